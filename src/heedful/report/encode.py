"""Encode numbers as short text: one character per cell of a picture, two per value of a spectrum.

    picture     63·√(w / largest), rounded: weights span decades, and the square root shows small ones
    spectrum    log₁₀ σ from −8 to 4 in 4096 steps (0.7 % each), only at the indices of GRID

The alphabet is base64, so JSON needs no escapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from heedful.shapes import Tensor

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
MISSING = ".."
LEAST, MOST, STEPS = -8.0, 4.0, 4095
SHADES = 63
GRID = sorted({round(1.18**power) for power in range(70)})
"""Indices, from 1, at which a spectrum is stored: all of the first ones, then 18 % apart, up to 100,000."""

_SHADE = bytes(ord(ALPHABET[round(SHADES * math.sqrt(level / 255))]) for level in range(256))


def spectrum(values: Iterable[float | None]) -> str:
    """Singular values as text; values that are not positive count as missing.

    >>> spectrum([1.0, 0.0]), len(spectrum([3.0, 2.0, 1.0]))
    ('qq..', 6)
    """
    pairs = []
    for value in values:
        if value is None or not value > 0:
            pairs.append(MISSING)
            continue
        share = (math.log10(value) - LEAST) / (MOST - LEAST)
        step = round(STEPS * min(max(share, 0.0), 1.0))
        pairs.append(ALPHABET[step // 64] + ALPHABET[step % 64])
    return "".join(pairs)


def picture(cells: Sequence[int], height: int, width: int, shrink: int = 1, pooling: str = "max") -> str:
    """A picture of bytes as text, row by row. Pools `shrink` × `shrink` cells into one; blocks at the edge may be
    smaller.

    >>> picture([0, 255, 64, 16], 2, 2), picture([0, 255, 64, 16], 2, 2, shrink=2)
    ('A/gQ', '/')
    """
    data = bytes(cells)
    if shrink > 1:
        data = bytes(_pooled(torch.tensor(list(data)).view(height, width), shrink, pooling).flatten().tolist())
    return data.translate(_SHADE).decode("ascii")


def _pooled(cells: Tensor, shrink: int, pooling: str) -> Tensor:
    image = cells[None, None].float()
    if pooling == "max":
        return torch.nn.functional.max_pool2d(image, shrink, ceil_mode=True)[0, 0].round().to(torch.uint8)
    return torch.nn.functional.avg_pool2d(image, shrink, ceil_mode=True)[0, 0].round().to(torch.uint8)


def short(value: float | None, digits: int = 4) -> float | int | None:
    """A number for JSON: four significant digits, whole numbers as integers, None if not finite.

    >>> short(12.0), short(0.123456), short(float("nan"))
    (12, 0.1235, None)
    """
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded
