"""Random feature attention in Triton: features are made from q and k in every launch and never reach device memory.

    features    fq_i = 2^(q_i Wq + c − a_i),  a_i = max_r;   fk_j = 2^(k_j Wk + c − b_j),  b_j = max_r;  all in (0, 1]
    weights     top_j = b_j − curvature ‖k_j‖²/2 + key_bias_j (to base 2),  s_i = max_{j ≤ i} top_j
                w_ij = 2^(top_j − s_i) ≤ 1 for j ≤ i:   num_i = Σ_j w_ij (fq_i·fk_j) v_j,  den_i = Σ_j w_ij (fq_i·fk_j)
    tokens      in chunks, one program each, which walks its chunk in blocks with the state in registers
    forward     states    each chunk by itself, on the scale of its own largest top: Sᵀ = Σ_j v_j fk_jᵀ, z = Σ_j fk_j
                scan      over the chunks, with their scales: the state before each chunk
                outputs   each chunk from the state before it:  P = w ∘ fq fkᵀ
                          num = P v + into (fq S),  den = P 1 + into (fq·z),  o = num / den
    backward    g_i = do_i / den_i,  δ_i = do_i·o_i / den_i
                adjoints  each chunk by itself: Rᵀ = Σ_i into_i g_i fq_iᵀ,  y = −Σ_i into_i δ_i fq_i
                scan      the same backwards: R and y after each chunk
                queries   dfq = D fk + into (g Sᵀ − δ zᵀ),  D = w ∘ (g vᵀ − δ 1ᵀ);   dq = (dfq ∘ fq) Wqᵀ
                keys      dfk = Dᵀ fq + leave (v Rᵀ + yᵀ),  dv = (w ∘ fq fkᵀ)ᵀ g + leave (fk R)
                          dk = (dfk ∘ fk) Wkᵀ − curvature (dfk·fk) k,  d key_bias = dfk·fk
    moving      into_i = 2^(s_before − s_i), leave_j = 2^(top_j − s_last), keep = 2^(s_before − s_last) of a block
    precision   states, normaliser, logarithms and sums in float32. Operands of a product: bfloat16 for bfloat16, where W
                goes as a sum of two (an error in ωᵀx is one in a logarithm); tf32 for float16, 3×tf32 for float32

The query's ‖q‖² and the shifts a, b, s leave the quotient, so no gradient goes through them. s looks at no later token.
Each element is written by one program in a fixed order: runs are bit-equal.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

from contextlib import nullcontext
from math import log2
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from heedful.kernels.chunked_linear.reference import LEAST
from heedful.kernels.random_features import reference

INTERPRETED = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(LEAST[torch.float32])
WIDEST = 256
MOST = 256
PROGRAMS = 1024
SHORTEST, LONGEST = 256, 2048


class Config(NamedTuple):
    """Of one kernel: warps, stages, most registers."""

    warps: int
    stages: int
    registers: int | None = None


NAMES = ("states", "outputs", "adjoints", "queries", "keys")
# The key is the number of features (up to it) times the widest of d and e (up to it).
CONFIGS = {
    "narrow": dict.fromkeys(NAMES, Config(4, 2)),
    "wide": dict.fromkeys(NAMES, Config(8, 2)),
    "widest": dict.fromkeys(NAMES, Config(8, 1)),
}


def objections(
    q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True
) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    options = dict(query_weight=query_weight, key_weight=key_weight, bias=bias, curvature=curvature)
    said = reference.objections(q, k, v, **options, key_bias=key_bias, causal=causal)
    if said:
        return said
    if not (q.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {q.device}.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        said.append(f"q, k, v must share bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        said.append(f"widths go up to {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}.")
    if query_weight.shape[-1] > MOST:
        said.append(f"features go up to {MOST}, got {query_weight.shape[-1]}.")
    if 0 in (*q.shape, *v.shape):
        said.append("there is nothing to launch for an empty tensor.")
    learned = [x for x in (query_weight, key_weight, bias) if x is not None and x.requires_grad]
    if learned and torch.is_grad_enabled():
        said.append("the gradient of the projection is not computed here.")
    return said


def random_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    bias: Tensor | None = None,
    curvature: float = 0.0,
    key_bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention by positive features; the same call as `reference.random_features`."""
    options = dict(query_weight=query_weight, key_weight=key_weight, bias=bias, curvature=curvature)
    if said := objections(q, k, v, **options, key_bias=key_bias, causal=causal):
        raise ValueError(" ".join(said))
    with _on(q):
        return _Attention.apply(q, k, v, key_bias, query_weight, key_weight, bias, float(curvature), causal)


