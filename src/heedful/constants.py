"""Constants that modules hold in buffers, such as 1/3: a dtype change rounds the exact constant, not the old buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.shapes import Tensor


def rounded_anew(before: Tensor, after: Tensor, exact: Callable[[], Tensor]) -> Tensor:
    """Return the constant `exact()` in the dtype and on the device of `after`, the converted copy of buffer `before`.

    Returns `after` unchanged if the dtype is the same, or if `before` no longer holds the constant because a checkpoint
    was loaded into it or it was written to.

    >>> third = torch.tensor(1 / 3)
    >>> third.double().item() == 1 / 3
    False
    >>> rounded_anew(third, third.double(), lambda: torch.tensor(1 / 3, dtype=torch.float64)).item() == 1 / 3
    True
    """
    if before.dtype == after.dtype or before.is_meta or after.is_meta:
        return after
    value = exact()
    return value.to(after) if torch.equal(value.to(before), before) else after
