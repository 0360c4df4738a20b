"""Variances of φ(x)·φ(y) as an estimate of e^{xᵀy}, in closed form, for m independent ω (scaled x, y; z = x + y).

All of them follow from E exp(a ω² + b ω) = (1−2a)^-½ exp(b² / 2(1−2a)) for ω ~ N(0, 1) and a < ½.

trig         (1/m) Σ cos ωᵀ(x−y) times e^{(‖x‖²+‖y‖²)/2}; with δ = x − y: E cos ωᵀδ = e^{−‖δ‖²/2} and
             E cos² ωᵀδ = (1 + e^{−2‖δ‖²})/2, so that Var cos = (1 − e^{−‖δ‖²})²/2
FAVOR+       E e^{2ωᵀz} e^{−‖x‖²−‖y‖²} = e^{2‖z‖² − ‖x‖² − ‖y‖²} = e^{2xᵀy} e^{‖z‖²}
hyperbolic   cosh ωᵀz in place of e^{ωᵀz}: E cosh² ωᵀz = (1 + e^{2‖z‖²})/2, so that Var = e^{2xᵀy} (cosh ‖z‖² − 1)
DERF         f f' = ∏ √(1−4A_l) exp(2A_l ω_l² + √(1−4A_l) ω_l w_l) exp(−(‖Sx‖² + ‖S^-T y‖²)/2), w = Sx + S^-T y;
             squared, a = 4A_l and b = 2√(1−4A_l) w_l, so that
             E f² f'² = ∏ (1−4A_l)(1−8A_l)^-½ exp(2(1−4A_l)/(1−8A_l) w_l²) exp(−‖Sx‖² − ‖S^-T y‖²)
GERF         DERF with S = I and one A
"""

from __future__ import annotations

import torch

from heedful.shapes import Float, Tensor


def variance_trig(x: Float[Tensor, "*b d"], y: Float[Tensor, "*b d"], m: int) -> Float[Tensor, "*b"]:
    """e^{‖x‖²+‖y‖²} (1 − e^{−‖x−y‖²})² / 2m.

    >>> variance_trig(torch.ones(3), torch.ones(3), m=10)
    tensor(0.)
    """
    return (_square(x) + _square(y)).exp() * torch.expm1(-_square(x - y)).square() / (2 * m)


def variance_favor_plus(x: Float[Tensor, "*b d"], y: Float[Tensor, "*b d"], m: int) -> Float[Tensor, "*b"]:
    """e^{2xᵀy} (e^{‖x+y‖²} − 1) / m."""
    return (2 * (x * y).sum(-1)).exp() * torch.expm1(_square(x + y)) / m


def variance_hyperbolic(x: Float[Tensor, "*b d"], y: Float[Tensor, "*b d"], m: int) -> Float[Tensor, "*b"]:
    """e^{2xᵀy} (cosh ‖x+y‖² − 1) / m for m pairs ±ω, 2m features."""
    return (2 * (x * y).sum(-1)).exp() * 2 * (_square(x + y) / 2).sinh().square() / m


def variance_gerf(A: float | Tensor, x: Float[Tensor, "*b d"], y: Float[Tensor, "*b d"], m: int) -> Float[Tensor, "*b"]:
    """GERF with parameter A < 1/8."""
    return variance_sderf(torch.as_tensor(A, dtype=x.dtype).expand(x.shape[-1]), x, y, m)


def variance_sderf(
    A: Float[Tensor, " d"],
    x: Float[Tensor, "*b d"],
    y: Float[Tensor, "*b d"],
    m: int,
    query_axes: Float[Tensor, "d d"] | None = None,
    key_axes: Float[Tensor, "d d"] | None = None,
) -> Float[Tensor, "*b"]:
    """Return the variance of any DERF. A and the axes are the buffers of `FavorSharp`; default: no change of axes."""
    target = (x * y).sum(-1)
    x = x if query_axes is None else x @ query_axes.mT
    y = y if key_axes is None else y @ key_axes.mT
    stretch = torch.log1p(-4 * A) - torch.log1p(-8 * A) / 2 + 2 * (1 - 4 * A) / (1 - 8 * A) * (x + y).square()
    log_second = stretch.sum(-1) - _square(x) - _square(y)
    return (2 * target).exp() * torch.expm1(log_second - 2 * target) / m


def variance_favor_plus_orthogonal(x: Float[Tensor, "*b d"], y: Float[Tensor, "*b d"], m: int) -> Float[Tensor, "*b"]:
    """FAVOR+ with rows orthogonal in blocks of d and independent χ_d norms.

    For two rows of one block, ω + ω' has the norm √(χ² + χ'²), a χ_2d, along a uniform direction. So E e^{(ω+ω')ᵀz} =
    ₁F₁(d; d/2; ‖z‖²/2) < e^{‖z‖²}: each pair of rows in a block has a negative covariance.
    """
    d, square = x.shape[-1], _square(x + y)
    hypergeometric = term = torch.ones_like(square)
    for i in range(400):  # (d)_i / (d/2)_i ≤ 2^i: a series like that of e^{‖z‖²}
        term = term * (d + i) / (d / 2 + i) * (square / 2) / (i + 1)
        hypergeometric = hypergeometric + term
    covariance = (-_square(x) - _square(y)).exp() * (hypergeometric - square.exp())
    pairs = m // d * d * (d - 1) + m % d * (m % d - 1)
    return variance_favor_plus(x, y, m) + covariance * pairs / m**2


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1)
