"""Linear decay: linear recurrences as attention with weights λ^{n−1}, …, λ, 1."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

import torch

from heedful.core import Mechanism
from heedful.measures import concentration
from heedful.mechanisms import GatedLinear, Retention
from heedful.shapes import Tensor
from heedful.theory import closed_forms
from heedful.theory.chapters.concentration.samples import slope_and_error
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, equal, evidence

Formula = Callable[[float, int], float]


def of_decay(decay: float, n: int) -> tuple[float, float]:
    """S of the last of n queries of retention whose q and k are all 1, and how many tokens take part."""
    one, ones = torch.ones(1, 1, dtype=torch.float64), torch.ones(n, 1, dtype=torch.float64)
    found = concentration(Retention(decay).operator(one, ones))
    return float(found.rows[0]), float(found.participation[0])


# ── S002-decay: the closed form


def text_decay(decay: float, n: int) -> float:
    x = torch.tensor(decay, dtype=torch.float64)  # 0/0 is NaN here, where Python's numbers would raise
    return float(((1 - x**n) / (n * (1 - x)) * (1 + x) / (1 + x**n)).sqrt())


def matches_retention(decays: tuple[float, ...]) -> Evidence:
    """The text's expression and the library's against rows of retention; where an expression gives no number, ∞."""
    text, library = 0.0, 0.0
    for decay in decays:
        for n in (10, 300):
            S, _ = of_decay(decay, n)
            gap = abs(text_decay(decay, n) / S - 1)
            text = max(text, inf if gap != gap else gap)
            library = max(library, abs(float(closed_forms.S_decay(decay, n)) / S - 1))
    return evidence(
        at_most("largest relative error of the expression", text, 1e-12),
        at_most("largest relative error of closed_forms.S_decay", library, 1e-12),
    )


DECAY = Claim(
    id="S002-decay",
    section="linear decay",
    kind="exact",
    statement=Text(
        "For a = (λ^{n−1}, …, λ, 1), λ ∈ (0, 1], S(a) = √((1 − λⁿ)/(n(1 − λ)) · (1 + λ)/(1 + λⁿ)).",
        "a = (λ^{n−1}, …, λ, 1)，λ ∈ (0, 1]：S(a) = √((1 − λⁿ)/(n(1 − λ)) · (1 + λ)/(1 + λⁿ))。",
    ),
    formula=r"S(a)=\sqrt{\frac{1-\lambda^n}{n(1-\lambda)}\frac{1+\lambda}{1+\lambda^n}}",
    check=matches_retention,
    case=Case("λ = 0.5, 0.9, 0.99", (0.5, 0.9, 0.99)),
    control=Case("λ = 1, which the text allows: 0/0", (1.0,)),
    first="conditional",
    condition=Text(
        "λ < 1; at λ = 1 the expression is 0/0, and its limit is S = 1.", "λ < 1；λ = 1 时为 0/0，其极限是 S = 1。"
    ),
)


# ── S002-decay-bound: an upper bound


def below(bound: Formula) -> Evidence:
    """The least of bound / S = 1/√(1 − λⁿ) over a grid on which λⁿ is above 4·10⁻⁹, so that rounding hides nothing."""
    ratio = min(bound(decay, n) / of_decay(decay, n)[0] for decay in (0.3, 0.7, 0.9, 0.99) for n in (4, 16))
    return evidence(
        at_least("least bound / S − 1", ratio - 1, 1e-9),
        note=f"bound at λ = 0.999, n = 1000: {text_bound(0.999, 1000):.3f}, where S ≤ 1 says more",
    )


def text_bound(decay: float, n: int) -> float:
    return sqrt((1 + decay) / (n * (1 - decay) * (1 + decay**n)))


def short_bound(decay: float, n: int) -> float:
    return sqrt(1 / (n * (1 - decay) * (1 + decay**n)))


DECAY_BOUND = Claim(
    id="S002-decay-bound",
    section="linear decay",
    kind="exact",
    statement=Text(
        "S(a) < √((1 + λ)/(n(1 − λ)(1 + λⁿ))).",
        "S(a) < √((1 + λ)/(n(1 − λ)(1 + λⁿ)))。",
    ),
    formula=r"S(a)<\sqrt{\frac1n\frac{1+\lambda}{(1-\lambda)(1+\lambda^n)}}",
    check=below,
    case=Case("as stated", text_bound),
    control=Case("without the factor 1 + λ", short_bound),
)


# ── S002-decay-limit: S → 0, so that sparsity is no problem


def vanishes(decay: float) -> Evidence:
    """The exponent of S in n between 1,024 and 16,384."""
    lengths = [1024, 2048, 4096, 8192, 16_384]
    slope, _ = slope_and_error(torch.tensor(lengths), torch.tensor([of_decay(decay, n)[0] for n in lengths]))
    return evidence(equal("exponent of S in n", slope, -0.5, within=0.01))


def keeps_its_width(width: Callable[[float], float]) -> Evidence:
    """n·S², the tokens that take part, at n = 4,096; rounding alone is left of λⁿ."""
    return evidence(
        *(equal(f"n·S² at λ = {x:g}", of_decay(x, 4096)[1], width(x), within=1e-10) for x in (0.5, 0.9, 0.99))
    )


def width_of_decay() -> Figure:
    lengths = [2**i for i in range(1, 15)]
    lines = {
        f"λ = {x:g}": (lengths, [n * float(closed_forms.S_decay(x, n)) ** 2 for n in lengths]) for x in (0.5, 0.9, 0.99)
    }
    title = Text(
        "Tokens that take part under decay: a window of constant width", "指数衰减下参与的 token 数：宽度恒定的窗口"
    )
    return Figure(title, "n", "n·S²", lines, log_x=True, log_y=True)


DECAY_LIMIT = Claim(
    id="S002-decay-limit",
    section="linear decay",
    kind="asymptotic",
    statement=Text(
        "For λ < 1, S(a) → 0 as n → ∞, so that sparsity is no problem for linear recurrences with decay.",
        "当 λ < 1 时，只要 n→∞，总有 S(a)→0，所以对于带有显式 Decay 的线性 RNN 模型来说，稀疏性是不成问题的。",
    ),
    formula=r"\lambda<1\ \Rightarrow\ S(a)=O(n^{-1/2})\to0",
    check=vanishes,
    case=Case("λ = 0.9", 0.9),
    control=Case("λ = 1", 1.0),
    first="conditional",
    corrected=Claim(
        id="S002-decay-limit*",
        section="linear decay",
        kind="exact",
        statement=Text(
            "n·S² tends to (1 + λ)/(1 − λ): 3 at λ = 0.5, 19 at 0.9, 199 at 0.99. S falls because n grows; attention "
            "is a window of constant width, not focus on one token.",
            "n·S² → (1 + λ)/(1 − λ)：λ = 0.5、0.9、0.99 时为 3、19、199。S 变小只是因为 n 变大；"
            "这是宽度恒定的窗口，而不是集中于一个 token。",
        ),
        formula=r"nS^2\to\frac{1+\lambda}{1-\lambda}",
        check=keeps_its_width,
        case=Case("(1 + λ)/(1 − λ)", lambda x: (1 + x) / (1 - x)),
        control=Case("1/(1 − λ), the sum of the weights", lambda x: 1 / (1 - x)),
    ),
    reason=Text(
        "The limit holds as it stands; what it is taken to mean needs the corrected form.",
        "极限本身成立；但由此推断“稀疏性不成问题”须以更正后的形式理解。",
    ),
    figure=width_of_decay,
)


# ── S002-decay-fixed: only fixed attention that decays


def is_fixed(mechanism: Mechanism) -> Evidence:
    """Weights under two sequences that differ in everything but q·k = 1; and each row falls with the distance."""
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(32, 4, dtype=torch.float64)
    q[:, 0] = 1
    first, second = (other_keys(generator) for _ in range(2))
    with torch.no_grad():
        A, B = (mechanism.matrix(q, k) for k in (first, second))
    return evidence(
        at_most("largest difference between two texts", (A - B).abs().max(), 1e-12),
        at_least("least step towards the present in the last row", A[-1].diff().min(), 0),
    )


def other_keys(generator: torch.Generator) -> Tensor:
    k = 3 * torch.randn(32, 4, generator=generator, dtype=torch.float64)
    k[:, 0] = 1
    return k


DECAY_FIXED = Claim(
    id="S002-decay-fixed",
    section="linear decay",
    kind="exact",
    statement=Text(
        "Such models can express only fixed attention that decays with relative distance, and so cannot attend to far "
        "context as the content asks.",
        "它的问题是只能表达随着相对位置增大而衰减的、固定不变的注意力，从而无法自适应地关注到距离足够长的 Context。",
    ),
    formula=r"a_{ij}=\lambda^{i-j}\quad\text{whatever the tokens}",
    check=is_fixed,
    case=Case("a constant decay", Retention(0.9)),
    control=Case("a decay that each token chooses", GatedLinear(d=4, gate="head", tau=1.0)),
    first="conditional",
    condition=Text(
        "The decay does not depend on the data. Gates that do (GLA, Mamba) change the weights with the text.",
        "衰减与数据无关。若衰减由数据决定（GLA、Mamba 等），权重会随内容改变。",
    ),
)

CLAIMS = (DECAY, DECAY_BOUND, DECAY_LIMIT, DECAY_FIXED)
