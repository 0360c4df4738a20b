"""3.1 and 3.2: the cost of standard attention, and how features turn N² into N."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch

from heedful import nn
from heedful.bench.fits import growth
from heedful.core import Mechanism
from heedful.feature_maps import Elu1, FeatureMap, Polynomial
from heedful.mechanisms import Linear, Quadratic, Softmax
from heedful.patterns import Full
from heedful.random_features import FavorPlus
from heedful.shapes import Tensor
from heedful.testing import FlopCounter
from heedful.theory.claim import Case, Claim, Evidence, Text, agrees, at_least, at_most, equal, evidence
from heedful.theory.samples import normal

EPS = torch.finfo(torch.float64).eps


# ── R003-3.1: O(N²d) time and O(N²) space in all


def flops_of_a_layer(n: int, d: int) -> tuple[int, int]:
    """(projections, attention) of a layer with one head of width d, counted as they run."""
    layer = nn.Attention(d, heads=1, mechanism=Softmax(Full()), dtype=torch.float64)
    x = normal(n, d)
    with torch.no_grad(), FlopCounter() as whole:
        layer(x)
    with torch.no_grad(), FlopCounter() as inner:
        layer.mechanism(x, x, x)
    return whole.flops - inner.flops, inner.flops


def attention_dominates(lengths: tuple[int, ...]) -> Evidence:
    """Counted flops at d = 64 against 8Nd² + 4N²d, and how the sum grows with N."""
    d, found = 64, []
    counted = {n: flops_of_a_layer(n, d) for n in lengths}
    for n, (outer, inner) in counted.items():
        found.append(equal(f"flops at N = {n}", outer + inner, 8 * n * d * d + 4 * n * n * d))
    last = max(lengths)
    fit = growth({n: float(sum(both)) for n, both in counted.items()}, least=1)
    assert fit is not None
    return evidence(
        *found,
        at_most(f"share of the projections at N = {last}", counted[last][0] / sum(counted[last]), 0.2),
        at_least("exponent of N", fit.exponent, 1.75),
    )


def equal_at(ratio: float) -> Evidence:
    """Projections and attention at N = ratio · d."""
    d = 64
    outer, inner = flops_of_a_layer(int(ratio * d), d)
    return evidence(equal("flops of the projections over those of attention", outer / inner, 1.0))


STANDARD = Claim(
    id="R003-3.1",
    section="3.1",
    kind="complexity",
    statement=Text(
        "Standard attention takes O(Nd²) for the linear projections and in all O(N²d) time and O(N²) space.",
        "标准注意力：线性投影 O(Nd²)；总计时间 O(N²d)、空间 O(N²)。",
    ),
    formula=r"O(Nd^2)+O(N^2d)+O(N^2)+O(N^2d)=O(N^2d)",
    check=attention_dominates,
    case=Case("N = 8d … 32d", (512, 1024, 2048)),
    control=Case("N = d/8 … d/2", (8, 16, 32)),
    first="conditional",
    condition=Text(
        "N well above d: the sum is O(N²d + Nd²), and its second term, left out of the total together with W_O, is the "
        "larger one below N = 2d. N² numbers are stored only where A is formed; kernels that work in tiles keep O(N).",
        "须 N 远大于 d：总和是 O(N²d + Nd²)，被略去的第二项（连同 W_O）在 N < 2d 时反而更大。"
        "只有把 A 整个存下来才需要 N² 空间，分块计算的内核只需 O(N)。",
    ),
    corrected=Claim(
        id="R003-3.1*",
        section="3.1",
        kind="complexity",
        statement=Text(
            "A layer takes 4N²d + 8Nd² flops with its output projection; the two terms are equal at N = 2d.",
            "含输出投影的一层共 4N²d + 8Nd² 次浮点运算；两项在 N = 2d 时相等。",
        ),
        formula=r"4N^2d+8Nd^2",
        check=equal_at,
        case=Case("N = 2d", 2.0),
        control=Case("N = 3d/2, where they would be equal without W_O", 1.5),
    ),
)


# ── R003-mercer: every positive semidefinite kernel is an inner product of features


def has_features(kernel: Callable[[Tensor], Tensor]) -> Evidence:
    """The kernel on 24 points: no negative eigenvalue, and features from its eigenvectors that give it back."""
    gram = kernel(normal(24, 3))
    values, vectors = torch.linalg.eigh(gram)
    features = vectors * values.clamp(min=0).sqrt()
    rounding = 100 * EPS * float(values[-1])
    return evidence(
        at_least("smallest eigenvalue", values[0], 0, slack=rounding),
        equal("largest error of φ(x)·φ(y)", (features @ features.mT - gram).abs().max(), 0, within=rounding),
    )


def exponential(x: Tensor) -> Tensor:
    return Quadratic(torch.exp, Full(), scale=1.0, normalise=None).matrix(x, x)


def rectified(x: Tensor) -> Tensor:
    return Quadratic(torch.relu, Full(), scale=1.0, normalise=None).matrix(x, x)


def quadratic_series(x: Tensor) -> Tensor:
    return Linear(Polynomial(2, scale=1.0), Full(), normalise=False).matrix(x, x)


def rank_has_no_limit(kernel: Callable[[Tensor], Tensor]) -> Evidence:
    """The rank on N points of the plane, at angles and lengths that keep the smallest eigenvalue far above rounding."""
    found = []
    for n in (4, 8, 16):
        turn = torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)
        x = 3 * torch.stack([turn.cos(), turn.sin()], -1)
        found.append(equal(f"rank on {n} points", torch.linalg.matrix_rank(kernel(x), hermitian=True), n))
    return evidence(*found)


MERCER = Claim(
    id="R003-mercer",
    section="3.2.1",
    kind="exact",
    statement=Text(
        "Mercer: every positive semidefinite kernel k(x, y) is an inner product of features, φ(x)ᵀφ(y).",
        "Mercer 定理：任何半正定核函数 k(x, y) 都可以表示为特征映射的内积 φ(x)ᵀφ(y)。",
    ),
    formula=r"k(x,y)=\phi(x)^\top\phi(y)",
    check=has_features,
    case=Case("exp(x·y), positive semidefinite", exponential),
    control=Case("max(x·y, 0), which is not", rectified),
    first="conditional",
    condition=Text(
        "φ maps into a Hilbert space, in general of infinite dimension (Moore–Aronszajn; Mercer's own theorem wants a "
        "continuous kernel on a compact set). For N given points N features do, as shown here.",
        "φ 取值于一般为无穷维的 Hilbert 空间（Moore–Aronszajn；Mercer 定理本身还要求核连续、定义域紧）。"
        "对给定的 N 个点，N 个特征就够了，如此处所示。",
    ),
    corrected=Claim(
        id="R003-mercer*",
        section="3.2.1",
        kind="exact",
        statement=Text(
            "No finite φ gives exp(x·y): its matrix on N distinct points has rank N for every N, on m features at most "
            "m.",
            "没有有限维的 φ 能给出 exp(x·y)：它在 N 个不同点上的矩阵对任何 N 都是满秩 N，而 m 个特征的秩至多为 m。",
        ),
        formula=r"\operatorname{rank}\,[e^{x_i^\top x_j}]_{ij}=N",
        check=rank_has_no_limit,
        case=Case("exp(x·y)", exponential),
        control=Case("its series to degree 2", quadratic_series),
    ),
)


# ── R003-3.2.2: softmax(QKᵀ)V = D⁻¹ exp(QKᵀ) V


def softmax_is_scaled_exp(axis: int) -> Evidence:
    """Both sides on 50 tokens of width 8, D from the sums of exp(QKᵀ) along an axis."""
    q, k, v = normal(3, 50, 8).unbind()
    exps = Quadratic(torch.exp, Full(), scale=1.0, normalise=None).matrix(q, k)
    other = exps / exps.sum(axis, keepdim=True) @ v
    error = (Softmax(Full(), scale=1.0)(q, k, v) - other).abs().max()
    return evidence(equal("largest difference", error, 0, within=1e-13))


SOFTMAX_KERNEL = Claim(
    id="R003-3.2.2",
    section="3.2.2",
    kind="exact",
    statement=Text(
        "Softmax attention uses the exponential kernel: softmax(QKᵀ)V = D⁻¹exp(QKᵀ)V, D diagonal.",
        "Softmax 注意力可以看作使用指数核：softmax(QKᵀ)V = D⁻¹exp(QKᵀ)V，D 是对角归一化矩阵。",
    ),
    formula=r"\mathrm{softmax}(QK^\top)V=D^{-1}\exp(QK^\top)V,\qquad D=\mathrm{diag}(\exp(QK^\top)\mathbf{1})",
    check=softmax_is_scaled_exp,
    case=Case("D from the rows", -1),
    control=Case("D from the columns", -2),
)


# ── R003-3.2.3: exp(q·k) = φ(q)ᵀφ(k) with φ(x) = exp(Ωx − ‖x‖²/2)


def features_give_exp(build: Callable[[], tuple[FeatureMap, float]]) -> Evidence:
    """φ(q)·φ(k) against exp(q·k) on 32 numbers q, k in [−2, 2], the factor undoing what the library's φ includes.

    The last comparison is free of any factor: the ratio of the two sides would have to be the same for all pairs.
    """
    phi, factor = build()
    x = torch.linspace(-2, 2, 32, dtype=torch.float64)[:, None]
    ratio = factor * phi.query(x) @ phi.key(x).mT / exponential(x)
    return evidence(
        equal("largest |φ(q)·φ(k) / exp(q·k) − 1|", (ratio - 1).abs().max(), 0, within=1e-12),
        equal("largest ratio over the smallest", ratio.max() / ratio.min(), 1, within=1e-12),
    )


def one_draw() -> tuple[FeatureMap, float]:
    m = 256
    return FavorPlus(1, m, scale=1.0), m  # the text's φ lacks the library's 1/√m


def series_of_exp() -> tuple[FeatureMap, float]:
    """All that is missing is Σ_{p>40} 4^p/p!, e^4 times 3e-25."""
    return Polynomial(40, scale=1.0), 1.0


def mean_gives_exp(factor: Callable[[int], float]) -> Evidence:
    """The mean of factor · φ(q)·φ(k) over 4,000 draws of Ω, q and k of width 8 with q·k = 1/2; φ without the 1/√m."""
    d, m, draws = 8, 16, 4000
    q = torch.full((1, 1, d), sqrt(1 / 16), dtype=torch.float64)
    phi = FavorPlus(d, m, seed=0, scale=1.0, heads=draws)
    estimates = (phi.query(q) * phi.key(q)).sum((-2, -1)) * m * factor(m)
    target = torch.tensor(d / 16).exp()
    return evidence(
        agrees("mean", estimates.mean(), target, error=estimates.std() / sqrt(draws)),
        at_least("spread from draw to draw", estimates.std(), 0.1),
    )


KERNEL_FEATURES = Claim(
    id="R003-3.2.3",
    section="3.2.3",
    kind="exact",
    statement=Text(
        "The exponential kernel factors: exp(qᵀk) = φ(q)ᵀφ(k) with φ(x) = exp(Ωx − ‖x‖²/2), Ω a random projection.",
        "将指数核分解：exp(qᵀk) = φ(q)ᵀφ(k)，其中 φ(x) = exp(Ωx − ‖x‖²/2)，Ω 是随机投影矩阵。",
    ),
    formula=r"\exp(q_i^\top k_j)=\phi(q_i)^\top\phi(k_j),\quad \phi(x)=\exp(\Omega x-\frac{1}{2}\|x\|^2)",
    check=features_give_exp,
    case=Case("one draw of 256 features", one_draw),
    control=Case("features xᵖ/√p!, the series of exp", series_of_exp),
    first="false",
    counterexample="""\
