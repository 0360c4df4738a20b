"""11.3.6: the layers of trained models."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch

from heedful.measures import effective_rank, entropy
from heedful.mechanisms import Softmax
from heedful.operator import AttentionOperator
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.low_rank.heads import Mean, heads
from heedful.theory.chapters.low_rank.softmax_bottleneck import one_hub
from heedful.theory.chapters.low_rank.spectra import gaussian
from heedful.theory.claim import (
    Case,
    Claim,
    Evidence,
    Figure,
    Text,
    Undecided,
    at_least,
    at_most,
    equal,
    evidence,
    surely_above,
    surely_below,
)

# ── L11.43-value: the heads of BERT-base have effective rank 150 on average


def rank_of_bert(trained: bool) -> Evidence:
    raise Undecided(
        "needs BERT-base, which is not among the models at hand (Tab11.3.1-values has what MiniLM, a BERT of 6 layers, "
        "and SmolLM2 show at this length: 51, and 122 to 125 for random heads as sharp)"
    )


L11_43_VALUE = Claim(
    id="L11.43-value",
    section="11.3.6",
    kind="empirical",
    statement=Text(
        "In BERT-base the mean effective rank of the 12 layers is about 150 at N = 512.",
        "在 BERT-base 模型中，12 层注意力矩阵的平均有效秩约为 150，序列长度为 512。",
    ),
    formula=r"\operatorname{eff-rank}(A)\approx 150\quad(N=512,\ d=768)",
    check=rank_of_bert,
    case=Case("the heads of BERT-base", True),
    control=Case("random heads of the same width and spread of logits", False),
    first="empirical",
    reason=Text(
        "The number stands in Table 11.3.1 too, where it is decided on other models. Whatever it is, 150 > d_k = 64 "
        "contradicts T11.23 of the same text.",
        "同一数值也见于表 11.3.1，在那里用其他模型作了判定。无论如何，150 > d_k = 64 与同文的定理 11.23 矛盾。",
    ),
)


# ── L11.43-arith: 150 is 30 % of the length and 20 % of the width


def shares_of_150(sizes: tuple[int, int]) -> Evidence:
    length, width = sizes
    return evidence(
        equal("150 over the length", 150 / length, 0.30, within=0.01),
        equal("150 over the width", 150 / width, 0.20, within=0.01),
    )


L11_43_ARITH = Claim(
    id="L11.43-arith",
    section="11.3.6",
    kind="exact",
    statement=Text(
        "150 is about 30 % of the nominal rank 512 and about 20 % of the width 768.",
        "有效秩 150 约为名义秩 512 的 30%，约为隐藏维度 768 的 20%。",
    ),
    formula=r"\frac{150}{512}\approx 0.3,\qquad \frac{150}{768}\approx 0.2",
    check=shares_of_150,
    case=Case("512 and 768", (512, 768)),
    control=Case("the nominal rank 768 of Table 11.3.1", (768, 768)),
)


# ── T11.29-trend: effective rank falls from early to late layers

LENGTH = 256
TEXTS = 4


def by_thirds(name: str, trained: bool = True) -> tuple[list[float], list[float], list[float]]:
    """Mean effective rank in the first, middle and last third of the layers, a number a text."""
    thirds: tuple[list[float], list[float], list[float]] = ([], [], [])
    for text in range(TEXTS):
        for third, layers in zip(thirds, heads(name, LENGTH, text, trained).ranks().tensor_split(3), strict=True):
            third.append(float(layers.mean()))
    return thirds


def difference(a: list[float], b: list[float]) -> Mean:
    return Mean.of([x - y for x, y in zip(a, b, strict=True)])


def rank_falls_with_depth(name: str) -> Evidence:
    first, middle, last = by_thirds(name)
    early, late = difference(first, middle), difference(middle, last)
    return evidence(
        surely_above("effective rank, first third less middle", early.value, 0, error=early.error),
        surely_above("effective rank, middle third less last", late.value, 0, error=late.error),
    )


def last_third_is_lowest(trained: bool) -> Evidence:
    found = []
    for name in ("minilm", "smollm2"):
        first, middle, last = by_thirds(name, trained)
        for which, third in (("first", first), ("middle", middle)):
            gap = difference(last, third)
            found.append(surely_below(f"last third less {which}, {name}", gap.value, 0, error=gap.error))
    return evidence(*found)


def rank_by_layer() -> Figure:
    lines = {}
    for name, called in (("minilm", "MiniLM"), ("smollm2", "SmolLM2")):
        for trained, suffix in ((True, ""), (False, ", random heads")):
            ranks = heads(name, LENGTH, 0, trained).ranks().mean(-1)
            depth = [(at + 0.5) / len(ranks) for at in range(len(ranks))]
            lines[called + suffix] = (depth, ranks.tolist())
    title = Text("Effective rank by layer, N = 256", "各层的有效秩，N = 256")
    return Figure(title, "depth", "mean effective rank (.9)", lines)


T11_29_TREND = Claim(
    id="T11.29-trend",
    section="11.3.6",
    kind="empirical",
    statement=Text(
        "The effective rank is high in the first layers, medium in the middle, low in the last.",
        "前几层有效秩较高，中间层有效秩中等，后几层有效秩较低。",
    ),
    formula=r"\operatorname{eff-rank}_{\mathrm{first}}>\operatorname{eff-rank}_{\mathrm{middle}}>\operatorname{eff-rank}_{\mathrm{last}}",
    check=rank_falls_with_depth,
    case=Case("SmolLM2, 30 layers", "smollm2"),
    control=Case("MiniLM, 6 layers", "minilm"),
    first="empirical",
    counterexample="""\
