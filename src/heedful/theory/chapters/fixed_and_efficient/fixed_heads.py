"""1.1: the seven fixed patterns, their edges, their weights and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch

from heedful.measures import effective_rank
from heedful.mechanisms import FixedPattern, Mixture, Quadratic, Softmax, TruncatedSVD
from heedful.nn import Attention
from heedful.patterns import Causal, Full, Window
from heedful.shapes import Tensor
from heedful.theory.chapters.fixed_and_efficient.counts import draw, exponent, flops
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, equal, evidence

KINDS = ("current", "previous", "next", "left", "right", "start", "end")
ROUNDING = 1e-14  # a few units of float64, for sums of 64 weights

# ── R003-7patterns: seven patterns, and whom each row attends


def as_given(kind: str, n: int = 64) -> Tensor:
    """A of the library, whose rows without a neighbour attend an end of the sequence, as in the paper's figure."""
    x = torch.zeros(n, 1, dtype=torch.float64)
    return FixedPattern(kind).matrix(x, x)


def stated(kind: str, n: int = 64) -> Tensor:
    """Whom a row may attend by the text's words: i, i − 1, i + 1, 0 … i − 2, i + 2 … n, all."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    sets = {"current": j == i, "previous": j == i - 1, "next": j == i + 1, "left": j <= i - 2, "right": j >= i + 2}
    return sets.get(kind, torch.ones(n, n, dtype=torch.bool))


def as_written(kind: str, n: int = 64) -> Tensor:
    """The same with nothing outside of the stated set: rows at the edges stay empty."""
    return as_given(kind, n) * stated(kind, n)


def rows_are_distributions(weights: Callable[[str], Tensor]) -> Evidence:
    """Away from the edges the support is the stated set; every row sums to one."""
    wrong = sum(int(((weights(kind) > 0) != stated(kind))[2:-2].sum()) for kind in KINDS)
    sums = torch.stack([weights(kind).sum(-1) for kind in KINDS])
    return evidence(
        equal("entries off the stated sets, rows 2 … N − 3", wrong, 0),
        at_least("smallest row sum", sums.min(), 1, slack=ROUNDING),
        at_most("largest row sum", sums.max(), 1, slack=ROUNDING),
    )


SEVEN = Claim(
    id="R003-7patterns",
    section="1.1.1",
    kind="exact",
    statement=Text(
        "Heads show seven patterns: the current, the previous, the next token, the left context 0 … i − 2, the right "
        "context i + 2 … n, the end and the start of the sentence.",
        "注意力头主要呈现七种模式：当前、前一个、后一个 token，左侧上下文 0 到 i−2，右侧上下文 i+2 到 n，句尾，句首。",
    ),
    check=rows_are_distributions,
    case=Case("rows at the edges attend the first or the last token", as_given),
    control=Case("as written: rows at the edges stay empty", as_written),
    first="conditional",
    condition=Text(
        "Positions run from 0 to n − 1, and the rows that have no such neighbour (0 of previous, n − 1 of next, 0 and "
        "1 of the left context, n − 2 and n − 1 of the right) are given a token to attend.",
        "位置从 0 到 n−1 编号，并为没有相应邻居的行（前一个的第 0 行、后一个的第 n−1 行、左侧上下文的第 0、1 行、"
        "右侧上下文的第 n−2、n−1 行）另行指定关注对象。",
    ),
)


# ── R003-noparam: the patterns need no parameters


def fixed(kind: str):
    return FixedPattern(kind)


def learned(kind: str):
    return Softmax(Full())


def needs_nothing(head: Callable[[str], FixedPattern | Softmax]) -> Evidence:
    """A does not change with q and k; a layer of width 512 and eight heads loses W_Q and W_K of seven of them."""
    q, k, _ = draw(16, 64, torch.float64)
    moved = max(float((head(kind).matrix(q, k) - head(kind).matrix(k, -q)).abs().max()) for kind in KINDS)
    layer = Attention(512, 8, Mixture([*map(head, KINDS), Softmax(Full())]))
    full = Attention(512, 8, Softmax(Full()))
    saved = sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in layer.parameters())
    return evidence(
        equal("change of A under other q, k", moved, 0),
        equal("parameters of the patterns", sum(p.numel() for kind in KINDS for p in head(kind).parameters()), 0),
        equal("weights that a layer is spared, of 1,048,576", saved, 2 * 512 * 7 * 64),
    )


NOPARAM = Claim(
    id="R003-noparam",
    section="1.1.1",
    kind="exact",
    statement=Text(
        "The patterns rest on positions alone and need no learnable parameters.",
        "这些模式完全基于位置信息，不需要任何可学习参数。",
    ),
    check=needs_nothing,
    case=Case("seven fixed heads", fixed),
    control=Case("seven softmax heads in their place", learned),
    reason=Text(
        "W_V and W_O of these heads stay and are learned.",
        "这些头的 W_V 与 W_O 仍然保留并需要学习。",
    ),
)


# ── R003-prev: ξ_ij = 1 where j = i − 1


def previous_is_a_shift(edge: str | None) -> Evidence:
    x = torch.zeros(64, 1, dtype=torch.float64)
    weights = as_written("previous") if edge is None else FixedPattern("previous", edge=edge).matrix(x, x)  # type: ignore[arg-type]
    shift = torch.diag(torch.ones(63, dtype=torch.float64), -1)
    return evidence(
        equal("distance from [j = i − 1], rows 1 … N − 1", (weights - shift)[1:].abs().max(), 0),
        at_least("smallest row sum", weights.sum(-1).min(), 1),
    )


def previous_has_full_rank(edge: str) -> Evidence:
    """Closed to a circle, the shift is a permutation; with itself at the edge two rows are equal."""
    x = torch.zeros(256, 1, dtype=torch.float64)
    weights = FixedPattern("previous", edge=edge).matrix(x, x)  # type: ignore[arg-type]
    values = torch.linalg.svdvals(weights)
    written = torch.linalg.svdvals(as_written("previous", 256))
    return evidence(
        equal("σ₁", values[0], 1, within=1e-12),
        equal("σ_N", values[-1], 1, within=1e-12),
        equal("effective rank (.9) at N = 256", effective_rank(weights).estimate, 231),  # the first above .9 · 256
        equal("as written: σ_{N−1}", written[-2], 1, within=1e-12),
        equal("as written: σ_N", written[-1], 0, within=1e-12),
    )


PREV = Claim(
    id="R003-prev",
    section="1.1.2",
    kind="exact",
    statement=Text(
        "The previous-token pattern has weight 1 at j = i − 1 and 0 elsewhere.",
        "前一个 token 模式：j = i−1 处为 1，其余为 0。",
    ),
    formula=r"\xi^{(2)}_{i,j}=\begin{cases}1 & j=i-1\\ 0 & \mathrm{otherwise}\end{cases}",
    check=previous_is_a_shift,
    case=Case("row 0 attends the last token", "last"),
    control=Case("as written: row 0 sums to 0", None),
    first="conditional",
    condition=Text(
        "Row 0, which has no token before it, is given one (the last in the paper's figure, or itself).",
        "为没有前一个 token 的第 0 行指定对象（论文图中为最后一个 token，或取自身）。",
    ),
    corrected=Claim(
        id="R003-prev*",
        section="1.1.2",
        kind="exact",
        statement=Text(
            "As written it has the singular values 1, …, 1, 0; closed to a circle it is a permutation, all ones. The "
            "simplest pattern has the largest effective rank: simple does not mean low rank.",
            "按原式其奇异值为 1, …, 1, 0；首尾相接后是置换矩阵，奇异值全为 1。最简单的模式有效秩最大：简单不等于低秩。",
        ),
        formula=r"\sigma(\xi^{(2)})=(1,\dots,1,0)",
        check=previous_has_full_rank,
        case=Case("row 0 attends the last token", "last"),
        control=Case("row 0 attends itself, as row 1 attends it too", "first"),
    ),
)


# ── R003-left: weights (j + 1)³ / Σ (j + 1)³


def left_is_cubic(weights: Callable[[str], Tensor]) -> Evidence:
    """Rows against 4(j + 1)³ / ((i − 1)² i²), as Σ_{s<i} s³ = ((i − 1) i / 2)²."""
    found = weights("left")
    i, j = torch.arange(64, dtype=torch.float64)[:, None], torch.arange(64, dtype=torch.float64)
    closed = torch.where(j <= i - 2, 4 * (j + 1) ** 3 / ((i - 1) * i).square(), 0)
    return evidence(
        equal("distance from the closed form, rows 2 …", (found - closed)[2:].abs().max(), 0, within=ROUNDING),
        equal("row 5, column 3", found[5, 3], 0.64, within=ROUNDING),
        at_least("smallest row sum", found.sum(-1).min(), 1, slack=ROUNDING),
        equal("rank at N = 64", torch.linalg.matrix_rank(found), 62),
    )


LEFT = Claim(
    id="R003-left",
    section="1.1.2",
    kind="exact",
    statement=Text(
        "The left-context pattern weighs j ≤ i − 2 by (j + 1)³ over the sum of these cubes.",
        "左侧上下文模式：j ≤ i−2 的权重为 (j+1)³ 除以这些立方之和。",
    ),
    formula=r"\xi^{(4)}_{i,j}=\frac{(j+1)^3}{\sum_{l=0}^{i-2}(l+1)^3}=\frac{4(j+1)^3}{(i-1)^2i^2},\quad j\le i-2",
    check=left_is_cubic,
    case=Case("rows 0 and 1 attend token 0", as_given),
    control=Case("as written, 0/0 taken as an empty row", as_written),
    first="conditional",
    condition=Text(
        "Rows 0 and 1, where the sum is empty (0/0), are defined: weight 1 on token 0. (f depends on i too, and the "
        "text's j is both the column and the index of the sum.)",
        "第 0、1 行的和为空（0/0），需另行定义：权重 1 放在 token 0 上。（f 其实依赖 i，且原文的 j 既是列号，"
        "又是求和指标。）",
    ),
)


# ── R003-left-local: these weights reflect locality


def left_context(n: int) -> Tensor:
    return as_given("left", n)


def even_past(n: int) -> Tensor:
    """All tokens before a query alike."""
    x = torch.zeros(n, 1, dtype=torch.float64)
    return Softmax(Causal()).matrix(x, x)


def window(n: int) -> Tensor:
    x = torch.zeros(n, 1, dtype=torch.float64)
    return Softmax(Window(8)).matrix(x, x)


def mean_distance(weights: Tensor) -> float:
    """Of the last row."""
    n = len(weights)
    return float(weights[-1] @ torch.arange(n - 1, -1, -1, dtype=torch.float64))


def near_weighs_more(weights: Callable[[int], Tensor]) -> Evidence:
    """The last 1 − 2^-¼ of the prefix holds half of the weight, whatever the length."""
    shares = []
    for n in (256, 1024):
        row = weights(n)[-1]
        prefix = n - 2
        shares.append(float(row[round(2**-0.25 * prefix) :].sum()))
    return evidence(
        *(
            equal(f"weight of the nearest 15.9 % at N = {n}", share, 0.5, within=3 / n)  # the cut falls between tokens
            for n, share in zip((256, 1024), shares, strict=True)
        )
    )


def distance_is_a_fifth(weights: Callable[[int], Tensor]) -> Evidence:
    """Mean distance of the last row: i + 1 − Σs⁴/Σs³ = i + 1 − 2(2n+1)(3n²+3n−1)/(15n(n+1)), n = i − 1: i/5 + O(1)."""
    found = {n: mean_distance(weights(n)) for n in (256, 512, 1024)}
    i, m = 1023, 1022
    expected = i + 1 - 2 * (2 * m + 1) * (3 * m**2 + 3 * m - 1) / (15 * m * (m + 1))
    return evidence(
        equal("mean distance at i = 1023", found[1024], expected, within=1e-9),
        equal("its exponent in i", exponent(found), 1, within=0.02),
    )


def distances() -> Figure:
    n = [8, 16, 32, 64, 128, 256, 512]
    lines = {"left context": left_context, "window of 8": window}
    return Figure(
        Text("Mean distance that a row looks back", "一行注意力回看的平均距离"),
        "i",
        "tokens",
        {name: (n, [mean_distance(weights(x)) for x in n]) for name, weights in lines.items()},
        log_x=True,
        log_y=True,
    )


LEFT_LOCAL = Claim(
    id="R003-left-local",
    section="1.1.2",
    kind="exact",
    statement=Text(
        "This distribution by position reflects the principle of locality.",
        "这种基于位置的注意力分布反映了局部性原则的重要性。",
    ),
    formula=r"\sum_{j>2^{-1/4}i}\xi^{(4)}_{i,j}\to\frac12",
    check=near_weighs_more,
    case=Case("left context", left_context),
    control=Case("all tokens before a query alike", even_past),
    first="conditional",
    condition=Text(
        "Locality is meant relative to the length: nearer tokens weigh more (recency), but no distance is the far end.",
        "局部性是相对于长度而言的：越近权重越大（近因加权），但并没有固定的作用范围。",
    ),
    corrected=Claim(
        id="R003-left-local*",
        section="1.1.2",
        kind="exact",
        statement=Text(
            "The weights are scale-free: the mean distance is i/5 and grows with the sentence, unlike a window's.",
            "权重是无标度的：平均距离约为 i/5，随句长增长，这与窗口不同。",
        ),
        formula=r"\sum_j\xi^{(4)}_{i,j}(i-j)=\frac i5+O(1)",
        check=distance_is_a_fifth,
        case=Case("left context", left_context),
        control=Case("a window of 8 tokens", window),
    ),
    figure=distances,
)


# ── R003-left-prefix: fixed attention takes O(N²d)


def seven_heads():
    return Mixture([FixedPattern(kind) for kind in KINDS])


def at_most_quadratic(build: Callable[[], Mixture | TruncatedSVD]) -> Evidence:
    """Operations of seven heads, counted, against 4N²d a head as dense attention takes, and their growth."""
    found = {n: flops(build(), n, 16, heads=7) for n in (128, 256, 512)}
    return evidence(
        at_most("operations / N²d a head at N = 512", found[512] / (7 * 512**2 * 16), 4),
        at_most("exponent in N", exponent(found), 2, slack=0.01),
    )


def by_prefix_sums(build: Callable[[], Mixture | Quadratic]) -> Evidence:
    """Exponent of the counted operations, and the fast path against the matrix in float64."""
    found = {n: flops(build(), n, 16, heads=7) for n in (512, 1024, 2048)}
    q, k, v = (x.expand(7, 1024, 64) for x in draw(1024, 64, torch.float64))
    attend = build()
    error = (attend(q, k, v) - attend.matrix(q, k) @ v).abs().max()
    return evidence(
        equal("exponent in N", exponent(found), 1, within=0.05),  # sums over blocks add a little that fades
        at_most("fast path against the matrix at N = 1024", error, 1024 * 2.0**-53 * sqrt(64)),
    )


LEFT_PREFIX = Claim(
    id="R003-left-prefix",
    section="4.4 (1.1.2)",
    kind="complexity",
    statement=Text("Fixed attention costs O(N²d).", "固定注意力的复杂度为 O(N²d)。"),
    formula=r"O(N^2d)",
    check=at_most_quadratic,
    case=Case("the seven fixed heads", seven_heads),
    control=Case("a singular value decomposition of softmax, O(N³)", lambda: TruncatedSVD(8)),
    first="conditional",
    corrected=Claim(
        id="R003-left-prefix*",
        section="4.4 (1.1.2)",
        kind="complexity",
        statement=Text(
            "O(Nd) is enough: shifts are copies, contexts are quotients of prefix sums.",
            "O(Nd) 即可：平移只是拷贝，左右上下文是前缀和之商。",
        ),
        formula=r"o_i=\frac{\sum_{j\le i-2}(j+1)^3v_j}{\sum_{j\le i-2}(j+1)^3}",
        check=by_prefix_sums,
        case=Case("the seven fixed heads", seven_heads),
        control=Case("softmax heads", lambda: Softmax(Full())),
    ),
    reason=Text(
        "True as an upper bound, but far from what fixed patterns need.",
        "作为上界成立，但远高于固定模式的实际所需。",
    ),
)

CLAIMS = (SEVEN, NOPARAM, PREV, LEFT, LEFT_LOCAL, LEFT_PREFIX)
