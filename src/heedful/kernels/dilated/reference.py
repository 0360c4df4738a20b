"""Softmax over the keys at 0, g, 2g, … (w − 1)g before a query, and after it: a window of w in each residue class.

    classes     i = a·g + r: inside one residue r the keys are a plain window over a
    segments    class r of segment s is a segment of its own

See README.md. The signature is that of every softmax backend, and so is the work inside the classes.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heedful.kernels.softmax import softmax
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.patterns import Pattern, Strided, Window, _And
from heedful.segments import Segments, resolve, take_tokens
from heedful.shapes import Float, Int, Tensor


class Shape(NamedTuple):
    """`window` keys on a side, the query's own among them, `gap` apart; before the query alone, or on both sides."""

    window: int
    gap: int
    causal: bool

    @property
    def pattern(self) -> Pattern:
        """Who sees whom."""
        reach = (self.window - 1) * self.gap
        return Strided(self.gap) & Window(reach, 0 if self.causal else reach)

    @property
    def inside(self) -> Window:
        """Who sees whom inside a class."""
        return Window(self.window - 1, 0 if self.causal else self.window - 1)

    @classmethod
    def of(cls, pattern: Pattern) -> Shape | None:
        """The shape of a stride and a window, in any order; None of any other pattern."""
        if not isinstance(pattern, _And):
            return None
        strided, window = pattern.left, pattern.right
        if isinstance(strided, Window):
            strided, window = window, strided
        if not isinstance(strided, Strided) or not isinstance(window, Window) or window.sinks:
            return None
        before, after = window.before // strided.stride, window.after // strided.stride
        return cls(before + 1, strided.stride, after == 0) if after in (0, before) else None


def attend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V for a dilated window, with gradients in q, k and v."""
    shape = Shape.of(pattern)
    assert shape is not None, "objections() come first"
    if segments is None:
        return _on_a_grid(q, k, v, rows, shape, scale)
    return _in_segments(q, k, v, rows, shape, segments, scale)


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why residue classes can't take these inputs."""
    why = []
    if Shape.of(pattern) is None:
        why.append("it takes Strided & Window, without sinks, and as far after a query as before it or not at all")
    if rows != SoftmaxRows(temperature=rows.temperature):
        why.append("it has no bias, softcap or sink")
    return why


def _on_a_grid(q, k, v, rows: SoftmaxRows, shape: Shape, scale: float) -> Tensor:
    n, m, gap = q.shape[-2], k.shape[-2], shape.gap
    start = (m - n) // gap * gap  # the row of the grid that the first query is in
    before, after = m - n - start, -m % gap

    def grid(x: Tensor, before: int) -> Float[Tensor, "*b r a w"]:
        count = (before + x.shape[-2] + after) // gap
        return F.pad(x, (0, 0, before, after)).unflatten(-2, (count, gap)).transpose(-3, -2)

    if after and not shape.causal:  # causal queries never reach the zeros at the end
        place = torch.arange(m + after, device=q.device).unflatten(0, (-1, gap)).mT
        rows = replace(rows, bias=torch.where(place < m, 0.0, -inf).to(q.dtype)[:, None, :])
    out = softmax(grid(q, before), grid(k, 0), grid(v, 0), rows, shape.inside, None, scale)
    return out.transpose(-3, -2).flatten(-3, -2)[..., before : before + n, :]


def _in_segments(q, k, v, rows: SoftmaxRows, shape: Shape, segments: Segments, scale: float) -> Tensor:
    layout = resolve(segments, q.shape[-2], k.shape[-2], q.device)
    queries = _classes(layout.query_ids, layout.query_positions, shape.gap)
    keys = _classes(layout.key_ids, layout.key_positions, shape.gap)
    first, second = queries.argsort(dim=-1, stable=True), keys.argsort(dim=-1, stable=True)
    ids = queries.gather(-1, first), keys.gather(-1, second)
    q, k, v = take_tokens(q, first), take_tokens(k, second), take_tokens(v, second)
    return take_tokens(softmax(q, k, v, rows, shape.inside, ids, scale), first.argsort(dim=-1))


def _classes(ids: Int[Tensor, "*s n"], positions: Int[Tensor, "*s n"], gap: int) -> Int[Tensor, "*s n"]:
    """A segment for each residue of each segment; padding stays padding."""
    return torch.where(ids >= 0, ids * gap + positions % gap, -1)
