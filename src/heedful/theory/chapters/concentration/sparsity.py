"""Sparsity: S(x) = E|x| / √E[x²] as a measure of concentration."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch

from heedful.shapes import Tensor
from heedful.theory.chapters.concentration.samples import of_row
from heedful.theory.claim import Case, Claim, Evidence, Text, at_most, equal, evidence

Spread = tuple[int, int]
"""(n, w): w of n weights are equal, the others are zero."""


# ── S002-S-def: the smaller S, the nearer to one-hot


def spread_over(n: int, w: int) -> Tensor:
    return (torch.arange(n) < w).double()


def smaller_is_sparser(pair: tuple[Spread, Spread]) -> Evidence:
    """Of two rows the one with the smaller S takes part with fewer tokens; S of w among n is √(w/n)."""
    small, large = (of_row(spread_over(*each)) for each in pair)
    return evidence(
        *(
            equal(f"S of {w} tokens of {n}", found.rows[0], sqrt(w / n), within=1e-15)
            for (n, w), found in zip(pair, (small, large), strict=True)
        ),
        at_most("S, first against second", small.rows[0], large.rows[0]),
        at_most("tokens that take part, first against second", small.participation[0], large.participation[0]),
    )


S_DEFINITION = Claim(
    id="S002-S-def",
    section="sparsity",
    kind="exact",
    statement=Text(
        "S(x) = E|x| / √E[x²] measures sparsity: the smaller S, the sparser, and the more likely one entry dominates "
        "(one-hot), as with entropy.",
        "S(x) = E|x| / √E[x²]：S 越小意味着对应的随机向量越稀疏，越有可能“一家独大”（one hot），与信息熵相似。",
    ),
    formula=r"S(x)=\frac{\mathbb E|x|}{\sqrt{\mathbb E[x^2]}},\qquad \frac1{\sqrt n}\le S\le 1",
    check=smaller_is_sparser,
    case=Case("1 and 100 tokens of 100", ((100, 1), (100, 100))),
    control=Case("100 tokens of a million, and 1 of 100", ((1_000_000, 100), (100, 1))),
    first="conditional",
    condition=Text(
        "Rows of the same length n are compared. Across lengths use the participation n·S² = (Σ|a|)²/Σa²: S = 0.01 "
        "at n = 10⁶ still spreads over 100 tokens.",
        "比较的是相同长度 n 的向量。不同长度之间应比较 n·S² = (Σ|a|)²/Σa²："
        "n = 10⁶ 时 S = 0.01 仍分散在 100 个 token 上。",
    ),
)


# ── S002-entropy-scope: entropy is for probabilities, S for any vector


def takes_any_vector(measure: Callable[[Tensor], float]) -> Evidence:
    """The same number whatever the scale and the sign of the weights."""
    x = torch.tensor([0.5, 2.0, 3.0, 0.25], dtype=torch.float64)
    return evidence(
        equal("3x against x", measure(3 * x), measure(x), within=1e-15),
        equal("x with signs against x", measure(x * torch.tensor([1, -1, 1, -1])), measure(x), within=1e-15),
    )


def S_of(x: Tensor) -> float:
    return float(of_row(x).rows[0])


def entropy_of(x: Tensor) -> float:
    """−Σ x ln x, of numbers that need not be probabilities; −∞ where one is negative."""
    return float(torch.special.entr(x).sum())


ENTROPY_SCOPE = Claim(
    id="S002-entropy-scope",
    section="sparsity",
    kind="exact",
    statement=Text(
        "Weights that are not normalised, or not even non-negative, have no entropy; S applies to any vector.",
        "信息熵只针对概率分布，不适用于非归一化乃至未必非负的 Attention 矩阵；S 适用于一般的随机变量或者向量。",
    ),
    formula=r"S(cx)=S(x)\quad(c\ne0)",
    check=takes_any_vector,
    case=Case("S", S_of),
    control=Case("−Σ x ln x", entropy_of),
    reason=Text(
        "The text has “乃至非负的” where “not even non-negative” is meant. (The entropy of |a|/Σ|a| does exist, and "
        "heedful.entropy is that one.)",
        "原文“乃至非负的”应为“乃至未必非负的”。（|a|/Σ|a| 的熵总是存在，heedful.entropy 即为此。）",
    ),
)

CLAIMS = (S_DEFINITION, ENTROPY_SCOPE)
