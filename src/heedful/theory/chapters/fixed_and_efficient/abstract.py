"""Abstract: most heads are positional, and linear attention is linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import mean, stdev

import torch

from heedful.feature_maps import Elu1, FeatureMap
from heedful.measures import positional_pattern, row_statistics
from heedful.mechanisms import FixedPattern, Linear, Mixture, Softmax
from heedful.operator import AttentionOperator
from heedful.patterns import Full
from heedful.random_features import FavorPlus
from heedful.theory import models
from heedful.theory.chapters.fixed_and_efficient.counts import LENGTHS, exponent, flops
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Text,
    equal,
    evidence,
    surely_above,
    surely_below,
)

# ── R003-positional: most heads of an encoder learn simple positional patterns

TEXTS = range(4)
SENTENCE, PASSAGE = 24, 128  # tokens
UNPOSITIONAL = ("content", "uniform", "stripes")
"""Labels that name no positions: stripes are columns that the text chooses."""

Layers = Callable[[int, int], list[AttentionOperator]]
"""The heads of a model, layer by layer, on a passage cut to a length."""


def of_minilm(text: int, length: int, trained: bool = True) -> list[AttentionOperator]:
    return [call.operator() for call in models.calls("minilm", length, text, trained)]


untrained = partial(of_minilm, trained=False)


def fixed_layers(text: int, length: int) -> list[AttentionOperator]:
    """Six layers of seven fixed heads and a learned one, as in the paper's own models."""
    kinds = ("current", "previous", "next", "left", "right", "start", "end")
    heads = Mixture([*map(FixedPattern, kinds), Softmax(Full())])
    q, k = torch.randn(2, 6, 1, 8, length, 32, generator=torch.Generator().manual_seed(text)).unbind()
    return [heads.operator(*layer) for layer in zip(q, k, strict=True)]


def on_one_place(layers: Sequence[AttentionOperator]) -> float:
    """Of the heads, those whose mean weight on itself, a neighbour, the first or the last token exceeds a half."""
    found = []
    for op in layers:
        rows = row_statistics(op, offsets=(-1, 0, 1), first=1, last=1)
        places = torch.cat([rows.at_offset, rows.first[..., None], rows.last[..., None]], -1)
        found.append(places.mean(-2).amax(-1).flatten() > 0.5)
    return torch.cat(found).double().mean().item()


def positional(layers: Sequence[AttentionOperator]) -> float:
    """Of the heads, those that one of the seven patterns, a band, a window or the first tokens explain by half."""
    labels = [label for op in layers for row in positional_pattern(op).labels for label in row]
    return sum(label not in UNPOSITIONAL for label in labels) / len(labels)


@cache
def share(measure: Callable[[Sequence[AttentionOperator]], float], layers: Layers, length: int) -> tuple[float, float]:
    """Mean and standard error over texts."""
    found = [measure(layers(text, length)) for text in TEXTS]
    return mean(found), stdev(found) / len(found) ** 0.5


def most_are_positional(layers: Layers) -> Evidence:
    return evidence(
        *(
            surely_above(f"positional heads, {length} tokens", value, 0.5, error=error)
            for length in (SENTENCE, PASSAGE)
            for value, error in [share(positional, layers, length)]
        )
    )


def some_are_positional(layers: Layers) -> Evidence:
    short, short_error = share(positional, layers, SENTENCE)
    long, long_error = share(positional, layers, PASSAGE)
    place, place_error = share(on_one_place, layers, SENTENCE)
    return evidence(
        surely_below("positional heads, 24 tokens", short, 0.5, error=short_error),
        surely_below("positional heads, 128 tokens", long, 0.25, error=long_error),
        surely_above("over half of the weight on one place, 24 tokens", place, 0.2, error=place_error),
    )


