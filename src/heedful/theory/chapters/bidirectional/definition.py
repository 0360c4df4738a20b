"""1: what rank is, and what low rank is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.measures.spectrum import numerical_rank
from heedful.mechanisms import FixedPattern, Perceiver, Softmax, TruncatedSVD
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.bidirectional.heads import few_tokens, gaussian, rank_of
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence

# ── N004-rank-def: rank is the number of linearly independent rows


def independent_rows(A: Tensor) -> int:
    """Rows are taken one by one; those that the rows before leave nothing of are not counted."""
    basis: list[Tensor] = []
    for row in A:
        left = row.clone()
        for _ in range(2):
            for unit in basis:
                left = left - (left @ unit) * unit
        if left.norm() > 1e-10 * A.norm():
            basis.append(left / left.norm())
    return len(basis)


def different_rows(A: Tensor) -> int:
    return len(torch.unique(A, dim=0))


def counts_rank(count: Callable[[Tensor], int]) -> Evidence:
    """The count of rows and of columns against the singular values, for attention of rank 5 of two kinds."""
    q, k = gaussian(40, 8, 1.0, 0)
    latents = Perceiver(d=8, latents=5, rounds=0).matrix(q, k).detach()
    repeated = Softmax(Full()).matrix(*few_tokens(40, 8, 5, 0))
    found = []
    for name, A in (("5 latents", latents), ("5 different tokens", repeated)):
        found += [
            equal(f"rows counted, {name}", count(A), numerical_rank(A)),
            equal(f"columns counted, {name}", count(A.mT), numerical_rank(A)),
        ]
    return evidence(*found)


RANK_DEFINITION = Claim(
    id="N004-rank-def",
    section="1",
    kind="exact",
    statement=Text(
        "The rank of a matrix is the number of its linearly independent rows or columns.",
        "矩阵的秩：矩阵中线性无关的行或列的数量。",
    ),
    formula=r"\operatorname{rank}A=\dim\operatorname{span}\{a_1,\dots,a_n\}",
    check=counts_rank,
    case=Case("linearly independent rows", independent_rows),
    control=Case("different rows", different_rows),
)


# ── N004-lowrank-def: where a few singular values dominate, the rank is far below n


def dominated_has_low_rank(rank: Callable[[Tensor], Tensor]) -> Evidence:
    """Nearly equal logits, N = 64: σ₁ holds more than 0.99 of the energy."""
    weights = Softmax(Full()).matrix(*gaussian(64, 16, 0.05, 0))
    values = torch.linalg.svdvals(weights)
    return evidence(
        at_least("share of σ₁² in Σσ²", values[0] ** 2 / values.square().sum(), 0.99),
        at_most("rank, N = 64", rank(weights), 8),
    )


def few_values_do(attention: Callable[[], tuple[Softmax | FixedPattern, Tensor, Tensor]]) -> Evidence:
    """Effective rank, and how near the best matrix of rank 1 comes."""
    mechanism, q, k = attention()
    weights = mechanism.matrix(q, k)
    values = torch.linalg.svdvals(weights)
    error = (TruncatedSVD(1, mechanism).matrix(q, k) - weights).norm()
    return evidence(
        equal("effective rank", rank_of(weights), 1),
        equal("exact rank", numerical_rank(weights), 64),
        equal("error of rank 1 less √Σ_{i>1} σᵢ²", error - values[1:].norm(), 0, within=1e-12),
    )


LOW_RANK_DEFINITION = Claim(
    id="N004-lowrank-def",
    section="1",
    kind="exact",
    statement=Text(
        "Where only a few singular values of the attention matrix dominate, its rank is far below n.",
        "注意力权重矩阵可能只有少数几个主成分（dominant singular values）占主导地位，导致其秩远低于理论最大值 n。",
    ),
    formula=r"\sigma_1\gg\sigma_2\ge\dots\ \Rightarrow\ \operatorname{rank}A\ll n",
    check=dominated_has_low_rank,
    case=Case("exact rank", numerical_rank),
    control=Case("effective rank (0.9 of the energy)", rank_of),
    first="false",
    counterexample="""\
import torch, heedful as h
q, k = torch.randn(2, 64, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
A = h.Softmax(h.Full(), temperature=20.).matrix(q, k)
print(torch.linalg.svdvals(A)[:3])                          # 1.0, 0.02, 0.02: one dominates
print(torch.linalg.matrix_rank(A), h.effective_rank(A).estimate)   # rank 64, effective rank 1""",
    corrected=Claim(
        id="N004-lowrank-def*",
        section="1",
        kind="exact",
        statement=Text(
            "What falls is the effective rank: where a few values dominate, a matrix of low rank is near, at a "
            "distance of √Σ_{i>r} σᵢ², while the rank itself stays n.",
            "下降的是有效秩：少数奇异值占主导时，存在距离为 √Σ_{i>r} σᵢ² 的低秩近似，而秩本身仍为 n。",
        ),
        formula=r"\min_{\operatorname{rank}B\le r}\|A-B\|_F=\left(\sum_{i>r}\sigma_i^2\right)^{1/2}",
        check=few_values_do,
        case=Case("nearly equal logits", lambda: (Softmax(Full()), *gaussian(64, 16, 0.05, 0))),
        control=Case("previous token: all values alike", lambda: (FixedPattern("previous"), *gaussian(64, 16, 1.0, 0))),
    ),
)

CLAIMS = (RANK_DEFINITION, LOW_RANK_DEFINITION)
