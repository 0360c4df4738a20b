"""Two examples: f = exp (softmax attention) and f = relu² (the gated attention unit)."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, pi, sqrt

import torch

from heedful.mechanisms import relu2
from heedful.shapes import Tensor
from heedful.theory import closed_forms
from heedful.theory.chapters.concentration.samples import (
    Activation,
    concentration_of,
    gaussian_keys,
    integrated_S,
    sampled,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    Undecided,
    agrees,
    at_least,
    at_most,
    equal,
    evidence,
)
from heedful.theory.samples import mean_and_error

POINTS = [(b, g) for b in (-2.0, -0.5, 0.0, 0.7, 3.0) for g in (0.6, 1.0, 2.5)]

# ── S002-exp: S = exp(−σ²‖q‖²/2)


def matches_integral_of_exp(factor: float) -> Evidence:
    """e^{−factor·γ²} and the closed form of the library against quadrature, which knows β too."""
    worst = {"e^{−factor·γ²}": 0.0, "closed_forms.S_exp": 0.0}
    for beta, gamma in POINTS:
        exact = integrated_S(torch.exp, beta, gamma)
        worst["e^{−factor·γ²}"] = max(worst["e^{−factor·γ²}"], abs(exp(-factor * gamma**2) / exact - 1))
        worst["closed_forms.S_exp"] = max(
            worst["closed_forms.S_exp"], abs(float(closed_forms.S_exp(gamma)) / exact - 1)
        )
    return evidence(*(at_most(f"largest relative error, {name}", x, 1e-12) for name, x in worst.items()))


EXP = Claim(
    id="S002-exp",
    section="two examples",
    kind="exact",
    statement=Text(
        "For f = exp, S(a) = exp(−σ²‖q‖²/2).",
        "f = exp 时，S(a) = exp(−σ²‖q‖²/2)。",
    ),
    formula=r"S(a)=\exp\left(-\frac12\sigma^2\|q\|^2\right)",
    check=matches_integral_of_exp,
    case=Case("factor ½", 0.5),
    control=Case("without the ½", 1.0),
)


# ── S002-exp-arbitrary: softmax can be as sparse as one likes


def few_tokens_at_any_length(c: float) -> Evidence:
    """1 / E Σa² of softmax of N logits with spread c·√(2 ln N): how many tokens take part, from 512 to 524,288."""
    tokens = {
        n: 1 / closed_forms.expected_square_sum(n, c * closed_forms.freezing_spread(n)) for n in (2**9, 2**14, 2**19)
    }
    return evidence(*(at_most(f"tokens that take part, N = {n}", x, 4) for n, x in tokens.items()))


def formula_at_512_keys(gamma: float) -> Evidence:
    """Sampled S at n = 512 against e^{−γ²/2}; the formula errs by a quarter at √(ln n / 2) = 1.77 and S ≥ 1/√n."""
    mean, error = mean_and_error(sampled(torch.exp, 512, 0.0, gamma, repeats=2000, seed=0).rows)
    formula = float(closed_forms.S_exp(gamma))
    return evidence(
        at_most("mean S / e^{−γ²/2}", mean / formula, 1.25),
        at_least("formula against the floor 1/√n", formula, 512**-0.5),
        note=f"mean S = {mean:.4f} ± {error:.1g}, formula {formula:.4f}",
    )


def random_energy_transition() -> Figure:
    c = [0.1 + 0.15 * i for i in range(16)]
    lines = {
        f"N = {n}": (c, [closed_forms.expected_square_sum(n, x * closed_forms.freezing_spread(n)) for x in c])
        for n in (64, 1024, 2**16)
    }
    lines["N → ∞"] = (c, [closed_forms.poisson_dirichlet_square_sum(x) for x in c])
    title = Text(
        "Softmax of N Gaussian logits freezes at spread √(2 ln N)",
        "N 个高斯 logits 的 softmax 在标准差 √(2 ln N) 处“冻结”",
    )
    return Figure(title, "spread / √(2 ln N)", "E Σa²", lines)


EXP_ARBITRARY = Claim(
    id="S002-exp-arbitrary",
    section="two examples",
    kind="asymptotic",
    statement=Text(
        "As σ → ∞ or ‖q‖ → ∞, S(a) → 0: softmax attention can concentrate as sparsely as one likes.",
        "当 σ→∞ 或 ‖q‖→∞ 时 S(a)→0，即理论上标准 Attention 确实可以任意稀疏地“集中注意力”。",
    ),
    formula=r"\sigma\|q\|>\sqrt{2\ln n}\ \Rightarrow\ \left(\mathbb E\sum_j a_j^2\right)^{-1}=O(1)",
    check=few_tokens_at_any_length,
    case=Case("spread 1.5·√(2 ln N)", 1.5),
    control=Case("spread 0.5·√(2 ln N)", 0.5),
    first="conditional",
    condition=Text(
        "The spread σ‖q‖ has to grow with the length: few tokens take part only above √(2 ln n) (3.5 at n = 512), "
        "whatever S → 0 says of n → ∞ at fixed spread.",
        "σ‖q‖ 必须随长度增长：只有超过 √(2 ln n)（n = 512 时为 3.5）才集中于 O(1) 个 token；"
        "固定 σ‖q‖ 令 n→∞ 所得的 S→0 并不保证这一点。",
    ),
    corrected=Claim(
        id="S002-exp-arbitrary*",
        section="two examples",
        kind="statistical",
        statement=Text(
            "For n keys the formula e^{−γ²/2} serves below γ = √(ln n / 2); "
            "beyond it is too small, and at last below 1/√n.",
            "对 n 个 key，公式 e^{−γ²/2} 只在 γ < √(ln n / 2) 时可用；超过后偏小，最终小于不可能低于的 1/√n。",
        ),
        formula=r"S\approx e^{-\gamma^2/2}\quad\text{for}\ \gamma<\sqrt{\frac12\ln n}",
        check=formula_at_512_keys,
        case=Case("γ = 1", 1.0),
        control=Case("γ = 3", 3.0),
    ),
    figure=random_energy_transition,
)


# ── S002-exp-how: enlarge ‖q‖, or the differences between keys


def focus_grows_with_size(f: Activation) -> Evidence:
    """Tokens that take part, as q or as the keys' deviations from their mean are doubled, four times."""
    q, k = gaussian_keys(512, 0.5, 0.5, repeats=16, seed=3)
    mean = 0.5 * q
    ways: dict[str, Callable[[float], tuple[Tensor, Tensor]]] = {
        "q": lambda c: (c * q, k),
        "the keys' differences": lambda c: (q, mean + c * (k - mean)),
    }
    found = []
    for name, scaled in ways.items():
        tokens = torch.stack([concentration_of(f, *scaled(2.0**i)).participation.mean() for i in range(5)])
        found.append(
            at_most(f"tokens that take part, ×2 in {name}: largest ratio", (tokens[1:] / tokens[:-1]).max(), 0.9)
        )
    return evidence(*found)


