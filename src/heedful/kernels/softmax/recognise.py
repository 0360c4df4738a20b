"""Recognise patterns that have a specialised kernel: once for each pattern, by its meaning, not by how it is written.

    StridedKeys     one set of offsets with a step     Strided(4) & Causal(), Strided(4) & Window(60)
    StridedWindow   such a set and a window            (Strided(128) | Window(127)) & Causal(), Strided(128) | Window(9)
    TreeNeighbours  near in a tree                     Tree(…), Tree(…) & Causal(), Tree(…) | Window(1)

All other patterns use intervals, lists or tiles. The objections below are those of the specialised kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from heedful.kernels.blocked.tiles import RowFunction, SoftmaxRows
from heedful.patterns import FAR, And, Causal, Full, Offsets, Or, Pattern, Tree, Window

NARROW = 32  # the most keys of a window that are listed together with those of a tree


class StridedKeys(NamedTuple):
    """Keys at multiples of a stride: in a window or everywhere, with or without keys after the query."""

    offsets: Offsets

    @property
    def inside(self) -> Pattern:
        """The pattern inside a residue class, where a step of the stride is one position."""
        before, after, step = self.offsets
        if before < FAR:
            return Window(before // step, after // step)
        if after >= FAR:
            return Full()
        return Causal() | Window(0, after // step) if after else Causal()


class StridedWindow(NamedTuple):
    """Keys at multiples of a stride, and all keys of a window."""

    far: Offsets
    near: Offsets


class TreeNeighbours(NamedTuple):
    """Keys that can be listed for each query: those of a tree, or of a tree and a narrow window."""


Shape = StridedKeys | StridedWindow | TreeNeighbours


def recognise(pattern: Pattern) -> Shape | None:
    """The shape of the pattern; None if no specialised kernel takes it.

    >>> from heedful.patterns import Strided
    >>> recognise(Causal() & Strided(128)) == recognise(Strided(128) & (Window(5) | Causal()))
    True
    >>> recognise(Strided(4) & Window(9)).offsets
    Offsets(before=8, after=0, step=4)
    >>> recognise(Strided(4) | Causal()) is None
    True
    """
    try:
        return _known(pattern)
    except TypeError:  # a user's pattern without a hash
        return _shape(pattern)


def _shape(pattern: Pattern) -> Shape | None:
    sets = pattern.offsets
    if sets is None:
        return TreeNeighbours() if has_tree(pattern) else None
    if any(x.after >= FAR > x.before for x in sets):
        return None  # no plain pattern describes this inside a class
    if len(sets) == 1 and sets[0].step > 1:
        return StridedKeys(sets[0])
    if len(sets) == 2 and sets[0].step == 1 and max(sets[0][:2]) < FAR:
        near, far = sets
        return StridedWindow(far, Offsets(_shorter(near.before, far.before, far), _shorter(near.after, far.after, far)))
    return None


def _shorter(near: int, reach: int, far: Offsets) -> int:
    """The extent of a window's side; one less if its outermost key is among the far keys anyway."""
    return near - 1 if 0 < near <= reach and near % far.step == 0 else near


_known = lru_cache(64)(_shape)


def has_tree(pattern: Pattern) -> bool:
    """True if the allowed pairs can be listed, starting from those of a tree."""
    match pattern:
        case And(left, right):
            return has_tree(left) or has_tree(right)
        case Or(left, right):
            trees = has_tree(left), has_tree(right)
            return any(trees) and all(tree or _is_narrow(side) for tree, side in zip(trees, (left, right), strict=True))
    return isinstance(pattern, Tree)


def _is_narrow(pattern: Pattern) -> bool:
    sets = pattern.offsets
    return sets is not None and sum((x.before + x.after) // x.step + 1 for x in sets) <= NARROW


# ── objections of each kernel


def about_classes(q, k, v, rows: RowFunction, pattern, segments, scale, *, memory=None) -> list[str]:
    """Why attention inside residue classes can't take these inputs."""
    why = _unless(StridedKeys, pattern, "Strided, alone or & Causal() or & a Window without sinks")
    return why + _about_bias(rows)


def about_merged(q, k, v, rows: RowFunction, pattern, segments, scale, *, memory=None) -> list[str]:
    """Why residue classes merged with a window can't take these inputs."""
    why = _unless(StridedWindow, pattern, "Strided | Window, with or without & Causal()")
    if why:
        return why
    if segments is not None:
        why.append("segments have residue classes of their own, of other lengths in each row")
    if not isinstance(rows, SoftmaxRows) or rows != SoftmaxRows(temperature=rows.temperature):
        why.append("it merges softmaxes without bias, softcap or sink")
    if 0 in (*q.shape, *k.shape, *v.shape):
        why.append("it can't take an empty tensor")
    return why


def about_lists(q, k, v, rows: RowFunction, pattern, segments, scale, *, memory=None) -> list[str]:
    """Why lists of neighbours can't take these inputs."""
    why = _unless(TreeNeighbours, pattern, f"a Tree, & any pattern, or | a window of at most {NARROW} keys")
    if segments is not None and not why:
        why.append("segments have positions of their own, and so other lists")
    return why + ["it has no tensor as bias"] * (rows.bias is not None)


def _unless(shape: type, pattern: Pattern, expected: str) -> list[str]:
    return [] if isinstance(recognise(pattern), shape) else [f"it takes {expected}"]


def _about_bias(rows: RowFunction) -> list[str]:
    biased = rows.bias is not None or (isinstance(rows, SoftmaxRows) and rows.bias_function is not None)
    return ["it has no bias"] if biased else []
