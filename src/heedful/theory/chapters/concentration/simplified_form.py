"""Simplified form: S(a) as a ratio of moments over the keys, and for Gaussian keys of one-dimensional ones."""

from __future__ import annotations

from math import sqrt

import torch

from heedful.mechanisms import Quadratic, no_activation, relu2
from heedful.patterns import Full
from heedful.shapes import Float, Tensor
from heedful.theory import closed_forms
from heedful.theory.chapters.concentration.samples import Activation, sampled
from heedful.theory.claim import Case, Claim, Evidence, Text, agrees, evidence, surely_below
from heedful.theory.samples import mean_and_error

# ── S002-Sa: S(a) = E|f| / √E f² in the limit of many keys


def converges(gamma: float) -> Evidence:
    """Mean S of 64 rows over 16,384 keys against the ratio of moments, for three activations."""
    beta, n = 0.5, 16_384
    limits: list[tuple[str, Activation, Tensor]] = [
        ("exp", torch.exp, closed_forms.S_exp(gamma)),
        ("relu²", relu2, closed_forms.S_relu2(beta, gamma)),
        ("no activation", no_activation, closed_forms.S_identity(beta, gamma)),
    ]
    found = []
    for seed, (name, f, limit) in enumerate(limits):
        mean, error = mean_and_error(sampled(f, n, beta, gamma, repeats=64, seed=seed).rows)
        gap = abs(mean / float(limit) - 1)
        found.append(surely_below(f"relative gap, {name}", gap, 0.02, error=error / float(limit)))
    return evidence(*found, note=f"n = {n}, γ = {gamma:g}; √(ln n / 2) = 2.2")


RATIO_OF_MOMENTS = Claim(
    id="S002-Sa",
    section="simplified form",
    kind="asymptotic",
    statement=Text(
        "For weights a_j ∝ f(q·k_j), S(a) = E|f(q·k)| / √E f²(q·k) over the keys, as n → ∞.",
        "a_j ∝ f(q·k_j) 时，S(a) = E_k|f(q·k)| / √E_k[f²(q·k)]，考虑 n→∞ 的极限。",
    ),
    formula=r"S(a)=\frac{\mathbb E_k|f(q\cdot k)|}{\sqrt{\mathbb E_k[f^2(q\cdot k)]}}",
    check=converges,
    case=Case("γ = 1", 1.0),
    control=Case("γ = 3 at the same n", 3.0),
    first="conditional",
    condition=Text(
        "A law of large numbers at fixed q. For n keys E f² must not be dominated by its largest term: for exp, "
        "σ‖q‖ < √(ln n / 2).",
        "这是固定 q 时的大数定律。对 n 个 key，E f² 不能由最大一项主导：f = exp 时要求 σ‖q‖ < √(ln n / 2)。",
    ),
)


# ── S002-reduce: only q·μ and σ‖q‖ matter


def scores_are_one_dimensional(spread: Float[Tensor, " d"]) -> Evidence:
    """Mean and standard deviation of q·k, k = μ + spread∘ε, against β = q·μ and γ = σ‖q‖ with σ² the mean variance."""
    generator = torch.Generator().manual_seed(0)
    q, mu = torch.randn(2, 6, generator=generator, dtype=torch.float64).unbind()
    beta, gamma = float(q @ mu), float(spread.square().mean().sqrt() * q.norm())
    k = mu + spread * torch.randn(64, 4096, 6, generator=generator, dtype=torch.float64)
    scores = Quadratic(no_activation, Full(), scale=1.0, normalise=None).matrix(q[None], k)
    mean, mean_error = mean_and_error(scores.mean((-2, -1)))
    square, square_error = mean_and_error((scores - beta).square().mean((-2, -1)))
    return evidence(
        agrees("mean of q·k", mean, beta, error=mean_error),
        agrees("standard deviation of q·k", sqrt(square), gamma, error=square_error / (2 * gamma)),
    )


REDUCTION = Claim(
    id="S002-reduce",
    section="simplified form",
    kind="statistical",
    statement=Text(
        "For k ~ N(μ, σ²I) the expectation depends on q only by q·μ and σ‖q‖: it is over one Gaussian number.",
        "k ~ N(μ, σ²I) 时，由于各向同性，期望只与 q·μ 和 σ‖q‖ 有关，化为对一个标量 ε ~ N(0, 1) 的期望。",
    ),
    formula=r"q\cdot k\sim\mathcal N(q\cdot\mu,\ \sigma^2\|q\|^2)",
    check=scores_are_one_dimensional,
    case=Case("equal spread in all directions", torch.full((6,), 0.7, dtype=torch.float64)),
    control=Case("spread 0.2 in some directions, 1.2 in others", torch.tensor([0.2, 1.2] * 3, dtype=torch.float64)),
)

CLAIMS = (RATIO_OF_MOMENTS, REDUCTION)
