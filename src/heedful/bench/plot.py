"""A plot of the crossover lengths: one line per entry, ordered by length.

A disc marks where the forward pass becomes faster than dense softmax, a ring where forward and backward together do. An
arrow to the left means faster at every measured length, an arrow to the right at none.
"""

from __future__ import annotations

from collections.abc import Sequence

from heedful.bench.rows import Row, machine
from heedful.bench.setting import BOTH, FORWARD
from heedful.bench.tables import crossovers
from heedful.svg import dot_plot


def crossover_svg(rows: Sequence[Row]) -> str:
    """An SVG file of the rows of the growth table."""
    found = crossovers(rows)
    if not found:
        raise ValueError("no row of the growth table has a counterpart in dense softmax: nothing to draw")
    by = {(row["entry"], row["pass"]): row for row in found}

    def order(entry: str) -> tuple[float, float]:
        """Sort key: the forward crossover, then the gain at the longest length, largest first."""
        row = by.get((entry, FORWARD)) or by[entry, BOTH]
        return row["crossover"], -row["gain"]

    def value(entry: str, which: str) -> tuple[float, int, int] | None:
        row = by.get((entry, which))
        return None if row is None else (row["crossover"], row["shortest"], row["longest"])

    entries = sorted(dict.fromkeys(row["entry"] for row in found), key=order)
    row = rows[0]
    return dot_plot(
        "From which length on is it faster than dense softmax?",
        f"B{row['batch']} H{row['heads']} d{row['d']}, {row['dtype']}, {machine(row)}, torch {row['torch']}",
        ("forward", "forward + backward"),
        {entry: [value(entry, which) for which in (FORWARD, BOTH)] for entry in entries},
    )
