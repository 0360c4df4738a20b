"""Count the files and functions of heedful that one call touches.

    python benchmarks/call_paths.py            # a table
    python benchmarks/call_paths.py --list     # and the functions behind it, by file

A file counts if one of its functions runs; a function counts once, by file and qualified name. Lambdas, comprehensions
and nested functions count separately. Each call runs once before it is counted, so imports, first calls and work that
is cached after them are left out. Triton programs, torch and the standard library are not counted.

    softmax     h.Softmax(h.Window(64))(q, k, v) on the CPU, N = 512
    linear      h.Linear(h.FavorPlus(64, 128))(q, k, v) on the CPU, N = 512
    rank        effective_rank of a causal softmax, N = 1024
    scan        heedful scan of MiniLM: one text, one length, one layer
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

import heedful as h

SOURCE = str(Path(h.__file__).parent)


def touched(call: Callable[[], object]) -> dict[str, set[str]]:
    """The functions of heedful that `call` runs, by file, in this thread and in threads that it starts."""
    found: dict[str, set[str]] = defaultdict(set)

    def record(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and code.co_name != "<module>":
            found[code.co_filename[len(SOURCE) + 1 :]].add(code.co_qualname)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def _tensors(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 1, 4, n, 64, generator=torch.Generator().manual_seed(0)).unbind()


def softmax() -> Callable[[], object]:
    attend, inputs = h.Softmax(h.Window(64)), _tensors(512)
    return lambda: attend(*inputs)


def linear() -> Callable[[], object]:
    attend, inputs = h.Linear(h.FavorPlus(64, 128)), _tensors(512)
    return lambda: attend(*inputs)


def rank() -> Callable[[], object]:
    from heedful.measures import effective_rank

    q, k, _ = _tensors(1024)
    op = h.Softmax().operator(q, k)
    return lambda: effective_rank(op)


def scan() -> Callable[[], object]:
    from typer.testing import CliRunner

    from heedful.cli.app import app

    folder = Path(tempfile.mkdtemp())
    text = folder / "text.txt"
    text.write_text("Attention heads are counted and measured, one after the other, on a short text. " * 8)
    counter = iter(range(10))

    def call():
        options = ["scan", "minilm", "--texts", str(text), "--lengths", "32", "--texts-count", "1", "--layers", "0"]
        ran = CliRunner().invoke(app, [*options, "--out", str(folder / f"run{next(counter)}")])
        assert ran.exit_code == 0, ran.output

    return call


CALLS = {"softmax": softmax, "linear": linear, "rank": rank, "scan": scan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the functions of each file")
    parser.add_argument("--only", choices=CALLS, nargs="+", default=list(CALLS), help="count these calls alone")
    given = parser.parse_args()
    for name in given.only:
        call = CALLS[name]()
        call()
        found = touched(call)
        print(f"{name:8} {len(found):3} files  {sum(map(len, found.values())):4} functions")
        for file in sorted(found) if given.list else ():
            print(f"  {file}: {', '.join(sorted(found[file]))}")


if __name__ == "__main__":
    main()
