"""The note at the head of the text: why decoders, and what is low rank."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import torch

from heedful.measures.spectrum import numerical_rank, row_correlation
from heedful.mechanisms import Softmax
from heedful.patterns import Causal, Full, Pattern
from heedful.shapes import Tensor
from heedful.theory.chapters.bidirectional.heads import (
    as_trained,
    by_layer,
    by_text,
    by_text_of_smollm2,
    few_tokens,
    gaussian,
    masked,
    rank_of,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    Undecided,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
    surely_below,
)
from heedful.theory.models import random_like
from heedful.theory.samples import mean_and_error

# ── N004-zeroshot, N004-encdec: which architecture is best without and with fine-tuning


def needs_matched_architectures(_: object) -> Evidence:
    raise Undecided(
        "decided by a study that trains decoder-only and encoder-decoder models of one size on one corpus and compares "
        "them before and after multitask fine-tuning, which has not run"
    )


ZERO_SHOT = Claim(
    id="N004-zeroshot",
    section="note 1",
    kind="empirical",
    statement=Text(
        "Without any fine-tuning data, decoder-only models are best at zero-shot tasks.",
        "decoder-only 结构模型在没有任何微调数据的情况下，zero-shot 的表现能力最好。",
    ),
    check=needs_matched_architectures,
    control=Case("the same after fine-tuning"),
    first="empirical",
)

ENCODER_DECODER = Claim(
    id="N004-encdec",
    section="note 1",
    kind="empirical",
    statement=Text(
        "Encoder-decoder models need multitask fine-tuning on labelled data to do their best.",
        "encoder-decoder 需要在一定量的标注数据上做 multitask-finetuning 才能够激发最佳性能。",
    ),
    check=needs_matched_architectures,
    control=Case("the same without fine-tuning"),
    first="empirical",
)


# ── N004-bidir-lowrank: bidirectional attention is of low rank in theory


def is_rank_deficient(tokens: tuple[Tensor, Tensor]) -> Evidence:
    """The rank of bidirectional softmax attention on 128 tokens of width 32; its smallest σ is no rounding."""
    weights = Softmax(Full()).matrix(*tokens)
    values = torch.linalg.svdvals(weights)
    return evidence(
        at_most("rank, N = 128", numerical_rank(weights), 64),
        note=f"smallest σ / largest: {float(values[-1] / values[0]):.1e}",
    )


def gap_of_ranks(spread: float) -> tuple[float, float]:
    """Effective rank without the mask less that with it, from the same q and k, over 8 random heads."""
    heads = [gaussian(128, 32, spread, seed) for seed in range(8)]
    full, causal = (torch.stack([rank_of(Softmax(p).matrix(q, k)) for q, k in heads]) for p in (Full(), Causal()))
    return mean_and_error(full - causal)


def sharpness_decides(spreads: tuple[float, float]) -> Evidence:
    """Where logits are spread, the mask lowers the effective rank; where they are alike, it raises it."""
    (sharp, sharp_error), (flat, flat_error) = (gap_of_ranks(spread) for spread in spreads)
    return evidence(
        surely_above("rank without the mask less that with it, sharp heads", sharp, 0, error=sharp_error),
        surely_below("the same, flat heads", flat, 0, error=flat_error),
        equal(
            "rank of bidirectional attention, N = 128",
            numerical_rank(Softmax(Full()).matrix(*gaussian(128, 32, 2.0, 0))),
            128,
        ),
    )


BIDIRECTIONAL_LOW_RANK = Claim(
    id="N004-bidir-lowrank",
    section="note 2, title",
    kind="exact",
    statement=Text(
        "In theory the bidirectional attention of an encoder is of low rank, which may weaken the model.",
        "在理论上因为 Encoder 的双向注意力会存在低秩的问题，这可能会削弱模型的表达能力。",
    ),
    formula=r"\operatorname{rank}\,\mathrm{softmax}(QK^\top/\sqrt d)\ll N",
    check=is_rank_deficient,
    case=Case("128 different tokens", gaussian(128, 32, 2.0, 0)),
    control=Case("128 tokens of which 7 differ, without positions", few_tokens(128, 32, 7, 0)),
    first="false",
    counterexample="""\
