"""Features, and the other inputs that both backends prepare: runs of segments, decays of tokens, shifts of exponents.

In Triton `exp` features are shifted: exp(q − max_r q) and exp(k − s) with s the running maximum of the keys so far in
the segment. The change of s from token to token, s_{t−1} − s_t ≤ 0, is a log-decay, so nothing overflows and nothing
looks ahead; the shift cancels between numerator and denominator. In torch each feature has its own scale (chunks.py).
"""

from __future__ import annotations

import weakref
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

LOG2E = 1 / log(2)


class LinearState(NamedTuple):
    """S (B, Hs, r, e) and z (B, Hs, r) in float32 (float64 for float64 inputs); with angles 2r instead of r.

    Hs is the number of key heads, or of query heads if there is a decay (which belongs to query heads). z is None
    without a normaliser. With `exp` features both must be multiplied by exp(log_scale), (B, Hs, r): each feature has
    its own scale.
    """

    S: Tensor
    z: Tensor | None
    log_scale: Tensor | None = None


_last_runs: tuple = (None, None, None)


def runs(segments: Tensor) -> tuple[Tensor, bool]:
    """Codes (B, n) int32, and True if every segment is one run of tokens (padding aside).

    A code is the index c of the token's run within its row, or −1 − c for padding after run c. The result for the last
    tensor is cached: the layers of a model share their segments, and the check synchronises with the device.
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
    if (real & (segments < previous)).any():  # ascending ids are runs; others must be counted
        ids = torch.nn.functional.pad(segments.clamp(min=-1).sort(-1).values, (1, 0), value=-1)
        distinct = (ids[..., 1:] != ids[..., :-1]).sum(-1)
        contiguous = bool((run[..., -1] + real.any(-1) == distinct).all())
    answer = torch.where(real, run, -1 - run), contiguous
    _last_runs = weakref.ref(segments), version, answer
    return answer


def token_decay(log_decay, code, B, H, n, dtype) -> Tensor | None:
    """The decay of each token, (B, H, n); zero at padding, so padding does not change the results."""
    if log_decay is None:
        return None
    decay = log_decay.to(dtype)
    decay = decay[None, :, None].expand(B, H, n) if decay.ndim == 1 else decay
    return decay if code is None else torch.where((code >= 0)[:, None], decay, 0.0)


def turns_of(angles: Tensor, B: int, dtype: torch.dtype) -> Tensor:
    """The cosine and the sine of each token's angle, (B, n, 2)."""
    return torch.stack([angles.cos(), angles.sin()], -1).to(dtype).expand(B, -1, -1)


def exp_shifts(q, k, causal, code):
    """Shifts of q (B, H, n) and of k (B, Hkv, m); if causal, also the log-decay between the shifts of adjacent tokens.

    Causal: s_t = max(s_{t−1}, max_r k_t), restarted in each segment. Otherwise s is the maximum over the segment.
    The result does not depend on the shifts, so no gradient flows through them.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    top = k.detach().amax(-1).to(torch.float64)
    B, _, m = top.shape
    run = top.new_zeros(B, 1, m, dtype=torch.long)
    if code is not None:
        top = top.masked_fill((code < 0)[:, None], -torch.inf)
        run = torch.maximum(code, -1 - code).long()[:, None]
    # A running maximum that restarts with each run: add c · 2³⁰ to run c, far more than any key.
    lift = run * 2.0**30
    s = (top.clamp(-(2.0**29), 2.0**29) + lift).cummax(-1).values - lift
    if not causal:
        end = torch.searchsorted(run.contiguous(), run.contiguous(), right=True) - 1
        s = s.gather(-1, end.expand_as(s))
    unseen = s <= -(2.0**29)
    s = torch.where(unseen, 0.0, s)
    decay = None
    if causal:
        before = torch.nn.functional.pad(s.masked_fill(unseen, -torch.inf), (1, -1), value=-torch.inf)
        fall = before - s
        decay = torch.where(fall.isfinite() & (fall < 0), fall, 0.0).to(wide)
    return q.detach().amax(-1).to(wide), s.to(wide), decay


def exp_state(k, v, code) -> LinearState:
    """S, z and the scale of each feature after the last token of the last segment, in float32 or better."""
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    y = k.to(wide)
    if code is not None:
        run = torch.maximum(code, -1 - code)
        live = ((code >= 0) & (run == run[:, -1:]))[:, None, :, None]
        y, v = torch.where(live, y, -torch.inf), torch.where(live, v, 0.0)
    scale = y.detach().amax(-2, keepdim=True)
    scale = torch.where(scale.isfinite(), scale, 0.0)
    y = (y - scale).exp()
    return LinearState(y.mT @ v.to(wide), y.sum(-2), scale[..., 0, :])


def features(x, feature, shift, real, dtype, turns=None):
    x = x.to(dtype)
    match feature:
        case "elu1":
            x = _Elu1.apply(x)
        case "relu":
            x = x.relu()
        case "exp":
            x = exp_(x - shift)
    return turned(x if real is None else torch.where(real, x, 0.0), turns)


class _Elu1(torch.autograd.Function):
    """elu(x) + 1 in few passes, without losing e^x beside 1; saves its result, as the product does anyway."""

    @staticmethod
    def forward(ctx, x):
        phi = exp_(x.clamp(max=0)).add_(x.relu())
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx, grad):
        (phi,) = ctx.saved_tensors
        return grad * phi.clamp(max=1)


def turned(x, turns):
    """[x cos, x sin] if there are angles, otherwise x."""
    return x if turns is None else torch.cat([x * turns[..., :1], x * turns[..., 1:]], -1)


def _turned_back(x, turns):
    """The reverse rotation, for features and for gradients alike: cos² + sin² = 1."""
    if turns is None:
        return x
    r = x.shape[-1] // 2
    return (x[..., :r] * turns[..., :1]).addcmul_(x[..., r:], turns[..., 1:])


def exp_(x):
    """e^x in place. On a CPU, torch's exp (MKL) is 3 times slower than exp2, 20 times if the result underflows."""
    return x.mul_(LOG2E).exp2_()


def pulled(grad, phi, feature, turns, real):
    """Multiply a gradient in features by their derivative, computed from the features; in place, zero at padding."""
    grad, phi = _turned_back(grad, turns), phi if feature == "identity" else _turned_back(phi, turns)
    match feature:
        case "elu1":
            grad.mul_(phi.clamp(max=1))
        case "relu":
            grad.mul_(phi > 0)
        case "exp":
            grad.mul_(phi)
    return grad if real is None else grad.masked_fill_(~real, 0.0)
