"""Connections between tokens after several layers of attention, and the tokens that they pass through.

    one layer       R_ℓ = (I ∪ A_ℓ) R_{ℓ−1},  R_0 = I        A_ℓ: the pattern of layer ℓ;  I: its residual connection
    through h       |inputs of h after ℓ layers| · |outputs that depend on h above layer ℓ|

Sets of tokens are bit masks. For each group of eight keys, a layer precomputes the 256 possible unions, and each query
looks up the one that it needs. This takes at most n² / 8 unions of n bits, and fewer if queries see few groups
(Arlazarov et al. 1970, the method of the four Russians).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from heedful.patterns.base import Pattern
from heedful.shapes import Bool, Float, Int, Tensor

SLAB = 1 << 24  # pairs per call of `allows`


@dataclass(frozen=True, eq=False)
class Reachability:
    """The result of `reach`.

    n                number of tokens
    layers           the pattern of each layer
    residual         True if each layer adds its output to its input
    shares           after each layer, the share of the possible pairs (output i, input j) that are connected. The
                     possible pairs are j ≤ i if all patterns are causal, and all pairs otherwise
    complete_after   the smallest number of layers that connects every possible pair; None if these layers do not
    """

    n: int
    layers: tuple[Pattern, ...]
    residual: bool
    shares: tuple[float, ...]
    complete_after: int | None
    _sets: tuple[Int[Tensor, "n words"], ...] = field(repr=False)

    def after(self, layers: int) -> Bool[Tensor, "n n"]:
        """True if output i depends on input j after the first `layers` layers."""
        if not 0 <= layers <= len(self.layers):
            raise ValueError(f"layers: expected 0 to {len(self.layers)}, the layers that were given, got {layers}.")
        octets = self._sets[layers].view(torch.uint8)[:, :, None]
        return ((octets >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten(1)[:, : self.n]

    @property
    def connected(self) -> Bool[Tensor, "n n"]:
        """True if output i depends on input j after all layers."""
        return self.after(len(self.layers))

    @cached_property
    def traffic(self) -> Float[Tensor, "layers n"]:
        """For each token between two layers, return the share of connected pairs that have a path through it.

        Row ℓ − 1 lies between layers ℓ and ℓ + 1; a single layer has no rows. Every input that a token depends on
        reaches every output that depends on the token, so the count of pairs is exact.
        """
        pairs = max(1, int(_sizes(self._sets[-1]).sum()))
        above, found = _single(self.n), []
        for below in range(len(self.layers) - 1, 0, -1):
            above = _joined(_table(self.layers[below], self.n, self.residual, transposed=True), above)
            found.append(_sizes(self._sets[below]).double() * _sizes(above) / pairs)
        return torch.stack(found[::-1]) if found else torch.zeros(0, self.n, dtype=torch.float64)

    def hubs(self, count: int = 8) -> list[tuple[int, float]]:
        """Return the tokens with the largest traffic between any two layers as (position, share), largest first.

        A share of 1 means that every connected pair has a path through this token. Among equal shares, the earliest
        position comes first.
        """
        if not len(self.traffic):
            return []
        largest = self.traffic.amax(0)
        order = largest.argsort(descending=True, stable=True)[:count]
        return [(int(token), float(largest[token])) for token in order]


def reach(patterns: Sequence[Pattern], n: int, *, residual: bool = True) -> Reachability:
    """Return which of n tokens are connected after several layers of attention; `patterns` has one pattern per layer.

    >>> import heedful as h
    >>> halves = [h.Window(16), h.Strided(16) & h.Causal()]  # of the Sparse Transformer, 16 = √256
    >>> h.reach(halves, 256).complete_after
    2
    >>> local = h.reach([h.Window(16)] * 4, 256)
    >>> [round(share, 2) for share in local.shares], local.complete_after
    ([0.13, 0.24, 0.35, 0.44], None)
    >>> h.reach([h.Window(2, 2) | h.Global((0,))] * 2, 256).hubs(1)  # every pair has a path through token 0
    [(0, 1.0)]

    residual   True if each layer adds its output to its input, as Transformer layers do. Without it, a token whose
               pattern excludes itself loses its own input
    """
    if isinstance(patterns, Pattern) or not all(isinstance(pattern, Pattern) for pattern in patterns):
        raise TypeError(f"patterns: expected one pattern a layer, such as [Window(64)] * 4, got {patterns!r}.")
    if n < 1:
        raise ValueError(f"n: expected at least one token, got {n}.")
    layers = tuple(patterns)
    possible = n * (n + 1) // 2 if all(pattern.is_causal for pattern in layers) else n * n
    sets = [_single(n)]
    shares: list[float] = []
    for pattern in layers:
        if residual and shares and shares[-1] == 1:
            sets.append(sets[-1])  # the sets do not change any more
        else:
            sets.append(_joined(_table(pattern, n, residual), sets[-1]))
        shares.append(int(_sizes(sets[-1]).sum()) / possible)
    complete = next((layer for layer, share in enumerate(shares, 1) if share == 1), None)
    return Reachability(n, layers, residual, tuple(shares), complete, tuple(sets))


def _table(pattern: Pattern, n: int, residual: bool, transposed: bool = False) -> Int[Tensor, "n octets"]:
    """Return the keys of each query as bits, eight tokens per number; if `transposed`, the queries of each key."""
    place, found = torch.arange(n), []
    for some in place.split(max(1, SLAB // n)):
        own, other = some[:, None], place
        seen = pattern.allows(other, own) if transposed else pattern.allows(own, other)
        seen = seen.expand(len(some), n)
        found.append(_octets(seen | (own == other) if residual else seen))
    return torch.cat(found)


def _octets(bits: Bool[Tensor, "r n"]) -> Int[Tensor, "r octets"]:
    """Pack bits: bit b of number o is token 8 o + b. Rows are padded to whole words of 64 bits."""
    bits = torch.nn.functional.pad(bits.byte(), (0, -bits.shape[-1] % 64))
    return (bits.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _single(n: int) -> Int[Tensor, "n words"]:
    """Return one set per token that holds this token alone."""
    return _octets(torch.eye(n, dtype=torch.bool)).view(torch.int64)


def _joined(table: Int[Tensor, "n octets"], sets: Int[Tensor, "n words"]) -> Int[Tensor, "n words"]:
    """Return, for each row of the table, the union of the sets of its tokens."""
    out = torch.zeros_like(sets)
    for group, column in enumerate(table.T.contiguous()[: -(-len(sets) // 8)]):
        rows = column.nonzero().flatten()
        if not len(rows):
            continue
        unions = torch.zeros_like(sets[:1])
        for each in sets[8 * group : 8 * group + 8]:
            unions = torch.cat([unions, unions | each])
        if len(rows) == len(out):
            out |= unions[column.long()]
        else:
            out[rows] |= unions[column[rows].long()]
    return out


_BITS = torch.tensor([number.bit_count() for number in range(256)])


def _sizes(sets: Int[Tensor, "n words"]) -> Int[Tensor, " n"]:
    """Return the number of tokens in each set."""
    return _BITS[sets.view(torch.uint8).int()].sum(-1)
