"""Tile sizes of the softmax kernels, and the setup that their launches share."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl

from heedful.kernels import launching
from heedful.kernels.launching import INTERPRETED, SIXFOLD, over, power, up
from heedful.kernels.softmax import triton_backward, triton_forward, triton_rows
from heedful.kernels.softmax.lists import MOST_ROWS, Lists
from heedful.kernels.softmax.reach import Intervals
from heedful.shapes import Tensor, broadcast_shapes

LOG2E = 1.4426950408889634
WIDEST = 256
NARROWEST = 64  # columns of a tile: tiles of 32 gave wrong results on an H200 (README.md)


class Config(NamedTuple):
    """Of one kernel: rows per program, tile size of the loop, warps, stages."""

    rows: int
    tile: int
    warps: int
    stages: int


# Chosen on an H200 with benchmarks/gpu_softmax.py --tune; for width 256 and float32 only by what fits.
# The key is the width (d and e up to it) and the bytes of an element.
CONFIGS = {
    (64, 2): dict(
        attend=Config(64, 64, 4, 3),
        queries=Config(64, 32, 4, 3),
        keys=Config(64, 64, 4, 2),
        adjoint=Config(128, 64, 4, 3),
        statistics=Config(128, 128, 4, 3),
    ),
    (128, 2): dict(
        attend=Config(64, 64, 4, 3),
        queries=Config(64, 64, 4, 2),
        keys=Config(64, 32, 4, 2),
        adjoint=Config(128, 64, 8, 2),
        statistics=Config(128, 64, 8, 2),
    ),
    (256, 2): dict(
        attend=Config(64, 64, 8, 2),
        queries=Config(64, 32, 8, 2),
        keys=Config(64, 32, 8, 2),
        adjoint=Config(64, 32, 8, 2),
        statistics=Config(64, 32, 8, 2),
    ),
    (64, 4): dict(
        attend=Config(128, 64, 8, 3),
        queries=Config(64, 32, 4, 2),
        keys=Config(64, 32, 4, 2),
        adjoint=Config(128, 64, 4, 1),
        statistics=Config(64, 32, 4, 2),
    ),
    (128, 4): dict.fromkeys(("attend", "queries", "keys", "adjoint", "statistics"), Config(64, 32, 8, 1)),
    (256, 4): dict.fromkeys(("attend", "queries", "keys", "adjoint", "statistics"), Config(32, 32, 8, 1)),
}
# Other choices for lists: more stages, since a load must wait for the tokens that say where to load; four warps for 64
# rows. Timed on an H200 at width 64, in float32 with tf32x3; width 128 was chosen by register use.
OTHERS = {
    (64, 2): dict(queries=Config(64, 32, 4, 5), keys=Config(64, 64, 4, 3)),
    (128, 2): dict(queries=Config(64, 64, 4, 3), keys=Config(64, 32, 4, 3), adjoint=Config(64, 64, 4, 2)),
    (64, 4): dict(attend=Config(64, 64, 4, 3), queries=Config(64, 32, 4, 3), keys=Config(64, 32, 4, 1)),
}


def _for_lists(configs: dict[str, Config]) -> dict[str, Config]:
    """The configs for lists: all kernels use the same blocks of rows, at most as many rows as a word has bits."""
    used = {name: config for name, config in configs.items() if name != "statistics"}
    rows = min(MOST_ROWS, *(config.rows for config in used.values()))
    return {name: config._replace(rows=rows) for name, config in used.items()}


LISTED = {kind: _for_lists(configs | OTHERS.get(kind, {})) for kind, configs in CONFIGS.items()}
PROGRAMS = 528  # programs that fill 132 multiprocessors four times; long rows or columns are split to reach it
FEW = 8  # keys count as few if there are this many times as many queries
PARTS = 64  # the most parts: one program adds them up


def kind_of(q: Tensor, v: Tensor) -> tuple[int, int]:
    """The key of the config tables."""
    return max(tile_width(q.shape[-1]), tile_width(v.shape[-1])), q.element_size()


def tile_width(width: int) -> int:
    """The columns of a tile; several programs share wider values."""
    return max(NARROWEST, power(min(width, WIDEST)))


class Heads(NamedTuple):
    """q (B, G, P, n, d), k (B, G, m, d) and v (B, G, m, e): views if strides and widths allow it, otherwise copies."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: tuple[int, ...]
    shared: int  # number of trailing batch axes along which k and v do not change


