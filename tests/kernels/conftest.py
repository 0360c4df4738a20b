from __future__ import annotations

import pytest
import torch
from bounds import within_bounds


def poisoned(shape, like, dtype=torch.float32):
    """Instead of an empty tensor: what is not written shows."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=like.device)


@pytest.fixture
def small_tiles(monkeypatch):
    """The launches of softmax with tiles so small that a few dozen tokens make several; every buffer is full of NaN."""
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels import launching
    from heedful.kernels.softmax import launches

    small = launches.Config(16, 16, 4, 1)
    for table in ("CONFIGS", "LISTED"):
        small_ones = {kind: dict.fromkeys(x, small) for kind, x in getattr(launches, table).items()}
        monkeypatch.setattr(launches, table, small_ones)
    monkeypatch.setattr(launching, "empty", poisoned)
    monkeypatch.setattr(launches, "SETUPS", launching.LaunchCache())
    return launches


@pytest.fixture
def fenced():
    """Fails a program that reads or writes where none of its tensors is."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the fence is around interpreted programs")
    with within_bounds():
        yield


@pytest.fixture
def bf16_products(monkeypatch):
    """Interpreted programs multiply bfloat16 as the card does: rounded to nearest (it cuts off), summed in float32."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is not installed")
    if torch.cuda.is_available():
        return  # the card rounds by itself
    import numpy as np
    import triton.language as tl

    from heedful.kernels.chunked_linear import launches

    dot, cast = interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.cast_impl

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounding(self, x, kind):
        if x.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, x, kind)
        near = torch.from_numpy(np.array(x.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(near.reshape(x.data.shape), kind.scalar)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest),
    )
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)
    monkeypatch.setattr(launches, "INTERPRETED", False)
