"""Code shared by the kernels of both passes: sums of gates, factors of features, the states of chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LOG2E, exp2
from heedful.kernels.launching import SIXFOLD
from heedful.kernels.triton_tiles import features, read

EXACTLY = tl.constexpr(SIXFOLD)


SHUT = tl.constexpr(-150.0)  # 2 to this power is 0 in float32, and zero times it is zero


if triton.knobs.runtime.interpret:

    @triton.jit
    def rounded(x, OPERAND: tl.constexpr):
        return x
else:

    @triton.jit
    def rounded(x, OPERAND: tl.constexpr):
        """x rounded to the operand's type, in float32; two elements at a time: one alone takes as long as eight."""
        if tl.bfloat16 == OPERAND:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
                "=f,=f,f,f",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        else:
            return x


@triton.jit
def place(chunks, span, H: tl.constexpr, PARTS: tl.constexpr):
    """The part of the split axis, chunk, row, batch entry, head and first token of this program."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    return part, chunk, row, row // H, row % H, chunk * span


@triton.jit
def tokens_of(code, start, n, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr):
    """For the block at `start`: which tokens are real, their runs, and whether a state enters, leaves, stays (1, 0)."""
    t = start + tl.arange(0, BLOCK)
    real = t < n
    run = tl.zeros([BLOCK], tl.int32)
    enters = tl.full([BLOCK], 1.0, tl.float32)
    leaves = enters
    stays = 1.0
    if SEGMENTS:
        c = tl.load(code + t, mask=real, other=-1)
        run = tl.maximum(c, -1 - c)
        before = tl.load(code + start - 1, mask=start > 0, other=0)
        before = tl.maximum(before, -1 - before)
        last = tl.load(code + tl.minimum(start + BLOCK, n) - 1)
        last = tl.maximum(last, -1 - last)
        real = real & (c >= 0)
        enters = tl.where(run == before, 1.0, 0.0)
        leaves = tl.where(run == last, 1.0, 0.0)
        stays = tl.where(before == last, 1.0, 0.0)
    return real, run, enters, leaves, stays


@triton.jit
def gates_of(pointer, t, stride, column, width, real, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """A tile of log-gates in base 2, channels × tokens; 0 (no fading) outside and at padding."""
    x = tl.trans(read(pointer, t, stride, column, width, real, EVEN_N, EVEN_C)).to(tl.float32) * LOG2E
    return tl.where(x < SHUT, SHUT, x)


@triton.jit
def sums_of(x, which, OPERAND: tl.constexpr):
    """Sums of columns of x, selected by a matrix of zeros and ones."""
    if tl.bfloat16 == OPERAND:
        chosen = tl.where(which, 1.0, 0.0).to(tl.bfloat16)
        high = rounded(x, OPERAND)
        return tl.dot((x - high).to(tl.bfloat16), chosen, tl.dot(high.to(tl.bfloat16), chosen))
    else:
        return tl.dot(x, tl.where(which, 1.0, 0.0), input_precision=EXACTLY)


@triton.jit
def places_of(t, R: tl.constexpr, OPERAND: tl.constexpr):
    """Token places for `sums_of`; if constant, their matrices stay in shared memory, where wide products read them."""
    if tl.bfloat16 == OPERAND and R >= 64:
        return tl.arange(0, t.shape[0])
    else:
        return t


@triton.jit
def left_inside(x, b, OPERAND: tl.constexpr):
    """The factor at each token on what was there before the block."""
    return exp2(sums_of(x, b[:, None] <= b[None, :], OPERAND))


@triton.jit
def left_after(x, b, OPERAND: tl.constexpr):
    """The factor after the block on what each token adds."""
    return exp2(sums_of(x, b[:, None] > b[None, :], OPERAND))


@triton.jit
def between_halves(x, b, k: tl.constexpr, OPERAND: tl.constexpr):
    """Factors between halves of 2^k tokens: from the middle to a token of the later half, from an earlier one to it."""
    u, i = b[:, None], b[None, :]
    later = ((i >> k) & 1) == 1
    return exp2(sums_of(x, (((i ^ u) >> k) == 0) & ((u <= i) == later), OPERAND))


@triton.jit
def phi_of(pointer, t, stride, column, width, real, FEATURE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr,
         CLEAR: tl.constexpr):  # fmt: skip
    """A tile of features, channels × tokens."""
    return tl.trans(
        features(pointer, pointer, pointer, t, 0, stride, column, width, real, FEATURE, False, EVEN_N, EVEN_C, CLEAR)
    )


@triton.jit
def pairs_of(t, ADJOINT: tl.constexpr):
    """For [query, key], or [key, query] with ADJOINT: i xor j where i > j (its highest bit is the level); −1 on the
    diagonal, 0 elsewhere. From t, not from a constant, so that no level's mask stays in registers during the loop."""
    a, b = t[:, None], t[None, :]
    past = a < b if ADJOINT else a > b
    return tl.where(a == b, -1, tl.where(past, a ^ b, 0))


@triton.jit
def inside_segments(a, run, SEGMENTS: tl.constexpr):
    """a where both tokens are in one segment, 0 elsewhere."""
    if SEGMENTS:
        return tl.where(run[:, None] == run[None, :], a, 0.0)
    else:
        return a


@triton.jit
def moved(f, by, ends, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr):
    """Features times their factor into or out of the block, rounded as operands are."""
    f = f * by
    if SEGMENTS:
        f = f * ends[None, :]
    return rounded(f, OPERAND)


@triton.jit
def carried(x, keep, stays, SEGMENTS: tl.constexpr):
    if SEGMENTS:
        keep = keep * stays
    return x * keep


@triton.jit
def held_state(slot, cr, ce, r, e, rows, NORMALISE: tl.constexpr):
    """Load the first `rows` features of S and z from a slot."""
    S = tl.load(slot + ce[None, :] * r + cr[:, None], mask=(ce < e)[None, :] & (cr < rows)[:, None], other=0.0)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < rows, other=0.0)
    return S, z


@triton.jit
def hold_state(slot, cr, ce, r, e, S, z, NORMALISE: tl.constexpr):
    tl.store(slot + ce[None, :] * r + cr[:, None], S, mask=(ce < e)[None, :] & (cr < r)[:, None])
    if NORMALISE:
        tl.store(slot + r * e + cr, z, mask=cr < r)