def shared_axes(batch: tuple[int, ...], k: Tensor, v: Tensor) -> int:
    """The number of trailing batch axes that k and v lack."""
    sizes = zip(*((*(1,) * (len(batch) + 2 - x.ndim), *x.shape[:-2]) for x in (k, v)), strict=True)
    apart = [axis for axis, pair in enumerate(sizes, 1) if pair != (1, 1)]
    return len(batch) - max(apart, default=0)


def heads(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Inputs with any batch axes as B (separate), G (heads of keys) and P (query heads that share one of them)."""
    batch = tuple(broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    shared = shared_axes(batch, k, v)
    lead = batch[: len(batch) - shared]
    q, k, v = (aligned(x) for x in (q, k, v))
    k, v = (_leading(x, lead, shared).reshape(*two_axes(lead), *x.shape[-2:]) for x in (k, v))
    return Heads(_by_key_head(q, batch, shared), k, v, batch, shared)


def two_axes(lead: tuple[int, ...]) -> tuple[int, int]:
    """B and G from the batch axes."""
    return prod(lead[:-1]), lead[-1] if lead else 1


def _by_key_head(x: Tensor, batch: tuple[int, ...], shared: int) -> Tensor:
    """(B, G, P, ·, ·) from a tensor of queries."""
    lead, tail = batch[: len(batch) - shared], batch[len(batch) - shared :]
    return x.expand(*batch, *x.shape[-2:]).reshape(*two_axes(lead), prod(tail), *x.shape[-2:])


def _leading(x: Tensor, lead: tuple[int, ...], shared: int) -> Tensor:
    """(*lead, ·, ·) from a tensor that has size 1, or nothing, along the axes that are shared."""
    x = x.reshape((1,) * (len(lead) + shared + 2 - x.ndim) + x.shape)
    return x.reshape(*x.shape[: len(lead)], *x.shape[-2:]).expand(*lead, *x.shape[-2:])


def aligned(x: Tensor) -> Tensor:
    """x, or a copy with zero columns appended, so that kernels read whole groups of 16 bytes.

    Otherwise kernels would load element by element, and each alignment would be one more kernel to compile.
    """
    width = x.shape[-1]
    if width % 16:
        return F.pad(x, (0, up(width, 16) - width))
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(s % 16 for s in _strides(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of all axes but the last; 0 for axes of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False))


class SoftmaxSetup:
    """Data shared by calls with inputs of one kind: sizes, strides, constants, compiled programs."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, where: Intervals | Lists, scale: float, cap: float | None):
        at = heads(q, k, v)
        self.batch, self.shared = at.batch, at.shared
        self.lead = at.batch[: len(at.batch) - at.shared]
        self.copies = any(x.data_ptr() != y.data_ptr() for x, y in zip(at[:3], (q, k, v), strict=True))
        self.B, self.G, self.P, self.n, self.d = at.q.shape
        self.m, self.e = at.k.shape[-2], at.v.shape[-1]
        self.heads = self.B * self.G * self.P
        self.orders = tuple(_order(x) for x in at[:3])
        self.strides = *_strides(at.q), *_strides(at.k), *_strides(at.v)
        self.listed = isinstance(where, Lists)
        rows, keys = (_strides(x)[:2] for x in self.tables(where))
        # For kernels over queries and over keys. Lists serve all heads; each block stores where its list begins.
        self.tables_at = ((*rows, 0, 0), (0, 0, *keys)) if self.listed else ((*rows, *keys),) * 2
        self.first_rows = where.first_rows
        self.sinks, self.global_rows = where.special
        self.D, self.E = tile_width(self.d), tile_width(self.e)
        self.configs: dict[str, Config] = (LISTED if self.listed else CONFIGS)[kind_of(q, v)]
        self.block = self.configs["attend"].rows if self.listed else 0  # rows per block of the lists
        # Few keys, as after a projection of the sequence, do not fill the GPU: split their queries into parts too.
        few = 4 * self.B * self.G * over(self.m, self.configs["keys"].rows) < PROGRAMS and self.n >= FEW * self.m
        self.first_keys = self.m if few and where.keys_may_split else where.first_keys
        self.scales = scale * LOG2E, 1.0 if cap is None else cap * LOG2E
        self.scale = scale
        operand = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[q.dtype]
        low = q.dtype != torch.float32
        self.constants = dict(
            D=self.D,
            E=self.E,
            SEGMENTS=where.segmented and not self.listed,  # lists account for segments already
            LISTED=self.listed,
            EVEN_D=self.d == self.D,
            EVEN_E=self.e % self.E == 0,
            OPERAND=tl.float32 if INTERPRETED else operand,  # the interpreter's dot does not support bfloat16
            PRECISION="tf32" if low else SIXFOLD,
            CAPPED=cap is not None,
        )
        self.ready: dict = {}

    def tables(self, where: Intervals | Lists) -> tuple[Tensor, Tensor]:
        """The intervals of queries and keys, (B, G, 4, ·), or their blocks, (B, G, ·, ·)."""
        tables = (_leading(x, self.lead, self.shared) for x in (where.rows, where.keys))
        rows, keys = (x.reshape(self.B, self.G, *x.shape[-2:]) for x in tables)
        return rows, keys

    def launch(self, name, kernel, key, pointers, steps, ends, heads, skip, stop, parts, prefix, **constants) -> None:
        """Launch `kernel` for rows [skip, stop) of `heads` heads."""

        def describe():
            config = self.configs[name]
            blocks = over(stop, config.rows)
            grid = blocks * parts * heads, over(self.e, self.E)
            numbers = (
                *(*self.strides, *steps(), *self.tables_at[name in ("keys", "adjoint")]),
                *(self.n, self.m, self.d, self.e, skip, stop, blocks, *self.scales, *ends, self.G, self.P),
            )
            tiles = dict(ROWS=config.rows, TILE=config.tile, PARTS=parts, PREFIX=prefix_of(prefix, config))
            options = dict(num_warps=config.warps, num_stages=config.stages)
            return kernel, grid, numbers, {**self.constants, **constants, **tiles}, options

        launching.launch(self.ready, (name, skip, stop, parts, *key), pointers, describe)

    def parts(self, heads: int, rows: int, across: int, name: str) -> int:
        """The number of parts for the first rows, each of which is as long as the sequence."""
        config = self.configs[name]
        most = max(1, over(across, 4 * config.tile))
        parts = min(most, PARTS, over(PROGRAMS, heads * over(rows, config.rows)))
        return max(parts, 2) if self.listed else parts  # a single part would be written in token order, not block order

    def as_given(self, x: Tensor, width: int) -> Tensor:
        """x with the batch axes of the inputs and without the appended columns."""
        x = x.reshape(*self.batch, *x.shape[3:])
        return x if x.shape[-1] == width else x[..., :width]


def prefix_of(tokens: int, config: Config) -> int:
    """The tile size for this many special tokens."""
    return min(max(16, power(tokens)), config.tile) if tokens else 0


def _order(x: Tensor) -> tuple[int, ...] | None:
    """The axes by descending stride; None if that is their order already."""
    apart = [axis for axis in range(x.ndim - 1) if x.shape[axis] > 1]
    order = sorted(apart, key=x.stride, reverse=True)
    if order == apart or any(x.stride(axis) == 0 for axis in apart):
        return None
    return (*(axis for axis in range(x.ndim - 1) if axis not in apart), *order, x.ndim - 1)


def _ordered(shape: tuple[int, ...], order: tuple[int, ...] | None, like: Tensor) -> Tensor:
    """An empty tensor of that shape, with its axes in that memory order."""
    if order is None:
        return launching.empty(shape, like, like.dtype)
    back = sorted(range(len(order)), key=order.__getitem__)
    return launching.empty([shape[axis] for axis in order], like, like.dtype).permute(back)


class Tables(NamedTuple):
    """The visible pairs as the kernels over queries and over keys take them: rows, keys and words."""

    by_query: tuple[Tensor, Tensor, Tensor]
    by_key: tuple[Tensor, Tensor, Tensor]


def _tables(setup: SoftmaxSetup, where: Intervals | Lists) -> Tables:
    rows, keys = setup.tables(where) if where.segmented else (where.rows, where.keys)
    if isinstance(where, Intervals):
        return Tables((rows, keys, rows), (rows, keys, rows))  # without words
    tokens, words = where.of_keys
    return Tables((rows, *where.of_rows), (tokens, keys, words))


class Job(NamedTuple):
    """One call: its setup and the tensors that the kernels read."""

    setup: SoftmaxSetup
    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tables
    sink: Tensor | None = None  # (B, G, P), base 2


SETUPS = launching.LaunchCache()


def job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: Intervals | Lists,
    scale: float,
    cap: float | None = None,
    sink: Tensor | None = None,
) -> Job:
    """A call with the setup for its kind: inputs that Triton would treat alike."""
    key = (
        *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device),
        *(q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16),
        *(where.kind, scale, cap),
    )
    setup: SoftmaxSetup = SETUPS.find(key, SoftmaxSetup, q, k, v, where, scale, cap)
    if setup.copies:
        q, k, v = heads(q, k, v)[:3]
    if sink is not None:
        sink = (sink.float() * LOG2E).expand(setup.batch).contiguous()
    return Job(setup, q, k, v, _tables(setup, where), sink)


