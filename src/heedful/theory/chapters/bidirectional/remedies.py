"""5: remedies: many heads, sparse attention, low rank with a residual, rotary positions, prior knowledge."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.core import Mechanism
from heedful.feature_maps import Identity
from heedful.measures.spectrum import numerical_rank
from heedful.mechanisms import Linear, Linformer, LinformerSparse, LowRankSparse, Perceiver
from heedful.nn.rope import Rope
from heedful.patterns import Full, Global, Pattern, Window
from heedful.random_features import FavorPlus
from heedful.shapes import Float, Tensor
from heedful.theory.chapters.bidirectional.heads import (
    LENGTH,
    TEXTS,
    by_text,
    gaussian,
    masked,
    rank_of,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Text,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
)
from heedful.theory.samples import mean_and_error

# ── N004-multihead: many heads raise the overall rank


def latent_heads(seeds: range) -> Float[Tensor, "h n n"]:
    """Heads of 4 latents each, which have rank 4 and rows that sum to one, on 64 tokens."""
    q, k = gaussian(64, 8, 1.0, 0)
    return torch.stack([Perceiver(d=8, latents=4, rounds=0, seed=seed).matrix(q, k) for seed in seeds]).detach()


def unnormalised_heads(seeds: range) -> Float[Tensor, "h n n"]:
    """Heads of 4 features each, whose rows sum to anything."""
    attend = Linear(Identity(), Full(), normalise=False)
    return torch.stack([attend.matrix(*gaussian(64, 4, 1.0, seed)) for seed in seeds])


def more_than_one_head(seeds: range | list[int]) -> Evidence:
    """The rank of the sum of 8 heads against that of one."""
    heads = latent_heads(seeds)  # type: ignore[arg-type]
    return evidence(
        equal("rank of one head", numerical_rank(heads[0]), 4),
        at_least("rank of the sum of 8 heads", numerical_rank(heads.sum(0)), 5),
    )


def layer_rank(heads: int) -> int:
    """Rank of X ↦ Σ_h A_h X W_h on 12 tokens of width 8, A_h of rank 2, W_h of rank 8/heads, as a matrix."""
    q, k = gaussian(12, 4, 1.0, 1)
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros(96, 96, dtype=torch.float64)
    for head in range(heads):
        A = Perceiver(d=4, latents=2, rounds=0, seed=head).matrix(q, k).detach()
        inner, outer = torch.randn(2, 8, 8 // heads, generator=generator, dtype=torch.float64).unbind()
        total += torch.kron(A, outer @ inner.mT)
    return int(numerical_rank(total))


def heads_share_a_vector(heads: Callable[[range], Tensor]) -> Evidence:
    """h(r − 1) + 1 rather than h·r, since the vector of ones lies in the column space of all; and the layer's rank."""
    ranks = {h: int(numerical_rank(heads(range(h)).sum(0))) for h in (2, 4, 8)}
    return evidence(
        *(equal(f"rank of the sum of {h} heads of rank 4", rank, h * 3 + 1) for h, rank in ranks.items()),
        equal("rank of the layer's map with 4 heads less that with 1", layer_rank(4) - layer_rank(1), 0),
        note=f"the layer's map has rank {layer_rank(1)} = 2 · 8",
    )


