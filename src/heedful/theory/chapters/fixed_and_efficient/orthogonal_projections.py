"""4.3: Johnson–Lindenstrauss, and what orthogonal frozen projections do for gradients, scale and memory."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log10, sqrt

import torch

from heedful import nn
from heedful.mechanisms import Softmax
from heedful.nn import Gaussian, Orthogonal
from heedful.nn.attention import HeadProjection
from heedful.patterns import Full
from heedful.shapes import Float, Tensor
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
)
from heedful.theory.closed_forms import johnson_lindenstrauss_dimension
from heedful.theory.samples import normal

GRID = [(n, eps) for n in (16, 64, 512, 4096) for eps in (0.1, 0.2, 0.3, 0.5, 0.9)]


def bad_pairs(n: int, eps: float, k: int) -> float:
    """How many of n points' distances² a Gaussian map to k dimensions changes by more than 1 ± ε, on average.

    ‖Ωx‖² / ‖x‖² is χ²_k / k, so its two tails are incomplete gamma functions: no bound, the number itself.
    (Orthonormal rows times √(d/k) scatter less: their variance is (1 − k/d)/(1 + 2/d) of this.)
    """
    half = torch.tensor(k / 2, dtype=torch.float64)
    low, high = torch.special.gammainc(half, half * (1 - eps)), torch.special.gammaincc(half, half * (1 + eps))
    return n * (n - 1) / 2 * float(low + high)


# ── R003-JL: k ≥ 4 ln n / (ε²/2 − ε³/3) suffices


def a_good_map_exists(dimension: Callable[[int, float], int]) -> Evidence:
    """Fewer than one bad pair on average: then some map has none. And such a map, found at the first draw."""
    worst = max(bad_pairs(n, eps, dimension(n, eps)) for n, eps in GRID)
    n, eps, d = 64, 0.5, 768
    k = dimension(n, eps)
    x, (i, j) = normal(n, d, seed=1), torch.triu_indices(n, n, 1)
    f = Orthogonal(d, heads=1, head_dim=k, seed=0, gain=sqrt(d / k), dtype=torch.float64)
    ratio = f(x[i] - x[j]).square().sum(-1) / (x[i] - x[j]).square().sum(-1)
    return evidence(
        at_most("bad pairs on average, the worst of n = 16 … 4096, ε = .1 … .9", worst, 1),
        at_most(f"largest |ratio − 1| at n = 64, ε = .5, k = {k}", (ratio - 1).abs().max(), eps),
    )


def by_common_logarithm(n: int, eps: float) -> int:
    return ceil(4 * log10(n) / (eps**2 / 2 - eps**3 / 3))


JL = Claim(
    id="R003-JL",
    section="4.3.1",
    kind="exact",
    statement=Text(
        "Johnson–Lindenstrauss: for ε in (0, 1) and k ≥ 4 log n / (ε²/2 − ε³/3), for any n points of ℝᵈ there is a map "
        "to ℝᵏ that keeps all squared distances within 1 ± ε.",
        "Johnson-Lindenstrauss 定理：对 ε ∈ (0, 1) 与 k ≥ 4 log n / (ε²/2 − ε³/3)，对 ℝᵈ 中任意 n 个点，存在映射 "
        "f: ℝᵈ → ℝᵏ，使所有距离平方保持在 1 ± ε 倍之内。",
    ),
    formula=r"k\ge\frac{4\ln n}{\epsilon^2/2-\epsilon^3/3}",
    check=a_good_map_exists,
    case=Case("natural logarithm", johnson_lindenstrauss_dimension),
    control=Case("common logarithm", by_common_logarithm),
)


# ── R003-JL-whp: random orthogonal projections do, with high probability


def likely_good(dimension: Callable[[int, float], int]) -> Evidence:
    """Bad pairs on average, times n: below 1, a draw fails with a probability below 1/n. And ten draws."""
    worst = max(n * bad_pairs(n, eps, dimension(n, eps)) for n, eps in GRID)
    n, eps, d, draws = 64, 0.5, 768, 10
    ratio = stretch_of_draws(n, d, dimension(n, eps), draws)
    failed = int(((ratio - 1).abs() > eps).any(-1).sum())
    return evidence(
        at_most("n · bad pairs on average, the worst of n = 16 … 4096, ε = .1 … .9", worst, 1),
        equal(f"of {draws} draws at n = 64, ε = .5, how many fail", failed, 0),
    )


def stretch_of_draws(n: int, d: int, k: int, draws: int) -> Float[Tensor, "draws pairs"]:
    """d/k ‖Ωx − Ωy‖² / ‖x − y‖²: every head of a layer's projection is a draw of its own."""
    omega = Orthogonal(d, heads=draws, head_dim=k, seed=0, gain=sqrt(d / k), dtype=torch.float64)
    x, (i, j) = normal(n, d, seed=1), torch.triu_indices(n, n, 1)
    apart = x[i] - x[j]
    images = omega(apart).unflatten(-1, (draws, k))
    return (images.square().sum(-1) / apart.square().sum(-1, keepdim=True)).mT


