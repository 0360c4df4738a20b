"""11.3 and 11.3.1: what attention costs, what the matrix is, and how its singular values decay."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt

import torch

from heedful.core import Mechanism
from heedful.measures import effective_rank, row_statistics, svdvals
from heedful.mechanisms import Quadratic, Softmax
from heedful.mechanisms.truncated_svd import TruncatedSVD
from heedful.nn import Attention
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.testing.flops import FlopCounter
from heedful.theory.chapters.low_rank.heads import Mean, growth, heads
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
    surely_below,
)


def gaussian(n: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Independent queries and keys."""
    q, k = torch.randn(2, n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).unbind()
    return q, k


def circle(n: int, logit: float) -> Tensor:
    """Softmax weights of queries and keys evenly on a circle (d = 2): logits R² cos(θ_i − θ_j), R² = `logit`."""
    angle = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
    x = torch.stack([angle.cos(), angle.sin()], -1) * sqrt(logit)
    return Softmax(Full(), scale=1.0).matrix(x, x)


# ── I11.3-cost: O(N²) time and space

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k) @ v


def by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax(Full())(q, k, v)


class Watched(FlopCounter):
    """Counts flops, and keeps the size of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for x in made if isinstance(made, tuple) else [made]:
            self.largest = max(self.largest, x.numel() if isinstance(x, Tensor) else 0)
        return made


def _grows(product: Product) -> tuple[float, float]:
    """Exponents in N of the flops that run, and of the largest tensor. (Inside, a fused kernel holds tiles alone.)"""
    sizes, flops, largest = [256, 512, 1024], [], []
    for n in sizes:
        q, k = gaussian(n, 16)
        with Watched() as watched:
            product(q, k, k)
        flops.append(float(watched.flops))
        largest.append(float(watched.largest))
    return growth(sizes, flops), growth(sizes, largest)


def quadratic_time_and_space(product: Product) -> Evidence:
    flops, space = _grows(product)
    return evidence(
        equal("exponent of the flops in N", flops, 2, within=0.05),
        equal("exponent of the largest tensor in N", space, 2, within=0.05),
    )


def linear_space_suffices(product: Product) -> Evidence:
    q, k = gaussian(1000, 32)
    error = (product(q, k, k) - by_matrix(q, k, k)).abs().max()
    return evidence(
        at_most("difference from the matrix's product, N = 1000", error, 1e-12),
        equal("exponent of the largest tensor in N", _grows(product)[1], 1, within=0.05),
    )


I11_3_COST = Claim(
    id="I11.3-cost",
    section="11.3",
    kind="complexity",
    statement=Text(
        "Standard self-attention needs O(N²) time and space.",
        "标准的自注意力计算需要 O(N²) 的时间和空间复杂度。",
    ),
    formula=r"\mathrm{time},\ \mathrm{space}=O(N^2)",
    check=quadratic_time_and_space,
    case=Case("the matrix is stored", by_matrix),
    control=Case("the same product tile by tile", by_tiles),
    first="conditional",
    condition=Text(
        "The space only where the matrix of weights is stored; the time is 4N²d flops in any case.",
        "空间为 O(N²) 仅当存储整个权重矩阵时成立；时间总是 4N²d 次浮点运算。",
    ),
    corrected=Claim(
        id="I11.3-cost*",
        section="11.3",
        kind="complexity",
        statement=Text(
            "Exact attention takes O(N²d) time, and O(Nd) memory is enough for it.",
            "精确注意力的时间为 O(N²d)，而内存只需 O(Nd)。",
        ),
        formula=r"\mathrm{time}=O(N^2d),\qquad \mathrm{memory}=O(Nd)",
        check=linear_space_suffices,
        case=Case("tile by tile", by_tiles),
        control=Case("the matrix is stored", by_matrix),
    ),
)


# ── D11.24: A = softmax(QKᵀ/√d_k), and d_k is usually the hidden width


def key_width_is_hidden_width(heads_of_layer: int) -> Evidence:
    layer = Attention(384, heads_of_layer, Softmax(Full()))
    q, k = gaussian(20, layer.head_dim)
    return evidence(
        at_least("smallest weight", layer.mechanism.matrix(q, k).min(), 1e-9),
        equal("d_k of a layer with d = 384", layer.head_dim, 384),
    )


D11_24 = Claim(
    id="D11.24",
    section="11.3.1",
    kind="exact",
    statement=Text(
        "A = softmax(QKᵀ/√d_k), row by row; d_k usually equals the hidden width d.",
        "A = softmax(QKᵀ/√d_k)，按行应用；d_k 通常等于隐藏维度 d。",
    ),
    formula=r"A=\mathrm{softmax}\left(\frac{QK^\top}{\sqrt{d_k}}\right)",
    check=key_width_is_hidden_width,
    case=Case("a layer of one head", 1),
    control=Case("12 heads, as in MiniLM", 12),
    first="conditional",
    condition=Text(
        "d_k = d in a layer of one head. With h heads it is d/h: 32 of 384 in MiniLM, 64 of 576 in SmolLM2.",
        "仅当只有一个头时 d_k = d。有 h 个头时 d_k = d/h：MiniLM 为 384 中的 32，SmolLM2 为 576 中的 64。",
    ),
)


# ── L11.33: rows sum to one


def row_stochastic(mechanism: Mechanism) -> Evidence:
    q, k = gaussian(128, 16)
    A = mechanism.operator(q, k)
    values, radius = svdvals(A), torch.linalg.eigvals(A.to_dense()).abs().max()
    return evidence(
        at_most("largest |row sum − 1|, N = 128", (row_statistics(A).total - 1).abs().max(), 1e-14),
        at_most("|spectral radius − 1|", (radius - 1).abs(), 1e-12),
        at_least("σ₁", values[0], 1, slack=1e-12),
        at_most("σ₁ against √N", values[0], sqrt(128)),
    )


L11_33 = Claim(
    id="L11.33",
    section="11.3.1",
    kind="exact",
    statement=Text("Each row of A sums to 1.", "注意力矩阵 A 是行随机的：每行之和为 1。"),
    formula=r"\sum_{j=1}^N a_{ij}=1",
    check=row_stochastic,
    case=Case("softmax", Softmax(Full())),
    control=Case("the exponential over its row's length", Quadratic(torch.exp, Full(), normalise="l2")),
)


# ── SVD11.3.1: A = UΣVᵀ


def decomposes(leave_out: int) -> Evidence:
    """A from its first N − leave_out singular triples, by the mechanism that takes the SVD of another's matrix."""
    q, k = gaussian(64, 8)
    A = Softmax(Full()).matrix(q, k)
    error = (TruncatedSVD(64 - leave_out, Softmax(Full())).matrix(q, k) - A).abs().max()
    values = svdvals(A)
    return evidence(
        at_most("largest error of UΣVᵀ, N = 64", error, 1e-14),
        at_least("smallest step σ_i − σ_{i+1}", (values[:-1] - values[1:]).min(), 0),
        at_least("σ_N", values[-1], 0),
    )


