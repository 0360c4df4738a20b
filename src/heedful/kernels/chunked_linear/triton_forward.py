"""The kernels of the forward pass, and the scan of both; triton.py says what they compute and launches them.

A kernel that "splits r" (or e) runs one program for each part of the features (or of the value columns).
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import link, reciprocal
from heedful.kernels.chunked_linear.triton_walk import clock, hold_state, own_columns, state_before, weigh
from heedful.kernels.triton_tiles import features, read, write


@triton.jit
def states(
    k, v, shift, turns, decay, code, slots, keeps, sums,
    k_b, k_h, k_t, v_b, v_h, v_t,
    n, span, chunks, r, e,
    KV: tl.constexpr, HEADS: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr, TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's own Sᵀ and z, in slot c + 1 of its head, and z before each of its blocks; splits r."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    kv = head // (HEADS // KV)
    base = chunk * span
    skip = base.to(tl.int64)
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    shift += (batch * KV + kv) * n + base
    turns += batch * 2 * n + base
    decay += row * n if DECAY == 2 else head
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    cx, x = own_columns(part * R, r, R, TURNED)
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    S = tl.zeros([E, R], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = 1.0
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, _b, _run, _into, leave, keep = clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        fk = features(k, shift, turns, t, n, k_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        if NORMALISE and CAUSAL:
            tl.store(sums + at // BLOCK * r, z, mask=cr < r)
        if DECAY > 0 or SEGMENTS:
            fk = fk * leave[:, None]
            S = S * keep
            z = z * keep
            kept = kept * keep
        S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if NORMALISE:
            z += tl.sum(fk, 0)
    slot = slots + (row * (chunks + 1) + chunk + 1) * (r * e + r if NORMALISE else r * e)
    tl.store(slot + ce[:, None] * r + cr[None, :], S, mask=(ce < e)[:, None] & (cr < r)[None, :])
    if NORMALISE:
        tl.store(slot + r * e + cr, z, mask=cr < r)
    if DECAY > 0 or SEGMENTS:
        if part == 0:
            tl.store(keeps + row * chunks + chunk, kept)


@triton.jit
def scan(
    slots, keeps, end, chunks, width,
    GIVEN: tl.constexpr, WEIGHTED: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x_c ← keep_{c−1} x_{c−1} + x_c over the slots of a head, or x_c ← keep_c x_{c+1} + x_c backwards.

    The slot where the scan starts counts as zero unless GIVEN; the last value is also written to `end`.
    """
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    slots += row * (chunks + 1) * width
    keeps += row * chunks
    start = chunks if REVERSE else 0
    x = tl.load(slots + start * width + column, mask=column < width * GIVEN, other=0.0)
    for at in range(0, chunks, GROUP):
        c = at + tl.arange(0, GROUP)
        c = chunks - 1 - c if REVERSE else c
        ok = (c >= 0) & (c < chunks)
        here = slots + (c if REVERSE else c + 1)[:, None] * width + column[None, :]
        mask = ok[:, None] & (column < width)[None, :]
        own = tl.load(here, mask=mask, other=0.0)
        if WEIGHTED:
            keep = tl.load(keeps + c, mask=ok, other=1.0)
            kept, own = tl.associative_scan((tl.broadcast_to(keep[:, None], (GROUP, TILE)), own), 0, link)
            own += kept * x[None, :]
        else:
            own = tl.cumsum(own, 0) + x[None, :]
        tl.store(here, own, mask=mask)
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)
    tl.store(end + row * width + column, x, mask=column < width)


@triton.jit
def outputs(
    q, k, v, o, den, shift_q, shift_k, turns, decay, code, slots, keeps, sums, final,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    n, span, chunks, r, e,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, GIVEN: tl.constexpr, LAUNCHES: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's outputs from the state before it; splits e. With one launch the chunk is the whole sequence."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * HEADS + head // (H // HEADS)
    base = chunk * span
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    o += batch * o_b + head * o_h + skip * o_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    den += row * n + base
    shift_q += row * n + base
    shift_k += (batch * KV + kv) * n + base
    turns += batch * 2 * n + base
    decay += owner * n if DECAY == 2 else owner % HEADS
    code += batch * n
    cr, ce = tl.arange(0, R), part * E + tl.arange(0, E)
    cx, x = own_columns(0, r, R, TURNED)
    width = r * e + r if NORMALISE else r * e
    slots += owner * (chunks + 1 if CAUSAL else 1) * width
    keeps += owner * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, z = state_before(slots, keeps, chunk, cr, ce, r, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    writes = (part == 0) & (head % (H // HEADS) == 0)  # one program per state writes it
    if NORMALISE:
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    CLEAR: tl.constexpr = 2 if SEGMENTS or LAUNCHES == 1 else 1
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        phi = features(q, shift_q, turns, t, n, q_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 0)
        fq = phi.to(OPERAND)
        acc = tl.dot(fq, tl.trans(S.to(OPERAND)), input_precision=PRECISION)
        if NORMALISE:
            zs = z
            if CAUSAL and LAUNCHES > 1:
                zs += tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
            below = tl.sum(phi * zs[None, :], 1)
        if CAUSAL:
            fk = features(k, shift_k, turns, t, n, k_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, CLEAR)
            vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
            a = tl.dot(fq, tl.trans(fk.to(OPERAND)), input_precision=PRECISION)
            a = weigh(a, b, run, BLOCK, DECAY, SEGMENTS, False)
            if DECAY > 0 or SEGMENTS:
                acc = acc * into[:, None]
                fk = fk * leave[:, None]
                S = S * keep
            if NORMALISE:
                if LAUNCHES == 1:
                    if writes:
                        tl.store(sums + at // BLOCK * r, z, mask=cr < r)
                if DECAY > 0 or SEGMENTS:
                    below = below * into
                    z = z * keep
                below += tl.sum(a, 1)
                if LAUNCHES == 1:
                    z += tl.sum(fk, 0)
            acc = tl.dot(a.to(OPERAND), vb, acc, input_precision=PRECISION)
            S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if SEGMENTS:
            acc = tl.where(real[:, None], acc, 0.0)
        if NORMALISE:
            if SEGMENTS:
                below = tl.where(real, below, 0.0)
            acc = acc * reciprocal(below)[:, None]
            if part == 0:
                tl.store(den + t, below, mask=base + t < n)
        write(o, t, o_t, ce, e, acc, n - base, EVEN_N, EVEN_C)
    if LAUNCHES < 3:
        if (chunk == chunks - 1) & (head % (H // HEADS) == 0):
            if NORMALISE and LAUNCHES == 2:
                z += tl.load(slots + chunks * width + r * e + cr, mask=cr < r, other=0.0)
            hold_state(final + owner * width, cr, ce, r, e, S, z, tl.where(part == 0, r, 0), NORMALISE)