def a_head(n: int, eps: float) -> int:
    return 64


def distortion_by_dimension() -> Figure:
    """The extreme ratios of 64 points' distances² as k grows."""
    sizes = [16, 32, 64, 128, 256, 512, 768]
    found = [stretch_of_draws(64, 768, k, 1) for k in sizes]
    return Figure(
        Text("Distances² of 64 points after projection from 768", "从 768 维投影后 64 个点的距离平方之比"),
        "k",
        "ratio",
        {
            "largest": (sizes, [float(x.max()) for x in found]),
            "smallest": (sizes, [float(x.min()) for x in found]),
        },
        log_x=True,
    )


JL_LIKELY = Claim(
    id="R003-JL-whp",
    section="4.3.1",
    kind="asymptotic",
    statement=Text(
        "Random orthogonal projections satisfy it with high probability.", "随机正交投影以高概率满足此性质。"
    ),
    formula=r"\mathbb{P}(\mathrm{all}\ \mathrm{within}\ 1\pm\epsilon)\ge 1-n^{-b}",
    check=likely_good,
    case=Case("k ≥ 6 ln n / (ε²/2 − ε³/3)", lambda n, eps: johnson_lindenstrauss_dimension(n, eps, power=1)),
    control=Case("k = 64, the width of a head", a_head),
    first="conditional",
    condition=Text(
        "Times √(d/k), and with k ≥ (4 + 2b) ln n / (ε²/2 − ε³/3) for a probability of 1 − n⁻ᵇ. At the k of the "
        "theorem itself the proof only gives one of 1/n, though fewer than 8 % of Gaussian draws fail at the sizes "
        "tried here. None of it speaks of heads: for n = 512 even ε → 1 needs k ≥ 150, and heads have 64.",
        "须乘以 √(d/k)，且 k ≥ (4 + 2b) ln n / (ε²/2 − ε³/3) 时概率才是 1 − n⁻ᵇ。"
        "取定理中的最小 k，证明只保证概率不低于 1/n，尽管在此处试过的规模下高斯映射的实际失败率不到 8%。"
        "这与注意力头无关：n = 512 时即使 ε → 1 也需要 k ≥ 150，而一个头只有 64 维。",
    ),
    figure=distortion_by_dimension,
)


# ── R003-4.3.2-grad: fixed projections avoid exploding and vanishing gradients

Through = Callable[[Tensor], Tensor]


def gradient_keeps_its_size(through: Through) -> Evidence:
    """The median gradient in 64 tokens of width 32 as they get 100 times as long: within a factor of 100?

    The median, because a token on the edge between two keys is an exception: its gradient grows.
    """
    norms = []
    for length in (1.0, 100.0):
        x = (length * normal(64, 32)).requires_grad_()
        out = through(x)
        out.backward(normal(*out.shape, seed=2))
        assert x.grad is not None
        norms.append(float(x.grad.norm(dim=-1).median()))
    ratio = norms[1] / norms[0]
    return evidence(
        at_least("gradient of long tokens against short ones", ratio, 0.01),
        at_most("gradient of long tokens against short ones", ratio, 100),
    )


def frozen_weights(x: Tensor) -> Tensor:
    """Attention of x to 16 given tokens by frozen orthogonal queries and keys."""
    q, k = (Orthogonal(32, heads=1, head_dim=32, seed=seed, dtype=torch.float64) for seed in (0, 1))
    return Softmax(Full()).matrix(q(x), k(normal(16, 32, seed=3)))


def frozen_queries(x: Tensor) -> Tensor:
    return Orthogonal(32, heads=1, head_dim=32, seed=0, dtype=torch.float64)(x)


