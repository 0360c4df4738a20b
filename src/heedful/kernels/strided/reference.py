"""Softmax over the keys at multiples of a stride, and those of a window, each key once: O(N · (N / l + w)).

    classes     i = a·l + r: the queries and keys of one residue r are a short dense sequence over a
    window      blocks of queries with the keys just before them (and after, where it looks both ways)
    merge       o = Σ_p exp(lse_p − lse) o_p,  lse = log Σ_p exp(lse_p)       p: the two parts, disjoint sets of keys
    backward    P = exp(S − lse),  dS = P ∘ (dO Vᵀ − dO·O)                    in each part, with the *merged* lse and O

See README.md for the derivation. The signature is that of every softmax backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from heedful.kernels.dispatch import as_given, uncompiled
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.patterns import Causal, Pattern, Strided, Window, _And, _Or
from heedful.segments import Segments
from heedful.shapes import Float, Tensor, broadcast_shapes

ROWS = 64  # queries of a class in a tile: a causal triangle is cut into strips of so many rows
BUDGET = 1 << 19  # scores in a tile: 2 MiB in float32, so that a tile stays in the cache


class Shape(NamedTuple):
    """Keys at multiples of `stride`, or nearer than `window`; before the query alone, or on both sides."""

    stride: int
    window: int
    causal: bool

    @property
    def skip(self) -> int:
        """Steps of the stride that lie inside the window, where the other part sees them."""
        return -(-self.window // self.stride)

    @property
    def pattern(self) -> Pattern:
        """Who sees whom."""
        near = self.window - 1
        if self.causal:
            return (Strided(self.stride) | Window(near) if self.window else Strided(self.stride)) & Causal()
        return Strided(self.stride) | Window(near, near) if self.window else Strided(self.stride)

    @classmethod
    def of(cls, pattern: Pattern) -> Shape | None:
        """The shape of a pattern that is written as above, in any order; None of any other."""
        causal = isinstance(pattern, _And)
        if isinstance(pattern, _And):
            if not isinstance(pattern.left, Causal) and not isinstance(pattern.right, Causal):
                return None
            pattern = pattern.left if isinstance(pattern.right, Causal) else pattern.right
        sides = [pattern.left, pattern.right] if isinstance(pattern, _Or) else [pattern]
        strides = [side for side in sides if isinstance(side, Strided)]
        windows = [side for side in sides if isinstance(side, Window)]
        if len(strides) != 1 or len(strides) + len(windows) != len(sides):
            return None
        if any(window.sinks or (not causal and window.after != window.before) for window in windows):
            return None
        return cls(strides[0].stride, windows[0].before + 1 if windows else 0, causal)


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
    """A V for a strided pattern, with gradients in q, k and v."""
    shape = Shape.of(pattern)
    assert shape is not None, "objections() come first"
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    flat = [x.expand(*batch, *x.shape[-2:]).reshape(prod(batch), *x.shape[-2:]) for x in (q, k, v)]
    return _Strided.apply(*flat, shape, scale).reshape(*batch, q.shape[-2], v.shape[-1])


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why residue classes can't take these inputs."""
    why = []
    if Shape.of(pattern) is None:
        why.append("it takes Strided, or Strided | Window, with or without & Causal()")
    if segments is not None:
        why.append("segments have residue classes of their own, of other lengths in each row")
    if rows != SoftmaxRows(temperature=rows.temperature):
        why.append("it has no bias, softcap or sink")
    if 0 in (*q.shape, *k.shape, *v.shape):
        why.append("it can't take an empty tensor")
    return why


