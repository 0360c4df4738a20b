"""Gated linear attention in plain torch: every channel of the state fades by its own factor at every token.

    definition  o_i = Σ_{j≤i} w_ij u_j,   w_ij = Σ_c φq_ic φk_jc exp(g_{j+1,c} + … + g_ic),   g = log_decay ≤ 0
    fast        chunks of c tokens; inside, recursive halving: queries of a later half with keys of the half before,
                  w = (φq ∘ e^P)(φk ∘ e^Q)ᵀ,   P = Σ g from the middle to i,   Q = Σ g from after j to the middle
                across chunks, by the state:  out += (φq ∘ e^P) S,   S ← e^G ∘ S + (φk ∘ e^Q)ᵀ u,   G = Σ g of the chunk
    gradients   of a half:  dφq = e^P ∘ (D (φk ∘ e^Q)),   dφk = e^Q ∘ (Dᵀ (φq ∘ e^P)),   du = wᵀ dout,   D = dout uᵀ
                dg_t = Σ_{i≥t} (φq_i ∘ dφq_i − φk_i ∘ dφk_i) + Σ_e S_n ∘ dS_n
    cost        2n((c − 1)(r + e)/2 + 2re) flops forward, state re, or r(e + 1) with the normaliser

Every exponent is a sum of gates, never a difference of sums. So none is positive, none cancels, and −∞ (a shut gate)
needs no special case. README.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from heedful.kernels.chunked_linear.features import LinearState, features, runs
from heedful.kernels.chunked_linear.groups import LEAST
from heedful.kernels.dispatch import as_given, uncompiled

FEATURES = ("identity", "elu1", "relu")
CHUNK = 64  # a power of two
BUDGET = 1 << 18  # numbers in a temporary buffer; it holds as many chunks at once as fit


def objections(q, k, v, *, log_decay, feature="identity", normalise=False, segments=None, state=None) -> list[str]:
    """Why these inputs are invalid, in sentences; empty if they are valid. New segments synchronise with the device."""
    if not q.ndim == k.ndim == v.ndim == log_decay.ndim == 4:
        axes = ", ".join(str(x.ndim) for x in (q, k, v, log_decay))
        return [f"q, k, v, log_decay must be (batch, heads, tokens, width), got {axes} axes."]
    (B, H, n, r), e = q.shape, v.shape[-1]
    said = []
    if k.shape != q.shape or v.shape[:-1] != q.shape[:-1]:
        said.append(f"k must be {tuple(q.shape)} like q and v as long, got {tuple(k.shape)} and {tuple(v.shape)}.")
    if log_decay.shape not in (q.shape, (*q.shape[:-1], 1)):
        shapes = f"{tuple(q.shape)}, one for each channel, or {(B, H, n, 1)}"
        said.append(f"log_decay must be {shapes}, got {tuple(log_decay.shape)}.")
    if not all(x.is_floating_point() for x in (q, k, v, log_decay)):
        said.append(f"q, k, v, log_decay must be floating point, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if feature not in FEATURES:
        said.append(f"feature must be one of {', '.join(FEATURES)}, got {feature!r}.")
    if segments is not None:
        if tuple(segments.shape) != (B, n):
            said.append(f"segments must be {(B, n)}, got {tuple(segments.shape)}.")
        elif segments.is_floating_point():
            said.append(f"segments must be integers, got {segments.dtype}.")
        elif not runs(segments)[1]:
            said.append("a segment id comes back after another one: each segment must be one run of tokens.")
    if state is not None:
        if tuple(state.S.shape) != (B, H, r, e):
            said.append(f"state.S must be {(B, H, r, e)}, got {tuple(state.S.shape)}.")
        if normalise and (state.z is None or tuple(state.z.shape) != (B, H, r)):
            shape = None if state.z is None else tuple(state.z.shape)
            said.append(f"state.z must be {(B, H, r)} where normalise is true, got {shape}.")
    return said


@uncompiled  # a compiler would unroll the loop over the length
def gated_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    feature: str = "identity",
    normalise: bool = False,
    segments: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Gated linear attention and the state after the last token; log_decay ≤ 0, −∞ for a shut gate.

    log_decay is (B, H, n, r), or (B, H, n, 1) if all channels have the same.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> g = -torch.rand(1, 2, 10, 4)
    >>> out, state = gated_linear(q, k, v, log_decay=g)
    >>> S = torch.zeros(1, 2, 4, 4)
    >>> for t in range(10):
    ...     S = g[:, :, t, :, None].exp() * S + k[:, :, t, :, None] * v[:, :, t, None, :]
    >>> torch.allclose(state.S, S, atol=1e-6), torch.allclose(out[:, :, -1:], q[:, :, -1:] @ S, atol=1e-5)
    (True, True)

    Yang et al. 2023, arXiv:2312.06635.
    """
    options = dict(log_decay=log_decay, feature=feature, normalise=normalise)
    if said := objections(q, k, v, **options, segments=segments, state=state):
        raise ValueError(" ".join(said))
    (B, H, n, r), e = q.shape, v.shape[-1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    code = None if segments is None else runs(segments)[0]
    real = None if code is None else (code >= 0)[:, None, :, None]
    x, y = (features(t, feature, None, real, wide) for t in (q, k))
    u, g = v.to(wide), log_decay.to(wide)
    if real is not None:  # padding is not a token: nothing fades there
        u, g = torch.where(real, u, 0.0), torch.where(real, g, 0.0)
    if normalise:
        u = torch.cat([u, u.new_ones(B, H, n, 1)], -1)
    if state is None:
        S = x.new_zeros(B, H, r, u.shape[-1])
    else:
        S = state.S.to(wide)
        S = torch.cat([S, state.z.to(wide)[..., None]], -1) if normalise and state.z is not None else S
    run = None if code is None else torch.maximum(code, -1 - code)
    out, S = _Gated.apply(x, y, u, g, S, run)
    if normalise:
        below = out[..., e:]
        some = below.abs() >= LEAST[wide]
        out = torch.where(some, out[..., :e] / torch.where(some, below, 1.0), 0.0)
    return out.to(v.dtype), LinearState(S[..., :e], S[..., e] if normalise else None)


class _Half(NamedTuple):
    """One level of a chunk: blocks of s keys, each with the s queries after it."""

    size: int
    later: Tensor  # e^P at the queries (…, blocks, s, r)
    earlier: Tensor  # e^Q at the keys (…, blocks, s, r)
    same: Tensor | None  # True for pairs in one segment (…, blocks, s, s)


class _Group:
    """The chunks [a, z) of all heads, tokens as (B, H, chunks, c, ·); zeros fill the last chunk."""

    def __init__(self, g: Tensor, run: Tensor | None, a: int, z: int, c: int):
        self.a, self.z, self.c = a, z, c
        self.g = self.cut(g)
        self.run = None if run is None else self._runs(run)
        for _, P, Q in _doubling(self.g, c):
            ahead, behind = P, Q
        self.into, self.leave, self.keep = ahead.exp(), behind.exp(), ahead[..., -1, :, None].exp()
        self._cut_segments(run)

    def cut(self, x: Tensor) -> Tensor:
        x = x[..., self.a : self.z, :]
        missing = (self.a - self.z) % self.c
        return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (-1, self.c))

    def join(self, target: Tensor, part: Tensor) -> None:
        target[..., self.a : self.z, :] = part.flatten(-3, -2)[..., : self.z - self.a, :]

    def halves(self) -> Iterator[_Half]:
        for size, P, Q in _doubling(self.g, self.c):
            if size == self.c:
                return
            same = None
            if self.run is not None:
                R = self.run.unflatten(-1, (-1, 2, size))
                same = R[..., 1, :, None] == R[..., 0, None, :]
            yield _Half(size, _split(P, size)[..., 1, :, :].exp(), _split(Q, size)[..., 0, :, :].exp(), same)

    def _runs(self, run: Tensor) -> Tensor:
        here = run[:, self.a : self.z]
        missing = (self.a - self.z) % self.c
        here = torch.cat([here, here[:, -1:].expand(-1, missing)], -1) if missing else here
        return here.unflatten(-1, (-1, self.c))[:, None]

    def _cut_segments(self, run: Tensor | None) -> None:
        """Stop states from entering, leaving or staying across the end of a segment."""
        if run is None or self.run is None:
            return
        last = self.run[..., -1:]
        first = run[:, None, None, self.a - 1 : self.a] if self.a else torch.zeros_like(last[:, :, :1])
        before = torch.cat([first, last[:, :, :-1]], 2)
        self.into = self.into * (self.run == before)[..., None]
        self.leave = self.leave * (self.run == last)[..., None]
        self.keep = self.keep * (before == last)[..., None]

    def states(self, y: Tensor, u: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk, and the state after the last."""
        return _scan(self.keep, (y * self.leave).mT @ u, S)

    def adjoint_states(self, x: Tensor, dout: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient in the state after each chunk, and in the state before the first."""
        after, R = _scan(self.keep.flip(2), ((x * self.into).mT @ dout).flip(2), R)
        return after.flip(2), R


def _scan(keep: Tensor, added: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    before = []
    for factor, more in zip(keep.unbind(2), added.unbind(2), strict=True):
        before.append(S)
        S = torch.addcmul(more, factor, S)
    return torch.stack(before, 2), S


def _doubling(g: Tensor, c: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Sums of gates up to each token and after it, inside blocks of 1, 2, 4, … c tokens.

    A block of 2s is two of s: the total of the first half is added to the sums of the second, and vice versa. Each
    iteration overwrites the tensors of the one before, so use them before the next.
    """
    P, Q, size = g.clone(), torch.zeros_like(g), 1
    while size < c:
        yield size, P, Q
        ahead, behind = _split(P, size), _split(Q, size)
        whole = ahead[..., -1:, :].clone()
        ahead[..., 1, :, :] += whole[..., 0, :, :]
        behind[..., 0, :, :] += whole[..., 1, :, :]
        size *= 2
    yield c, P, Q


def _split(x: Tensor, size: int) -> Tensor:
    """A view (…, blocks, 2, size, w) of x, (…, c, w)."""
    return x.unflatten(-2, (-1, 2, size))


def _spans(x: Tensor, u: Tensor) -> list[tuple[int, int, int]]:
    """The first token, last token and chunk size of each group."""
    (B, H, n, r), e = x.shape, u.shape[-1]
    c = min(CHUNK, 1 << max(n - 1, 0).bit_length())
    size = c * max(1, BUDGET // max(1, B * H * max(c * max(r, e), r * e)))
    return [(a, min(a + size, n), c) for a in range(0, n, size)]


def _inside(group: _Group, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """Attention among the tokens of each chunk."""
    out = (x * y).sum(-1, keepdim=True) * u
    for half in group.halves():
        w = (_split(x, half.size)[..., 1, :, :] * half.later) @ (_split(y, half.size)[..., 0, :, :] * half.earlier).mT
        w = w if half.same is None else w * half.same
        _split(out, half.size)[..., 1, :, :] += w @ _split(u, half.size)[..., 0, :, :]
    return out


def _inside_backward(group: _Group, x: Tensor, y: Tensor, u: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_inside` in x and y by the weights of two different tokens, and in u by all weights."""
    dx, dy, du = torch.zeros_like(x), torch.zeros_like(y), (x * y).sum(-1, keepdim=True) * dout
    for half in group.halves():
        X, D, dX = (_split(t, half.size)[..., 1, :, :] for t in (x, dout, dx))
        Y, U, dY, dU = (_split(t, half.size)[..., 0, :, :] for t in (y, u, dy, du))
        X, Y = X * half.later, Y * half.earlier
        w, dw = X @ Y.mT, D @ U.mT
        if half.same is not None:
            w, dw = w * half.same, dw * half.same
        dU += w.mT @ D
        dX += half.later * (dw @ Y)
        dY += half.earlier * (dw.mT @ X)
    return dx, dy, du


class _Gated(torch.autograd.Function):
    """Saves its inputs and the last state; both loops of the backward pass recompute the rest, group by group."""

    @staticmethod
    def forward(ctx, x, y, u, g, S, run):
        out, first = x.new_empty(*x.shape[:-1], u.shape[-1]), S
        for span in _spans(x, u):
            group = _Group(g, run, *span)
            X, Y, U = (group.cut(t) for t in (x, y, u))
            before, S = group.states(Y, U, S)
            group.join(out, _inside(group, X, Y, U) + (X * group.into) @ before)
        S = S.clone() if S is first else S
        ctx.save_for_backward(x, y, u, g, first, run, S)
        return out, S

    @staticmethod
    def backward(ctx, dout, dlast):
        with as_given(dout):
            return _Gated._backward(ctx, dout, dlast)

    @staticmethod
    def _backward(ctx, dout, dlast):
        x, y, u, g, S, run, last = ctx.saved_tensors
        dx, dy, du, dg = (torch.empty_like(t) for t in (x, y, u, g))
        for span in _spans(x, u):
            group = _Group(g, run, *span)
            before, S = group.states(group.cut(y), group.cut(u), S)
            group.join(dx, group.into * (group.cut(dout) @ before.mT))
        R, after_it = dlast, _of_gates((last.double() * dlast).sum(-1)[..., None, :], g)
        for span in reversed(_spans(x, u)):
            group = _Group(g, run, *span)
            X, Y, U, D = (group.cut(t) for t in (x, y, u, dout))
            after, R = group.adjoint_states(X, D, R)
            dX, dY, dU = _inside_backward(group, X, Y, U, D)
            dX, dY = dX + group.cut(dx), dY + group.leave * (U @ after.mT)
            # differences of large sums: float64 preserves them over long sequences
            change = _of_gates((X.double() * dX - Y.double() * dY).flatten(-3, -2), g)
            own = (D * U).sum(-1, keepdim=True)  # of a token's weight for itself, which no gate changes
            dX, dY = dX + own * Y, dY + own * X
            change = change.flip(-2).cumsum(-2).flip(-2) + after_it
            after_it = change[..., :1, :]
            for target, part in ((dx, dX), (dy, dY), (du, dU + (Y * group.leave) @ after)):
                group.join(target, part)
            dg[..., group.a : group.z, :] = change[..., : group.z - group.a, :]
        return dx, dy, du, dg, R, None


def _of_gates(x: Tensor, g: Tensor) -> Tensor:
    """x channel by channel, or summed over the channels that share a gate."""
    return x if g.shape[-1] == x.shape[-1] else x.sum(-1, keepdim=True)
