"""Which parts of the score matrix to visit.

A tile is a block of queries with *all* the keys that any of them may see, gathered together. So a row function
sees whole rows (no running maximum, no second pass), and work follows the pattern: a block of b queries under a
window of w visits b·(b + w) scores, whatever the length.

A block of queries is halved while that saves enough of its work (a single global token must not make its
neighbours dense), and a tile never holds more than BUDGET scores, so memory does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from heedful.patterns import Full, Pattern, Span
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Bool, Int, Tensor

ROWS = 128  # queries in a tile: enough for the matrix unit, few enough that a window's corners cost little
FEWEST = 16  # fewer queries than this are not worth a call of their own
WORTH = 0.7  # halve a block of queries when the halves need less than this share of its work
BUDGET = 1 << 21  # scores in a tile: 8 MiB in float32


class Tile(NamedTuple):
    """Part of the work: `batch` indexes the leading batch axes, `rows` and `cols` the queries and keys."""

    batch: tuple[int, ...]
    rows: slice
    cols: slice | Tensor
    i: Int[Tensor, "r 1"]
    j: Int[Tensor, "c"]
    mask: Bool[Tensor, "r c"] | None


def tiles(
    pattern: Pattern, batch: tuple[int, ...], n: int, m: int, segments: Segments | None, device: torch.device
) -> Iterator[Tile]:
    """Tiles that together hold every allowed pair, each pair once. Queries that see no key may be in no tile."""
    layout = Layout(*(with_axes(x, len(batch), 1) for x in resolve(segments, n, m, device)))
    axes = max((axis + 1 for x in layout for axis in range(len(batch)) if x.shape[axis] > 1), default=0)
    for outer in product(*(range(size) for size in batch[:axes])):
        ids = Layout(*(pick(x, outer).reshape(-1) for x in layout))
        blocks = _blocks(pattern, n, m) if segments is None else _segment_blocks(pattern, ids)
        for lo, hi, cols in blocks:
            width = len(ids.key_ids[cols])
            inner = axes
            while inner < len(batch) and prod(batch[inner:]) * (hi - lo) * width > BUDGET:
                inner += 1
            step = min(hi - lo, max(1, BUDGET // width))
            for start in range(lo, hi, step):
                rows = slice(start, min(start + step, hi))
                i, j = ids.query_positions[rows, None], ids.key_positions[cols]
                mask = _mask(pattern, ids, rows, cols, i, j, packed=segments is not None)
                for index in product(*(range(size) for size in batch[axes:inner])):
                    yield Tile(outer + index, rows, cols, i, j, mask)


def with_axes(x: Tensor, axes: int, tail: int) -> Tensor:
    """x with exactly `axes` batch axes in front of its last `tail` ones, new ones of size 1."""
    return x.reshape((1,) * (axes + tail - x.ndim) + x.shape)


def pick(x: Tensor, index: tuple[int, ...]) -> Tensor:
    """x[index], where an axis of size 1 serves every index."""
    return x[tuple(at if x.shape[axis] > 1 else 0 for axis, at in enumerate(index))]


def _mask(pattern, ids: Layout, rows, cols, i, j, *, packed: bool) -> Tensor | None:
    if isinstance(pattern, Full) and not packed:
        return None
    mask = pattern.allows(i, j)
    if packed:
        here = ids.query_ids[rows, None]
        mask = mask & (here == ids.key_ids[cols]) & (here >= 0)
    return mask


def _blocks(pattern: Pattern, n: int, m: int) -> Iterator[tuple[int, int, slice | Tensor]]:
    """Blocks of queries [lo, hi) with the keys they may see, by the pattern's own intervals."""

    def split(lo: int, hi: int, spans: list[Span]):
        middle = (lo + hi) // 2
        if hi - lo >= 2 * FEWEST:
            first, second = (pattern.spans(a + m - n, b + m - n, m) for a, b in ((lo, middle), (middle, hi)))
            halves = (middle - lo) * _size(first) + (hi - middle) * _size(second)
            if halves < WORTH * (hi - lo) * _size(spans):
                yield from split(lo, middle, first)
                yield from split(middle, hi, second)
                return
        if spans:
            yield lo, hi, _as_index(spans)

    for lo in range(0, n, ROWS):
        hi = min(lo + ROWS, n)
        yield from split(lo, hi, pattern.spans(lo + m - n, hi + m - n, m))


def _segment_blocks(pattern: Pattern, ids: Layout) -> Iterator[tuple[int, int, slice | Tensor]]:
    """Blocks of queries with the keys of their segments that the pattern may let them see."""
    n, longest = len(ids.query_ids), int(ids.key_positions.max()) + 1 if len(ids.key_ids) else 0
    for lo in range(0, n, ROWS):
        hi = min(lo + ROWS, n)
        here = ids.query_ids[lo:hi]
        where = ids.query_positions[lo:hi][here >= 0]
        if not len(where):
            continue
        reach = torch.zeros(longest, dtype=torch.bool, device=here.device)
        for start, stop in pattern.spans(int(where.min()), int(where.max()) + 1, longest):
            reach[start:stop] = True
        seen = torch.isin(ids.key_ids, here[here >= 0].unique()) & reach[ids.key_positions]
        index = seen.nonzero().flatten()
        if len(index):
            first, last = int(index[0]), int(index[-1])
            yield lo, hi, slice(first, last + 1) if last - first + 1 == len(index) else index


def _size(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _as_index(spans: list[Span]) -> slice | Tensor:
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(start, stop) for start, stop in spans])
