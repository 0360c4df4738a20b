"""11.3.6 and 11.3.7: layers of trained models, compression, and the summary."""

from __future__ import annotations

from collections.abc import Callable
from math import e, log

import torch
from torch import nn

from heedful.core import Dims, Mechanism
from heedful.feature_maps import Elu1, Polynomial
from heedful.measures import effective_rank, entropy
from heedful.mechanisms import Linear, Softmax
from heedful.mechanisms.linformer import Linformer
from heedful.nn import Attention, LoRA
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


# ── L11.44-params: 70 to 90 % fewer parameters


def layer(mechanism: Mechanism | None = None) -> Attention:
    """An attention layer of BERT-base's size."""
    return Attention(768, 12, mechanism or Softmax(Full()))


def approximated() -> list[tuple[str, Attention]]:
    linformer = Linformer(512, 256, shared=False)
    return [("linear attention", layer(Linear(Elu1(), Full()))), ("Linformer, k = 256, N = 512", layer(linformer))]


def adapted(rank: int = 8) -> list[tuple[str, Attention]]:
    """Frozen, but for LoRA on all four projections."""
    found = layer()
    found.requires_grad_(False)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(found, name, LoRA(getattr(found, name), rank))
    return [(f"LoRA of rank {rank}, what is trained", found)]


def trained_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def fewer_parameters(layers: Callable[[], list[tuple[str, Attention]]]) -> Evidence:
    whole = trained_parameters(layer())
    return evidence(*(at_most(f"{name}, of softmax's", trained_parameters(m) / whole, 0.3) for name, m in layers()))


def counted_parameters(rank: int) -> Evidence:
    (_, linear), (_, linformer) = approximated()
    [(_, lora)] = adapted()
    whole = 4 * 768**2
    return evidence(
        equal("linear attention", trained_parameters(linear), whole),
        equal("Linformer, beyond the layer's", trained_parameters(linformer) - whole, 2 * 256 * 512),
        equal("LoRA, trained", trained_parameters(lora), 4 * rank * (768 + 768)),
        equal("LoRA, in all", sum(p.numel() for p in lora.parameters()), whole + 4 * rank * (768 + 768)),
    )


L11_44_PARAMS = Claim(
    id="L11.44-params",
    section="11.3.6",
    kind="exact",
    statement=Text(
        "Low-rank approximation cuts the number of parameters by 70 to 90 %.",
        "基于低秩近似，参数量通常可减少 70–90%。",
    ),
    check=fewer_parameters,
    case=Case("linear attention and Linformer in place of softmax", approximated),
    control=Case("what LoRA trains", adapted),
    first="false",
    counterexample="""\
import heedful as h
for mechanism in (h.Softmax(h.Full()), h.Linear(pattern=h.Full()), h.Linformer(512, 256, shared=False)):
    layer = h.nn.Attention(768, 12, mechanism)
    print(sum(p.numel() for p in layer.parameters()))       # 2359296, the same, and 262144 more""",
    corrected=Claim(
        id="L11.44-params*",
        section="11.3.6",
        kind="exact",
        statement=Text(
            "Attention matrices have no parameters: linear attention keeps all of a layer's, Linformer adds 2kN. What "
            "falls, to 2 % at rank 8, is the number that LoRA trains, not the number there is.",
            "注意力矩阵没有参数：线性注意力保留该层的全部参数，Linformer 增加 2kN 个。减少（秩 8 时降至 2%）的是 LoRA "
            "要训练的参数量，而非总参数量。",
        ),
        formula=r"\mathrm{Linformer}:\ +2kN,\qquad \mathrm{LoRA}:\ 2rd\ \mathrm{of}\ d^2\ \mathrm{trained}",
        check=counted_parameters,
        case=Case("rank 8", 8),
        control=Case("rank 16 said of a LoRA of rank 8", 16),
    ),
)


# ── L11.44-speed: linear attention is 2 to 5 times faster


def speedup(n: int) -> float:
    """Flops of a layer of width 768 with 12 heads, softmax over linear: projections and MLP take 24d² a token."""
    dims, others = Dims(n, n, 64, 64, batch=12), 24 * n * 768**2
    return (Softmax(Full()).cost(dims).flops + others) / (Linear(Elu1(), Full()).cost(dims).flops + others)


def two_to_five_times(n: int) -> Evidence:
    return evidence(
        at_least(f"flops, softmax over linear, N = {n}", speedup(n), 2),
        at_most(f"flops, softmax over linear, N = {n}", speedup(n), 5),
    )


