"""The kernels of the forward pass, and the scan of both; triton.py says what they compute and launches them.

A kernel that "splits r" (or e) runs one program for each part of the features (or of the value columns).
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2, link, reciprocal
from heedful.kernels.gated_linear.triton_gates import (
    between_halves,
    carried,
    gates_of,
    held_state,
    hold_state,
    inside_segments,
    left_after,
    left_inside,
    moved,
    pairs_of,
    phi_of,
    place,
    places_of,
    tokens_of,
)
from heedful.kernels.triton_tiles import read, write


@triton.jit
def states(
    k, v, g, code, slots, keeps,
    k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    n, span, chunks, r, e,
    H: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's own Sᵀ and z in slot c + 1 of its head, and its keep; splits r."""
    part, chunk, row, batch, head, base = place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    S = tl.zeros([R, E], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = tl.full([R], 1.0, tl.float32)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, _run, _enters, leaves, stays = tokens_of(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = gates_of(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = places_of(t, R, OPERAND)
        fk = phi_of(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        go = moved(fk, left_after(x, b, OPERAND), leaves, SEGMENTS, OPERAND)
        keep = exp2(tl.sum(x, 1))
        if NORMALISE:
            z = carried(z, keep, stays, SEGMENTS) + tl.sum(go, 1)
        kept = carried(kept, keep, stays, SEGMENTS)
        S = carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(go.to(OPERAND), vb, S, input_precision=PRECISION)
    slot = slots + (row * (chunks + 1) + chunk + 1) * (r * e + r if NORMALISE else r * e)
    hold_state(slot, cr, ce, r, e, S, z, NORMALISE)
    tl.store(keeps + (row * chunks + chunk) * r + cr, kept, mask=cr < r)


@triton.jit
def scan(
    slots, keeps, end,
    chunks, width, r,
    GIVEN: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x_c ← keep_{c−1} ∘ x_{c−1} + x_c over the slots of a head, or x_c ← keep_c ∘ x_{c+1} + x_c backwards.

    The slot where the scan starts counts as zero unless GIVEN; the last value is also written to `end`. A slot is rows
    of r numbers, so column c of a slot has the gates of channel c mod r.
    """
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    slots += row * (chunks + 1) * width
    keeps += row * chunks * r
    start = chunks if REVERSE else 0
    x = tl.load(slots + start * width + column, mask=column < width * GIVEN, other=0.0)
    for at in range(0, chunks, GROUP):
        c = at + tl.arange(0, GROUP)
        c = chunks - 1 - c if REVERSE else c
        mask = ((c >= 0) & (c < chunks))[:, None] & (column < width)[None, :]
        here = slots + (c if REVERSE else c + 1)[:, None] * width + column[None, :]
        own = tl.load(here, mask=mask, other=0.0)
        keep = tl.load(keeps + c[:, None] * r + (column % r)[None, :], mask=mask, other=1.0)
        kept, own = tl.associative_scan((keep, own), 0, link)
        own += kept * x[None, :]
        tl.store(here, own, mask=mask)
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)
    tl.store(end + row * width + column, x, mask=column < width)


@triton.jit
def outputs(
    q, k, v, g, o, den, code, slots,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t,
    n, span, chunks, r, e,
    H: tl.constexpr, GIVEN: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's outputs from the state before it; splits e."""
    part, chunk, row, batch, head, base = place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    o += batch * o_b + head * o_h + skip * o_t
    den += row * n + base
    code += batch * n
    cr, ce = tl.arange(0, R), part * E + tl.arange(0, E)
    slots += (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    S, z = held_state(slots, cr, ce, r, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, run, enters, leaves, stays = tokens_of(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = gates_of(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = places_of(t, R, OPERAND)
        fq = phi_of(q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
        fk = phi_of(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        come = fq * left_inside(x, b, OPERAND)
        if SEGMENTS:
            come = come * enters[None, :]
        acc = tl.dot(tl.trans(come.to(OPERAND)), S.to(OPERAND), input_precision=PRECISION)
        keep = exp2(tl.sum(x, 1))
        if NORMALISE:
            below = tl.sum(come * z[:, None], 0)
        pairs = pairs_of(t, False)
        a = tl.where(pairs == -1, tl.sum(fq * fk, 0)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            f = between_halves(x, b, level, OPERAND)
            w = tl.dot(tl.trans((fq * f).to(OPERAND)), (fk * f).to(OPERAND), input_precision=PRECISION)
            a = tl.where((pairs >> level) == 1, w, a)
        a = inside_segments(a, run, SEGMENTS)
        acc = tl.dot(a.to(OPERAND), vb, acc, input_precision=PRECISION)
        go = moved(fk, left_after(x, b, OPERAND), leaves, SEGMENTS, OPERAND)
        if SEGMENTS:
            acc = tl.where(real[:, None], acc, 0.0)
        S = carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(go.to(OPERAND), vb, S, input_precision=PRECISION)
        if NORMALISE:
            z = carried(z, keep, stays, SEGMENTS) + tl.sum(go, 1)
            below += tl.sum(a, 1)
            if SEGMENTS:
                below = tl.where(real, below, 0.0)
            acc = acc * reciprocal(below)[:, None]
            if part == 0:
                tl.store(den + t, below, mask=base + t < n)
        write(o, t, o_t, ce, e, acc, n - base, EVEN_N, EVEN_C)
