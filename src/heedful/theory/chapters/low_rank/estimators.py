"""11.3.4: linear attention by random features, in expectation and in floating point."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt

import torch

from heedful.mechanisms import Linear, Quadratic, Softmax
from heedful.patterns import Full
from heedful.random_features import FavorPlus
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.kernels import Product, features
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, agrees, at_most, equal, evidence

# ── T11.27: linear attention equals softmax attention in expectation

DRAWS = 20_000


def _one_query() -> tuple[Tensor, Tensor, Tensor]:
    """d = 1: q = 1, keys 1 and −1, values 1 and 0, so that softmax gives e/(e + 1/e) = .8808."""
    q, k, v = (torch.tensor(x, dtype=torch.float64)[:, None] for x in ([1.0], [1.0, -1.0], [1.0, 0.0]))
    return q, k, v


def estimates(features_drawn: int, normalise: bool, draws: int = DRAWS) -> Tensor:
    """The output of attention with FAVOR+ features, once for each draw: heads are draws."""
    q, k, v = (x.expand(draws, -1, -1) for x in _one_query())
    phi = FavorPlus(1, features_drawn, 0, orthogonal=False, scale=1.0, heads=draws)
    return Linear(phi, Full(), normalise)(q, k, v).flatten()


def unbiased(normalise: bool) -> Evidence:
    """The mean over draws of m = 8 features, against softmax attention, or against Σ e^(q·k) v without normaliser."""
    q, k, v = _one_query()
    target = Softmax(Full(), 1.0) if normalise else Quadratic(torch.exp, Full(), 1.0, normalise=None)
    found = estimates(8, normalise)
    error = found.std() / sqrt(DRAWS)
    return evidence(agrees("mean output, 8 features", found.mean(), target(q, k, v), error=error))


def ratio_of_two() -> float:
    """E of the ratio at m = 2, by the trapezoid rule over ω₁, ω₂: features are e^{ωx − x²/2}, and e^{−1/2} cancels."""
    w = torch.linspace(-10, 10, 401, dtype=torch.float64)
    density = torch.exp(-w.square() / 2)
    density /= density.sum()
    first, both = torch.exp(2 * w), torch.exp(2 * w) + 1  # φ(q)φ(1) and φ(q)(φ(1) + φ(−1)), in units of e^{−1}
    ratio = (first[:, None] + first) / (both[:, None] + both)
    return float(density @ ratio @ density)


def bias_at_two(expected: Callable[[], float]) -> Evidence:
    found = estimates(2, True)
    one = estimates(1, True, 200)
    return evidence(
        agrees("mean output, 2 features", found.mean(), expected(), error=found.std() / sqrt(DRAWS)),
        agrees("mean output, 1 feature", one.mean(), 0.5, error=one.std() / sqrt(200)),
    )


def bias_against_features() -> Figure:
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    means = [float(estimates(m, True, 4000).mean()) for m in counts]
    exact = float(Softmax(Full(), 1.0)(*_one_query()))
    x = [float(m) for m in counts]
    lines = {"mean over draws": (x, means), "softmax": (x, [exact] * len(x))}
    title = Text("Attention by random features is biased", "随机特征注意力是有偏的")
    return Figure(title, "features", "output", lines, log_x=True)


T11_27 = Claim(
    id="T11.27",
    section="11.3.4",
    kind="statistical",
    statement=Text(
        "For certain kernels linear attention equals softmax attention in expectation.",
        "对于某些特定的核函数，线性注意力在期望意义上等价于原始 softmax 注意力。",
    ),
    formula=r"\mathbb{E}\,\mathrm{LinearAttention}(q,K,V)=\mathrm{Attention}(q,K,V)",
    check=unbiased,
    case=Case("attention: rows normalised", True),
    control=Case("the sum Σ e^(q·k) v, not normalised", False),
    first="false",
    counterexample="""\
