"""5.1.7: masks that are added to the scores."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

import torch

from heedful.mechanisms import Softmax
from heedful.patterns import Causal, Full, Window
from heedful.segments import from_lengths, visible
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import EPS, layer
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence
from heedful.theory.samples import normal

# ── E5.1.10-shift: what the prediction of position t may depend on


def predicts_from_the_past(shift: int) -> Evidence:
    """Gradients of the output at t − shift, which predicts token t = 7 of 12, in each of the tokens."""
    attention, t = layer(16, seed=0, heads=2, pattern=Causal()), 7
    x = normal(12, 16, seed=1).requires_grad_()
    (gradient,) = torch.autograd.grad(attention(x)[t - shift].sum(), x)
    size = torch.linalg.vector_norm(gradient, dim=-1)
    return evidence(
        at_least("dependence on tokens before t, the smallest", size[:t].min(), 1e-3),
        equal("dependence on token t and later", size[t:].max(), 0),
    )


E5_1_10_SHIFT = Claim(
    id="E5.1.10-shift",
    section="5.1.7",
    kind="exact",
    statement=Text(
        "The prediction of position t may use positions 1 … t−1 only; the mask that lets i see j ≤ i achieves it.",
        "预测位置 t 时只能依赖位置 1 到 t−1 的信息；允许 j ≤ i 的因果掩码实现了这一约束。",
    ),
    formula=r"\hat x_t=f(x_1,\dots,x_{t-1}),\qquad j\le i",
    check=predicts_from_the_past,
    case=Case("the output at t − 1 predicts token t", 1),
    control=Case("the output at t predicts token t", 0),
    first="conditional",
    condition=Text(
        "The target is shifted by one: the output at i predicts token i + 1. Without the shift j ≤ i leaks the answer.",
        "目标需平移一位：位置 i 的输出预测第 i + 1 个词元；否则 j ≤ i 会泄露答案。",
    ),
)


# ── E5.1.9-10: S + M


def causal_mask(n: int) -> Tensor:
    """M of the text: 0 for j ≤ i, −∞ for j > i."""
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~visible(Causal(), n, n, None), -inf)


def mask_off_by_one(n: int) -> Tensor:
    return torch.zeros(n, n, dtype=torch.float64).masked_fill(~visible(Window(n, after=1), n, n, None), -inf)


def hides_the_future(mask: Callable[[int], Tensor]) -> Evidence:
    n = 32
    q, k, v = normal(3, n, 8, seed=0).unbind()
    attend = Softmax(Full(), bias=mask(n))
    later = [torch.cat([x[:20], other[20:]]) for x, other in zip((q, k, v), normal(3, n, 8, seed=1), strict=True)]
    weights = attend.matrix(q, k)
    return evidence(
        equal("largest weight at j > i", weights.triu(1).max(), 0),
        equal("sum of a row, the furthest from 1", (weights.sum(-1) - 1).abs().max(), 0, within=n * EPS),
        equal("change of outputs < 20 with tokens ≥ 20", (attend(*later) - attend(q, k, v))[:20].abs().max(), 0),
        at_most("distance from Softmax(Causal())", (weights - Softmax(Causal()).matrix(q, k)).abs().max(), n * EPS),
    )


E5_1_9_10 = Claim(
    id="E5.1.9-10",
    section="5.1.7",
    kind="exact",
    statement=Text(
        "With M added to the scores, 0 for j ≤ i and −∞ for j > i, P_ij = 0 for all j > i.",
        "在分数上加 M（j ≤ i 时为 0，j > i 时为 −∞）后，对所有 j > i 有 P_ij = 0。",
    ),
    formula=r"S_{\mathrm{masked}}=S+M,\qquad M_{ij}=\begin{cases}0&j\le i\\-\infty&j>i\end{cases}",
    check=hides_the_future,
    case=Case("M", causal_mask),
    control=Case("−∞ from j > i + 1 on", mask_off_by_one),
)


# ── E5.1.10-lower: the shape of M


def is_lower_triangular(matrix: Callable[[int], Tensor]) -> Evidence:
    return evidence(equal("entries ≠ 0 above the diagonal, n = 8", (matrix(8).triu(1) != 0).sum(), 0))


def is_upper_and_its_exponential_lower(matrix: Callable[[int], Tensor]) -> Evidence:
    mask = matrix(8)
    return evidence(
        equal("entries ≠ 0 on or below the diagonal", (mask.tril() != 0).sum(), 0),
        equal("entries ≠ 0 of e^M above the diagonal", (mask.exp().triu(1) != 0).sum(), 0),
        equal("entries of e^M other than those of Causal()", (mask.exp() != visible(Causal(), 8, 8, None)).sum(), 0),
    )


E5_1_10_LOWER = Claim(
    id="E5.1.10-lower",
    section="5.1.7",
    kind="exact",
    statement=Text("M is a lower triangular matrix.", "M 是一个 n × n 的下三角矩阵。"),
    formula=r"M_{ij}=0\quad\mathrm{for}\ j>i",
    check=is_lower_triangular,
    case=Case("M", causal_mask),
    control=Case("e^M, element by element", lambda n: causal_mask(n).exp()),
    first="false",
    counterexample="""\
