"""11.3.2, geometry: nearest neighbours, high dimension, and softmax over random keys."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, sqrt

import torch

from heedful.measures import concentration, row_statistics
from heedful.mechanisms import Softmax, TopK
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.heads import Mean
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
    surely_below,
)
from heedful.theory.closed_forms import (
    expected_largest,
    expected_square_sum,
    freezing_spread,
    poisson_dirichlet_largest,
)

# ── G11.3.2-NN: the key with the largest q·k is the nearest neighbour


def as_drawn(k: Tensor) -> Tensor:
    return k


def on_the_sphere(k: Tensor) -> Tensor:
    return k / k.norm(dim=-1, keepdim=True)


def chosen_is_nearest(keys: Callable[[Tensor], Tensor]) -> Evidence:
    """How often the one key that hard attention picks is the nearest of 1000."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1000, 16, generator=generator, dtype=torch.float64).unbind()
    k = keys(k)
    chosen, nearest = TopK(1, Full()).matrix(q, k).argmax(-1), torch.cdist(q, k).argmin(-1)
    return evidence(equal("share of queries that pick their nearest key", (chosen == nearest).double().mean(), 1))


G11_3_2_NN = Claim(
    id="G11.3.2-NN",
    section="11.3.2",
    kind="exact",
    statement=Text(
        "To look for the key most similar to q, by q·k, is to look for its nearest neighbour.",
        "当 q_i 寻找最相似的 k_j 时，它实际上是在 R^d 空间中寻找最近的邻居。",
    ),
    formula=r"\arg\max_j q\cdot k_j=\arg\min_j\|q-k_j\|",
    check=chosen_is_nearest,
    case=Case("Gaussian keys", as_drawn),
    control=Case("keys of one length", on_the_sphere),
    first="false",
    counterexample="""\
import torch
q, k = torch.tensor([1., 0.]), torch.tensor([[1., 0.], [10., 10.]])
print(k @ q, (k - q).norm(dim=-1))                          # 1, 10 and 0, 13.45: the far one is picked""",
    corrected=Claim(
        id="G11.3.2-NN*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "It is so where all keys have one length, as ‖q−k‖² = ‖q‖² + ‖k‖² − 2q·k; else it is a search for the "
            "largest inner product.",
            "当所有键的长度相同时成立，因为 ‖q−k‖² = ‖q‖² + ‖k‖² − 2q·k；否则是最大内积搜索。",
        ),
        formula=r"\|k_j\|=c\ \forall j\ \Rightarrow\ \arg\max_j q\cdot k_j=\arg\min_j\|q-k_j\|",
        check=chosen_is_nearest,
        case=Case("keys of one length", on_the_sphere),
        control=Case(
            "lengths 1 and 1.1 by turns", lambda k: on_the_sphere(k) * (1 + torch.arange(1000) % 2 / 10)[:, None]
        ),
    ),
)


# ── L11.37: in high dimension softmax concentrates on a few keys

Scale = Callable[[int], float]


def scaled(d: int) -> float:
    return 1 / sqrt(d)


def unscaled(d: int) -> float:
    return 1.0


def concentrates_in_high_dimension(scale: Scale) -> Evidence:
    """The share of 4000 random keys that takes part in a row, (Σa)²/Σa² / N, at d = 1024."""
    shares = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(16, 1024, generator=generator), torch.randn(4000, 1024, generator=generator)
        op = Softmax(Full(), scale(1024)).operator(q, k)
        shares.append(float(concentration(op).participation.mean()) / 4000)
    mean = Mean.of(shares)
    return evidence(surely_below("share of keys that take part, d = 1024", mean.value, 0.05, error=mean.error))


def width_does_not_matter(scale: Scale) -> Evidence:
    """Σa² of a query of length √d against the random energy model with logits of standard deviation 1, N = 1000."""
    found = []
    for d in (4, 64, 1024):
        sums = []
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            q, k = torch.randn(1, d, generator=generator), torch.randn(1000, d, generator=generator)
            op = Softmax(Full(), scale(d)).operator(q / q.norm() * sqrt(d), k)
            sums.append(float(row_statistics(op).square))
        mean = Mean.of(sums)
        found.append(agrees(f"Σa² at d = {d}", mean.value, expected_square_sum(1000, 1.0), error=mean.error))
    return evidence(*found)


