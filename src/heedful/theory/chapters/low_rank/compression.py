"""11.3.6 and 11.3.7: what low rank saves, and the summary."""

from __future__ import annotations

from collections.abc import Callable
from math import e

import torch
from torch import nn

from heedful.core import Dims, Mechanism
from heedful.feature_maps import Elu1, Polynomial
from heedful.mechanisms import Linear, Softmax
from heedful.mechanisms.linformer import Linformer
from heedful.nn import Attention, LoRA
from heedful.patterns import Full
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

CLAIMS = (L11_44_PARAMS, L11_44_SPEED, L11_44_ACC, S_FEATURE)
