"""4.4 and the references: the table that compares everything, and a citation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from math import sqrt

import torch

from heedful import nn
from heedful.core import Mechanism
from heedful.mechanisms import FixedPattern, Linear, Softmax
from heedful.nn import Orthogonal
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.studies.results import BLEU
from heedful.theory.claim import Case, Claim, Evidence, Text, Undecided, at_least, at_most, equal, evidence
from heedful.theory.samples import normal
from heedful.theory.study_rows import gap, high

# ── R003-4.4-QKV: who learns Q, K and V


def queries_and_keys_learn(mechanism: Mechanism) -> Evidence:
    """The gradient that reaches queries, keys and values."""
    q, k, v = (x.requires_grad_() for x in normal(3, 20, 8))
    out = mechanism(q, k, v)
    out.backward(normal(*out.shape, seed=1))
    sizes = [0.0 if x.grad is None else float(x.grad.norm()) for x in (q, k, v)]
    return evidence(
        *(at_least(f"gradient in {name}", size, 0.1) for name, size in zip("qkv", sizes, strict=True)),
    )


def trained_parts(build: Callable[[], nn.Attention]) -> Evidence:
    """The parts of a layer of width d that are trained, and how many numbers they hold."""
    layer = build()
    d = layer.embed_dim
    trained = {name.partition(".")[0] for name, _ in layer.named_parameters()}
    return evidence(
        equal("of Q and K, how many are trained", len(trained & {"q_proj", "k_proj"}), 0),
        equal("of V and the output, how many are trained", len(trained & {"v_proj", "out_proj"}), 2),
        equal("trained numbers / d²", sum(p.numel() for p in layer.parameters()) / d**2, 2),
    )


def frozen_and_fixed_train_v(layers: tuple[Callable[[], nn.Attention], ...]) -> Evidence:
    return evidence(*(one for build in layers for one in trained_parts(build).comparisons))


def fixed_layer() -> nn.Attention:
    return nn.Attention(64, heads=8, mechanism=FixedPattern("previous"))


def frozen_layer() -> nn.Attention:
    return nn.Attention(64, heads=8, qk=Orthogonal, seed=0)


def learned_layer() -> nn.Attention:
    return nn.Attention(64, heads=8)


WHO_LEARNS = Claim(
    id="R003-4.4-QKV",
    section="4.4",
    kind="exact",
    statement=Text(
        "Table: fixed attention learns the projections Q/K/V; in orthogonal random attention Q/K/V are orthogonal, "
        "random and frozen.",
        "综合比较表：“Q/K/V 投影”一行，固定注意力为“学习得到”，正交随机注意力为“正交随机+冻结”。",
    ),
    formula=r"\frac{\partial O}{\partial Q},\ \frac{\partial O}{\partial K},\ \frac{\partial O}{\partial V}\ne0",
    check=queries_and_keys_learn,
    case=Case("a fixed head", FixedPattern("previous")),
    control=Case("a softmax head", Softmax(Full())),
    first="conditional",
    counterexample="""\
import torch, heedful as h
q, k, v = (torch.randn(20, 8).requires_grad_() for _ in "qkv")
h.FixedPattern("previous")(q, k, v).square().sum().backward()
print(q.grad.norm(), k.grad.norm(), v.grad.norm())           # 0, 0, 25: nothing reaches Q and K
layer = h.nn.Attention(64, heads=8, mechanism=h.FixedPattern("previous"))
print([name for name, _ in layer.named_parameters()])        # v_proj.weight, out_proj.weight""",
    corrected=Claim(
        id="R003-4.4-QKV*",
        section="4.4",
        kind="exact",
        statement=Text(
            "Fixed heads learn V alone: their weights read no Q and K, which need not exist. Orthogonal random "
            "attention, as 4.2.1 defines it, freezes Q and K and learns V.",
            "固定注意力头只学习 V：其权重与 Q、K 无关，这两个投影根本不需要。"
            "按 4.2.1 的定义，正交随机注意力冻结 Q 与 K，学习 V。",
        ),
        formula=r"4d^2\to2d^2\ \mathrm{trained:}\ W_V,W_O",
        check=frozen_and_fixed_train_v,
        case=Case("fixed heads; frozen Q, K", (fixed_layer, frozen_layer)),
        control=Case("fixed heads; learned Q, K", (fixed_layer, learned_layer)),
    ),
    reason=Text(
        "The first reading took the row for inexact. Its half on fixed heads is false: no gradient reaches their Q and "
        "K. Its other half contradicts the table in 4.2.1, where only Q and K are frozen.",
        "初读认为这一行只是不严谨。其中关于固定注意力的一半是错的：没有梯度到达其 Q、K。"
        "另一半与 4.2.1 的表（只冻结 Q/K）矛盾。",
    ),
)


