"""3: where low rank comes from: repeated tokens, softmax, positions."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING

import torch

from heedful.measures import row_statistics
from heedful.measures.spectrum import numerical_rank
from heedful.mechanisms import Softmax
from heedful.nn.rope import Rope
from heedful.operator import AttentionOperator
from heedful.patterns import Causal, Full
from heedful.shapes import Tensor
from heedful.theory import models
from heedful.theory.chapters.bidirectional.heads import (
    LENGTH,
    TEXTS,
    by_text,
    by_text_of_smollm2,
    few_tokens,
    gaussian,
    rank_of,
)
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    at_most,
    equal,
    evidence,
    surely_above,
    surely_below,
)
from heedful.theory.samples import mean_and_error

if TYPE_CHECKING:
    from heedful.hf.calls import Call

# ── N004-data: repeated tokens make A redundant


def bounded_by_vocabulary(weights: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """The rank of attention among 48 tokens of which r differ."""
    return evidence(
        *(
            equal(f"rank at {r} different tokens", numerical_rank(weights(*few_tokens(48, 16, r, r))), r)
            for r in (3, 7, 20)
        )
    )


def everyone(q: Tensor, k: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k)


def with_positions(q: Tensor, k: Tensor) -> Tensor:
    rope = Rope(q.shape[-1])
    return Softmax(Full()).matrix(rope(q), rope(k))


def before_it(q: Tensor, k: Tensor) -> Tensor:
    return Softmax(Causal()).matrix(q, k)


def not_bounded(weights: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """24 tokens of which 3 differ."""
    return evidence(equal("rank, 24 tokens of which 3 differ", numerical_rank(weights(*few_tokens(24, 16, 3, 3))), 24))


DATA = Claim(
    id="N004-data",
    section="3.1",
    kind="exact",
    statement=Text(
        "Repeated or closely related tokens in the input make the attention matrix redundant.",
        "输入序列中可能存在重复或高度相关的信息（例如高频词、语法结构等），导致注意力权重矩阵的冗余。",
    ),
    formula=r"\operatorname{rank}A\le\#\{\text{different tokens}\}",
    check=bounded_by_vocabulary,
    case=Case("no positions, no mask", everyone),
    control=Case("rotary positions", with_positions),
    first="conditional",
    condition=Text(
        "Tokens carry no positions and there is no causal mask: then the rank is the number of different tokens. With "
        "either of them equal tokens have different rows.",
        "token 不带位置信息，也没有因果 mask：此时秩等于不同 token 的个数。只要有其一，相同的 token 就有不同的行。",
    ),
    corrected=Claim(
        id="N004-data*",
        section="3.1",
        kind="exact",
        statement=Text(
            "The causal mask alone restores full rank, however often tokens repeat.",
            "仅靠因果 mask，无论 token 如何重复，都是满秩。",
        ),
        formula=r"\operatorname{rank}A=N",
        check=not_bounded,
        case=Case("causal mask", before_it),
        control=Case("no mask", everyone),
    ),
)


# ── N004-softmax: winner-take-all makes attention sparse and low in rank

Sharpened = Callable[[float], Tensor]


def sparser_and_lower(weights: Sharpened) -> Evidence:
    """Perplexity of the rows and effective rank, temperature ½ against 1."""
    sharp, flat = weights(0.5), weights(1.0)
    return evidence(
        at_most("perplexity of the rows, temperature ½ against 1", perplexity(sharp), perplexity(flat)),
        at_most("effective rank, temperature ½ against 1", rank_of(sharp), rank_of(flat)),
    )


def perplexity(weights: Tensor) -> Tensor:
    return torch.special.entr(weights).sum(-1).exp().mean()


def random_head(temperature: float) -> Tensor:
    return Softmax(Full(), temperature=temperature).matrix(*gaussian(256, 16, 1.0, 0))


def shared_favourite(temperature: float) -> Tensor:
    """A key that every query likes best."""
    q, k = gaussian(256, 16, 1.0, 0)
    return Softmax(Full(), temperature=temperature, bias=lambda i, j: 3.0 * (j == 0) + 0.0 * i).matrix(q, k)


def rank_rises_in_real_heads(sharp: float) -> Evidence:
    """Effective rank of MiniLM's heads at another temperature, less that at 1."""

    def at(temperature: float, call: Call) -> Tensor:
        return rank_of(Softmax(call.pattern, call.scale, temperature).operator(call.q, call.per_head(call.k)))

    gain = by_text(lambda call, text: at(sharp, call) - at(1.0, call))
    mean, error = mean_and_error(gain)
    hard = Softmax(Full(), temperature=1e-4).matrix(*gaussian(256, 16, 1.0, 0))
    return evidence(
        surely_above("MiniLM: effective rank, sharpened less as trained", mean, 0, error=error),
        equal(
            "rank of the limit less the number of favourites",
            numerical_rank(hard, 1e-6) - len(hard.argmax(-1).unique()),
            0,
        ),
        note=f"{TEXTS} texts, N = {LENGTH}",
    )


