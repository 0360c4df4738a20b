"""Introduction: is low rank what makes linear attention weaker?"""

from __future__ import annotations

import torch

from heedful.core import Mechanism
from heedful.feature_maps import Elu1, Relu
from heedful.measures.spectrum import numerical_rank
from heedful.mechanisms import Linear, Softmax
from heedful.patterns import Causal
from heedful.shapes import Tensor
from heedful.theory.claim import Case, Claim, Evidence, Text, Undecided, at_most, equal, evidence

# ── S002-causal-full-rank: what the causal mask leaves has full rank


def random_tokens(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, n, d, generator=generator, dtype=torch.float64).unbind()
    return q, k


def full_rank(mechanism: Mechanism) -> Evidence:
    """A triangular matrix is invertible where its diagonal has no zero; 16 tokens, so that rounding hides nothing."""
    weights = mechanism.matrix(*random_tokens(16, 4, seed=0))
    return evidence(
        equal("zeros on the diagonal, N = 16", int((weights.diagonal() == 0).sum()), 0),
        equal("rank", numerical_rank(weights), 16),
    )


def low_rank_block(mechanism: Mechanism) -> Evidence:
    """What the second half of the tokens reads from the first half: r = 8 features, N = 64."""
    weights = mechanism.matrix(*random_tokens(64, 8, seed=1))
    return evidence(
        equal("zeros on the diagonal, N = 64", int((weights.diagonal() == 0).sum()), 0),
        at_most("rank of the block [N/2:, :N/2]", numerical_rank(weights[32:, :32]), 8),
    )


CAUSAL_FULL_RANK = Claim(
    id="S002-causal-full-rank",
    section="intro",
    kind="exact",
    statement=Text(
        "The lower-triangular matrix that the causal mask leaves is necessarily of full rank, so that a low-rank "
        "bottleneck does not exist there.",
        "Decoder 的 Attention 矩阵被 mask 后留下的下三角矩阵必然是满秩的，低秩瓶颈似乎就不复存在。",
    ),
    formula=r"\det A=\prod_i a_{ii}\ne 0\ \Rightarrow\ \operatorname{rank}A=N",
    check=full_rank,
    case=Case("softmax", Softmax(Causal())),
    control=Case("linear attention with relu features, whose diagonal has zeros", Linear(Relu(), Causal())),
    first="conditional",
    condition=Text(
        "No diagonal entry is zero: softmax and elu + 1 meet it, relu features do not.",
        "对角元都不为零：softmax 与 elu + 1 满足，relu 特征不满足。",
    ),
    corrected=Claim(
        id="S002-causal-full-rank*",
        section="intro",
        kind="exact",
        statement=Text(
            "The bottleneck moves below the diagonal: with r features each block of causal linear attention that lies "
            "off the diagonal has rank at most r, while the matrix as a whole is invertible.",
            "瓶颈只是移到了对角线以下：r 个特征的因果线性注意力，整体可逆，但对角线之外的每个分块的秩不超过 r。",
        ),
        formula=r"\operatorname{rank}A_{I,J}\le r\quad\text{for}\ \min I>\max J",
        check=low_rank_block,
        case=Case("linear attention, elu + 1", Linear(Elu1(), Causal())),
        control=Case("softmax", Softmax(Causal())),
    ),
)


# ── S002-lowrank-linear: poor concentration is why linear attention is weaker


def needs_trained_pair(_: object) -> Evidence:
    raise Undecided(
        "decided by a study that trains softmax and linear models alike and sets recall against participation, which "
        "has not run. That linear attention concentrates less is checked in S002-summary; that this is the cause is not"
    )


LINEAR_WEAKNESS = Claim(
    id="S002-lowrank-linear",
    section="intro",
    kind="empirical",
    statement=Text(
        "Linear attention finds it harder to concentrate and so to locate key tokens, which probably is the main "
        "reason why it does a little worse.",
        "与标准 Attention 相比，线性 Attention 更难“集中注意力”，从而难以准确地定位到关键 token，"
        "这大概是它效果稍逊一筹的主要原因。",
    ),
    check=needs_trained_pair,
    control=Case("models that concentrate alike"),
    first="empirical",
    reason=Text(
        "A statement about a cause: it takes models trained alike that differ in concentration alone.",
        "这是因果判断：需要训练出只在集中程度上不同的成对模型才能判定。",
    ),
)

CLAIMS = (CAUSAL_FULL_RANK, LINEAR_WEAKNESS)