MULTIHEAD = Claim(
    id="N004-multihead",
    section="5.1",
    kind="exact",
    statement=Text(
        "Multi-head attention raises the overall rank: each head attends to another pattern.",
        "多头注意力通过多个独立的注意力头（每个头关注不同模式）提升整体秩。",
    ),
    formula=r"\operatorname{rank}\sum_hA_h>\operatorname{rank}A_h",
    check=more_than_one_head,
    case=Case("8 different heads", range(8)),
    control=Case("8 heads alike", [0] * 8),
    first="conditional",
    condition=Text(
        "The heads differ, and rank means that of the sum of the A_h. The map of the layer at a fixed width d has rank "
        "at most r·d with one head or many.",
        "各头不同，且“整体秩”指 ΣA_h 的秩。宽度 d 固定时，整层映射的秩无论单头多头都不超过 r·d。",
    ),
    corrected=Claim(
        id="N004-multihead*",
        section="5.1",
        kind="exact",
        statement=Text(
            "Heads of rank r whose rows sum to one add up to rank h(r − 1) + 1 at most, since they share the vector of "
            "ones; and X ↦ Σ A_h X W_h, with W_h of rank d/h, has rank r·d for any number of heads.",
            "行和为 1 的 h 个秩 r 的头之和，秩至多为 h(r − 1) + 1（共享全 1 向量）；"
            "而 X ↦ Σ A_h X W_h（W_h 的秩为 d/h）的秩与头数无关，都是 r·d。",
        ),
        formula=r"\operatorname{rank}\sum_{h}A_h\le h(r-1)+1,\qquad\operatorname{rank}\sum_hA_h\otimes W_h^\top\le rd",
        check=heads_share_a_vector,
        case=Case("rows that sum to one", latent_heads),
        control=Case("rows that do not", unnormalised_heads),
    ),
)


# ── N004-sparse: sparse attention avoids low rank


def sparse_is_higher(pattern: Pattern) -> Evidence:
    """Effective rank of MiniLM's q and k under a sparse pattern, less that under none."""
    gain = by_text(lambda call, text: rank_of(masked(pattern)(call, text)) - rank_of(masked(Full())(call, text)))
    mean, error = mean_and_error(gain)
    return evidence(
        surely_above("effective rank, sparse less full", mean, 0, error=error), note=f"{TEXTS} texts, N = {LENGTH}"
    )


SPARSE = Claim(
    id="N004-sparse",
    section="5.2",
    kind="empirical",
    statement=Text(
        "Sparse attention, forced to local or key regions, keeps the attention matrix from becoming low in rank "
        "(Longformer, BigBird).",
        "稀疏注意力强制关注局部或关键区域，避免全局注意力矩阵的低秩化（如 Longformer、BigBird）。",
    ),
    check=sparse_is_higher,
    case=Case("a window of 8 tokens on each side", Window(8, 8)),
    control=Case("8 global tokens alone", Global(tuple(range(8)))),
    first="conditional",
    condition=Text(
        "Regions are local, so that rows differ. A few places that all rows share make the rank lower, not higher.",
        "关注的是局部区域，各行因而不同。若各行集中在相同的少数“关键”位置，秩反而更低。",
    ),
    reason=Text(
        "It contradicts section 2 of the same text, by which mass near the diagonal lowers the rank (N004-diag).",
        "这与同一文第 2 节“集中在对角线附近会降低秩”的说法相矛盾（见 N004-diag）。",
    ),
)


# ── N004-linformer: Linformer is low rank with a residual of high rank


def has_residual(mechanism: Mechanism) -> Evidence:
    """The rank of the whole matrix on 64 tokens, 8 projected keys."""
    with torch.no_grad():
        weights = mechanism.matrix(*gaussian(64, 8, 1.0, 0))
    return evidence(at_least("rank, N = 64, r = 8", numerical_rank(weights), 9))


def has_none(mechanism: Mechanism) -> Evidence:
    """A factor of width r is all there is."""
    with torch.no_grad():
        weights = mechanism.matrix(*gaussian(64, 8, 1.0, 0))
    return evidence(at_most("rank, N = 64, r = 8", numerical_rank(weights), 8))


