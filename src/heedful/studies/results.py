"""Statistics of recorded runs: one row per run, means over seeds, and differences paired by seed.

mean        mean over the seeds of a cell, with the half width of its 95 % interval by Student's t
difference  difference of two cells, paired by seed, with its interval and the p-value of the paired t-test
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

Row = dict[str, Any]

BASELINES = {"fixed-heads": "8L", "frozen-projections": "learned"}
SAME = {("frozen-projections", "learned"): ("fixed-heads", "8L")}
"""Cells with the same model and training as a cell of another study: their translation runs are taken from there."""


def published(study: str) -> list[Row]:
    """The rows that come with heedful, from runs on one H200; empty for a study that has not run."""
    folder = files("heedful.studies") / "published"
    found: list[Row] = []
    for name in {study, *(other for (mine, _), (other, _) in SAME.items() if mine == study)}:
        file = folder / f"{name}.jsonl.gz"
        if file.is_file():
            found += [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    return of_study(found, study)


def save(rows: Iterable[Row], path: Path) -> None:
    """Write rows to a compressed file; the same rows give the same bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def of_study(rows: Iterable[Row], study: str) -> list[Row]:
    """The rows of a study, including rows shared with another study, renamed to this one."""
    rows = list(rows)
    own = [row for row in rows if row["study"] == study]
    shared = {other: name for (mine, name), other in SAME.items() if mine == study}
    same = [row for row in rows if (row["study"], row["cell"]) in shared and not row["shuffled"]]
    wanted = {setting_of(row) for row in own}
    return own + [
        {**row, "study": study, "cell": shared[row["study"], row["cell"]]} for row in same if setting_of(row) in wanted
    ]


class Spread(NamedTuple):
    """A mean over seeds and the half width of its 95 % interval, which needs two seeds."""

    mean: float
    half: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.half is None else f" ± {self.half:.2f}")


def spread(values: list[float]) -> Spread:
    """Mean and interval.

    >>> str(spread([1.0, 2.0, 3.0]))
    '2.00 ± 2.48'
    """
    if len(values) < 2:
        return Spread(mean(values), None, len(values))
    error = stdev(values) / math.sqrt(len(values))
    return Spread(mean(values), t_quantile(len(values) - 1) * error, len(values))


class Difference(NamedTuple):
    """A cell minus another: mean difference over common seeds, half width of its 95 % interval, p-value of zero."""

    mean: float
    half: float | None
    p: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f}" + ("" if self.half is None else f" ± {self.half:.2f}")


def difference(some: dict[int, float], base: dict[int, float]) -> Difference | None:
    """The paired difference of values by seed; None without a common seed.

    >>> difference({0: 11.0, 1: 13.1, 2: 14.9}, {0: 10.0, 1: 12.0, 2: 14.0})
    Difference(mean=1.0, half=0.2484..., p=0.0033..., seeds=3)
    """
    gaps = [some[seed] - base[seed] for seed in sorted(some.keys() & base.keys())]
    if not gaps:
        return None
    if len(gaps) < 2:
        return Difference(gaps[0], None, None, 1)
    error = stdev(gaps) / math.sqrt(len(gaps))
    freedom = len(gaps) - 1
    p = 0.0 if error == 0 else 2 * (1 - t_cdf(abs(mean(gaps)) / error, freedom))
    return Difference(mean(gaps), t_quantile(freedom) * error, p, len(gaps))


def t_cdf(t: float, freedom: int) -> float:
    """P(T ≤ t) of Student's t for t ≥ 0, by Simpson's rule over the angle: t = √ν tan θ, density ∝ cos^(ν−1) θ.

    >>> round(t_cdf(4.303, 2), 4)
    0.975
    """
    end = math.atan(t / math.sqrt(freedom))

    def integral(until: float, parts: int = 400) -> float:
        step = until / parts
        inner = sum((4 if k % 2 else 2) * math.cos(k * step) ** (freedom - 1) for k in range(1, parts))
        return step / 3 * (1 + inner + math.cos(until) ** (freedom - 1))

    return 0.5 + 0.5 * integral(end) / integral(math.pi / 2)


@cache
def t_quantile(freedom: int, p: float = 0.975) -> float:
    """The quantile of Student's t at p, by bisection.

    >>> round(t_quantile(4), 3)
    2.776
    """
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


class Measure(NamedTuple):
    """A measure of a run: its name, its path in a row, and whether more is better."""

    name: str
    path: tuple[str, ...]
    more_is_better: bool = True

    def of(self, row: Row) -> float | None:
        found: Any = row
        for key in self.path:
            found = found.get(key) if isinstance(found, dict) else None
        return found


BLEU = Measure("BLEU", ("tests", "test", "bleu"))
UNSEEN_BLEU = Measure("BLEU, unseen packages", ("tests", "test_unseen", "bleu"))
LOSS = Measure("test loss", ("losses", "test"), False)
ACCURACY = Measure("accuracy", ("accuracies", "test"))
UNSEEN_LOSS = Measure("loss, unseen packages", ("losses", "test_unseen"), False)
UNSEEN_ACCURACY = Measure("accuracy, unseen", ("accuracies", "test_unseen"))

MEASURES: dict[str, tuple[Measure, Measure]] = {
    "translation": (BLEU, UNSEEN_BLEU),
    "prose": (LOSS, UNSEEN_LOSS),
    "manuals": (ACCURACY, UNSEEN_ACCURACY),
    "recall": (ACCURACY, UNSEEN_ACCURACY),
}
"""The main measure of each task on its two tests."""


class Setting(NamedTuple):
    """What all cells of one table have in common."""

    corpus: str
    direction: str
    steps: int

    @property
    def task(self) -> str:
        return self.corpus if self.corpus in MEASURES else "translation"


def settings(rows: Iterable[Row]) -> list[Setting]:
    """The settings of some rows, one per table: translation by increasing size, then the other tasks."""
    found = {setting_of(row) for row in rows}
    return sorted(found, key=lambda x: (list(MEASURES).index(x.task), x.direction, size_of(x.corpus), x.steps))


def setting_of(row: Row) -> Setting:
    return Setting(row["corpus"], row["direction"], row["steps"])


def size_of(corpus: str) -> int:
    end = corpus.rpartition("-")[2]
    return int(end) if end.isdigit() else 0


def cells(rows: Iterable[Row], setting: Setting) -> dict[str, list[Row]]:
    """The runs of each cell in a setting, by seed; the control with shuffled pairs is a separate cell."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        if setting_of(row) == setting:
            found.setdefault(row["cell"] + (" (shuffled pairs)" if row["shuffled"] else ""), []).append(row)
    return found


def by_seed(rows: Iterable[Row], measure: Measure) -> dict[int, float]:
    """A measure of runs by seed, without runs that lack it."""
    return {row["seed"]: value for row in rows if (value := measure.of(row)) is not None}
