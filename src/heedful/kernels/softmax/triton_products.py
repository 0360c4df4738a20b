"""Products A Y and Aᵀ Y in Triton for 16-bit q and k and float32 Y, with the accuracy of float32.

    scores      x = scale · log₂e · q·k by one product of 16-bit numbers: exact except for the sum in float32
    weights     p = 2^(x − lse) in float32; lse, one number per query, is known beforehand, so nothing is rescaled
    halves      t = t₁ + t₂ with t₁ = half(t), t₂ = half(t − t₁): float16 has 11 bits, so |t − t₁ − t₂| ≤ 2⁻²² |t|
    product     p y ≈ p₂ y₁ + p₁ y₂ + p₁ y₁, three products of float16; the omitted p₂ y₂ is at most 2⁻²² p |y|
    range       float16 has a maximum of 65504 and a smallest step of 2⁻²⁴: p is scaled by 2¹⁵, each column of Y by a
                power of two that brings its largest element into [2¹⁴, 2¹⁵); so at most 2⁻⁴⁰ of the largest is lost
    error       at most 3 · 2⁻²² Σ p |y|, 7e-7, the same as with tf32x3, whose products take twice as long each; three
                products of bfloat16, with 8 bits, have an error of 3 · 2⁻¹⁸

    forward     a block of queries over its keys:   o_i = Σ_j p_ij y_j
    adjoint     a block of keys over its queries:   o_j = Σ_i p_ij y_i      the same p, except for rounding in x

Tensor cores truncate what they add to a sum, which biases sums of terms of one sign. So the kernel sums each tile alone
and adds the sums outside the tensor cores, rounded to nearest.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2
from heedful.kernels.softmax.triton_walk import (
    NOWHERE,
    cut,
    edge_tile,
    numbers,
    prefix_tile,
    prefix_tiles,
    reach_of,
    read,
    scores,
    share,
    takes_part,
    write,
)

RAISE = tl.constexpr(2.0**15)  # scales p; a factor, since adding 15 to the exponent would cost it three bits
LOWER = tl.constexpr(2.0**-15)


@triton.jit
def _halved(x):
    """A float32 as the sum of two float16."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=["length", "table_b", "table_g", "G", "parts", "span"])
