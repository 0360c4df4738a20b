"""The iteration of Nyström attention that converges to a pseudo-inverse (Razavi et al. 2014; arXiv:2102.03902, eq. 11).

    definition  Z₀ = Wᵀ / (‖W‖₁ ‖W‖∞),   Z ← ¼ Z (13 I − P (15 I − P (7 I − P))),   P = W Z
    step        the bracket is 4 I + (I − P)(3 I − P)²: with N = (3 I − P)² = P² − 6 P + 9 I,
                Z ← Z M,   M = I + ¼ (N − P N)                    four products; each step computes P from W and Z
                Near P = I the sum 13 − 15 + 7 − 1 would cancel; I − P, the remaining error, does not
    last steps  Z_t X = Z M M' M'' X needs no later Z, only P' = P M = P + ¼ (P − P²) N, computed from P alone:
                X ← X + ¼ N (X − P X),   P ← P + ¼ (P − P²) N     two products of r × r and two of r × e
    gradients   Z₀ is Wᵀ times a number, so every P is a polynomial of W Wᵀ and symmetric for any W. Only the symmetric
                part (G + Gᵀ)/2 of a gradient G in such a matrix matters, and G N, N G are each other's transpose: three
                products instead of four

A P computed from the previous P inherits its rounding error, up to 13/4 times as large after a step; a P computed from
W and Z does not. So only the last steps use P alone. In float32, the error of Z X is then up to 2.8 times that of the
definition, and the error of attention (outputs and gradients) up to 1.4 times. (Gradients of all steps from P alone
would save a tenth of the time, with errors 15 times as large.)
"""

from __future__ import annotations

from math import prod

import torch

from heedful.kernels.dispatch import as_given
from heedful.shapes import Float, Tensor, broadcast_shapes

LAST = 3
"""Last steps, which do not compute Z. One more would save 1½ products of r × r and double the error."""


def iterated_inverse(W: Float[Tensor, "*b a c"], iterations: int) -> Float[Tensor, "*b c a"]:
    """The iterate that converges to the pseudo-inverse of W. Each matrix of a batch is treated independently.

    >>> W = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    >>> iterated_inverse(W, 10)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.2500]])
    """
    Z = _start(W)
    for _ in range(iterations):
        P = W @ Z
        N = _shifted(torch.sub(P @ P, P, alpha=6), 9)
        Z = Z @ _shifted((N - P @ N) / 4, 1)
    return Z


def inverse_times(W: Float[Tensor, "*#b a c"], X: Float[Tensor, "*#b a e"], iterations: int) -> Float[Tensor, "*b c e"]:
    """iterated_inverse(W, iterations) @ X; the last steps never compute the inverse. `iterations` is at least 1.

    >>> inverse_times(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.ones(2, 1), 10).flatten()
    tensor([0.5000, 0.2500])
    """
    batch = broadcast_shapes(W.shape[:-2], X.shape[:-2])
    W, X = (x.expand(*batch, *x.shape[-2:]).reshape(prod(batch), *x.shape[-2:]) for x in (W, X))
    return _InverseTimes.apply(W, _start(W), X, iterations).reshape(*batch, W.shape[-1], X.shape[-1])


def inverse_products(a: int, c: int, e: int, iterations: int) -> int:
    """The multiply-adds of `inverse_times` with W (a, c) and X (a, e)."""
    last = min(iterations, LAST)
    forming = (iterations - last) * 2 * a * a * (a + c) + a * a * c
    return forming + (last - 1) * 2 * a * a * (a + e) + 3 * a * a * e + a * c * e


def _start(W: Float[Tensor, "*b a c"]) -> Float[Tensor, "*b c a"]:
    """Z₀. Since ‖W‖₁ ‖W‖∞ ≥ σ_max², every eigenvalue of W Z₀ lies in [0, 1]."""
    size = W.abs()
    return W.mT / (size.sum(-2).amax(-1) * size.sum(-1).amax(-1))[..., None, None]


