"""Deprecated mechanisms of release 0.1. They are now `Softmax` with a pattern, and the pattern selects the kernel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Pattern, Strided, Tree, Window


def StridedSoftmax(
    stride: int,
    window: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    temperature: float = 1.0,
) -> Softmax:
    """Deprecated: `Softmax((Strided(stride) | Window(window - 1)) & Causal())`, or without the window."""
    if window is not None:
        _require_count("window", window)
    pattern: Pattern = Strided(stride)
    if window is not None:
        pattern = pattern | Window(window - 1, 0 if causal else window - 1)
    return _instead(pattern & Causal() if causal else pattern, "StridedSoftmax", scale, temperature)


def DilatedSoftmax(
    window: int, gap: int, causal: bool = True, scale: float | None = None, temperature: float = 1.0
) -> Softmax:
    """Deprecated: `Softmax(Strided(gap) & Window((window - 1) * gap))`."""
    _require_count("window", window)
    _require_count("gap", gap)
    reach = (window - 1) * gap
    return _instead(Strided(gap) & Window(reach, 0 if causal else reach), "DilatedSoftmax", scale, temperature)


def TreeSoftmax(
    parents: Sequence[int],
    radius: int = 2,
    causal: bool = False,
    scale: float | None = None,
    temperature: float = 1.0,
) -> Softmax:
    """Deprecated: `Softmax(Tree(parents, radius))`, or `Softmax(Tree(parents, radius) & Causal())`."""
    tree = Tree(tuple(parents), radius)
    return _instead(tree & Causal() if causal else tree, "TreeSoftmax", scale, temperature)


def _instead(pattern: Pattern, name: str, scale: float | None, temperature: float) -> Softmax:
    made = Softmax(pattern, scale, temperature)
    warnings.warn(
        f"{name} will go in the next release; use heedful.Softmax({pattern!r}), which runs on the same kernel.",
        DeprecationWarning,
        stacklevel=3,
    )
    return made


def _require_count(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}: expected an integer ≥ 1, got {count!r}.")
