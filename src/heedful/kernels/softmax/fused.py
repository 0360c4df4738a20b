"""Softmax attention over patterns and packed segments in Triton: two intervals per query, or lists of keys."""

from __future__ import annotations

from math import inf, log, prod
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import as_given, on_device, uncompiled
from heedful.kernels.parallel_compile import compile_both_passes
from heedful.kernels.softmax import launches
from heedful.kernels.softmax.launches import INTERPRETED, LOG2E, WIDEST, Job
from heedful.kernels.softmax.lists import MOST_PAIRS, Lists, lists
from heedful.kernels.softmax.reach import Intervals, Reach, are_runs, intervals
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Tensor, broadcast_shapes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = SoftmaxRows()


@uncompiled
def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
) -> Tensor:
    """A V, with gradients in q, k, v and the sink."""
    with on_device(q):
        return _Attend.apply(q, k, v, rows.sink, rows, pattern, segments, scale)


@uncompiled
@torch.no_grad()
def adjoint(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    *,
    memory: dict[str, Tensor] | None = None,
) -> Tensor:
    """Aᵀ Y, without gradients in q and k. `memory` caches the rows' log-sum-exps, which are the same for every Y."""
    memory = {} if memory is None else memory
    if "lse" not in memory:
        memory["lse"] = log_sum_exp(q, k, rows, pattern, segments, scale)
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], y.shape[:-2])
    # Each query head has its own product: here heads do not share keys, though they may read the same ones.
    k, y = (x.expand(*batch, *x.shape[-2:]) for x in (k, y))
    with on_device(q):
        job = _job(q, k, y, rows, pattern, segments, scale)
        lse = memory["lse"].expand(*batch, -1).contiguous()
        out = launches.adjoint(job, lse, launches.queries_like(job, y))
    return out.reshape(*batch, *out.shape[-2:])[..., : y.shape[-1]]


@uncompiled
@torch.no_grad()
def log_sum_exp(
    q: Tensor, k: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
) -> Tensor:
    """log₂ Σ_j exp(s_j) over the visible keys and the sink, (*batch, n); +∞ where nothing is visible."""
    with on_device(q):
        k = _apart_like(segments, k)
        job = _job(q, k, k, rows, pattern, segments, scale)
        return launches.log_sum_exp(job).reshape(*job.setup.batch, -1)


