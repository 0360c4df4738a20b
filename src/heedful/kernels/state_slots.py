"""Output layouts and state slots, shared by the kernels that carry a state from chunk to chunk.

An output has the memory order of its input. A slot holds one head's state in float32: Sᵀ row by row (e × r), then z if
the outputs are normalised.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from heedful.kernels import launching

Layout = tuple[tuple[int, ...], bool]


class Sizes(Protocol):
    """Sizes of a setup: r features computed from d columns, values of width e, and whether there is a normaliser."""

    r: int
    d: int
    e: int
    normalise: bool


def layout(like: Tensor, heads: int) -> Layout:
    """The sizes (without width) in the memory order of `like`, and True if tokens come before heads in that order."""
    B, _, n, _ = like.shape
    swapped = like.stride(1) < like.stride(2)
    return ((B, n, heads) if swapped else (B, heads, n)), swapped


def tokens(layout: Layout, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor (B, heads, n, width) in this layout; its dtype is that of `like` unless given."""
    shape, swapped = layout
    x = launching.empty((*shape, width), like, like.dtype if dtype is None else dtype)
    return x.transpose(1, 2) if swapped else x


def fill(sizes: Sizes, slots: Tensor, at: int, S: Tensor | None, z: Tensor | None) -> None:
    """Write a state into slot `at` of every head; a missing S or z is written as zero."""
    slot = slots[:, :, at]
    slot.zero_()
    for there, x in zip(_views(sizes, slot), (S, z), strict=True):
        if there is not None and x is not None:
            there.copy_(x.unflatten(2, there.shape[2:4]))


def state_in(sizes: Sizes, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """S (B, heads, r, e) and z (B, heads, r) read from one slot per head; z is None without a normaliser."""
    S, z = _views(sizes, slots)
    return S.flatten(2, 3), None if z is None else z.flatten(2, 3)


def _views(sizes: Sizes, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Views S (B, heads, sides, d, e) and z (B, heads, sides, d) of slots; sides: cosines and sines (2), or 1."""
    area, sides = sizes.r * sizes.e, sizes.r // sizes.d
    S = slots[..., :area].unflatten(-1, (sizes.e, sizes.d, sides)).permute(0, 1, 4, 3, 2)
    return S, slots[..., area:].unflatten(-1, (sizes.d, sides)).mT if sizes.normalise else None
