"""5.1.4: the dot product as a score, its variance, and the factor 1/√d_k."""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import torch

from heedful.mechanisms import Softmax
from heedful.nn import Attention
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import (
    EPS,
    exponent,
    exponent_and_error,
    project,
    scores,
    variance_and_error,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Comparison,
    Evidence,
    Figure,
    Text,
    agrees,
    at_least,
    at_most,
    evidence,
    surely_above,
    surely_below,
)
from heedful.theory.samples import mean_and_error, normal, seeded

SIGMA = 1.3  # standard deviation of the components; not 1, so that σ² and σ⁴ differ

# ── E5.1.3: the score is a sum over components


def sums_components(left_out: int) -> Evidence:
    q, k = normal(2, 20, 16, seed=0).unbind()
    kept = 16 - left_out
    by_components = sum(torch.outer(q[:, m], k[:, m]) for m in range(kept))
    return evidence(at_most("largest |QKᵀ − Σ q_m k_m|", (scores(q, k) - by_components).abs().max(), 16 * 16 * EPS))


E5_1_3 = Claim(
    id="E5.1.3",
    section="5.1.4",
    kind="exact",
    statement=Text(
        "(QKᵀ)_ij is the dot product of q_i and k_j, the sum of the products of their components.",
        "(QKᵀ)_ij = q_i·k_j，即各对应分量乘积之和。",
    ),
    formula=r"(QK^\top)_{ij}=q_i\cdot k_j=\sum_{m=1}^{d_k}q_{i,m}\,k_{j,m}",
    check=sums_components,
    case=Case("all d_k components", 0),
    control=Case("the last one left out", 1),
)


# ── N5.1.4-contrib: large components in the same place


def raises_the_score(sign: float) -> Evidence:
    """What a component of size s in the same place of q and of k adds to the score."""
    q, k = normal(2, 1, 8, seed=0).unbind()

    def score(size: float) -> Tensor:
        left, right = q.clone(), k.clone()
        left[0, 3], right[0, 3] = size, sign * size
        return scores(left, right)[0, 0]

    return evidence(*(at_least(f"score at size {s} − at 0", score(s) - score(0.0), 0.5) for s in (1.0, 2.0, 3.0)))


N5_1_4_CONTRIB = Claim(
    id="N5.1.4-contrib",
    section="5.1.4",
    kind="exact",
    statement=Text(
        "Where q and k both have a large component in the same place, it adds more to the score.",
        "若 q 与 k 在同一维度上的分量都较大，则它们对点积的贡献就越大。",
    ),
    formula=r"q_mk_m>0\iff \operatorname{sign}q_m=\operatorname{sign}k_m",
    check=raises_the_score,
    case=Case("of the same sign", 1.0),
    control=Case("of opposite signs", -1.0),
    first="conditional",
    condition=Text(
        "The two components have the same sign; 3 · (−3) lowers the score by 9.",
        "两个分量同号；3·(−3) 会使分数降低 9。",
    ),
)


# ── E5.1.4, E5.1.5: mean and variance of q·k

Law = Callable[[int, int, int], Tensor]
Pairing = Callable[[Law, int, int], tuple[Tensor, Tensor]]


def gauss(count: int, d: int, seed: int) -> Tensor:
    return SIGMA * normal(count, d, seed=seed)


def uniform(count: int, d: int, seed: int) -> Tensor:
    return SIGMA * sqrt(12) * (torch.rand(count, d, generator=seeded(seed), dtype=torch.float64) - 0.5)


def signs(count: int, d: int, seed: int) -> Tensor:
    return SIGMA * (2.0 * torch.randint(2, (count, d), generator=seeded(seed)).double() - 1)


LAWS: dict[str, Law] = {"normal": gauss, "uniform": uniform, "random signs": signs}


def independent(law: Law, count: int, d: int) -> tuple[Tensor, Tensor]:
    return law(count, d, 2 * d), law(count, d, 2 * d + 1)


def tied(law: Law, count: int, d: int) -> tuple[Tensor, Tensor]:
    q = law(count, d, 2 * d)
    return q, q


def dot_products(q: Tensor, k: Tensor, scale: float | None = 1.0) -> Tensor:
    """One score for each pair of vectors."""
    return scores(q[:, None], k[:, None], scale)[:, 0, 0]


def product_has_mean_zero(pair: Pairing) -> Evidence:
    def compare(name: str, law: Law) -> Comparison:
        mean, error = mean_and_error(dot_products(*pair(law, 100_000, 1)))
        return agrees(f"mean of q_m k_m, {name}", mean, 0, error=error)

    return evidence(*(compare(name, law) for name, law in LAWS.items()))


