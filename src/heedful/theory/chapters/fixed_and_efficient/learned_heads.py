"""1.2: why heads learn positions, and whether heads are redundant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import sqrt
from statistics import mean

import torch
from torch.nn.functional import cross_entropy, normalize

from heedful.measures import row_statistics
from heedful.mechanisms import Softmax
from heedful.nn import Rope
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory import models
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Text,
    at_least,
    equal,
    evidence,
    surely_above,
    surely_below,
)
from heedful.theory.samples import mean_and_error

# ── R003-locality: language is local, and heads look near

FREQUENT = 15  # words with a class of their own; all others are one more


@cache
def word_classes() -> tuple[Tensor, ...]:
    """The passages as sequences of classes: the most frequent words, and the rest."""
    from heedful.hf.prose import passages

    texts = [re.findall("[a-z]+", text.lower()) for text in passages()]
    frequent = [word for word, _ in Counter(word for text in texts for word in text).most_common(FREQUENT)]
    index = {word: at for at, word in enumerate(frequent)}
    return tuple(torch.tensor([index.get(word, FREQUENT) for word in text]) for text in texts)


def mutual_information(classes: Tensor, distance: int) -> float:
    """Of two words so far apart, in nats, from their frequencies (biased up, alike at every distance)."""
    kinds = FREQUENT + 1
    pairs = torch.bincount(classes[:-distance] * kinds + classes[distance:], minlength=kinds**2).double()
    joint = (pairs / pairs.sum()).view(kinds, kinds)
    apart = joint.sum(1, keepdim=True) * joint.sum(0)
    return float(torch.where(joint > 0, joint * (joint / apart).log(), 0).sum())


def shuffled(classes: Tensor) -> Tensor:
    return classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))]


def near_matters(real: bool) -> Evidence:
    """Words at distance 1 tell more of each other than at 20; heads put more on ±8 tokens than spread evenly."""
    near = [
        mean(
            float(row_statistics(call.operator(), window=8).inside.mean())  # type: ignore[union-attr]
            for call in models.calls("minilm", 128, text, trained=real)
        )
        for text in range(4)
    ]
    texts = word_classes() if real else tuple(map(shuffled, word_classes()))
    gain, error = mean_and_error([mutual_information(x, 1) - mutual_information(x, 20) for x in texts])
    i = torch.arange(128)
    even = float(((i[:, None] - i).abs() <= 8).double().mean())
    share, spread = mean_and_error(near)
    return evidence(
        surely_above("mutual information at distance 1 less that at 20 (nats)", gain, 0, error=error),
        surely_above("weight within ±8 tokens, against an even spread", share, 1.5 * even, error=spread),
    )


LOCALITY = Claim(
    id="R003-locality",
    section="1.2.1",
    kind="empirical",
    statement=Text(
        "Natural language is strongly local, so that models tend to learn to attend to near positions.",
        "自然语言具有强烈的局部性，这使得模型倾向于学习关注邻近位置的简单模式。",
    ),
    check=near_matters,
    case=Case("24 passages of prose, and MiniLM on four of them", True),
    control=Case("the words shuffled, and an untrained copy", False),
    first="empirical",
    reason=Text(
        "Both facts are seen: near words tell more of each other, and trained heads look near. That the one is the "
        "cause of the other is not decided by this: it would take training on language without locality.",
        "两个事实都得到证实：近处的词相互信息更多，训练后的头更关注近处。但前者是否是后者的原因并未由此判定：那需要在"
        "没有局部性的语言上训练。",
    ),
)


# ── R003-PE: sines and cosines of the position tell positions apart


def sines_and_cosines(n: int, d: int) -> Tensor:
    """PE: the vector of pairs (0, 1), turned by the angles of `Rope`, gives (−sin, cos)."""
    unit = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(n, d // 2)
    return Rope(d, interleaved=True)(unit) * torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(d // 2)


def sines_alone(n: int, d: int) -> Tensor:
    """The cosines left out."""
    return sines_and_cosines(n, d) * torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(d // 2)


def tells_positions_apart(encode) -> Evidence:
    """The Gram matrix depends on the offset alone, so that the distances from position 0 are all distances."""
    P = encode(256, 512)
    gram = P @ P.mT
    first = torch.stack([gram.diagonal(k)[0].expand(256 - k).sub(gram.diagonal(k)).abs().max() for k in range(256)])
    far = encode(2000, 512)
    angle = torch.arange(2000, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, 512, 2).double() / 512)
    return evidence(
        equal("sin(pos / 10000^{2i/d}), largest difference", (far[:, 0::2] - angle.sin()).abs().max(), 0, within=1e-12),
        equal("largest change of PE_p·PE_q along an offset", first.max(), 0, within=1e-10),
        equal("‖PE‖²", P.square().sum(-1).max(), 256, within=1e-10),
        at_least("smallest distance among 2000 positions", (far[1:] - far[0]).norm(dim=-1).min(), 3.714),
    )


PE = Claim(
    id="R003-PE",
    section="1.2.2",
    kind="exact",
    statement=Text(
        "Sines and cosines of the position at geometric frequencies let a model tell the positions of tokens apart.",
        "正弦/余弦位置编码使模型能够区分不同位置的 token。",
    ),
    formula=r"PE_{(pos,2i)}=\sin(pos/10000^{2i/d}),\qquad PE_{(pos,2i+1)}=\cos(pos/10000^{2i/d})",
    check=tells_positions_apart,
    case=Case("sines and cosines, d = 512", sines_and_cosines),
    control=Case("sines alone", sines_alone),
)


# ── R003-PE-easy: positions make positional patterns easy to learn


def trained_previous(positions: bool, seed: int, n: int = 16, d: int = 32, steps: int = 300) -> float:
    """Weight on the previous token after a head has been trained to attend it, content being noise."""
    generator = torch.Generator().manual_seed(seed)
    W = (torch.randn(2, d, d, generator=generator) / sqrt(3 * d)).requires_grad_()
    optimiser, where = torch.optim.Adam([W], lr=3e-2), sines_and_cosines(n, d).float() * positions
    for _ in range(steps):
        x = 0.5 * torch.randn(4, n, d, generator=generator) + where
        before = Softmax(Full()).matrix(x @ W[0], x @ W[1]).diagonal(-1, -2, -1)
        optimiser.zero_grad()
        (-before.log().mean()).backward()
        optimiser.step()
    return float(before.detach().mean())


def is_learned(positions: bool) -> Evidence:
    weight, error = mean_and_error([trained_previous(positions, seed) for seed in range(5)])
    return evidence(surely_above("weight on the previous token, N = 16, by chance 1/16", weight, 4 / 16, error=error))


PE_EASY = Claim(
    id="R003-PE-easy",
    section="1.2.2",
    kind="empirical",
    statement=Text(
        "Positional encodings make it easy for attention to learn simple patterns of positions.",
        "位置编码也使得注意力机制容易学习到基于位置的简单模式。",
    ),
    check=is_learned,
    case=Case("a head trained for 300 steps to attend the previous token, with positional encodings", True),
    control=Case("without them", False),
    first="empirical",
    reason=Text(
        "Decided on one head that is asked for the pattern. Whether the heads of a translation model, which are not "
        "asked, become positional more often with encodings than without is for the study raganato.",
        "在一个以该模式为目标训练的头上判定。翻译模型的头并未被要求如此，它们在有位置编码时是否更常成为位置头，由研究 "
        "raganato 判定。",
    ),
)


# ── R003-8heads

EIGHT = Claim(
    id="R003-8heads",
    section="1.2.3",
    kind="wording",
    statement=Text("The standard Transformer uses 8 attention heads.", "标准 Transformer 使用 8 个注意力头。"),
    first="conditional",
    reason=Text(
        "A choice of its authors, not a theorem: the base model has 8 heads, the big one 16.",
        "这是作者的设计选择而非定理：base 模型 8 个头，big 模型 16 个。",
    ),
)


# ── R003-redundant: many heads are alike, many can be pruned

PRUNED = 27  # of the 270 heads of SmolLM2


@contextmanager
def gated(model, gates: Tensor) -> Iterator[None]:
    """The model with each head's output times its gate, (layers, heads)."""

    def hook(gate: Tensor):
        return lambda _, given: ((given[0].unflatten(-1, (len(gate), -1)) * gate[:, None]).flatten(-2),)

    layers = model.model.layers
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(hook(gate)) for layer, gate in zip(layers, gates, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss(gates: Tensor, text: int, length: int = 256) -> Tensor:
    """Nats a token of SmolLM2 on a passage."""
    model, tokenizer = models.model("smollm2")
    from heedful.hf.prose import encode, passages

    inputs = encode(model, tokenizer, passages()[text], length)
    with gated(model, gates):
        logits = model(**inputs).logits[0]
    return cross_entropy(logits[:-1], inputs["input_ids"][0, 1:])


@cache
def importance() -> Tensor:
    """|∂ loss / ∂ gate| over four passages (Michel et al. 2019, arXiv:1905.10650)."""
    config = models.model("smollm2")[0].config
    total = torch.zeros(config.num_hidden_layers, config.num_attention_heads)
    for text in range(12, 16):
        gates = torch.ones_like(total, requires_grad=True)
        total += torch.autograd.grad(loss(gates, text), gates)[0].abs()
    return total


def a_tenth_is_dispensable(chosen: str) -> Evidence:
    """The loss that pruning adds on passages that had no say in the choice."""
    scores = importance()
    if chosen == "least important":
        order = scores.flatten().argsort()
    else:
        order = torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(0))
    whole = torch.ones_like(scores)
    with torch.no_grad():
        before = [float(loss(whole, text)) for text in range(6)]
        costs = []
        for count in (PRUNED, 2 * PRUNED):
            gates = whole.flatten().index_fill(0, order[:count], 0).view_as(whole)
            costs.append(mean_and_error([float(loss(gates, text)) - before[text] for text in range(6)]))
    (tenth, error), (fifth, spread) = costs
    return evidence(
        surely_below(f"nats a token that {PRUNED} of 270 heads cost", tenth, 0.1, error=error),
        note=f"twice as many cost {fifth:.3g} ± {spread:.2g}",
    )


