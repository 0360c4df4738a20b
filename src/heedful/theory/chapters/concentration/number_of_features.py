"""General linear attention, continued: independent features, and what more of them do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import pi, sqrt

import torch

from heedful.feature_maps import Identity, Polynomial
from heedful.measures import concentration
from heedful.measures.spectrum import numerical_rank
from heedful.mechanisms import Linear, Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory import closed_forms
from heedful.theory.chapters.concentration.samples import gaussian_keys, slope_and_error
from heedful.theory.claim import Case, Claim, Evidence, Text, agrees, at_most, equal, evidence
from heedful.theory.samples import mean_and_error

# ── S002-iid: features of independent components


def matches_iid(features: Callable[[torch.Generator], Tensor]) -> Evidence:
    """S over 4,096 keys, 64 times, against the formula with the law's mean and spread, both 1."""
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(1, 8, generator=generator, dtype=torch.float64)
    k = features(generator)
    rows = concentration(Linear(Identity(), Full(), normalise=False).operator(q, k)).rows
    mean, error = mean_and_error(rows)
    return evidence(agrees("S", mean, closed_forms.S_iid(q[0], 1.0, 1.0), error=error))


def independent(generator: torch.Generator) -> Tensor:
    return torch.empty(64, 4096, 8, dtype=torch.float64).exponential_(generator=generator)


def in_common(generator: torch.Generator) -> Tensor:
    return torch.empty(64, 4096, 1, dtype=torch.float64).exponential_(generator=generator).expand(-1, -1, 8)


IID = Claim(
    id="S002-iid",
    section="general linear",
    kind="statistical",
    statement=Text(
        "Where the components of k̃ are independent and alike, S(a) = 1/√(1 + (σ̃/μ̃ · ‖q̃‖₂/‖q̃‖₁)²).",
        "k̃ 的各分量独立同分布时，S(a) = 1/√(1 + (σ̃/μ̃ · ‖q̃‖₂/‖q̃‖₁)²)。",
    ),
    formula=r"S(a)=\left(1+\left(\frac{\tilde\sigma}{\tilde\mu}"
    r"\frac{\|\tilde q\|_2}{\|\tilde q\|_1}\right)^2\right)^{-1/2}",
    check=matches_iid,
    case=Case("independent exponential components", independent),
    control=Case("one exponential for all components", in_common),
)


# ── S002-l2l1: the maximum of ‖q‖₂/‖q‖₁


def norm_ratio(q: Tensor) -> Tensor:
    """‖q‖₂/‖q‖₁, read from the closed form: 1/S² − 1 at σ = μ."""
    return (closed_forms.S_iid(q, 1.0, 1.0) ** -2 - 1).sqrt()


def inverse_ratio(q: Tensor) -> Tensor:
    return 1 / norm_ratio(q)


def candidates(d: int) -> Tensor:
    """One-hot and constant vectors, and 1,000 between them: powers of uniform numbers, from flat to peaked."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(1000, d, generator=generator, dtype=torch.float64)
    powers = torch.logspace(-2, 2, 1000, dtype=torch.float64)[:, None]
    return torch.cat([torch.eye(d, dtype=torch.float64), torch.ones(1, d, dtype=torch.float64), u**powers])


def reaches_root_d(ratio: Callable[[Tensor], Tensor]) -> Evidence:
    return evidence(
        *(equal(f"largest ratio found, d = {d}", ratio(candidates(d)).max(), sqrt(d), within=1e-6) for d in (16, 64))
    )


def lies_between(ratio: Callable[[Tensor], Tensor]) -> Evidence:
    found = ratio(candidates(64))
    return evidence(
        equal("largest ratio found, d = 64 (one-hot)", found.max(), 1, within=1e-6),
        equal("least ratio found (constant)", found.min(), 64**-0.5, within=1e-6),
    )


L2_L1 = Claim(
    id="S002-l2l1",
    section="general linear",
    kind="exact",
    statement=Text("The maximum of ‖q‖₂/‖q‖₁ is √d.", "‖q‖₂/‖q‖₁ 的最大值是 √d。"),
    formula=r"\max_q\frac{\|q\|_2}{\|q\|_1}=\sqrt d",
    check=reaches_root_d,
    case=Case("‖q‖₂/‖q‖₁", norm_ratio),
    control=Case("‖q‖₁/‖q‖₂", inverse_ratio),
    first="false",
    counterexample="""\
import torch
d = 64
peaked, flat = torch.eye(d)[0], torch.ones(d)
for q in (peaked, flat):
    print((q.norm(2) / q.norm(1)).item(), d ** 0.5)         # 1 and 0.125: never 8""",
    corrected=Claim(
        id="S002-l2l1*",
        section="general linear",
        kind="exact",
        statement=Text(
            "‖q‖₂/‖q‖₁ lies between 1/√d (all alike) and 1 (one-hot); the maximum does not depend on d.",
            "‖q‖₂/‖q‖₁ 介于 1/√d（各分量相同）与 1（one-hot）之间；最大值与 d 无关。",
        ),
        formula=r"\frac1{\sqrt d}\le\frac{\|q\|_2}{\|q\|_1}\le1",
        check=lies_between,
        case=Case("‖q‖₂/‖q‖₁", norm_ratio),
        control=Case("‖q‖₁/‖q‖₂", inverse_ratio),
    ),
)


# ── S002-increase-d: more features make attention sparser


