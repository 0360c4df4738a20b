"""Operations and memory of one call, and how they grow: what the complexity statements are decided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from heedful.bench.fits import growth
from heedful.bench.memory import allocated
from heedful.core import Mechanism
from heedful.shapes import Tensor
from heedful.testing.flops import FlopCounter

LENGTHS = (512, 1024, 2048)
WIDTHS = (32, 64, 128)


def draw(n: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v of one head."""
    return torch.randn(3, n, d, generator=torch.Generator().manual_seed(0), dtype=dtype).unbind()


def flops(mechanism: Mechanism, n: int, d: int, heads: int | None = None) -> int:
    """What one call of a head (of so many heads, where the mechanism has several) really takes, counted."""
    q, k, v = draw(n, d)
    if heads is not None:
        q, k, v = (x.expand(heads, n, d) for x in (q, k, v))
    with torch.no_grad(), FlopCounter() as counter:
        mechanism(q, k, v)
    return counter.flops


def largest(call: Callable[[], object], itemsize: int = 4) -> int:
    """Numbers in the largest tensor that one call makes."""
    with torch.no_grad():
        return allocated(call).largest // itemsize


def exponent(points: Mapping[int, float]) -> float:
    """p of y ∝ N^p over the given sizes, least squares in log-log."""
    fit = growth(points, least=min(points))
    assert fit is not None
    return fit.exponent
