"""Strided attention of the Sparse Transformer (Child et al. 2019, arXiv:1904.10509), alone or merged with its window.

matrix      softmax over the keys at distances that are multiples of l, and those nearer than w, each counted once
fast        dense attention inside each residue class mod l and blocks of the window, merged by their log-sum-exps
recurrence  a cache of all keys and values
cost        2 · pairs · (d + e) flops, state (d + e) · m;  pairs ≈ N · (N / 2l + w)
"""

from __future__ import annotations

import torch

from heedful.core import Cost, Dims, Mechanism
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.kernels.strided import strided
from heedful.kernels.strided.reference import Shape
from heedful.mechanisms.score_base import ScoreBase
from heedful.mechanisms.softmax import Softmax


class StridedSoftmax(ScoreBase):
    """Softmax over every `stride`-th key, and over the nearest `window` keys, in O(N · (N / stride + window)).

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 1000, 16).unbind()
    >>> attend = h.StridedSoftmax(32, window=32)
    >>> attend.pattern
    ((Strided(stride=32) | Window(before=31, after=0, sinks=0)) & Causal())
    >>> torch.allclose(attend(q, k, v), h.Softmax(attend.pattern)(q, k, v), atol=1e-5)
    True

    stride   distance of the keys that a query sees, its own position the first
    window   how many of the nearest keys it sees too, its own among them; none by default
    causal   whether it only looks back; if not, the window reaches as far after a query as before it
    """

    kernel = strided

    def __init__(
        self,
        stride: int,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        temperature: float = 1.0,
    ):
        for name, count in (("stride", stride), ("window", 1 if window is None else window)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}: expected an integer ≥ 1, got {count!r}.")
        shape = Shape(stride, window or 0, causal)
        super().__init__(shape.pattern, scale)
        self.shape = shape
        self.temperature = temperature
        self.definition  # noqa: B018  (it refuses a bad temperature in its own words)

    @property
    def definition(self) -> Softmax:
        """The same by its pattern: the matrix."""
        return Softmax(self.pattern, self.scale, self.temperature)

    def score_scale(self, d: int) -> float:
        return super().score_scale(d) / self.temperature

    def rows(self) -> SoftmaxRows:
        return SoftmaxRows(temperature=self.temperature)

    def matrix(self, q, k, *, segments=None):
        return self.definition.matrix(q, k, segments=segments)

    def products(self, q, k, *, segments=None):
        return Mechanism.products(self, q, k, segments=segments)  # by the gradient in v, which the classes give too

    def cost(self, dims: Dims) -> Cost:
        return self._exact_cost(dims, self._pairs(dims.n, dims.m), kept=dims.m)

    def _pairs(self, n: int, m: int) -> int:
        """What `pattern.pairs` counts, in closed form for each query."""
        stride, window, causal = self.shape
        i = torch.arange(m - n, m)
        sides = [i] if causal else [i, m - 1 - i]  # how many keys lie before, and after
        pairs = n  # its own position
        for far in sides:
            near = far.clamp(max=max(window - 1, 0))
            pairs += int((far // stride - near // stride + near).sum())
        return pairs

    def extra_repr(self) -> str:
        stride, window, causal = self.shape
        parts = [str(stride)] + [f"window={window}"] * bool(window) + ["causal=False"] * (not causal)
        parts += [f"scale={self.scale}"] * (self.scale is not None)
        return ", ".join(parts + [f"temperature={self.temperature}"] * (self.temperature != 1))
