"""Softmax over the keys at multiples of a stride and those of a window, each key once: O(N · (N / s + w)).

    classes     i = a·s + r: the queries and keys of one residue r are a short sequence over a
    window      blocks of queries with the keys just before and after them
    merge       o = Σ_p exp(lse_p − lse) o_p,  lse = log Σ_p exp(lse_p)       p: the two parts, disjoint sets of keys
    backward    P = exp(S − lse),  dS = P ∘ (dO Vᵀ − dO·O)                    in each part, with the *merged* lse and O
    adjoint     Aᵀ Y = Σ_parts Pᵀ Y                                           the same lse for every Y

See README.md for the derivation. The signature is that of every softmax backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import as_given, uncompiled
from heedful.kernels.softmax.recognise import StridedWindow, recognise
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Tensor, broadcast_shapes

ROWS = 64  # queries of a class in a tile: a causal triangle is cut into strips of this many rows
BUDGET = 1 << 19  # scores in a tile: 2 MiB in float32, so that a tile stays in the cache


@uncompiled
def attend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V, with gradients in q, k and v."""
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    out = _Merged.apply(*_flat(batch, q, k, v), _shape(pattern), scale)
    return out.reshape(*batch, q.shape[-2], v.shape[-1])


@uncompiled
@torch.no_grad()
def adjoint(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    y: Float[Tensor, "*#b n e"],
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    *,
    memory: dict[str, Tensor] | None = None,
) -> Float[Tensor, "*b m e"]:
    """Aᵀ Y. `memory` caches the rows' log-sum-exps, which are the same for every Y."""
    memory = {} if memory is None else memory
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], y.shape[:-2])
    q, k, y = _flat(batch, q, k, y)
    work = _Work(q, k, k[..., :1], _shape(pattern), scale)
    name = f"lse of {tuple(batch)}"
    if name not in memory:
        memory[name] = work.attend()[1]
    work = _Work(q, k, y.new_empty(len(k), k.shape[1], y.shape[-1]), work.shape, scale)
    (dv,) = work.pull_back(memory[name], None, y.to(work.q.dtype))
    return dv.to(y.dtype).reshape(*batch, *dv.shape[-2:])


def _shape(pattern: Pattern) -> StridedWindow:
    shape = recognise(pattern)
    assert isinstance(shape, StridedWindow), "objections() come first"
    return shape


def _flat(batch: tuple[int, ...], *tensors: Tensor) -> list[Float[Tensor, "b t w"]]:
    return [x.expand(*batch, *x.shape[-2:]).reshape(prod(batch), *x.shape[-2:]) for x in tensors]


