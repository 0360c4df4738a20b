"""Random feature attention in Triton: features are made from q and k in every launch and never reach device memory.

    features    fq_i = 2^(q_i Wq + c − a_i),  a_i = max_r;   fk_j = 2^(k_j Wk + c − b_j),  b_j = max_r;  all in (0, 1]
    weights     top_j = b_j − curvature ‖k_j‖²/2 + key_bias_j (to base 2),  s_i = max_{j ≤ i} top_j
                w_ij = 2^(top_j − s_i) ≤ 1 for j ≤ i:   num_i = Σ_j w_ij (fq_i·fk_j) v_j,  den_i = Σ_j w_ij (fq_i·fk_j)
    forward     peaks     a, b, top and its running maximum within each block
                levels    the running maximum before each block
                states    each block by itself: Sᵀ = Σ_j leave_j v_j fk_jᵀ,  z = Σ_j leave_j fk_j
                scan      over the blocks: the state before each
                outputs   P = w ∘ fq fkᵀ,  num = P v + into (fq S),  den = P 1 + into (fq·z),  o = num / den
    backward    g_i = do_i / den_i,  δ_i = do_i·o_i / den_i
                adjoints  each block by itself: Rᵀ = Σ_i into_i g_i fq_iᵀ,  y = −Σ_i into_i δ_i fq_i
                scan      the same backwards: R and y after each block
                queries   dfq = D fk + into (g Sᵀ − δ zᵀ),  D = w ∘ (g vᵀ − δ 1ᵀ);   dq = (dfq ∘ fq) Wqᵀ
                dk, dv    dfk = Dᵀ fq + leave (v Rᵀ + yᵀ),  dv = (w ∘ fq fkᵀ)ᵀ g + leave (fk R)
                          dk = (dfk ∘ fk) Wkᵀ − curvature (dfk·fk) k,  d key_bias = dfk·fk
    moving      into_i = 2^(s_before − s_i), leave_j = 2^(top_j − s_last), keep = 2^(s_before − s_last) of a block
    precision   logarithms, normaliser and sums in float32. Operands of a product: bfloat16 for bfloat16, with W as
                a sum of two (an error in ωᵀx is one in a logarithm); tf32 for float16, six products of bfloat16 for
                float32. What is bfloat16 already (v, do) is an operand as it is: its factors wait for the product, or
                go to the features, which are rounded anyway. R, whose errors weigh most, is kept in float32

Every program walks over the features, a few dozen at a time: what it holds does not grow with their number. ‖q‖² and
the shifts a, b, s leave the quotient, so no gradient goes through them. s looks at no later token. Each element is
written by one program in a fixed order: runs are bit-equal. README.md has the floors and the measurements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LN2, LOG2E, exp2, link, reciprocal
from heedful.kernels.tiles import read, write


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _numbers(pointer, t, left):
    """One number a token, zero outside."""
    return tl.load(pointer + t, mask=t < left, other=0.0)


@triton.jit
def _logs(
    x, W, bias, at,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """x W + c to base 2 for the features from `at` on, W in one or two parts; −∞ for features beyond the last.

    Also both parts of W, for the way back."""
    cr = at + tl.arange(0, R)
    here = W + tl.arange(0, D)[:, None] * M + cr[None, :]
    high = tl.load(here)
    low = high
    logs = tl.dot(x, high, input_precision=PRECISION)
    if SPLIT:
        low = tl.load(here + D * M)
        logs = tl.dot(x, low, logs, input_precision=PRECISION)
    return logs + tl.load(bias + cr)[None, :], high, low


@triton.jit
def _features(
    x, peak, W, bias, at,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """2^(x W + c − peak) in (0, 1] for the features from `at` on; and W."""
    logs, high, low = _logs(x, W, bias, at, SPLIT, PRECISION, D, M, R)
    return exp2(logs - peak[:, None]), high, low


@triton.jit
def _returned(grad, high, low, back, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """back + grad Wᵀ, both in two parts where W is"""
    rounded = grad.to(OPERAND)
    back = tl.dot(rounded, tl.trans(high), back, input_precision=PRECISION)
    if SPLIT:
        back = tl.dot(rounded, tl.trans(low), back, input_precision=PRECISION)
        rest = (grad - rounded.to(tl.float32)).to(OPERAND)
        back = tl.dot(rest, tl.trans(high), back, input_precision=PRECISION)
    return back


@triton.jit
def _state(slots, sums, column, at, some, OPERAND: tl.constexpr, M: tl.constexpr, R: tl.constexpr):
    """Sᵀ, an operand, and z for the features from `at` on; zero where there are none yet (some = 0)."""
    r = at + tl.arange(0, R)
    S = tl.load(slots + column[:, None] * M + r[None, :], mask=(r < some)[None, :], other=0.0)
    return S.to(OPERAND), tl.load(sums + r, mask=r < some, other=0.0)


@triton.jit
def _weigh(a, top, s, BLOCK: tl.constexpr, ADJOINT: tl.constexpr):
    """w ∘ a for a[query, key]; for a[key, query] with ADJOINT."""
    i = tl.arange(0, BLOCK)
    if ADJOINT:
        seen = i[None, :] >= i[:, None]
        return a * exp2(tl.where(seen, top[:, None] - s[None, :], float("-inf")))
    else:
        seen = i[:, None] >= i[None, :]
        return a * exp2(tl.where(seen, top[None, :] - s[:, None], float("-inf")))


@triton.jit
def peaks(
    x, key_bias, W, bias, peaks, tops, climbs, maxima,
    x_b, x_h, x_t,
    curvature, n, d,
    HEADS: tl.constexpr, WEIGHTS: tl.constexpr, KEYS: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The largest logarithm of each token; of keys also top, its running maximum and its maximum over the block."""
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
        logs, _high, _low = _logs(tile, W, bias, at, SPLIT, PRECISION, D, M, R)
        peak = tl.maximum(peak, tl.max(logs, 1))
    tl.store(peaks + first + t, peak, mask=t < left)
    if KEYS:
        wide = tile.to(tl.float32)
        top = peak - curvature * tl.sum(wide * wide, 1)
        if BIASED:
            top += _numbers(key_bias + first, t, left) * LOG2E
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
    """A chunk's own Sᵀ and z for a few features: in slot c + 1 of its head; where nothing is causal, in slot c."""
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
        logs, _high, _low = _logs(x, W, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - _numbers(peaks, t, left)[:, None])
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

    Slot c is on the scale before block c; the first one forwards and the last one backwards is not read."""
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
        # chunks beyond the last add nothing and keep everything
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)


@triton.jit
def _times(tops, climbs, levels, t, left, block, blocks, CAUSAL: tl.constexpr, EVEN_N: tl.constexpr):
    """Of a block: top, s, and s before and after it."""
    if CAUSAL:
        before = tl.load(levels + block)
        last = tl.load(levels + block + 1)
        top = tl.load(tops + t, mask=t < left, other=float("-inf"))
        s = tl.maximum(_numbers(climbs, t, left), before)
        if not EVEN_N:
            s = tl.where(t < left, s, last)
    else:
        before = 0.0
        last = tl.load(levels + blocks)
        top = tl.load(tops + t, mask=t < left, other=float("-inf"))
        s = top
    return top, s, before, last


@triton.jit
def outputs(
    q, k, v, o, Wq, Wk, bias, peaks_q, den, peaks, tops, climbs, levels, slots, sums,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    n, d, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, M: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One block of outputs from the state before it, or from the state of all keys."""
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
    a = _numbers(peaks_q + row * n + base, t, left)
    if CAUSAL:
        k += batch * k_b + kv * k_h + skip * k_t
        v += batch * v_b + kv * v_h + skip * v_t
        y = read(k, t, k_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        b = _numbers(peaks + owner * n + base, t, left)
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
        f, _high, _low = _features(x, a, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        S, z = _state(slots, sums, ce, at, some, OPERAND, M, R)
        total += tl.sum(f * z[None, :], 1)
        fq = f.to(OPERAND)
        num = tl.dot(fq, tl.trans(S), num, input_precision=PRECISION)
        if CAUSAL:
            fk, _high, _low = _features(y, b, Wk, bias, at, SPLIT, PRECISION, D, M, R)
            fk = fk.to(OPERAND)
            P = tl.dot(fq, tl.trans(fk), P, input_precision=PRECISION)
    if CAUSAL:
        u = read(v, t, v_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        at_token = owner * n + base
        top, s, before, _after = _times(
            tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
        )
        into = exp2(before - s)
        P = _weigh(P, top, s, BLOCK, False)
        total = total * into + tl.sum(P, 1)
        num = tl.dot(P.to(OPERAND), u, num * into[:, None], input_precision=PRECISION)
    tl.store(den + row * n + base + t, total, mask=t < left)
    write(o, t, o_t, ce, e, num * reciprocal(total)[:, None], left, EVEN_N, EVEN_E)


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
        over = reciprocal(_numbers(den, t, left))
        if at == 0:
            tl.store(delta + t, along * over, mask=t < left)
        if CAUSAL:
            over *= exp2(before - tl.maximum(_numbers(climbs, t, left), before))
        logs, _high, _low = _logs(x, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - _numbers(peaks_q, t, left)[:, None])
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
    a = _numbers(peaks_q + row * n + base, t, left)
    over = reciprocal(_numbers(den + row * n + base, t, left))
    dl = _numbers(delta + row * n + base, t, left)
    g = read(do, t, do_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
    if CAUSAL:
        k += batch * k_b + kv * k_h + skip * k_t
        v += batch * v_b + kv * v_h + skip * v_t
        y = read(k, t, k_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        u = read(v, t, v_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        b = _numbers(peaks + owner * n + base, t, left)
        at_token = owner * n + base
        top, s, before, _after = _times(
            tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
        )
        pairs = tl.dot(g, tl.trans(u), input_precision=PRECISION) * over[:, None] - dl[:, None]
        pairs = _weigh(pairs, top, s, BLOCK, False).to(OPERAND)
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
        S, z = _state(slots, sums, ce, at, some, OPERAND, M, R)
        grad = tl.dot(g, S, input_precision=PRECISION) * over[:, None] - dl[:, None] * z[None, :]
        if CAUSAL:
            fk, _high, _low = _features(y, b, Wk, bias, at, SPLIT, PRECISION, D, M, R)
            fk = fk.to(OPERAND)
            grad = tl.dot(pairs, fk, grad, input_precision=PRECISION)
        f, high, low = _features(x, a, Wq, bias, at, SPLIT, PRECISION, D, M, R)
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
    """One block of dk or of dv for one query head, apart since both at once spill; n counts keys."""
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
    b = _numbers(peaks + at_token, t, left)
    top, s, _before, last = _times(
        tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
    )
    leave = exp2(top - last)
    if CAUSAL:
        q += batch * q_b + head * q_h + skip * q_t
        do += batch * do_b + head * do_h + skip * do_t
        x = read(q, t, q_t, cd, d, t < left, EVEN_N, EVEN_D).to(OPERAND)
        a = _numbers(peaks_q + row * n + base, t, left)
        over = reciprocal(_numbers(den + row * n + base, t, left))
        dl = _numbers(delta + row * n + base, t, left)
        g = read(do, t, do_t, ce, e, t < left, EVEN_N, EVEN_E).to(OPERAND)
        if DK:
            pairs = tl.dot(u, tl.trans(g), input_precision=PRECISION) * over[None, :] - dl[None, :]
            pairs = _weigh(pairs, top, s, BLOCK, True).to(OPERAND)
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
        S, z = _state(slots, sums, ce, at, some, OPERAND, M, R)
        f, high, low = _features(y, b, Wk, bias, at, SPLIT, PRECISION, D, M, R)
        fk = f.to(OPERAND)
        if DV:
            gv = tl.dot(fk, tl.trans(S), gv, input_precision=PRECISION)
        if DK:
            grad = (tl.dot(u, S, input_precision=PRECISION) + z[None, :]) * leave[:, None]
        if CAUSAL:
            fq, _high, _low = _features(x, a, Wq, bias, at, SPLIT, PRECISION, D, M, R)
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
            A = (_weigh(A, top, s, BLOCK, True) * over[None, :]).to(OPERAND)
            gv = tl.dot(A, g, gv, input_precision=PRECISION)
        write(dv, t, dv_t, ce, e, gv, left, EVEN_N, EVEN_E)
    if DK:
        if BIASED:
            tl.store(shares + row * n + base + t, share, mask=t < left)
        # curvature is to base 2 and halved
        back = (back - 2 * curvature * share[:, None] * y.to(tl.float32)) * LN2
        write(dk, t, dk_t, cd, d, back, left, EVEN_N, EVEN_D)
