"""5.1.3: queries, keys and values as projections of the input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from heedful.mechanisms import Softmax
from heedful.nn import Attention
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.chapters.scaled_dot_product.common import EPS, layer, project
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, equal, evidence
from heedful.theory.samples import normal

# ── E5.1.2: Q = X W_Q, K = X W_K, V = X W_V


def projects_by(matrix_of: Callable[[nn.Parameter], Tensor]) -> Evidence:
    """A layer without output projection against Attention(XW_Q, XW_K, XW_V); W from the layer's stored weights.

    d_k = d_model, so that a W on its side is a matrix of the same shape; d_v is another.
    """
    n, d_model, d_v = 20, 12, 5
    attention = layer(d_model, seed=0, head_dim=d_model, value_dim=d_v)
    attention.out_proj = nn.Identity()
    x = normal(n, d_model, seed=1)
    with torch.no_grad():
        w_q, w_k = (matrix_of(attention.get_parameter(f"{name}_proj.weight")) for name in "qk")
        w_v = attention.get_parameter("v_proj.weight").mT
        out = Softmax(Full())(x @ w_q, x @ w_k, x @ w_v)
        return evidence(
            equal("rows of W_V", w_v.shape[0], d_model),
            equal("columns of W_V", w_v.shape[1], d_v),
            at_most("distance from XW_Q", (project(attention, x)[0] - x @ w_q).abs().max(), 20 * d_model * EPS),
            at_most("distance from Attention(XW_Q, XW_K, XW_V)", (attention(x) - out).abs().max(), 1e3 * EPS),
        )


E5_1_2 = Claim(
    id="E5.1.2",
    section="5.1.3",
    kind="exact",
    statement=Text(
        "Q = XW_Q, K = XW_K, V = XW_V, with W_Q, W_K of shape d_model × d_k and W_V of shape d_model × d_v.",
        "Q = XW_Q，K = XW_K，V = XW_V，其中 W_Q、W_K 为 d_model × d_k，W_V 为 d_model × d_v。",
    ),
    formula=r"Q=XW_Q,\quad K=XW_K,\quad V=XW_V",
    check=projects_by,
    case=Case("W of shape d_model × d_k", lambda weight: weight.mT),
    control=Case("the transpose, as torch stores it", lambda weight: weight),
)


# ── E5.1.2-allparams: what there is to learn


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def without_output(d: int) -> Attention:
    attention = Attention(d, 1, Softmax(Full()))
    attention.out_proj = nn.Identity()
    return attention


def with_output(d: int) -> Attention:
    return Attention(d, 8, Softmax(Full()))


def three_matrices_are_all(build: Callable[[int], Attention]) -> Evidence:
    attention = build(64)
    three = sum(attention.get_parameter(f"{name}_proj.weight").numel() for name in "qkv")
    return evidence(equal("parameters at d = 64", count(attention), three))


def four_matrices(bias: bool) -> Evidence:
    return evidence(
        *(equal(f"parameters at d = {d}", count(Attention(d, 8, bias=bias)), 4 * d * d + 4 * d) for d in (64, 768))
    )


E5_1_2_ALLPARAMS = Claim(
    id="E5.1.2-allparams",
    section="5.1.3",
    kind="exact",
    statement=Text(
        "These three matrices are all the parameters that attention has to learn.",
        "这三个投影矩阵包含了注意力机制需要学习的全部参数。",
    ),
    formula=r"\theta=\{W_Q,W_K,W_V\}",
    check=three_matrices_are_all,
    case=Case("one head, no output projection", without_output),
    control=Case("eight heads and their output projection", with_output),
    first="conditional",
    condition=Text(
        "A single head, no output projection W_O, no biases.",
        "单头、无输出投影 W_O、无偏置。",
    ),
    corrected=Claim(
        id="E5.1.2-allparams*",
        section="5.1.3",
        kind="exact",
        statement=Text(
            "Multi-head attention learns W_Q, W_K, W_V and W_O: 4d² parameters, and 4d more with biases.",
            "多头注意力要学习 W_Q、W_K、W_V 与 W_O：共 4d² 个参数，带偏置时再加 4d。",
        ),
        formula=r"|\theta|=4d^2+4d",
        check=four_matrices,
        case=Case("with biases", True),
        control=Case("without biases", False),
    ),
)


# ── P5.1.3-3d2: the number of parameters


def three_squares(head_dim: int) -> Evidence:
    attention = Attention(768, 1, head_dim=head_dim, device="meta")
    found = sum(attention.get_parameter(f"{name}_proj.weight").numel() for name in "qkv")
    return evidence(equal("weights of W_Q, W_K, W_V at d = 768", found, 3 * 768**2))


P5_1_3_3D2 = Claim(
    id="P5.1.3-3d2",
    section="5.1.3",
    kind="exact",
    statement=Text(
        "With d_k = d_v = d_model = d the three projections are d × d and have 3d² parameters.",
        "当 d_k = d_v = d_model = d 时，三个投影矩阵都是 d × d 方阵，参数数量为 3d²。",
    ),
    formula=r"3d^2",
    check=three_squares,
    case=Case("d_k = d_model", 768),
    control=Case("d_k = d_model / 12", 64),
)


# ── P5.1.3-squash: d_k < d_model compresses


def forgets_directions(d_k: int) -> Evidence:
    """The kernel of W_Q, and what moving the input of the queries along it does to the weights."""
    d_model = 64
    attention = layer(d_model, seed=0, head_dim=d_k)
    x = normal(20, d_model, seed=1)
    with torch.no_grad():
        w_q = attention.get_parameter("q_proj.weight").mT
        left, values, _ = torch.linalg.svd(w_q)
        rank = int((values > d_model * EPS * values[0]).sum())
        unseen = left[:, rank:]
        q, k, _ = project(attention, x)
        moved = project(attention, x + normal(20, d_model - rank, seed=2) @ unseen.mT)[0]
        change = (attention.mechanism.matrix(moved, k) - attention.mechanism.matrix(q, k)).abs().max()
    return evidence(
        equal("directions that queries can't see", d_model - rank, d_model - d_k),
        at_least("and there are some", d_model - rank, 1),
        at_most("change of the weights along them", change, 1e4 * EPS),
    )


P5_1_3_SQUASH = Claim(
    id="P5.1.3-squash",
    section="5.1.3",
    kind="exact",
    statement=Text(
        "Where d_k < d_model the projection squashes its input into a space of lower dimension, which may regularise.",
        "当 d_k < d_model 时，投影把高维输入压缩到低维空间，这种压缩可能是有益的正则化。",
    ),
    formula=r"\dim\ker W_Q=d_{\mathrm{model}}-d_k>0",
    check=forgets_directions,
    case=Case("64 → 16", 16),
    control=Case("64 → 64", 64),
    first="conditional",
    reason=Text(
        "The compression is exact: 48 of 64 directions leave no trace in the weights. Whether it regularises is a "
        "question to training runs, not decided here; the text only says that it may.",
        "压缩是精确成立的：64 个方向中有 48 个对权重毫无影响。"
        "是否起正则化作用需由训练实验判定，此处不作结论；原文也只说“可能”。",
    ),
)

CLAIMS = (E5_1_2, E5_1_2_ALLPARAMS, P5_1_3_3D2, P5_1_3_SQUASH)
