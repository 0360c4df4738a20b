"""Sets of offsets: the normal form of patterns that are the same at every position.

A query at i sees the key at j if the offset i − j lies in one of a few sets {… −s, 0, s, 2s …} ∩ [−after, before].
Full, causal, windowed and strided attention are one such set each. The intersection of two sets is again one set, and a
union is stored as a tuple of sets. So every combination by `&` and `|` has a normal form, however it was written.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import lcm
from typing import NamedTuple

import torch

FAR = 1 << 60  # larger than any distance: no limit
MOST = 4  # largest number of sets for which pairs are counted by inclusion and exclusion


class Offsets(NamedTuple):
    """The multiples of `step` from −after to before; 0 is always among them."""

    before: int = FAR
    after: int = FAR
    step: int = 1

    def contains(self, other: Offsets) -> bool:
        return other.step % self.step == 0 and other.before <= self.before and other.after <= self.after

    def meet(self, other: Offsets) -> Offsets:
        """The offsets in both."""
        return Offsets(min(self.before, other.before), min(self.after, other.after), lcm(self.step, other.step))

    def pairs(self, n: int, m: int) -> int:
        """Return the number of (query, key) pairs at these offsets, if n queries are the last of m positions, n ≤ m."""
        i = torch.arange(m - n, m)
        back, ahead = i.clamp(max=self.before), (m - 1 - i).clamp(max=self.after)
        return n + int((back // self.step).sum() + (ahead // self.step).sum())


def union(sets: Iterable[Offsets]) -> tuple[Offsets, ...]:
    """Return the union as the fewest sets, those with the smallest step first."""
    widest: dict[int, Offsets] = {}
    for before, after, step in sets:
        before, after = (x if x >= FAR else x - x % step for x in (before, after))
        step = step if before or after else 1
        known = widest.get(step, Offsets(0, 0, step))
        widest[step] = Offsets(max(before, known.before), max(after, known.after), step)
    kept = [x for x in widest.values() if not any(y is not x and y.contains(x) for y in widest.values())]
    return tuple(sorted(kept, key=lambda x: x.step))


def count_pairs(sets: tuple[Offsets, ...], n: int, m: int) -> int:
    """Return the number of (query, key) pairs in a union of at most `MOST` sets, by inclusion and exclusion."""
    total = 0
    for size in range(1, len(sets) + 1):
        for some in combinations(sets, size):
            shared = some[0]
            for other in some[1:]:
                shared = shared.meet(other)
            total -= (-1) ** size * shared.pairs(n, m)
    return total
