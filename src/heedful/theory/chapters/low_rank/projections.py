"""11.3.3: what Johnson and Lindenstrauss promise of distances, inner products and attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from heedful.mechanisms import Softmax
from heedful.nn import Gaussian, Orthogonal
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.heads import Mean
from heedful.theory.claim import Case, Claim, Evidence, Text, agrees, at_most, equal, evidence
from heedful.theory.closed_forms import johnson_lindenstrauss_dimension

POINTS, WIDTH, EPS = 100, 1000, 0.5
DIMENSION = johnson_lindenstrauss_dimension(POINTS, EPS)  # 222


def points() -> Tensor:
    return torch.randn(POINTS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def projected(x: Tensor, k: int, seed: int) -> Tensor:
    """On k random orthonormal directions, times √(d/k)."""
    d = x.shape[-1]
    return Orthogonal(d, 1, k, seed, gain=(d / k) ** 0.5, dtype=torch.float64)(x)


def pairs(x: Tensor) -> Tensor:
    """The entries of an n × n matrix for i < j."""
    i, j = torch.triu_indices(len(x), len(x), 1)
    return x[i, j]


# ── T11.25: Johnson–Lindenstrauss


def distances_are_kept(k: int) -> Evidence:
    """The best of five draws: the theorem says that a good map exists."""
    x = points()
    before = pairs(torch.cdist(x, x)).square()
    worst = [
        float((pairs(torch.cdist(y, y)).square() / before - 1).abs().max())
        for y in (projected(x, k, seed) for seed in range(5))
    ]
    return evidence(at_most(f"largest distortion of 4950 distances², k = {k} of {WIDTH}", min(worst), EPS))


T11_25 = Claim(
    id="T11.25",
    section="11.3.3",
    kind="exact",
    statement=Text(
        "Johnson–Lindenstrauss: for n points a linear map to k = O(log n/ε²) dimensions keeps all squared distances "
        "within 1 ± ε.",
        "Johnson–Lindenstrauss 引理：对 n 个点，存在到 k = O(log n/ε²) 维的线性映射，使所有距离平方保持在 1 ± ε 之内。",
    ),
    formula=r"(1-\epsilon)\|x_i-x_j\|^2\le\|Px_i-Px_j\|^2\le(1+\epsilon)\|x_i-x_j\|^2",
    check=distances_are_kept,
    case=Case("k = 4 ln n / (ε²/2 − ε³/3)", DIMENSION),
    control=Case("a tenth of that", DIMENSION // 10),
)


# ── C11.10: inner products are kept to a factor 1 ± ε


def to_a_factor(inner: Tensor, lengths: Tensor) -> Tensor:
    return EPS * inner.abs()


def to_the_lengths(inner: Tensor, lengths: Tensor) -> Tensor:
    return EPS * lengths


def inner_products_are_kept(allowed: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """On a map that keeps all distances within 1 ± ε: the share of pairs whose inner product errs by more."""
    x = points()
    y = projected(x, DIMENSION, 0)
    distances = pairs(torch.cdist(y, y) / torch.cdist(x, x)).square()
    inner, lengths = pairs(x @ x.mT), pairs(x.norm(dim=-1)[:, None] * x.norm(dim=-1))
    beyond = (pairs(y @ y.mT) - inner).abs() > allowed(inner, lengths)
    return evidence(
        at_most("largest distortion of distances²", (distances - 1).abs().max(), EPS),
        equal("share of pairs beyond the bound", beyond.double().mean(), 0),
    )


def random_map() -> tuple[Tensor, Tensor, Tensor]:
    """Points, their images under a random projection, and the vectors whose lengths it has to keep: x/‖x‖ ± y/‖y‖."""
    x = points()
    unit = x / x.norm(dim=-1, keepdim=True)
    i, j = torch.triu_indices(len(x), len(x), 1)
    needed = torch.cat([unit[i] + unit[j], unit[i] - unit[j]])
    images = projected(torch.cat([x, needed]), DIMENSION, 0)
    return x, images[: len(x)], (images[len(x) :].norm(dim=-1) / needed.norm(dim=-1)).square()


def dropped_axis() -> tuple[Tensor, Tensor, Tensor]:
    """Two points, their images without the third axis, and their distance alone, which that map keeps exactly."""
    x = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    y = x[:, :2]
    return x, y, ((y[0] - y[1]).norm() / (x[0] - x[1]).norm()).square()[None]


def inner_products_follow(given: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> Evidence:
    """On a map that keeps the lengths it is asked for within 1 ± ε: the largest error of ⟨x, y⟩ over ‖x‖‖y‖."""
    x, y, kept = given()
    lengths = pairs(x.norm(dim=-1)[:, None] * x.norm(dim=-1))
    errors = (pairs(y @ y.mT) - pairs(x @ x.mT)).abs() / lengths
    return evidence(
        at_most("largest distortion of the squared lengths that are asked for", (kept - 1).abs().max(), EPS),
        at_most("largest |⟨Px, Py⟩ − ⟨x, y⟩| / ‖x‖‖y‖, against ε", errors.max(), (kept - 1).abs().max(), slack=1e-12),
    )


C11_10 = Claim(
    id="C11.10",
    section="11.3.3",
    kind="exact",
    statement=Text(
        "Under the conditions of the lemma inner products are kept too, to a factor 1 ± ε.",
        "在 JL 引理的条件下，点积也近似保持：(1−ε)⟨x_i, x_j⟩ ≤ ⟨Px_i, Px_j⟩ ≤ (1+ε)⟨x_i, x_j⟩。",
    ),
    formula=r"(1-\epsilon)\langle x_i,x_j\rangle\le\langle Px_i,Px_j\rangle\le(1+\epsilon)\langle x_i,x_j\rangle",
    check=inner_products_are_kept,
    case=Case("error at most ε|⟨x, y⟩|", to_a_factor),
    control=Case("error at most ε‖x‖‖y‖", to_the_lengths),
    first="false",
    counterexample="""\
