"""2.2.4: the variances of TrigRF, FAVOR+, FAVOR++ and FAVOR#."""

from __future__ import annotations

from math import e, exp, log, pi, sqrt
from typing import Literal

import torch

from heedful.mechanisms import Linear, Softmax
from heedful.patterns import Full
from heedful.random_features import (
    FavorPlus,
    FavorPlusPlus,
    FavorSharp,
    Fit,
    Moments,
    Trig,
    best_A,
    fit_gerf,
    fit_sderf,
    objective,
)
from heedful.theory.chapters.fixed_and_efficient.draws import (
    DRAWS,
    along,
    estimates,
    pair,
    spread_and_error,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    agrees,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
)
from heedful.theory.closed_forms import (
    variance_favor_plus,
    variance_gerf,
    variance_sderf,
    variance_trig,
)
from heedful.theory.samples import mean_and_error

# ── R003-var-Trig: the variance of trigonometric features is high


def trig_is_worse(cosine: float) -> Evidence:
    """Against FAVOR+ at ‖x‖² = ‖y‖² = 4; the closed form against 20,000 draws at ‖x‖² = ‖y‖² = 1."""
    x, y = pair(4.0, cosine, 4)
    ratio = float(variance_trig(x, y, 1) / variance_favor_plus(x, y, 1))
    x, y = pair(1.0, cosine, 4)
    phi = Trig(4, 1, orthogonal=False, scale=1.0, heads=DRAWS)
    found, error = spread_and_error(estimates(phi, x, y), exp(float(x @ y)))
    return evidence(
        at_least("variance over that of FAVOR+", ratio, 1),
        agrees("m Var by draws", found, variance_trig(x, y, 1), error=error),
    )


def variances_by_angle() -> Figure:
    angles = [pi * i / 60 for i in range(61)]
    cosines = [float(torch.tensor(a, dtype=torch.float64).cos()) for a in angles]
    lines = {}
    for name, variance in (("trigonometric", variance_trig), ("FAVOR+", variance_favor_plus)):
        values = [float(variance(*pair(2.0, c, 4), 1)) for c in cosines]
        shown = [(c, v) for c, v in zip(cosines, values, strict=True) if v > 1e-6]
        lines[name] = ([c for c, _ in shown], [v for _, v in shown])
    return Figure(
        Text("m Var of the estimators at ‖x‖² = ‖y‖² = 2", "‖x‖² = ‖y‖² = 2 时各估计量的 m·Var"),
        "cos(x, y)",
        "m Var",
        lines,
        log_y=True,
    )


TRIG = Claim(
    id="R003-var-Trig",
    section="2.2.4",
    kind="statistical",
    statement=Text(
        "Trigonometric features (TrigRF) have a high, unstable variance.", "TrigRF（正弦/余弦特征）：方差高，不稳定。"
    ),
    formula=r"m\operatorname{Var}=\frac12e^{\|x\|^2+\|y\|^2}\left(1-e^{-\|x-y\|^2}\right)^2",
    check=trig_is_worse,
    case=Case("cos(x, y) = −0.5", -0.5),
    control=Case("cos(x, y) = 0.5", 0.5),
    first="conditional",
    condition=Text(
        "Where the kernel is small, xᵀy < 0, which is what breaks normalisers. Where xᵀy > 0 it is lower than that of "
        "FAVOR+, and 0 at x = y.",
        "在核值小处（xᵀy < 0）成立，这正是破坏归一化之处。xᵀy > 0 时它反而低于 FAVOR+，在 x = y 处为 0。",
    ),
    figure=variances_by_angle,
)


# ── R003-var-FAVOR+: stable, but of higher variance


def stable_but_higher(size: float) -> Evidence:
    """Outputs of 256 features against softmax (N = 128, d = 16, entries of q and k of this size); variances."""
    generator = torch.Generator().manual_seed(0)
    gains = []
    for seed in range(16):
        q, k, v = torch.randn(3, 128, 16, generator=generator, dtype=torch.float64).unbind()
        q, k = size * q, size * k
        exact, found = (attend(q, k, v) for attend in (Softmax(Full()), Linear(FavorPlus(16, 256, seed), Full())))
        average = v.mean(-2).expand_as(exact)
        gains.append(float(((average - exact).norm() - (found - exact).norm()) / exact.norm()))
    gain, error = mean_and_error(torch.tensor(gains, dtype=torch.float64))
    x, y = along(1.0, 4)
    spread, noise = spread_and_error(
        estimates(FavorPlus(4, 1, orthogonal=False, scale=1.0, heads=4 * DRAWS), x, y), exp(0.25)
    )
    better = variance_gerf(best_A(torch.tensor(1.0 / 4)), x, y, 1)
    return evidence(
        surely_above("error of plain averaging less that of FAVOR+, relative", gain, 0, error=error),
        agrees("m Var at ‖z‖² = 1 by draws", spread, variance_favor_plus(x, y, 1), error=noise),
        at_least("variance over that of GERF", variance_favor_plus(x, y, 1) / better, 1),
    )