L11_37 = Claim(
    id="L11.37",
    section="11.3.2",
    kind="statistical",
    statement=Text(
        "In high dimension few random keys are similar to a query, so that softmax concentrates on a few positions.",
        "在高维空间中，只有少数几个键向量与给定查询有较高的相似性；softmax 归一化后注意力权重集中在少数几个位置上。",
    ),
    formula=r"d\to\infty\ \Rightarrow\ \frac{(\sum_j a_j)^2}{N\sum_j a_j^2}\to 0",
    check=concentrates_in_high_dimension,
    case=Case("scores q·k/√d", scaled),
    control=Case("scores q·k", unscaled),
    first="false",
    counterexample="""\
import torch, heedful as h
for d in (4, 64, 1024):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(16, d, generator=generator), torch.randn(4000, d, generator=generator)
    rows = h.concentration(h.Softmax(h.Full()).operator(q, k))
    print(d, rows.participation.mean() / 4000)              # 0.4 of all keys take part, at any d""",
    corrected=Claim(
        id="L11.37*",
        section="11.3.2",
        kind="statistical",
        statement=Text(
            "After the factor 1/√d the width does not matter: the logits of a query have standard deviation ‖q‖/√d at "
            "any d, and iid logits concentrate only where it exceeds √(2 ln N).",
            "除以 √d 之后宽度不起作用：一个查询的 logits 在任何 d 下标准差都是 ‖q‖/√d；独立同分布的 logits "
            "只有当标准差超过 √(2 ln N) 时才会集中。",
        ),
        formula=r"q\cdot k/\sqrt d\sim N(0,\|q\|^2/d),\qquad \mathrm{threshold}\ \sqrt{2\ln N}",
        check=width_does_not_matter,
        case=Case("scores q·k/√d", scaled),
        control=Case("scores q·k", unscaled),
    ),
)


# ── T11.24: the weights tend to a limit law that is very uneven


def gini(weights: Tensor) -> float:
    """Of non-negative numbers: 0 where all are equal, 1 where one has everything.

    >>> round(gini(torch.tensor([1.0, 1.0, 1.0])), 6), round(gini(torch.tensor([0.0] * 999 + [1.0])), 3)
    (0.0, 0.999)
    """
    n = len(weights)
    rank = torch.arange(1, n + 1, dtype=weights.dtype)
    return float((2 * rank - n - 1) @ weights.sort().values / (n * weights.sum()))


def tends_to_a_lognormal_law(power: float) -> Evidence:
    """N·a_j against exp(s z − s²/2), z normal, with s = ‖q‖/d^power, over 12 draws of q and of 100,000 keys.

    The distance of the distribution functions exceeds 2.2/√N once in 10,000 draws (Dvoretzky, Kiefer, Wolfowitz); that
    Z is a sample moves them by 2.1/√N more at most, four of its standard errors.
    """
    n, d, gaps, unevenness, distance = 100_000, 16, [], [], 0.0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(count, d, generator=generator, dtype=torch.float64) for count in (1, n))
        weights = Softmax(Full(), scale=d**-power).matrix(q, k)[0]
        spread = float(q.norm()) * d**-power
        unevenness.append(gini(weights))
        gaps.append(unevenness[-1] - erf(spread / 2))
        z = ((n * weights).log() + spread**2 / 2).sort().values / spread
        law = torch.special.ndtr(z)
        distance = max(distance, float((law - torch.arange(n) / n).abs().max()) * sqrt(n))
    gap, uneven = Mean.of(gaps), Mean.of(unevenness)
    return evidence(
        at_most("largest distance from the lognormal law, times √N", distance, 4.5),
        agrees("Gini coefficient less erf(s/2)", gap.value, 0, error=gap.error),
        at_least("mean Gini coefficient", uneven.value, 0.4),
    )


T11_24 = Claim(
    id="T11.24",
    section="11.3.2",
    kind="asymptotic",
    statement=Text(
        "For q, k_j iid N(0, I_d), as N → ∞ the attention weights tend to a limit law, which is very uneven.",
        "若 q 与 k_1, …, k_N 独立同分布于 N(0, I_d)，则 N → ∞ 时注意力权重趋向某种极限分布，且高度不均匀。",
    ),
    formula=r"N a_j\to e^{sz-s^2/2},\quad z\sim N(0,1),\ s=\frac{\|q\|}{\sqrt d};"
    r"\qquad \mathrm{Gini}\to\operatorname{erf}(s/2)",
    check=tends_to_a_lognormal_law,
    case=Case("scores q·k/√d", 0.5),
    control=Case("scores q·k/d", 1.0),
    condition=Text(
        "The law is that of N·a_j, lognormal given q; each weight itself tends to 0. Very uneven is read as a Gini "
        "coefficient of 0.4 or more: it is about erf(½) = 0.52. Proof: the logits are iid N(0, s²) given q, and Z/N → "
        "e^(s²/2) by the law of large numbers.",
        "极限分布是 N·a_j 的分布：给定 q 时为对数正态；单个权重本身趋于 0。“高度不均匀”读作基尼系数不低于 0.4："
        "实际约为 erf(½) = 0.52。证明：给定 q，logits 独立同分布于 N(0, s²)，由大数定律 Z/N → e^(s²/2)。",
    ),
)


