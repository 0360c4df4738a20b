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
                decay     b_i gains φq_i·dφq_i and loses φk_i·dφk_i; log_decay_t gets the sum of that over i ≥ t.
                          What a pair of tokens adds to both has to be the same number, rounded alike: see README.md
    angles      cos(a_i − a_j) = cos cos + sin sin: twice the features, φ cos a and φ sin a in turn, made in registers;
                their gradients are turned back there
    joining     of few chunks the scan is left out: outputs, queries and keys add up the states they need (2 launches).
                Of one chunk states and adjoints are too: z, y and δ are made in the walk (1 launch)
    weights     b = cumsum of log_decay in the block;  W_ij = exp(b_i − b_j), into_i = exp(b_i),
                leave_j = exp(b_last − b_j), keep = exp(b_last); zero between segments
    precision   states, normaliser and all sums in float32. Operands of a product: bfloat16 for bfloat16,
                tf32 for float16 (its mantissa without its overflow), six products of bfloat16 for float32

do and v go to the tensor cores as they lie in memory, only φk and ψ pass through registers: this is why 1/den
stands on φq and the states are held transposed. z before each block is written by `states` (y after it by
`adjoints`), so that no other walk has to sum over tokens. Each element is written by one program in a fixed
order: runs are bit-equal. README.md has the floors, the measurements and what did not work.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LOG2E, exp2, link, reciprocal, tf32, times
from heedful.kernels.tiles import features, pulled, read, write


@triton.jit
def _own(start, r, R: tl.constexpr, TURNED: tl.constexpr):
    """The columns of q and k that R features from `start` on are made of, and how many of them there are in all.

    Turned features stand in pairs, φ cos and φ sin side by side: a part of them is made of a part of the columns.
    """
    if TURNED:
        return start // 2 + tl.arange(0, R // 2), r // 2
    else:
        return start + tl.arange(0, R), r


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
def _weigh(a, b, run, BLOCK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, ADJOINT: tl.constexpr):
    """W ∘ a for a[query, key]; for a[key, query] with ADJOINT."""
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
    cx, x = _own(part * R, r, R, TURNED)
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    S = tl.zeros([E, R], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = 1.0
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, _b, _run, _into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
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
            kept, own = tl.associative_scan((tl.broadcast_to(keep[:, None], (GROUP, TILE)), own), 0, link)
            own += kept * x[None, :]
        else:
            own = tl.cumsum(own, 0) + x[None, :]
        tl.store(here, own, mask=mask)
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)
    tl.store(end + row * width + column, x, mask=column < width)


@triton.jit
def _held(slot, cr, ce, r, e, rows, NORMALISE: tl.constexpr):
    """Sᵀ and z of a slot, of its first `rows` features."""
    S = tl.load(slot + ce[:, None] * r + cr[None, :], mask=(ce < e)[:, None] & (cr < rows)[None, :], other=0.0)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < rows, other=0.0)
    return S, z


@triton.jit
def _hold(slot, cr, ce, r, e, S, z, rows, NORMALISE: tl.constexpr):
    """Stores them; of z the first `rows` features."""
    tl.store(slot + ce[:, None] * r + cr[None, :], S, mask=(ce < e)[:, None] & (cr < r)[None, :])
    if NORMALISE:
        tl.store(slot + r * e + cr, z, mask=cr < rows)


@triton.jit
def _start(slot, cr, ce, r, e, GIVEN: tl.constexpr, NORMALISE: tl.constexpr):
    """The state of a slot where one is given, which may be no memory at all where none is."""
    S = tl.zeros([ce.shape[0], cr.shape[0]], tl.float32)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if GIVEN:
        S, z = _held(slot, cr, ce, r, e, r, NORMALISE)
    return S, z