def _on(x):
    """Triton launches on the current device: make it that of x where it is not."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


if INTERPRETED:

    @triton.jit
    def _exp2(x):
        return tl.exp2(x)
else:

    @triton.jit
    def _exp2(x):
        """2^x with denormals flushed: one instruction, where tl.exp2 takes five to keep them."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _link(keep1, x1, keep2, x2):
    return keep1 * keep2, x1 * keep2 + x2


@triton.jit
def _reciprocal(den):
    """1 / den; zero where there is nothing to divide by."""
    some = tl.abs(den) >= TINY
    return tl.where(some, 1 / tl.where(some, den, 1.0), 0.0)


@triton.jit
def _rows(pointer, t, stride, column, width, left, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """A tile of tokens × columns as stored, zero outside."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN_N and EVEN_C:
        return tl.load(at)
    elif EVEN_C:
        return tl.load(at, mask=(t < left)[:, None], other=0)
    else:
        return tl.load(at, mask=(t < left)[:, None] & (column < width)[None, :], other=0)


@triton.jit
def _put(pointer, t, stride, column, width, tile, left, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN_N and EVEN_C:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(t < left)[:, None] & (column < width)[None, :])


@triton.jit
def _weight(W, D: tl.constexpr, M: tl.constexpr):
    """A padded matrix of weights, (D, M) as it lies."""
    return tl.load(W + tl.arange(0, D)[:, None] * M + tl.arange(0, M)[None, :])


@triton.jit
def _logs(x, high, low, bias, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """x W + c to base 2, W in one or two parts; −∞ for features beyond the last."""
    logs = tl.dot(x, high, input_precision=PRECISION)
    if SPLIT:
        logs = tl.dot(x, low, logs, input_precision=PRECISION)
    return logs + bias[None, :]


@triton.jit
def _weigh(a, top, s, BLOCK: tl.constexpr, ADJOINT: tl.constexpr):
    """w ∘ a for a[query, key]; for a[key, query] with ADJOINT."""
    i = tl.arange(0, BLOCK)
    if ADJOINT:
        seen = i[None, :] >= i[:, None]
        return a * _exp2(tl.where(seen, top[:, None] - s[None, :], float("-inf")))
    else:
        seen = i[:, None] >= i[None, :]
        return a * _exp2(tl.where(seen, top[None, :] - s[:, None], float("-inf")))


@triton.jit
def _states(
    k,
    v,
    key_bias,
    weight,
    bias,
    peaks,
    tops,
    climbs,
    slots,
    maxima,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    curvature,
    n,
    span,
    chunks,
    d,
    e,
    KV: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
):
    """One chunk's own Sᵀ, z in slot c + 1 of its head, and its largest top; b, top and their running maximum a token."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = (pid // chunks).to(tl.int64)
    batch, head = row // KV, row % KV
    base = chunk * span
    k += batch * k_b + head * k_h + base.to(tl.int64) * k_t
    v += batch * v_b + head * v_h + base.to(tl.int64) * v_t
    first = row * n + base
    peaks += first
    tops += first
    climbs += first
    key_bias += first
    weight += (head % WEIGHTS) * (2 * D * M)
    cd, ce, cm = tl.arange(0, D), tl.arange(0, E), tl.arange(0, M)
    c = tl.load(bias + (head % WEIGHTS) * M + cm)
    high = _weight(weight, D, M)
    low = _weight(weight + D * M, D, M) if SPLIT else high
    S = tl.zeros([E, M], tl.float32)
    z = tl.zeros([M], tl.float32)
    before = -float("inf")
    left = n - base
    for at in range(0, tl.minimum(span, left), BLOCK):
        t = at + tl.arange(0, BLOCK)
        x = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E)
        logs = _logs(x, high, low, c, SPLIT, PRECISION)
        peak = tl.max(logs, 1)
        wide = x.to(tl.float32)
        top = peak - curvature * tl.sum(wide * wide, 1)
        if BIASED:
            top += tl.load(key_bias + t, mask=t < left, other=0.0) * LOG2E
        if not EVEN_N:
            top = tl.where(t < left, top, float("-inf"))
        climb = tl.maximum(tl.associative_scan(top, 0, _larger), before)
        last = tl.max(climb, 0)
        tl.store(peaks + t, peak, mask=t < left)
        tl.store(tops + t, top, mask=t < left)
        tl.store(climbs + t, climb, mask=t < left)
        f = _exp2(logs - peak[:, None])
        leave = _exp2(top - last)
        keep = _exp2(before - last)
        before = last
        z = z * keep + tl.sum(f * leave[:, None], 0)
        moved = (u.to(tl.float32) * leave[:, None]).to(OPERAND)
        S = tl.dot(tl.trans(moved), f.to(OPERAND), S * keep, input_precision=PRECISION)
    slots += (row * (chunks + 1) + chunk + 1) * (E * M + M)
    tl.store(slots + ce[:, None] * M + cm[None, :], S)
    tl.store(slots + E * M + cm, z)
    tl.store(maxima + row * chunks + chunk, before)


