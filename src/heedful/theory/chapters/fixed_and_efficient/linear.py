"""2.1: linear attention: what it is equal to, what it costs, and which feature maps there are."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, exp, factorial, pi, sqrt

import torch
import torch.nn.functional as F

from heedful.core import Dims, Mechanism
from heedful.feature_maps import Cos, CosFormer, Elu1, FeatureMap, Polynomial
from heedful.mechanisms import Linear, Quadratic, Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.fixed_and_efficient.counts import LENGTHS, WIDTHS, draw, exponent, flops, largest
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence

# ── R003-std-cost: QKᵀ takes O(N²d) time and O(N²) space


def by_the_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k) @ v


def by_a_fused_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax(Full())(q, k, v)


def quadratic_time_and_space(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    """Operations counted, and the largest tensor that is made."""
    attention = Softmax(Full())
    space = {n: largest(lambda n=n: attend(*draw(n, 32))) for n in LENGTHS}  # type: ignore[misc]
    return evidence(
        equal("exponent of time in N", exponent({n: flops(attention, n, 32) for n in LENGTHS}), 2, within=0.01),
        equal("exponent of time in d", exponent({d: flops(attention, 512, d) for d in WIDTHS}), 1, within=0.01),
        equal("exponent of the largest tensor in N", exponent(space), 2, within=0.01),
    )


STD_COST = Claim(
    id="R003-std-cost",
    section="2.1.1",
    kind="complexity",
    statement=Text("QKᵀ of N tokens takes O(N²d) time and O(N²) space.", "计算 QKᵀ 需要 O(N²d) 时间和 O(N²) 空间。"),
    formula=r"QK^\top\in\mathbb R^{N\times N}:\ O(N^2d)\ \mathrm{time},\ O(N^2)\ \mathrm{space}",
    check=quadratic_time_and_space,
    case=Case("the matrix, then its product with V", by_the_matrix),
    control=Case("a fused kernel that never stores the matrix", by_a_fused_kernel),
    first="conditional",
    condition=Text(
        "The matrix is stored. A kernel that goes by tiles takes the same time and O(Nd) space.",
        "把矩阵存下来。按块计算的融合核耗时相同，但只需 O(Nd) 空间。",
    ),
)


# ── R003-linattn-eq: Attention(Q, K, V) = φ(Q)φ(K)ᵀV


def is_softmax(attend: Mechanism) -> Evidence:
    """Weights on 64 tokens of width 8 against softmax."""
    q, k, _ = draw(64, 8, torch.float64)
    exact, found = Softmax(Full()).matrix(q, k), attend.matrix(q, k)
    return evidence(
        equal("mean row sum", found.sum(-1).mean(), 1, within=1e-12),
        at_most("‖A − softmax‖ / ‖softmax‖", (found - exact).norm() / exact.norm(), 1e-12),
    )


def is_softmax_if_the_kernel_is(phi: FeatureMap) -> Evidence:
    """With a normaliser, and features of the series of exp up to degree 12, on 64 tokens of width 2."""
    q, k, _ = (x / 2 for x in draw(64, 2, torch.float64))
    exact, found = Softmax(Full()).matrix(q, k), Linear(phi, Full()).matrix(q, k)
    top = float((q @ k.mT / sqrt(2)).abs().max())
    remainder = top**13 / factorial(13) * exp(top)  # of the series, against weights of e^-top at least
    return evidence(
        equal("mean row sum", found.sum(-1).mean(), 1, within=1e-12),
        at_most("largest difference from softmax", (found - exact).abs().max(), 2 * remainder * exp(top)),
    )


LINATTN_EQ = Claim(
    id="R003-linattn-eq",
    section="2.1.2",
    kind="exact",
    statement=Text(
        "Softmax attention is rewritten as inner products of features: Attention(Q, K, V) = φ(Q)φ(K)ᵀV.",
        "将 softmax 注意力重写为核特征映射的内积：Attention(Q, K, V) = φ(Q)φ(K)ᵀV。",
    ),
    formula=r"\operatorname{Attention}(Q,K,V)=\phi(Q)\phi(K)^\top V",
    check=is_softmax,
    case=Case("φ = elu + 1", Linear(Elu1(), Full(), normalise=False)),
    control=Case("the kernel exp, divided by its row sums", Quadratic(torch.exp, Full(), normalise="l1")),
    first="false",
    counterexample="""\
