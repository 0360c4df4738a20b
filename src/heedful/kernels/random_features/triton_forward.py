"""The kernels of the forward pass, and the scan of both; triton.py says what they compute and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LOG2E, exp2, link, reciprocal
from heedful.kernels.random_features.triton_features import features_of, logs_of, numbers_at, state_at, tops_of, weigh
from heedful.kernels.triton_tiles import read, write


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def peaks(
    x, key_bias, W, bias, peaks, tops, climbs, maxima,
    x_b, x_h, x_t,
    curvature, n, d,
    HEADS: tl.constexpr, WEIGHTS: tl.constexpr, KEYS: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The largest logarithm of each token; for keys also top, its running maximum and its maximum over the block."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    base = block * BLOCK
    x += batch * x_b + head * x_h + base.to(tl.int64) * x_t
    W += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    t, left = tl.arange(0, BLOCK), n - base
    first = row * n + base
    tile = read(x, t, x_t, tl.arange(0, D), d, t < left, EVEN_N, EVEN_D).to(OPERAND)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, M, R):
        logs, _high, _low = logs_of(tile, W, bias, at, SPLIT, PRECISION, D, M, R)
        peak = tl.maximum(peak, tl.max(logs, 1))
    tl.store(peaks + first + t, peak, mask=t < left)
    if KEYS:
        wide = tile.to(tl.float32)
        top = peak - curvature * tl.sum(wide * wide, 1)
        if BIASED:
            top += numbers_at(key_bias + first, t, left) * LOG2E
        top = tl.where(t < left, top, float("-inf"))
        tl.store(tops + first + t, top, mask=t < left)
        tl.store(climbs + first + t, tl.associative_scan(top, 0, _larger), mask=t < left)
        tl.store(maxima + row * tl.num_programs(0) + block, tl.max(top, 0))


@triton.jit
def levels(maxima, levels, blocks, GROUP: tl.constexpr):
    """The running maximum of a row before each block, and after the last."""
    row = tl.program_id(0)
    maxima += row * blocks
    levels += row * (blocks + 1)
    tl.store(levels, float("-inf"))
    level = -float("inf")
    for at in range(0, blocks, GROUP):
        c = at + tl.arange(0, GROUP)
        own = tl.load(maxima + c, mask=c < blocks, other=float("-inf"))
        up = tl.maximum(tl.associative_scan(own, 0, _larger), level)
        tl.store(levels + c + 1, up, mask=c < blocks)
        level = tl.max(up, 0)


@triton.jit
def states(
    k, v, W, bias, peaks, tops, levels, slots, sums,
    k_b, k_h, k_t, v_b, v_h, v_t,
    n, span, chunks, d, e,
    KV: tl.constexpr, WEIGHTS: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A chunk's own Sᵀ and z for a few features, in slot c + 1 of its head; without CAUSAL in slot c."""
    chunk = tl.program_id(0) // (M // R)
    at = tl.program_id(0) % (M // R) * R
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // KV, row % KV
    base = chunk * span
    k += batch * k_b + head * k_h + base.to(tl.int64) * k_t
    v += batch * v_b + head * v_h + base.to(tl.int64) * v_t
    peaks += row * n + base
    tops += row * n + base
    W += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    cd, ce, cr = tl.arange(0, D), tl.arange(0, E), at + tl.arange(0, R)
    blocks = tl.cdiv(n, BLOCK)
    last = tl.load(levels + row * (blocks + 1) + (chunk + 1 if CAUSAL else blocks))
    S = tl.zeros([E, R], tl.float32)
    z = tl.zeros([R], tl.float32)
    left = n - base
    for step in range(0, tl.minimum(span, left), BLOCK):
        t = step + tl.arange(0, BLOCK)
        x = read(k, t, k_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        u = read(v, t, v_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        logs, _high, _low = logs_of(x, W, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - numbers_at(peaks, t, left)[:, None])
        leave = exp2(tl.load(tops + t, mask=t < left, other=float("-inf")) - last)
        f *= leave[:, None]
        z += tl.sum(f, 0)
        S = tl.dot(tl.trans(u), f.to(OPERAND), S, input_precision=PRECISION)
    slot = row * (chunks + CAUSAL) + chunk + CAUSAL
    tl.store(slots + slot * (E * M) + ce[:, None] * M + cr[None, :], S)
    tl.store(sums + slot * M + cr, z)


@triton.jit
def scan(
    slots, levels, chunks, width,
    G: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x_{c+1} ← keep_c x_c + x_{c+1} over the slots of a head from zero, or x_c ← keep_c x_{c+1} + x_c backwards.

    Slot c is on the scale before block c. The first slot forwards, and the last one backwards, is not read."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    slots += row * (chunks + 1) * width
    levels += row // G * (chunks + 1)
    inside = (column < width)[None, :]
    x = tl.zeros([TILE], tl.float32)
    for at in range(0, chunks, GROUP):
        c = at + tl.arange(0, GROUP)
        if REVERSE:
            c = chunks - 1 - c
        ok = (c >= 0) & (c < chunks)
        here = slots + (c if REVERSE else c + 1)[:, None] * width + column[None, :]
        own = tl.load(here, mask=ok[:, None] & inside, other=0.0).to(tl.float32)
        a = tl.load(levels + c, mask=ok, other=0.0)
        b = tl.load(levels + c + 1, mask=ok, other=0.0)
        keep = exp2(a - b)
        kept, own = tl.associative_scan((tl.broadcast_to(keep[:, None], (GROUP, TILE)), own), 0, link)
        own += kept * x[None, :]
        tl.store(here, own, mask=ok[:, None] & inside)
        # chunks beyond the last add nothing and have keep = 1
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)


@triton.jit
def outputs(
    q, k, v, o, Wq, Wk, bias, peaks_q, den, peaks, tops, climbs, levels, slots, sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    n, d, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, M: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One block of outputs from the state before it, or without CAUSAL from the state of all keys."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * KV + kv
    base = block * BLOCK
    skip = base.to(tl.int64)
    blocks = tl.num_programs(0)
    q += batch * q_b + head * q_h + skip * q_t
    o += batch * o_b + head * o_h + skip * o_t
    Wq += (head % WEIGHTS) * (2 * D * M)
    Wk += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    t, left = tl.arange(0, BLOCK), n - base
    cd, ce = tl.arange(0, D), tl.arange(0, E)
    x = read(q, t, q_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
    a = numbers_at(peaks_q + row * n + base, t, left)
    if CAUSAL:
        k += batch * k_b + kv * k_h + skip * k_t
        v += batch * v_b + kv * v_h + skip * v_t
        y = read(k, t, k_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        b = numbers_at(peaks + owner * n + base, t, left)
        slots += (owner * (blocks + 1) + block) * (E * M)
        sums += (owner * (blocks + 1) + block) * M
        P = tl.zeros([BLOCK, BLOCK], tl.float32)
        some = tl.where(block > 0, M, 0)
    else:
        slots += owner * (E * M)
        sums += owner * M
        some = M
    num = tl.zeros([BLOCK, E], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, M, R):
        f, _high, _low = features_of(x, a, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        S, z = state_at(slots, sums, ce, at, some, OPERAND, M, R)
        total += tl.sum(f * z[None, :], 1)
        fq = f.to(OPERAND)
        num = tl.dot(fq, tl.trans(S), num, input_precision=PRECISION)
        if CAUSAL:
            fk, _high, _low = features_of(y, b, Wk, bias, at, SPLIT, PRECISION, D, M, R)
            fk = fk.to(OPERAND)
            P = tl.dot(fq, tl.trans(fk), P, input_precision=PRECISION)
    if CAUSAL:
        u = read(v, t, v_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        at_token = owner * n + base
        top, s, before, _after = tops_of(
            tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
        )
        into = exp2(before - s)
        P = weigh(P, top, s, BLOCK, False)
        total = total * into + tl.sum(P, 1)
        num = tl.dot(P.to(OPERAND), u, num * into[:, None], input_precision=PRECISION)
    tl.store(den + row * n + base + t, total, mask=t < left)
    write(o, t, o_t, ce, e, num * reciprocal(total)[:, None], left, EVEN_N, EVEN_E)