import torch
q, k = torch.randn(2, 128, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
A = torch.softmax(2 * q @ k.T / 32 ** 0.5, -1)              # every token sees every token
s = torch.linalg.svdvals(A)
print(torch.linalg.matrix_rank(A), s[-1] / s[0])            # 128 of 128; the smallest is no rounding""",
    corrected=Claim(
        id="N004-bidir-lowrank*",
        section="note 2, title",
        kind="statistical",
        statement=Text(
            "Bidirectional softmax attention generically has full rank N. Its effective rank is above that of the "
            "causal matrix from the same q and k where heads are sharp (logits of spread 2), and below where they are "
            "flat (spread 0.1): neither mask is the one of low rank.",
            "双向 softmax 注意力一般是满秩 N。由同一组 q、k 得到的有效秩：头较尖锐（logits 标准差 2）时双向高于因果，"
            "头较平坦（标准差 0.1）时双向低于因果；“低秩”并不专属于某一种 mask。",
        ),
        formula=r"\operatorname{rank}A=N\ \text{generically}",
        check=sharpness_decides,
        case=Case("sharp: spread 2; flat: spread 0.1", (2.0, 0.1)),
        control=Case("spreads exchanged", (0.1, 2.0)),
    ),
)


# ── N004-causal-vs-bidir: causal attention has no low-rank problem, being of full rank


def reaches_full_rank(rank: Callable[[Tensor], Tensor]) -> Evidence:
    """Causal attention with equal logits: row i spreads over i tokens. N = 512."""
    zeros = torch.zeros(512, 4, dtype=torch.float64)
    return evidence(equal("rank, N = 512", rank(Softmax(Causal()).matrix(zeros, zeros)), 512))


def digits_of_inverse(n: int) -> float:
    """log₁₀ ‖A⁻¹‖_F of a causal random head, by forward substitution with 120 digits."""
    rows = Softmax(Causal()).matrix(*gaussian(n, 16, 1.0, 0)).tolist()
    with localcontext() as context:
        context.prec = 120
        A = [[Decimal(x) for x in row] for row in rows]
        total = Decimal(0)
        for column in range(n):
            x = [Decimal(0)] * n
            for i in range(column, n):
                x[i] = (int(i == column) - sum((A[i][j] * x[j] for j in range(column, i)), Decimal(0))) / A[i][i]
            total += sum((value * value for value in x), Decimal(0))
        return float(total.log10()) / 2


def own_mask_is_best(masks: tuple[Pattern, Pattern]) -> Evidence:
    """Effective rank from one and the same q and k under two masks: MiniLM was trained with the first of them.

    SmolLM2 with the second. Between the two models nothing is compared, since they differ in everything.
    """
    one, other = masks
    gains = {
        "MiniLM (bidirectional), N = 128": by_text(
            lambda call, text: rank_of(masked(one)(call, text)) - rank_of(masked(other)(call, text))
        ),
        "SmolLM2 (causal), N = 256": by_text_of_smollm2(
            lambda call, text: rank_of(masked(other)(call, text)) - rank_of(masked(one)(call, text))
        ),
    }
    alike, alike_error = mean_and_error(
        by_text_of_smollm2(
            lambda call, text: row_correlation(as_trained(call)) - row_correlation(random_like(call, text))
        )
    )
    found = [(name, *mean_and_error(gain)) for name, gain in gains.items()]
    return evidence(
        *(
            surely_above(f"gain of effective rank by its own mask, {name}", mean, 0, error=error)
            for name, mean, error in found
        ),
        surely_above("SmolLM2: mean cosine of two rows, less that of random heads", alike, 0.1, error=alike_error),
        at_least(
            "digits that ‖A⁻¹‖ gains from N = 16 to 64, causal", digits_of_inverse(64) - digits_of_inverse(16), 10
        ),
        note="SmolLM2: every fifth layer, weights of four bits",
    )


