"""Tiles of the score matrix, and row functions: what turns the scores of a tile into weights.

A tile is a block of queries with *all* the keys that any of them may see, gathered together. So a row function sees
whole rows: no running maximum, no second pass. `schedule` says which tiles a pattern has.

    softmax     p = exp(s − lse),  s = cap · tanh(x / cap) + bias,  lse = log(Σ_visible exp(s) + exp(sink))
    pull back   ds = p ∘ (dp − dO·O)         (the sink takes part of the mass but has no value)

A temperature needs no code: it divides scale, cap, bias and sink alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from heedful.patterns import Pattern, Span
from heedful.shapes import Bool, Float, Int, Tensor

FEWEST = 16  # fewer queries than this are not worth a call of their own
ROWS = 128  # queries in a tile: enough for the matrix unit, few enough that a window's corners cost little
VECTOR = 16  # numbers that a CPU handles at once: where slices begin and end elsewhere, they take up to twice as long
BUDGET = 1 << 21  # scores in a tile: 8 MiB in float32


class Size(NamedTuple):
    """Of tiles: the most queries, the fewest that are worth a call of their own, the most scores."""

    rows: int
    fewest: int
    scores: int


ON_GPU = Size(512, 128, 1 << 26)  # 256 MiB: enough work to hide what a launch costs


def size_on(device: torch.device) -> Size:
    return Size(ROWS, FEWEST, BUDGET) if device.type == "cpu" else ON_GPU


class Mask:
    """Which queries see which keys, with the forms that row functions need, each made once."""

    def __init__(self, visible: Bool[Tensor, "*s r c"]):
        self.visible = visible

    @cached_property
    def hidden(self) -> Bool[Tensor, "*s r c"]:
        return ~self.visible

    @cached_property
    def penalty(self) -> Float[Tensor, "*s r c"]:
        return torch.where(self.visible, 0.0, -inf).float()

    @cached_property
    def blind(self) -> Bool[Tensor, "*s r 1"] | None:
        """The queries that see none of these keys; None where there is none."""
        blind = self.hidden.all(-1, keepdim=True)
        return blind if blind.any() else None

    @cached_property
    def count(self) -> Int[Tensor, "*s r 1"]:
        return self.visible.sum(-1, keepdim=True)

    def complete(self) -> None:
        """Make every form now, for a mask that later calls use again."""
        _ = self.hidden, self.penalty, self.blind, self.count


class Keys:
    """The keys of a tile, in increasing order: whole intervals, or single ones."""

    FEW = 8  # up to so many intervals are faster copied one by one than gathered by index

    def __init__(self, spans: list[Span] | None = None, index: Tensor | None = None):
        self.interval = spans[0] if spans is not None and len(spans) == 1 else None
        """The first and the one after the last, where these are all the keys between; None where they are not."""
        self.spans = spans if spans is not None and len(spans) <= self.FEW else None
        self._all, self._given = spans or [], index

    @cached_property
    def index(self) -> Int[Tensor, " c"]:
        return torch.cat([torch.arange(*span) for span in self._all]) if self._given is None else self._given

    def __len__(self) -> int:
        return len(self.index) if self.interval is None else self.interval[1] - self.interval[0]

    @property
    def last(self) -> int:
        return int(self.index[-1]) if self.interval is None else self.interval[1] - 1

    def before(self, key: int) -> int:
        """How many are less than this one."""
        if self.interval is None:
            return int(torch.searchsorted(self.index, key))
        start, stop = self.interval
        return min(max(key, start), stop) - start

    def find(self, keys: Int[Tensor, "*x"]) -> tuple[Int[Tensor, "*x"], Bool[Tensor, "*x"]]:
        """Where these stand among mine, and whether they do."""
        if self.interval is not None:
            start, stop = self.interval
            inside = keys.clamp(start, stop - 1)
            return inside - start, inside == keys
        index = self.index.to(keys.device)
        place = torch.searchsorted(index, keys.contiguous()).clamp(max=len(index) - 1)
        return place, index[place] == keys

    def take(self, x: Float[Tensor, "*b m w"], out: Tensor | None = None) -> Float[Tensor, "*b c w"]:
        """x[…, keys, :], a view where the keys are one interval, else a copy (into `out`, where it is given)."""
        if self.spans is None:  # x[..., index, :] is four times slower
            return torch.index_select(x, -2, self.index.to(x.device), out=out)
        parts = [x.narrow(-2, start, stop - start) for start, stop in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2, out=out)

    def add(self, target: Float[Tensor, "*b m w"], part: Float[Tensor, "*b c w"]) -> None:
        """target[…, keys, :] += part."""
        if self.spans is None:
            target.index_add_(-2, self.index.to(target.device), part)
            return
        done = 0
        for start, stop in self.spans:
            target.narrow(-2, start, stop - start).add_(part.narrow(-2, done, stop - start))
            done += stop - start


@dataclass(frozen=True)
class Tile:
    """Part of the work: `batch` indexes the leading batch axes, `rows` the queries, `cols` the keys.

    Every query sees the first `clear` keys; `mask` is about those after them, and None where all are seen.
    """

    batch: tuple[int, ...]
    rows: slice
    cols: Keys
    i: Int[Tensor, "*s r 1"]
    j: Int[Tensor, " c"] | Int[Tensor, "*s #r c"]
    mask: Mask | None
    clear: int = 0

    def lower(self, scores: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b r c"]:
        """Scores with −∞ where hidden. (Adding is ten times faster than filling by a boolean mask.)"""
        if self.mask is None:
            return scores
        if scores.requires_grad:
            return scores + F.pad(self.mask.penalty, (self.clear, 0))
        scores[..., self.clear :].add_(self.mask.penalty)  # += would also copy the slice onto itself
        return scores

    def blank(self, weights: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b r c"]:
        """Weights with 0 where hidden, whatever stood there."""
        if self.mask is None:
            return weights
        if weights.requires_grad:
            return weights.masked_fill(F.pad(self.mask.hidden, (self.clear, 0)), 0)
        weights[..., self.clear :].masked_fill_(self.mask.hidden, 0)
        return weights

    @property
    def blind(self) -> Bool[Tensor, "*s r 1"] | None:
        """The queries that see nothing; None where there is none."""
        return self.mask.blind if self.mask is not None and self.clear == 0 else None

    @property
    def count(self) -> Int[Tensor, "*s r 1"] | int:
        """How many keys each query sees, at least one."""
        return len(self.cols) if self.mask is None else (self.mask.count + self.clear).clamp(min=1)


def with_axes(x: Tensor, axes: int, tail: int) -> Tensor:
    """x with exactly `axes` batch axes in front of its last `tail` ones, new ones of size 1."""
    return x.reshape((1,) * (axes + tail - x.ndim) + x.shape)


def pick(x: Tensor, index: tuple[int, ...]) -> Tensor:
    """x[index], where an axis of size 1 serves every index."""
    return x[tuple(at if x.shape[axis] > 1 else 0 for axis, at in enumerate(index))] if index else x


class RowFunction(Protocol):
    """Weights from scores, row by row."""

    @property
    def bias(self) -> Tensor | None:
        """Added to the scores where it is given; broadcasts to (*batch, n, m) and receives a gradient."""
        ...

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Small tensors that receive a gradient."""
        ...

    def weights(self, scores: Tensor, tile: Tile, bias: Tensor | None, parameters: Sequence[Tensor]) -> Tensor:
        """(…, r, c) from (…, r, c); may overwrite the scores when no gradient is recorded."""
        ...

    def pull_back(self, weights: Tensor, grad: Tensor, dot: Tensor) -> Tensor | None:
        """The gradient in the scores from that in the weights, or None to have autograd find it.

        May overwrite grad. `dot` is Σ_j weights_j grad_j, which equals dO·O.
        """
        ...


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
