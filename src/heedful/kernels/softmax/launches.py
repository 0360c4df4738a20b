"""How the softmax kernels are laid out and launched: the table of tiles, and what their launches share."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton.language as tl

from heedful.kernels.softmax import triton_backward, triton_forward, triton_rows
from heedful.kernels.softmax.reach import Intervals, Reach
from heedful.kernels.softmax.triton_forward import INTERPRETED
from heedful.shapes import Tensor

LOG2E = 1.4426950408889634
WIDEST = 256


class Config(NamedTuple):
    """Of one kernel: rows a program, tile it walks in, warps, stages."""

    rows: int
    tile: int
    warps: int
    stages: int


# The key is the width (d and e up to it) and the bytes of an element.
CONFIGS = {
    (64, 2): dict(
        attend=Config(128, 64, 4, 3),
        queries=Config(128, 64, 8, 3),
        keys=Config(128, 64, 8, 3),
        adjoint=Config(128, 64, 4, 3),
        statistics=Config(128, 64, 4, 3),
    ),
    (128, 2): dict(
        attend=Config(128, 64, 8, 3),
        queries=Config(128, 64, 8, 2),
        keys=Config(64, 64, 8, 2),
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
    (64, 4): dict.fromkeys(("attend", "queries", "keys", "adjoint", "statistics"), Config(64, 32, 4, 2)),
    (128, 4): dict.fromkeys(("attend", "queries", "keys", "adjoint", "statistics"), Config(64, 32, 8, 1)),
    (256, 4): dict.fromkeys(("attend", "queries", "keys", "adjoint", "statistics"), Config(32, 32, 8, 1)),
}
PROGRAMS = 264  # parts of a long row or column that fill 132 multiprocessors twice


def empty(shape, like: Tensor, dtype=torch.float32) -> Tensor:
    """Every output and workspace is born here, so that a test can fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def over(a: int, b: int) -> int:
    return -(-a // b)


def power(x: int) -> int:
    return max(16, 1 << (x - 1).bit_length())


class Heads(NamedTuple):
    """q (B, G, P, n, d), k (B, G, m, d) and v (B, G, m, e): views, where the strides allow it."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: tuple[int, ...]
    shared: int  # trailing batch axes along which k and v do not change


def shared_axes(batch: tuple[int, ...], k: Tensor, v: Tensor) -> int:
    """How many trailing batch axes k and v lack."""
    sizes = zip(*((*(1,) * (len(batch) + 2 - x.ndim), *x.shape[:-2]) for x in (k, v)), strict=True)
    apart = [axis for axis, pair in enumerate(sizes, 1) if pair != (1, 1)]
    return len(batch) - max(apart, default=0)


def heads(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """Inputs of any batch axes with those axes sorted: apart, a head of keys, the query heads that share it."""
    batch = tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    shared = shared_axes(batch, k, v)
    lead, tail = batch[: len(batch) - shared], batch[len(batch) - shared :]
    B, G, P = prod(lead[:-1]), lead[-1] if lead else 1, prod(tail)
    q = _plain(q.expand(*batch, *q.shape[-2:])).reshape(B, G, P, *q.shape[-2:])
    k, v = (_plain(_leading(x, lead, shared)).reshape(B, G, *x.shape[-2:]) for x in (k, v))
    return Heads(q, k, v, batch, shared)


def _leading(x: Tensor, lead: tuple[int, ...], shared: int) -> Tensor:
    """(*lead, ·, ·) from a tensor that has size 1, or nothing, along the axes that are shared."""
    x = x.reshape((1,) * (len(lead) + shared + 2 - x.ndim) + x.shape)
    return x.reshape(*x.shape[: len(lead)], *x.shape[-2:]).expand(*lead, *x.shape[-2:])


def _plain(x: Tensor) -> Tensor:
    """Columns one after another, which is what the kernels read."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Plan:
    """What the launches for one set of inputs share."""

    def __init__(self, at: Heads, where: Intervals, reach: Reach, scale: float, e: int | None = None):
        self.at, self.where, self.reach, self.scale = at, where, reach, scale
        self.B, self.G, self.P, self.n, self.d = at.q.shape
        self.m, self.e = at.v.shape[-2], at.v.shape[-1] if e is None else e
        lead = at.batch[: len(at.batch) - at.shared]
        tables = (_leading(x, lead, at.shared) for x in (where.rows, where.keys))
        self.rows, self.keys = (x.reshape(self.B, self.G, *x.shape[-2:]) for x in tables)
        width = max(64, power(self.d), min(power(self.e), WIDEST))
        self.configs = CONFIGS[width, at.q.element_size()]
        self.D, self.E = power(self.d), min(power(self.e), WIDEST)
        low = at.q.dtype != torch.float32
        operand = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[at.q.dtype]
        self.constants = dict(
            D=self.D,
            E=self.E,
            SEGMENTS=where.segmented,
            EVEN_D=self.d == self.D,
            EVEN_E=self.e % self.E == 0,
            OPERAND=tl.float32 if INTERPRETED else operand,  # the interpreter's dot does not know bfloat16
            PRECISION="tf32" if low else ("tf32x3" if width < 256 else "ieee"),
        )

    @property
    def heads(self) -> int:
        return self.B * self.G * self.P

    def strides(self):
        """Of q, k and v."""
        return *self.at.q.stride()[:4], *self.at.k.stride()[:3], *self.at.v.stride()[:3]

    def tables(self):
        return *self.rows.stride()[:2], *self.keys.stride()[:2]

    def launch(self, kernel, name, tensors, numbers, ends, heads, skip, stop, parts, prefix, **constants):
        """`kernel` for rows [skip, stop) of so many heads."""
        config: Config = self.configs[name]
        blocks = over(stop, config.rows)
        columns = over(self.e, self.E)
        kernel[blocks * parts * heads, columns](
            *tensors,
            *numbers,
            *self.tables(),
            *(self.n, self.m, self.d, self.e, skip, stop, blocks),
            *ends,
            *(self.G, self.P),
            **self.constants,
            **constants,
            ROWS=config.rows,
            TILE=config.tile,
            PREFIX=min(power(prefix), config.tile) if prefix else 0,
            PARTS=parts,
            num_warps=config.warps,
            num_stages=config.stages,
        )

    def parts(self, heads: int, rows: int, across: int, name: str) -> int:
        """In how many parts to walk the first rows, each of which is as long as the sequence."""
        config: Config = self.configs[name]
        most = max(1, over(across, 4 * config.tile))
        return min(most, over(PROGRAMS, heads * over(rows, config.rows)))


def attend(plan: Plan) -> tuple[Tensor, Tensor]:
    """o (B, G, P, n, e) and lse (B, G, P, n) in base 2."""
    o = _like_queries(plan)
    return o, _attend_all(plan, o)


def log_sum_exp(plan: Plan) -> Tensor:
    """lse (B, G, P, n) in base 2."""
    return _attend_all(plan, None)


def _attend_all(plan: Plan, o: Tensor | None) -> Tensor:
    q = plan.at.q
    lse = empty((plan.B, plan.G, plan.P, plan.n), q)
    first = plan.where.first_rows
    if first < plan.n:
        _attend(plan, o, lse, first, plan.n, 1, plan.reach.sinks)
    if first:
        parts = plan.parts(plan.heads, first, plan.m, "attend")
        shape = (parts, plan.B, plan.G, plan.P, first)
        some_lse = empty(shape, q)
        some = None if o is None else empty((*shape, plan.e), q)
        _attend(plan, some, some_lse, 0, first, parts, 0)
        _merge(o, lse, some, some_lse)
    return lse


def _attend(plan: Plan, o, lse, skip, stop, parts, prefix) -> None:
    at = plan.at
    target = lse if o is None else o
    steps = (0,) * 5 if o is None else (*o.stride()[-5:-1], o.stride(0) if o.ndim == 6 else 0)
    plan.launch(
        triton_forward.attend,
        "attend",
        (at.q, at.k, at.v, target, lse, plan.rows, plan.keys),
        (*plan.strides(), *steps),
        (plan.scale * LOG2E,),
        plan.heads,
        skip,
        stop,
        parts,
        prefix,
        VALUES=o is not None,
    )


def _merge(o, lse, some, some_lse) -> None:
    """Parts of the first rows made one: o = Σ 2^(lse_p − lse) o_p."""
    first = some_lse.shape[-1]
    level = some_lse.masked_fill(some_lse == torch.inf, -torch.inf)
    peak = level.amax(0)
    weight = torch.exp2(level - peak.masked_fill(peak == -torch.inf, 0))
    mass = weight.sum(0)
    lse[..., :first] = torch.where(mass > 0, peak + mass.log2(), torch.inf)
    if o is not None:
        o[..., :first, :] = ((weight / mass.clamp(min=1))[..., None] * some).sum(0).to(o.dtype)


def _like_queries(plan: Plan) -> Tensor:
    """The output, tokens before heads in memory where q has them so."""
    q = plan.at.q
    if q.stride(-2) > max(q.stride(1), q.stride(2)):
        return empty((plan.B, plan.n, plan.G, plan.P, plan.e), q, q.dtype).permute(0, 2, 3, 1, 4)
    return empty((plan.B, plan.G, plan.P, plan.n, plan.e), q, q.dtype)


def gradients(plan: Plan, o: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, G, P, n, d), dk (B, G, m, d), dv (B, G, m, e)."""
    q, k, v = plan.at[:3]
    dq, dk, dv = (empty(x.shape, x, x.dtype) for x in (q, k, v))
    delta = empty(lse.shape, q)
    first = plan.where.first_rows
    if first < plan.n:
        _queries(plan, o, lse, do, delta, dq, first, plan.n, 1, plan.reach.sinks)
    if first:
        parts = plan.parts(plan.heads, first, plan.m, "queries")
        some = empty((parts, *dq.shape[:3], first, plan.d), q)
        _queries(plan, o, lse, do, delta, some, 0, first, parts, 0)
        dq[..., :first, :] = some.sum(0).to(dq.dtype)
    _all_keys(plan, lse, do, delta, dk, dv)
    return dq, dk, dv


def _queries(plan: Plan, o, lse, do, delta, dq, skip, stop, parts, prefix) -> None:
    at = plan.at
    steps = (*o.stride()[:4], *do.stride()[:4], *dq.stride()[-5:-1], dq.stride(0) if dq.ndim == 6 else 0)
    plan.launch(
        triton_backward.queries,
        "queries",
        (at.q, at.k, at.v, o, do, lse, delta, dq, plan.rows, plan.keys),
        (*plan.strides(), *steps),
        (plan.scale * LOG2E, plan.scale),
        plan.heads,
        skip,
        stop,
        parts,
        prefix,
    )


def adjoint(plan: Plan, lse: Tensor, y: Tensor) -> Tensor:
    """Aᵀ y (B, G, m, e), summed over the heads that share keys."""
    out = empty((plan.B, plan.G, plan.m, plan.e), y, y.dtype)
    _all_keys(plan, lse, y, None, None, out)
    return out


def _all_keys(plan: Plan, lse, do, delta, dk, dv) -> None:
    first = plan.where.first_keys
    if first < plan.m:
        _keys(plan, lse, do, delta, dk, dv, first, plan.m, 1, plan.reach.heads)
    if first:
        parts = plan.parts(plan.B * plan.G, first, plan.n, "adjoint" if dk is None else "keys")
        some_v = empty((parts, *dv.shape[:2], first, plan.e), dv)
        some_k = some_v[..., :0] if dk is None else empty((parts, *dk.shape[:2], first, plan.d), dv)
        _keys(plan, lse, do, delta, None if dk is None else some_k, some_v, 0, first, parts, 0)
        dv[..., :first, :] = some_v.sum(0).to(dv.dtype)
        if dk is not None:
            dk[..., :first, :] = some_k.sum(0).to(dk.dtype)


def _keys(plan: Plan, lse, do, delta, dk, dv, skip, stop, parts, prefix) -> None:
    at, alone = plan.at, dk is None
    if alone:
        dk, delta = dv, lse  # not touched
    steps = do.stride()[:4]
    for x in (dk, dv):
        steps += (*x.stride()[-4:-1], x.stride(0) if x.ndim == 5 else 0)
    plan.launch(
        triton_backward.keys,
        "adjoint" if alone else "keys",
        (
            at.q,
            at.k,
            at.v,
            do,
            lse,
            lse if delta is None else delta,
            dv if dk is None else dk,
            dv,
            plan.rows,
            plan.keys,
        ),
        (*plan.strides(), *steps),
        (plan.scale * LOG2E, plan.scale),
        plan.B * plan.G,
        skip,
        stop,
        parts,
        prefix,
        DK=not alone,
    )


def statistics(plan: Plan) -> tuple[Tensor, ...]:
    """lse (base 2), Σ a², entropy, max a and its key, each (B, G, P, n)."""
    at, config = plan.at, plan.configs["statistics"]
    shape = (plan.B, plan.G, plan.P, plan.n)
    found = tuple(empty(shape, at.q) for _ in range(4))
    places = empty(shape, at.q, torch.int32)
    blocks = over(plan.n, config.rows)
    prefix = plan.reach.sinks
    constants = {x: plan.constants[x] for x in ("D", "SEGMENTS", "EVEN_D", "OPERAND", "PRECISION")}
    triton_rows.statistics[(blocks * plan.heads,)](
        *(at.q, at.k, *found, places, plan.rows, plan.keys),
        *(*at.q.stride()[:4], *at.k.stride()[:3], *plan.tables()),
        *(plan.n, plan.m, plan.d, blocks, plan.scale * LOG2E, plan.G, plan.P),
        **constants,
        ROWS=config.rows,
        TILE=config.tile,
        PREFIX=min(power(prefix), config.tile) if prefix else 0,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return *found, places