E5_1_4 = Claim(
    id="E5.1.4",
    section="5.1.4",
    kind="statistical",
    statement=Text(
        "The product of independent components with mean 0 has mean 0.",
        "独立、零均值的分量之积的期望为 0。",
    ),
    formula=r"\mathbb{E}[q_mk_m]=\mathbb{E}[q_m]\,\mathbb{E}[k_m]=0",
    check=product_has_mean_zero,
    case=Case("q and k independent", independent),
    control=Case("q = k", tied),
)


def variance_is_linear(pair: Pairing) -> Evidence:
    """Var(q·k) over d_k for three laws and three widths, and the exponent of its growth."""
    widths = (16, 64, 256)
    found = []
    for name, law in LAWS.items():
        for d in widths:
            value, error = variance_and_error(dot_products(*pair(law, 10_000, d)))
            found.append(agrees(f"Var(q·k)/d_k, {name}, d_k = {d}", value / d, SIGMA**4, error=error / d))
    normal_ones = found[: len(widths)]
    slope, error = exponent_and_error(
        widths,
        [d * one.measured for d, one in zip(widths, normal_ones, strict=True)],
        [d * (one.noise or 0.0) for d, one in zip(widths, normal_ones, strict=True)],
    )
    return evidence(*found, agrees("exponent of d_k, normal", slope, 1, error=error))


def variance_in_general(of_means: float) -> Evidence:
    """q, k independent with random means and covariances; `of_means` weighs the terms with means."""
    d, count = 16, 100_000
    mean_q, mean_k = 0.5 * normal(2, d, seed=0)
    root_q, root_k = normal(2, d, d, seed=1) / 4
    q = mean_q + normal(count, d, seed=2) @ root_q
    k = mean_k + normal(count, d, seed=3) @ root_k
    cov_q, cov_k = root_q.mT @ root_q, root_k.mT @ root_k
    expected = (cov_q * cov_k).sum() + of_means * (mean_q @ cov_k @ mean_q + mean_k @ cov_q @ mean_k)
    found, error = variance_and_error(dot_products(q, k))
    return evidence(agrees("Var(q·k)", found, expected, error=error))


def variance_against_width() -> Figure:
    widths = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    lines = {}
    for name, scale in (("q·k", 1.0), ("q·k / √d_k", None)):
        lines[name] = (
            widths,
            [float(dot_products(*independent(gauss, 2000, d), scale).var()) / SIGMA**4 for d in widths],
        )
    title = Text("Variance of the scores, in units of σ⁴", "分数的方差（以 σ⁴ 为单位）")
    return Figure(title, "d_k", "variance / σ⁴", lines, log_x=True, log_y=True)


E5_1_5 = Claim(
    id="E5.1.5",
    section="5.1.4",
    kind="statistical",
    statement=Text(
        "If the components of q and k are iid with mean 0 and variance σ², the variance of q·k is d_k σ⁴.",
        "若 q、k 的分量独立同分布、均值为 0、方差为 σ²，则点积的方差为 d_k σ⁴。",
    ),
    formula=r"\operatorname{Var}(q\cdot k)=\sum_{m=1}^{d_k}\sigma^4=d_k\sigma^4",
    check=variance_is_linear,
    case=Case("q and k independent", independent),
    control=Case("q = k", tied),
    first="conditional",
    corrected=Claim(
        id="E5.1.5*",
        section="5.1.4",
        kind="statistical",
        statement=Text(
            "For independent q and k with means μ and covariances Σ of any kind the variance of q·k is "
            "tr(Σ_q Σ_k) + μ_qᵀ Σ_k μ_q + μ_kᵀ Σ_q μ_k. With equal means μ: d_k σ⁴ + 2 d_k μ² σ²; with components that "
            "correlate by ρ: d_k σ⁴ (1 + (d_k − 1) ρ²), which grows like d_k².",
            "对任意均值 μ 与协方差 Σ 的独立 q、k，Var(q·k) = tr(Σ_qΣ_k) + μ_qᵀΣ_kμ_q + μ_kᵀΣ_qμ_k。均值同为 μ 时为 "
            "d_kσ⁴ + 2d_kμ²σ²；分量两两相关系数为 ρ 时为 d_kσ⁴(1 + (d_k − 1)ρ²)，按 d_k² 增长。",
        ),
        formula=r"\operatorname{Var}(q\cdot k)=\operatorname{tr}(\Sigma_q\Sigma_k)"
        r"+\mu_q^\top\Sigma_k\mu_q+\mu_k^\top\Sigma_q\mu_k",
        check=variance_in_general,
        case=Case("with the terms of the means", 1.0),
        control=Case("without them", 0.0),
    ),
    reason=Text(
        "The conditions that a first reading missed (independent, mean 0) are those that the text states before the "
        "formula; under them it holds for every law tried. The corrected form says what becomes of it without them.",
        "初判所缺的条件（独立、零均值）正是原文在公式前写明的假设；在此假设下对所试各分布都成立。更一般的形式给出假设不满足时的结果。",
    ),
    figure=variance_against_width,
)


