"""11.3.3: Linformer, its formula, cost and error bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from heedful.core import Dims, Mechanism
from heedful.feature_maps import Elu1, Identity
from heedful.measures import numerical_rank
from heedful.mechanisms import Linear, Softmax
from heedful.mechanisms.linformer import Linformer
from heedful.nn import Gaussian, Orthogonal
from heedful.patterns import Full
from heedful.random_features import FavorPlus
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.heads import growth
from heedful.theory.chapters.low_rank.projections import EPS, entry_by_entry, sketched
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence
from heedful.theory.closed_forms import johnson_lindenstrauss_dimension

# ── D11.26: Linformer is Q(KᵀV/k)

Approximation = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def printed(q: Tensor, k: Tensor, v: Tensor, rank: int) -> Tensor:
    """Q(KᵀV/k): linear attention with the identity for features, without a normaliser."""
    return Linear(Identity(), Full(), normalise=False)(q, k, v) / rank


def pooled(q: Tensor, k: Tensor, v: Tensor, rank: int) -> Tensor:
    """softmax(Q(EK)ᵀ/√d)(FV), E and F the means of `rank` pieces."""
    return Linformer(len(k), rank, projection="pooled")(q, k, v)


def in_pieces(n: int, d: int, pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values that are constant on so many pieces: rank `pieces` loses nothing."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(n, d, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, pieces, d, generator=generator, dtype=torch.float64).repeat_interleave(n // pieces, 1)
    return q, k, v


def approximates_attention(approximation: Approximation) -> Evidence:
    q, k, v = in_pieces(256, 16, 32)
    exact = Softmax(Full())(q, k, v)
    error = (approximation(q, k, v, 32) - exact).norm() / exact.norm()
    return evidence(at_most("relative error at N = 256, k = 32, keys and values in 32 pieces", error, 1e-12))


def linformer_has_rank(projection: Literal["pooled", "random"]) -> Evidence:
    q, k, v = in_pieces(256, 16, 32)
    mechanism = Linformer(256, 32, projection=projection).double()
    exact = Softmax(Full())(q, k, v)
    error = (mechanism(q, k, v) - exact).norm() / exact.norm()
    return evidence(
        at_most("rank at k = 32", numerical_rank(mechanism.matrix(q, k)), 32),
        at_most("relative error, keys and values in 32 pieces", error, 1e-12),
    )


D11_26 = Claim(
    id="D11.26",
    section="11.3.3",
    kind="exact",
    statement=Text(
        "Linformer approximates AV by Q(KᵀV/k), k being the low rank.",
        "Linformer 用低秩矩阵近似注意力：AV ≈ Q(KᵀV/k)，k 是低秩维度。",
    ),
    formula=r"AV\approx Q\left(\frac{K^\top V}{k}\right)",
    check=approximates_attention,
    case=Case("Q(KᵀV/k)", printed),
    control=Case("softmax(Q(EK)ᵀ/√d)(FV)", pooled),
    first="false",
    counterexample="""\
import torch
Q, K, V = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[3., 4.]])    # one token
print(torch.softmax(Q @ K.T, -1) @ V, Q @ (K.T @ V) / 7)    # (3, 4) and (0, 0), whatever k""",
    corrected=Claim(
        id="D11.26*",
        section="11.3.3",
        kind="exact",
        statement=Text(
            "Linformer is softmax(Q(EK)ᵀ/√d)(FV) with E, F of k × N: a matrix of rank k at most, exact where keys and "
            "values are constant on k equal pieces and E, F take their means. Q(KᵀV) is linear attention without a "
            "normaliser, in which k is but a factor.",
            "Linformer 是 softmax(Q(EK)ᵀ/√d)(FV)，E、F 为 k × N：秩不超过 k；当键和值在 k 个等长段上为常数且 E、F "
            "取各段均值时精确。Q(KᵀV) 则是没有归一化的线性注意力，k 在其中只是一个因子。",
        ),
        formula=r"\mathrm{softmax}\left(\frac{Q(EK)^\top}{\sqrt d}\right)FV,\qquad E,F\in\mathbb{R}^{k\times N}",
        check=linformer_has_rank,
        case=Case("E and F the means of pieces", "pooled"),
        control=Case("E and F random", "random"),
    ),
)


# ── L11.38: exact attention O(N²d), Linformer O(Ndk)

Build = Callable[[int, int], Mechanism]  # from length and rank


def linformer(n: int, rank: int) -> Mechanism:
    return Linformer(n, rank)


def printed_formula(n: int, rank: int) -> Mechanism:
    return Linear(Identity(), Full(), normalise=False)


def flops(mechanism: Mechanism, n: int, d: int) -> float:
    return float(mechanism.cost(Dims(n, n, d, d)).flops)


