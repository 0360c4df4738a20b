"""11.3.1: how much of the energy lies in few singular values (Lemma 11.34 and Table 11.3.1)."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import torch

from heedful.measures import effective_rank, energy_share, numerical_rank, spectrum, svdvals
from heedful.mechanisms import Quadratic, Softmax, no_activation
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.heads import Mean, heads
from heedful.theory.chapters.low_rank.spectra import circle, gaussian
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
from heedful.theory.models import calls

MODELS = ("minilm", "smollm2")
LENGTH = 512
TEXTS = 3

# ── L11.34.1: the top 10 % of singular values carry more than 80 % of the energy


def top_tenth(trained: bool) -> Evidence:
    found = []
    for name in MODELS:
        shares = [heads(name, LENGTH, text, trained).shares() for text in range(TEXTS)]
        mean = Mean.of([float(share.mean()) for share in shares])
        many = Mean.of([float((share > 0.8).double().mean()) for share in shares])
        found += [
            surely_above(f"mean share of the top 10 %, {name}", mean.value, 0.8, error=mean.error),
            surely_above(f"heads where it is above 80 %, {name}", many.value, 0.5, error=many.error),
        ]
    return evidence(*found)


def energy_by_part() -> Figure:
    parts = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0]
    lines = {
        title: (parts, [float(heads("minilm", 256, 0, trained).shares(part).mean()) for part in parts])
        for title, trained in (("MiniLM", True), ("random, as sharp", False))
    }
    before = [spectrum(call.operator(), 256) for call in calls("minilm", 256, 0, trained=False)]
    shares = [torch.stack([energy_share(layer, part).estimate for layer in before]).mean() for part in parts]
    lines["MiniLM before training"] = (parts, [float(share) for share in shares])
    title = Text("Energy in the largest singular values, N = 256", "最大的若干奇异值所占的能量，N = 256")
    return Figure(title, "part of the singular values", "share of the energy", lines)


L11_34_1 = Claim(
    id="L11.34.1",
    section="11.3.1",
    kind="empirical",
    statement=Text(
        "In trained language models the top 10 % of the singular values usually carry more than 80 % of the energy.",
        "在实际训练的大语言模型中，前 10% 的奇异值通常能捕获 80% 以上的总能量。",
    ),
    formula=r"\sum_{i\le N/10}\sigma_i^2>0.8\sum_{i\le N}\sigma_i^2",
    check=top_tenth,
    case=Case("the heads of MiniLM and SmolLM2, N = 512", True),
    control=Case("random heads of the same width, pattern and spread of logits", False),
    first="empirical",
    reason=Text(
        "In two small models, on three texts. It is no mark of training: random heads as sharp have 0.69, and MiniLM "
        "before training, whose attention is all but uniform, has 0.999 and effective rank 1.",
        "在两个小模型、三段文本上成立。但这并非训练的标志：同样尖锐的随机头为 0.69，而训练之前的 MiniLM "
        "注意力几乎均匀，比例高达 0.999，有效秩为 1。",
    ),
    figure=energy_by_part,
    slow=True,
)


# ── L11.34.2: the other 90 % contribute less than 20 %


def top_and_rest(power: int) -> Evidence:
    """The share of the top 10 %, and what the others have of Σ σ^power, for flat to sharp random heads."""
    found = []
    for sharpness in (0.5, 1.0, 4.0):
        q, k = gaussian(200, 16)
        A = Softmax(Full()).matrix(sharpness * q, k)
        values = svdvals(A) ** power
        rest = values[20:].sum() / values.sum()
        together = energy_share(A, 0.1).estimate + rest
        found.append(equal(f"top 10 % and the rest, spread {sharpness}", together, 1, within=1e-12))
    return evidence(*found)


L11_34_2 = Claim(
    id="L11.34.2",
    section="11.3.1",
    kind="exact",
    statement=Text("The remaining 90 % contribute less than 20 %.", "剩余 90% 的奇异值贡献不到 20% 的能量。"),
    formula=r"\sum_{i>N/10}\sigma_i^2<0.2\sum_{i\le N}\sigma_i^2",
    check=top_and_rest,
    case=Case("energies σ²", 2),
    control=Case("σ in place of σ²", 1),
    reason=Text(
        "L11.34.1 in other words: the two shares add up to 1, which is what is checked. No evidence of its own.",
        "与 L11.34.1 是同一句话：两个比例之和为 1（此处检验的正是这一点），并无独立内容。",
    ),
)


# ── L11.34.3: the effective rank is at most d


def effective_rank_at_most_width(weights: Callable[[float], Tensor]) -> Evidence:
    return evidence(at_most("effective rank (.9) at d = 2, N = 256", effective_rank(weights(400.0)).estimate, 2))


def circle_weights(logit: float) -> Tensor:
    return circle(256, logit)


def circle_scores(logit: float) -> Tensor:
    angle = torch.arange(256, dtype=torch.float64) * (2 * torch.pi / 256)
    x = torch.stack([angle.cos(), angle.sin()], -1) * logit**0.5
    return Quadratic(no_activation, Full(), 1.0, normalise=None).matrix(x, x)


def effective_rank_grows_at_fixed_width(logits: tuple[float, ...]) -> Evidence:
    ranks = [int(effective_rank(circle_weights(logit)).estimate) for logit in logits]
    return evidence(
        *(equal(f"effective rank, R² = {x:g}", r, e) for x, r, e in zip(logits, ranks, (12, 47, 147), strict=True)),
        at_most("the largest against N", max(ranks), 256),
    )


L11_34_3 = Claim(
    id="L11.34.3",
    section="11.3.1",
    kind="exact",
    statement=Text(
        "The effective rank usually does not exceed the hidden width d.",
        "有效秩通常不超过隐藏维度 d，即 eff-rank(A) ≤ d。",
    ),
    formula=r"\operatorname{eff-rank}(A)\le d",
    check=effective_rank_at_most_width,
    case=Case("queries and keys on a circle of radius 20", circle_weights),
    control=Case("their scores QKᵀ", circle_scores),
    first="false",
    counterexample="""\
