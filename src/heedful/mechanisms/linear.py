"""Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236): weights are inner products of features.

matrix      A_ij = φ(q_i)·φ(k_j) / Σ_{l visible} φ(q_i)·φ(k_l),  j visible from i
fast        chunks of c: inside by tril(φq φkᵀ), across by S
recurrence  S_t = S_{t-1} + φ(k_t) v_tᵀ,  z_t = z_{t-1} + φ(k_t),  o_t = S_tᵀφ(q_t) / z_t·φ(q_t)
cost        2n(c(r + e) + 2re) flops, state r(e + 1)
"""

from __future__ import annotations

from heedful.feature_maps import Elu1, FeatureMap
from heedful.mechanisms.linear_base import LinearBase
from heedful.patterns import Causal, Pattern


class Linear(LinearBase):
    """Linear attention, O(n): weights are inner products of features, so sums over keys replace rows of scores.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    >>> h.Linear()(q, k, v).shape
    torch.Size([1, 8, 4096, 64])

    With signed features (Cos, Identity) the normaliser may vanish: use normalise=False. elu(x) + 1 = e^x underflows if
    all entries are very negative; on a GPU, rows with a normaliser below 2^-95 are zero.
    """

    def __init__(
        self,
        feature_map: FeatureMap | None = None,
        pattern: Pattern = Causal(),  # noqa: B008  (frozen)
        normalise: bool = True,
    ):
        super().__init__(Elu1() if feature_map is None else feature_map, pattern, normalise)

    def extra_repr(self) -> str:
        return f"{self.pattern!r}, normalise={self.normalise}"