@triton.jit
def _scan(
    slots,
    maxima,
    scales,
    end,
    chunks,
    width,
    G: tl.constexpr,
    WEIGHTED: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Forwards: the state before each chunk, each on its own scale, and the scales. Backwards: what comes after each
    chunk, by the scales found forwards. What it ends with is also left in `end`."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    slots += row * (chunks + 1) * width
    maxima += row * chunks
    scales += row // G * (chunks + 1)
    inside = (column < width)[None, :]
    x = tl.zeros([TILE], tl.float32)
    level = -float("inf")
    for at in range(0, chunks, GROUP):
        c = at + tl.arange(0, GROUP)
        if REVERSE:
            c = chunks - 1 - c
        ok = (c >= 0) & (c < chunks)
        here = slots + (c if REVERSE else c + 1)[:, None] * width + column[None, :]
        own = tl.load(here, mask=ok[:, None] & inside, other=0.0)
        keep = tl.full([GROUP], 1.0, tl.float32)
        if REVERSE:
            if WEIGHTED:
                a = tl.load(scales + c, mask=ok, other=0.0)
                b = tl.load(scales + c + 1, mask=ok, other=0.0)
                keep = _exp2(a - b)
        else:
            a = tl.load(maxima + c, mask=ok, other=float("-inf"))
            b = tl.load(maxima + c - 1, mask=(c > 0) & (c <= chunks), other=float("-inf"))
            up = tl.maximum(tl.associative_scan(a, 0, _larger), level)
            was = tl.maximum(tl.associative_scan(b, 0, _larger), level)
            keep = _exp2(was - up)
            own *= _exp2(a - up)[:, None]
            level = tl.max(up, 0)
            if tl.program_id(0) == 0:
                if row % G == 0:
                    tl.store(scales + c, was, mask=ok)
        kept, own = tl.associative_scan((tl.broadcast_to(keep[:, None], (GROUP, TILE)), own), 0, _link)
        own += kept * x[None, :]
        tl.store(here, own, mask=ok[:, None] & inside)
        # chunks beyond the last add nothing and keep everything
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)
    tl.store(end + row * width + column, x, mask=column < width)
    if not REVERSE:
        if tl.program_id(0) == 0:
            tl.store(scales + chunks, level)


