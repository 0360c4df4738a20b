"""The loop shared by the softmax kernels: a block of queries over the keys that it sees, or of keys over queries.

    near        the tokens [min lo, max hi) of the block in tiles; tiles that every row sees completely need no mask
    prefix      special tokens apart from them, in narrower tiles
    list        instead of both, for any pattern: the tokens that some row of the block sees, from anywhere

The kernels read from memory which tokens a row sees: four numbers per row (reach.py), or the block's list (lists.py).
So they are not compiled for one length, window or pattern. A tile is given by its first token if its tokens are
consecutive, and by a vector of tokens if it comes from a list. `read`, `numbers` and `write` take either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import exp2
from heedful.kernels.softmax import lists, reach

NOWHERE = tl.constexpr(reach.NOWHERE)
HEAD = tl.constexpr(lists.HEAD)
# Lengths are not compiled in: one kernel serves sequences of any length.
LENGTHS = ["n", "m", "skip", "stop", "blocks", "rows_b", "rows_g", "keys_b", "keys_g", "G"]


@triton.jit
def capped(x, cap):
    """cap · tanh(x / cap), by one power of two; by its series where that would cancel."""
    y = x / cap
    fall = exp2(tl.abs(y) * -2.8853900817779268)  # exp(−2 |x| / cap)
    size = cap * (1.0 - fall) / (1.0 + fall)
    square = y * y
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.04, series, tl.where(x < 0, -size, size))


@triton.jit
def _rows_at(base, start, stride, rows):
    """Addresses of the rows start + rows of a matrix; if `start` is a vector, of the rows that it lists."""
    if start.type.is_block():
        return base + start.to(tl.int64)[:, None] * stride
    else:
        return base + start.to(tl.int64) * stride + rows[:, None] * stride


@triton.jit
def read(base, start, stride, rows, columns, real, width, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """Load the rows start + rows of a matrix; rows that are not real, and columns from `width` on, read as zero."""
    at = _rows_at(base, start, stride, rows) + columns[None, :]
    if MASKED:
        if EVEN:
            return tl.load(at, mask=real[:, None], other=0.0)
        return tl.load(at, mask=real[:, None] & (columns[None, :] < width), other=0.0)
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=columns[None, :] < width, other=0.0)


@triton.jit
def numbers(base, start, rows, real, other, MASKED: tl.constexpr):
    """Load one number for each of the rows start + rows; `other` for those that are not real."""
    at = base + start
    if not start.type.is_block():
        at += rows
    if MASKED:
        return tl.load(at, mask=real, other=other)
    return tl.load(at)


@triton.jit
def write(base, start, stride, rows, columns, real, width, tile):
    at = _rows_at(base, start, stride, rows) + columns[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=real[:, None] & (columns[None, :] < width))


@triton.jit
def reach_of(table, length, i, here, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr):
    """lo, hi of the near interval; base, stop of the prefix; from, until of a prefix that lies among the near tiles.

    Queries of a block that begin a new segment have their prefix nearby, and the tiles of the near interval cover it.
    The other queries share the prefix of the block's first segment, which may lie far back.
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
    """The start of the near tiles and their number; tiles left … right − 1 need no mask."""
    first = tl.minimum(tl.min(lo, 0), tl.min(late, 0))
    last = tl.maximum(tl.max(hi, 0), tl.max(until, 0))
    total = tl.cdiv(tl.maximum(last - first, 0), TILE)
    inner = tl.max(tl.where(lo == NOWHERE, 0, lo), 0)
    outer = tl.min(tl.where(lo == NOWHERE, NOWHERE, hi), 0)
    left = tl.minimum(tl.cdiv(tl.maximum(inner - first, 0), TILE), total)
    right = tl.maximum(left, tl.minimum(tl.maximum(outer - first, 0) // TILE, total))
    return first, total, left, right


@triton.jit
def list_of(table, block, within, here, ROWS: tl.constexpr, TILE: tl.constexpr):
    """A block's tokens; lo (NOWHERE if a token sees nothing); the start of its list; its tiles, `right` of them full.

    The counterpart of `cut` for a list. Full tiles come first, so `left` is 0.
    """
    table += block * (ROWS + HEAD)
    token = tl.load(table + within, mask=here, other=-1)
    wanted = tl.max(here.to(tl.int32), 0) > 0  # other programs process, in parts, a block with no row here
    first = tl.load(table + ROWS)
    full = tl.load(table + ROWS + 1, mask=wanted, other=0) // TILE
    total = tl.load(table + ROWS + 2, mask=wanted, other=0) // TILE
    return tl.where(token < 0, ~token, token), tl.where(token < 0, NOWHERE, 0), first, total, 0, full


@triton.jit
def full_tile(t, first, tokens, TILE: tl.constexpr):
    """The t-th tile of a list."""
    return tl.load(tokens + first + t * TILE + tl.arange(0, TILE))


@triton.jit
def partial_tile(t, first, right, tokens, words, within, TILE: tl.constexpr):
    """The t-th tile after the full ones: its tokens, the mask of visible pairs, and which tokens are not padding."""
    at = first + (right + t) * TILE + tl.arange(0, TILE)
    token = tl.load(tokens + at)
    seen = (tl.load(words + at)[None, :] >> within[:, None].to(tl.int64)) & 1
    return token, seen != 0, token >= 0


@triton.jit
def share(count, part, PARTS: tl.constexpr):
    """The range of tiles of one part out of PARTS."""
    return count * part // PARTS, count * (part + 1) // PARTS


@triton.jit
def sees(j, lo, hi, late, until, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr):
    seen = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None])
    if PREFIX and SEGMENTS:
        seen = seen | ((j[None, :] >= late[:, None]) & (j[None, :] < until[:, None]))
    return seen


@triton.jit
def takes_part(table, j, length, SEGMENTS: tl.constexpr):
    """True for tokens that exist and are not padding; the contents of others, even NaN, must not be read."""
    real = j < length
    if SEGMENTS:
        real = tl.load(table + j, mask=real, other=NOWHERE) != NOWHERE
    return real


@triton.jit
def edge_tile(
    t, first, left, right, lo, hi, late, until, table, length,
    TILE: tl.constexpr, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The t-th near tile that needs a mask: its start, the visible pairs, and which tokens take part."""
    at = first + tl.where(t < left, t, t - left + right) * TILE
    j = at + tl.arange(0, TILE)
    seen = sees(j, lo, hi, late, until, PREFIX, SEGMENTS)
    return at, seen, takes_part(table, j, length, SEGMENTS)


@triton.jit
def prefix_tiles(base, end, PREFIX: tl.constexpr):
    """The number of prefix tiles."""
    return tl.cdiv(tl.maximum(tl.max(end, 0) - base, 0), PREFIX)


@triton.jit
def prefix_tile(t, base, end, table, length, PREFIX: tl.constexpr, SEGMENTS: tl.constexpr):
    """The t-th tile of the prefix: its start, its tokens, the visible pairs, and which tokens take part."""
    at = base + t * PREFIX
    j = at + tl.arange(0, PREFIX)
    real = takes_part(table, j, length, SEGMENTS)
    return at, j, real[None, :] & (j[None, :] < end[:, None]), real


@triton.jit
def scores(a, b, scale, cap, PRECISION: tl.constexpr, CAPPED: tl.constexpr):
    """a bᵀ, and the factor still to apply to it; with a cap the factor is applied already."""
    x = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    if CAPPED:
        x = capped(x * scale, cap)
        scale = 1.0
    return x, scale
