"""11.3.4: linear attention and kernels."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt

import torch

from heedful.core import Dims, Mechanism
from heedful.feature_maps import Elu1, Exp, Polynomial, Relu
from heedful.measures import numerical_rank
from heedful.mechanisms import Linear, Quadratic, Softmax, no_activation
from heedful.patterns import Full
from heedful.random_features import FavorPlus
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.heads import growth
from heedful.theory.claim import Case, Claim, Evidence, Text, agrees, at_most, equal, evidence

DEGREE = 14  # of the series of exp: where |s| ≤ 1 it leaves 1/15! = 8e-13
ROUNDING = 2**15 * 2**-52 * exp(1)  # of a sum of 2¹⁵ features, d = 2, that comes to e at most: 2e-11


def small(n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys in the unit ball, so that |q·k| ≤ 1; values of width 3."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, n, d, generator=generator, dtype=torch.float64).unbind()
    v = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v


def features(mechanism: Linear, q: Tensor, k: Tensor) -> Tensor:
    """φ(q)·φ(k) for all pairs."""
    return mechanism.feature_map.query(q) @ mechanism.feature_map.key(k).mT


# ── K11.3.4-core: K(q, k) = φ(q)·φ(k) stands for softmax


def kernel_gives_softmax(normalise: bool) -> Evidence:
    """Attention with features of the exponential to degree 14, against softmax."""
    q, k, _ = small(8, 2)
    error = (Linear(Polynomial(DEGREE), Full(), normalise).matrix(q, k) - Softmax(Full()).matrix(q, k)).abs().max()
    return evidence(at_most("largest difference from softmax", error, ROUNDING))


K_CORE = Claim(
    id="K11.3.4-core",
    section="11.3.4",
    kind="exact",
    statement=Text(
        "Linear attention approximates softmax by a kernel K(q, k) = φ(q)·φ(k).",
        "线性注意力的核心思想是用核函数 K(q, k) = φ(q)ᵀφ(k) 近似 softmax 函数。",
    ),
    formula=r"K(q,k)=\phi(q)^\top\phi(k)",
    check=kernel_gives_softmax,
    case=Case("the kernel stands for exp, and rows are normalised", True),
    control=Case("the kernel stands for softmax itself", False),
    first="conditional",
    condition=Text(
        "What is approximated is exp(q·k/√d), and rows are divided by their sum afterwards: softmax itself depends on "
        "all keys and is no kernel of two vectors.",
        "被近似的是 exp(q·k/√d)，之后再按行归一化：softmax 本身依赖于所有的键，不是两个向量的核函数。",
    ),
)


# ── L11.39: attention rewritten as φ(q)ᵀ Σ φ(k_j) v_jᵀ, in O(N)


def rewrites(mechanism: Mechanism) -> Evidence:
    q, k, v = small(200, 8)
    sizes = [1024, 2048, 4096]
    flops = [float(mechanism.cost(Dims(n, n, 8, 3)).flops) for n in sizes]
    return evidence(
        at_most("A V against the rewritten sum", (mechanism(q, k, v) - mechanism.matrix(q, k) @ v).abs().max(), 1e-13),
        equal("exponent of the cost in N", growth(sizes, flops), 1, within=1e-9),
    )


def error_is_passed_on(factor: float) -> Evidence:
    """Weights that err by at most δ give outputs that err by at most δ Σ_j |v_j|; signs can be such that they do."""
    q, k, v = small(50, 4)
    exact, rough = (Linear(Polynomial(p), Full()).matrix(q, k) for p in (6, 1))
    delta = (rough - exact).abs().max()
    worst = delta * torch.ones_like(exact) * v[:, :1].T.sign()  # an error of δ in every entry
    bound = factor * delta * v.abs().sum(0)
    return evidence(
        at_most("error of the output over its bound", (((rough - exact) @ v).abs() / bound).max(), 1),
        equal("error over its bound, with the worst signs", (worst @ v[:, :1]).max() / bound[0], 1, within=1e-12),
    )


L11_39 = Claim(
    id="L11.39",
    section="11.3.4",
    kind="exact",
    statement=Text(
        "If softmax(q·k/√d) ≈ φ(q)·φ(k), attention becomes φ(q)ᵀ Σ_j φ(k_j)v_jᵀ, and O(N²) becomes O(N).",
        "若 softmax(qᵀk/√d) ≈ φ(q)ᵀφ(k)，则注意力可重写为 φ(q)ᵀ Σ_j φ(k_j)v_jᵀ，复杂度从 O(N²) 降低到 O(N)。",
    ),
    formula=r"\sum_j\phi(q_i)^\top\phi(k_j)\,v_j=\phi(q_i)^\top\sum_j\phi(k_j)v_j^\top",
    check=rewrites,
    case=Case("linear attention", Linear(Elu1(), Full())),
    control=Case("softmax attention", Softmax(Full())),
    first="conditional",
    condition=Text(
        "With exp in place of softmax and the normaliser φ(q)·Σφ(k_j) kept; O(N) hides the factor m·e.",
        "须以 exp 代替 softmax 并保留归一化项 φ(q)·Σφ(k_j)；O(N) 隐去了因子 m·e。",
    ),
    corrected=Claim(
        id="L11.39*",
        section="11.3.4",
        kind="exact",
        statement=Text(
            "The rewriting is exact; an error δ in each weight becomes at most δ Σ_j |v_j| in the output, which is N "
            "times as large, and can be that.",
            "重写是精确的；每个权重的误差 δ 在输出中至多变为 δ Σ_j |v_j|，即放大 N 倍，且可以达到。",
        ),
        formula=r"|\hat o-o|\le\delta\sum_j|v_j|",
        check=error_is_passed_on,
        case=Case("δ Σ |v|", 1.0),
        control=Case("δ times the mean of |v|", 1 / 50),
    ),
)


# ── K11.3.4-exp: features of the exponential kernel

Product = Callable[[Tensor, Tensor], Tensor]


def as_printed(q: Tensor, k: Tensor) -> Tensor:
    """φ(x) = e^{‖x‖²/2d} (e^{x₁/√d}, …, e^{x_d/√d})."""
    d = q.shape[-1]
    lengths = ((q.square().sum(-1)[:, None] + k.square().sum(-1)) / (2 * d)).exp()
    return lengths * features(Linear(Exp(), Full()), q / sqrt(d), k / sqrt(d))


def by_series(q: Tensor, k: Tensor) -> Tensor:
    return features(Linear(Polynomial(DEGREE, scale=1 / q.shape[-1]), Full()), q, k)


def is_the_exponential(product: Product) -> Evidence:
    q, k, _ = small(12, 2)
    error = (product(q, k) - (q @ k.mT / 2).exp()).abs().max()
    return evidence(at_most("largest difference from e^(q·k/d), d = 2", error, ROUNDING))


def random_features_of_the_exponential(scale: float) -> Evidence:
    """FAVOR+ features with 50 000 draws of 4 for one query and one key, d = 4: their products' mean is the kernel."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 4, generator=generator, dtype=torch.float64).unbind()
    phi = FavorPlus(4, 4, 0, scale=scale, heads=50_000)
    products = (phi.query(q) * phi.key(k)).sum(-1).flatten()
    mean, error = products.mean(), products.std() / sqrt(len(products))
    return evidence(agrees("mean of φ(q)·φ(k)", mean, exp(float((q * k).sum()) / 4), error=error))


