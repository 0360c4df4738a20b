"""5.1 and 5.1.1: paths between positions, and what separate queries and keys can match."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from heedful.mechanisms import Softmax
from heedful.patterns import Causal, Pattern, Window
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import (
    EPS,
    layer,
    project,
    scores,
)
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence
from heedful.theory.samples import normal

# ── P5.1-path: the path between two positions


def hops(pattern: Pattern, distance: int) -> int:
    """How often one reads along the pattern until the last token has heard of the first."""
    q, k = normal(2, distance + 1, 4, seed=distance).unbind()
    operator = Softmax(pattern).operator(q, k)
    heard = torch.zeros(distance + 1, dtype=torch.float64)
    heard[0] = 1
    for hop in range(1, distance + 1):
        heard = operator @ heard
        if heard[-1] > 0:
            return hop
    raise ValueError(f"{pattern!r} never joins two tokens {distance} apart.")


def paths(pattern: Pattern) -> Evidence:
    """Hops along a chain, in which a state reads the one before, and along the pattern."""
    distances = (7, 15, 31, 63)
    return evidence(
        *(equal(f"hops of a recurrence over {d} tokens", hops(Window(1), d), d) for d in distances),
        *(equal(f"hops of attention over {d} tokens", hops(pattern, d), 1) for d in distances),
    )


P5_1_PATH = Claim(
    id="P5.1-path",
    section="5.1",
    kind="complexity",
    statement=Text(
        "In a recurrent network information passes step by step, along a path as long as the distance; attention joins "
        "any two positions directly.",
        "循环网络中信息沿序列依次传递，路径长度与距离成正比；注意力直接连接任意两个位置。",
    ),
    formula=r"\mathrm{path}_{\mathrm{RNN}}(i,j)=|i-j|,\qquad \mathrm{path}_{\mathrm{attention}}(i,j)=1",
    check=paths,
    case=Case("causal attention", Causal()),
    control=Case("attention in a window of 8", Window(8)),
)


# ── D5.1.1-QMA: vocabulary

D5_1_1_QMA = Claim(
    id="D5.1.1-QMA",
    section="5.1.1",
    kind="wording",
    statement=Text(
        "Attention queries, matches and aggregates: Q is the need, K the index, V the content.",
        "注意力是“查询-匹配-聚合”三阶段范式：Query 表达需求，Key 提供标识，Value 承载内容。",
    ),
    first="design",
    reason=Text(
        "Names for the three factors of the formula; nothing follows from them.", "只是三个因子的名称，无可判定。"
    ),
)


# ── N5.1.1-nonlinear: what kind of function the match is

Projection = Callable[[int, int], nn.Module]


def linear(width: int, out: int) -> nn.Module:
    return nn.Linear(width, out, bias=False, dtype=torch.float64)


def linear_then_tanh(width: int, out: int) -> nn.Module:
    return nn.Sequential(linear(width, out), nn.Tanh())


def bilinearity_defect(projection: Projection) -> float:
    """|s(2x + 3x', y) − 2 s(x, y) − 3 s(x', y)|, the largest over 8 × 8 pairs, with scores of size 1."""
    attention = layer(10, seed=0, head_dim=4, projection=projection)
    x, other, y = normal(3, 8, 10, seed=1).unbind()

    def score(left: Tensor) -> Tensor:
        return scores(project(attention, left)[0], project(attention, y)[1], None)

    with torch.no_grad():
        return float((score(2 * x + 3 * other) - 2 * score(x) - 3 * score(other)).abs().max())


def match_is_nonlinear(projection: Projection) -> Evidence:
    return evidence(at_least("defect of bilinearity", bilinearity_defect(projection), 1e-3))


def match_is_bilinear(projection: Projection) -> Evidence:
    """Sums of 10 and of 4 products of numbers below 100: each rounds by less than 1e5 ε."""
    attention = layer(10, seed=0, head_dim=4, projection=projection)
    x = normal(32, 10, seed=1)
    with torch.no_grad():
        q, k, _ = project(attention, x)
    return evidence(
        at_most("defect of bilinearity", bilinearity_defect(projection), 1e5 * EPS),
        equal("rank of the scores of 32 tokens, d_k = 4", torch.linalg.matrix_rank(scores(q, k)), 4),
    )


N5_1_1_NONLINEAR = Claim(
    id="N5.1.1-nonlinear",
    section="5.1.1",
    kind="exact",
    statement=Text(
        "Separate projections for queries and keys let the model learn highly non-linear matching functions.",
        "Query 与 Key 的分离允许模型学习到高度非线性的匹配函数。",
    ),
    formula=r"s(x,y)=\frac{xW_Q\,(yW_K)^\top}{\sqrt{d_k}}",
    check=match_is_nonlinear,
    case=Case("linear projections, as in the text", linear),
    control=Case("a tanh after each projection", linear_then_tanh),
    first="false",
    counterexample="""\
