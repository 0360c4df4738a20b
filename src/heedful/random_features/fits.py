"""Optimal parameters of GERF and DERF for given queries and keys, in closed form.

With w = Sx + S^-T y, the second moment of one feature's product is (see variances.py)

    E f² f'² = ∏ (1−4A_l) (1−8A_l)^-½ exp(2 (1−4A_l)/(1−8A_l) w_l²) · exp(−‖Sx‖² − ‖S^-T y‖²)

The fits minimise the mean of its logarithm over all pairs of a query and a key of one sequence,

    L(A, S) = Σ_l [log(1−4A_l) − ½ log(1−8A_l) + 2 (1−4A_l)/(1−8A_l) Z_ll] − tr(S M₁ Sᵀ) − tr(S^-T M₂ S^-1)

where M₁ = mean xxᵀ, M₂ = mean yyᵀ, C = mean x̄ȳᵀ (means within a sequence, then over sequences), and
Z = S M₁ Sᵀ + S^-T M₂ S^-1 + S C S^-1 + (S C S^-1)ᵀ = mean wwᵀ. Likhosherstov et al. 2023, arXiv:2302.00787.

one axis   2(1−4A)/(1−8A) = 1 + 1/(1−8A); with u = 1/(1−8A) and t = Z_ll the derivative vanishes at
           2t u² + (2t+1) u − 1 = 0, so that A = h(t) = (1 − 2t − √((2t+1)² + 8t)) / 16, and the minimum is concave in t
GERF       S = I, one A: t = φ/d with φ = tr Z = mean ‖x+y‖²
SDERF      S orthogonal: ‖Sx‖ = ‖x‖, and a sum of concave functions of the diagonal of Z is least where the diagonal is
           the spectrum (which majorises it): S = Qᵀ, Z = QΛQᵀ, A = h(Λ)
ADERF      one A: L depends on S through tr(P M₁) + tr(P^-1 M₂), P = SᵀS, with a positive factor; its minimum is
           2 tr Σ, at S = Σ^½ Uᵀ Λ₁^-½ Q₁ᵀ with Mₖ = QₖΛₖQₖᵀ, Λ₁^½ Q₁ᵀ Q₂ Λ₂^½ = UΣVᵀ; then t = (2 tr Σ + 2 tr C)/d
SADERF     the same for a diagonal S: S_ll = (M₂_ll / M₁_ll)^¼, t = (2 Σ √(M₁_ll M₂_ll) + 2 tr C)/d
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from heedful.shapes import Float, Tensor

FLOOR = 1e-6
"""Lower bound on the second moment of queries or keys in any direction, as a share of the largest one."""


class Moments(NamedTuple):
    """Second moments of queries and keys, and the products of their means, in float64."""

    query: Float[Tensor, "*h d d"]
    key: Float[Tensor, "*h d d"]
    cross: Float[Tensor, "*h d d"]

    @classmethod
    def of(cls, x: Float[Tensor, "*#b n d"], y: Float[Tensor, "*#b m d"], per_head: bool = False) -> Moments:
        """Return moments over all tokens and batch axes; with `per_head`, one set per entry of the last batch axis."""
        for name, tokens in (("q", x), ("k", y)):
            if tokens.numel() == 0 or not tokens.isfinite().all():
                found = "no tokens" if tokens.numel() == 0 else "NaN or infinity"
                raise ValueError(
                    f"{name}: {found} in shape {tuple(tokens.shape)}, expected finite data to calibrate on."
                )
        x, y = x.detach().double(), y.detach().double()
        query, key = (u.mT @ u / u.shape[-2] for u in (x, y))
        cross = x.mean(-2)[..., :, None] * y.mean(-2)[..., None, :]
        return cls(*(_pooled(u, per_head) for u in (query, key, cross)))

    @property
    def of_sums(self) -> Float[Tensor, "*h d d"]:
        """Mean of (x+y)(x+y)ᵀ."""
        return self.query + self.key + self.cross + self.cross.mT


class Fit(NamedTuple):
    """A, one number per axis, and the axes S of queries and S^-T of keys."""

    A: Float[Tensor, "*h d"]
    query_axes: Float[Tensor, "*h d d"]
    key_axes: Float[Tensor, "*h d d"]


def best_A(t: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return h(t), the optimal A of an axis along which x + y has the second moment t.

    >>> best_A(torch.tensor([0.0, 1.0]))
    tensor([ 0.0000, -0.3202])
    """
    return (1 - 2 * t - ((2 * t + 1).square() + 8 * t).sqrt()) / 16