import torch, heedful as h
angle = torch.arange(256, dtype=torch.float64) * (2 * torch.pi / 256)
x = 20 * torch.stack([angle.cos(), angle.sin()], -1)        # d = 2
A = h.Softmax(h.Full(), scale=1.0).matrix(x, x)
print(h.effective_rank(A, 0.9).estimate)                    # 47, more than d = 2""",
    corrected=Claim(
        id="L11.34.3*",
        section="11.3.1",
        kind="exact",
        statement=Text(
            "The width does not bound the effective rank, N alone does: on a circle (d = 2, N = 256) it is 12, 47, 147 "
            "for R² = 25, 400, 3600. Of the heads of MiniLM at N = 512, 4 in 10 exceed their width of 32.",
            "宽度并不限制有效秩，只有 N 限制它：圆上的点（d = 2，N = 256）在 R² = 25、400、3600 时有效秩为 "
            "12、47、147。MiniLM 在 N = 512 时有四成的头超过其宽度 32。",
        ),
        formula=r"\operatorname{eff-rank}(A)\le\operatorname{rank}(A)\le N",
        check=effective_rank_grows_at_fixed_width,
        case=Case("R² = 25, 400, 3600", (25.0, 400.0, 3600.0)),
        control=Case("R² = 1, 2, 3", (1.0, 2.0, 3.0)),
    ),
    reason=Text(
        "d is taken as the width that makes the logits. For the hidden width of a whole model, N ≤ d at the lengths of "
        "the table, and the bound says nothing beyond rank ≤ N.",
        "此处 d 指产生 logits 的宽度。若指整个模型的隐藏维度，则在表中的长度下 N ≤ d，该界不比 rank ≤ N 多说什么。",
    ),
)


# ── L11.34-formal: formally A has full rank


def full_rank(factor: float) -> Evidence:
    found = []
    for n, d in ((64, 4), (128, 16), (256, 64)):
        q, k = gaussian(n, d)
        found.append(equal(f"rank at d = {d}", numerical_rank(Softmax(Full()).matrix(factor * q, k)), n))
    return evidence(*found)