SVD11_3_1 = Claim(
    id="SVD11.3.1",
    section="11.3.1",
    kind="exact",
    statement=Text(
        "A = UΣVᵀ with orthogonal U, V and σ₁ ≥ … ≥ σ_N ≥ 0.",
        "A = UΣVᵀ，其中 U、V 正交，σ₁ ≥ … ≥ σ_N ≥ 0。",
    ),
    formula=r"A=U\Sigma V^\top,\qquad \sigma_1\ge\sigma_2\ge\dots\ge\sigma_N\ge 0",
    check=decomposes,
    case=Case("all N singular values", 0),
    control=Case("one of them, the smallest, left out", 1),
)


# ── D11.25: effective rank


def effective_rank_is(power: int) -> Evidence:
    """The fewest k with Σ_{i≤k} σ_i^power ≥ τ Σ σ_i^power, against the measure, on three matrices of N = 128."""
    q, k = gaussian(128, 16)
    found = []
    uniform, itself = torch.full((128, 128), 1 / 128, dtype=torch.float64), torch.eye(128, dtype=torch.float64)
    for tau in (0.9, 0.95):
        values = svdvals(Softmax(Full()).matrix(q, k)) ** power
        fewest = int((values.cumsum(-1) < tau * values.sum()).sum()) + 1
        found += [
            equal(f"random head, τ = {tau}", effective_rank(Softmax(Full()).operator(q, k), tau).estimate, fewest),
            equal(f"uniform, τ = {tau}", effective_rank(uniform, tau).estimate, 1),
            equal(f"identity, τ = {tau}", effective_rank(itself, tau).estimate, ceil(tau * 128)),
        ]
    return evidence(*found)