import heedful as h
from heedful import hf
model, tokenizer = hf.load("smollm2")
seen = []
hf.Probe(model)(hf.encode(model, tokenizer, hf.passages()[0], 128), seen.append)
ranks = [float(h.effective_rank(call.operator()).estimate.double().mean()) for call in seen]
print([sum(ranks[at : at + 10]) / 10 for at in (0, 10, 20)])  # the middle third is highest: about 14, 17, 8""",
    corrected=Claim(
        id="T11.29-trend*",
        section="11.3.6",
        kind="empirical",
        statement=Text(
            "In both models the last third of the layers has the lowest effective rank. The order of the others "
            "depends on the model: the peak is in the second layer of 6 in MiniLM, in the twelfth of 30 in SmolLM2.",
            "两个模型中都是后三分之一的层有效秩最低；其余的次序因模型而异：MiniLM 的峰值在 6 层中的第 2 层，"
            "SmolLM2 在 30 层中的第 12 层。",
        ),
        formula=r"\operatorname{eff-rank}_{\mathrm{last}}<\min(\operatorname{eff-rank}_{\mathrm{first}},\operatorname{eff-rank}_{\mathrm{middle}})",
        check=last_third_is_lowest,
        case=Case("trained heads", True),
        control=Case("random heads, as sharp layer by layer", False),
    ),
    reason=Text(
        "It holds in MiniLM and not in SmolLM2. Nor does the spread of attention go with it: the mean entropy of "
        "MiniLM's last layer is its highest (T11.29-wording).",
        "在 MiniLM 中成立，在 SmolLM2 中不成立。注意力的分散程度也不随之变化：MiniLM 最后一层的平均熵反而最高"
        "（见 T11.29-wording）。",
    ),
    figure=rank_by_layer,
    slow=True,
)


# ── T11.29-wording: dispersed attention has high effective rank, concentrated attention low


def random_heads(sharpness: float) -> AttentionOperator:
    q, k = gaussian(256, 64)
    return Softmax(Full()).operator(sharpness * q, k)


def hub_heads(sharpness: float) -> AttentionOperator:
    """Sharper and sharper on one column."""
    return with_logits(one_hub(10 * sharpness / 8))


def with_logits(logits: Tensor) -> AttentionOperator:
    zero = torch.zeros(len(logits), 1, dtype=logits.dtype)
    return Softmax(Full(), bias=logits).operator(zero, zero)


def dispersed_is_high_rank(family: Callable[[float], AttentionOperator]) -> Evidence:
    """Flat (0.1) against sharp (8)."""
    flat, sharp = family(0.1), family(8.0)
    ranks = [int(effective_rank(op).estimate) for op in (flat, sharp)]
    entropies = [float(entropy(op).mean()) for op in (flat, sharp)]
    return evidence(
        at_least("entropy, flat against sharp", entropies[0], entropies[1]),
        at_least("effective rank, flat against sharp", ranks[0], ranks[1]),
    )