# ── E5.1.5-scaled: after division by √d_k

Spread = Callable[[int, int], float]


def xavier(d_model: int, d_k: int) -> float:
    return 2 / (d_model + d_k)


def mean_square_score(d_model: int, d_k: int, spread: Spread, draws: int = 32) -> tuple[float, float]:
    """Of scaled scores between layer-normed tokens, over draws of the weights, whose variance is `spread`."""
    attention = Attention(d_model, 1, Softmax(Full()), head_dim=d_k, dtype=torch.float64)
    generator = seeded(d_k)
    squares = []
    with torch.no_grad():
        for _ in range(draws):
            for name in "qk":
                weight = attention.get_parameter(f"{name}_proj.weight")
                weight.normal_(0, sqrt(spread(d_model, d_k)), generator=generator)
            x = torch.randn(48, d_model, generator=generator, dtype=torch.float64)
            q, k, _ = project(attention, torch.nn.functional.layer_norm(x, (d_model,)))
            squares.append(scores(q, k, None).square().mean())
    return mean_and_error(torch.stack(squares))


def scaled_variance_under_xavier(power: int) -> Evidence:
    def compare(d_model: int, d_k: int) -> Comparison:
        mean, error = mean_square_score(d_model, d_k, xavier)
        expected = (2 * d_model / (d_model + d_k)) ** power
        return agrees(f"variance of scaled scores, {d_model} → {d_k}", mean, expected, error=error)

    return evidence(compare(256, 16), compare(256, 64), compare(768, 64))


def scaled_variance_is_fourth_power(scale: Callable[[int], float]) -> Evidence:
    """Var(scale · q·k) for components of standard deviation σ, over three σ and three widths."""
    found = []
    for sigma in (0.5, 1.0, 2.0):
        for d in (16, 64, 256):
            q, k = (sigma * normal(10_000, d, seed=seed) for seed in (2 * d, 2 * d + 1))
            value, error = variance_and_error(dot_products(q, k, scale(d)))
            found.append(agrees(f"variance of scaled scores, σ = {sigma}, d_k = {d}", value, sigma**4, error=error))
    return evidence(*found)


E5_1_5_SCALED = Claim(
    id="E5.1.5-scaled",
    section="5.1.4",
    kind="statistical",
    statement=Text(
        "After division by √d_k the variance of a score is σ⁴ and no longer depends on d_k.",
        "除以 √d_k 后，分数的方差为 σ⁴，不再依赖于维度 d_k。",
    ),
    formula=r"\operatorname{Var}\left(\frac{q_i\cdot k_j}{\sqrt{d_k}}\right)=\sigma^4",
    check=scaled_variance_is_fourth_power,
    case=Case("divided by √d_k", lambda d: d**-0.5),
    control=Case("divided by d_k", lambda d: 1 / d),
    first="conditional",
    reason=Text(
        "For independent components of mean 0 and variance σ², as the text assumes, it holds. Proof: Var(q·k) = d_k σ⁴ "
        "(E5.1.5), and a factor 1/√d_k divides a variance by d_k. Whether σ² itself depends on d_k is another "
        "question: under the Xavier weights of 5.1.8 it does.",
        "在原文的假设（分量独立、零均值、方差 σ²）下成立。证明：Var(q·k) = d_kσ⁴（E5.1.5），"
        "因子 1/√d_k 使方差除以 d_k。"
        "σ² 本身是否依赖 d_k 是另一个问题：在 5.1.8 的 Xavier 初始化下确实依赖。",
    ),
    corrected=Claim(
        id="E5.1.5-scaled*",
        section="5.1.4",
        kind="statistical",
        statement=Text(
            "Under Xavier weights and layer-normed inputs σ² = 2d_model/(d_model + d_k), so that the variance of a "
            "scaled score depends on d_k: 3.41 for 768 → 64, not 1.",
            "Xavier 初始化且输入经 LayerNorm 时 σ² = 2d_model/(d_model + d_k)，"
            "缩放后的方差仍依赖 d_k：768 → 64 时为 3.41，而非 1。",
        ),
        formula=r"\sigma^4=\left(\frac{2d_{\mathrm{model}}}{d_{\mathrm{model}}+d_k}\right)^2",
        check=scaled_variance_under_xavier,
        case=Case("σ⁴", 2),
        control=Case("σ²", 1),
    ),
)