L11_34_FORMAL = Claim(
    id="L11.34-formal",
    section="11.3.1",
    kind="exact",
    statement=Text("A is formally an N × N matrix of full rank.", "注意力矩阵形式上是 N × N 的满秩矩阵。"),
    formula=r"\operatorname{rank}(A)=N",
    check=full_rank,
    case=Case("Gaussian queries and keys", 1.0),
    control=Case("queries zero, A uniform", 0.0),
    first="conditional",
    condition=Text(
        "Queries and keys in general position. (It contradicts T11.23 of the same text, which is false.)",
        "查询与键处于一般位置。（与同文的定理 11.23 矛盾，而后者不成立。）",
    ),
)


# ── Tab11.3.1-maxrank: the largest possible rank at N = 512, d = 768 is 768


def largest_rank(expected: int) -> Evidence:
    q, k = gaussian(512, 768)
    return evidence(equal("rank at N = 512, d = 768", numerical_rank(Softmax(Full()).matrix(q, k)), expected))


def rank_is(bound: Callable[[int, int], int]) -> Evidence:
    found = []
    for n, d in ((64, 96), (64, 64), (64, 4)):
        q, k = gaussian(n, d)
        rank = numerical_rank(Softmax(Full()).matrix(q, k))
        found.append(equal(f"rank at N = {n}, d = {d}", rank, bound(n, d)))
    return evidence(*found)


TAB_MAXRANK = Claim(
    id="Tab11.3.1-maxrank",
    section="11.3.1",
    kind="exact",
    statement=Text(
        "The largest possible rank is 768 for N = 512, d = 768.", "表 11.3.1：N = 512、d = 768 时理论最大秩为 768。"
    ),
    formula=r"\max\operatorname{rank}(A)=768\quad(N=512,\ d=768)",
    check=largest_rank,
    case=Case("768", 768),
    control=Case("512", 512),
    first="false",
    counterexample="""\
import torch
q, k = torch.randn(2, 512, 768, dtype=torch.float64)
print(torch.linalg.matrix_rank(torch.softmax(q @ k.T / 768**0.5, -1)))  # 512: no 512 × 512 matrix has more""",
    corrected=Claim(
        id="Tab11.3.1-maxrank*",
        section="11.3.1",
        kind="exact",
        statement=Text("The largest possible rank is N, whatever d.", "理论最大秩是 N，与 d 无关。"),
        formula=r"\max\operatorname{rank}(A)=N",
        check=rank_is,
        case=Case("N", lambda n, d: n),
        control=Case("min(N, d)", min),
    ),
)


# ── Tab11.3.1-values: effective rank about 150, top 10 % hold 85 %, at N = 512


class Row(NamedTuple):
    """What the table lists: the effective rank at τ = .9 and .95, and the share of the top 10 %."""

    rank: Mean
    rank_95: Mean
    share: Mean


def of_heads(name: str, trained: bool = True) -> Row:
    texts = [heads(name, LENGTH, text, trained) for text in range(TEXTS)]
    columns = zip(*[(text.ranks(), text.ranks(0.95), text.shares()) for text in texts], strict=True)
    return Row(*(Mean.of([float(x.mean()) for x in column]) for column in columns))


def of_power_law(alpha: float) -> Row:
    """σ_i = i^−α, for which the two numbers of the table's first row go together."""
    A = torch.diag(torch.arange(1, LENGTH + 1, dtype=torch.float64) ** -alpha)
    numbers = effective_rank(A, 0.9).estimate, effective_rank(A, 0.95).estimate, energy_share(A, 0.1).estimate
    return Row(*(Mean(float(number), 0.0) for number in numbers))


def as_the_table_says(rows: Callable[[], list[tuple[str, Row]]]) -> Evidence:
    """τ is .9 or .95, so the table's 150 should lie between the two ranks, give or take a third; the share is 85 %."""
    found = []
    for name, row in rows():
        found += [
            at_least(f"effective rank (.95), {name}", row.rank_95.value, 100),
            at_most(f"effective rank (.9), {name}", row.rank.value, 200),
            equal(f"share of the top {ceil(LENGTH / 10)}, {name}", row.share.value, 0.85, within=0.05),
        ]
    return evidence(*found)