K_EXP = Claim(
    id="K11.3.4-exp",
    section="11.3.4",
    kind="exact",
    statement=Text(
        "The kernel e^(q·k/d) has the feature map φ(x) = e^(‖x‖²/2d) (e^(x₁/√d), …, e^(x_d/√d)).",
        "指数核 K(q, k) = e^(qᵀk/d) 对应的特征映射为 φ(x) = e^(‖x‖²/(2d))·(e^(x₁/√d), e^(x₂/√d), …)。",
    ),
    formula=r"e^{q\cdot k/d}=\phi(q)^\top\phi(k),\quad \phi(x)=e^{\|x\|^2/(2d)}(e^{x_1/\sqrt d},\dots,e^{x_d/\sqrt d})",
    check=is_the_exponential,
    case=Case("as printed", as_printed),
    control=Case("the series to degree 14", by_series),
    first="false",
    counterexample="""\
import torch
def phi(x): return (x @ x / (2 * len(x))).exp() * (x / len(x)**0.5).exp()
q, k = torch.tensor([1., 2.]), torch.tensor([.5, -1.])
print((q @ k / 2).exp(), phi(q) @ phi(k))                   # 0.4724 and 23.45
print(phi(0 * q) @ phi(0 * k))                              # 2, where the kernel is 1""",
    corrected=Claim(
        id="K11.3.4-exp*",
        section="11.3.4",
        kind="statistical",
        statement=Text(
            "No finite map has this kernel. Random ones have it in expectation: with ω ~ N(0, I), "
            "φ(x) = exp(ω·x/√d − ‖x‖²/2d). (Attention scales by √d, not d.)",
            "没有有限维的特征映射能给出这个核。随机特征在期望意义下可以：ω ~ N(0, I)，φ(x) = exp(ω·x/√d − ‖x‖²/2d)。"
            "（注意力的缩放是 √d 而不是 d。）",
        ),
        formula=r"e^{q\cdot k/d}=\mathbb{E}\,\phi_\omega(q)\phi_\omega(k),\quad "
        r"\phi_\omega(x)=e^{\omega\cdot x/\sqrt d-\|x\|^2/2d}",
        check=random_features_of_the_exponential,
        case=Case("scale 1/d", 1 / 4),
        control=Case("scale 1/√d", 1 / 2),
    ),
)


