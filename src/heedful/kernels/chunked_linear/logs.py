"""Both passes of causal linear attention from logarithms of features, in torch; chunks.py has the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.chunks import (
    LOWEST,
    backward_from_logs,
    chunks_of,
    cut,
    forward_from_logs,
    groups_of,
    in_rows,
    put,
    slabs,
    upstream_of_logs,
    where_of,
)
from heedful.kernels.dispatch import as_given


class _Given:
    """Logarithms as they lie in memory, (rows, n, r), with the decay inside each chunk."""

    binary = False

    def __init__(self, q: Tensor, k: Tensor, real: Tensor | None, decay: Tensor | None, dtype: torch.dtype):
        self.q, self.k, self.real, self.decay, self.dtype = q, k, real, decay, dtype

    def clock(self, at) -> Tensor | None:
        """D (g, c, 1)."""
        return None if self.decay is None else cut(self.decay, *at).cumsum(1)

    def queries(self, at):
        return self._cut(self.q, at, 1)

    def keys(self, at):
        x = self._cut(self.k, at, -1)
        return x if self.real is None else x.masked_fill_(~cut(self.real, *at), -torch.inf)

    def _cut(self, x, at, sign) -> Tensor:
        here = chunks_of(x, *at)
        logs = torch.empty(here.shape, dtype=self.dtype, device=x.device).copy_(here).flatten(0, 1)
        if self.real is not None:
            logs.masked_fill_(~cut(self.real, *at), 0.0)
        clock = self.clock(at)
        return logs if clock is None else logs.add_(clock, alpha=sign)


class CausalLogs(torch.autograd.Function):
    """o and lse from log φ of queries and keys; S, z and their scale (B, H, 1, r) after the last token.

    Keeps its inputs, its output and a state a group. Gradients go through o, lse, S and z, not through the scale.
    """

    @staticmethod
    def forward(ctx, q, k, v, decay, S, z, scale, code):
        (B, H, n, r), e, wide = q.shape, v.shape[-1], v.dtype
        run = None if code is None else torch.maximum(code, -1 - code)[:, None]
        real = None if code is None else (code >= 0)[:, None, :, None]
        decay = None if decay is None else decay[..., None]
        given = in_rows(B, H, q, k, v, decay, run, real)
        out, inverse, lse = v.new_empty(B * H, n, e), v.new_empty(B * H, n, 1), v.new_empty(B * H, n, 1)
        ctx.met, last = [], []
        for slab in slabs(*given, out, inverse, lse, *in_rows(B, H, S, z, scale), r=r):
            q, k, v, decay, run, real, o, over, logs_of_sums = slab[:9]
            logs, met, state = _Given(q, k, real, decay, wide), [], tuple(slab[9:])
            for at in groups_of(q, r):
                met.append(state)
                clock = logs.clock(at)
                total = None if clock is None else clock[:, -1:]
                found = forward_from_logs(logs, at, cut(v, *at), state, total, where_of(run, real, *at))
                for there, x in zip((o, over, logs_of_sums), found[:3], strict=True):
                    put(there, *at, x)
                state = found[3]
            last.append(state)
            ctx.met.append(met if any(ctx.needs_input_grad) else [])
        after = [torch.cat(t).unflatten(0, (B, H)) for t in zip(*last, strict=True)] if last else [S, z, scale]
        lse = lse.unflatten(0, (B, H))[..., 0]
        after[2] = torch.where(after[2] > LOWEST / 2, after[2], 0.0)
        ctx.shape = B, H
        ctx.save_for_backward(*given, out, inverse, *after[:2])
        ctx.mark_non_differentiable(after[2])
        return out.unflatten(0, (B, H)), lse, *after

    @staticmethod
    def backward(ctx, dout, dlse, R, t, _scale):
        with as_given(dout):
            return CausalLogs._backward(ctx, dout, dlse, R, t)

    @staticmethod
    def _backward(ctx, dout, dlse, R, t):
        *given, out, inverse, S, z = ctx.saved_tensors
        (B, H), wide = ctx.shape, dout.dtype
        dout, dlse, R, t = in_rows(B, H, dout, dlse[..., None], R, t)
        grads = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in given[:3]]
        change = dout.new_empty(dout.shape[:2], dtype=torch.float64) if ctx.needs_input_grad[3] else None
        firsts: list[Any] = []
        parts = slabs(*given, dout, dlse, out, inverse, *grads, change, R, t, r=R.shape[-2])
        for slab, met in zip(parts, ctx.met, strict=True):
            q, k, v, decay, run, real, do, dl, o, over, dq, dk, dv, gains, R_, t_ = slab
            logs = _Given(q, k, real, decay, wide)
            for at, state in zip(reversed(groups_of(q, R.shape[-2])), reversed(met), strict=True):
                clock = logs.clock(at)
                total = None if clock is None else clock[:, -1:]
                above = upstream_of_logs(*(cut(x, *at) for x in (do, dl, o, over)))
                da, db, dvs, R_, t_ = backward_from_logs(
                    logs, at, cut(v, *at), above, state, R_, t_, total, where_of(run, real, *at)
                )
                if gains is not None:
                    put(gains, *at, da.sum(-1, dtype=torch.float64) - db.sum(-1, dtype=torch.float64))
                for there, x in zip((dq, dk, dv), (da, db, dvs), strict=True):
                    put(there, *at, x)
            firsts.append((R_, t_))
        first = [torch.cat(x).unflatten(0, (B, H)) for x in zip(*firsts, strict=True)] if firsts else [R, t]
        if change is not None:
            end = (S.flatten(0, 1).double() * R).sum((-2, -1)) + (z.flatten(0, 1).double() * t).sum((-2, -1))
            change = (change.flip(-1).cumsum(-1).flip(-1) + end[..., None]).to(wide).unflatten(0, (B, H))
        dq, dk, dv = (x.unflatten(0, (B, H)) for x in grads)
        return dq, dk, dv, change, *first, None, None