def trained_rows() -> list[tuple[str, Row]]:
    return [(name, of_heads(name)) for name in MODELS]


def power_law_rows() -> list[tuple[str, Row]]:
    return [("σᵢ = i^−0.65", of_power_law(0.65))]


def below_random(trained: bool) -> Evidence:
    found = []
    for name in MODELS:
        row, random = of_heads(name, trained), of_heads(name, False)
        ratio, error = row.rank.value / random.rank.value, row.rank.error / random.rank.value
        found += [
            surely_below(f"effective rank (.9) over that of random heads, {name}", ratio, 0.5, error=error),
            surely_above(f"share of the top 10 %, {name}", row.share.value, random.share.value, error=row.share.error),
        ]
    rows = {name: of_heads(name, trained) for name in MODELS}
    note = ", ".join(f"{name} {row.rank.value:.1f} (.9), {row.rank_95.value:.1f} (.95)" for name, row in rows.items())
    return evidence(*found, note=f"effective ranks: {note}")


TAB_VALUES = Claim(
    id="Tab11.3.1-values",
    section="11.3.1",
    kind="empirical",
    statement=Text(
        "At N = 512 the effective rank is about 150 and the top 10 % of the singular values hold 85 % of the energy.",
        "表 11.3.1：N = 512 时实际有效秩约 150，前 10% 的奇异值捕获 85% 的能量。",
    ),
    formula=r"N=512:\quad \operatorname{eff-rank}(A)\approx 150,\quad \sum_{i\le 51}\sigma_i^2\approx 0.85\,\|A\|_F^2",
    check=as_the_table_says,
    case=Case("the heads of MiniLM and SmolLM2", trained_rows),
    control=Case("the power law i^−0.65, whose rank and share these are", power_law_rows),
    first="empirical",
    counterexample="""\
import heedful as h
from heedful import hf
model, tokenizer = hf.load("minilm")
seen = []
hf.Probe(model)(hf.encode(model, tokenizer, hf.passages()[0], 512), seen.append)
for tau in (0.9, 0.95):
    ranks = [h.effective_rank(call.operator(), tau).estimate.double().mean() for call in seen]
    print(tau, sum(ranks) / len(ranks))                     # 51 and 71, not 150""",
    corrected=Claim(
        id="Tab11.3.1-values*",
        section="11.3.1",
        kind="empirical",
        statement=Text(
            "In MiniLM and SmolLM2 at N = 512 the mean effective rank is about 51 (τ = .9) or 71 to 74 (.95), less "
            "than half that of random heads as sharp, and the share 0.89. About 150 is what random heads have: 122 "
            "to 125 (.9), 163 to 171 (.95).",
            "在 MiniLM 与 SmolLM2 中，N = 512 时平均有效秩约为 51（τ = .9）或 71–74（.95），不到同样尖锐的随机头的"
            "一半，能量占比 0.89。“约 150”反而是随机头的数值：122–125（.9），163–171（.95）。",
        ),
        formula=r"\operatorname{eff-rank}_{\mathrm{trained}}<\frac{1}{2}\operatorname{eff-rank}_{\mathrm{random}}",
        check=below_random,
        case=Case("trained heads", True),
        control=Case("random heads in their place", False),
    ),
    reason=Text(
        "The table names no model, data or τ; these are the two models at hand. Its second row contradicts τ = .9: if "
        "the top 103 hold 90 %, the effective rank is at most 103, not 200. A power law that has the numbers of the "
        "first row is i^−0.65, against the α > 1 of T11.21.",
        "表中没有给出模型、数据和 τ；这里用的是手头的两个模型。第二行与 τ = .9 矛盾："
        "若前 103 个奇异值占 90%，则有效秩至多 103，而非 200。符合第一行数值的幂律是 i^−0.65，"
        "与定理 11.21 的 α > 1 不符。",
    ),
    slow=True,
)

CLAIMS = (L11_34_1, L11_34_2, L11_34_3, L11_34_FORMAL, TAB_MAXRANK, TAB_VALUES)
