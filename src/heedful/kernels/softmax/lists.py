"""Lists of the keys that each block of queries sees, and of the queries that see each block of keys, for any pattern.

If six numbers do not describe a pattern (reach.py), this module evaluates the pattern once for every pair. It puts
queries into blocks, and each block gets

    list        the keys that at least one of its queries sees: first whole tiles of keys that all of them see, then the
                others, padded to whole tiles
    words       64 bits for each key of the list: bit r is set if row r of the block sees the key

It lists keys, not tiles of keys: a kernel gathers a tile from wherever its keys lie. For example, the last eight of
every 128 keys among 1024 make one full tile of 64; tiles of consecutive keys would be eight, mostly empty. For the same
reason queries that see far more keys than most come first and share blocks; the others stay in order. Keys are put
into blocks with lists of queries in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from heedful.kernels.launching import up
from heedful.kernels.softmax.reach import recent
from heedful.patterns import Pattern
from heedful.segments import Layout, Segments, allowed, resolve
from heedful.shapes import Bool, Int, Tensor, broadcast_shapes

MOST_ROWS = 64  # of a block: the bits of a word
MOST_PAIRS = 1 << 34  # the largest number of pairs for which a pattern is evaluated
SLAB = 1 << 24  # pairs evaluated at a time
LONG = 4  # a token sees "far more than most" if it sees more than LONG times the median
HEAD = 3  # numbers of a block beside its tokens: start of its list, length of the full part, length of the list


class List(NamedTuple):
    """The lists of all blocks, concatenated; token −1 is padding."""

    tokens: Int[Tensor, " l"]
    words: Int[Tensor, " l"]


@dataclass(frozen=True)
class Lists:
    """Blocks of queries with their lists of keys, and blocks of keys with their lists of queries.

    A block's row holds its tokens (~i instead of i if token i sees nothing), then three numbers (HEAD). first_rows and
    first_keys count the tokens in the leading blocks, whose lists are long; 0 with segments, where each sequence has
    its own order.
    """

    rows: Int[Tensor, "*s blocks numbers"]
    keys: Int[Tensor, "*s blocks numbers"]
    of_rows: List
    of_keys: List
    first_rows: int
    first_keys: int
    segmented: bool

    special = 0, 0  # tokens that kernels process apart from the others: none, a list holds all
    keys_may_split = False  # few keys under many queries are not split here: lists have them only with segments

    @property
    def kind(self) -> tuple:
        """All that a `SoftmaxSetup` depends on."""
        return "lists", self.rows.shape, self.keys.shape, self.first_rows, self.first_keys, self.segmented


def lists(
    pattern: Pattern, n: int, m: int, segments: Segments | None, device: torch.device, rows: int, tile: int
) -> Lists:
    """The lists for blocks of `rows` rows; cached for recent patterns, lengths and segments."""
    if segments is None:
        return _unsegmented(pattern, n, m, device, rows, tile)
    return recent((pattern, n, m, rows, tile), segments, lambda: _segmented(pattern, n, m, segments, rows, tile))


@lru_cache(4)
def _unsegmented(pattern: Pattern, n: int, m: int, device: torch.device, rows: int, tile: int) -> Lists:
    layout = resolve(None, n, m, device)
    queries, keys = (_Tokens(None, x[None]) for x in (layout.query_positions, layout.key_positions))
    by_row, by_key = _sides(pattern, queries, keys, rows, tile)
    blocks = by_row.blocks[0], by_key.blocks[0]
    return Lists(*blocks, by_row.lists, by_key.lists, by_row.first, by_key.first, False)


def _segmented(pattern: Pattern, n: int, m: int, segments: Segments, rows: int, tile: int) -> Lists:
    layout = resolve(segments, n, m)
    lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
    flat = Layout(*(x.expand(*lead, -1).reshape(prod(lead), -1) for x in layout))
    queries, keys = _Tokens(flat.query_ids, flat.query_positions), _Tokens(flat.key_ids, flat.key_positions)
    by_row, by_key = _sides(pattern, queries, keys, rows, tile)
    rows_of, keys_of = (x.blocks.view(*lead, *x.blocks.shape[1:]) for x in (by_row, by_key))
    return Lists(rows_of, keys_of, by_row.lists, by_key.lists, 0, 0, True)


class _Tokens(NamedTuple):
    """Some tokens of each sequence; ids is None without segments."""

    ids: Int[Tensor, "s t"] | None
    positions: Int[Tensor, "s t"]

    def at(self, *index: Tensor | slice) -> _Tokens:
        return _Tokens(None if self.ids is None else self.ids[index], self.positions[index])


Sees = Callable[[_Tokens, _Tokens], Bool[Tensor, "s own others"]]


class _Side(NamedTuple):
    """The blocks and lists of all queries, or of all keys."""

    blocks: Int[Tensor, "s blocks numbers"]
    lists: List
    first: int


def _sides(pattern: Pattern, queries: _Tokens, keys: _Tokens, rows: int, tile: int) -> tuple[_Side, _Side]:
    def seen(queries: _Tokens, keys: _Tokens) -> Tensor:
        if queries.ids is None or keys.ids is None:
            i, j = queries.positions[..., None], keys.positions[..., None, :]
            return pattern.allows(i, j).expand(broadcast_shapes(i.shape, j.shape))
        return allowed(pattern, Layout(queries.ids, keys.ids, queries.positions, keys.positions))

    def seeing(keys: _Tokens, queries: _Tokens) -> Tensor:
        return seen(queries, keys).mT

    some, others = _counts(seen, queries, keys)
    return _side(seen, queries, keys, some, rows, tile), _side(seeing, keys, queries, others, rows, tile)


def _counts(sees: Sees, own: _Tokens, other: _Tokens) -> tuple[Int[Tensor, "s t"], Int[Tensor, "s u"]]:
    """How many others each token sees, and how many tokens see each of the others."""
    found, others = [], torch.zeros_like(other.positions)
    tokens = torch.arange(own.positions.shape[-1], device=others.device)
    for at in tokens.split(max(1, SLAB // others.numel())):
        seen = sees(own.at(slice(None), at), other)
        found.append(seen.sum(-1))
        others += seen.sum(-2)
    return torch.cat(found, -1), others


def _side(sees: Sees, own: _Tokens, other: _Tokens, counts: Int[Tensor, "s t"], rows: int, tile: int) -> _Side:
    """Blocks of the own tokens, and lists of the others that they see."""
    order, first = _order(counts)
    sequences, length = order.shape
    filled = torch.cat([order, order[:, -1:].expand(-1, -length % rows)], -1)  # the last token pads the last block
    sequence = torch.arange(sequences, device=order.device).repeat_interleave(filled.shape[-1] // rows)
    step = max(1, SLAB // (rows * other.positions.shape[-1]))
    heads, parts, begin = [], [], 0
    for s, at in zip(sequence.split(step), filled.view(-1, rows).split(step), strict=True):
        head, part = _listed(_words(sees(own.at(s[:, None], at), other.at(s))), rows, tile)
        head[:, 0] += begin
        begin += len(part.tokens)
        heads.append(head)
        parts.append(part)
    tokens = torch.where(counts.gather(-1, filled) > 0, filled, ~filled).view(sequences, -1, rows)
    blocks = torch.cat([tokens, torch.cat(heads).view(sequences, -1, HEAD)], -1).int()
    return _Side(blocks, List(*map(torch.cat, zip(*parts, strict=True))), min(up(first, rows), length))


def _order(counts: Int[Tensor, "s t"]) -> tuple[Int[Tensor, "s t"], int]:
    """A permutation (tokens that see far more than most first), and how many those are in sequence 0."""
    long = counts > LONG * counts.median(-1, keepdim=True).values
    return (~long).byte().argsort(stable=True), int(long[0].sum())


def _words(seen: Bool[Tensor, "b rows others"]) -> Int[Tensor, "b others"]:
    """Pack each column of a block into a word: bit r is row r. Works on bytes, since wider numbers move more memory."""
    blocks, rows, others = seen.shape
    place = torch.arange(8, dtype=torch.uint8, device=seen.device)[:, None]
    octets = (seen.byte().reshape(blocks, rows // 8, 8, others) << place).sum(2, dtype=torch.uint8)
    words = octets.new_zeros(blocks, others, 8)
    words[..., : rows // 8] = octets.mT
    return words.view(torch.int64).squeeze(-1)


def _listed(words: Int[Tensor, "b others"], rows: int, tile: int) -> tuple[Tensor, List]:
    """HEAD for each block, and the lists: whole tiles of tokens that all its rows see, then the others."""
    some = words != 0
    full = words == (-1 if rows == 64 else (1 << rows) - 1)
    full &= full.cumsum(-1) <= full.sum(-1, keepdim=True) // tile * tile  # an incomplete tile goes with the others
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
