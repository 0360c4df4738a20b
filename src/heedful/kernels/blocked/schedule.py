"""Which parts of the score matrix to visit.

Work follows the pattern: a block of b queries under a window of w visits b·(b + w) scores, whatever the length.

A block of queries is halved while that saves enough of its work (a single global token must not make its
neighbours dense), and a tile never holds more scores than its device is given, so memory does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod

import torch

from heedful.kernels.blocked.tiles import VECTOR, Keys, Mask, Size, Tile, pick, size_on, with_axes
from heedful.patterns import Full, Pattern, Span
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Tensor

WORTH = 0.7  # halve a block of queries when the halves need less than this share of its work
MOST_TILES = 4096  # of a schedule that is cached
MOST_BYTES = 1 << 22  # of its masks and lists of keys
MASK_BYTES = 6  # of an entry of a mask: visible, hidden, and the penalty in float32


def tiles(
    pattern: Pattern, batch: tuple[int, ...], n: int, m: int, segments: Segments | None, device: torch.device
) -> Iterator[Tile]:
    """Tiles that together hold every allowed pair, each pair once. Queries that see no key may be in no tile."""
    if segments is None:
        return _pattern_tiles(pattern, batch, n, m, device)
    layout = Layout(*(with_axes(x, len(batch), 1) for x in resolve(segments, n, m, device)))
    if 0 < prod(batch) * n * m <= size_on(device).scores:
        return iter([_everything(pattern, layout)])
    return _segment_tiles(pattern, batch, layout, size_on(device))


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # a tensor made in that mode can't be saved for gradients later
def cached_tiles(pattern: Pattern, batch: tuple[int, ...], n: int, m: int, size: Size) -> tuple[Tile, ...] | None:
    """The tiles on a CPU without segments, made once; None if they would take too much memory.

    size   `size_on` a CPU, on which the tiles depend
    """
    if _too_many_masks(pattern, n, m, size):  # asked first, so that no mask is made for nothing
        return None
    kept: list[Tile] = []
    parts: dict[int, Mask | Keys] = {}  # many tiles share one mask, or one list of keys
    bytes_held = 0
    for tile in _pattern_tiles(pattern, batch, n, m, torch.device("cpu")):
        kept.append(tile)
        if tile.mask is not None and id(tile.mask) not in parts:
            parts[id(tile.mask)] = tile.mask
            bytes_held += MASK_BYTES * tile.mask.visible.numel()
        if tile.cols.interval is None and id(tile.cols) not in parts:
            parts[id(tile.cols)] = tile.cols
            bytes_held += 16 * len(tile.cols)
        if len(kept) > MOST_TILES or bytes_held > MOST_BYTES:
            return None
    for part in parts.values():
        if isinstance(part, Mask):
            part.complete()
    return tuple(kept)


def _too_many_masks(pattern: Pattern, n: int, m: int, size: Size) -> bool:
    """True if the tiles that have a mask of their own hold more entries than are kept."""
    first = pattern.repeats_from
    own = n if first is None else first - (m - n)  # queries before those whose tiles share a mask
    most = MOST_BYTES // MASK_BYTES
    if own * m <= most:
        return False
    entries = 0
    for lo, hi, cols in _blocks(pattern, n, m, size):
        if lo >= own or entries > most:
            break
        entries += (hi - lo) * len(cols)
    return entries > most


def _pattern_tiles(pattern: Pattern, batch: tuple[int, ...], n: int, m: int, device: torch.device) -> Iterator[Tile]:
    """Without segments: blocks of queries with the intervals of keys that the pattern gives them."""
    queries, keys = torch.arange(m - n, m, device=device), torch.arange(m, device=device)
    most, last = size_on(device), _LastMask()
    for lo, hi, cols in _blocks(pattern, n, m, most):
        j = keys[cols.index if cols.interval is None else slice(*cols.interval)]
        for rows, index in _parts(lo, hi, cols, batch, most):
            i = queries[rows, None]
            mask, clear = last(pattern, rows.start + m - n, cols, i, j)
            for at in index:
                yield Tile(at, rows, cols, i, j, mask, clear)


def _segment_tiles(pattern: Pattern, batch: tuple[int, ...], layout: Layout, most: Size) -> Iterator[Tile]:
    """Row of ids by row of ids: blocks of queries with the keys of their segments that the pattern may let them see."""
    axes = max((axis + 1 for x in layout for axis in range(len(batch)) if x.shape[axis] > 1), default=0)
    for outer in product(*(range(size) for size in batch[:axes])):
        ids = Layout(*(pick(x, outer).reshape(-1) for x in layout))
        for lo, hi, cols in _segment_blocks(pattern, ids, most.rows):
            j = ids.key_positions[cols.index if cols.interval is None else slice(*cols.interval)]
            for rows, index in _parts(lo, hi, cols, batch[axes:], most):
                i = ids.query_positions[rows, None]
                mask = _segment_mask(pattern, ids, rows, cols, i, j)
                for at in index:
                    yield Tile(outer + at, rows, cols, i, j, mask)


def _parts(
    lo: int, hi: int, cols: Keys, batch: tuple[int, ...], most: Size
) -> Iterator[tuple[slice, list[tuple[int, ...]]]]:
    """The queries of a block and the batch entries of each tile, so that no tile holds more scores than it may."""
    axes = 0
    while axes < len(batch) and prod(batch[axes:]) * (hi - lo) * len(cols) > most.scores:
        axes += 1
    index = list(product(*(range(size) for size in batch[:axes])))
    step = min(hi - lo, max(1, most.scores // len(cols)))
    for start in range(lo, hi, step):
        yield slice(start, min(start + step, hi)), index


def _everything(pattern: Pattern, layout: Layout) -> Tile:
    """The whole of a small batch at once: a loop over its sequences would take longer than the work."""
    i, j = layout.query_positions[..., None], layout.key_positions[..., None, :]
    here = layout.query_ids[..., None]
    mask = Mask(pattern.allows(i, j) & (here == layout.key_ids[..., None, :]) & (here >= 0))
    return Tile((), slice(None), Keys([(0, layout.key_ids.shape[-1])]), i, j, mask)


class _LastMask:
    """Tiles that are shifts of each other share one mask; only the last is kept, so memory does not grow."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self.mask: Mask | None = None

    def __call__(self, pattern: Pattern, first: int, cols: Keys, i: Tensor, j: Tensor) -> tuple[Mask | None, int]:
        """The mask of a tile, and how many keys lie before those that it is about.

        first   the position of its first query, which a GPU need not be asked for
        """
        if isinstance(pattern, Full):
            return None, 0
        clear = cols.before(pattern.clear_until(first))
        clear -= clear % VECTOR
        shape = len(i), len(j) - clear, first - cols.last
        repeats = pattern.repeats_from is not None and first >= pattern.repeats_from
        if not repeats or shape != self.shape:
            self.mask = Mask(pattern.allows(i, j[clear:]))
            self.shape = shape if repeats else None
        return self.mask, clear


