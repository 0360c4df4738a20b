"""Code shared by the kernels of both passes: decays of a block, its weights, the states before and after a chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LOG2E, exp2, times


@triton.jit
def own_columns(start, r, R: tl.constexpr, TURNED: tl.constexpr):
    """The columns of q and k from which R features from `start` on are computed, and the number of columns in all.

    With angles, features come in adjacent pairs φ cos, φ sin, so a part of the features needs only some columns.
    """
    if TURNED:
        return start // 2 + tl.arange(0, R // 2), r // 2
    else:
        return start + tl.arange(0, R), r


@triton.jit
def clock(decay, code, start, n, BLOCK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """For the block at `start`: which tokens are real, b (base 2), their runs, and into, leave, keep."""
    i = tl.arange(0, BLOCK)
    t = start + i
    real = t < n
    run = tl.zeros([BLOCK], tl.int32)
    into = tl.full([BLOCK], 1.0, tl.float32)
    leave = into
    keep = 1.0
    b = into
    if SEGMENTS:
        c = tl.load(code + t, mask=real, other=-1)
        run = tl.maximum(c, -1 - c)
        before = tl.load(code + start - 1, mask=start > 0, other=0)
        before = tl.maximum(before, -1 - before)
        last = tl.load(code + tl.minimum(start + BLOCK, n) - 1)
        last = tl.maximum(last, -1 - last)
        real = real & (c >= 0)
    if DECAY > 0:
        if DECAY == 2:
            d = times(tl.load(decay + t, mask=real, other=0.0), LOG2E)
            b = tl.cumsum(d, 0)
            total = tl.sum(d, 0)
        elif SEGMENTS:
            d = tl.where(real, tl.load(decay) * LOG2E, 0.0)
            b = tl.cumsum(d, 0)
            total = tl.sum(d, 0)
        else:
            d = tl.load(decay) * LOG2E
            b = times(tl.minimum(i + 1, n - start).to(tl.float32), d)
            total = times(tl.minimum(BLOCK, n - start).to(tl.float32), d)
        into = exp2(b)
        leave = exp2(total - b)
        keep = exp2(total)
    if SEGMENTS:
        into = tl.where(run == before, into, 0.0)
        leave = tl.where(run == last, leave, 0.0)
        keep = tl.where(before == last, keep, 0.0)
    return real, b, run, into, leave, keep


@triton.jit
def weigh(a, b, run, BLOCK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, ADJOINT: tl.constexpr):
    """W ∘ a for a[query, key]; with ADJOINT for a[key, query]."""
    i = tl.arange(0, BLOCK)
    seen = i[None, :] >= i[:, None] if ADJOINT else i[:, None] >= i[None, :]
    if SEGMENTS:
        seen = seen & (run[:, None] == run[None, :])
    if DECAY > 0:
        gap = (b[None, :] - b[:, None]) if ADJOINT else (b[:, None] - b[None, :])
        return a * exp2(tl.where(seen, gap, float("-inf")))
    else:
        return tl.where(seen, a, 0.0)


@triton.jit
def held_state(slot, cr, ce, r, e, rows, NORMALISE: tl.constexpr):
    """Load the first `rows` features of Sᵀ and z from a slot."""
    S = tl.load(slot + ce[:, None] * r + cr[None, :], mask=(ce < e)[:, None] & (cr < rows)[None, :], other=0.0)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < rows, other=0.0)
    return S, z


@triton.jit
def hold_state(slot, cr, ce, r, e, S, z, rows, NORMALISE: tl.constexpr):
    """Store Sᵀ and the first `rows` features of z in a slot."""
    tl.store(slot + ce[:, None] * r + cr[None, :], S, mask=(ce < e)[:, None] & (cr < r)[None, :])
    if NORMALISE:
        tl.store(slot + r * e + cr, z, mask=cr < rows)


@triton.jit
def given_state(slot, cr, ce, r, e, GIVEN: tl.constexpr, NORMALISE: tl.constexpr):
    """The state in a slot if GIVEN, otherwise zeros; then the slot need not be valid memory."""
    S = tl.zeros([ce.shape[0], cr.shape[0]], tl.float32)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if GIVEN:
        S, z = held_state(slot, cr, ce, r, e, r, NORMALISE)
    return S, z


@triton.jit
def state_before(
    slots, keeps, chunk, cr, ce, r, e,
    GIVEN: tl.constexpr, NORMALISE: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    LAUNCHES: tl.constexpr,
):  # fmt: skip
    """The state before a chunk: already scanned (3 launches), the sum of all chunks before it (2), or given (1)."""
    width = r * e + r if NORMALISE else r * e
    if LAUNCHES == 3:
        if CAUSAL:
            slots += chunk * width
        S, z = held_state(slots, cr, ce, r, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    else:
        S, z = given_state(slots, cr, ce, r, e, GIVEN, NORMALISE)
    if LAUNCHES == 2:
        for c in range(0, chunk):
            own, own_z = held_state(slots + (c + 1) * width, cr, ce, r, e, r, NORMALISE)
            if WEIGHTED:
                keep = tl.load(keeps + c)
                S = S * keep
                z = z * keep
            S += own
            z += own_z
    return S, z


@triton.jit
def adjoint_after(
    slots, keeps, chunk, chunks, cr, ce, r, e,
    GIVEN: tl.constexpr, NORMALISE: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    LAUNCHES: tl.constexpr,
):  # fmt: skip
    """The adjoint after a chunk, in the same three ways."""
    width = r * e + r if NORMALISE else r * e
    if LAUNCHES == 3:
        if CAUSAL:
            slots += (chunk + 1) * width
            S, y = held_state(slots, cr, ce, r, e, tl.where(chunk + 1 - GIVEN < chunks, r, 0), NORMALISE)
        else:
            S, y = held_state(slots, cr, ce, r, e, r, NORMALISE)
    else:
        S, y = given_state(slots + chunks * width, cr, ce, r, e, GIVEN, NORMALISE)
    if LAUNCHES == 2:
        for step in range(1, chunks - chunk):
            c = chunks - step
            own, own_y = held_state(slots + c * width, cr, ce, r, e, r, NORMALISE)
            if WEIGHTED:
                keep = tl.load(keeps + c)
                S = S * keep
                y = y * keep
            S += own
            y += own_y
    return S, y
