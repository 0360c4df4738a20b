"""Seeded samples, and means with standard errors, for statistical checks."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch

from heedful.shapes import Tensor


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Independent N(0, 1) samples in float64."""
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def mean_and_error(samples: Tensor | Sequence[float]) -> tuple[float, float]:
    """The mean of independent samples, and its standard error.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    x = torch.as_tensor(samples, dtype=torch.float64).flatten()
    return float(x.mean()), float(x.std() / sqrt(len(x)))
