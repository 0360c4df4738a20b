"""A small theory for the tests of the runner: a package of two chapters, written to a folder of its own.

Every check writes down that it ran, so that a test can tell a finding that was kept from one that was made again.
"""

from __future__ import annotations

from pathlib import Path

REGISTRY = """
from {name} import calm, wild
CHAPTERS = (calm.CHAPTER, wild.CHAPTER)
"""
CALM = '''
"""Claims that are decided."""
from pathlib import Path
from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import *
from heedful.theory.claim import agrees, at_most, equal, evidence

HERE = Path(__file__).parent.parent  # outside the package, whose files are part of fingerprints

def ran(name):
    with open(HERE / "ran.txt", "a") as file:
        file.write(name + "\\n")

def even(n):
    ran("C1")
    return evidence(equal("remainder of <b>n</b> & 2", n % 2, 0))

def small(n):
    ran("C2")
    return evidence(at_most("size", n, 3), at_most("a second number", 1e-16, 1e-12), note="a note")

def mean(n):
    ran("C3")
    return evidence(agrees("mean", n, 1.0, error=0.01))

def curve():
    return Figure(Text("A curve", "曲线"), "x", "y", {"one": ([1, 2, 3], [1.0, 4.0, float("nan")])}, log_x=True)

C1 = Claim("C1", "1", "exact", Text("Four is even <script>alert(1)</script>.", "四是偶数 <i>。"), r"4\\bmod 2=0",
           even, Case("4", 4), Case("5", 5), figure=curve)
C2 = Claim("C2", "1", "exact", Text("Five is at most three.", "五不超过三。"), r"5\\le 3",
           small, Case("5", 5), Case("2", 2), first="holds", reason=Text("It was counted.", "数过了。"),
           counterexample="print(5 <= 3)  # </pre><script>",
           corrected=Claim("C2*", "1", "exact", Text("Two is.", "二才是。"), r"2\\le\\sqrt{9}",
                           small, Case("2", 2), Case("9", 9)))
C3 = Claim("C3", "2", "statistical", Text("The mean is one.", "均值为一。"), r"\\mathbb{E}x=1",
           mean, Case("1.01", 1.01), Case("2", 2.0), first="conditional",
           condition=Text("the sample is large", "样本足够大"))
W1 = Claim("W1", "3", "wording", Text("A definition.", "一个定义。"), first="design")
CHAPTER = Chapter("calm", Text("Calm waters", "风平浪静"), "calm.txt", (C1, C2, C3, W1))
'''
WILD = '''
"""Claims that something happens to."""
import os, signal, time
from pathlib import Path
from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import *
from heedful.theory.claim import equal, evidence

HERE = Path(__file__).parent.parent  # outside the package, whose files are part of fingerprints

def quick(n):
    with open(HERE / "ran.txt", "a") as file:
        file.write("quick\\n")
    return evidence(equal("n", n, 0))

def crash(n):
    print("said on the way")
    raise ZeroDivisionError("nothing to divide by")

def hang(n):
    with open(HERE / "ran.txt", "a") as file:
        file.write("hang\\n")
    while (HERE / "hang").exists():
        time.sleep(0.05)
    return evidence(equal("n", n, 0))

def die(n):
    os.kill(os.getpid(), signal.SIGKILL)

def same(n):
    return evidence(equal("one", 1, 1))

def study(n):
    raise Undecided("decided by a study that has not run")

def of(name, check, **more):
    return Claim(name, "1", "exact", Text(name, name), "", check, Case("0", 0), Case("1", 1), **more)

CLAIMS = (of("quick", quick), of("die", die), of("crash", crash), of("same", same), of("study", study),
          of("hang", hang), of("late", quick, slow=True))
CHAPTER = Chapter("wild", Text("Wild waters", "惊涛骇浪"), "wild.txt", CLAIMS)
'''


def write(folder: Path, name: str) -> Path:
    """The package `name` in a folder; returns where it is."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(REGISTRY.format(name=name), encoding="utf-8")
    (package / "calm.py").write_text(CALM, encoding="utf-8")
    (package / "wild.py").write_text(WILD, encoding="utf-8")
    return package


def ran(package: Path) -> list[str]:
    """The checks that ran, in order."""
    path = package.parent / "ran.txt"
    return path.read_text().split() if path.exists() else []