def sparser_with_features(S: Callable[[], list[tuple[int, float]]]) -> Evidence:
    """S as the number of features grows; the statement wants it to fall."""
    found = S()
    return evidence(
        *(
            at_most(f"S of {r} features against {fewer}", value, before)
            for (fewer, before), (r, value) in pairwise(found)
        )
    )


def iid_features() -> list[tuple[int, float]]:
    """Half-normal features of keys and queries, 2,048 keys: linear attention of the library."""
    generator = torch.Generator().manual_seed(0)
    attend = Linear(Identity(), Full())
    found = []
    for d in (4, 64, 1024):
        q, k = (torch.randn(n, d, generator=generator, dtype=torch.float64).abs() for n in (16, 2048))
        found.append((d, float(concentration(attend.operator(q, k)).rows.mean())))
    return found


def series_of_exp() -> list[tuple[int, float]]:
    """Tensor powers up to degree 0, 2, 4, 6 of Gaussian keys with γ = 1: more features, nearer to exp."""
    q, k = gaussian_keys(4096, 0.0, 1.0, repeats=1, seed=0)
    maps = [Polynomial(degree, scale=1.0) for degree in (0, 2, 4, 6)]
    return [(phi.dim(2), float(concentration(Linear(phi, Full()).operator(q, k[0])).rows.mean())) for phi in maps]


def flattens(query: Callable[[int, torch.Generator], Tensor]) -> Evidence:
    """1/S² − 1 against d by the closed form: (σ/μ)² π/2d for half-normal q, an exponent of −1."""
    generator = torch.Generator().manual_seed(0)
    widths = [16, 64, 256, 1024, 4096]
    excess = [float((closed_forms.S_iid(query(d, generator), 1.0, 1.0) ** -2 - 1).mean()) for d in widths]
    slope, _ = slope_and_error(torch.tensor(widths), torch.tensor(excess))
    return evidence(
        equal("exponent of 1/S² − 1 in d", slope, -1, within=0.05),
        equal("(1/S² − 1)·2d/π at d = 4096", excess[-1] * 2 * 4096 / pi, 1, within=0.05),
    )


def dense_query(d: int, generator: torch.Generator) -> Tensor:
    return torch.randn(256, d, generator=generator, dtype=torch.float64)


def one_hot_query(d: int, generator: torch.Generator) -> Tensor:
    return torch.eye(d, dtype=torch.float64)[:1]


INCREASE_D = Claim(
    id="S002-increase-d",
    section="general linear",
    kind="exact",
    statement=Text(
        "So to make linear attention sparse means to increase d; only a larger d cures it at the root.",
        "所以增大 ‖q‖₂/‖q‖₁ 意味着要增大 d；只有增大 d 才能从根本上缓解线性 Attention 的不足。",
    ),
    formula=r"d\uparrow\ \Rightarrow\ S\downarrow",
    check=sparser_with_features,
    case=Case("independent features alike, as in the formula", iid_features),
    control=Case("tensor powers, the series of exp: 1, 7, 31, 127 features", series_of_exp),
    first="false",
    counterexample="""\
import torch
from heedful.theory.closed_forms import S_iid
for d in (4, 64, 1024):
    q = torch.randn(d, generator=torch.Generator().manual_seed(0)).abs()
    print(d, S_iid(q, 1.0, 1.0).item())                     # 0.86, 0.99, 0.999: flatter, not sparser""",
    corrected=Claim(
        id="S002-increase-d*",
        section="general linear",
        kind="asymptotic",
        statement=Text(
            "By the same formula more features flatten attention: for a dense q, 1/S² − 1 = (σ̃/μ̃)² π/2d → 0. What more "
            "features raise is the bound on the rank; sparsity takes other features, such as the tensor powers of exp.",
            "按同一公式，特征越多注意力越平：q 稠密时 1/S² − 1 = (σ̃/μ̃)² π/2d → 0。增大 d 提高的只是秩的上限；"
            "要稀疏需要换特征，例如 exp 的各阶张量幂。",
        ),
        formula=r"\frac1{S^2}-1\simeq\frac{\tilde\sigma^2}{\tilde\mu^2}\frac{\pi}{2d}",
        check=flattens,
        case=Case("a dense q", dense_query),
        control=Case("a one-hot q", one_hot_query),
    ),
)


# ── S002-inf-dim: softmax attention is linear attention of infinitely many features


def is_limit_of_features(degree: int) -> Evidence:
    """Linear attention of tensor powers up to a degree against softmax, scores below 1 in size; 1/17! is 3·10⁻¹⁵."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.rand(2, 12, 2, generator=generator, dtype=torch.float64).mul(2).sub(1).unbind()
    exact = Softmax(Full(), scale=0.5).matrix(q, k)
    features = Linear(Polynomial(degree, scale=0.5), Full())
    return evidence(
        at_most(f"largest difference at degree {degree}", (features.matrix(q, k) - exact).abs().max(), 1e-13),
        equal("rank of softmax, 12 tokens of width 2", numerical_rank(exact), 12),
    )


INFINITE = Claim(
    id="S002-inf-dim",
    section="general linear",
    kind="exact",
    statement=Text(
        "Standard attention is linear attention of infinite dimension.",
        "标准 Attention 也可以理解为一种无限维的线性 Attention。",
    ),
    formula=r"e^{q\cdot k}=\sum_{p\ge0}\frac{\langle q^{\otimes p},k^{\otimes p}\rangle}{p!}",
    check=is_limit_of_features,
    case=Case("degree 16", 16),
    control=Case("degree 4", 4),
)

CLAIMS = (IID, L2_L1, INCREASE_D, INFINITE)
