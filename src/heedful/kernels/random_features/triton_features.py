"""Code shared by the kernels of both passes: features from their logarithms, states, weights inside a block."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2


@triton.jit
def numbers_at(pointer, t, left):
    """Load one number per token; zero outside."""
    return tl.load(pointer + t, mask=t < left, other=0.0)


@triton.jit
def logs_of(
    x, W, bias, at,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """x W + c in base 2 for the features from `at` on, W in one or two parts; −∞ for features beyond the last.

    Also returns both parts of W, for the backward pass."""
    cr = at + tl.arange(0, R)
    here = W + tl.arange(0, D)[:, None] * M + cr[None, :]
    high = tl.load(here)
    low = high
    logs = tl.dot(x, high, input_precision=PRECISION)
    if SPLIT:
        low = tl.load(here + D * M)
        logs = tl.dot(x, low, logs, input_precision=PRECISION)
    return logs + tl.load(bias + cr)[None, :], high, low


@triton.jit
def features_of(
    x, peak, W, bias, at,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """2^(x W + c − peak) in (0, 1] for the features from `at` on; also returns W."""
    logs, high, low = logs_of(x, W, bias, at, SPLIT, PRECISION, D, M, R)
    return exp2(logs - peak[:, None]), high, low


@triton.jit
def state_at(slots, sums, column, at, some, OPERAND: tl.constexpr, M: tl.constexpr, R: tl.constexpr):
    """Sᵀ, as an operand, and z for the features from `at` on; zero if there is no state yet (some = 0)."""
    r = at + tl.arange(0, R)
    S = tl.load(slots + column[:, None] * M + r[None, :], mask=(r < some)[None, :], other=0.0)
    return S.to(OPERAND), tl.load(sums + r, mask=r < some, other=0.0)


@triton.jit
def weigh(a, top, s, BLOCK: tl.constexpr, ADJOINT: tl.constexpr):
    """w ∘ a for a[query, key]; with ADJOINT for a[key, query]."""
    i = tl.arange(0, BLOCK)
    if ADJOINT:
        seen = i[None, :] >= i[:, None]
        return a * exp2(tl.where(seen, top[:, None] - s[None, :], float("-inf")))
    else:
        seen = i[:, None] >= i[None, :]
        return a * exp2(tl.where(seen, top[None, :] - s[:, None], float("-inf")))


@triton.jit
def tops_of(tops, climbs, levels, t, left, block, blocks, CAUSAL: tl.constexpr, EVEN_N: tl.constexpr):
    """top and s of a block, and s before and after it."""
    if CAUSAL:
        before = tl.load(levels + block)
        last = tl.load(levels + block + 1)
        top = tl.load(tops + t, mask=t < left, other=float("-inf"))
        s = tl.maximum(numbers_at(climbs, t, left), before)
        if not EVEN_N:
            s = tl.where(t < left, s, last)
    else:
        before = 0.0
        last = tl.load(levels + blocks)
        top = tl.load(tops + t, mask=t < left, other=float("-inf"))
        s = top
    return top, s, before, last