class _InverseTimes(torch.autograd.Function):
    """Z_t X from W, Z₀ and X with one batch axis. Only the sum of the gradients through W and Z₀(W) is right."""

    @staticmethod
    def forward(ctx, W, Z, X, iterations):
        forming, learns = max(iterations - LAST, 0), any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        for _ in range(forming):
            P = torch.bmm(W, Z)
            N = _squared(torch.bmm(P, P), P)
            M = _shifted(torch.baddbmm(N, P, N, beta=0.25, alpha=-0.25), 1)
            kept += [Z, P, N, M] if learns else []
            Z = torch.bmm(Z, M)
        P = torch.bmm(W, Z)
        for _ in range(iterations - forming - 1):
            S = torch.bmm(P, P)
            D = P - S
            N = _squared(S, P)
            R = torch.baddbmm(X, P, X, alpha=-1)
            kept += [P, N, D, X, R] if learns else []
            X = torch.baddbmm(X, N, R, alpha=0.25)
            P = torch.baddbmm(P, D, N, alpha=0.25)
        R = torch.baddbmm(X, P, X, alpha=-1)
        R_ = torch.baddbmm(R, P, R, beta=3, alpha=-1)
        given = (W, Z, P, X, R, R_)
        X = torch.baddbmm(R_, P, R_, beta=3, alpha=-1).mul_(0.25).add_(X)
        if learns:
            ctx.forming = forming
            ctx.save_for_backward(X, *given, *kept)
        return torch.bmm(Z, X)

    @staticmethod
    def backward(ctx, dout):
        with as_given(dout):
            return _InverseTimes._backward(ctx, dout)

    @staticmethod
    def _backward(ctx, dout):
        end, W, Z, P, X, R, R_, *rest = ctx.saved_tensors
        cut = 4 * ctx.forming
        formed, last = _groups(rest[:cut], 4), _groups(rest[cut:], 5)
        learns = any(ctx.needs_input_grad[:2])
        g = torch.bmm(Z.mT, dout)
        d_ = torch.baddbmm(g, P.mT, g, beta=0.75, alpha=-0.25)
        d = torch.baddbmm(d_, P.mT, d_, beta=3, alpha=-1)
        H = None
        if learns:
            dZ = torch.bmm(dout, end.mT)
            H = torch.bmm(torch.cat([g / 4, d_, d], -1), torch.cat([R_, R, X], -1).mT).neg_()
        G = torch.baddbmm(d, P.mT, d, alpha=-1).add_(g)
        for P, N, D, X, R in reversed(last):
            dR = torch.bmm(N, G).mul_(0.25)
            if H is not None:
                H = _symmetric(H)
                dN = torch.bmm(torch.cat([H, G], -1), torch.cat([D, R], -1).mT).mul_(0.25)
                dD = torch.bmm(H, N).mul_(0.25)
                H = H.add_(dD).sub_(dN, alpha=6).baddbmm_(dR, X.mT, alpha=-1)
                H.baddbmm_(_symmetric(dN.sub_(dD)), P, alpha=2)
            G = torch.baddbmm(dR, P, dR, alpha=-1).add_(G)
        if H is None:
            return None, None, G, None
        dW = torch.bmm(H, Z.mT)  # H is the gradient in P = W Z
        dZ.baddbmm_(W.mT, H)
        for Z, P, N, M in reversed(formed):
            dM = _symmetric(torch.bmm(Z.mT, dZ))
            dN = _symmetric(torch.baddbmm(dM, dM, P, beta=0.25, alpha=-0.25))
            H = torch.bmm(dM, N).mul_(-0.25).sub_(dN, alpha=6).baddbmm_(dN, P, alpha=2)
            dZ = torch.bmm(dZ, M).baddbmm_(W.mT, H)
            dW.baddbmm_(H, Z.mT)
        return dW, dZ, G, None


def _groups(tensors: list[Tensor], size: int) -> list[list[Tensor]]:
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]


def _squared(S: Float[Tensor, "*b a a"], P: Float[Tensor, "*b a a"]) -> Float[Tensor, "*b a a"]:
    """(3 I − P)²; overwrites S = P²."""
    return _shifted(S.sub_(P, alpha=6), 9)


def _shifted(X: Float[Tensor, "*b a a"], by: float) -> Float[Tensor, "*b a a"]:
    """X + by · I; overwrites X."""
    X.diagonal(dim1=-2, dim2=-1).add_(by)
    return X


def _symmetric(G: Float[Tensor, "*b a a"]) -> Float[Tensor, "*b a a"]:
    """The symmetric part of G: the part of a gradient that matters for a symmetric matrix."""
    return (G + G.mT).mul_(0.5)
