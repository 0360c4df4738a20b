"""3.3: orthogonal random features, and the algorithm of FAVOR+."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import hypot, log, sqrt

import torch

from heedful import nn
from heedful.mechanisms import Linear, Softmax
from heedful.patterns import Full
from heedful.random_features import FavorPlus
from heedful.random_features.projections import Orthogonal
from heedful.shapes import Float, Tensor
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    agrees,
    equal,
    evidence,
    surely_below,
)
from heedful.theory.closed_forms import variance_favor_plus, variance_favor_plus_orthogonal
from heedful.theory.samples import normal

# ── R003-3.3.2-GS: Gram–Schmidt gives ΩᵀΩ = I_m


def product_is_identity(product: Callable[[Tensor], Tensor]) -> Evidence:
    """Ω is m × d (2.2.2), four orthonormal rows of width 8 drawn from Gaussian vectors."""
    m, d = 4, 8
    omega = nn.Orthogonal(d, heads=1, head_dim=m, seed=0, dtype=torch.float64).dense()
    found = product(omega)
    distance = torch.linalg.matrix_norm(found - torch.eye(len(found), dtype=torch.float64), 2)
    return evidence(equal("side", len(found), m), equal("distance from the identity", distance, 0, within=1e-14))


def rows_are_gaussian(norms: Callable[[Tensor], Tensor]) -> Evidence:
    """Blocks of the library's orthogonal features: right angles inside a block, and lengths as of N(0, I_d).

    Features with such rows estimate exp(x·y) without bias: the mean over 2,000 draws for two orthogonal unit vectors.
    """
    d, draws = 8, 2000
    projection = Orthogonal(d, d, heads=draws)
    projection.redraw(torch.Generator().manual_seed(0))
    omega = norms(projection.rows().double())
    unit = torch.nn.functional.normalize(omega, dim=-1)
    off = (unit @ unit.mT - torch.eye(d, dtype=torch.float64)).abs().max()
    squares = omega.square().sum(-1).flatten()
    x, y = torch.eye(d, dtype=torch.float64)[:2]
    terms = (omega @ (x + y) - 1).exp().mean(-1)
    return evidence(
        equal("largest cosine of two rows", off, 0, within=1e-5),  # the rows are kept in float32
        agrees("mean of ‖ω‖²", squares.mean(), d, error=squares.std() / sqrt(len(squares))),
        agrees("mean of φ(x)·φ(y)", terms.mean(), 1, error=terms.std() / sqrt(draws)),
    )


GRAM_SCHMIDT = Claim(
    id="R003-3.3.2-GS",
    section="3.3.2",
    kind="exact",
    statement=Text(
        "Orthogonal features: draw m vectors from N(0, I_d) and orthogonalise them by Gram–Schmidt; then ΩᵀΩ = I_m.",
        "正交随机特征：从 N(0, I_d) 采样 m 个向量，使用 Gram-Schmidt 正交化，结果 ΩᵀΩ = I_m。",
    ),
    formula=r"\Omega\in\mathbb{R}^{m\times d},\qquad \Omega^\top\Omega=I_m",
    check=product_is_identity,
    case=Case("ΩᵀΩ", lambda omega: omega.mT @ omega),
    control=Case("ΩΩᵀ", lambda omega: omega @ omega.mT),
    first="false",
    counterexample="""\
import torch
torch.manual_seed(0)
Omega = torch.linalg.qr(torch.randn(8, 4, dtype=torch.float64)).Q.mT      # 4 orthonormal rows of width 8
print((Omega @ Omega.mT - torch.eye(4)).norm(p=2))                        # 0: ΩΩᵀ = I_4
print((Omega.mT @ Omega - torch.eye(8)).norm(p=2))                        # 2: ΩᵀΩ is 8 × 8 and of rank 4""",
    corrected=Claim(
        id="R003-3.3.2-GS*",
        section="3.3.2",
        kind="statistical",
        statement=Text(
            "ΩΩᵀ = I_m, for m ≤ d only (more rows come in blocks of d); then each row is stretched to a norm drawn "
            "from χ_d, without which φ(x)·φ(y) is biased.",
            "应为 ΩΩᵀ = I_m，且仅当 m ≤ d（更多的行按每 d 行一块抽取）；随后每一行须再乘以服从 χ_d 的模长，"
            "否则 φ(x)·φ(y) 有偏。",
        ),
        formula=r"\Omega\Omega^\top=I_m\ (m\le d),\qquad \omega_i\leftarrow\chi_d\,\omega_i",
        check=rows_are_gaussian,
        case=Case("rows of norm χ_d", lambda omega: omega),
        control=Case("rows of norm 1", partial(torch.nn.functional.normalize, dim=-1)),
    ),
)


