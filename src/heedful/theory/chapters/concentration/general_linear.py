"""General linear attention: non-negative features, their mean and their covariance."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import torch

from heedful.feature_maps import Elu1
from heedful.measures import concentration
from heedful.mechanisms import FixedPattern, Linear, Quadratic, TruncatedSVD
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory import closed_forms
from heedful.theory.chapters.concentration.samples import gaussian_keys, of_row
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, evidence

# ── S002-nonneg: S from the mean and the covariance of the features


def matches_moments(correction: int) -> Evidence:
    """Rows of linear attention (elu + 1) over 64 keys against the formula with the moments of those very keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 8, generator=generator, dtype=torch.float64).unbind()
    features = Elu1().key(k)
    covariance = torch.cov(features.mT, correction=correction)
    formula = closed_forms.S_nonnegative(
        Elu1().query(q), features.mean(0).expand(64, -1), covariance.expand(64, -1, -1)
    )
    rows = concentration(Linear(Elu1(), Full()).operator(q, k)).rows
    return evidence(at_most("largest |S − formula| of 64 rows", (rows - formula).abs().max(), 1e-13))


NONNEGATIVE = Claim(
    id="S002-nonneg",
    section="general linear",
    kind="exact",
    statement=Text(
        "For non-negative features with mean μ̃ and covariance Σ̃, S(a) = 1/√(1 + q̃ᵀΣ̃q̃/(q̃ᵀμ̃)²), without approximation.",
        "非负型线性 Attention：S(a) = 1/√(1 + q̃ᵀΣ̃q̃/(q̃ᵀμ̃)²)，其中 μ̃、Σ̃ 是 k̃ 序列的均值向量和协方差矩阵，没有任何近似。",
    ),
    formula=r"S(a)=\left(1+\frac{\tilde q^\top\tilde\Sigma\tilde q}{(\tilde q^\top\tilde\mu)^2}\right)^{-1/2}",
    check=matches_moments,
    case=Case("covariance over n", 0),
    control=Case("covariance over n − 1", 1),
)


# ── S002-nonneg-sparse: as sparse as one likes, if the mean vanishes or the covariance grows


def becomes_sparse(features: Callable[[float], Tensor]) -> Evidence:
    """S of 10,000 weights as their mean falls from 0.1 to 0.001; features that are 1 with probability p have S = √p."""
    falling = [float(of_row(features(p)).rows[0]) for p in (0.1, 0.01, 0.001)]
    return evidence(
        *(
            at_most(f"S at mean {p:g}", S, sqrt(p), slack=1e-12)
            for p, S in zip((0.1, 0.01, 0.001), falling, strict=True)
        )
    )


def rare(p: float) -> Tensor:
    """1 in a share p of places, 0 elsewhere: the mean falls, the ratio of spread to mean grows."""
    return (torch.arange(10_000) < round(10_000 * p)).double()


def faint(p: float) -> Tensor:
    """The mean falls, and the spread with it."""
    return 10 * p * rare(0.1)


NONNEGATIVE_SPARSE = Claim(
    id="S002-nonneg-sparse",
    section="general linear",
    kind="exact",
    statement=Text(
        "Non-negative linear attention too can be as sparse as one likes: it takes a mean that tends to 0 or a "
        "covariance that tends to ∞, that is a small signal-to-noise ratio of the features.",
        "非负型线性 Attention 也可能任意稀疏，只需要均值趋于 0，或者协方差趋于 ∞，即 k̃ 序列的信噪比尽可能小。",
    ),
    formula=r"\frac{\mu}{\sigma}\to0\ \Rightarrow\ S=\left(1+\frac{\sigma^2}{\mu^2}\right)^{-1/2}\to0",
    check=becomes_sparse,
    case=Case("features that are seldom 1", rare),
    control=Case("features whose spread shrinks with their mean", faint),
)


# ── S002-nonneg-snr: a small signal-to-noise ratio means that most entries are close to each other


