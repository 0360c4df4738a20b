"""Linear attention by its matrix, for batches of short sequences, without waiting for the device.

matrix      that of Linear
fast        W = φ(q) φ(k)ᵀ over the visible keys,  W v / Σ_j W_ij
logs        where the map gives log φ:  W_ij = exp(a_i + b_j) φ'(q_i)·φ'(k_j) with the largest features a_i and b_j
            taken out;  A = softmax_j(log φ'(q_i)·φ'(k_j) + b_j), in which a_i cancels
cost        2 · n · m · (r + e) flops

Linear attention is less work for long sequences. For sentences of a hundred tokens its kernels are many small launches,
and they look at the segments, which waits for the device.
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
"""Products of features are at least this in the logarithm: a weight of 0 has no gradient."""


class MaterialisedLinear(Linear):
    """Normalised linear attention whose calls form the matrix.

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