import torch
g = torch.Generator().manual_seed(0)
d, m = 4, 256
q, k, Omega = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((d,), (d,), (m, d)))
phi = lambda x: torch.exp(Omega @ x - x @ x / 2)
print(torch.exp(q @ k), phi(q) @ phi(k), phi(q) @ phi(k) / m)   # 0.19, 19.1, 0.075""",
    corrected=Claim(
        id="R003-3.2.3*",
        section="3.2.3",
        kind="statistical",
        statement=Text(
            "Equality holds in expectation over Ω and with the factor 1/m; a single draw of m features scatters about "
            "it, and its matrix has rank at most m.",
            "等式只在对 Ω 取期望、并带因子 1/m 时成立；单次抽取的 m 个特征围绕它波动，其矩阵的秩至多为 m。",
        ),
        formula=r"\exp(q^\top k)=\mathbb{E}_{\Omega}\,\frac{1}{m}\,\phi(q)^\top\phi(k)",
        check=mean_gives_exp,
        case=Case("factor 1/m", lambda m: 1 / m),
        control=Case("no factor", lambda m: 1.0),
    ),
)


# ── R003-3.2.4: O_i = φ(q_i)ᵀS / φ(q_i)ᵀz


def sums_give_the_output(total: Callable[[Tensor], Tensor]) -> Evidence:
    """φ(q)ᵀS / φ(q)ᵀz against the definition, row by row of weights, and S, z against the library's state."""
    q, k, v = normal(3, 50, 8).unbind()
    phi, attend = Elu1(), Linear(Elu1(), Full())
    S, z = phi.key(k).mT @ v, total(phi.key(k))
    out = phi.query(q) @ S / (phi.query(q) @ z)[:, None]
    state = attend.prefill(q, k, v)[1]
    assert state.z is not None
    return evidence(
        equal("largest difference from A V", (out - attend.matrix(q, k) @ v).abs().max(), 0, within=1e-13),
        equal("S against the state", (S - state.S).abs().max(), 0, within=1e-12),
        equal("z against the state", (z - state.z).abs().max(), 0, within=1e-12),
    )


