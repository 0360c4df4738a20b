"""The kernels of the backward pass; triton.py says what they compute and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LN2, exp2, reciprocal
from heedful.kernels.random_features.triton_features import features_of, logs_of, numbers_at, state_at, tops_of, weigh
from heedful.kernels.triton_tiles import read, write


@triton.jit
def _returned(grad, high, low, back, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """back + grad Wᵀ, both in two parts if W is."""
    rounded = grad.to(OPERAND)
    back = tl.dot(rounded, tl.trans(high), back, input_precision=PRECISION)
    if SPLIT:
        back = tl.dot(rounded, tl.trans(low), back, input_precision=PRECISION)
        rest = (grad - rounded.to(tl.float32)).to(OPERAND)
        back = tl.dot(rest, tl.trans(high), back, input_precision=PRECISION)
    return back


@triton.jit
def adjoints(
    q, o, do, Wq, bias, peaks_q, den, delta, climbs, levels, slots, sums,
    q_b, q_h, q_t, o_b, o_h, o_t, do_b, do_h, do_t,
    n, span, chunks, d, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, M: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A chunk's own Rᵀ and y for a few features, in slot c of its query head; δ of every token."""
    chunk = tl.program_id(0) // (M // R)
    at = tl.program_id(0) % (M // R) * R
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    owner = batch * KV + head // (H // KV)
    base = chunk * span
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    o += batch * o_b + head * o_h + skip * o_t
    do += batch * do_b + head * do_h + skip * do_t
    peaks_q += row * n + base
    den += row * n + base
    delta += row * n + base
    climbs += owner * n + base
    Wq += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    cd, ce, cr = tl.arange(0, D), tl.arange(0, E), at + tl.arange(0, R)
    before = tl.load(levels + owner * (chunks + 1) + chunk) if CAUSAL else 0.0
    S = tl.zeros([E, R], tl.float32)
    y = tl.zeros([R], tl.float32)
    left = n - base
    for step in range(0, tl.minimum(span, left), BLOCK):
        t = step + tl.arange(0, BLOCK)
        x = read(q, t, q_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        g = read(do, t, do_t, ce, e, t < left, EVEN_N, EVEN_E).to(tl.float32)
        out = read(o, t, o_t, ce, e, t < left, EVEN_N, EVEN_E).to(tl.float32)
        along = tl.sum(g * out, 1)
        over = reciprocal(numbers_at(den, t, left))
        if at == 0:
            tl.store(delta + t, along * over, mask=t < left)
        if CAUSAL:
            over *= exp2(before - tl.maximum(numbers_at(climbs, t, left), before))
        logs, _high, _low = logs_of(x, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - numbers_at(peaks_q, t, left)[:, None])
        f *= over[:, None]
        y -= tl.sum(f * along[:, None], 0)
        S = tl.dot(tl.trans(g.to(OPERAND)), f.to(OPERAND), S, input_precision=PRECISION)
    slot = row * (chunks + CAUSAL) + chunk
    tl.store(slots + slot * (E * M) + ce[:, None] * M + cr[None, :], S)
    tl.store(sums + slot * M + cr, y)


@triton.jit
def queries(
    q, k, v, do, dq, Wq, Wk, bias, peaks_q, den, delta, peaks, tops, climbs, levels, slots, sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    n, d, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, M: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One block of dq."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * KV + kv
    base = block * BLOCK
    skip = base.to(tl.int64)
    blocks = tl.num_programs(0)
    q += batch * q_b + head * q_h + skip * q_t
    do += batch * do_b + head * do_h + skip * do_t
    dq += batch * dq_b + head * dq_h + skip * dq_t
    Wq += (head % WEIGHTS) * (2 * D * M)
    Wk += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    t, left = tl.arange(0, BLOCK), n - base
    cd, ce = tl.arange(0, D), tl.arange(0, E)
    x = read(q, t, q_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
    a = numbers_at(peaks_q + row * n + base, t, left)
    over = reciprocal(numbers_at(den + row * n + base, t, left))
    dl = numbers_at(delta + row * n + base, t, left)
    g = read(do, t, do_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
    if CAUSAL:
        k += batch * k_b + kv * k_h + skip * k_t
        v += batch * v_b + kv * v_h + skip * v_t
        y = read(k, t, k_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        u = read(v, t, v_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        b = numbers_at(peaks + owner * n + base, t, left)
        at_token = owner * n + base
        top, s, before, _after = tops_of(
            tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
        )
        pairs = tl.dot(g, tl.trans(u), input_precision=PRECISION) * over[:, None] - dl[:, None]
        pairs = weigh(pairs, top, s, BLOCK, False).to(OPERAND)
        into = exp2(before - s)
        over *= into
        dl *= into
        slots += (owner * (blocks + 1) + block) * (E * M)
        sums += (owner * (blocks + 1) + block) * M
        some = tl.where(block > 0, M, 0)
    else:
        slots += owner * (E * M)
        sums += owner * M
        some = M
    back = tl.zeros([BLOCK, D], tl.float32)
    for at in range(0, M, R):
        S, z = state_at(slots, sums, ce, at, some, OPERAND, M, R)
        grad = tl.dot(g, S, input_precision=PRECISION) * over[:, None] - dl[:, None] * z[None, :]
        if CAUSAL:
            fk, _high, _low = features_of(y, b, Wk, bias, at, SPLIT, PRECISION, D, M, R)
            fk = fk.to(OPERAND)
            grad = tl.dot(pairs, fk, grad, input_precision=PRECISION)
        f, high, low = features_of(x, a, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        back = _returned(grad * f, high, low, back, SPLIT, OPERAND, PRECISION)
    write(dq, t, dq_t, cd, d, back * LN2, left, EVEN_N, EVEN_D)


@triton.jit
def keys(
    q, k, v, do, dk, dv, Wq, Wk, bias, peaks_q, den, delta, peaks, tops, climbs, levels, slots, sums, shares,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    curvature, n, d, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, CAUSAL: tl.constexpr, BIASED: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One block of dk or of dv for one query head (both at once would spill registers); n counts keys."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * KV + kv
    base = block * BLOCK
    skip = base.to(tl.int64)
    blocks = tl.num_programs(0)
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    dk += batch * dk_b + head * dk_h + skip * dk_t
    dv += batch * dv_b + head * dv_h + skip * dv_t
    Wq += (head % WEIGHTS) * (2 * D * M)
    Wk += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    t, left = tl.arange(0, BLOCK), n - base
    cd, ce = tl.arange(0, D), tl.arange(0, E)
    y = read(k, t, k_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
    u = read(v, t, v_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
    at_token = owner * n + base
    b = numbers_at(peaks + at_token, t, left)
    top, s, _before, last = tops_of(
        tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
    )
    leave = exp2(top - last)
    if CAUSAL:
        q += batch * q_b + head * q_h + skip * q_t
        do += batch * do_b + head * do_h + skip * do_t
        x = read(q, t, q_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        a = numbers_at(peaks_q + row * n + base, t, left)
        over = reciprocal(numbers_at(den + row * n + base, t, left))
        dl = numbers_at(delta + row * n + base, t, left)
        g = read(do, t, do_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        if DK:
            pairs = tl.dot(u, tl.trans(g), input_precision=PRECISION) * over[None, :] - dl[None, :]
            pairs = weigh(pairs, top, s, BLOCK, True).to(OPERAND)
        if DV:
            A = tl.zeros([BLOCK, BLOCK], tl.float32)
        slots += (row * (blocks + 1) + block + 1) * (E * M)
        sums += (row * (blocks + 1) + block + 1) * M
        some = tl.where(block + 1 < blocks, M, 0)
    else:
        slots += row * (E * M)
        sums += row * M
        some = M
    gv = tl.zeros([BLOCK, E], tl.float32)
    back = tl.zeros([BLOCK, D], tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    for at in range(0, M, R):
        S, z = state_at(slots, sums, ce, at, some, OPERAND, M, R)
        f, high, low = features_of(y, b, Wk, bias, at, SPLIT, PRECISION, D, M, R)
        fk = f.to(OPERAND)
        if DV:
            gv = tl.dot(fk, tl.trans(S), gv, input_precision=PRECISION)
        if DK:
            grad = (tl.dot(u, S, input_precision=PRECISION) + z[None, :]) * leave[:, None]
        if CAUSAL:
            fq, _high, _low = features_of(x, a, Wq, bias, at, SPLIT, PRECISION, D, M, R)
            fq = fq.to(OPERAND)
            if DV:
                A = tl.dot(fk, tl.trans(fq), A, input_precision=PRECISION)
            if DK:
                grad = tl.dot(pairs, fq, grad, input_precision=PRECISION)
        if DK:
            grad *= f
            share += tl.sum(grad, 1)
            back = _returned(grad, high, low, back, SPLIT, OPERAND, PRECISION)
    if DV:
        gv *= leave[:, None]
        if CAUSAL:
            A = (weigh(A, top, s, BLOCK, True) * over[None, :]).to(OPERAND)
            gv = tl.dot(A, g, gv, input_precision=PRECISION)
        write(dv, t, dv_t, ce, e, gv, left, EVEN_N, EVEN_E)
    if DK:
        if BIASED:
            tl.store(shares + row * n + base + t, share, mask=t < left)
        # curvature is in base 2 and halved
        back = (back - 2 * curvature * share[:, None] * y.to(tl.float32)) * LN2
        write(dk, t, dk_t, cd, d, back, left, EVEN_N, EVEN_D)
