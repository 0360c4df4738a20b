"""Statistics of the rows of softmax attention in Triton: the loop of triton_forward.py without values.

online, with x = scale · log₂e · q·k, p = 2^(x − peak) and a = p / mass
mass ← Σ p          square ← Σ p²          lean ← Σ p (x − peak)          where ← the first key of the peak
a new peak     mass · f,  square · f²,  f · (lean + mass · (old − new)),  f = 2^(old − new)
out            lse = peak + log₂ mass,   Σ a² = square / mass²,   max a = 1 / mass
               entropy = ln 2 · (log₂ mass − lean / mass): two terms ≥ 0, nothing cancels
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2
from heedful.kernels.softmax.triton_walk import (
    HEAD,
    NOWHERE,
    capped,
    cut,
    edge_tile,
    prefix_tile,
    prefix_tiles,
    reach_of,
    read,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _add_tile(
    q, peak, mass, square, lean, where, start, seen, real, k, sk_n, scale, cap, d, in_d,
    TILE: tl.constexpr, MASKED: tl.constexpr, EVEN_D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys."""
    within = tl.arange(0, TILE)
    keys = read(k, start, sk_n, within, in_d, real, d, MASKED, EVEN_D).to(OPERAND)
    x = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    if CAPPED:
        x = capped(x, cap)
    if MASKED:
        x = tl.where(seen, x, float("-inf"))
    top = tl.max(x, 1)
    place = tl.min(tl.where(x == top[:, None], (start + within)[None, :], NOWHERE), 1)
    where = tl.where((top > peak) | ((top == peak) & (place < where)), place, where)
    new = tl.maximum(peak, top)
    level = tl.where(new == float("-inf"), 0.0, new)
    depth = x - level[:, None]
    p = exp2(depth)
    if MASKED:
        depth = tl.where(seen, depth, 0.0)
    fall = tl.where(peak == float("-inf"), 0.0, peak - level)
    keep = exp2(peak - level)
    lean = keep * (lean + mass * fall) + tl.sum(p * depth, 1)
    mass = mass * keep + tl.sum(p, 1)
    square = square * keep * keep + tl.sum(p * p, 1)
    return new, mass, square, lean, where