class _Grid:
    """Tokens as rows a and columns r at position a·l + r; zeros before the first query and after the last key.

    The keys have all rows. The queries are the last n of m positions; their rows start at `first`.
    """

    def __init__(self, n: int, m: int, stride: int):
        self.stride, self.n = stride, n
        self.rows = -(-m // stride)
        self.first = (m - n) // stride
        self.before, self.after = m - n - self.first * stride, self.rows * stride - m

    def keys(self, x: Float[Tensor, "b m w"]) -> Float[Tensor, "b a r w"]:
        return F.pad(x, (0, 0, 0, self.after)).unflatten(1, (self.rows, self.stride))

    def queries(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b a r w"]:
        return F.pad(x, (0, 0, self.before, self.after)).unflatten(1, (-1, self.stride))

    def back(self, x: Float[Tensor, "b a r w"]) -> Float[Tensor, "b n w"]:
        """The queries of a grid as a sequence (a view)."""
        return x.flatten(1, 2)[:, self.before : self.before + self.n]


class _Tile(NamedTuple):
    """Batch entries and residues (slices), rows of queries, rows of keys, and −∞ where a query sees no key."""

    batch: slice
    residues: slice
    queries: slice
    keys: slice
    penalty: Tensor | None


class _Work:
    """One call: its inputs in the precision of the computation, as sequences and as grids."""

    def __init__(self, q, k, v, shape: StridedWindow, scale: float):
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = (x.to(dtype) for x in (q, k, v))
        self.shape, self.scale = shape, scale
        self.n, self.m = q.shape[1], k.shape[1]
        far, near = shape
        self.stride = min(far.step, self.m)  # a longer stride reaches only the query's own key
        self.back = range(near.before // self.stride + 1, min(far.before // far.step, self.m) + 1)
        self.ahead = range(near.after // self.stride + 1, min(far.after // far.step, self.m) + 1)
        """Steps of the stride at which a query sees keys outside the window, before it and after it."""
        self.grid = _Grid(self.n, self.m, self.stride)
        self.Q, self.K, self.V = self.grid.queries(self.q), self.grid.keys(self.k), self.grid.keys(self.v)

    def attend(self) -> tuple[Float[Tensor, "b n e"], Float[Tensor, "b n 1"]]:
        """A V, and the logarithms of the normalisers of the rows."""
        # Whole grids; the zeros around the queries are never read.
        out = self.Q.new_zeros(*self.Q.shape[:3], self.v.shape[-1])
        lse = self.Q.new_full((*self.Q.shape[:3], 1), -inf)
        rows, log = self.grid.back(out), self.grid.back(lse)
        for tile in self.window_tiles():
            s = self.scores(self.q[tile.batch, tile.queries], self.k[tile.batch, tile.keys], tile)
            o, l = _attend(s, self.v[tile.batch, tile.keys])  # noqa: E741
            rows[tile.batch, tile.queries], log[tile.batch, tile.queries] = o, l
        for tile in self.class_tiles():
            s = self.scores(_take(self.Q, tile, tile.queries), _take(self.K, tile, tile.keys), tile)
            o, l = _attend(s, _take(self.V, tile, tile.keys))  # noqa: E741
            place, was = _place(out, tile, tile.queries), _place(lse, tile, tile.queries)
            _merge(place, was, o.view(place.shape), l.view(was.shape))
        return rows, log

    def pull_back(
        self, lse: Float[Tensor, "b n 1"], dot: Float[Tensor, "b n 1"] | None, grad: Float[Tensor, "b n e"]
    ) -> list[Tensor]:
        """The gradient in v; if dO·O is given for every row, those in v, q and k."""
        dV = self.K.new_zeros(*self.K.shape[:3], grad.shape[-1])
        totals = [dV] if dot is None else [dV, torch.zeros_like(self.Q), torch.zeros_like(self.K)]
        flat = [self.grid.back(x) if at == 1 else x.flatten(1, 2) for at, x in enumerate(totals)]
        lse = lse.masked_fill(lse == -inf, 0)
        of_rows = [lse, grad] if dot is None else [lse, grad, dot]
        for tile in self.window_tiles():
            x = self.q[tile.batch, tile.queries]
            y, z = (a[tile.batch, tile.keys] for a in (self.k, self.v))
            here = [a[tile.batch, tile.queries] for a in of_rows]
            parts = _pull_back(self.scores(x, y, tile), (x, y, z), here, self.scale)
            for total, where, part in zip(flat, (tile.keys, tile.queries, tile.keys), parts, strict=False):
                total[tile.batch, where].add_(part)
        on_grid = [self.grid.queries(x) for x in of_rows]
        for tile in self.class_tiles():
            x, y, z = (
                _take(g, tile, at) for g, at in ((self.Q, tile.queries), (self.K, tile.keys), (self.V, tile.keys))
            )
            here = [_take(a, tile, tile.queries) for a in on_grid]
            parts = _pull_back(self.scores(x, y, tile), (x, y, z), here, self.scale)
            for total, where, part in zip(totals, (tile.keys, tile.queries, tile.keys), parts, strict=False):
                place = _place(total, tile, where)
                place.add_(part.view(place.shape))
        return [x if at == 1 else x[:, : self.m] for at, x in enumerate(flat)]

    def class_tiles(self) -> Iterator[_Tile]:
        """Strips of rows, each with as many residues and batch entries as make BUDGET scores."""
        grid, back, ahead = self.grid, self.back, self.ahead
        begin = grid.first if ahead else max(grid.first, back.start)  # earlier rows see no key of their class
        for lo in range(begin, grid.rows, ROWS):
            hi = min(lo + ROWS, grid.rows)
            start = max(0, lo - back.stop + 1) if back else lo + ahead.start
            stop = min(grid.rows, hi + ahead.stop - 1) if ahead else hi - back.start
            if stop <= start:
                continue
            per = max(1, BUDGET // ((hi - lo) * (stop - start)))
            residues, entries = min(per, self.stride), max(1, per // self.stride)
            apart = self._apart(lo, hi, start, stop)
            for r in range(0, self.stride, residues):
                some = slice(r, min(r + residues, self.stride))
                penalty = self._with_end(apart, some, start, stop)
                for b in range(0, len(self.q), entries):
                    queries = slice(lo - grid.first, hi - grid.first)
                    yield _Tile(slice(b, b + entries), some, queries, slice(start, stop), penalty)

    def _apart(self, lo: int, hi: int, start: int, stop: int) -> Tensor | None:
        """0 where the query's row sees the key's row outside the window, −∞ elsewhere; None if all are seen."""
        device = self.q.device
        steps = torch.arange(lo, hi, device=device)[:, None] - torch.arange(start, stop, device=device)
        seen = (steps >= self.back.start) & (steps < self.back.stop)
        if self.ahead:
            seen |= (-steps >= self.ahead.start) & (-steps < self.ahead.stop)
        return None if bool(seen.all()) else self._penalty(seen)

    def _with_end(self, apart: Tensor | None, residues: slice, start: int, stop: int) -> Tensor | None:
        """The mask `apart`, also with −∞ at the zeros after the last key. (Queries that look back never see them.)"""
        if not self.ahead or not self.grid.after or stop < self.grid.rows:
            return apart
        r = torch.arange(residues.start, residues.stop, device=self.q.device)[:, None, None]
        where = torch.arange(start, stop, device=self.q.device) * self.stride + r
        end = self._penalty(where < self.m)
        return end if apart is None else apart + end

    def window_tiles(self) -> Iterator[_Tile]:
        """Blocks of queries, each with as many batch entries as make BUDGET scores; by positions, not rows."""
        before, after, _ = self.shape.near
        block = max(16, min(128, (max(before, after) + 1) // 2))
        first = self.m - self.n
        last: tuple[tuple[int, ...], Tensor] | None = None
        for lo in range(0, self.n, block):
            hi = min(lo + block, self.n)
            start, stop = max(0, lo + first - before), min(self.m, hi + first + after)
            key = hi - lo, start - lo - first, stop - lo - first
            if last is None or last[0] != key:  # blocks that are shifts of each other share a mask
                steps = torch.arange(lo + first, hi + first)[:, None] - torch.arange(start, stop)
                last = key, self._penalty(((steps <= before) & (steps >= -after)).to(self.q.device))
            entries = max(1, BUDGET // ((hi - lo) * (stop - start)))
            for b in range(0, len(self.q), entries):
                yield _Tile(slice(b, b + entries), slice(None), slice(lo, hi), slice(start, stop), last[1])

    def _penalty(self, seen: Tensor) -> Tensor:
        return torch.where(seen, 0.0, -inf).to(self.q.dtype)

    def scores(self, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
        s = torch.bmm(q * self.scale, k.mT)
        if tile.penalty is not None and tile.penalty.ndim == 3:  # one mask per residue
            s.unflatten(0, (-1, len(tile.penalty))).add_(tile.penalty)
        elif tile.penalty is not None:
            s.add_(tile.penalty)
        return s


def _take(grid: Float[Tensor, "b a r w"], tile: _Tile, rows: slice) -> Float[Tensor, "s l w"]:
    """The rows of a tile's classes, one sequence after the other."""
    return grid[tile.batch, rows, tile.residues].transpose(1, 2).flatten(0, 1)


def _place(grid: Float[Tensor, "b a r w"], tile: _Tile, rows: slice) -> Float[Tensor, "c s l w"]:
    """The same part of a grid, as a view to write to."""
    return grid[tile.batch, rows, tile.residues].transpose(1, 2)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, shape: StridedWindow, scale: float):
        out, lse = _Work(q, k, v, shape, scale).attend()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = shape, scale
        return out.to(q.dtype, copy=True, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        with as_given(grad):
            grad = grad.to(out.dtype)
            scores_too = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
            dot = (grad * out).sum(-1, keepdim=True) if scores_too else None
            dv, *rest = _Work(q, k, v, *ctx.rest).pull_back(lse, dot, grad)
            dq, dk = (x.to(q.dtype) for x in rest) if scores_too else (None, None)
        return dq, dk, dv.to(v.dtype), None, None


def _attend(s: Float[Tensor, "b r c"], v: Float[Tensor, "b c e"]) -> tuple[Tensor, Tensor]:
    """Softmax(s) v and the logarithm of its normaliser; overwrites s."""
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -inf, 0)
    total = s.sub_(top).exp_().sum(-1, keepdim=True)
    return torch.bmm(s, v).div_(total.clamp(min=torch.finfo(s.dtype).tiny)), total.log().add_(top)


def _merge(out: Tensor, lse: Tensor, o: Tensor, log: Tensor) -> None:
    """Merge a part into out and lse, in place."""
    share = (log - lse).sigmoid().nan_to_num_(0.0)  # shares add up to 1 at any size; −∞ − −∞ is NaN
    out.mul_(1 - share).add_(o.mul_(share))
    lse.copy_(torch.logaddexp(lse, log))


def _pull_back(s: Tensor, inputs, of_rows: list[Tensor], scale: float) -> list[Tensor]:
    """The gradients in v and, if dO·O is given, in q and k, from (q, k, v) and (lse, dO, dO·O); overwrites s."""
    (q, k, v), (lse, grad, *dot) = inputs, of_rows
    weights = s.sub_(lse).exp_()
    dv = torch.bmm(weights.mT, grad)
    if not dot:
        return [dv]
    ds = torch.bmm(grad, v.mT).sub_(dot[0]).mul_(weights).mul_(scale)
    return [dv, torch.bmm(ds, k), torch.bmm(ds.mT, q)]
