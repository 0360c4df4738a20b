"""What the sections of this chapter share: rows of given weights, Gaussian keys, and integrals over a Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch

from heedful.feature_maps import Identity
from heedful.measures import concentration
from heedful.measures.concentration import Concentration
from heedful.mechanisms import Linear, Quadratic
from heedful.mechanisms.quadratic import Normaliser
from heedful.patterns import Full
from heedful.shapes import Float, Tensor

Activation = Callable[[Tensor], Tensor]


def of_row(weights: Float[Tensor, "*b n"]) -> Concentration:
    """The concentration of one query whose weights are these: linear attention without activation, q = 1, k = a."""
    one = torch.ones(1, 1, dtype=weights.dtype)
    return concentration(Linear(Identity(), Full(), normalise=False).operator(one, weights[..., None]))


def gaussian_keys(n: int, beta: float, gamma: float, *, repeats: int, seed: int, d: int = 2) -> tuple[Tensor, Tensor]:
    """q of norm 1 and n keys from N(μ, σ²I) with q·μ = β and σ = γ, so many times."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.full((1, d), d**-0.5, dtype=torch.float64)
    noise = torch.randn(repeats, n, d, generator=generator, dtype=torch.float64)
    return q, beta * q + gamma * noise


def sampled(f: Activation, n: int, beta: float, gamma: float, *, repeats: int, seed: int) -> Concentration:
    """Concentration of f(q·k) over n Gaussian keys, one row a repetition."""
    return concentration_of(f, *gaussian_keys(n, beta, gamma, repeats=repeats, seed=seed))


def concentration_of(f: Activation, q: Tensor, k: Tensor) -> Concentration:
    """Concentration of f(q·k)."""
    normaliser: Normaliser | None = (
        "l1" if f is torch.exp else None
    )  # S does not change with the scale, and exp can't overflow
    return concentration(Quadratic(f, Full(), scale=1.0, normalise=normaliser).operator(q, k))


def gaussian_mean(f: Activation, kink: float = 0.0) -> float:
    """E f(ε), ε ~ N(0, 1), for f smooth but at `kink`: x = kink ± e^{y − e^{−y}} makes both sides fall off in y twice.

    >>> round(gaussian_mean(lambda x: x.abs()) ** 2 * pi, 12)
    2.0
    """
    step = 1 / 64
    y = torch.arange(-6, 6, step, dtype=torch.float64)
    reach = torch.exp(y - torch.exp(-y))
    slope = reach * (1 + torch.exp(-y)) * step
    sides = (f(x) * torch.exp(-x.square() / 2) * slope for x in (kink + reach, kink - reach))
    return float(sum(side.nan_to_num(0).sum() for side in sides)) / sqrt(2 * pi)


def integrated_S(f: Activation, beta: float, gamma: float) -> float:
    """E|f(β + γε)| / √E f²(β + γε) by quadrature; f may have its kink at 0."""
    kink = -beta / gamma
    first = gaussian_mean(lambda x: f(beta + gamma * x).abs(), kink)
    second = gaussian_mean(lambda x: f(beta + gamma * x).square(), kink)
    return first / sqrt(second)


def slope_and_error(x: Float[Tensor, " k"], y: Float[Tensor, " k"]) -> tuple[float, float]:
    """Least squares of log y on log x: the exponent and its standard error."""
    x, y = x.double().log(), y.double().log()
    x, y = x - x.mean(), y - y.mean()
    slope = (x * y).sum() / x.square().sum()
    misfit = (y - slope * x).square().sum() / max(len(x) - 2, 1)
    return float(slope), float((misfit / x.square().sum()).sqrt())
