"""2.3: the patterns of the Sparse Transformer, what they cost, and what two layers of them connect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, sqrt

import torch

from heedful.bench.fits import growth
from heedful.core import Dims, Mechanism
from heedful.mechanisms import Softmax, build
from heedful.patterns import Blocks, Causal, Full, Pattern, SparseFixed, Strided, Window, reach
from heedful.segments import visible
from heedful.shapes import Bool, Tensor
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, equal, evidence

SIZES = ((16, 4), (64, 8), (256, 16), (100, 10))
"""(N, l), mostly with l = √N."""


def reached(layers: Sequence[Pattern], n: int) -> Bool[Tensor, "n n"]:
    """Which inputs j an output i depends on after layers of attention alone, the first layer first."""
    return reach(layers, n, residual=False).connected


# ── R003-strided-def: A¹_i = {max(0, i−l) … i}, A²_i = {j : (i−j) mod l = 0}


def looks_back_only(far: Callable[[int], Pattern]) -> Evidence:
    """Both heads at N = 16, l = 4: what they see, how much of it lies ahead, and whether the library's is the same."""
    n, stride = 16, 4
    near, second = Window(stride), far(stride)
    both = visible(near | second, n, n, None)
    library = visible(build("strided", stride=stride, window=stride).pattern, n, n, None)
    return evidence(
        equal("pairs of the first head", near.pairs(n, n), sum(min(i, stride) + 1 for i in range(n))),
        equal("pairs of the second head", second.pairs(n, n), sum(i // stride + 1 for i in range(n))),
        equal("pairs (i, j) with j > i", int(visible(second, n, n, None).triu(1).sum()), 0),
        equal("pairs in which the catalogue's strided differs", int((both != library).sum()), 0),
    )


STRIDED_DEF = Claim(
    id="R003-strided-def",
    section="2.3.2",
    kind="exact",
    statement=Text(
        "Strided attention: the first head sees t, t+1, …, i with t = max(0, i−l), the second all j with (i−j) mod l = "
        "0.",
        "Strided Attention：第一个头关注 t, t+1, …, i（t = max(0, i−l)），第二个头关注满足 (i−j) mod l = 0 的 j。",
    ),
    formula=r"A_i^{(1)}=\{t,\dots,i\},\ t=\max(0,i-l),\qquad A_i^{(2)}=\{j:(i-j)\ \mathrm{mod}\ l=0\}",
    check=looks_back_only,
    case=Case("the second head with j ≤ i", lambda stride: Strided(stride) & Causal()),
    control=Case("the second head as written", Strided),
    first="conditional",
    condition=Text(
        "The second set needs j ≤ i; as written it looks ahead (64 pairs instead of 40 at N = 16, l = 4). The first "
        "one holds l + 1 positions, the token itself and the l before it.",
        "第二个集合须加上 j ≤ i；照原文字面会看到未来（N = 16、l = 4 时为 64 对而不是 40 对）。"
        "第一个集合含 l + 1 个位置：自身与之前的 l 个。",
    ),
)


# ── R003-NsqrtN: O(N√N)


def grows_like_N_sqrt_N(stride: Callable[[int], int]) -> Evidence:
    """Multiply-adds of strided attention for each unit of width: the exponent, and the constant in front of N√N.

    With l = w = √N a query sees w keys and N/2l on average beyond them, in all 3/2 √N; the ends of the sequence and the
    keys that both heads see change this by less than one key and a half a query.
    """
    pairs = {n: strided_pairs(n, stride(n)) for n in (4096, 16384, 65536, 262144)}
    last = max(pairs)
    fit = growth(pairs)
    assert fit is not None
    return evidence(
        equal("exponent of N", fit.exponent, 1.5, within=0.01),
        equal(f"pairs / N√N at N = {last}", pairs[last] / last**1.5, 1.5, within=1.5 / sqrt(last)),
    )


def strided_pairs(n: int, stride: int) -> float:
    """From the cost, which is two flops a pair and unit of width."""
    attend = Softmax((Strided(stride) | Window(stride - 1)) & Causal())
    return attend.cost(Dims(n, n, d=64, e=64)).flops / (2 * (64 + 64))


def best_stride_is(root: Callable[[int], float]) -> Evidence:
    """Over all strides: the least number of pairs against √2 N√N, and at which stride it is taken."""
    n = 4096
    strides = [round(root(n) * 2 ** (step / 32)) for step in range(-96, 97)]
    pairs = {stride: strided_pairs(n, stride) for stride in strides}
    best = min(pairs, key=lambda stride: pairs[stride])
    return evidence(
        equal("least pairs / N√N", pairs[best] / n**1.5, sqrt(2), within=1.5 / sqrt(n)),
        equal("best stride against its formula", best / root(n), 1.0, within=0.1),
    )


N_SQRT_N = Claim(
    id="R003-NsqrtN",
    section="2.3.2",
    kind="complexity",
    statement=Text("Strided attention takes O(N√N) with l ≈ √N.", "Strided Attention 的复杂度为 O(N√N)（l ≈ √n）。"),
    formula=r"\sum_i |A_i^{(1)}\cup A_i^{(2)}| = O(N\sqrt{N}),\qquad l\approx\sqrt{N}",
    check=grows_like_N_sqrt_N,
    case=Case("l = √N", isqrt),
    control=Case("l = 64 at every length", lambda n: 64),
    corrected=Claim(
        id="R003-NsqrtN*",
        section="2.3.2",
        kind="complexity",
        statement=Text(
            "It takes 2(d+e)·N(l + N/2l) flops; the best stride is √(N/2), not √N, with √2 N√N pairs instead of 3/2.",
            "其计算量为 2(d+e)·N(l + N/2l)；最优步长是 √(N/2) 而不是 √N，此时共 √2·N√N 对，而不是 3/2·N√N。",
        ),
        formula=r"\min_l N\left(l+\frac{N}{2l}\right)=\sqrt{2}\,N^{3/2}\ \mathrm{at}\ l=\sqrt{N/2}",
        check=best_stride_is,
        case=Case("√(N/2)", lambda n: sqrt(n / 2)),
        control=Case("√N", lambda n: sqrt(n)),
    ),
)


# ── R003-2hop: any two positions within two layers


def two_layers_reach(wanted: Callable[[int], int]) -> Evidence:
    """Pairs (i, j) connected by a layer of each head, in both orders."""
    found = []
    for n, stride in SIZES:
        near, far = Window(stride), Strided(stride) & Causal()
        for name, layers in (("window first", (near, far)), ("stride first", (far, near))):
            pairs = int(reached(layers, n).sum())
            found.append(equal(f"pairs reached at N = {n}, l = {stride}, {name}", pairs, wanted(n)))
    return evidence(*found)


def earlier_pairs(n: int) -> int:
    return Causal().pairs(n, n)


def reach_of_windows() -> Figure:
    """How much two layers connect at N = 256, l = 16 as the window grows: all of it once it spans a stride."""
    n, stride = 256, 16
    far, windows = Strided(stride) & Causal(), range(1, 2 * stride + 1)
    lines: dict[str, list[float]] = {"one layer of both": [], "two layers": []}
    for window in windows:
        near = Window(window - 1)
        lines["one layer of both"].append(float(reached((near | far,), n).sum()) / earlier_pairs(n))
        lines["two layers"].append(float(reached((near, far), n).sum()) / earlier_pairs(n))
    return Figure(
        Text("Earlier positions reached, stride 16, N = 256", "可达的先前位置所占比例（步长 16，N = 256）"),
        "window",
        "share of pairs j ≤ i",
        {name: (list(map(float, windows)), shares) for name, shares in lines.items()},
    )


TWO_HOP = Claim(
    id="R003-2hop",
    section="2.3.3",
    kind="exact",
    statement=Text(
        "Strided attention spreads information globally by two hops: any two positions are connected within two "
        "layers.",
        "Strided Attention 通过两跳连接实现全局信息传播：任意两个位置在两层内可达。",
    ),
    formula=r"A^{(1)}\circ A^{(2)}\ni(i,j)\ \forall\,i,j",
    check=two_layers_reach,
    case=Case("pairs with j ≤ i, N(N+1)/2 of them", earlier_pairs),
    control=Case("any two positions, N²", lambda n: n * n),
    first="conditional",
    condition=Text(
        "Only j ≤ i: every position reaches every earlier one, N(N+1)/2 pairs, in either order of the layers, where "
        "the window spans a stride (l keys). Later positions are out of reach of any number of causal layers.",
        "仅限 j ≤ i：每个位置可达所有先前位置，共 N(N+1)/2 对，两层的先后顺序不限，只要窗口覆盖一个步长（l 个键）。"
        "因果层无论多少层都到不了之后的位置。",
    ),
    figure=reach_of_windows,
)


# ── R003-hub: position → nearest hub, hubs ↔ hubs, hence everything in two layers


@dataclass(frozen=True)
class NearestHub(Pattern):
    """A query sees the middle of its own block of `stride`, its nearest hub, and itself; `gather`: hubs see blocks."""

    stride: int
    gather: bool = False

    def allows(self, i, j):
        position, hub = (j, i) if self.gather else (i, j)
        return (hub == position // self.stride * self.stride + self.stride // 2) | (i == j)


@dataclass(frozen=True)
class AmongHubs(Pattern):
    """Hubs see all hubs; every position sees itself."""

    stride: int

    def allows(self, i, j):
        hub = self.stride // 2
        return ((i % self.stride == hub) & (j % self.stride == hub)) | (i == j)


def connects_all(layers: Callable[[int], Sequence[Pattern]]) -> Evidence:
    """Pairs reached of all N², in the better of the two orders of the layers."""
    found = []
    for n, stride in ((16, 4), (64, 8)):
        chosen = layers(stride)
        pairs = max(int(reached(order, n).sum()) for order in (chosen, chosen[::-1]))
        found.append(equal(f"pairs reached at N = {n}, l = {stride}", pairs, n * n))
    return evidence(*found)


def joins_by_a_stop(stop: Callable[[Tensor, Tensor, int], Tensor]) -> Evidence:
    """For every pair j ≤ i: the stride leads from i to the stop, the window from there to j. And many are stops."""
    n, stride = 256, 16
    i, j = torch.tril_indices(n, n)
    middle = stop(i, j, stride)
    joined = (Strided(stride) & Causal()).allows(i, middle) & Window(stride).allows(middle, j) & (middle >= 0)
    stops = middle[(middle != i) & (middle != j)].unique()
    return evidence(
        equal("pairs joined", int(joined.sum()), earlier_pairs(n)),
        at_least("positions that are stops between two others", len(stops), n - 2 * stride),
    )


HUB = Claim(
    id="R003-hub",
    section="2.3.3",
    kind="exact",
    statement=Text(
        "Why two layers do: in layer 1 each position is connected to the nearest hub and itself, in layer 2 hubs are "
        "connected to each other; so any position reaches any other.",
        "第 1 层：每个位置连接到最近的 hub 和它自己；第 2 层：hubs 之间可以相互连接；结果：任意位置 → 任意位置。",
    ),
    formula=r"(\mathrm{hub}\leftrightarrow\mathrm{hub})\circ(i\to\mathrm{hub}(i))=\{1,\dots,N\}^2",
    check=connects_all,
    case=Case("position → hub, hubs ↔ hubs", lambda stride: (NearestHub(stride), AmongHubs(stride))),
    control=Case(
        "three layers: hub ← its block, hubs ↔ hubs, position ← hub",
        lambda stride: (NearestHub(stride, gather=True), AmongHubs(stride), NearestHub(stride)),
    ),
    first="false",
    counterexample="""\
import torch
i, l = torch.arange(16), 4                                       # hubs at 2, 6, 10, 14
hub = i // l * l + l // 2
one = (i[:, None] == i) | (i == hub[:, None])                    # layer 1: nearest hub and itself
two = (i[:, None] == i) | ((i == hub) & (i == hub)[:, None])     # layer 2: hubs among themselves
for A in (one, two), (two, one):
    print(int((A[1].double() @ A[0].double() > 0).sum()), "of", 16 * 16)   # 40 and 76 of 256""",
    corrected=Claim(
        id="R003-hub*",
        section="2.3.3",
        kind="exact",
        statement=Text(
            "The strided pattern has no hubs: i reaches an earlier j by the stop i − l⌊(i−j)/l⌋, a stride from i and "
            "less than l from j, and almost every position is the stop of some pair. Hubs need a third layer.",
            "步进模式没有 hub：i 经由中转位置 i − l⌊(i−j)/l⌋ 到达先前的 j，中转到 i 的距离是 l 的倍数、"
            "到 j 的距离小于 l；几乎每个位置都是某对位置的中转站。用 hub 则需要第三层。",
        ),
        formula=r"i\ \to\ i-l\left\lfloor\frac{i-j}{l}\right\rfloor\ \to\ j",
        check=joins_by_a_stop,
        case=Case("⌊(i−j)/l⌋ strides", lambda i, j, stride: i - (i - j) // stride * stride),
        control=Case("one stride more", lambda i, j, stride: i - ((i - j) // stride + 1) * stride),
    ),
)


# ── R003-fixed-attn: summary cells


def summaries_carry_the_past(second: Callable[[int], Pattern]) -> Evidence:
    """Pairs reached by one's own block, then a layer with summary cells."""
    found = []
    for n, stride in SIZES:
        pairs = int(reached((Blocks(stride) & Causal(), second(stride)), n).sum())
        found.append(equal(f"pairs reached at N = {n}, l = {stride}", pairs, earlier_pairs(n)))
    return evidence(*found)


FIXED_ATTENTION = Claim(
    id="R003-fixed-attn",
    section="2.3.1",
    kind="exact",
    statement=Text(
        "Fixed attention: certain cells summarise the positions before them and pass the information on to all later "
        "cells.",
        "Fixed Attention：特定单元总结先前位置，并将信息传播到所有未来单元。",
    ),
    formula=r"\mathrm{summaries}\circ\mathrm{block}\ \cup\ \mathrm{block}=\{(i,j):j\le i\}",
    check=summaries_carry_the_past,
    case=Case("one's own block and the last cell of every earlier one", lambda stride: SparseFixed(stride) & Causal()),
    control=Case("blocks alone, no summaries", lambda stride: Blocks(stride) & Causal()),
)


# ── R003-local: O(N·w)


def grows_like_N_w(build: Callable[[int], Mechanism]) -> Evidence:
    """Pairs by the cost of a window of w = 65 keys (and of 129): the exponents of N and of w, and the bound N·w."""
    width, n = 65, 8192
    at = {n: window_pairs(build(width), n) for n in (1024, 2048, 4096, 8192)}
    by_length = growth(at)
    assert by_length is not None
    wider = window_pairs(build(2 * width - 1), n) / window_pairs(build(width), n)
    return evidence(
        equal("exponent of N", by_length.exponent, 1, within=0.02),  # the ends miss w²/4 pairs
        equal("129 keys against 65", wider, 129 / 65, within=0.02),
        at_most("pairs at N = 1024, w = 65", at[1024], 1024 * width),
    )


def window_pairs(mechanism: Mechanism, n: int) -> float:
    return mechanism.cost(Dims(n, n, d=64, e=64)).flops / (2 * (64 + 64))


LOCAL = Claim(
    id="R003-local",
    section="2.3.4",
    kind="complexity",
    statement=Text(
        "Local attention sees only neighbours inside a window and takes O(N·w), w the size of the window.",
        "Local Attention：每个位置只关注窗口内的邻居，复杂度 O(N·w)，w 为窗口大小。",
    ),
    formula=r"\mathrm{pairs}\le N\,w",
    check=grows_like_N_w,
    case=Case("a window of w keys around the query", lambda w: Softmax(Window(w // 2, w // 2))),
    control=Case("all keys", lambda w: Softmax(Full())),
)


# ── R003-block: block-sparse is friendly to hardware


def tiles_are_full(pattern: Pattern) -> Evidence:
    """Of the pairs in tiles that a kernel with 64 queries a tile visits, how many it needs."""
    n, rows = 2048, 64
    visited = sum(
        rows * sum(stop - start for start, stop in pattern.spans(lo, lo + rows, n)) for lo in range(0, n, rows)
    )
    return evidence(equal("pairs needed / pairs visited", pattern.pairs(n, n) / visited, 1.0))


BLOCK = Claim(
    id="R003-block",
    section="2.3.4",
    kind="complexity",
    statement=Text(
        "Block-sparse attention cuts the sequence into blocks and defines attention between blocks; it is friendly to "
        "hardware and fits the parallelism of GPUs. Global and local attention combine.",
        "块稀疏注意力将序列分成块，在块级别定义注意力；硬件友好，适合 GPU 并行。全局与局部注意力可以组合。",
    ),
    formula=r"\frac{\mathrm{needed}}{\mathrm{visited}}=1",
    check=tiles_are_full,
    case=Case("blocks of 64", Blocks(64)),
    control=Case("every 32nd key: as many pairs, spread out", Strided(32)),
    first="design",
    reason=Text(
        "A remark on design, of which one thing can be counted: a kernel that works in tiles visits no pair in vain, "
        "whereas as many pairs spread over a stride make it visit everything. Speed on a GPU is not decided here.",
        "这是设计上的说明，其中有一点可以计数：按块（tile）计算的内核没有一对是白算的；同样多的对若按步长分散，则须访问全部。"
        "GPU 上的实际速度不在此判定。",
    ),
)

CLAIMS = (STRIDED_DEF, N_SQRT_N, TWO_HOP, HUB, FIXED_ATTENTION, LOCAL, BLOCK)
