"""SVG plots: line plots inside pages, and dot plots as separate files.

Made without a plotting library: a plot has a few dozen elements, no pixels, nothing to load, and real text. Series
differ by colour, dash and mark, never by colour alone. Elements have classes; a page's style sheet sets their colours,
so plots follow light and dark mode. Separate files include the style sheet `STYLE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 42
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 2 1 2 1 2")
MARKED = 16
"""A line with more points than this is drawn without marks."""
STYLE = (
    ".dots text{font:12px sans-serif;fill:#222}.dots .title{font-size:16px;font-weight:bold}"
    ".dots .note{font-size:11px;fill:#666}.dots .grid{stroke:#d9d9d9}.dots .line{stroke:#999}"
    ".dots .s0{fill:#2a6fb0;stroke:#2a6fb0}.dots .s1{fill:#fff;stroke:#c8641e;stroke-width:2}"
)
MARKS = ("circle", "square", "diamond", "triangle", "cross", "ring")


@dataclass(frozen=True)
class Axis:
    """Maps values to coordinates on the page, and holds the ticks."""

    low: float
    high: float
    log: bool
    start: float
    end: float

    def place(self, value: float) -> float:
        at, low, high = (math.log10(x) if self.log else x for x in (value, self.low, self.high))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def line_plot(figure: Mapping[str, Any]) -> str:
    """An SVG of a figure's series: {x, y, series: {name: [xs, ys]}, log_x, log_y, points}."""
    series = {name: _visible(pair, figure["log_x"], figure["log_y"]) for name, pair in figure["series"].items()}
    everything = [point for points in series.values() for point in points]
    if not everything:
        return ""
    across = _axis([x for x, _ in everything], figure["log_x"], LEFT, WIDTH - RIGHT, margin=0.0)
    up = _axis([y for _, y in everything], figure["log_y"], HEIGHT - BOTTOM, TOP, margin=0.06)
    parts = [_grid(across, up), _titles(figure["x"], figure["y"])]
    for index, points in enumerate(series.values()):
        parts.append(_series(index, points, across, up, clouds=figure["points"]))
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def legend(figure: Mapping[str, Any]) -> str:
    """A legend with the name of each line, in the order of the series."""
    items = []
    for index, (name, (xs, _)) in enumerate(figure["series"].items()):
        line = "" if figure["points"] else _path("M1 6H29", index)
        mark = _mark(index, 15, 6) if figure["points"] or len(xs) <= MARKED else ""
        swatch = f'<svg viewBox="0 0 30 12" aria-hidden="true">{line}{mark}</svg>'
        items.append(f"<li>{swatch}{escape(name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def dot_plot(
    title: str, note: str, series: tuple[str, str], rows: Mapping[str, Sequence[tuple[float, int, int] | None]]
) -> str:
    """An SVG file of lengths on an axis of powers of two: one line per row, with a disc for the value of the first
    series and a ring for that of the second.

    rows    by name, (value, shortest, longest measured length) of each series; None has no mark. The values 0 (at every
            length) and ∞ (at no length) are arrows beyond the measured lengths
    """
    left, right, top, step, width = 130, 40, 64, 19, 760
    bottom = top + step * len(rows)
    tried = [value[1:] for values in rows.values() for value in values if value is not None]
    low, high = min(shortest for shortest, _ in tried), max(longest for _, longest in tried)
    across = Axis(low / math.sqrt(2), high * math.sqrt(2), True, left, width - right)
    parts = [_text(12, 24, title, "title", "start"), _text(12, 44, note, "note", "start")]
    for n in (2**p for p in range(math.floor(math.log2(low)), math.floor(math.log2(high)) + 1)):
        x = across.place(n)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{n:,}" if n < 1024 else f"{n // 1024}k"))
    parts.append(_text((left + width - right) / 2, bottom + 34, "tokens"))
    for at, (name, values) in enumerate(rows.items()):
        y = top + step * (at + 0.5)
        parts.append(_text(left - 10, y + 4, name, anchor="end"))
        places = [None if value is None else _place(*value, across) for value in values]
        if None not in places:
            parts.append(f'<path class="line" d="M{places[0]:.1f} {y}H{places[1]:.1f}"/>')
        for index in (1, 0):  # draw the ring first, so that the disc covers it
            found, place = values[index], places[index]
            if found is not None and place is not None:
                parts.append(_dot(index, place, y, found[0]))
    legend = bottom + 56
    for x, gap, index, value, text in (
        *((left, 10, 0, 1.0, series[0]), (left + 80, 12, 1, 1.0, series[1])),
        *((left + 234, 10, 0, 0.0, "at every length measured"), (left + 408, 10, 0, math.inf, "at none of them")),
    ):
        parts += [_dot(index, x, legend - 4, value), _text(x + gap, legend, text, anchor="start")]
    size = f'viewBox="0 0 {width} {legend + 16}" width="{width}" height="{legend + 16}"'
    head = f'<svg class="dots" xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _place(value: float, shortest: int, longest: int, across: Axis) -> float:
    if value in (0, math.inf):
        return across.place(longest) + 14 if value else across.place(shortest) - 14
    return across.place(value)


def _dot(index: int, x: float, y: float, value: float) -> str:
    """A disc or a ring; for 0 and ∞ a triangle that points left or right."""
    if value in (0, math.inf):
        size = 7 if index else 4
        tip = size if value else -size
        points = f"{x + tip:.1f},{y} {x - tip:.1f},{y - size} {x - tip:.1f},{y + size}"
        return f'<polygon class="s{index}" points="{points}"/>'
    return f'<circle class="s{index}" cx="{x:.1f}" cy="{y}" r="{6 if index else 4}"/>'


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two others.

    >>> linear_ticks(0, 58), linear_ticks(-0.3, 0.7)
    ([0.0, 20.0, 40.0], [-0.2, 0.0, 0.2, 0.4, 0.6])
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) + 0.0 for k in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; if fewer than two fit, also 2 and 5 times them.

    >>> log_ticks(1, 1000), log_ticks(120, 1100)
    ([1.0, 10.0, 100.0, 1000.0], [200.0, 500.0, 1000.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    powers = [10.0**k for k in range(first, last + 1, every) if low * 0.999 <= 10.0**k <= high * 1.001]
    if len(powers) >= 2:
        return powers
    finer = [factor * 10.0**k for k in range(first, last + 1) for factor in (1, 2, 5)]
    return [tick for tick in finer if low * 0.999 <= tick <= high * 1.001]


def tick_text(value: float) -> str:
    """A number as short text, with a power of ten if it is large or small.

    >>> tick_text(0.05), tick_text(1e-6), tick_text(-20.0), tick_text(131072)
    ('0.05', '10⁻⁶', '−20', '1.3×10⁵')
    """
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1e5:
        return f"{value:.4g}".replace("-", "−")
    power = math.floor(math.log10(size) + 1e-9)
    factor = value / 10.0**power
    exponent = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    lead = "" if abs(factor - 1) < 1e-6 else f"{factor:.2g}×".replace("-", "−")
    return f"{lead}10{exponent}"


def _visible(pair: Sequence[Sequence[float | str]], log_x: bool, log_y: bool) -> list[tuple[float, float]]:
    """Points that can be drawn: finite, and positive on a logarithmic axis."""
    points = [(float(x), float(y)) for x, y in zip(*pair, strict=True)]
    return [
        (x, y)
        for x, y in points
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]


def _axis(values: list[float], log: bool, start: float, end: float, margin: float) -> Axis:
    low, high = min(values), max(values)
    if log:
        factor = (high / low) ** margin if high > low else 2.0
        return Axis(low / factor, high * factor, True, start, end)
    room = (high - low) * margin if high > low else max(abs(high), 1.0) / 2
    return Axis(low - room, high + room, False, start, end)


def _grid(across: Axis, up: Axis) -> str:
    parts = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y + 4, tick_text(value), anchor="end"))
    for value in across.ticks():
        x = across.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 17, tick_text(value)))
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _titles(x: str, y: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 7}" text-anchor="middle">{escape(x)}</text>'
        f'<text class="name" transform="rotate(-90 11 {middle})" x="11" y="{middle + 4}" text-anchor="middle">'
        f"{escape(y)}</text>"
    )


