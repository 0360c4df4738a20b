"""Dilated sliding window (Beltagy et al. 2020, Longformer, arXiv:2004.05150, §3.1; Ding et al. 2023, arXiv:2307.02486).

matrix      softmax over the keys j = i, i − g, i − 2g, … i − (w − 1)g, and as many after i where it looks both ways
fast        a plain window of w inside each residue class mod g
recurrence  a cache of the last (w − 1)g keys and values, which later queries see in turn
cost        2 · pairs · (d + e) flops, state (d + e) · (w − 1)g;  pairs ≈ N · w, whatever the gap
"""

from __future__ import annotations

import torch

from heedful.core import Cost, Dims, Mechanism
from heedful.kernels.dilated import dilated
from heedful.kernels.dilated.reference import Shape
from heedful.mechanisms.softmax import Softmax


class DilatedSoftmax(Softmax):
    """Softmax over `window` keys that lie `gap` apart: a reach of window · gap at the price of window.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 1000, 16).unbind()
    >>> attend = h.DilatedSoftmax(16, gap=4)
    >>> attend.pattern
    (Strided(stride=4) & Window(before=60, after=0, sinks=0))
    >>> torch.allclose(attend(q, k, v), h.Softmax(attend.pattern)(q, k, v), atol=1e-5)
    True

    window   how many keys a query sees on a side, its own among them
    gap      their distance; 1 is a plain window
    causal   whether it only looks back
    """

    kernel = dilated

    def __init__(
        self, window: int, gap: int, causal: bool = True, scale: float | None = None, temperature: float = 1.0
    ):
        for name, count in (("window", window), ("gap", gap)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: expected an integer ≥ 1, got {count!r}.")
        shape = Shape(window, gap, causal)
        super().__init__(shape.pattern, scale, temperature)
        self.shape = shape

    def products(self, q, k, *, segments=None):
        return Mechanism.products(self, q, k, segments=segments)  # by the gradient in v, which the classes give too

    def cost(self, dims: Dims) -> Cost:
        kept = min(dims.m, (self.shape.window - 1) * self.shape.gap)
        return self._exact_cost(dims, self._pairs(dims.n, dims.m), kept)

    def _pairs(self, n: int, m: int) -> int:
        """What `pattern.pairs` counts, in closed form for each query."""
        window, gap, causal = self.shape
        i = torch.arange(m - n, m)
        sides = [i] if causal else [i, m - 1 - i]  # how many keys lie before, and after
        return n + sum(int((far // gap).clamp(max=window - 1).sum()) for far in sides)

    def extra_repr(self) -> str:
        window, gap, causal = self.shape
        parts = [str(window), f"gap={gap}"] + ["causal=False"] * (not causal)
        parts += [f"scale={self.scale}"] * (self.scale is not None)
        return ", ".join(parts + [f"temperature={self.temperature}"] * (self.temperature != 1))