def four_corners(spread_out: Callable[[int], Tensor]) -> Evidence:
    """Logits whose attention is dispersed or not, and of high rank or not; entropy in units of ln N, rank in N."""
    n = 256
    uniform = torch.zeros(n, n, dtype=torch.float64)
    itself = 100 * torch.eye(n, dtype=torch.float64)
    corners = {
        "uniform": (uniform, True, False),
        "all on the first token": (itself[:1].expand(n, n), False, False),
        "each on itself": (itself, False, True),
        "each on keys of its own": (spread_out(n), True, True),
    }
    found = []
    for name, (logits, dispersed, high) in corners.items():
        op = with_logits(logits)
        spread, rank = float(entropy(op).mean()) / log(n), float(effective_rank(op).estimate) / n
        for what, number, large, most in (("entropy", spread, dispersed, 0.7), ("effective rank", rank, high, 0.25)):
            held = at_least(f"{name}: {what}", number, most) if large else at_most(f"{name}: {what}", number, 0.01)
            found.append(held)
    return evidence(*found)


def own_quarters(n: int) -> Tensor:
    """Each row over a random quarter of the keys."""
    drawn = torch.rand(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.where(drawn < 0.25, 0.0, -100.0)


def same_quarter(n: int) -> Tensor:
    return own_quarters(n)[:1].expand(n, n)


def rank_against_entropy() -> Figure:
    found = heads("minilm", 128, 0)
    ranks, entropies = found.ranks(), torch.stack(list(found.entropies))
    lines = {
        f"layer {layer + 1}": (entropies[layer].tolist(), ranks[layer].tolist()) for layer in range(ranks.shape[0])
    }
    title = Text("Effective rank against entropy, heads of MiniLM", "有效秩与熵：MiniLM 的各个头")
    return Figure(title, "mean entropy of a row", "effective rank (.9)", lines, points=True)


T11_29_WORDING = Claim(
    id="T11.29-wording",
    section="11.3.6",
    kind="exact",
    statement=Text(
        "Dispersed attention goes with high effective rank, concentrated attention with low.",
        "有效秩较高时注意力较为分散，有效秩较低时注意力高度集中。",
    ),
    check=dispersed_is_high_rank,
    case=Case("random heads", random_heads),
    control=Case("heads that sharpen on one column", hub_heads),
    first="false",
    counterexample="""\
import torch, heedful as h
generator = torch.Generator().manual_seed(0)
q, k = torch.randn(2, 256, 64, generator=generator, dtype=torch.float64)
for sharpness in (0.1, 1, 8):
    A = h.Softmax(h.Full()).operator(sharpness * q, k)
    print(h.entropy(A).mean(), h.effective_rank(A).estimate)  # entropy falls, 5.5 to 0.7; rank rises, 1 to 109""",
    corrected=Claim(
        id="T11.29-wording*",
        section="11.3.6",
        kind="exact",
        statement=Text(
            "Effective rank tells how rows differ from each other, entropy how far one row spreads; all four "
            "combinations of low and high occur.",
            "有效秩反映各行之间的差异，熵反映单行内部的分散程度；高低的四种组合都会出现。",
        ),
        check=four_corners,
        case=Case("each row over a random quarter of the keys", own_quarters),
        control=Case("all rows over the same quarter", same_quarter),
    ),
    figure=rank_against_entropy,
)


# ── C11.12: simple tasks give lower effective rank


def rank_by_task(case: str) -> Evidence:
    raise Undecided(
        "decided by a study of fine-tuning that has not run: one model on tasks of graded difficulty, several seeds, "
        "effective rank on held-out text"
    )


C11_12 = Claim(
    id="C11.12",
    section="11.3.6",
    kind="empirical",
    statement=Text(
        "After fine-tuning, attention has lower effective rank the simpler the task.",
        "在特定任务上微调时，有效秩会随任务复杂度调整；简单任务的注意力矩阵通常具有更低的有效秩。",
    ),
    check=rank_by_task,
    case=Case("a simple task against a hard one"),
    control=Case("the same task with another seed"),
    first="empirical",
)


CLAIMS = (L11_43_VALUE, L11_43_ARITH, T11_29_TREND, T11_29_WORDING, C11_12)
