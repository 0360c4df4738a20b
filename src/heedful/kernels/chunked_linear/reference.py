"""Chunked linear attention in plain torch: the same call as the Triton form, on any device, any float type.

    definition  o_i = Σ_j w_ij (φq_i·φk_j) v_j / Σ_j w_ij (φq_i·φk_j),   j of i's segment, j ≤ i if causal
                w_ij = Π_{j<t≤i} exp(log_decay_t);  a row with a zero denominator is zero
    fast        with u_j = [v_j, 1] and chunks of c tokens:  out = (W ∘ φq φkᵀ) u + into · φq S
                S ← keep · S + (leave · φk)ᵀ u
                with b the cumsum of log_decay:  W_ij = exp(b_i − b_j), into_i = exp(b_i),
                leave_j = exp(b_c − b_j), keep = exp(b_c); zero where the two sides lie in different segments
    gradients   the same two lines again: dφq is the product of (dout, u, φk) forwards in time,
                dφk of (u, dout, φq) and du of (φk, φq, dout) backwards in time, so memory stays O(n)
                d log_decay_t = Σ_{i≥t} (φq_i·dφq_i − φk_i·dφk_i) + ⟨S_n, dS_n⟩
    cost        2n(c(r + e) + 2re) flops forward, state r(e + 1)

`exp` features are shifted: exp(q − max_r q) and exp(k − s) with s the running maximum of the keys seen so far
in the segment. The change of s from token to token, s_{t−1} − s_t ≤ 0, is one more log-decay, so nothing
overflows and nothing looks ahead; the shift leaves numerator and denominator alike.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.kernels.dispatch import as_given

FEATURES = ("identity", "elu1", "relu", "exp")
CHUNK = 64
LEAST = {torch.float32: 2.0**-95, torch.float64: 2.0**-766}
"""A denominator below this, the 3/4 power of the least normal number, is nothing: gradients divide by it again."""


class LinearState(NamedTuple):
    """S (B, Hs, r, e) and z (B, Hs, r) in float32 (float64 for float64 inputs).

    Hs is the number of key heads, or of query heads where there is a decay (it belongs to query heads). z is
    None where nothing is normalised. With `exp` features both are to be multiplied by exp(log_scale) (B, Hs).
    """

    S: Tensor
    z: Tensor | None
    log_scale: Tensor | None = None


def objections(
    q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, segments=None, state=None
) -> list[str]:
    """Why these inputs have no meaning, in sentences; none if they do. New segments wait for the device."""
    if not q.ndim == k.ndim == v.ndim == 4:
        return [f"q, k, v must be (batch, heads, tokens, width), got {q.ndim}, {k.ndim} and {v.ndim} axes."]
    (B, H, n, r), (_, Hkv, m, e) = q.shape, v.shape
    said = []
    if k.shape != (B, Hkv, m, r):
        said.append(f"k must be {(B, Hkv, m, r)} to go with q and v, got {tuple(k.shape)}.")
    if v.shape[0] != B:
        said.append(f"q has batch {B}, v has batch {v.shape[0]}.")
    if Hkv == 0 or H % Hkv:
        said.append(f"the {H} query heads must be a multiple of the {Hkv} key heads.")
    if not all(x.is_floating_point() for x in (q, k, v)):
        said.append(f"q, k and v must be floating point, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if feature not in FEATURES:
        said.append(f"feature must be one of {', '.join(FEATURES)}, got {feature!r}.")
    if causal and n != m:
        said.append(f"causal needs as many queries as keys, got {n} and {m}; pass the past as a state.")
    if log_decay is not None:
        if not causal:
            said.append("log_decay needs causal: it counts tokens from a key to a later query.")
        if tuple(log_decay.shape) not in ((H,), (B, H, n)):
            said.append(f"log_decay must be {(H,)} or {(B, H, n)}, got {tuple(log_decay.shape)}.")
    if segments is not None:
        if tuple(segments.shape) != (B, n) or n != m:
            got = f"{tuple(segments.shape)} and {m} keys"
            said.append(f"segments must be {(B, n)}, with as many keys as queries, got {got}.")
        elif segments.is_floating_point():
            said.append(f"segments must be integers, got {segments.dtype}.")
        elif not runs(segments)[1]:
            said.append("a segment id comes back after another one: each segment must be one run of tokens.")
    if state is not None:
        heads = Hkv if log_decay is None else H
        if tuple(state.S.shape) != (B, heads, r, e):
            said.append(f"state.S must be {(B, heads, r, e)}, got {tuple(state.S.shape)}.")
        if normalise and (state.z is None or tuple(state.z.shape) != (B, heads, r)):
            shape = None if state.z is None else tuple(state.z.shape)
            said.append(f"state.z must be {(B, heads, r)} where normalise is true, got {shape}.")
        if (feature == "exp") != (state.log_scale is not None):
            said.append("state.log_scale belongs to exp features: the state is one of another feature map.")
    return said


def chunked_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature: str = "identity",
    normalise: bool = True,
    causal: bool = True,
    log_decay: Tensor | None = None,
    segments: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Linear attention and the state after the last token.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> whole, _ = chunked_linear(q, k, v, feature="elu1")
    >>> _, state = chunked_linear(q[:, :, :9], k[:, :, :9], v[:, :, :9], feature="elu1")
    >>> last, _ = chunked_linear(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], feature="elu1", state=state)
    >>> torch.allclose(whole[:, :, 9:], last, atol=1e-6)
    True

    Katharopoulos et al. 2020, arXiv 2006.16236; decay as in Sun et al. 2023, arXiv 2307.08621.
    """
    options = dict(feature=feature, normalise=normalise, causal=causal, log_decay=log_decay)
    if said := objections(q, k, v, **options, segments=segments, state=state):
        raise ValueError(" ".join(said))
    (B, H, n, r), (_, Hkv, m, e) = q.shape, v.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = Hkv if log_decay is None else H
    code = None if segments is None else runs(segments)[0]
    decay = token_decay(log_decay, code, B, H, n, wide)
    shift_q = shift_k = log_scale = None
    if feature == "exp":
        shift_q, shift_k, log_scale, decay, state = exp_shifts(q, k, causal, decay, code, state, heads)

    real = None if code is None else (code >= 0)[:, None, :, None]
    x = features(q, feature, shift_q, real, wide)
    y = features(k, feature, shift_k, real, wide)
    u = v.to(wide) if real is None else torch.where(real, v.to(wide), 0.0)
    if normalise:
        u = torch.cat([u, u.new_ones(B, Hkv, m, 1)], -1)
    S = None
    if state is not None:
        S = state.S.to(wide)
        S = torch.cat([S, state.z.to(wide)[..., None]], -1) if normalise and state.z is not None else S
        S = _repeat(S, H)
    y, u = _repeat(y, H), _repeat(u, H)

    if causal:
        decay = None if decay is None else _repeat(decay, H)
        out, S = _Causal.apply(x, y, u, decay, x.new_zeros(B, H, r, u.shape[-1]) if S is None else S, code)
    else:
        out, S = _full(x, y, u, S, code)
    if normalise:
        o = _Normalised.apply(out)
    elif feature == "exp":
        # without a normaliser the shifts go back in; queries that are not the keys' tokens share one shift
        s = _repeat(shift_k, H)
        o = out * (shift_q + (s if n == m else s[..., :1])).exp()[..., None] if m else out
    else:
        o = out
    S = S[:, :: H // heads]
    return o.to(v.dtype), LinearState(S[..., :e], S[..., e] if normalise else None, log_scale)


_last_runs: tuple = (None, None, None)


def runs(segments: Tensor) -> tuple[Tensor, bool]:
    """Codes (B, n) int32, and whether every segment is one run of tokens (padding aside).

    A code is the count c of the token's run within its row, or −1 − c for padding after run c. The answer for
    the last tensor seen is kept: the layers of a model share their segments, and asking waits for the device.
    """
    global _last_runs
    version = None if segments.is_inference() else segments._version
    known, known_version, answer = _last_runs
    if known is not None and known() is segments and version is not None and known_version == version:
        return answer
    if segments.shape[-1] == 0:
        return segments.int(), True
    real = segments >= 0
    at = torch.arange(segments.shape[-1], device=segments.device)
    last = torch.where(real, at, -1).cummax(-1).values
    before = torch.nn.functional.pad(last, (1, -1), value=-1)
    previous = torch.where(before >= 0, segments.gather(-1, before.clamp(min=0)), segments)
    run = (real & (segments != previous)).cumsum(-1, dtype=torch.int32)
    contiguous = True
    if (real & (segments < previous)).any():  # ids that only rise need no counting
        ids = torch.nn.functional.pad(segments.clamp(min=-1).sort(-1).values, (1, 0), value=-1)
        distinct = (ids[..., 1:] != ids[..., :-1]).sum(-1)
        contiguous = bool((run[..., -1] + real.any(-1) == distinct).all())
    answer = torch.where(real, run, -1 - run), contiguous
    _last_runs = weakref.ref(segments), version, answer
    return answer


def token_decay(log_decay, code, B, H, n, dtype) -> Tensor | None:
    """(B, H, n), zero at padding, which does not decay: a padded sequence gives what the bare one gives."""
    if log_decay is None:
        return None
    decay = log_decay.to(dtype)
    decay = decay[None, :, None].expand(B, H, n) if decay.ndim == 1 else decay
    return decay if code is None else torch.where((code >= 0)[:, None], decay, 0.0)


def exp_shifts(q, k, causal, decay, code, state, heads):
    """Shifts of q and k, scale of the last state, decay with the shifts' in it, first state on their scale.

    Causal: s_t = max(s_{t−1}, max_r k_t) from the state's scale on, starting anew in each segment. Otherwise
    s is the maximum over the segment. The result does not depend on it: no gradient goes through.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    shift_q = q.detach().amax(-1).to(wide)
    top = k.detach().amax(-1).to(torch.float64)
    (B, Hkv, m), shared = top.shape, heads // k.shape[1]
    # with a decay the query heads that share a key head carry the same scale: take one of them
    floor = top.new_full((B, Hkv), -torch.inf) if state is None else state.log_scale[:, ::shared].double()
    if m == 0:
        scale = torch.where(floor.isfinite(), floor, 0.0).to(wide)
        return shift_q, top.to(wide), _repeat(scale, heads), decay, state
    run = top.new_zeros(B, 1, m, dtype=torch.long)
    if code is not None:
        top = top.masked_fill((code < 0)[:, None], -torch.inf)
        run = torch.maximum(code, -1 - code).long()[:, None]
    # a running maximum that starts anew with each run: lift run c by c · 2²⁰, far above any key there is
    lift = run * 2.0**20
    top = torch.maximum(top, torch.where(run == 0, floor[..., None], -torch.inf)).clamp(-(2.0**19), 2.0**19)
    s = (top + lift).cummax(-1).values - lift
    if not causal:
        end = torch.searchsorted(run.contiguous(), run.contiguous(), right=True) - 1
        s = s.gather(-1, end.expand_as(s))
    unseen = s <= -(2.0**19)
    s = torch.where(unseen, 0.0, s)
    scale = _repeat(s[..., -1].to(wide), heads)
    if causal:
        before = torch.cat([floor[..., None], s.masked_fill(unseen, -torch.inf)], -1)[..., :m]
        fall = before - s
        fall = torch.where(fall.isfinite() & (fall < 0), fall, 0.0).to(wide)
        decay = fall if decay is None else decay + _repeat(fall, heads)
    elif state is not None:
        change = _repeat((floor - s[..., 0]).exp().to(wide), heads)
        z = None if state.z is None else state.z * change[..., None]
        state = LinearState(state.S * change[..., None, None], z, scale)
    return shift_q, s.to(wide), scale, decay, state


def features(x, feature, shift, real, dtype):
    x = x.to(dtype)
    match feature:
        case "elu1":
            x = _Elu1.apply(x)
        case "relu":
            x = x.relu()
        case "exp":
            x = (x - shift[..., None]).exp_()
    return x if real is None else torch.where(real, x, 0.0)


def _repeat(x, heads):
    """Each key head once for every query head that uses it, as a view where nothing has to be repeated."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _full(x, y, u, S0, code):
    """Every query sees every key of its segment: one state a segment."""
    if code is None or int(code.max()) <= 0:
        S = y.mT @ u if S0 is None else S0 + y.mT @ u
        return x @ S, S
    rows, last = [], []
    for b, row in enumerate(torch.maximum(code, -1 - code)):
        lengths = torch.unique_consecutive(row, return_counts=True)[1].tolist()
        at, out = 0, []
        for c, length in enumerate(lengths):
            here = slice(at, at + length)
            S = y[b, :, here].mT @ u[b, :, here]
            if c == 0 and S0 is not None:
                S = S + S0[b]
            out.append(x[b, :, here] @ S)
            at += length
        rows.append(torch.cat(out, -2))
        last.append(S)
    return torch.stack(rows), torch.stack(last)


def _chunks(n):
    return [(a, min(a + CHUNK, n)) for a in range(0, n, CHUNK)]


def _weights(decay, code, a, z):
    """W, into, leave, keep of the chunk [a, z) (see the head of this file); None where every weight is 1."""
    c = z - a
    if decay is None and code is None:
        return None
    W: Any = 1.0
    into: Any = 1.0
    leave: Any = 1.0
    keep: Any = 1.0
    if decay is not None:
        b = decay[..., a:z].cumsum(-1)
        lower = torch.ones(c, c, dtype=torch.bool, device=b.device).tril()
        W = torch.where(lower, b[..., :, None] - b[..., None, :], -torch.inf).exp()
        into, leave = b.exp()[..., None], (b[..., -1:] - b).exp()[..., None]
        keep = b[..., -1, None, None].exp()
    if code is not None:
        run = torch.maximum(code, -1 - code)[:, None]
        here, last = run[..., a:z], run[..., z - 1 : z]
        before = run[..., a - 1 : a] if a else torch.zeros_like(last)
        W = W * (here[..., :, None] == here[..., None, :]).tril()
        into, leave = into * (here == before)[..., None], leave * (here == last)[..., None]
        keep = keep * (before == last)[..., None]
    return W, into, leave, keep


def _walk(x, y, u, S, decay, code, *, back):
    """One product a chunk with the state, two inside it, all written where they belong.

    A chunk's scores and the state stay in the cache; nothing else is allocated, which on a CPU is a third of the time.
    """
    (B, H, n, _), e = x.shape, u.shape[-1]
    out, S = x.new_empty(B, H, n, e), S.clone(memory_format=torch.contiguous_format)
    scores = x.new_empty(B * H * min(CHUNK, n) ** 2)
    flat_x, flat_y, flat_u, flat_out, flat_S = (t.flatten(0, 1) for t in (x, y, u, out, S))
    for a, z in reversed(_chunks(n)) if back else _chunks(n):
        xc, yc, uc, oc = (t[:, a:z] for t in (flat_x, flat_y, flat_u, flat_out))
        P = scores[: B * H * (z - a) ** 2].view(B, H, z - a, z - a)
        flat_P = P.flatten(0, 1)
        torch.bmm(xc, yc.mT, out=flat_P)
        torch.bmm(xc, flat_S, out=oc)
        w = _weights(decay, code, a, z)
        if w is None:
            _ = P.triu_() if back else P.tril_()
        else:
            W, into, leave, keep = w
            before, after = (leave, into) if back else (into, leave)
            P.mul_(W.mT if back else W)
            out[..., a:z, :].mul_(before)
            yc = (y[..., a:z, :] * after).flatten(0, 1)
            S.mul_(keep)
        oc.baddbmm_(flat_P, uc)
        flat_S.baddbmm_(yc.mT, uc)
    return out, S


def _forwards(x, y, u, S, decay, code):
    """out_i = Σ_{j≤i} w_ij (x_i·y_j) u_j + w_i (x_i S), and the state after the last token."""
    return _walk(x, y, u, S, decay, code, back=False)


def _backwards(x, y, u, R, decay, code):
    """The adjoint: out_j = Σ_{i≥j} w_ij (x_j·y_i) u_i + w_j (x_j R), and the gradient of the first state."""
    return _walk(x, y, u, R, decay, code, back=True)


class _Elu1(torch.autograd.Function):
    """elu(x) + 1 without losing e^x beside 1, in few passes; keeps its result, as the product does anyway."""

    @staticmethod
    def forward(ctx, x):
        phi = x.clamp(max=0).exp_().add_(x.relu())
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx, grad):
        (phi,) = ctx.saved_tensors
        return grad * phi.clamp(max=1)