# ── R003-3.3.2-corr: orthogonalisation reduces the correlation between features

Rows = Callable[[int, int], Float[Tensor, "draws 2 d"]]
"""Many draws of two rows ω, ω' of width d."""


def rows_of(orthogonal: bool) -> Rows:
    def rows(draws: int, d: int) -> Tensor:
        return FavorPlus(d, 2, seed=0, orthogonal=orthogonal, heads=draws).projection.rows().double()

    return rows


def correlated_rows(draws: int, d: int) -> Tensor:
    first, second = normal(2, draws, d).unbind()
    return torch.stack([first, (first + second) / sqrt(2)], -2)


def terms_of(rows: Rows, x: Tensor, y: Tensor, draws: int = 200_000) -> tuple[Tensor, Tensor]:
    """What each of two features adds to the estimate of e^{x·y}: exp(ωᵀ(x+y) − ‖x‖²/2 − ‖y‖²/2)."""
    omega = rows(draws, len(x))
    terms = (omega @ (x + y) - (x.square().sum() + y.square().sum()) / 2).exp()
    return terms[:, 0], terms[:, 1]


def covariance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """(estimate, standard error)."""
    products = (one - one.mean()) * (other - other.mean())
    return float(products.mean()), float(products.std() / sqrt(len(products)))


def correlation_shrinks(change: tuple[Rows, Rows]) -> Evidence:
    """|covariance| of two features' terms, before and after, for x, y the unit vectors of the plane."""
    x, y = torch.eye(2, dtype=torch.float64)
    before, after = (covariance(*terms_of(rows, x, y)) for rows in change)
    error = sqrt(before[1] ** 2 + after[1] ** 2)
    return evidence(
        surely_below("|covariance| afterwards, less before", abs(after[0]) - abs(before[0]), 0, error=error)
    )


def covariance_is_negative(rows: Rows) -> Evidence:
    """The covariance of two rows of a block, against 2/e − 1 in the plane and the library's variances at d = 8."""
    x, y = torch.eye(2, dtype=torch.float64)
    found, error = covariance(*terms_of(rows, x, y))
    u, v = normal(2, 8) * 0.25
    wide, wide_error = covariance(*terms_of(rows, u, v))
    expected = 2 * (variance_favor_plus_orthogonal(u, v, 2) - variance_favor_plus(u, v, 2))
    return evidence(
        agrees("covariance, d = 2", found, 2 / torch.e - 1, error=error),
        agrees("covariance, d = 8", wide, expected, error=wide_error),
        surely_below("covariance, d = 2", found, 0, error=error),
    )


def variances_of_estimates() -> Figure:
    """Of one estimate with m = d = 8 features, relative to e^{2x·y}, over the length of x + y."""
    lengths = [0.25 * step for step in range(1, 13)]
    lines: dict[str, list[float]] = {"independent": [], "orthogonal": []}
    x, y = torch.eye(8, dtype=torch.float64)[:2]
    for length in lengths:
        u, v = x * length / sqrt(2), y * length / sqrt(2)
        lines["independent"].append(float(variance_favor_plus(u, v, 8)))
        lines["orthogonal"].append(float(variance_favor_plus_orthogonal(u, v, 8)))
    return Figure(
        Text("Variance of 8 features, d = 8", "8 个特征的方差（d = 8）"),
        "‖x + y‖",
        "variance / e^{2x·y}",
        {name: (lengths, values) for name, values in lines.items()},
        log_y=True,
    )