D11_25 = Claim(
    id="D11.25",
    section="11.3.1",
    kind="exact",
    statement=Text(
        "The effective rank is the least number of singular values that hold a share τ of the energy Σσ².",
        "有效秩是满足累积能量比 ≥ τ 的最小奇异值个数。",
    ),
    formula=r"\min\left\{k:\frac{\sum_{i\le k}\sigma_i^2}{\sum_{i\le N}\sigma_i^2}\ge\tau\right\}",
    check=effective_rank_is,
    case=Case("energies σ²", 2),
    control=Case("σ in place of σ²", 1),
)


# ── T11.21: σ_i ≤ C i^−α with α > 1

LENGTHS = [128, 256, 512]
TEXTS = 4


def of_trained(n: int, text: int) -> tuple[float, float]:
    """Mean effective rank, and mean C of σ_i ≤ C / i, over the heads of MiniLM."""
    found = heads("minilm", n, text)
    return float(found.ranks().mean()), float(found.constants(1.0).mean())


def of_circles(n: int, text: int) -> tuple[float, float]:
    """The same of queries and keys on a circle: a smooth kernel, whose spectrum does not change with N."""
    weights = circle(n, 9.0 + text)
    rank = effective_rank(weights).estimate
    return float(rank), float((svdvals(weights) * torch.arange(1, n + 1)).max())


Family = Callable[[int, int], tuple[float, float]]


def _exponents(family: Family) -> tuple[Mean, Mean]:
    """How rank and C grow with the length, as means over texts."""
    ranks, constants = [], []
    for text in range(TEXTS):
        measured = [family(n, text) for n in LENGTHS]
        ranks.append(growth(LENGTHS, [rank for rank, _ in measured]))
        constants.append(growth(LENGTHS, [constant for _, constant in measured]))
    return Mean.of(ranks), Mean.of(constants)


def power_law_whatever_the_length(family: Family) -> Evidence:
    """C free of N and α > 1 would bound max i·σ_i, and with it (C11.8) the effective rank, as N grows."""
    rank, constant = _exponents(family)
    return evidence(
        surely_below("exponent in N of C = max i·σ_i", constant.value, 0.1, error=constant.error),
        surely_below("exponent in N of the effective rank", rank.value, 0.1, error=rank.error),
    )


def rank_in_proportion(family: Family) -> Evidence:
    rank, constant = _exponents(family)
    return evidence(
        surely_above("exponent in N of the effective rank", rank.value, 0.8, error=rank.error),
        surely_below("exponent in N of the effective rank", rank.value, 1.2, error=rank.error),
        surely_above("exponent in N of C = max i·σ_i", constant.value, 0.5, error=constant.error),
    )


def decay_of_trained_heads() -> Figure:
    places = sorted({round(1.25**step) for step in range(28)} & set(range(1, 513)))
    lines = {}
    for n in LENGTHS:
        values = torch.cat([layer.values[0] for layer in heads("minilm", n, 0).spectra]).median(0).values
        kept = [i for i in places if i <= n]
        lines[f"N = {n}"] = ([float(i) for i in kept], [float(values[i - 1]) for i in kept])
    title = Text("Singular values of the median head of MiniLM", "MiniLM 各头奇异值的中位数")
    return Figure(title, "i", "σᵢ", lines, log_x=True, log_y=True)


T11_21 = Claim(
    id="T11.21",
    section="11.3.1",
    kind="empirical",
    statement=Text(
        "In trained attention σ_i ≤ C·i^−α for all i, with constants C > 0 and α > 1.",
        "对充分训练得到的注意力矩阵，存在常数 C > 0 和衰减指数 α > 1，使 σ_i ≤ C·i^−α。",
    ),
    formula=r"\sigma_i\le C\,i^{-\alpha},\qquad \alpha>1",
    check=power_law_whatever_the_length,
    case=Case("the heads of MiniLM, N = 128 to 512", of_trained),
    control=Case("queries and keys on a circle", of_circles),
    first="empirical",
    counterexample="""\
import heedful as h
from heedful import hf
model, tokenizer = hf.load("minilm")
for n in (64, 128, 256):                                    # were C and α free of n, the rank would be bounded
    seen = []
    hf.Probe(model)(hf.encode(model, tokenizer, hf.passages()[0], n), seen.append)
    ranks = [h.effective_rank(call.operator()).estimate.double().mean() for call in seen]
    print(n, sum(ranks) / len(ranks))                       # 6, 12, 24: in proportion to n""",
    corrected=Claim(
        id="T11.21*",
        section="11.3.1",
        kind="empirical",
        statement=Text(
            "For one matrix any α will do, with C large enough. With C free of N no α > 1 does: in MiniLM, C at α = 1 "
            "and the mean effective rank grow with N, the rank in proportion to it.",
            "对单个矩阵，任何 α 都成立，只要 C 足够大。若 C 与 N 无关，则不存在这样的 α > 1："
            "在 MiniLM 中 α = 1 时的 C 随 N 增长，平均有效秩与 N 成正比。",
        ),
        formula=r"\operatorname{eff-rank}_{0.9}\propto N",
        check=rank_in_proportion,
        case=Case("the heads of MiniLM, N = 128 to 512", of_trained),
        control=Case("queries and keys on a circle", of_circles),
    ),
    reason=Text(
        "Read as a statement about a family of lengths; for a single matrix it says nothing.",
        "此处理解为对一族长度的陈述；对单个矩阵它没有内容。",
    ),
    figure=decay_of_trained_heads,
    slow=True,
)


