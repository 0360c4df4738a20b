"""The base class of patterns, and their combinations by `&` and `|`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from heedful.patterns.offsets import MOST, Offsets, count_pairs, union
from heedful.shapes import Bool, Int, Tensor

Span = tuple[int, int]
"""A half-open interval of positions."""


class Pattern(ABC):
    """A predicate on (query position, key position).

    >>> import torch, heedful as h
    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> (h.Causal() & h.Window(before=1)).allows(i, j).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    @abstractmethod
    def allows(self, i: Int[Tensor, "*#s"], j: Int[Tensor, "*#s"]) -> Bool[Tensor, "*#s"]:
        """True if the query at position i may see the key at position j; i and j broadcast."""

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key."""
        return False

    @property
    def repeats_from(self) -> int | None:
        """The query position from which on all blocks of queries have the same mask; None if there is none."""
        return None

    @property
    def offsets(self) -> tuple[Offsets, ...] | None:
        """The distances i − j of the visible keys; None if they depend on the query's position."""
        return None

    def clear_until(self, lo: int) -> int:
        """Return a position such that every query at lo or later sees all keys before it."""
        return 0

    def spans(self, lo: int, hi: int, m: int) -> list[Span]:
        """Return sorted, disjoint intervals of [0, m) that contain every key visible to a query in [lo, hi).

        They may contain further keys.
        """
        return clip([(0, hi if self.is_causal else m)], m)

    def remembers(self, j: Int[Tensor, "*#s"], t: Int[Tensor, "*#s"]) -> Bool[Tensor, "*#s"]:
        """True if a query at position t or later may see the key at position j < t."""
        return torch.ones_like(j - t, dtype=torch.bool)

    def pairs(self, n: int, m: int) -> int:
        """Return the number of allowed (query, key) pairs for m keys, if the n queries are the last positions."""
        if n <= m and self.offsets is not None and len(self.offsets) <= MOST:
            return count_pairs(self.offsets, n, m)
        total = 0
        for lo in range(m - n, m, 64):
            hi = min(lo + 64, m)
            spans = self.spans(lo, hi, m)
            keys = torch.cat([torch.arange(*span) for span in spans] or [torch.arange(0)])
            for i in torch.arange(lo, hi)[:, None].split(max(1, 2**20 // max(1, len(keys)))):
                total += int(self.allows(i, keys).sum())
        return total

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, other)


@dataclass(frozen=True)
class And(Pattern):
    """The pairs that both patterns allow; written `left & right`."""

    left: Pattern
    right: Pattern

    @property
    def is_causal(self):
        return self.left.is_causal or self.right.is_causal

    @property
    def repeats_from(self):
        return 0 if self.left.repeats_from == self.right.repeats_from == 0 else None

    @property
    def offsets(self):
        if self.left.offsets is None or self.right.offsets is None:
            return None
        return union(x.meet(y) for x in self.left.offsets for y in self.right.offsets)

    def allows(self, i, j):
        return self.left.allows(i, j) & self.right.allows(i, j)

    def clear_until(self, lo):
        return min(self.left.clear_until(lo), self.right.clear_until(lo))

    def spans(self, lo, hi, m):
        return intersect(self.left.spans(lo, hi, m), self.right.spans(lo, hi, m))

    def remembers(self, j, t):
        return self.left.remembers(j, t) & self.right.remembers(j, t)

    def __repr__(self):
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class Or(Pattern):
    """The pairs that at least one pattern allows; written `left | right`."""

    left: Pattern
    right: Pattern

    @property
    def is_causal(self):
        return self.left.is_causal and self.right.is_causal

    @property
    def repeats_from(self):
        return 0 if self.left.repeats_from == self.right.repeats_from == 0 else None

    @property
    def offsets(self):
        if self.left.offsets is None or self.right.offsets is None:
            return None
        return union((*self.left.offsets, *self.right.offsets))

    def allows(self, i, j):
        return self.left.allows(i, j) | self.right.allows(i, j)

    def clear_until(self, lo):
        return max(self.left.clear_until(lo), self.right.clear_until(lo))

    def spans(self, lo, hi, m):
        return clip(self.left.spans(lo, hi, m) + self.right.spans(lo, hi, m), m)

    def remembers(self, j, t):
        return self.left.remembers(j, t) | self.right.remembers(j, t)

    def __repr__(self):
        return f"({self.left!r} | {self.right!r})"


def require_counts(pattern: Pattern, *, least: int = 0, **counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < least:
            raise ValueError(f"{type(pattern).__name__}: {name} must be an integer ≥ {least}, got {count!r}.")


def clip(spans: list[Span], m: int) -> list[Span]:
    """The union of intervals inside [0, m), sorted and disjoint."""
    merged: list[Span] = []
    for start, stop in sorted((max(start, 0), min(stop, m)) for start, stop in spans):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def intersect(left: list[Span], right: list[Span]) -> list[Span]:
    shared = []
    a = b = 0
    while a < len(left) and b < len(right):
        start, stop = max(left[a][0], right[b][0]), min(left[a][1], right[b][1])
        if start < stop:
            shared.append((start, stop))
        if left[a][1] < right[b][1]:
            a += 1
        else:
            b += 1
    return shared
