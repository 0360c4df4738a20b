"""Attention of each query over its own list of keys, by any row function; for patterns that contain a tree.

    forward     gather queries with similar numbers of keys, and their keys: S = scale · q Kᵀ, O = W(S) V
    backward    the same again with gradients, added at the places that the inputs were gathered from
    adjoint     the weights again, times Y, added at the places of the keys

See README.md. The signature is that of every softmax backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.tiles import Keys, Mask, RowFunction, Tile
from heedful.kernels.dispatch import as_given, uncompiled
from heedful.kernels.softmax.recognise import has_tree
from heedful.patterns import And, Or, Pattern, Tree
from heedful.segments import Segments
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes

BUDGET = 1 << 22  # numbers gathered at a time: 16 MiB in float32


class Bucket(NamedTuple):
    """Queries, the list of keys of each, and which of those are seen; the others are padding."""

    queries: Int[Tensor, " r"]
    keys: Int[Tensor, "r c"]
    seen: Bool[Tensor, "r c"]


@lru_cache(maxsize=8)
def buckets(pattern: Pattern, n: int, m: int) -> tuple[Bucket, ...]:
    """Every allowed pair of the last n of m positions, in buckets by the length of the query's list."""
    i, j = _links(pattern, n, m)
    i = i - (m - n)
    count = torch.bincount(i, minlength=n)
    first = count.cumsum(0) - count
    size = torch.where(count > 0, torch.frexp((count - 1).double()).exponent, -1)  # ⌈log₂ count⌉
    found = []
    for kind in size.unique().tolist():
        if kind < 0:
            continue  # these queries see nothing
        queries = (size == kind).nonzero().flatten()
        place = torch.arange(int(count[queries].max()))
        seen = place < count[queries, None]
        found.append(Bucket(queries, j[first[queries, None] + torch.where(seen, place, 0)], seen))
    return tuple(found)


def _links(pattern: Pattern, n: int, m: int) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Positions (query, key) of every allowed pair, sorted."""
    match pattern:
        case Tree():
            i, j = pattern.links
            some = (i >= m - n) & (i < m) & (j < m)
            return i[some], j[some]
        case And(left, right) if has_tree(pattern):
            one, other = (left, right) if has_tree(left) else (right, left)
            i, j = _links(one, n, m)
            some = other.allows(i, j)
            return i[some], j[some]
        case Or(left, right) if has_tree(pattern):
            pairs = torch.cat([i * m + j for i, j in (_links(left, n, m), _links(right, n, m))]).unique()
            return pairs // max(m, 1), pairs % max(m, 1)
    assert pattern.offsets is not None, "a narrow window"
    steps = torch.cat([torch.arange(-x.after, x.before + 1) for x in pattern.offsets]).unique()
    i = torch.arange(m - n, m)[:, None].expand(-1, len(steps))
    j = i - steps.flip(0)
    some = (j >= 0) & (j < m) & pattern.allows(i, j)
    return i[some], j[some]


@uncompiled
def attend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V, with gradients in q, k, v and the row function's parameters."""
    groups = buckets(pattern, q.shape[-2], k.shape[-2])
    return _Lists.apply(q, k, v, groups, rows, scale, *rows.parameters)


