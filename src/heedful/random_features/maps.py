"""The base class of random feature maps, and the two maps that are not given by logarithms.

Trig           φ(x) = e^{‖x‖²/2} [cos ωᵀx, sin ωᵀx] / √m     E φ(x)·φ(y) = e^{xᵀy}
ReluFeatures   φ(x) = max(ωᵀx, 0) / √m                       E φ(x)·φ(y) = ‖x‖‖y‖ (sin θ + (π − θ) cos θ) / 2π
"""

from __future__ import annotations

from math import log, pi, sqrt
from typing import Literal

import torch

from heedful.feature_maps import FeatureMap
from heedful.random_features.projections import projection
from heedful.shapes import Float, Tensor


class RandomFeatures(FeatureMap):
    """Base class of feature maps with a random projection, which is stored in buffers.

    features     m, the number of projections ω
    orthogonal   True: rows orthogonal in blocks of d; False: independent rows; "hadamard": structured, O(d log d)
    scale        scale of the scores, d^-½ by default
    heads        draw (and fit) a separate map for each of this many heads, the last batch axis of the inputs

    Features have float32 or better for every input dtype, and `.to(torch.bfloat16)` leaves the buffers in float32,
    because an absolute error in ωᵀx is a relative error in a feature.
    """

    def __init__(
        self,
        d: int,
        features: int,
        seed: int = 0,
        orthogonal: bool | Literal["hadamard"] = True,
        scale: float | None = None,
        heads: int | None = None,
    ):
        super().__init__()
        for name, number in (("d", d), ("features", features), ("heads", 1 if heads is None else heads)):
            if number < 1:
                raise ValueError(f"{name}: expected 1 or more, got {number}.")
        if scale is not None and not scale > 0:
            raise ValueError(f"scale: expected a positive number, as √scale multiplies both q and k; got {scale}.")
        self.d = d
        self.features = features
        self.heads = heads
        self.scale = d**-0.5 if scale is None else scale
        self.projection = projection(d, features, seed, orthogonal, heads)

    def dim(self, d: int) -> int:
        return self.features

    def flops(self, d: int) -> int:
        """Flops of the features of one token, as `Cost` counts them."""
        return self.projection.flops()

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new ω from the same distribution, in place. The fit of `calibrate` does not depend on ω and remains."""
        self.projection.redraw(generator)

    def scaled(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """√scale · x in float32 or better."""
        if x.shape[-1] != self.d:
            raise ValueError(
                f"q, k: width {x.shape[-1]}, expected {self.d}: {type(self).__name__} drew its projections for d = "
                f"{self.d}. Likely cause: d of the whole model instead of one head's, or heads that were not split."
            )
        if self.heads is not None and (x.ndim < 3 or x.shape[-3] not in (1, self.heads)):
            raise ValueError(
                f"q, k: shape {tuple(x.shape)}, expected (*batch, {self.heads}, tokens, {self.d}): "
                f"{type(self).__name__} has a projection for each of its {self.heads} heads."
            )
        return x.to(torch.promote_types(x.dtype, torch.float32)) * sqrt(self.scale)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}"

    def _apply(self, fn, recurse=True):
        def at_least_float32(x):
            moved = fn(x)
            return x.to(moved.device) if moved.is_floating_point() and moved.element_size() < 4 else moved

        return super()._apply(at_least_float32, recurse)


class Trig(RandomFeatures):
    """φ(x) = e^{‖x‖²/2} [cos ωᵀx, sin ωᵀx] / √m: signed, 2m features (Rahimi & Recht 2007; Peng et al. 2021,
    arXiv:2103.02143).

    >>> phi = Trig(d=4, features=64)
    >>> x = torch.tensor([[1.0, -0.5, 0.5, 0.0]])
    >>> round((phi.query(x) @ phi.key(x).mT).item(), 3)  # e^{‖x‖² / √4}
    2.117

    Its variance is zero at x = y and large where the kernel is small, so normalisers may vanish or change sign. ‖x‖²/2
    is clipped at 22, a quarter of float32's exponent range, so that products stay finite; estimates for such long keys
    are noise. The limit is the same in float64, because decoding steps compute float32 inputs in float64.
    """

    def query(self, x, positions=None):
        x = self.scaled(x)
        angle = self.projection(x)
        room = log(torch.finfo(torch.float32).max) / 4
        length = (x.square().sum(-1, keepdim=True) / 2).clamp(max=room).exp() / sqrt(self.features)
        return torch.cat([angle.cos(), angle.sin()], -1) * length

    def dim(self, d):
        return 2 * self.features


class ReluFeatures(RandomFeatures):
    """φ(x) = max(ωᵀx, 0) / √m (Choromanski et al. 2020, arXiv:2009.14794, "generalised attention").

    Its inner products do not estimate e^{xᵀy} but the arc-cosine kernel of order 1 (`arc_cosine`), which is
    non-negative, grows with the cosine of the angle and is linear in each length. All m features of a token are zero
    with probability 2^-m. The paper's code adds 10⁻³ to each feature to avoid this; here such a row of A is zero.

    >>> phi = ReluFeatures(d=4, features=8192)
    >>> x = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    >>> round((phi.query(x) @ phi.key(x).mT).item(), 1)  # ‖x‖² / 2√4
    1.0
    """

    def query(self, x, positions=None):
        return self.projection(self.scaled(x)).relu() / sqrt(self.features)


def arc_cosine(x: Float[Tensor, "*b d"], y: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
    """Return E max(ωᵀx, 0) max(ωᵀy, 0) = ‖x‖‖y‖ (sin θ + (π − θ) cos θ) / 2π (Cho & Saul 2009, order 1)."""
    lengths = x.norm(dim=-1) * y.norm(dim=-1)
    cosine = ((x * y).sum(-1) / lengths).clamp(-1, 1)
    angle = cosine.arccos()
    return lengths * (angle.sin() + (pi - angle) * cosine) / (2 * pi)