@triton.jit(do_not_specialize=["n", "m", "blocks", "rows_b", "rows_g", "keys_b", "keys_g", "G"])
def statistics(
    q, k, lse, squares, entropy, largest, places, rows, keys,
    sq_b, sq_g, sq_p, sq_n, sk_b, sk_g, sk_n,
    rows_b, rows_g, keys_b, keys_g,
    n, m, d, blocks, scale, cap, G, P,
    D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """lse (base 2), Σ a², entropy (nats), max a and its key for every query; ∞, 0, 0, 0, −1 if it sees nothing."""
    block = blocks - 1 - tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    b = (head // P // G).to(tl.int64)
    g = (head // P % G).to(tl.int64)
    q += b * sq_b + g * sq_g + (head % P).to(tl.int64) * sq_p
    k += b * sk_b + g * sk_g
    rows += b * rows_b + g * rows_g
    keys += b * keys_b + g * keys_g

    start = block * ROWS
    within = tl.arange(0, ROWS)
    i = start + within
    here = i < n
    lo, hi, base, end, late, until = reach_of(rows, n, i, here, PREFIX, SEGMENTS)
    first, total, left, right = cut(lo, hi, late, until, TILE)

    in_d = tl.arange(0, D)
    queries = read(q, start, sq_n, within, in_d, here, d, True, EVEN_D).to(OPERAND)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    lean = tl.zeros([ROWS], tl.float32)
    where = tl.full([ROWS], NOWHERE, tl.int32)

    if PREFIX:
        for t in range(0, prefix_tiles(base, end, PREFIX)):
            at, _, seen, real = prefix_tile(t, base, end, keys, m, PREFIX, SEGMENTS)
            peak, mass, square, lean, where = _add_tile(
                queries, peak, mass, square, lean, where, at, seen, real, k, sk_n, scale, cap, d, in_d,
                PREFIX, True, EVEN_D, OPERAND, PRECISION, CAPPED,
            )  # fmt: skip
    for t in range(0, left + total - right):
        at, seen, real = edge_tile(t, first, left, right, lo, hi, late, until, keys, m, TILE, PREFIX, SEGMENTS)
        peak, mass, square, lean, where = _add_tile(
            queries, peak, mass, square, lean, where, at, seen, real, k, sk_n, scale, cap, d, in_d,
            TILE, True, EVEN_D, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip
    for t in range(0, right - left):
        at = first + (left + t) * TILE
        peak, mass, square, lean, where = _add_tile(
            queries, peak, mass, square, lean, where, at, here, here, k, sk_n, scale, cap, d, in_d,
            TILE, False, EVEN_D, OPERAND, PRECISION, CAPPED,
        )  # fmt: skip

    sighted = (mass != 0) & (lo != NOWHERE)
    mass = tl.where(sighted, mass, 1.0)
    at = head.to(tl.int64) * n + i
    tl.store(lse + at, tl.where(sighted, peak + tl.log2(mass), float("inf")), mask=here)
    tl.store(squares + at, tl.where(sighted, square / (mass * mass), 0.0), mask=here)
    tl.store(entropy + at, tl.where(sighted, LN2 * (tl.log2(mass) - lean / mass), 0.0), mask=here)
    tl.store(largest + at, tl.where(sighted, 1.0 / mass, 0.0), mask=here)
    tl.store(places + at, tl.where(sighted, where, -1), mask=here)


@triton.jit
def _token(rows, i, BLOCK: tl.constexpr):
    """The token of row i of the parts. With lists, parts are stored in the order of blocks of BLOCK rows."""
    if BLOCK:
        token = tl.load(rows + i // BLOCK * (BLOCK + HEAD) + i % BLOCK).to(tl.int64)
        return tl.where(token < 0, ~token, token)
    else:
        return i


@triton.jit(do_not_specialize=["n", "first", "heads", "parts", "G", "P"])
def merge(
    o, lse, some_o, some_lse, rows, so_b, so_g, so_p, so_n, n, first, heads, parts, e, G, P,
    PARTS: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of the first rows: lse = log₂ Σ 2^lse_p,  o = Σ 2^(lse_p − lse) o_p."""
    i = tl.program_id(0) % first
    head = tl.program_id(0) // first
    part = tl.arange(0, PARTS)
    at = (part * heads + head).to(tl.int64) * first + i
    level = tl.load(some_lse + at, mask=part < parts, other=float("inf"))
    level = tl.where(level == float("inf"), float("-inf"), level)
    peak = tl.max(level, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(level - peak)
    mass = tl.sum(weight, 0)
    i = _token(rows, i, BLOCK)
    tl.store(lse + head.to(tl.int64) * n + i, tl.where(mass > 0, peak + tl.log2(mass), float("inf")))
    if VALUES:
        weight = weight / tl.where(mass > 0, mass, 1.0)
        column = tl.program_id(1) * E + tl.arange(0, E)
        wanted = (part < parts)[:, None] & (column < e)[None, :]
        values = tl.load(some_o + at[:, None] * e + column[None, :], mask=wanted, other=0.0)
        out = tl.sum(values * weight[:, None], 0)
        o += (head // P // G).to(tl.int64) * so_b + (head // P % G).to(tl.int64) * so_g + (head % P).to(tl.int64) * so_p
        tl.store(o + i * so_n + column, out.to(o.dtype.element_ty), mask=column < e)


@triton.jit(do_not_specialize=["first", "heads", "parts", "G", "P"])
def add_up(
    x, some, rows, sx_b, sx_g, sx_p, sx_n, first, heads, parts, width, G, P,
    PARTS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of the gradients of the first rows, in a fixed order."""
    i = tl.program_id(0) % first
    head = tl.program_id(0) // first
    part = tl.arange(0, PARTS)
    column = tl.program_id(1) * W + tl.arange(0, W)
    at = (part * heads + head).to(tl.int64) * first + i
    wanted = (part < parts)[:, None] & (column < width)[None, :]
    total = tl.sum(tl.load(some + at[:, None] * width + column[None, :], mask=wanted, other=0.0), 0)
    x += (head // P // G).to(tl.int64) * sx_b + (head // P % G).to(tl.int64) * sx_g + (head % P).to(tl.int64) * sx_p
    tl.store(x + _token(rows, i, BLOCK) * sx_n + column, total.to(x.dtype.element_ty), mask=column < width)
