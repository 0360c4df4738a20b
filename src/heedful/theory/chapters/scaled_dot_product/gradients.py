"""5.1.8: projection matrices, their initialisation, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import exp, sqrt

import torch
from torch import nn

from heedful.measures import svdvals
from heedful.mechanisms import Softmax
from heedful.nn import Attention
from heedful.patterns import Full, Pattern, Window
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import (
    EPS,
    exponent,
    exponent_and_error,
    jacobian_norms,
    layer,
    project,
    variance_and_error,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Comparison,
    Evidence,
    Figure,
    Text,
    agrees,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
)
from heedful.theory.samples import mean_and_error, normal, seeded

# ── V5.1.8-svd: W = U Σ Vᵀ

Rebuild = Callable[[Tensor, Tensor, Tensor], Tensor]


def decomposes(rebuild: Rebuild) -> Evidence:
    """A projection, a square matrix, and one of rank 3, rebuilt from the library's singular values."""
    drawn = normal(12, 12, seed=1)
    matrices = {"W_Q, 10 × 4": normal(10, 4, seed=0), "12 × 12": drawn, "12 × 12 of rank 3": drawn[:, :3] @ drawn[:3]}
    found = []
    for name, matrix in matrices.items():
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        values = svdvals(matrix)
        off = torch.linalg.matrix_norm(rebuild(u, values.diag(), vt) - matrix)
        found.append(at_most(f"‖W − UΣVᵀ‖, {name}", off, 100 * EPS * float(values[0])))
        found.append(at_least(f"smallest singular value, {name}", values.min(), 0))
        one = torch.eye(len(values), dtype=torch.float64)
        turned = max((u.mT @ u - one).abs().max(), (vt @ vt.mT - one).abs().max())
        found.append(at_most(f"UᵀU and VᵀV, distance from 1, {name}", turned, 100 * EPS))
    return evidence(*found)


V5_1_8_SVD = Claim(
    id="V5.1.8-svd",
    section="5.1.8",
    kind="exact",
    statement=Text(
        "Every matrix has a decomposition W = UΣVᵀ with U, V orthogonal and Σ diagonal.",
        "任意矩阵 W 都可以分解为 W = UΣVᵀ，U、V 正交，Σ 为对角矩阵。",
    ),
    formula=r"W=U\Sigma V^\top",
    check=decomposes,
    case=Case("UΣVᵀ", lambda u, s, vt: u @ s @ vt),
    control=Case("UΣV", lambda u, s, vt: u @ s @ vt.mT),
)


# ── V5.1.8-order: which rotation comes first

Order = tuple[int, int, int]
TEXT, RIGHT = (2, 1, 0), (0, 1, 2)  # indices into (U, Σ, Vᵀ)


def turns_in_this_order(order: Order) -> Evidence:
    """q = xW_Q of a layer against x multiplied by the three factors one after the other, d_model = 10."""
    found = []
    for d_k in (10, 4):
        attention, x = layer(10, seed=0, head_dim=d_k), normal(6, 10, seed=1)
        with torch.no_grad():
            u, values, vt = torch.linalg.svd(attention.get_parameter("q_proj.weight").mT)
            sigma = torch.zeros(10, d_k, dtype=torch.float64)
            sigma.diagonal().copy_(values)
            factors = [(u, sigma, vt)[at] for at in order]
            fits = [left.shape[-1] == right.shape[0] for left, right in pairwise([x, *factors])]
            found.append(equal(f"products whose shapes fit, 10 → {d_k}", sum(fits), 3))
            if all(fits):
                off = (project(attention, x)[0] - x @ factors[0] @ factors[1] @ factors[2]).abs().max()
                found.append(at_most(f"distance from q = xW_Q, 10 → {d_k}", off, 1e3 * EPS))
    return evidence(*found)