import torch
P = torch.tensor([[1., .1], [0., 1.]])                      # distances of 0, x, y kept within 10 %
x, y = torch.eye(2)
print((P @ x).norm()**2, (P @ y).norm()**2, (P @ (x - y)).norm()**2 / 2)   # 1, 1.01, 0.905
print(x @ y, (P @ x) @ (P @ y))                             # 0 and 0.1: no factor makes one of the other""",
    corrected=Claim(
        id="C11.10*",
        section="11.3.3",
        kind="exact",
        statement=Text(
            "If P keeps the squared lengths of x/‖x‖ + y/‖y‖ and x/‖x‖ − y/‖y‖ within 1 ± ε, then |⟨Px, Py⟩ − ⟨x, y⟩| "
            "≤ ε‖x‖‖y‖, an additive error. Distances between the points alone do not give it.",
            "若 P 使 x/‖x‖ ± y/‖y‖ 的长度平方都保持在 1 ± ε 之内，则 |⟨Px, Py⟩ − ⟨x, y⟩| ≤ ε‖x‖‖y‖，即加性误差；"
            "仅保持各点之间的距离并不够。",
        ),
        formula=r"4\langle Pu,Pv\rangle=\|P(u+v)\|^2-\|P(u-v)\|^2\ \Rightarrow\ "
        r"|\langle Px,Py\rangle-\langle x,y\rangle|\le\epsilon\|x\|\|y\|",
        check=inner_products_follow,
        case=Case("a map that keeps x/‖x‖ ± y/‖y‖", random_map),
        control=Case(
            "a map that keeps the distance of x and y: (1, 0, 1) and (0, 1, 1) without the third axis", dropped_axis
        ),
    ),
)


# ── LF11.3.3: A is approximated by a matrix of rank k = O(log N)


def sharp(n: int) -> Tensor:
    """Softmax attention of each token to itself alone, nearly."""
    return Softmax(Full(), scale=1.0).matrix(*[torch.eye(n, dtype=torch.float64) * 5.0] * 2)


