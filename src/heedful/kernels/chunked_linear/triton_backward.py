"""The kernels of the backward pass; triton.py says what they compute and launches them.

A kernel that "splits r" (or e) runs one program for each part of the features (or of the value columns).
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import reciprocal, tf32
from heedful.kernels.chunked_linear.triton_walk import (
    adjoint_after,
    clock,
    hold_state,
    own_columns,
    state_before,
    weigh,
)
from heedful.kernels.triton_tiles import features, pulled, read, write


@triton.jit
def adjoints(
    q, o, do, den, delta, shift, turns, decay, code, slots, keeps, sums,
    q_b, q_h, q_t, o_b, o_h, o_t, do_b, do_h, do_t,
    n, span, chunks, r, e,
    H: tl.constexpr, HEADS: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr,
    DECAY: tl.constexpr, SEGMENTS: tl.constexpr, TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's δ, its own Rᵀ and y in slot c of its head, and y after each of its blocks; splits r."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, owner = row // HEADS, row % HEADS
    GROUP: tl.constexpr = H // HEADS
    base = chunk * span
    skip = base.to(tl.int64)
    first = (batch * H + owner * GROUP) * n + base
    q += batch * q_b + owner * GROUP * q_h + skip * q_t
    o += batch * o_b + owner * GROUP * o_h + skip * o_t
    do += batch * do_b + owner * GROUP * do_h + skip * do_t
    den += first
    delta += first
    shift += first
    turns += batch * 2 * n + base
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    cx, x = own_columns(part * R, r, R, TURNED)
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    S = tl.zeros([E, R], tl.float32)
    y = tl.zeros([R], tl.float32)
    kept = 1.0
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, _b, _run, into, _leave, keep = clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        if NORMALISE and CAUSAL:
            tl.store(sums + at // BLOCK * r, y, mask=cr < r)
        if DECAY > 0 or SEGMENTS:
            S = S * keep
            y = y * keep
            kept = kept * keep
        for h in tl.static_range(GROUP):
            qh, shift_h = q + h * q_h, shift + h * n
            psi = features(qh, shift_h, turns, t, n, q_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 0)
            dob = read(do + h * do_h, t, do_t, ce, e, real, EVEN_N, EVEN_C)
            if NORMALISE:
                psi = psi * reciprocal(tl.load(den + h * n + t, mask=real, other=0.0))[:, None]
                ob = read(o + h * o_h, t, o_t, ce, e, real, EVEN_N, EVEN_C)
                d = tl.sum(dob.to(tl.float32) * ob.to(tl.float32), 1)
                if part == 0:
                    tl.store(delta + h * n + t, d, mask=base + t < n)
            if DECAY > 0 or SEGMENTS:
                psi = psi * into[:, None]
            S = tl.dot(tl.trans(dob.to(OPERAND)), psi.to(OPERAND), S, input_precision=PRECISION)
            if NORMALISE:
                y -= tl.sum(psi * d[:, None], 0)
    slot = slots + (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    tl.store(slot + ce[:, None] * r + cr[None, :], S, mask=(ce < e)[:, None] & (cr < r)[None, :])
    if NORMALISE:
        tl.store(slot + r * e + cr, y, mask=cr < r)
    if DECAY > 0 or SEGMENTS:
        if part == 0:
            tl.store(keeps + row * chunks + chunk, kept)


@triton.jit
def _dots(o, do, t, stride, column, width, real, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """δ_i = do_i·o_i."""
    ob = read(o, t, stride, column, width, real, EVEN_N, EVEN_C)
    return tl.sum(do.to(tl.float32) * ob.to(tl.float32), 1)


@triton.jit
def _precisely(a, S, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """a S with all bits of S: in three parts if operands have a third of the bits."""
    if OPERAND == tl.bfloat16 or PRECISION == "tf32":  # noqa: SIM300
        high = S.to(tl.bfloat16)
        rest = S - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = tl.dot(a, low.to(OPERAND), input_precision=PRECISION)
        product = tl.dot(a, middle.to(OPERAND), product, input_precision=PRECISION)
        return tl.dot(a, high.to(OPERAND), product, input_precision=PRECISION)
    else:
        return tl.dot(a, S, input_precision=PRECISION)


@triton.jit
def _flow(x, by, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x·by for each token, with `by` rounded as it is when it is an operand of a product."""
    by = by.to(OPERAND).to(tl.float32)
    if PRECISION == "tf32":
        by = tf32(by)
    return tl.sum(x * by, 1)


