"""Which parts of the score matrix to visit.

A tile is a block of queries with *all* the keys that any of them may see, gathered together. So a row function
sees whole rows (no running maximum, no second pass), and work follows the pattern: a block of b queries under a
window of w visits b·(b + w) scores, whatever the length.

A block of queries is halved while that saves enough of its work (a single global token must not make its
neighbours dense), and a tile never holds more scores than its device is given, so memory does not depend on the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heedful.patterns import Full, Pattern, Span
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Bool, Float, Int, Tensor

FEWEST = 16  # fewer queries than this are not worth a call of their own
WORTH = 0.7  # halve a block of queries when the halves need less than this share of its work
ROWS = 128  # queries in a tile: enough for the matrix unit, few enough that a window's corners cost little
VECTOR = 16  # numbers that a CPU handles at once: where slices begin and end elsewhere, they take up to twice as long
BUDGET = 1 << 21  # scores in a tile: 8 MiB in float32


class Size(NamedTuple):
    """Of tiles: the most queries, the fewest that are worth a call of their own, the most scores."""

    rows: int
    fewest: int
    scores: int


ON_GPU = Size(512, 128, 1 << 26)  # 256 MiB: enough work to hide what a launch costs


def size_on(device: torch.device) -> Size:
    return Size(ROWS, FEWEST, BUDGET) if device.type == "cpu" else ON_GPU


class Mask:
    """Which queries see which keys, with the forms that row functions need, each made once."""

    def __init__(self, visible: Bool[Tensor, "*s r c"]):
        self.visible = visible

    @cached_property
    def hidden(self) -> Bool[Tensor, "*s r c"]:
        return ~self.visible

    @cached_property
    def penalty(self) -> Float[Tensor, "*s r c"]:
        return torch.where(self.visible, 0.0, -inf)

    @cached_property
    def blind(self) -> Bool[Tensor, "*s r 1"] | None:
        """The queries that see none of these keys; None where there is none."""
        blind = self.hidden.all(-1, keepdim=True)
        return blind if blind.any() else None

    @cached_property
    def count(self) -> Int[Tensor, "*s r 1"]:
        return self.visible.sum(-1, keepdim=True)


class Keys:
    """The keys of a tile, in increasing order: whole intervals, or single ones."""

    FEW = 8  # up to so many intervals are faster copied one by one than gathered by index

    def __init__(self, spans: list[Span] | None = None, index: Tensor | None = None):
        self.interval = spans[0] if spans is not None and len(spans) == 1 else None
        """The first and the one after the last, where these are all the keys between; None where they are not."""
        self.spans = spans if spans is not None and len(spans) <= self.FEW else None
        self._all, self._given = spans or [], index

    @cached_property
    def index(self) -> Int[Tensor, " c"]:
        return torch.cat([torch.arange(*span) for span in self._all]) if self._given is None else self._given

    def __len__(self) -> int:
        return len(self.index) if self.interval is None else self.interval[1] - self.interval[0]

    @property
    def last(self) -> int:
        return int(self.index[-1]) if self.interval is None else self.interval[1] - 1

    def before(self, key: int) -> int:
        """How many are less than this one."""
        if self.interval is None:
            return int(torch.searchsorted(self.index, key))
        start, stop = self.interval
        return min(max(key, start), stop) - start

    def find(self, keys: Int[Tensor, "*x"]) -> tuple[Int[Tensor, "*x"], Bool[Tensor, "*x"]]:
        """Where these stand among mine, and whether they do."""
        if self.interval is not None:
            start, stop = self.interval
            inside = keys.clamp(start, stop - 1)
            return inside - start, inside == keys
        index = self.index.to(keys.device)
        place = torch.searchsorted(index, keys.contiguous()).clamp(max=len(index) - 1)
        return place, index[place] == keys

    def take(self, x: Float[Tensor, "*b m w"], out: Tensor | None = None) -> Float[Tensor, "*b c w"]:
        """x[…, keys, :], a view where the keys are one interval, else a copy (into `out`, where it is given)."""
        if self.spans is None:  # x[..., index, :] is four times slower
            return torch.index_select(x, -2, self.index.to(x.device), out=out)
        parts = [x.narrow(-2, start, stop - start) for start, stop in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2, out=out)

    def add(self, target: Float[Tensor, "*b m w"], part: Float[Tensor, "*b c w"]) -> None:
        """target[…, keys, :] += part."""
        if self.spans is None:
            target.index_add_(-2, self.index.to(target.device), part)
            return
        done = 0
        for start, stop in self.spans:
            target.narrow(-2, start, stop - start).add_(part.narrow(-2, done, stop - start))
            done += stop - start


@dataclass(frozen=True)
class Tile:
    """Part of the work: `batch` indexes the leading batch axes, `rows` the queries, `cols` the keys.

    Every query sees the first `clear` keys; `mask` is about those after them, and None where all are seen.
    """

    batch: tuple[int, ...]
    rows: slice
    cols: Keys
    i: Int[Tensor, "*s r 1"]
    j: Int[Tensor, " c"] | Int[Tensor, "*s #r c"]
    mask: Mask | None
    clear: int = 0

    def lower(self, scores: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b r c"]:
        """Scores with −∞ where hidden. (Adding is ten times faster than filling by a boolean mask.)"""
        if self.mask is None:
            return scores
        if scores.requires_grad:
            return scores + F.pad(self.mask.penalty, (self.clear, 0))
        scores[..., self.clear :].add_(self.mask.penalty)  # += would also copy the slice onto itself
        return scores

    def blank(self, weights: Float[Tensor, "*b r c"]) -> Float[Tensor, "*b r c"]:
        """Weights with 0 where hidden, whatever stood there."""
        if self.mask is None:
            return weights
        if weights.requires_grad:
            return weights.masked_fill(F.pad(self.mask.hidden, (self.clear, 0)), 0)
        weights[..., self.clear :].masked_fill_(self.mask.hidden, 0)
        return weights

    @property
    def blind(self) -> Bool[Tensor, "*s r 1"] | None:
        """The queries that see nothing; None where there is none."""
        return self.mask.blind if self.mask is not None and self.clear == 0 else None

    @property
    def count(self) -> Int[Tensor, "*s r 1"] | int:
        """How many keys each query sees, at least one."""
        return len(self.cols) if self.mask is None else (self.mask.count + self.clear).clamp(min=1)


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


def with_axes(x: Tensor, axes: int, tail: int) -> Tensor:
    """x with exactly `axes` batch axes in front of its last `tail` ones, new ones of size 1."""
    return x.reshape((1,) * (axes + tail - x.ndim) + x.shape)


def pick(x: Tensor, index: tuple[int, ...]) -> Tensor:
    """x[index], where an axis of size 1 serves every index."""
    return x[tuple(at if x.shape[axis] > 1 else 0 for axis, at in enumerate(index))] if index else x


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
