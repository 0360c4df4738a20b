"""The fence around interpreted programs sees what the interpreter does not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl


@triton.jit
def double(x, y, n, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n, other=0.0), mask=at < n)


def test_a_step_beyond_a_tensor_is_seen(fenced):
    x, y = torch.ones(10), torch.empty(10)
    double[(1,)](x, y, 10, WIDTH=16)
    assert torch.equal(y, 2 * x)
    for short, long in ((x[:9], y), (x, y[:9])):
        with pytest.raises(Exception, match="outside every tensor"):
            double[(1,)](short, long, 10, WIDTH=16)
