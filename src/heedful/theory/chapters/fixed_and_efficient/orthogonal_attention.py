"""4.1 and 4.2: attention whose projections of queries and keys are orthogonal, random and frozen."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, sqrt
from statistics import mean

import torch

from heedful import nn
from heedful.bench.fits import growth
from heedful.mechanisms import Softmax
from heedful.nn import FrozenProjection, Hadamard, Orthogonal
from heedful.patterns import Full
from heedful.shapes import Float, Tensor
from heedful.studies.results import BLEU, LOSS, Measure
from heedful.testing import FlopCounter
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence
from heedful.theory.samples import normal
from heedful.theory.study_rows import gap, high, low, overfitting, runs

A, B, FEW = "fixed-heads", "frozen-projections", "de-5000"
"""The studies that decide empirical claims, and the smaller of their corpora: docs/studies.md."""

TRAIN_LOSS = Measure("training loss", ("losses", "train"), False)

# ── R003-4.1: positional patterns carry most of what is useful


def patterns_suffice(cell: str) -> Evidence:
    """The cell reaches nine tenths of the BLEU of seven fixed heads and a learned one, at both sizes."""
    found = []
    for corpus in ("de-5000", "de-20000"):
        one, other = (mean(row["tests"]["test"]["bleu"] for row in runs(A, x, corpus)) for x in (cell, "7Ftoken+1L"))
        found.append(at_least(f"BLEU on {corpus}, against nine tenths of 7F+1L", one, 0.9 * other))
    gains = ", ".join(str(gap(A, "7Ftoken+1L", "8F", corpus, BLEU)) for corpus in ("de-5000", "de-20000"))
    return evidence(*found, note=f"a learned head beside seven fixed ones changes BLEU by {gains}")


PATTERNS_SUFFICE = Claim(
    id="R003-4.1",
    section="4.1",
    kind="empirical",
    statement=Text(
        "Simple positional patterns already capture most of the useful information; keeping one learned head helps "
        "complex semantic tasks.",
        "简单的位置注意力模式已经能够捕获大部分有用的信息；保留一个可学习头对复杂语义任务有益。",
    ),
    check=patterns_suffice,
    case=Case("eight fixed heads", "8F"),
    control=Case("one learned head", "1L"),
    first="empirical",
    condition=Text(
        "The first half alone, for translation from 5,000 and 20,000 pairs in short training: a learned head beside "
        "seven fixed ones makes no difference there that several seeds could show.",
        "仅指前半句，且限于 5,000 与 20,000 句对、短训练的翻译：在七个固定头之外保留一个可学习头，"
        "多个种子下看不出差别。",
    ),
    reason=Text("Decided by the study fixed-heads (docs/studies.md).", "由研究 fixed-heads 判定（docs/studies.md）。"),
)


# ── R003-4.2.1: what is fixed

WHAT_IS_FIXED = Claim(
    id="R003-4.2.1",
    section="4.2.1",
    kind="wording",
    statement=Text(
        "Fixed patterns fix the attention weights, deterministically; orthogonal random attention fixes the "
        "projections of Q and K, drawn at random and frozen throughout.",
        "固定注意力模式固定的是注意力权重分布（确定性）；正交随机注意力固定的是 Q/K 投影矩阵（随机初始化、全程冻结）。",
    ),
    first="design",
    reason=Text(
        "The definition of the proposal: nothing to decide. Section 4.4 contradicts it, see R003-4.4-QKV; that "
        "expressive power is kept is R003-4.2.2-expressive.",
        "这是该方案的定义，没有可判定的内容。4.4 节与之矛盾，见 R003-4.4-QKV；“保留表达能力”见 R003-4.2.2-expressive。",
    ),
)


# ── R003-4.2.2-expressive: frozen orthogonal Q, K keep the whole expressive power

WIDTH = 64


def layer_with(qk: nn.attention.HeadProjection | None) -> nn.Attention:
    """One head of the width of the tokens, unmasked."""
    seed = None if qk is None else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Attention(WIDTH, heads=1, mechanism=Softmax(Full()), qk=qk, seed=seed, dtype=torch.float64)


def weights_of(layer: nn.Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    assert layer.q_proj is not None and layer.k_proj is not None
    return layer.mechanism.matrix(layer.q_proj(x), layer.k_proj(x))


def fitted(layer: nn.Attention, x: Float[Tensor, "n d"]) -> Float[Tensor, "n n"]:
    """The weights after training everything that is trainable so that each token attends to the one before it."""
    trainable = [*layer.parameters(), *([x] if x.requires_grad else [])]
    optimiser = torch.optim.Adam(trainable, lr=0.03)
    for _ in range(200):
        loss = -weights_of(layer, x).diagonal(-1).log().mean()
        if not loss.requires_grad:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return weights_of(layer, x).detach()


def learns_the_previous_token(qk: nn.attention.HeadProjection | None) -> Evidence:
    """64 different tokens, one-hot: the weight on the token before, after fitting."""
    weights = fitted(layer_with(qk), torch.eye(WIDTH, dtype=torch.float64))
    return evidence(at_least("mean weight on the previous token", weights.diagonal(-1).mean(), 0.99))


def weights_are_one_point(qk: nn.attention.HeadProjection | None) -> Evidence:
    """The same layer: trainable numbers that its weights depend on, how far from uniform they get, and trained tokens.

    The last is the way out: embeddings that start one-hot and are trained for the frozen layer.
    """
    layer, x = layer_with(qk), torch.eye(WIDTH, dtype=torch.float64)
    total = weights_of(layer, x).square().sum()
    readable = [p for p in layer.parameters() if total.requires_grad]
    found = torch.autograd.grad(total, readable, allow_unused=True) if readable else ()
    weights = fitted(layer, x)
    moved = fitted(layer, x.clone().requires_grad_())
    return evidence(
        equal("trainable numbers the weights depend on", sum(g.numel() for g in found if g is not None), 0),
        at_most("largest weight", weights.max(), exp(2 / sqrt(WIDTH)) / WIDTH),
        at_least("smallest weight", weights.min(), exp(-2 / sqrt(WIDTH)) / WIDTH),
        at_least("mean weight on the previous token, tokens trained", moved.diagonal(-1).mean(), 0.99),
    )


EXPRESSIVE = Claim(
    id="R003-4.2.2-expressive",
    section="4.2.2, 4.4",
    kind="exact",
    statement=Text(
        "Orthogonal random projections keep the complete expressive power of attention.",
        "正交随机投影保留了完整的表达能力。",
    ),
    formula=r"\{A(XW_QW_K^\top X^\top)\}_{W_Q,W_K}=\{A(X\Omega_Q\Omega_K^\top X^\top)\}",
    check=learns_the_previous_token,
    case=Case("Q, K orthogonal and frozen", Orthogonal),
    control=Case("Q, K learned", None),
    first="false",
    counterexample="""\