ASSOCIATIVE = Claim(
    id="R003-3.2.4",
    section="3.2.4",
    kind="exact",
    statement=Text(
        "With S = Σφ(k_j)v_jᵀ and z = Σφ(k_j), the output is O_i = φ(q_i)ᵀS / φ(q_i)ᵀz.",
        "定义累积项 S = Σφ(k_j)v_jᵀ、z = Σφ(k_j)，则 O_i = φ(q_i)ᵀS / (φ(q_i)ᵀz)。",
    ),
    formula=r"O_i=\frac{\phi(q_i)^\top S}{\phi(q_i)^\top z},\quad S=\sum_j\phi(k_j)v_j^\top,\quad z=\sum_j\phi(k_j)",
    check=sums_give_the_output,
    case=Case("z the sum of the features", lambda features: features.sum(0)),
    control=Case("z their mean", lambda features: features.mean(0)),
)


# ── R003-3.2.4-cost: O(Nmd)


def grows_like_Nmd(build: Callable[[int, int], Mechanism]) -> Evidence:
    """Flops counted as they run; doubling N, m or d doubles each."""
    found = []
    for name, factors in (("N", (2, 1, 1)), ("m", (1, 2, 1)), ("d", (1, 1, 2))):
        one, two = (counted_flops(build, 512 * N, 32 * m, 16 * d) for N, m, d in ((1, 1, 1), factors))
        found.append(equal(f"flops when {name} doubles", two / one, 2.0, within=1e-12))
    n, m, d = 512, 32, 16
    return evidence(*found, equal("flops / Nmd", counted_flops(build, n, m, d) / (n * m * d), 8.0, within=1e-12))


