"""Softmax of each query over a list of its own, for patterns that are a tree, or a tree and more.

    forward     queries with about as many keys as each other, gathered with them: s = scale · q Kᵀ, o = softmax(s) V
    backward    the same once more with gradients, which are added to the places they were gathered from

See README.md. The signature is that of every softmax backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from heedful.kernels.dispatch import as_given, uncompiled
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.patterns import Pattern, Tree, _And
from heedful.segments import Segments
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes

BUDGET = 1 << 22  # gathered numbers at a time: 16 MiB in float32


class Bucket(NamedTuple):
    """Queries, the keys of each, and which of those are filling."""

    queries: Int[Tensor, " r"]
    keys: Int[Tensor, "r c"]
    filling: Bool[Tensor, "r c"]


@lru_cache(maxsize=8)
def buckets(pattern: Pattern, n: int, m: int) -> tuple[Bucket, ...]:
    """Every allowed pair of the last n of m positions, in a bucket by the length of its query's list."""
    tree = _tree_of(pattern)
    assert tree is not None, "objections() come first"
    i, j = tree.links
    some = (i >= m - n) & (i < m) & (j < m)
    i, j = i[some], j[some]
    some = pattern.allows(i, j)
    i, j = i[some] - (m - n), j[some]
    count = torch.bincount(i, minlength=n)
    first = count.cumsum(0) - count
    size = torch.where(count > 0, torch.frexp((count - 1).double()).exponent, -1)  # ⌈log₂ count⌉
    found = []
    for kind in size.unique().tolist():
        if kind < 0:
            continue  # they see nothing
        queries = (size == kind).nonzero().flatten()
        place = torch.arange(int(count[queries].max()))
        filling = place >= count[queries, None]
        found.append(Bucket(queries, j[first[queries, None] + torch.where(filling, 0, place)], filling))
    return tuple(found)


def _tree_of(pattern: Pattern) -> Tree | None:
    """The tree that a pattern is, or that is one side of it."""
    if isinstance(pattern, _And):
        left, right = _tree_of(pattern.left), _tree_of(pattern.right)
        return right if left is None else left
    return pattern if isinstance(pattern, Tree) else None


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
    """A V for a pattern with a tree, with gradients in q, k and v."""
    return _Lists.apply(q, k, v, buckets(pattern, q.shape[-2], k.shape[-2]), scale)


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why lists can't take these inputs."""
    why = []
    if _tree_of(pattern) is None:
        why.append("it takes a Tree, or a Tree & another pattern")
    if segments is not None:
        why.append("segments have positions of their own, and so other lists")
    if rows != SoftmaxRows(temperature=rows.temperature):
        why.append("it has no bias, softcap or sink")
    return why


def _gathered(groups: tuple[Bucket, ...], width: int, device: torch.device) -> Iterator[Bucket]:
    """The buckets in pieces of at most BUDGET gathered numbers."""
    for group in groups:
        step = max(1, BUDGET // max(1, group.keys.shape[-1] * width))
        for start in range(0, len(group.queries), step):
            yield Bucket(*(x[start : start + step].to(device) for x in group))


def _take(x: Float[Tensor, "*b m w"], index: Int[Tensor, "*r"]) -> Float[Tensor, "*b *r w"]:
    return x.index_select(-2, index.flatten()).unflatten(-2, index.shape)


def _attend(inputs: tuple[Tensor, ...], filling: Bool[Tensor, "r c"], scale: float) -> Float[Tensor, "*b r e"]:
    """q (*b, r, d), k (*b, r, c, d), v (*b, r, c, e)."""
    q, k, v = inputs
    s = (q * scale)[..., None, :] @ k.mT
    return (s.masked_fill(filling[:, None], -inf).softmax(-1) @ v)[..., 0, :]


class _Lists(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, groups, scale):
        dtype = torch.promote_types(q.dtype, torch.float32)
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        out = q.new_zeros(*batch, q.shape[-2], v.shape[-1])
        width = prod(batch) * (q.shape[-1] + v.shape[-1])
        for queries, keys, filling in _gathered(groups, width, q.device):
            near = (_take(x, at).to(dtype) for x, at in ((q, queries), (k, keys), (v, keys)))
            part = _attend(tuple(near), filling, scale)
            out.index_copy_(-2, queries, part.expand(*batch, -1, -1).to(q.dtype))
        ctx.save_for_backward(q, k, v)
        ctx.rest = groups, scale, width
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with as_given(grad):
            return _Lists._backward(ctx, grad)

    @staticmethod
    def _backward(ctx, grad):
        inputs, (groups, scale, width) = ctx.saved_tensors, ctx.rest
        dtype, wants = torch.promote_types(grad.dtype, torch.float32), ctx.needs_input_grad[:3]
        totals = [torch.zeros_like(x, dtype=dtype) for x in inputs]
        for queries, keys, filling in _gathered(groups, width, grad.device):
            places = queries, keys, keys
            with torch.enable_grad():
                leaves = [
                    _take(x.detach(), at).to(dtype).requires_grad_(want)
                    for x, at, want in zip(inputs, places, wants, strict=True)
                ]
                out = _attend(tuple(leaves), filling, scale)
            wanted = [at for at in range(3) if wants[at]]
            found = torch.autograd.grad(out, [leaves[at] for at in wanted], _take(grad, queries).to(dtype))
            for at, part in zip(wanted, found, strict=True):
                total, place = totals[at], places[at]
                total.index_add_(-2, place.flatten(), part.reshape(*total.shape[:-2], place.numel(), total.shape[-1]))
        grads = (g.to(x.dtype) if want else None for g, x, want in zip(totals, inputs, wants, strict=True))
        return *grads, None, None
