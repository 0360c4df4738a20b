"""5.1.5: softmax as a distribution, where it saturates, and its Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt

import torch

from heedful.mechanisms import Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import EPS, jacobian_norms, softmax_of
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
from heedful.theory.samples import mean_and_error, normal, seeded

# ── E5.1.6: Softmax(x)_i = e^{x_i} / Σ e^{x_j}


def is_softmax(attend: Softmax) -> Evidence:
    """A row of weights against the formula, on keys of width 1 and a query 1."""
    x = 3 * normal(40, seed=0)
    weights = attend.matrix(torch.ones(1, 1, dtype=x.dtype), x[:, None])[0]
    return evidence(
        at_most("distance from the formula", (weights - x.exp() / x.exp().sum()).abs().max(), 40 * EPS),
        at_most("fast path from the formula", (softmax_of(x) - x.exp() / x.exp().sum()).abs().max(), 40 * EPS),
        equal("sum", weights.sum(), 1, within=40 * EPS),
    )


E5_1_6 = Claim(
    id="E5.1.6",
    section="5.1.5",
    kind="exact",
    statement=Text(
        "Softmax(x)_i = e^{x_i} / Σ_j e^{x_j}, a probability distribution.",
        "Softmax(x)_i = e^{x_i} / Σ_j e^{x_j}，是一个概率分布。",
    ),
    formula=r"\operatorname{Softmax}(x)_i=\frac{e^{x_i}}{\sum_{j=1}^n e^{x_j}}",
    check=is_softmax,
    case=Case("as defined", Softmax(Full(), scale=1.0)),
    control=Case("with a sink of logit 0, as some models have", Softmax(Full(), scale=1.0, sink=torch.tensor(0.0))),
)


# ── S5.1.5-hard: large inputs make it hard

Inputs = Callable[[Tensor, float], Tensor]


def multiplied(x: Tensor, c: float) -> Tensor:
    return c * x


def shifted(x: Tensor, c: float) -> Tensor:
    return x + c


def gathers_on_the_largest(enlarge: Inputs) -> Evidence:
    """x = (0, .3, 1, 1) enlarged by C: all the mass but 2e^{−.7C} gathers on the two largest."""
    x = torch.tensor([0.0, 0.3, 1.0, 1.0], dtype=torch.float64)
    rest = {c: 1 - softmax_of(enlarge(x, c))[2:].sum() for c in (1.0, 5.0, 20.0, 40.0)}
    return evidence(*(at_most(f"mass elsewhere, C = {c:g}", left, 2 * exp(-0.7 * c)) for c, left in rest.items()))


S5_1_5_HARD = Claim(
    id="S5.1.5-hard",
    section="5.1.5",
    kind="exact",
    statement=Text(
        "Where its inputs are large, softmax tends to a hard distribution, on one or a few of the largest inputs.",
        "当输入值的量级较大时，Softmax 趋向于“硬”分布，概率集中在一个或少数几个最大的输入上。",
    ),
    formula=r"\operatorname{Softmax}(Cx)\to\text{uniform on }\operatorname{argmax}x\quad(C\to\infty)",
    check=gathers_on_the_largest,
    case=Case("C·x, the gaps grow", multiplied),
    control=Case("x + C, large without gaps", shifted),
    first="conditional",
    condition=Text(
        "The gaps between the inputs grow, not only their size; equal largest inputs share the mass.",
        "增大的是输入之间的差距，而不只是量级；并列最大的输入平分概率。",
    ),
)


# ── S5.1.5-addC: adding a constant


def becomes_one_hot(enlarge: Inputs) -> Evidence:
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return evidence(
        *(at_least(f"largest weight, C = {c:g}", softmax_of(enlarge(x, c)).max(), 0.99) for c in (10.0, 1e3))
    )


def is_unmoved(enlarge: Inputs) -> Evidence:
    """x + C is rounded by ε(|x| + C)/2, which changes no weight by more than its share of ε(|x| + C)."""
    x = normal(64, seed=0)
    still = softmax_of(x)
    found = {c: (softmax_of(enlarge(x, c)) - still).abs().max() for c in (1.0, 1e3, 1e6)}
    return evidence(*(at_most(f"change, C = {c:g}", change, EPS * (c + 64)) for c, change in found.items()))


S5_1_5_ADDC = Claim(
    id="S5.1.5-addC",
    section="5.1.5",
    kind="exact",
    statement=Text(
        "If a large constant C is added to all inputs, the output of softmax tends to a one-hot distribution.",
        "如果所有输入 x_i 都加上一个较大的常数 C，Softmax 的输出将趋向于 one-hot 分布。",
    ),
    formula=r"\operatorname{Softmax}(x+C\mathbf 1)\to e_{\operatorname{argmax}x}\quad(C\to\infty)",
    check=becomes_one_hot,
    case=Case("x + C", shifted),
    control=Case("C·x", multiplied),
    first="false",
    counterexample="""\
import torch
x = torch.tensor([0., 1.], dtype=torch.float64)
for C in (0., 10., 1000.):
    print(C, torch.softmax(x + C, -1), torch.softmax(C * x, -1))
