"""Reads and writes outside the tensors of a launch, made visible under Triton's interpreter, which lets them pass."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch


def _extent(x):
    """The first byte of a tensor's own elements and the one after the last, whatever else lies in its storage."""
    steps = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (steps + 1) * x.element_size()


@contextmanager
def within_bounds():
    """Raises IndexError for an address that belongs to no tensor of the launch."""
    from triton.runtime import interpreter

    ranges: list[tuple[int, int]] = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, arguments = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst

    def check(pointers, mask):
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for first, end in ranges:
            at = at[(at < first) | (at + size > end)]
        if at.size:
            raise IndexError(f"{at.size} addresses outside every tensor of the launch, the first {at[0]:#x}")

    def recorded(self, given, named):
        host = arguments(self, given, named)
        tensors = [x for x in (*host[0], *host[1].values()) if isinstance(x, torch.Tensor) and x.numel()]
        ranges[:] = map(_extent, tensors)
        return host

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor._init_args_hst = recorded
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor._init_args_hst = arguments