@uncompiled
@torch.no_grad()
def adjoint(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    y: Float[Tensor, "*#b n e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    *,
    memory: dict[str, Tensor] | None = None,
) -> Float[Tensor, "*b m e"]:
    """Aᵀ Y; nothing is cached in `memory`."""
    lists = _Gathered(q, k, y, buckets(pattern, q.shape[-2], k.shape[-2]), rows, scale)
    out = q.new_zeros(*lists.batch, k.shape[-2], y.shape[-1], dtype=lists.dtype)
    for part in lists.parts():
        weights = lists.weights(part, lists.take(q, part.queries), lists.take(k, part.keys), rows.parameters)
        given = weights[..., None] * lists.take(y, part.queries)[..., None, :]
        out.index_add_(-2, part.keys.flatten(), given.expand(*lists.batch, *given.shape[-3:]).flatten(-3, -2))
    return out.to(y.dtype)


class _Gathered:
    """One call: its buckets in pieces, each with queries and gathered keys."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, groups: tuple[Bucket, ...], rows: RowFunction, scale: float):
        self.batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.groups, self.rows, self.scale = groups, rows, scale
        self.first, self.device = k.shape[-2] - q.shape[-2], q.device
        self.width = prod(self.batch) * (q.shape[-1] + v.shape[-1])

    def parts(self) -> Iterator[Bucket]:
        """The buckets in pieces of at most BUDGET gathered numbers."""
        for group in self.groups:
            step = max(1, BUDGET // max(1, group.keys.shape[-1] * self.width))
            for start in range(0, len(group.queries), step):
                yield Bucket(*(x[start : start + step].to(self.device) for x in group))

    def take(self, x: Float[Tensor, "*b t w"], index: Int[Tensor, "*r"]) -> Float[Tensor, "*b *r w"]:
        return x.index_select(-2, index.flatten()).unflatten(-2, index.shape).to(self.dtype)

    def weights(
        self, part: Bucket, q: Float[Tensor, "*#b r d"], k: Float[Tensor, "*#b r c d"], parameters
    ) -> Float[Tensor, "*b r c"]:
        """The row function's weights for a piece: a tile in which every row has its own keys."""
        scores = ((q * self.scale)[..., None, :] @ k.mT)[..., 0, :]
        tile = Tile(
            (),
            slice(0, len(part.queries)),
            Keys([(0, part.keys.shape[-1])]),
            (part.queries + self.first)[:, None],
            part.keys,
            None if bool(part.seen.all()) else Mask(part.seen),
        )
        return self.rows.weights(scores, tile, None, parameters)


class _Lists(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, groups, rows, scale, *parameters):
        lists = _Gathered(q, k, v, groups, rows, scale)
        out = q.new_zeros(*lists.batch, q.shape[-2], v.shape[-1])
        for part in lists.parts():
            weights = lists.weights(part, lists.take(q, part.queries), lists.take(k, part.keys), parameters)
            found = (weights[..., None, :] @ lists.take(v, part.keys))[..., 0, :]
            out.index_copy_(-2, part.queries, found.expand(*lists.batch, -1, -1).to(q.dtype))
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.rest = groups, rows, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with as_given(grad):
            return _Lists._backward(ctx, grad)

    @staticmethod
    def _backward(ctx, grad):
        q, k, v, *parameters = ctx.saved_tensors
        lists = _Gathered(q, k, v, *ctx.rest)
        wants = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:]]
        inputs = [q, k, v, *parameters]
        totals = [
            torch.zeros_like(x, dtype=lists.dtype if at < 3 else x.dtype) if want else None
            for at, (x, want) in enumerate(zip(inputs, wants, strict=True))
        ]
        for part in lists.parts():
            places = part.queries, part.keys, part.keys
            leaves = [lists.take(x.detach(), at) for x, at in zip(inputs, places, strict=False)]
            leaves += [x.detach() for x in parameters]
            leaves = [x.requires_grad_(want) for x, want in zip(leaves, wants, strict=True)]
            with torch.enable_grad():
                weights = lists.weights(part, leaves[0], leaves[1], leaves[3:])
                out = (weights[..., None, :] @ leaves[2])[..., 0, :]
            wanted = [at for at, want in enumerate(wants) if want]
            found = torch.autograd.grad(
                out, [leaves[at] for at in wanted], lists.take(grad, part.queries), materialize_grads=True
            )
            for at, more in zip(wanted, found, strict=True):
                total = totals[at]
                assert total is not None, "it is wanted"
                if at < 3:
                    more = more.reshape(*total.shape[:-2], places[at].numel(), total.shape[-1])
                    total.index_add_(-2, places[at].flatten(), more)
                else:
                    total += more
        grads = [None if g is None else g.to(x.dtype) for g, x in zip(totals, inputs, strict=True)]
        return *grads[:3], None, None, None, *grads[3:]
