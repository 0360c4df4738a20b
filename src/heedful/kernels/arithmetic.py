"""Arithmetic shared by the Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from heedful.kernels.chunked_linear import chunks
from heedful.kernels.chunked_linear.groups import LEAST

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(LEAST[torch.float32])
FAINT = tl.constexpr(chunks.FAINT[torch.float32])

if triton.knobs.runtime.interpret:

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def times(x, y):
        return x * y

    @triton.jit
    def tf32(x):
        return x  # the interpreter's products are exact
else:

    @triton.jit
    def exp2(x):
        """2^x with denormals flushed to zero: one instruction; tl.exp2 takes five to preserve them."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def times(x, y):
        """x · y rounded on its own, so that all kernels get the same number: a compiler may fuse x · y into a sum."""
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def tf32(x):
        """x as tensor cores read a float32 operand: without its last 13 bits."""
        return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(den):
    """1 / den; zero where |den| is below the smallest normal float32, as for a row that attends to nothing."""
    some = tl.abs(den) >= TINY
    return tl.where(some, 1 / tl.where(some, den, 1.0), 0.0)


@triton.jit
def link(keep1, x1, keep2, x2):
    """Compose two steps of x ← keep · x + own into one, for an associative scan."""
    return keep1 * keep2, x1 * keep2 + x2
