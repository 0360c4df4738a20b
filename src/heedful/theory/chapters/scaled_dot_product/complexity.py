"""5.1.6: operations and storage, by counting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.core import Dims
from heedful.kernels.dispatch import backend
from heedful.mechanisms import Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.testing.flops import FlopCounter
from heedful.theory.chapters.scaled_dot_product.common import EPS, exponent, layer
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_most, equal, evidence
from heedful.theory.samples import normal


class Written(TorchDispatchMode):
    """Inside this block: how many numbers operations wrote, and how many the largest tensor among them has."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not func.is_view]
        self.total += sum(sizes)
        self.largest = max([self.largest, *sizes])
        return out


# ── C5.1.6-time: O(n² d)

Flops = Callable[[int, int], int]


def of_attention(n: int, d: int) -> int:
    """What runs from q, k, v on."""
    q, k, v = normal(3, n, d, seed=0).unbind()
    with FlopCounter() as counter:
        Softmax(Full())(q, k, v)
    return counter.flops


def of_layer(n: int, d: int) -> int:
    """What runs from x on, projections included."""
    attention, x = layer(d, seed=0), normal(n, d, seed=1)
    with torch.no_grad(), FlopCounter() as counter:
        attention(x)
    return counter.flops


def numbers_of_softmax(n: int, d: int) -> int:
    """What is written while the weights are formed: scores, exponentials, sums, quotients."""
    q, k = normal(2, n, d, seed=0).unbind()
    with Written() as written:
        Softmax(Full()).matrix(q, k)
    return written.total


def grows_like_n2_d(flops: Flops) -> Evidence:
    """Exponents of what is counted: exact, but for the row sums (n beside n²) of softmax."""
    lengths, widths = (64, 128, 256, 512), (16, 32, 64, 128)
    return evidence(
        equal("exponent of n in the products", exponent(lengths, [flops(n, 64) for n in lengths]), 2, within=1e-9),
        equal("exponent of d in the products", exponent(widths, [flops(64, d) for d in widths]), 1, within=1e-9),
        equal("products at n = 512, d = 64, over n²d", flops(512, 64) / (512**2 * 64), 4),
        equal(
            "exponent of n in softmax", exponent(lengths, [numbers_of_softmax(n, 64) for n in lengths]), 2, within=0.05
        ),
        equal(
            "exponent of d in softmax", exponent(widths, [numbers_of_softmax(64, d) for d in widths]), 0, within=1e-9
        ),
    )


def counts_projections(projections: int) -> Evidence:
    """4n²d + 2·projections·nd², and their ratio n/2d."""
    sizes = ((64, 32), (128, 256), (512, 64), (128, 768))
    return evidence(
        *(
            equal(f"flops of a layer, n = {n}, d = {d}", of_layer(n, d), 4 * n * n * d + 2 * projections * n * d * d)
            for n, d in sizes
        ),
        equal(
            "attention over projections at n = 128, d = 768", of_attention(128, 768) / (8 * 128 * 768**2), 128 / 1536
        ),
    )


def attention_against_projections() -> Figure:
    lengths = [2**step for step in range(6, 15)]
    core = [Softmax(Full()).cost(Dims(n, n, 768, 768)).flops for n in lengths]
    lines = {"QKᵀ and PV": (lengths, core), "projections": (lengths, [8 * n * 768**2 for n in lengths])}
    title = Text("Flops of a layer, d = 768: the lines meet at n = 2d", "一层的浮点运算量（d = 768）：两线交于 n = 2d")
    return Figure(title, "n", "flops", lines, log_x=True, log_y=True)


