"""Positive random features, given by their logarithms.

    FAVOR+     log f(ω, x) = ωᵀx − ‖x‖²/2
    FAVOR++    log f(ω, x) = (d/4) log(1−4A) + A‖ω‖² + √(1−4A) ωᵀx − ‖x‖²/2                    A < 1/8
    FAVOR#     log f(ω, x) = ¼ Σ log(1−4A_l) + Σ A_l ω_l² + Σ √(1−4A_l) ω_l (Sx)_l − ‖Sx‖²/2      A_l < 1/8
               with S for queries and S^-T for keys, which leaves (Sx)ᵀ(S^-T y) = xᵀy

each over √m; E_ω f(ω, x) f(ω, y) = e^{xᵀy}. Why: with z = x + y (in the new axes), f f' is a Gaussian integral,
∏ √(1−4A_l) E exp(2A_l ω_l² + √(1−4A_l) ω_l z_l) = ∏ exp(z_l²/2), and ‖z‖²/2 − ‖x‖²/2 − ‖y‖²/2 = xᵀy.

FAVOR# is written in its paper as D exp(ωᵀAω + ωᵀBx + xᵀCx) with a symmetric A. As ω is isotropic A may be taken
diagonal, and then B = (I−4A)^½ S, C = −½SᵀS: orthogonal S is SDERF, A = aI is ADERF, A = aI with a diagonal S SADERF.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Literal

import torch

from heedful.constants import rounded_anew
from heedful.feature_maps import LinearLogs, LogFeatureMap
from heedful.random_features.fits import Moments, fit_aderf, fit_gerf, fit_saderf, fit_sderf
from heedful.random_features.maps import RandomFeatures
from heedful.shapes import Float, Tensor


class FavorPlus(RandomFeatures, LogFeatureMap):
    """φ(x) = exp(ωᵀx − ‖x‖²/2) / √m (Choromanski et al. 2020, arXiv:2009.14794, Lemma 1).

    >>> phi = FavorPlus(d=4, features=4096)
    >>> q, k = torch.tensor([[1.0, -0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.0, 1.0, 0.5]])
    >>> round((phi.query(q) @ phi.key(k).mT).item(), 1)  # e^{q·k / √4} = 1.284
    1.3

    hyperbolic=True uses each ω with both signs: 2m features, and ½(1 − e^{−‖x+y‖²}) times the variance.
    """

    logs_depend_on = ("scale", "hyperbolic")

    def __init__(
        self,
        d: int,
        features: int,
        seed: int = 0,
        orthogonal: bool | Literal["hadamard"] = True,
        scale: float | None = None,
        heads: int | None = None,
        hyperbolic: bool = False,
    ):
        super().__init__(d, features, seed, orthogonal, scale, heads)
        self.hyperbolic = hyperbolic

    def log_query(self, x):
        x = self.scaled(x)
        score = self.projection(x)
        if self.hyperbolic:
            score = torch.cat([score, -score], -1)
        # in place, as it is nobody else's; added, as the gradient of a difference is first negated in full
        return score.add_((x.square().sum(-1, keepdim=True) + log(score.shape[-1])) / -2)

    def linear_logs(self):
        W = _by_head(self.projection.rows().mT * sqrt(self.scale), 3)
        if self.hyperbolic:
            W = torch.cat([W, -W], -1)
        return LinearLogs(W, W, torch.full_like(W[:, 0], -log(W.shape[-1]) / 2), self.scale)

    def dim(self, d):
        return self.features * (2 if self.hyperbolic else 1)

    def extra_repr(self):
        return super().extra_repr() + (", hyperbolic=True" if self.hyperbolic else "")


class FavorPlusPlus(RandomFeatures, LogFeatureMap):
    """Generalised exponential features, GERF (Likhosherstov et al. 2022, arXiv:2205.15317).

    A starts at 0, which is FAVOR+; `calibrate(q, k)` sets the best one for queries and keys such as these.

    >>> q, k = torch.randn(2, 1, 100, 4, generator=torch.Generator().manual_seed(0))
    >>> phi = FavorPlusPlus(d=4, features=16)
    >>> phi.calibrate(q, k)
    >>> -1 < phi.A.item() < 0
    True
    """

    A: Tensor

    logs_depend_on = ("scale",)

    def __init__(
        self,
        d: int,
        features: int,
        seed: int = 0,
        orthogonal: bool | Literal["hadamard"] = True,
        scale: float | None = None,
        heads: int | None = None,
        A: float = 0.0,
    ):
        super().__init__(d, features, seed, orthogonal, scale, heads)
        if not A < 1 / 8:
            raise ValueError(f"A: expected a number below 1/8, beyond which the variance is infinite; got {A}.")
        self.given = float(A)
        self.register_buffer("A", torch.full((*self.projection.lead, 1), self.given))

    def _apply(self, fn, recurse=True):
        before = self.A
        super()._apply(fn, recurse)
        self.A = rounded_anew(before, self.A, lambda: torch.full(before.shape, self.given, dtype=torch.float64))
        return self

    def calibrate(self, q: Float[Tensor, "*#b n d"], k: Float[Tensor, "*#b m d"]) -> None:
        """Set A to the one that minimises the mean log second moment over all pairs of a query and a key."""
        moments = Moments.of(self.scaled(q), self.scaled(k), per_head=self.heads is not None)
        self.A.copy_(fit_gerf(moments).A[..., :1])

    def log_query(self, x):
        return _log_features(self, self.scaled(x), self.A)

    def linear_logs(self):
        W, own = _rows_and_own(self, self.A, torch.float32)
        W = _by_head(W.mT * sqrt(self.scale), 3)
        return LinearLogs(W, W, _by_head(own, 2), self.scale)

    def extra_repr(self):
        return f"{super().extra_repr()}, A={_in_short(self.A)}"


class FavorSharp(RandomFeatures, LogFeatureMap):
    """Dense exponential features, DERF (Likhosherstov et al. 2023, arXiv:2302.00787).

    kind     "sderf": axes along the principal ones of x + y, one A each; "aderf": queries and keys balanced by a linear
             map, one A; "saderf": balanced coordinate by coordinate, one A

    Starts at A = 0 in the given axes, which is FAVOR+; `calibrate(q, k)` fits A and the axes.

    >>> q, k = torch.randn(2, 1, 100, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([2, 1, 0.5, 0.1])
    >>> phi = FavorSharp(d=4, features=16)
    >>> phi.calibrate(q, k)
    >>> phi.A  # 0 across the axis that hardly varies
    tensor([-0.005..., -0.1..., -0.3..., -0.8...])
    """

    A: Tensor
    query_axes: Tensor
    key_axes: Tensor

    logs_depend_on = ("scale",)

    def __init__(
        self,
        d: int,
        features: int,
        seed: int = 0,
        orthogonal: bool | Literal["hadamard"] = True,
        scale: float | None = None,
        heads: int | None = None,
        kind: Literal["sderf", "aderf", "saderf"] = "sderf",
    ):
        super().__init__(d, features, seed, orthogonal, scale, heads)
        if kind not in FITS:
            raise ValueError(f"kind: expected one of {', '.join(FITS)}, got {kind!r}.")
        self.kind = kind
        lead = self.projection.lead
        self.register_buffer("A", torch.zeros(*lead, d))
        self.register_buffer("query_axes", torch.eye(d).repeat(*lead, 1, 1))
        self.register_buffer("key_axes", torch.eye(d).repeat(*lead, 1, 1))

    def flops(self, d):
        return super().flops(d) + 2 * d**2

    def calibrate(self, q: Float[Tensor, "*#b n d"], k: Float[Tensor, "*#b m d"]) -> None:
        """Set A and the axes to those that minimise the mean log second moment over all pairs of a query and a key."""
        moments = Moments.of(self.scaled(q), self.scaled(k), per_head=self.heads is not None)
        fit = FITS[self.kind](moments)
        for buffer, found in zip((self.A, self.query_axes, self.key_axes), fit, strict=True):
            buffer.copy_(found)

    def log_query(self, x):
        x = self.scaled(x)
        return _log_features(self, x @ self.query_axes.to(x.dtype).mT, self.A)

    def log_key(self, x):
        x = self.scaled(x)
        return _log_features(self, x @ self.key_axes.to(x.dtype).mT, self.A)

    def linear_logs(self):
        W, own = _rows_and_own(self, self.A, torch.float32)
        axes = [x.float() * sqrt(self.scale) for x in (self.query_axes, self.key_axes)]
        Wq, Wk = (_by_head((W @ x).mT, 3) for x in axes)
        return LinearLogs(Wq, Wk, _by_head(own, 2), 0.0, axes[1])

    def extra_repr(self):
        return f"{super().extra_repr()}, kind={self.kind!r}, A={_in_short(self.A)}"


FITS = {"sderf": fit_sderf, "aderf": fit_aderf, "saderf": fit_saderf}


def _by_head(x: Tensor, axes: int) -> Tensor:
    """With an axis of heads in front, if only of one."""
    return x if x.ndim == axes else x[None]


def _rows_and_own(phi: RandomFeatures, A: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows √(1−4A) ω, and what a feature's logarithm has of its own: A‖ω‖² and the constants."""
    A = A.to(dtype).expand(*A.shape[:-1], phi.d)
    rows = phi.projection.rows().to(dtype)
    own = (rows.square() * A[..., None, :]).sum(-1)
    own = own + (torch.log1p(-4 * A).sum(-1, keepdim=True) - 2 * log(phi.features)) / 4
    return rows * (1 - 4 * A).sqrt()[..., None, :], own


def _log_features(phi: RandomFeatures, x: Tensor, A: Tensor) -> Tensor:
    """log f(ω, x) − ½ log m, with x in the new axes already."""
    own = _rows_and_own(phi, A, x.dtype)[1]
    A = A.to(x.dtype).expand(*A.shape[:-1], phi.d)
    score = phi.projection(x * (1 - 4 * A).sqrt()[..., None, :])
    return score.add_(own[..., None, :]).add_(x.square().sum(-1, keepdim=True) / -2)  # it is nobody else's


def _in_short(A: Tensor) -> str:
    if not A.any():
        return "0 (calibrate(q, k) fits it)"
    low, high = A.aminmax()
    return f"{low:.3g}" if low == high else f"{low:.3g}…{high:.3g}"
