"""Both passes of linear attention in torch, a group of chunks at a time; reference.py has the formulas.

A group is a few chunks of all heads, as large as stays in the cache: features, products and quotient of it, and nothing
of size n·r or n·c in memory. One state a group is kept for the gradients, which make the rest of it again. A normaliser
as a value column would make products of odd width, a sixth slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.chunks import (
    Weights,
    blocks_of,
    chunk_states,
    chunks_of,
    cut,
    groups_of,
    in_rows,
    put,
    slabs,
)
from heedful.kernels.chunked_linear.features import LOG2E, exp_, features, pulled, turned
from heedful.kernels.dispatch import as_given

LEAST = {torch.float32: 2.0**-95, torch.float64: 2.0**-766}
"""A denominator below this, the 3/4 power of the least normal number, is nothing: gradients divide by it again."""


def full(q, k, v, S, z, scale, turns_q, turns_k, code, feature):
    """Every query sees every key of its segment: one state a segment; an initial one belongs to the first.

    The output, S, z and, of exp features, the scale (B, H, 1, r) of each feature in the last state.
    """
    if code is None or not code.numel() or int(code.max()) <= 0:
        return _segment(q, k, v, S, z, scale, turns_q, turns_k, code, feature)
    rows = []
    for b, row in enumerate(torch.maximum(code, -1 - code)):
        lengths = torch.unique_consecutive(row, return_counts=True)[1].tolist()
        tokens = [q, k, v, turns_q, turns_k]
        pieces = [[None] * len(lengths) if t is None else t[b : b + 1].split(lengths, 2) for t in tokens]
        codes = code[b : b + 1].split(lengths, 1)
        state: Any = [None if t is None else t[b : b + 1] for t in (S, z, scale)]
        parts = []
        for qs, ks, vs, t_q, t_k, here in zip(*pieces, codes, strict=True):
            given, before, base = state
            parts.append(_segment(qs, ks, vs, given, before, base, t_q, t_k, here, feature))
            state = [None if t is None else torch.zeros_like(t) for t in state[:2]] + [None]
        rows.append((torch.cat([part[0] for part in parts], 2), *parts[-1][1:]))
    return (*(None if t[0] is None else torch.cat(t) for t in zip(*rows, strict=True)),)


def _segment(q, k, v, S, z, scale, turns_q, turns_k, code, feature):
    """One segment of each row. exp features are on a scale of their own each: that of the largest key."""
    if feature != "exp":
        return *_Full.apply(q, k, v, S, z, None, None, turns_q, turns_k, code, feature), None
    most = k.detach().to(v.dtype)
    if code is not None:
        most = most.masked_fill((code < 0)[:, None, :, None], -torch.inf)
    most = most.amax(-2, keepdim=True) if k.shape[2] else S.new_full((*S.shape[:2], 1, S.shape[2]), -torch.inf)
    if scale is not None:
        most = torch.maximum(most, scale)
    most = torch.where(most.isfinite(), most, 0.0)
    if scale is not None:
        kept = (scale - most).exp()
        S, z = S * kept.mT, None if z is None else z * kept
    q, k = q.to(v.dtype) + most, k.to(v.dtype) - most
    top = q.detach().amax(-1)
    o, S, z = _Full.apply(q, k, v, S, z, top, torch.zeros_like(k[..., 0]), turns_q, turns_k, code, feature)
    return o if z is not None else o * top.exp()[..., None], S, z, most


def _weights(decay: Tensor | None, run: Tensor | None, a: int, z: int, c: int) -> Weights | None:
    """From decay and run (rows, n); None where every weight is 1."""
    if decay is None and run is None:
        return None
    W: Any = 1.0
    into: Any = 1.0
    leave: Any = 1.0
    keep: Any = 1.0
    if decay is not None:
        b = cut(decay, a, z, c).cumsum(-1)
        lower = torch.ones(c, c, dtype=torch.bool, device=b.device).tril()
        b = b * LOG2E
        W = torch.where(lower, b[..., :, None] - b[..., None, :], -torch.inf).exp2_()
        into, leave = b.exp2()[..., None], (b[..., -1:] - b).exp2_()[..., None]
        keep = b[..., -1, None, None].exp2()
    if run is not None:
        here = cut(run, a, z, c)
        last = here[:, -1:]
        before = torch.cat([run[:, a - 1 : a] if a else torch.zeros_like(run[:, :1]), last[: -len(run)]])
        W = W * (here[..., :, None] == here[..., None, :]).tril()
        into, leave = into * (here == before)[..., None], leave * (here == last)[..., None]
        keep = keep * (before == last)[..., None]
    return Weights(W, into, leave, keep)


def _masked(P: Tensor, w: Weights | None) -> Tensor:
    return P.tril_() if w is None else P.mul_(w.W)


def forward_group(xs, ys, vs, w: Weights | None, S, z):
    """Numerators of a group of chunks, the inverse of their normalisers, the state after it."""
    leaving = ys if w is None else ys * w.leave
    P = _masked(torch.bmm(xs, ys.mT), w)
    before, S = chunk_states(S, leaving, vs, w)
    o = torch.bmm(xs, before)
    if w is not None:
        o.mul_(w.into)
    o.baddbmm_(P, vs)
    if z is None:
        return o, None, S, None
    before, z = chunk_states(z, leaving, None, w)
    below = torch.bmm(xs, before.mT)
    below = (below if w is None else below.mul_(w.into)).add_(P.sum(-1, keepdim=True))
    return o, inverse_of(below), S, z


def backward_group(xs, ys, vs, gs, cs, w: Weights | None, met, R, t):
    """Gradients of a group's features and values, and of the state that it met, given those of the one after it."""
    leaving, entering = (ys, xs) if w is None else (ys * w.leave, xs * w.into)
    before, _ = chunk_states(met[0], leaving, vs, w)
    after, R = chunk_states(R, entering, gs, w, back=True)
    D = torch.bmm(gs, vs.mT)
    dx, dy, dvs = torch.bmm(gs, before.mT), torch.bmm(vs, after.mT), torch.bmm(ys, after)
    if cs is not None:
        before, _ = chunk_states(met[1], leaving, None, w)
        after, t = chunk_states(t, entering * cs, None, w, back=True)
        D.add_(cs)
        # Where there is nothing before a token its weight is 1, whatever q is: computed, this 0 is the rounding of a
        # difference, over a normaliser that may be small where features have signs.
        D[: len(met[1]), 0].masked_fill_((met[1] == 0).all(-1), 0)
        dx.addcmul_(cs, before)
        dy.add_(after)
    if w is not None:
        for part, weight in ((dx, w.into), (dy, w.leave), (dvs, w.leave)):
            part.mul_(weight)
    D = _masked(D, w)
    dx.baddbmm_(D, ys)
    dy.baddbmm_(D.mT, xs)
    dvs.baddbmm_(_masked(torch.bmm(xs, ys.mT), w).mT, gs)
    return dx, dy, dvs, R, t