import torch, heedful as h
q, k, _ = torch.randn(3, 64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
A = h.Linear(h.Elu1(), h.Full(), normalise=False).matrix(q, k)
print(A.sum(-1).mean())                                     # 689, not 1
A, S = A / A.sum(-1, keepdim=True), h.Softmax(h.Full()).matrix(q, k)
print((A - S).norm() / S.norm(), (1 / 64 - S).norm() / S.norm())  # 0.70; an even spread is off by 0.76""",
    corrected=Claim(
        id="R003-linattn-eq*",
        section="2.1.2",
        kind="exact",
        statement=Text(
            "Divided by its row sums, φ(Q)φ(K)ᵀV is an attention of its own; it is that of softmax as far as "
            "φ(q)·φ(k) is e^{q·k/√d}, which takes infinitely many features.",
            "除以行和后，D⁻¹φ(Q)φ(K)ᵀV 是另一种注意力；只有在 φ(q)·φ(k) 逼近 e^{q·k/√d} 的程度上才等于 softmax 注意力，"
            "而精确相等需要无穷多特征。",
        ),
        formula=r"D^{-1}\phi(Q)\phi(K)^\top V,\qquad D=\operatorname{diag}(\phi(Q)\phi(K)^\top 1)",
        check=is_softmax_if_the_kernel_is,
        case=Case("the series of exp up to degree 12", Polynomial(12)),
        control=Case("elu + 1", Elu1()),
    ),
)


# ── R003-assoc: (φ(Q)φ(K)ᵀ)V = φ(Q)(φ(K)ᵀV)


def associates(attend: Mechanism) -> Evidence:
    """The matrix times V against the fast path, and what the fast path takes."""
    q, k, v = draw(512, 32, torch.float64)
    first, then = attend.matrix(q, k) @ v, attend(q, k, v)
    # sums of 512 · 32 products, rounded to float64 each
    rounding = 512 * 32 * 2.0**-53 * float(first.abs().max())
    return evidence(
        at_most("largest difference", (first - then).abs().max(), rounding),
        equal("exponent of time in N", exponent({n: flops(attend, n, 32) for n in LENGTHS}), 1, within=0.01),
        equal("exponent of time in d", exponent({d: flops(attend, 512, d) for d in WIDTHS}), 2, within=0.01),
    )


ASSOC = Claim(
    id="R003-assoc",
    section="2.1.3",
    kind="exact",
    statement=Text(
        "Matrix products associate: (φ(Q)φ(K)ᵀ)V = φ(Q)(φ(K)ᵀV), in O(Nd²) instead of O(N²d).",
        "利用矩阵乘法结合律：(φ(Q)φ(K)ᵀ)V = φ(Q)(φ(K)ᵀV)，由 O(N²d) 变为 O(Nd²)。",
    ),
    formula=r"(\phi(Q)\phi(K)^\top)V=\phi(Q)(\phi(K)^\top V)",
    check=associates,
    case=Case("φ = elu + 1", Linear(Elu1(), Full(), normalise=False)),
    control=Case("softmax, which no product of factors makes", Softmax(Full())),
    reason=Text("With m features O(Nmd).", "有 m 个特征时为 O(Nmd)。"),
)


# ── R003-assoc-table: it stores O(d²) and is the faster where d ≪ N


def state_and_gain(phi: FeatureMap) -> Evidence:
    """Numbers kept after N tokens, and operations of softmax over those of linear attention, at N = 4096, d = 64."""
    linear, softmax = Linear(phi, Full()), Softmax(Full())
    short, long = (Dims(n, n, 64, 64) for n in (1024, 4096))
    state = linear.cost(long).state
    gain = softmax.cost(long).flops / linear.cost(long).flops
    return evidence(
        equal("state at N = 4096 less that at 1024", (state or 0) - (linear.cost(short).state or 0), 0),
        equal("gain against N / features", gain * phi.dim(64) / 4096, 1, within=1e-12),
        at_least("gain", gain, 1),
        at_most("state, in units of d²", (state or 0) / 64**2, 2),
    )


ASSOC_TABLE = Claim(
    id="R003-assoc-table",
    section="2.1.3",
    kind="complexity",
    statement=Text(
        "Linear attention stores O(d²) instead of O(N²), and is the faster where d ≪ N.",
        "线性注意力存储 O(d²) 而非 O(N²)；当 d ≪ N 时显著更高效。",
    ),
    formula=r"\frac{4N^2d}{4Nrd}=\frac Nr",
    check=state_and_gain,
    case=Case("elu + 1, as many features as d", Elu1()),
    control=Case("all monomials up to degree 3, 266,305 features", Polynomial(3)),
    first="conditional",
    condition=Text(
        "The map has r ≈ d features: state r(d + 1), gain N/r, so that the two meet at N = r. Q, K, V themselves are "
        "O(Nd), and causal attention goes by chunks or keeps a state for each token.",
        "特征数 r ≈ d：状态为 r(d+1)，加速比 N/r，二者在 N = r 处持平。Q、K、V 本身仍占 O(Nd)；因果注意力需分块计算，"
        "否则要为每个 token 保存状态。",
    ),
)


