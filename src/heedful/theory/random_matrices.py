"""Random projections and random matrices."""

from __future__ import annotations

from math import atan, ceil, cos, log, pi, sin, sqrt, tan


def johnson_lindenstrauss_dimension(points: int, eps: float, power: float = 0.0) -> int:
    """k ≥ (4 + 2b) ln n / (ε²/2 − ε³/3): enough dimensions to preserve all squared distances of n points within 1 ± ε.

    >>> [johnson_lindenstrauss_dimension(512, eps) for eps in (0.1, 0.2, 0.3, 0.5)]
    [5348, 1440, 694, 300]

    A random projection on k dimensions, scaled by √(d/k), fails for one pair with probability at most
    2e^{−k(ε²/2 − ε³/3)/2}, so for any of the n(n−1)/2 pairs with probability less than n^{−b}. With b = 0 a good
    projection exists; a larger `power` b makes it likely (Dasgupta & Gupta 2003, Random Struct. Alg. 22). Inner
    products are preserved up to an absolute error ε‖x‖‖y‖, not up to a factor.
    """
    if not isinstance(points, int) or points < 1:
        raise ValueError(f"points: expected an integer ≥ 1, got {points!r}.")
    if not 0 < eps < 1:
        raise ValueError(f"eps: expected a distortion in (0, 1), got {eps}.")
    if not power >= 0:
        raise ValueError(f"power: expected b ≥ 0 of a failure probability n^-b, got {power}.")
    return ceil((4 + 2 * power) * log(points) / (eps**2 / 2 - eps**3 / 3))


def marchenko_pastur_share(fraction: float, aspect: float = 1.0) -> float:
    """The share of Σσ² in the top fraction of singular values of a large matrix of iid entries with mean 0.

    >>> round(marchenko_pastur_share(0.1), 4)
    0.3136

    aspect   smaller over larger side, y in (0, 1]; the fraction is of the smaller side's singular values

    Eigenvalues x = σ²/n have the density √((b−x)(x−a)) / (2πyx) on [(1−√y)², (1+√y)²] (Marchenko & Pastur 1967). With
    x = 1 + y + 2√y cos θ, the eigenvalues above x have

        share   (θ − sin θ cos θ) / π
        count   (2/π) ∫₀^θ sin²t / (1 + y + 2√y cos t) dt
                = (2/π) [(1+y)θ/4y − sin θ/2√y − (1−y)/2y · atan((1−√y)/(1+√y) · tan(θ/2))]
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: expected a part of the singular values, 0 to 1, got {fraction}.")
    if not 0 < aspect <= 1:
        raise ValueError(f"aspect: expected smaller over larger side, in (0, 1], got {aspect}. Likely cause: inverted.")
    low, high = 0.0, pi
    for _ in range(60):  # bisection: the count grows with θ
        middle = (low + high) / 2
        low, high = (middle, high) if _count_above(middle, aspect) < fraction else (low, middle)
    return (low - sin(low) * cos(low)) / pi if fraction < 1 else 1.0


def _count_above(theta: float, y: float) -> float:
    root = sqrt(y)
    if y >= 0.01:
        turn = atan((1 - root) / (1 + root) * tan(theta / 2))
        return 2 / pi * ((1 + y) * theta / (4 * y) - sin(theta) / (2 * root) - (1 - y) / (2 * y) * turn)
    # Terms of size 1/y would cancel. With r = √y: sin²t / |1 + r e^{it}|² and Σ (−r)^k cos kt = Re 1/(1 + r e^{it}), so
    # 1/(1 + y + 2r cos t) = (1 + 2 Σ_{k≥1} (−r)^k cos kt) / (1 − y), and r ≤ 0.1.
    total = (theta - sin(theta) * cos(theta)) / 2
    for k in range(1, 24):
        total += 2 * (-root) ** k * _sin2_cos(theta, k)
    return 2 / pi * total / (1 - y)


def _sin2_cos(theta: float, k: int) -> float:
    """∫₀^θ sin²t cos kt dt = ½ ∫ cos kt − ¼ ∫ cos (k+2)t − ¼ ∫ cos (k−2)t."""

    def whole(p: int) -> float:
        return theta if p == 0 else sin(p * theta) / p

    return whole(k) / 2 - whole(k + 2) / 4 - whole(k - 2) / 4
