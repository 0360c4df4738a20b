"""Linear attention by its materialised matrix, for batches of short sequences, without synchronising with the GPU.

matrix      the matrix of Linear
fast        W = φ(q) φ(k)ᵀ over the visible keys,  W v / Σ_j W_ij
logs        if the map returns log φ:  W_ij = exp(a_i + b_j) φ'(q_i)·φ'(k_j), with the largest log features a_i and b_j
            factored out;  A = softmax_j(log φ'(q_i)·φ'(k_j) + b_j), in which a_i cancels
cost        2 · n · m · (r + e) flops

`Linear` does less work for long sequences. For sentences of about a hundred tokens its kernels are many small launches,
and they read the segments on the CPU, which synchronises with the GPU.
"""

from __future__ import annotations

from functools import partial

import torch

from heedful.feature_maps import FeatureMap, LogFeatureMap
from heedful.mechanisms import Linear
from heedful.nn.masked_softmax import mask_of
from heedful.patterns import Causal, Pattern
from heedful.validation import check_inputs

LEAST = 1e-30
"""Lower bound on products of features inside the logarithm, because a weight of 0 has no gradient."""


class MaterialisedLinear(Linear):
    """Normalised linear attention that materialises its matrix in each call.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    >>> linear = h.Linear(h.feature_maps.Elu1(), h.Causal())
    >>> torch.allclose(h.nn.MaterialisedLinear(h.feature_maps.Elu1(), h.Causal())(q, k, v), linear(q, k, v), atol=1e-5)
    True
    """

    def __init__(self, feature_map: FeatureMap | None = None, pattern: Pattern = Causal()):  # noqa: B008  (frozen)
        super().__init__(feature_map, pattern)

    def forward(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        wide = torch.promote_types(q.dtype, torch.float32)
        x, y = q.to(wide), k.to(wide)
        mask, real = mask_of(self.pattern, q.shape[-2], k.shape[-2], segments, x)
        attend = partial(_by_logs, self.feature_map) if isinstance(self.feature_map, LogFeatureMap) else self._direct
        return (attend(x, y, v.to(wide), mask) * real).to(v.dtype)

    def _direct(self, q, k, v, mask):
        W = (self.feature_map.query(q) @ self.feature_map.key(k).mT).masked_fill(mask < 0, 0)
        total = W.sum(-1, keepdim=True)
        return W @ v / total.masked_fill(total == 0, 1)


def _by_logs(features: LogFeatureMap, q, k, v, mask):
    x, y = features.log_query(q), features.log_key(k)
    top = y.amax(-1, keepdim=True).detach()
    products = (x - x.amax(-1, keepdim=True).detach()).exp() @ (y - top).exp().mT
    return (products.clamp(min=LEAST).log() + top.mT + mask).softmax(-1) @ v
