"""Patterns that are defined by a rule on two positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from heedful.patterns.base import Pattern, Span, clip, require_counts
from heedful.patterns.offsets import Offsets
from heedful.shapes import Int, Tensor


@dataclass(frozen=True)
class Full(Pattern):
    """Every query sees every key.

    >>> torch.arange(8)[Full().allows(torch.tensor(5), torch.arange(8))]  # the keys that query 5 sees
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """

    repeats_from = 0
    offsets = (Offsets(),)

    def allows(self, i, j):
        return torch.ones_like(i - j, dtype=torch.bool)

    def pairs(self, n, m):
        return n * m


@dataclass(frozen=True)
class Causal(Pattern):
    """A query sees its own position and all earlier ones.

    >>> torch.arange(8)[Causal().allows(torch.tensor(5), torch.arange(8))]  # the keys that query 5 sees
    tensor([0, 1, 2, 3, 4, 5])
    """

    is_causal = True
    repeats_from = 0
    offsets = (Offsets(after=0),)

    def allows(self, i, j):
        return j <= i

    def clear_until(self, lo):
        return lo + 1

    def pairs(self, n, m):
        return n * (m - n) + n * (n + 1) // 2


@dataclass(frozen=True)
class Window(Pattern):
    """A query sees `before` keys before its own position, `after` keys after it, and the first `sinks` keys.

    A query sees no sink that is more than `after` positions ahead, so a window with `after=0` is causal.

    >>> torch.arange(8)[Window(before=2, sinks=1).allows(torch.tensor(5), torch.arange(8))]
    tensor([0, 3, 4, 5])
    """

    before: int
    after: int = 0
    sinks: int = 0

    def __post_init__(self):
        require_counts(self, before=self.before, after=self.after, sinks=self.sinks)

    @property
    def is_causal(self):
        return self.after == 0

    @property
    def repeats_from(self):
        return self.before + self.sinks if self.sinks else 0

    @property
    def offsets(self):
        return None if self.sinks else (Offsets(self.before, self.after),)

    def allows(self, i, j):
        near = j >= i - self.before
        if self.sinks:
            near = near | (j < self.sinks)
        return near & (j <= i + self.after)

    def spans(self, lo, hi, m):
        stop = hi + self.after
        return clip([(0, min(self.sinks, stop)), (lo - self.before, stop)], m)

    def remembers(self, j, t):
        return (j >= t - self.before) | (j < self.sinks)


@dataclass(frozen=True)
class Strided(Pattern):
    """A query sees the keys whose distance is a multiple of `stride` (Child et al. 2019, arXiv:1904.10509).

    >>> torch.arange(8)[Strided(3).allows(torch.tensor(5), torch.arange(8))]
    tensor([2, 5])
    """

    stride: int

    repeats_from = 0

    def __post_init__(self):
        require_counts(self, least=1, stride=self.stride)

    @property
    def offsets(self):
        return (Offsets(step=self.stride),)

    def allows(self, i, j):
        return (i - j) % self.stride == 0


@dataclass(frozen=True)
class SparseFixed(Pattern):
    """A query sees its own block of `stride` keys and the last `summary` keys of every block (Child et al. 2019).

    >>> torch.arange(8)[SparseFixed(stride=4, summary=1).allows(torch.tensor(5), torch.arange(8))]
    tensor([3, 4, 5, 6, 7])
    """

    stride: int
    summary: int = 1

    def __post_init__(self):
        require_counts(self, least=1, stride=self.stride, summary=self.summary)
        if self.summary > self.stride:
            raise ValueError(f"SparseFixed: summary = {self.summary} exceeds the block of stride = {self.stride}.")

    def allows(self, i, j):
        return (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary)

    def spans(self, lo, hi, m):
        ends = range(self.stride, m + self.stride, self.stride)
        return clip([_whole_blocks(lo, hi, self.stride)] + [(end - self.summary, end) for end in ends], m)

    def remembers(self, j, t):
        return (j // self.stride == t // self.stride) | (j % self.stride >= self.stride - self.summary)


@dataclass(frozen=True)
class Summaries(Pattern):
    """A query sees the last `summary` keys of every block of `stride`: `SparseFixed` without the query's own block.

    The Sparse Transformer (Child et al. 2019) has separate heads for these keys. Combined with `Causal`, queries before
    the first summary see nothing.

    >>> torch.arange(8)[Summaries(stride=4, summary=1).allows(torch.tensor(5), torch.arange(8))]
    tensor([3, 7])
    """

    stride: int
    summary: int = 1

    def __post_init__(self):
        require_counts(self, least=1, stride=self.stride, summary=self.summary)
        if self.summary > self.stride:
            raise ValueError(f"Summaries: summary = {self.summary} exceeds the block of stride = {self.stride}.")

    def allows(self, i, j):
        return (j % self.stride >= self.stride - self.summary) & torch.ones_like(i, dtype=torch.bool)

    def spans(self, lo, hi, m):
        ends = range(self.stride, m + self.stride, self.stride)
        return clip([(end - self.summary, end) for end in ends], m)

    def remembers(self, j, t):
        return (j % self.stride >= self.stride - self.summary) & torch.ones_like(t, dtype=torch.bool)


@dataclass(frozen=True)
class Blocks(Pattern):
    """A query sees the keys of its own block of `size`.

    >>> torch.arange(8)[Blocks(4).allows(torch.tensor(5), torch.arange(8))]
    tensor([4, 5, 6, 7])
    """

    size: int

    def __post_init__(self):
        require_counts(self, least=1, size=self.size)

    def allows(self, i, j):
        return i // self.size == j // self.size

    def spans(self, lo, hi, m):
        return clip([_whole_blocks(lo, hi, self.size)], m)

    def remembers(self, j, t):
        return j // self.size == t // self.size


@dataclass(frozen=True)
class Global(Pattern):
    """The tokens at `indices` see every key and are seen by every query (Beltagy et al. 2020, arXiv:2004.05150).

    >>> longformer = Window(2, after=2) | Global((0,))
    >>> torch.arange(8)[longformer.allows(torch.tensor(5), torch.arange(8))]
    tensor([0, 3, 4, 5, 6, 7])
    """

    indices: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "indices", tuple(sorted({int(index) for index in self.indices})))
        if self.indices and self.indices[0] < 0:
            raise ValueError(
                f"Global: indices are positions from 0, got {self.indices[0]}. A position counted from the end "
                "has no meaning while a sequence grows."
            )

    def allows(self, i, j):
        return self._holds(i) | self._holds(j)

    def _holds(self, position):
        return torch.isin(position, torch.tensor(self.indices, dtype=position.dtype, device=position.device))

    def spans(self, lo, hi, m):
        if any(lo <= index < hi for index in self.indices):
            return clip([(0, m)], m)
        return clip([(index, index + 1) for index in self.indices], m)

    def remembers(self, j, t):
        last = max(self.indices, default=-1)
        return self._holds(j) | (t <= last)


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """Every block of `size` is linked with `count` different random earlier blocks, in both directions.

    A block with `count` or fewer earlier blocks is linked with all of them. The draw for block I depends only on the
    seed and on I, not on the length. So a longer sequence has all links of a shorter one, and a decoder sees the same
    keys as the encoder. BigBird (Zaheer et al. 2020, arXiv:2007.14062) draws among all blocks of a fixed length, and
    its code excludes the blocks of the window and of the global tokens. Here a link may fall on a key that another part
    of the pattern already shows.

    >>> torch.arange(8)[RandomBlocks(size=2, count=1).allows(torch.tensor(5), torch.arange(8))]
    tensor([2, 3, 6, 7])
    """

    size: int
    count: int
    seed: int = 0

    def __post_init__(self):
        require_counts(self, least=1, size=self.size, count=self.count)

    def allows(self, i, j):
        i, j = i // self.size, j // self.size
        last = max((int(x.max()) for x in (i, j) if x.numel()), default=0)
        drawn = _draws(self.seed, self.count, _room(last + 1)).to(i.device)
        joined = torch.zeros_like(i - j, dtype=torch.bool)
        for by_i, by_j in zip(drawn[:, i.clamp(min=0)], drawn[:, j.clamp(min=0)], strict=True):
            joined |= (j == by_i) | (i == by_j)
        return joined

    def spans(self, lo, hi, m):
        first, stop, blocks = max(lo, 0) // self.size, -(-hi // self.size), -(-m // self.size)
        room = _room(max(stop, blocks))
        earlier = _draws(self.seed, self.count, room)[:, first:stop].flatten().tolist()
        later = (block for own in _drawn_by(self.seed, self.count, room)[first:stop] for block in own)
        seen = {block for block in (*earlier, *later) if 0 <= block < blocks}
        return clip([(block * self.size, (block + 1) * self.size) for block in sorted(seen)], m)


NO_BLOCK = torch.iinfo(torch.long).min


def _room(blocks: int) -> int:
    """Round up the number of blocks, so that a few cached tables serve all sequence lengths."""
    return 1 << max(blocks - 1, 0).bit_length()


@lru_cache(maxsize=16)
def _draws(seed: int, count: int, blocks: int) -> Int[Tensor, "count blocks"]:
    """Return the different earlier blocks that each block draws; unused entries are `NO_BLOCK`.

    Floyd's sampling: draw a random block below `last`, and take `last` itself if that block was drawn before. Every set
    of `count` earlier blocks is equally likely.
    """
    at = torch.arange(blocks)
    draws = torch.full((count, blocks), NO_BLOCK)
    for k in range(count):
        last = at - count + k
        drawn = _scramble(at, seed * 1009 + k) % (last + 1).clamp(min=1)
        drawn = torch.where((draws[:k] == drawn).any(0), last, drawn)
        draws[k] = torch.where(at >= count, drawn, torch.where(at > k, k, NO_BLOCK))
    return draws


@lru_cache(maxsize=16)
def _drawn_by(seed: int, count: int, blocks: int) -> list[list[int]]:
    """The later blocks that drew each block."""
    later: list[list[int]] = [[] for _ in range(blocks)]
    for row in _draws(seed, count, blocks)[:, 1:].tolist():
        for block, earlier in enumerate(row, 1):
            if earlier != NO_BLOCK:
                later[earlier].append(block)
    return later


def _whole_blocks(lo: int, hi: int, size: int) -> Span:
    return lo // size * size, -(-hi // size) * size


def _scramble(x: Tensor, salt: int) -> Tensor:
    """Return a fixed non-negative integer hash, the same on every device and in every release of torch."""
    x = x.long() * 2654435761 + salt * 40503 + 12345
    for shift, factor in ((16, 73244475), (15, 73244475), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
    return x