def lengths_of_speedup(m: int) -> Evidence:
    """The ratio is (24d + 4N)/(24d + 4m)."""
    return evidence(
        equal("ratio at N = 6d + 2m", speedup(6 * 768 + 2 * m), 2, within=1e-9),
        equal("ratio at N = 24d + 5m", speedup(24 * 768 + 5 * m), 5, within=1e-9),
    )


def speedup_by_length() -> Figure:
    sizes = [2**p for p in range(7, 17)]
    title = Text("Flops of a layer (d = 768), softmax over linear", "一层的浮点运算量之比（d = 768），softmax 比线性")
    lines = {"ratio": ([float(n) for n in sizes], [speedup(n) for n in sizes])}
    return Figure(title, "N", "ratio", lines, log_x=True, log_y=True)


L11_44_SPEED = Claim(
    id="L11.44-speed",
    section="11.3.6",
    kind="complexity",
    statement=Text(
        "Linear attention makes inference 2 to 5 times faster.", "推理速度提升：线性注意力可实现 2–5 倍加速。"
    ),
    formula=r"\frac{24d+4N}{24d+4m}\in[2,5]",
    check=two_to_five_times,
    case=Case("N = 8192", 8192),
    control=Case("N = 512, the length of the text's example", 512),
    first="conditional",
    condition=Text(
        "By flops of a whole layer at d = 768, where N is 4.7 to 18.8 thousand; at N = 512 it is 1.1 times. Below "
        "6d tokens most work is not attention.",
        "按整层的浮点运算量计（d = 768），仅当 N 约为 4.7 千至 18.8 千时成立；N = 512 时只有 1.1 倍。"
        "长度低于 6d 时大部分计算不在注意力上。",
    ),
    corrected=Claim(
        id="L11.44-speed*",
        section="11.3.6",
        kind="complexity",
        statement=Text(
            "With m features a head a layer takes (24d + 4N)/(24d + 4m) times fewer flops: 2 at N = 6d + 2m, 5 at "
            "N = 24d + 5m.",
            "每个头 m 个特征时，一层的运算量之比为 (24d + 4N)/(24d + 4m)：N = 6d + 2m 时为 2 倍，"
            "N = 24d + 5m 时为 5 倍。",
        ),
        formula=r"\frac{24d+4N}{24d+4m}",
        check=lengths_of_speedup,
        case=Case("m = 64", 64),
        control=Case("m = 256", 256),
    ),
    figure=speedup_by_length,
)


# ── L11.44-acc: accuracy falls by less than 1 %


def accuracy_is_kept(case: str) -> Evidence:
    raise Undecided(
        "decided by a study that has not run: models trained alike with and without the approximation, several tasks, "
        "several seeds"
    )


L11_44_ACC = Claim(
    id="L11.44-acc",
    section="11.3.6",
    kind="empirical",
    statement=Text("Accuracy falls by less than 1 % on most tasks.", "精度保持：在大多数任务上精度损失小于 1%。"),
    check=accuracy_is_kept,
    case=Case("low-rank attention against softmax"),
    control=Case("no attention at all"),
    first="empirical",
)


# ── S11.3.7-feature: kernelised attention is a dot product in a high-dimensional space


def dot_products_of_features(degree: int) -> Evidence:
    """e^(q·k/2) on the unit square, by the features of its series."""
    x = torch.rand(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    phi = Polynomial(degree, scale=0.5)
    error = (phi.query(x) @ phi.key(x).mT - (x @ x.mT / 2).exp()).abs().max()
    rounding = phi.dim(2) * torch.finfo(x.dtype).eps * e  # of a sum of so many terms that comes to e at most
    return evidence(at_most(f"largest error, {phi.dim(2)} features", error, rounding))


S_FEATURE = Claim(
    id="S11.3.7-feature",
    section="11.3.7",
    kind="exact",
    statement=Text(
        "Kernelised attention is mathematically equal to dot products in a high-dimensional feature space.",
        "这种转化在数学上等价于在高维特征空间中计算点积。",
    ),
    formula=r"e^{q\cdot k}=\langle\phi(q),\phi(k)\rangle",
    check=dot_products_of_features,
    case=Case("the series of exp to degree 15", 15),
    control=Case("to degree 2, as in Taylor features", 2),
    first="conditional",
    condition=Text(
        "In the limit of infinitely many features (or in expectation over random ones): no finite number gives exp "
        "exactly, and its degree grows with the logits.",
        "须取无穷多个特征的极限（或对随机特征取期望）：任何有限个特征都不能精确给出 exp，且所需次数随 logits 增大。",
    ),
)

CLAIMS = (
    L11_43_VALUE,
    L11_43_ARITH,
    T11_29_TREND,
    T11_29_WORDING,
    C11_12,
    L11_44_PARAMS,
    L11_44_SPEED,
    L11_44_ACC,
    S_FEATURE,
)