LINFORMER = Claim(
    id="N004-linformer",
    section="5.2",
    kind="exact",
    statement=Text(
        "Low rank with residual compensation: attention is split into a low-rank part, fast, and a high-rank residual, "
        "for detail, as in Linformer.",
        "低秩近似+残差补偿：将注意力矩阵分解为低秩部分（快速计算）和高秩残差部分（捕捉细节），如 Linformer。",
    ),
    formula=r"A=A_r+R,\quad\operatorname{rank}A_r\le r,\quad\operatorname{rank}R>r",
    check=has_residual,
    case=Case("Linformer", Linformer(64, 8)),
    control=Case("Linformer with an exact window (Long-Short Transformer)", LinformerSparse(64, 8, window=4)),
    first="false",
    counterexample="""\
import torch, heedful as h
q, k = torch.randn(2, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
print(torch.linalg.matrix_rank(h.Linformer(64, 8).matrix(q, k)))                     # 8: nothing beside the low rank
print(torch.linalg.matrix_rank(h.LinformerSparse(64, 8, window=4).matrix(q, k)))     # 64: with an exact window""",
    corrected=Claim(
        id="N004-linformer*",
        section="5.2",
        kind="exact",
        statement=Text(
            "Linformer's matrix softmax(Q(EK)ᵀ)F has rank at most r and no residual. Low rank plus a sparse part is "
            "Scatterbrain, or the Long-Short Transformer.",
            "Linformer 的矩阵 softmax(Q(EK)ᵀ)F 秩至多为 r，没有残差部分。"
            "“低秩 + 稀疏”是 Scatterbrain 或 Long-Short Transformer。",
        ),
        formula=r"\operatorname{rank}\left(\mathrm{softmax}(Q(EK)^\top/\sqrt d)\,F\right)\le r",
        check=has_none,
        case=Case("Linformer", Linformer(64, 8)),
        control=Case("Scatterbrain: 8 features and a window", LowRankSparse(FavorPlus(8, features=8), 4, Full())),
    ),
)


# ── N004-rope: rotary positions


def depends_on_offset(place: Callable[[Tensor, int], Tensor]) -> Evidence:
    """Scores of the same q and k, 7 apart, at positions from 0 to 4,000; and their norms."""
    q, k = (x[:1] for x in gaussian(1, 64, 1.0, 0))
    starts = range(0, 4000, 97)
    scores = torch.stack([(place(q, start + 7) @ place(k, start).mT).squeeze() for start in starts])
    norms = torch.stack([place(q, start).norm() for start in starts])
    return evidence(
        at_most("spread of q·k at one offset", scores.max() - scores.min(), 1e-11),
        at_most("spread of the norm", norms.max() - norms.min(), 1e-12),
    )


def rotated(x: Tensor, position: int) -> Tensor:
    return Rope(64)(x, torch.tensor([position]))


def added(x: Tensor, position: int) -> Tensor:
    """Sinusoids added to the token (Vaswani et al. 2017)."""
    angles = position * 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    return x + torch.cat([angles.sin(), angles.cos()])


ROPE = Claim(
    id="N004-rope",
    section="5.3",
    kind="exact",
    statement=Text(
        "Richer position encodings such as rotary ones (RoPE) improve how a model handles positional relations.",
        "使用更复杂的位置编码（如旋转位置编码 RoPE），提升模型对位置关系的建模能力。",
    ),
    formula=r"\langle R_iq,R_jk\rangle=\langle q,R_{j-i}k\rangle,\qquad\|R_iq\|=\|q\|",
    check=depends_on_offset,
    case=Case("rotary positions", rotated),
    control=Case("sinusoids added", added),
    first="conditional",
    condition=Text(
        "What is exact: the score of two tokens depends on their distance alone, and norms stay. That quality improves "
        "takes models trained with both; see N004-posenc for what rotation adds to trained heads.",
        "精确成立的是：分数只依赖相对距离，且模长不变。质量是否提升，需要两种编码各自训练的模型；"
        "旋转位置对训练好的头贡献多少，见 N004-posenc。",
    ),
)


# ── N004-prior: structure and memory

PRIOR = Claim(
    id="N004-prior",
    section="5.4",
    kind="wording",
    statement=Text(
        "Structured attention (guided by syntax trees) or external memory supplement what a low-rank matrix lacks.",
        "通过结构化注意力（如语法树引导的注意力）或外部记忆模块补充低秩矩阵的信息缺失。",
    ),
    first="design",
    reason=Text(
        "A proposal: it states no quantity that could be measured.",
        "这是改进建议，没有可度量的断言。",
    ),
)

CLAIMS = (MULTIHEAD, SPARSE, LINFORMER, ROPE, PRIOR)