class _Grid:
    """Tokens as rows a and columns r, position a·l + r: zeros before the first query and after the last key fill it.

    The keys have all rows; the queries, the last n of m positions, those from `first` on.
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
        """The queries of a grid as a sequence, a view."""
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

    def __init__(self, q, k, v, shape: Shape, scale: float):
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = (x.to(dtype) for x in (q, k, v))
        self.shape, self.scale = shape, scale
        self.n, self.m = q.shape[1], k.shape[1]
        self.grid = _Grid(self.n, self.m, shape.stride)
        self.Q, self.K, self.V = self.grid.queries(self.q), self.grid.keys(self.k), self.grid.keys(self.v)

    def class_tiles(self) -> Iterator[_Tile]:
        """Strips of rows, of as many residues and batch entries as make BUDGET scores."""
        grid, (stride, _, causal), skip = self.grid, self.shape, self.shape.skip
        start = max(grid.first, skip) if causal else grid.first  # rows before it see none of their class
        for lo in range(start, grid.rows, ROWS):
            hi = min(lo + ROWS, grid.rows)
            width = hi - skip if causal else grid.rows
            per = max(1, BUDGET // ((hi - lo) * width))
            residues, entries = min(per, stride), max(1, per // stride)
            apart = self._apart(lo, hi, width)
            for r in range(0, stride, residues):
                some = slice(r, min(r + residues, stride))
                penalty = self._with_end(apart, some)
                for b in range(0, len(self.q), entries):
                    yield _Tile(
                        slice(b, b + entries), some, slice(lo - grid.first, hi - grid.first), slice(0, width), penalty
                    )

    def _apart(self, lo: int, hi: int, width: int) -> Tensor | None:
        """0 where the query's row is `skip` or more rows from the key's (and after it, if causal), −∞ elsewhere."""
        steps = torch.arange(lo, hi, device=self.q.device)[:, None] - torch.arange(width, device=self.q.device)
        seen = steps >= self.shape.skip if self.shape.causal else steps.abs() >= self.shape.skip
        return None if bool(seen.all()) else self._penalty(seen)

    def _with_end(self, apart: Tensor | None, residues: slice) -> Tensor | None:
        """Zeros after the last key are keys to nobody. (Causal queries never reach them.)"""
        if self.shape.causal or not self.grid.after:
            return apart
        r = torch.arange(residues.start, residues.stop, device=self.q.device)[:, None, None]
        where = torch.arange(self.grid.rows, device=self.q.device) * self.shape.stride + r
        end = self._penalty(where < self.m)
        return end if apart is None else apart + end

    def window_tiles(self) -> Iterator[_Tile]:
        """Blocks of queries, all batch entries at once; positions, not rows."""
        reach = self.shape.window - 1
        if reach < 0:
            return
        block = max(16, min(128, self.shape.window // 2))
        before = self.m - self.n
        last: tuple[tuple[int, ...], Tensor] | None = None
        for lo in range(0, self.n, block):
            hi = min(lo + block, self.n)
            start, stop = max(0, lo + before - reach), min(self.m, hi + before + (0 if self.shape.causal else reach))
            key = hi - lo, start - lo - before, stop - lo - before
            if last is None or last[0] != key:  # blocks that are shifts of each other share their mask
                steps = torch.arange(lo + before, hi + before)[:, None] - torch.arange(start, stop)
                seen = (steps <= reach) & (steps >= (0 if self.shape.causal else -reach))
                last = key, self._penalty(seen.to(self.q.device))
            yield _Tile(slice(None), slice(None), slice(lo, hi), slice(start, stop), last[1])

    def _penalty(self, seen: Tensor) -> Tensor:
        return torch.where(seen, 0.0, -inf).to(self.q.dtype)

    def scores(self, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
        s = torch.bmm(q * self.scale, k.mT)
        if tile.penalty is not None and tile.penalty.ndim == 3:  # each residue its own
            s.unflatten(0, (-1, len(tile.penalty))).add_(tile.penalty)
        elif tile.penalty is not None:
            s.add_(tile.penalty)
        return s


def _take(grid: Float[Tensor, "b a r w"], tile: _Tile, rows: slice) -> Float[Tensor, "s l w"]:
    """The classes of a tile, one sequence after the other."""
    return grid[tile.batch, rows, tile.residues].transpose(1, 2).flatten(0, 1)


def _place(grid: Float[Tensor, "b a r w"], tile: _Tile, rows: slice) -> Float[Tensor, "c s l w"]:
    """The same part of a grid as a view to write to."""
    return grid[tile.batch, rows, tile.residues].transpose(1, 2)


class _Strided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, shape: Shape, scale: float):
        work = _Work(q, k, v, shape, scale)
        # Grids, of which the queries are a part: what stands in the zeros around them is never read.
        out = work.Q.new_zeros(*work.Q.shape[:3], v.shape[-1])
        lse = work.Q.new_full((*work.Q.shape[:3], 1), -inf)
        rows, log = work.grid.back(out), work.grid.back(lse)
        for tile in work.window_tiles():
            s = work.scores(work.q[:, tile.queries], work.k[:, tile.keys], tile)
            rows[:, tile.queries], log[:, tile.queries] = _attend(s, work.v[:, tile.keys])
        for tile in work.class_tiles():
            s = work.scores(_take(work.Q, tile, tile.queries), _take(work.K, tile, tile.keys), tile)
            o, l = _attend(s, _take(work.V, tile, tile.keys))  # noqa: E741
            place, was = _place(out, tile, tile.queries), _place(lse, tile, tile.queries)
            _merge(place, was, o.view(place.shape), l.view(was.shape), first=not shape.window)
        ctx.save_for_backward(q, k, v, rows, log)
        ctx.rest = shape, scale
        return rows.to(q.dtype, copy=True, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with as_given(grad):
            return _Strided._backward(ctx, grad)

    @staticmethod
    def _backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        work = _Work(q, k, v, *ctx.rest)
        scores_too = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad = grad.to(out.dtype)
        dot = (grad * out).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -inf, 0)
        dQ, dK, dV = (torch.zeros_like(x) for x in (work.Q, work.K, work.V))
        dq, dk, dv = work.grid.back(dQ), dK.flatten(1, 2), dV.flatten(1, 2)
        for tile in work.window_tiles():
            x, y, z = work.q[:, tile.queries], work.k[:, tile.keys], work.v[:, tile.keys]
            here = [a[:, tile.queries] for a in (lse, dot, grad)]
            parts = _pull_back(work.scores(x, y, tile), (x, y, z), here, work.scale, scores_too)
            for target, where, part in zip((dv, dq, dk), (tile.keys, tile.queries, tile.keys), parts, strict=False):
                target[:, where].add_(part)
        G, L, D = (work.grid.queries(x) for x in (grad, lse, dot))
        for tile in work.class_tiles():
            x, y, z = (
                _take(g, tile, at) for g, at in ((work.Q, tile.queries), (work.K, tile.keys), (work.V, tile.keys))
            )
            here = [_take(a, tile, tile.queries) for a in (L, D, G)]
            parts = _pull_back(work.scores(x, y, tile), (x, y, z), here, work.scale, scores_too)
            for target, where, part in zip((dV, dQ, dK), (tile.keys, tile.queries, tile.keys), parts, strict=False):
                place = _place(target, tile, where)
                place.add_(part.view(place.shape))
        dk, dv = dk[:, : work.m].to(k.dtype), dv[:, : work.m].to(v.dtype)
        return (dq.to(q.dtype), dk, dv, None, None) if scores_too else (None, None, dv, None, None)


def _attend(s: Float[Tensor, "b r c"], v: Float[Tensor, "b c e"]) -> tuple[Tensor, Tensor]:
    """Softmax(s) v, and the logarithm of its normaliser; overwrites s."""
    top = s.amax(-1, keepdim=True)
    top.masked_fill_(top == -inf, 0)
    total = s.sub_(top).exp_().sum(-1, keepdim=True)
    return torch.bmm(s, v).div_(total.clamp(min=torch.finfo(s.dtype).tiny)), total.log().add_(top)


def _merge(out: Tensor, lse: Tensor, o: Tensor, log: Tensor, *, first: bool) -> None:
    """Joins a part to what was there, in place."""
    if first:
        out.copy_(o)
        lse.copy_(log)
        return
    share = (
        (log - lse).sigmoid().nan_to_num_(0.0)
    )  # shares add up to 1 however large the logarithms are; −∞ − −∞ is NaN
    out.mul_(1 - share).add_(o.mul_(share))
    lse.copy_(torch.logaddexp(lse, log))


def _pull_back(s: Tensor, inputs, outputs, scale: float, scores_too: bool) -> list[Tensor]:
    """The gradients in v and, if asked for, in q and k, from (q, k, v) and (lse, dO·O, dO) of a tile; overwrites s."""
    (q, k, v), (lse, dot, grad) = inputs, outputs
    weights = s.sub_(lse).exp_()
    dv = torch.bmm(weights.mT, grad)
    if not scores_too:
        return [dv]
    ds = torch.bmm(grad, v.mT).sub_(dot).mul_(weights).mul_(scale)
    return [dv, torch.bmm(ds, k), torch.bmm(ds.mT, q)]