CORRELATION = Claim(
    id="R003-3.3.2-corr",
    section="3.3.2",
    kind="statistical",
    statement=Text(
        "Orthogonalisation reduces the correlation between random features and thereby the variance of the estimate.",
        "方差减少：正交化减少了随机特征之间的相关性，降低了估计方差。",
    ),
    formula=r"|\mathrm{cov}_{\mathrm{ort}}(f_i,f_j)|<|\mathrm{cov}_{\mathrm{iid}}(f_i,f_j)|",
    check=correlation_shrinks,
    case=Case("from independent to orthogonal rows", (rows_of(False), rows_of(True))),
    control=Case("from correlated to independent rows", (correlated_rows, rows_of(False))),
    first="false",
    counterexample="""\
import torch
torch.manual_seed(0)
iid = torch.randn(400000, 2, 2, dtype=torch.float64)
u = iid[:, 0] / iid[:, 0].norm(dim=-1, keepdim=True)         # a uniform direction, and the one across
ort = torch.stack([u, torch.stack([-u[:, 1], u[:, 0]], -1)], 1) * iid.flip(1).norm(dim=-1, keepdim=True)
for omega in (iid, ort):                                     # x = (1, 0), y = (0, 1)
    print(torch.cov((omega.sum(-1) - 1).exp().mT)[0, 1])     # about 0; about 2/e − 1 = −0.26""",
    corrected=Claim(
        id="R003-3.3.2-corr*",
        section="3.3.2",
        kind="statistical",
        statement=Text(
            "Independent features have no correlation to reduce. Orthogonal ones are negatively correlated, which is "
            "what lowers the variance: their covariance is 2/e − 1 at x = (1, 0), y = (0, 1).",
            "独立特征之间本来就没有相关性可减。正交特征之间是负相关，方差因此降低："
            "在 x = (1, 0)、y = (0, 1) 处每对的协方差为 2/e − 1。",
        ),
        formula=r"\mathrm{cov}(f_i,f_j)=e^{-\|x\|^2-\|y\|^2}"
        r"\left({}_1F_1(d;\frac{d}{2};\frac{\|x+y\|^2}{2})-e^{\|x+y\|^2}\right)<0",
        check=covariance_is_negative,
        case=Case("orthogonal rows", rows_of(True)),
        control=Case("independent rows", rows_of(False)),
    ),
    figure=variances_of_estimates,
)


# ── R003-3.3.3: the algorithm


def comes_near_softmax(scale: float | None) -> Evidence:
    """The error of FAVOR+ against softmax(QKᵀ/√d)V, root mean square over 64 draws of Ω: how it falls, and to what.

    Of squares the mean is the variance of the estimate, c/m; the mean of logarithms would follow another law, as single
    errors have a long tail. The exponent is that between two sizes, its error that of the two means.
    """
    n, d, draws = 64, 16, 64
    q, k, v = normal(3, n, d).unbind()
    q, k = q / 4, k / 4
    exact = Softmax(Full())(q, k, v)

    def squares(m: int) -> Tensor:
        errors = [(Linear(FavorPlus(d, m, seed, scale=scale), Full())(q, k, v) - exact).norm() for seed in range(draws)]
        return (torch.stack(errors) / exact.norm()).square()

    few, many = squares(256), squares(4096)
    spread = [float(x.std() / x.mean()) / sqrt(draws) for x in (few, many)]
    exponent = float((many.mean() / few.mean()).log()) / 2 / log(4096 / 256)
    return evidence(
        agrees("exponent of m", exponent, -0.5, error=hypot(*spread) / 2 / log(4096 / 256)),
        surely_below("relative error² at m = 4096", many.mean(), 0.1**2, error=many.std() / sqrt(draws)),
    )


ALGORITHM = Claim(
    id="R003-3.3.3",
    section="3.3.3",
    kind="statistical",
    statement=Text(
        "FAVOR+: orthogonal Ω; φ(Q) = exp(QΩᵀ − ‖Q‖²/2), φ(K) likewise; S = φ(K)ᵀV, z = Σφ(K); O_i = φ(Q_i)ᵀS / "
        "φ(Q_i)ᵀz. It approximates softmax attention.",
        "FAVOR+ 算法：生成正交随机矩阵 Ω；φ(Q) = exp(QΩᵀ − 0.5‖Q‖²)，φ(K) 同理；S = φ(K)ᵀV，z = Σφ(K)；"
        "O_i = φ(Q_i)ᵀS / (φ(Q_i)ᵀz)。以此近似 softmax 注意力。",
    ),
    formula=r"O_i=\frac{\phi(Q_i)^\top S}{\phi(Q_i)^\top z},\qquad \phi(x)=\exp(\Omega x-\frac{1}{2}\|x\|^2)",
    check=comes_near_softmax,
    case=Case("inputs times d^-¼, norms χ_d", None),
    control=Case("inputs as listed", 1.0),
    first="conditional",
    condition=Text(
        "Q and K are multiplied by d^-¼ first (the listing leaves the 1/√d of softmax out) and the rows of Ω have "
        "norms drawn from χ_d. The error then falls as 1/√m, from a height that grows like exp(‖q + k‖²/2√d): the "
        "tokens here are short. In practice the exponents need their maximum taken off.",
        "Q 与 K 须先乘以 d^-¼（所列步骤漏了 softmax 的 1/√d），且 Ω 的行模长服从 χ_d。"
        "此时误差按 1/√m 下降，但起点随 exp(‖q + k‖²/2√d) 增大（此处的 token 较短）；实际计算还须先减去指数的最大值。",
    ),
)

CLAIMS = (GRAM_SCHMIDT, CORRELATION, ALGORITHM)