def _segment_mask(pattern: Pattern, ids: Layout, rows: slice, cols: Keys, i, j) -> Mask:
    here = ids.query_ids[rows, None]
    return Mask(pattern.allows(i, j) & (here == ids.key_ids[cols.index]) & (here >= 0))


def _blocks(pattern: Pattern, n: int, m: int, size: Size) -> Iterator[tuple[int, int, Keys]]:
    """Blocks of queries [lo, hi) with the keys they may see, by the pattern's own intervals."""

    def split(lo: int, hi: int, spans: list[Span]):
        middle = (lo + hi) // 2
        if hi - lo >= 2 * size.fewest:
            first, second = (pattern.spans(a + m - n, b + m - n, m) for a, b in ((lo, middle), (middle, hi)))
            halves = (middle - lo) * _size(first) + (hi - middle) * _size(second)
            if halves < WORTH * (hi - lo) * _size(spans):
                yield from split(lo, middle, first)
                yield from split(middle, hi, second)
                return
        if spans:
            yield lo, hi, Keys(_rounded(spans, m))

    for lo in range(0, n, size.rows):
        hi = min(lo + size.rows, n)
        yield from split(lo, hi, pattern.spans(lo + m - n, hi + m - n, m))


def _segment_blocks(pattern: Pattern, ids: Layout, rows: int) -> Iterator[tuple[int, int, Keys]]:
    """Blocks of queries with the keys of their segments that the pattern may let them see."""
    n, longest = len(ids.query_ids), int(ids.key_positions.max()) + 1 if len(ids.key_ids) else 0
    for lo in range(0, n, rows):
        hi = min(lo + rows, n)
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
            whole = last - first + 1 == len(index)
            yield lo, hi, Keys([(first, last + 1)]) if whole else Keys(index=index)


def _size(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def _rounded(spans: list[Span], m: int) -> list[Span]:
    """A few keys more, so that rows of a tile are whole vectors of the CPU: masked, they cost less than raggedness."""
    start, stop = spans[-1]
    return [*spans[:-1], (start, min(m, stop + -_size(spans) % VECTOR))]