FAVOR_PLUS = Claim(
    id="R003-var-FAVOR+",
    section="2.2.4",
    kind="statistical",
    statement=Text(
        "FAVOR+ (positive exponential features) is stable, but its variance is rather high.",
        "FAVOR+（正指数特征）：稳定但方差较高。",
    ),
    formula=r"m\operatorname{Var}=e^{2x^\top y}\left(e^{\|x+y\|^2}-1\right)",
    check=stable_but_higher,
    case=Case("entries of q and k of size 0.35: ‖z‖² ≈ 1", 0.35),
    control=Case("entries of size 1, scores of unit variance: ‖z‖² ≈ 8", 1.0),
    first="conditional",
    condition=Text(
        "m ≫ e^{‖x+y‖²}: the relative variance is (e^{‖z‖²} − 1)/m. With scores of unit variance (d = 16) and 256 "
        "features the outputs are further from softmax than the plain average of the values.",
        "m ≫ e^{‖x+y‖²}：相对方差为 (e^{‖z‖²} − 1)/m。当分数方差为 1（d = 16）且 m = 256 时，其输出比直接取 V 的平均离 "
        "softmax 还远。",
    ),
)


# ── R003-var-GERF: FAVOR++ lowers the variance e² to e³ times


def log_gain(z2: float, d: int, axes: Literal["all", "z"]) -> float:
    """ln of FAVOR+'s variance over that of GERF with the best A for this pair, or of SDERF with an A along z alone."""
    x, y = along(z2, d)
    if axes == "all":
        better = variance_gerf(best_A(torch.tensor(z2 / d, dtype=torch.float64)), x, y, 1)
    else:
        better = variance_sderf(best_A((x + y).square()), x, y, 1)
    return float((variance_favor_plus(x, y, 1) / better).log())


def gain_in_range(z2: float) -> Evidence:
    """At d = 64; and the closed form against draws at d = 4, ‖z‖² = 1."""
    x, y = along(1.0, 4)
    A = best_A(torch.tensor(0.25, dtype=torch.float64))
    phi = FavorPlusPlus(4, 1, orthogonal=False, scale=1.0, heads=4 * DRAWS, A=float(A))
    found, error = spread_and_error(estimates(phi, x, y), exp(0.25))
    gain = log_gain(z2, 64, "all")
    return evidence(
        at_least("ln gain at d = 64", gain, 2),
        at_most("ln gain at d = 64", gain, 3),
        agrees("m Var by draws", found, variance_gerf(A, x, y, 1), error=error),
    )


def gains() -> Figure:
    z2 = [0.5 * i for i in range(1, 51)]
    lines = {f"GERF, d = {d}": (z2, [log_gain(x, d, "all") for x in z2]) for d in (16, 64)}
    lines["SDERF, along z"] = (z2, [log_gain(x, 4, "z") for x in z2])
    return Figure(
        Text("How many times smaller than FAVOR+'s the variance is", "方差比 FAVOR+ 缩小的倍数"),
        "‖x + y‖²",
        "ln",
        lines,
    )


def gain_by_length(factor: float) -> Evidence:
    """ln gains at d = 64 against the minimum of E f²f'² over A, where r = 1/(1 − 8A)."""
    d, comparisons = 64, []
    for z2 in (1.0, 4.0, 9.0, 16.0, 25.0):
        r = (sqrt((2 * z2 + d) ** 2 + 8 * d * z2) - 2 * z2 - d) / (4 * z2)
        # over e^{2xᵀy}, where ‖x‖² + ‖y‖² + 2xᵀy = ‖z‖²
        second = ((1 + r) / 2) ** d * r ** (-factor * d / 2) * exp(r * z2)
        expected = log((exp(z2) - 1) / abs(second - 1))
        comparisons.append(equal(f"ln gain at ‖z‖² = {z2:g}", log_gain(z2, d, "all"), expected, within=1e-6))
    return evidence(*comparisons)


GERF = Claim(
    id="R003-var-GERF",
    section="2.2.4",
    kind="statistical",
    statement=Text("FAVOR++ (GERF) has e² to e³ times less variance.", "FAVOR++（GERF）：方差降低 e²–e³ 倍。"),
    check=gain_in_range,
    case=Case("‖x + y‖² = 11", 11.0),
    control=Case("‖x + y‖² = 4", 4.0),
    first="conditional",
    condition=Text(
        "‖x + y‖² between 9.9 and 12.7 (d = 64), or between 5.8 and 7.7 (d = 16); the gain depends on both: at d = 64 "
        "e^0.05, e^0.4, e^1.7, e^4.4, e^8.8 at ‖z‖² = 1, 4, 9, 16, 25.",
        "‖x+y‖² 在 9.9 与 12.7 之间（d = 64）或 5.8 与 7.7 之间（d = 16）；收益取决于二者：d = 64 时，‖z‖² = 1、4、9、"
        "16、25 处分别为 e^0.05、e^0.4、e^1.7、e^4.4、e^8.8。",
    ),
    corrected=Claim(
        id="R003-var-GERF*",
        section="2.2.4",
        kind="exact",
        statement=Text(
            "With the best A for a pair, the second moment over e^{2xᵀy} is ((1+r)/2)^d r^{−d/2} e^{r‖z‖²}, and the "
            "gain grows with ‖z‖² and falls with d.",
            "对给定的一对取最优 A 时，二阶矩除以 e^{2xᵀy} 为 ((1+r)/2)^d r^{−d/2} e^{r‖z‖²}；收益随 ‖z‖² 增大，"
            "随 d 减小。",
        ),
        formula=r"\left(\frac{1+r}2\right)^dr^{-d/2}e^{r\|z\|^2},\qquad "
        r"r=\frac{\sqrt{(2\|z\|^2+d)^2+8d\|z\|^2}-2\|z\|^2-d}{4\|z\|^2}",
        check=gain_by_length,
        case=Case("r^{−d/2}", 1.0),
        control=Case("r^{−d}", 2.0),
    ),
    figure=gains,
)