import torch
M = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
print(M)            # what is not 0 stands above the diagonal
print(M.exp())      # this one is lower triangular""",
    corrected=Claim(
        id="E5.1.10-lower*",
        section="5.1.7",
        kind="exact",
        statement=Text(
            "What is not 0 in M stands strictly above the diagonal; lower triangular is e^M, the matrix of 0 and 1.",
            "M 的非零元严格位于对角线上方；下三角的是逐元素的 e^M，即 0/1 矩阵。",
        ),
        formula=r"M_{ij}=0\ \mathrm{for}\ j\le i,\qquad (e^{M})_{ij}=0\ \mathrm{for}\ j>i",
        check=is_upper_and_its_exponential_lower,
        case=Case("M", causal_mask),
        control=Case("Mᵀ", lambda n: causal_mask(n).mT),
    ),
)


# ── E5.1.10-1e9: a large negative number for −∞

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def hidden_keys(n: int, empty_row: bool) -> Tensor:
    hidden = ~visible(Causal(), n, n, None)
    hidden[2] |= empty_row
    return hidden


def weight_on_hidden(hidden: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    """The largest weight that a masked key gets; NaN where a weight is none."""
    n = len(hidden)
    q, k = normal(2, n, 8, seed=0).to(dtype).unbind()
    bias = torch.zeros(n, n, dtype=torch.float64).masked_fill(hidden, fill).to(dtype)
    return (Softmax(Full(), bias=bias).matrix(q, k) * hidden).max()


def a_large_number_will_do(empty_row: bool) -> Evidence:
    hidden = hidden_keys(6, empty_row)
    return evidence(
        *(
            equal(f"largest weight on a masked key, {dtype}", weight_on_hidden(hidden, -1e9, dtype), 0)
            for dtype in DTYPES
        )
    )


def guarded_infinity(fill: float) -> Evidence:
    hidden = hidden_keys(6, empty_row=True)
    return evidence(
        *(
            equal(f"largest weight on a masked key, {dtype}", weight_on_hidden(hidden, fill, dtype), 0)
            for dtype in DTYPES
        )
    )


E5_1_10_1E9 = Claim(
    id="E5.1.10-1e9",
    section="5.1.7",
    kind="exact",
    statement=Text(
        "In practice a large negative number such as −10⁹ takes the place of −∞, to avoid numerical problems.",
        "在实现中，通常用非常大的负数（如 −10⁹）代替 −∞，以避免数值计算问题。",
    ),
    formula=r"M_{ij}=-10^9\ \mathrm{for}\ j>i\quad\Rightarrow\quad P_{ij}=0",
    check=a_large_number_will_do,
    case=Case("every row sees a key", False),
    control=Case("a row sees none", True),
    first="conditional",
    condition=Text(
        "Every row sees at least one key. In a row that sees none −10⁹ hides nothing: in float64 it becomes softmax of "
        "its own scores, in float32 and bfloat16 uniform; in float16 −10⁹ is −∞ itself.",
        "每一行至少有一个可见的键。若某行全被掩蔽，−10⁹ 不起任何作用："
        "float64 下得到原分数的 Softmax，float32 与 bfloat16 下为均匀分布；"
        "float16 下 −10⁹ 就是 −∞。",
    ),
    corrected=Claim(
        id="E5.1.10-1e9*",
        section="5.1.7",
        kind="exact",
        statement=Text(
            "−∞ with a guard, weights 0 in a row that sees nothing, is right in every precision.",
            "使用 −∞ 并显式处理全掩蔽行（权重置 0），在各种精度下都正确。",
        ),
        formula=r"P_{ij}=0\ \mathrm{where}\ M_{ij}=-\infty",
        check=guarded_infinity,
        case=Case("−∞, guarded", -inf),
        control=Case("−10⁹", -1e9),
    ),
)


# ── E5.1.11: padding

Padded = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def by_added_mask(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The text's formula: −∞ added in the columns of padding."""
    padding = (from_lengths(lengths, q.shape[-2]) < 0)[..., None, :]
    mask = torch.zeros(padding.shape, dtype=q.dtype).masked_fill(padding, -inf)
    return torch.softmax(q @ k.mT / sqrt(q.shape[-1]) + mask, -1) @ v


def by_segments(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return Softmax(Full())(q, k, v, segments=from_lengths(lengths, q.shape[-2]))


def leaves_padding_out(attend: Padded, lengths: tuple[int, ...]) -> Evidence:
    """Each sequence of a padded batch against the same sequence alone."""
    n = 9
    q, k, v = normal(3, len(lengths), n, 8, seed=0).unbind()
    out = attend(q, k, v, torch.tensor(lengths))
    apart = [
        (out[b, :length] - Softmax(Full())(q[b, :length], k[b, :length], v[b, :length])).abs().max()
        for b, length in enumerate(lengths)
        if length
    ]
    return evidence(
        equal("outputs that are no numbers", out.isnan().sum(), 0),
        at_most("distance from the sequences alone", torch.stack(apart).max(), 100 * EPS),
    )


def added_mask_leaves_padding_out(lengths: tuple[int, ...]) -> Evidence:
    return leaves_padding_out(by_added_mask, lengths)


def leaves_padding_out_of_an_empty_one_too(attend: Padded) -> Evidence:
    return leaves_padding_out(attend, (5, 0, 3))


E5_1_11 = Claim(
    id="E5.1.11",
    section="5.1.7",
    kind="exact",
    statement=Text(
        "A mask with −∞ at padding, 0 elsewhere, added to the scores, keeps padding out of attention.",
        "在分数上加填充掩码（填充位置为 −∞，其余为 0），使填充位置不参与注意力计算。",
    ),
    formula=r"S_{\mathrm{padded}}=S+P_{\mathrm{mask}}",
    check=added_mask_leaves_padding_out,
    case=Case("lengths 5, 9, 3", (5, 9, 3)),
    control=Case("lengths 5, 0, 3: one sequence is empty", (5, 0, 3)),
    first="conditional",
    condition=Text(
        "The −∞ stand in the columns of padded keys, and every row has a real key; a row without one becomes NaN.",
        "−∞ 加在填充键所在的列上，且每行至少有一个真实的键；否则该行变为 NaN。",
    ),
    corrected=Claim(
        id="E5.1.11*",
        section="5.1.7",
        kind="exact",
        statement=Text(
            "Masked key columns with a guard for rows that see nothing are right for every length, 0 included.",
            "掩蔽填充键所在的列并处理全掩蔽行，对任意长度（包括 0）都正确。",
        ),
        formula=r"P_{ij}=0\ \mathrm{for}\ j\ \mathrm{padded},\qquad O_i=0\ \mathrm{where\ nothing\ is\ visible}",
        check=leaves_padding_out_of_an_empty_one_too,
        case=Case("segments", by_segments),
        control=Case("the mask added to the scores", by_added_mask),
    ),
)


# ── E5.1.11-combine: both masks

CAUSAL = ~visible(Causal(), 6, 6, None)
PADDED = (from_lengths(torch.tensor(4), 6, padding="left") < 0).expand(6, 6)


def filled(hidden: Tensor, fill: float) -> Tensor:
    return torch.zeros(6, 6).masked_fill(hidden, fill)


def add_up(fill: float) -> Evidence:
    """Six tokens in float32, two of them padding on the left, both masks filled and added."""
    q, k = normal(2, 6, 8, seed=0).float().unbind()
    weights = Softmax(Full(), bias=filled(CAUSAL, fill) + filled(PADDED, fill)).matrix(q, k)
    alone = Softmax(Causal()).matrix(q[2:], k[2:])
    first = ", ".join(f"{weight:.3g}" for weight in weights[0].tolist())
    return evidence(
        at_most("rows of real tokens, distance from the sequence alone", (weights[2:, 2:] - alone).abs().max(), 1e-6),
        equal("largest weight on a masked key", (weights * (CAUSAL | PADDED)).max(), 0),
        note=f"row of the first padding token: {first}",
    )


def combine_by(join: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """One mask from two against the library's Causal() under segments."""
    q, k = normal(2, 6, 8, seed=0).float().unbind()
    weights = Softmax(Full(), bias=filled(join(CAUSAL, PADDED), -inf)).matrix(q, k)
    expected = Softmax(Causal()).matrix(q, k, segments=from_lengths(torch.tensor(4), 6, padding="left"))
    return evidence(at_most("distance from Softmax(Causal()) under segments", (weights - expected).abs().max(), 1e-6))


E5_1_11_COMBINE = Claim(
    id="E5.1.11-combine",
    section="5.1.7",
    kind="exact",
    statement=Text(
        "The padding mask and the causal mask may be added, and satisfy both constraints together.",
        "填充掩码与因果掩码可以叠加使用，同时满足两种约束。",
    ),
    formula=r"S+M+P_{\mathrm{mask}}",
    check=add_up,
    case=Case("−∞, rows that see nothing guarded", -inf),
    control=Case("−10⁹", -1e9),
    first="conditional",
    condition=Text(
        "The masks are filled with −∞ and rows that see nothing are guarded. With −10⁹ and padding on the left, a "
        "padding token attends to the future: keys that one mask hides win over those that both hide.",
        "掩码用 −∞ 填充，且全掩蔽行另行处理。若用 −10⁹ 且左侧填充，填充词元会关注未来："
        "只被一个掩码遮住的键胜过被两个掩码遮住的键。",
    ),
    corrected=Claim(
        id="E5.1.11-combine*",
        section="5.1.7",
        kind="exact",
        statement=Text(
            "A key is hidden where either mask hides it: masks are joined by a logical or, and filled once.",
            "任一掩码遮住的键即被遮住：应以逻辑或合并掩码，再填充一次。",
        ),
        formula=r"\mathrm{hidden}_{ij}=(j>i)\lor(j\ \mathrm{padded})",
        check=combine_by,
        case=Case("or", torch.logical_or),
        control=Case("and", torch.logical_and),
    ),
)

CLAIMS = (E5_1_10_SHIFT, E5_1_9_10, E5_1_10_LOWER, E5_1_10_1E9, E5_1_11, E5_1_11_COMBINE)
