"""Which keys a block of queries sees, one by one; which queries see a block of keys: for any pattern.

Where six numbers do not describe a pattern (reach.py) it is asked itself, pair by pair and once. Queries are put into
blocks, and each block gets

    list        the keys that at least one of its queries sees: first whole tiles of keys that all of them see, then the
                others, filled up to whole tiles
    words       64 bits for each key of the list: bit r is set where row r of the block sees it

Keys are listed, not tiles of keys: a program gathers its tile from wherever the keys lie. So the last eight of every
128 keys are one full tile of 64 for 1024, where tiles of neighbours would be eight, mostly empty. For the same reason
queries that see far more than most come first and share blocks; the others keep their order. Keys are put into blocks,
and get lists of queries, in the same way.
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

    A block's tokens come first (~i instead of i: it sees nothing), then three numbers (HEAD). The orders are those in
    which tokens are put into blocks; first_rows and first_keys count the leading ones, whose lists are long. Sequences
    with segments have orders of their own, and are not walked in parts: there both are 0, and the orders are empty.
    """

    rows: Int[Tensor, "*s blocks numbers"]
    keys: Int[Tensor, "*s blocks numbers"]
    of_rows: List
    of_keys: List
    row_order: Int[Tensor, " n"]
    key_order: Int[Tensor, " m"]
    first_rows: int
    first_keys: int
    segmented: bool

    special = 0, 0  # tokens that programs walk apart from the others: a list has all in one
    keys_may_split = False  # all of them, where they are few under many queries: those come with segments alone

    @property
    def kind(self) -> tuple:
        """All that a plan takes from it."""
        return "lists", self.rows.shape, self.keys.shape, self.first_rows, self.first_keys, self.segmented


def lists(
    pattern: Pattern, n: int, m: int, segments: Segments | None, device: torch.device, rows: int, tile: int
) -> Lists:
    """The lists of blocks of so many rows; those of the last patterns, lengths and segments are kept."""
    if segments is None:
        return _unsegmented(pattern, n, m, device, rows, tile)
    return recent((pattern, n, m, rows, tile), segments, lambda: _segmented(pattern, n, m, segments, rows, tile))


@lru_cache(4)
def _unsegmented(pattern: Pattern, n: int, m: int, device: torch.device, rows: int, tile: int) -> Lists:
    by_row, by_key = _sides(pattern, resolve(None, n, m, device), rows, tile)
    orders, firsts = (by_row.order, by_key.order), (by_row.first, by_key.first)
    return Lists(by_row.blocks, by_key.blocks, by_row.lists, by_key.lists, *orders, *firsts, False)


def _segmented(pattern: Pattern, n: int, m: int, segments: Segments, rows: int, tile: int) -> Lists:
    layout = resolve(segments, n, m)
    lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
    by_sequence = (x.expand(*lead, -1).reshape(prod(lead), -1) for x in layout)
    sides = [_sides(pattern, Layout(*one), rows, tile) for one in zip(*by_sequence, strict=True)]
    (by_row, of_rows), (by_key, of_keys) = (_joined(half, lead) for half in zip(*sides, strict=True))
    none = by_row.new_empty(0)
    return Lists(by_row, by_key, of_rows, of_keys, none, none, 0, 0, True)


class _Side(NamedTuple):
    """The queries of one sequence, or its keys."""

    blocks: Int[Tensor, "blocks numbers"]
    lists: List
    order: Int[Tensor, " tokens"]
    first: int


def _sides(pattern: Pattern, layout: Layout, rows: int, tile: int) -> tuple[_Side, _Side]:
    query_ids, key_ids, i, j = layout

    def seen_by(at: Tensor) -> Tensor:
        return allowed(pattern, Layout(query_ids[at], key_ids, i[at], j))

    def seeing(at: Tensor) -> Tensor:
        return allowed(pattern, Layout(query_ids, key_ids[at], i, j[at])).mT

    n, m = len(i), len(j)
    keys, queries = torch.zeros_like(i), torch.zeros_like(j)  # how many each query sees; how many see each key
    for at in torch.arange(n, device=i.device).split(_step(m, rows)):
        seen = seen_by(at)
        keys[at] = seen.sum(1)
        queries += seen.sum(0)
    return _side(seen_by, keys, m, rows, tile), _side(seeing, queries, n, rows, tile)


def _step(others: int, rows: int) -> int:
    """How many tokens are looked at together: whole blocks."""
    return max(1, SLAB // (rows * others)) * rows


def _side(
    sees: Callable[[Tensor], Bool[Tensor, "t others"]], counts: Int[Tensor, " t"], others: int, rows: int, tile: int
) -> _Side:
    """Blocks and lists of tokens of which each sees what `sees` says, so many in all."""
    order, first = _order(counts)
    rest, step = (0, -len(order) % rows), _step(others, rows)
    places, here = F.pad(order, rest), F.pad(torch.ones_like(order, dtype=torch.bool), rest)
    heads, parts, begin = [], [], 0
    for at, real in zip(places.split(step), here.split(step), strict=True):
        words = _words((sees(at) & real[:, None]).view(-1, rows, others))
        head, part = _listed(words, _words(real.view(-1, rows, 1)), tile)
        head[:, 0] += begin
        begin += len(part.tokens)
        heads.append(head)
        parts.append(part)
    tokens = F.pad(torch.where(counts[order] > 0, order, ~order), rest).view(-1, rows)
    blocks = torch.cat([tokens, torch.cat(heads)], -1).int()
    return _Side(blocks, _concatenated(parts), order, min(-(-first // rows) * rows, len(order)))


def _order(counts: Int[Tensor, " t"]) -> tuple[Int[Tensor, " t"], int]:
    """A permutation: tokens that see far more than most, then the others; and how many the former are."""
    long = counts > LONG * counts.median()
    return (~long).byte().argsort(stable=True), int(long.sum())


def _words(seen: Bool[Tensor, "b rows others"]) -> Int[Tensor, "b others"]:
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