class _Normalised(torch.autograd.Function):
    """All columns but the last over the last, rows of zero where it is nothing; gradients in one piece."""

    @staticmethod
    def forward(ctx, out):
        below = out[..., -1:]
        some = below.abs() >= LEAST[out.dtype]
        inverse = torch.where(some, 1 / torch.where(some, below, 1.0), 0.0)
        o = out[..., :-1] * inverse
        ctx.save_for_backward(o, inverse)
        return o

    @staticmethod
    def backward(ctx, grad):
        o, inverse = ctx.saved_tensors
        return torch.cat([grad, -(grad * o).sum(-1, keepdim=True)], -1).mul_(inverse)


class _Causal(torch.autograd.Function):
    """The two walks joined: keeps its inputs and the last state, nothing of size n·c."""

    @staticmethod
    def forward(ctx, x, y, u, decay, S, code):
        out, last = _forwards(x, y, u, S, decay, code)
        ctx.save_for_backward(x, y, u, decay, S, code, last)
        return out, last

    @staticmethod
    def backward(ctx, dout, dlast):
        with as_given(dout):
            return _Causal._backward(ctx, dout, dlast)

    @staticmethod
    def _backward(ctx, dout, dlast):
        x, y, u, decay, S, code, last = ctx.saved_tensors
        wants_decay = ctx.needs_input_grad[3]
        dx = dy = du = ddecay = dS = None
        if ctx.needs_input_grad[0] or wants_decay:
            dx = _forwards(dout, u, y, S.mT, decay, code)[0]
        if ctx.needs_input_grad[1] or wants_decay:
            dy = _backwards(u, dout, x, dlast.mT, decay, code)[0]
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[4]:
            du, dS = _backwards(y, x, dout, dlast, decay, code)
        if wants_decay:
            # differences of large sums: float64 keeps them over long sequences, and they are n numbers a head
            change = (x.double() * dx - y.double() * dy).sum(-1)
            after = change.flip(-1).cumsum(-1).flip(-1) + (last.double() * dlast).sum((-2, -1))[..., None]
            ddecay = after.to(decay.dtype)
        return dx, dy, du, ddecay, dS, None