def sketch(n: int, k: int, seed: int) -> Tensor:
    """R, k × n with entries N(0, 1/k): E RᵀR = I."""
    return Gaussian(n, 1, k, seed, gain=(n / k) ** 0.5, dtype=torch.float64).dense()


def values(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def sketched(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, V and A RᵀR V for N = 1024, d = 8."""
    A, V, R = sharp(1024), values(1024, 8), sketch(1024, k, 0)
    return A, V, (A @ R.mT) @ (R @ V)


def entry_by_entry(A: Tensor, V: Tensor, error: Tensor) -> Tensor:
    """In units of |a_i||v_j|, the largest."""
    return (error.abs() / (A.norm(dim=-1)[:, None] * V.norm(dim=0))).max()


def as_a_whole(A: Tensor, V: Tensor, error: Tensor) -> Tensor:
    """In units of |AV|, in the Frobenius norm."""
    return error.norm() / (A @ V).norm()


def sketch_is_near(distance: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    k = johnson_lindenstrauss_dimension(1024 + 8, EPS)
    A, V, found = sketched(k)
    return evidence(at_most(f"error at k = {k} of 1024", distance(A, V, found - A @ V), EPS))


def sketch_error(power: int) -> Evidence:
    """Mean of ‖A RᵀR V − AV‖² over draws, N = 64, against (‖A‖²‖V‖² + ‖AV‖²)/k^power."""
    A, V, k = sharp(64), values(64, 4), 16
    squares = [
        float(((A @ R.mT) @ (R @ V) - A @ V).square().sum()) for R in (sketch(64, k, seed) for seed in range(300))
    ]
    mean = Mean.of(squares)
    expected = (A.square().sum() * V.square().sum() + (A @ V).square().sum()) / k**power
    return evidence(agrees("‖A RᵀR V − AV‖²", mean.value, expected, error=mean.error))


LF11_3_3 = Claim(
    id="LF11.3.3",
    section="11.3.3",
    kind="statistical",
    statement=Text(
        "By Johnson–Lindenstrauss the N × N attention matrix can be approximated by an N × k matrix of low rank.",
        "基于 JL 引理，Linformer 证明了可以将 N × N 的注意力矩阵近似为 N × k 的低秩矩阵，其中 k ≪ N。",
    ),
    formula=r"A\approx AR^\top R,\qquad R\in\mathbb{R}^{k\times N}",
    check=sketch_is_near,
    case=Case("entry by entry, in units of |a_i||v_j|", entry_by_entry),
    control=Case("as a whole, in units of |AV|", as_a_whole),
    first="conditional",
    condition=Text(
        "Entry by entry and additively: |(A RᵀR V − AV)_ij| ≤ ε|a_i||v_j|. As a whole A = I needs k of the order of N. "
        "(And A RᵀR is N × N of rank k, not N × k.)",
        "仅按元素、在加性误差意义下成立：|(A RᵀR V − AV)_ij| ≤ ε|a_i||v_j|。就整体范数而言，A = I 需要 k 与 N 同阶。"
        "（而且 A RᵀR 是秩为 k 的 N × N 矩阵，不是 N × k。）",
    ),
    corrected=Claim(
        id="LF11.3.3*",
        section="11.3.3",
        kind="statistical",
        statement=Text(
            "For R with entries N(0, 1/k) the mean square error of A RᵀR V is (‖A‖²‖V‖² + ‖AV‖²)/k.",
            "若 R 的元素服从 N(0, 1/k)，则 A RᵀR V 的均方误差为 (‖A‖²‖V‖² + ‖AV‖²)/k。",
        ),
        formula=r"\mathbb{E}\|AR^\top RV-AV\|_F^2=\frac{\|A\|_F^2\|V\|_F^2+\|AV\|_F^2}{k}",
        check=sketch_error,
        case=Case("1/k", 1),
        control=Case("1/k²", 2),
    ),
)


CLAIMS = (T11_25, C11_10, LF11_3_3)
