"""The keys that a query sees as two intervals per query; the queries that see a key as two intervals per key.

The fused kernels take a pattern as six numbers. With i and j counted from the start of the segment,

    j visible from i    i < heads or j < sinks      j ≤ i + limit
                        otherwise                   i − before ≤ j ≤ i + after  and  ⌊i/block⌋ = ⌊j/block⌋

This gives each query a near interval [lo, hi) and a prefix [start, stop), which are disjoint; each key likewise. So one
kernel covers windows, blocks, causal and full attention, sinks, leading global tokens and packed segments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch

from heedful.patterns import And, Blocks, Causal, Full, Global, Or, Pattern, Window
from heedful.segments import Segments, resolve
from heedful.shapes import Int, Tensor, broadcast_shapes

T = TypeVar("T")
FAR = 1 << 29  # longer than any sequence
NOWHERE = 1 << 30  # the lo of a query that sees nothing, or of a key that nothing sees


@dataclass(frozen=True)
class Reach:
    """A pattern in six numbers; the near interval is empty if before < 0, and there are no blocks if block = 0."""

    before: int = FAR
    after: int = FAR
    block: int = 0
    sinks: int = 0
    heads: int = 0
    limit: int = FAR

    @property
    def is_plain(self) -> bool:
        """True if no token is special."""
        return self.sinks == self.heads == 0

    @classmethod
    def of(cls, pattern: Pattern) -> Reach | None:
        """The numbers of a pattern; None if six do not describe it."""
        try:
            return _known(pattern)
        except TypeError:  # the pattern has no hash
            return _numbers(pattern)


def _numbers(pattern: Pattern) -> Reach | None:
    match pattern:
        case Full():
            return Reach()
        case Causal():
            return Reach(after=0, limit=0)
        case Window(before, after, sinks):
            return Reach(before, after, sinks=sinks, limit=after)
        case Blocks(size):
            return Reach(block=size)
        case Global(indices) if indices == tuple(range(len(indices))):
            return Reach(-1, -1, sinks=len(indices), heads=len(indices))
        case And(left, right):
            return _both(_numbers(left), _numbers(right))
        case Or(left, right):
            return _either(_numbers(left), _numbers(right))
    return None


_known = lru_cache(64)(_numbers)  # every call needs them, and computing them takes as long as a launch


def _both(x: Reach | None, y: Reach | None) -> Reach | None:
    if x is None or y is None:
        return None
    if x.is_plain:
        x, y = y, x
    after = min(x.after, y.after)
    if not x.is_plain:  # only a limit to the right may cut the row or column of a special token
        one_sided = y.is_plain and y.before == FAR and not y.block
        return replace(x, after=after, limit=min(x.limit, y.after)) if one_sided else None
    small, large = sorted((x.block, y.block))
    if small and large % small:
        return None
    return Reach(min(x.before, y.before), after, small or large)


def _either(x: Reach | None, y: Reach | None) -> Reach | None:
    if x is None or y is None:
        return None
    for one in (x, y):
        if one == Reach():
            return one
    if x.before < 0 or y.before < 0:
        near = y if x.before < 0 else x
        before, after, block = near.before, near.after, near.block
    elif x.block or y.block:
        return None
    else:
        before, after, block = max(x.before, y.before), max(x.after, y.after), 0
    if y.is_plain or _covers(x, y):
        special = x
    elif x.is_plain or _covers(y, x):
        special = y
    else:
        return None
    found = Reach(before, after, block, special.sinks, special.heads, special.limit)
    return found if found.is_plain or after <= found.limit else None


def _covers(x: Reach, y: Reach) -> bool:
    return x.sinks >= y.sinks and x.heads >= y.heads and x.limit >= y.limit


@dataclass(frozen=True)
class Intervals:
    """lo, hi, start, stop of every query, (*s, 4, n), and of every key, (*s, 4, m); lo = NOWHERE: no visible pairs.

    first_rows and first_keys count the leading queries and keys that may see, or be seen by, the whole sequence, which
    is too much work for one program. With segments they are 0.
    """

    rows: Int[Tensor, "*s 4 n"]
    keys: Int[Tensor, "*s 4 m"]
    first_rows: int
    first_keys: int
    segmented: bool
    reach: Reach

    @property
    def special(self) -> tuple[int, int]:
        """The numbers of leading keys and leading queries that kernels process apart from the others."""
        return self.reach.sinks, self.reach.heads

    @property
    def kind(self) -> tuple:
        """All that a `SoftmaxSetup` depends on."""
        return self.reach, self.rows.shape, self.first_rows, self.first_keys, self.segmented

    @property
    def keys_may_split(self) -> bool:
        """True if the loop of all keys may be split into parts, like that of the first ones."""
        return not self.reach.heads

    @cached_property
    def bounds(self) -> tuple[Int[Tensor, "*s n"], ...]:
        """lo, hi, start, stop of every query; hi = lo and stop = start for an empty interval."""
        lo, hi, start, stop = self.rows.long().unbind(-2)
        return lo, torch.maximum(lo, hi), start, torch.maximum(start, stop)

    @cached_property
    def counts(self) -> Int[Tensor, "*s n"]:
        """The number of keys that each query sees."""
        lo, hi, start, stop = self.bounds
        return hi - lo + stop - start


def intervals(reach: Reach, n: int, m: int, segments: Segments | None, device: torch.device) -> Intervals:
    """The intervals of every query and key; cached for recent lengths and segments."""
    if segments is None:
        return _unsegmented(reach, n, m, device)
    return recent((reach, n, m), segments, lambda: _segmented(reach, n, m, segments))


def recent(key: tuple, segments: Segments, make: Callable[[], T]) -> T:
    """make(), cached for recent keys and segments: the layers of a model share them."""
    parts = segments if isinstance(segments, tuple) else (segments,)
    key = *key, tuple(id(part) for part in parts)
    known, found = _recent.get(key, ((), None))
    if found is None or not all(mark.holds(part) for mark, part in zip(known, parts, strict=True)):
        found = make()
        if len(_recent) >= 8:
            _recent.clear()
        _recent[key] = tuple(_Mark(part) for part in parts), found
    return found


class _Mark:
    """Tells whether a tensor is the same object as before, and unmodified."""

    def __init__(self, x: Tensor):
        self.ref, self.version = weakref.ref(x), _version(x)

    def holds(self, x: Tensor) -> bool:
        return self.ref() is x and self.version is not None and self.version == _version(x)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


_recent: dict[tuple, tuple[tuple[_Mark, ...], Any]] = {}


@lru_cache(32)
def _unsegmented(reach: Reach, n: int, m: int, device: torch.device) -> Intervals:
    i, j = torch.arange(m - n, m, device=device), torch.arange(m, device=device)
    rows = _of_queries(reach, i, 0, m)
    keys = _of_keys(reach, j, 0, n, m - n)
    first_rows = min(max(reach.heads - (m - n), 0), n) if reach.heads else 0
    return Intervals(rows, keys, first_rows, min(reach.sinks, m), False, reach)


def _segmented(reach: Reach, n: int, m: int, segments: Segments) -> Intervals:
    layout = resolve(segments, n, m)
    lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
    query_ids, key_ids = (x.expand(*lead, -1).contiguous() for x in (layout.query_ids, layout.key_ids))
    i, j = (x.expand(*lead, -1) for x in (layout.query_positions, layout.key_positions))
    among_keys, among_queries = _Runs(key_ids), _Runs(query_ids)
    start, count = among_keys.of(query_ids)
    rows = _without(_of_queries(reach, i, start, count), (query_ids < 0) | (count == 0))
    start, queries = among_queries.of(key_ids)
    _, count = among_keys.of(key_ids)
    keys = _without(_of_keys(reach, j, start, queries, count - queries), (key_ids < 0) | (queries == 0))
    return Intervals(rows, keys, 0, 0, True, reach)


class _Runs:
    """Where each id begins, and how often it occurs."""

    def __init__(self, ids: Tensor):
        self.ordered, self.order = ids.sort(dim=-1, stable=True)

    def of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.searchsorted(self.ordered, ids)
        count = torch.searchsorted(self.ordered, ids, right=True) - first
        if not self.order.shape[-1]:
            return first, count
        return self.order.gather(-1, first.clamp(max=self.order.shape[-1] - 1)), count


def are_runs(segments: Segments) -> bool:
    """True if every segment is one run of tokens; synchronises with the device once per new tensor of segments."""
    return all(_is_run(part) for part in (segments if isinstance(segments, tuple) else (segments,)))


_last_runs: list[tuple[_Mark, bool]] = []


def _is_run(ids: Tensor) -> bool:
    for mark, answer in _last_runs:
        if mark.holds(ids):
            return answer
    flat = ids.reshape(-1, ids.shape[-1]).long()
    ordered, order = flat.sort(dim=-1, stable=True)
    apart = (ordered[:, 1:] == ordered[:, :-1]) & (order[:, 1:] != order[:, :-1] + 1) & (ordered[:, 1:] >= 0)
    answer = not bool(apart.any())
    _last_runs.append((_Mark(ids), answer))
    del _last_runs[:-4]
    return answer


def _of_queries(reach: Reach, i: Tensor, start, count) -> Tensor:
    """lo, hi, start, stop for queries at position i; the segment has `count` keys, from `start` on."""
    lo, hi = i - reach.before, i + reach.after + 1
    if reach.block:
        first = i.div(reach.block, rounding_mode="floor") * reach.block
        lo, hi = torch.maximum(lo, first), torch.minimum(hi, first + reach.block)
    end = i + reach.limit + 1
    special = (i < reach.heads) & (reach.heads > 0)
    lo = torch.where(special, 0, lo.clamp(min=reach.sinks))
    hi = torch.where(special, end, hi)
    stop = torch.where(special, 0, end.clamp(max=reach.sinks))
    return _stacked(lo, hi, torch.zeros_like(i), stop, start, count, 0)


def _of_keys(reach: Reach, j: Tensor, start, count, shift) -> Tensor:
    """lo, hi, start, stop for keys at position j; the segment's queries start at position `shift`."""
    lo, hi = j - reach.after, j + reach.before + 1
    if reach.block:
        first = j.div(reach.block, rounding_mode="floor") * reach.block
        lo, hi = torch.maximum(lo, first), torch.minimum(hi, first + reach.block)
    begin = j - reach.limit
    special = j < reach.sinks
    lo = torch.where(special, begin, lo.clamp(min=reach.heads) if reach.heads else lo)
    hi = torch.where(special, FAR, hi)
    stop = torch.where(special, 0, torch.full_like(j, reach.heads)) if reach.heads else begin  # positions may be < 0
    return _stacked(lo, hi, begin, stop, start, count, shift)


