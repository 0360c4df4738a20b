"""Softmax attention in Triton: the walk of a block of queries over its keys.

    q, k, v     (B, G, P, n, d), (B, G, m, d), (B, G, m, e): P query heads share a head of keys
    walk        keys [min lo, max hi) of the block in tiles, and the prefix in narrower ones; tiles that every query
                sees whole carry no mask
    score       x = scale · log₂e · q·k, or with a cap c · tanh(x / c)
    softmax     online: peak ← max,  mass ← mass · 2^(old − new) + Σ 2^(x − peak)
    out         o = acc / mass, lse = peak + log₂ mass (base 2; +∞ for a query that sees nothing, whose o is 0)
    sink        a logit without a value: the walk begins with peak = sink, mass = 1

Which keys a query sees stands in four numbers a query (reach.py), read from memory: nothing is compiled for a length,
a window or a pattern. Each element is written by one program in a fixed order: runs are bit-equal.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2
from heedful.kernels.softmax import reach

NOWHERE = tl.constexpr(reach.NOWHERE)


@triton.jit
def capped(x, cap):
    """cap · tanh(x / cap), by one power of two."""
    fall = exp2(tl.abs(x) * (-2.8853900817779268 / cap))  # exp(−2 |x| / cap)
    size = cap * (1.0 - fall) / (1.0 + fall)
    return tl.where(x < 0, -size, size)


@triton.jit
def read(base, start, stride, rows, columns, real, width, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """Rows start + rows of a matrix; those that are not real, and columns from `width` on, are zero and not read."""
    at = base + start.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if MASKED:
        if EVEN:
            return tl.load(at, mask=real[:, None], other=0.0)
        return tl.load(at, mask=real[:, None] & (columns[None, :] < width), other=0.0)
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=columns[None, :] < width, other=0.0)


@triton.jit
def write(base, start, stride, rows, columns, real, width, tile):
    at = base + start.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=real[:, None] & (columns[None, :] < width))


@triton.jit
def reach_of(table, length, i, here, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr):
    """lo, hi of the near interval; base, stop of the prefix; from, until of a prefix that lies among the near tiles.

    The queries of a block that begin a segment of their own have their prefix nearby: the tiles of the near interval
    take it along. The others share the prefix of the block's first segment, which may lie far back.
    """
    lo = tl.load(table + i, mask=here, other=NOWHERE)
    hi = tl.load(table + length + i, mask=here, other=0)
    begin = tl.full(lo.shape, 0, tl.int32)
    stop = tl.full(lo.shape, 0, tl.int32)
    if PREFIX:
        begin = tl.load(table + 2 * length + i, mask=here, other=NOWHERE)
        stop = tl.load(table + 3 * length + i, mask=here, other=0)
    base = tl.min(begin, 0)
    late = tl.full(lo.shape, NOWHERE, tl.int32)
    until = tl.full(lo.shape, 0, tl.int32)
    if PREFIX and SEGMENTS:
        own = (begin != base) & (stop > begin)
        late = tl.where(own, begin, NOWHERE)
        until = tl.where(own, stop, 0)
        stop = tl.where(own, 0, stop)
    return lo, hi, base, stop, late, until


@triton.jit
def cut(lo, hi, late, until, TILE: tl.constexpr):
    """Where the near tiles begin; how many there are; the first and the last but one that need no mask."""
    first = tl.minimum(tl.min(lo, 0), tl.min(late, 0))
    last = tl.maximum(tl.max(hi, 0), tl.max(until, 0))
    total = tl.cdiv(tl.maximum(last - first, 0), TILE)
    inner = tl.max(tl.where(lo == NOWHERE, 0, lo), 0)
    outer = tl.min(tl.where(lo == NOWHERE, NOWHERE, hi), 0)
    left = tl.minimum(tl.cdiv(tl.maximum(inner - first, 0), TILE), total)
    right = tl.maximum(left, tl.minimum(tl.maximum(outer - first, 0) // TILE, total))
    return first, total, left, right


@triton.jit
def share(count, part, PARTS: tl.constexpr):
    """The tiles of one part out of PARTS."""
    return count * part // PARTS, count * (part + 1) // PARTS


@triton.jit
def sees(j, lo, hi, late, until, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr):
    seen = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    if PREFIX and SEGMENTS:
        seen = seen | ((j[None, :] >= late[:, None]) & (j[None, :] < until[:, None]))
    return seen


@triton.jit
def takes_part(table, j, length, SEGMENTS: tl.constexpr):
    """Tokens that exist and are no padding: what stands in others, NaN too, must not be read."""
    real = j < length
    if SEGMENTS:
        real = tl.load(table + j, mask=real, other=NOWHERE) != NOWHERE
    return real


@triton.jit
def _add_tile(
    q,
    acc,
    peak,
    mass,
    start,
    seen,
    real,
    k,
    v,
    sk_n,
    sv_n,
    scale,
    cap,
    d,
    e,
    in_d,
    in_e,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    VALUES: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One tile of keys more."""
    within = tl.arange(0, TILE)
    keys = read(k, start, sk_n, within, in_d, real, d, MASKED, EVEN_D).to(OPERAND)
    x = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if CAPPED:
        x = capped(x * scale, cap)
        scale = 1.0
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    new = tl.maximum(peak, tl.max(x, 1) * scale)
    level = new
    if MASKED:
        level = tl.where(new == float("-inf"), 0.0, new)
    p = exp2(x * scale - level[:, None])
    keep = exp2(peak - level)
    mass = mass * keep + tl.sum(p, 1)
    if VALUES:
        values = read(v, start, sv_n, within, in_e, real, e, MASKED, EVEN_E).to(OPERAND)
        acc = tl.dot(p.to(OPERAND), values, acc * keep[:, None], input_precision=PRECISION)
    return acc, new, mass


