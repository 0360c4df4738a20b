"""The crossover lengths as a picture: an SVG file, written by hand so that it needs nothing.

One line an entry, ordered by length: a disc where the forward pass starts to win over dense softmax, a ring where
forward and backward together do. An arrow to the left wins at every length measured, one to the right at none yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import inf, log2

from heedful.bench.rows import Row, machine
from heedful.bench.setting import BOTH, FORWARD
from heedful.bench.tables import crossovers

LEFT, RIGHT, TOP, LINE, WIDTH = 130, 40, 64, 19, 760
BLUE, ORANGE, GREY, INK = "#2a6fb0", "#c8641e", "#d9d9d9", "#222222"


def crossover_svg(rows: Sequence[Row]) -> str:
    found = crossovers(rows)
    if not found:
        raise ValueError("no row of the growth table has a counterpart in dense softmax: nothing to draw")
    by = {(row["entry"], row["pass"]): row for row in found}
    entries = sorted(dict.fromkeys(row["entry"] for row in found), key=lambda entry: _order(by, entry))
    low, high = min(row["shortest"] for row in found), max(row["longest"] for row in found)
    bottom = TOP + LINE * len(entries)

    def x(n: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log2(n) - log2(low) + 0.5) / (log2(high) - log2(low) + 1)

    parts = [
        _text(12, 24, "From which length on is it faster than dense softmax?", size=16, weight="bold"),
        _text(12, 44, _subtitle(rows), size=11, colour="#666666"),
    ]
    ticks = [2**p for p in range(int(log2(low)), int(log2(high)) + 1)]
    for n in ticks:
        parts.append(f'<line x1="{x(n):.1f}" y1="{TOP}" x2="{x(n):.1f}" y2="{bottom}" stroke="{GREY}"/>')
        parts.append(_text(x(n), bottom + 16, f"{n:,}" if n < 1024 else f"{n // 1024}k", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, "tokens", anchor="middle"))
    for i, entry in enumerate(entries):
        y = TOP + LINE * (i + 0.5)
        parts.append(_text(LEFT - 10, y + 4, entry, anchor="end"))
        spots = [_place(by.get((entry, which)), x) for which in (FORWARD, BOTH)]
        known = [spot for spot in spots if spot is not None]
        if len(known) == 2:
            parts.append(f'<line x1="{known[0]:.1f}" y1="{y}" x2="{known[1]:.1f}" y2="{y}" stroke="#999999"/>')
        for which, spot in zip((BOTH, FORWARD), reversed(spots), strict=True):
            if spot is not None:
                parts.append(_mark(by[entry, which], spot, y, which))
    legend = bottom + 56
    parts += [
        f'<circle cx="{LEFT}" cy="{legend - 4}" r="4" fill="{BLUE}"/>',
        _text(LEFT + 10, legend, "forward"),
        f'<circle cx="{LEFT + 80}" cy="{legend - 4}" r="6" fill="none" stroke="{ORANGE}" stroke-width="2"/>',
        _text(LEFT + 92, legend, "forward + backward"),
        _arrow(LEFT + 234, legend - 4, -4, f'fill="{BLUE}"'),
        _text(LEFT + 244, legend, "at every length measured"),
        _arrow(LEFT + 408, legend - 4, 4, f'fill="{BLUE}"'),
        _text(LEFT + 418, legend, "at none of them"),
    ]
    height = legend + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _subtitle(rows: Sequence[Row]) -> str:
    row = rows[0]
    return f"B{row['batch']} H{row['heads']} d{row['d']}, {row['dtype']}, {machine(row)}, torch {row['torch']}"


def _order(by: dict, entry: str) -> tuple[float, float]:
    """By the forward crossover, then by the gain at the end, the greatest first."""
    row = by.get((entry, FORWARD)) or by[entry, BOTH]
    return row["crossover"], -row["gain"]


def _place(row: Row | None, x) -> float | None:
    if row is None:
        return None
    at = row["crossover"]
    return x(row["shortest"]) - 14 if at == 0 else x(row["longest"]) + 14 if at == inf else x(at)


def _mark(row: Row, x: float, y: float, which: str) -> str:
    colour = BLUE if which == FORWARD else ORANGE
    if row["crossover"] in (0, inf):
        size = 4 if which == FORWARD else 7
        style = f'fill="{colour}"' if which == FORWARD else f'fill="white" stroke="{colour}" stroke-width="1.5"'
        return _arrow(x, y, -size if row["crossover"] == 0 else size, style)
    style = f'r="4" fill="{colour}"' if which == FORWARD else f'r="6" fill="white" stroke="{colour}" stroke-width="2"'
    return f'<circle cx="{x:.1f}" cy="{y}" {style}/>'


def _arrow(x: float, y: float, size: float, style: str) -> str:
    """A triangle that points right, or left where the size is negative."""
    return f'<polygon points="{x + size:.1f},{y} {x - size:.1f},{y - size} {x - size:.1f},{y + size}" {style}/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: str = "normal", colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