import torch
generator = torch.Generator().manual_seed(0)
q, k, v = 1.0, torch.tensor([1., -1.]), torch.tensor([1., 0.])
w = torch.randn(100_000, 8, 1, generator=generator)         # 8 positive random features, many times
K = (torch.exp(w * q - q * q / 2) * torch.exp(w * k - k * k / 2)).mean(1)
print(K.mean(0), torch.exp(q * k))                          # the kernel is unbiased: 2.72, 0.37
print((K @ v / K.sum(-1)).mean(), torch.softmax(q * k, -1) @ v)  # attention is not: 0.75, 0.88""",
    corrected=Claim(
        id="T11.27*",
        section="11.3.4",
        kind="statistical",
        statement=Text(
            "Random features are unbiased for exp(q·k) alone. The ratio is biased by O(1/m): in the example 0.5 at "
            "m = 1, where φ(q) cancels, and 0.6070 at m = 2, instead of 0.8808.",
            "随机特征只对 exp(q·k) 无偏。其比值有 O(1/m) 的偏差：例中 m = 1 时为 0.5（φ(q) 被约去），m = 2 时为 "
            "0.6070，而非 0.8808。",
        ),
        formula=r"\mathbb{E}\,\frac{\hat S}{\hat Z}-r="
        r"\frac{r\operatorname{Var}Z-\operatorname{Cov}(S,Z)}{m\,Z^2}+O(m^{-2})",
        check=bias_at_two,
        case=Case("the ratio's mean, by quadrature", ratio_of_two),
        control=Case("softmax attention", lambda: exp(1) / (exp(1) + exp(-1))),
    ),
    figure=bias_against_features,
)


# ── C11.11: linear attention avoids softmax's underflow


def kernel_values(q: Tensor, k: Tensor) -> Tensor:
    """The original kernel values, φ(q)·φ(k) over their sum, as the text has it."""
    products = features(Linear(FavorPlus(8, 256), Full()), q, k)
    return products / products.sum(-1, keepdim=True)


def in_logarithms(q: Tensor, k: Tensor) -> Tensor:
    """The same features by their logarithms, the largest subtracted, as softmax has it."""
    return Linear(FavorPlus(8, 256), Full()).matrix(q, k)


def softmax_weights(q: Tensor, k: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k)


def survives_long_vectors(weights: Product) -> Evidence:
    """In float32, with queries and keys of length 40, d = 8. Exponents are of size ‖x‖²/2 = 283, so that rounding
    leaves 300 · 2⁻²³ of a weight."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 16, 8, generator=generator).unbind()
    rows = weights(40 * q / q.norm(dim=-1, keepdim=True), 40 * k / k.norm(dim=-1, keepdim=True)).sum(-1)
    return evidence(
        equal("rows of 16 that are NaN", rows.isnan().sum(), 0),
        at_most("largest |row sum − 1|", (rows.nan_to_num(0) - 1).abs().max(), 300 * 2**-23),
    )


C11_11 = Claim(
    id="C11.11",
    section="11.3.4",
    kind="exact",
    statement=Text(
        "Linear attention avoids the numerical instability of softmax: small weights may underflow there, while it "
        "uses the kernel's own values.",
        "线性注意力避免了 softmax 的数值不稳定性：权重非常小时 softmax 可能下溢，而线性注意力使用原始的核函数值。",
    ),
    check=survives_long_vectors,
    case=Case("positive features, as they are", kernel_values),
    control=Case("softmax, its row's largest subtracted", softmax_weights),
    first="false",
    counterexample="""\
import torch
x = torch.tensor([20., 0., 0., 0.])                         # float32
w = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
phi = torch.exp(w @ x - x @ x / 2)
print(phi @ phi)                                            # 0: the normaliser of linear attention is 0/0
print(torch.softmax(torch.tensor([0., -1000.]), -1))        # (1, 0): softmax is exact""",
    corrected=Claim(
        id="C11.11*",
        section="11.3.4",
        kind="exact",
        statement=Text(
            "Softmax with its row's maximum subtracted is the stable one. Linear attention has to do the same, with "
            "the logarithms of its features.",
            "减去行最大值的 softmax 才是稳定的；线性注意力必须对特征的对数做同样的处理。",
        ),
        check=survives_long_vectors,
        case=Case("features by their logarithms, the largest subtracted", in_logarithms),
        control=Case("features as they are", kernel_values),
    ),
)

CLAIMS = (T11_27, C11_11)
