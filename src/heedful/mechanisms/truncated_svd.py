"""The best rank-r approximation of another mechanism: a lower bound on every low-rank error (Eckart & Young 1936).

matrix      A_r = Σ_{i≤r} σ_i u_i v_iᵀ,   A = Σ σ_i u_i v_iᵀ the inner mechanism's matrix, σ₁ ≥ σ₂ ≥ …
fast        none: A is materialised and its SVD computed in float32 or better, O(N³) time and O(N²) memory
gradient    in the basis of u and v, i ≤ r < j:  G_ij ← (σ_i² G_ij + σ_i σ_j G_ji) / (σ_i² − σ_j²), G_ji likewise
cost        the inner scores + (6 N + 20 s) s² for the SVD, s = min(n, m), N = max(n, m), + 2 n m (r + e) flops
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from heedful.core import Cost, Dims, Mechanism, Stage
from heedful.kernels.dispatch import as_given
from heedful.mechanisms.softmax import Softmax
from heedful.operator import Products
from heedful.patterns import Full
from heedful.segments import Segments, per_segment
from heedful.shapes import Float, Tensor
from heedful.validation import check_inputs


class TruncatedSVD(Mechanism):
    """The nearest matrix of rank r to another mechanism's A. A baseline for studies, not for production.

    >>> import torch, heedful as h
    >>> q, k = torch.randn(2, 50, 8).unbind()
    >>> torch.linalg.matrix_rank(h.TruncatedSVD(4, h.Softmax(h.Full())).matrix(q, k)).item()
    4

    rank    r; if min(n, m) ≤ r, the result is A itself
    inner   the mechanism to approximate; by default exact softmax attention of every query to every key

    The pattern is always Full, because the best approximation of a causal matrix is not causal. If σ_r = σ_{r+1}, the
    best approximation is not unique: the result is the one that the SVD returns. A_r has no derivative there, and the
    infinite terms of the gradient are dropped. Inputs that `inner` rejects, such as more queries than keys for a causal
    one, are rejected here too.
    """

    def __init__(self, rank: int, inner: Mechanism | None = None):
        super().__init__(Full())
        if rank < 1:
            raise ValueError(f"rank: expected at least 1, got {rank}.")
        if inner is not None and not isinstance(inner, Mechanism):
            raise TypeError(f"inner: expected a Mechanism such as Softmax(Full()), got {type(inner).__name__}.")
        self.rank = rank
        self.inner = Softmax(Full()) if inner is None else inner

    def matrix(self, q, k, *, segments=None):
        self._check(q, k, None, segments)
        if segments is not None:
            unit = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
            return per_segment(lambda q, k, x: self.matrix(q, k) @ x, q, k, unit, segments)
        with as_given(q):
            return self._nearest(q, k).to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments)
        if segments is not None:
            return per_segment(self, q, k, v, segments, self.parameters())
        with as_given(q):
            return _times(self._nearest(q, k), v)

    def reads_qk(self, heads):
        return self.inner.reads_qk(heads)

    def products(self, q, k, *, segments=None):
        kept: list[Tensor] = []
        learns = any(x.requires_grad for x in (q, k, *self.inner.parameters()))

        def nearest() -> Tensor:
            """Return A_r, cached for all products, except for products that need gradients in q or k."""
            if kept and not (learns and torch.is_grad_enabled()):
                return kept[0]
            with as_given(q):
                A = self._nearest(q, k) if segments is None else self.matrix(q, k, segments=segments)
            if not A.requires_grad:
                kept.append(A)
            return A

        return Products(_product(nearest), _product(lambda: nearest().mT))

    def _nearest(self, q: Tensor, k: Tensor) -> Float[Tensor, "*b n m"]:
        """Return A_r in float32 or better."""
        wide = torch.promote_types(q.dtype, torch.float32)
        A = self.inner.matrix(q.to(wide), k.to(wide))  # q·k may exceed the range of float16
        return A if A.numel() == 0 else _BestOfRank.apply(A, self.rank)

    def _check(self, q: Tensor, k: Tensor, v: Tensor | None, segments: Segments | None) -> None:
        check_inputs(q, k, v, segments=segments, pattern=self.inner.pattern, mechanism=self)

    def cost(self, dims: Dims) -> Cost:
        short, long = sorted((dims.n, dims.m))
        return Cost.of_stages(
            *self.inner.cost(replace(dims, e=0)).stages,
            Stage("svd", dims.batch * (6 * long * short**2 + 20 * short**3)),
            Stage("rank-r matrix", 2 * dims.batch * dims.n * dims.m * min(self.rank, short)),
            Stage("aggregation", 2 * dims.batch * dims.n * dims.m * dims.e),
            bytes=dims.io_bytes,
        )

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


class _BestOfRank(torch.autograd.Function):
    """A ↦ A_r, with a derivative that needs a gap only between σ_r and σ_{r+1}.

    The derivative of torch.linalg.svd divides by every difference σ_i² − σ_j², also if u_i and u_j are both kept or
    both dropped, where the quotient does not affect A_r.
    """

    @staticmethod
    def forward(ctx, A: Float[Tensor, "*b n m"], r: int) -> Float[Tensor, "*b n m"]:
        U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
        ctx.save_for_backward(U, sigma, Vh)
        ctx.r = r
        return U[..., :r] * sigma[..., None, :r] @ Vh[..., :r, :]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, G: Float[Tensor, "*b n m"]) -> tuple[Float[Tensor, "*b n m"], None]:
        (U, sigma, Vh), r = ctx.saved_tensors, ctx.r
        kept = torch.arange(sigma.shape[-1], device=G.device) < r
        left, right = U.mT @ G, G @ Vh.mT
        M = left @ Vh.mT
        i, j = sigma[..., :, None], sigma[..., None, :]
        across = kept[:, None] != kept
        larger = torch.where(kept[:, None], i, j)  # the σ of the pair that is kept
        gap = (i - j).abs() * (i + j)
        mixed = (larger**2 * M + i * j * M.mT) / torch.where(across & (gap > 0), gap, 1)
        inside = torch.where(across & (gap > 0), mixed, torch.where(kept[:, None] | kept, M, 0))
        beyond = U[..., :r] @ (left - M @ Vh)[..., :r, :] + (right - U @ M)[..., :r] @ Vh[..., :r, :]  # σ_j = 0
        return U @ inside @ Vh + beyond, None


def _product(matrix: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        with as_given(x):
            return _times(matrix(), x)

    return apply


def _times(A: Float[Tensor, "*#b n m"], x: Float[Tensor, "*#b m e"]) -> Float[Tensor, "*b n e"]:
    return (A @ x.to(A.dtype)).to(x.dtype)
