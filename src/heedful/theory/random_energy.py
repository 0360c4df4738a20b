"""Softmax of N iid Gaussian logits: the random energy model (Derrida 1981, Phys. Rev. B 24, 2613).

a_j = e^{sX_j} / Z, Z = Σ_l e^{sX_l}, X ~ N(0, I_N). From 1/Z² = ∫ t e^{−tZ} dt and independence, with t = e^τ,
w(x) = e^{τ + sx}, φ the normal density:

    E Σ a²   = N ∫ dτ  g(τ) h(τ)^{N−1},                 g = E w² e^{−w},  h = E e^{−w}
    E max a  = N ∫ dτ ∫ φ(x) w e^{−w} H(τ, x)^{N−1} dx,   H = ∫_{y<x} φ(y) e^{−w(y)} dy

The powers are computed from 1 − h and 1 − H, which are small where it matters. The integrands are analytic and decay on
both sides, so the trapezoid rule converges exponentially; the running integral H uses Gauss–Legendre cells.

The law of large numbers gives E Σa² ≈ e^{s²}/N for small s. Above the spread s = √(2 ln N) softmax freezes: with
s = c √(2 ln N), c > 1, the weights tend to a Poisson–Dirichlet law with parameter α = 1/c, for which

    E Σ a² = 1 − α        E max a = ∫₀^∞ e^{−u} du / (e^{−u} + u^α γ(1 − α, u))

(Talagrand 2003, Spin Glasses; Pitman & Yor 1997, Ann. Probab. 25). The second: points of intensity α x^{−α−1} dx have a
largest one M = m and 1/Σ = ∫ e^{−tΣ} dt; with u = tm the integral over m is elementary. So even far above the threshold
a single token never takes all the mass in the limit, because c is finite.
"""

from __future__ import annotations

from math import ceil, exp, lgamma, log, sqrt

import torch

from heedful.shapes import Tensor

REACH = 12.0  # standard deviations; beyond them a normal variable has 1e-32 of its mass
STEP = 0.125  # of the trapezoid rules: functions of e^τ are analytic in |Im τ| < π/2, so their error is e^{−π²/STEP}
CELL = 8  # Gauss–Legendre points in a cell


def freezing_spread(N: int) -> float:
    """√(2 ln N): softmax of N iid logits concentrates on few of them only if their standard deviation is above it.

    >>> round(freezing_spread(512), 2)
    3.53
    """
    _check(N, 1.0)
    return sqrt(2 * log(N))


def expected_square_sum(N: int, s: float) -> float:
    """E Σ a² of the softmax of N iid logits of standard deviation s; e^{s²}/N for small s.

    >>> round(expected_square_sum(512, 0.0) * 512, 9), round(expected_square_sum(512, 8.0), 4)
    (1.0, 0.6265)
    """
    _check(N, s)
    x, _ = _grid(-REACH, REACH, min(0.5, STEP / s) if s > 0 else 0.5)
    density = torch.exp(-x.square() / 2)
    density /= density.sum()
    total = 0.0
    for tau in _taus(N, s).split(256):
        w = torch.exp(tau[:, None] + s * x)
        g = (w.square() * torch.exp(-w)).nan_to_num(0) @ density
        missing = -torch.expm1(-w) @ density
        total += float((g * torch.exp((N - 1) * torch.log1p(-missing.clamp(max=1)))).nan_to_num(0).sum())
    return N * total * STEP


def expected_largest(N: int, s: float) -> float:
    """E max a of the softmax of N iid logits of standard deviation s.

    >>> round(expected_largest(512, 1.0), 4), round(expected_largest(512, 8.0), 4)
    (0.0266, 0.7285)
    """
    _check(N, s)
    cells = ceil(2 * REACH * max(1.0, s) / 0.5)
    x, weights, running = _cells(cells)
    density = torch.exp(-x.square() / 2) / sqrt(2 * torch.pi)
    above = torch.special.ndtr(-x)
    total = 0.0
    for tau in _taus(N, s).split(64):
        w = torch.exp(tau[:, None, None] + s * x)
        inside = density * -torch.expm1(-w)
        before = (inside * weights).sum(-1).cumsum(-1) - (inside * weights).sum(-1)
        missing = above + before[..., None] + inside @ running.mT
        each = density * (w * torch.exp(-w)).nan_to_num(0)
        total += float((each * weights * torch.exp((N - 1) * torch.log1p(-missing.clamp(max=1)))).nan_to_num(0).sum())
    return N * total * STEP


def poisson_dirichlet_square_sum(c: float) -> float:
    """lim E Σ a² at s = c √(2 ln N): 1 − 1/c above the threshold, 0 below it."""
    return max(0.0, 1 - 1 / c)


def poisson_dirichlet_largest(c: float) -> float:
    """lim E max a at s = c √(2 ln N), 0 for c ≤ 1.

    >>> round(poisson_dirichlet_largest(2.0), 4), round(poisson_dirichlet_largest(4.0), 4)
    (0.6265, 0.8213)
    """
    if not c > 1:
        return 0.0
    alpha = 1 / c
    y, dy = _grid(-5.0, 7.0, 1 / 64)
    u = torch.exp(y - torch.exp(-y))  # clusters nodes at 0, where u^α is not smooth
    order = torch.tensor(1 - alpha, dtype=torch.float64)
    context = u**alpha * exp(lgamma(1 - alpha)) * torch.special.gammainc(order, u)
    slope = u * (1 + torch.exp(-y))
    return float((torch.exp(-u) / (torch.exp(-u) + context) * slope).sum() * dy)


def _check(N: int, s: float) -> None:
    if not isinstance(N, int) or N < 1:
        raise ValueError(f"N: expected the number of logits, an integer ≥ 1, got {N!r}.")
    if not s >= 0:
        raise ValueError(f"s: expected a standard deviation ≥ 0, got {s!r}.")


def _grid(start: float, stop: float, step: float) -> tuple[Tensor, float]:
    points = ceil((stop - start) / step)
    return torch.linspace(start, stop, points + 1, dtype=torch.float64), (stop - start) / points


def _taus(N: int, s: float) -> Tensor:
    """A grid for τ ≈ −ln Z, which lies between the values for one term and for N terms."""
    low, high = -(log(N) + s * s / 2 + REACH * s + 40), REACH * s + 10
    return torch.arange(low, high, STEP, dtype=torch.float64)


def _cells(cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes (cells, CELL) on [−REACH, REACH], their weights, and the matrix that integrates from a cell's start."""
    nodes, weights = _gauss_legendre(CELL)
    half = REACH / cells
    starts = -REACH + 2 * half * torch.arange(cells, dtype=torch.float64)
    powers = torch.arange(CELL, dtype=torch.float64)
    values = nodes[:, None] ** powers
    integrals = (nodes[:, None] ** (powers + 1) - (-1.0) ** (powers + 1)) / (powers + 1)
    running = torch.linalg.solve(values.mT, integrals.mT).mT
    return starts[:, None] + half * (nodes + 1), half * weights, half * running


def _gauss_legendre(points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights from the eigenvalues of the Jacobi matrix (Golub & Welsch 1969)."""
    k = torch.arange(1, points, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()
