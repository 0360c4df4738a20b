"""Chunked linear attention in Triton: feature map, decay, segments, normaliser and state in three launches.

    tokens      split into chunks of `span` tokens, each chunk into blocks of `block` tokens
    forward     1. states    every chunk but the last, in parallel: S = Σ_j leave_j φk_j v_jᵀ, z = Σ_j leave_j φk_j
                2. scan      x_c ← keep_{c−1} x_{c−1} + x_c over the chunks: the state before each chunk
                3. outputs   every chunk in parallel, walking its blocks with S, z in registers:
                             num = into (φq S) + P v,  den = into (φq·z) + Σ_j P_ij,  P = W ∘ φq φkᵀ,  o = num / den
    backward    g_i = do_i / den_i,  c_i = −(do_i·o_i) / den_i: the normaliser is one more value column, [v, 1] against [g, c]
                1. adjoints  every chunk: c, and R = Σ_i into_i φq_i g_iᵀ, y = Σ_i into_i φq_i c_i
                2. scan      backwards over the chunks: R, y after each chunk
                3. queries   walking forwards:   dφq = D φk + into (g Sᵀ + c zᵀ),  D = W ∘ (g vᵀ + c 1ᵀ)
                4. keys      walking backwards:  dφk = Dᵀ φq + leave (v Rᵀ + yᵀ),  dv = Pᵀ g + leave (φk R)
    weights     W, into, leave, keep as in reference.py; segments are runs, so one id tells whose state is carried
    precision   S, z, R, y, den, c and all sums in float32. Operands of a product: bfloat16 for bfloat16 inputs, tf32 for
                float16 (its mantissa, without its overflow: z passes 65504 after 64k tokens), three tf32 for float32

No atomics: each element is written by one program, in a fixed order, so runs are bit-equal. README.md has the derivation,
the floors and the measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .reference import LinearState

WIDEST = 256
LOG2E = tl.constexpr(1.4426950408889634)


class Config(NamedTuple):
    """How one kernel is laid out: tokens a block, columns a program (of the axis it may split), warps, stages."""

    block: int
    split: int
    warps: int
    stages: int


# Chosen on an H200 by benchmarks/gpu_chunked_linear.py --tune; the key is the width (r and e up to it) and the operands.
CONFIGS = {
    ("states", 64, "bf16"): Config(64, 64, 4, 3),
    ("outputs", 64, "bf16"): Config(64, 64, 4, 3),
    ("adjoints", 64, "bf16"): Config(64, 64, 4, 2),
    ("queries", 64, "bf16"): Config(64, 64, 4, 2),
    ("keys", 64, "bf16"): Config(64, 64, 4, 2),
    ("states", 128, "bf16"): Config(64, 128, 8, 2),
    ("outputs", 128, "bf16"): Config(64, 128, 8, 2),
    ("adjoints", 128, "bf16"): Config(64, 128, 8, 2),
    ("queries", 128, "bf16"): Config(64, 128, 8, 2),
    ("keys", 128, "bf16"): Config(64, 128, 8, 2),
    ("states", 256, "bf16"): Config(64, 64, 8, 2),
    ("outputs", 256, "bf16"): Config(64, 64, 8, 1),
    ("adjoints", 256, "bf16"): Config(64, 64, 8, 1),
    ("queries", 256, "bf16"): Config(64, 64, 8, 1),
    ("keys", 256, "bf16"): Config(64, 64, 8, 1),
}
PROGRAMS = 1024  # chunks in flight that fill 132 multiprocessors a few times over
LONGEST = 2048  # tokens a chunk


def objections(
    q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, segments=None, state=None
) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    said = reference.objections(
        q, k, v, feature=feature, normalise=normalise, causal=causal, log_decay=log_decay, segments=segments, state=state
    )
    if said:
        return said
    if not (q.is_cuda or triton.knobs.runtime.interpret):
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
    if segments is not None and not causal and bool((reference.run_codes(segments) > 0).any()):
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
    """Linear attention and the state after the last token; the same call as `reference.chunked_linear`."""
    options = dict(feature=feature, normalise=normalise, causal=causal, log_decay=log_decay, segments=segments)
    if said := objections(q, k, v, **options, state=state):
        raise ValueError(" ".join(said))
    heads = k.shape[1] if log_decay is None else q.shape[1]
    code = None if segments is None else reference.run_codes(segments)
    shift_q = shift_k = log_scale = None
    decay = log_decay
    if feature == "exp":
        B, H, n, _ = q.shape
        decay = reference.token_decay(log_decay, code, B, H, n, torch.float32)
        shift_q, shift_k, log_scale, decay, state = reference.exp_shifts(q, k, causal, decay, code, state, heads)
    S, z = (None, None) if state is None else (state.S, state.z)
    o, S, z = _Linear.apply(q, k, v, S, z, decay, code, shift_q, shift_k, feature, normalise, causal, heads)
    return o, LinearState(S, z, log_scale)


def empty(shape, like: Tensor, dtype=torch.float32) -> Tensor:
    """Every output and workspace is born here, so that a test can fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _tokens_like(shape, like):
    """(B, heads, n, width) in the memory order of `like`: heads before tokens, or tokens before heads."""
    B, h, n, w = shape
    if like.stride(1) < like.stride(2):
        return empty((B, n, h, w), like, like.dtype).transpose(1, 2)
    return empty(shape, like, like.dtype)


