"""Softmax attention in Triton: a block of queries loops over its keys.

    q, k, v     (B, G, P, n, d), (B, G, m, d), (B, G, m, e): P query heads share a head of keys
    score       x = scale · log₂e · q·k, or with a cap c · tanh(x / c)
    softmax     online: peak ← max,  mass ← mass · 2^(old − new) + Σ 2^(x − peak)
    out         o = acc / mass, lse = peak + log₂ mass (base 2; +∞ for a query that sees nothing, whose o is 0)
    sink        a logit without a value: the loop begins with peak = sink, mass = 1

The loop is in triton_walk.py. One program writes each element, in a fixed order: runs are bit-equal.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2
from heedful.kernels.softmax.triton_walk import (
    LENGTHS,
    NOWHERE,
    cut,
    edge_tile,
    full_tile,
    list_of,
    partial_tile,
    prefix_tile,
    prefix_tiles,
    reach_of,
    read,
    scores,
    share,
    write,
)


@triton.jit
def _add_tile(
    q, acc, peak, mass, start, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
    TILE: tl.constexpr, MASKED: tl.constexpr, VALUES: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys."""
    within = tl.arange(0, TILE)
    keys = read(k, start, sk_n, within, in_d, real, d, MASKED, EVEN_D).to(OPERAND)
    x, scale = scores(q, keys, scale, cap, PRECISION, CAPPED)
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


@triton.jit(do_not_specialize=[*LENGTHS, "so_part"])
def attend(
    q, k, v, o, lse, sink, rows, keys, words,
    sq_b, sq_g, sq_p, sq_n, sk_b, sk_g, sk_n, sv_b, sv_g, sv_n, so_b, so_g, so_p, so_n, so_part,
    rows_b, rows_g, keys_b, keys_g,
    n, m, d, e, skip, stop, blocks, scale, cap, G, P,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PREFIX: tl.constexpr,
    SEGMENTS: tl.constexpr, LISTED: tl.constexpr, PARTS: tl.constexpr, VALUES: tl.constexpr, SINK: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """o and lse of the queries [skip, stop) of every head; with PARTS > 1 each part covers a share of the keys."""
    block = blocks - 1 - tl.program_id(0) % blocks  # longest first: the last queries of a causal pattern see most keys
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
    if LISTED:
        start, lo, first, total, left, right = list_of(rows, block, within, here, ROWS, TILE)
        i = start
    else:
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
            for t in range(0, prefix_tiles(base, end, PREFIX)):
                at, _, seen, real = prefix_tile(t, base, end, keys, m, PREFIX, SEGMENTS)
                acc, peak, mass = _add_tile(
                    queries, acc, peak, mass, at, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
                    PREFIX, True, VALUES, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
                )  # fmt: skip
    begin, finish = share(left + total - right, part, PARTS)
    for t in range(begin, finish):
        if LISTED:
            at, seen, real = partial_tile(t, first, right, keys, words, within, TILE)
        else:
            at, seen, real = edge_tile(t, first, left, right, lo, hi, late, until, keys, m, TILE, PREFIX, SEGMENTS)
        acc, peak, mass = _add_tile(
            queries, acc, peak, mass, at, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
            TILE, True, VALUES, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip
    begin, finish = share(right - left, part, PARTS)
    for t in range(begin, finish):
        at = full_tile(t, first, keys, TILE) if LISTED else first + (left + t) * TILE
        acc, peak, mass = _add_tile(
            queries, acc, peak, mass, at, here, here, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
            TILE, False, VALUES, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip

    sighted = (mass != 0) & (lo != NOWHERE)  # padding sees nothing, whatever its query contains
    if LISTED and PARTS > 1:  # parts are stored in the order of the blocks
        start = block * ROWS
        i = start + within
    where = ((part * tl.num_programs(0) // blocks // PARTS).to(tl.int64) + head) * stop
    if columns == 0:
        tl.store(lse + where + i, tl.where(sighted, peak + tl.log2(mass), float("inf")), mask=here)
    if VALUES:
        o += b * so_b + g.to(tl.int64) * so_g + (head % P).to(tl.int64) * so_p + part.to(tl.int64) * so_part
        acc = tl.where(sighted[:, None], acc / tl.where(sighted, mass, 1.0)[:, None], 0.0)
        write(o, start, so_n, within, in_e, here, e, acc)