import torch, heedful as h
x = torch.eye(64)                                            # 64 different tokens
layer = h.nn.Attention(64, heads=1, mechanism=h.Softmax(h.Full()), qk=h.nn.Orthogonal, seed=0)
A = layer.mechanism.matrix(layer.q_proj(x), layer.k_proj(x))
print(A.min(), A.max(), A.requires_grad)                     # .0148, .0164, False: nothing to train""",
    corrected=Claim(
        id="R003-4.2.2-expressive*",
        section="4.2.2, 4.4",
        kind="exact",
        statement=Text(
            "For given tokens the weights of a frozen layer are a single point: no trainable number enters them. For "
            "one-hot tokens they lie within e^{±2/√d}/d, all but uniform. What is learned moves into the tokens: "
            "trained embeddings make the same layer attend to the previous one.",
            "对给定的 token，冻结层的注意力权重只是一个点：没有任何可训练参数参与其中。对 one-hot token，"
            "权重都在 e^{±2/√d}/d 之间，几乎均匀。能学习的部分被转移到了 token 表示里："
            "训练词嵌入后，同一层可以关注前一个 token。",
        ),
        formula=r"\frac{e^{-2/\sqrt{d}}}{d}\le A_{ij}\le\frac{e^{2/\sqrt{d}}}{d}\quad\mathrm{for}\ X=I_d",
        check=weights_are_one_point,
        case=Case("Q, K orthogonal and frozen", Orthogonal),
        control=Case("Q, K learned", None),
    ),
)