# ── C11.8: the top k hold 1 − C′/k^{α−1} of the energy


def energy_bound(weights: Tensor) -> Evidence:
    """With α = 1.5, the least C for these singular values, and C′ = C²/(2α − 1), a function of C and α alone."""
    alpha = 1.5
    values = svdvals(weights)
    places = torch.arange(1, len(values) + 1)
    C = (values * places**alpha).max()
    ratio = values.square().cumsum(-1) / values.square().sum()
    slack = ratio - (1 - C**2 / (2 * alpha - 1) / places ** (alpha - 1))
    bound = 1 - C**2 / (2 * alpha - 1) / len(values) ** (alpha - 1)
    return evidence(
        at_least("ratio less its bound, least over k", slack.min(), 0),
        at_least("the bound at k = N (0 or less says nothing)", bound, 0),
    )


def tail_exponent(exponent: Callable[[float], float]) -> Evidence:
    """log-log slope of 1 − ratio over k = 50 … 400, of σ_i = i^−α and N = 200 000."""
    found = []
    for alpha in (1.1, 1.5, 2.0):
        squares = torch.arange(1, 200_001, dtype=torch.float64) ** (-2 * alpha)
        tails = squares.flip(0).cumsum(0).flip(0) / squares.sum()
        ks = [50, 100, 200, 400]
        slope = growth(ks, [float(tails[k]) for k in ks])
        found.append(equal(f"slope at α = {alpha}", slope, exponent(alpha), within=0.02))
    return evidence(*found)


C11_8 = Claim(
    id="C11.8",
    section="11.3.1",
    kind="exact",
    statement=Text(
        "Where σ_i ≤ C·i^−α, the top k hold at least 1 − C′/k^(α−1) of the energy, C′ depending on C and α.",
        "在上述谱衰减条件下，前 k 个奇异值的累积能量比 ≥ 1 − C′/k^(α−1)，C′ 与 C 和 α 有关。",
    ),
    formula=r"\frac{\sum_{i\le k}\sigma_i^2}{\sum_{i\le N}\sigma_i^2}\ge 1-\frac{C'}{k^{\alpha-1}}",
    check=energy_bound,
    case=Case("softmax weights on a circle, N = 64", circle(64, 1.0)),
    control=Case("σ_i = 0.0001, all alike: C is small, and so is the energy", torch.eye(64, dtype=torch.float64) / 1e4),
    first="conditional",
    condition=Text(
        "The energy Σσ² is at least 1, as rows that sum to one make it; else C′ must depend on it too.",
        "能量 Σσ² 不小于 1（行和为 1 时总成立）；否则 C′ 还须依赖于它。",
    ),
    corrected=Claim(
        id="C11.8*",
        section="11.3.1",
        kind="asymptotic",
        statement=Text(
            "The tail falls as k^−(2α−1), for which α > 1/2 suffices.",
            "尾部按 k^−(2α−1) 衰减，只需 α > 1/2。",
        ),
        formula=r"1-\frac{\sum_{i\le k}\sigma_i^2}{\|A\|_F^2}\le\frac{C^2}{(2\alpha-1)\|A\|_F^2}\,k^{-(2\alpha-1)}",
        check=tail_exponent,
        case=Case("−(2α − 1)", lambda alpha: 1 - 2 * alpha),
        control=Case("−(α − 1)", lambda alpha: 1 - alpha),
    ),
)

CLAIMS = (I11_3_COST, D11_24, L11_33, SVD11_3_1, D11_25, T11_21, C11_8)
