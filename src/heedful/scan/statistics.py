"""Means over texts with bootstrap intervals. The text is the unit: heads and tokens of one text are not independent."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch

from heedful.shapes import Float, Tensor

RESAMPLES = 2000


class Mean(NamedTuple):
    """Means with 95 % intervals, which are NaN for fewer than two texts."""

    mean: Float[Tensor, "*c"]
    low: Float[Tensor, "*c"]
    high: Float[Tensor, "*c"]

    @property
    def half_width(self) -> Float[Tensor, "*c"]:
        return (self.high - self.low) / 2


def bootstrap(values: Float[Tensor, "texts ..."], *, resamples: int = RESAMPLES, seed: int = 0) -> Mean:
    """The mean over texts, and the interval that holds 95 % of the means of resampled texts.

    The mean of T resampled texts has only (T − 1)/T of the true variance, so deviations are multiplied by √(T/(T − 1));
    this matters for few texts. NaN marks a text without a number, which is left out.

    >>> found = bootstrap(torch.arange(20.0, dtype=torch.float64)[:, None])
    >>> float(found.mean), bool(found.low < 9.5 < found.high)
    (9.5, True)
    """
    count, shape = values.shape[0], values.shape[1:]
    flat = values.reshape(count, -1).double()
    there = ~flat.isnan()
    filled = torch.where(there, flat, 0)
    mean = filled.sum(0) / there.sum(0)
    if count < 2:
        none = torch.full_like(mean, torch.nan).reshape(shape)
        return Mean(mean.reshape(shape), none, none)
    weights = _weights(count, resamples, seed)
    low, high = (torch.empty_like(mean) for _ in range(2))
    for part in torch.arange(flat.shape[1]).split(4096):
        means = weights @ filled[:, part] / (weights @ there[:, part].double())
        low[part], high[part] = _ends(mean[part], means, count)
    few = there.sum(0) < 2
    low, high = (x.masked_fill(few, torch.nan).reshape(shape) for x in (low, high))
    return Mean(mean.reshape(shape), low, high)


def exponent(
    lengths: Float[Tensor, " l"], values: Float[Tensor, "texts l *c"], *, resamples: int = RESAMPLES, seed: int = 0
) -> Mean:
    """α of mean ∝ lengthᵅ: the least-squares slope of log(mean over texts) against log(length).

    Each resample uses the same texts at all lengths and fits its own line. NaN marks a text without a number at that
    length.

    >>> x = torch.tensor([256.0, 512.0, 1024.0])
    >>> found = exponent(x, (x.sqrt() * 3).expand(4, -1)[..., None])
    >>> round(float(found.mean), 6)
    0.5
    """
    x = lengths.double().log()
    x = x - x.mean()

    def slope(means: Tensor) -> Tensor:
        y = means.log()
        return torch.einsum("l,...lc->...c", x, y - y.mean(-2, keepdim=True)) / x.square().sum()

    count, shape = values.shape[0], values.shape[2:]
    flat = values.reshape(count, len(x), -1).double()
    there = ~flat.isnan()
    filled = torch.where(there, flat, 0)
    found = slope(filled.sum(0) / there.sum(0))
    if count < 2:
        none = torch.full_like(found, torch.nan).reshape(shape)
        return Mean(found.reshape(shape), none, none)
    weights = _weights(count, resamples, seed)
    low, high = (torch.empty_like(found) for _ in range(2))
    for part in torch.arange(flat.shape[2]).split(max(1, 4096 // len(x))):
        sums, counts = (torch.einsum("rt,tlc->rlc", weights, y[..., part].double()) for y in (filled, there))
        low[part], high[part] = _ends(found[part], slope(sums / counts), count)
    few = (there.sum(0) < 2).any(0)
    low, high = (y.masked_fill(few, torch.nan).reshape(shape) for y in (low, high))
    return Mean(found.reshape(shape), low, high)


def _weights(count: int, resamples: int, seed: int) -> Float[Tensor, "resamples texts"]:
    """How often each text is drawn in each resample."""
    drawn = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
    ones = torch.ones(resamples, count, dtype=torch.float64)
    return torch.zeros_like(ones).scatter_add_(1, drawn, ones)


def _ends(found: Float[Tensor, " c"], resampled: Float[Tensor, "resamples c"], count: int) -> Float[Tensor, "2 c"]:
    """The ends of the interval with 95 % of the resampled values, with deviations stretched as in `bootstrap`."""
    resampled = resampled.mT.contiguous()  # quantiles along the last axis are four times as fast
    ends = resampled.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    return found + sqrt(count / (count - 1)) * (ends - found)