def queries_like(job: Job, x: Tensor) -> Tensor:
    """x as (B, G, P, n, ·), from the batch axes of the inputs."""
    return _by_key_head(aligned(x), job.setup.batch, job.setup.shared)


def attend(job: Job) -> tuple[Tensor, Tensor]:
    """o (B, G, P, n, e) and lse (B, G, P, n) in base 2."""
    setup = job.setup
    o = _ordered((setup.B, setup.G, setup.P, setup.n, setup.e), setup.orders[0], job.q)
    return o, _attend_all(job, o)


def log_sum_exp(job: Job) -> Tensor:
    """lse (B, G, P, n) in base 2."""
    return _attend_all(job, None)


def _attend_all(job: Job, o: Tensor | None) -> Tensor:
    setup, first = job.setup, job.setup.first_rows
    lse = launching.empty((setup.B, setup.G, setup.P, setup.n), job.q)
    if first < setup.n:
        attend_rows(job, o, lse, first, setup.n, 1, setup.sinks)
    if first:
        parts = setup.parts(setup.heads, first, setup.m, "attend")
        shape = (parts, setup.B, setup.G, setup.P, first)
        some_lse = launching.empty(shape, job.q)
        some = None if o is None else launching.empty((*shape, setup.e), job.q)
        attend_rows(job, some, some_lse, 0, first, parts, 0)
        _merge(job, o, lse, some, some_lse)
    return lse


