"""A Y and Aᵀ Y for 16-bit q and k and float32 Y: the setup shared by all products, and the launches of each.

setup       the rows' log-sum-exps; q and k as the kernels read them; the intervals of both
a product   three launches: peaks of Y's columns, Y in halves, the product itself; then a sum if rows are split in parts

The mathematics and the error bound are in triton_products.py.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import triton.language as tl

from heedful.kernels import launching
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import on_device, uncompiled
from heedful.kernels.launching import INTERPRETED, over, power
from heedful.kernels.softmax import fused, launches, triton_products
from heedful.kernels.softmax.launches import LOG2E, NARROWEST, PARTS, PROGRAMS, Config, aligned
from heedful.kernels.softmax.reach import Intervals, Reach, intervals
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Tensor, broadcast_shapes

# Keyed by the width of q and k, and the columns per program. Chosen on an H200 with benchmarks/gpu_softmax.py
# --products; (128, 128) and width 256 only by what fits. At most four warps for 64 rows: with more, warps would share a
# row and exchange its weights through shared memory.
CONFIGS = {
    (64, 16): dict(forward=Config(64, 64, 4, 3), adjoint=Config(128, 64, 4, 3)),
    (64, 32): dict(forward=Config(128, 64, 4, 3), adjoint=Config(128, 64, 4, 3)),
    (64, 64): dict(forward=Config(128, 64, 4, 3), adjoint=Config(128, 64, 4, 3)),
    (64, 128): dict(forward=Config(128, 64, 8, 3), adjoint=Config(128, 64, 8, 3)),
    (128, 64): dict(forward=Config(64, 64, 4, 3), adjoint=Config(128, 64, 8, 3)),
    (128, 128): dict(forward=Config(128, 64, 8, 2), adjoint=Config(128, 64, 8, 2)),
    **{(256, E): dict(forward=Config(128, 32, 8, 2), adjoint=Config(128, 32, 8, 2)) for E in (64, 128)},
}
SPLIT_ROWS = 64
PEAKS = 128  # parts in which the largest elements of Y are found


class Side(NamedTuple):
    """Either the queries, which loop over the keys, or the keys, which loop over the queries."""

    x: Tensor  # (B, G, tokens, d)
    length: int
    table: Tensor  # (B, G, 4, tokens)
    first: int  # leading tokens whose loop is as long as the other side
    prefix: int  # number of special tokens on the other side
    span: int  # the longest loop of the other tokens; 0 if they must not be split into parts


class Room(NamedTuple):
    """Buffers that successive products of one kind reuse."""

    tops: Tensor  # the largest elements of the columns of Y, one set per part
    halves: Tensor  # two float16 for each element, (heads, groups, 2, tokens, E)
    units: Tensor  # the scale of each column
    some: Tensor | None  # the parts of split rows


class Way(NamedTuple):
    """How to compute a product with a given number of columns."""

    own: Side
    other: Side
    adjoint: bool
    e: int
    E: int  # columns per program
    groups: int
    config: Config
    span: int  # tokens per part in the search for the largest elements of Y
    first: int  # leading tokens whose loop is split into parts
    parts: int


class Products:
    """x ↦ A x and y ↦ Aᵀ y for one q and k, which must not be modified meanwhile.

    Every query head has its own product; heads that share keys read the same ones.
    """

    def __init__(
        self, q: Tensor, k: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
    ):
        self._given = q, k, rows, pattern, segments, scale
        self.batch = tuple(broadcast_shapes(q.shape[:-2], k.shape[:-2]))

    @uncompiled
    def apply(self, x: Float[Tensor, "*b m c"]) -> Float[Tensor, "*b n c"]:
        """A x, in float32."""
        return self._product(x, False)

    @uncompiled
    def adjoint(self, y: Float[Tensor, "*b n c"]) -> Float[Tensor, "*b m c"]:
        """Aᵀ y, in float32."""
        return self._product(y, True)

    @cached_property
    def walks(self) -> Walks:
        return Walks(self.batch, *self._given)

    @cached_property
    def lse(self) -> Float[Tensor, "*b n"]:
        """log₂ Σ exp of every row; +∞ where a query sees nothing."""
        return fused.log_sum_exp(*self._given).expand(*self.batch, -1).contiguous()

    def _product(self, y: Tensor, adjoint: bool) -> Tensor:
        batch = tuple(y.shape[:-2])
        if batch != self.batch:
            return self._among(batch)._product(y, adjoint)
        with on_device(y):
            out = self.walks.product(y, self.lse, adjoint)
        return out.view(*batch, *out.shape[1:])

    def _among(self, batch: tuple[int, ...]) -> Products:
        """The same products for more heads, which all share q and k."""
        q, k, rows, pattern, segments, scale = self._given
        more = Products(q.expand(*batch, *q.shape[-2:]), k, rows, pattern, segments, scale)
        more.lse = self.lse.expand(*batch, -1).contiguous()
        return more


def objections(q, k, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why the kernels can't take these inputs."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return [f"it takes q and k of 16 bits, not {q.dtype}"]
    return fused.objections(q, k, k, rows, pattern, segments, scale) or fused.about_intervals(
        q, k, k, pattern, segments
    )


READY = launching.LaunchCache()  # compiled launches, keyed by all that Triton inspects in q, k and the intervals


class Walks:
    """q and k as the kernels read them, and the launches of a product."""

    def __init__(self, batch: tuple[int, ...], q, k, rows: SoftmaxRows, pattern, segments, scale: float):
        reach = Reach.of(pattern)
        assert reach is not None, f"{pattern}: see objections"
        where = intervals(reach, q.shape[-2], k.shape[-2], segments, q.device)
        self.queries, self.keys = _sides(batch, q, k, where)
        self.heads, self.G = prod(batch), self.queries.x.shape[1]
        self.d = self.queries.x.shape[-1]
        self.scales = scale * LOG2E, 1.0 if rows.softcap is None else rows.softcap * LOG2E
        self.D = max(NARROWEST, power(self.d))
        operand = tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
        self.constants = dict(
            D=self.D,
            SEGMENTS=where.segmented,
            EVEN_D=self.d == self.D,
            OPERAND=tl.float32 if INTERPRETED else operand,  # the interpreter's dot does not support bfloat16
            CAPPED=rows.softcap is not None,
        )
        kinds = ((x.x.shape, x.x.stride(), x.table.stride(), *x[3:]) for x in (self.queries, self.keys))
        key = *kinds, q.dtype, q.device, where.segmented, *self.scales, rows.softcap is None
        self.ready = READY.find(key, dict)
        self._ways: dict[tuple[bool, int], Way] = {}
        self._rooms: dict[tuple[bool, int, int], Room] = {}

    def product(self, y: Tensor, lse: Tensor, adjoint: bool) -> Float[Tensor, "h l e"]:
        e = y.shape[-1]
        way = self._ways.get((adjoint, e))
        if way is None:
            way = self._ways[adjoint, e] = self._way(adjoint, e)
        own, other = way.own, way.other
        out = launching.empty((self.heads, own.length, e), y)
        if not e:
            return out
        room = self._room(y, way)
        self._halve(y, way, room)
        inputs = own.x, other.x, room.halves, room.units, lse
        if way.first < own.length:
            self._walk(way, inputs, out, way.first, own.length, 1, own.prefix)
        if room.some is not None:
            self._walk(way, inputs, room.some, 0, way.first, way.parts, 0)
            torch.sum(room.some, 0, out=out if way.first == own.length else out[:, : way.first])
        return out

    def _room(self, y: Tensor, way: Way) -> Room:
        """The buffers for one kind of product and stream; one stream runs in order, so its products can share them."""
        key = way.adjoint, way.e, launching.current_stream()
        room = self._rooms.get(key)
        if room is None:
            length, E, groups = way.other.length, way.E, way.groups
            room = self._rooms[key] = Room(
                launching.empty((self.heads, over(length, way.span), groups * E), y),
                launching.empty((self.heads, groups, 2, length, E), y, torch.float16),
                launching.empty((self.heads, groups * E), y),
                launching.empty((way.parts, self.heads, way.first, way.e), y) if way.first else None,
            )
        return room

    def _way(self, adjoint: bool, e: int) -> Way:
        own, other = (self.keys, self.queries) if adjoint else (self.queries, self.keys)
        E = columns_of(e)
        if self.d != NARROWEST:  # narrower groups were verified on a GPU only for keys of width 64
            E = max(E, NARROWEST)
        groups = max(1, over(e, E))
        config = CONFIGS[self.D, E]["adjoint" if adjoint else "forward"]
        span = max(SPLIT_ROWS, power(over(other.length, PEAKS)))
        return Way(own, other, adjoint, e, E, groups, config, span, *_long(own, other, config, self.heads * groups))

    def _halve(self, y: Tensor, way: Way, room: Room) -> None:
        """Split Y into two float16 per element, and compute the units of its columns."""
        side, length, E, groups = way.other, way.other.length, way.E, way.groups
        parts = over(length, way.span)
        y = y.reshape(*side.x.shape[:2], *y.shape[-2:])
        strides = y.stride()
        kind = way.adjoint, way.e, strides, y.data_ptr() % 16

        def describe_peaks():
            numbers = (*strides, *side.table.stride()[:2], length, way.e, self.G, parts, way.span)
            constants = dict(ROWS=SPLIT_ROWS, E=E, SEGMENTS=self.constants["SEGMENTS"])
            return triton_products.peaks, (parts * self.heads, groups), numbers, constants, dict(num_warps=4)

        def describe_split():
            blocks = over(length, SPLIT_ROWS)
            numbers = (*strides, *side.table.stride()[:2], length, way.e, self.G, parts, blocks)
            constants = dict(PARTS=power(parts), ROWS=SPLIT_ROWS, E=E, SEGMENTS=self.constants["SEGMENTS"])
            return triton_products.split, (blocks * self.heads, groups), numbers, constants, dict(num_warps=4)

        launching.launch(self.ready, ("peaks", kind), (y, side.table, room.tops), describe_peaks)
        pointers = y, side.table, room.tops, room.halves, room.units
        launching.launch(self.ready, ("split", kind), pointers, describe_split)

    def _walk(self, way: Way, inputs: tuple, out: Tensor, skip: int, stop: int, parts: int, prefix: int) -> None:
        own, other, config = way.own, way.other, way.config

        def describe():
            blocks = over(stop, config.rows)
            numbers = (
                *(*own.x.stride()[:3], *other.x.stride()[:3], *own.table.stride()[:2], *other.table.stride()[:2]),
                *(own.length, other.length, self.d, way.e, skip, stop, blocks, self.heads, *self.scales, self.G),
            )
            constants = dict(
                self.constants,
                E=way.E,
                ROWS=config.rows,
                TILE=config.tile,
                PREFIX=launches.prefix_of(prefix, config),
                PARTS=parts,
                ADJOINT=way.adjoint,
            )
            options = dict(num_warps=config.warps, num_stages=config.stages)
            return triton_products.product, (blocks * parts * self.heads, way.groups), numbers, constants, options

        key = "walk", way.adjoint, way.e, skip, parts
        launching.launch(self.ready, key, (*inputs, out, own.table, other.table), describe)


def columns_of(e: int) -> int:
    """Columns per program. Each group computes the scores again, which costs about as much as 24 columns."""
    if e <= 128:
        return max(16, power(e))
    return min((128, 64), key=lambda E: over(e, E) * (E + 24))


def _sides(batch: tuple[int, ...], q: Tensor, k: Tensor, where: Intervals) -> tuple[Side, Side]:
    reach, two = where.reach, launches.two_axes(batch)

    def by_head(x: Tensor) -> Tensor:
        return x.expand(*batch, *x.shape[-2:]).reshape(*two, *x.shape[-2:])

    span = 0
    if reach.is_plain and not where.segmented:
        span = min(reach.before + reach.after + 1, reach.block or reach.before + reach.after + 1)
    return (
        Side(by_head(aligned(q)), q.shape[-2], by_head(where.rows), where.first_rows, reach.sinks, span),
        Side(by_head(aligned(k)), k.shape[-2], by_head(where.keys), where.first_keys, reach.heads, span),
    )


def _long(own: Side, other: Side, config: Config, heads: int) -> tuple[int, int]:
    """How many tokens to split into parts, and into how many: special tokens, or all if they do not fill the GPU."""
    length = own.first or own.length
    span = other.length if own.first else min(own.span and own.span + config.rows, other.length)
    parts = min(PARTS, span // (4 * config.tile), PROGRAMS // (heads * over(length, config.rows)))
    if own.first:
        return own.first, max(parts, 1)
    return (own.length, parts) if parts > 1 else (0, 1)
