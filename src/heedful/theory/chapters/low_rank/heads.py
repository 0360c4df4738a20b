"""The heads of trained models, and random heads to hold beside them, with what the chapter asks of both."""

from __future__ import annotations

from functools import cache
from math import log
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch

from heedful.measures import Spectrum, effective_rank, energy_share, entropy, spectrum
from heedful.shapes import Float, Tensor
from heedful.theory.models import calls, random_like
from heedful.theory.samples import mean_and_error

if TYPE_CHECKING:
    pass


class Mean(NamedTuple):
    """A mean over texts and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, texts: list[float]) -> Mean:
        return cls(*mean_and_error(texts))


class Heads(NamedTuple):
    """All heads of a model on one text, a layer an entry: singular values, and the mean entropy of their rows."""

    spectra: tuple[Spectrum, ...]
    entropies: tuple[Float[Tensor, " h"], ...]

    def ranks(self, tau: float = 0.9) -> Float[Tensor, "l h"]:
        """Effective ranks."""
        return torch.stack([effective_rank(layer, tau).estimate[0].double() for layer in self.spectra])

    def shares(self, part: float = 0.1) -> Float[Tensor, "l h"]:
        """The energy in the largest `part` of the singular values."""
        return torch.stack([energy_share(layer, part).estimate[0] for layer in self.spectra])

    def constants(self, alpha: float) -> Float[Tensor, "l h"]:
        """The least C with σ_i ≤ C i^−α."""
        values = torch.stack([layer.values[0] for layer in self.spectra])
        return (values * torch.arange(1, values.shape[-1] + 1) ** alpha).amax(-1)


@cache
def heads(name: str, length: int, text: int, trained: bool = True) -> Heads:
    """The heads of a model on a passage; not trained, random ones in their place."""
    spectra, entropies = [], []
    for layer, call in enumerate(calls(name, length, text)):
        op = call.operator() if trained else random_like(call, seed=1000 * text + layer)
        spectra.append(spectrum(op, length))
        entropies.append(entropy(op).mean(-1)[0])
    return Heads(tuple(spectra), tuple(entropies))


def growth(sizes: list[int], numbers: list[float]) -> float:
    """The exponent g of numbers ∝ size^g, by least squares in log-log.

    >>> round(growth([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [log(size) for size in sizes], [log(number) for number in numbers]
    centre = fmean(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)
