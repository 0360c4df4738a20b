"""Selection of heads of a layer by index: their queries, and the keys and values that they share.

The selected heads run in one call, also if they are not adjacent. Adjacent heads are views; others are copied. Keys and
values are copied per group if every group has equally many selected heads, else per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from heedful.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class HeadIndex:
    """Query heads, in order, out of `total`; each of the `groups` KV heads serves total / groups query heads."""

    heads: tuple[int, ...]
    total: int
    groups: int

    @cached_property
    def group_of_head(self) -> tuple[int, ...]:
        """The group of each of these heads."""
        return tuple(head // (self.total // self.groups) for head in self.heads)

    @cached_property
    def own_groups(self) -> tuple[int, ...]:
        """The groups that contain one of these heads."""
        return tuple(dict.fromkeys(self.group_of_head))

    @cached_property
    def per_group(self) -> int | None:
        """Number of these heads in each of their groups; None if the groups differ."""
        counts = {self.group_of_head.count(group) for group in self.own_groups}
        return counts.pop() if len(counts) == 1 else None

    def queries(self, q: Float[Tensor, "b h n d"]) -> Tensor:
        """Return the queries, (b, heads, n, d), or (b, groups, per group, n, d) if heads share keys."""
        mine, each = take(q, 1, self.heads), self.per_group
        return mine if each in (None, 1) else mine.unflatten(1, (len(self.own_groups), each))

    def keys(self, x: Float[Tensor, "b g m d"]) -> Tensor:
        """Return keys or values for `queries`: (b, heads, m, d), or (b, groups, 1, m, d) if heads share them."""
        each = self.per_group
        if each is None:
            return x.index_select(1, _on(self.group_of_head, x.device))
        mine = take(x, 1, self.own_groups)
        return mine if each == 1 else mine.unsqueeze(2)

    def heads_of(self, out: Tensor) -> Float[Tensor, "b h n e"]:
        """Return the outputs for `queries` with a single head axis."""
        return out.flatten(1, 2) if out.ndim == 5 else out


def join(parts: list[tuple[HeadIndex, Float[Tensor, "b h n e"]]]) -> Float[Tensor, "b h n e"]:
    """Return the outputs of all heads, in the order of the heads."""
    if len(parts) == 1:
        return parts[0][1]
    out = torch.cat([part for _, part in parts], 1)
    back = place_of_heads(tuple(index.heads for index, _ in parts))
    return out if back is None else out.index_select(1, _on(back, out.device))


@lru_cache(maxsize=1024)
def place_of_heads(heads: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    """Return the place of each head in the concatenation of these tuples; None if they are in order."""
    joined = [head for part in heads for head in part]
    return None if joined == sorted(joined) else tuple(sorted(range(len(joined)), key=joined.__getitem__))


def take(x: Tensor, axis: int, places: tuple[int, ...]) -> Tensor:
    """Return these places of an axis: x itself, a view if they are adjacent, or a copy."""
    if places == tuple(range(x.shape[axis])):
        return x
    first = places[0]
    if places == tuple(range(first, first + len(places))):
        return x.narrow(axis, first, len(places))
    return x.index_select(axis, _on(places, x.device))


@lru_cache(maxsize=1024)
def _on(places: tuple[int, ...], device: torch.device) -> Int[Tensor, " places"]:
    with torch.inference_mode(False):  # the tensor is cached, and a later backward pass may need it
        return torch.tensor(places, device=device)