def _series(index: int, points: list[tuple[float, float]], across: Axis, up: Axis, *, clouds: bool) -> str:
    places = [(across.place(x), up.place(y)) for x, y in points]
    line = ""
    if not clouds and len(places) > 1:
        line = _path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), index)
    marked = places if clouds or len(points) <= MARKED else []
    return line + "".join(_mark(index, x, y) for x, y in marked)


def _path(d: str, index: int) -> str:
    dash = f' stroke-dasharray="{DASHES[index % 6]}"' if DASHES[index % 6] else ""
    return f'<path class="line s{index % 6}" d="{d}"{dash}/>'


def _mark(index: int, x: float, y: float) -> str:
    at = f'class="mark s{index % 6}"'
    match MARKS[index % 6]:
        case "circle":
            return f'<circle {at} cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
        case "square":
            return f'<path {at} d="M{x - 2.4:.1f} {y - 2.4:.1f}h4.8v4.8h-4.8z"/>'
        case "diamond":
            return f'<path {at} d="M{x:.1f} {y - 3.4:.1f}l3.4 3.4l-3.4 3.4l-3.4-3.4z"/>'
        case "triangle":
            return f'<path {at} d="M{x:.1f} {y - 3.2:.1f}l3.2 5.4h-6.4z"/>'
        case "cross":
            return f'<path {at} d="M{x - 2.6:.1f} {y - 2.6:.1f}l5.2 5.2m0-5.2l-5.2 5.2"/>'
    return f'<circle {at} cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill-opacity="0"/>'