def _span(n, rows, block) -> int:
    """Tokens a chunk: the longest that still gives every multiprocessor several chunks."""
    chunks = max(1, min(triton.cdiv(PROGRAMS, rows), triton.cdiv(n, block)))
    return min(LONGEST, max(128, triton.next_power_of_2(triton.cdiv(n, chunks))))


class _Plan:
    """What every launch of one call shares: sizes, the constants of the kernels and the grid."""

    def __init__(self, q, k, v, decay, code, feature, normalise, causal, heads):
        self.B, self.H, self.n, self.r = q.shape
        self.Hkv, self.m, self.e = v.shape[1:]
        self.heads = heads
        self.width = max(64, triton.next_power_of_2(max(self.r, self.e)))
        self.kind = "bf16" if q.dtype == torch.bfloat16 else "fp32"
        self.span = _span(max(self.n, self.m), self.B * heads, 64)
        self.chunks_q, self.chunks_k = triton.cdiv(self.n, self.span), triton.cdiv(self.m, self.span)
        self.slot = self.r * (self.e + 1) if normalise else self.r * self.e
        self.even = code is None
        self.constants = dict(
            FEATURE=feature,
            NORMALISE=normalise,
            CAUSAL=causal,
            DECAY=0 if decay is None else (1 if decay.ndim == 1 else 2),
            SEGMENTS=code is not None,
            OPERAND=tl.bfloat16 if self.kind == "bf16" else tl.float32,
            PRECISION="tf32" if q.dtype == torch.float16 else "tf32x3",
        )

    def layout(self, name):
        """Config of one kernel, and the padded widths r and e of its tiles before the split."""
        config = CONFIGS.get((name, self.width, self.kind))
        if config is None:  # float32 operands fill twice the shared memory
            wide = {64: Config(64, 64, 4, 1), 128: Config(32, 64, 8, 1), 256: Config(16, 32, 8, 1)}
            config = wide[self.width]
        R, E = (max(16, triton.next_power_of_2(x)) for x in (self.r, self.e))
        return config, R, E


if triton.knobs.runtime.interpret:
    _exp2 = tl.exp2