@triton.jit
def _outputs(
    q,
    k,
    v,
    o,
    query_weight,
    key_weight,
    bias,
    peaks_q,
    den,
    peaks,
    tops,
    climbs,
    slots,
    scales,
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
    d,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    WEIGHTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
):
    """One chunk's outputs from the state before it, or from the state of all keys."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = (pid // chunks).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * KV + kv
    base = chunk * span
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    o += batch * o_b + head * o_h + skip * o_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    peaks_q += row * n + base
    den += row * n + base
    peaks += owner * n + base
    tops += owner * n + base
    climbs += owner * n + base
    query_weight += (head % WEIGHTS) * (2 * D * M)
    key_weight += (head % WEIGHTS) * (2 * D * M)
    cd, ce, cm = tl.arange(0, D), tl.arange(0, E), tl.arange(0, M)
    c = tl.load(bias + (head % WEIGHTS) * M + cm)
    high = _weight(query_weight, D, M)
    low = _weight(query_weight + D * M, D, M) if SPLIT else high
    if CAUSAL:
        high_k = _weight(key_weight, D, M)
        low_k = _weight(key_weight + D * M, D, M) if SPLIT else high_k
        slots += (owner * (chunks + 1) + chunk) * (E * M + M)
        some = tl.where(chunk > 0, M, 0)
        S = tl.load(slots + ce[:, None] * M + cm[None, :], mask=(cm < some)[None, :], other=0.0)
        z = tl.load(slots + E * M + cm, mask=cm < some, other=0.0)
        start = tl.load(scales + owner * (chunks + 1) + chunk)
    else:
        slots += owner * (E * M + M)
        S = tl.load(slots + ce[:, None] * M + cm[None, :])
        z = tl.load(slots + E * M + cm)
        start = 0.0
    before = start
    left = n - base
    for at in range(0, tl.minimum(span, left), BLOCK):
        t = at + tl.arange(0, BLOCK)
        x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        logs = _logs(x, high, low, c, SPLIT, PRECISION)
        peak = tl.max(logs, 1)
        tl.store(peaks_q + t, peak, mask=t < left)
        fq = _exp2(logs - peak[:, None])
        total = tl.sum(fq * z[None, :], 1)
        fq = fq.to(OPERAND)
        num = tl.dot(fq, tl.trans(S.to(OPERAND)), input_precision=PRECISION)
        if CAUSAL:
            top = tl.load(tops + t, mask=t < left, other=float("-inf"))
            s = tl.maximum(tl.load(climbs + t, mask=t < left, other=float("-inf")), start)
            last = tl.max(s, 0)
            if not EVEN_N:
                s = tl.where(t < left, s, last)
            into = _exp2(before - s)
            y = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
            u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E)
            logs = _logs(y, high_k, low_k, c, SPLIT, PRECISION)
            fk = _exp2(logs - tl.load(peaks + t, mask=t < left, other=0.0)[:, None])
            leave = _exp2(top - last)
            keep = _exp2(before - last)
            before = last
            z = z * keep + tl.sum(fk * leave[:, None], 0)
            fk = fk.to(OPERAND)
            P = tl.dot(fq, tl.trans(fk), input_precision=PRECISION)
            P = _weigh(P, top, s, BLOCK, False)
            total = total * into + tl.sum(P, 1)
            num = tl.dot(P.to(OPERAND), u.to(OPERAND), num * into[:, None], input_precision=PRECISION)
            moved = (u.to(tl.float32) * leave[:, None]).to(OPERAND)
            S = tl.dot(tl.trans(moved), fk, S * keep, input_precision=PRECISION)
        tl.store(den + t, total, mask=t < left)
        _put(o, t, o_t, ce, e, num * _reciprocal(total)[:, None], left, EVEN_N, EVEN_E)


@triton.jit
def _adjoints(
    q,
    o,
    do,
    query_weight,
    bias,
    peaks_q,
    den,
    delta,
    climbs,
    slots,
    scales,
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
    d,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    WEIGHTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
):
    """One chunk's own Rᵀ and y, in slot c of its query head, on the scale before the chunk; δ of every token."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = (pid // chunks).to(tl.int64)
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
    query_weight += (head % WEIGHTS) * (2 * D * M)
    cd, ce, cm = tl.arange(0, D), tl.arange(0, E), tl.arange(0, M)
    c = tl.load(bias + (head % WEIGHTS) * M + cm)
    high = _weight(query_weight, D, M)
    low = _weight(query_weight + D * M, D, M) if SPLIT else high
    start = tl.load(scales + owner * (chunks + 1) + chunk) if CAUSAL else 0.0
    R = tl.zeros([E, M], tl.float32)
    y = tl.zeros([M], tl.float32)
    left = n - base
    for at in range(0, tl.minimum(span, left), BLOCK):
        t = at + tl.arange(0, BLOCK)
        x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        g = _rows(do, t, do_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32)
        out = _rows(o, t, o_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32)
        over = _reciprocal(tl.load(den + t, mask=t < left, other=0.0))
        dl = tl.sum(g * out, 1) * over
        tl.store(delta + t, dl, mask=t < left)
        if CAUSAL:
            s = tl.maximum(tl.load(climbs + t, mask=t < left, other=float("inf")), start)
            into = _exp2(start - s)
            over *= into
            dl *= into
        logs = _logs(x, high, low, c, SPLIT, PRECISION)
        fq = _exp2(logs - tl.load(peaks_q + t, mask=t < left, other=0.0)[:, None])
        y -= tl.sum(fq * dl[:, None], 0)
        R = tl.dot(tl.trans((g * over[:, None]).to(OPERAND)), fq.to(OPERAND), R, input_precision=PRECISION)
    slots += (row * (chunks + 1) + chunk) * (E * M + M)
    tl.store(slots + ce[:, None] * M + cm[None, :], R)
    tl.store(slots + E * M + cm, y)


