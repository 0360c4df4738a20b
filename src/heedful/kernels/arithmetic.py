"""Arithmetic that Triton programs share."""

from __future__ import annotations

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    @triton.jit
    def exp2(x):
        return tl.exp2(x)
else:

    @triton.jit
    def exp2(x):
        """2^x with denormals flushed: one instruction, where tl.exp2 takes five to keep them."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