else:

    @triton.jit
    def _exp2(x):
        """2^x with denormals flushed: one instruction where tl.exp2 takes five. Called impure, so that it is not
        computed again for every layout the result is wanted in."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def _phi(x, shift, FEATURE: tl.constexpr):
    if FEATURE == "elu1":
        return tl.where(x > 0, x + 1, _exp2(x * LOG2E))
    elif FEATURE == "relu":
        return tl.maximum(x, 0)
    elif FEATURE == "exp":
        return _exp2((x - shift[:, None]) * LOG2E)
    else:
        return x


@triton.jit
def _slope(x, phi, FEATURE: tl.constexpr):
    """φ′, from x and φ(x) where that saves an exponential."""
    if FEATURE == "elu1":
        return tl.minimum(phi, 1)
    elif FEATURE == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif FEATURE == "exp":
        return phi
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _rows(pointer, t, stride, column, width, real, EVEN: tl.constexpr):
    """A tile of tokens × columns as stored, zero outside and at padding, where there may be anything."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=real[:, None] & (column < width)[None, :], other=0)


@triton.jit
def _put(pointer, t, stride, column, width, tile, left, EVEN: tl.constexpr):
    """Stores a tile of tokens × columns: what lies within the `left` tokens and the width."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(t < left)[:, None] & (column < width)[None, :])


@triton.jit
def _features(pointer, shift, t, stride, column, width, real, FEATURE: tl.constexpr, EVEN: tl.constexpr):
    """(x, φ(x)) of a tile, φ zero outside."""
    x = _rows(pointer, t, stride, column, width, real, EVEN).to(tl.float32)
    s = t
    if FEATURE == "exp":
        s = tl.load(shift + t, mask=real, other=0)
    phi = _phi(x, s, FEATURE)
    if EVEN or FEATURE == "identity":
        return x, phi
    else:
        return x, tl.where(real[:, None] & (column < width)[None, :], phi, 0.0)


@triton.jit
def _clock(decay, code, start, n, BLOCK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Of the block at `start`: which tokens are real, b, their runs, and the weights into, leave, keep."""
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
        if DECAY == 1:
            d = tl.where(real, tl.load(decay), 0.0)
        else:
            d = tl.load(decay + t, mask=real, other=0.0)
        d = d * LOG2E
        b = tl.cumsum(d, 0)
        total = tl.sum(d, 0)
        into = _exp2(b)
        leave = _exp2(total - b)
        keep = _exp2(total)
    if SEGMENTS:
        into = tl.where(run == before, into, 0.0)
        leave = tl.where(run == last, leave, 0.0)
        keep = tl.where(before == last, keep, 0.0)
    return real, b, run, into, leave, keep


@triton.jit
def _weigh(a, b, run, BLOCK: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr, ADJOINT: tl.constexpr):
    """W ∘ a for a[query, key]; for a[key, query] with ADJOINT."""
    i = tl.arange(0, BLOCK)
    if ADJOINT:
        seen = i[None, :] >= i[:, None]
    else:
        seen = i[:, None] >= i[None, :]
    if SEGMENTS:
        seen = seen & (run[:, None] == run[None, :])
    if DECAY > 0:
        gap = (b[None, :] - b[:, None]) if ADJOINT else (b[:, None] - b[None, :])
        return a * _exp2(tl.where(seen, gap, float("-inf")))
    else:
        return tl.where(seen, a, 0.0)


@triton.jit
def _states(
    k, v, shift, decay, code, slots, keeps,
    k_b, k_h, k_t, v_b, v_h, v_t, n, span, chunks, r, e,
    KV: tl.constexpr, HEADS: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):
    """One chunk's own state, in slot c + 1 of its head; splits the features r."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, head = row // HEADS, row % HEADS
    kv = head // (HEADS // KV)
    k += batch * k_b + kv * k_h
    v += batch * v_b + kv * v_h
    shift += (batch * KV + kv) * n
    decay += row * n if DECAY == 2 else head
    code += batch * n
    base = chunk * span
    k += base.to(tl.int64) * k_t
    v += base.to(tl.int64) * v_t
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    S = tl.zeros([R, E], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = 1.0
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        _, fk = _features(k, shift + base, t, k_t, cr, r, real, FEATURE, EVEN)
        vb = _rows(v, t, v_t, ce, e, real, EVEN).to(OPERAND)
        if DECAY > 0 or SEGMENTS:
            fk = fk * leave[:, None]
            S = S * keep
            z = z * keep
            kept = kept * keep
        S = tl.dot(tl.trans(fk.to(OPERAND)), vb, S, input_precision=PRECISION)
        if NORMALISE:
            z += tl.sum(fk, 0)
    slot = slots + (row * (chunks + 1) + chunk + 1) * (r * e + r if NORMALISE else r * e)
    tl.store(slot + cr[:, None] * e + ce[None, :], S, mask=(cr < r)[:, None] & (ce < e)[None, :])
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
    slots, keeps, chunks, width, first_given,
    WEIGHTED: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):
    """x_c ← keep_{c−1} x_{c−1} + x_c over the slots 0 … chunks of a head, or x_c ← keep_c x_{c+1} + x_c backwards."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    slots += row * (chunks + 1) * width
    keeps += row * chunks
    end = chunks if REVERSE else 0
    x = tl.load(slots + end * width + column, mask=column < width * first_given, other=0.0)
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


