"""The gradients of softmax attention in Triton, and its adjoint.

    p_ij = 2^(x_ij − lse_i), recomputed from q, k and lse;   δ_i = do_i·o_i;   ds = p ∘ (do vᵀ − δ)
    cap         ds ∘ (1 − (x / c)²)
    queries     a block of queries over its keys:   dq = scale · ds k      (writes δ for the keys)
    keys        a block of keys over its queries:   dv = pᵀ do,  dk = scale · dsᵀ q,  one query head after another
    adjoint     the same loop, dv alone:            Aᵀ y = pᵀ y

Both loops are those of triton_walk.py, the second with the intervals of the keys. No atomics: the loop of a first key
that every query sees is split into parts, which are added in a fixed order.
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
    numbers,
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
def _add_keys(
    q, do, lse, delta, dq, start, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
    TILE: tl.constexpr, MASKED: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add the part of one tile of keys to dq."""
    within = tl.arange(0, TILE)
    keys = read(k, start, sk_n, within, in_d, real, d, MASKED, EVEN_D).to(OPERAND)
    values = read(v, start, sv_n, within, in_e, real, e, MASKED, EVEN_E).to(OPERAND)
    x, scale = scores(q, keys, scale, cap, PRECISION, CAPPED)
    p = exp2(x * scale - lse[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    if CAPPED:
        ds *= 1.0 - (x / cap) * (x / cap)
    return tl.dot(ds.to(OPERAND), keys, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=[*LENGTHS, "sdq_part"])
def queries(
    q, k, v, o, do, lse, delta, dq, rows, keys, words,
    sq_b, sq_g, sq_p, sq_n, sk_b, sk_g, sk_n, sv_b, sv_g, sv_n, so_b, so_g, so_p, so_n, sdo_b, sdo_g, sdo_p, sdo_n,
    sdq_b, sdq_g, sdq_p, sdq_n, sdq_part,
    rows_b, rows_g, keys_b, keys_g,
    n, m, d, e, skip, stop, blocks, scale, cap, factor, G, P,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PREFIX: tl.constexpr,
    SEGMENTS: tl.constexpr, LISTED: tl.constexpr, PARTS: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dq and δ of the queries [skip, stop) of every head."""
    block = blocks - 1 - tl.program_id(0) % blocks
    rest = tl.program_id(0) // blocks
    part = rest % PARTS
    head = rest // PARTS
    b = (head // P // G).to(tl.int64)
    g = (head // P % G).to(tl.int64)
    p = (head % P).to(tl.int64)
    q += b * sq_b + g * sq_g + p * sq_p
    k += b * sk_b + g * sk_g
    v += b * sv_b + g * sv_g
    o += b * so_b + g * so_g + p * so_p
    do += b * sdo_b + g * sdo_g + p * sdo_p
    dq += b * sdq_b + g * sdq_g + p * sdq_p + part.to(tl.int64) * sdq_part
    lse += head.to(tl.int64) * n
    delta += head.to(tl.int64) * n
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
    in_e = tl.arange(0, E)
    alive = here & (lo != NOWHERE)
    query = read(q, start, sq_n, within, in_d, alive, d, True, EVEN_D).to(OPERAND)
    dout = read(do, start, sdo_n, within, in_e, alive, e, True, EVEN_E)
    out = read(o, start, so_n, within, in_e, alive, e, True, EVEN_E)
    dot = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    dout = dout.to(OPERAND)
    level = tl.load(lse + i, mask=alive, other=float("inf"))
    if part == 0:
        tl.store(delta + i, dot, mask=here)
    acc = tl.zeros([ROWS, D], tl.float32)

    if PREFIX:
        if part == 0:
            for t in range(0, prefix_tiles(base, end, PREFIX)):
                at, _, seen, real = prefix_tile(t, base, end, keys, m, PREFIX, SEGMENTS)
                acc = _add_keys(
                    query, dout, level, dot, acc, at, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
                    PREFIX, True, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
                )  # fmt: skip
    begin, finish = share(left + total - right, part, PARTS)
    for t in range(begin, finish):
        if LISTED:
            at, seen, real = partial_tile(t, first, right, keys, words, within, TILE)
        else:
            at, seen, real = edge_tile(t, first, left, right, lo, hi, late, until, keys, m, TILE, PREFIX, SEGMENTS)
        acc = _add_keys(
            query, dout, level, dot, acc, at, seen, real, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
            TILE, True, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip
    begin, finish = share(right - left, part, PARTS)
    for t in range(begin, finish):
        at = full_tile(t, first, keys, TILE) if LISTED else first + (left + t) * TILE
        acc = _add_keys(
            query, dout, level, dot, acc, at, here, here, k, v, sk_n, sv_n, scale, cap, d, e, in_d, in_e,
            TILE, False, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip

    if LISTED and PARTS > 1:  # parts are stored in the order of the blocks
        start = block * ROWS
    write(dq, start, sdq_n, within, in_d, here, d, tl.where(alive[:, None], acc * factor, 0.0))


@triton.jit
def _add_queries(
    k, v, dk, dv, start, seen, real, q, do, lse, delta, sq_n, sdo_n, scale, cap, d, e, in_d, in_e,
    TILE: tl.constexpr, MASKED: tl.constexpr, DK: tl.constexpr, EVEN_D: tl.constexpr, EVEN_E: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add the part of one tile of queries to dk and dv."""
    within = tl.arange(0, TILE)
    query = read(q, start, sq_n, within, in_d, real, d, MASKED, EVEN_D).to(OPERAND)
    dout = read(do, start, sdo_n, within, in_e, real, e, MASKED, EVEN_E).to(OPERAND)
    level = numbers(lse, start, within, real, float("inf"), MASKED)
    x, scale = scores(k, query, scale, cap, PRECISION, CAPPED)
    p = exp2(x * scale - level[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(OPERAND), dout, dv, input_precision=PRECISION)
    if DK:
        dot = numbers(delta, start, within, real, 0.0, MASKED)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = p * (dp - dot[None, :])
        if CAPPED:
            ds *= 1.0 - (x / cap) * (x / cap)
        dk = tl.dot(ds.to(OPERAND), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=[*LENGTHS, "sdk_part", "sdv_part"])
def keys(
    q, k, v, do, lse, delta, dk, dv, rows, keys, words,
    sq_b, sq_g, sq_p, sq_n, sk_b, sk_g, sk_n, sv_b, sv_g, sv_n, sdo_b, sdo_g, sdo_p, sdo_n, sdk_b, sdk_g, sdk_n,
    sdk_part, sdv_b, sdv_g, sdv_n, sdv_part,
    rows_b, rows_g, keys_b, keys_g,
    n, m, d, e, skip, stop, blocks, scale, cap, factor, G, P,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PREFIX: tl.constexpr,
    SEGMENTS: tl.constexpr, LISTED: tl.constexpr, PARTS: tl.constexpr, DK: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_E: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dk and dv, or dv alone, of the keys [skip, stop) of every head of keys."""
    block = tl.program_id(0) % blocks  # longest first: most queries of a causal pattern see the first keys
    rest = tl.program_id(0) // blocks
    part = rest % PARTS
    head = rest // PARTS
    columns = tl.program_id(1)
    b = (head // G).to(tl.int64)
    g = (head % G).to(tl.int64)
    q += b * sq_b + g * sq_g
    k += b * sk_b + g * sk_g
    v += b * sv_b + g * sv_g
    do += b * sdo_b + g * sdo_g
    dk += b * sdk_b + g * sdk_g + part.to(tl.int64) * sdk_part
    dv += b * sdv_b + g * sdv_g + part.to(tl.int64) * sdv_part
    lse += head.to(tl.int64) * P * n
    delta += head.to(tl.int64) * P * n
    rows += b * rows_b + g * rows_g
    keys += b * keys_b + g * keys_g

    start = block * ROWS
    within = tl.arange(0, ROWS)
    j = start + within
    here = (j >= skip) & (j < stop)
    if LISTED:
        start, lo, first, total, left, right = list_of(keys, block, within, here, ROWS, TILE)
        j = start
    else:
        lo, hi, base, end, late, until = reach_of(keys, m, j, here, PREFIX, SEGMENTS)
        first, total, left, right = cut(lo, hi, late, until, TILE)

    in_d = tl.arange(0, D)
    in_e = columns * E + tl.arange(0, E)
    alive = here & (lo != NOWHERE)
    key = read(k, start, sk_n, within, in_d, alive, d, True, EVEN_D).to(OPERAND)
    value = key
    if DK:
        value = read(v, start, sv_n, within, in_e, alive, e, True, EVEN_E).to(OPERAND)
    acc_k = tl.zeros([ROWS, D], tl.float32)
    acc_v = tl.zeros([ROWS, E], tl.float32)

    for _ in range(0, P):
        if PREFIX:
            if part == 0:
                # With a limit to the right, the prefix of each key begins elsewhere: mask by each key's own beginning.
                begin = tl.load(keys + 2 * m + j, mask=here, other=NOWHERE)
                for t in range(0, prefix_tiles(base, end, PREFIX)):
                    at, i, seen, real = prefix_tile(t, base, end, rows, n, PREFIX, SEGMENTS)
                    seen = seen & (i[None, :] >= begin[:, None])
                    acc_k, acc_v = _add_queries(
                        key, value, acc_k, acc_v, at, seen, real, q, do, lse, delta, sq_n, sdo_n, scale, cap, d, e,
                        in_d, in_e, PREFIX, True, DK, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
                    )  # fmt: skip
        begin_t, finish = share(left + total - right, part, PARTS)
        for t in range(begin_t, finish):
            if LISTED:
                at, seen, real = partial_tile(t, first, right, rows, words, within, TILE)
            else:
                at, seen, real = edge_tile(t, first, left, right, lo, hi, late, until, rows, n, TILE, PREFIX, SEGMENTS)
            acc_k, acc_v = _add_queries(
                key, value, acc_k, acc_v, at, seen, real, q, do, lse, delta, sq_n, sdo_n, scale, cap, d, e,
                in_d, in_e, TILE, True, DK, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
            )  # fmt: skip
        begin_t, finish = share(right - left, part, PARTS)
        for t in range(begin_t, finish):
            at = full_tile(t, first, rows, TILE) if LISTED else first + (left + t) * TILE
            acc_k, acc_v = _add_queries(
                key, value, acc_k, acc_v, at, here, here, q, do, lse, delta, sq_n, sdo_n, scale, cap, d, e,
                in_d, in_e, TILE, False, DK, EVEN_D, EVEN_E, OPERAND, PRECISION, CAPPED,
            )  # fmt: skip
        q += sq_p
        do += sdo_p
        lse += n
        delta += n

    if LISTED and PARTS > 1:  # parts are stored in the order of the blocks
        start = block * ROWS
    write(dv, start, sdv_n, within, in_e, here, e, tl.where(alive[:, None], acc_v, 0.0))
    if DK:
        write(dk, start, sdk_n, within, in_d, here, d, tl.where(alive[:, None], acc_k * factor, 0.0))
