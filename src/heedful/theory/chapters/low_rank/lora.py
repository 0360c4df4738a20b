"""11.3.5: what low-rank updates of weights do to attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from heedful.feature_maps import Identity
from heedful.measures import energy_share, numerical_rank
from heedful.mechanisms import Linear, Quadratic, Softmax, no_activation
from heedful.nn import LoRA
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.linformers import in_pieces, pooled
from heedful.theory.claim import Case, Claim, Evidence, Text, Undecided, at_most, equal, evidence

# ── L11.41: fine-tuning changes attention by a matrix of low effective rank


def change_is_low_rank(case: str) -> Evidence:
    raise Undecided(
        "decided by a study of fine-tuning that has not run: the effective rank of A_after − A_before on held-out "
        "text, against that of A_before and of a random change of the logits that is as large"
    )


L11_41 = Claim(
    id="L11.41",
    section="11.3.5",
    kind="empirical",
    statement=Text(
        "Fine-tuning on a task changes attention by ΔA of low effective rank.",
        "在下游任务微调时，增量 ΔA = A_fine-tuned − A_pretrained 具有较低的有效秩。",
    ),
    formula=r"\operatorname{eff-rank}(A_{\mathrm{fine-tuned}}-A_{\mathrm{pretrained}})\ \mathrm{low}",
    check=change_is_low_rank,
    case=Case("fine-tuned against pretrained"),
    control=Case("a random change of the logits, as large"),
    first="empirical",
    reason=Text(
        "It does not follow from low-rank updates of the weights: see T11.28*, where an update of rank 1 changes A by "
        "a matrix of rank N − 1.",
        "它不能由权重的低秩更新推出：见 T11.28*，其中秩 1 的更新使 A 改变一个秩为 N − 1 的矩阵。",
    ),
)


# ── T11.28: ΔA = BA with r ≪ N


def to_itself(n: int) -> Tensor:
    """Every token looks at itself."""
    return Softmax(Full(), scale=1.0).matrix(*[torch.eye(n, dtype=torch.float64) * 10.0] * 2)


def to_the_first(n: int) -> Tensor:
    """Every token looks at the first."""
    q, k = torch.ones(n, 1, dtype=torch.float64), torch.zeros(n, 1, dtype=torch.float64)
    k[0] = 50
    return Softmax(Full(), scale=1.0).matrix(q, k)


def change_has_low_rank(after: Callable[[int], Tensor]) -> Evidence:
    """From uniform attention: what the best matrix of rank 8 leaves of ΔA, N = 128."""
    zero = torch.zeros(128, 1, dtype=torch.float64)
    change = after(128) - Softmax(Full()).matrix(zero, zero)
    return evidence(at_most("energy of ΔA beyond rank 8", 1 - energy_share(change, 8 / 128).estimate, 0.1))


def update_of_weights(plus: Callable[[int], int]) -> Evidence:
    """A LoRA update of W_q of rank 1: what it does to the scores and to A, 64 tokens of width 16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base, keys = (nn.Linear(16, 16, bias=False, dtype=torch.float64) for _ in range(2))
        adapted = LoRA(base, rank=1)
        nn.init.normal_(adapted.B)
        x = torch.randn(64, 16, dtype=torch.float64)
    with torch.no_grad():
        before, after, k = base(x), adapted(x), keys(x)
        scores, weights = (
            m.matrix(after, k) - m.matrix(before, k)
            for m in (Quadratic(no_activation, Full(), normalise=None), Softmax(Full()))
        )
    return evidence(
        equal("rank of the update of W", numerical_rank(adapted.merge().weight - base.weight), 1),
        equal("rank of the change of the scores", numerical_rank(scores), 1),
        equal("rank of the change of A, N = 64", numerical_rank(weights), plus(64)),
    )