EXP_HOW = Claim(
    id="S002-exp-how",
    section="two examples",
    kind="exact",
    statement=Text(
        "To make softmax attention concentrate more, enlarge ‖q‖ or the variance among the keys.",
        "让注意力更集中的方法：增大 q 的模长，或者增大各个 k 之间的方差，换言之拉开 k 的差距。",
    ),
    formula=r"\frac{\partial}{\partial\gamma}e^{-\gamma^2/2}<0",
    check=focus_grows_with_size,
    case=Case("exp", torch.exp),
    control=Case("relu², which does not change with the size of q", relu2),
)


# ── S002-relu2: the closed form


def text_relu2(beta: float, gamma: float, five: float = 5.0) -> float:
    """The text's expression, term by term."""
    b, g = torch.tensor([beta, gamma], dtype=torch.float64)
    erf, bell = torch.erf(b / (sqrt(2) * g)) + 1, torch.exp(-(b**2) / (2 * g**2))
    above = bell * (sqrt(2) * b * g + sqrt(pi) / bell * (b**2 + g**2) * erf)
    below = 2 * sqrt(2) * b * g * bell * (b**2 + five * g**2)
    below = below + 2 * sqrt(pi) * (b**4 + 6 * b**2 * g**2 + 3 * g**4) * erf
    return float(above / (pi**0.25 * below.sqrt()))


def matches_integral_of_relu2(five: float) -> Evidence:
    """The text's expression and the library's against quadrature; for β ≪ 0 the text's cancels, hence 10⁻⁹."""
    text, library = 0.0, 0.0
    for beta, gamma in POINTS:
        exact = integrated_S(relu2, beta, gamma)
        text = max(text, abs(text_relu2(beta, gamma, five) / exact - 1))
        library = max(library, abs(float(closed_forms.S_relu2(beta, gamma)) / exact - 1))
    return evidence(
        at_most("largest relative error of the expression", text, 1e-9),
        at_most("largest relative error of closed_forms.S_relu2", library, 1e-12),
    )


def curves(S: Callable[[float, Tensor], Tensor], betas: tuple[float, ...], title: Text) -> Figure:
    gamma = torch.linspace(0.1, 5, 50, dtype=torch.float64)
    lines = {f"β = {beta:g}": (gamma.tolist(), S(beta, gamma).tolist()) for beta in betas}
    return Figure(title, "γ = σ‖q‖", "S(a)", lines)


def relu2_curves() -> Figure:
    title = Text("S(a) of relu² attention", "relu² 注意力的稀疏程度")
    return curves(closed_forms.S_relu2, (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0), title)


