"""11.3.2: does softmax make attention low rank?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.measures import effective_rank
from heedful.mechanisms import Quadratic, Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, equal, evidence

# ── T11.23: rank(softmax(QKᵀ/√d)) ≤ min(N, d)


def rank_at_most_width(weights: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """The rank of a matrix made of q, k of width 1 on three tokens, whose smallest singular value is no rounding."""
    q = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    return evidence(at_most("rank at N = 3, d = 1", torch.linalg.matrix_rank(weights(q, q)), 1))


def softmax_weights(q: Tensor, k: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return Quadratic(lambda x: x, Full(), normalise=None).matrix(q, k)


def log_rank_at_most_width(rank_plus: int) -> Evidence:
    """rank(log A) ≤ d + 1, since log A = QKᵀ/√d − (log-sum-exp of each row) 1ᵀ; and A itself has full rank."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 64, 4, generator=generator, dtype=torch.float64).unbind()
    weights = softmax_weights(q, k)
    return evidence(
        at_most("rank of log A at N = 64, d = 4", torch.linalg.matrix_rank(weights.log()), 4 + rank_plus),
        equal("rank of A", torch.linalg.matrix_rank(weights), 64),
    )


T11_23 = Claim(
    id="T11.23",
    section="11.3.2",
    kind="exact",
    statement=Text(
        "The rank of softmax(QKᵀ/√d) is at most min(N, d).",
        "softmax(QKᵀ/√d) 的秩不超过 min(N, d)。",
    ),
    formula=r"\operatorname{rank}\,\mathrm{softmax}(QK^\top/\sqrt d)\le\min(N,d)",
    check=rank_at_most_width,
    case=Case("softmax", softmax_weights),
    control=Case("the scores QKᵀ/√d themselves", scores),
    first="false",
    counterexample="""\
import torch
q = torch.tensor([[0.], [1.], [2.]], dtype=torch.float64)   # N = 3 tokens, d = 1
A = torch.softmax(q @ q.T, -1)
print(torch.linalg.matrix_rank(A), torch.linalg.det(A))     # 3, 0.0244: more than d""",
    corrected=Claim(
        id="T11.23*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "The scores have rank at most d and log A at most d + 1; A itself generically has full rank N.",
            "分数矩阵的秩不超过 d，log A 的秩不超过 d + 1；而 A 本身一般是满秩 N。",
        ),
        formula=r"\operatorname{rank}(\log A)\le d+1,\qquad \operatorname{rank}A=N\ \text{generically}",
        check=log_rank_at_most_width,
        case=Case("d + 1", 1),
        control=Case("d without the one", 0),
    ),
)


# ── C11.9: sharper attention has lower rank


def rank_falls_with_sharpness(logits: Callable[[float], Tensor]) -> Evidence:
    """Effective rank (τ = .9) of softmax(b·Z), sharp (b = 10) against flat (b = 0.1)."""
    flat, sharp = (effective_rank(torch.softmax(logits(b), -1)).estimate for b in (0.1, 10.0))
    return evidence(at_most("effective rank, b = 10 against b = 0.1", sharp, flat))


def diagonal(b: float) -> Tensor:
    return b * torch.eye(64, dtype=torch.float64)


def one_hub(b: float) -> Tensor:
    """A diagonal that fades, and a column that every row attends to."""
    hub = torch.zeros(64, 64, dtype=torch.float64)
    hub[:, 0] = b
    return hub + torch.eye(64, dtype=torch.float64) * 4 / (1 + b)


def rank_rises_on_a_diagonal(sign: float) -> Evidence:
    """σ₂ = … = σ_N = (eᵇ − 1)/(eᵇ + N − 1) grows with b: measured on softmax(bI), N = 64."""
    b = 2.0
    values = torch.linalg.svdvals(torch.softmax(diagonal(b), -1))
    expected = (torch.tensor(sign * b).exp().item() - 1) / (torch.tensor(sign * b).exp().item() + 63)
    return evidence(
        equal("σ₂", values[1], expected, within=1e-6),
        at_least("effective rank at b = 2", effective_rank(torch.softmax(diagonal(b), -1)).estimate, 46),
    )


def rank_against_sharpness() -> Figure:
    b = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    lines = {
        name: (b, [float(effective_rank(torch.softmax(logits(x), -1)).estimate) for x in b])
        for name, logits in (("diagonal", diagonal), ("one hub", one_hub))
    }
    return Figure(Text("Effective rank as attention sharpens", "注意力变尖锐时的有效秩"), "b", "effective rank", lines)


C11_9 = Claim(
    id="C11.9",
    section="11.3.2",
    kind="exact",
    statement=Text("Sharper attention lowers the rank of A.", "注意力越尖锐（稀疏），A 的秩越低。"),
    formula=r"b\uparrow\ \Rightarrow\ \operatorname{rank}\,\mathrm{softmax}(bZ)\downarrow",
    check=rank_falls_with_sharpness,
    case=Case("logits b·I", diagonal),
    control=Case("one column that every row attends to", one_hub),
    first="false",
    counterexample="""\
import torch, heedful as h
for b in (0., 2., 10.):                                     # flat, sharper, sharpest
    A = torch.softmax(b * torch.eye(64, dtype=torch.float64), -1)
    print(b, h.effective_rank(A).estimate)                  # 1, 46, 58: it rises""",
    corrected=Claim(
        id="C11.9*",
        section="11.3.2",
        kind="exact",
        statement=Text(
            "On logits b·I the singular values σ₂ … σ_N = (eᵇ−1)/(eᵇ+N−1) grow with b. Sharpness lowers the rank only "
            "where many rows share their target; the rank of the limit is the number of distinct targets.",
            "对 logits b·I，σ₂ … σ_N = (eᵇ−1)/(eᵇ+N−1) 随 b 增大。只有当许多行指向同一列时，尖锐化才降低秩；"
            "极限矩阵的秩等于不同目标列的个数。",
        ),
        formula=r"\sigma_2=\dots=\sigma_N=\frac{e^b-1}{e^b+N-1}",
        check=rank_rises_on_a_diagonal,
        case=Case("b·I", 1.0),
        control=Case("the formula with −b", -1.0),
    ),
    figure=rank_against_sharpness,
)

CLAIMS = (C11_9, T11_23)