@triton.jit
def _queries(
    pid, q, k, v, o, do, den, delta, dq, shift_q, shift_k, turns, decay, code, slots, keeps, sums, gain, rows,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    n, span, chunks, r, e,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, GIVEN: tl.constexpr, LAUNCHES: tl.constexpr,
    CLOCKED: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr, TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's dq from the state before it; splits r."""
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
    do += batch * do_b + head * do_h + skip * do_t
    dq += batch * dq_b + head * dq_h + skip * dq_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    gain += (part * rows + row) * n + base
    den += row * n + base
    delta += row * n + base
    shift_q += row * n + base
    shift_k += (batch * KV + kv) * n + base
    turns += batch * 2 * n + base
    decay += owner * n if DECAY == 2 else owner % HEADS
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    cx, x = own_columns(part * R, r, R, TURNED)
    width = r * e + r if NORMALISE else r * e
    slots += owner * (chunks + 1 if CAUSAL else 1) * width
    keeps += owner * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, z = state_before(slots, keeps, chunk, cr, ce, r, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    if NORMALISE:
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        raw = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C)
        dob = raw.to(OPERAND)
        grad = tl.zeros([BLOCK, R], tl.float32)
        d = tl.zeros([BLOCK, BLOCK], tl.float32)
        if NORMALISE:
            zs = z
            if LAUNCHES == 1:
                minus = -_dots(o, raw, t, o_t, ce, e, real, EVEN_N, EVEN_C)
                zs = tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
            else:
                minus = -tl.load(delta + t, mask=real, other=0.0)
                if CAUSAL:
                    zs += tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
            grad += minus[:, None] * zs[None, :]
            d += minus[:, None]
        if CLOCKED:
            psi = features(q, shift_q, turns, t, n, q_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 0)
            if NORMALISE:
                psi = psi * reciprocal(tl.load(den + t, mask=real, other=0.0))[:, None]
            far = psi * into[:, None]
            inner = _precisely(dob, S, OPERAND, PRECISION)
            turn = _flow(inner, far, OPERAND, PRECISION) + tl.sum(grad * far, 1)
            grad += inner
        else:
            grad = tl.dot(dob, S.to(OPERAND), grad, input_precision=PRECISION)
        if CAUSAL:
            fk = features(
                k, shift_k, turns, t, n, k_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 2 if SEGMENTS else 1
            )
            vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
            d = tl.dot(dob, tl.trans(vb), d, input_precision=PRECISION)
            d = weigh(d, b, run, BLOCK, DECAY, SEGMENTS, False).to(OPERAND)
            if DECAY > 0 or SEGMENTS:
                grad = grad * into[:, None]
            if CLOCKED:
                inner = tl.dot(d, fk.to(OPERAND), input_precision=PRECISION)
                turn += _flow(inner, psi, OPERAND, PRECISION)
                grad += inner
            else:
                grad = tl.dot(d, fk.to(OPERAND), grad, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                fk = fk * leave[:, None]
                S = S * keep
                z = z * keep
            S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if CLOCKED:
            tl.store(gain + t, tl.where(real, turn, 0.0), mask=base + t < n)
        grad = pulled(grad, q, shift_q, turns, t, n, q_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C)
        if NORMALISE:
            grad = grad * reciprocal(tl.load(den + t, mask=real, other=0.0))[:, None]
        if SEGMENTS:
            grad = tl.where(real[:, None], grad, 0.0)
        write(dq, t, dq_t, cx, x, grad, n - base, EVEN_N, EVEN_C)


@triton.jit
def _keys(
    pid, q, k, v, o, do, den, delta, dk, dv, shift_q, shift_k, turns, decay, code, slots, keeps, sums, first, loss,
    rows,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    n, span, chunks, r, e,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, GIVEN: tl.constexpr, FIRST: tl.constexpr,
    LAUNCHES: tl.constexpr, CLOCKED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, TURNED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's dk and dv. If the state is too wide for one program, separate programs compute dk, which splits r,
    and dv, which splits e.

    Sums over the query heads that share the state; n counts keys. Without CAUSAL the sums include all queries.
    """
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, owner = row // HEADS, row % HEADS
    GROUP: tl.constexpr = H // HEADS
    kv = owner // (HEADS // KV)
    base = chunk * span
    skip = base.to(tl.int64)
    token = (batch * H + owner * GROUP) * n + base
    q += batch * q_b + owner * GROUP * q_h + skip * q_t
    o += batch * o_b + owner * GROUP * o_h + skip * o_t
    do += batch * do_b + owner * GROUP * do_h + skip * do_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    dk += batch * dk_b + owner * dk_h + skip * dk_t
    dv += batch * dv_b + owner * dv_h + skip * dv_t
    loss += (part * rows + row) * n + base  # with a decay, heads do not share a state
    den += token
    delta += token
    shift_q += token
    shift_k += (batch * KV + kv) * n + base
    turns += batch * 2 * n + base
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr = (0 if DV else part * R) + tl.arange(0, R)
    ce = (0 if DK else part * E) + tl.arange(0, E)
    cx, x = own_columns(0 if DV else part * R, r, R, TURNED)
    width = r * e + r if NORMALISE else r * e
    slots += row * (chunks + 1 if CAUSAL else 1) * width
    keeps += row * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, y = adjoint_after(slots, keeps, chunk, chunks, cr, ce, r, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    if NORMALISE:
        sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, b, run, into, leave, keep = clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        fk = features(k, shift_k, turns, t, n, k_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 2 if SEGMENTS else 1)
        far = fk * leave[:, None]
        fk = fk.to(OPERAND)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        held = S.to(OPERAND)
        if DV:
            gv = tl.dot(fk, tl.trans(held), input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                gv = gv * leave[:, None]
        if DK:
            gk = tl.zeros([BLOCK, R], tl.float32)
            if NORMALISE:
                ys = y
                if CAUSAL and LAUNCHES > 1:
                    ys += tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
                gk += ys[None, :]
            if CLOCKED:
                inner = _precisely(vb, S, OPERAND, PRECISION)
                turn = _flow(inner, far, OPERAND, PRECISION) + tl.sum(gk * far, 1)
                gk += inner
            else:
                gk = tl.dot(vb, held, gk, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                gk = gk * leave[:, None]
        if CAUSAL:
            if DECAY > 0 or SEGMENTS:
                S = S * keep
                y = y * keep
            for h in tl.static_range(GROUP):
                qh, shift_h = q + h * q_h, shift_q + h * n
                psi = features(qh, shift_h, turns, t, n, q_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C, 0)
                raw = read(do + h * do_h, t, do_t, ce, e, real, EVEN_N, EVEN_C)
                dob = raw.to(OPERAND)
                if NORMALISE and DK:
                    if LAUNCHES == 1:
                        delta_h = _dots(o + h * o_h, raw, t, o_t, ce, e, real, EVEN_N, EVEN_C)
                    else:
                        delta_h = tl.load(delta + h * n + t, mask=real, other=0.0)
                if NORMALISE:
                    psi = psi * reciprocal(tl.load(den + h * n + t, mask=real, other=0.0))[:, None]
                if NORMALISE and DK and LAUNCHES == 1:
                    y -= tl.sum(psi * (delta_h * into)[:, None], 0)
                fq = psi.to(OPERAND)
                if DV:
                    a = tl.dot(fk, tl.trans(fq), input_precision=PRECISION)
                    a = weigh(a, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    gv = tl.dot(a, dob, gv, input_precision=PRECISION)
                if DK:
                    d = tl.zeros([BLOCK, BLOCK], tl.float32)
                    if NORMALISE:
                        d -= delta_h[None, :]
                    d = tl.dot(vb, tl.trans(dob), d, input_precision=PRECISION)
                    d = weigh(d, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    if CLOCKED:
                        inner = tl.dot(d, fq, input_precision=PRECISION)
                        turn += _flow(inner, fk, OPERAND, PRECISION)
                        gk += inner
                    else:
                        gk = tl.dot(d, fq, gk, input_precision=PRECISION)
                if DECAY > 0 or SEGMENTS:
                    fq = (psi * into[:, None]).to(OPERAND)
                S = tl.dot(tl.trans(dob), fq, S, input_precision=PRECISION)
        if DK:
            if CLOCKED:
                tl.store(loss + t, tl.where(real, turn, 0.0), mask=base + t < n)
            gk = pulled(gk, k, shift_k, turns, t, n, k_t, cx, x, real, FEATURE, TURNED, EVEN_N, EVEN_C)
            if SEGMENTS:
                gk = tl.where(real[:, None], gk, 0.0)
            write(dk, t, dk_t, cx, x, gk, n - base, EVEN_N, EVEN_C)
        if DV:
            if SEGMENTS:
                gv = tl.where(real[:, None], gv, 0.0)
            write(dv, t, dv_t, ce, e, gv, n - base, EVEN_N, EVEN_C)
    if FIRST and DK and LAUNCHES < 3:
        if chunk == 0:
            if NORMALISE and LAUNCHES == 2:
                y += tl.load(slots + r * e + cr, mask=cr < r, other=0.0)
            hold_state(first + row * width, cr, ce, r, e, S, y, r, NORMALISE)


@triton.jit
def gradients(
    q, k, v, o, do, den, delta, dq, dk, dv, shift_q, shift_k, turns_q, turns_k, decay, code, slots, keeps, sums, back,
    keeps_back, after, first, gain, loss,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t, dk_b, dk_h, dk_t,
    dv_b, dv_h, dv_t,
    n, m, span, chunks_q, chunks_k, split, rows, r, e,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, GIVEN: tl.constexpr, GIVEN_BACK: tl.constexpr,
    FIRST: tl.constexpr, LAUNCHES: tl.constexpr, CLOCKED: tl.constexpr, QUERIES: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr, TURNED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """dq in some programs, dk and dv in the others: each leaves multiprocessors idle that the other can use."""
    pid = tl.program_id(0)
    if QUERIES:
        if pid < split:
            _queries(
                pid, q, k, v, o, do, den, delta, dq, shift_q, shift_k, turns_q, decay, code, slots, keeps, sums, gain,
                rows, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
                n, span, chunks_q, r, e, H, KV, HEADS, GIVEN, LAUNCHES, CLOCKED, FEATURE, NORMALISE, CAUSAL, DECAY,
                SEGMENTS, TURNED, OPERAND, PRECISION, EVEN_N, EVEN_C, BLOCK, R, E, PARTS,
            )  # fmt: skip
    if DK or DV:
        if pid >= split:
            _keys(
                pid - split, q, k, v, o, do, den, delta, dk, dv, shift_q, shift_k, turns_k, decay, code, back,
                keeps_back, after, first, loss, rows, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
                do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t, m, span, chunks_k, r, e, H, KV, HEADS,
                GIVEN_BACK, FIRST, LAUNCHES, CLOCKED, DK, DV, FEATURE, NORMALISE, CAUSAL, DECAY, SEGMENTS, TURNED,
                OPERAND, PRECISION, EVEN_N, EVEN_C, BLOCK, R, E, PARTS,
            )  # fmt: skip