# x + C stays at (.2689, .7311); it is C·x that becomes (0, 1)""",
    corrected=Claim(
        id="S5.1.5-addC*",
        section="5.1.5",
        kind="exact",
        statement=Text(
            "Softmax does not change when a constant is added to all inputs; multiplied by C it tends to one-hot where "
            "the largest input is alone.",
            "所有输入加同一常数时 Softmax 不变；乘以 C 时，若最大输入唯一，则趋向 one-hot。",
        ),
        formula=r"\operatorname{Softmax}(x+C\mathbf 1)=\operatorname{Softmax}(x)",
        check=is_unmoved,
        case=Case("x + C", shifted),
        control=Case("C·x", lambda x, c: (1 + c) * x),
    ),
)


# ── E5.1.7: the output as an expectation


def is_expected_value(sampled: Softmax) -> Evidence:
    """One output against the mean of values drawn with the weights as probabilities."""
    q, k = normal(2, 24, 8, seed=0).unbind()
    v = normal(24, 3, seed=1)
    out = Softmax(Full())(q, k, v)[0]
    drawn = v[torch.multinomial(sampled.matrix(q, k)[0], 100_000, replacement=True, generator=seeded(2))]
    means = [mean_and_error(drawn[:, c]) for c in range(3)]
    return evidence(
        *(agrees(f"mean of v_j, component {c}", m, out[c], error=error) for c, (m, error) in enumerate(means))
    )


E5_1_7 = Claim(
    id="E5.1.7",
    section="5.1.5",
    kind="statistical",
    statement=Text(
        "The output is the expectation of v_j, j drawn with the attention weights of q_i as probabilities.",
        "输出是期望 E_{j~p(·|q_i)}[v_j]，其中 p(j|q_i) 为注意力权重。",
    ),
    formula=r"\mathrm{output}_i=\mathbb{E}_{j\sim p(\cdot|q_i)}[v_j]=\sum_{j=1}^n p(j|q_i)\,v_j",
    check=is_expected_value,
    case=Case("drawn with the weights", Softmax(Full())),
    control=Case("drawn with the weights at twice the temperature", Softmax(Full(), temperature=2.0)),
)


# ── E5.1.7-pgm: a framework

E5_1_7_PGM = Claim(
    id="E5.1.7-pgm",
    section="5.1.5",
    kind="wording",
    statement=Text(
        "The expectation brings attention into the framework of graphical models.",
        "这种期望形式将注意力机制纳入概率图模型的框架。",
    ),
    first="design",
    reason=Text(
        "A way of speaking: no graphical model is stated that could be compared with.",
        "只是一种说法：文中没有给出可供比较的图模型。",
    ),
)


# ── E5.1.8: the Jacobian


def jacobian(x: Tensor) -> Tensor:
    """∂y_i/∂x_j by backpropagation through the fast path."""
    return torch.autograd.functional.jacobian(softmax_of, x)


def has_jacobian(formula: Callable[[Tensor], Tensor]) -> Evidence:
    x = 2 * normal(12, seed=0)
    found = jacobian(x)
    return evidence(
        at_most("distance from the formula", (found - formula(softmax_of(x))).abs().max(), 100 * EPS),
        at_most("largest sum of a row", found.sum(-1).abs().max(), 100 * EPS),
        equal("rank at n = 12", torch.linalg.matrix_rank(found, rtol=1e-10), 11),
    )


def diagonal_less_outer(y: Tensor) -> Tensor:
    return torch.diag(y) - torch.outer(y, y)


E5_1_8 = Claim(
    id="E5.1.8",
    section="5.1.5",
    kind="exact",
    statement=Text(
        "∂y_i/∂x_j is y_i(1 − y_i) for i = j and −y_i y_j otherwise.",
        "∂y_i/∂x_j 当 i = j 时为 y_i(1 − y_i)，否则为 −y_i y_j。",
    ),
    formula=r"\frac{\partial y_i}{\partial x_j}=\begin{cases}y_i(1-y_i)&i=j\\-y_iy_j&i\ne j\end{cases}",
    check=has_jacobian,
    case=Case("diag(y) − yyᵀ", diagonal_less_outer),
    control=Case("its diagonal alone, as for sigmoids", lambda y: torch.diag(y * (1 - y))),
)


# ── S5.1.5-sat: saturation


def vanishes_when_sharp(x: Tensor) -> Evidence:
    """max |J_ij| ≤ 1 − max y as C·x sharpens, and its end."""
    found = []
    for c in (1.0, 5.0, 20.0, 40.0):
        left = 1 - softmax_of(c * x).max()
        found.append(at_most(f"largest |∂y_i/∂x_j|, C = {c:g}", jacobian(c * x).abs().max(), left, slack=8 * EPS))
    return evidence(*found, at_most("and at the end", found[-1].measured, 1e-12))