# ── R003-4.4-express: linear attention and orthogonal random attention are complete

TOKENS, FEATURES = 128, 8


def directions() -> Tensor:
    """Tokens as unit vectors of width 8, times 60: each has its largest score with itself, by far."""
    return 60 * torch.nn.functional.normalize(normal(TOKENS, FEATURES), dim=-1)


def gives_the_identity(mechanism: Mechanism) -> Evidence:
    """Each token attending to itself alone, as far as a mechanism gets for tokens in different directions."""
    x = directions()
    eye = torch.eye(TOKENS, dtype=torch.float64)
    distance = (mechanism.matrix(x, x) - eye).norm() / sqrt(TOKENS)
    return evidence(at_most("distance of A from I, relative", distance, 0.1))


def rank_is_at_most_features(mechanism: Mechanism) -> Evidence:
    """The rank of A, and its distance from I, which is at least √(N − m) for a matrix of rank m (Eckart & Young)."""
    x = directions()
    A = mechanism.matrix(x, x)
    return evidence(
        at_most("rank of A", torch.linalg.matrix_rank(A), FEATURES),
        at_least(
            "distance of A from I",
            (A - torch.eye(TOKENS, dtype=torch.float64)).norm(),
            sqrt(TOKENS - FEATURES),
            slack=1e-12,
        ),
    )


COMPLETE = Claim(
    id="R003-4.4-express",
    section="4.4",
    kind="exact",
    statement=Text(
        "Table: the expressive power of linear attention and of orthogonal random attention is complete.",
        "综合比较表：“表达能力”一行，Linear Attention 与正交随机注意力均为“完整”。",
    ),
    formula=r"\exists\,q,k:\ A_{\mathrm{lin}}(q,k)=I",
    check=gives_the_identity,
    case=Case("linear attention, elu + 1, 8 features", Linear(pattern=Full())),
    control=Case("softmax, width 8", Softmax(Full())),
    first="false",
    counterexample="""\
import torch, heedful as h
torch.manual_seed(0)
x = 60 * torch.nn.functional.normalize(torch.randn(128, 8, dtype=torch.float64), dim=-1)
for attend in (h.Softmax(h.Full()), h.Linear(pattern=h.Full())):
    A = attend.matrix(x, x)                                  # can each token attend to itself alone?
    print(torch.linalg.matrix_rank(A), (A - torch.eye(128)).norm())   # 128, 5e-44; 8, 11.15 > √120""",
    corrected=Claim(
        id="R003-4.4-express*",
        section="4.4",
        kind="exact",
        statement=Text(
            "Linear attention with m features has rank at most m, so that it stays √(N−m) away from the identity and "
            "from any shift: it is restricted. So is attention with frozen Q, K (R003-4.2.2-expressive).",
            "m 个特征的线性注意力秩至多为 m，因此与单位矩阵或任何平移矩阵的距离不小于 √(N−m)：表达能力受限。"
            "冻结 Q、K 的注意力同样受限（R003-4.2.2-expressive）。",
        ),
        formula=r"\operatorname{rank}A\le m,\qquad \|A-I\|_F\ge\sqrt{N-m}",
        check=rank_is_at_most_features,
        case=Case("linear attention, elu + 1, 8 features", Linear(pattern=Full())),
        control=Case("softmax", Softmax(Full())),
    ),
)


# ── R003-4.4-lowres: low-resource performance