def counted_flops(build: Callable[[int, int], Mechanism], n: int, m: int, d: int) -> int:
    """Of features of q and k, of S and of φ(q)ᵀS, 2Nmd each; sums such as z are no products and not counted."""
    mechanism = build(m, d)
    x = normal(n, d)
    with torch.no_grad(), FlopCounter() as counter:
        mechanism(x, x, x)
    return counter.flops


LINEAR_COST = Claim(
    id="R003-3.2.4-cost",
    section="3.2.4",
    kind="complexity",
    statement=Text(
        "S and z take O(Nmd), each O_i takes O(md), in all O(Nmd): O(N) where m ≪ N.",
        "计算 S 和 z：O(Nmd)；计算每个 O_i：O(md)；总计 O(Nmd)，当 m ≪ N 时为 O(N)。",
    ),
    formula=r"O(Nmd)+N\cdot O(md)=O(Nmd)",
    check=grows_like_Nmd,
    case=Case("m random features", lambda m, d: Linear(FavorPlus(d, m), Full())),
    control=Case("softmax", lambda m, d: Softmax(Full())),
    reason=Text(
        "“O(N)” takes m and d as constants.",
        "“O(N)”是把 m 与 d 视为常数。",
    ),
)

CLAIMS = (STANDARD, MERCER, SOFTMAX_KERNEL, KERNEL_FEATURES, ASSOCIATIVE, LINEAR_COST)
