"""One benchmark run: which tables, where their rows are stored, and progress messages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from heedful.bench import tables
from heedful.bench.cases import CASES, SIZES
from heedful.bench.gpu import GPU_CASES, GPU_KEY, gpu_table, measure_gpu
from heedful.bench.measure import (
    GROWTH_KEY,
    GROWTH_SIZES,
    MEMORY_KEY,
    MEMORY_SIZES,
    PEER_KEY,
    measure_growth,
    measure_memory,
    measure_peers,
)
from heedful.bench.memory import limited_memory
from heedful.bench.plot import crossover_svg
from heedful.bench.rows import Row, Rows, provenance
from heedful.bench.setting import PASSES, Setting
from heedful.bench.timing import Pace
from heedful.executor import using
from heedful.mechanisms import CATALOG
from heedful.store import write_whole

TABLES = ("peers", "growth", "memory")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    only     names of cases and catalogue entries; empty: all
    sizes    lengths, instead of each table's own
    fresh    measure existing rows again
    runs     repetitions of the peers table, because gains vary from run to run

    The memory table uses one head: its figures are relative to the inputs, and long sequences must fit.
    """

    out: Path
    setting: Setting
    tables: tuple[str, ...] = TABLES
    only: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    fresh: bool = False
    pace: Pace = Pace()  # noqa: RUF009  (frozen)
    runs: int = 1

    def journal(self, table: str) -> Rows:
        peers = GPU_KEY if self.on_gpu else PEER_KEY
        key = {"peers": peers, "growth": GROWTH_KEY, "memory": MEMORY_KEY}[table]
        path = self.out / f"{self.setting.device}_{table}.jsonl"
        fresh = self.fresh and table in self.tables
        return Rows(path, key, provenance(self.setting_of(table)), fresh=fresh)

    @property
    def on_gpu(self) -> bool:
        return self.setting.device == "cuda"

    def setting_of(self, table: str) -> Setting:
        return replace(self.setting, heads=1) if table == "memory" else self.setting

    def lengths(self, own: Sequence[int]) -> tuple[int, ...]:
        return self.sizes or tuple(own)


def check_names(only: Sequence[str]) -> None:
    """Raise for an unknown name, and list the known ones."""
    works = {case.name for case in GPU_CASES}
    for name in only:
        if name not in CASES and name not in CATALOG and name not in works:
            raise ValueError(
                f"{name!r} is neither a case ({', '.join(CASES)}) nor an entry of the catalogue (`heedful list`)."
            )


def run(plan: BenchOptions) -> dict[str, list[Row]]:
    """Measure missing rows, and return the rows of all tables, including tables that were not requested."""
    check_names(plan.only)
    cases = [case for name, case in CASES.items() if not plan.only or name in plan.only]
    entries = [entry for name, entry in CATALOG.items() if not plan.only or name in plan.only]
    journals = {table: plan.journal(table) for table in TABLES}
    limit = nullcontext() if plan.on_gpu else limited_memory()  # CUDA maps far more memory than it uses
    with warnings.catch_warnings(), limit, using(plan.setting.threads):
        warnings.simplefilter("ignore")  # peers warn about versions other than those they were written for
        for table in plan.tables:
            setting, journal = plan.setting_of(table), journals[table]
            match table:
                case "peers" if plan.on_gpu:
                    works = [case for case in GPU_CASES if not plan.only or case.name in plan.only]
                    with Progress(table, sum(1 + len(case.rivals) for case in works)) as progress:
                        measure_gpu(works, setting, journal, progress.say)
                case "peers":
                    sizes = plan.lengths(SIZES)
                    with Progress(table, plan.runs * len(cases) * len(sizes) * len(PASSES)) as progress:
                        for at in range(1, plan.runs + 1):
                            measure_peers(cases, sizes, setting, journal, plan.pace, progress.say, at)
                case "growth":
                    sizes = plan.lengths(GROWTH_SIZES)
                    pace = replace(plan.pace, least=2, budget=plan.pace.budget / 4, patience=plan.pace.patience / 5)
                    with Progress(table, (len(entries) + 2) * len(sizes)) as progress:
                        measure_growth(entries, sizes, setting, journal, pace, progress.say)
                case "memory":
                    sizes = plan.lengths(MEMORY_SIZES)
                    with Progress(table, len(entries)) as progress:
                        measure_memory(entries, sizes, setting, journal, progress.say)
            if not plan.only and not plan.sizes:
                journal.forget_others()
    return {table: journal.rows() for table, journal in journals.items()}


def report(rows: dict[str, list[Row]], chosen: Sequence[str]) -> str:
    """The requested tables as text."""
    parts = []
    if "peers" in chosen:
        on_gpu = any("card" in row for row in rows["peers"])
        parts.append(gpu_table(rows["peers"]) if on_gpu else tables.peers_table(rows["peers"]))
    if "growth" in chosen:
        parts += [tables.crossover_table(rows["growth"]), tables.growth_table(rows["growth"], rows["memory"])]
    if "memory" in chosen:
        parts.append(tables.memory_table(rows["memory"]))
    return "\n\n".join(parts)


def draw(rows: dict[str, list[Row]], path: Path) -> None:
    """Write the crossover lengths as an SVG file."""
    write_whole(path, crossover_svg(rows["growth"]))


class Progress:
    """Print one line per step to stderr; in a terminal with rich, a progress bar below."""

    def __init__(self, table: str, total: int):
        self.table, self.total, self.done = table, total, 0
        self._bar = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress as Bar
            except ImportError:
                return
            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(table, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        self.done += 1
        if self._bar is None:
            print(f"{self.table} {self.done}/{self.total}: {text}", file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)
            self._bar.update(self._task, completed=self.done)
