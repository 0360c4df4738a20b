"""Gaussian numbers by seed; random features drawn many times: pairs to estimate on, estimates, and their errors."""

from __future__ import annotations

from math import sqrt

import torch

from heedful.random_features import RandomFeatures
from heedful.shapes import Tensor
from heedful.theory.samples import mean_and_error

DRAWS = 20_000  # at ‖x + y‖² ≤ 2, beyond which tails are too heavy for a standard error to mean much


def pair(square: float, cosine: float, d: int) -> tuple[Tensor, Tensor]:
    """x and y with ‖x‖² = ‖y‖² = square and this cosine."""
    x, y = torch.zeros(2, d, dtype=torch.float64).unbind()
    x[0], y[0], y[1] = sqrt(square), sqrt(square) * cosine, sqrt(square * (1 - cosine**2))
    return x, y


def along(z2: float, d: int) -> tuple[Tensor, Tensor]:
    """x = y with ‖x + y‖² = z2."""
    return pair(z2 / 4, 1.0, d)


def estimates(phi: RandomFeatures, x: Tensor, y: Tensor) -> Tensor:
    """φ(x)·φ(y), one for each independent draw: the map has as many heads."""
    return (phi.query(x[None, None]) * phi.key(y[None, None])).sum(-1).flatten()


def spread_and_error(samples: Tensor, center: float) -> tuple[float, float]:
    """Variance around a known mean, and its standard error."""
    return mean_and_error((samples - center).square())
