"""One token of linear attention in plain torch, on any device, in any float type.

S ← λ S + φ(k) vᵀ,  z ← λ z + φ(k),  o = Sᵀφ(q) / z·φ(q)
exp features: with s_r the largest key so far of each feature, S_r and z_r are stored times exp(−s_r)
              S ← exp(s − s') S + exp(k − s') vᵀ,  s' = max(s, k);  φ(q) = exp(q + s' − max_r (q + s'))
              the largest exp(q_r + k_r) over all keys is 1 in the normaliser
"""

from __future__ import annotations

import torch

from heedful.kernels.chunked_linear.groups import LEAST
from heedful.shapes import Float, Int, Tensor

FEATURES = {
    "identity": lambda x: x,
    "elu1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
    "relu": torch.relu,
}


def objections(q, k, v, S, z, log_scale, length, *, feature="identity", fade=None) -> list[str]:
    """Why these inputs are invalid, in sentences; empty if they are valid."""
    said = []
    if feature != "exp" and feature not in FEATURES:
        said.append(f"feature must be exp or one of {', '.join(FEATURES)}, got {feature!r}.")
    if (feature == "exp") != (log_scale is not None):
        said.append("exp features, and no other, have a log_scale in their state.")
    return said


def linear_step(
    q: Float[Tensor, "*#b 1 r"],
    k: Float[Tensor, "*#b 1 r"],
    v: Float[Tensor, "*#b 1 e"],
    S: Float[Tensor, "*#b r e"],
    z: Float[Tensor, "*#b r"] | None,
    log_scale: Float[Tensor, "*#b r"] | None,
    length: Int[Tensor, "*s"],
    *,
    feature: str = "identity",
    fade: Float[Tensor, "*#b #r"] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The output of one token, and S, z and log_scale after it; z is None without a normaliser.

    Queries that share keys and values share a state: it has the batch axes of k, v and fade, and may have fewer than q.

    length   the number of tokens before this one; an empty state has no scale yet
    fade     log λ, the decay of the state: one number per head, or one for each row of S
    """
    if said := objections(q, k, v, S, z, log_scale, length, feature=feature, fade=fade):
        raise ValueError(" ".join(said))
    dtype, wide = q.dtype, S.dtype
    q, k, v = (x.to(wide) for x in (q, k, v))
    lift = None
    if log_scale is not None:
        before = log_scale.masked_fill((length == 0)[..., None], -torch.inf)
        if fade is not None:  # fade the scales, not the sums: what remains of a large key must not hide a later one
            before, fade = before + fade.to(wide), None
        log_scale = torch.maximum(before, k[..., 0, :])
        fall = (before - log_scale).exp()
        S, z = S * fall[..., None], None if z is None else z * fall
        x, y = q + log_scale[..., None, :], (k - log_scale[..., None, :]).exp()
        lift = x.amax(-1, keepdim=True)
        x = (x - lift).exp()
    else:
        x, y = FEATURES[feature](q), FEATURES[feature](k)
    if fade is not None:
        keep = fade.to(wide).exp()
        S, z = S * keep[..., None], None if z is None else z * keep
    S = S + y.mT @ v
    out = x @ S
    if z is not None:
        z = z + y[..., 0, :]
        total = x @ z[..., None]
        some = total.abs() >= LEAST[wide]
        out = torch.where(some, out / torch.where(some, total, 1), 0)
    elif lift is not None:
        out = out * lift.exp()
    return out.to(dtype), S, z, log_scale
