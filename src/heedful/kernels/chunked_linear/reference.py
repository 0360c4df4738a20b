"""Chunked linear attention in plain torch: the same call as the Triton form, on any device, any float type.

    definition  o_i = Σ_j w_ij (φq_i·φk_j) v_j / Σ_j w_ij (φq_i·φk_j),   j of i's segment, j ≤ i if causal
                w_ij = Π_{j<t≤i} exp(log_decay_t) cos(angle_i − angle_j);  a row with a zero denominator is zero
    fast        chunks of c tokens:  P = W ∘ φq φkᵀ,  num = P v + into · φq S,  den = P 1 + into · φq z
                S ← keep · S + (leave · φk)ᵀ v,   z ← keep · z + Σ leave · φk
                with b the cumsum of log_decay:  W_ij = exp(b_i − b_j), into_i = exp(b_i),
                leave_j = exp(b_c − b_j), keep = exp(b_c); zero where the two sides lie in different segments
    gradients   of num and den: g = do / den, c = −do·o / den.  D = W ∘ (g vᵀ + c 1ᵀ) and the adjoint state R, t:
                dφq = D φk + into (g Sᵀ + c zᵀ),   dφk = Dᵀ φq + leave (v Rᵀ + t),   dv = Pᵀ g + leave φk R
                R ← keep · R + (into · φq)ᵀ g,   t ← keep · t + Σ into · c φq,   backwards in time
                d log_decay_t = Σ_{i≥t} (φq_i·dφq_i − φk_i·dφk_i) + ⟨S_n, R_n⟩ + ⟨z_n, t_n⟩
    angles      cos(a − b) = cos a cos b + sin a sin b: as many features again, [φ cos, φ sin] for φ above
    on a CPU    a group of chunks of all heads at once, as large as stays in the cache: features, products and quotient,
                nothing of size n·r or n·c in memory. One state a group is kept for the gradients, which make the rest
                of it again. A normaliser as a value column would make products of odd width, a sixth slower
    cost        2n(c(r + e) + 2re) flops forward, state r(e + 1)

`exp` features are shifted: exp(q − max_r q) and exp(k − s) with s the running maximum of the keys seen so far
in the segment. The change of s from token to token, s_{t−1} − s_t ≤ 0, is one more log-decay, so nothing
overflows and nothing looks ahead; the shift leaves numerator and denominator alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.kernels.dispatch import as_given

FEATURES = ("identity", "elu1", "relu", "exp")
CHUNK = 32
GROUP = 8 * CHUNK
CACHED = 2**18
"""Tokens a chunk; tokens of a head that are worked on at once, at least; numbers of a tensor that stay in the cache."""
LOG2E = 1 / log(2)
LEAST = {torch.float32: 2.0**-95, torch.float64: 2.0**-766}
"""A denominator below this, the 3/4 power of the least normal number, is nothing: gradients divide by it again."""


class LinearState(NamedTuple):
    """S (B, Hs, r, e) and z (B, Hs, r) in float32 (float64 for float64 inputs); 2r for r where there are angles.

    Hs is the number of key heads, or of query heads where there is a decay (it belongs to query heads). z is
    None where nothing is normalised. With `exp` features both are to be multiplied by exp(log_scale) (B, Hs).
    """

    S: Tensor
    z: Tensor | None
    log_scale: Tensor | None = None


def objections(
    q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, angles=None, segments=None, state=None
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
    if angles is not None:
        if tuple(angles.shape) not in ((1, max(n, m)), (B, max(n, m))) or not angles.is_floating_point():
            want = f"{(B, max(n, m))} or {(1, max(n, m))} in floating point"
            said.append(f"angles must be {want}, got {tuple(angles.shape)} in {angles.dtype}.")
        if angles.requires_grad:
            said.append("angles have no gradient here: give them detached.")
    if segments is not None:
        if tuple(segments.shape) != (B, n) or n != m:
            got = f"{tuple(segments.shape)} and {m} keys"
            said.append(f"segments must be {(B, n)}, with as many keys as queries, got {got}.")
        elif segments.is_floating_point():
            said.append(f"segments must be integers, got {segments.dtype}.")
        elif not runs(segments)[1]:
            said.append("a segment id comes back after another one: each segment must be one run of tokens.")
    if state is not None:
        heads, f = Hkv if log_decay is None else H, r if angles is None else 2 * r
        if tuple(state.S.shape) != (B, heads, f, e):
            said.append(f"state.S must be {(B, heads, f, e)}, got {tuple(state.S.shape)}.")
        if normalise and (state.z is None or tuple(state.z.shape) != (B, heads, f)):
            shape = None if state.z is None else tuple(state.z.shape)
            said.append(f"state.z must be {(B, heads, f)} where normalise is true, got {shape}.")
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
    angles: Tensor | None = None,
    segments: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Linear attention and the state after the last token.

    log_decay   (H,), or (B, H, n)
    angles      (B, n) or (1, n): a weight is multiplied by cos(angle_i − angle_j), as cosFormer's are. Where there are
                more keys than queries, or fewer, there is one for each of the more; both end with the last of them

    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> whole, _ = chunked_linear(q, k, v, feature="elu1")
    >>> _, state = chunked_linear(q[:, :, :9], k[:, :, :9], v[:, :, :9], feature="elu1")
    >>> last, _ = chunked_linear(q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], feature="elu1", state=state)
    >>> torch.allclose(whole[:, :, 9:], last, atol=1e-6)
    True

    Katharopoulos et al. 2020, arXiv 2006.16236; decay as in Sun et al. 2023, arXiv 2307.08621; angles as in Qin et al.
    2022, arXiv 2202.08791.
    """
    options = dict(feature=feature, normalise=normalise, causal=causal, log_decay=log_decay, angles=angles)
    if said := objections(q, k, v, **options, segments=segments, state=state):
        raise ValueError(" ".join(said))
    (B, H, n, r), (_, Hkv, m, e) = q.shape, v.shape
    kept = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide = torch.float64 if cancels(q, log_decay) else kept
    heads = Hkv if log_decay is None else H
    code = None if segments is None else runs(segments)[0]
    decay = token_decay(log_decay, code, B, H, n, wide)
    shift_q = shift_k = log_scale = None
    if feature == "exp":
        shift_q, shift_k, log_scale, decay, state = exp_shifts(q, k, causal, decay, code, state, heads)

    turns = None if angles is None else turns_of(angles, B, wide)[:, None]
    u = v if code is None else torch.where((code >= 0)[:, None, :, None], v, 0.0)
    if state is None:
        f = r if angles is None else 2 * r
        state = LinearState(*(torch.zeros(B, heads, f, *width, device=q.device) for width in ((e,), ())))
    S = repeat(state.S.to(wide), H)
    z = repeat(state.z.to(wide), H)[..., None, :] if normalise and state.z is not None else None
    y, u, shift = repeat(k, H), repeat(u, H), None if shift_k is None else repeat(shift_k, H)
    if causal:
        decay = None if decay is None else repeat(decay, H)
        o, S, z = _Causal.apply(q, y, u.to(wide), decay, S, z, shift_q, shift, turns, code, feature)
    else:
        turns_q, turns_k = (None if turns is None else turns[:, :, turns.shape[2] - size :] for size in (n, m))
        o, S, z = _full(q, y, u.to(wide), S, z, shift_q, shift, turns_q, turns_k, code, feature)
    if shift_q is not None and shift is not None and not normalise:
        # without a normaliser the shifts go back in; queries that are not the keys' tokens share one shift
        o = o * (shift_q + (shift if n == m else shift[..., :1])).exp()[..., None] if m else o
    S, z = S[:, :: H // heads].to(kept), None if z is None else z[:, :: H // heads, 0].to(kept)
    return o.to(v.dtype), LinearState(S, z, log_scale)


def cancels(q: Tensor, log_decay: Tensor | None) -> bool:
    """Whether a gradient is asked for that float32 can't give as well as the formula does.

    That of one decay a head is a sum over tokens of gains less losses, each times its position, and it comes to pairs
    times their distance: over 2048 tokens at λ = ½ half of the digits are lost.
    """
    learns = log_decay is not None and log_decay.ndim == 1 and log_decay.requires_grad and torch.is_grad_enabled()
    return learns and q.dtype == torch.float32


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


def turns_of(angles: Tensor, B: int, dtype: torch.dtype) -> Tensor:
    """(B, n, 2), the cosine and the sine of each token's angle."""
    return torch.stack([angles.cos(), angles.sin()], -1).to(dtype).expand(B, -1, -1)


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
        return shift_q, top.to(wide), repeat(scale, heads), decay, state
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
    scale = repeat(s[..., -1].to(wide), heads)
    if causal:
        before = torch.cat([floor[..., None], s.masked_fill(unseen, -torch.inf)], -1)[..., :m]
        fall = before - s
        fall = torch.where(fall.isfinite() & (fall < 0), fall, 0.0).to(wide)
        decay = fall if decay is None else decay + repeat(fall, heads)
    elif state is not None:
        change = repeat((floor - s[..., 0]).exp().to(wide), heads)
        z = None if state.z is None else state.z * change[..., None]
        state = LinearState(state.S * change[..., None, None], z, scale)
    return shift_q, s.to(wide), scale, decay, state


def features(x, feature, shift, real, dtype, turns=None):
    x = x.to(dtype)
    match feature:
        case "elu1":
            x = _Elu1.apply(x)
        case "relu":
            x = x.relu()
        case "exp":
            x = _exp_(x - shift)
    return _turned(x if real is None else torch.where(real, x, 0.0), turns)


def _turned(x, turns):
    """[x cos, x sin], where there are angles."""
    return x if turns is None else torch.cat([x * turns[..., :1], x * turns[..., 1:]], -1)


def _turned_back(x, turns):
    """The way back, of features and of gradients alike: cos² + sin² = 1."""
    if turns is None:
        return x
    r = x.shape[-1] // 2
    return (x[..., :r] * turns[..., :1]).addcmul_(x[..., r:], turns[..., 1:])


def _exp_(x):
    """e^x in place. On a CPU torch's exp is MKL's, 3 times slower than exp2 and 20 times where the result vanishes."""
    return x.mul_(LOG2E).exp2_()


def _pulled(grad, phi, feature, turns, real):
    """Through the features, in place: their derivative is in what they are, zero at padding."""
    grad, phi = _turned_back(grad, turns), phi if feature == "identity" else _turned_back(phi, turns)
    match feature:
        case "elu1":
            grad.mul_(phi.clamp(max=1))
        case "relu":
            grad.mul_(phi > 0)
        case "exp":
            grad.mul_(phi)
    return grad if real is None else grad.masked_fill_(~real, 0.0)


def repeat(x, heads):
    """Each key head once for every query head that uses it, as a view where nothing has to be repeated."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _full(q, k, v, S, z, shift_q, shift_k, turns_q, turns_k, code, feature):
    """Every query sees every key of its segment: one state a segment; an initial one belongs to the first."""
    if code is None or int(code.max()) <= 0:
        return _Full.apply(q, k, v, S, z, shift_q, shift_k, turns_q, turns_k, code, feature)
    rows = []
    for b, row in enumerate(torch.maximum(code, -1 - code)):
        lengths = torch.unique_consecutive(row, return_counts=True)[1].tolist()
        tokens = [q, k, v, *(None if t is None else t[..., None] for t in (shift_q, shift_k)), turns_q, turns_k]
        pieces = [[None] * len(lengths) if t is None else t[b : b + 1].split(lengths, 2) for t in tokens]
        codes = code[b : b + 1].split(lengths, 1)
        state: tuple = S[b : b + 1], None if z is None else z[b : b + 1]
        parts = []
        for qs, ks, vs, s_q, s_k, t_q, t_k, here in zip(*pieces, codes, strict=True):
            shifts = (None if t is None else t[..., 0] for t in (s_q, s_k))
            parts.append(_Full.apply(qs, ks, vs, *state, *shifts, t_q, t_k, here, feature))
            state = tuple(None if t is None else torch.zeros_like(t) for t in state)
        rows.append((torch.cat([part[0] for part in parts], 2), *parts[-1][1:]))
    out, S, last = zip(*rows, strict=True)
    return torch.cat(out), torch.cat(S), None if z is None else torch.cat(last)


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


def _chunks(t: Tensor, a: int, z: int, c: int) -> Tensor:
    """(rows, n, ·) → (chunks, rows, c, ·), a view: the chunks of [a, z) one after the other, each of all rows."""
    return t[:, a:z].unflatten(1, (-1, c)).transpose(0, 1)


def cut(t: Tensor, a: int, z: int, c: int) -> Tensor:
    """(rows, n, ·) → (chunks · rows, c, ·), side by side in memory."""
    return _chunks(t, a, z, c).flatten(0, 1)


def put(t: Tensor, a: int, z: int, c: int, chunks: Tensor, times: Tensor | None = None) -> None:
    """The way back, multiplied on it."""
    there, chunks = _chunks(t, a, z, c), chunks.unflatten(0, (-1, len(t)))
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
    """Of each chunk, see the head of this file."""

    W: Any
    into: Any
    leave: Any
    keep: Any


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


def _states(S: Tensor, y: Tensor, u: Tensor | None, w: Weights | None, *, back: bool = False) -> tuple[Tensor, Tensor]:
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


def _masked(P: Tensor, w: Weights | None) -> Tensor:
    return P.tril_() if w is None else P.mul_(w.W)


def forward_group(xs, ys, vs, w: Weights | None, S, z):
    """Numerators of a group of chunks, the inverse of their normalisers, the state after it."""
    leaving = ys if w is None else ys * w.leave
    P = _masked(torch.bmm(xs, ys.mT), w)
    before, S = _states(S, leaving, vs, w)
    o = torch.bmm(xs, before)
    if w is not None:
        o.mul_(w.into)
    o.baddbmm_(P, vs)
    if z is None:
        return o, None, S, None
    before, z = _states(z, leaving, None, w)
    below = torch.bmm(xs, before.mT)
    below = (below if w is None else below.mul_(w.into)).add_(P.sum(-1, keepdim=True))
    return o, inverse_of(below), S, z


def backward_group(xs, ys, vs, gs, cs, w: Weights | None, met, R, t):
    """Gradients of a group's features and values, and of the state that it met, given those of the one after it."""
    leaving, entering = (ys, xs) if w is None else (ys * w.leave, xs * w.into)
    before, _ = _states(met[0], leaving, vs, w)
    after, R = _states(R, entering, gs, w, back=True)
    D = torch.bmm(gs, vs.mT)
    dx, dy, dvs = torch.bmm(gs, before.mT), torch.bmm(vs, after.mT), torch.bmm(ys, after)
    if cs is not None:
        before, _ = _states(met[1], leaving, None, w)
        after, t = _states(t, entering * cs, None, w, back=True)
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


def _forwards(q, k, v, shift_q, shift_k, turns, real, decay, run, S, z, out, inverse, *, met, feature):
    """Writes the output, the inverse of its normaliser and the states that groups meet; returns the last state."""
    for i, at in enumerate(groups_of(q, S.shape[-2])):
        xs, ys, vs, *_ = _operands(q, k, v, shift_q, shift_k, turns, real, at, feature)
        for kept, state in zip(met, (S, z), strict=False):
            kept[i] = state
        o, over, S, z = forward_group(xs, ys, vs, _weights(decay, run, *at), S, z)
        if inverse is not None:
            put(inverse, *at, over)
        put(out, *at, o, over)
    return S, z


def _backwards(
    q, k, v, shift_q, shift_k, turns, real, decay, run, dout, out, inverse, R, t, dq, dk, dv, change, *, met, feature
):
    """Writes the gradients, given those of the output and of the last state (R, t).

    Returns those of the first state. Within a group the states are made again from the one that it met.
    """
    for i, at in reversed(list(enumerate(groups_of(q, R.shape[-2])))):
        xs, ys, vs, turns_s, real_s = _operands(q, k, v, shift_q, shift_k, turns, real, at, feature)
        gs, cs = upstream(*(None if x is None else cut(x, *at) for x in (dout, out, inverse)))
        w = _weights(decay, run, *at)
        dx, dy, dvs, R, t = backward_group(xs, ys, vs, gs, cs, w, [kept[i] for kept in met], R, t)
        if change is not None:
            # differences of large sums: float64 keeps them over long sequences, and they are n numbers a head
            put(change, *at, (xs.double() * dx - ys.double() * dy).sum(-1))
        put(dq, *at, _pulled(dx, xs, feature, turns_s, real_s))
        put(dk, *at, _pulled(dy, ys, feature, turns_s, real_s))
        put(dv, *at, dvs)
    return R, t


def _operands(q, k, v, shift_q, shift_k, turns, real, at, feature):
    """Features of a group's queries and keys, its values, how they are turned, and which of its tokens are real."""
    v, turns, real = (None if t is None else cut(t, *at) for t in (v, turns, real))
    x, y = (_cut_features(t, s, turns, real, at, feature, v.dtype) for t, s in ((q, shift_q), (k, shift_k)))
    return x, y, v, turns, real


def _cut_features(t, shift, turns, real, at, feature, dtype):
    """`features` of `cut`, where the first pass is the one that puts chunks side by side."""
    if feature not in ("elu1", "exp"):
        return features(cut(t, *at), feature, None, real, dtype, turns)
    here = _chunks(t, *at).to(dtype)
    x = here.new_empty(here.shape)
    if feature == "exp":
        _exp_(torch.sub(here, _chunks(shift, *at), out=x))
    else:
        _exp_(torch.clamp(here, max=0, out=x)).add_(here.relu())
    x = x.flatten(0, 1)
    return _turned(x if real is None else torch.where(real, x, 0.0), turns)


def inverse_of(below: Tensor) -> Tensor:
    """1 over it, zero where it is nothing."""
    return torch.where(below.abs() >= LEAST[below.dtype], below.reciprocal(), 0.0)


class _Elu1(torch.autograd.Function):
    """elu(x) + 1 without losing e^x beside 1, in few passes; keeps its result, as the product does anyway."""

    @staticmethod
    def forward(ctx, x):
        phi = _exp_(x.clamp(max=0)).add_(x.relu())
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx, grad):
        (phi,) = ctx.saved_tensors
        return grad * phi.clamp(max=1)