POSITIONAL = Claim(
    id="R003-positional",
    section="Abstract, 1.1",
    kind="empirical",
    statement=Text(
        "Most self-attention heads of an encoder learn nothing but simple positional patterns.",
        "编码器中大多数自注意力头学习到的仅仅是简单的位置模式。",
    ),
    check=most_are_positional,
    case=Case("MiniLM (6 × 12 heads) on four texts", of_minilm),
    control=Case("seven fixed heads and one learned in each layer", fixed_layers),
    first="empirical",
    counterexample="""\
import heedful as h
from heedful.theory.models import calls
for length in (24, 128):
    labels = [x for call in calls("minilm", length) for x in h.positional_pattern(call.operator()).labels[0]]
    found = [x for x in labels if x not in ("content", "uniform", "stripes")]  # stripes: columns that the text chooses
    print(length, len(found), "of", len(labels))            # 24 of 72, and 14 of 72""",
    corrected=Claim(
        id="R003-positional*",
        section="Abstract, 1.1",
        kind="empirical",
        statement=Text(
            "A minority does, and fewer the longer the text: in MiniLM a third of the heads at 24 tokens, nearly all "
            "of which rest on the first tokens, and a fifth at 128; one head of 72 attends the previous token and one "
            "the next. In an untrained copy none does.",
            "只有少数头如此，且文本越长越少：MiniLM 在 24 个 token 时约三分之一（几乎都停在开头几个 token 上），"
            "128 个时约五分之一；72 个头中关注前一个、后一个 token 的各一个。未训练的同结构模型中一个也没有。",
        ),
        check=some_are_positional,
        case=Case("MiniLM", of_minilm),
        control=Case("an untrained copy of it", untrained),
    ),
    reason=Text(
        "Decided on a trained sentence encoder. The paper reports it of earlier works; it is not its own result. "
        "Whether it is so in encoders of translation models is for the study raganato, which trains them.",
        "在一个训练好的句子编码器上判定。原论文是转述前人的工作，并非其自身结论。翻译模型的编码器是否如此，由训练它们的"
        "研究 raganato 判定。",
    ),
)


# ── R003-abs-ON: linear attention and Performer take O(N) instead of O(N²)


def linear_in_length(maps: Callable[[int], Sequence[FeatureMap]]) -> Evidence:
    """Exponents of the counted operations in N, for each of the feature maps at that length, d = 32."""
    found: dict[str, dict[int, float]] = {}
    for n in LENGTHS:
        for phi in maps(n):
            found.setdefault(type(phi).__name__, {})[n] = flops(Linear(phi, Full()), n, 32)
    return evidence(
        *(equal(f"{name}: exponent of the operations in N", exponent(x), 1, within=0.01) for name, x in found.items())
    )


def as_many_at_every_length(n: int) -> Sequence[FeatureMap]:
    return Elu1(), FavorPlus(32, 64)


def as_many_as_tokens(n: int) -> Sequence[FeatureMap]:
    return Elu1(), FavorPlus(32, n)


def operations_are_the_product(factor: float) -> Evidence:
    """Performer at N = 1024, m = 64, d = 32: two products for the features, two with the values."""
    n, m, d = 1024, 64, 32
    counted = flops(Linear(FavorPlus(d, m), Full()), n, d)
    return evidence(equal("operations / Nmd", counted / (n * m * d), factor))


ABS_ON = Claim(
    id="R003-abs-ON",
    section="Abstract",
    kind="complexity",
    statement=Text(
        "Linear attention and Performer bring the complexity from O(N²) down to O(N).",
        "Linear Attention、Performer 将复杂度从 O(N²) 降至 O(N)。",
    ),
    formula=r"O(N^2)\to O(N)",
    check=linear_in_length,
    case=Case("elu + 1, and 64 random features", as_many_at_every_length),
    control=Case("as many random features as tokens", as_many_as_tokens),
    first="conditional",
    condition=Text(
        "The number m of features stays fixed as N grows: the cost is O(Nmd). Accuracy may ask for a large m.",
        "特征数 m 不随 N 增长：代价是 O(Nmd)；而精度可能要求很大的 m。",
    ),
    corrected=Claim(
        id="R003-abs-ON*",
        section="Abstract",
        kind="complexity",
        statement=Text(
            "Performer takes 8 Nmd operations: half of them for the features.",
            "Performer 需要 8Nmd 次运算，其中一半用于计算特征。",
        ),
        formula=r"8Nmd",
        check=operations_are_the_product,
        case=Case("8 Nmd", 8.0),
        control=Case("4 Nmd, without the features", 4.0),
    ),
)

CLAIMS = (POSITIONAL, ABS_ON)
