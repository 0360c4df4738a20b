"""Gaussian numbers by seed, for the checks of this chapter."""

from __future__ import annotations

import torch

from heedful.shapes import Tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Independent N(0, 1) in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
