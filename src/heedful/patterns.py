"""Who may attend to whom.

A pattern is a predicate on two positions, i of the query and j of the key, and nothing else: no tensor of
shape n × n, no length. Patterns compose with `&` and `|`.

    allows      the definition, element by element
    spans       the keys that a block of queries may see, as intervals: what a blocked kernel visits
    remembers   the keys that queries still to come may see: what a decoder must keep

Positions are absolute. Where there are fewer queries than keys, the queries are the last ones (they follow a
cache), so `Causal` is aligned bottom-right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from heedful.shapes import Bool, Int, Tensor

Span = tuple[int, int]
"""A half-open interval of positions."""


class Pattern(ABC):
    """A predicate on (query position, key position).

    >>> import torch
    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> (Causal() & Window(before=1)).allows(i, j).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    @abstractmethod
    def allows(self, i: Int[Tensor, "*#s"], j: Int[Tensor, "*#s"]) -> Bool[Tensor, "*#s"]:
        """Whether the query at position i may see the key at position j; i and j broadcast."""

    @property
    def is_causal(self) -> bool:
        """No query sees a later key."""
        return False

    @property
    def repeats_from(self) -> int | None:
        """From this query position on, blocks of queries of the same shape have the same mask; None: never."""
        return None

    def clear_until(self, lo: int) -> int:
        """Every query at position lo or later sees every key before this position."""
        return 0

    def spans(self, lo: int, hi: int, m: int) -> list[Span]:
        """Sorted, disjoint intervals of [0, m) holding every key that a query in [lo, hi) may see.

        They may hold more keys than needed, never fewer.
        """
        return _clip([(0, hi if self.is_causal else m)], m)

    def remembers(self, j: Int[Tensor, "*#s"], t: Int[Tensor, "*#s"]) -> Bool[Tensor, "*#s"]:
        """Whether some query at position t or later may still see the key at position j < t."""
        return torch.ones_like(j - t, dtype=torch.bool)

    def pairs(self, n: int, m: int) -> int:
        """How many (query, key) pairs are allowed when n queries follow up on m keys."""
        total = 0
        for lo in range(m - n, m, 64):
            hi = min(lo + 64, m)
            spans = self.spans(lo, hi, m)
            keys = torch.cat([torch.arange(*span) for span in spans] or [torch.arange(0)])
            for i in torch.arange(lo, hi)[:, None].split(max(1, 2**20 // max(1, len(keys)))):
                total += int(self.allows(i, keys).sum())
        return total

    def __and__(self, other: Pattern) -> Pattern:
        return _And(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return _Or(self, other)


@dataclass(frozen=True)
class Full(Pattern):
    """Every query sees every key."""

    repeats_from = 0

    def allows(self, i, j):
        return torch.ones_like(i - j, dtype=torch.bool)

    def pairs(self, n, m):
        return n * m


@dataclass(frozen=True)
class Causal(Pattern):
    """A query sees its own position and the ones before it."""

    is_causal = True
    repeats_from = 0

    def allows(self, i, j):
        return j <= i

    def clear_until(self, lo):
        return lo + 1

    def pairs(self, n, m):
        return n * (m - n) + n * (n + 1) // 2


@dataclass(frozen=True)
class Window(Pattern):
    """A query sees `before` keys before its own position, `after` keys after it, and the first `sinks` keys.

    The sinks obey the same limit to the right, so that a window with `after=0` stays causal.
    """

    before: int
    after: int = 0
    sinks: int = 0

    def __post_init__(self):
        _require_counts(self, before=self.before, after=self.after, sinks=self.sinks)

    @property
    def is_causal(self):
        return self.after == 0

    @property
    def repeats_from(self):
        return self.before + self.sinks if self.sinks else 0

    def allows(self, i, j):
        near = j >= i - self.before
        if self.sinks:
            near = near | (j < self.sinks)
        return near & (j <= i + self.after)

    def spans(self, lo, hi, m):
        stop = hi + self.after
        return _clip([(0, min(self.sinks, stop)), (lo - self.before, stop)], m)

    def remembers(self, j, t):
        return (j >= t - self.before) | (j < self.sinks)


@dataclass(frozen=True)
class Strided(Pattern):
    """A query sees the keys whose distance is a multiple of `stride` (Child et al. 2019, arXiv:1904.10509)."""

    stride: int

    repeats_from = 0

    def __post_init__(self):
        _require_counts(self, least=1, stride=self.stride)

    def allows(self, i, j):
        return (i - j) % self.stride == 0


@dataclass(frozen=True)
class SparseFixed(Pattern):
    """A query sees its own block of `stride` keys and the last `summary` keys of every block (Child et al. 2019)."""

    stride: int
    summary: int = 1

    def __post_init__(self):
        _require_counts(self, least=1, stride=self.stride, summary=self.summary)
        if self.summary > self.stride:
            raise ValueError(f"SparseFixed: summary = {self.summary} exceeds the block of stride = {self.stride}.")

    def allows(self, i, j):
        return (i // self.stride == j // self.stride) | (j % self.stride >= self.stride - self.summary)

    def spans(self, lo, hi, m):
        ends = range(self.stride, m + self.stride, self.stride)
        return _clip([_whole_blocks(lo, hi, self.stride)] + [(end - self.summary, end) for end in ends], m)

    def remembers(self, j, t):
        return (j // self.stride == t // self.stride) | (j % self.stride >= self.stride - self.summary)


@dataclass(frozen=True)
class Summaries(Pattern):
    """A query sees the last `summary` keys of every block of `stride`: `SparseFixed` without one's own block.

    In the Sparse Transformer (Child et al. 2019) heads of their own see them; causal queries before the first, nothing.
    """

    stride: int
    summary: int = 1

    def __post_init__(self):
        _require_counts(self, least=1, stride=self.stride, summary=self.summary)
        if self.summary > self.stride:
            raise ValueError(f"Summaries: summary = {self.summary} exceeds the block of stride = {self.stride}.")

    def allows(self, i, j):
        return (j % self.stride >= self.stride - self.summary) & torch.ones_like(i, dtype=torch.bool)

    def spans(self, lo, hi, m):
        ends = range(self.stride, m + self.stride, self.stride)
        return _clip([(end - self.summary, end) for end in ends], m)

    def remembers(self, j, t):
        return (j % self.stride >= self.stride - self.summary) & torch.ones_like(t, dtype=torch.bool)


@dataclass(frozen=True)
class Blocks(Pattern):
    """A query sees the keys of its own block of `size`."""

    size: int

    def __post_init__(self):
        _require_counts(self, least=1, size=self.size)

    def allows(self, i, j):
        return i // self.size == j // self.size

    def spans(self, lo, hi, m):
        return _clip([_whole_blocks(lo, hi, self.size)], m)

    def remembers(self, j, t):
        return j // self.size == t // self.size


@dataclass(frozen=True)
class Global(Pattern):
    """The tokens at `indices` see every key and are seen by every query (Beltagy et al. 2020, arXiv:2004.05150)."""

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
            return _clip([(0, m)], m)
        return _clip([(index, index + 1) for index in self.indices], m)

    def remembers(self, j, t):
        last = max(self.indices, default=-1)
        return self._holds(j) | (t <= last)


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """Every block of `size` is joined with `count` different random earlier blocks, in both directions.

    A block with no more than `count` before it is joined with all of them. The draw for block I depends on the seed and
    on I alone, never on the length, so that a longer sequence keeps the links of a shorter one and a decoder sees what
    the encoder saw. (BigBird, Zaheer et al. 2020, arXiv:2007.14062, draws among all blocks of a fixed length, and its
    code leaves out those of the window and of the global tokens. Here a link may fall on a key that another part of the
    pattern shows too.)
    """

    size: int
    count: int
    seed: int = 0

    def __post_init__(self):
        _require_counts(self, least=1, size=self.size, count=self.count)

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
        return _clip([(block * self.size, (block + 1) * self.size) for block in sorted(seen)], m)


NO_BLOCK = torch.iinfo(torch.long).min


def _room(blocks: int) -> int:
    """A few lengths of table serve every length of sequence."""
    return 1 << max(blocks - 1, 0).bit_length()


@lru_cache(maxsize=16)
def _draws(seed: int, count: int, blocks: int) -> Int[Tensor, "count blocks"]:
    """The different earlier blocks that each block draws, all of them where there are fewer; then `NO_BLOCK`.

    Floyd's sampling: of the blocks below `last`, one at random, or `last` itself where that one was drawn before. Every
    set of `count` earlier blocks is as likely as any other.
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


@dataclass(frozen=True, repr=False)
class Tree(Pattern):
    """A query sees the keys within `radius` edges of it in the tree given by `parents` (-1 at a root, -2: no token).

    Positions beyond the tree, and those without a token, see nothing and are seen by nothing. Several roots make a
    forest, whose trees do not see each other: `forest` packs the trees of a batch into one.
    """

    parents: tuple[int, ...]
    radius: int

    def __repr__(self) -> str:
        parents = self.parents if len(self.parents) <= 32 else f"({len(self.parents)} parents)"
        return f"Tree(parents={parents}, radius={self.radius})"

    def __post_init__(self):
        parents = tuple(int(parent) for parent in self.parents)
        object.__setattr__(self, "parents", parents)
        _require_counts(self, radius=self.radius)
        for child, parent in enumerate(parents):
            if not -2 <= parent < len(parents) or parent == child or (parent >= 0 and parents[parent] == -2):
                raise ValueError(
                    f"Tree: parents[{child}] = {parent}, expected -1 (a root), -2 (no token) or the position of "
                    f"another token, below {len(parents)}. Heads counted from 1, as in treebanks, need 1 subtracted."
                )

    @cached_property
    def _ancestors(self) -> Tensor:
        """(n + 1, radius + 1): the s-th ancestor of each position, -1 past the root; the last row is 'outside'."""
        parents = torch.tensor([*self.parents, -1]).clamp(min=-1)
        own = torch.arange(len(self.parents))
        line = [torch.cat([torch.where(torch.tensor(self.parents) == -2, -1, own), torch.tensor([-1])]).long()]
        for _ in range(self.radius):
            line.append(parents[line[-1]])  # index -1 is the appended row, which stays -1
        return torch.stack(line, -1)

    @cached_property
    def links(self) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
        """Every pair (query, key) that is allowed, sorted: breadth first from all tokens at once."""
        size, parents = len(self.parents), torch.tensor(self.parents, dtype=torch.long)
        child = (parents >= 0).nonzero().flatten()
        ends = torch.cat([torch.stack([child, parents[child]]), torch.stack([parents[child], child])], 1)
        ends = ends[:, ends[0].argsort(stable=True)]
        degree = torch.bincount(ends[0], minlength=size)
        first = degree.cumsum(0) - degree
        found = front = (parents != -2).nonzero().flatten() * (size + 1)  # a pair (i, j) as i · size + j
        for _ in range(self.radius):
            i, j = front // size, front % size
            count = degree[j]
            step = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
            reached = ends[1][first[j].repeat_interleave(count) + step]
            front = (i.repeat_interleave(count) * size + reached).unique()
            found = torch.cat([found, front]).unique()
        return found // max(size, 1), found % max(size, 1)

    def allows(self, i, j):
        size = len(self.parents)
        line = self._ancestors.to(i.device)
        inside = ((i >= 0) & (i < size)) & ((j >= 0) & (j < size))
        up_i = line[torch.where((i >= 0) & (i < size), i, size)]
        up_j = line[torch.where((j >= 0) & (j < size), j, size)]
        near = torch.zeros_like(inside)
        for s in range(self.radius + 1):
            for t in range(self.radius + 1 - s):
                near |= (up_i[..., s] == up_j[..., t]) & (up_i[..., s] >= 0)
        return near & inside

    def spans(self, lo, hi, m):
        i, j = self.links
        first, last = torch.searchsorted(i, torch.tensor([lo, hi])).tolist()
        seen = j[first:last].unique()
        breaks = (seen.diff() > 1).nonzero().flatten() + 1
        return _clip([(int(run[0]), int(run[-1]) + 1) for run in seen.tensor_split(breaks) if len(run)], m)

    def pairs(self, n, m):
        i, j = self.links
        return int(((i >= m - n) & (i < m) & (j < m)).sum())


def forest(trees: Iterable[Sequence[int]], length: int | None = None) -> tuple[int, ...]:
    """The parents of many trees, one after the other: sentences packed into one sequence, each with its own tree.

    `length` gives every tree as many positions, those after its last token without one: a padded batch, row by row.

    >>> forest([[-1, 0, 0], [1, -1]])
    (-1, 0, 0, 4, -1)
    >>> forest([[-1, 0, 0], [1, -1]], length=3)
    (-1, 0, 0, 4, -1, -2)
    """
    parents: list[int] = []
    for tree in trees:
        start, size = len(parents), len(tree) if length is None else length
        if len(tree) > size:
            raise ValueError(f"length: {length}, expected at least {len(tree)}, the tokens of the longest tree.")
        parents += [int(parent) + start if parent >= 0 else int(parent) for parent in tree]
        parents += [-2] * (size - len(tree))
    return tuple(parents)


def balanced_tree(length: int) -> tuple[int, ...]:
    """The parents of a balanced binary tree in which every subtree is a run of tokens, as in most sentences.

    >>> balanced_tree(7)
    (1, 3, 1, -1, 5, 3, 5)
    """
    parents = [-1] * length
    todo = [(0, length, -1)]
    while todo:
        start, stop, above = todo.pop()
        if start < stop:
            middle = (start + stop) // 2
            parents[middle] = above
            todo += [(start, middle, middle), (middle + 1, stop, middle)]
    return tuple(parents)


@dataclass(frozen=True)
class _And(Pattern):
    left: Pattern
    right: Pattern

    @property
    def is_causal(self):
        return self.left.is_causal or self.right.is_causal

    @property
    def repeats_from(self):
        return 0 if self.left.repeats_from == self.right.repeats_from == 0 else None

    def allows(self, i, j):
        return self.left.allows(i, j) & self.right.allows(i, j)

    def clear_until(self, lo):
        return min(self.left.clear_until(lo), self.right.clear_until(lo))

    def spans(self, lo, hi, m):
        return _intersect(self.left.spans(lo, hi, m), self.right.spans(lo, hi, m))

    def remembers(self, j, t):
        return self.left.remembers(j, t) & self.right.remembers(j, t)

    def __repr__(self):
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class _Or(Pattern):
    left: Pattern
    right: Pattern

    @property
    def is_causal(self):
        return self.left.is_causal and self.right.is_causal

    @property
    def repeats_from(self):
        return 0 if self.left.repeats_from == self.right.repeats_from == 0 else None

    def allows(self, i, j):
        return self.left.allows(i, j) | self.right.allows(i, j)

    def clear_until(self, lo):
        return max(self.left.clear_until(lo), self.right.clear_until(lo))

    def spans(self, lo, hi, m):
        return _clip(self.left.spans(lo, hi, m) + self.right.spans(lo, hi, m), m)

    def remembers(self, j, t):
        return self.left.remembers(j, t) | self.right.remembers(j, t)

    def __repr__(self):
        return f"({self.left!r} | {self.right!r})"


def _require_counts(pattern: Pattern, *, least: int = 0, **counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < least:
            raise ValueError(f"{type(pattern).__name__}: {name} must be an integer ≥ {least}, got {count!r}.")


def _whole_blocks(lo: int, hi: int, size: int) -> Span:
    return lo // size * size, -(-hi // size) * size


def _clip(spans: list[Span], m: int) -> list[Span]:
    """The union of intervals inside [0, m), sorted and disjoint."""
    merged: list[Span] = []
    for start, stop in sorted((max(start, 0), min(stop, m)) for start, stop in spans):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _intersect(left: list[Span], right: list[Span]) -> list[Span]:
    shared = []
    a = b = 0
    while a < len(left) and b < len(right):
        start, stop = max(left[a][0], right[b][0]), min(left[a][1], right[b][1])
        if start < stop:
            shared.append((start, stop))
        if left[a][1] < right[b][1]:
            a += 1
        else:
            b += 1
    return shared


def _scramble(x: Tensor, salt: int) -> Tensor:
    """A fixed integer hash, non-negative: the same on every device and in every release of torch."""
    x = x.long() * 2654435761 + salt * 40503 + 12345
    for shift, factor in ((16, 73244475), (15, 73244475), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0x7FFFFFFF
    return x
