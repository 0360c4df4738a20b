"""Random feature attention on a CPU, the features made group by group: nothing of size n·r in memory.

    logarithms  a = q Wq + c,   b = k Wk + c + length,   to base 2
    causal      the walk of chunked_linear/chunks.py: a scale s_r for each feature, the largest key so far
    full        x = 2^(a + s − max_r),  y = 2^(b − s):  s_r the largest key so far, block by block; the sums are scaled
                down where it grows. The normaliser is ≥ 1: the largest a_ir + b_jr is in it as 2^0
    gradients   features are made again; dlog = φ ∘ dφ, dq = dlog Wqᵀ, dk = dlog Wkᵀ, dlength = Σ_r dlog

The result does not depend on s: no gradient goes through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.chunks import (
    LOWEST,
    backward_from_logs,
    blocks_of,
    cut,
    forward_from_logs,
    groups_of,
    in_rows,
    put,
    repeat,
    slabs,
    upstream_of_logs,
)
from heedful.kernels.chunked_linear.features import LOG2E
from heedful.kernels.chunked_linear.groups import inverse_of, upstream
from heedful.kernels.dispatch import as_given, uncompiled
from heedful.kernels.random_features import reference


def objections(q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True) -> list[str]:
    """Why this form can't take these inputs, in sentences; none if it can."""
    options = dict(query_weight=query_weight, key_weight=key_weight, bias=bias, curvature=curvature)
    if said := reference.objections(q, k, v, **options, key_bias=key_bias, causal=causal):
        return said
    if q.device.type != "cpu":
        said.append(f"groups are sized for the cache of a CPU, the inputs are on {q.device}.")
    if 0 in (*q.shape, *v.shape):
        said.append("there is nothing to group in an empty tensor.")
    if torch.promote_types(q.dtype, torch.float32) != query_weight.dtype:
        said.append(f"projections in {query_weight.dtype} would round inputs in {q.dtype}.")
    learned = [x for x in (query_weight, key_weight, bias) if x is not None and x.requires_grad]
    if learned and torch.is_grad_enabled():
        said.append("the gradient of the projection is not computed here.")
    return said


@uncompiled
def random_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    bias: Tensor | None = None,
    curvature: float = 0.0,
    key_bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """As `reference.random_features`.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> omega = torch.randn(1, 4, 16)
    >>> options = dict(query_weight=omega, key_weight=omega, curvature=1.0)
    >>> torch.allclose(random_features(q, k, v, **options), reference.random_features(q, k, v, **options), atol=1e-5)
    True
    """
    wide, heads = query_weight.dtype, q.shape[1]
    x, y, u = q.to(wide), repeat(k.to(wide), heads), repeat(v.to(wide), heads)
    length = y.square().sum(-1).mul(-curvature / 2)
    if key_bias is not None:
        length = length + repeat(key_bias.to(wide), heads)
    own = query_weight.new_zeros(len(query_weight), query_weight.shape[-1]) if bias is None else bias.to(wide)
    function = _Causal if causal else _Full
    return function.apply(x, y, u, length, query_weight, key_weight.to(wide), own).to(v.dtype)


