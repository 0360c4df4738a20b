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
    from heedful.kernels.softmax import launches

    small = launches.Config(16, 16, 4, 1)
    monkeypatch.setattr(launches, "CONFIGS", {key: dict.fromkeys(x, small) for key, x in launches.CONFIGS.items()})
    monkeypatch.setattr(launches, "empty", poisoned)
    monkeypatch.setattr(launches, "PLANS", {})
    return launches


@pytest.fixture
def fenced():
    """Fails a program that reads or writes where none of its tensors is."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the fence is around interpreted programs")
    with within_bounds():
        yield