# Lengths are not compiled in: sequences of any length share one program.
LENGTHS = ["n", "m", "skip", "stop", "blocks", "rows_b", "rows_g", "keys_b", "keys_g", "G"]


@triton.jit(do_not_specialize=[*LENGTHS, "so_part"])
def attend(
    q,
    k,
    v,
    o,
    lse,
    sink,
    rows,
    keys,
    sq_b,
    sq_g,
    sq_p,
    sq_n,
    sk_b,
    sk_g,
    sk_n,
    sv_b,
    sv_g,
    sv_n,
    so_b,
    so_g,
    so_p,
    so_n,
    so_part,
    rows_b,
    rows_g,
    keys_b,
    keys_g,
    n,
    m,
    d,
    e,
    skip,
    stop,
    blocks,
    scale,
    cap,
    G,
    P,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PREFIX: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    SINK: tl.constexpr,
    EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Queries [skip, stop) of every head; with PARTS > 1 each takes a share of the keys and writes what that gives."""
    block = blocks - 1 - tl.program_id(0) % blocks  # the last queries of a causal pattern have most to do
    rest = tl.program_id(0) // blocks
    part = rest % PARTS
    head = rest // PARTS
    columns = tl.program_id(1)
    b = (head // P // G).to(tl.int64)
    g = head // P % G
    q += b * sq_b + g.to(tl.int64) * sq_g + (head % P).to(tl.int64) * sq_p
    k += b * sk_b + g.to(tl.int64) * sk_g
    v += b * sv_b + g.to(tl.int64) * sv_g
    rows += b * rows_b + g * rows_g
    keys += b * keys_b + g * keys_g

    start = block * ROWS
    within = tl.arange(0, ROWS)
    i = start + within
    here = (i >= skip) & (i < stop)
    lo, hi, base, end, late, until = reach_of(rows, n, i, here, PREFIX, SEGMENTS)
    first, total, left, right = cut(lo, hi, late, until, TILE)

    in_d = tl.arange(0, D)
    in_e = columns * E + tl.arange(0, E)
    queries = read(q, start, sq_n, within, in_d, i < n, d, True, EVEN_D).to(OPERAND)
    acc = tl.zeros([ROWS, E], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    if SINK:
        if part == 0:
            peak = tl.load(sink + head) + tl.zeros([ROWS], tl.float32)
            mass = tl.full([ROWS], 1.0, tl.float32)

    if PREFIX:
        if part == 0:
            for t in range(0, tl.cdiv(tl.maximum(tl.max(end, 0) - base, 0), PREFIX)):
                at = base + t * PREFIX
                j = at + tl.arange(0, PREFIX)
                real = takes_part(keys, j, m, SEGMENTS)
                seen = real[None, :] & (j[None, :] < end[:, None])
                acc, peak, mass = _add_tile(
                    queries, acc, peak, mass, at, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
                    PREFIX, True, VALUES, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
                )  # fmt: skip
    begin, finish = share(left + total - right, part, PARTS)
    for t in range(begin, finish):
        at = first + tl.where(t < left, t, t - left + right) * TILE
        j = at + tl.arange(0, TILE)
        seen = sees(j, lo, hi, late, until, PREFIX, SEGMENTS)
        real = takes_part(keys, j, m, SEGMENTS)
        acc, peak, mass = _add_tile(
            queries, acc, peak, mass, at, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
            TILE, True, VALUES, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip
    begin, finish = share(right - left, part, PARTS)
    for t in range(begin, finish):
        at = first + (left + t) * TILE
        acc, peak, mass = _add_tile(
            queries, acc, peak, mass, at, here, here, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
            TILE, False, VALUES, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip

    sighted = (mass != 0) & (lo != NOWHERE)  # padding sees nothing, whatever its query holds
    where = ((part * tl.num_programs(0) // blocks // PARTS).to(tl.int64) + head) * stop
    if columns == 0:
        tl.store(lse + where + i, tl.where(sighted, peak + tl.log2(mass), float("inf")), mask=here)
    if VALUES:
        o += b * so_b + g.to(tl.int64) * so_g + (head % P).to(tl.int64) * so_p + part.to(tl.int64) * so_part
        acc = tl.where(sighted[:, None], acc / tl.where(sighted, mass, 1.0)[:, None], 0.0)
        write(o, start, so_n, within, in_e, here, e, acc)
