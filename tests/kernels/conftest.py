from __future__ import annotations

import pytest
import torch
from bounds import within_bounds


@pytest.fixture
def fenced():
    """Fails a program that reads or writes where none of its tensors is."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the fence is around interpreted programs")
    with within_bounds():
        yield