S5_1_5_SAT = Claim(
    id="S5.1.5-sat",
    section="5.1.5",
    kind="exact",
    statement=Text(
        "When some y_i comes close to 1, all entries of the Jacobian come close to 0.",
        "当某个 y_i 接近 1 时，雅可比矩阵的对角线与非对角线元素都接近 0。",
    ),
    formula=r"\max_{i,j}\left|\frac{\partial y_i}{\partial x_j}\right|\le 1-\max_i y_i",
    check=vanishes_when_sharp,
    case=Case("one largest input", torch.tensor([0.0, -0.5, 1.0, 0.2], dtype=torch.float64)),
    control=Case("two largest inputs, y → (½, ½)", torch.tensor([0.0, 1.0, 1.0, 0.2], dtype=torch.float64)),
)


# ── S5.1.5-unscaledgrad: gradients without the factor 1/√d_k


DRAWS = 200


def norms_and_gradients(n: int, d: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """‖J‖_F of softmax over n keys, and |∂L/∂q| of a random linear loss; one row for each draw of q, k, v."""
    attend = Softmax(Full(), scale)
    q = normal(DRAWS, 1, d, seed=0).requires_grad_()
    k, v, pull = normal(DRAWS, n, d, seed=1), normal(DRAWS, n, 16, seed=2), normal(DRAWS, 1, 16, seed=3)
    (gradient,) = torch.autograd.grad((attend(q, k, v) * pull).sum(), q)
    with torch.no_grad():
        return jacobian_norms(attend.matrix(q, k))[:, 0], torch.linalg.vector_norm(gradient[:, 0], dim=-1)


def unscaled_is_smaller(sizes: tuple[int, int]) -> Evidence:
    """Mean ‖J‖_F without scaling against with it, and how often |∂L/∂q| is the smaller one."""
    n, d = sizes
    bare, bare_gradient = norms_and_gradients(n, d, 1.0)
    scaled, scaled_gradient = norms_and_gradients(n, d, None)
    (mean, error), (bound, other) = mean_and_error(bare), mean_and_error(scaled)
    share, share_error = mean_and_error((bare_gradient < scaled_gradient).double())
    return evidence(
        surely_below("mean ‖J‖ unscaled, below scaled", mean, bound, error=sqrt(error**2 + other**2)),
        surely_above("share of draws with the smaller ∂L/∂q", share, 0.5, error=max(share_error, 0.5 / sqrt(DRAWS))),
        note=f"√d_k = {sqrt(d):.3g}, √(2 ln n) = {sqrt(2 * log(n)):.3g}; mean |∂L/∂q| unscaled "
        f"{bare_gradient.mean():.3g}, scaled {scaled_gradient.mean():.3g}",
    )


def jacobian_against_spread() -> Figure:
    spreads = [0.25 * 2 ** (step / 2) for step in range(17)]
    lines = {}
    for n in (8, 64, 512):
        q, k = torch.ones(200, 1, 1, dtype=torch.float64), normal(200, n, 1, seed=n)
        norms = [jacobian_norms(Softmax(Full(), scale=s).matrix(q, k)).mean() for s in spreads]
        lines[f"n = {n}"] = (spreads, [float(norm) for norm in norms])
    title = Text("Mean Jacobian norm of softmax as logits spread", "logits 展宽时 Softmax 雅可比范数的均值")
    return Figure(title, "standard deviation of the logits", "mean ‖J‖_F", lines, log_x=True, log_y=True)


S5_1_5_UNSCALEDGRAD = Claim(
    id="S5.1.5-unscaledgrad",
    section="5.1.5",
    kind="statistical",
    statement=Text(
        "Without scaling the gradients of softmax become very small; scaling greatly improves the flow of gradients.",
        "不缩放时 Softmax 的梯度会变得非常小；缩放因子的引入极大地改善了梯度流。",
    ),
    formula=r"\|J\|_{\mathrm{unscaled}}\ll\|J\|_{\mathrm{scaled}},\qquad J=\operatorname{diag}(y)-yy^\top",
    check=unscaled_is_smaller,
    case=Case("n = 8, d_k = 1024", (8, 1024)),
    control=Case("n = 512, d_k = 64", (512, 64)),
    first="conditional",
    condition=Text(
        "√d_k lies far above √(2 ln n), ten times and more. At n = 512, d_k = 64 it is the scaled, flat softmax that "
        "has the smaller Jacobian (1/n where it is uniform). And even where the Jacobian is small, the mean of |∂L/∂q| "
        "is not: few rows, undecided between two keys, carry it.",
        "√d_k 远大于 √(2 ln n)（十倍以上）。n = 512、d_k = 64 "
        "时反而是缩放后的平坦 Softmax 雅可比更小（均匀分布时为 1/n）。"
        "而且即使雅可比很小，|∂L/∂q| 的均值也不小：少数在两个键之间未决的行贡献了它。",
    ),
    figure=jacobian_against_spread,
)

CLAIMS = (
    E5_1_6,
    S5_1_5_HARD,
    S5_1_5_ADDC,
    E5_1_7,
    E5_1_7_PGM,
    E5_1_8,
    S5_1_5_SAT,
    S5_1_5_UNSCALEDGRAD,
)
