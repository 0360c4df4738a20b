"""The Triton programs of chunked linear attention; triton.py launches them, one to three forward, one to five backward.

    tokens      in chunks, one program each, which walks its chunk in blocks with the state in registers
    forward     states    each chunk by itself: Sᵀ = Σ_j leave_j v_j φk_jᵀ, z = Σ_j leave_j φk_j
                scan      x_c ← keep_{c−1} x_{c−1} + x_c over the chunks: the state before each chunk
                outputs   each chunk from the state before it:  P = W ∘ φq φkᵀ
                          num = P v + into (φq S),  den = Σ_j P_ij + into (φq·z),  o = num / den
    backward    the normaliser is one more value column, so with ψ_i = φq_i / den_i and δ_i = do_i·o_i
                dv_j  = Σ_i w_ij (φk_j·ψ_i) do_i          dφk_j = Σ_i w_ij (v_j·do_i − δ_i) ψ_i
                dφq_i = Σ_j w_ij (do_i·v_j − δ_i) φk_j / den_i
                adjoints  each chunk by itself: δ, Rᵀ = Σ_i into_i do_i ψ_iᵀ, y = −Σ_i into_i δ_i ψ_i
                scan      the same backwards: R and y after each chunk
                queries   forwards:   dφq = (D φk + into (do Sᵀ − δ zᵀ)) / den,  D = W ∘ (do vᵀ − δ 1ᵀ)
                keys      backwards:  dφk = Dᵀ ψ + leave (v Rᵀ + yᵀ),  dv = (W ∘ ψ φkᵀ)ᵀ do + leave (φk R)
                decay     b_i gains φq_i·dφq_i and loses φk_i·dφk_i; log_decay_t gets the sum of that over i ≥ t
    angles      cos(a_i − a_j) is one more factor of W in a block. Between blocks it is cos cos + sin sin: there are two
                states, S, z of φk cos a and T, x of φk sin a, which lie r columns further on in a slot
    joining     of few chunks the scan is left out: outputs, queries and keys add up the states they need (2 launches).
                Of one chunk states and adjoints are too: z, y and δ are made in the walk (1 launch)
    weights     b = cumsum of log_decay in the block;  W_ij = exp(b_i − b_j), into_i = exp(b_i),
                leave_j = exp(b_last − b_j), keep = exp(b_last); zero between segments
    precision   states, normaliser and all sums in float32. Operands of a product: bfloat16 for bfloat16,
                tf32 for float16 (its mantissa without its overflow), 3×tf32 or IEEE for float32

do and v go to the tensor cores as they lie in memory, only φk and ψ pass through registers: this is why 1/den
stands on φq and the states are held transposed. z before each block is written by `states` (y after it by
`adjoints`), so that no other walk has to sum over tokens. Each element is written by one program in a fixed
order: runs are bit-equal. README.md has the floors, the measurements and what did not work.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2
from heedful.kernels.chunked_linear import reference

LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(reference.LEAST[torch.float32])


@triton.jit
def _phi(x, shift, FEATURE: tl.constexpr):
    if FEATURE == "elu1":
        return tl.where(x > 0, x + 1, exp2(x * LOG2E))
    elif FEATURE == "relu":
        return tl.maximum(x, 0)
    elif FEATURE == "exp":
        return exp2((x - shift[:, None]) * LOG2E)
    else:
        return x


@triton.jit
def _rows(pointer, t, stride, column, width, real, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """A tile of tokens × columns as stored, zero outside and at padding, where there may be anything."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN_N and EVEN_C:
        return tl.load(at)
    elif EVEN_C:
        return tl.load(at, mask=real[:, None], other=0)
    elif EVEN_N:
        return tl.load(at, mask=(column < width)[None, :], other=0)
    else:
        return tl.load(at, mask=real[:, None] & (column < width)[None, :], other=0)