import torch
W_Q, W_K = torch.randn(2, 10, 4, dtype=torch.float64).unbind()
x, z, y = torch.randn(3, 10, dtype=torch.float64).unbind()
s = lambda x, y: (x @ W_Q) @ (y @ W_K)
print(s(2 * x + 3 * z, y) - 2 * s(x, y) - 3 * s(z, y))      # 0 but for rounding: the score is bilinear""",
    corrected=Claim(
        id="N5.1.1-nonlinear*",
        section="5.1.1",
        kind="exact",
        statement=Text(
            "The score is a bilinear form x W_Q W_Kᵀ yᵀ of rank at most d_k. Only softmax and the other layers are not "
            "linear; projections apart buy an asymmetric form, no other kind of function.",
            "匹配分数是秩不超过 d_k 的双线性型 x W_Q W_Kᵀ yᵀ。非线性只来自 Softmax 与其他层；"
            "分离投影带来的是非对称性，而不是非线性。",
        ),
        formula=r"s(ax+bx',y)=a\,s(x,y)+b\,s(x',y),\qquad \operatorname{rank}(W_QW_K^\top)\le d_k",
        check=match_is_bilinear,
        case=Case("linear projections", linear),
        control=Case("a tanh after each projection", linear_then_tanh),
    ),
)


# ── N5.1.1-asym: a match need not be a likeness


def opposites_match(sign: float) -> Evidence:
    """Two tokens u and −u under W_K = sign · W_Q: the weight that each gives to its opposite."""
    attention = layer(10, seed=0, head_dim=4)
    u = normal(1, 10, seed=1)
    x = torch.cat([u, -u])
    with torch.no_grad():
        attention.get_parameter("k_proj.weight").copy_(attention.get_parameter("q_proj.weight") * sign)
        q, k, _ = project(attention, x)
        weights = attention.mechanism.matrix(q, k)
    cosine = torch.nn.functional.cosine_similarity(x[0], x[1], dim=0)
    return evidence(
        equal("cosine of the two embeddings", cosine, -1, within=8 * EPS),
        at_least("weight on the opposite", weights.diagonal(1).min(), 0.5 + 1e-6),
        at_least("and back", weights.diagonal(-1).min(), 0.5 + 1e-6),
    )


N5_1_1_ASYM = Claim(
    id="N5.1.1-asym",
    section="5.1.1",
    kind="exact",
    statement=Text(
        "A query and a key need not be alike in the space of embeddings to match.",
        "Query 和 Key 不必在原始嵌入空间中相似也能匹配。",
    ),
    formula=r"W_K=-W_Q:\quad s(u,-u)=\frac{\|uW_Q\|^2}{\sqrt{d_k}}>0>s(u,u)",
    check=opposites_match,
    case=Case("W_K = −W_Q", -1.0),
    control=Case("W_K = W_Q", 1.0),
)

CLAIMS = (P5_1_PATH, D5_1_1_QMA, N5_1_1_NONLINEAR, N5_1_1_ASYM)