# ── K11.3.4-relu: features of ReLU(q·k)


def on_a_circle(n: int) -> Tensor:
    angle = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
    return torch.stack([angle.cos(), angle.sin()], -1)


def relu_of_the_product(x: Tensor) -> Tensor:
    return Quadratic(torch.relu, Full(), 1 / x.shape[-1], normalise=None).matrix(x, x)


def product_of_relus(x: Tensor) -> Tensor:
    return features(Linear(Relu(), Full()), x, x)


def relu_features_give(kernel: Callable[[Tensor], Tensor]) -> Evidence:
    x = on_a_circle(8)
    return evidence(at_most("largest difference on 8 points", (kernel(x) - product_of_relus(x)).abs().max(), 1e-12))


def has_no_feature_map(kernel: Callable[[Tensor], Tensor]) -> Evidence:
    """Gram matrices of feature maps have no negative eigenvalue; that of ReLU(cos) on 8 points has 1 − √2 (over d)."""
    least = torch.linalg.eigvalsh(kernel(on_a_circle(8))).min()
    return evidence(equal("least eigenvalue, times d", 2 * least, 1 - sqrt(2), within=1e-13))


K_RELU = Claim(
    id="K11.3.4-relu",
    section="11.3.4",
    kind="exact",
    statement=Text(
        "The kernel ReLU(q·k/d) has the feature map φ(x) = max(0, x).",
        "ReLU 核 K(q, k) = ReLU(qᵀk/d) 对应的特征映射为 φ(x) = max(0, x)。",
    ),
    formula=r"\mathrm{ReLU}(q\cdot k/d)=\phi(q)^\top\phi(k),\qquad \phi(x)=\max(0,x)",
    check=relu_features_give,
    case=Case("ReLU(q·k/d)", relu_of_the_product),
    control=Case("Σ_l max(q_l, 0) max(k_l, 0)", lambda x: (x.clamp(min=0)[:, None] * x.clamp(min=0)[None]).sum(-1)),
    first="false",
    counterexample="""\
import torch
q = k = torch.tensor([-1., 0.])
print((q @ k / 2).relu(), q.relu() @ k.relu())              # 0.5 and 0
angle = torch.arange(8) * torch.pi / 4
print(torch.linalg.eigvalsh((angle[:, None] - angle).cos().relu()))  # -0.414 among them: no feature map at all""",
    corrected=Claim(
        id="K11.3.4-relu*",
        section="11.3.4",
        kind="exact",
        statement=Text(
            "Features max(0, x) have the kernel Σ_l max(q_l, 0) max(k_l, 0). ReLU(q·k) has no feature map: on 8 points "
            "of a circle its Gram matrix has the eigenvalue 1 − √2 < 0.",
            "特征 max(0, x) 对应的核是 Σ_l max(q_l, 0) max(k_l, 0)。ReLU(q·k) 没有任何特征映射："
            "圆上 8 个点的 Gram 矩阵有特征值 1 − √2 < 0。",
        ),
        formula=r"\lambda_{\min}\left[\mathrm{ReLU}(\cos(\theta_i-\theta_j))\right]=1-\sqrt 2",
        check=has_no_feature_map,
        case=Case("ReLU(q·k)", relu_of_the_product),
        control=Case("features max(0, x)", product_of_relus),
    ),
)


