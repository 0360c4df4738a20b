"""11.3.2: does softmax make attention low rank?"""

from __future__ import annotations

from collections.abc import Callable
from math import comb, exp, factorial

import torch

from heedful.measures import effective_rank, numerical_rank, svdvals
from heedful.mechanisms import Quadratic, Softmax, TopK, no_activation
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, equal, evidence


def softmax_weights(q: Tensor, k: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return Quadratic(no_activation, Full(), normalise=None).matrix(q, k)


# ── L11.35: the temperature's limits are one-hot and uniform


def temperature_limits(logits: tuple[float, ...]) -> Evidence:
    """Softmax of one row of logits, cold (T = 0.001) and hot (T = 10⁹)."""
    one, z = torch.ones(1, 1, dtype=torch.float64), torch.tensor(logits, dtype=torch.float64)[:, None]
    cold, hot = (Softmax(Full(), scale=1.0, temperature=T).matrix(one, z)[0] for T in (1e-3, 1e9))
    at_top = torch.nn.functional.one_hot(z[:, 0].argmax(), len(z))
    warm = Softmax(Full(), scale=1.0, temperature=0.1).matrix(one, z)[0]
    gap = float(z.max() - z[z < z.max()].max())
    return evidence(
        at_most("distance from one-hot at T = 0.001", (cold - at_top).abs().max(), 1e-12),
        at_most("distance from uniform at T = 10⁹", (hot - 1 / len(z)).abs().max(), 1e-9),
        at_most("1 − largest at T = 0.1, against (N − 1)e^(−gap/T)", 1 - warm.max(), (len(z) - 1) * exp(-gap / 0.1)),
    )


L11_35 = Claim(
    id="L11.35",
    section="11.3.2",
    kind="asymptotic",
    statement=Text(
        "As T → 0 softmax tends to the one-hot vector at the maximum, as T → ∞ to the uniform distribution.",
        "当 T → 0 时 softmax 趋向于最大元素处的 one-hot 向量；当 T → ∞ 时趋向于均匀分布。",
    ),
    formula=r"\mathrm{softmax}(z/T)\to e_{\arg\max z}\ (T\to 0),\qquad \to\frac{1}{N}\mathbf{1}\ (T\to\infty)",
    check=temperature_limits,
    case=Case("logits (1, 0.5, 0)", (1.0, 0.5, 0.0)),
    control=Case("a tie, (1, 1, 0)", (1.0, 1.0, 0.0)),
    first="conditional",
    condition=Text(
        "The maximum is unique; else the limit is uniform over all maxima.",
        "最大值唯一；否则极限是所有最大位置上的均匀分布。",
    ),
)


# ── T11.22: the rank of the one-hot limit is the number of distinct argmax positions


def rank_counts_targets(attend: TopK | Softmax) -> Evidence:
    """On 200 random tokens, and on two queries q = 1, 2 that both prefer the first of the keys 1, 0."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 200, 16, generator=generator, dtype=torch.float64).unbind()
    small_q, small_k = (torch.tensor(x, dtype=torch.float64)[:, None] for x in ([1.0, 2.0], [1.0, 0.0]))
    found = []
    for name, (a, b) in {"200 tokens": (q, k), "two tokens": (small_q, small_k)}.items():
        weights = attend.matrix(a, b)
        found.append(equal(f"rank, {name}", numerical_rank(weights), len(weights.argmax(-1).unique())))
    return evidence(*found)


T11_22 = Claim(
    id="T11.22",
    section="11.3.2",
    kind="exact",
    statement=Text(
        "For sufficiently small T the rows are one-hot, and the rank is the number of distinct positions of the ones.",
        "当温度 T 足够小时，各行趋向 one-hot 向量，此时矩阵的秩受限于（不同的）非零元素位置数量。",
    ),
    formula=r"\operatorname{rank}\lim_{T\to 0}A_T=\left|\{\arg\max_j z_{ij}\}_i\right|",
    check=rank_counts_targets,
    case=Case("the limit: the largest key alone", TopK(1, Full())),
    control=Case("softmax at T = 0.05", Softmax(Full(), temperature=0.05)),
    first="conditional",
    condition=Text(
        "In the limit T = 0 itself. At no T > 0 need it hold: logits (1, 0), (2, 0) share their target, and det A ≠ 0 "
        "for every T > 0 (−2·10⁻⁹ at T = 0.05).",
        "仅对极限 T = 0 本身成立。任何 T > 0 都未必成立：logits (1, 0)、(2, 0) 目标相同，但对每个 T > 0 都有 det A ≠ 0"
        "（T = 0.05 时为 −2·10⁻⁹）。",
    ),
)


# ── C11.9: sharper attention has lower rank


def rank_falls_with_sharpness(logits: Callable[[float], Tensor]) -> Evidence:
    """Effective rank (τ = .9) of softmax(Z(b)), sharp (b = 10) against flat (b = 0.1)."""
    flat, sharp = (effective_rank(torch.softmax(logits(b), -1)).estimate for b in (0.1, 10.0))
    return evidence(at_most("effective rank, b = 10 against b = 0.1", sharp, flat))


def diagonal(b: float) -> Tensor:
    return b * torch.eye(64, dtype=torch.float64)


def one_hub(b: float) -> Tensor:
    """A diagonal that fades, and a column that every row attends to."""
    hub = torch.zeros(64, 64, dtype=torch.float64)
    hub[:, 0] = b
    return hub + torch.eye(64, dtype=torch.float64) * 4 / (1 + b)


def rank_rises_on_a_diagonal(sign: float) -> Evidence:
    """σ₂ = … = σ_N = (eᵇ − 1)/(eᵇ + N − 1) grows with b: measured on softmax(bI), N = 64."""
    b = 2.0
    values = torch.linalg.svdvals(torch.softmax(diagonal(b), -1))
    expected = (exp(sign * b) - 1) / (exp(sign * b) + 63)
    return evidence(
        equal("σ₂", values[1], expected, within=1e-14),
        at_least("effective rank at b = 2", effective_rank(torch.softmax(diagonal(b), -1)).estimate, 46),
    )


def rank_against_sharpness() -> Figure:
    b = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    lines = {
        name: (b, [float(effective_rank(torch.softmax(logits(x), -1)).estimate) for x in b])
        for name, logits in (("diagonal", diagonal), ("one hub", one_hub))
    }
    return Figure(Text("Effective rank as attention sharpens", "注意力变尖锐时的有效秩"), "b", "effective rank", lines)


C11_9 = Claim(
    id="C11.9",
    section="11.3.2",
    kind="exact",
    statement=Text("Sharper attention lowers the rank of A.", "注意力越尖锐（稀疏），A 的秩越低。"),
    formula=r"b\uparrow\ \Rightarrow\ \operatorname{rank}\,\mathrm{softmax}(bZ)\downarrow",
    check=rank_falls_with_sharpness,
    case=Case("logits b·I", diagonal),
    control=Case("one column that every row attends to", one_hub),
    first="false",
    counterexample="""\
import torch, heedful as h
for b in (0., 2., 10.):                                     # flat, sharper, sharpest
    A = torch.softmax(b * torch.eye(64, dtype=torch.float64), -1)
    print(b, h.effective_rank(A).estimate)                  # 1, 46, 58: it rises""",
    corrected=Claim(
        id="C11.9*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "On logits b·I the singular values σ₂ … σ_N = (eᵇ−1)/(eᵇ+N−1) grow with b. Sharpness lowers the rank only "
            "where many rows share their target; the rank of the limit is the number of distinct targets.",
            "对 logits b·I，σ₂ … σ_N = (eᵇ−1)/(eᵇ+N−1) 随 b 增大。只有当许多行指向同一列时，尖锐化才降低秩；"
            "极限矩阵的秩等于不同目标列的个数。",
        ),
        formula=r"\sigma_2=\dots=\sigma_N=\frac{e^b-1}{e^b+N-1}",
        check=rank_rises_on_a_diagonal,
        case=Case("b·I", 1.0),
        control=Case("the formula with −b", -1.0),
    ),
    figure=rank_against_sharpness,
)

