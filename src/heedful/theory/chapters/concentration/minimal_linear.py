"""Minimal linear attention: no activation at all, weights q·k."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import torch

from heedful.feature_maps import Identity
from heedful.measures import concentration
from heedful.mechanisms import Linear, no_activation
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory import closed_forms
from heedful.theory.chapters.concentration.samples import gaussian_keys, integrated_S
from heedful.theory.chapters.concentration.two_examples import POINTS, curves, text_relu2
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, equal, evidence

Formula = Callable[[float, float], float]

# ── S002-identity: the closed form


def text_identity(beta: float, gamma: float, constant: float = 2 / pi) -> float:
    """The text's expression, term by term."""
    b, g = torch.tensor([beta, gamma], dtype=torch.float64)
    bell, erf = torch.exp(-(b**2) / (2 * g**2)), torch.erf(b / (sqrt(2) * g))
    return float((sqrt(constant) * g * bell + b * erf) / (b**2 + g**2).sqrt())


def matches_integral(constant: float) -> Evidence:
    """The text's expression and the library's against quadrature of |β + γε|."""
    text, library = 0.0, 0.0
    for beta, gamma in POINTS:
        exact = integrated_S(no_activation, beta, gamma)
        text = max(text, abs(text_identity(beta, gamma, constant) / exact - 1))
        library = max(library, abs(float(closed_forms.S_identity(beta, gamma)) / exact - 1))
    return evidence(
        at_most("largest relative error of the expression", text, 1e-12),
        at_most("largest relative error of closed_forms.S_identity", library, 1e-12),
    )


def identity_curves() -> Figure:
    title = Text("S(a) of linear attention without activation", "极简线性注意力的稀疏程度")
    return curves(closed_forms.S_identity, (0.0, 0.25, 0.5, 1.0, 2.0), title)


IDENTITY = Claim(
    id="S002-identity",
    section="minimal linear",
    kind="exact",
    statement=Text(
        "Without activation, S(a) = [√(2/π) γ exp(−β²/2γ²) + β erf(β/√2γ)] / √(β² + γ²).",
        "f = identical 时，S(a) = [√(2/π) γ exp(−β²/2γ²) + β erf(β/√2γ)] / √(β² + γ²)。",
    ),
    formula=r"S(a)=\frac{\sqrt{\frac2\pi}\,\gamma e^{-\beta^2/2\gamma^2}"
    r"+\beta\operatorname{erf}\left(\frac{\beta}{\sqrt2\gamma}\right)}{\sqrt{\beta^2+\gamma^2}}",
    check=matches_integral,
    case=Case("√(2/π)", 2 / pi),
    control=Case("√(1/π)", 1 / pi),
    figure=identity_curves,
)


# ── S002-identity-even: S is even in β


def even(S: Formula) -> Evidence:
    gap = max(abs(S(b, g) - S(-b, g)) for b in (0.3, 1.0, 2.5) for g in (0.6, 1.0, 2.5))
    return evidence(equal("largest |S(β) − S(−β)|", gap, 0, within=1e-15))


IDENTITY_EVEN = Claim(
    id="S002-identity-even",
    section="minimal linear",
    kind="exact",
    statement=Text("This S(a) is an even function of β.", "此时的 S(a) 是关于 β 的偶函数。"),
    formula=r"S(-\beta,\gamma)=S(\beta,\gamma)",
    check=even,
    case=Case("no activation", text_identity),
    control=Case("relu²", text_relu2),
)


# ── S002-identity-min: S stays above a rather high bound


def bounded_below(S: Callable[[Tensor, float], Tensor]) -> Evidence:
    """The least S over z = β/γ from −8 to 8; near 0 it is √(2/π)(1 + z⁴/12)."""
    z = torch.linspace(-8, 8, 3201, dtype=torch.float64)
    bound = sqrt(2 / pi)
    return evidence(
        at_least("least S over z", S(z, 1.0).min(), bound, slack=1e-15),
        equal("S at β = 0", S(torch.zeros((), dtype=torch.float64), 1.0), bound, within=1e-15),
        equal(
            "(S/√(2/π) − 1)·12/z⁴ at z = 0.05",
            (float(S(torch.tensor(0.05), 1.0)) / bound - 1) * 12 / 0.05**4,
            1,
            within=0.01,
        ),
    )


IDENTITY_MIN = Claim(
    id="S002-identity-min",
    section="minimal linear",
    kind="exact",
    statement=Text(
        "The S of linear attention without activation cannot come near 0: it has a rather high lower bound, √(2/π).",
        "不加任何激活函数的线性 Attention 的稀疏程度并不能接近 0，而是存在一个较高的下限（即 √(2/π)）。",
    ),
    formula=r"\min_{\beta,\gamma}S=\sqrt{\frac2\pi}\approx 0.798",
    check=bounded_below,
    case=Case("no activation", closed_forms.S_identity),
    control=Case("relu²", closed_forms.S_relu2),
)


# ── S002-identity-nofocus: it cannot concentrate in long sequences


def spreads_over_all(keys: Callable[[int], tuple[Tensor, Tensor]]) -> Evidence:
    """The share of n keys that take part, n = 256 and 16,384; for Gaussian keys at least 2/π = 0.637 in the limit."""
    attend = Linear(Identity(), Full(), normalise=False)
    shares = {n: concentration(attend.operator(*keys(n))).participation.mean() / n for n in (256, 16_384)}
    return evidence(*(at_least(f"share of {n} keys that take part", share, 0.6) for n, share in shares.items()))


def gaussian(n: int) -> tuple[Tensor, Tensor]:
    return gaussian_keys(n, 0.3, 1.0, repeats=16, seed=n)


def one_alike(n: int) -> tuple[Tensor, Tensor]:
    """One key along q, all others across it."""
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[0.0, 1.0]], dtype=torch.float64).repeat(n, 1)
    k[n // 3] = q[0]
    return q, k


IDENTITY_NO_FOCUS = Claim(
    id="S002-identity-nofocus",
    section="minimal linear",
    kind="statistical",
    statement=Text(
        "In a long sequence such linear attention has no way to concentrate on the key positions.",
        "当输入序列足够长时，这种线性 Attention 并没有办法“集中注意力”到关键位置上。",
    ),
    formula=r"\frac{(\sum_j|a_j|)^2}{\sum_j a_j^2}\ge\frac{2}{\pi}n\quad(n\to\infty)",
    check=spreads_over_all,
    case=Case("Gaussian keys", gaussian),
    control=Case("one key along q, the others across it: one-hot at any length", one_alike),
    first="conditional",
    condition=Text(
        "Keys are isotropic Gaussian. A key along q among keys across it takes all the weight at any length.",
        "key 服从各向同性的高斯分布。若只有一个 key 与 q 同向、其余都正交，则任意长度都是 one-hot。",
    ),
)

CLAIMS = (IDENTITY, IDENTITY_EVEN, IDENTITY_MIN, IDENTITY_NO_FOCUS)