@triton.jit
def _queries(
    q,
    k,
    v,
    do,
    dq,
    query_weight,
    key_weight,
    bias,
    peaks_q,
    den,
    delta,
    peaks,
    tops,
    climbs,
    slots,
    scales,
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
    d,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    WEIGHTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
):
    """One chunk's dq, forwards from the state before it."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = (pid // chunks).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * KV + kv
    base = chunk * span
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    do += batch * do_b + head * do_h + skip * do_t
    dq += batch * dq_b + head * dq_h + skip * dq_t
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    peaks_q += row * n + base
    den += row * n + base
    delta += row * n + base
    peaks += owner * n + base
    tops += owner * n + base
    climbs += owner * n + base
    query_weight += (head % WEIGHTS) * (2 * D * M)
    key_weight += (head % WEIGHTS) * (2 * D * M)
    cd, ce, cm = tl.arange(0, D), tl.arange(0, E), tl.arange(0, M)
    c = tl.load(bias + (head % WEIGHTS) * M + cm)
    high = _weight(query_weight, D, M)
    low = _weight(query_weight + D * M, D, M) if SPLIT else high
    if CAUSAL:
        high_k = _weight(key_weight, D, M)
        low_k = _weight(key_weight + D * M, D, M) if SPLIT else high_k
        slots += (owner * (chunks + 1) + chunk) * (E * M + M)
        some = tl.where(chunk > 0, M, 0)
        S = tl.load(slots + ce[:, None] * M + cm[None, :], mask=(cm < some)[None, :], other=0.0)
        z = tl.load(slots + E * M + cm, mask=cm < some, other=0.0)
        start = tl.load(scales + owner * (chunks + 1) + chunk)
    else:
        slots += owner * (E * M + M)
        S = tl.load(slots + ce[:, None] * M + cm[None, :])
        z = tl.load(slots + E * M + cm)
        start = 0.0
    before = start
    left = n - base
    for at in range(0, tl.minimum(span, left), BLOCK):
        t = at + tl.arange(0, BLOCK)
        over = _reciprocal(tl.load(den + t, mask=t < left, other=0.0))
        g = _rows(do, t, do_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32) * over[:, None]
        g = g.to(OPERAND)
        dl = tl.load(delta + t, mask=t < left, other=0.0)
        grad = tl.dot(g, S.to(OPERAND), input_precision=PRECISION)
        grad -= dl[:, None] * z[None, :]
        if CAUSAL:
            top = tl.load(tops + t, mask=t < left, other=float("-inf"))
            s = tl.maximum(tl.load(climbs + t, mask=t < left, other=float("-inf")), start)
            last = tl.max(s, 0)
            if not EVEN_N:
                s = tl.where(t < left, s, last)
            into = _exp2(before - s)
            y = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
            u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E)
            logs = _logs(y, high_k, low_k, c, SPLIT, PRECISION)
            fk = _exp2(logs - tl.load(peaks + t, mask=t < left, other=0.0)[:, None])
            leave = _exp2(top - last)
            keep = _exp2(before - last)
            before = last
            z = z * keep + tl.sum(fk * leave[:, None], 0)
            fk = fk.to(OPERAND)
            moved = (u.to(tl.float32) * leave[:, None]).to(OPERAND)
            S = tl.dot(tl.trans(moved), fk, S * keep, input_precision=PRECISION)
            D_ = tl.dot(g, tl.trans(u.to(OPERAND)), input_precision=PRECISION) - dl[:, None]
            D_ = _weigh(D_, top, s, BLOCK, False).to(OPERAND)
            grad = tl.dot(D_, fk, grad * into[:, None], input_precision=PRECISION)
        x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        logs = _logs(x, high, low, c, SPLIT, PRECISION)
        grad *= _exp2(logs - tl.load(peaks_q + t, mask=t < left, other=0.0)[:, None])
        back = tl.dot(grad.to(OPERAND), tl.trans(high), input_precision=PRECISION) * LN2
        _put(dq, t, dq_t, cd, d, back, left, EVEN_N, EVEN_D)


@triton.jit
def _keys(
    q,
    k,
    v,
    do,
    dk,
    dv,
    query_weight,
    key_weight,
    bias,
    peaks_q,
    den,
    delta,
    peaks,
    tops,
    climbs,
    slots,
    scales,
    shares,
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
    curvature,
    n,
    span,
    chunks,
    d,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIASED: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
):
    """One chunk's dk and dv for one query head, backwards from what comes after it; n counts keys."""
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = (pid // chunks).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    owner = batch * KV + kv
    base = chunk * span
    skip = base.to(tl.int64)
    k += batch * k_b + kv * k_h + skip * k_t
    v += batch * v_b + kv * v_h + skip * v_t
    dk += batch * dk_b + head * dk_h + skip * dk_t
    dv += batch * dv_b + head * dv_h + skip * dv_t
    peaks += owner * n + base
    tops += owner * n + base
    climbs += owner * n + base
    shares += row * n + base
    key_weight += (head % WEIGHTS) * (2 * D * M)
    cd, ce, cm = tl.arange(0, D), tl.arange(0, E), tl.arange(0, M)
    c = tl.load(bias + (head % WEIGHTS) * M + cm)
    high_k = _weight(key_weight, D, M)
    low_k = _weight(key_weight + D * M, D, M) if SPLIT else high_k
    scales += owner * (chunks + 1)
    if CAUSAL:
        q += batch * q_b + head * q_h + skip * q_t
        do += batch * do_b + head * do_h + skip * do_t
        peaks_q += row * n + base
        den += row * n + base
        delta += row * n + base
        query_weight += (head % WEIGHTS) * (2 * D * M)
        high = _weight(query_weight, D, M)
        low = _weight(query_weight + D * M, D, M) if SPLIT else high
        slots += (row * (chunks + 1) + chunk + 1) * (E * M + M)
        some = tl.where(chunk + 1 < chunks, M, 0)
        R = tl.load(slots + ce[:, None] * M + cm[None, :], mask=(cm < some)[None, :], other=0.0)
        y = tl.load(slots + E * M + cm, mask=cm < some, other=0.0)
        start = tl.load(scales + chunk)
        last = tl.load(scales + chunk + 1)
    else:
        slots += row * (E * M + M)
        R = tl.load(slots + ce[:, None] * M + cm[None, :])
        y = tl.load(slots + E * M + cm)
        start = 0.0
        last = tl.load(scales + chunks)
    left = n - base
    blocks = tl.cdiv(tl.minimum(span, left), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        t = at + tl.arange(0, BLOCK)
        top = tl.load(tops + t, mask=t < left, other=float("-inf"))
        leave = _exp2(top - last)
        x = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D)
        u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E).to(OPERAND)
        logs = _logs(x.to(OPERAND), high_k, low_k, c, SPLIT, PRECISION)
        fk = _exp2(logs - tl.load(peaks + t, mask=t < left, other=0.0)[:, None]).to(OPERAND)
        held = R.to(OPERAND)
        gv = tl.dot(fk, tl.trans(held), input_precision=PRECISION) * leave[:, None]
        gk = (tl.dot(u, held, input_precision=PRECISION) + y[None, :]) * leave[:, None]
        if CAUSAL:
            s = tl.maximum(tl.load(climbs + t, mask=t < left, other=float("-inf")), start)
            if not EVEN_N:
                s = tl.where(t < left, s, last)
            before = tl.load(climbs + at - 1, mask=at > 0, other=float("-inf"))
            before = tl.maximum(before, start)
            over = _reciprocal(tl.load(den + t, mask=t < left, other=0.0))
            dl = tl.load(delta + t, mask=t < left, other=0.0)
            g32 = _rows(do, t, do_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32) * over[:, None]
            g = g32.to(OPERAND)
            xq = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
            logs = _logs(xq, high, low, c, SPLIT, PRECISION)
            fq = _exp2(logs - tl.load(peaks_q + t, mask=t < left, other=0.0)[:, None])
            into = _exp2(before - s)
            keep = _exp2(before - last)
            last = before
            y = y * keep - tl.sum(fq * (dl * into)[:, None], 0)
            fq = fq.to(OPERAND)
            A = tl.dot(fk, tl.trans(fq), input_precision=PRECISION)
            A = _weigh(A, top, s, BLOCK, True).to(OPERAND)
            gv = tl.dot(A, g, gv, input_precision=PRECISION)
            D_ = tl.dot(u, tl.trans(g), input_precision=PRECISION) - dl[None, :]
            D_ = _weigh(D_, top, s, BLOCK, True).to(OPERAND)
            gk = tl.dot(D_, fq, gk, input_precision=PRECISION)
            moved = (g32 * into[:, None]).to(OPERAND)
            R = tl.dot(tl.trans(moved), fq, R * keep, input_precision=PRECISION)
        _put(dv, t, dv_t, ce, e, gv, left, EVEN_N, EVEN_E)
        gk *= fk.to(tl.float32)
        share = tl.sum(gk, 1)
        if BIASED:
            tl.store(shares + t, share, mask=t < left)
        back = tl.dot(gk.to(OPERAND), tl.trans(high_k), input_precision=PRECISION)
        # curvature is to base 2 and halved
        back = (back - 2 * curvature * share[:, None] * x.to(tl.float32)) * LN2
        _put(dk, t, dk_t, cd, d, back, left, EVEN_N, EVEN_D)


