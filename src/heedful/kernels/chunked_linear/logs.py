"""Both passes of causal linear attention from logarithms of features, in torch.

    definition  w_ij = Σ_r exp(a_ir + b_jr),  o_i = Σ_{j≤i} w_ij v_j / Σ_{j≤i} w_ij,  lse_i = log Σ_{j≤i} w_ij
    state       a scale for each feature, c_r = max_j b_jr over the keys so far:
                S_r = Σ_j exp(b_jr − c_r) v_j,  z_r = Σ_j exp(b_jr − c_r) ≥ 1
    chunk       queries exp(a + c − M_i) ≤ 1 with M_i = max_r (a_ir + c_r), keys exp(b − c), c before the chunk:
                the state alone makes the normaliser ≥ 1, and nothing looks ahead
    rare rows   a key of the chunk may raise a feature by more than the float type holds, and in a segment that starts
                inside the chunk the state says nothing. Rows that see such a key, or whose normaliser is faint, are
                taken one by one: exp(a_ir + b_jr − top_i) for keys of the chunk, exp(a_ir + c_r − top_i) for the state
    decay       cumsum D of log_decay inside the chunk: a_i + D_i for a, b_j − D_j for b
    gradients   dA_ir = Σ_j w_ijr D_ij + …, as in reference.py, with logarithms for features: dlog = φ ∘ dφ

A rare row takes c·r exponentials, so the worst case is n·c·r. Where the keys so far span the features, there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.features import exp_
from heedful.kernels.chunked_linear.groups import Weights, chunk_states, chunks_of, cut, groups_of, in_rows, put, slabs
from heedful.kernels.dispatch import as_given

LOWEST = -1e30
"""The scale of a feature that no key has had yet: below any logarithm that there is, and finite."""
RISE = {torch.float32: 40.0, torch.float64: 350.0}
"""How far a key may lie above the scale of its chunk: half of the exponents that there are."""
FAINT = {torch.float32: 2.0**-63, torch.float64: 2.0**-511}
"""A normaliser below this may have lost terms that matter: the root of the least normal number."""
ROWS = 2**24
"""Exponentials of rare rows at once."""


class Logs(Protocol):
    """Logarithms of features, made anew at each call: (chunks · rows, c, r) of the tokens of `at`."""

    binary: bool
    """Whether they are to base 2."""

    def queries(self, at: tuple[int, int, int]) -> Tensor: ...

    def keys(self, at: tuple[int, int, int]) -> Tensor:
        """−∞ where a token is not real."""
        ...


class Where(NamedTuple):
    """Of the chunks of a group, where there are segments: runs of tokens, which see the state, which are in the last.

    `same` (g, c, c): pairs of one run. `carries` (g, 1, 1): the run of the state is that of the last token.
    """

    same: Tensor
    first: Tensor
    sees_state: Tensor
    in_last: Tensor
    carries: Tensor
    real: Tensor


class Group(NamedTuple):
    """What both passes need of a group of chunks."""

    x: Tensor
    """Queries on the scale before their chunk, (g, c, r); zero in rare rows."""
    across: Tensor
    """The same as they meet the state: zero where a query does not see it, rare rows on scales of their own."""
    y: Tensor
    leaving: Tensor
    """Keys on the scale before their chunk, and on that after it."""
    shift: Tensor
    """M, (g, c, 1)."""
    weights: Weights
    before: Tensor
    """The scale before each chunk, (g, 1, r)."""
    hot: Tensor | None
    """(g, c, 1): rows that see a key far above the scale; None where there are none."""
    scale: Tensor
    """After the group, (rows, 1, r)."""


def where_of(run: Tensor | None, real: Tensor | None, a: int, z: int, c: int) -> Where | None:
    """From runs (rows, n) and real (rows, n, 1)."""
    if run is None or real is None:
        return None
    here = cut(run, a, z, c)
    last = here[:, -1:]
    before = torch.cat([run[:, a - 1 : a] if a else torch.zeros_like(run[:, :1]), last[: -len(run)]])
    return Where(
        (here[..., :, None] == here[..., None, :]),
        (here[:, :1] == before)[..., None],
        (here == before)[..., None],
        (here == last)[..., None],
        (before == last)[..., None],
        cut(real, a, z, c),
    )


def _exp(x: Tensor, binary: bool) -> Tensor:
    """In place, of logarithms to base 2 or e."""
    return x.exp2_() if binary else exp_(x)


def _make(logs: Logs, at, scale: Tensor, total: Tensor | None, where: Where | None) -> Group:
    """Features of a group: `total` (g, 1, 1) is the decay of each chunk, `scale` (rows, 1, r) that before the group."""
    x, b = logs.queries(at), logs.keys(at)
    rows = len(scale)
    most = b.amax(-2, keepdim=True)
    of_last = most if where is None else b.masked_fill(~where.in_last, -torch.inf).amax(-2, keepdim=True)
    scales = [scale]
    for chunk in range(len(b) // rows):
        there = slice(chunk * rows, (chunk + 1) * rows)
        old = scales[-1] if where is None else scales[-1].masked_fill(~where.carries[there], LOWEST)
        new = torch.maximum(old, of_last[there])
        scales.append(new if total is None else new + total[there])
    before, after = torch.cat(scales[:-1]), torch.cat(scales[1:])
    known = before > LOWEST / 2 if where is None else (before > LOWEST / 2) & where.first
    base = torch.where(known, before, b[:, :1])  # at the start of a segment that of its first key
    base = torch.where(base > LOWEST / 2, base, 0.0)
    x.add_(base)
    shift = x.amax(-1, keepdim=True)
    _exp(x.sub_(shift), logs.binary)
    y, hot, limit = b - base, None, RISE[b.dtype]
    if bool(((most - base) > limit).any()):
        hot = y.amax(-1, keepdim=True).cummax(-2).values > limit
        y.clamp_(max=limit)
    _exp(y, logs.binary)
    end = after if total is None else after - total
    leaving, keep, across = b.sub_(end), before - end, x
    if where is not None:
        leaving.masked_fill_(~where.in_last, -torch.inf)
        keep = keep.masked_fill_(~where.carries, -torch.inf)
        across = x * where.sees_state
    leaving, keep = _exp(leaving, logs.binary), _exp(keep, logs.binary)
    return Group(x, across, y, leaving, shift, Weights(1.0, 1.0, 1.0, keep), before, hot, scales[-1])


def _met(S: Tensor, z: Tensor, group: Group, vs: Tensor):
    """The states that the chunks of a group meet, and the one after it."""
    keep = group.weights
    before, S = chunk_states(S, group.leaving, vs, keep._replace(keep=keep.keep.mT))
    sums, z = chunk_states(z, group.leaving, None, keep)
    return before, sums, S, z


def _products(group: Group, where: Where | None) -> Tensor:
    P = torch.bmm(group.x, group.y.mT).tril_()
    return P if where is None else P.mul_(where.same)


def _rare(logs: Logs, at, group: Group, where: Where | None, rare: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rare rows at a time: chunk, token (f,); exp(a + b − top) (f, c, r), exp(a + before − top); top (f, 1)."""
    a, b = logs.queries(at), logs.keys(at)
    chunk, token = rare[..., 0].nonzero(as_tuple=True)
    c = b.shape[1]
    later = torch.ones(c, c, dtype=torch.bool, device=b.device).triu(1)
    for p, i in zip(*(t.split(max(1, ROWS // (c * b.shape[-1]))) for t in (chunk, token)), strict=True):
        own = a[p, i]
        unseen = later[i] if where is None else later[i] | ~where.same[p, i]
        inside = (b[p] + own[:, None]).masked_fill_(unseen[..., None], -torch.inf)
        state = own + group.before[p, 0]
        if where is not None:
            state = state.masked_fill_(~where.sees_state[p, i], -torch.inf)
        top = torch.maximum(inside.amax((1, 2)), state.amax(-1))[:, None]
        top = torch.where(top > LOWEST / 2, top, 0.0)
        yield p, i, _exp(inside.sub_(top[..., None]), logs.binary), _exp(state.sub_(top), logs.binary), top


def forward_group(logs: Logs, at, vs, state, total=None, where=None):
    """Outputs of a group of chunks, 1 / normaliser (negative in rare rows), lse, and the state after it."""
    S, z, scale = state
    group = _make(logs, at, scale, total, where)
    P = _products(group, where)
    before, sums, S, z = _met(S, z, group, vs)
    across, shift = group.across, group.shift
    den = torch.bmm(across, sums.mT).add_(P.sum(-1, keepdim=True))
    rare = den < FAINT[den.dtype]
    if group.hot is not None:
        rare |= group.hot
    if where is not None:
        rare &= where.real
    if some := bool(rare.any()):
        across = across.clone() if across is group.x else across
        for p, i, inside, to_state, top in _rare(logs, at, group, where, rare):
            P[p, i], across[p, i], shift[p, i] = inside.sum(-1), to_state, top
        den = torch.bmm(across, sums.mT).add_(P.sum(-1, keepdim=True))
    over = torch.where(den > 0, den.reciprocal(), 0.0)
    if where is not None:
        over = torch.where(where.real, over, 0.0)
    out = torch.bmm(across, before).baddbmm_(P, vs).mul_(over)
    lse = torch.where(over > 0, (den.log2() if logs.binary else den.log()).add_(shift), -torch.inf)
    return out, torch.where(rare, -over, over) if some else over, lse, (S, z, group.scale)


def backward_group(logs: Logs, at, vs, upstream, met, R, t, total=None, where=None):
    """Gradients of a group's logarithms and values, and of the state that it met."""
    gs, cs, lse, rare = upstream
    S, z, scale = met
    group = _make(logs, at, scale, total, where)
    x, across, y, leaving = group.x, group.across, group.y, group.leaving
    before, sums, _, _ = _met(S, z, group, vs)
    parts = []
    if rare is not None:
        x = x.masked_fill(rare, 0)
        across = across.masked_fill(rare, 0)
        parts = list(_rare(logs, at, group, where, rare))
        for p, i, _, state, _ in parts:
            across[p, i] = state
    keep = group.weights
    after, R = chunk_states(R, across, gs, keep._replace(keep=keep.keep.mT), back=True)
    ends, t = chunk_states(t, across * cs, None, keep, back=True)
    D = torch.bmm(gs, vs.mT).add_(cs)
    # the first token of all has a weight of 1, whatever q is: computed, this 0 would be the rounding of a difference
    alone = 0.0 if lse is None else lse[: len(z), 0]
    D[: len(z), 0] = torch.where((z == 0).all(-1), alone, D[: len(z), 0])
    D.tril_()
    P = torch.bmm(x, y.mT).tril_()
    if where is not None:
        D.mul_(where.same)
        P.mul_(where.same)
    for p, i, inside, *_ in parts:
        P[p, i] = inside.sum(-1)
    dvs = torch.bmm(leaving, after).baddbmm_(P.mT, gs)
    da = torch.bmm(gs, before.mT).addcmul_(cs, sums)
    da = da.baddbmm_(D, y).mul_(x) if across is x else da.mul_(across).addcmul_(torch.bmm(D, y), x)
    db = torch.bmm(vs, after.mT).add_(ends).mul_(leaving).addcmul_(torch.bmm(D.mT, x), y)
    for p, i, inside, *_ in parts:
        pull = inside.mul_(D[p, i][..., None])
        da[p, i] += pull.sum(1)
        db.index_add_(0, p, pull)
    return da, db, dvs, R, t


class Upstream(NamedTuple):
    """Gradients of numerators and of normalisers, do / den and (dlse − do·o) / den, with dlse / den apart.

    `rare` (g, c, 1) says which rows are, or None where none is.
    """

    g: Tensor
    c: Tensor
    lse: Tensor | None
    rare: Tensor | None


def upstream(dout, dlse, out, inverse) -> Upstream:
    over, rare = inverse.abs(), inverse < 0
    c = (dout * out).sum(-1, keepdim=True).mul_(-over)
    if dlse is not None:
        dlse = dlse * over
        c.add_(dlse)
    return Upstream(dout * over, c, dlse, rare if bool(rare.any()) else None)


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
                found = forward_group(logs, at, cut(v, *at), state, total, where_of(run, real, *at))
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
                above = upstream(*(cut(x, *at) for x in (do, dl, o, over)))
                da, db, dvs, R_, t_ = backward_group(
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