def _forwards(q, k, v, turns, real, decay, run, S, z, out, inverse, *, met, feature):
    """Writes the output, the inverse of its normaliser and the states that groups meet; returns the last state."""
    for i, at in enumerate(groups_of(q, S.shape[-2])):
        xs, ys, vs, *_ = _operands(q, k, v, turns, real, at, feature)
        for kept, state in zip(met, (S, z), strict=False):
            kept[i] = state
        o, over, S, z = forward_group(xs, ys, vs, _weights(decay, run, *at), S, z)
        if inverse is not None:
            put(inverse, *at, over)
        put(out, *at, o, over)
    return S, z


def _backwards(q, k, v, turns, real, decay, run, dout, out, inverse, R, t, dq, dk, dv, change, *, met, feature):
    """Writes the gradients, given those of the output and of the last state (R, t).

    Returns those of the first state. Within a group the states are made again from the one that it met.
    """
    for i, at in reversed(list(enumerate(groups_of(q, R.shape[-2])))):
        xs, ys, vs, turns_s, real_s = _operands(q, k, v, turns, real, at, feature)
        gs, cs = upstream(*(None if x is None else cut(x, *at) for x in (dout, out, inverse)))
        w = _weights(decay, run, *at)
        dx, dy, dvs, R, t = backward_group(xs, ys, vs, gs, cs, w, [kept[i] for kept in met], R, t)
        if change is not None:
            # differences of large sums: float64 keeps them over long sequences, and they are n numbers a head
            put(change, *at, (xs.double() * dx - ys.double() * dy).sum(-1))
        put(dq, *at, pulled(dx, xs, feature, turns_s, real_s))
        put(dk, *at, pulled(dy, ys, feature, turns_s, real_s))
        put(dv, *at, dvs)
    return R, t


