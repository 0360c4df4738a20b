"""4: what low rank costs."""

from __future__ import annotations

import torch

from heedful.core import Dims
from heedful.measures import svdvals
from heedful.mechanisms import Linformer, Softmax, TruncatedSVD
from heedful.patterns import Full
from heedful.shapes import Float, Tensor
from heedful.theory import models
from heedful.theory.chapters.bidirectional.heads import LENGTH, few_tokens, gaussian
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, equal, evidence, surely_above
from heedful.theory.samples import mean_and_error

# ── N004-effects: low rank expresses less and loses detail


def last_states(text: int, rank: int | None) -> Float[Tensor, "n d"]:
    """The last states of MiniLM on a text where every head is replaced by its best approximation of this rank."""
    from heedful.hf.prose import encode, passages
    from heedful.hf.tap import prepared, tapped

    model, tokenizer = models.model("minilm")
    given = encode(model, tokenizer, passages()[text], LENGTH)

    def attend(call, own):
        mechanism = call.mechanism if rank is None else TruncatedSVD(rank, call.mechanism)
        return mechanism(call.q, call.k, call.v, segments=call.segments).transpose(1, 2).contiguous(), None

    with prepared(model), tapped(model, attend, given):
        return model(**given).last_hidden_state[0]


def change(text: int, rank: int) -> Tensor:
    """‖X_r − X‖ / ‖X − X̄‖: 1 would be as far as all tokens are from their mean."""
    exact = last_states(text, None)
    return (last_states(text, rank) - exact).norm() / (exact - exact.mean(0)).norm()


def states_change(rank: int) -> Evidence:
    """MiniLM with all 72 heads held to a rank: how far the last states of the tokens move."""
    mean, error = mean_and_error(torch.stack([change(text, rank) for text in range(4)]))
    return evidence(
        surely_above(f"relative change of the last states, heads of rank {rank}", mean, 0.25, error=error),
        note=f"4 texts, N = {LENGTH}; effective rank of the heads 12 on the mean",
    )


def change_against_rank() -> Figure:
    ranks = [1, 2, 4, 8, 16, 32, 64, 96, 128]
    line = (ranks, [float(change(0, rank)) for rank in ranks])
    title = Text("MiniLM with every head held to rank r, N = 128", "把 MiniLM 的每个头限制为秩 r（N = 128）")
    return Figure(title, "r", "relative change of the last states", {"one text": line}, log_x=True)


EFFECTS = Claim(
    id="N004-effects",
    section="4",
    kind="empirical",
    statement=Text(
        "A low-rank matrix hardly captures fine-grained, varied dependencies; the model may miss local detail and rare "
        "patterns.",
        "低秩矩阵难以捕捉细粒度的、多样化的依赖关系，可能导致模型忽略局部细节或罕见模式。",
    ),
    check=states_change,
    case=Case("every head held to its best rank 16", 16),
    control=Case("rank 128, which is all", 128),
    first="empirical",
    reason=Text(
        "Decided by taking rank away from a trained model: with 16 of 128 dimensions left to each head, more than the "
        "mean effective rank, the states move by 0.44 of their spread. Whether a model with less effective rank is the "
        "weaker one takes training, and is not decided.",
        "通过削减已训练模型的秩来判定：每个头只留 128 维中的 16 维（高于平均有效秩），状态就移动其离散程度的 0.44。"
        "有效秩较低的模型是否因此更弱，需要训练，尚未判定。",
    ),
    figure=change_against_rank,
)


# ── N004-approx-cost: low-rank factorisation is faster, at the expense of quality


def faster_and_worse(tokens: tuple[Tensor, Tensor]) -> Evidence:
    """Best rank 16 of a head of 256 tokens: its error is √Σ_{i>16} σᵢ²; and flops of r keys against all."""
    q, k = tokens
    weights = Softmax(Full()).matrix(q, k)
    values = svdvals(weights)
    error = (TruncatedSVD(16).matrix(q, k) - weights).norm()
    dims = Dims(n=256, m=256, d=16, e=16)
    saved = Softmax(Full()).cost(dims).flops / Linformer(256, 16).cost(dims).flops
    return evidence(
        at_least("flops of softmax over those of 16 projected keys", saved, 2),
        equal("error less √Σ_{i>16} σᵢ²", error - values[16:].norm(), 0, within=1e-10),
        at_least("relative error of the best rank 16", error / weights.norm(), 0.1),
    )


APPROXIMATION = Claim(
    id="N004-approx-cost",
    section="4",
    kind="exact",
    statement=Text(
        "Low-rank factorisation makes attention faster, but at the expense of performance.",
        "虽然低秩矩阵可通过近似加速计算（如使用低秩分解），但这是以牺牲性能为代价的。",
    ),
    formula=r"\min_{\operatorname{rank}B\le r}\|A-B\|_F=\left(\sum_{i>r}\sigma_i^2\right)^{1/2}",
    check=faster_and_worse,
    case=Case("256 different tokens", gaussian(256, 16, 1.0, 0)),
    control=Case("256 tokens of which 7 differ: the rank is 7", few_tokens(256, 16, 7, 0)),
    first="conditional",
    condition=Text(
        "The rank given is below that of A; the price is exactly the energy of what is left out.",
        "所取的秩低于 A 的秩；代价恰好是被舍去的奇异值的能量。",
    ),
    reason=Text(
        "The error of the matrix is decided; what it costs a task is not.",
        "判定的是矩阵误差；对任务性能的影响未判定。",
    ),
)

CLAIMS = (EFFECTS, APPROXIMATION)
