"""The pattern of a tree, and functions that make tuples of parents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from heedful.patterns.base import Pattern, clip, require_counts
from heedful.shapes import Int, Tensor


@dataclass(frozen=True, repr=False)
class Tree(Pattern):
    """A query sees the keys within `radius` edges of it in the tree given by `parents` (-1: root, -2: no token).

    Positions beyond the tree and positions without a token see nothing and are seen by nothing. Several roots make a
    forest; tokens of different trees do not see each other.

    The same tree applies to every row of a batch and to every segment. If each sentence has a different tree, pack the
    sentences into one sequence and their trees into one `forest`. Two sentences of 5 and 3 tokens, padded to 5, with 8
    heads:

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
    >>> trees = h.Tree(h.forest([[1, -1, 4, 4, 1], [1, -1, 1]], length=5), radius=1)
    >>> folded = (x.movedim(0, -3).flatten(-3, -2) for x in (q, k, v))  # (8, 2 · 5, 16)
    >>> out = h.Softmax(trees)(*folded).unflatten(-2, (2, 5)).movedim(-3, 0)
    >>> out.shape, out[1, :, 3:].any().item()  # padding gets zeros
    (torch.Size([2, 8, 5, 16]), False)
    """

    parents: tuple[int, ...]
    radius: int

    def __repr__(self) -> str:
        parents = self.parents if len(self.parents) <= 32 else f"({len(self.parents)} parents)"
        return f"Tree(parents={parents}, radius={self.radius})"

    def __post_init__(self):
        parents = tuple(int(parent) for parent in self.parents)
        object.__setattr__(self, "parents", parents)
        require_counts(self, radius=self.radius)
        for child, parent in enumerate(parents):
            if not -2 <= parent < len(parents) or parent == child or (parent >= 0 and parents[parent] == -2):
                raise ValueError(
                    f"Tree: parents[{child}] = {parent}, expected -1 (a root), -2 (no token) or the position of "
                    f"another token, below {len(parents)}. Heads counted from 1, as in treebanks, need 1 subtracted."
                )

    @cached_property
    def _ancestors(self) -> Tensor:
        """(n + 1, radius + 1): the s-th ancestor of each position, -1 past the root; the last row stands for none."""
        parents = torch.tensor([*self.parents, -1]).clamp(min=-1)
        own = torch.arange(len(self.parents))
        line = [torch.cat([torch.where(torch.tensor(self.parents) == -2, -1, own), torch.tensor([-1])]).long()]
        for _ in range(self.radius):
            line.append(parents[line[-1]])  # index -1 is the appended row, which stays -1
        return torch.stack(line, -1)

    @cached_property
    def links(self) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
        """All allowed pairs (query, key), sorted; found by a breadth-first search from all tokens at once."""
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
        return clip([(int(run[0]), int(run[-1]) + 1) for run in seen.tensor_split(breaks) if len(run)], m)

    def pairs(self, n, m):
        i, j = self.links
        return int(((i >= m - n) & (i < m) & (j < m)).sum())


def forest(trees: Iterable[Sequence[int]], length: int | None = None) -> tuple[int, ...]:
    """Concatenate the parents of several trees, for sentences that are packed into one sequence.

    With `length`, each tree gets that many positions and those after its last token are empty, as in a padded batch.

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
    """Return the parents of a balanced binary tree in which every subtree is a contiguous span, as in most sentences.

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