def map_keeps_gradients(kind: type[Orthogonal] | type[Gaussian]) -> Evidence:
    """‖Ωᵀg‖ against ‖g‖ for a square Ω, by backpropagation; and the Jacobian of softmax at logits (20, 0, 0, 0).

    Its largest entry is a(1 − a) with a = e²⁰/(e²⁰ + 3), whatever made the logits.
    """
    x = normal(16, 32).requires_grad_()
    out = kind(32, heads=1, head_dim=32, seed=0, dtype=torch.float64)(x)
    g = normal(*out.shape, seed=2)
    out.backward(g)
    assert x.grad is not None
    ratio = x.grad.norm(dim=-1) / g.norm(dim=-1)
    logits = torch.tensor([20.0, 0, 0, 0], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: torch.softmax(z, -1), logits)
    a = torch.softmax(logits, -1)[0]
    return evidence(
        equal("largest |‖Ωᵀg‖/‖g‖ − 1|", (ratio - 1).abs().max(), 0, within=1e-13),
        equal("largest entry of the softmax's Jacobian", jacobian.abs().max(), a * (1 - a), within=1e-15),
    )


GRADIENTS = Claim(
    id="R003-4.3.2-grad",
    section="4.3.2",
    kind="exact",
    statement=Text(
        "Fixed projections avoid exploding and vanishing gradients in training.",
        "固定投影避免了训练过程中的梯度爆炸/消失。",
    ),
    formula=r"0<c\le\left\|\frac{\partial A}{\partial x}\right\|\le C<\infty",
    check=gradient_keeps_its_size,
    case=Case("the weights of a layer with frozen orthogonal Q, K", frozen_weights),
    control=Case("the orthogonal projection alone", frozen_queries),
    first="false",
    counterexample="""\
import torch, heedful as h
q, k = (h.nn.Orthogonal(32, heads=1, head_dim=32, seed=s) for s in (0, 1))   # frozen
torch.manual_seed(0)
tokens, keys, g = torch.randn(64, 32), torch.randn(16, 32), torch.randn(64, 16)
for length in (1., 100.):
    x = (length * tokens).requires_grad_()
    h.Softmax(h.Full()).matrix(q(x), k(keys)).backward(g)
    print(length, x.grad.norm(dim=-1).median())              # 0.23, then 4e-15: it vanishes all the same""",
    corrected=Claim(
        id="R003-4.3.2-grad*",
        section="4.3.2",
        kind="exact",
        statement=Text(
            "A square orthogonal projection passes gradients on at their length. The softmax behind it does not: its "
            "Jacobian at logits (20, 0, 0, 0) has no entry above 6.2·10⁻⁹, whatever the projection. Freezing removes "
            "∂L/∂W, not ∂L/∂x.",
            "方的正交投影原样传递梯度的长度；其后的 softmax 则不然：在 logits (20, 0, 0, 0) 处，"
            "无论投影如何，其 Jacobian 的元素都不超过 6.2·10⁻⁹。冻结只是去掉了 ∂L/∂W，并没有去掉 ∂L/∂x。",
        ),
        formula=r"\|\Omega^\top g\|=\|g\|,\qquad J=\mathrm{diag}(a)-aa^\top",
        check=map_keeps_gradients,
        case=Case("orthogonal", Orthogonal),
        control=Case("Gaussian", Gaussian),
    ),
)


# ── R003-4.3.2-scale: orthogonality preserves the scale of features


def lengths_are_kept(k: int) -> Evidence:
    """‖Ωx‖/‖x‖ over 64 tokens of width 768."""
    omega = Orthogonal(768, heads=1, head_dim=k, seed=0, dtype=torch.float64)
    x = normal(64, 768, seed=1)
    ratio = omega(x).norm(dim=-1) / x.norm(dim=-1)
    return evidence(equal("mean of ‖Ωx‖/‖x‖", ratio.mean(), 1, within=1e-13))


def scores_keep_their_spread(gain: float) -> Evidence:
    """The variance of the scores q·k/√64 of heads of width 64, over 24 heads, each a draw of its own.

    Tokens are 64 vectors whose entries have mean square 1, as after a normalisation.
    """
    d, k, heads = 768, 64, 24
    x = sqrt(d) * torch.nn.functional.normalize(normal(64, d, seed=1), dim=-1)
    q, key = (
        Orthogonal(d, heads=heads, head_dim=k, seed=seed, gain=gain, dtype=torch.float64)(x)
        .unflatten(-1, (heads, k))
        .transpose(0, 1)
        for seed in (2, 3)
    )
    off = ~torch.eye(64, dtype=torch.bool)
    squares = (q @ key.mT / sqrt(k))[:, off].square().mean(-1)
    return evidence(agrees("mean square of the scores", squares.mean(), 1, error=squares.std() / sqrt(heads)))