# ── E5.1.5-range: softmax gets inputs of a reasonable size


def largest_scores(pair: Pairing, widths: tuple[int, ...], draws: int) -> Tensor:
    """(draws, widths): the largest scaled score of each row, averaged over 128 rows of unit variance."""

    def largest(d: int, seed: int) -> Tensor:
        q, k = pair(lambda count, d, s: normal(count, d, seed=s + 10_000 * seed), 128, d)
        return scores(q, k, None).amax(-1).mean()

    return torch.stack([torch.stack([largest(d, seed) for d in widths]) for seed in range(draws)])


def range_is_kept(pair: Pairing) -> Evidence:
    """The largest score of 128, d_k from 16 to 1024: the exponent of its growth, a draw being the unit."""
    widths = (16, 64, 256, 1024)
    found = largest_scores(pair, widths, draws=12)
    slope, error = mean_and_error(torch.tensor([exponent(widths, row) for row in found]))
    last, error_of_last = mean_and_error(found[:, -1])
    return evidence(
        surely_below("exponent of d_k in the largest score", slope, 0.1, error=error),
        surely_below("largest score at d_k = 1024, below √(2 ln 128)", last, sqrt(2 * log(128)), error=error_of_last),
    )


def own_score_grows(pair: Pairing) -> Evidence:
    """The score and the weight that a token gives to itself among 128, over 40 draws."""

    def own(d: int, seed: int) -> tuple[Tensor, Tensor]:
        q, k = pair(lambda count, d, s: normal(count, d, seed=s + 10_000 * seed), 128, d)
        return scores(q, k, None).diagonal().mean(), Softmax(Full()).matrix(q, k).diagonal().mean()

    found = []
    for d in (16, 64, 256):
        score, weight = (torch.stack(x) for x in zip(*(own(d, seed) for seed in range(40)), strict=True))
        mean, error = mean_and_error(score)
        found.append(agrees(f"own score at d_k = {d}", mean, sqrt(d), error=error))
        if d == 64:
            mean, error = mean_and_error(weight)
            found.append(surely_above("own weight at d_k = 64", mean, 0.85, error=error))
    return evidence(*found)


E5_1_5_RANGE = Claim(
    id="E5.1.5-range",
    section="5.1.4",
    kind="statistical",
    statement=Text(
        "Scaling makes sure that the inputs of softmax stay in a reasonable range, whatever the hidden dimension.",
        "缩放确保无论隐藏维度如何变化，Softmax 的输入都能保持在合理的范围内。",
    ),
    formula=r"\max_j\frac{q_i\cdot k_j}{\sqrt{d_k}}=O(1)\quad\mathrm{in}\ d_k",
    check=range_is_kept,
    case=Case("q and k independent", independent),
    control=Case("q = k", tied),
    first="conditional",
    condition=Text(
        "q and k are independent, as at initialisation; training aligns them and nothing bounds their norms.",
        "q 与 k 相互独立（如初始化时）；训练会使二者对齐，且范数不受约束。",
    ),
    corrected=Claim(
        id="E5.1.5-range*",
        section="5.1.4",
        kind="statistical",
        statement=Text(
            "Where q and k are aligned, a scaled score still grows like √d_k: with q = k and d_k = 64 a token keeps "
            "nine tenths of its weight for itself among 128.",
            "q 与 k 对齐时，缩放后的分数仍按 √d_k 增长："
            "q = k、d_k = 64 时，128 个词元中每个词元约九成权重落在自己身上。",
        ),
        formula=r"\mathbb{E}\,\frac{q_i\cdot q_i}{\sqrt{d_k}}=\sqrt{d_k}",
        check=own_score_grows,
        case=Case("q = k", tied),
        control=Case("q and k independent", independent),
    ),
)

CLAIMS = (E5_1_3, N5_1_4_CONTRIB, E5_1_4, E5_1_5, E5_1_5_SCALED, E5_1_5_RANGE)
