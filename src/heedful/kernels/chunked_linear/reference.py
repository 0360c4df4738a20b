"""Chunked linear attention in plain torch: the same call as in Triton, on any device, in any float type.

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
angles      cos(a − b) = cos a cos b + sin a sin b: twice the features, [φ cos, φ sin] instead of φ
cost        2n(c(r + e) + 2re) flops forward, state r(e + 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.chunks import LOWEST, repeat
from heedful.kernels.chunked_linear.features import LinearState, runs, token_decay, turns_of
from heedful.kernels.chunked_linear.groups import Causal, full
from heedful.kernels.chunked_linear.logs import CausalLogs
from heedful.kernels.dispatch import uncompiled

FEATURES = ("identity", "elu1", "relu", "exp")


def objections(
    q,
    k,
    v,
    *,
    feature="identity",
    normalise=True,
    causal=True,
    log_decay=None,
    angles=None,
    segments=None,
    state=None,
    stateful=True,
) -> list[str]:
    """Why these inputs are invalid, in sentences; empty if they are valid. New segments synchronise with the device."""
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
        if feature == "exp":
            said.append("angles do not go with exp features, which are kept by their logarithms.")
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
        elif state.log_scale is not None and tuple(state.log_scale.shape) != (B, heads, f):
            said.append(f"state.log_scale must be {(B, heads, f)}, got {tuple(state.log_scale.shape)}.")
        elif feature == "exp" and causal and state.z is None:
            said.append("state.z must be given with exp features, whose sums are on scales of their own.")
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
    stateful: bool = True,
) -> tuple[Tensor, LinearState | None]:
    """Linear attention and the state after the last token.

    log_decay   (H,), or (B, H, n)
    angles      (B, n) or (1, n): a weight is multiplied by cos(angle_i − angle_j), as in cosFormer. If the numbers of
                keys and queries differ, there is one angle for each of the larger; both end with the last angle
    stateful    False if the state of exp features is not needed; it may then be None

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
    turns = None if angles is None else turns_of(angles, B, wide)[:, None]
    u = v if code is None else torch.where((code >= 0)[:, None, :, None], v, 0.0)
    exp, scale = feature == "exp", None
    if state is None:
        f = r if angles is None else 2 * r
        state = LinearState(*(torch.zeros(B, heads, f, *width, device=q.device) for width in ((e,), ())))
    elif exp and state.log_scale is not None:
        scale = repeat(state.log_scale.to(wide), H)[..., None, :]
    S = repeat(state.S.to(wide), H)
    z = None if state.z is None or not (normalise or (exp and causal)) else repeat(state.z.to(wide), H)[..., None, :]
    y, u = repeat(k, H), repeat(u, H).to(wide)
    if causal and exp:
        o, lse, S, z, scale = _by_logs(q, y, u, decay, S, z, scale, code)
        if not normalise:
            o, z = o * lse.exp()[..., None], None
    elif causal:
        o, S, z = Causal.apply(q, y, u, decay, S, z, turns, code, feature)
    else:
        turns_q, turns_k = (None if turns is None else turns[:, :, turns.shape[2] - size :] for size in (n, m))
        o, S, z, scale = full(q, y, u, S, z, scale, turns_q, turns_k, code, feature)
    S = S[:, :: H // heads].to(kept)
    z, scale = (None if x is None else x[:, :: H // heads, 0].to(kept) for x in (z, scale))
    return o.to(v.dtype), LinearState(S, z, scale)


def attend_to_logs(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention by exp features, and log Σ_{j ≤ i, r} exp(q_ir + k_jr); −∞ where a row sees nothing.

    q, k, v   (B, H, n, ·) in float32 or float64
    segments  (B, n), each one run of tokens

    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> _, lse = attend_to_logs(q, k, v)
    >>> torch.allclose(lse[:, :, 0], (q + k)[:, :, 0].logsumexp(-1), atol=1e-5)
    True
    """
    code = None if segments is None else runs(segments)[0]
    return _by_logs(q, k, v, None, None, None, None, code)[:2]


@uncompiled
def _by_logs(q, k, v, decay, S, z, scale, code):
    """Output, logarithms of the normalisers, and S (B, H, r, e), z and its scale (B, H, 1, r) after the last token."""
    (B, H, _, r), e = q.shape, v.shape[-1]
    S = v.new_zeros(B, H, r, e) if S is None else S
    z = v.new_zeros(B, H, 1, r) if z is None else z
    scale = v.new_full((B, H, 1, r), LOWEST) if scale is None else scale
    if code is not None:
        v = torch.where((code >= 0)[:, None, :, None], v, 0.0)
    return CausalLogs.apply(q, k, v, decay, S, z, scale, code)


def cancels(q: Tensor, log_decay: Tensor | None) -> bool:
    """True if a gradient is needed that float32 can't compute as accurately as the direct formula.

    The gradient of one decay per head is a sum over tokens of gains less losses, each times its position; the result
    is a sum over pairs times their distance. Over 2048 tokens at λ = ½ the difference loses half of the digits.
    """
    learns = log_decay is not None and log_decay.ndim == 1 and log_decay.requires_grad and torch.is_grad_enabled()
    return learns and q.dtype == torch.float32