# ── L11.40: the ReLU kernel makes zeros, which lowers the rank


def relu_lowers_rank(sign: Callable[[Tensor], Tensor]) -> Evidence:
    """Weights ReLU(q·k) of 64 tokens, d = 4: zero where q·k < 0, and of no higher rank than the scores."""
    q, k = (sign(x) for x in _drawn(64, 4))
    plain, relu = (Quadratic(f, Full(), normalise=None).matrix(q, k) for f in (no_activation, torch.relu))
    return evidence(
        equal("weights where q·k < 0", relu[plain < 0].sum(), 0),
        at_most("rank of ReLU(QKᵀ), against that of QKᵀ", numerical_rank(relu), numerical_rank(plain)),
    )


def _drawn(n: int, d: int) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    return q, k


def relu_raises_rank(activation: Callable[[Tensor], Tensor]) -> Evidence:
    found = []
    for d in (3, 4, 8):
        q, k = _drawn(64, d)
        rank = numerical_rank(Quadratic(activation, Full(), normalise=None).matrix(q, k))
        of_features = numerical_rank(Linear(Relu(), Full(), normalise=False).matrix(q, k))
        found += [
            equal(f"rank of f(QKᵀ), N = 64, d = {d}", rank, 64),
            at_most(f"rank with features max(0, x), d = {d}", of_features, d),
        ]
    return evidence(*found)


L11_40 = Claim(
    id="L11.40",
    section="11.3.4",
    kind="exact",
    statement=Text(
        "The ReLU kernel gives zero weight where q·k < 0, which strengthens the low-rank structure.",
        "ReLU 核倾向于产生稀疏的注意力权重：当 q_iᵀk_j < 0 时权重为零，这进一步强化了低秩结构。",
    ),
    formula=r"\operatorname{rank}\,\mathrm{ReLU}(QK^\top)\le\operatorname{rank}(QK^\top)",
    check=relu_lowers_rank,
    case=Case("Gaussian queries and keys", lambda x: x),
    control=Case("non-negative ones, of which ReLU changes nothing", torch.abs),
    first="false",
    counterexample="""\
import torch
generator = torch.Generator().manual_seed(0)
q, k = torch.randn(2, 64, 4, generator=generator, dtype=torch.float64)
print(torch.linalg.matrix_rank(q @ k.T), torch.linalg.matrix_rank((q @ k.T).relu()))  # 4 and 64""",
    corrected=Claim(
        id="L11.40*",
        section="11.3.4",
        kind="exact",
        statement=Text(
            "The zeros are there, but an elementwise ReLU raises the rank, from d to N for d ≥ 3. Features max(0, x) "
            "keep it at d, but their weights vanish only where no coordinate is positive in both.",
            "零确实存在，但逐元素的 ReLU 会提高秩：d ≥ 3 时从 d 升到 N。特征 max(0, x) 使秩不超过 d，"
            "但其权重只有在没有任何坐标同时为正时才为零。",
        ),
        formula=r"\operatorname{rank}\,\mathrm{ReLU}(QK^\top)=N,\qquad \operatorname{rank}\,\phi(Q)\phi(K)^\top\le d",
        check=relu_raises_rank,
        case=Case("ReLU of the scores", torch.relu),
        control=Case("the scores themselves", no_activation),
    ),
)


CLAIMS = (K_CORE, L11_39, K_EXP, K_RELU, L11_40)