def heads_have_twins(trained: bool) -> Evidence:
    """Of MiniLM's heads, those with another whose A, less its even part, has a cosine above .8."""
    shares = []
    for text in range(4):
        A = torch.cat([call.operator().materialise()[0] for call in models.calls("minilm", 128, text, trained)])
        beyond = normalize((A - 1 / A.shape[-1]).flatten(1), dim=-1)
        cosines = (beyond @ beyond.mT).fill_diagonal_(-1)
        shares.append(float((cosines.amax(-1) > 0.8).double().mean()))
    share, error = mean_and_error(shares)
    return evidence(surely_above("share of heads with a twin", share, 0.4, error=error))


REDUNDANT = Claim(
    id="R003-redundant",
    section="1.2.3",
    kind="empirical",
    statement=Text(
        "Many heads learn very similar patterns, and many can be pruned without much loss.",
        "许多头学习到的模式高度相似，大量头可以被剪枝而不显著影响性能。",
    ),
    check=a_tenth_is_dispensable,
    case=Case("a tenth of SmolLM2's heads, those of the least importance, set to zero", "least important"),
    control=Case("a tenth at random", "at random"),
    first="empirical",
    condition=Text(
        "The heads are chosen by their importance, and they are a tenth: without retraining they cost 0.04 nats "
        "a token and a fifth costs 0.19, where a tenth at random costs 0.37.",
        "按重要性挑选，且只剪十分之一：不重新训练时每 token 损失增加 0.04 nat，剪五分之一增加 0.19；而随机剪十分之一"
        "增加 0.37。",
    ),
    corrected=Claim(
        id="R003-redundant*",
        section="1.2.3",
        kind="empirical",
        statement=Text(
            "About half of MiniLM's heads have a twin: another head whose weights, less an even spread, have a cosine "
            "above 0.8 with its own.",
            "MiniLM 约一半的头有“孪生”头：扣除均匀部分后，两者权重的余弦大于 0.8。",
        ),
        check=heads_have_twins,
        case=Case("MiniLM", True),
        control=Case("an untrained copy", False),
    ),
    reason=Text(
        "How many heads a translation model can lose after retraining is for the study raganato.",
        "翻译模型在重新训练后能剪去多少头，由研究 raganato 判定。",
    ),
    slow=True,
)

CLAIMS = (LOCALITY, PE, PE_EASY, EIGHT, REDUNDANT)
