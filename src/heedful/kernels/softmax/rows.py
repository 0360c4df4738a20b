"""Softmax as a row function.

    weights     p = exp(s − lse),  s = cap · tanh(x / cap) + bias,  lse = log(Σ_visible exp(s) + exp(sink))
    pull back   ds = p ∘ (dp − dO·O)         (the sink takes part of the mass but has no value)

A temperature needs no code: it divides scale, cap, bias and sink alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import nn

from heedful.kernels.blocked.tiles import Tile, pick, with_axes
from heedful.patterns import Pattern
from heedful.shapes import Tensor


@dataclass(frozen=True)
class SoftmaxRows:
    """Weights that are positive and sum to one over the visible keys (and the sink, where there is one)."""

    bias: Tensor | None = None
    bias_function: Callable[[Tensor, Tensor], Tensor] | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    temperature: float = 1.0

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        module = self.bias_function
        learned = tuple(module.parameters()) if isinstance(module, nn.Module) else ()
        return (*([] if self.sink is None else [self.sink]), *learned)

    def weights(self, scores, tile: Tile, bias, parameters):
        scores = self.logits(scores, tile, bias, parameters)
        if self.sink is not None:
            sink = self.sink_of(tile, scores, parameters)
            scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
            return scores.softmax(-1)[..., :-1]
        dead = self._dead_rows(scores, tile, bias)
        if dead is None:
            in_place = not scores.requires_grad and scores.device.type == "cpu"  # each row is read before it is written
            return torch.softmax(scores, -1, out=scores) if in_place else scores.softmax(-1)
        return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)

    def logits(self, scores, tile: Tile, bias, parameters) -> Tensor:
        """What the exponential is taken of: capped, biased, −∞ where hidden. May overwrite the scores, as `weights`."""
        learned = parameters if self.sink is None else parameters[1:]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if bias is not None:
            scores = scores + bias
        if self.bias_function is not None:
            extra = with_axes(_bias_at(self.bias_function, tile.i, tile.j, learned), _axes(scores, tile), 2)
            scores = scores + pick(extra, tile.batch).to(scores.dtype) / self.temperature
        return tile.lower(scores)

    def sink_of(self, tile: Tile, scores: Tensor, parameters) -> Tensor:
        """The sink's logit for the rows of a tile, (…, 1, 1)."""
        sink = pick(with_axes(parameters[0], _axes(scores, tile), 0), tile.batch)
        return sink[..., None, None].to(scores.dtype) / self.temperature

    def _dead_rows(self, scores, tile: Tile, bias):
        """Queries with nothing to attend to, which get zeros (softmax of -inf alone is NaN); None where none is."""
        if bias is not None or self.bias_function is not None:
            dead = scores.detach().amax(-1, keepdim=True) == -inf
            return dead if dead.any() else None
        return tile.blind

    def pull_back(self, weights, grad, dot):
        return None if self.softcap is not None else grad.sub_(dot).mul_(weights)


def kind(q, k, v, rows: SoftmaxRows, pattern: Pattern, segments, scale: float, *, memory=None) -> tuple | None:
    """What the choice of a softmax backend depends on; None where it depends on values: of segments, or of a bias."""
    if segments is not None or rows.bias is not None:
        return None
    sink = rows.sink
    return (
        *(q.shape, k.shape, v.shape, q.dtype, q.device, q.requires_grad, k.requires_grad, v.requires_grad),
        *(pattern, scale > 0, rows.bias_function is None, rows.softcap is None, None if sink is None else sink.shape),
    )


def _axes(scores: Tensor, tile: Tile) -> int:
    """How many batch axes the whole work has."""
    return scores.ndim - 2 + len(tile.batch)


def _bias_at(function: Callable[[Tensor, Tensor], Tensor], i: Tensor, j: Tensor, learned) -> Tensor:
    if isinstance(function, nn.Module):
        names = [name for name, _ in function.named_parameters()]
        return torch.func.functional_call(function, dict(zip(names, learned, strict=True)), (i, j))
    with torch.enable_grad():
        extra = function(i, j)
    if extra.requires_grad:
        raise TypeError(
            "bias: a plain function returned a tensor that requires grad, and its gradient would be lost between "
            "tiles. Make the function an nn.Module that owns its parameters."
        )
    return extra