# ── R003-elu: φ(x) = elu(x) + 1


def stays_positive(phi: Callable[[Tensor], Tensor]) -> Evidence:
    """In float32, against eˣ at x ≤ 0."""
    x = torch.tensor([-5.0, -10.0, -20.0, -60.0])
    found, expected = phi(x).double(), x.double().exp()
    return evidence(
        at_least("φ(−20)", found[2], 1e-9),
        at_most("largest relative error", ((found - expected) / expected).abs().max(), 4 * 2.0**-24),
        equal("φ(3)", phi(torch.tensor([3.0]))[0], 4),
    )


def elu_and_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


ELU = Claim(
    id="R003-elu",
    section="2.1.4",
    kind="exact",
    statement=Text(
        "φ(x) = elu(x) + 1 is a (positive) feature map of linear attention.", "ELU 核：φ(x) = elu(x) + 1（取正值）。"
    ),
    formula=r"\phi(x)=\operatorname{elu}(x)+1>0",
    check=stays_positive,
    case=Case("e^x for x ≤ 0", Elu1().query),
    control=Case("as written, elu(x) + 1 in float32", elu_and_one),
    first="conditional",
    condition=Text(
        "It is computed as eˣ for x ≤ 0: elu(x) + 1 in float32 is 0 at x = −20, where it should be 2.06e-9. (It is "
        "positive, but no approximation of exp.)",
        "对 x ≤ 0 直接按 eˣ 计算：以 float32 计算 elu(x)+1，在 x = −20 处得到 0，而真值为 2.06e-9。（它为正，"
        "但并不逼近 exp。）",
    ),
)


# ── R003-cos: the cosine kernel of Qin et al. is φ(x) = cos x


def gives_weights(phi: FeatureMap) -> Evidence:
    """φ(q)·φ(k) at single tokens: neither negative, nor 0 at a query of (positive) entries against every key."""
    tokens = torch.linspace(0.1, 3.1, 16, dtype=torch.float64)[:, None]
    weights = Linear(phi, Full(), normalise=False).matrix(tokens, tokens)
    return evidence(
        at_least("smallest weight of 16 × 16 tokens", weights.min(), 0),
        at_least("smallest sum of a row", weights.sum(-1).min(), 1e-3),
    )


def reweighs_by_distance(period: float) -> Evidence:
    """cosFormer at M = 16: relu(q)·relu(k) cos(π(i − j) / 2M), split into features of each position."""
    q, k, _ = draw(16, 8, torch.float64)
    found = Linear(CosFormer(16), Full(), normalise=False).matrix(q, k)
    i = torch.arange(16, dtype=torch.float64)
    factor = torch.cos(pi * (i[:, None] - i) / period)
    return evidence(
        at_most("difference from the definition", (found - q.relu() @ k.relu().mT * factor).abs().max(), 1e-14),
        equal("smallest factor", factor.min(), cos(pi * 15 / 32), within=1e-15),
    )


COS = Claim(
    id="R003-cos",
    section="2.1.4",
    kind="exact",
    statement=Text(
        "The cosine kernel (Qin et al. 2022) is φ(x) = cos(x).", "余弦核（Qin et al., 2022）：φ(x) = cos(x)。"
    ),
    formula=r"\phi(x)=\cos(x)",
    check=gives_weights,
    case=Case("cos of each entry", Cos()),
    control=Case("cosFormer, M = 16", CosFormer(16)),
    first="false",
    counterexample="""\
import math, torch, heedful as h
q, k = torch.tensor([[math.pi], [math.pi / 2]]), torch.tensor([[0.], [1.]])
print(h.Linear(h.Cos(), h.Full(), normalise=False).matrix(q, k))  # a row of negative weights, a row that vanishes""",
    corrected=Claim(
        id="R003-cos*",
        section="2.1.4",
        kind="exact",
        statement=Text(
            "cosFormer (Qin et al. 2022) takes relu(q)·relu(k) and weighs it by cos(π(i − j)/2M); cos(a − b) = cos a "
            "cos b + sin a sin b makes that features of each position, and weights ≥ 0.",
            "cosFormer（Qin et al., 2022）取 relu(q)·relu(k) 并乘以 cos(π(i−j)/2M)；由 cos(a−b) = cos a cos b + sin a "
            "sin b 可拆成各位置的特征，权重非负。",
        ),
        formula=r"\phi_i(x)=\left[\mathrm{relu}(x)\cos\frac{\pi i}{2M},\ \mathrm{relu}(x)\sin\frac{\pi i}{2M}\right]",
        check=reweighs_by_distance,
        case=Case("cos(π(i − j) / 2M)", 32.0),
        control=Case("cos(π(i − j) / M)", 16.0),
    ),
)