def fit_gerf(moments: Moments) -> Fit:
    """Fit one A, with the axes unchanged."""
    d = moments.query.shape[-1]
    A = best_A(_trace(moments.of_sums) / d)
    axes = torch.eye(d, dtype=A.dtype, device=A.device).expand_as(moments.query)
    return Fit(A[..., None].expand(*A.shape, d), axes, axes)


def fit_sderf(moments: Moments) -> Fit:
    """Fit the principal axes of x + y, with one A per axis."""
    spectrum, Q = torch.linalg.eigh(moments.of_sums)
    return Fit(best_A(spectrum.clamp(min=0)), Q.mT, Q.mT)


def fit_aderf(moments: Moments) -> Fit:
    """Fit a linear map that balances queries and keys, and one A."""
    root1, Q1 = _roots(moments.query)
    root2, Q2 = _roots(moments.key)
    U, balanced, _ = torch.linalg.svd(root1[..., :, None] * (Q1.mT @ Q2) * root2[..., None, :])
    root = balanced.sqrt()[..., :, None]
    query_axes = root * U.mT / root1[..., None, :] @ Q1.mT
    key_axes = U.mT / root * root1[..., None, :] @ Q1.mT
    return _one_A(moments, balanced, query_axes, key_axes)


def fit_saderf(moments: Moments) -> Fit:
    """Fit a diagonal map that balances queries and keys, and one A."""
    query, key = (_raised(u.diagonal(dim1=-2, dim2=-1)) for u in (moments.query, moments.key))
    stretch = (key / query) ** 0.25
    return _one_A(moments, (query * key).sqrt(), torch.diag_embed(stretch), torch.diag_embed(1 / stretch))


def objective(moments: Moments, fit: Fit) -> Float[Tensor, "*h"]:
    """Return L(A, S), the mean over pairs of log E f² f'² (see the top of this file)."""
    A, S, T = fit
    of_queries, of_keys, cross = S @ moments.query @ S.mT, T @ moments.key @ T.mT, S @ moments.cross @ T.mT
    Z = (of_queries + of_keys + 2 * cross).diagonal(dim1=-2, dim2=-1)
    axes = torch.log1p(-4 * A) - torch.log1p(-8 * A) / 2 + 2 * (1 - 4 * A) / (1 - 8 * A) * Z
    return axes.sum(-1) - _trace(of_queries) - _trace(of_keys)


def _one_A(moments: Moments, balanced: Tensor, query_axes: Tensor, key_axes: Tensor) -> Fit:
    t = 2 * (balanced.sum(-1) + _trace(moments.cross)) / balanced.shape[-1]
    return Fit(best_A(t.clamp(min=0))[..., None].expand_as(balanced), query_axes, key_axes)


def _roots(second_moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return Λ^½ and Q; also works with fewer tokens than axes."""
    spectrum, Q = torch.linalg.eigh(second_moment)
    return _raised(spectrum).sqrt(), Q


def _raised(spectrum: Tensor) -> Tensor:
    floor = FLOOR * spectrum.amax(-1, keepdim=True)
    return spectrum.clamp(min=torch.where(floor > 0, floor, 1.0))


def _trace(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _pooled(x: Tensor, per_head: bool) -> Tensor:
    return x.reshape(-1, *x.shape[-3 if per_head else -2 :]).mean(0)
