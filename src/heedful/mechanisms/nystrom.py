"""Nyström attention (Xiong et al. 2021, arXiv:2102.03902): softmax attention through r landmarks.

matrix      A = softmax(s · Q K̃ᵀ) Z softmax(s · Q̃ Kᵀ),   Q̃, K̃: the means of r consecutive pieces of Q and of K
            Z = Z_t of Z₀ = Wᵀ / (‖W‖₁ ‖W‖∞),  Z ← ¼ Z (13 I − W Z (15 I − W Z (7 I − W Z))),  W = softmax(s · Q̃ K̃ᵀ)
fast        right to left: attention of the landmarks to all keys, Z, attention of all queries to the landmarks;
            the last iterations of Z are applied directly to the r × e matrix (kernels/iterated_inverse)
cost        2 r (n + m)(d + e) + 2 r² (d + 8 e) + 2 r³ (4 t − 7) flops, t ≥ 3

The mechanism uses the paper's t-th iterate, not the pseudo-inverse that Z_t converges to. As a function of a singular
value σ of W, the iterate is a polynomial that stays small where 1/σ is huge. So nearly equal landmarks do no harm.
"""

from __future__ import annotations

import torch

from heedful.core import Cost, Dims, Mechanism, Stage, softmax_stages
from heedful.kernels.blocked.reference import blocked_adjoint
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import as_given
from heedful.kernels.iterated_inverse import inverse_products, inverse_times, iterated_inverse
from heedful.kernels.softmax import softmax
from heedful.patterns import Full, Pattern
from heedful.segments import nothing_seen, per_segment
from heedful.shapes import Float, Tensor, broadcast_shapes
from heedful.validation import check_inputs