V5_1_8_ORDER = Claim(
    id="V5.1.8-order",
    section="5.1.8",
    kind="exact",
    statement=Text(
        "A query is made by turning the input by Vᵀ, scaling by Σ, and turning by U in the space of outputs.",
        "Query 的生成可理解为：先在输入空间中旋转（Vᵀ），再沿奇异值方向缩放（Σ），最后在输出空间中旋转（U）。",
    ),
    formula=r"q=x\,V^\top\,\Sigma\,U",
    check=turns_in_this_order,
    case=Case("first Vᵀ, last U", TEXT),
    control=Case("first U, last Vᵀ", RIGHT),
    first="false",
    counterexample="""\
import torch
W_Q = torch.randn(10, 4)                        # d_model × d_k, and q = x W_Q as in (5.1.2)
U, S, Vt = torch.linalg.svd(W_Q)
print(U.shape, Vt.shape)                        # 10 × 10 acts on x, 4 × 4 on the output: x Vᵀ is not defined
x = torch.randn(10)
print((x @ U[:, :4] * S @ Vt - x @ W_Q).abs().max())""",
    corrected=Claim(
        id="V5.1.8-order*",
        section="5.1.8",
        kind="exact",
        statement=Text(
            "With rows for vectors, q = xW_Q, it is U that turns the input and Vᵀ the output. The order of the text "
            "belongs to columns, q = Wx.",
            "以行向量 q = xW_Q 计，作用于输入的是 U，作用于输出的是 Vᵀ；原文的顺序属于列向量写法 q = Wx。",
        ),
        formula=r"q=x\,U\,\Sigma\,V^\top",
        check=turns_in_this_order,
        case=Case("first U, last Vᵀ", RIGHT),
        control=Case("first Vᵀ, last U", TEXT),
    ),
)


# ── X5.1.8-var: the variance of Xavier's weights