def peaks(
    y, table, out, sy_b, sy_g, sy_n, sy_c, table_b, table_g, length, e, G, parts, span,
    ROWS: tl.constexpr, E: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The largest finite |y| of every column in each part of `span` tokens; (heads, parts, columns)."""
    part = tl.program_id(0) % parts
    head = tl.program_id(0) // parts
    column = tl.program_id(1) * E + tl.arange(0, E)
    y += (head // G).to(tl.int64) * sy_b + (head % G).to(tl.int64) * sy_g
    table += head // G * table_b + head % G * table_g
    top = tl.zeros([E], tl.float32)
    for start in range(part * span, tl.minimum(part * span + span, length), ROWS):
        j = start + tl.arange(0, ROWS)
        real = takes_part(table, j, length, SEGMENTS)
        at = y + j.to(tl.int64)[:, None] * sy_n + column.to(tl.int64)[None, :] * sy_c
        size = tl.abs(tl.load(at, mask=real[:, None] & (column < e)[None, :], other=0.0))
        top = tl.maximum(top, tl.max(tl.where(size < float("inf"), size, 0.0), 0))
    tl.store(out + (head * parts + part).to(tl.int64) * tl.num_programs(1) * E + column, top)


@triton.jit(do_not_specialize=["length", "table_b", "table_g", "G", "parts", "blocks"])
def split(
    y, table, peak, halves, units, sy_b, sy_g, sy_n, sy_c, table_b, table_g, length, e, G, parts, blocks,
    PARTS: tl.constexpr, ROWS: tl.constexpr, E: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Y in halves, (heads, groups of E columns, 2, tokens, E), zero at padding; and the unit of each column."""
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    groups = tl.num_programs(1)
    column = tl.program_id(1) * E + tl.arange(0, E)
    part = tl.arange(0, PARTS)
    at = peak + (head * parts + part).to(tl.int64)[:, None] * groups * E + column[None, :]
    top = tl.max(tl.load(at, mask=(part < parts)[:, None], other=0.0), 0)
    exponent = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 255, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^14 / 2^⌊log₂ top⌋
    if block == 0:
        unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        tl.store(units + head.to(tl.int64) * groups * E + column, unit)
    y += (head // G).to(tl.int64) * sy_b + (head % G).to(tl.int64) * sy_g
    table += head // G * table_b + head % G * table_g
    j = block * ROWS + tl.arange(0, ROWS)
    real = takes_part(table, j, length, SEGMENTS)
    at = y + j.to(tl.int64)[:, None] * sy_n + column.to(tl.int64)[None, :] * sy_c
    high, low = _halved(tl.load(at, mask=real[:, None] & (column < e)[None, :], other=0.0) * factor[None, :])
    halves += (head * groups + tl.program_id(1)).to(tl.int64) * 2 * length * E
    to = halves + j[:, None] * E + tl.arange(0, E)[None, :]
    tl.store(to, high, mask=(j < length)[:, None])
    tl.store(to + length.to(tl.int64) * E, low, mask=(j < length)[:, None])


@triton.jit
def _add_tile(
    own, acc, level, start, seen, real, other, high, low, lse, s_n, scale, cap, d, in_d, in_e,
    TILE: tl.constexpr, MASKED: tl.constexpr, ADJOINT: tl.constexpr, EVEN_D: tl.constexpr, E: tl.constexpr,
    OPERAND: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys, or of queries for the adjoint."""
    within = tl.arange(0, TILE)
    tile = read(other, start, s_n, within, in_d, real, d, MASKED, EVEN_D).to(OPERAND)
    x, scale = scores(own, tile, scale, cap, "tf32", CAPPED)
    if ADJOINT:
        level = numbers(lse, start, within, real, float("inf"), MASKED)
        p = exp2(x * scale - level[None, :])
    else:
        p = exp2(x * scale - level[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    p_high, p_low = _halved(p * RAISE)
    y_high = read(high, start, E, within, in_e, real, E, MASKED, True)
    y_low = read(low, start, E, within, in_e, real, E, MASKED, True)
    part = tl.dot(p_low, y_high)
    part = tl.dot(p_high, y_low, part)
    part = tl.dot(p_high, y_high, part)
    return acc + part


LENGTHS = ["length", "others", "skip", "stop", "blocks", "heads", "own_b", "own_g", "other_b", "other_g", "G"]


@triton.jit(do_not_specialize=LENGTHS)
def product(
    own, other, halves, units, lse, out, own_table, other_table,
    s_b, s_g, s_n, t_b, t_g, t_n,
    own_b, own_g, other_b, other_g,
    length, others, d, e, skip, stop, blocks, heads, scale, cap, G,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PREFIX: tl.constexpr,
    SEGMENTS: tl.constexpr, PARTS: tl.constexpr, ADJOINT: tl.constexpr, EVEN_D: tl.constexpr, OPERAND: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Rows [skip, stop) of A Y if `own` is q, of Aᵀ Y if it is k; with PARTS > 1 each part covers a share."""
    block = tl.program_id(0) % blocks  # longest first, for a causal pattern
    if not ADJOINT:
        block = blocks - 1 - block
    rest = tl.program_id(0) // blocks
    part = rest % PARTS
    head = rest // PARTS
    group = tl.program_id(1)
    b = (head // G).to(tl.int64)
    g = (head % G).to(tl.int64)
    own += b * s_b + g * s_g
    other += b * t_b + g * t_g
    own_table += b * own_b + g * own_g
    other_table += b * other_b + g * other_g
    high = halves + (head * tl.num_programs(1) + group).to(tl.int64) * 2 * others * E
    low = high + others.to(tl.int64) * E

    start = block * ROWS
    within = tl.arange(0, ROWS)
    i = start + within
    here = (i >= skip) & (i < stop)
    lo, hi, base, end, late, until = reach_of(own_table, length, i, here, PREFIX, SEGMENTS)
    first, total, left, right = cut(lo, hi, late, until, TILE)

    in_d = tl.arange(0, D)
    in_e = tl.arange(0, E)
    alive = here & (lo != NOWHERE)
    mine = read(own, start, s_n, within, in_d, alive, d, True, EVEN_D).to(OPERAND)
    level = tl.full([ROWS], 0.0, tl.float32)
    if ADJOINT:
        lse += head.to(tl.int64) * others
    else:
        level = tl.load(lse + head.to(tl.int64) * length + i, mask=alive, other=float("inf"))
    acc = tl.zeros([ROWS, E], tl.float32)

    if PREFIX:
        if part == 0:
            # With a limit to the right, the prefix of each key begins elsewhere: mask by each key's own beginning.
            begin = tl.load(own_table + 2 * length + i, mask=here, other=NOWHERE)
            for t in range(0, prefix_tiles(base, end, PREFIX)):
                at, j, seen, real = prefix_tile(t, base, end, other_table, others, PREFIX, SEGMENTS)
                seen = seen & (j[None, :] >= begin[:, None])
                acc = _add_tile(
                    mine, acc, level, at, seen, real, other, high, low, lse, t_n, scale, cap, d, in_d, in_e,
                    PREFIX, True, ADJOINT, EVEN_D, E, OPERAND, CAPPED,
                )  # fmt: skip
    from_t, finish = share(left + total - right, part, PARTS)
    for t in range(from_t, finish):
        at, seen, real = edge_tile(
            t, first, left, right, lo, hi, late, until, other_table, others, TILE, PREFIX, SEGMENTS
        )
        acc = _add_tile(
            mine, acc, level, at, seen, real, other, high, low, lse, t_n, scale, cap, d, in_d, in_e,
            TILE, True, ADJOINT, EVEN_D, E, OPERAND, CAPPED,
        )  # fmt: skip
    from_t, finish = share(right - left, part, PARTS)
    for t in range(from_t, finish):
        at = first + (left + t) * TILE
        acc = _add_tile(
            mine, acc, level, at, here, here, other, high, low, lse, t_n, scale, cap, d, in_d, in_e,
            TILE, False, ADJOINT, EVEN_D, E, OPERAND, CAPPED,
        )  # fmt: skip

    column = group * E + in_e
    unit = tl.load(units + (head * tl.num_programs(1) + group).to(tl.int64) * E + in_e)
    acc = tl.where(alive[:, None], acc * LOWER * unit[None, :], 0.0)
    out += (part * heads + head).to(tl.int64) * stop * e
    write(out, start, e, within, column, here, e, acc)
