"""Constants that modules hold in buffers, such as 1/3: a change of dtype rounds the constant itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.shapes import Tensor


def rounded_anew(before: Tensor, after: Tensor, exact: Callable[[], Tensor]) -> Tensor:
    """The constant `exact()` in the dtype and on the device of `after`, which a module made of its buffer `before`.

    `after` itself where the dtype is the same, or where the buffer held something else: it was loaded or written to.

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