def masks_by_layer() -> Figure:
    layers = list(range(1, 7))
    lines = {
        "q, k of MiniLM, all keys": (layers, by_layer(lambda c, s: rank_of(masked(Full())(c, s)))),
        "the same, causal mask": (layers, by_layer(lambda c, s: rank_of(masked(Causal())(c, s)))),
        "untrained, all keys": (layers, by_layer(lambda c, s: rank_of(masked(Full())(c, s)), trained=False)),
        "untrained, causal mask": (layers, by_layer(lambda c, s: rank_of(masked(Causal())(c, s)), trained=False)),
    }
    title = Text(
        "Effective rank by layer, N = 128: the same q and k under two masks",
        "各层的有效秩（N = 128）：同一组 q、k，两种 mask",
    )
    return Figure(title, "layer", "effective rank", lines)


CAUSAL_FULL_RANK = Claim(
    id="N004-causal-vs-bidir",
    section="implied (with 002)",
    kind="exact",
    statement=Text(
        "Decoders, whose causal matrix is of full rank, have no low-rank problem.",
        "Decoder 的因果注意力矩阵是满秩的，因此不存在低秩问题。",
    ),
    formula=r"\det A=\prod_i a_{ii}>0",
    check=reaches_full_rank,
    case=Case("rank", numerical_rank),
    control=Case("effective rank (0.9 of the energy)", rank_of),
    first="conditional",
    condition=Text(
        "Rank means exact rank. Of the 512 singular values of uniform causal attention, 7 hold 0.9 of the energy.",
        "这里的秩是精确秩。均匀因果注意力（N = 512）的 512 个奇异值中，7 个就占 0.9 的能量。",
    ),
    corrected=Claim(
        id="N004-causal-vs-bidir*",
        section="implied (with 002)",
        kind="empirical",
        statement=Text(
            "Full rank is not high effective rank: ‖A⁻¹‖ of causal attention grows exponentially with N. From the same "
            "trained q and k, in the two models measured, the higher effective rank belongs to the mask of their "
            "training: all keys in MiniLM, the causal one in SmolLM2. Rows of causal heads are redundant too.",
            "满秩不等于有效秩高：因果矩阵的 ‖A⁻¹‖ 随 N 指数增长。"
            "对同一组训练好的 q、k，所测的两个模型都是训练时所用的 mask 有效秩较高：MiniLM 是双向，SmolLM2 是因果。"
            "因果头的各行同样冗余。",
        ),
        check=own_mask_is_best,
        case=Case("MiniLM: all keys, SmolLM2: causal", (Full(), Causal())),
        control=Case("masks exchanged", (Causal(), Full())),
        slow=True,
    ),
    reason=Text(
        "MiniLM against SmolLM2 would decide nothing: they differ in size, data, width and positions. The controlled "
        "comparison keeps q and k and changes the mask alone.",
        "直接比较 MiniLM 与 SmolLM2 不能说明问题：规模、数据、宽度、位置编码都不同。这里固定 q、k，只改变 mask。",
    ),
    figure=masks_by_layer,
    slow=True,
)


# ── N004-correlated: strongly correlated rows have a rank far below n


def correlated_rows_are_few(rank: Callable[[Tensor], Tensor]) -> Evidence:
    """Softmax of nearly equal logits: the mean cosine of two rows is above 0.999."""
    weights = Softmax(Full()).matrix(*gaussian(64, 16, 0.02, 0))
    return evidence(
        at_least("mean cosine of two rows", row_correlation(weights), 0.999),
        at_most("rank, N = 64", rank(weights), 8),
    )


CORRELATED = Claim(
    id="N004-correlated",
    section="tip",
    kind="exact",
    statement=Text(
        "Where rows or columns of the weights are strongly correlated, the rank is far below n.",
        "注意力权重矩阵的行或列之间存在强相关性，这样矩阵的秩就会远低于最大值 n。",
    ),
    formula=r"\cos(a_i,a_j)\approx1\ \Rightarrow\ \operatorname{rank}A\ll n",
    check=correlated_rows_are_few,
    case=Case("effective rank (0.9 of the energy)", rank_of),
    control=Case("exact rank", numerical_rank),
    first="conditional",
    condition=Text(
        "Rank means effective rank. Rows that are almost equal still have exact rank n; only equal ones do not.",
        "秩指有效秩。几乎相同的行精确秩仍为 n，只有完全相等才会降秩。",
    ),
)

CLAIMS = (ZERO_SHOT, ENCODER_DECODER, BIDIRECTIONAL_LOW_RANK, CAUSAL_FULL_RANK, CORRELATED)