# ── R003-var-SDERF: FAVOR# lowers it up to e¹⁰ times


def gain_on_data(decay: float) -> Evidence:
    """Mean ln second moment of FAVOR+ less that of SDERF fitted to 4096 pairs, d = 64, E‖x + y‖² = 16."""
    spectrum = torch.exp(-decay * torch.arange(64, dtype=torch.float64))
    size = (8 * spectrum / spectrum.sum()).sqrt()
    x, y = torch.randn(2, 4096, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * size
    moments, unit = Moments.of(x, y), torch.eye(64, dtype=torch.float64)
    plain = objective(moments, Fit(torch.zeros(64, dtype=torch.float64), unit, unit))
    one, each = (float(plain - objective(moments, fit(moments))) for fit in (fit_gerf, fit_sderf))
    return evidence(
        at_least("ln gain of SDERF over FAVOR+", each, 10), note=f"GERF, with one A for all axes: {one:.3g}"
    )


def no_limit(fitted: bool) -> Evidence:
    """A along z alone: ln gain at ‖z‖² = 25; second moment at 36 against √(e‖z‖²/2); the closed form against draws."""
    x, y = along(25.0, 4)
    A = best_A((x + y).square()) * fitted
    gain = float((variance_favor_plus(x, y, 1) / variance_sderf(A, x, y, 1)).log())
    x, y = along(36.0, 4)
    A = best_A((x + y).square()) * fitted
    second = float(variance_sderf(A, x, y, 1) / exp(2 * float(x @ y))) + 1
    x, y = along(2.0, 4)
    phi = FavorSharp(4, 1, orthogonal=False, scale=1.0, heads=4 * DRAWS)
    A = best_A((x + y).square()) * fitted
    phi.A.copy_(A)
    found, error = spread_and_error(estimates(phi, x, y), exp(0.5))
    return evidence(
        at_least("ln gain at ‖z‖² = 25", gain, 23),
        equal("second moment over √(e‖z‖²/2) at ‖z‖² = 36", second / sqrt(e * 18), 1, within=0.02),
        agrees("m Var by draws at ‖z‖² = 2", found, variance_sderf(A, x, y, 1), error=error),
    )


SDERF = Claim(
    id="R003-var-SDERF",
    section="2.2.4",
    kind="statistical",
    statement=Text(
        "FAVOR# (SDERF, ADERF) has up to e¹⁰ times less variance.", "FAVOR#（SDERF/ADERF）：方差降低达 e¹⁰ 倍。"
    ),
    check=gain_on_data,
    case=Case("a spectrum that falls by e^-1/2 from axis to axis", 0.5),
    control=Case("the same in all directions", 0.0),
    first="conditional",
    condition=Text(
        "Queries and keys vary along few directions: on data alike in all of 64 directions it gains e^4.4, no more "
        "than GERF.",
        "查询与键集中在少数方向上：若数据在 64 个方向上各向同性，收益仅为 e^4.4，不超过 GERF。",
    ),
    corrected=Claim(
        id="R003-var-SDERF*",
        section="2.2.4",
        kind="statistical",
        statement=Text(
            "For a single pair there is no limit: with A along z alone the second moment over e^{2xᵀy} tends to "
            "√(e‖z‖²/2), instead of e^{‖z‖²}; the gain is e^10 at ‖z‖² = 11.1 and e^23 at 25.",
            "对单独一对则没有上限：A 只取 z 方向时，二阶矩除以 e^{2xᵀy} 趋于 √(e‖z‖²/2)，而不是 e^{‖z‖²}；收益在 "
            "‖z‖² = 11.1 处为 e^10，25 处为 e^23。",
        ),
        formula=r"\frac{\mathbb E f^2f'^2}{e^{2x^\top y}}\to\sqrt{\frac{e\|z\|^2}2}",
        check=no_limit,
        case=Case("the best A along z", True),
        control=Case("A = 0, which is FAVOR+", False),
    ),
)

CLAIMS = (TRIG, FAVOR_PLUS, GERF, SDERF)
