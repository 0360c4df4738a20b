"""Summary: which mechanisms can be sparse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.feature_maps import Relu
from heedful.measures import concentration
from heedful.mechanisms import Linear, Softmax
from heedful.patterns import Full
from heedful.shapes import Tensor
from heedful.theory.claim import Case, Claim, Evidence, Figure, Text, at_least, at_most, evidence

# ── S002-summary: quadratic attention can be sparse, linear attention hardly

Tokens = Callable[[int], tuple[Tensor, Tensor]]


def gaussian(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, n, 16, generator=generator, dtype=torch.float64).unbind()
    return q, k


def one_hot(n: int) -> tuple[Tensor, Tensor]:
    """Keys that share no feature, each with its query: as many features as tokens."""
    unit = torch.eye(n, dtype=torch.float64)
    return unit, unit


def share_in_part(tokens: Tokens, size: float, n: int) -> dict[str, float]:
    """The mean share of n keys that take part, with q times `size`."""
    q, k = tokens(n)
    mechanisms = {"softmax": Softmax(Full(), scale=1.0), "linear (relu features)": Linear(Relu(), Full())}
    return {
        name: float(concentration(each.operator(size * q, k)).participation.mean()) / n
        for name, each in mechanisms.items()
    }


def only_softmax_is_sparse(tokens: Tokens) -> Evidence:
    """512 tokens, q made 32 times as large: softmax comes down to a few keys, linear attention stays with a quarter."""
    n = 512
    large = share_in_part(tokens, 32.0, n)
    return evidence(
        at_most("tokens that take part, softmax", large["softmax"] * n, 2),
        at_least("share of tokens that take part, linear", large["linear (relu features)"], 0.25),
    )


def share_against_size() -> Figure:
    sizes = [2.0**i for i in range(-4, 6)]
    found = [share_in_part(gaussian, size, 512) for size in sizes]
    title = Text("Share of keys that take part as q grows", "q 增大时参与的 key 的比例")
    lines = {name: (sizes, [each[name] for each in found]) for name in found[0]}
    return Figure(title, "‖q‖, relative", "n·S² / n", lines, log_x=True, log_y=True)


SUMMARY = Claim(
    id="S002-summary",
    section="summary",
    kind="exact",
    statement=Text(
        "Quadratic attention can make attention matrices as sparse as one likes; linear attention does not easily do "
        "so, or only by absolute position.",
        "二次型 Attention 机制有可能实现任意稀疏的 Attention 矩阵，线性 Attention 则并不容易实现这种稀疏，"
        "或者只能实现绝对位置相关的稀疏。",
    ),
    check=only_softmax_is_sparse,
    case=Case("Gaussian tokens, 16 features", gaussian),
    control=Case("512 keys that share no feature: linear attention is one-hot", one_hot),
    first="conditional",
    condition=Text(
        "Dense keys and far fewer features than tokens; and for softmax a spread of scores above √(2 ln n). With keys "
        "that share no feature, linear attention is one-hot too.",
        "key 是稠密的，且特征数远少于 token 数；对 softmax 还要求分数的标准差超过 √(2 ln n)。"
        "若各 key 的特征互不重叠，线性 Attention 同样是 one-hot。",
    ),
    figure=share_against_size,
)

CLAIMS = (SUMMARY,)