RELU2 = Claim(
    id="S002-relu2",
    section="two examples",
    kind="exact",
    statement=Text(
        "For f = relu², S(a) has a closed form in β = q·μ and γ = σ‖q‖.",
        "f = relu² 时，S(a) 有以 β = q·μ、γ = σ‖q‖ 表示的闭式。",
    ),
    formula=r"S=\frac{e^{-z^2/2}\left(\sqrt2\,\beta\gamma+\sqrt\pi\,e^{z^2/2}(\beta^2+\gamma^2)(\operatorname{erf}\frac{z}{\sqrt2}+1)\right)}"
    r"{\sqrt[4]{\pi}\sqrt{2\sqrt2\,\beta\gamma e^{-z^2/2}(\beta^2+5\gamma^2)"
    r"+2\sqrt\pi(\beta^4+6\beta^2\gamma^2+3\gamma^4)(\operatorname{erf}\frac{z}{\sqrt2}+1)}},"
    r"\quad z=\frac\beta\gamma",
    check=matches_integral_of_relu2,
    case=Case("β² + 5γ², as in the text", 5.0),
    control=Case("β² + 6γ²", 6.0),
    figure=relu2_curves,
)


# ── S002-relu2-beta: only for β < 0 can S tend to 0


def can_vanish(beta: float) -> Evidence:
    """The smallest S over γ from 0.05 to 50; and S grows with z = β/γ, so that the sign of β decides."""
    z = torch.linspace(-8, 8, 3201, dtype=torch.float64)
    gamma = torch.logspace(-1.3, 1.7, 200, dtype=torch.float64)
    return evidence(
        at_least("least step of S along z", closed_forms.S_relu2(z, 1.0).diff().min(), 0),
        equal("S at β = 0 (1/√6)", closed_forms.S_relu2(0.0, 1.0), 6**-0.5, within=1e-15),
        at_most("least S over γ", closed_forms.S_relu2(beta, gamma).min(), 1e-3),
    )


def empty_rows(shift: float) -> Evidence:
    """How many rows of relu² over n = 64 keys have no weight at all, at z = −2, and how S falls there."""
    rows = sampled(relu2, 64, -2.0, 1.0, repeats=4000, seed=4)
    share, error = mean_and_error((rows.participation == 0).double())
    expected = float((1 - torch.special.ndtr(torch.tensor(-2.0 + shift, dtype=torch.float64))) ** 64)
    z = -60.0
    tail = float(closed_forms.log_S_relu2(z, 1.0)) + z**2 / 4 + log(6 * -z * sqrt(2 * pi)) / 2
    return evidence(
        agrees("share of rows without weight", share, expected, error=error),
        equal("log S − log √(φ(z)/6|z|) at z = −60", tail, 0, within=1e-3),
    )


RELU2_BETA = Claim(
    id="S002-relu2-beta",
    section="two examples",
    kind="exact",
    statement=Text(
        "Only for β < 0 can the S of relu² tend to 0.",
        "只有 β < 0 时，原版 GAU（relu²）的稀疏度才有机会趋于 0。",
    ),
    formula=r"\inf_\gamma S=0\iff\beta<0,\qquad S|_{\beta=0}=\frac1{\sqrt6}",
    check=can_vanish,
    case=Case("β = −1", -1.0),
    control=Case("β = +1", 1.0),
    corrected=Claim(
        id="S002-relu2-beta*",
        section="two examples",
        kind="statistical",
        statement=Text(
            "S depends on z = β/γ alone and falls like √(φ(z)/6|z|); but a weight is non-zero with probability Φ(z), "
            "so that among n keys a whole row vanishes with probability (1 − Φ(z))ⁿ.",
            "S 只依赖 z = β/γ，z→−∞ 时 S ~ √(φ(z)/6|z|)；但每个权重非零的概率只有 Φ(z)，"
            "n 个 key 时整行为零的概率是 (1 − Φ(z))ⁿ。",
        ),
        formula=r"S\sim\sqrt{\frac{\varphi(z)}{6|z|}},\qquad P(a=0)=(1-\Phi(z))^n",
        check=empty_rows,
        case=Case("Φ(z)", 0.0),
        control=Case("Φ(z + 0.1)", 0.1),
    ),
)


# ── S002-relu2-bias: a bias of the keys may help


def needs_trained_unit(_: object) -> Evidence:
    raise Undecided(
        "decided by a study that trains gated attention units with and without a bias of the keys, which has not run. "
        "That a negative q·μ makes relu² sparser is checked in S002-relu2-beta"
    )


RELU2_BIAS = Claim(
    id="S002-relu2-bias",
    section="two examples",
    kind="empirical",
    statement=Text(
        "Unlike softmax, where it has no effect on S, a bias of the keys may help relu² attention.",
        "跟 f = exp 的标准注意力不同，k 的 bias 项可能会对 f = relu² 的 GAU 有正面帮助。",
    ),
    check=needs_trained_unit,
    control=Case("softmax, on which a bias of the keys has no effect"),
    first="empirical",
    reason=Text(
        "That it makes attention sparser is exact; that this helps takes training.",
        "偏置能使注意力更稀疏是精确结论；是否有“正面帮助”需要训练才能判定。",
    ),
)

CLAIMS = (EXP, EXP_ARBITRARY, EXP_HOW, RELU2, RELU2_BETA, RELU2_BIAS)