def rank_against_temperature() -> Figure:
    sharpness = [0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    lines = {
        name: (sharpness, [float(rank_of(weights(1 / x))) for x in sharpness])
        for name, weights in (("random head, N = 256", random_head), ("a key that all like best", shared_favourite))
    }
    return Figure(
        Text("Effective rank against sharpness", "有效秩与尖锐程度"),
        "1 / temperature",
        "effective rank",
        lines,
        log_x=True,
    )


SOFTMAX = Claim(
    id="N004-softmax",
    section="3.2",
    kind="exact",
    statement=Text(
        "Softmax presses the weights into a few places (winner takes all), which makes the matrix sparser and lower in "
        "rank.",
        "Softmax 函数会将注意力权重压缩到少数几个显著的位置（“赢者通吃”效应），加剧矩阵的稀疏性和低秩性。",
    ),
    check=sparser_and_lower,
    case=Case("a random head", random_head),
    control=Case("a key that every query likes best", shared_favourite),
    first="false",
    counterexample="""\
import torch, heedful as h
q, k = torch.randn(2, 256, 16, generator=torch.Generator().manual_seed(0)).unbind()
for temperature in (4., 1., 0.25):                          # flat, as it is, sharp
    A = h.Softmax(h.Full(), temperature=temperature).operator(q, k)
    print(temperature, h.entropy(A).exp().mean(), h.effective_rank(A).estimate)  # sparser, and higher in rank""",
    corrected=Claim(
        id="N004-softmax*",
        section="3.2",
        kind="empirical",
        statement=Text(
            "Sparsity and rank are different axes: sharpening raises the effective rank of random heads and, on the "
            "mean, of trained ones. In the limit the rank is the number of different favourites, so that it falls only "
            "where queries share them.",
            "稀疏与低秩是两回事：尖锐化会提高随机头的有效秩，训练好的头平均也如此。极限情形下秩等于不同“赢家”的个数，"
            "只有当许多 query 的赢家相同时才会下降。",
        ),
        check=rank_rises_in_real_heads,
        case=Case("temperature ½", 0.5),
        control=Case("temperature 2", 2.0),
    ),
    figure=rank_against_temperature,
)


# ── N004-posenc: limits of the position encoding make patterns simple


@cache
def without_positions(text: int) -> tuple[Call, ...]:
    """The calls of MiniLM where all positions have the same embedding, the mean of them."""
    from heedful.hf.probe import Probe
    from heedful.hf.prose import encode, passages

    trained, tokenizer = models.model("minilm")
    blind = deepcopy(trained)
    with torch.no_grad():
        table = blind.embeddings.position_embeddings.weight
        table.copy_(table[:LENGTH].mean(0).expand_as(table))
    seen: list[Call] = []
    with torch.no_grad():
        Probe(blind)(encode(blind, tokenizer, passages()[text], LENGTH), seen.append)
    return tuple(seen)


def absolute_positions() -> list[tuple[AttentionOperator, AttentionOperator]]:
    """First layer of MiniLM with and without position embeddings, for each text."""
    return [
        (models.calls("minilm", LENGTH, text)[0].operator(), without_positions(text)[0].operator())
        for text in range(TEXTS)
    ]


def importance_of_places() -> list[tuple[AttentionOperator, AttentionOperator]]:
    """The same layer without them, with and without a liking of all queries for early keys."""
    pairs = []
    for text in range(TEXTS):
        call = without_positions(text)[0]
        early = Softmax(call.pattern, call.scale, bias=lambda i, j: -0.5 * j.double() + 0 * i)
        pairs.append((early.operator(call.q, call.k), call.operator()))
    return pairs


def positions_simplify(heads: Callable[[], list[tuple[AttentionOperator, AttentionOperator]]]) -> Evidence:
    """Effective rank with positions less that without."""
    gaps = torch.stack([(rank_of(known) - rank_of(blind)).mean() for known, blind in heads()])
    mean, error = mean_and_error(gaps)
    return evidence(surely_below("effective rank with positions less that without", mean, 0, error=error))


def positions_enrich(turn: float) -> Evidence:
    """SmolLM2: effective rank, and mass on the previous token, of the same q and k with their rotation and turned back.

    turn   1: turned back by their positions; 0: left as they are
    """
    trained, _ = models.model("smollm2")
    base = trained.config.rope_parameters["rope_theta"]

    def turned_back(call: Call) -> AttentionOperator:
        rope = Rope(call.q.shape[-1], base)
        places = (-turn * torch.arange(call.q.shape[-2])).long()
        return Softmax(call.pattern, call.scale).operator(rope(call.q, places), rope(call.per_head(call.k), places))

    def more_than_half(call: Call, text: int) -> Tensor:
        return rank_of(call.operator()) / 2 - rank_of(turned_back(call))

    def gain_before(call: Call, text: int) -> Tensor:
        known, blind = (row_statistics(op).at_offset[..., 0].mean(-1) for op in (call.operator(), turned_back(call)))
        return known - blind

    rank, rank_error = mean_and_error(by_text_of_smollm2(more_than_half))
    mass, mass_error = mean_and_error(by_text_of_smollm2(gain_before))
    first = torch.stack([(rank_of(known) / 2 - rank_of(blind)).mean() for known, blind in absolute_positions()])
    absolute, absolute_error = mean_and_error(first)
    return evidence(
        surely_above("half the effective rank less that without rotation, SmolLM2, N = 256", rank, 0, error=rank_error),
        surely_above("mass on the previous token that it adds", mass, 0, error=mass_error),
        surely_above(
            "half the effective rank less that without embeddings, MiniLM, first layer",
            absolute,
            0,
            error=absolute_error,
        ),
        note="SmolLM2: every fifth layer, weights of four bits",
    )


POSITIONS = Claim(
    id="N004-posenc",
    section="3.3",
    kind="empirical",
    statement=Text(
        "Absolute or relative position encodings may fail to model complex global dependencies, so that attention "
        "patterns become simple: a cause of low rank.",
        "绝对位置编码或相对位置编码可能无法充分建模复杂的全局依赖关系，导致注意力模式趋于简单化（低秩的原因之一）。",
    ),
    check=positions_simplify,
    case=Case("position embeddings of MiniLM, first layer", absolute_positions),
    control=Case("a position term that is the same for all queries", importance_of_places),
    first="empirical",
    counterexample="""\
import torch, heedful as h
from heedful.nn.rope import Rope
words = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
x = 2 * words[torch.randint(20, (128,), generator=torch.Generator().manual_seed(1))]     # 128 tokens, 20 words
for name, y in (("no positions", x), ("rotary positions", Rope(32)(x))):
    print(name, h.effective_rank(h.Softmax(h.Full()).operator(y, y)).estimate)           # positions raise it""",
    corrected=Claim(
        id="N004-posenc*",
        section="3.3",
        kind="empirical",
        statement=Text(
            "Positions make patterns richer: taken out of the same q and k of SmolLM2, and out of the embeddings of "
            "MiniLM, the effective rank falls by more than a half.",
            "位置编码使注意力模式更丰富：在 SmolLM2 的同一组 q、k 中去掉旋转位置，或在 MiniLM 的嵌入中去掉位置，"
            "有效秩都下降一半以上。",
        ),
        check=positions_enrich,
        case=Case("turned back by the positions", 1.0),
        control=Case("not turned at all", 0.0),
        slow=True,
    ),
    reason=Text(
        "Read so: if the encoding in use were a cause, patterns without it would be no simpler. "
        "MiniLM (absolute) against SmolLM2 (rotary) would be confounded; here the same weights are run with and "
        "without positions. Whether another encoding, trained from the start, would give richer patterns is not "
        "decided.",
        "按此理解：若现有位置编码是原因，去掉它模式就不应更简单。"
        "直接比较 MiniLM（绝对位置）与 SmolLM2（RoPE）有混杂；这里用同一组权重，比较有无位置信息。"
        "若从头训练更复杂的位置编码，模式是否更丰富，尚未判定。",
    ),
    slow=True,
)

CLAIMS = (DATA, SOFTMAX, POSITIONS)