def xavier_uniform(weight: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_uniform_(weight, generator=generator)


def xavier_normal(weight: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_normal_(weight, generator=generator)


def kaiming(weight: Tensor, generator: torch.Generator) -> None:
    nn.init.kaiming_uniform_(weight, generator=generator)


def queries(d_in: int, d_out: int) -> tuple[nn.Module, nn.Parameter]:
    """The query projection of a layer of one head, and its weights."""
    attention = Attention(d_in, 1, Softmax(Full()), head_dim=d_out, dtype=torch.float64)
    assert attention.q_proj is not None
    return attention.q_proj, attention.get_parameter("q_proj.weight")


def has_xavier_variance(init: Callable[[Tensor, torch.Generator], None]) -> Evidence:
    found = []
    for d_in, d_out in ((768, 64), (256, 256)):
        _, weight = queries(d_in, d_out)
        init(weight.data, seeded(d_in))
        value, error = variance_and_error(weight.detach().flatten())
        found.append(agrees(f"variance of weights, {d_in} → {d_out}", value, 2 / (d_in + d_out), error=error))
    return evidence(*found)


X5_1_8_VAR = Claim(
    id="X5.1.8-var",
    section="5.1.8",
    kind="statistical",
    statement=Text(
        "Xavier's initialisation has variance 2/(d_in + d_out), so 2/(d_model + d_k) for the projections.",
        "Xavier 初始化的方差为 2/(d_in + d_out)，对投影矩阵即 2/(d_model + d_k)。",
    ),
    formula=r"\operatorname{Var}(W)=\frac{2}{d_{\mathrm{in}}+d_{\mathrm{out}}}",
    check=has_xavier_variance,
    case=Case("Xavier, uniform", xavier_uniform),
    control=Case("Kaiming, 2/d_in", kaiming),
)


# ── X5.1.8-ensures: what it keeps


def gains(d_in: int, d_out: int, draws: int = 24) -> tuple[tuple[float, float], tuple[float, float]]:
    """Mean square of output over input, and of the gradient in the input over that in the output, with errors."""
    generator = seeded(d_in + d_out)
    forward, backward = [], []
    projection, weight = queries(d_in, d_out)
    for _ in range(draws):
        xavier_normal(weight.data, generator)
        x = torch.randn(32, d_in, generator=generator, dtype=torch.float64, requires_grad=True)
        pull = torch.randn(32, d_out, generator=generator, dtype=torch.float64)
        out = projection(x)
        (gradient,) = torch.autograd.grad(out, x, pull)
        forward.append(out.detach().square().mean() / x.detach().square().mean())
        backward.append(gradient.square().mean() / pull.square().mean())
    return mean_and_error(torch.stack(forward)), mean_and_error(torch.stack(backward))


def keeps_variance(sizes: tuple[int, int]) -> Evidence:
    (ahead, error), (back, other) = gains(*sizes)
    return evidence(agrees("gain forward", ahead, 1, error=error), agrees("gain backward", back, 1, error=other))


def has_these_gains(forward_by: Callable[[int, int], int]) -> Evidence:
    """Forward 2·forward_by/(d_in + d_out), backward the rest of 2."""
    found = []
    for sizes in ((768, 64), (64, 256)):
        (ahead, error), (back, other) = gains(*sizes)
        expected = 2 * forward_by(*sizes) / sum(sizes)
        found.append(agrees(f"gain forward, {sizes[0]} → {sizes[1]}", ahead, expected, error=error))
        found.append(agrees(f"gain backward, {sizes[0]} → {sizes[1]}", back, 2 - expected, error=other))
    return evidence(*found)


X5_1_8_ENSURES = Claim(
    id="X5.1.8-ensures",
    section="5.1.8",
    kind="statistical",
    statement=Text(
        "This makes sure that signals and gradients neither grow nor shrink on the way forward and back.",
        "这种初始化确保信号和梯度在正向与反向传播中都不会过度放大或衰减。",
    ),
    formula=r"\frac{\mathbb{E}\,q^2}{\mathbb{E}\,x^2}=1,\qquad "
    r"\frac{\mathbb{E}\,(\partial L/\partial x)^2}{\mathbb{E}\,(\partial L/\partial q)^2}=1",
    check=keeps_variance,
    case=Case("256 → 256", (256, 256)),
    control=Case("768 → 64", (768, 64)),
    first="conditional",
    condition=Text(
        "d_in = d_out. For 768 → 64 the signal gains 1.85 and the gradient keeps 0.15.",
        "d_in = d_out。768 → 64 时信号方差放大到 1.85 倍，梯度方差只剩 0.15 倍。",
    ),
    corrected=Claim(
        id="X5.1.8-ensures*",
        section="5.1.8",
        kind="statistical",
        statement=Text(
            "The gain is 2d_in/(d_in + d_out) forward and 2d_out/(d_in + d_out) backward; only their mean is 1.",
            "正向增益为 2d_in/(d_in + d_out)，反向增益为 2d_out/(d_in + d_out)；只有二者的平均为 1。",
        ),
        formula=r"\frac{2d_{\mathrm{in}}}{d_{\mathrm{in}}+d_{\mathrm{out}}},\qquad "
        r"\frac{2d_{\mathrm{out}}}{d_{\mathrm{in}}+d_{\mathrm{out}}}",
        check=has_these_gains,
        case=Case("d_in forward, d_out backward", lambda d_in, d_out: d_in),
        control=Case("the other way round", lambda d_in, d_out: d_out),
    ),
)


# ── G5.1.8-chain: ∂L/∂W_Q


def chain_rule(assemble: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """∂L/∂W_Q by backpropagation through a layer against a product of X and ∂L/∂Q, n = d_model = d_k = 5.

    ∂L/∂Q = [P ∘ (GVᵀ − rowsum(P ∘ GVᵀ))] K / √d_k with G = ∂L/∂O.
    """
    attention = layer(5, seed=0, value_dim=3)
    attention.out_proj = nn.Identity()
    x, pull = normal(5, 5, seed=1), normal(5, 3, seed=2)
    weight = attention.get_parameter("q_proj.weight")
    (found,) = torch.autograd.grad((attention(x) * pull).sum(), weight)
    with torch.no_grad():
        q, k, v = project(attention, x)
        weights, inner = attention.mechanism.matrix(q, k), pull @ v.mT
        by_hand = weights * (inner - (weights * inner).sum(-1, keepdim=True)) @ k / sqrt(5)
    return evidence(at_most("distance from ∂L/∂W_Q", (found.mT - assemble(x, by_hand)).abs().max(), 1e3 * EPS))


G5_1_8_CHAIN = Claim(
    id="G5.1.8-chain",
    section="5.1.8",
    kind="exact",
    statement=Text(
        "∂L/∂W_Q = ∂L/∂O · ∂O/∂Q · ∂Q/∂W_Q with ∂Q/∂W_Q = Xᵀ.",
        "∂L/∂W_Q = ∂L/∂O · ∂O/∂Q · ∂Q/∂W_Q，其中 ∂Q/∂W_Q = Xᵀ。",
    ),
    formula=r"\frac{\partial L}{\partial W_Q}=X^\top\frac{\partial L}{\partial Q},\qquad "
    r"\frac{\partial L}{\partial Q}=\frac{1}{\sqrt{d_k}}\left[P\circ(GV^\top-\mathrm{rowsum}(P\circ GV^\top))\right]K",
    check=chain_rule,
    case=Case("Xᵀ · ∂L/∂Q", lambda x, gradient: x.mT @ gradient),
    control=Case("∂L/∂Q · Xᵀ, in the order written", lambda x, gradient: gradient @ x.mT),
    first="conditional",
    condition=Text(
        "Xᵀ multiplies from the left, not last as written; the derivative ∂Q/∂W_Q itself is a tensor with four axes.",
        "Xᵀ 应从左侧相乘，而非按所写顺序置于末尾；∂Q/∂W_Q 本身是四阶张量。",
    ),
)


# ── G5.1.8-stable: gradients at any depth and length

LENGTHS = (128, 512, 2048, 8192)


def query_gradients(pattern: Pattern, n: int, seed: int) -> Tensor:
    """Mean |∂L/∂q| of 64 queries over n keys, for a random linear loss, scaled scores of variance 1."""
    q = normal(64, 32, seed=seed).requires_grad_()
    k, v, pull = normal(n, 32, seed=seed + 1), normal(n, 8, seed=seed + 2), normal(64, 8, seed=seed + 3)
    (gradient,) = torch.autograd.grad((Softmax(pattern)(q, k, v) * pull).sum(), q)
    return torch.linalg.vector_norm(gradient, dim=-1).mean()


def does_not_depend_on_length(pattern: Pattern) -> Evidence:
    """The exponent of n in |∂L/∂q|, a draw of everything being the unit."""
    draws = [[float(query_gradients(pattern, n, 100 * draw + n)) for n in LENGTHS] for draw in range(8)]
    slope, error = mean_and_error(torch.tensor([exponent(LENGTHS, row) for row in draws]))
    return evidence(agrees("exponent of n in |∂L/∂q|, n = 128 … 8192", slope, 0, error=error))


def squared_norms(n: int, spread: float, draws: int = 64) -> Tensor:
    """n ‖J‖²_F of softmax of n iid normal logits: keys are normal and queries have length spread · √d."""
    q = spread * sqrt(4) * nn.functional.normalize(normal(draws, 1, 4, seed=n), dim=-1)
    return n * jacobian_norms(Softmax(Full()).matrix(q, normal(draws, n, 4, seed=n + 1)))[:, 0].square()


def through_layers(depth: int, seed: int) -> Tensor:
    """log₁₀ of the mean square of ∂L/∂x through so many residual layers without normalisation."""
    x = normal(48, 32, seed=seed).requires_grad_()
    out = x
    for at in range(depth):
        out = out + layer(32, seed=1000 * seed + at)(out)
    return torch.autograd.grad(out, x, normal(48, 32, seed=seed + 500))[0].square().mean().log10()


def depends_on_length_and_depth(power: float) -> Evidence:
    """n E‖J‖²_F → e^{power · s²}, the exponent −½ of n in ‖J‖_F, and gradients through 8 layers against 1."""
    lengths = (4096, 16384, 65536)  # where the next order in 1/n is below the errors

    def level(spread: float) -> Comparison:
        limit = exp(power * spread**2)
        mean, error = mean_and_error(squared_norms(16384, spread))
        expected = limit * (1 - (2 * limit - 1) ** 2 / 16384)  # to first order in 1/n, by expanding Σe^{2x} / (Σe^x)²
        return agrees(f"n E‖J‖² at n = 16384, s = {spread}", mean, expected, error=error)

    means = [mean_and_error(squared_norms(n, 0.5, draws=24) / n) for n in lengths]
    slope, error = exponent_and_error(lengths, [mean for mean, _ in means], [error for _, error in means])
    growth, growth_error = mean_and_error(
        torch.stack([through_layers(8, seed) - through_layers(1, seed) for seed in range(12)])
    )
    return evidence(
        level(0.5),
        level(0.75),
        agrees("exponent of n in ‖J‖, s = 0.5", slope / 2, -0.5, error=error / 2),
        surely_above("log₁₀ of the squared gradient, 8 layers over 1", growth, 0.5, error=growth_error),
    )


def gradient_against_length() -> Figure:
    lengths = [2**step for step in range(6, 14)]
    lines = {
        name: (lengths, [float(query_gradients(pattern, n, n)) for n in lengths])
        for name, pattern in (("all keys", Full()), ("a window of 16", Window(16)))
    }
    title = Text("|∂L/∂q| under scaled scores", "缩放分数下的 |∂L/∂q|")
    return Figure(title, "n", "mean |∂L/∂q|", lines, log_x=True, log_y=True)


G5_1_8_STABLE = Claim(
    id="G5.1.8-stable",
    section="5.1.8",
    kind="asymptotic",
    statement=Text(
        "With the scaling factor gradients flow stably, whatever the depth of the model or the length of a sequence.",
        "引入缩放因子后，无论模型深度如何或序列长度如何，梯度都能稳定地流动。",
    ),
    formula=r"\left\|\frac{\partial L}{\partial q}\right\|=\Theta(1)\quad(n\to\infty)",
    check=does_not_depend_on_length,
    case=Case("scaled scores over all keys", Full()),
    control=Case("scaled scores over a window of 16", Window(16)),
    first="false",
    counterexample="""\
import torch, heedful as h
for n in (64, 256, 1024, 4096):
    torch.manual_seed(0)
    q, k, v = torch.randn(64, 32, requires_grad=True), torch.randn(n, 32), torch.randn(n, 8)
    (h.Softmax(h.Full())(q, k, v) * torch.randn(64, 8)).sum().backward()
    print(n, float(q.grad.norm(dim=-1).mean()))             # about halves as n grows fourfold""",
    corrected=Claim(
        id="G5.1.8-stable*",
        section="5.1.8",
        kind="asymptotic",
        statement=Text(
            "At logits of standard deviation s the norm of the Jacobian falls like √(e^{s²}/n): scaling fixes s and "
            "does nothing about n. Nor about depth: through residual layers without normalisation gradients grow.",
            "logits 标准差为 s 时，雅可比范数按 √(e^{s²}/n) 衰减：缩放只固定了 s，对 n 无能为力；"
            "对深度也是如此：残差层若无归一化，梯度逐层放大。",
        ),
        formula=r"n\,\mathbb{E}\|J\|_F^2=e^{s^2}\left(1-\frac{(2e^{s^2}-1)^2}{n}+O(n^{-2})\right)",
        check=depends_on_length_and_depth,
        case=Case("e^{s²}", 1.0),
        control=Case("e^{s²/2}", 0.5),
    ),
    figure=gradient_against_length,
)

CLAIMS = (V5_1_8_SVD, V5_1_8_ORDER, X5_1_8_VAR, X5_1_8_ENSURES, G5_1_8_CHAIN, G5_1_8_STABLE)