# ── T11.23: rank(softmax(QKᵀ/√d)) ≤ min(N, d)


def rank_at_most_width(weights: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """The rank of a matrix made of q, k of width 1 on three tokens, whose smallest singular value is no rounding."""
    q = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    return evidence(at_most("rank at N = 3, d = 1", torch.linalg.matrix_rank(weights(q, q)), 1))


def log_rank_at_most_width(rank_plus: int) -> Evidence:
    """rank(log A) ≤ d + 1, since log A = QKᵀ/√d − (log-sum-exp of each row) 1ᵀ; and A itself has full rank."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 4, generator=generator, dtype=torch.float64).unbind()
    weights = softmax_weights(q, k)
    return evidence(
        at_most("rank of log A at N = 64, d = 4", torch.linalg.matrix_rank(weights.log()), 4 + rank_plus),
        equal("rank of A", torch.linalg.matrix_rank(weights), 64),
    )


T11_23 = Claim(
    id="T11.23",
    section="11.3.2",
    kind="exact",
    statement=Text(
        "The rank of softmax(QKᵀ/√d) is at most min(N, d).",
        "softmax(QKᵀ/√d) 的秩不超过 min(N, d)。",
    ),
    formula=r"\operatorname{rank}\,\mathrm{softmax}(QK^\top/\sqrt d)\le\min(N,d)",
    check=rank_at_most_width,
    case=Case("softmax", softmax_weights),
    control=Case("the scores QKᵀ/√d themselves", scores),
    first="false",
    counterexample="""\
import torch
q = torch.tensor([[0.], [1.], [2.]], dtype=torch.float64)   # N = 3 tokens, d = 1
A = torch.softmax(q @ q.T, -1)
print(torch.linalg.matrix_rank(A), torch.linalg.det(A))     # 3, 0.0244: more than d""",
    corrected=Claim(
        id="T11.23*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "The scores have rank at most d and log A at most d + 1; A itself generically has full rank N.",
            "分数矩阵的秩不超过 d，log A 的秩不超过 d + 1；而 A 本身一般是满秩 N。",
        ),
        formula=r"\operatorname{rank}(\log A)\le d+1,\qquad \operatorname{rank}A=N\ \text{generically}",
        check=log_rank_at_most_width,
        case=Case("d + 1", 1),
        control=Case("d without the one", 0),
    ),
)