@triton.jit
def _outputs(
    q, k, v, o, den, shift_q, shift_k, decay, code, slots, final,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, n, span, chunks, r, e, first_given,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):
    """One chunk's outputs from the state before it; splits the values e. The last chunk leaves the final state."""
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
    tile = cr[:, None] * e + ce[None, :]
    inside = (cr < r)[:, None] & (ce < e)[None, :]
    given = tl.where(chunk + first_given > 0, r, 0)  # rows of the state to read
    width = r * e + r if NORMALISE else r * e
    if CAUSAL:
        slot = slots + (owner * (chunks + 1) + chunk) * width
    else:
        slot = slots + owner * width
        given = r
    S = tl.load(slot + tile, mask=(cr < given)[:, None] & (ce < e)[None, :], other=0.0)
    z = tl.zeros([R], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < given, other=0.0)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        _, phi = _features(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN)
        fq = phi.to(OPERAND)
        acc = tl.dot(fq, S.to(OPERAND), input_precision=PRECISION)
        below = tl.sum(phi * z[None, :], 1)
        if CAUSAL:
            _, fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN)
            vb = _rows(v, t, v_t, ce, e, real, EVEN).to(OPERAND)
            a = tl.dot(fq, tl.trans(fk.to(OPERAND)), input_precision=PRECISION)
            a = _weigh(a, b, run, BLOCK, DECAY, SEGMENTS, False)
            if DECAY > 0 or SEGMENTS:
                acc = acc * into[:, None]
                below = below * into
                fk = fk * leave[:, None]
                S = S * keep
                z = z * keep
            acc = tl.dot(a.to(OPERAND), vb, acc, input_precision=PRECISION)
            below += tl.sum(a, 1)
            S = tl.dot(tl.trans(fk.to(OPERAND)), vb, S, input_precision=PRECISION)
            if NORMALISE:
                z += tl.sum(fk, 0)
        if NORMALISE:
            acc = acc * tl.where(below != 0, 1 / below, 0.0)[:, None]
            if part == 0:
                tl.store(den + t, below, mask=base + t < n)
        _put(o, t, o_t, ce, e, acc, n - base, EVEN)
    if CAUSAL:
        if (chunk == chunks - 1) & (head % (H // HEADS) == 0):
            final += owner * width
            tl.store(final + tile, S, mask=inside)
            if NORMALISE:
                if part == 0:
                    tl.store(final + r * e + cr, z, mask=cr < r)


@triton.jit
def _inverse(den, t, real):
    """1 / den, zero where a row attends to nothing."""
    d = tl.load(den + t, mask=real, other=0.0)
    return tl.where(d != 0, 1 / d, 0.0)


@triton.jit
def _adjoints(
    q, o, do, den, c, shift, decay, code, slots, keeps,
    q_b, q_h, q_t, o_b, o_h, o_t, do_b, do_h, do_t, n, span, chunks, r, e,
    H: tl.constexpr, HEADS: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):
    """One chunk's c_i, and its own R and y in slot c of its head; splits the features r."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    batch, owner = row // HEADS, row % HEADS
    GROUP: tl.constexpr = H // HEADS
    base = chunk * span
    skip = base.to(tl.int64)
    q += batch * q_b + owner * GROUP * q_h + skip * q_t
    o += batch * o_b + owner * GROUP * o_h + skip * o_t
    do += batch * do_b + owner * GROUP * do_h + skip * do_t
    den += (batch * H + owner * GROUP) * n + base
    c += (batch * H + owner * GROUP) * n + base
    shift += (batch * H + owner * GROUP) * n + base
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    S = tl.zeros([R, E], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = 1.0
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        if DECAY > 0 or SEGMENTS:
            S = S * keep
            z = z * keep
            kept = kept * keep
        for g in tl.static_range(GROUP):
            _, fq = _features(q + g * q_h, shift + g * n, t, q_t, cr, r, real, FEATURE, EVEN)
            dob = _rows(do + g * do_h, t, do_t, ce, e, real, EVEN).to(tl.float32)
            if DECAY > 0 or SEGMENTS:
                fq = fq * into[:, None]
            if NORMALISE:
                ob = _rows(o + g * o_h, t, o_t, ce, e, real, EVEN).to(tl.float32)
                inverse = _inverse(den + g * n, t, real)
                minus = -tl.sum(dob * ob, 1) * inverse
                dob = dob * inverse[:, None]
                z += tl.sum(fq * minus[:, None], 0)
                if part == 0:
                    tl.store(c + g * n + t, minus, mask=base + t < n)
            S = tl.dot(tl.trans(fq.to(OPERAND)), dob.to(OPERAND), S, input_precision=PRECISION)
    slot = slots + (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    tl.store(slot + cr[:, None] * e + ce[None, :], S, mask=(cr < r)[:, None] & (ce < e)[None, :])
    if NORMALISE:
        tl.store(slot + r * e + cr, z, mask=cr < r)
    if DECAY > 0 or SEGMENTS:
        if part == 0:
            tl.store(keeps + row * chunks + chunk, kept)


@triton.jit
def _queries(
    q, k, v, do, den, c, dq, shift_q, shift_k, decay, code, slots,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    n, span, chunks, r, e, first_given,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):
    """One chunk's dq; splits the features r."""
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
    c += row * n + base
    shift_q += row * n + base
    shift_k += (batch * KV + kv) * n + base
    decay += owner * n if DECAY == 2 else owner % HEADS
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    inside = (cr < r)[:, None] & (ce < e)[None, :]
    given = tl.where(chunk + first_given > 0, r, 0)  # rows of the state to read
    width = r * e + r if NORMALISE else r * e
    if CAUSAL:
        slot = slots + (owner * (chunks + 1) + chunk) * width
    else:
        slot = slots + owner * width
        given = r
    S = tl.load(slot + cr[:, None] * e + ce[None, :], mask=(cr < given)[:, None] & (ce < e)[None, :], other=0.0)
    z = tl.zeros([R], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < given, other=0.0)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        g = _rows(do, t, do_t, ce, e, real, EVEN)
        minus = into
        if NORMALISE:
            g = g.to(tl.float32) * _inverse(den, t, real)[:, None]
            minus = tl.load(c + t, mask=real, other=0.0)
        g = g.to(OPERAND)
        dfq = tl.dot(g, tl.trans(S.to(OPERAND)), input_precision=PRECISION)
        if NORMALISE:
            dfq += minus[:, None] * z[None, :]
        if CAUSAL:
            _, fk = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN)
            vb = _rows(v, t, v_t, ce, e, real, EVEN).to(OPERAND)
            d = tl.zeros([BLOCK, BLOCK], tl.float32)
            if NORMALISE:
                d += minus[:, None]
            d = tl.dot(g, tl.trans(vb), d, input_precision=PRECISION)
            d = _weigh(d, b, run, BLOCK, DECAY, SEGMENTS, False).to(OPERAND)
            if DECAY > 0 or SEGMENTS:
                dfq = dfq * into[:, None]
            dfq = tl.dot(d, fk.to(OPERAND), dfq, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                fk = fk * leave[:, None]
                S = S * keep
                z = z * keep
            S = tl.dot(tl.trans(fk.to(OPERAND)), vb, S, input_precision=PRECISION)
            if NORMALISE:
                z += tl.sum(fk, 0)
        x, fq = _features(q, shift_q, t, q_t, cr, r, real, FEATURE, EVEN)
        dfq = dfq * _slope(x, fq, FEATURE)
        if SEGMENTS:
            dfq = tl.where(real[:, None], dfq, 0.0)
        _put(dq, t, dq_t, cr, r, dfq, n - base, EVEN)


@triton.jit
def _keys(
    q, k, v, do, den, c, dk, dv, shift_q, shift_k, decay, code, slots,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    n, span, chunks, r, e, last_given,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):
    """One chunk's dk and dv, or, where the state is too wide for one program, dk alone splitting r and dv alone splitting e.

    Sums over the query heads that share the state; n counts keys. Without CAUSAL the queries are all in the state.
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
    q += batch * q_b + owner * GROUP * q_h + skip * q_t
    do += batch * do_b + owner * GROUP * do_h + skip * do_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    dk += batch * dk_b + owner * dk_h + skip * dk_t
    dv += batch * dv_b + owner * dv_h + skip * dv_t
    den += (batch * H + owner * GROUP) * n + base
    c += (batch * H + owner * GROUP) * n + base
    shift_q += (batch * H + owner * GROUP) * n + base
    shift_k += (batch * KV + kv) * n + base
    decay += row * n if DECAY == 2 else owner
    code += batch * n
    cr = (0 if DV else part * R) + tl.arange(0, R)
    ce = (0 if DK else part * E) + tl.arange(0, E)
    width = r * e + r if NORMALISE else r * e
    if CAUSAL:
        slot = slots + (row * (chunks + 1) + chunk + 1) * width
        given = tl.where(chunk + 1 - last_given < chunks, r, 0)
    else:
        slot = slots + row * width
        given = r
    S = tl.load(slot + cr[:, None] * e + ce[None, :], mask=(cr < given)[:, None] & (ce < e)[None, :], other=0.0)
    z = tl.zeros([R], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < given, other=0.0)
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, b, run, into, leave, keep = _clock(decay, code, base + at, n, BLOCK, DECAY, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x, phi = _features(k, shift_k, t, k_t, cr, r, real, FEATURE, EVEN)
        fk = phi.to(OPERAND)
        vb = _rows(v, t, v_t, ce, e, real, EVEN).to(OPERAND)
        held = S.to(OPERAND)
        if DV:
            gv = tl.dot(fk, held, input_precision=PRECISION)
            if DECAY > 0 or SEGMENTS:
                gv = gv * leave[:, None]
        if DK:
            gk = tl.dot(vb, tl.trans(held), input_precision=PRECISION)
            if NORMALISE:
                gk += z[None, :]
            if DECAY > 0 or SEGMENTS:
                gk = gk * leave[:, None]
        if CAUSAL:
            if DECAY > 0 or SEGMENTS:
                S = S * keep
                z = z * keep
            for h in tl.static_range(GROUP):
                _, fq = _features(q + h * q_h, shift_q + h * n, t, q_t, cr, r, real, FEATURE, EVEN)
                g = _rows(do + h * do_h, t, do_t, ce, e, real, EVEN)
                minus = into
                if NORMALISE:
                    g = g.to(tl.float32) * _inverse(den + h * n, t, real)[:, None]
                    minus = tl.load(c + h * n + t, mask=real, other=0.0)
                g = g.to(OPERAND)
                if DV:
                    a = tl.dot(fk, tl.trans(fq.to(OPERAND)), input_precision=PRECISION)
                    a = _weigh(a, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    gv = tl.dot(a, g, gv, input_precision=PRECISION)
                if DK:
                    d = tl.zeros([BLOCK, BLOCK], tl.float32)
                    if NORMALISE:
                        d += minus[None, :]
                    d = tl.dot(vb, tl.trans(g), d, input_precision=PRECISION)
                    d = _weigh(d, b, run, BLOCK, DECAY, SEGMENTS, True).to(OPERAND)
                    gk = tl.dot(d, fq.to(OPERAND), gk, input_precision=PRECISION)
                if DECAY > 0 or SEGMENTS:
                    fq = fq * into[:, None]
                S = tl.dot(tl.trans(fq.to(OPERAND)), g, S, input_precision=PRECISION)
                if NORMALISE:
                    z += tl.sum(fq * minus[:, None], 0)
        if DK:
            gk = gk * _slope(x, phi, FEATURE)
            if SEGMENTS:
                gk = tl.where(real[:, None], gk, 0.0)
            _put(dk, t, dk_t, cr, r, gk, n - base, EVEN)
        if DV:
            if SEGMENTS:
                gv = tl.where(real[:, None], gv, 0.0)
            _put(dv, t, dv_t, ce, e, gv, n - base, EVEN)


def _steps(x):
    return x.stride()[:3]


def _packed(x):
    """Tokens whose coordinates lie side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _scan_slots(plan, slots, keeps, chunks, first_given, reverse):
    c = plan.constants
    tile = 64
    _scan[(triton.cdiv(plan.slot, tile), plan.B * plan.heads)](
        slots, keeps, chunks, plan.slot, int(first_given),
        WEIGHTED=c["DECAY"] > 0 or c["SEGMENTS"], REVERSE=reverse,
        GROUP=min(64, triton.next_power_of_2(chunks)), TILE=tile, num_warps=4,
    )


def _launch(kernel, plan, name, rows, chunks, splits, *args, **constants):
    """One program for each row of heads, chunk and part of the split axis."""
    config, R, E = plan.layout(name)
    if splits == "r":
        R, parts = min(R, config.split), triton.cdiv(R, config.split)
    else:
        E, parts = min(E, config.split), triton.cdiv(E, config.split)
    even = plan.even and plan.span % config.block == 0 and (plan.r, plan.e) == (R * (parts if splits == "r" else 1), E * (parts if splits == "e" else 1)) and plan.n % config.block == 0 and plan.m % config.block == 0
    kernel[(plan.B * rows * chunks * parts,)](
        *args, **constants, **plan.constants, EVEN=even, BLOCK=config.block, R=R, E=E, PARTS=parts,
        num_warps=config.warps, num_stages=config.stages,
    )


class _Linear(torch.autograd.Function):
    """The launches joined: keeps q, k, v, o, the denominators and the states before each chunk."""

    @staticmethod
    def forward(ctx, q, k, v, S, z, decay, code, shift_q, shift_k, feature, normalise, causal, heads):
        q, k, v = _packed(q), _packed(k), _packed(v)
        decay = None if decay is None else decay.float().contiguous()
        plan = _Plan(q, k, v, decay, code, feature, normalise, causal, heads)
        B, H, n, r, e, m = plan.B, plan.H, plan.n, plan.r, plan.e, plan.m
        o = _tokens_like((B, H, n, e), q)
        den = empty((B, H, n) if normalise else (1,), q)
        chunks = plan.chunks_k
        slots = empty((B, heads, chunks + 1, plan.slot), q)
        keeps = empty((B, heads, chunks), q)
        final = empty((B, heads, plan.slot), q)
        given = S is not None
        if given:
            slots[:, :, 0, : r * e] = S.reshape(B, heads, r * e)
            if normalise:
                slots[:, :, 0, r * e :] = z
        if not causal or chunks > 1:
            _launch(
                _states, plan, "states", heads, chunks, "r",
                k, v, _or(shift_k, q), _or(decay, q), _or(code, q), slots, keeps,
                *_steps(k), *_steps(v), m, plan.span, chunks, r, e, KV=plan.Hkv, HEADS=heads,
            )
            if causal:
                _scan_slots(plan, slots, keeps, chunks, given, False)
            else:
                final = slots[:, :, 0 if given else 1 :].sum(2)
        _launch(
            _outputs, plan, "outputs", H, plan.chunks_q, "e",
            q, k, v, o, den, _or(shift_q, q), _or(shift_k, q), _or(decay, q), _or(code, q),
            slots if causal else final, final,
            *_steps(q), *_steps(k), *_steps(v), *_steps(o), n, plan.span, plan.chunks_q, r, e, int(given),
            H=H, KV=plan.Hkv, HEADS=heads,
        )
        ctx.save_for_backward(q, k, v, o, den, slots if causal else final, decay, code, shift_q, shift_k)
        ctx.plan, ctx.given = plan, given
        ctx.set_materialize_grads(False)
        S = final[..., : r * e].view(B, heads, r, e)
        return o, S, final[..., r * e :] if normalise else None

    @staticmethod
    def backward(ctx, do, dS, dz):
        q, k, v, o, den, slots, decay, code, shift_q, shift_k = ctx.saved_tensors
        plan = ctx.plan
        normalise, causal, heads = plan.constants["NORMALISE"], plan.constants["CAUSAL"], plan.heads
        B, H, n, r, e, m = plan.B, plan.H, plan.n, plan.r, plan.e, plan.m
        do = torch.zeros_like(o) if do is None else _packed(do)
        shifts = _or(shift_q, q), _or(shift_k, q)
        rest = _or(decay, q), _or(code, q)
        chunks = plan.chunks_q
        c = empty((B, H, n) if normalise else (1,), q)
        back = empty((B, heads, chunks + 1, plan.slot), q)
        keeps = empty((B, heads, chunks), q)
        given = dS is not None or dz is not None
        if given:
            back[:, :, chunks, : r * e] = 0 if dS is None else dS.reshape(B, heads, r * e)
            if normalise:
                back[:, :, chunks, r * e :] = 0 if dz is None else dz
        _launch(
            _adjoints, plan, "adjoints", heads, chunks, "r",
            q, o, do, den, c, shifts[0], *rest, back, keeps,
            *_steps(q), *_steps(o), *_steps(do), n, plan.span, chunks, r, e, H=H, HEADS=heads,
        )
        if causal:
            _scan_slots(plan, back, keeps, chunks, given, True)
            first = back[:, :, 0]
        else:
            back = first = back[:, :, : chunks + given].sum(2)
        dq = _tokens_like(q.shape, q)
        _launch(
            _queries, plan, "queries", H, chunks, "r",
            q, k, v, do, den, c, dq, *shifts, *rest, slots,
            *_steps(q), *_steps(k), *_steps(v), *_steps(do), *_steps(dq), n, plan.span, chunks, r, e, int(ctx.given),
            H=H, KV=plan.Hkv, HEADS=heads,
        )
        # with a decay a key head has one gradient a query head: they are summed below
        dk, dv = _tokens_like((B, heads, m, r), k), _tokens_like((B, heads, m, e), v)

        def keys(splits, DK, DV):
            _launch(
                _keys, plan, "keys", heads, plan.chunks_k, splits,
                q, k, v, do, den, c, dk, dv, *shifts, *rest, back,
                *_steps(q), *_steps(k), *_steps(v), *_steps(do), *_steps(dk), *_steps(dv),
                m, plan.span, plan.chunks_k, r, e, int(given), H=H, KV=plan.Hkv, HEADS=heads, DK=DK, DV=DV,
            )

        config, R, E = plan.layout("keys")
        if max(R, E) <= config.split:
            keys("r", True, True)
        else:
            keys("r", True, False)
            keys("e", False, True)
        if heads > plan.Hkv:
            dk, dv = (x.view(B, plan.Hkv, -1, m, x.shape[-1]).sum(2) for x in (dk, dv))
        dS = dz = None
        if ctx.given:
            dS = first[..., : r * e].view(B, heads, r, e)
            dz = first[..., r * e :] if normalise else None
        return dq, dk, dv, dS, dz, None, None, None, None, None, None, None, None


def _or(pointer, other):
    """Triton wants a pointer even where the kernel never reads it."""
    return other if pointer is None else pointer