def in_rows(B, H, *tensors):
    """(B, H, …) → (B·H, …)"""
    return [None if t is None else t.expand(B, H, *t.shape[2:]).flatten(0, 1) for t in tensors]


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
                d.copy_(_pulled(dx, x, feature, turns, real_s))
            for ks, vs, d, dvs, turns, s, real_s in blocks_of(k, v, dk, dv, turns_k, s_k, real, r=r):
                y = features(ks, feature, s, real_s, v.dtype, turns)
                dvs.copy_(y @ R_)
                dy = vs @ R_.mT
                if t_ is not None:
                    dy.add_(t_)
                d.copy_(_pulled(dy, y, feature, turns, real_s))
        return *(None if s is None else s.unflatten(0, ctx.shape) for s in (*grads, R, t)), *[None] * 6


class _Causal(torch.autograd.Function):
    """The two walks joined: keeps its inputs, its output and a state a group, nothing of size n·c."""

    @staticmethod
    def forward(ctx, q, k, v, decay, S, z, shift_q, shift_k, turns, code, feature):
        (B, H, n, _), e, r = q.shape, v.shape[-1], S.shape[-2]
        run = None if code is None else torch.maximum(code, -1 - code)[:, None]
        shift_q, shift_k, real = _tokens(code, shift_q, shift_k)
        given = in_rows(B, H, q, k, v, shift_q, shift_k, turns, real, decay, run)
        first, learns = in_rows(B, H, S, z), any(ctx.needs_input_grad)
        out, inverse = v.new_empty(B * H, n, e), v.new_empty(B * H, n, 1) if learns and z is not None else None
        ctx.met, last = [], []
        for slab in slabs(*given, *first, out, inverse, r=r):
            states = [t for t in slab[9:11] if t is not None]
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
            return _Causal._backward(ctx, dout, R, t)

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
        return *(None if s is None else s.unflatten(0, ctx.shape) for s in every), *[None] * 5
