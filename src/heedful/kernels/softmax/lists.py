"""Which keys a block of queries sees, one by one; which queries see a block of keys: for any pattern.

What six numbers do not describe (reach.py) the pattern itself is asked for, pair by pair and once. Queries are put into
blocks, and each block gets

    list        the keys that at least one of its queries sees: first whole tiles of keys that all of them see, then the
                others, filled up to whole tiles
    words       64 bits for each key of the list: bit r is set where row r of the block sees it

Keys are listed, not tiles of keys: a tile of the program is gathered from wherever its keys lie. So eight keys out of
every 128 make one full tile of 64 out of 1024, where tiles of neighbours would be eight, mostly empty. For the same reason
queries that see far more than most come first and share blocks; the others stay in their order. Keys are put into
blocks and get lists of queries in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heedful.kernels.softmax.reach import recent
from heedful.patterns import Pattern
from heedful.segments import Layout, Segments, allowed, resolve
from heedful.shapes import Bool, Int, Tensor, broadcast_shapes

MOST_ROWS = 64  # of a block: the bits of a word
MOST_PAIRS = 1 << 34  # a pattern is asked about no more
SLAB = 1 << 24  # pairs that are looked at together
LONG = 4  # times as many as the median, to be called far more than most
HEAD = 3  # numbers of a block beside its tokens: where its list begins, the length of its full part, its length


class List(NamedTuple):
    """The lists of all blocks, one after the other; token −1 fills up."""

    tokens: Int[Tensor, " l"]
    words: Int[Tensor, " l"]


@dataclass(frozen=True)
class Lists:
    """Blocks of queries with their lists of keys, and blocks of keys with their lists of queries.

    A block's tokens come first (~i instead of i: it sees nothing), then three numbers (HEAD). first_rows and first_keys
    count the leading places, in the order of the blocks, whose lists are long; 0 under segments.
    """

    rows: Int[Tensor, "*s blocks numbers"]
    keys: Int[Tensor, "*s blocks numbers"]
    of_rows: List
    of_keys: List
    first_rows: int
    first_keys: int
    segmented: bool

    special = 0, 0  # tokens that programs walk apart from the others

    @property
    def kind(self) -> tuple:
        """All that a plan may take from it."""
        return "lists", self.rows.shape, self.keys.shape, self.first_rows, self.first_keys, self.segmented

    @property
    def keys_may_split(self) -> bool:
        """Whether places of keys are the same ones in every batch entry."""
        return not self.segmented


def lists(
    pattern: Pattern, n: int, m: int, segments: Segments | None, device: torch.device, rows: int, tile: int
) -> Lists:
    """Lists for blocks of so many rows; those of the last patterns, lengths and segments are kept."""
    if segments is None:
        return _unsegmented(pattern, n, m, device, rows, tile)
    return recent((pattern, n, m, rows, tile), segments, lambda: _made(pattern, n, m, segments, device, rows, tile))


@lru_cache(4)
def _unsegmented(pattern: Pattern, n: int, m: int, device: torch.device, rows: int, tile: int) -> Lists:
    return _made(pattern, n, m, None, device, rows, tile)


class _Side(NamedTuple):
    """Either half of it, for one sequence."""

    blocks: Int[Tensor, "blocks numbers"]
    lists: List
    first: int


def _made(
    pattern: Pattern, n: int, m: int, segments: Segments | None, device: torch.device, rows: int, tile: int
) -> Lists:
    layout = resolve(segments, n, m, device)
    lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
    by_sequence = (x.expand(*lead, -1).reshape(prod(lead), -1).unbind() for x in layout)
    sides = []
    for query_ids, key_ids, i, j in zip(*by_sequence, strict=True):

        def of_queries(at: Tensor, query_ids=query_ids, key_ids=key_ids, i=i, j=j) -> Tensor:
            return allowed(pattern, Layout(query_ids[at], key_ids, i[at], j))

        def of_keys(at: Tensor, query_ids=query_ids, key_ids=key_ids, i=i, j=j) -> Tensor:
            return allowed(pattern, Layout(query_ids, key_ids[at], i, j[at])).mT

        sides.append((_side(of_queries, n, m, rows, tile, device), _side(of_keys, m, n, rows, tile, device)))
    (by_row, of_rows), (by_key, of_keys) = (_joined(half, lead) for half in zip(*sides, strict=True))
    first = (0, 0) if segments is not None else (sides[0][0].first, sides[0][1].first)
    return Lists(by_row, by_key, of_rows, of_keys, *first, segments is not None)


def _side(
    sees: Callable[[Tensor], Bool[Tensor, "t others"]], length: int, others: int, rows: int, tile: int, device
) -> _Side:
    """The blocks and lists of tokens that see what `sees` says of them."""
    step = max(1, SLAB // (rows * max(others, 1))) * rows
    counts = torch.cat([sees(at).sum(-1) for at in torch.arange(length, device=device).split(step)])
    order, first = _order(counts)
    marked = torch.where(counts[order] > 0, order, ~order)
    here = F.pad(torch.ones_like(order, dtype=torch.bool), (0, -length % rows))
    everyone = _bits(here.view(-1, rows, 1))
    heads, parts, begin = [], [], 0
    for at, real in zip(F.pad(order, (0, -length % rows)).split(step), here.split(step), strict=True):
        words = _bits((sees(at) & real[:, None]).view(-1, rows, others))
        blocks = sum(len(head) for head in heads)
        head, part = _listed(words, everyone[blocks : blocks + len(words)], tile)
        head[:, 0] += begin
        begin += len(part.tokens)
        heads.append(head)
        parts.append(part)
    tokens = F.pad(marked, (0, -length % rows)).view(-1, rows)
    blocks = torch.cat([tokens, torch.cat(heads)], -1).int()
    return _Side(blocks, _concatenated(parts), min(-(-first // rows) * rows, length))


def _order(counts: Int[Tensor, " t"]) -> tuple[Int[Tensor, " t"], int]:
    """A permutation: tokens that see far more than most, then the others; and how many the former are."""
    long = counts > LONG * counts.median()
    return (~long).byte().argsort(stable=True), int(long.sum())


def _bits(seen: Bool[Tensor, "b rows others"]) -> Int[Tensor, "b others"]:
    """Bit r of a word is what row r of its block says."""
    place = torch.arange(seen.shape[1], device=seen.device)[:, None]
    return (seen.long() << place).sum(1)


def _listed(words: Int[Tensor, "b others"], everyone: Int[Tensor, "b 1"], tile: int) -> tuple[Tensor, List]:
    """HEAD for each block, and the lists: whole tiles of tokens that all its rows see, then the others."""
    some = words != 0
    full = some & (words == everyone)
    full &= full.cumsum(-1) <= full.sum(-1, keepdim=True) // tile * tile  # the rest of a tile goes with the others
    partial = some & ~full
    inner, outer = full.sum(-1), partial.sum(-1)
    length = inner + (outer + tile - 1) // tile * tile
    begin = length.cumsum(0) - length
    place = torch.where(full, full.cumsum(-1), inner[:, None] + partial.cumsum(-1)) - 1 + begin[:, None]
    total = int(length.sum())
    found = List(torch.full((total,), -1, device=words.device).int(), words.new_zeros(total))
    found.tokens[place[some]] = some.nonzero()[:, 1].int()
    found.words[place[some]] = words[some]
    return torch.stack([begin, inner, length], -1), found


def _joined(sides: Sequence[_Side], lead: torch.Size) -> tuple[Tensor, List]:
    """The sides of all sequences as one: their lists follow each other."""
    blocks, begin = [], 0
    for side in sides:
        blocks.append(side.blocks.clone())
        blocks[-1][:, -HEAD] += begin
        begin += len(side.lists.tokens)
    return torch.stack(blocks).view(*lead, *blocks[0].shape), _concatenated([side.lists for side in sides])


def _concatenated(parts: Sequence[List]) -> List:
    return List(*(torch.cat(x) for x in zip(*parts, strict=True)))