T11_28 = Claim(
    id="T11.28",
    section="11.3.5",
    kind="exact",
    statement=Text(
        "The change of attention can be written as ΔA = BA with B of N × r, A of r × N, r ≪ N.",
        "注意力权重的增量可以参数化为 ΔA = BA，其中 B ∈ R^(N×r)，A ∈ R^(r×N)，r ≪ N。",
    ),
    formula=r"\Delta A=BA,\qquad B\in\mathbb{R}^{N\times r},\ A\in\mathbb{R}^{r\times N},\ r\ll N",
    check=change_has_low_rank,
    case=Case("from uniform to oneself", to_itself),
    control=Case("from uniform to the first token", to_the_first),
    first="false",
    counterexample="""\
import torch
change = torch.eye(128) - 1 / 128                           # from uniform attention to the identity
energy = torch.linalg.svdvals(change)**2
print(energy[8:].sum() / energy.sum())                      # 0.937 is left by the best matrix of rank 8""",
    corrected=Claim(
        id="T11.28*",
        section="11.3.5",
        kind="exact",
        statement=Text(
            "LoRA writes ΔW = BA on weights, which do not depend on the input as attention does. An update of rank r "
            "changes the scores by rank r at most, but A generically by rank N − 1 (ΔA·1 = 0).",
            "LoRA 是对权重写 ΔW = BA，权重不像注意力那样依赖于输入。秩 r 的更新使分数矩阵至多改变秩 r，"
            "而 A 的改变一般秩为 N − 1（ΔA·1 = 0）。",
        ),
        formula=r"\operatorname{rank}(\Delta W)=1\ \Rightarrow\ "
        r"\operatorname{rank}(\Delta S)\le 1,\ \operatorname{rank}(\Delta A)=N-1",
        check=update_of_weights,
        case=Case("N − 1", lambda n: n - 1),
        control=Case("1, as of the scores", lambda n: 1),
    ),
)


# ── L11.42: one principle

L11_42 = Claim(
    id="L11.42",
    section="11.3.5",
    kind="wording",
    statement=Text(
        "Linformer, linear attention and LoRA rest on one principle: low-dimensional structure.",
        "无论是 Linformer、线性注意力还是 LoRA，都基于相同的数学原理：高维数据或变换的低维流形结构。",
    ),
    first="design",
    reason=Text(
        "A motto: the three use a sketch, a kernel and a factorised weight; there is no number to hold against it.",
        "这是口号：三者分别使用草图投影、核特征和权重分解，没有可以检验的数值。",
    ),
)


# ── Tab11.3.3: softmax(QKᵀ) ≈ Q(KᵀV/k), and equality in expectation


def sides_have_one_shape(left: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Evidence:
    q, k, v = in_pieces(64, 8, 16)
    right = Linear(Identity(), Full(), normalise=False)(q, k, v) / 16
    return evidence(equal("columns, left against right", left(q, k, v).shape[-1], right.shape[-1]))


def sides_agree(rank: int) -> Evidence:
    q, k, v = in_pieces(64, 8, 16)
    exact, found = Softmax(Full())(q, k, v), pooled(q, k, v, rank)
    return evidence(
        equal("columns", found.shape[-1], exact.shape[-1]),
        at_most("difference, keys and values in 16 pieces", (found - exact).abs().max(), 1e-12),
    )


TAB11_3_3 = Claim(
    id="Tab11.3.3",
    section="11.3.5",
    kind="exact",
    statement=Text(
        "Linformer: softmax(QKᵀ) ≈ Q(KᵀV/k); linear attention is guaranteed to be equal in expectation.",
        "表 11.3.3：Linformer 的参数化形式为 softmax(QKᵀ) ≈ Q(KᵀV/k)；线性注意力的理论保证为期望等价性。",
    ),
    formula=r"\mathrm{softmax}(QK^\top)\approx Q(K^\top V/k)",
    check=sides_have_one_shape,
    case=Case("softmax(QKᵀ), N × N", lambda q, k, v: Softmax(Full()).matrix(q, k)),
    control=Case("softmax(QKᵀ)V, N × d", lambda q, k, v: Softmax(Full())(q, k, v)),
    first="false",
    counterexample="""\
import torch
Q, K, V = torch.randn(3, 64, 8)
print(torch.softmax(Q @ K.T, -1).shape, (Q @ (K.T @ V) / 16).shape)  # (64, 64) and (64, 8): nothing to compare""",
    corrected=Claim(
        id="Tab11.3.3*",
        section="11.3.5",
        kind="exact",
        statement=Text(
            "Linformer: softmax(QKᵀ/√d)V ≈ softmax(Q(EK)ᵀ/√d)FV (D11.26*). In expectation exp(q·k) alone is equal, "
            "attention is not (T11.27*).",
            "Linformer：softmax(QKᵀ/√d)V ≈ softmax(Q(EK)ᵀ/√d)FV（见 D11.26*）。期望意义下相等的只有 exp(q·k)，"
            "而不是注意力（见 T11.27*）。",
        ),
        formula=r"\mathrm{softmax}(QK^\top/\sqrt d)V\approx\mathrm{softmax}(Q(EK)^\top/\sqrt d)FV",
        check=sides_agree,
        case=Case("as many means as pieces, k = 16", 16),
        control=Case("fewer, k = 8", 8),
    ),
)

CLAIMS = (L11_41, T11_28, L11_42, TAB11_3_3)
