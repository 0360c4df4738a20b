"""One token of linear attention in plain torch, on any device, in any float type.

S ← λ S + φ(k) vᵀ,  z ← λ z + φ(k),  o = Sᵀφ(q) / z·φ(q)
exp features: with s the largest key so far,  S and z are kept times exp(−s)
              S ← exp(s − s') S + exp(k − s') vᵀ,  s' = max(s, max k);  φ(q) = exp(q − max q)
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
    """Why these inputs have no meaning, in sentences; none if they do."""
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
    S: Float[Tensor, "*b r e"],
    z: Float[Tensor, "*b r"] | None,
    log_scale: Float[Tensor, "*b"] | None,
    length: Int[Tensor, "*s"],
    *,
    feature: str = "identity",
    fade: Float[Tensor, "*#b #r"] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The output of one token, and S, z and log_scale after it; z is None where nothing is normalised.

    length   counts the tokens before it: an empty state has no scale yet
    fade     log λ, what is left of the state: one number a head, or one for each of its rows
    """
    if said := objections(q, k, v, S, z, log_scale, length, feature=feature, fade=fade):
        raise ValueError(" ".join(said))
    dtype, wide = q.dtype, S.dtype
    q, k, v = (x.to(wide) for x in (q, k, v))
    lift = None
    if log_scale is not None:
        top = q.amax(-1, keepdim=True)
        before = log_scale.masked_fill(length == 0, -torch.inf)
        log_scale = torch.maximum(before, k.amax((-2, -1)))
        fall = (before - log_scale).exp()
        S, z = S * fall[..., None, None], None if z is None else z * fall[..., None]
        x, y = (q - top).exp(), (k - log_scale[..., None, None]).exp()
        lift = top + log_scale[..., None, None]
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