# ── T11.23-proof: softmax preserves linear dependence of rows


def dependence_is_kept(weights: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """Scores (0, 1) and (0, 2): the second row is twice the first."""
    q, k = (torch.tensor(x, dtype=torch.float64)[:, None] for x in ([1.0, 2.0], [0.0, 1.0]))
    return evidence(at_most("|det| of two dependent rows", torch.linalg.det(weights(q, k)).abs(), 1e-12))


def shift_is_kept(rows: tuple[tuple[float, float], tuple[float, float]]) -> Evidence:
    """Two rows of scores, given as a bias."""
    zero = torch.zeros(2, 1, dtype=torch.float64)
    weights = Softmax(Full(), bias=torch.tensor(rows, dtype=torch.float64)).matrix(zero, zero)
    return evidence(at_most("difference of the two rows of A", (weights[0] - weights[1]).abs().max(), 1e-15))


T11_23_PROOF = Claim(
    id="T11.23-proof",
    section="11.3.2",
    kind="exact",
    statement=Text(
        "Rows of M that are linearly dependent stay dependent under softmax.",
        "如果 M 的某些行是线性相关的，那么对应的 A 的行也保持相关。",
    ),
    formula=r"m_2=2m_1\ \Rightarrow\ \mathrm{softmax}(m_2)\parallel\mathrm{softmax}(m_1)",
    check=dependence_is_kept,
    case=Case("softmax", softmax_weights),
    control=Case("the scores themselves", scores),
    first="false",
    counterexample="""\
import torch
M = torch.tensor([[0., 1.], [0., 2.]], dtype=torch.float64)  # the second row is twice the first
print(torch.linalg.det(torch.softmax(M, -1)))                # 0.1497, not 0""",
    corrected=Claim(
        id="T11.23-proof*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "What softmax preserves is equality up to an additive constant: m and m + c give the same row.",
            "softmax 保持的只是相差常数的相等：m 与 m + c 给出同一行。",
        ),
        formula=r"\mathrm{softmax}(m+c\mathbf{1})=\mathrm{softmax}(m)",
        check=shift_is_kept,
        case=Case("m and m + 3", ((0.0, 1.0), (3.0, 4.0))),
        control=Case("m and 2m", ((0.0, 1.0), (0.0, 2.0))),
    ),
)