SCALE = Claim(
    id="R003-4.3.2-scale",
    section="4.3.2",
    kind="exact",
    statement=Text("Orthogonality preserves the scale of the features.", "正交性保持了特征尺度。"),
    formula=r"\|\Omega x\|=\|x\|",
    check=lengths_are_kept,
    case=Case("768 → 768", 768),
    control=Case("768 → 64, one head", 64),
    first="conditional",
    condition=Text(
        "Lengths are kept by a square Ω only; a head's d × d_k block shrinks them to √(d_k/d), 0.289 for 64 of 768. "
        "What it keeps is the variance of each entry.",
        "只有方阵 Ω 保持长度；一个头的 d × d_k 块会把长度缩到 √(d_k/d)（768 维中取 64 维时为 0.289）。"
        "它保持的是每个分量的方差。",
    ),
    corrected=Claim(
        id="R003-4.3.2-scale*",
        section="4.3.2",
        kind="statistical",
        statement=Text(
            "Orthonormal rows of any number keep the variance of the entries, so that scores of unit-variance tokens "
            "have variance 1 after the 1/√d_k; the factor √(d/d_k) that keeps lengths would multiply them by d/d_k.",
            "任意行数的标准正交行都保持分量的方差，因此单位方差 token 的分数在除以 √d_k 后方差为 1；"
            "若改用保持长度的因子 √(d/d_k)，分数会放大 d/d_k 倍。",
        ),
        formula=r"\mathbb{E}\left(\frac{(\Omega_Qx)^\top\Omega_Ky}{\sqrt{d_k}}\right)^2=1",
        check=scores_keep_their_spread,
        case=Case("orthonormal rows", 1.0),
        control=Case("rows times √(d/d_k)", sqrt(768 / 64)),
    ),
)


# ── R003-4.3.2-mem: nothing to store for frozen projections


def stores_half(qk: HeadProjection | None) -> Evidence:
    """Numbers that a layer of width d trains, their gradients and what Adam keeps, in units of d²."""
    d = 64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.Attention(d, heads=8, qk=qk, seed=None if qk is None else 0)
    optimiser = torch.optim.Adam(layer.parameters())
    layer(normal(4, d).float()).square().sum().backward()
    optimiser.step()
    gradients = sum(p.grad.numel() for p in layer.parameters() if p.grad is not None)
    kept = sum(x.numel() for state in optimiser.state.values() for x in state.values() if x.ndim)
    return evidence(
        equal("trained numbers / d²", sum(p.numel() for p in layer.parameters()) / d**2, 2),
        equal("gradients / d²", gradients / d**2, 2),
        equal("numbers that Adam keeps / d²", kept / d**2, 4),
    )


MEMORY = Claim(
    id="R003-4.3.2-mem",
    section="4.3.2",
    kind="exact",
    statement=Text(
        "The gradients of the frozen projections need not be stored, and layers can share them.",
        "内存效率：不需要存储投影矩阵的梯度，可以跨层共享投影矩阵。",
    ),
    formula=r"4d^2\to2d^2\ \mathrm{trained}",
    check=stores_half,
    case=Case("Q, K orthogonal and frozen", Orthogonal),
    control=Case("Q, K learned", None),
    reason=Text(
        "In numbers: half of the 4d² of attention, a sixth of a layer of 12d² with its feed-forward part; the gradient "
        "and Adam's two moments are saved for each.",
        "数量上：注意力 4d² 参数的一半，即含前馈部分的 12d² 一层的六分之一；每个参数省去梯度与 Adam 的两个矩。",
    ),
)


# ── R003-4.3.3: beside the Performer

PERFORMER = Claim(
    id="R003-4.3.3",
    section="4.3.3",
    kind="wording",
    statement=Text(
        "The Performer and orthogonal random attention both freeze orthogonal random matrices, one to approximate the "
        "softmax kernel at lower cost, the other as projections of Q and K with fewer parameters.",
        "Performer 与正交随机注意力都使用冻结的正交随机矩阵：前者用来近似 softmax 核以降低复杂度，"
        "后者作为 Q/K 投影矩阵以减少可训练参数。",
    ),
    first="design",
    reason=Text(
        "A comparison of purposes: nothing to decide. The matrices are not quite the same: rows of the Performer have "
        "norms drawn from χ_d (R003-3.3.2-GS*), those of a projection have norm 1 (R003-4.3.2-scale*).",
        "这是用途上的比较，没有可判定的内容。两者的矩阵也不完全相同：Performer 的行模长服从 χ_d（R003-3.3.2-GS*），"
        "投影矩阵的行模长为 1（R003-4.3.2-scale*）。",
    ),
)

CLAIMS = (JL, JL_LIKELY, GRADIENTS, SCALE, MEMORY, PERFORMER)