# ── T11.24-proof: the largest term dominates as N grows


def largest_of_keys(n: int, spread: float, draws: int = 40) -> Mean:
    """Mean largest weight of one query over n Gaussian keys, d = 16, the query of length spread · √d."""
    largest = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(1, 16, generator=generator), torch.randn(n, 16, generator=generator)
        op = Softmax(Full()).operator(q / q.norm() * 4 * spread, k)
        largest.append(float(row_statistics(op).largest))
    return Mean.of(largest)


def largest_dominates(spread: Callable[[int], float]) -> Evidence:
    mean = largest_of_keys(100_000, spread(100_000))
    return evidence(surely_above("mean largest weight at N = 100 000", mean.value, 0.5, error=mean.error))


def largest_is(spread: float) -> Evidence:
    """Against the random energy model at spread 1."""
    found = []
    for n in (100, 1000, 10_000):
        mean, expected = largest_of_keys(n, spread, draws=100), expected_largest(n, 1.0)
        found.append(agrees(f"mean largest weight at N = {n}", mean.value, expected, error=mean.error))
    return evidence(*found)


def transition() -> Figure:
    c = [0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 2.5]
    lines = {f"N = {n}": (c, [expected_largest(n, x * freezing_spread(n)) for x in c]) for n in (100, 10_000)}
    lines["N → ∞"] = (c, [poisson_dirichlet_largest(x) for x in c])
    title = Text("The largest of N softmax weights", "N 个 softmax 权重中最大者")
    return Figure(title, "standard deviation of the logits / √(2 ln N)", "E max a", lines)


T11_24_PROOF = Claim(
    id="T11.24-proof",
    section="11.3.2",
    kind="asymptotic",
    statement=Text(
        "The proof: as N → ∞ the largest term dominates Z = Σ exp(q·k_j/√d) by the law of large numbers, and the "
        "weights concentrate at the maximum.",
        "证明思路：N → ∞ 时由大数定律，最大项主导 Z = Σ exp(q·k_j/√d)，注意力权重在最大相似性附近集中。",
    ),
    formula=r"\frac{\max_j e^{q\cdot k_j/\sqrt d}}{\sum_j e^{q\cdot k_j/\sqrt d}}\to 1",
    check=largest_dominates,
    case=Case("logits of spread 1", lambda n: 1.0),
    control=Case("logits of spread 4√(2 ln N)", lambda n: 4 * freezing_spread(n)),
    first="false",
    counterexample="""\
import torch
generator = torch.Generator().manual_seed(0)
for n in (100, 10_000, 1_000_000):
    q, k = torch.randn(16, generator=generator), torch.randn(n, 16, generator=generator)
    print(n, torch.softmax(k @ q / 4, 0).max())             # falls towards 0""",
    corrected=Claim(
        id="T11.24-proof*",
        section="11.3.2",
        kind="statistical",
        statement=Text(
            "The law of large numbers says the opposite: Z/N → e^(s²/2) with s = ‖q‖/√d, N·a_j tends to a lognormal "
            "law, and the largest weight to 0, as the random energy model has it. Domination needs s > √(2 ln N).",
            "大数定律给出的恰恰相反：Z/N → e^(s²/2)，s = ‖q‖/√d；N·a_j 趋于对数正态分布，最大权重趋于 0，"
            "与随机能量模型一致。要由最大项主导，须 s > √(2 ln N)。",
        ),
        formula=r"\frac{Z}{N}\to e^{s^2/2},\qquad \mathbb{E}\max_j a_j\approx\frac{e^{s\sqrt{2\ln N}-s^2/2}}{N}\to 0",
        check=largest_is,
        case=Case("spread 1", 1.0),
        control=Case("spread 1.5", 1.5),
    ),
    figure=transition,
)

CLAIMS = (G11_3_2_NN, L11_37, T11_24, T11_24_PROOF)