C5_1_6_TIME = Claim(
    id="C5.1.6-time",
    section="5.1.6",
    kind="complexity",
    statement=Text(
        "QKᵀ takes O(n²d), softmax O(n²), PV O(n²d_v): in all O(n²d).",
        "QKᵀ 为 O(n²d)，Softmax 为 O(n²)，值聚合为 O(n²d_v)，总时间复杂度为 O(n²d)。",
    ),
    formula=r"O(n^2d)+O(n^2)+O(n^2d_v)=O(n^2d)",
    check=grows_like_n2_d,
    case=Case("from q, k, v on", of_attention),
    control=Case("a whole layer, from x on", of_layer),
    first="conditional",
    condition=Text(
        "Q, K and V are given. The four projections of a layer take 8nd² more, which is most of the work while n < 2d.",
        "Q、K、V 已给定。一层的四个投影另需 8nd² 次运算，当 n < 2d 时占大部分。",
    ),
    corrected=Claim(
        id="C5.1.6-time*",
        section="5.1.6",
        kind="complexity",
        statement=Text(
            "A layer takes 4n²d + 8nd² flops; attention is n/2d of the projections: a twelfth at n = 128, d = 768.",
            "一层共需 4n²d + 8nd² 次浮点运算；注意力与投影之比为 n/2d：n = 128、d = 768 时为十二分之一。",
        ),
        formula=r"4n^2d+8nd^2=O(n^2d+nd^2)",
        check=counts_projections,
        case=Case("four projections", 4),
        control=Case("three, without the output", 3),
    ),
    figure=attention_against_projections,
)


# ── C5.1.6-space: O(n²) numbers

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax(Full()).matrix(q, k) @ v


def by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fast path in plain torch, so that all that it allocates is seen; a fused kernel keeps less still."""
    with backend("torch"):
        return Softmax(Full())(q, k, v)


LENGTHS = (256, 512, 1024, 2048)


def largest(attend: Attend, n: int) -> int:
    q, k, v = normal(3, n, 16, seed=0).unbind()
    with Written() as written:
        attend(q, k, v)
    return written.largest


def stores_n2(attend: Attend) -> Evidence:
    found = [largest(attend, n) for n in LENGTHS]
    return evidence(
        equal("numbers in the largest tensor, n = 2048", found[-1], 2048**2),
        equal("exponent of n", exponent(LENGTHS, found), 2, within=1e-9),
    )


def stores_n(attend: Attend) -> Evidence:
    q, k, v = normal(3, 2048, 16, seed=0).unbind()
    difference = (attend(q, k, v) - Softmax(Full())(q, k, v)).abs()
    return evidence(
        at_most("exponent of n", exponent(LENGTHS, [largest(attend, n) for n in LENGTHS]), 1, slack=1e-9),
        at_most("distance from a fused kernel's output", difference.max(), 2048 * EPS),
    )


C5_1_6_SPACE = Claim(
    id="C5.1.6-space",
    section="5.1.6",
    kind="complexity",
    statement=Text(
        "The score matrix S and the weights P both need O(n²) storage.",
        "注意力分数矩阵 S 和注意力权重矩阵 P 都需要 O(n²) 的存储空间。",
    ),
    formula=r"S,P\in\mathbb{R}^{n\times n}:\ O(n^2)",
    check=stores_n2,
    case=Case("the matrix is formed", by_matrix),
    control=Case("by tiles of the scores", by_tiles),
    first="conditional",
    condition=Text(
        "S and P are formed as matrices; the output does not need them.",
        "S 与 P 被实际构造为矩阵；而计算输出并不需要它们。",
    ),
    corrected=Claim(
        id="C5.1.6-space*",
        section="5.1.6",
        kind="complexity",
        statement=Text(
            "The same output takes O(nd) storage when scores are visited in tiles of rows, or of rows and columns with "
            "a running log-sum-exp.",
            "按行分块（或按行列分块并维护 log-sum-exp）访问分数时，同样的输出只需 O(nd) 存储。",
        ),
        formula=r"O(nd)",
        check=stores_n,
        case=Case("by tiles of the scores", by_tiles),
        control=Case("the matrix is formed", by_matrix),
    ),
)


# ── C5.1.6-par: an explanation

C5_1_6_PAR = Claim(
    id="C5.1.6-par",
    section="5.1.6",
    kind="wording",
    statement=Text(
        "That it runs in parallel is the fundamental reason why the Transformer is so much more efficient than an RNN.",
        "这种并行性是 Transformer 相比 RNN 在计算效率上具有巨大优势的根本原因。",
    ),
    first="design",
    reason=Text(
        "That all positions are computed at once is P5.1-path; which reason is the fundamental one is an opinion.",
        "所有位置可同时计算，即 P5.1-path 中的一跳；何为“根本原因”则是看法，无可判定。",
    ),
)

CLAIMS = (C5_1_6_TIME, C5_1_6_SPACE, C5_1_6_PAR)