@triton.jit
def _before(
    slots, keeps, chunk, cr, ce, r, e,
    GIVEN: tl.constexpr, NORMALISE: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    LAUNCHES: tl.constexpr,
):  # fmt: skip
    """The state before a chunk: scanned already (3 launches), the sum of all chunks before it (2), or given (1)."""
    width = r * e + r if NORMALISE else r * e
    if LAUNCHES == 3:
        if CAUSAL:
            slots += chunk * width
        S, z = _held(slots, cr, ce, r, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    else:
        S, z = _start(slots, cr, ce, r, e, GIVEN, NORMALISE)
    if LAUNCHES == 2:
        for c in range(0, chunk):
            own, own_z = _held(slots + (c + 1) * width, cr, ce, r, e, r, NORMALISE)
            if WEIGHTED:
                keep = tl.load(keeps + c)
                S = S * keep
                z = z * keep
            S += own
            z += own_z
    return S, z


@triton.jit
def _after(
    slots, keeps, chunk, chunks, cr, ce, r, e,
    GIVEN: tl.constexpr, NORMALISE: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr,
    LAUNCHES: tl.constexpr,
):  # fmt: skip
    """The adjoint after a chunk, in the same three ways."""
    width = r * e + r if NORMALISE else r * e
    if LAUNCHES == 3:
        if CAUSAL:
            slots += (chunk + 1) * width
            S, y = _held(slots, cr, ce, r, e, tl.where(chunk + 1 - GIVEN < chunks, r, 0), NORMALISE)
        else:
            S, y = _held(slots, cr, ce, r, e, r, NORMALISE)
    else:
        S, y = _start(slots + chunks * width, cr, ce, r, e, GIVEN, NORMALISE)
    if LAUNCHES == 2:
        for step in range(1, chunks - chunk):
            c = chunks - step
            own, own_y = _held(slots + c * width, cr, ce, r, e, r, NORMALISE)
            if WEIGHTED:
                keep = tl.load(keeps + c)
                S = S * keep
                y = y * keep
            S += own
            y += own_y
    return S, y


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
    cx, x = _own(0, r, R, TURNED)
    width = r * e + r if NORMALISE else r * e
    slots += owner * (chunks + 1 if CAUSAL else 1) * width
    keeps += owner * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, z = _before(slots, keeps, chunk, cr, ce, r, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    writes = (part == 0) & (head % (H // HEADS) == 0)  # one program a state
    if NORMALISE:
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    CLEAR: tl.constexpr = 2 if SEGMENTS or LAUNCHES == 1 else 1
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
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
            a = _weigh(a, b, run, BLOCK, DECAY, SEGMENTS, False)
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
            _hold(final + owner * width, cr, ce, r, e, S, z, tl.where(part == 0, r, 0), NORMALISE)


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
    cx, x = _own(part * R, r, R, TURNED)
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    S = tl.zeros([E, R], tl.float32)
    y = tl.zeros([R], tl.float32)
    kept = 1.0
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, _b, _run, into, _leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
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
    """a S with all the digits of S: in three parts, where operands have a third of them."""
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
    """x·by, token by token, with `by` as rounded as it is where it goes into a product."""
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
    cx, x = _own(part * R, r, R, TURNED)
    width = r * e + r if NORMALISE else r * e
    slots += owner * (chunks + 1 if CAUSAL else 1) * width
    keeps += owner * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, z = _before(slots, keeps, chunk, cr, ce, r, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    if NORMALISE:
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
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
            d = _weigh(d, b, run, BLOCK, DECAY, SEGMENTS, False).to(OPERAND)
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
    cx, x = _own(0 if DV else part * R, r, R, TURNED)
    width = r * e + r if NORMALISE else r * e
    slots += row * (chunks + 1 if CAUSAL else 1) * width
    keeps += row * chunks
    WEIGHTED: tl.constexpr = DECAY > 0 or SEGMENTS
    S, y = _after(slots, keeps, chunk, chunks, cr, ce, r, e, GIVEN, NORMALISE, WEIGHTED, CAUSAL, LAUNCHES)
    if NORMALISE:
        sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
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
                    a = _weigh(a, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    gv = tl.dot(a, dob, gv, input_precision=PRECISION)
                if DK:
                    d = tl.zeros([BLOCK, BLOCK], tl.float32)
                    if NORMALISE:
                        d -= delta_h[None, :]
                    d = tl.dot(vb, tl.trans(dob), d, input_precision=PRECISION)
                    d = _weigh(d, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
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
            _hold(first + row * width, cr, ce, r, e, S, y, r, NORMALISE)


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
