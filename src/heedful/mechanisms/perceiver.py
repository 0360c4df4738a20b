"""Perceiver latents (Jaegle et al. 2021, arXiv:2103.03206; IO: 2107.14795): attention through r learned latents.

matrix      A = R P_t ⋯ P_1 C,  so rank A ≤ r, and rows sum to 1
            cross-attend  C = softmax(s · L Kᵀ),  X = L + C K,  with latents L ∈ R^{r×d}
            process       M = softmax(s · (X W)(X U)ᵀ),  P = (I + M) / 2,  X ← X + M X,  with W, U of each round
            read          R = softmax(s · Q Xᵀ)
fast        right to left: C [K, V] in one pass over the keys, t rounds of r × r, then n queries with r keys
cost        2r(m(2d + e) + n(d + e)) + 2t r(2d² + r(2d + e)) flops

A latent has two parts: an address X in the space of the keys, which determines all weights, and a value, to which the
same weights apply. So the output is linear in v. In the paper both are one array, with MLPs in between, and the
residual is a sum; here the residual of the values is a mean, so that rows sum to 1. There is no causal version: each
latent depends on the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from heedful.core import Cost, Dims, Mechanism, Stage, softmax_stages
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import as_given
from heedful.kernels.softmax import softmax
from heedful.patterns import Full, Pattern
from heedful.segments import Segments, differ_by_head, nothing_seen, of_head, per_segment
from heedful.shapes import Float, Tensor, broadcast_shapes
from heedful.validation import check_inputs

Weights = tuple[Tensor, Tensor, Tensor]
"""L (*h, r, d), and W and U (*h, t, d, d)."""


class Perceiver(Mechanism):
    """Attention through r learned latents: cost linear in the length, rank at most r.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    >>> h.Perceiver(d=64, latents=32, heads=8)(q, k, v).shape
    torch.Size([1, 8, 4096, 64])

    d         width of queries and keys
    latents   r; each is a learned query to the sequence
    rounds    t, the number of rounds in which the latents attend to each other
    heads     1: all heads share the parameters; more: separate parameters per head, the last batch axis
    scale     s, the factor of every score; d^-½ by default
    seed      seed of the parameters: L from N(0, 1), W and U from N(0, 1/d)

    16-bit inputs are converted to float32, because three softmaxes in sequence would accumulate rounding errors.
    """

    def __init__(
        self,
        d: int,
        latents: int = 256,
        *,
        rounds: int = 2,
        heads: int = 1,
        scale: float | None = None,
        seed: int = 0,
        pattern: Pattern = Full(),  # noqa: B008  (frozen)
    ):
        super().__init__(pattern)
        if not isinstance(pattern, Full):
            raise ValueError(
                f"pattern: {pattern!r}, expected Full(): Perceiver latents have no causal or sparse form, because each "
                "latent attends to all tokens, later ones too. For a causal mechanism of linear cost see Linear."
            )
        for name, value, least in (("d", d, 1), ("latents", latents, 1), ("rounds", rounds, 0), ("heads", heads, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer ≥ {least}, got {value!r}.")
        self.d, self.latents, self.rounds, self.heads, self.scale = d, latents, rounds, heads, scale
        generator = torch.Generator().manual_seed(seed)
        lead = () if heads == 1 else (heads,)
        self.L = nn.Parameter(torch.randn(*lead, latents, d, generator=generator))
        self.W, self.U = (
            nn.Parameter(torch.randn(*lead, rounds, d, d, generator=generator) * d**-0.5) for _ in range(2)
        )

    def matrix(self, q, k, *, segments=None):
        self._check(q, k, segments=segments)
        unit = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
        with as_given(q):
            return self._apart(lambda weights, q, k, x: self._dense(weights, q, k) @ x, q, k, unit, segments)

    def _dense(self, weights: Weights, q: Tensor, k: Tensor) -> Tensor:
        """Return A of one sequence, by the definition."""
        if k.shape[-2] == 0:
            return q.new_zeros(*broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], 0)
        wide, s = torch.promote_types(q.dtype, torch.float32), self._scale()
        Q, K = q.to(wide), k.to(wide)
        L, W, U = (x.to(wide) for x in weights)
        C = (s * L @ K.mT).softmax(-1)
        X = L + C @ K
        for t in range(self.rounds):
            M = (s * (X @ W[..., t, :, :]) @ (X @ U[..., t, :, :]).mT).softmax(-1)
            P = (torch.eye(self.latents, dtype=wide, device=q.device) + M) / 2
            X, C = X + M @ X, P @ C
        return ((s * Q @ X.mT).softmax(-1) @ C).to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments=segments)
        return self._apart(self._attend, q, k, v, segments)

    def _attend(self, weights: Weights, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output for one sequence, by the fast path."""
        if k.shape[-2] == 0:
            return nothing_seen(q, k, v, *weights)
        wide = torch.promote_types(q.dtype, torch.float32)
        L, W, U = (x.to(wide) for x in weights)
        lead = broadcast_shapes(k.shape[:-2], v.shape[:-2])
        both = torch.cat([x.to(wide).expand(*lead, *x.shape[-2:]) for x in (k, v)], -1)
        with as_given(q):
            found = self._softmax(L, k.to(wide), both)
            X, Z = L + found[..., : self.d], found[..., self.d :]
            for A, B in zip(W.unbind(-3), U.unbind(-3), strict=True):
                M = ((X @ A) @ (X @ B).mT * self._scale()).softmax(-1)
                X, Z = X + M @ X, (Z + M @ Z) / 2
            return self._softmax(q.to(wide), X, Z).to(v.dtype)

    def _apart(
        self,
        attend: Callable[[Weights, Tensor, Tensor, Tensor], Tensor],
        q: Float[Tensor, "*#b n d"],
        k: Float[Tensor, "*#b m d"],
        v: Float[Tensor, "*#b m e"],
        segments: Segments | None,
    ) -> Float[Tensor, "*b n e"]:
        """Run each sequence with separate latents."""
        weights = self.L, self.W, self.U
        if segments is None:
            return attend(weights, q, k, v)
        if self.heads == 1 or not differ_by_head(segments):
            return per_segment(partial(attend, weights), q, k, v, segments, weights)
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
        rows = []
        for head in range(self.heads):
            own = partial(attend, (self.L[head], self.W[head], self.U[head]))
            each = q.select(-3, head), k.select(-3, head), v.select(-3, head)
            rows.append(per_segment(own, each[0], each[1], each[2], of_head(segments, head), weights))
        return torch.stack(rows, -3)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q, k, v, SoftmaxRows(), Full(), None, self._scale())

    def _scale(self) -> float:
        return self.d**-0.5 if self.scale is None else self.scale

    def _check(self, *qkv, segments=None) -> None:
        check_inputs(*qkv, segments=segments, pattern=self.pattern, mechanism=self)
        if qkv[0].shape[-1] != self.d:
            raise ValueError(
                f"q, k: width {qkv[0].shape[-1]}, expected d = {self.d}, that of the latents. Likely cause: the "
                "mechanism was built for another layer."
            )
        batch = broadcast_shapes(*(x.shape[:-2] for x in qkv))
        if self.heads > 1 and batch[-1:] != (self.heads,):
            raise ValueError(
                f"q, k: batch axes {tuple(batch)}, expected the last to be heads = {self.heads}, each of which has its "
                "own latents. Likely cause: the mechanism was built for another layer; heads=1 shares them among all."
            )

    def cost(self, dims: Dims) -> Cost:
        if dims.m == 0:
            return Cost(flops=0, bytes=dims.io_bytes)
        r, d, e = self.latents, dims.d, dims.e
        own = dims.states(self.heads)  # sets of latents: one per sequence of keys
        parameters = self.L.numel() + self.W.numel() + self.U.numel()
        return Cost.of_stages(
            Stage("latents read keys", 2 * own * r * dims.m * (2 * d + e), own * r * dims.m),
            Stage("rounds", 2 * own * self.rounds * r * (2 * d * d + r * (2 * d + e)), own * self.rounds * r * r),
            *softmax_stages(dims.batch * dims.n * r, d, e),
            bytes=dims.io_bytes + parameters * self.L.element_size(),
        )

    def explain(self, q, k, v, *, segments=None):
        wide = torch.promote_types(q.dtype, torch.float32)
        keys, values = (x[..., : self.latents, :].to(wide) for x in (k, v))  # stand-ins with the shape of the latents
        return softmax.explain(q.to(wide), keys, values, SoftmaxRows(), Full(), None, self._scale())

    def extra_repr(self) -> str:
        parts = [f"d={self.d}, latents={self.latents}, rounds={self.rounds}"]
        parts += [f"heads={self.heads}"] * (self.heads > 1) + [f"scale={self.scale}"] * (self.scale is not None)
        return ", ".join(parts)