def attend_rows(job: Job, o: Tensor | None, lse: Tensor, skip: int, stop: int, parts: int, prefix: int) -> None:
    setup, sink = job.setup, job.sink
    pointers = (job.q, job.k, job.v, lse if o is None else o, lse, lse if sink is None else sink, *job.tables.by_query)
    setup.launch(
        *("attend", triton_forward.attend, (o is None, sink is None), pointers),
        lambda: (0,) * 5 if o is None else (*_strides(o)[-4:], o.stride(0) if o.ndim == 6 else 0),
        *((), setup.heads, skip, stop, parts, prefix),
        VALUES=o is not None,
        SINK=sink is not None,
    )


def _merge(job: Job, o: Tensor | None, lse: Tensor, some: Tensor | None, some_lse: Tensor) -> None:
    setup, parts, first = job.setup, len(some_lse), some_lse.shape[-1]

    def describe():
        steps = (0,) * 4 if o is None else _strides(o)
        numbers = (*steps, setup.n, first, setup.heads, parts, setup.e, setup.G, setup.P)
        grid = setup.heads * first, over(setup.e, setup.E)
        constants = dict(PARTS=power(max(2, parts)), E=setup.E, VALUES=o is not None, BLOCK=setup.block)
        return triton_rows.merge, grid, numbers, constants, dict(num_warps=4)

    pointers = (lse if o is None else o, lse, some_lse if some is None else some, some_lse, job.tables.by_query[0])
    launching.launch(setup.ready, ("merge", o is None), pointers, describe)