# ── R003-4.2.2-anylinear: a random projection can approximate any linear map

Fit = Callable[[Tensor, Tensor], Tensor]
"""The map nearest to W (64 × 64) among those that may be made of Ω."""


def comes_near_any_map(fit: Fit) -> Evidence:
    """What is left of a random W, relative to its norm; Ω square and orthogonal."""
    omega = Orthogonal(WIDTH, heads=1, head_dim=WIDTH, seed=0, dtype=torch.float64).dense()
    W = normal(WIDTH, WIDTH, seed=1)
    return evidence(equal("residual / ‖W‖", (fit(W, omega) - W).norm() / W.norm(), 0, within=1e-12))


def multiple(W: Tensor, omega: Tensor) -> Tensor:
    return omega * ((W * omega).sum() / omega.square().sum())


def trained_after(W: Tensor, omega: Tensor) -> Tensor:
    """V Ω with the best V: the least-squares solution of V Ω = W."""
    return torch.linalg.lstsq(omega.mT, W.mT).solution.mT @ omega


def trained_map_mends_it(rows: int) -> Evidence:
    """V Ω with V trained and `rows` orthonormal rows in Ω."""
    omega = Orthogonal(WIDTH, heads=1, head_dim=rows, seed=0, dtype=torch.float64).dense()
    W = normal(WIDTH, WIDTH, seed=1)
    nearest = W @ omega.mT @ omega  # as ΩΩᵀ = I, the best V is WΩᵀ
    return evidence(equal("residual / ‖W‖", (nearest - W).norm() / W.norm(), 0, within=1e-12))