def costs_as_stated(build: Build) -> Evidence:
    sizes = [1024, 2048, 4096]
    return evidence(
        equal("softmax: exponent in N", growth(sizes, [flops(Softmax(Full()), n, 64) for n in sizes]), 2, within=1e-9),
        equal("exponent in N", growth(sizes, [flops(build(n, 64), n, 64) for n in sizes]), 1, within=1e-9),
        equal("exponent in k", growth(sizes, [flops(build(4096, k), 4096, 64) for k in sizes]), 1, within=1e-9),
        equal("exponent in d", growth(sizes, [flops(build(4096, 64), 4096, d) for d in sizes]), 1, within=1e-9),
    )


L11_38 = Claim(
    id="L11.38",
    section="11.3.3",
    kind="complexity",
    statement=Text(
        "Exact attention costs O(N²d), Linformer O(Ndk).", "原始注意力的计算复杂度为 O(N²d)，而 Linformer 为 O(Ndk)。"
    ),
    formula=r"O(N^2d)\quad\mathrm{and}\quad O(Ndk)",
    check=costs_as_stated,
    case=Case("softmax(Q(EK)ᵀ/√d)(FV)", linformer),
    control=Case("Q(KᵀV/k), as the text prints it", printed_formula),
    first="conditional",
    condition=Text(
        "For Linformer as it is. The formula of D11.26 costs O(Nd²), whatever k.",
        "指真正的 Linformer。定义 11.26 中的公式代价是 O(Nd²)，与 k 无关。",
    ),
)


# ── T11.26: an error bound for Q(KᵀV/k)


def some_rank_will_do(approximation: Approximation) -> Evidence:
    """Queries zero, values (3, 4) throughout, N = 4: the least error over all k."""
    q, v = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([[3.0, 4.0]] * 4, dtype=torch.float64)
    k = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = Softmax(Full())(q, k, v)
    errors = [float(torch.linalg.matrix_norm(approximation(q, k, v, rank) - exact, 2)) for rank in range(1, 5)]
    return evidence(at_most("least error over k = 1 … 4", min(errors), 0.1))


def entries_are_near(part: int) -> Evidence:
    """k large enough for the rows of A and the columns of V, or a part of that."""
    k = johnson_lindenstrauss_dimension(1024 + 8, EPS) // part
    A, V, found = sketched(k)
    return evidence(at_most(f"largest error in units of |a_i||v_j|, k = {k}", entry_by_entry(A, V, found - A @ V), EPS))


T11_26 = Claim(
    id="T11.26",
    section="11.3.3",
    kind="exact",
    statement=Text(
        "For any X there is k = O(log N/ε²) with ‖softmax(QKᵀ/√d)V − Q(KᵀV/k)‖ ≤ ε.",
        "对于任意输入 X，存在低秩维度 k = O(log N/ε²)，使 ‖softmax(QKᵀ/√d)V − Q(KᵀV/k)‖ ≤ ε。",
    ),
    formula=r"\|\mathrm{softmax}(QK^\top/\sqrt d)V-Q(K^\top V/k)\|\le\epsilon",
    check=some_rank_will_do,
    case=Case("Q(KᵀV/k)", printed),
    control=Case("softmax(Q(EK)ᵀ/√d)(FV)", pooled),
    first="false",
    counterexample="""\
import torch
Q, K, V = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[3., 4.]])    # one token
for k in (1, 10, 1000):
    print((torch.softmax(Q @ K.T, -1) @ V - Q @ (K.T @ V) / k).norm())     # 5, whatever k""",
    corrected=Claim(
        id="T11.26*",
        section="11.3.3",
        kind="exact",
        statement=Text(
            "There is no such bound. What holds is |(A RᵀR V − AV)_ij| ≤ ε|a_i||v_j| for k = O(log(N + d)/ε²), and it "
            "needs A.",
            "不存在这样的界。成立的是：当 k = O(log(N + d)/ε²) 时 |(A RᵀR V − AV)_ij| ≤ ε|a_i||v_j|，而这仍需要 A。",
        ),
        formula=r"|(AR^\top RV-AV)_{ij}|\le\epsilon\,|a_i||v_j|",
        check=entries_are_near,
        case=Case("k as Johnson–Lindenstrauss has it", 1),
        control=Case("a twentieth of it", 20),
    ),
)


# ── T11.26-proof: P: R^d → R^k with PᵀP ≈ I_d


def projection_is_near_identity(k: int) -> Evidence:
    P = Orthogonal(64, 1, k, 0, gain=(64 / k) ** 0.5, dtype=torch.float64).dense()
    return evidence(at_most(f"‖PᵀP − I‖ at k = {k}, d = 64", _defect(P), 0.5))


def projection_is_far_from_identity(k: int) -> Evidence:
    """For three maps: orthogonal, Gaussian, and a tenth of the first."""
    maps = [kind(64, 1, k, 0, gain=(64 / k) ** 0.5, dtype=torch.float64).dense() for kind in (Orthogonal, Gaussian)]
    return evidence(*(at_least("‖PᵀP − I‖", _defect(P), 1, slack=1e-12) for P in [*maps, maps[0] / 10]))


