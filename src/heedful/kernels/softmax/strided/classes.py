"""Attention over keys a stride apart, by any row function: a plain pattern inside each residue class.

    classes     i = a·s + r: inside one residue class r, multiples of the stride s are adjacent (a, a + 1)
    segments    class r of segment t becomes a segment
    adjoint     the same with the adjoint inside the classes

See README.md. `within` is the kernel that runs inside the classes: any that takes plain patterns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from heedful.kernels.blocked.tiles import RowFunction, SoftmaxRows
from heedful.kernels.dispatch import Kernel
from heedful.kernels.softmax.recognise import StridedKeys, recognise
from heedful.patterns import Pattern
from heedful.segments import Segments, resolve, take_tokens
from heedful.shapes import Float, Int, Tensor


def attend(
    within: Kernel,
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V, with gradients in q, k, v and the row function's parameters."""
    shape = recognise(pattern)
    assert isinstance(shape, StridedKeys), "objections() come first"
    step = min(shape.offsets.step, max(1, k.shape[-2]))
    if segments is not None:
        order = _Order(q, k, step, segments)
        found = within(order.queries(q), order.keys(k), order.keys(v), rows, shape.inside, order.ids, scale)
        return order.queries_back(found)
    grid, rows = Grid(q, k, step), on_grid(rows)

    def run(part: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return within(q, k, v, rows, shape.inside, None, scale)

    looks_ahead = shape.offsets.after > 0
    return grid.queries_back(each_length(run, grid, looks_ahead, grid.queries(q), grid.keys(k), grid.keys(v)))


def adjoint(
    within: Kernel,
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    y: Float[Tensor, "*#b n e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    *,
    memory: dict[str, Any] | None = None,
) -> Float[Tensor, "*b m e"]:
    """Aᵀ Y. The kernel inside the classes caches what it knows of q and k in `memory`."""
    shape = recognise(pattern)
    assert isinstance(shape, StridedKeys), "objections() come first"
    memory = {} if memory is None else memory
    step = min(shape.offsets.step, max(1, k.shape[-2]))
    if segments is not None:
        order = _Order(q, k, step, segments)
        inputs = order.queries(q), order.keys(k), order.queries(y)
        return order.keys_back(within(*inputs, rows, shape.inside, order.ids, scale, memory=memory))
    grid, rows = Grid(q, k, step), on_grid(rows)

    def run(part: str, q: Tensor, k: Tensor, y: Tensor) -> Tensor:
        return within(q, k, y, rows, shape.inside, None, scale, memory=memory.setdefault(part, {}))

    looks_ahead = shape.offsets.after > 0
    return grid.keys_back(each_length(run, grid, looks_ahead, grid.queries(q), grid.keys(k), grid.queries(y)))


def on_grid(rows: RowFunction) -> RowFunction:
    """The row function for inputs with one more batch axis, that of the residues."""
    if isinstance(rows, SoftmaxRows) and rows.sink is not None:
        return replace(rows, sink=rows.sink[..., None])
    return rows


class Grid:
    """Tokens as residues r and rows a at position a·s + r; zeros before the first query and after the last key.

    The keys have all rows. The queries are the last n of m positions; their rows start with that of the first query.
    """

    def __init__(self, q: Tensor, k: Tensor, step: int):
        self.n, self.m, self.step = q.shape[-2], k.shape[-2], step
        self.before, self.after = (self.m - self.n) % step, -self.m % step

    def keys(self, x: Float[Tensor, "*b m w"] | Int[Tensor, "*b m w"]) -> Tensor:
        return self._grid(x, 0)

    def queries(self, x: Float[Tensor, "*b n w"] | Int[Tensor, "*b n w"]) -> Tensor:
        return self._grid(x, self.before)

    def _grid(self, x: Tensor, before: int) -> Tensor:
        count = (before + x.shape[-2] + self.after) // self.step
        return F.pad(x, (0, 0, before, self.after)).unflatten(-2, (count, self.step)).transpose(-3, -2)

    def queries_back(self, x: Float[Tensor, "*b r a w"]) -> Float[Tensor, "*b n w"]:
        return x.transpose(-3, -2).flatten(-3, -2)[..., self.before : self.before + self.n, :]

    def keys_back(self, x: Float[Tensor, "*b r a w"]) -> Float[Tensor, "*b m w"]:
        return x.transpose(-3, -2).flatten(-3, -2)[..., : self.m, :]


def each_length(run: Callable[..., Tensor], grid: Grid, looks_ahead: bool, *grids: Tensor) -> Tensor:
    """Run all classes together; if queries look ahead, run the classes that lack the last row separately.

    Zeros in the last row come after every query of their class; a query that does not look ahead never sees them.
    """
    if not grid.after or not looks_ahead:
        return run("all", *grids)
    whole = grid.step - grid.after
    longer = run("longer", *(x[..., :whole, :, :] for x in grids))
    shorter = run("shorter", *(x[..., whole:, :-1, :] for x in grids))
    return torch.cat([longer, F.pad(shorter, (0, 0, 0, 1))], -3)


class _Order:
    """Sorts tokens by segment and residue, and back. Blocks of adjacent tokens then see few keys."""

    def __init__(self, q: Tensor, k: Tensor, step: int, segments: Segments):
        layout = resolve(segments, q.shape[-2], k.shape[-2], q.device)
        queries = _classes(layout.query_ids, layout.query_positions, step)
        keys = _classes(layout.key_ids, layout.key_positions, step)
        self.first, self.second = queries.argsort(dim=-1, stable=True), keys.argsort(dim=-1, stable=True)
        self.ids = queries.gather(-1, self.first), keys.gather(-1, self.second)

    def queries(self, x: Tensor) -> Tensor:
        return take_tokens(x, self.first)

    def keys(self, x: Tensor) -> Tensor:
        return take_tokens(x, self.second)

    def queries_back(self, x: Tensor) -> Tensor:
        return take_tokens(x, self.first.argsort(dim=-1))

    def keys_back(self, x: Tensor) -> Tensor:
        return take_tokens(x, self.second.argsort(dim=-1))


def _classes(ids: Int[Tensor, "*s n"], positions: Int[Tensor, "*s n"], step: int) -> Int[Tensor, "*s n"]:
    """New segment ids, one for each residue of each segment; padding stays padding."""
    return torch.where(ids >= 0, ids * step + positions % step, -1)
