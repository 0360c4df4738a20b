"""What the sections of this chapter share: real heads, random ones of the same sharpness, and means over texts.

The text is the unit of all statistics: a number is taken for each head, averaged over the heads of a text, and its
standard error is that of the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from heedful.measures import effective_rank
from heedful.mechanisms import Softmax
from heedful.operator import AttentionOperator
from heedful.patterns import Pattern
from heedful.shapes import Float, Tensor
from heedful.theory import models

if TYPE_CHECKING:
    from heedful.hf.calls import Call

TEXTS = 6
LENGTH = 128

Heads = Callable[["Call", int], AttentionOperator]
"""The operators of a layer's heads, from its call and a seed."""


def rank_of(weights: AttentionOperator | Tensor) -> Float[Tensor, "*b"]:
    """Effective rank: how many singular values hold 0.9 of Σσ²."""
    return effective_rank(weights).estimate.double()


def as_trained(call: Call, seed: int = 0) -> AttentionOperator:
    return call.operator()


def masked(pattern: Pattern) -> Heads:
    """The call's own q and k under another mask."""
    return lambda call, seed: Softmax(pattern, call.scale).operator(call.q, call.per_head(call.k))


def by_text(
    measure: Callable[[Call, int], Tensor],
    name: str = "minilm",
    *,
    length: int = LENGTH,
    texts: int = TEXTS,
    layers: slice = slice(None),
    trained: bool = True,
) -> Float[Tensor, " t"]:
    """A number of each head, averaged over the heads of each text; seeds differ between texts."""
    means = []
    for text in range(texts):
        calls = models.calls(name, length, text, trained)[layers]
        means.append(torch.stack([measure(call, text).double().mean() for call in calls]).mean())
    return torch.stack(means)


def by_text_of_smollm2(measure: Callable[[Call, int], Tensor]) -> Float[Tensor, " t"]:
    """The same for SmolLM2: 4 texts of 256 tokens, every fifth layer."""
    return by_text(measure, "smollm2", length=256, texts=4, layers=slice(None, None, 5))


def by_layer(measure: Callable[[Call, int], Tensor], name: str = "minilm", trained: bool = True) -> list[float]:
    """A number of each head of the first text, averaged over the heads of each layer, for a picture."""
    return [float(measure(call, 0).double().mean()) for call in models.calls(name, LENGTH, 0, trained)]


def gaussian(n: int, d: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """q and k whose logits q·k/√d have this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, n, d, generator=generator, dtype=torch.float64).unbind()
    return spread * q, k


def few_tokens(n: int, d: int, distinct: int, seed: int) -> tuple[Tensor, Tensor]:
    """q and k of n tokens of which only so many differ, in random order; logits have standard deviation 2."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.cat([torch.arange(distinct), torch.randint(distinct, (n - distinct,), generator=generator)])
    which = which[torch.randperm(n, generator=generator)]
    q, k = gaussian(distinct, d, 2.0, seed)
    return q[which], k[which]