def _operands(q, k, v, turns, real, at, feature):
    """Features of a group's queries and keys, its values, how they are turned, and which of its tokens are real."""
    v, turns, real = (None if t is None else cut(t, *at) for t in (v, turns, real))
    x, y = (_cut_features(t, turns, real, at, feature, v.dtype) for t in (q, k))
    return x, y, v, turns, real


def _cut_features(t, turns, real, at, feature, dtype):
    """`features` of `cut`, where the first pass is the one that puts chunks side by side."""
    if feature != "elu1":
        return features(cut(t, *at), feature, None, real, dtype, turns)
    here = chunks_of(t, *at).to(dtype)
    x = exp_(torch.clamp(here, max=0, out=here.new_empty(here.shape))).add_(here.relu()).flatten(0, 1)
    return turned(x if real is None else torch.where(real, x, 0.0), turns)


def inverse_of(below: Tensor) -> Tensor:
    """1 over it, zero where it is nothing."""
    return torch.where(below.abs() >= LEAST[below.dtype], below.reciprocal(), 0.0)


def _tokens(code, shift_q, shift_k):
    """What features need to know of tokens, (·, ·, n, 1)."""
    real = None if code is None else (code >= 0)[:, None, :, None]
    return *(None if s is None else s[..., None] for s in (shift_q, shift_k)), real


def upstream(dout, out, inverse):
    """Gradients of numerators and normalisers, o = num / den: do / den and −do·o / den."""
    if inverse is None:
        return dout, None
    return dout * inverse, (dout * out).sum(-1, keepdim=True).mul_(-inverse)


def _joined(states, otherwise):
    """Those of all slabs; the other ones where there is no slab, as no row."""
    parts = zip(*states, strict=True) if states else ([t] for t in otherwise)
    return [None if t[0] is None else torch.cat(list(t)) for t in parts]


class _Full(torch.autograd.Function):
    """out = x S / (x·z) with S and z the sums over all keys; features are made block by block, and again."""

    @staticmethod
    def forward(ctx, q, k, v, S, z, shift_q, shift_k, turns_q, turns_k, code, feature):
        (B, H, n, _), e, wide = q.shape, v.shape[-1], v.dtype
        tokens = q, k, v, turns_q, turns_k, *_tokens(code, shift_q, shift_k)
        given = in_rows(B, H, *tokens, S.clone(), None if z is None else z.clone())
        out, inverse = v.new_empty(B * H, n, e), None if z is None else v.new_empty(B * H, n, 1)
        r = S.shape[-2]
        for q, k, v, t_q, t_k, s_q, s_k, real, S, z, o, over in slabs(*given, out, inverse, r=r):
            for ks, vs, turns, s, real_s in blocks_of(k, v, t_k, s_k, real, r=r):
                y = features(ks, feature, s, real_s, wide, turns)
                S.baddbmm_(y.mT, vs)
                if z is not None:
                    z.add_(y.sum(-2, keepdim=True))
            for qs, os, overs, turns, s, real_s in blocks_of(q, o, over, t_q, s_q, real, r=r):
                x = features(qs, feature, s, real_s, wide, turns)
                if z is None:
                    os.copy_(x @ S)
                else:
                    overs.copy_(inverse_of((x * z).sum(-1, keepdim=True)))
                    torch.mul(x @ S, overs, out=os)
        ctx.shape, ctx.feature = (B, H), feature
        ctx.save_for_backward(*given, out, inverse)
        return tuple(None if t is None else t.unflatten(0, (B, H)) for t in (out, *given[-2:]))

    @staticmethod
    def backward(ctx, dout, R, t):
        with as_given(dout):
            return _Full._backward(ctx, dout, R, t)

    @staticmethod
    def _backward(ctx, dout, R, t):
        *given, out, inverse = ctx.saved_tensors
        dout, R, t = in_rows(*ctx.shape, dout, R.clone(), None if t is None else t.clone())
        g, c = upstream(dout, out, inverse)
        grads = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in given[:3]]
        r, feature = R.shape[-2], ctx.feature
        for rows in slabs(*given, g, c, R, t, *grads, r=r):
            q, k, v, turns_q, turns_k, s_q, s_k, real, S, z, g_, c_, R_, t_, dq, dk, dv = rows
            for qs, gs, cs, d, turns, s, real_s in blocks_of(q, g_, c_, dq, turns_q, s_q, real, r=r):
                x = features(qs, feature, s, real_s, v.dtype, turns)
                R_.baddbmm_(x.mT, gs)
                dx = gs @ S.mT
                if c_ is not None:
                    t_.add_((x * cs).sum(-2, keepdim=True))
                    dx.addcmul_(cs, z)
                d.copy_(pulled(dx, x, feature, turns, real_s))
            for ks, vs, d, dvs, turns, s, real_s in blocks_of(k, v, dk, dv, turns_k, s_k, real, r=r):
                y = features(ks, feature, s, real_s, v.dtype, turns)
                dvs.copy_(y @ R_)
                dy = vs @ R_.mT
                if t_ is not None:
                    dy.add_(t_)
                d.copy_(pulled(dy, y, feature, turns, real_s))
        return *(None if s is None else s.unflatten(0, ctx.shape) for s in (*grads, R, t)), *[None] * 6


