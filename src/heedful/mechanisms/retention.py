"""Retention (Sun et al. 2023, arXiv:2307.08621): linear attention whose state decays by λ per token.

matrix      A_ij = λ^{i−j} φ(q_i)·φ(k_j) / z_i,  j ≤ i;  z_i = Σ_{l≤i} λ^{i−l} φ(q_i)·φ(k_l), or 1
fast        chunks of c, the decay carried in logarithms
recurrence  S_t = λ S_{t-1} + φ(k_t) v_tᵀ,  o_t = S_tᵀφ(q_t) / z_t·φ(q_t)
cost        2n(c(r + e) + 2re) flops, state r(e + 1), or re without normaliser

The paper also rotates q and k (here the layer's rotary positions do that) and divides scores by √d and by norms of D
and of the rows (the following group norm cancels these). None of this is part of A here.
"""

from __future__ import annotations

import torch

from heedful.constants import rounded_anew
from heedful.feature_maps import Elu1, FeatureMap, Identity
from heedful.mechanisms.linear_base import LinearBase
from heedful.patterns import Causal
from heedful.shapes import Float, Tensor


class Retention(LinearBase):
    """Linear attention with decay: one λ for all heads, or one per head.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 4, 1000, 16).unbind()
    >>> h.Retention(torch.tensor([0.9, 0.95, 0.99, 1.0]))(q, k, v).shape
    torch.Size([1, 4, 1000, 16])

    The default features are elu + 1 with normalisation, and q and k themselves without, as in the paper.
    """

    log_lambda: Tensor

    def __init__(
        self,
        decay: float | Float[Tensor, " heads"] = 0.97,
        normalise: bool = False,
        feature_map: FeatureMap | None = None,
    ):
        default = Elu1() if normalise else Identity()
        super().__init__(default if feature_map is None else feature_map, Causal(), normalise)
        decay = torch.as_tensor(decay, dtype=torch.float64)
        if decay.ndim > 1 or not bool(((decay > 0) & (decay <= 1)).all()):
            raise ValueError(f"decay: expected one number in (0, 1], or one for each head, got {decay.tolist()}.")
        self.decay = decay.tolist()
        self.register_buffer("log_lambda", decay.log())

    def _apply(self, fn, recurse=True):
        before = self.log_lambda
        try:
            super()._apply(fn, recurse)
        except TypeError:  # a device without float64, such as MPS
            before = self.log_lambda = self.log_lambda.float()
            super()._apply(fn, recurse)
        exact = torch.tensor(self.decay, dtype=torch.float64)
        self.log_lambda = rounded_anew(before, self.log_lambda, exact.log)
        return self

    def log_decay(self):
        return self.log_lambda

    def extra_repr(self) -> str:
        return f"decay={self.log_lambda.exp().tolist()}, normalise={self.normalise}"