@uncompiled
@torch.no_grad()
def forward_with_lse(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """A V and the natural log Σ exp of every row, (*batch, n) in float32; −∞ for a row that sees nothing.

    For attention whose keys are split among several calls. The inputs may have any strides if the last is 1; nothing
    is copied if the others are multiples of 16. The output has the memory order of q.
    """
    with on_device(q):
        job = _job(q, k, v, PLAIN, pattern, segments, scale)
        o, lse = launches.attend(job)
    natural = lse.masked_fill_(lse == inf, -inf).mul_(log(2))
    return job.setup.as_given(o, v.shape[-1]), natural.reshape(*job.setup.batch, -1)


@uncompiled
@torch.no_grad()
def backward_from(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    pattern: Pattern,
    scale: float,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv through the keys seen here; o and its natural log-sum-exp are those of the whole rows.

    If the keys of a row are split among several calls, p = exp(s − lse) and δ = do·o are right in each call. Each call
    computes dk and dv of its keys, and the parts of dq add up. The gradients have the memory order of q, k and v.
    """
    with on_device(q):
        job = _job(q, k, v, PLAIN, pattern, segments, scale)
        level = lse.float().mul(LOG2E).masked_fill_(lse == -inf, inf).expand(*job.setup.batch, -1).contiguous()
        o, do = (launches.queries_like(job, x.to(q.dtype)) for x in (o, do))
        grads = launches.gradients(job, o, level, do)
    return _shaped(job, grads, q, k, v)


class RowStatistics(NamedTuple):
    """Statistics of every row of A, (*batch, n); ∞, 0, 0, 0 and −1 for a query that sees nothing."""

    lse: Tensor  # log₂ Σ exp
    square: Tensor  # Σ a²
    entropy: Tensor  # −Σ a log a, in nats
    largest: Tensor  # max a
    place: Tensor  # the key of the largest weight


@uncompiled
@torch.no_grad()
def row_statistics(
    q: Tensor, k: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
) -> RowStatistics:
    """Row statistics from one pass over q and k; the sink is left out."""
    with on_device(q):
        k = _apart_like(segments, k)
        job = _job(q, k, k, SoftmaxRows(softcap=rows.softcap), pattern, segments, scale)
        return RowStatistics(*(x.reshape(*job.setup.batch, -1) for x in launches.statistics(job)))


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale, *, memory=None) -> list[str]:
    """Why the Triton kernels can't take these inputs."""
    why = about_scores(q, k, rows, scale)
    if segments is not None and not why:
        why += _about_shared_heads(q, k, v, segments)
    if not why and not _are_intervals(pattern, segments):
        why += _about_lists(q, k, pattern, segments)
    if v.shape[-1] > WIDEST and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        why.append(f"gradients with values wider than {WIDEST} are not computed here")
    if 0 in v.shape:
        why.append("there is nothing to launch for an empty tensor")
    if rows.sink is not None and not why:
        why += _about_sink(q, k, v, rows.sink)
    return why


def about_scores(q, k, rows: SoftmaxRows, scale) -> list[str]:
    why = []
    if not (q.is_cuda or INTERPRETED):
        why.append(f"Triton kernels run on a GPU, the inputs are on {q.device}")
    if q.dtype not in DTYPES:
        why.append(f"it takes bfloat16, float16 and float32, not {q.dtype}")
    if q.shape[-1] > WIDEST:
        why.append(f"keys wider than {WIDEST} do not fit, got {q.shape[-1]}")
    if 0 in q.shape or 0 in k.shape:
        why.append("there is nothing to launch for an empty tensor")
    if not scale > 0:
        why.append(f"the largest score is found before scaling, which takes a positive scale, got {scale}")
    if rows.bias is not None:
        why.append("it has no bias")
    if rows.bias_function is not None:
        why.append("it has no bias_function")
    return why


def about_intervals(q, k, v, pattern: Pattern, segments: Segments | None) -> list[str]:
    """Why the pattern is not two intervals per query; for kernels that take nothing else."""
    if Reach.of(pattern) is None:
        return [
            "the pattern is more than a window, blocks, leading global tokens or sinks, alone or cut off to the right"
        ]
    if segments is None:
        return []
    if not are_runs(segments):
        return ["a segment that is interrupted and goes on later is not an interval"]
    return _about_shared_heads(q, k, v, segments)


def _about_shared_heads(q, k, v, segments: Segments) -> list[str]:
    batch = tuple(broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    shared = launches.shared_axes(batch, k, v)
    for part in segments if isinstance(segments, tuple) else (segments,):
        if shared and any(size > 1 for size in part.shape[:-1][-shared:]):
            return ["segments that differ among heads that share keys are not taken"]
    return []


def _about_lists(q, k, pattern: Pattern, segments: Segments | None) -> list[str]:
    try:
        hash(pattern)
    except TypeError:
        return ["lists are kept by pattern, and this one has no hash, as a frozen dataclass would have"]
    parts = () if segments is None else segments if isinstance(segments, tuple) else (segments,)
    sequences = prod(broadcast_shapes((), *(x.shape[:-1] for x in parts)))
    pairs = sequences * q.shape[-2] * k.shape[-2]
    if pairs > MOST_PAIRS:
        return [f"to list who sees whom it would look at {pairs} pairs of tokens, more than {MOST_PAIRS}"]
    return []


def _about_sink(q, k, v, sink: Tensor) -> list[str]:
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if broadcast_shapes(batch, sink.shape) != batch:
        return [f"the sink has more heads, {tuple(sink.shape)}, than the inputs, {tuple(batch)}"]
    return []


def _job(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> Job:
    where = _where(q, k, v, pattern, segments)
    sink = None if rows.sink is None else rows.sink / rows.temperature
    return launches.job(q, k, v, where, scale, rows.softcap, sink)


def _apart_like(segments: Segments | None, k: Tensor) -> Tensor:
    """k expanded to the batch axes of the segments: along those axes heads do not share keys."""
    parts = () if segments is None else segments if isinstance(segments, tuple) else (segments,)
    return k.expand(*broadcast_shapes(k.shape[:-2], *(x.shape[:-1] for x in parts)), *k.shape[-2:])


def _are_intervals(pattern: Pattern, segments: Segments | None) -> bool:
    return Reach.of(pattern) is not None and (segments is None or are_runs(segments))


def _where(q, k, v, pattern: Pattern, segments: Segments | None) -> Intervals | Lists:
    """The visible pairs: as two intervals per query if the pattern allows, otherwise as lists."""
    n, m = q.shape[-2], k.shape[-2]
    reach = Reach.of(pattern)
    if reach is not None and _are_intervals(pattern, segments):
        return intervals(reach, n, m, segments, q.device)
    configs = launches.LISTED[launches.kind_of(q, v)]
    rows, tile = configs["attend"].rows, max(config.tile for config in configs.values())
    return lists(pattern, n, m, segments, q.device, rows, tile)


def _shaped(job: Job, grads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with the axes and widths of the inputs."""
    setup = job.setup
    keys = *setup.lead, *(1,) * setup.shared
    batches = setup.batch, keys, keys
    dq, dk, dv = (_sized(x, batch, y) for x, batch, y in zip(grads[:3], batches, (q, k, v), strict=True))
    return dq, dk, dv


def _sized(grad: Tensor, batch: tuple[int, ...], x: Tensor) -> Tensor:
    grad = grad.reshape(*batch, *grad.shape[-2:])
    if grad.shape == x.shape:
        return grad
    return grad[..., : x.shape[-1]].sum_to_size(x.shape)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, rows, pattern, segments, scale):
        job = _job(q, k, v, rows, pattern, segments, scale)
        compile_both_passes(_Attend, ctx, job.setup.ready, q, k, v, sink, rows, pattern, segments, scale)
        o, lse = launches.attend(job)
        ctx.save_for_backward(q, k, v, sink, o, lse)
        ctx.rest = job.setup, job.tables, job.sink, rows.temperature
        return job.setup.as_given(o, v.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sink, o, lse = ctx.saved_tensors
        setup, tables, level, temperature = ctx.rest
        x, y, z = launches.heads(q, k, v)[:3] if setup.copies else (q, k, v)
        job = Job(setup, x, y, z, tables, level)
        with as_given(q), on_device(q):
            do = launches.queries_like(job, do.to(o.dtype))
            grads = launches.gradients(job, o, lse, do)
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            # the sink's weight times the gradient of its score, with a value of 0: p (0 − δ)
            share = torch.exp2(level.reshape(lse.shape[:3])[..., None] - lse) * grads[3]
            dsink = -share.sum(-1).reshape(setup.batch).sum_to_size(sink.shape).to(sink.dtype) / temperature
        return *_shaped(job, grads, q, k, v), dsink, None, None, None, None
