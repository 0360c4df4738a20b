"""Chunked linear attention in Triton: the same call as reference.py, three launches forward, four backward.

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
from torch import Tensor

from heedful.kernels.arithmetic import exp2
from heedful.kernels.chunked_linear import launches, reference
from heedful.kernels.chunked_linear.launches import INTERPRETED
from heedful.kernels.chunked_linear.reference import LinearState
from heedful.kernels.dispatch import on_device

WIDEST = 256
LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(reference.LEAST[torch.float32])


def objections(
    q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, segments=None, state=None
) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    options = dict(feature=feature, normalise=normalise, causal=causal, log_decay=log_decay)
    said = reference.objections(q, k, v, **options, segments=segments, state=state)
    if said:
        return said
    if not (q.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {q.device}.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        said.append(f"q, k, v must share bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        said.append(f"widths go up to {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}.")
    if 0 in (*q.shape, *v.shape):
        said.append("there is nothing to launch for an empty tensor.")
    if feature == "exp" and not normalise:
        said.append("exp features are shifted here, which only the normaliser takes out again.")
    if log_decay is not None and log_decay.requires_grad and torch.is_grad_enabled():
        said.append("the gradient of log_decay is not computed here.")
    if segments is not None and not causal and bool((reference.runs(segments)[0] > 0).any()):
        said.append("several segments in a row are taken only where causal is true.")
    return said


def chunked_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature: str = "identity",
    normalise: bool = True,
    causal: bool = True,
    log_decay: Tensor | None = None,
    segments: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Linear attention and the state after the last token; the same call as `reference.chunked_linear`.

    Inputs are such that `objections` has none: the dispatcher has asked.
    """
    heads = k.shape[1] if log_decay is None else q.shape[1]
    code = None if segments is None else reference.runs(segments)[0]
    shift_q = shift_k = log_scale = None
    decay = log_decay
    if feature == "exp":
        B, H, n, _ = q.shape
        decay = reference.token_decay(log_decay, code, B, H, n, torch.float32)
        shifted = reference.exp_shifts(q, k, causal, decay, code, state, heads)
        shift_q, shift_k, log_scale, decay, state = shifted
    S, z = (None, None) if state is None else (state.S, state.z)
    with on_device(q):
        inputs = q, k, v, S, z, decay, code, shift_q, shift_k, feature, normalise, causal, heads
        o, S, z = _Linear.apply(*inputs) if _learns(q, k, v, S, z) else _attend(*inputs)[0]
    return o, LinearState(S, z, log_scale)


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
def _reciprocal(den):
    """1 / den; zero where a row attends to nothing, or to less than the smallest normal float32."""
    some = tl.abs(den) >= TINY
    return tl.where(some, 1 / tl.where(some, den, 1.0), 0.0)


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
def _states(
    k,
    v,
    shift,
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
    decay += row * n if DECAY == 2 else head
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    S = tl.zeros([E, R], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = 1.0
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, _b, _run, _into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        fk = _features(k, shift, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
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
def _link(keep1, x1, keep2, x2):
    return keep1 * keep2, x1 * keep2 + x2


@triton.jit
def _scan(
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
def _outputs(
    q,
    k,
    v,
    o,
    den,
    shift_q,
    shift_k,
    decay,
    code,
    slots,
    sums,
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
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One chunk's outputs from the state before it; splits e."""
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
    decay += owner * n if DECAY == 2 else owner % HEADS
    code += batch * n
    cr, ce = tl.arange(0, R), part * E + tl.arange(0, E)
    width = r * e + r if NORMALISE else r * e
    slots += (owner * (chunks + 1) + chunk if CAUSAL else owner) * width
    rows = tl.where(chunk + GIVEN > 0, r, 0)  # features of the state to read: none where there is none
    inside = (ce < e)[:, None] & (cr < rows)[None, :]
    S = tl.load(slots + ce[:, None] * r + cr[None, :], mask=inside, other=0.0)
    z = tl.zeros([R], tl.float32)
    if NORMALISE:
        z = tl.load(slots + r * e + cr, mask=cr < rows, other=0.0)
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        phi = _features(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
        fq = phi.to(OPERAND)
        acc = tl.dot(fq, tl.trans(S.to(OPERAND)), input_precision=PRECISION)
        if NORMALISE:
            zs = z
            if CAUSAL:
                zs += tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
            below = tl.sum(phi * zs[None, :], 1)
        if CAUSAL:
            fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2 if SEGMENTS else 1)
            vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
            a = tl.dot(fq, tl.trans(fk.to(OPERAND)), input_precision=PRECISION)
            a = _weigh(a, b, run, BLOCK, DECAY, SEGMENTS, False)
            if DECAY > 0 or SEGMENTS:
                acc = acc * into[:, None]
                fk = fk * leave[:, None]
                S = S * keep
            if NORMALISE:
                if DECAY > 0 or SEGMENTS:
                    below = below * into
                    z = z * keep
                below += tl.sum(a, 1)
            acc = tl.dot(a.to(OPERAND), vb, acc, input_precision=PRECISION)
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


@triton.jit
def _adjoints(
    q,
    o,
    do,
    den,
    delta,
    shift,
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
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
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
def _queries(
    q,
    k,
    v,
    do,
    den,
    delta,
    dq,
    shift_q,
    shift_k,
    decay,
    code,
    slots,
    sums,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
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
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
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
    do += batch * do_b + head * do_h + skip * do_t
    dq += batch * dq_b + head * dq_h + skip * dq_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    den += row * n + base
    delta += row * n + base
    shift_q += row * n + base
    shift_k += (batch * KV + kv) * n + base
    decay += owner * n if DECAY == 2 else owner % HEADS
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    width = r * e + r if NORMALISE else r * e
    slots += (owner * (chunks + 1) + chunk if CAUSAL else owner) * width
    rows = tl.where(chunk + GIVEN > 0, r, 0)
    inside = (ce < e)[:, None] & (cr < rows)[None, :]
    S = tl.load(slots + ce[:, None] * r + cr[None, :], mask=inside, other=0.0)
    z = tl.zeros([R], tl.float32)
    if NORMALISE:
        z = tl.load(slots + r * e + cr, mask=cr < rows, other=0.0)
        sums += (owner * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        dob = _rows(do, t, do_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        grad = tl.zeros([BLOCK, R], tl.float32)
        d = tl.zeros([BLOCK, BLOCK], tl.float32)
        if NORMALISE:
            minus = -tl.load(delta + t, mask=real, other=0.0)
            zs = z
            if CAUSAL:
                zs += tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
            grad += minus[:, None] * zs[None, :]
            d += minus[:, None]
        grad = tl.dot(dob, S.to(OPERAND), grad, input_precision=PRECISION)
        if CAUSAL:
            fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2 if SEGMENTS else 1)
            vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
            d = tl.dot(dob, tl.trans(vb), d, input_precision=PRECISION)
            d = _weigh(d, b, run, BLOCK, DECAY, SEGMENTS, False).to(OPERAND)
            if DECAY > 0 or SEGMENTS:
                grad = grad * into[:, None]
            grad = tl.dot(d, fk.to(OPERAND), grad, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                fk = fk * leave[:, None]
                S = S * keep
                z = z * keep
            S = tl.dot(tl.trans(vb), fk.to(OPERAND), S, input_precision=PRECISION)
        if FEATURE != "identity":
            grad = grad * _slope(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C)
        if NORMALISE:
            grad = grad * _reciprocal(tl.load(den + t, mask=real, other=0.0))[:, None]
        if SEGMENTS:
            grad = tl.where(real[:, None], grad, 0.0)
        _put(dq, t, dq_t, cr, r, grad, n - base, EVEN_N, EVEN_C)


@triton.jit
def _keys(
    q,
    k,
    v,
    do,
    den,
    delta,
    dk,
    dv,
    shift_q,
    shift_k,
    decay,
    code,
    slots,
    sums,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
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
    DK: tl.constexpr,
    DV: tl.constexpr,
    FEATURE: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECAY: tl.constexpr,
    SEGMENTS: tl.constexpr,
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
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, owner = row // HEADS, row % HEADS
    GROUP: tl.constexpr = H // HEADS
    kv = owner // (HEADS // KV)
    base = chunk * span
    skip = base.to(tl.int64)
    first = (batch * H + owner * GROUP) * n + base
    q += batch * q_b + owner * GROUP * q_h + skip * q_t
    do += batch * do_b + owner * GROUP * do_h + skip * do_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    dk += batch * dk_b + owner * dk_h + skip * dk_t
    dv += batch * dv_b + owner * dv_h + skip * dv_t
    den += first
    delta += first
    shift_q += first
    shift_k += (batch * KV + kv) * n + base
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr = (0 if DV else part * R) + tl.arange(0, R)
    ce = (0 if DK else part * E) + tl.arange(0, E)
    width = r * e + r if NORMALISE else r * e
    slots += (row * (chunks + 1) + chunk + 1 if CAUSAL else row) * width
    rows = tl.where(chunk + 1 - GIVEN < chunks, r, 0) if CAUSAL else r
    inside = (ce < e)[:, None] & (cr < rows)[None, :]
    S = tl.load(slots + ce[:, None] * r + cr[None, :], mask=inside, other=0.0)
    y = tl.zeros([R], tl.float32)
    if NORMALISE:
        y = tl.load(slots + r * e + cr, mask=cr < rows, other=0.0)
        sums += (row * tl.cdiv(n, BLOCK) + base // BLOCK) * r + cr
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2 if SEGMENTS else 1)
        fk = fk.to(OPERAND)
        vb = _rows(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        held = S.to(OPERAND)
        if DV:
            gv = tl.dot(fk, tl.trans(held), input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                gv = gv * leave[:, None]
        if DK:
            gk = tl.zeros([BLOCK, R], tl.float32)
            if NORMALISE:
                ys = y
                if CAUSAL:
                    ys += tl.load(sums + at // BLOCK * r, mask=cr < r, other=0.0)
                gk += ys[None, :]
            gk = tl.dot(vb, held, gk, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                gk = gk * leave[:, None]
        if CAUSAL:
            if DECAY > 0 or SEGMENTS:
                S = S * keep
                y = y * keep
            for h in tl.static_range(GROUP):
                psi = _features(q + h * q_h, shift_q + h * n, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
                dob = _rows(do + h * do_h, t, do_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
                if NORMALISE:
                    psi = psi * _reciprocal(tl.load(den + h * n + t, mask=real, other=0.0))[:, None]
                fq = psi.to(OPERAND)
                if DV:
                    a = tl.dot(fk, tl.trans(fq), input_precision=PRECISION)
                    a = _weigh(a, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    gv = tl.dot(a, dob, gv, input_precision=PRECISION)
                if DK:
                    d = tl.zeros([BLOCK, BLOCK], tl.float32)
                    if NORMALISE:
                        d -= tl.load(delta + h * n + t, mask=real, other=0.0)[None, :]
                    d = tl.dot(vb, tl.trans(dob), d, input_precision=PRECISION)
                    d = _weigh(d, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    gk = tl.dot(d, fq, gk, input_precision=PRECISION)
                if DECAY > 0 or SEGMENTS:
                    fq = (psi * into[:, None]).to(OPERAND)
                S = tl.dot(tl.trans(dob), fq, S, input_precision=PRECISION)
        if DK:
            if FEATURE != "identity":
                gk = gk * _slope(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C)
            if SEGMENTS:
                gk = tl.where(real[:, None], gk, 0.0)
            _put(dk, t, dk_t, cr, r, gk, n - base, EVEN_N, EVEN_C)
        if DV:
            if SEGMENTS:
                gv = tl.where(real[:, None], gv, 0.0)
            _put(dv, t, dv_t, ce, e, gv, n - base, EVEN_N, EVEN_C)


def _steps(*tensors):
    return tuple(step for x in tensors for step in x.stride()[:3])


def _packed(x):
    """Tokens whose coordinates lie side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _or(pointer, other):
    """Triton wants a pointer even where the kernel never reads it."""
    return other if pointer is None else pointer


def _scan_slots(plan, slots, keeps, end, chunks, given, reverse):
    def describe():
        c, tile = plan.constants, 64
        constants = dict(
            GIVEN=given,
            WEIGHTED=c["DECAY"] > 0 or c["SEGMENTS"],
            REVERSE=reverse,
            GROUP=min(64, launches.power(chunks)),
            TILE=tile,
        )
        grid = launches.over(plan.slot, tile), plan.B * plan.heads
        return "scan", _scan, grid, (chunks, plan.slot), constants

    launches.launch(plan, ("scan", given, reverse), (slots, keeps, end), describe)


def _fill(plan, slots, at, chunks, S, z):
    """Puts a state (zero where there is none) into slot `at` of every head: Sᵀ, then z."""
    B, heads, r, e = plan.B, plan.heads, plan.r, plan.e
    slot = slots[: B * heads * (chunks + 1) * plan.slot].view(B, heads, chunks + 1, plan.slot)[:, :, at]
    slot.zero_()
    if S is not None:
        slot[..., : r * e].view(B, heads, e, r).copy_(S.mT)
    if z is not None:
        slot[..., r * e :] = z


def _learns(*tensors: Tensor | None) -> bool:
    """Whether anything asks for a gradient; where nothing does, autograd's bookkeeping is left out."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attend(q, k, v, S, z, decay, code, shift_q, shift_k, feature, normalise, causal, heads):
    """The three launches: o and the last state; what a backward pass needs; the plan, and whether a state came in."""
    q, k, v = _packed(q), _packed(k), _packed(v)
    decay = None if decay is None else decay.float().contiguous()
    given = S is not None
    plan = launches.plan(q, k, v, decay, code, shift_q, shift_k, given, feature, normalise, causal, heads)
    B, H, n, r, e, m = plan.B, plan.H, plan.n, plan.r, plan.e, plan.m
    chunks = plan.chunks_k
    o = launches.tokens_like((B, H, n, e), q)
    final = launches.empty((B, heads, plan.slot), q)
    den, slots, keeps, sums = launches.workspace(
        (
            B * H * n * normalise,
            B * heads * (chunks + 1) * plan.slot,
            B * heads * chunks,
            B * heads * launches.over(m, plan.block) * r * normalise * causal,
        ),
        q,
    )
    if given:
        _fill(plan, slots, 0, chunks, S, z if normalise else None)
    sq, sk, dec, runs = _or(shift_q, q), _or(shift_k, q), _or(decay, q), _or(code, q)

    def states():
        grid, tile = launches.parted(plan, "states", "r", heads, chunks)
        numbers = *_steps(k, v), m, plan.span, chunks, r, e
        return "states", _states, grid, numbers, dict(KV=plan.Hkv, HEADS=heads, **tile)

    def outputs():
        grid, tile = launches.parted(plan, "outputs", "e", H, plan.chunks_q)
        numbers = *_steps(q, k, v, o), n, plan.span, plan.chunks_q, r, e
        constants = dict(H=H, KV=plan.Hkv, HEADS=heads, GIVEN=given or not causal)
        return "outputs", _outputs, grid, numbers, {**constants, **tile}

    held = slots if causal else final
    launches.launch(plan, "states", (k, v, sk, dec, runs, slots, keeps, sums), states)
    _scan_slots(plan, slots, keeps, final, chunks, given, False)
    launches.launch(plan, "outputs", (q, k, v, o, den, sq, sk, dec, runs, held, sums), outputs)
    S = final[..., : r * e].view(B, heads, e, r).mT
    out = o, S, final[..., r * e :] if normalise else None
    return out, (q, k, v, o, den, held, sums, decay, code, shift_q, shift_k), plan, given


class _Linear(torch.autograd.Function):
    """The launches joined: keeps q, k, v, o, den, the state before each chunk and z before each block."""

    @staticmethod
    def forward(ctx, *inputs):
        out, kept, ctx.plan, ctx.given = _attend(*inputs)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, do, dS, dz):
        q, k, v, o, den, slots, sums, decay, code, shift_q, shift_k = ctx.saved_tensors
        plan = ctx.plan
        normalise, causal, heads = plan.normalise, plan.causal, plan.heads
        B, H, n, r, e, m = plan.B, plan.H, plan.n, plan.r, plan.e, plan.m
        do = torch.zeros_like(o) if do is None else _packed(do)
        chunks, given = plan.chunks_q, dS is not None or dz is not None
        dq = launches.tokens_like(q.shape, q)
        # with a decay a key head has one gradient for each query head: they are summed below
        dk, dv = launches.tokens_like((B, heads, m, r), k), launches.tokens_like((B, heads, m, e), v)
        delta, back, keeps, after, first = launches.workspace(
            (
                B * H * n * normalise,
                B * heads * (chunks + 1) * plan.slot,
                B * heads * chunks,
                B * heads * launches.over(n, plan.block) * r * normalise * causal,
                B * heads * plan.slot,
            ),
            q,
        )
        if given:
            _fill(plan, back, chunks, chunks, dS, dz)
        sq, sk, dec, runs = _or(shift_q, q), _or(shift_k, q), _or(decay, q), _or(code, q)

        def adjoints():
            grid, tile = launches.parted(plan, "adjoints", "r", heads, chunks)
            numbers = *_steps(q, o, do), n, plan.span, chunks, r, e
            return "adjoints", _adjoints, grid, numbers, dict(H=H, HEADS=heads, **tile)

        def queries():
            grid, tile = launches.parted(plan, "queries", "r", H, chunks)
            numbers = *_steps(q, k, v, do, dq), n, plan.span, chunks, r, e
            constants = dict(H=H, KV=plan.Hkv, HEADS=heads, GIVEN=ctx.given or not causal)
            return "queries", _queries, grid, numbers, {**constants, **tile}

        def keys(splits, DK, DV):
            def describe():
                grid, tile = launches.parted(plan, "keys", splits, heads, plan.chunks_k)
                numbers = *_steps(q, k, v, do, dk, dv), m, plan.span, plan.chunks_k, r, e
                constants = dict(H=H, KV=plan.Hkv, HEADS=heads, GIVEN=given, DK=DK, DV=DV)
                return "keys", _keys, grid, numbers, {**constants, **tile}

            pointers = q, k, v, do, den, delta, dk, dv, sq, sk, dec, runs, back if causal else first, after
            launches.launch(plan, ("keys", DK, DV, given, *incoming), pointers, describe)

        incoming = *do.stride(), do.data_ptr() % 16
        launches.launch(
            plan, ("adjoints", *incoming), (q, o, do, den, delta, sq, dec, runs, back, keeps, after), adjoints
        )
        _scan_slots(plan, back, keeps, first, chunks, given, True)
        launches.launch(
            plan,
            ("queries", *incoming),
            (q, k, v, do, den, delta, dq, sq, sk, dec, runs, slots, sums),
            queries,
        )
        if max(plan.R, plan.E) <= plan.configs["keys"].split:
            keys("r", True, True)
        else:
            keys("r", True, False)
            keys("e", False, True)
        if heads > plan.Hkv:
            dk, dv = (x.reshape(B, plan.Hkv, -1, m, x.shape[-1]).sum(2) for x in (dk, dv))
        dS = dz = None
        if ctx.given:
            first = first[: B * heads * plan.slot].view(B, heads, plan.slot)
            dS = first[..., : r * e].view(B, heads, e, r).mT
            dz = first[..., r * e :] if normalise else None
        return dq, dk, dv, dS, dz, None, None, None, None, None, None, None, None
