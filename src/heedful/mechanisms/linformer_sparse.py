"""Linformer with an exact window under one normaliser, as in the Long-Short Transformer (Zhu et al. 2021,
arXiv:2107.02192).

matrix      [P_near, P_low] = softmax over both of [scale · Q Kᵀ where |i − j| < w,  scale · Q (E K)ᵀ],   E, F ∈ R^{r×N}
            A = P_near + P_low F                                                  banded plus rank ≤ r, linear in v
fast        softmax over the window and softmax over the r keys E K with the values F V, joined by their log-sum-exps
cost        2 r (n + m)(d + e) + 2 · pairs · (d + e) flops

The projected keys cover all tokens, including those of the window; the window adds detail that mixtures of keys cannot
resolve. The Long-Short Transformer computes its projection from the keys; here it is Linformer's, so there is no causal
version.
"""

from __future__ import annotations

from typing import Literal

import torch

from heedful.core import Cost, Dims, Mechanism, softmax_stages
from heedful.kernels.dispatch import as_given
from heedful.kernels.partial import join, partial_softmax
from heedful.mechanisms.linformer import Linformer
from heedful.patterns import Full, Pattern, Window
from heedful.segments import resolve, take_tokens
from heedful.shapes import broadcast_shapes


class LinformerSparse(Linformer):
    """Softmax attention to r linear combinations of the keys and to the nearest keys.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 1024, 16).unbind()
    >>> h.LinformerSparse(length=1024, rank=64, window=32)(q, k, v).shape
    torch.Size([1, 8, 1024, 16])

    window   number of exact keys on each side, including the query's own

    The other options are those of `Linformer`. If there are fewer queries than keys, they are the last positions.
    """

    kernel = partial_softmax

    def __init__(
        self,
        length: int,
        rank: int = 256,
        window: int = 128,
        *,
        projection: Literal["learned", "pooled", "random"] = "learned",
        shared: bool = True,
        heads: int = 1,
        seed: int = 0,
        scale: float | None = None,
        pattern: Pattern = Full(),  # noqa: B008  (frozen)
    ):
        super().__init__(
            length, rank, projection=projection, shared=shared, heads=heads, seed=seed, scale=scale, pattern=pattern
        )
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window: expected an integer ≥ 1, the number of exact keys on a side, got {window!r}.")
        self.window = window

    def matrix(self, q, k, *, segments=None):
        self._check(q, k, None, segments)
        n, m, scale = q.shape[-2], k.shape[-2], self._scale(q)
        layout = resolve(segments, n, m, q.device)
        real = layout.key_positions[layout.key_ids >= 0]
        self._check_length(m if segments is None else int(real.max()) + 1 if len(real) else 0)
        at = layout.key_positions.clamp(max=self.length - 1)  # only padding lies beyond
        E, F = (take_tokens(P.to(q.dtype).mT, at).mT for P in self._projections())  # (*b, r, m): the column of each key
        distance = layout.query_positions[..., :, None] - layout.key_positions[..., None, :]
        A = q.new_zeros(*broadcast_shapes(q.shape[:-2], k.shape[:-2]), n, m)
        for segment in layout.key_ids[layout.key_ids >= 0].unique().tolist():
            own = (layout.key_ids == segment)[..., None]
            here = (layout.query_ids == segment)[..., None]
            with as_given(q):
                low = q @ (E @ torch.where(own, k, 0)).mT * scale
                near = (q @ k.mT * scale).masked_fill((distance.abs() >= self.window) | ~own.mT, -torch.inf)
                weights = torch.cat([near, low], -1).softmax(-1)
                A = torch.where(here, weights[..., :m] + weights[..., m:] @ torch.where(own.mT, F, 0), A)
        return A

    def _attend(self, E, F, q, k, v):
        m, scale, reach = k.shape[-2], self._scale(q), self.window - 1
        self._check_length(m)
        with as_given(q):
            keys, values = (P[..., :m].to(q.dtype) @ x for P, x in ((E, k), (F, v)))
            low = partial_softmax(q, keys, values, Full(), None, scale)
            near = partial_softmax(q, k, v, Window(reach, reach), None, scale)
            return join(low, near).to(v.dtype)

    def products(self, q, k, *, segments=None):
        return Mechanism.products(self, q, k, segments=segments)  # the default: Aᵀ y by the gradient in v

    def cost(self, dims: Dims) -> Cost:
        low, reach = super().cost(dims), self.window - 1
        pairs = Window(reach, reach).pairs(dims.n, dims.m)
        return Cost.of_stages(*low.stages, *softmax_stages(dims.batch * pairs, dims.d, dims.e), bytes=low.bytes)

    def explain(self, q, k, v, *, segments=None):
        reach = self.window - 1
        return partial_softmax.explain(q, k, v, Window(reach, reach), segments, self._scale(q))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}"
