"""Chunks of tokens: how they are cut, the states between them, and a group of chunks from logarithms of features.

A group is a few chunks of all heads, as large as stays in the cache. Causal attention from logarithms of features:

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
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.features import exp_

CHUNK = 32
GROUP = 8 * CHUNK
CACHED = 2**18
"""Tokens a chunk; tokens of a head that are worked on at once, at least; numbers of a tensor that stay in the cache."""
LOWEST = -1e30
"""The scale of a feature that no key has had yet: below any logarithm that there is, and finite."""
RISE = {torch.float32: 40.0, torch.float64: 350.0}
"""How far a key may lie above the scale of its chunk: half of the exponents that there are."""
FAINT = {torch.float32: 2.0**-63, torch.float64: 2.0**-511}
"""A normaliser below this may have lost terms that matter: the root of the least normal number."""
ROWS = 2**24
"""Exponentials of rare rows at once."""


def groups_of(x: Tensor, r: int | None = None) -> list[tuple[int, int, int]]:
    """(first token, end, tokens a chunk) of what is worked on at once: whole chunks, then what remains.

    r is the number of features where it is not the width of x.
    """
    n = x.shape[1]
    whole, size = n // CHUNK * CHUNK, _group(x, r)
    groups = [(a, min(a + size, whole), CHUNK) for a in range(0, whole, size)]
    return groups if n == whole else [*groups, (whole, n, n - whole)]


def slabs(*tensors: Tensor | None, r: int | None = None) -> Iterator[list]:
    """Of tensors (rows, …): the rows that walk together."""
    first = tensors[0]
    assert first is not None
    size = max(1, _at_once(first, r) // GROUP)
    for a in range(0, len(first), size):
        yield [None if t is None else t[a : a + size] for t in tensors]


def _at_once(x: Tensor, r: int | None) -> int:
    """Tokens of all rows together; it takes many more to keep a GPU busy."""
    return CACHED // max(1, x.shape[-1] if r is None else r) * (1 if x.device.type == "cpu" else 64)


def _group(x: Tensor, r: int | None) -> int:
    """Tokens of each row."""
    return max(GROUP, _at_once(x, r) // max(1, len(x)) // CHUNK * CHUNK)


def chunks_of(t: Tensor, a: int, z: int, c: int) -> Tensor:
    """(rows, n, ·) → (chunks, rows, c, ·), a view: the chunks of [a, z) one after the other, each of all rows."""
    return t[:, a:z].unflatten(1, (-1, c)).transpose(0, 1)


def cut(t: Tensor, a: int, z: int, c: int) -> Tensor:
    """(rows, n, ·) → (chunks · rows, c, ·), side by side in memory."""
    return chunks_of(t, a, z, c).flatten(0, 1)


def put(t: Tensor, a: int, z: int, c: int, chunks: Tensor, times: Tensor | None = None) -> None:
    """The way back, multiplied on it."""
    there, chunks = chunks_of(t, a, z, c), chunks.unflatten(0, (-1, len(t)))
    if times is None:
        there.copy_(chunks)
    else:
        torch.mul(chunks, times.unflatten(0, (-1, len(t))), out=there)


def blocks_of(*tensors: Tensor | None, r: int | None = None) -> Iterator[list]:
    """Of tensors (rows, n, ·): a group of tokens at a time."""
    first = tensors[0]
    assert first is not None
    size = _group(first, r)
    for a in range(0, first.shape[1], size):
        yield [None if t is None else t[:, a : a + size] for t in tensors]


class Weights(NamedTuple):
    """Of each chunk, see the head of reference.py."""

    W: Any
    into: Any
    leave: Any
    keep: Any


def chunk_states(
    S: Tensor, y: Tensor, u: Tensor | None, w: Weights | None, *, back: bool = False
) -> tuple[Tensor, Tensor]:
    """The state that each chunk meets, S being the first, and the one after all: a chunk adds yᵀu, or Σ y without u.

    Backwards the last chunk comes first.
    """
    chunks = len(y) // len(S)
    S_ = S.new_empty(chunks + 1, *S.shape)
    S_[-1 if back else 0] = S
    added = (S_[:-1] if back else S_[1:]).flatten(0, 1)
    _ = torch.sum(y, -2, keepdim=True, out=added) if u is None else torch.bmm(y.mT, u, out=added)
    keep = [None] * chunks if w is None else w.keep.unflatten(0, (chunks, -1)).unbind()
    steps = [*zip(pairwise(S_.unbind()), keep, strict=True)]
    for (one, next_), kept in reversed(steps) if back else steps:
        old, new = (next_, one) if back else (one, next_)
        _ = new.add_(old) if kept is None else new.addcmul_(old, kept)
    return (S_[1:] if back else S_[:-1]).flatten(0, 1), S_[0 if back else -1]


def repeat(x, heads):
    """Each key head once for every query head that uses it, as a view where nothing has to be repeated."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def in_rows(B, H, *tensors):
    """(B, H, …) → (B·H, …)"""
    return [None if t is None else t.expand(B, H, *t.shape[2:]).flatten(0, 1) for t in tensors]


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


def forward_from_logs(logs: Logs, at, vs, state, total=None, where=None):
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


def backward_from_logs(logs: Logs, at, vs, upstream, met, R, t, total=None, where=None):
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


def upstream_of_logs(dout, dlse, out, inverse) -> Upstream:
    over, rare = inverse.abs(), inverse < 0
    c = (dout * out).sum(-1, keepdim=True).mul_(-over)
    if dlse is not None:
        dlse = dlse * over
        c.add_(dlse)
    return Upstream(dout * over, c, dlse, rare if bool(rare.any()) else None)