class Causal(torch.autograd.Function):
    """The two walks joined: keeps its inputs, its output and a state a group, nothing of size n·c."""

    @staticmethod
    def forward(ctx, q, k, v, decay, S, z, turns, code, feature):
        (B, H, n, _), e, r = q.shape, v.shape[-1], S.shape[-2]
        run = None if code is None else torch.maximum(code, -1 - code)[:, None]
        real = None if code is None else (code >= 0)[:, None, :, None]
        given = in_rows(B, H, q, k, v, turns, real, decay, run)
        first, learns = in_rows(B, H, S, z), any(ctx.needs_input_grad)
        out, inverse = v.new_empty(B * H, n, e), v.new_empty(B * H, n, 1) if learns and z is not None else None
        ctx.met, last = [], []
        for slab in slabs(*given, *first, out, inverse, r=r):
            states = [t for t in slab[7:9] if t is not None]
            met = [t.new_empty(len(groups_of(slab[0], r)), *t.shape) for t in states] if learns else []
            last.append(_forwards(*slab, met=met, feature=feature))
            ctx.met.append(met)
        last = _joined(last, first)
        ctx.shape, ctx.feature = (B, H), feature
        ctx.save_for_backward(*given, out, inverse, *last)
        return tuple(None if t is None else t.unflatten(0, (B, H)) for t in (out, *last))

    @staticmethod
    def backward(ctx, dout, R, t):
        with as_given(dout):
            return Causal._backward(ctx, dout, R, t)

    @staticmethod
    def _backward(ctx, dout, R, t):
        *given, out, inverse, S, z = ctx.saved_tensors
        dout, R, t = in_rows(*ctx.shape, dout, R, t)
        grads = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in given[:3]]
        change = dout.new_empty(dout.shape[:2], dtype=torch.float64) if ctx.needs_input_grad[3] else None
        parts = slabs(*given, dout, out, inverse, R, t, *grads, change, r=R.shape[-2])
        firsts = [_backwards(*slab, met=met, feature=ctx.feature) for slab, met in zip(parts, ctx.met, strict=True)]
        first = _joined(firsts, (R, t))
        if change is not None:
            end = (S.double() * R).sum((-2, -1))
            end = end if t is None else end + (z.double() * t).sum((-2, -1))
            change = (change.flip(-1).cumsum(-1).flip(-1) + end[..., None]).to(dout.dtype)
        every = (*grads, change, *first)
        return *(None if s is None else s.unflatten(0, ctx.shape) for s in every), *[None] * 3