class Nystrom(Mechanism):
    """Softmax attention through segment-mean landmarks.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    >>> h.Nystrom(landmarks=64)(q, k, v).shape
    torch.Size([1, 8, 4096, 64])

    landmarks    r. If a sequence has fewer tokens, its tokens are the landmarks, and A is softmax attention up to the
                 error of Z. If r does not divide the length, the first pieces are one token longer. Padding is ignored
    iterations   t; each iteration cubes the error of Z, once it is below 1
    scale        s, the factor of q·k; d^-½ by default

    16-bit inputs are converted to float32, because Z amplifies the rounding errors of the other factors. The depthwise
    convolution over v that the paper adds to the output is a separate layer and not part of the mechanism.
    """

    def __init__(
        self,
        landmarks: int = 64,
        *,
        iterations: int = 6,
        scale: float | None = None,
        pattern: Pattern = Full(),  # noqa: B008  (frozen)
    ):
        super().__init__(pattern)
        if not isinstance(pattern, Full):
            raise ValueError(
                f"pattern: {pattern!r}, expected Full(): Nyström attention has no causal or sparse form, because each "
                "landmark is a mean over tokens, later ones too. For a causal mechanism of linear cost see Linear."
            )
        for name, value in (("landmarks", landmarks), ("iterations", iterations)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}.")
        self.landmarks, self.iterations, self.scale = landmarks, iterations, scale

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        n, m, scale = q.shape[-2], k.shape[-2], self._scale(q)
        if segments is not None:
            unit = torch.eye(m, dtype=q.dtype, device=q.device)
            return per_segment(lambda q, k, x: self.matrix(q, k) @ x, q, k, unit, segments)
        if n == 0 or m == 0:
            return q.new_zeros(*broadcast_shapes(q.shape[:-2], k.shape[:-2]), n, m)
        wide = torch.promote_types(q.dtype, torch.float32)
        Q, K = q.to(wide), k.to(wide)
        Q_, K_ = (
            torch.stack([piece.mean(-2) for piece in X.tensor_split(min(self.landmarks, X.shape[-2]), -2)], -2)
            for X in (Q, K)
        )
        with as_given(q):
            W = (Q_ @ K_.mT * scale).softmax(-1)
            Z = W.mT / (torch.linalg.matrix_norm(W, 1) * torch.linalg.matrix_norm(W, torch.inf))[..., None, None]
            eye = torch.eye(W.shape[-2], dtype=wide, device=q.device)
            for _ in range(self.iterations):
                Z = Z @ (13 * eye - W @ Z @ (15 * eye - W @ Z @ (7 * eye - W @ Z))) / 4
            return ((Q @ K_.mT * scale).softmax(-1) @ Z @ (Q_ @ K.mT * scale).softmax(-1)).to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        if segments is not None:
            return per_segment(self, q, k, v, segments)
        n, m = q.shape[-2], k.shape[-2]
        if n == 0 or m == 0:
            return nothing_seen(q, k, v)
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, x = q.to(wide), k.to(wide), v.to(wide)
        with as_given(q):
            q, of_queries = with_landmarks(q, self.landmarks)
            k, of_keys = with_landmarks(k, self.landmarks)
            W = self._between(of_queries, of_keys)
            x = inverse_times(W, self._attend(of_queries, k, x), self.iterations)
            x = self._attend(q, of_keys, x)
        return x.to(v.dtype)

    def products(self, q, k, *, segments=None):
        products = super().products(q, k, segments=segments)

        @torch.no_grad()
        def transposed(y):
            """The transposed factors in reverse order."""
            wide = torch.promote_types(q.dtype, torch.float32)
            Q, K = q.to(wide), k.to(wide)
            with as_given(q):
                of_queries, of_keys = landmarks(Q, self.landmarks), landmarks(K, self.landmarks)
                W = self._between(of_queries, of_keys)
                x = iterated_inverse(W, self.iterations).mT @ self._attend_transposed(Q, of_keys, y.to(wide))
                return self._attend_transposed(of_queries, K, x).to(y.dtype)

        plain = segments is None and q.shape[-2] and k.shape[-2]
        return products._replace(adjoint=transposed) if plain else products

    def _between(self, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        """W."""
        return (of_queries @ (of_keys * self._scale(of_keys)).mT).softmax(-1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax(q, k, v, SoftmaxRows(), Full(), None, self._scale(q))

    def _attend_transposed(self, q: Tensor, k: Tensor, y: Tensor) -> Tensor:
        return blocked_adjoint(q, k, y, SoftmaxRows(), Full(), None, self._scale(q))

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def cost(self, dims: Dims) -> Cost:
        if dims.n == 0 or dims.m == 0:
            return Cost(flops=0, bytes=dims.io_bytes)
        a, b = min(self.landmarks, dims.n), min(self.landmarks, dims.m)
        between = a * b * dims.d + inverse_products(a, b, dims.e, self.iterations)
        return Cost.of_stages(
            *softmax_stages(dims.batch * (a * dims.m + dims.n * b), dims.d, dims.e),
            Stage("pseudo-inverse", 2 * dims.batch * between, dims.batch * a * b),
            bytes=dims.io_bytes,
        )

    def explain(self, q, k, v, *, segments=None):
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.to(wide) for x in (q[..., : self.landmarks, :], k, v))
        return softmax.explain(q, k, v, SoftmaxRows(), Full(), None, self._scale(q))

    def extra_repr(self) -> str:
        given = "" if self.scale is None else f", scale={self.scale}"
        return f"landmarks={self.landmarks}, iterations={self.iterations}{given}"


def landmarks(x: Float[Tensor, "*b n d"], count: int) -> Float[Tensor, "*b r d"]:
    """Return the means of `count` consecutive pieces; if `count` does not divide n, the first are one token longer.

    >>> landmarks(torch.arange(5.0)[:, None], 2).flatten()
    tensor([1.0000, 3.5000])
    """
    return with_landmarks(x, count)[1]


def with_landmarks(x: Float[Tensor, "*b n d"], count: int) -> tuple[Float[Tensor, "*b n d"], Float[Tensor, "*b r d"]]:
    """Return x and the means of its pieces, computed so that autograd adds their two gradients in one pass."""
    count = min(count, x.shape[-2])
    size, longer = divmod(x.shape[-2], count)
    if not longer:
        pieces = x.unflatten(-2, (count, size))
        return pieces.flatten(-3, -2), pieces.sum(-2) / size
    cut = longer * (size + 1)
    head = x[..., :cut, :].unflatten(-2, (longer, size + 1)).mean(-2)
    return x, torch.cat([head, x[..., cut:, :].unflatten(-2, (count - longer, size)).mean(-2)], -2)
