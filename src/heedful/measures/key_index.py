"""Indices of keys by position: the first and last keys of a query's segment, keys at given offsets.

Positions count from the start of a segment, so in a packed batch the first token is that of the query's segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heedful.segments import Layout
from heedful.shapes import Int, Tensor, broadcast_shapes


class Places:
    """Finds keys of each query's segment by position; −1 means that there is no such key.

    >>> from heedful.segments import resolve
    >>> Places(resolve(torch.tensor([0, 0, 1, 1, 1, -1]), 6, 6)).at_offset([-1]).flatten()
    tensor([-1,  0, -1,  2,  3, -1])
    """

    def __init__(self, layout: Layout):
        lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
        query_ids, keys = (x.expand(*lead, -1).contiguous() for x in (layout.query_ids, layout.key_ids))
        ids, order = keys.sort(dim=-1, stable=True)
        begin, end = torch.searchsorted(ids, query_ids), torch.searchsorted(ids, query_ids, right=True)
        self._order, self._ids, self._begin = order, ids, begin
        self.real = query_ids >= 0
        self.length = (end - begin) * self.real
        """Number of keys in each query's segment, 0 for padding."""
        self.position = layout.query_positions.expand(*lead, -1)

    def at(self, position: Int[Tensor, "*s n t"]) -> Int[Tensor, "*s n t"]:
        """The key at each position of the query's segment."""
        exists = (position >= 0) & (position < self.length[..., None])
        if not self._order.shape[-1]:
            return torch.full_like(position, -1)
        place = torch.where(exists, self._begin[..., None] + position, 0)
        order = self._order[..., None, :].expand(*place.shape[:-1], -1)
        return torch.where(exists, order.gather(-1, place), -1)

    def at_offset(self, offsets: Sequence[int]) -> Int[Tensor, "*s n t"]:
        """The keys at these distances from the query, negative before it."""
        return self.at(self.position[..., None] + self._counted(offsets))

    def first(self, count: int) -> Int[Tensor, "*s n t"]:
        """The first keys of the query's segment."""
        return self.at(self._counted(range(count)).expand(*self.position.shape, -1))

    def last(self, count: int) -> Int[Tensor, "*s n t"]:
        """The last keys of the query's segment, the last one first."""
        return self.at(self.length[..., None] - 1 - self._counted(range(count)))

    def after_previous(self, tokens: Int[Tensor, "*#b m"]) -> Int[Tensor, "*b n 1"]:
        """The key that follows the previous occurrence of the query's own token in its segment.

        >>> from heedful.segments import resolve
        >>> Places(resolve(None, 5, 5)).after_previous(torch.tensor([7, 8, 9, 7, 8])).flatten()
        tensor([-1, -1, -1,  1,  2])
        """
        lead = broadcast_shapes(tokens.shape[:-1], self._order.shape[:-1])
        order, ids = (x.expand(*lead, -1) for x in (self._order, self._ids))
        words, by_word = tokens.expand(*lead, -1).gather(-1, order).sort(dim=-1, stable=True)
        ids, by_segment = ids.gather(-1, by_word).sort(dim=-1, stable=True)
        words, place = words.gather(-1, by_segment), by_word.gather(-1, by_segment)
        again = (words[..., 1:] == words[..., :-1]) & (ids[..., 1:] == ids[..., :-1])
        before = torch.nn.functional.pad(torch.where(again, place[..., :-1], -2), (1, 0), value=-2)
        before = torch.empty_like(before).scatter_(-1, place, before)  # `place` indexes the keys in segment order
        own, begin = (x.expand(*lead, -1) for x in (self._begin + self.position, self._begin))
        inside = ((self.position >= 0) & (self.position < self.length)).expand(*lead, -1)
        if not before.shape[-1]:
            return torch.full((*own.shape, 1), -1, device=tokens.device)
        found = before.gather(-1, own.clamp(0, before.shape[-1] - 1))
        target = torch.where(inside & (found >= 0), found + 1 - begin, -1)[..., None]
        exists = target >= 0
        place = torch.where(exists, begin[..., None] + target, 0)
        return torch.where(exists, order[..., None, :].expand(*place.shape[:-1], -1).gather(-1, place), -1)

    def _counted(self, values: Sequence[int]) -> Int[Tensor, " t"]:
        return torch.tensor(list(values), dtype=torch.long, device=self.position.device)
