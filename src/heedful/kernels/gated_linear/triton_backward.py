"""The kernels of the backward pass; triton.py says what they compute and launches them.

A kernel that "splits r" (or e) runs one program for each part of the features (or of the value columns).
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2, reciprocal
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
    rounded,
    sums_of,
    tokens_of,
)
from heedful.kernels.triton_tiles import pulled, read, write


@triton.jit
def _psi(q, den, t, stride, column, width, real, FEATURE: tl.constexpr, NORMALISE: tl.constexpr,
         EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):  # fmt: skip
    """A tile of ψ = φq / den, channels × tokens."""
    psi = phi_of(q, t, stride, column, width, real, FEATURE, EVEN_N, EVEN_C, 0)
    if NORMALISE:
        psi = psi * reciprocal(tl.load(den + t, mask=real, other=0.0))[None, :]
    return psi


@triton.jit
def _by_state(S, x, acc, EXACT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + S x; with EXACT in two parts of S."""
    high = rounded(S, OPERAND)
    acc = tl.dot(high.to(OPERAND), x, acc, input_precision=PRECISION)
    if EXACT and tl.bfloat16 == OPERAND:
        acc = tl.dot((S - high).to(OPERAND), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _diagonal(d, pairs):
    return tl.sum(tl.where(pairs == -1, d, 0.0), 0)


@triton.jit
def adjoints(
    q, g, o, do, den, delta, code, slots,
    q_b, q_h, q_t, g_b, g_h, g_t, o_b, o_h, o_t, do_b, do_h, do_t,
    n, span, chunks, r, e,
    H: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's own Rᵀ and y, in slot c of its head, and δ; splits r."""
    part, chunk, row, batch, head, base = place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    g += batch * g_b + head * g_h + skip * g_t
    o += batch * o_b + head * o_h + skip * o_t
    do += batch * do_b + head * do_h + skip * do_t
    den += row * n + base
    delta += row * n + base
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    S = tl.zeros([R, E], tl.float32)
    y = tl.zeros([R], tl.float32)
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, _run, enters, _leaves, stays = tokens_of(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = gates_of(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = places_of(t, R, OPERAND)
        psi = _psi(q, den, t, q_t, cr, r, real, FEATURE, NORMALISE, EVEN_N, EVEN_C)
        dob = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C)
        come = moved(psi, left_inside(x, b, OPERAND), enters, SEGMENTS, OPERAND)
        keep = exp2(tl.sum(x, 1))
        if NORMALISE:
            ob = read(o, t, o_t, ce, e, real, EVEN_N, EVEN_C)
            d = tl.sum(dob.to(tl.float32) * ob.to(tl.float32), 1)
            if part == 0:
                tl.store(delta + t, d, mask=base + t < n)
            y = carried(y, keep, stays, SEGMENTS) - tl.sum(come * d[None, :], 1)
        S = carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(come.to(OPERAND), dob.to(OPERAND), S, input_precision=PRECISION)
    slot = slots + (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    hold_state(slot, cr, ce, r, e, S, y, NORMALISE)


@triton.jit
def queries(
    q, k, v, g, do, den, delta, dq, gain, code, slots,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    n, span, chunks, r, e,
    H: tl.constexpr, GIVEN: tl.constexpr, GATED: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr,
    SEGMENTS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's dq from the state before it, and φq ∘ dφq if the gates need a gradient; splits r."""
    part, chunk, row, batch, head, base = place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    do += batch * do_b + head * do_h + skip * do_t
    dq += batch * dq_b + head * dq_h + skip * dq_t
    gain += (row * n + base) * r
    den += row * n + base
    delta += row * n + base
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    slots += (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    S, z = held_state(slots, cr, ce, r, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, run, enters, leaves, stays = tokens_of(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = gates_of(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = places_of(t, R, OPERAND)
        fk = phi_of(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        dob = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        keep = exp2(tl.sum(x, 1))
        into = left_inside(x, b, OPERAND)
        if SEGMENTS:
            into = into * enters[None, :]
        grad = tl.zeros([R, BLOCK], tl.float32)
        d = tl.zeros([BLOCK, BLOCK], tl.float32)
        if NORMALISE:
            minus = -tl.load(delta + t, mask=real, other=0.0)
            below = reciprocal(tl.load(den + t, mask=real, other=0.0))[None, :]
            grad += z[:, None] * minus[None, :]
            d += minus[None, :]
        grad = _by_state(S, tl.trans(dob), grad, GATED, OPERAND, PRECISION)
        if GATED:
            psi = phi_of(q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
            if NORMALISE:
                psi = psi * below
            turn = grad * rounded(psi * into, OPERAND)
        grad = grad * into
        d = tl.dot(vb, tl.trans(dob), d, input_precision=PRECISION)
        d = inside_segments(d, run, SEGMENTS)
        pairs = pairs_of(t, True)
        for level in tl.static_range(LEVELS):
            f = between_halves(x, b, level, OPERAND)
            here = tl.where((pairs >> level) == 1, d, 0.0).to(OPERAND)
            got = tl.dot((fk * f).to(OPERAND), here, input_precision=PRECISION)
            grad += f * got
            if GATED:
                turn += got * rounded(psi * f, OPERAND)
        grad += _diagonal(d, pairs)[None, :] * fk
        go = moved(fk, left_after(x, b, OPERAND), leaves, SEGMENTS, OPERAND)
        if SEGMENTS:
            grad = tl.where(real[None, :], grad, 0.0)
        S = carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(go.to(OPERAND), vb, S, input_precision=PRECISION)
        if NORMALISE:
            grad = grad * below
            z = carried(z, keep, stays, SEGMENTS) + tl.sum(go, 1)
        if GATED:
            write(gain, t, r, cr, r, tl.trans(turn), n - base, EVEN_N, EVEN_C)
        grad = pulled(tl.trans(grad), q, q, q, t, 0, q_t, cr, r, real, FEATURE, False, EVEN_N, EVEN_C)
        write(dq, t, dq_t, cr, r, grad, n - base, EVEN_N, EVEN_C)


@triton.jit
def keys(
    q, k, v, g, do, den, delta, dk, dv, dg, gain, code, slots, back,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h,
    dv_t, dg_b, dg_h, dg_t,
    n, span, chunks, r, e,
    H: tl.constexpr, GIVEN: tl.constexpr, GATED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's dk, dg and dv from the adjoint after it. If that is too wide, separate programs compute dk and dg,
    which split r, and dv, which splits e."""
    part, chunk, row, batch, head, base = place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    do += batch * do_b + head * do_h + skip * do_t
    dk += batch * dk_b + head * dk_h + skip * dk_t
    dv += batch * dv_b + head * dv_h + skip * dv_t
    dg += batch * dg_b + head * dg_h + skip * dg_t
    gain += (row * n + base) * r
    den += row * n + base
    delta += row * n + base
    code += batch * n
    cr = (0 if DV else part * R) + tl.arange(0, R)
    ce = (0 if DK else part * E) + tl.arange(0, E)
    width = r * e + r if NORMALISE else r * e
    after = (row * (chunks + 1) + chunk + 1) * width
    S, y = held_state(back + after, cr, ce, r, e, tl.where(chunk + 1 - GIVEN < chunks, r, 0), NORMALISE)
    late = tl.zeros([R], tl.float32)  # gradient in the gates up to a token from pairs that end after it
    if GATED and DK:
        state, sum_before = held_state(slots + after, cr, ce, r, e, r, NORMALISE)
        late = tl.sum(state * S, 1) + sum_before * y
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, run, enters, leaves, stays = tokens_of(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = gates_of(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = places_of(t, R, OPERAND)
        fk = phi_of(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        psi = _psi(q, den, t, q_t, cr, r, real, FEATURE, NORMALISE, EVEN_N, EVEN_C)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        dob = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        pairs = pairs_of(t, False)
        turned = pairs_of(t, True)
        leave = left_after(x, b, OPERAND)
        if SEGMENTS:
            leave = leave * leaves[None, :]
        go = rounded(fk * leave, OPERAND)
        if DV:
            gv = tl.dot(tl.trans(go.to(OPERAND)), S.to(OPERAND), input_precision=PRECISION)
            a = tl.where(turned == -1, tl.sum(psi * fk, 0)[:, None], 0.0)
        if NORMALISE:
            minus = -tl.load(delta + t, mask=real, other=0.0)
        if DK:
            gk = tl.zeros([R, BLOCK], tl.float32)
            d = tl.zeros([BLOCK, BLOCK], tl.float32)
            if NORMALISE:
                gk += y[:, None]
                d += minus[:, None]
            gk = _by_state(S, tl.trans(vb), gk, GATED, OPERAND, PRECISION)
            if GATED:
                turn = tl.trans(read(gain, t, r, cr, r, base + t < n, EVEN_N, EVEN_C)) - gk * go
            gk = gk * leave
            d = tl.dot(dob, tl.trans(vb), d, input_precision=PRECISION)
            d = inside_segments(d, run, SEGMENTS)
        for level in tl.static_range(LEVELS):
            f = between_halves(x, b, level, OPERAND)
            later, earlier = (psi * f).to(OPERAND), rounded(fk * f, OPERAND)
            if DV:
                w = tl.dot(tl.trans(earlier.to(OPERAND)), later, input_precision=PRECISION)
                a = tl.where((turned >> level) == 1, w, a)
            if DK:
                here = tl.where((pairs >> level) == 1, d, 0.0).to(OPERAND)
                got = tl.dot(later, here, input_precision=PRECISION)
                gk += f * got
                if GATED:
                    turn -= got * earlier
        if DV:
            gv = tl.dot(inside_segments(a, run, SEGMENTS).to(OPERAND), dob, gv, input_precision=PRECISION)
            if SEGMENTS:
                gv = tl.where(real[:, None], gv, 0.0)
            write(dv, t, dv_t, ce, e, gv, n - base, EVEN_N, EVEN_C)
        come = moved(psi, left_inside(x, b, OPERAND), enters, SEGMENTS, OPERAND)
        keep = exp2(tl.sum(x, 1))
        S = carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(come.to(OPERAND), dob, S, input_precision=PRECISION)
        if DK:
            if NORMALISE:
                y = carried(y, keep, stays, SEGMENTS) + tl.sum(come * minus[None, :], 1)
            if GATED:
                change = sums_of(turn, b[:, None] >= b[None, :], OPERAND) + late[:, None]
                if SEGMENTS:
                    change = tl.where(real[None, :], change, 0.0)
                write(dg, t, dg_t, cr, r, tl.trans(change), n - base, EVEN_N, EVEN_C)
                late += tl.sum(turn, 1)
            gk += _diagonal(d, pairs)[None, :] * psi
            if SEGMENTS:
                gk = tl.where(real[None, :], gk, 0.0)
            grad = pulled(tl.trans(gk), k, k, k, t, 0, k_t, cr, r, real, FEATURE, False, EVEN_N, EVEN_C)
            write(dk, t, dk_t, cr, r, grad, n - base, EVEN_N, EVEN_C)
