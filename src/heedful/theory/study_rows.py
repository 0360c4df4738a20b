"""Numbers from the published studies for use in claims: differences of two cells, paired by seed."""

from __future__ import annotations

from functools import cache

from heedful.studies.results import Difference, Measure, Row, by_seed, difference, published
from heedful.theory.claim import Undecided

LEAST_SEEDS = 3


@cache
def _rows(study: str) -> tuple[Row, ...]:
    return tuple(published(study))


def runs(study: str, cell: str, corpus: str) -> list[Row]:
    """The runs of a cell as the study planned them, without the shuffled control; at least three seeds."""
    found = [row for row in _rows(study) if (row["cell"], row["corpus"]) == (cell, corpus) and not row["shuffled"]]
    fewest = min((row["steps"] for row in found), default=0)
    found = [row for row in found if row["steps"] == fewest]
    if len(found) < LEAST_SEEDS:
        raise Undecided(
            f"decided by the study {study}; it has {len(found)} of {LEAST_SEEDS} seeds of “{cell}” on {corpus}"
        )
    return found


def gap(study: str, cell: str, base: str, corpus: str, measure: Measure) -> Difference:
    """The difference of a measure between two cells."""
    found = difference(*(by_seed(runs(study, name, corpus), measure) for name in (cell, base)))
    if found is None or found.seeds < LEAST_SEEDS:
        raise Undecided(f"decided by the study {study}: {cell} and {base} on {corpus} have too few seeds in common")
    return found


def overfitting(study: str, cell: str, base: str, corpus: str) -> Difference:
    """The difference between two cells of the gap between training and test loss."""

    def gaps(name: str) -> dict[int, float]:
        return {row["seed"]: row["losses"]["test"] - row["losses"]["train"] for row in runs(study, name, corpus)}

    found = difference(gaps(cell), gaps(base))
    assert found is not None
    return found


def low(found: Difference) -> float:
    """The lower end of a difference's 95 % interval."""
    return found.mean - (found.half or 0.0)


def high(found: Difference) -> float:
    """The upper end of a difference's 95 % interval."""
    return found.mean + (found.half or 0.0)