ANY_LINEAR = Claim(
    id="R003-4.2.2-anylinear",
    section="4.2.2",
    kind="exact",
    statement=Text("A random projection can approximate any linear transformation.", "随机投影可以近似任意线性变换。"),
    formula=r"\Omega x\approx Wx\ \ \forall\,W",
    check=comes_near_any_map,
    case=Case("multiples of the frozen Ω", multiple),
    control=Case("V Ω, V trained", trained_after),
    first="false",
    counterexample="""\
import torch
torch.manual_seed(0)
W, Omega = torch.randn(64, 64), torch.linalg.qr(torch.randn(64, 64)).Q
near = Omega * (W * Omega).sum() / Omega.square().sum()      # the best multiple of Ω
print((near - W).norm() / W.norm())                          # 1.000: nothing of W is in it""",
    corrected=Claim(
        id="R003-4.2.2-anylinear*",
        section="4.2.2",
        kind="exact",
        statement=Text(
            "One frozen Ω is one map. Followed by a trained V it gives every map, V = WΩᵀ, if Ω is square; with k < d "
            "rows, only those that vanish across its row space.",
            "一个冻结的 Ω 只是一个映射。其后接可训练的 V 时，若 Ω 为方阵则可得到任意映射（V = WΩᵀ）；"
            "若只有 k < d 行，则只能得到在其行空间正交补上为零的映射。",
        ),
        formula=r"W=(W\Omega^\top)\,\Omega",
        check=trained_map_mends_it,
        case=Case("64 rows of 64", WIDTH),
        control=Case("32 rows of 64", WIDTH // 2),
    ),
)


# ── R003-4.2.2-JL: (1−ε)‖x−y‖² ≤ ‖Ωx−Ωy‖² ≤ (1+ε)‖x−y‖²


def stretches(d: int, k: int, gain: float, points: int = 64) -> Tensor:
    """‖Ωx − Ωy‖² / ‖x − y‖² for all pairs of Gaussian points, Ω of k orthonormal rows times the gain."""
    omega = Orthogonal(d, heads=1, head_dim=k, seed=0, gain=gain, dtype=torch.float64)
    x = normal(points, d, seed=1)
    i, j = torch.triu_indices(points, points, 1)
    apart = x[i] - x[j]
    return omega(apart).square().sum(-1) / apart.square().sum(-1)


def distances_are_kept(gain: Callable[[int, int], float]) -> Evidence:
    """64 points in 768 dimensions, 256 rows: all 2,016 distances² within 1 ± ½? (Enough rows: 200 would do.)"""
    ratio = stretches(768, 256, gain(768, 256))
    return evidence(at_least("smallest ratio", ratio.min(), 0.5), at_most("largest ratio", ratio.max(), 1.5))


JL_UNSCALED = Claim(
    id="R003-4.2.2-JL",
    section="4.2.2",
    kind="exact",
    statement=Text(
        "A random orthogonal Ω keeps relative distances: (1−ε)‖x−y‖² ≤ ‖Ωx−Ωy‖² ≤ (1+ε)‖x−y‖².",
        "随机正交投影保持向量间的相对距离：(1−ε)‖x−y‖² ≤ ‖Ωx−Ωy‖² ≤ (1+ε)‖x−y‖²。",
    ),
    formula=r"(1-\epsilon)\|x-y\|^2\le\|\Omega x-\Omega y\|^2\le(1+\epsilon)\|x-y\|^2",
    check=distances_are_kept,
    case=Case("orthonormal rows", lambda d, k: 1.0),
    control=Case("the same times √(d/k)", lambda d, k: sqrt(d / k)),
    first="false",
    counterexample="""\
import torch
torch.manual_seed(0)
Omega = torch.linalg.qr(torch.randn(768, 64)).Q.mT           # 64 orthonormal rows, as for a head
x = torch.randn(1000, 768)
ratio = (x @ Omega.mT).square().sum(-1) / x.square().sum(-1)
print(ratio.mean(), 64 / 768)                                # 0.083, 0.083: only ε > 0.9 would do""",
    corrected=Claim(
        id="R003-4.2.2-JL*",
        section="4.2.2",
        kind="exact",
        statement=Text(
            "Times √(d/k): orthonormal rows alone shrink squared lengths by k/d on average. A square Ω needs no "
            "factor, is an isometry and reduces nothing.",
            "须乘以 √(d/k)：仅有标准正交的行会使长度平方平均缩小为 k/d。方阵 Ω 无需因子，是等距映射，但也不降维。",
        ),
        formula=r"(1-\epsilon)\|x-y\|^2\le\frac{d}{k}\|\Omega x-\Omega y\|^2\le(1+\epsilon)\|x-y\|^2",
        check=distances_are_kept,
        case=Case("times √(d/k)", lambda d, k: sqrt(d / k)),
        control=Case("times d/k", lambda d, k: d / k),
    ),
)


# ── R003-4.2.2-gen: better generalisation


def generalises_better(case: tuple[str, str, str]) -> Evidence:
    """A smaller gap between training and test loss, and a smaller test loss, at 5,000 pairs, by 95 % intervals."""
    study, cell, base = case
    return evidence(
        at_most("gap between training and test loss, against learned", high(overfitting(study, cell, base, FEW)), 0),
        at_most("test loss, against learned", high(gap(study, cell, base, FEW, LOSS)), 0),
    )


def loses_by_freezing(cell: str) -> Evidence:
    """Both losses are larger and BLEU is smaller than with learned Q, K, at 5,000 pairs, by 95 % intervals."""
    return evidence(
        *(at_least(f"{x.name}, against learned", low(gap(B, cell, "learned", FEW, x)), 0) for x in (TRAIN_LOSS, LOSS)),
        at_most("BLEU, against learned", high(gap(B, cell, "learned", FEW, BLEU)), 0),
    )


GENERALISATION = Claim(
    id="R003-4.2.2-gen",
    section="4.2.2",
    kind="empirical",
    statement=Text(
        "Better generalisation: the constraint makes the space of hypotheses smaller, a random start is a good one, "
        "and overfitting in training is avoided.",
        "更好的泛化：正交约束减少了假设空间，随机初始化提供了良好的起点，避免了训练过程中的过拟合。",
    ),
    check=generalises_better,
    case=Case("Q, K orthogonal and frozen", (B, "orthogonal", "learned")),
    control=Case("seven fixed heads, against eight learned", (A, "7Ftoken+1L", "8L")),
    first="empirical",
    reason=Text(
        "Decided by the study frozen-projections (docs/studies.md). Provisional: the check was written after the runs "
        "were seen, and training was short.",
        "由研究 frozen-projections 判定（docs/studies.md）。此判定是暂时的：检验写于看到结果之后，且训练较短。",
    ),
    counterexample="""\
from statistics import mean
from heedful.studies.results import published
for cell in ("learned", "orthogonal"):
    runs = [row for row in published("frozen-projections") if row["cell"] == cell and row["corpus"] == "de-5000"]
    print(cell, round(mean(row["losses"]["test"] for row in runs), 2))
""",
    corrected=Claim(
        id="R003-4.2.2-gen*",
        section="4.2.2",
        kind="empirical",
        statement=Text(
            "With Q and K frozen in all attention the gap is smaller only because training is fitted worse: training "
            "and test loss are larger than with learned Q, K, and BLEU is smaller.",
            "在所有注意力中冻结 Q、K 时，差距变小只是因为训练集拟合得更差：训练与测试损失都大于可学习的 Q、K，"
            "BLEU 更低。",
        ),
        check=loses_by_freezing,
        case=Case("Q, K orthogonal and frozen", "orthogonal"),
        control=Case("an orthogonal start that is trained", "orthogonal start, trained"),
    ),
)


# ── R003-4.2.2-fast: orthogonal matrices have fast multiplication algorithms


def multiplies_fast(kind: type[FrozenProjection]) -> Evidence:
    """Flops of Ωx for one token, counted as they run, over widths; and that Ω is orthogonal.

    D log D has the exponent 1 + 1/ln D or so, below 1¼ here; the transform works in radix 64, hence the constant.
    """
    flops = {}
    for width in (64, 256, 1024):
        omega = kind(width, 1, width, dtype=torch.float64)  # type: ignore[call-arg]
        x = normal(1, width)
        with FlopCounter() as counter:
            omega(x)
        flops[width] = float(counter.flops)
        error = (omega.dense() @ omega.dense().mT - torch.eye(width, dtype=torch.float64)).abs().max()
    fit = growth(flops, least=1)
    assert fit is not None
    return evidence(
        equal("ΩΩᵀ − I at d = 1024", error, 0, within=1e-12),
        at_most("exponent of d", fit.exponent, 1.25),
        at_most("flops at d = 1024, over 64 d log₂ d", flops[1024] / (64 * 1024 * 10), 1),
    )


FAST = Claim(
    id="R003-4.2.2-fast",
    section="4.2.2, 4.3.2",
    kind="complexity",
    statement=Text("Orthogonal matrices have efficient multiplication algorithms.", "正交矩阵有高效的乘法算法。"),
    formula=r"x\mapsto\Omega x\ \mathrm{in}\ O(d\log d)",
    check=multiplies_fast,
    case=Case("signs and Walsh–Hadamard transforms", Hadamard),
    control=Case("uniformly drawn", Orthogonal),
    first="conditional",
    condition=Text(
        "Only structured ones, such as random signs and Walsh–Hadamard transforms: O(d log d). A uniformly drawn "
        "orthogonal matrix takes d² like any other.",
        "仅限结构化的正交矩阵，如随机符号与 Walsh–Hadamard 变换：O(d log d)。"
        "均匀抽取（Haar）的正交矩阵与一般矩阵一样需要 d²。",
    ),
)

CLAIMS = (
    PATTERNS_SUFFICE,
    WHAT_IS_FIXED,
    EXPRESSIVE,
    ANY_LINEAR,
    JL_UNSCALED,
    GENERALISATION,
    FAST,
)
