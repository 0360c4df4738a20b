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
                a sum of two (an error in ωᵀx is one in a logarithm); tf32 for float16, 3×tf32 for float32

Every program walks over the features, a few dozen at a time: what it holds does not grow with their number. ‖q‖² and
the shifts a, b, s leave the quotient, so no gradient goes through them. s looks at no later token. Each element is
written by one program in a fixed order: runs are bit-equal. README.md has the floors and the measurements.
"""

from __future__ import annotations

from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from heedful.kernels.arithmetic import exp2
from heedful.kernels.chunked_linear.launches import INTERPRETED, Config, launch, over
from heedful.kernels.chunked_linear.reference import LEAST
from heedful.kernels.dispatch import on_device
from heedful.kernels.kept import kept
from heedful.kernels.random_features import reference

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(LEAST[torch.float32])
WIDEST = 256
MOST = 256
PARTS = 512  # partial sums over all keys in flight, where nothing is causal
LAUNCHES = ("peaks", "states", "outputs", "adjoints", "queries", "dk", "dv")
PARTED = ("states", "adjoints")  # one program for each few features; the others walk over them

# Tokens a block, and of each launch: features at a time, warps, stages. The first is what gpu_random_features.py --tune
# found on an H200, the others go by registers and spills, compiled for sm_90. The key is the widest of d and e (up to
# it) and the operands.
CONFIGS = {
    (64, "bf16"): (
        128,
        dict(
            peaks=Config(64, 8, 2),
            states=Config(128, 8, 1),
            outputs=Config(64, 8, 3),
            adjoints=Config(128, 8, 2),
            queries=Config(64, 8, 3),
            dk=Config(64, 8, 3),
            dv=Config(64, 8, 3),
        ),
    ),
    (128, "bf16"): (64, dict.fromkeys(LAUNCHES, Config(64, 8, 2))),
    (256, "bf16"): (64, dict.fromkeys(LAUNCHES, Config(64, 8, 1))),
    (64, "fp32"): (32, dict.fromkeys(LAUNCHES, Config(32, 4, 1))),
    (128, "fp32"): (32, dict.fromkeys(LAUNCHES, Config(32, 4, 1))),
    (256, "fp32"): (16, dict.fromkeys(LAUNCHES, Config(32, 4, 1))),
}
SPLIT = True  # W as a sum of two bfloat16
GROUP, TILE = 8, 256  # blocks × numbers that a program of the scan takes at a time
SCAN = Config(TILE, 1, 3)  # one warp, so that a thread has all blocks of its numbers
LEVELS = 1024  # blocks of which the levels are found at a time


def objections(q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True) -> list[str]:
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
    if q.shape[0] * q.shape[1] > 65535:
        said.append(f"batch times heads goes up to 65535, got {q.shape[0] * q.shape[1]}.")
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
    with on_device(q):
        return _Attention.apply(q, k, v, key_bias, query_weight, key_weight, bias, float(curvature), causal)


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
def _logs(
    x, W, bias, at, SPLIT: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr
):
    """x W + c to base 2 for the features from `at` on, W in one or two parts; −∞ for features beyond the last.

    Also W itself, rounded, for the way back."""
    cr = at + tl.arange(0, R)
    here = W + tl.arange(0, D)[:, None] * M + cr[None, :]
    high = tl.load(here)
    logs = tl.dot(x, high, input_precision=PRECISION)
    if SPLIT:
        logs = tl.dot(x, tl.load(here + D * M), logs, input_precision=PRECISION)
    return logs + tl.load(bias + cr)[None, :], high


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
def _peaks(
    x,
    key_bias,
    W,
    bias,
    peaks,
    tops,
    climbs,
    maxima,
    x_b,
    x_h,
    x_t,
    curvature,
    n,
    d,
    HEADS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    KEYS: tl.constexpr,
    BIASED: tl.constexpr,
    SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
):
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
    tile = _rows(x, t, x_t, tl.arange(0, D), d, left, EVEN_N, EVEN_D).to(OPERAND)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, M, R):
        logs, _high = _logs(tile, W, bias, at, SPLIT, PRECISION, D, M, R)
        peak = tl.maximum(peak, tl.max(logs, 1))
    tl.store(peaks + first + t, peak, mask=t < left)
    if KEYS:
        wide = tile.to(tl.float32)
        top = peak - curvature * tl.sum(wide * wide, 1)
        if BIASED:
            top += tl.load(key_bias + first + t, mask=t < left, other=0.0) * LOG2E
        top = tl.where(t < left, top, float("-inf"))
        tl.store(tops + first + t, top, mask=t < left)
        tl.store(climbs + first + t, tl.associative_scan(top, 0, _larger), mask=t < left)
        tl.store(maxima + row * tl.num_programs(0) + block, tl.max(top, 0))


@triton.jit
def _levels(maxima, levels, blocks, GROUP: tl.constexpr):
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
def _states(
    k,
    v,
    W,
    bias,
    peaks,
    tops,
    levels,
    slots,
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
    d,
    e,
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
    R: tl.constexpr,
):
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
        x = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32)
        logs, _high = _logs(x, W, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - tl.load(peaks + t, mask=t < left, other=0.0)[:, None])
        leave = exp2(tl.load(tops + t, mask=t < left, other=float("-inf")) - last)
        z += tl.sum(f * leave[:, None], 0)
        moved = (u * leave[:, None]).to(OPERAND)
        S = tl.dot(tl.trans(moved), f.to(OPERAND), S, input_precision=PRECISION)
    slot = row * (chunks + CAUSAL) + chunk + CAUSAL
    tl.store(slots + slot * (E * M) + ce[:, None] * M + cr[None, :], S)
    tl.store(sums + slot * M + cr, z)


@triton.jit
def _scan(
    slots,
    levels,
    chunks,
    width,
    G: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
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
        kept, own = tl.associative_scan((tl.broadcast_to(keep[:, None], (GROUP, TILE)), own), 0, _link)
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
        s = tl.maximum(tl.load(climbs + t, mask=t < left, other=0.0), before)
        if not EVEN_N:
            s = tl.where(t < left, s, last)
    else:
        before = 0.0
        last = tl.load(levels + blocks)
        top = tl.load(tops + t, mask=t < left, other=float("-inf"))
        s = top
    return top, s, before, last


@triton.jit
def _outputs(
    q,
    k,
    v,
    o,
    Wq,
    Wk,
    bias,
    peaks_q,
    den,
    peaks,
    tops,
    climbs,
    levels,
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
    R: tl.constexpr,
):
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
    x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
    a = tl.load(peaks_q + row * n + base + t, mask=t < left, other=0.0)
    if CAUSAL:
        k += batch * k_b + kv * k_h + skip * k_t
        v += batch * v_b + kv * v_h + skip * v_t
        y = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        b = tl.load(peaks + owner * n + base + t, mask=t < left, other=0.0)
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
        cr = at + tl.arange(0, R)
        logs, _high = _logs(x, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - a[:, None])
        S = tl.load(slots + ce[:, None] * M + cr[None, :], mask=(cr < some)[None, :], other=0.0)
        z = tl.load(sums + cr, mask=cr < some, other=0.0)
        total += tl.sum(f * z[None, :], 1)
        fq = f.to(OPERAND)
        num = tl.dot(fq, tl.trans(S), num, input_precision=PRECISION)
        if CAUSAL:
            logs, _high = _logs(y, Wk, bias, at, SPLIT, PRECISION, D, M, R)
            fk = exp2(logs - b[:, None]).to(OPERAND)
            P = tl.dot(fq, tl.trans(fk), P, input_precision=PRECISION)
    if CAUSAL:
        u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E).to(OPERAND)
        at_token = owner * n + base
        top, s, before, _after = _times(
            tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
        )
        into = exp2(before - s)
        P = _weigh(P, top, s, BLOCK, False)
        total = total * into + tl.sum(P, 1)
        num = tl.dot(P.to(OPERAND), u, num * into[:, None], input_precision=PRECISION)
    tl.store(den + row * n + base + t, total, mask=t < left)
    _put(o, t, o_t, ce, e, num * _reciprocal(total)[:, None], left, EVEN_N, EVEN_E)


@triton.jit
def _adjoints(
    q,
    o,
    do,
    Wq,
    bias,
    peaks_q,
    den,
    delta,
    climbs,
    levels,
    slots,
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
    R: tl.constexpr,
):
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
        x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        g = _rows(do, t, do_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32)
        out = _rows(o, t, o_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32)
        over = _reciprocal(tl.load(den + t, mask=t < left, other=0.0))
        dl = tl.sum(g * out, 1) * over
        if at == 0:
            tl.store(delta + t, dl, mask=t < left)
        if CAUSAL:
            into = exp2(before - tl.maximum(tl.load(climbs + t, mask=t < left, other=0.0), before))
            over *= into
            dl *= into
        logs, _high = _logs(x, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - tl.load(peaks_q + t, mask=t < left, other=0.0)[:, None])
        y -= tl.sum(f * dl[:, None], 0)
        S = tl.dot(tl.trans((g * over[:, None]).to(OPERAND)), f.to(OPERAND), S, input_precision=PRECISION)
    slot = row * (chunks + CAUSAL) + chunk
    tl.store(slots + slot * (E * M) + ce[:, None] * M + cr[None, :], S)
    tl.store(sums + slot * M + cr, y)


@triton.jit
def _queries(
    q,
    k,
    v,
    do,
    dq,
    Wq,
    Wk,
    bias,
    peaks_q,
    den,
    delta,
    peaks,
    tops,
    climbs,
    levels,
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
    R: tl.constexpr,
):
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
    x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
    a = tl.load(peaks_q + row * n + base + t, mask=t < left, other=0.0)
    over = _reciprocal(tl.load(den + row * n + base + t, mask=t < left, other=0.0))
    dl = tl.load(delta + row * n + base + t, mask=t < left, other=0.0)
    g = _rows(do, t, do_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32) * over[:, None]
    if CAUSAL:
        k += batch * k_b + kv * k_h + skip * k_t
        v += batch * v_b + kv * v_h + skip * v_t
        y = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E).to(OPERAND)
        b = tl.load(peaks + owner * n + base + t, mask=t < left, other=0.0)
        at_token = owner * n + base
        top, s, before, _after = _times(
            tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
        )
        pairs = tl.dot(g.to(OPERAND), tl.trans(u), input_precision=PRECISION) - dl[:, None]
        pairs = _weigh(pairs, top, s, BLOCK, False).to(OPERAND)
        into = exp2(before - s)
        g *= into[:, None]
        dl *= into
        slots += (owner * (blocks + 1) + block) * (E * M)
        sums += (owner * (blocks + 1) + block) * M
        some = tl.where(block > 0, M, 0)
    else:
        slots += owner * (E * M)
        sums += owner * M
        some = M
    g = g.to(OPERAND)
    back = tl.zeros([BLOCK, D], tl.float32)
    for at in range(0, M, R):
        cr = at + tl.arange(0, R)
        S = tl.load(slots + ce[:, None] * M + cr[None, :], mask=(cr < some)[None, :], other=0.0)
        z = tl.load(sums + cr, mask=cr < some, other=0.0)
        grad = tl.dot(g, S, input_precision=PRECISION) - dl[:, None] * z[None, :]
        if CAUSAL:
            logs, _high = _logs(y, Wk, bias, at, SPLIT, PRECISION, D, M, R)
            fk = exp2(logs - b[:, None]).to(OPERAND)
            grad = tl.dot(pairs, fk, grad, input_precision=PRECISION)
        logs, high = _logs(x, Wq, bias, at, SPLIT, PRECISION, D, M, R)
        grad *= exp2(logs - a[:, None])
        back = tl.dot(grad.to(OPERAND), tl.trans(high), back, input_precision=PRECISION)
    _put(dq, t, dq_t, cd, d, back * LN2, left, EVEN_N, EVEN_D)


@triton.jit
def _keys(
    q,
    k,
    v,
    do,
    dk,
    dv,
    Wq,
    Wk,
    bias,
    peaks_q,
    den,
    delta,
    peaks,
    tops,
    climbs,
    levels,
    slots,
    sums,
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
    d,
    e,
    H: tl.constexpr,
    KV: tl.constexpr,
    WEIGHTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BIASED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
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
    R: tl.constexpr,
):
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
    y = _rows(k, t, k_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
    u = _rows(v, t, v_t, ce, e, left, EVEN_N, EVEN_E)
    at_token = owner * n + base
    b = tl.load(peaks + at_token + t, mask=t < left, other=0.0)
    top, s, _before, last = _times(
        tops + at_token, climbs + at_token, levels + owner * (blocks + 1), t, left, block, blocks, CAUSAL, EVEN_N
    )
    leave = exp2(top - last)
    if CAUSAL:
        q += batch * q_b + head * q_h + skip * q_t
        do += batch * do_b + head * do_h + skip * do_t
        x = _rows(q, t, q_t, cd, d, left, EVEN_N, EVEN_D).to(OPERAND)
        a = tl.load(peaks_q + row * n + base + t, mask=t < left, other=0.0)
        over = _reciprocal(tl.load(den + row * n + base + t, mask=t < left, other=0.0))
        dl = tl.load(delta + row * n + base + t, mask=t < left, other=0.0)
        g = _rows(do, t, do_t, ce, e, left, EVEN_N, EVEN_E).to(tl.float32) * over[:, None]
        g = g.to(OPERAND)
        if DK:
            pairs = tl.dot(u.to(OPERAND), tl.trans(g), input_precision=PRECISION) - dl[None, :]
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
    moved = (u.to(tl.float32) * leave[:, None]).to(OPERAND)
    gv = tl.zeros([BLOCK, E], tl.float32)
    back = tl.zeros([BLOCK, D], tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    for at in range(0, M, R):
        cr = at + tl.arange(0, R)
        S = tl.load(slots + ce[:, None] * M + cr[None, :], mask=(cr < some)[None, :], other=0.0)
        z = tl.load(sums + cr, mask=cr < some, other=0.0)
        logs, high = _logs(y, Wk, bias, at, SPLIT, PRECISION, D, M, R)
        f = exp2(logs - b[:, None])
        fk = f.to(OPERAND)
        if DV:
            gv = tl.dot(fk, tl.trans(S), gv, input_precision=PRECISION)
        if DK:
            grad = tl.dot(moved, S, input_precision=PRECISION) + leave[:, None] * z[None, :]
        if CAUSAL:
            logs, _high = _logs(x, Wq, bias, at, SPLIT, PRECISION, D, M, R)
            fq = exp2(logs - a[:, None]).to(OPERAND)
            if DV:
                A = tl.dot(fk, tl.trans(fq), A, input_precision=PRECISION)
            if DK:
                grad = tl.dot(pairs, fq, grad, input_precision=PRECISION)
        if DK:
            grad *= f
            share += tl.sum(grad, 1)
            back = tl.dot(grad.to(OPERAND), tl.trans(high), back, input_precision=PRECISION)
    if DV:
        gv *= leave[:, None]
        if CAUSAL:
            A = _weigh(A, top, s, BLOCK, True).to(OPERAND)
            gv = tl.dot(A, g, gv, input_precision=PRECISION)
        _put(dv, t, dv_t, ce, e, gv, left, EVEN_N, EVEN_E)
    if DK:
        if BIASED:
            tl.store(shares + row * n + base + t, share, mask=t < left)
        # curvature is to base 2 and halved
        back = (back - 2 * curvature * share[:, None] * y.to(tl.float32)) * LN2
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


def power(x, least) -> int:
    return max(least, 1 << (x - 1).bit_length())


def config(low, widest) -> tuple[int, dict[str, Config]]:
    return CONFIGS[next(x for x in (64, 128, 256) if widest <= x), "bf16" if low else "fp32"]


class Plan:
    """What the launches for inputs of one kind share: sizes, constants, the compiled kernels."""

    def __init__(self, q, v, weight, curvature, causal, biased):
        self.B, self.H, self.n, self.d = q.shape
        self.KV, self.m, self.e = v.shape[1:]
        self.causal, self.biased = causal, biased
        self.half = curvature * log2(torch.e) / 2
        low = q.dtype == torch.bfloat16
        # Rows of 128 bytes at least: with narrower operands of wgmma, what Triton 3.6 and 3.7 compile may read shared
        # memory where there is none (its issues 10573 and 11366).
        least = 64 if low else 32
        self.D, self.M, self.E = (power(x, least) for x in (self.d, weight.shape[-1], self.e))
        widest = max(self.D, self.E)
        self.block, configs = config(low, widest)
        self.configs = {**configs, "scan": SCAN}
        self.blocks_q, self.blocks_k = over(self.n, self.block), over(self.m, self.block)
        # the interpreter's dot does not know bfloat16
        self.operand = torch.bfloat16 if low and not INTERPRETED else torch.float32
        self.shared = dict(
            WEIGHTS=weight.shape[0],
            CAUSAL=causal,
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
            H=self.H,
            KV=self.KV,
        )
        self.constants: dict = {}
        self.ready: dict = {}

    def span(self, name, n, rows) -> int:
        """Tokens a chunk: one block where causal, else as many as leave enough chunks."""
        if self.causal:
            return self.block
        chunks = max(1, PARTS // (self.B * rows * self.parts(name)))
        return over(over(n, chunks), self.block) * self.block

    def parts(self, name) -> int:
        return over(self.M, self.configs[name].split)

    def launch(self, name, kernel, blocks, rows, pointers, numbers, key=(), **constants):
        """By the compiled kernel itself from the second time on; `key` is what the plan's own does not cover."""

        def describe():
            features = min(self.M, self.configs[name].split)
            every = {**self.shared, "R": features, **constants}
            grid = blocks * (self.parts(name) if name in PARTED else 1), self.B * rows
            return name, kernel, grid, numbers, {x: every[x] for x in kernel.arg_names if x in every}

        launch(self, (name, key, tuple(constants.items())), pointers, describe)

    def room(self, rows, chunks, like) -> tuple[Tensor, Tensor]:
        """For the states of all chunks: one more than chunks where causal, and only then in the operands' precision."""
        chunks, dtype = (chunks + 1, self.operand) if self.causal else (chunks, torch.float32)
        return empty((self.B, rows, chunks, self.E, self.M), like, dtype), empty((self.B, rows, chunks, self.M), like)

    def join(self, rows, slots, sums, levels, reverse) -> tuple[Tensor, Tensor]:
        """The states before (or after) each block, in place; where nothing is causal, the state of all."""
        if not self.causal:
            return slots.sum(2).to(self.operand), sums.sum(2)
        for name, x, width, tile in (("slots", slots, self.E * self.M, TILE), ("sums", sums, self.M, 32)):
            constants = dict(G=rows // self.KV, REVERSE=reverse, GROUP=GROUP, TILE=tile)

            def describe(width=width, tile=tile, constants=constants):
                return "scan", _scan, (over(width, tile), self.B * rows), (slots.shape[2] - 1, width), constants

            launch(self, (name, rows, reverse), (x, levels), describe)
        return slots, sums


PLANS: dict = {}


def plan_for(q, k, v, key_bias, weight, curvature, causal) -> Plan:
    """One plan for inputs that Triton would treat alike: sizes, strides, dtype, alignment, device, rest."""
    tensors = [x for x in (q, k, v, key_bias) if x is not None]
    key: tuple = (q.shape, v.shape, weight.shape, q.dtype, q.device, curvature, causal, SPLIT, config)
    key += tuple(x.stride() for x in tensors) + tuple(x.data_ptr() % 16 == 0 for x in tensors)
    plan = PLANS.get(key)
    if plan is None:
        if len(PLANS) >= 1024:
            PLANS.clear()
        plan = PLANS[key] = Plan(q, v, weight, curvature, causal, key_bias is not None)
    return plan


def _steps(*tensors):
    return tuple(step for x in tensors for step in x.stride()[:3])


def _packed(x):
    """Tokens whose coordinates lie side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


PADDED = WeakIdKeyDictionary()
BIASES = WeakIdKeyDictionary()


def _padded(weight, plan):
    """W to base 2 as (heads, 2, D, M) operands: W rounded, and what the rounding left."""

    def make():
        wide = weight.detach().float() * log2(torch.e)
        wide = torch.nn.functional.pad(wide, (0, plan.M - wide.shape[-1], 0, plan.D - wide.shape[-2]))
        high = wide.to(plan.operand)
        return torch.stack([high, (wide - high.float()).to(plan.operand)], 1)

    return kept(PADDED, (weight,), (plan.D, plan.M, plan.operand), make)


def _biases(bias, weight, plan):
    """c to base 2, −∞ for the features beyond the last."""

    def make():
        own = weight.new_zeros(weight.shape[0], weight.shape[-1]) if bias is None else bias.detach()
        return torch.nn.functional.pad(own.float() * log2(torch.e), (0, plan.M - own.shape[-1]), value=-torch.inf)

    return kept(BIASES, (weight if bias is None else bias,), (bias is None, plan.M), make)


class _Attention(torch.autograd.Function):
    """The launches joined: keeps q, k, v, o, the state before each block and five numbers a token and head."""

    @staticmethod
    def forward(ctx, q, k, v, key_bias, query_weight, key_weight, bias, curvature, causal):
        q, k, v = _packed(q), _packed(k), _packed(v)
        if key_bias is not None:
            key_bias = key_bias.float().contiguous()
        plan = plan_for(q, k, v, key_bias, query_weight, curvature, causal)
        B, H, KV, n, m, d, e = plan.B, plan.H, plan.KV, plan.n, plan.m, plan.d, plan.e
        Wq = _padded(query_weight, plan)
        Wk = Wq if key_weight is query_weight else _padded(key_weight, plan)
        c = _biases(bias, query_weight, plan)
        o = tokens_like((B, H, n, e), q, v.dtype)
        peaks_q, den = empty((2, B, H, n), q)
        peaks, tops, climbs = empty((3, B, KV, m), q)
        maxima, levels = empty((B, KV, plan.blocks_k), q), empty((B, KV, plan.blocks_k + 1), q)
        pointers: tuple[Tensor, ...] = q, q, Wq, c, peaks_q, q, q, q
        numbers: tuple = *_steps(q), plan.half, n, d
        plan.launch("peaks", _peaks, plan.blocks_q, H, pointers, numbers, HEADS=H, KEYS=False, BIASED=False)
        pointers = k, q if key_bias is None else key_bias, Wk, c, peaks, tops, climbs, maxima
        numbers = *_steps(k), plan.half, m, d
        plan.launch("peaks", _peaks, plan.blocks_k, KV, pointers, numbers, HEADS=KV, KEYS=True, BIASED=plan.biased)
        levelled = (B * KV,), (plan.blocks_k,), dict(GROUP=LEVELS)
        launch(plan, "levels", (maxima, levels), lambda: ("levels", _levels, *levelled))
        span = plan.span("states", m, KV)
        chunks = over(m, span)
        slots, sums = plan.room(KV, chunks, q)
        pointers, numbers = (k, v, Wk, c, peaks, tops, levels, slots, sums), (*_steps(k, v), m, span, chunks, d, e)
        plan.launch("states", _states, chunks, KV, pointers, numbers)
        slots, sums = plan.join(KV, slots, sums, levels, False)
        pointers = q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, levels, slots, sums
        plan.launch("outputs", _outputs, plan.blocks_q, H, pointers, (*_steps(q, k, v, o), n, d, e))
        ctx.save_for_backward(q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, levels, slots, sums)
        ctx.plan = plan
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, levels, slots, sums = ctx.saved_tensors
        plan, do = ctx.plan, _packed(do)
        B, H, KV, n, m, d, e = plan.B, plan.H, plan.KV, plan.n, plan.m, plan.d, plan.e
        key = do.dtype, do.stride(), do.data_ptr() % 16 == 0
        kind = q.dtype if H == KV else torch.float32  # the query heads that share a key head are summed below
        dq = tokens_like(q.shape, q, q.dtype)
        dk, dv = tokens_like((B, H, m, d), k, kind), tokens_like((B, H, m, e), v, kind)
        delta = empty((B, H, n), q)
        shares = empty((B, H, m), q) if plan.biased else delta
        span = plan.span("adjoints", n, H)
        chunks = over(n, span)
        back, after = plan.room(H, chunks, q)
        pointers: tuple[Tensor, ...] = q, o, do, Wq, c, peaks_q, den, delta, climbs, levels, back, after
        plan.launch("adjoints", _adjoints, chunks, H, pointers, (*_steps(q, o, do), n, span, chunks, d, e), key)
        back, after = plan.join(H, back, after, levels, True)
        pointers = q, k, v, do, dq, Wq, Wk, c, peaks_q, den, delta, peaks, tops, climbs, levels, slots, sums
        plan.launch("queries", _queries, plan.blocks_q, H, pointers, (*_steps(q, k, v, do, dq), n, d, e), key)
        pointers = q, k, v, do, dk, dv, Wq, Wk, c, peaks_q, den, delta, peaks, tops, climbs, levels, back, after, shares
        numbers = *_steps(q, k, v, do, dk, dv), plan.half, m, d, e
        for name in ("dk", "dv"):
            own = dict(BIASED=plan.biased, DK=name == "dk", DV=name == "dv")
            plan.launch(name, _keys, plan.blocks_k, H, pointers, numbers, key, **own)
        if H > KV:
            dk, dv = (x.unflatten(1, (KV, -1)).sum(2).to(q.dtype) for x in (dk, dv))
        dbias = None
        if plan.biased:
            dbias = shares if H == KV else shares.unflatten(1, (KV, -1)).sum(2)
        return dq, dk, dv, dbias, None, None, None, None, None