@triton.jit
def _put(pointer, t, stride, column, width, tile, left, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """Stores a tile of tokens × columns: what lies within the `left` tokens and the width."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN_N and EVEN_C:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(t < left)[:, None] & (column < width)[None, :])


@triton.jit
def _features(
    pointer,
    shift,
    t,
    stride,
    column,
    width,
    real,
    FEATURE: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """φ of a tile. Outside it is φ(0), or zero where it has to be: with CLEAR = 1 at columns beyond the width
    (if keys are zero there, queries may hold anything), with CLEAR = 2 also at tokens that are not real."""
    x = _rows(pointer, t, stride, column, width, real, EVEN_N, EVEN_C).to(tl.float32)
    s = t
    if FEATURE == "exp":
        s = tl.load(shift + t, mask=real, other=0)
    phi = _phi(x, s, FEATURE)
    if FEATURE == "elu1" or FEATURE == "exp":
        if CLEAR > 0 and not EVEN_C:
            phi = tl.where((column < width)[None, :], phi, 0.0)
        if CLEAR == 2 and not EVEN_N:
            phi = tl.where(real[:, None], phi, 0.0)
    return phi


@triton.jit
def _slope(
    pointer,
    shift,
    t,
    stride,
    column,
    width,
    real,
    FEATURE: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
):
    """φ′ of a tile, from φ."""
    phi = _features(pointer, shift, t, stride, column, width, real, FEATURE, EVEN_N, EVEN_C, 0)
    if FEATURE == "elu1":
        return tl.minimum(phi, 1)
    elif FEATURE == "relu":
        return tl.where(phi > 0, 1.0, 0.0)
    else:
        return phi


@triton.jit
def _clock(decay, code, start, n, BLOCK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Of the block at `start`: which tokens are real, b (to base 2), their runs, and into, leave, keep."""
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
            d = tl.load(decay + t, mask=real, other=0.0) * LOG2E
            b = tl.cumsum(d, 0)
            total = tl.sum(d, 0)
        elif SEGMENTS:
            d = tl.where(real, tl.load(decay) * LOG2E, 0.0)
            b = tl.cumsum(d, 0)
            total = tl.sum(d, 0)
        else:
            d = tl.load(decay) * LOG2E
            b = d * tl.minimum(i + 1, n - start)
            total = d * tl.minimum(BLOCK, n - start)
        into = exp2(b)
        leave = exp2(total - b)
        keep = exp2(total)
    if SEGMENTS:
        into = tl.where(run == before, into, 0.0)
        leave = tl.where(run == last, leave, 0.0)
        keep = tl.where(before == last, keep, 0.0)
    return real, b, run, into, leave, keep


@triton.jit
def _turn(turns, t, n, real, TURNED: tl.constexpr, EVEN_N: tl.constexpr):
    """The cosine and the sine of each token's angle, where there are angles; zero where no token is real."""
    c, s = real, real
    if TURNED and EVEN_N:
        c, s = tl.load(turns + t), tl.load(turns + n + t)
    elif TURNED:
        c, s = tl.load(turns + t, mask=real, other=0.0), tl.load(turns + n + t, mask=real, other=0.0)
    return c, s


@triton.jit
def _turned_back(x, y, c, s):
    """x cos + y sin, token by token: what belongs to φ cos and to φ sin, brought to φ."""
    return x * c[:, None] + y * s[:, None]


@triton.jit
def _reciprocal(den):
    """1 / den; zero where a row attends to nothing, or to less than the smallest normal float32."""
    some = tl.abs(den) >= TINY
    return tl.where(some, 1 / tl.where(some, den, 1.0), 0.0)


@triton.jit
def _weigh(
    a,
    b,
    run,
    c,
    s,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    ADJOINT: tl.constexpr,
):
    """W ∘ a for a[query, key]; for a[key, query] with ADJOINT."""
    i = tl.arange(0, BLOCK)
    if TURNED:
        a = a * (c[:, None] * c[None, :] + s[:, None] * s[None, :])
    seen = i[None, :] >= i[:, None] if ADJOINT else i[:, None] >= i[None, :]
    if SEGMENTS:
        seen = seen & (run[:, None] == run[None, :])
    if DECAY > 0:
        gap = (b[None, :] - b[:, None]) if ADJOINT else (b[:, None] - b[None, :])
        return a * exp2(tl.where(seen, gap, float("-inf")))
    else:
        return tl.where(seen, a, 0.0)


@triton.jit
def states(
    k,
    v,
    shift,
    turns,
    decay,
    code,
    slots,
    keeps,
    sums,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    n,
    span,
    chunks,
    r,
    e,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
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
    f = r * 2 if TURNED else r
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * f + cr
    S = tl.zeros([E, R], tl.float32)
    z = tl.zeros([R], tl.float32)
    T, x = S, z
    kept = 1.0
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, _b, _run, _into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        fk = _features(k, shift, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        if NORMALISE and CAUSAL:
            _note(sums + at // BLOCK * f, z, x, cr, r, TURNED)
        if DECAY > 0 or SEGMENTS:
            fk = fk * leave[:, None]
            S = S * keep
            z = z * keep
            kept = kept * keep
        if TURNED:
            c, s = _turn(turns, t, n, real, TURNED, EVEN_N)
            sine = fk * s[:, None]
            fk = fk * c[:, None]
            if DECAY > 0 or SEGMENTS:
                T = T * keep
                x = x * keep
            T = tl.dot(tl.trans(vb), sine.to(OPERAND), T, input_precision=PRECISION)
            if NORMALISE:
                x += tl.sum(sine, 0)
        S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if NORMALISE:
            z += tl.sum(fk, 0)
    slot = slots + (row * (chunks + 1) + chunk + 1) * (f * e + f if NORMALISE else f * e)
    _hold(slot, cr, ce, r, f, e, S, z, r, NORMALISE)
    if TURNED:
        _hold(slot + r, cr, ce, r, f, e, T, x, r, NORMALISE)
    if DECAY > 0 or SEGMENTS:
        if part == 0:
            tl.store(keeps + row * chunks + chunk, kept)


@triton.jit
def _link(keep1, x1, keep2, x2):
    return keep1 * keep2, x1 * keep2 + x2


@triton.jit
def scan(
    slots,
    keeps,
    end,
    chunks,
    width,
    GIVEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """x_c ← keep_{c−1} x_{c−1} + x_c over the slots of a head, or x_c ← keep_c x_{c+1} + x_c backwards.

    The slot it starts from counts as zero unless GIVEN; what it ends with is also left in `end`.
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
            kept, own = tl.associative_scan((tl.broadcast_to(keep[:, None], (GROUP, TILE)), own), 0, _link)
            own += kept * x[None, :]
        else:
            own = tl.cumsum(own, 0) + x[None, :]
        tl.store(here, own, mask=mask)
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)
    tl.store(end + row * width + column, x, mask=column < width)


@triton.jit
def _held(slot, cr, ce, f, e, rows, NORMALISE: tl.constexpr):
    """Sᵀ and z of a slot of f features, the first `rows` of them."""
    S = tl.load(slot + ce[:, None] * f + cr[None, :], mask=(ce < e)[:, None] & (cr < rows)[None, :], other=0.0)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if NORMALISE:
        z = tl.load(slot + f * e + cr, mask=cr < rows, other=0.0)
    return S, z


@triton.jit
def _hold(slot, cr, ce, r, f, e, S, z, rows, NORMALISE: tl.constexpr):
    """Stores r of f features; of z the first `rows`."""
    tl.store(slot + ce[:, None] * f + cr[None, :], S, mask=(ce < e)[:, None] & (cr < r)[None, :])
    if NORMALISE:
        tl.store(slot + f * e + cr, z, mask=cr < rows)


@triton.jit
def _note(sums, z, x, cr, r, TURNED: tl.constexpr):
    """Stores z of a block, and x, that of the sines."""
    tl.store(sums, z, mask=cr < r)
    if TURNED:
        tl.store(sums + r, x, mask=cr < r)


@triton.jit
def _start(slot, cr, ce, r, f, e, GIVEN: tl.constexpr, NORMALISE: tl.constexpr):
    """The state of a slot where one is given, which may be no memory at all where none is."""
    S = tl.zeros([ce.shape[0], cr.shape[0]], tl.float32)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if GIVEN:
        S, z = _held(slot, cr, ce, f, e, r, NORMALISE)
    return S, z


@triton.jit
def _before(
    slots,
    keeps,
    chunk,
    cr,
    ce,
    r,
    f,
    e,
    GIVEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LAUNCHES: tl.constexpr,
):
    """The state before a chunk: scanned already (3 launches), the sum of all chunks before it (2), or given (1)."""
    width = f * e + f if NORMALISE else f * e
    if LAUNCHES == 3:
        if CAUSAL:
            slots += chunk * width
        S, z = _held(slots, cr, ce, f, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    else:
        S, z = _start(slots, cr, ce, r, f, e, GIVEN, NORMALISE)
    if LAUNCHES == 2:
        for c in range(0, chunk):
            own, own_z = _held(slots + (c + 1) * width, cr, ce, f, e, r, NORMALISE)
            if WEIGHTED:
                keep = tl.load(keeps + c)
                S = S * keep
                z = z * keep
            S += own
            z += own_z
    return S, z


@triton.jit
def _after(
    slots,
    keeps,
    chunk,
    chunks,
    cr,
    ce,
    r,
    f,
    e,
    GIVEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    LAUNCHES: tl.constexpr,
):
    """The adjoint after a chunk, in the same three ways."""
    width = f * e + f if NORMALISE else f * e
    if LAUNCHES == 3:
        if CAUSAL:
            slots += (chunk + 1) * width
            S, y = _held(slots, cr, ce, f, e, tl.where(chunk + 1 - GIVEN < chunks, r, 0), NORMALISE)
        else:
            S, y = _held(slots, cr, ce, f, e, r, NORMALISE)
    else:
        S, y = _start(slots + chunks * width, cr, ce, r, f, e, GIVEN, NORMALISE)
    if LAUNCHES == 2:
        for step in range(1, chunks - chunk):
            c = chunks - step
            own, own_y = _held(slots + c * width, cr, ce, f, e, r, NORMALISE)
            if WEIGHTED:
                keep = tl.load(keeps + c)
                S = S * keep
                y = y * keep
            S += own
            y += own_y
    return S, y


@triton.jit
def outputs(
    q,
    k,
    v,
    o,
    den,
    shift_q,
    shift_k,
    turns,
    decay,
    code,
    slots,
    keeps,
    sums,
    final,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    n,
    span,
    chunks,
    r,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    GIVEN: tl.constexpr,
    LAUNCHES: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One chunk's outputs from the state before it; splits e. In one launch the chunk is the whole sequence."""
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
    f = r * 2 if TURNED else r
    width = f * e + f if NORMALISE else f * e
    slots += owner * (chunks + 1 if CAUSAL else 1) * width
    keeps += owner * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, z = _before(slots, keeps, chunk, cr, ce, r, f, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    T, x = S, z
    if TURNED:
        T, x = _before(slots + r, keeps, chunk, cr, ce, r, f, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    writes = (part == 0) & (head % (H // HEADS) == 0)  # one program a state
    if NORMALISE:
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * f + cr
    CLEAR: tl.constexpr = 2 if SEGMENTS or LAUNCHES == 1 else 1
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        phi = _features(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
        fq = phi.to(OPERAND)
        c, s = _turn(turns, t, n, real, TURNED, EVEN_N)
        acc = tl.dot(fq, tl.trans(S.to(OPERAND)), input_precision=PRECISION)
        if TURNED:
            acc = _turned_back(acc, tl.dot(fq, tl.trans(T.to(OPERAND)), input_precision=PRECISION), c, s)
        if NORMALISE:
            zs, xs = z, x
            if CAUSAL and LAUNCHES > 1:
                zs += tl.load(sums + at // BLOCK * f, mask=cr < r, other=0.0)
                if TURNED:
                    xs += tl.load(sums + at // BLOCK * f + r, mask=cr < r, other=0.0)
            if TURNED:
                below = tl.sum(phi * (c[:, None] * zs[None, :] + s[:, None] * xs[None, :]), 1)
            else:
                below = tl.sum(phi * zs[None, :], 1)
        if CAUSAL:
            fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, CLEAR)
            vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
            a = tl.dot(fq, tl.trans(fk.to(OPERAND)), input_precision=PRECISION)
            a = _weigh(a, b, run, c, s, BLOCK, DECAY, SEGMENTS, TURNED, False)
            if DECAY > 0 or SEGMENTS:
                acc = acc * into[:, None]
                fk = fk * leave[:, None]
                S = S * keep
            if NORMALISE:
                if LAUNCHES == 1:
                    if writes:
                        _note(sums + at // BLOCK * f, z, x, cr, r, TURNED)
                if DECAY > 0 or SEGMENTS:
                    below = below * into
                    z = z * keep
                below += tl.sum(a, 1)
            acc = tl.dot(a.to(OPERAND), vb, acc, input_precision=PRECISION)
            if TURNED:
                sine = fk * s[:, None]
                fk = fk * c[:, None]
                if DECAY > 0 or SEGMENTS:
                    T = T * keep
                    x = x * keep
                T = tl.dot(tl.trans(vb), sine.to(OPERAND), T, input_precision=PRECISION)
                if NORMALISE and LAUNCHES == 1:
                    x += tl.sum(sine, 0)
            if NORMALISE and LAUNCHES == 1:
                z += tl.sum(fk, 0)
            S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if SEGMENTS:
            acc = tl.where(real[:, None], acc, 0.0)
        if NORMALISE:
            if SEGMENTS:
                below = tl.where(real, below, 0.0)
            acc = acc * _reciprocal(below)[:, None]
            if part == 0:
                tl.store(den + t, below, mask=base + t < n)
        _put(o, t, o_t, ce, e, acc, n - base, EVEN_N, EVEN_C)
    if LAUNCHES < 3:
        if (chunk == chunks - 1) & (head % (H // HEADS) == 0):
            if NORMALISE and LAUNCHES == 2:
                z += tl.load(slots + chunks * width + f * e + cr, mask=cr < r, other=0.0)
                if TURNED:
                    x += tl.load(slots + chunks * width + f * e + r + cr, mask=cr < r, other=0.0)
            final += owner * width
            _hold(final, cr, ce, r, f, e, S, z, tl.where(part == 0, r, 0), NORMALISE)
            if TURNED:
                _hold(final + r, cr, ce, r, f, e, T, x, tl.where(part == 0, r, 0), NORMALISE)


@triton.jit
def adjoints(
    q,
    o,
    do,
    den,
    delta,
    shift,
    turns,
    decay,
    code,
    slots,
    keeps,
    sums,
    q_b,
    q_h,
    q_t,
    o_b,
    o_h,
    o_t,
    do_b,
    do_h,
    do_t,
    n,
    span,
    chunks,
    r,
    e,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
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
    f = r * 2 if TURNED else r
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * f + cr
    S = tl.zeros([E, R], tl.float32)
    y = tl.zeros([R], tl.float32)
    T, x = S, y
    kept = 1.0
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, _b, _run, into, _leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        c, s = _turn(turns, t, n, real, TURNED, EVEN_N)
        if NORMALISE and CAUSAL:
            _note(sums + at // BLOCK * f, y, x, cr, r, TURNED)
        if DECAY > 0 or SEGMENTS:
            S = S * keep
            y = y * keep
            kept = kept * keep
            if TURNED:
                T = T * keep
                x = x * keep
        for h in tl.static_range(GROUP):
            psi = _features(q + h * q_h, shift + h * n, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
            dob = _rows(do + h * do_h, t, do_t, ce, e, real, EVEN_N, EVEN_C)
            scale = into
            if NORMALISE:
                scale = scale * _reciprocal(tl.load(den + h * n + t, mask=real, other=0.0))
                ob = _rows(o + h * o_h, t, o_t, ce, e, real, EVEN_N, EVEN_C)
                d = tl.sum(dob.to(tl.float32) * ob.to(tl.float32), 1)
                if part == 0:
                    tl.store(delta + h * n + t, d, mask=base + t < n)
            if NORMALISE or DECAY > 0 or SEGMENTS:
                psi = psi * scale[:, None]
            if TURNED:
                sine = psi * s[:, None]
                psi = psi * c[:, None]
                T = tl.dot(tl.trans(dob.to(OPERAND)), sine.to(OPERAND), T, input_precision=PRECISION)
                if NORMALISE:
                    x -= tl.sum(sine * d[:, None], 0)
            S = tl.dot(tl.trans(dob.to(OPERAND)), psi.to(OPERAND), S, input_precision=PRECISION)
            if NORMALISE:
                y -= tl.sum(psi * d[:, None], 0)
    slot = slots + (row * (chunks + 1) + chunk) * (f * e + f if NORMALISE else f * e)
    _hold(slot, cr, ce, r, f, e, S, y, r, NORMALISE)
    if TURNED:
        _hold(slot + r, cr, ce, r, f, e, T, x, r, NORMALISE)
    if DECAY > 0 or SEGMENTS:
        if part == 0:
            tl.store(keeps + row * chunks + chunk, kept)


@triton.jit
def _dots(o, do, t, stride, column, width, real, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """δ_i = do_i·o_i."""
    ob = _rows(o, t, stride, column, width, real, EVEN_N, EVEN_C)
    return tl.sum(do.to(tl.float32) * ob.to(tl.float32), 1)


@triton.jit
def _precisely(a, S, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """a S with all the digits of S: in three parts, where operands have a third of them."""
    if OPERAND == tl.bfloat16:  # noqa: SIM300
        high = S.to(OPERAND)
        rest = S - high.to(tl.float32)
        middle = rest.to(OPERAND)
        low = (rest - middle.to(tl.float32)).to(OPERAND)
        return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))
    else:
        return tl.dot(a, S, input_precision=PRECISION)


@triton.jit
def _flow(x, by, OPERAND: tl.constexpr):
    """x·by, token by token, with `by` as rounded as it is where it goes into a product."""
    return tl.sum(x * by.to(OPERAND).to(tl.float32), 1)


@triton.jit
def _queries(
    pid,
    q,
    k,
    v,
    o,
    do,
    den,
    delta,
    dq,
    shift_q,
    shift_k,
    turns,
    decay,
    code,
    slots,
    keeps,
    sums,
    gain,
    rows,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    do_b,
    do_h,
    do_t,
    dq_b,
    dq_h,
    dq_t,
    n,
    span,
    chunks,
    r,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    GIVEN: tl.constexpr,
    LAUNCHES: tl.constexpr,
    CLOCKED: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
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
    f = r * 2 if TURNED else r
    width = f * e + f if NORMALISE else f * e
    slots += owner * (chunks + 1 if CAUSAL else 1) * width
    keeps += owner * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, z = _before(slots, keeps, chunk, cr, ce, r, f, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    T, x = S, z
    if TURNED:
        T, x = _before(slots + r, keeps, chunk, cr, ce, r, f, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    if NORMALISE:
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * f + cr
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        raw = _rows(do, t, do_t, ce, e, real, EVEN_N, EVEN_C)
        dob = raw.to(OPERAND)
        c, s = _turn(turns, t, n, real, TURNED, EVEN_N)
        grad = tl.zeros([BLOCK, R], tl.float32)
        sine = grad
        d = tl.zeros([BLOCK, BLOCK], tl.float32)
        if NORMALISE:
            zs, xs = z, x
            if LAUNCHES == 1:
                minus = -_dots(o, raw, t, o_t, ce, e, real, EVEN_N, EVEN_C)
                zs = tl.load(sums + at // BLOCK * f, mask=cr < r, other=0.0)
                if TURNED:
                    xs = tl.load(sums + at // BLOCK * f + r, mask=cr < r, other=0.0)
            else:
                minus = -tl.load(delta + t, mask=real, other=0.0)
                if CAUSAL:
                    zs += tl.load(sums + at // BLOCK * f, mask=cr < r, other=0.0)
                    if TURNED:
                        xs += tl.load(sums + at // BLOCK * f + r, mask=cr < r, other=0.0)
            grad += minus[:, None] * zs[None, :]
            sine += minus[:, None] * xs[None, :]
            d += minus[:, None]
        if CLOCKED:
            psi = _features(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
            if NORMALISE:
                psi = psi * _reciprocal(tl.load(den + t, mask=real, other=0.0))[:, None]
            inner, far = _precisely(dob, S, OPERAND, PRECISION), psi * into[:, None]
            if TURNED:
                inner_sine, far_sine = _precisely(dob, T, OPERAND, PRECISION), far * s[:, None]
                far = far * c[:, None]
                turn = _flow(inner_sine, far_sine, OPERAND) + tl.sum(sine * far_sine, 1)
                sine += inner_sine
                turn += _flow(inner, far, OPERAND) + tl.sum(grad * far, 1)
            else:
                turn = _flow(inner, far, OPERAND) + tl.sum(grad * far, 1)
            grad += inner
        else:
            grad = tl.dot(dob, S.to(OPERAND), grad, input_precision=PRECISION)
            if TURNED:
                sine = tl.dot(dob, T.to(OPERAND), sine, input_precision=PRECISION)
        if TURNED:
            grad = _turned_back(grad, sine, c, s)
        if CAUSAL:
            fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2 if SEGMENTS else 1)
            vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
            d = tl.dot(dob, tl.trans(vb), d, input_precision=PRECISION)
            d = _weigh(d, b, run, c, s, BLOCK, DECAY, SEGMENTS, TURNED, False).to(OPERAND)
            if DECAY > 0 or SEGMENTS:
                grad = grad * into[:, None]
            if CLOCKED:
                inner = tl.dot(d, fk.to(OPERAND), input_precision=PRECISION)
                turn += _flow(inner, psi, OPERAND)
                grad += inner
            else:
                grad = tl.dot(d, fk.to(OPERAND), grad, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                fk = fk * leave[:, None]
                S = S * keep
                z = z * keep
            if TURNED:
                if DECAY > 0 or SEGMENTS:
                    T = T * keep
                    x = x * keep
                T = tl.dot(tl.trans(vb), (fk * s[:, None]).to(OPERAND), T, input_precision=PRECISION)
                fk = fk * c[:, None]
            S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if CLOCKED:
            tl.store(gain + t, tl.where(real, turn, 0.0), mask=base + t < n)
        if FEATURE != "identity":
            grad = grad * _slope(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C)
        if NORMALISE:
            grad = grad * _reciprocal(tl.load(den + t, mask=real, other=0.0))[:, None]
        if SEGMENTS:
            grad = tl.where(real[:, None], grad, 0.0)
        _put(dq, t, dq_t, cr, r, grad, n - base, EVEN_N, EVEN_C)


@triton.jit
def _keys(
    pid,
    q,
    k,
    v,
    o,
    do,
    den,
    delta,
    dk,
    dv,
    shift_q,
    shift_k,
    turns,
    decay,
    code,
    slots,
    keeps,
    sums,
    first,
    loss,
    rows,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    do_b,
    do_h,
    do_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    n,
    span,
    chunks,
    r,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    GIVEN: tl.constexpr,
    FIRST: tl.constexpr,
    LAUNCHES: tl.constexpr,
    CLOCKED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One chunk's dk and dv; where the state is too wide for one program, dk alone splits r, dv alone e.

    Sums over the query heads that share the state; n counts keys. Without CAUSAL all queries are in it.
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
    loss += (part * rows + row) * n + base  # a decay has no heads that share a state
    den += token
    delta += token
    shift_q += token
    shift_k += (batch * KV + kv) * n + base
    turns += batch * 2 * n + base
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr = (0 if DV else part * R) + tl.arange(0, R)
    ce = (0 if DK else part * E) + tl.arange(0, E)
    f = r * 2 if TURNED else r
    width = f * e + f if NORMALISE else f * e
    slots += row * (chunks + 1 if CAUSAL else 1) * width
    keeps += row * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, y = _after(slots, keeps, chunk, chunks, cr, ce, r, f, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    T, x = S, y
    if TURNED:
        T, x = _after(slots + r, keeps, chunk, chunks, cr, ce, r, f, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    if NORMALISE:
        sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * f + cr
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        phi = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2 if SEGMENTS else 1)
        fk = phi.to(OPERAND)
        vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        c, s = _turn(turns, t, n, real, TURNED, EVEN_N)
        held, held_sine = S.to(OPERAND), T.to(OPERAND)
        if DV:
            gv = tl.dot(fk, tl.trans(held), input_precision=PRECISION)
            if TURNED:
                gv = _turned_back(gv, tl.dot(fk, tl.trans(held_sine), input_precision=PRECISION), c, s)
            if DECAY > 0 or SEGMENTS:
                gv = gv * leave[:, None]
        if DK:
            gk = tl.zeros([BLOCK, R], tl.float32)
            sine = gk
            if NORMALISE:
                ys, xs = y, x
                if CAUSAL and LAUNCHES > 1:
                    ys += tl.load(sums + at // BLOCK * f, mask=cr < r, other=0.0)
                    if TURNED:
                        xs += tl.load(sums + at // BLOCK * f + r, mask=cr < r, other=0.0)
                gk += ys[None, :]
                sine += xs[None, :]
            if CLOCKED:
                inner, far = _precisely(vb, S, OPERAND, PRECISION), phi * leave[:, None]
                if TURNED:
                    inner_sine, far_sine = _precisely(vb, T, OPERAND, PRECISION), far * s[:, None]
                    far = far * c[:, None]
                    turn = _flow(inner_sine, far_sine, OPERAND) + tl.sum(sine * far_sine, 1)
                    sine += inner_sine
                    turn += _flow(inner, far, OPERAND) + tl.sum(gk * far, 1)
                else:
                    turn = _flow(inner, far, OPERAND) + tl.sum(gk * far, 1)
                gk += inner
            else:
                gk = tl.dot(vb, held, gk, input_precision=PRECISION)
                if TURNED:
                    sine = tl.dot(vb, held_sine, sine, input_precision=PRECISION)
            if TURNED:
                gk = _turned_back(gk, sine, c, s)
            if DECAY > 0 or SEGMENTS:
                gk = gk * leave[:, None]
        if CAUSAL:
            if DECAY > 0 or SEGMENTS:
                S = S * keep
                y = y * keep
                if TURNED:
                    T = T * keep
                    x = x * keep
            for h in tl.static_range(GROUP):
                psi = _features(q + h * q_h, shift_q + h * n, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
                raw = _rows(do + h * do_h, t, do_t, ce, e, real, EVEN_N, EVEN_C)
                dob = raw.to(OPERAND)
                if NORMALISE and DK:
                    if LAUNCHES == 1:
                        delta_h = _dots(o + h * o_h, raw, t, o_t, ce, e, real, EVEN_N, EVEN_C)
                    else:
                        delta_h = tl.load(delta + h * n + t, mask=real, other=0.0)
                if NORMALISE:
                    psi = psi * _reciprocal(tl.load(den + h * n + t, mask=real, other=0.0))[:, None]
                if NORMALISE and DK and LAUNCHES == 1:
                    if TURNED:
                        y -= tl.sum(psi * (delta_h * into * c)[:, None], 0)
                        x -= tl.sum(psi * (delta_h * into * s)[:, None], 0)
                    else:
                        y -= tl.sum(psi * (delta_h * into)[:, None], 0)
                fq = psi.to(OPERAND)
                if DV:
                    a = tl.dot(fk, tl.trans(fq), input_precision=PRECISION)
                    a = _weigh(a, b, run, c, s, BLOCK, DECAY, SEGMENTS, TURNED, True).to(OPERAND)
                    gv = tl.dot(a, dob, gv, input_precision=PRECISION)
                if DK:
                    d = tl.zeros([BLOCK, BLOCK], tl.float32)
                    if NORMALISE:
                        d -= delta_h[None, :]
                    d = tl.dot(vb, tl.trans(dob), d, input_precision=PRECISION)
                    d = _weigh(d, b, run, c, s, BLOCK, DECAY, SEGMENTS, TURNED, True).to(OPERAND)
                    if CLOCKED:
                        inner = tl.dot(d, fq, input_precision=PRECISION)
                        turn += _flow(inner, fk, OPERAND)
                        gk += inner
                    else:
                        gk = tl.dot(d, fq, gk, input_precision=PRECISION)
                if DECAY > 0 or SEGMENTS:
                    psi = psi * into[:, None]
                if TURNED:
                    T = tl.dot(tl.trans(dob), (psi * s[:, None]).to(OPERAND), T, input_precision=PRECISION)
                    psi = psi * c[:, None]
                if DECAY > 0 or SEGMENTS or TURNED:
                    fq = psi.to(OPERAND)
                S = tl.dot(tl.trans(dob), fq, S, input_precision=PRECISION)
        if DK:
            if CLOCKED:
                tl.store(loss + t, tl.where(real, turn, 0.0), mask=base + t < n)
            if FEATURE != "identity":
                gk = gk * _slope(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C)
            if SEGMENTS:
                gk = tl.where(real[:, None], gk, 0.0)
            _put(dk, t, dk_t, cr, r, gk, n - base, EVEN_N, EVEN_C)
        if DV:
            if SEGMENTS:
                gv = tl.where(real[:, None], gv, 0.0)
            _put(dv, t, dv_t, ce, e, gv, n - base, EVEN_N, EVEN_C)
    if FIRST and DK and LAUNCHES < 3:
        if chunk == 0:
            if NORMALISE and LAUNCHES == 2:
                y += tl.load(slots + f * e + cr, mask=cr < r, other=0.0)
                if TURNED:
                    x += tl.load(slots + f * e + r + cr, mask=cr < r, other=0.0)
            first += row * width
            _hold(first, cr, ce, r, f, e, S, y, r, NORMALISE)
            if TURNED:
                _hold(first + r, cr, ce, r, f, e, T, x, r, NORMALISE)


@triton.jit
def gradients(
    q,
    k,
    v,
    o,
    do,
    den,
    delta,
    dq,
    dk,
    dv,
    shift_q,
    shift_k,
    turns_q,
    turns_k,
    decay,
    code,
    slots,
    keeps,
    sums,
    back,
    keeps_back,
    after,
    first,
    gain,
    loss,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    o_b,
    o_h,
    o_t,
    do_b,
    do_h,
    do_t,
    dq_b,
    dq_h,
    dq_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    n,
    m,
    span,
    chunks_q,
    chunks_k,
    split,
    rows,
    r,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    HEADS: tl.constexpr,
    GIVEN: tl.constexpr,
    GIVEN_BACK: tl.constexpr,
    FIRST: tl.constexpr,
    LAUNCHES: tl.constexpr,
    CLOCKED: tl.constexpr,
    QUERIES: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dq of some programs, dk and dv of the others: each leaves multiprocessors idle that the other can use."""
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
