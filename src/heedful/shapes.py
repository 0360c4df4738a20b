"""Shape annotations: those of jaxtyping if it is installed, plain tensors otherwise.

The core runs with torch alone. The annotations are for readers and for the type checker; the tests check them at run
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _AnyShape:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _AnyShape

__all__ = ["Bool", "Float", "Int", "Tensor", "broadcast_shapes"]


def broadcast_shapes(first: tuple[int, ...], *others: tuple[int, ...]) -> torch.Size:
    """torch.broadcast_shapes with a fast path for equal or empty shapes: torch's takes 50 µs, more than a launch."""
    if all(not other or other == first for other in others):
        return torch.Size(first)
    return torch.broadcast_shapes(first, *others)