class _Map:
    """log₂ of features, linear in a token: shared by all rows, or one for each."""

    def __init__(self, weight: Tensor, own: Tensor):
        self.weight, self.own, self.binary = weight, own * LOG2E, weight * LOG2E

    def logs(self, x: Tensor) -> Tensor:
        """(chunks · rows, c, d) → (chunks · rows, c, r)"""
        if len(self.weight) == 1:
            return torch.addmm(self.own[0], x.flatten(0, 1), self.binary[0]).unflatten(0, x.shape[:2])
        return (x.unflatten(0, (-1, len(self.weight))) @ self.binary).add_(self.own[:, None]).flatten(0, 1)

    def pulled(self, dlog: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of tokens and of their lengths from that of the logarithms of their features."""
        if len(self.weight) == 1:
            dx = (dlog.flatten(0, 1) @ self.weight[0].mT).unflatten(0, dlog.shape[:2])
        else:
            dx = (dlog.unflatten(0, (-1, len(self.weight))) @ self.weight.mT).flatten(0, 1)
        return dx, dlog.sum(-1, keepdim=True)


def _maps(rows: slice, query_weight: Tensor, key_weight: Tensor, own: Tensor) -> tuple[_Map, _Map]:
    heads = len(query_weight)
    if heads > 1:
        at = torch.arange(rows.start, rows.stop) % heads
        query_weight, key_weight, own = (t[at] for t in (query_weight, key_weight, own))
    return _Map(query_weight, own), _Map(key_weight, own)


class _Made:
    """Logarithms of features, made of tokens (rows, n, d)."""

    binary = True

    def __init__(self, q: Tensor, k: Tensor, length: Tensor, maps: tuple[_Map, _Map]):
        self.q, self.k, self.length, self.maps = q, k, length, maps

    def queries(self, at):
        return self.maps[0].logs(cut(self.q, *at))

    def keys(self, at):
        return self.maps[1].logs(cut(self.k, *at)).add_(cut(self.length, *at))


class _Causal(torch.autograd.Function):
    """Keeps its inputs, its output, and a state and its scale a group."""

    @staticmethod
    def forward(ctx, q, k, v, length, *weights):
        (B, H, n, _), e, r = q.shape, v.shape[-1], weights[0].shape[-1]
        given = in_rows(B, H, q, k, v, length[..., None] * LOG2E)
        out, inverse = v.new_empty(B * H, n, e), v.new_empty(B * H, n, 1)
        ctx.shape, ctx.met, first = (B, H), [], 0
        for q, k, v, length, o, over in slabs(*given, out, inverse, r=r):
            made = _Made(q, k, length, _maps(slice(first, first := first + len(q)), *weights))
            S, z, scale = v.new_zeros(len(q), r, e), v.new_zeros(len(q), 1, r), v.new_full((len(q), 1, r), LOWEST)
            met = []
            for at in groups_of(q, r):
                if any(ctx.needs_input_grad):
                    met.append((S, z, scale))
                here, inverses, _, (S, z, scale) = forward_from_logs(made, at, cut(v, *at), (S, z, scale))
                put(o, *at, here)
                put(over, *at, inverses)
            ctx.met.append(met)
        ctx.save_for_backward(*given, out, inverse, *weights)
        return out.unflatten(0, (B, H))

    @staticmethod
    def backward(ctx, dout):
        with as_given(dout):
            *given, out, inverse, query_weight, key_weight, own = ctx.saved_tensors
            (dout,) = in_rows(*ctx.shape, dout)
            grads, first, r = [torch.empty_like(t) for t in given], 0, own.shape[-1]
            for slab, met in zip(slabs(*given, dout, out, inverse, *grads, r=r), ctx.met, strict=True):
                q, k, v, length, do, o, over, dq, dk, dv, dl = slab
                maps = _maps(slice(first, first := first + len(q)), query_weight, key_weight, own)
                made = _Made(q, k, length, maps)
                R, t = v.new_zeros(len(q), r, v.shape[-1]), v.new_zeros(len(q), 1, r)
                for at, state in zip(reversed(groups_of(q, r)), reversed(met), strict=True):
                    above = upstream_of_logs(cut(do, *at), None, cut(o, *at), cut(over, *at))
                    da, db, dvs, R, t = backward_from_logs(made, at, cut(v, *at), above, state, R, t)
                    put(dq, *at, maps[0].pulled(da)[0])
                    for target, grad in zip((dk, dl), maps[1].pulled(db), strict=True):
                        put(target, *at, grad)
                    put(dv, *at, dvs)
            dq, dk, dv, dlength = (t.unflatten(0, ctx.shape) for t in grads)
            return dq, dk, dv, dlength[..., 0], None, None, None


class _Full(torch.autograd.Function):
    """Keeps its inputs, its output, the sums over all keys and their scales."""

    @staticmethod
    def forward(ctx, q, k, v, length, *weights):
        (B, H, n, _), e, r = q.shape, v.shape[-1], weights[0].shape[-1]
        given = in_rows(B, H, q, k, v, length[..., None] * LOG2E)
        S, z, s = v.new_zeros(B * H, r, e), v.new_zeros(B * H, 1, r), v.new_full((B * H, 1, r), LOWEST)
        out, inverse, first = v.new_empty(B * H, n, e), v.new_empty(B * H, n, 1), 0
        for q, k, v, length, S_, z_, s_, o, over in slabs(*given, S, z, s, out, inverse, r=r):
            of_queries, of_keys = _maps(slice(first, first := first + len(q)), *weights)
            for ks, vs, ls in blocks_of(k, v, length, r=r):
                y, fade = _more_keys(ks, ls, of_keys, s_)
                S_.mul_(fade.mT).baddbmm_(y.mT, vs)
                z_.mul_(fade).add_(y.sum(-2, keepdim=True))
            for qs, os, overs in blocks_of(q, o, over, r=r):
                x = _queries(qs, of_queries, s_)
                overs.copy_(inverse_of((x * z_).sum(-1, keepdim=True)))
                torch.mul(torch.bmm(x, S_), overs, out=os)
        ctx.shape = B, H
        ctx.save_for_backward(*given, S, z, s, out, inverse, *weights)
        return out.unflatten(0, (B, H))

    @staticmethod
    def backward(ctx, dout):
        with as_given(dout):
            return _Full._backward(ctx, dout)

    @staticmethod
    def _backward(ctx, dout):
        *kept, out, inverse, query_weight, key_weight, own = ctx.saved_tensors
        given, r, first = kept[:4], own.shape[-1], 0
        grads = [torch.empty_like(t) for t in given]
        (dout,) = in_rows(*ctx.shape, dout)
        g, c = upstream(dout, out, inverse)
        for q, k, v, length, S, z, s, g_, c_, dq, dk, dv, dl in slabs(*kept, g, c, *grads, r=r):
            of_queries, of_keys = _maps(slice(first, first := first + len(q)), query_weight, key_weight, own)
            R, t = torch.zeros_like(S), torch.zeros_like(z)
            for qs, gs, cs, dqs in blocks_of(q, g_, c_, dq, r=r):
                x = _queries(qs, of_queries, s)
                R.baddbmm_(x.mT, gs)
                t.baddbmm_(cs.mT, x)
                dqs.copy_(of_queries.pulled(torch.bmm(gs, S.mT).addcmul_(cs, z).mul_(x))[0])
            for ks, vs, ls, dks, dvs, dls in blocks_of(k, v, length, dk, dv, dl, r=r):
                y = of_keys.logs(ks).add_(ls).sub_(s).exp2_()
                dvs.copy_(torch.bmm(y, R))
                dlog = torch.bmm(vs, R.mT).add_(t).mul_(y)
                for target, grad in zip((dks, dls), of_keys.pulled(dlog), strict=True):
                    target.copy_(grad)
        dq, dk, dv, dlength = (t.unflatten(0, ctx.shape) for t in grads)
        return dq, dk, dv, dlength[..., 0], None, None, None


def _queries(x: Tensor, of: _Map, s: Tensor) -> Tensor:
    """Features of a block of queries, on the scales of the keys."""
    a = of.logs(x).add_(s)
    return a.sub_(a.amax(-1, keepdim=True)).exp2_()


def _more_keys(x: Tensor, length: Tensor, of: _Map, s: Tensor) -> tuple[Tensor, Tensor]:
    """Features of a block of keys, and what is left of the sums so far; the scales s are raised in place."""
    b = of.logs(x).add_(length)
    now = torch.maximum(s, b.amax(-2, keepdim=True))
    fade = (s - now).exp2_()
    s.copy_(now)
    return b.sub_(now).exp2_(), fade