def empty(shape, like: Tensor, dtype=torch.float32) -> Tensor:
    """Every output and workspace is born here, so that a test can fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def tokens_like(shape, like: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, heads, n, width) in the memory order of `like`: heads before tokens, or tokens before heads."""
    B, h, n, w = shape
    if like.stride(1) < like.stride(2):
        return empty((B, n, h, w), like, dtype).transpose(1, 2)
    return empty(shape, like, dtype)


def over(a, b) -> int:
    return -(-a // b)


def power(x) -> int:
    return max(16, 1 << (x - 1).bit_length())


def span(n, rows) -> int:
    """Tokens a chunk: the longest that still gives every multiprocessor several chunks."""
    chunks = max(1, over(PROGRAMS, rows))
    return min(LONGEST, max(SHORTEST, 1 << (over(n, chunks) - 1).bit_length()))


SPLIT = True


class Plan:
    """What the launches of one call share."""

    def __init__(self, q, k, v, weight, causal, biased):
        self.B, self.H, self.n, self.d = q.shape
        self.KV, self.m, self.e = v.shape[1:]
        self.causal, self.biased = causal, biased
        self.D, self.M, self.E = power(self.d), power(weight.shape[-1]), power(self.e)
        low = q.dtype == torch.bfloat16
        widest = max(self.D, self.E)
        self.block = 64 if low and widest <= 128 else (32 if low or widest <= 64 else 16)
        kind = "narrow" if self.M <= 64 and widest <= 64 else ("wide" if self.M * widest <= 256 * 64 else "widest")
        self.configs = CONFIGS[kind]
        self.span = span(max(self.n, self.m), self.B * self.H)
        self.chunks_q, self.chunks_k = over(self.n, self.span), over(self.m, self.span)
        self.slot = self.M * (self.E + 1)
        # the interpreter's dot does not know bfloat16
        self.operand = torch.bfloat16 if low and not INTERPRETED else torch.float32
        self.constants = dict(
            WEIGHTS=weight.shape[0],
            SPLIT=SPLIT and low,
            OPERAND=tl.bfloat16 if self.operand == torch.bfloat16 else tl.float32,
            PRECISION="tf32" if q.dtype == torch.float16 else "tf32x3" if widest < 256 else "ieee",
            EVEN_N=self.n % self.block == self.m % self.block == 0,
            EVEN_D=self.d == self.D,
            EVEN_E=self.e == self.E,
            BLOCK=self.block,
            D=self.D,
            M=self.M,
            E=self.E,
        )

    def launch(self, name, kernel, rows, chunks, pointers, numbers, **constants):
        config = self.configs[name]
        options = dict(num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers)
        constants = {**self.constants, **constants}
        kernel[(self.B * rows * chunks,)](*pointers, *numbers, self.span, chunks, self.d, self.e, **constants, **options)

    def scan(self, rows, slots, maxima, scales, chunks, reverse) -> Tensor:
        end = empty((self.B * rows, self.slot), slots)
        group = min(64, 1 << (chunks - 1).bit_length())
        constants = dict(
            G=rows // self.KV, WEIGHTED=self.causal, REVERSE=reverse, GROUP=group, TILE=64, num_warps=4
        )
        _scan[over(self.slot, 64), self.B * rows](slots, maxima, scales, end, chunks, self.slot, **constants)
        return end


def _steps(*tensors):
    return tuple(step for x in tensors for step in x.stride()[:3])


def _packed(x):
    """Tokens whose coordinates lie side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(weight, plan):
    """W to base 2 as (heads, 2, D, M) operands: W rounded, and what the rounding left."""
    wide = weight.float() * log2(torch.e)
    wide = torch.nn.functional.pad(wide, (0, plan.M - wide.shape[-1], 0, plan.D - wide.shape[-2]))
    high = wide.to(plan.operand)
    return torch.stack([high, (wide - high.float()).to(plan.operand)], 1).contiguous()


def _biases(bias, weight, plan):
    if bias is None:
        bias = weight.new_zeros(weight.shape[0], weight.shape[-1], dtype=torch.float32)
    return torch.nn.functional.pad(bias.float() * log2(torch.e), (0, plan.M - bias.shape[-1]), value=-torch.inf)


class _Attention(torch.autograd.Function):
    """The launches joined: keeps q, k, v, o, the state before each chunk and six numbers a token and head."""

    @staticmethod
    def forward(ctx, q, k, v, key_bias, query_weight, key_weight, bias, curvature, causal):
        q, k, v = _packed(q), _packed(k), _packed(v)
        plan = Plan(q, k, v, query_weight, causal, key_bias is not None)
        B, H, KV, n, m = plan.B, plan.H, plan.KV, plan.n, plan.m
        Wq = _padded(query_weight, plan)
        Wk = Wq if key_weight is query_weight else _padded(key_weight, plan)
        c = _biases(bias, query_weight, plan)
        kb = q if key_bias is None else key_bias.float().contiguous()
        o = tokens_like((B, H, n, plan.e), q, v.dtype)
        chunks = plan.chunks_k
        peaks_q, den = empty((2, B, H, n), q)
        peaks, tops, climbs = empty((3, B, KV, m), q)
        slots, maxima = empty((B, KV, chunks + 1, plan.slot), q), empty((B, KV, chunks), q)
        scales = empty((B, KV, chunks + 1), q)
        half = curvature * log2(torch.e) / 2
        plan.launch(
            "states",
            _states,
            KV,
            chunks,
            (k, v, kb, Wk, c, peaks, tops, climbs, slots, maxima),
            (*_steps(k, v), half, m),
            KV=KV,
            BIASED=plan.biased,
        )
        end = plan.scan(KV, slots, maxima, scales, chunks, False)
        held = slots if causal else end
        plan.launch(
            "outputs",
            _outputs,
            H,
            plan.chunks_q,
            (q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, held, scales),
            (*_steps(q, k, v, o), n),
            H=H,
            KV=KV,
            CAUSAL=causal,
        )
        ctx.save_for_backward(q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, held, scales)
        ctx.plan, ctx.half = plan, half
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, held, scales = ctx.saved_tensors
        plan, do = ctx.plan, _packed(do)
        B, H, KV, n, m, causal = plan.B, plan.H, plan.KV, plan.n, plan.m, plan.causal
        heads = dict(H=H, KV=KV, CAUSAL=causal)
        kind = q.dtype if H == KV else torch.float32  # the query heads that share a key head are summed below
        dq = tokens_like(q.shape, q, q.dtype)
        dk, dv = tokens_like((B, H, m, plan.d), k, kind), tokens_like((B, H, m, plan.e), v, kind)
        delta = empty((B, H, n), q)
        shares = empty((B, H, m), q) if plan.biased else delta
        chunks = plan.chunks_q
        slots = empty((B, H, chunks + 1, plan.slot), q)
        plan.launch(
            "adjoints",
            _adjoints,
            H,
            chunks,
            (q, o, do, Wq, c, peaks_q, den, delta, climbs, slots, scales),
            (*_steps(q, o, do), n),
            **heads,
        )
        first = plan.scan(H, slots, slots, scales, chunks, True)
        plan.launch(
            "queries",
            _queries,
            H,
            chunks,
            (q, k, v, do, dq, Wq, Wk, c, peaks_q, den, delta, peaks, tops, climbs, held, scales),
            (*_steps(q, k, v, do, dq), n),
            **heads,
        )
        back = slots if causal else first
        plan.launch(
            "keys",
            _keys,
            H,
            plan.chunks_k,
            (q, k, v, do, dk, dv, Wq, Wk, c, peaks_q, den, delta, peaks, tops, climbs, back, scales, shares),
            (*_steps(q, k, v, do, dk, dv), ctx.half, m),
            BIASED=plan.biased,
            **heads,
        )
        if H > KV:
            dk, dv = (x.unflatten(1, (KV, -1)).sum(2).to(q.dtype) for x in (dk, dv))
        dbias = None
        if plan.biased:
            dbias = shares if H == KV else shares.unflatten(1, (KV, -1)).sum(2)
        return dq, dk, dv, dbias, None, None, None, None, None