def near_the_baseline(cells: tuple[str, ...]) -> Evidence:
    """The 95 % interval of BLEU to learned softmax reaches within a point of it, at 5,000 pairs."""
    study, few = "frozen-projections", "de-5000"
    open_cell = f"orthogonal random attention is at {gap(study, 'orthogonal', 'learned', few, BLEU)} BLEU"
    try:
        known = {cell: gap(study, cell, "learned", few, BLEU) for cell in cells}
    except Undecided as why:
        raise Undecided(f"{why}; the cell that the text leaves open: {open_cell}") from None
    return evidence(
        *(at_least(f"BLEU of {cell} to learned softmax, upper end", high(known[cell]), -1) for cell in cells),
        note=open_cell,
    )


LOW_RESOURCE = Claim(
    id="R003-4.4-lowres",
    section="4.4",
    kind="empirical",
    statement=Text(
        "With few resources linear attention and Performer come close to the baseline; orthogonal random attention is "
        "to be verified.",
        "低资源性能：Linear Attention 与 Performer 接近基准；正交随机注意力待验证。",
    ),
    check=near_the_baseline,
    case=Case("linear attention and Performer", ("linear, learned", "favor+, learned")),
    control=Case("orthogonal random attention", ("orthogonal",)),
    first="empirical",
)


# ── R003-ref8: Shen et al.


@dataclass(frozen=True)
class Citation:
    authors: str
    title: str
    venue: str
    year: int


CITED = Citation("Shen et al.", "Efficient Attention: A Study of Linear Time Transformers", "ICLR", 2021)
PUBLISHED = Citation("Shen et al.", "Efficient Attention: Attention with Linear Complexities", "WACV", 2021)
"""Proceedings of the IEEE/CVF Winter Conference on Applications of Computer Vision, pp. 3531–3539; arXiv:1812.01243."""


def is_the_published_one(citation: Citation) -> Evidence:
    """Field by field against the proceedings' own record at openaccess.thecvf.com."""
    same = [ours == theirs for ours, theirs in zip(astuple(citation), astuple(PUBLISHED), strict=True)]
    return evidence(equal("fields of authors, title, venue, year that agree with the proceedings", sum(same), 4))


REFERENCE = Claim(
    id="R003-ref8",
    section="references",
    kind="exact",
    statement=Text(
        "Reference 8: Shen, Z., et al. (2021). Efficient Attention: A Study of Linear Time Transformers. ICLR 2021.",
        "参考文献 8：Shen, Z., et al. (2021). Efficient Attention: A Study of Linear Time Transformers. ICLR 2021.",
    ),
    check=is_the_published_one,
    case=Case("as cited", CITED),
    control=Case("as in the proceedings", PUBLISHED),
    first="false",
    counterexample="""\
cited = ("Shen et al.", "Efficient Attention: A Study of Linear Time Transformers", "ICLR", 2021)
published = ("Shen et al.", "Efficient Attention: Attention with Linear Complexities", "WACV", 2021)
print([ours == theirs for ours, theirs in zip(cited, published)])   # title and venue differ""",
    corrected=Claim(
        id="R003-ref8*",
        section="references",
        kind="exact",
        statement=Text(
            "Shen, Z., Zhang, M., Zhao, H., Yi, S., Li, H. (2021). Efficient Attention: Attention with Linear "
            "Complexities. WACV 2021, pp. 3531–3539.",
            "应为：Shen, Z., Zhang, M., Zhao, H., Yi, S., Li, H. (2021). Efficient Attention: Attention with Linear "
            "Complexities. WACV 2021, pp. 3531–3539.",
        ),
        check=is_the_published_one,
        case=Case("as in the proceedings", PUBLISHED),
        control=Case("as cited", CITED),
    ),
    reason=Text(
        "Looked up, not computed: the record is that of the proceedings (openaccess.thecvf.com).",
        "此条靠查证而非计算：依据会议论文集的记录（openaccess.thecvf.com）。",
    ),
)

CLAIMS = (WHO_LEARNS, COMPLETE, LOW_RESOURCE, REFERENCE)
