"""Means over texts with bootstrap intervals. The text is the unit: heads and tokens of one text are not independent."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch

from heedful.shapes import Float, Tensor

RESAMPLES = 2000


class Mean(NamedTuple):
    """Means with 95 % intervals, which are NaN where there is one text or none."""

    mean: Float[Tensor, "*c"]
    low: Float[Tensor, "*c"]
    high: Float[Tensor, "*c"]

    @property
    def half_width(self) -> Float[Tensor, "*c"]:
        return (self.high - self.low) / 2


def bootstrap(values: Float[Tensor, "texts ..."], *, resamples: int = RESAMPLES, seed: int = 0) -> Mean:
    """The mean over texts, and where 95 % of the means of resampled texts lie.

    A mean of T resampled texts varies with (T − 1)/T of the variance that it should have; deviations are stretched by
    the root, which matters for few texts. NaN stands for a text without the number, and is left out.

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
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    weights = torch.zeros(resamples, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(resamples, count, dtype=torch.float64)
    )
    low, high = (torch.empty_like(mean) for _ in range(2))
    for part in torch.arange(flat.shape[1]).split(4096):
        means = weights @ filled[:, part] / (weights @ there[:, part].double())
        means = means.mT.contiguous()  # quantiles along the last axis take a quarter of the time
        ends = means.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
        low[part], high[part] = mean[part] + sqrt(count / (count - 1)) * (ends - mean[part])
    few = there.sum(0) < 2
    low, high = (x.masked_fill(few, torch.nan).reshape(shape) for x in (low, high))
    return Mean(mean.reshape(shape), low, high)


def exponent(lengths: Float[Tensor, " l"], values: Float[Tensor, "texts l *c"]) -> Mean:
    """α of value ∝ lengthᵅ: the slope of each text's own line in log-log coordinates, then the mean over texts.

    >>> x = torch.tensor([256.0, 512.0, 1024.0])
    >>> found = exponent(x, (x.sqrt() * 3).expand(4, -1)[..., None])
    >>> round(float(found.mean), 6)
    0.5
    """
    x = lengths.double().log()
    x = x - x.mean()
    y = values.double().log()
    slopes = torch.einsum("l,tl...->t...", x, y - y.mean(1, keepdim=True)) / x.square().sum()
    return bootstrap(slopes)