def gradients(job: Job, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (B, G, P, n, d), dk (B, G, m, d), dv (B, G, m, e) and δ (B, G, P, n)."""
    setup, like = job.setup, job.q
    shape = setup.B, setup.G
    dq = _ordered((*shape, setup.P, setup.n, setup.d), setup.orders[0], like)
    dk = _ordered((*shape, setup.m, setup.d), setup.orders[1], like)
    dv = _ordered((*shape, setup.m, setup.e), setup.orders[2], like)
    delta = launching.empty(lse.shape, like)
    first = setup.first_rows
    if first < setup.n:
        query_rows(job, o, lse, do, delta, dq, first, setup.n, 1, setup.sinks)
    if first:
        parts = setup.parts(setup.heads, first, setup.m, "queries")
        some = launching.empty((parts, *dq.shape[:3], first, setup.d), like)
        query_rows(job, o, lse, do, delta, some, 0, first, parts, 0)
        _add_up(setup, "dq", dq, some, job.tables.by_query[0])
    _all_keys(job, lse, do, delta, dk, dv)
    return dq, dk, dv, delta


def query_rows(job: Job, o, lse, do, delta, dq, skip, stop, parts, prefix) -> None:
    setup = job.setup
    pointers = (job.q, job.k, job.v, o, do, lse, delta, dq, *job.tables.by_query)
    setup.launch(
        *("queries", triton_backward.queries, (o.stride(), do.stride()), pointers),
        lambda: (*_strides(o), *_strides(do), *_strides(dq)[-4:], dq.stride(0) if dq.ndim == 6 else 0),
        *((setup.scale,), setup.heads, skip, stop, parts, prefix),
    )


def adjoint(job: Job, lse: Tensor, y: Tensor) -> Tensor:
    """Aᵀ y (B, G, m, e), summed over the heads that share keys."""
    setup = job.setup
    out = launching.empty((setup.B, setup.G, setup.m, setup.e), y, y.dtype)
    _all_keys(job, lse, y, None, None, out)
    return out


def _all_keys(job: Job, lse: Tensor, do: Tensor, delta: Tensor | None, dk: Tensor | None, dv: Tensor) -> None:
    setup, first = job.setup, job.setup.first_keys
    if first < setup.m:
        key_rows(job, lse, do, delta, dk, dv, first, setup.m, 1, setup.global_rows)
    if first:
        parts = setup.parts(setup.B * setup.G, first, setup.n, "adjoint" if dk is None else "keys")
        shape = (parts, setup.B, setup.G, first)
        some_v = launching.empty((*shape, setup.e), dv)
        some_k = None if dk is None else launching.empty((*shape, setup.d), dv)
        key_rows(job, lse, do, delta, some_k, some_v, 0, first, parts, 0)
        _add_up(setup, "dv", dv, some_v, job.tables.by_key[1])
        if dk is not None and some_k is not None:
            _add_up(setup, "dk", dk, some_k, job.tables.by_key[1])


def _add_up(setup: SoftmaxSetup, name: str, x: Tensor, some: Tensor, table: Tensor) -> None:
    """Sum the parts of the first rows into x, (*heads, tokens, width)."""
    parts, first, width = len(some), *some.shape[-2:]

    def describe():
        steps, shared = _strides(x), setup.P
        if x.ndim == 4:  # a gradient of keys or values
            steps, shared = (*steps[:2], 0, steps[2]), 1
        count, W = prod(x.shape[:-2]), tile_width(width)
        numbers = (*steps, first, count, parts, width, setup.G, shared)
        constants = dict(PARTS=power(max(2, parts)), W=W, BLOCK=setup.block)
        return triton_rows.add_up, (count * first, over(width, W)), numbers, constants, dict(num_warps=4)

    launching.launch(setup.ready, ("add up", name, x.stride(), parts), (x, some, table), describe)


def key_rows(job: Job, lse, do, delta, dk, dv, skip, stop, parts, prefix) -> None:
    setup, alone = job.setup, dk is None
    if alone:
        dk, delta = dv, lse  # placeholders that the kernel does not read or write
    pointers = (job.q, job.k, job.v, do, lse, delta, dk, dv, *job.tables.by_key)

    def steps():
        ends = ((*_strides(x)[-3:], x.stride(0) if x.ndim == 5 else 0) for x in (dk, dv))
        return *_strides(do), *(step for end in ends for step in end)

    setup.launch(
        *("adjoint" if alone else "keys", triton_backward.keys, (do.stride(),), pointers, steps),
        *((setup.scale,), setup.B * setup.G, skip, stop, parts, prefix),
        DK=not alone,
    )


def statistics(job: Job) -> tuple[Tensor, ...]:
    """lse (base 2), Σ a², entropy, max a and its key, each (B, G, P, n); the sink is left out."""
    setup, config = job.setup, job.setup.configs["statistics"]
    shape = (setup.B, setup.G, setup.P, setup.n)
    found = tuple(launching.empty(shape, job.q) for _ in range(4))
    places = launching.empty(shape, job.q, torch.int32)

    def describe():
        blocks = over(setup.n, config.rows)
        numbers = (
            *setup.strides[:7],
            *setup.tables_at[0],
            setup.n,
            setup.m,
            setup.d,
            blocks,
            *setup.scales,
            setup.G,
            setup.P,
        )
        constants = {x: setup.constants[x] for x in ("D", "SEGMENTS", "EVEN_D", "OPERAND", "PRECISION", "CAPPED")}
        constants |= dict(ROWS=config.rows, TILE=config.tile, PREFIX=prefix_of(setup.sinks, config))
        options = dict(num_warps=config.warps, num_stages=config.stages)
        return triton_rows.statistics, (blocks * setup.heads,), numbers, constants, options

    pointers = (job.q, job.k, *found, places, *job.tables.by_query[:2])
    launching.launch(setup.ready, "statistics", pointers, describe)
    return *found, places
