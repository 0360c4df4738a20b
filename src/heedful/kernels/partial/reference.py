"""A part of a softmax: its own output and the logarithm of its normaliser, both with gradients.

    forward     S = scale · Q Kᵀ,  lse = log Σ_visible exp(S),  O = exp(S − lse) V          tile by tile
    backward    P = exp(S − lse),  dV += Pᵀ dO,  dS = P ∘ (dO Vᵀ − dO·O + dlse)
                dQ = scale · dS K,  dK += scale · dSᵀ Q
    join        o = Σ_p w_p o_p,  w = softmax over the parts of lse_p

A query that sees nothing has O = 0 and lse = −∞. Results are in float32 or better, so that joining adds no rounding.
"""

from __future__ import annotations

from math import inf

import torch
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.reference import Work, add_at
from heedful.kernels.blocked.tiles import pick
from heedful.kernels.dispatch import as_given, uncompiled
from heedful.patterns import Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Float, Tensor

NOTHING = -1e30  # far below any logarithm but finite, so that gradients of absent parts are 0 and not NaN


@uncompiled
def attend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> tuple[Float[Tensor, "*b n e"], Float[Tensor, "*b n"]]:
    """softmax(S) V over the pattern, and log Σ exp(S) of each row.

    >>> q, k, v = torch.randn(3, 5, 4).unbind()
    >>> from heedful.patterns import Full
    >>> _, lse = attend(q, k, v, Full(), None, 0.5)
    >>> torch.allclose(lse, (0.5 * q @ k.mT).logsumexp(-1))
    True
    """
    if segments is not None:  # values at padding, even NaN, must not reach outputs or gradients
        layout = resolve(segments, q.shape[-2], k.shape[-2])
        q = q.masked_fill(layout.query_ids[..., None] < 0, 0)
        k, v = (x.masked_fill(layout.key_ids[..., None] < 0, 0) for x in (k, v))
    return _Part.apply(q, k, v, pattern, segments, scale)


def objections(q, k, v, pattern, segments, scale) -> list[str]:
    """Empty: this backend takes all inputs."""
    return []


def join(*parts: tuple[Float[Tensor, "*#b n e"], Float[Tensor, "*#b n"]]) -> Float[Tensor, "*b n e"]:
    """One softmax from parts over disjoint keys; zeros if no part has a key."""
    if len(parts) == 1:
        return parts[0][0]
    logs = torch.stack(torch.broadcast_tensors(*(lse for _, lse in parts)))
    weights = logs.masked_fill(logs == -inf, NOTHING).softmax(0)[..., None]
    return torch.stack([w * out for w, (out, _) in zip(weights, parts, strict=True)]).sum(0)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pattern, segments, scale):
        work = Work(q, k, v, None, pattern, segments, scale)
        out = work.zeros(work.n, v.shape[-1])
        lse = work.zeros(work.n).fill_(-inf)
        for tile in work.tiles():
            s = tile.lower(work.scores(tile))
            top = s.amax(-1, keepdim=True)
            top = top.masked_fill_(top == -inf, 0)
            total = s.sub_(top).exp_().sum(-1, keepdim=True)
            part = s @ work.cols_of(2, tile)
            pick(out, tile.batch)[..., tile.rows, :] = part.div_(total.clamp(min=torch.finfo(s.dtype).tiny))
            pick(lse, tile.batch)[..., tile.rows] = total.log_().add_(top)[..., 0]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = pattern, segments, scale
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        with as_given(dout):
            return _Part._backward(ctx, dout, dlse)

    @staticmethod
    def _backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        work = Work(q, k, v, None, *ctx.rest)
        wants_q, wants_k = ctx.needs_input_grad[:2]
        dq, dk, dv = (
            q.new_zeros(x.shape, dtype=work.dtype) if want else None
            for x, want in zip(work.inputs, ctx.needs_input_grad[:3], strict=True)
        )
        dout = dout.contiguous()
        rest = dlse[..., None] - (dout * out).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -inf, 0)[..., None]
        for tile in work.tiles():
            here, below, more = (pick(x, tile.batch)[..., tile.rows, :] for x in (dout, lse, rest))
            weights = tile.lower(work.scores(tile)) - below
            weights.exp_()
            if dv is not None:
                add_at(pick(dv, tile.batch), tile.cols, weights.mT @ here)
            if not (wants_q or wants_k):
                continue
            ds = (here @ work.cols_of(2, tile).mT).add_(more).mul_(weights).mul_(work.scale)
            if dq is not None:
                target = pick(dq, tile.batch)[..., tile.rows, :]
                target += (ds @ work.cols_of(1, tile)).sum_to_size(target.shape)
            if dk is not None:
                add_at(pick(dk, tile.batch), tile.cols, ds.mT @ work.rows_of(0, tile))
        grads = (
            None if g is None else g.reshape(x.shape).to(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)
        )
        return *grads, None, None, None
