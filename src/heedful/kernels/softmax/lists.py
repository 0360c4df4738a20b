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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heedful.kernels.launching import up
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
    layout = Layout(*(x[None] for x in resolve(None, n, m, device)))
    by_row, by_key = _sides(pattern, layout, rows, tile)
    blocks, orders = (by_row.blocks[0], by_key.blocks[0]), (by_row.order[0], by_key.order[0])
    return Lists(*blocks, by_row.lists, by_key.lists, *orders, by_row.first, by_key.first, False)


def _segmented(pattern: Pattern, n: int, m: int, segments: Segments, rows: int, tile: int) -> Lists:
    layout = resolve(segments, n, m)
    lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
    flat = Layout(*(x.expand(*lead, -1).reshape(prod(lead), -1) for x in layout))
    by_row, by_key = _sides(pattern, flat, rows, tile)
    rows_of, keys_of = (x.blocks.view(*lead, *x.blocks.shape[1:]) for x in (by_row, by_key))
    none = by_row.order.new_empty(0)
    return Lists(rows_of, keys_of, by_row.lists, by_key.lists, none, none, 0, 0, True)


class _Tokens(NamedTuple):
    ids: Int[Tensor, "s t"]
    positions: Int[Tensor, "s t"]


class _Side(NamedTuple):
    """The queries of some sequences, or their keys."""

    blocks: Int[Tensor, "s blocks numbers"]
    lists: List
    order: Int[Tensor, "s t"]
    first: int


def _sides(pattern: Pattern, layout: Layout, rows: int, tile: int) -> tuple[_Side, _Side]:
    queries = _Tokens(layout.query_ids, layout.query_positions)
    keys = _Tokens(layout.key_ids, layout.key_positions)

    def seen(queries: _Tokens, keys: _Tokens) -> Tensor:
        return allowed(pattern, Layout(queries.ids, keys.ids, queries.positions, keys.positions))

    def seeing(keys: _Tokens, queries: _Tokens) -> Tensor:
        return seen(queries, keys).mT

    return _side(seen, queries, keys, rows, tile), _side(seeing, keys, queries, rows, tile)


def _side(sees: Callable[[_Tokens, _Tokens], Tensor], own: _Tokens, other: _Tokens, rows: int, tile: int) -> _Side:
    """Blocks of one's own tokens and lists of the others that they see."""
    sequences, length = own.ids.shape
    place = torch.arange(up(length, rows), device=own.ids.device).expand(sequences, -1)
    counts = torch.cat([seen.sum(-1) for seen in _slabs(sees, own, other, place.clamp(max=length - 1), rows)])
    order, first = _order(counts.view(sequences, -1)[:, :length])
    here = (place < length).reshape(-1, rows, 1)
    heads, parts, begin = [], [], 0
    for seen in _slabs(sees, own, other, _filled(order, rows), rows):
        real, here = here[: len(seen)], here[len(seen) :]
        head, part = _listed(_words(seen & real), _words(real), tile)
        head[:, 0] += begin
        begin += len(part.tokens)
        heads.append(head)
        parts.append(part)
    blind = counts.view(sequences, -1).gather(-1, order) == 0
    tokens = _filled(torch.where(blind, ~order, order), rows).view(sequences, -1, rows)
    blocks = torch.cat([tokens, torch.cat(heads).view(sequences, -1, HEAD)], -1).int()
    return _Side(blocks, List(*map(torch.cat, zip(*parts, strict=True))), order, min(up(first, rows), length))


def _filled(order: Int[Tensor, "s t"], rows: int) -> Int[Tensor, "s p"]:
    """With a token for every place of the last block, which may be any."""
    return F.pad(order, (0, -order.shape[-1] % rows))


def _slabs(
    sees: Callable[[_Tokens, _Tokens], Tensor], own: _Tokens, other: _Tokens, at: Int[Tensor, "s p"], rows: int
) -> Iterator[Bool[Tensor, "b rows others"]]:
    """What the tokens `at` those places see, a number of blocks at a time."""
    step = max(1, SLAB // (rows * other.ids.shape[-1]))
    sequence = torch.arange(len(at), device=at.device).repeat_interleave(at.shape[-1] // rows)
    for s, here in zip(sequence.split(step), at.reshape(-1, rows).split(step), strict=True):
        yield sees(_Tokens(*(x[s[:, None], here] for x in own)), _Tokens(*(x[s] for x in other)))


def _order(counts: Int[Tensor, "s t"]) -> tuple[Int[Tensor, "s t"], int]:
    """A permutation: tokens that see far more than most, then the others; and how many the former are in sequence 0."""
    long = counts > LONG * counts.median(-1, keepdim=True).values
    return (~long).byte().argsort(stable=True), int(long[0].sum())


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