def _stacked(lo, hi, begin, stop, start, count, shift) -> Tensor:
    """Intersect positions with [shift, shift + count), and shift them so that this interval begins at `start`."""

    def cut(x):
        return torch.minimum((x - shift).clamp(min=0), torch.as_tensor(count, device=x.device)) + start

    lo, hi, begin, stop = (cut(x) for x in (lo, hi, begin, stop))
    empty = stop <= begin
    begin, stop = torch.where(empty, NOWHERE, begin), torch.where(empty, 0, stop)
    return torch.stack([lo, torch.maximum(lo, hi), begin, stop], -2).int()


def _without(x: Tensor, dead: Tensor) -> Tensor:
    nothing = torch.tensor([NOWHERE, 0, NOWHERE, 0], dtype=x.dtype, device=x.device)[:, None]
    return torch.where(dead[..., None, :], nothing, x).contiguous()


def inside(where: Intervals, n: int, m: int, least: int | None, most: int | None) -> Intervals:
    """The intervals restricted to offsets least … most, both included; valid for the queries only, not for the keys.

    The prefixes of adjacent queries then begin at different keys, as with segments, so kernels treat them like those.
    """
    i = torch.arange(m - n, m, device=where.rows.device)
    lo, hi, start, stop = where.rows.long().unbind(-2)
    dead, cuts = lo == NOWHERE, (torch.maximum, torch.minimum)
    begin, end = i + (-FAR if least is None else least), i + (FAR if most is None else most) + 1
    lo, hi, start, stop = (f(x, y) for f, x, y in zip(cuts * 2, (lo, hi, start, stop), (begin, end) * 2, strict=True))
    empty = stop <= start
    start, stop = torch.where(empty, NOWHERE, start), torch.where(empty, 0, stop)
    rows = torch.stack([lo, torch.maximum(lo, hi), start, stop], -2).int()
    return replace(where, rows=_without(rows, dead), first_rows=0, first_keys=0, segmented=True)