def _defect(P: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(P.mT @ P - torch.eye(P.shape[-1], dtype=P.dtype), 2)


T11_26_PROOF = Claim(
    id="T11.26-proof",
    section="11.3.3",
    kind="exact",
    statement=Text(
        "Proof: a map P: R^d → R^k keeps inner products; replace K by PK; as PᵀP ≈ I_d, little changes.",
        "证明思路：线性映射 P: R^d → R^k 保持点积；将 K 替换为 PK；由于 PᵀP ≈ I_d，表达式近似等于原始注意力。",
    ),
    formula=r"P\in\mathbb{R}^{k\times d},\ k<d:\quad P^\top P\approx I_d",
    check=projection_is_near_identity,
    case=Case("k = 32, d = 64", 32),
    control=Case("k = d = 64", 64),
    first="false",
    counterexample="""\
import torch
P = torch.linalg.qr(torch.randn(64, 32, dtype=torch.float64))[0].T * 2**0.5
print(torch.linalg.matrix_norm(P.T @ P - torch.eye(64), 2)) # 1: PᵀP has rank 32, so it sends some x to 0""",
    corrected=Claim(
        id="T11.26-proof*",
        section="11.3.3",
        kind="exact",
        statement=Text(
            "For k < d, ‖PᵀP − I‖ ≥ 1 for every P, as PᵀP has a kernel. Nor do the shapes fit: K is N × d, so that PK "
            "is not defined, and with P of k × N the softmax is N × k and can't multiply V. Project the sequence axis "
            "of K and V, or the feature axis of Q and K, which stays O(N²k).",
            "当 k < d 时，任何 P 都有 ‖PᵀP − I‖ ≥ 1，因为 PᵀP 有核。形状也不匹配：K 为 N × d，PK 无定义；"
            "若 P 为 k × N，则 softmax 是 N × k，不能与 V 相乘。应在序列维上同时投影 K 与 V，或在特征维上同时投影 "
            "Q 与 K（后者仍为 O(N²k)）。",
        ),
        formula=r"k<d\ \Rightarrow\ \|P^\top P-I_d\|_2\ge 1",
        check=projection_is_far_from_identity,
        case=Case("k = 32, d = 64", 32),
        control=Case("k = d = 64", 64),
    ),
)


# ── Tab11.3.2-lin: linear attention costs O(Nd)


def linear_in_width(build: Callable[[int], Mechanism]) -> Evidence:
    widths = [64, 128, 256]
    return evidence(
        equal("exponent in N", growth(widths, [flops(build(64), 64 * n, 64) for n in widths]), 1, within=1e-9),
        equal("exponent in d", growth(widths, [flops(build(d), 4096, d) for d in widths]), 1, within=1e-9),
    )


def linear_in_each(expected: tuple[int, int, int]) -> Evidence:
    """Exponents in N, in the number of features m, and in the values' width e."""
    sizes = [64, 128, 256]

    def cost(n: int, m: int, e: int) -> float:
        return float(Linear(Elu1(), Full()).cost(Dims(n, n, m, e)).flops)

    found = [[cost(n, 64, 64) for n in sizes], [cost(64, m, 64) for m in sizes], [cost(64, 64, e) for e in sizes]]
    return evidence(
        *(
            equal(f"exponent in {name}", growth(sizes, numbers), exponent, within=1e-9)
            for name, numbers, exponent in zip(("N", "m", "e"), found, expected, strict=True)
        )
    )


TAB_LIN = Claim(
    id="Tab11.3.2-lin",
    section="11.3.3",
    kind="complexity",
    statement=Text(
        "Linear attention φ(Q)(φ(K)ᵀV) costs O(Nd).", "表 11.3.2：线性注意力 φ(Q)(φ(K)ᵀV) 的计算复杂度为 O(Nd)。"
    ),
    formula=r"\phi(Q)(\phi(K)^\top V):\quad O(Nd)",
    check=linear_in_width,
    case=Case("as many features as dimensions", lambda d: Linear(Elu1(), Full())),
    control=Case("64 features whatever d", lambda d: Linear(FavorPlus(d, 64, orthogonal=False), Full())),
    first="false",
    counterexample="""\
import heedful as h
from heedful.core import Dims
for d in (64, 128, 256):
    print(d, h.Linear(pattern=h.Full()).cost(Dims(4096, 4096, d, d)).flops)  # 4 times as much for twice d""",
    corrected=Claim(
        id="Tab11.3.2-lin*",
        section="11.3.3",
        kind="complexity",
        statement=Text(
            "It costs O(N m e), with m features and values of width e: O(Nd²) where both are d.",
            "代价为 O(N m e)，m 为特征数，e 为值的宽度：两者都等于 d 时是 O(Nd²)。",
        ),
        formula=r"4Nme\ \mathrm{flops}",
        check=linear_in_each,
        case=Case("1 in each of N, m, e", (1, 1, 1)),
        control=Case("free of m", (1, 0, 1)),
    ),
)

CLAIMS = (D11_26, L11_38, T11_26, T11_26_PROOF, TAB_LIN)
