"""Measure the three tables, row by row; rows that exist already are not measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from heedful.bench.cases import Case
from heedful.bench.catalogue import affordable, cost, instance, is_linear
from heedful.bench.memory import measure_apart
from heedful.bench.peers import DENSE, DENSE_CAUSAL
from heedful.bench.rows import Row, Rows, problem
from heedful.bench.setting import FORWARD, PASSES, Setting, Work
from heedful.bench.timing import Pace, race, summary
from heedful.core import Mechanism
from heedful.mechanisms import Entry
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Full
from heedful.store import version

PEER_KEY = ("case", "contender", "n", "pass", "run")
GROWTH_KEY = ("entry", "n", "pass")
MEMORY_KEY = ("entry", "n", "pass")

GROWTH_SIZES = tuple(2**p for p in range(7, 16))
MEMORY_SIZES = (1024, 2048, 4096, 8192, 16384, 131072)

Say = Callable[[str], None]


def measure_peers(
    cases: Iterable[Case], sizes: Iterable[int], setting: Setting, journal: Rows, pace: Pace, say: Say, run: int = 1
) -> None:
    """Measure every case at every length, contenders in interleaved rounds. `run` numbers repetitions of the table."""
    for case in cases:
        for n in sizes:
            todo = [which for which in PASSES if _outdated(case, n, which, run, journal)]
            made = _make(case, setting, n) if todo else {}
            for which in PASSES:
                rows = _run_cell(case, setting, n, which, made, pace) if which in todo else None
                if rows is not None:
                    journal.add({**row, "run": run} for row in rows)
                say(f"{case.name}, N = {n}, {which}: " + (_spoken(rows) if rows is not None else "taken before"))


def _outdated(case: Case, n: int, which: str, run: int, journal: Rows) -> bool:
    """True if a row is missing, or failed for lack of a package that is installed now."""
    for contender in case.contenders:
        row = journal.find(case=case.name, contender=contender.name, n=n, run=run, **{"pass": which})
        if row is None or (row["problem"] == contender.missing and contender.installed):
            return True
    return False


def _make(case: Case, setting: Setting, n: int) -> dict[str, Work | str]:
    """The work of each contender, or the reason why there is none."""
    made: dict[str, Work | str] = {}
    for contender in case.contenders:
        if not contender.installed:
            made[contender.name] = contender.missing
            continue
        try:
            made[contender.name] = contender.make(setting, n)
        except Exception as error:  # a peer may raise anything; go on with the others
            made[contender.name] = problem(error)
    return made


def _run_cell(case: Case, setting: Setting, n: int, which: str, made: dict[str, Work | str], pace: Pace) -> list[Row]:
    works = {name: work for name, work in made.items() if isinstance(work, Work)}
    times = race({name: work.call(which) for name, work in works.items()}, setting.now, pace)
    apart = _differences(case, setting) if which == FORWARD else {}
    rows = []
    for contender in case.contenders:
        found: Any = times.get(contender.name, made[contender.name])
        found = problem(found) if isinstance(found, Exception) else found
        rows.append(
            {
                "case": case.name,
                "contender": contender.name,
                "ours": contender in case.ours,
                "n": n,
                "pass": which,
                **(summary(found) if isinstance(found, list) else {"seconds": None}),
                "problem": None if isinstance(found, list) else found,
                "difference": apart.get(contender.name),
                "note": contender.note,
                "version": version(contender.package),
            }
        )
    return rows


@torch.no_grad()
def _differences(case: Case, setting: Setting, n: int = 1024) -> dict[str, float]:
    """The relative difference between each rival's output and heedful's, at a short length."""
    found = {}
    ours = case.ours[0].make(setting, n)
    reference = ours.function(*ours.inputs)
    for rival in case.rivals:
        if rival.same and rival.installed:
            try:
                work = rival.make(setting, n)
                out = work.function(*work.inputs)
                found[rival.name] = float((out - reference).norm() / reference.norm())
            except Exception:  # its row in the table has the reason
                continue
    return found


def _spoken(rows: list[Row]) -> str:
    times = [(row["contender"], row["seconds"]) for row in rows if row["seconds"]]
    return ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times) or "nothing to time"


def measure_growth(
    entries: Iterable[Entry],
    sizes: Iterable[int],
    setting: Setting,
    journal: Rows,
    pace: Pace,
    say: Say,
    longest: float = 1.5,
) -> None:
    """Measure every entry from short to long, while a call should take less than `longest` seconds. Dense softmax gets
    five times as long, because all others are compared with it.
    """
    ways = [*_dense_ways(), *((entry.name, _builder(entry, setting)) for entry in entries)]
    spent: dict[tuple[str, str], dict[int, float]] = {}
    for n in sizes:
        for name, build in ways:
            try:
                mechanism = build(n)
            except ValueError as refusal:  # such as more landmarks than tokens
                say(f"{name}, N = {n}: not at this length; {refusal}")
                continue
            for which in PASSES:
                so_far = spent.setdefault((name, which), {})
                row = journal.find(entry=name, n=n, **{"pass": which})
                patience = longest * (5 if name in DENSE_WAYS else 1)
                if row is None and affordable(mechanism, setting, so_far, n, patience):
                    row = _growth_row(name, mechanism, setting, n, which, pace)
                    journal.add([row])
                if row is not None and row["seconds"]:
                    so_far[n] = row["seconds"]
            say(f"{name}, N = {n}")


DENSE_WAYS = {DENSE_CAUSAL.name: DENSE_CAUSAL, DENSE.name: DENSE}


def _dense_ways() -> list[tuple[str, Callable[[int], Mechanism]]]:
    """Dense softmax, under the same names as in the peers table."""
    return [(DENSE_CAUSAL.name, lambda n: Softmax(Causal())), (DENSE.name, lambda n: Softmax(Full()))]


def _builder(entry: Entry, setting: Setting) -> Callable[[int], Mechanism]:
    return lambda n: instance(entry, setting, n)


def _growth_row(name: str, mechanism: Mechanism, setting: Setting, n: int, which: str, pace: Pace) -> Row:
    contender = DENSE_WAYS.get(name)
    work = contender.make(setting, n) if contender else Work(mechanism, setting.draw(n))
    if setting.device == "cuda":
        work.call(which)()  # compiles; not a sample
    found = race({name: work.call(which)}, setting.now, pace)[name]
    said = cost(mechanism, setting, n)
    return {
        "entry": name,
        "n": n,
        "pass": which,
        "causal": mechanism.pattern.is_causal,
        **(summary(found) if isinstance(found, list) else {"seconds": None}),
        "problem": None if isinstance(found, list) else problem(found),
        "flops": said.flops,
        "bytes": said.bytes,
    }


def measure_memory(entries: Iterable[Entry], sizes: Iterable[int], setting: Setting, journal: Rows, say: Say) -> None:
    """Measure every entry in a separate process; beyond 8,192 tokens only those with (nearly) linear time."""
    for entry in entries:
        if entry.complexity == "each head's":
            say(f"{entry.name}: takes what its heads take")
            continue
        own = [n for n in sizes if n <= 8192 or _goes_far(entry)]
        if all(journal.find(entry=entry.name, n=n, **{"pass": which}) for n in own for which in PASSES):
            say(f"{entry.name}: taken before")
            continue
        rows = []
        for row in measure_apart(entry.name, setting, own):
            rows.append({"peak_bytes": None, "largest_bytes": None, "resident_bytes": None, "problem": None, **row})
            journal.add(rows[-1:])
        say(f"{entry.name}: {_peaks(rows)}")


def _goes_far(entry: Entry) -> bool:
    return is_linear(entry) or entry.complexity.startswith("N·(")


def _peaks(rows: list[Row]) -> str:
    """A progress message: the peaks of an entry at its longest length."""
    last = max((row["n"] for row in rows if row["peak_bytes"]), default=None)
    shares = [f"{row['peak_bytes'] / row['input_bytes']:.3g}" for row in rows if row["n"] == last and row["peak_bytes"]]
    return f"N = {last}, {' and '.join(shares)} times q, k, v" if shares else "nothing measured"
