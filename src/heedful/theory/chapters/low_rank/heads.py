"""The heads of trained models, and random heads to hold beside them, with what the chapter asks of both.

A random head has independent Gaussian queries and keys of the same width, as many tokens, the same pattern, and logits
of the same spread along a row. What it shows too is no mark of training.
"""

from __future__ import annotations

from functools import cache
from math import log, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

import torch

from heedful.measures import Spectrum, effective_rank, energy_share, entropy, spectrum
from heedful.mechanisms import Quadratic, Softmax, identity
from heedful.operator import AttentionOperator
from heedful.segments import visible
from heedful.shapes import Float, Tensor
from heedful.theory.models import calls

if TYPE_CHECKING:
    from heedful.hf.calls import Call


class Mean(NamedTuple):
    """A mean over texts and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, texts: list[float]) -> Mean:
        return cls(fmean(texts), stdev(texts) / sqrt(len(texts)))


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


def random_like(call: Call, seed: int) -> AttentionOperator:
    """Random heads with the pattern, the width and the spread of these."""
    shape, generator = call.q.shape, torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, *shape, generator=generator).unbind()
    return Softmax(call.pattern).operator(q * spread(call)[..., None, None], k)


def spread(call: Call) -> Float[Tensor, "b h"]:
    """The standard deviation of the logits along a row, as a root mean square over the rows."""
    scores = Quadratic(identity, call.pattern, call.scale, normalise=None)  # zero where nothing is to be seen
    logits = scores.matrix(call.q, call.per_head(call.k)).double()
    n, m = logits.shape[-2:]
    count = visible(call.pattern, n, m, call.segments).sum(-1)
    mean = logits.sum(-1) / count
    return (logits.square().sum(-1) / count - mean.square()).mean(-1).sqrt().float()


def growth(sizes: list[int], numbers: list[float]) -> float:
    """The exponent g of numbers ∝ size^g, by least squares in log-log.

    >>> round(growth([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [log(size) for size in sizes], [log(number) for number in numbers]
    centre = fmean(x)
    return sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)