# ── L11.36: for N ≫ d the rank is bounded by d


def rank_at_most_width_of_long(weights: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    q, k = bounded(128, 4, 1.5)
    return evidence(at_most("rank at N = 128, d = 4", numerical_rank(weights(q, k)), 4))


def bounded(n: int, d: int, bound: float) -> tuple[Tensor, Tensor]:
    """Queries and keys of one length each, so that no logit q·k/√d is larger than the bound."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, n, d, generator=generator, dtype=torch.float64).unbind()
    length = (bound * d**0.5) ** 0.5
    return length * q / q.norm(dim=-1, keepdim=True), length * k / k.norm(dim=-1, keepdim=True)


def taylor_rank(count: Callable[[int, int], int]) -> Evidence:
    """Logits are at most B. The series of exp to degree p has rank binom(d + p, p) and leaves R = Σ_{n>p} Bⁿ/n! of an
    entry; rows are divided by at least N e^−B, so that σ_{r+1}(A) ≤ e^B R."""
    B, d = 1.5, 4
    q, k = bounded(512, d, B)
    values = svdvals(Softmax(Full()).matrix(q, k))
    found = []
    for p in (2, 4, 6):
        rest = exp(B) - sum(B**n / factorial(n) for n in range(p + 1))
        r = count(d, p)
        found.append(at_most(f"σ_{r + 1}, degree {p}, against e^B R", values[r], exp(B) * rest))
    return evidence(*found)


L11_36 = Claim(
    id="L11.36",
    section="11.3.2",
    kind="exact",
    statement=Text(
        "For N ≫ d the rank of A is bounded by d: a dimension bottleneck, and the root cause of low rank.",
        "当 N ≫ d 时，注意力矩阵的理论秩上界为 d；这种“维度瓶颈”是低秩结构产生的根本原因。",
    ),
    formula=r"N\gg d\ \Rightarrow\ \operatorname{rank}(A)\le d",
    check=rank_at_most_width_of_long,
    case=Case("softmax", softmax_weights),
    control=Case("the scores QKᵀ/√d", scores),
    first="false",
    counterexample="""\
import torch
generator = torch.Generator().manual_seed(0)
q, k = torch.randn(2, 128, 4, generator=generator, dtype=torch.float64)
print(torch.linalg.matrix_rank(torch.softmax(q @ k.T / 2, -1)))  # 128, not 4""",
    corrected=Claim(
        id="L11.36*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "The bottleneck is one of the logits. A itself is near low rank where they are bounded by B: with "
            "r = binom(d+p, p), σ_{r+1}(A) ≤ e^B Σ_{n>p} Bⁿ/n!.",
            "瓶颈在 logits 上。当 logits 不超过 B 时，A 本身近似低秩：取 r = binom(d+p, p)，则 "
            "σ_{r+1}(A) ≤ e^B Σ_{n>p} Bⁿ/n!。",
        ),
        formula=r"\sigma_{r+1}(A)\le e^B\sum_{n>p}\frac{B^n}{n!},\qquad r=\binom{d+p}{p}",
        check=taylor_rank,
        case=Case("r = binom(d + p, p)", lambda d, p: comb(d + p, p)),
        control=Case("r = d", lambda d, p: d),
    ),
)

CLAIMS = (L11_35, T11_22, C11_9, T11_23, T11_23_PROOF, L11_36)