def mostly_alike(within: Callable[[Tensor], Tensor]) -> Evidence:
    """Of 16,384 non-negative weights with a mean of 0.065 spreads, the share that is close to their median."""
    q, k = gaussian_keys(16_384, 0.0, 3.0, repeats=1, seed=0)
    x = Quadratic(torch.exp, Full(), scale=1.0, normalise="l1").matrix(q, k)[0, 0]
    ratio = float(x.mean() / x.std())
    return evidence(
        at_most("mean / spread", ratio, 0.1),
        at_least("share of entries close to the median", within(x).double().mean(), 1 - 5 * ratio),
        note="Markov: P(x > σ/5) ≤ 5 μ/σ",
    )


def relative_to_spread(x: Tensor) -> Tensor:
    return (x - x.median()).abs() <= 0.2 * x.std()


def relative_to_itself(x: Tensor) -> Tensor:
    return (x / x.median()).log().abs() <= log(2)


NONNEGATIVE_SNR = Claim(
    id="S002-nonneg-snr",
    section="general linear",
    kind="exact",
    statement=Text(
        "In a non-negative sequence with a small signal-to-noise ratio most entries are close to each other.",
        "信噪比很小的非负序列意味着序列中大部分元素都是相近的，于是这样的序列能表达的信息有限。",
    ),
    formula=r"P(x>\delta\sigma)\le\frac{\mu}{\delta\sigma}",
    check=mostly_alike,
    case=Case("within 0.2 σ", relative_to_spread),
    control=Case("within a factor of 2", relative_to_itself),
    first="conditional",
    condition=Text(
        "“Close” means small beside σ (Markov's inequality); in ratio the entries may differ by orders of magnitude.",
        "“相近”是相对 σ 而言（马尔可夫不等式）；按比值看，元素之间可以相差几个数量级。",
    ),
    reason=Text(
        "That such a sequence carries little information is not decided: softmax weights at γ = 3 are such a sequence, "
        "and their order is that of the scores.",
        "“能表达的信息有限”未判定：γ = 3 的 softmax 权重正是这样的序列，其大小次序与分数完全一致。",
    ),
)


# ── S002-nonneg-abs: only the importance of absolute positions


def misses_relative_positions(r: int) -> Evidence:
    """Error of the best matrix of rank r, on which r features have no grip beyond: previous token, and one column."""
    x = torch.ones(16, 1, dtype=torch.float64)
    errors = {}
    for kind in ("previous", "start"):
        pattern = FixedPattern(kind)
        exact = pattern.matrix(x, x)
        errors[kind] = float((TruncatedSVD(r, pattern).matrix(x, x) - exact).norm() / exact.norm())
    return evidence(
        at_least(f"previous token, N = 16: error of {r} features", errors["previous"], 0.5),
        at_most(f"the same row for all: error of {r} features", errors["start"], 1e-12),
    )


NONNEGATIVE_ABSOLUTE = Claim(
    id="S002-nonneg-abs",
    section="general linear",
    kind="exact",
    statement=Text(
        "Linear attention can usually express the importance of absolute positions only (a column of ones), and not "
        "well that of relative ones, which is its low-rank bottleneck.",
        "线性 Attention 通常只能表示绝对位置的重要性（比如 Attention 矩阵某一列都是 1），"
        "而无法很好地表达相对位置的重要性，这本质上也是线性 Attention 低秩瓶颈的体现。",
    ),
    formula=r"\min_{\operatorname{rank}B\le r}\frac{\|P-B\|_F}{\|P\|_F}=\sqrt{1-\frac rN},"
    r"\quad P\ \text{a permutation}",
    check=misses_relative_positions,
    case=Case("4 features", 4),
    control=Case("16 features, as many as tokens", 16),
    first="conditional",
    condition=Text(
        "Fewer features than tokens, r < N: with r ≥ N one-hot features of the positions give any pattern exactly.",
        "特征数少于 token 数（r < N）：r ≥ N 时用位置的 one-hot 特征即可精确表示任意模式。",
    ),
)

CLAIMS = (NONNEGATIVE, NONNEGATIVE_SPARSE, NONNEGATIVE_SNR, NONNEGATIVE_ABSOLUTE)
