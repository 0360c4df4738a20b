"""Some heads of a layer, by index: their queries, with the keys and values that they share.

Heads that need not be neighbours run in one call. Neighbours are views; others are gathered, queries by head, keys and
values by group where every group has as many of these heads, else by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from heedful.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class HeadIndex:
    """Heads of queries, in order, out of `total`; each of `groups` heads of keys serves total / groups of them."""

    heads: tuple[int, ...]
    total: int
    groups: int

    @cached_property
    def group_of_head(self) -> tuple[int, ...]:
        """The group of each of these heads."""
        return tuple(head // (self.total // self.groups) for head in self.heads)

    @cached_property
    def own_groups(self) -> tuple[int, ...]:
        """The groups that have one of these heads."""
        return tuple(dict.fromkeys(self.group_of_head))

    @cached_property
    def per_group(self) -> int | None:
        """How many of these heads each of their groups has; None where they differ."""
        counts = {self.group_of_head.count(group) for group in self.own_groups}
        return counts.pop() if len(counts) == 1 else None

    def queries(self, q: Float[Tensor, "b h n d"]) -> Tensor:
        """(b, heads, n, d), or (b, groups, per group, n, d) where keys are shared."""
        mine, each = take(q, 1, self.heads), self.per_group
        return mine if each in (None, 1) else mine.unflatten(1, (len(self.own_groups), each))

    def keys(self, x: Float[Tensor, "b g m d"]) -> Tensor:
        """Keys or values for `queries`: (b, heads, m, d), or (b, groups, 1, m, d) where they are shared."""
        each = self.per_group
        if each is None:
            return x.index_select(1, _on(self.group_of_head, x.device))
        mine = take(x, 1, self.own_groups)
        return mine if each == 1 else mine.unsqueeze(2)

    def heads_of(self, out: Tensor) -> Float[Tensor, "b h n e"]:
        """Outputs for `queries`, one axis for the heads."""
        return out.flatten(1, 2) if out.ndim == 5 else out


def join(parts: list[tuple[HeadIndex, Float[Tensor, "b h n e"]]]) -> Float[Tensor, "b h n e"]:
    """The outputs of all heads, in order."""
    if len(parts) == 1:
        return parts[0][1]
    out = torch.cat([part for _, part in parts], 1)
    back = place_of_heads(tuple(index.heads for index, _ in parts))
    return out if back is None else out.index_select(1, _on(back, out.device))


@lru_cache(maxsize=1024)
def place_of_heads(heads: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    """Where each head is among these, side by side; None where they are in order."""
    joined = [head for part in heads for head in part]
    return None if joined == sorted(joined) else tuple(sorted(range(len(joined)), key=joined.__getitem__))


def take(x: Tensor, axis: int, places: tuple[int, ...]) -> Tensor:
    """These places of an axis: x itself, a view of neighbours, or a copy."""
    if places == tuple(range(x.shape[axis])):
        return x
    first = places[0]
    if places == tuple(range(first, first + len(places))):
        return x.narrow(axis, first, len(places))
    return x.index_select(axis, _on(places, x.device))


@lru_cache(maxsize=1024)
def _on(places: tuple[int, ...], device: torch.device) -> Int[Tensor, " places"]:
    with torch.inference_mode(False):  # kept: a later backward pass may need it
        return torch.tensor(places, device=device)