# ── R003-poly: features [1, x, x², …]


def plain_powers(x: Tensor) -> Tensor:
    """1, x, …, x³⁰."""
    return x ** torch.arange(31, dtype=x.dtype)


def is_geometric(at: tuple[tuple[float, float], ...]) -> Evidence:
    """φ(x)·φ(y) up to degree 30 against 1/(1 − xy), within the remainder |xy|³¹/|1 − xy|."""
    found = []
    for x, y in at:
        total = plain_powers(torch.tensor([x], dtype=torch.float64)) @ plain_powers(
            torch.tensor([y], dtype=torch.float64)
        )
        rest = min(abs(x * y) ** 31 / abs(1 - x * y), 1e-3)
        found.append(equal(f"φ({x})·φ({y}), against 1/(1 − xy)", total, 1 / (1 - x * y), within=rest + 1e-14))
    return evidence(*found)


def by_tensor_powers(x: Tensor) -> Tensor:
    return Polynomial(8, scale=1.0).query(x)


def by_powers_of_entries(x: Tensor) -> Tensor:
    """Powers of single entries, over √n!: the mixed products are missing."""
    powers = [x**p / sqrt(factorial(p)) for p in range(1, 9)]
    return torch.cat([torch.ones_like(x[:, :1]), *powers], -1)


def is_exp_in_three_dimensions(phi: Callable[[Tensor], Tensor]) -> Evidence:
    """Against e^{q·k} for 16 tokens of width 3, within the remainder of the series."""
    q, k, _ = (x / 3 for x in draw(16, 3, torch.float64))
    s = q @ k.mT
    top = float(s.abs().max())
    return evidence(
        at_most("largest error", (phi(q) @ phi(k).mT - s.exp()).abs().max(), top**9 / factorial(9) * exp(top))
    )


POLY = Claim(
    id="R003-poly",
    section="2.1.4",
    kind="exact",
    statement=Text(
        "The powers of x are the features of a polynomial kernel: φ(x) = [1, x, x², …].",
        "多项式核：φ(x) = [1, x, x², …]。",
    ),
    formula=r"\phi(x)=[1,x,x^2,\dots],\qquad \phi(x)\cdot\phi(y)=\sum_n(xy)^n=\frac1{1-xy}",
    check=is_geometric,
    case=Case("|xy| < 1", ((0.5, 0.5), (0.9, -0.7), (0.3, 0.8))),
    control=Case("|xy| > 1", ((1.5, 1.5), (2.0, -0.7))),
    first="false",
    condition=Text(
        "|xy| < 1; the kernel is then 1/(1 − xy), positive definite. It is not that of softmax: see the sharper form.",
        "|xy| < 1；此时核为 1/(1 − xy)，正定。它不是 softmax 的核：见更精确的形式。",
    ),
    corrected=Claim(
        id="R003-poly*",
        section="2.1.4",
        kind="exact",
        statement=Text(
            "Weighted by 1/√n!, and by tensor powers where d > 1, they become the features of e^{x·y}; of degree p the "
            "error is at most |x·y|^{p+1} e^{|x·y|} / (p + 1)!.",
            "以 1/√n! 加权（d > 1 时取张量幂）才是 e^{x·y} 的特征；截断到 p 次时误差不超过 "
            "|x·y|^{p+1} e^{|x·y|} / (p+1)!。",
        ),
        formula=r"\phi(x)=\left[\frac{x^{\otimes n}}{\sqrt{n!}}\right]_{n\ge0},\qquad \phi(x)\cdot\phi(y)=e^{x\cdot y}",
        check=is_exp_in_three_dimensions,
        case=Case("tensor powers up to degree 8, d = 3", by_tensor_powers),
        control=Case("powers of single entries", by_powers_of_entries),
    ),
    reason=Text(
        "The text does not say that this kernel is the exponential, so that is not what is checked.",
        "原文并未说这个核就是指数核，因此检验的不是这一点。",
    ),
)

CLAIMS = (STD_COST, LINATTN_EQ, ASSOC, ASSOC_TABLE, ELU, COS, POLY)
