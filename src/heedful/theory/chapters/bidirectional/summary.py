"""6: do FlashAttention and Perceiver break the low-rank bottleneck?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from heedful.core import Mechanism
from heedful.measures.spectrum import numerical_rank
from heedful.mechanisms import Perceiver, Softmax
from heedful.patterns import Full, Window
from heedful.shapes import Tensor
from heedful.theory.chapters.bidirectional.heads import gaussian, rank_of
from heedful.theory.claim import Case, Claim, Evidence, Text, at_least, at_most, evidence

# ── N004-flash


def by_fast_path(mechanism: Mechanism) -> Callable[[Tensor, Tensor], Tensor]:
    """The matrix that the fused, tiled computation applies: its output for values that are the identity."""

    def weights(q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            return mechanism(q, k, torch.eye(len(k), dtype=k.dtype))

    return weights


def raises_rank(fast: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> Evidence:
    """Effective rank on a random head of 256 tokens, against the definition of softmax attention."""
    q, k = gaussian(256, 32, 2.0, 0)
    plain = rank_of(Softmax(Full()).matrix(q, k))
    return evidence(
        *(at_least(f"effective rank, {name}", rank_of(each(q, k)), plain + 1) for name, each in fast.items())
    )


def leaves_rank(fast: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> Evidence:
    """The same matrix to rounding where it is exact; no more than its latents where it is not."""
    q, k = gaussian(256, 32, 2.0, 0)
    exact = Softmax(Full()).matrix(q, k)
    return evidence(
        at_most(
            "largest difference of the fused weights from the definition",
            (fast["fused"](q, k) - exact).abs().max(),
            1e-12,
        ),
        at_most("rank of Perceiver with 16 latents, N = 256", numerical_rank(fast["Perceiver"](q, k)), 16),
    )


FUSED = {"fused": by_fast_path(Softmax(Full())), "Perceiver": by_fast_path(Perceiver(d=32, latents=16))}
LOCAL = {"fused": by_fast_path(Softmax(Window(4, 4))), "Perceiver": by_fast_path(Softmax(Window(4, 4)))}

FLASH = Claim(
    id="N004-flash",
    section="6",
    kind="exact",
    statement=Text(
        "Current research (such as Perceiver and FlashAttention) tries to break the low-rank bottleneck at its root.",
        "当前的研究（如 Perceiver、FlashAttention）也在尝试从根本上突破（低秩）这一瓶颈。",
    ),
    check=raises_rank,
    case=Case("fused softmax (FlashAttention), Perceiver with 16 latents", FUSED),
    control=Case("a window of 4 tokens on each side", LOCAL),
    first="false",
    counterexample="""\
import torch, heedful as h
q, k = torch.randn(2, 256, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
I = torch.eye(256, dtype=torch.float64)
flash = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], I[None])[0]    # its weights, by A·I
print((flash - torch.softmax(q @ k.T / 32 ** 0.5, -1)).abs().max())                       # 1e-16: the same matrix
print(torch.linalg.matrix_rank(h.Perceiver(d=32, latents=16)(q, k, I)))                   # at most 16 of 256""",
    corrected=Claim(
        id="N004-flash*",
        section="6",
        kind="exact",
        statement=Text(
            "FlashAttention computes the same matrix product with less traffic, so that the rank is what it was; M "
            "latents bound the rank of Perceiver by M, which lowers it. They address cost, not rank.",
            "FlashAttention 计算的是同一个矩阵乘积，只是访存更少，秩不变；"
            "Perceiver 的 M 个隐变量使秩至多为 M，是降低而非提高。它们解决的是开销，不是秩。",
        ),
        formula=r"\operatorname{rank}A_{\mathrm{Perceiver}}\le M",
        check=leaves_rank,
        case=Case("fused softmax, Perceiver", FUSED),
        control=Case("a window of 4 tokens on each side", LOCAL),
    ),
)

CLAIMS = (FLASH,)
