"""Gated linear attention (Yang et al. 2023, arXiv:2312.06635): each token sets the decay of the state.

matrix      A_ij = Σ_c φ(q_i)_c φ(k_j)_c exp(b_ic − b_jc) / z_i,  j ≤ i;   z_i: the row's sum where normalised, or 1
            b_i = Σ_{t≤i} log α_t,   log α_t = log σ(U W k_t + β) / τ
fast        chunks of c; inside, recursive halves whose exponents are never positive     (kernels/gated_linear)
recurrence  S_t = diag(α_t) S_{t-1} + φ(k_t) v_tᵀ,  z_t = α_t ∘ z_{t-1} + φ(k_t),  o_t = S_tᵀφ(q_t) / z_t·φ(q_t)
cost        2n((c − 1)(r + e)/2 + 2re) + 2m ρ(d + r) flops, state re, or r(e + 1) with the normaliser

Here the gate is a function of the key, so that A depends on q and k alone; in the paper it is a function of the layer's
input. With one gate per head, this is Retention with a decay that each token sets.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from heedful.core import Cost, Dims, Stage
from heedful.feature_maps import Elu1, FeatureMap, Identity, LogFeatureMap
from heedful.kernels.dispatch import as_given
from heedful.kernels.gated_linear.reference import CHUNK
from heedful.kernels.linear_attention import LinearOptions, gated_attention
from heedful.mechanisms.linear_base import LinearBase
from heedful.patterns import Causal
from heedful.segments import resolve, visible
from heedful.shapes import Float, Tensor, broadcast_shapes
from heedful.validation import check_inputs

GATES = ("channel", "head")


class GatedLinear(LinearBase):
    """Linear attention whose state decays by a learned function of each key.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 4, 1000, 16).unbind()
    >>> attend = h.GatedLinear(d=16, heads=4)
    >>> attend(q, k, v).shape
    torch.Size([1, 4, 1000, 16])
    >>> attend.log_gates(k).shape
    torch.Size([1, 4, 1000, 16])

    d             width of the keys
    heads         1: all heads share the gate's weights; more: separate weights per head, the last batch axis
    gate          "channel": one gate per row of the state, as in the paper; "head": one gate per head
    rank          ρ, the rank of the gate's weights U W
    tau           τ; a larger τ means slower decay: initially, α is about 2^(-1/τ)
    normalise     True: rows sum to 1, and the default features are elu + 1; False: the default features are q and k
    seed          seed of W and U, which are uniform as in a linear layer; β starts at 0
    """

    kernel = gated_attention

    def __init__(
        self,
        d: int,
        heads: int = 1,
        *,
        gate: Literal["channel", "head"] = "channel",
        rank: int = 16,
        tau: float = 16.0,
        normalise: bool = False,
        feature_map: FeatureMap | None = None,
        seed: int = 0,
    ):
        default = Elu1() if normalise else Identity()
        super().__init__(default if feature_map is None else feature_map, Causal(), normalise)
        if isinstance(feature_map, LogFeatureMap):
            raise TypeError(
                f"feature_map: {type(feature_map).__name__} gives logarithms of features, expected the features "
                "themselves, as Elu1() does. Retention takes logarithms, with a decay that is constant."
            )
        for name, value in (("d", d), ("heads", heads), ("rank", rank)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an integer ≥ 1, got {value!r}.")
        if not tau > 0:
            raise ValueError(f"tau: expected > 0, got {tau}.")
        if gate not in GATES:
            raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {gate!r}.")
        self.d, self.heads, self.gate, self.rank, self.tau = d, heads, gate, rank, tau
        width = self.feature_map.dim(d) if gate == "channel" else 1
        generator = torch.Generator().manual_seed(seed)
        lead = () if heads == 1 else (heads,)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(*lead, *shape, generator=generator) - 1) * shape[-1] ** -0.5)

        self.W, self.U = drawn(rank, d), drawn(width, rank)
        self.beta = nn.Parameter(torch.zeros(*lead, width))

    def log_gates(self, k: Float[Tensor, "*#b m d"]) -> Float[Tensor, "*b m #r"]:
        """Return log α of each token, in float32 or better, with one entry per channel or a single one."""
        wide = torch.promote_types(k.dtype, torch.float32)
        with as_given(k):
            W, U, beta = (x.to(wide) for x in (self.W, self.U, self.beta))
            return F.logsigmoid(k.to(wide) @ W.mT @ U.mT + beta[..., None, :]) / self.tau

    def fading(self, k, dtype):
        return self.log_gates(k.to(dtype))[..., 0, :]

    def matrix(self, q, k, *, segments=None):
        self._check(q, k, segments=segments)
        n, m = q.shape[-2], k.shape[-2]
        wide = torch.promote_types(q.dtype, torch.float32)
        layout = resolve(segments, n, m, q.device)
        here, there = layout.query_ids, layout.key_ids
        sees = visible(self.pattern, n, m, segments, q.device)
        after = layout.key_positions[..., :, None] >= layout.key_positions[..., None, :]
        after = after & (there[..., :, None] == there[..., None, :])
        k = k.masked_fill(there[..., None] < 0, 0)
        with as_given(q):
            g = self.log_gates(k)
            of_queries, of_keys = sees.to(wide) @ g, after.to(wide) @ g  # b, the sum inside the segment
            x = self.feature_map.query(q.masked_fill(here[..., None] < 0, 0).to(wide), layout.query_positions)
            y = self.feature_map.key(k.to(wide), layout.key_positions)
            rows = []
            for a in range(0, max(n, 1), 64):  # 64 rows at a time: each row needs m × r numbers
                some = slice(a, a + 64)
                between = of_queries[..., some, None, :] - of_keys[..., None, :, :]
                fade = between.masked_fill(~sees[..., some, :, None], -torch.inf).exp()
                rows.append(torch.einsum("...ic,...ijc,...jc->...ij", x[..., some, :], fade, y))
            weights = torch.cat(rows, -2)
        if self.normalise:
            total = weights.sum(-1, keepdim=True)
            weights = torch.where(total == 0, 0, weights / total.masked_fill(total == 0, 1))
        return weights.to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments=segments)
        return super().forward(q, k, v, segments=segments)

    def prefill(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments=segments)
        return super().prefill(q, k, v, segments=segments)

    def _options(self, stateful: bool = False) -> LinearOptions:
        return super()._options(stateful)._replace(log_gates=self.log_gates)

    def _step(self, state, q, k, v):
        self._check(q, k, v)
        return super()._step(state, q, k, v)

    def cost(self, dims: Dims) -> Cost:
        width, plain = self.U.shape[-2], super().cost(dims)
        gated = dims.states(self.heads) * dims.m  # tokens with separate gates
        r, e, tokens = self.feature_map.dim(dims.d), dims.e + self.normalise, max(dims.n, dims.m)
        return Cost.of_stages(
            Stage("gates", 2 * gated * self.rank * (self.d + width), gated * width),
            Stage("within chunks", dims.batch * tokens * (min(CHUNK, tokens) - 1) * (r + e)),
            Stage("state", 4 * dims.batch * tokens * r * e),
            bytes=plain.bytes,
            state=plain.state,
        )

    @property
    def own_heads(self):
        return max(super().own_heads, self.heads)

    def _check(self, *qkv, segments=None) -> None:
        check_inputs(*qkv, segments=segments, pattern=self.pattern, mechanism=self)
        k = qkv[1]
        if k.shape[-1] != self.d:
            raise ValueError(
                f"k: width {k.shape[-1]} {tuple(k.shape)}, expected d = {self.d}, for which the gate was built. Likely "
                "cause: the mechanism was built for another layer."
            )
        batch = broadcast_shapes(*(x.shape[:-2] for x in qkv))
        if self.heads > 1 and batch[-1:] != (self.heads,):
            raise ValueError(
                f"q, k: batch axes {tuple(batch)}, expected the last to be heads = {self.heads}, each of which has its "
                "own gate. Likely cause: the mechanism was built for another layer; heads=1 shares one among all."
            )

    def extra_repr(self) -> str:
        parts = [f"d={self.d}", f"gate={self.gate!r}", f"rank={self.rank}", f"tau={self.tau:g}"]
        parts += [f"heads={self.heads}"] * (self.heads > 1) + ["normalise=True"] * self.normalise
        return ", ".join(parts)
