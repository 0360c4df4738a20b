"""A fence around the memory that interpreted Triton programs are given."""

from __future__ import annotations

import pytest
import torch


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The first and the last byte + 1 that belong to x."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@pytest.fixture
def fenced(monkeypatch):
    """Fails a program that reads or writes where none of its tensors is; the interpreter itself would not notice."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the fence is around interpreted programs")
    extents: list[tuple[int, int]] = []
    begin = interpreter.GridExecutor._init_args_hst
    load, store = (getattr(interpreter.InterpreterBuilder, f"create_masked_{x}") for x in ("load", "store"))

    def watch(self, args, kwargs):
        extents[:] = [extent(x) for x in args if isinstance(x, torch.Tensor)]
        return begin(self, args, kwargs)

    def look(pointers, mask):
        wanted = pointers.data[mask.data].astype("int64")
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = sum(((wanted >= first) & (wanted + size <= end)) for first, end in extents)
        assert wanted.size == 0 or inside.all(), f"{int((inside == 0).sum())} places outside all tensors"

    def watched_load(self, pointers, mask, *rest):
        look(pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        look(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", watch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", watched_store)
