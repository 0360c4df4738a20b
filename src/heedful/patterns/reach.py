"""Which tokens are connected after several layers of attention, and through which tokens they are.

    one layer       R_ℓ = (I ∪ A_ℓ) R_{ℓ−1},  R_0 = I        A_ℓ: the pattern of layer ℓ;  I: its residual connection
    through h       |inputs of h after ℓ layers| · |outputs that depend on h above layer ℓ|

Sets of tokens are bits. A layer takes the keys in groups of eight, forms the 256 unions that a query may need of them,
and looks up each query's: n² / 8 unions of n bits at most, and fewer where queries see few groups (Arlazarov et al.
1970, "the four Russians").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from heedful.patterns.base import Pattern
from heedful.shapes import Bool, Float, Int, Tensor

SLAB = 1 << 24  # pairs that a pattern is asked about at once


@dataclass(frozen=True, eq=False)
class Reachability:
    """What `reach` found.

    n                tokens
    layers           the pattern of each layer
    residual         whether each layer also passes every token on to itself
    shares           after each layer, the share of the possible pairs (output i, input j) that are connected; possible
                     are j ≤ i where all patterns are causal, and all pairs otherwise
    complete_after   the first number of layers after which every possible pair is connected; None: not with these
    """

    n: int
    layers: tuple[Pattern, ...]
    residual: bool
    shares: tuple[float, ...]
    complete_after: int | None
    _sets: tuple[Int[Tensor, "n words"], ...] = field(repr=False)

    def after(self, layers: int) -> Bool[Tensor, "n n"]:
        """Whether output i depends on input j after so many of the layers."""
        if not 0 <= layers <= len(self.layers):
            raise ValueError(f"layers: expected 0 to {len(self.layers)}, the layers that were given, got {layers}.")
        octets = self._sets[layers].view(torch.uint8)[:, :, None]
        return ((octets >> torch.arange(8, dtype=torch.uint8)) & 1).bool().flatten(1)[:, : self.n]

    @property
    def connected(self) -> Bool[Tensor, "n n"]:
        """Whether output i depends on input j after all layers."""
        return self.after(len(self.layers))

    @cached_property
    def traffic(self) -> Float[Tensor, "layers n"]:
        """For each place between two layers, the share of connected pairs with a path through each token there.

        Row ℓ − 1 lies between layers ℓ and ℓ + 1. All inputs that a token depends on reach all outputs that depend on
        it, so the pairs are counted exactly. One layer has no such place.
        """
        pairs = max(1, int(_sizes(self._sets[-1]).sum()))
        above, found = _single(self.n), []
        for below in range(len(self.layers) - 1, 0, -1):
            above = _joined(_table(self.layers[below], self.n, self.residual, transposed=True), above)
            found.append(_sizes(self._sets[below]).double() * _sizes(above) / pairs)
        return torch.stack(found[::-1]) if found else torch.zeros(0, self.n, dtype=torch.float64)

    def hubs(self, count: int = 8) -> list[tuple[int, float]]:
        """The tokens with the largest traffic at any place, and how much: (position, share), the largest first.

        A share of 1 says that every connected pair has a path through this token; of equal ones the earliest counts.
        """
        if not len(self.traffic):
            return []
        largest = self.traffic.amax(0)
        order = largest.argsort(descending=True, stable=True)[:count]
        return [(int(token), float(largest[token])) for token in order]


def reach(patterns: Sequence[Pattern], n: int, *, residual: bool = True) -> Reachability:
    """Which of n tokens are connected after layers of attention, one pattern a layer, the first layer first.

    >>> import heedful as h
    >>> halves = [h.Window(16), h.Strided(16) & h.Causal()]  # of the Sparse Transformer, 16 = √256
    >>> h.reach(halves, 256).complete_after
    2
    >>> local = h.reach([h.Window(16)] * 4, 256)
    >>> [round(share, 2) for share in local.shares], local.complete_after
    ([0.13, 0.24, 0.35, 0.44], None)
    >>> h.reach([h.Window(2, 2) | h.Global((0,))] * 2, 256).hubs(1)  # every pair has a path through token 0
    [(0, 1.0)]

    residual   whether each layer adds its output to its input, as layers of a Transformer do; without it a token loses
               what its pattern does not let it see
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
            sets.append(sets[-1])  # nothing to add
        else:
            sets.append(_joined(_table(pattern, n, residual), sets[-1]))
        shares.append(int(_sizes(sets[-1]).sum()) / possible)
    complete = next((layer for layer, share in enumerate(shares, 1) if share == 1), None)
    return Reachability(n, layers, residual, tuple(shares), complete, tuple(sets))


def _table(pattern: Pattern, n: int, residual: bool, transposed: bool = False) -> Int[Tensor, "n octets"]:
    """What each token takes from, eight tokens a number: the keys of a query or, transposed, the queries of a key."""
    place, found = torch.arange(n), []
    for some in place.split(max(1, SLAB // n)):
        own, other = some[:, None], place
        seen = pattern.allows(other, own) if transposed else pattern.allows(own, other)
        seen = seen.expand(len(some), n)
        found.append(_octets(seen | (own == other) if residual else seen))
    return torch.cat(found)


def _octets(bits: Bool[Tensor, "r n"]) -> Int[Tensor, "r octets"]:
    """Bit b of number o is token 8 o + b; whole words of 64 bits."""
    bits = torch.nn.functional.pad(bits.byte(), (0, -bits.shape[-1] % 64))
    return (bits.unflatten(-1, (-1, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _single(n: int) -> Int[Tensor, "n words"]:
    """Every token by itself."""
    return _octets(torch.eye(n, dtype=torch.bool)).view(torch.int64)


def _joined(table: Int[Tensor, "n octets"], sets: Int[Tensor, "n words"]) -> Int[Tensor, "n words"]:
    """For each row of the table, the union of the sets of the tokens in it."""
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
    """How many tokens are in each set."""
    return _BITS[sets.view(torch.uint8).int()].sum(-1)
