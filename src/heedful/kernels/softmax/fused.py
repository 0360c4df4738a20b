"""Softmax attention over windows, blocks, leading global tokens and packed segments, in Triton."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from heedful.kernels.dispatch import as_given
from heedful.kernels.softmax import launches
from heedful.kernels.softmax.launches import INTERPRETED, WIDEST, Plan
from heedful.kernels.softmax.reach import Reach, are_runs, intervals
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.compiler.disable
def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
) -> Tensor:
    """A V, with gradients in q, k and v."""
    with _on(q):
        return _Attend.apply(q, k, v, pattern, segments, scale)


@torch.compiler.disable
@torch.no_grad()
def adjoint(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """Aᵀ Y, without the gradients in q and k; `lse` from `log_sum_exp` saves a pass where there are many Y."""
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], y.shape[:-2])
    if lse is None:
        lse = log_sum_exp(q, k, rows, pattern, segments, scale)
    # Each query head has its own product: here the heads do not share keys, though they may read the same ones.
    k = k.expand(*batch, *k.shape[-2:])
    plan = _plan(q, k, k, pattern, segments, scale, y.shape[-1])
    with _on(q):
        out = launches.adjoint(plan, lse.expand(*batch, -1).contiguous(), launches.heads(y, k, k).q)
    return out.reshape(*batch, *out.shape[-2:])


@torch.compiler.disable
@torch.no_grad()
def log_sum_exp(
    q: Tensor, k: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
) -> Tensor:
    """log₂ Σ_j exp(scale · q·k_j) over the visible keys, (*batch, n); +∞ where there are none."""
    plan = _plan(q, k, k, pattern, segments, scale)
    with _on(q):
        return launches.log_sum_exp(plan).reshape(*plan.at.batch, -1)


class RowStatistics(NamedTuple):
    """Of every row of A, (*batch, n); ∞, 0, 0, 0 and −1 for a query that sees nothing."""

    lse: Tensor  # log₂ Σ exp
    square: Tensor  # Σ a²
    entropy: Tensor  # −Σ a log a, in nats
    largest: Tensor  # max a
    place: Tensor  # and its key


@torch.compiler.disable
@torch.no_grad()
def row_statistics(
    q: Tensor, k: Tensor, rows: SoftmaxRows, pattern: Pattern, segments: Segments | None, scale: float
) -> RowStatistics:
    """What one pass over q and k tells about the rows."""
    plan = _plan(q, k, k, pattern, segments, scale)
    with _on(q):
        return RowStatistics(*(x.reshape(*plan.at.batch, -1) for x in launches.statistics(plan)))


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why the Triton kernels can't take these inputs."""
    why = _about_scores(q, k, rows, pattern, scale)
    if segments is not None and not why:
        why += _about_segments(q, k, v, segments)
    if v.shape[-1] > WIDEST and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        why.append(f"gradients with values wider than {WIDEST} are not computed here")
    if 0 in v.shape:
        why.append("there is nothing to launch for an empty tensor")
    return why


def _about_scores(q, k, rows: SoftmaxRows, pattern, scale) -> list[str]:
    why = []
    if not (q.is_cuda or INTERPRETED):
        why.append(f"Triton kernels run on a GPU, the inputs are on {q.device}")
    if q.dtype not in DTYPES:
        why.append(f"it takes bfloat16, float16 and float32, not {q.dtype}")
    if q.shape[-1] > WIDEST:
        why.append(f"keys wider than {WIDEST} do not fit, got {q.shape[-1]}")
    if 0 in (*q.shape, *k.shape):
        why.append("there is nothing to launch for an empty tensor")
    if Reach.of(pattern) is None:
        why.append(
            "the pattern is more than a window, blocks, leading global tokens or sinks, alone or cut off to the right"
        )
    if not scale > 0:
        why.append(f"the largest score is found before scaling, which takes a positive scale, got {scale}")
    for name in ("bias", "bias_function", "softcap", "sink"):
        if getattr(rows, name) is not None:
            why.append(f"it has no {name}")
    return why


def _about_segments(q, k, v, segments: Segments) -> list[str]:
    batch = tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))
    shared = launches.shared_axes(batch, k, v)
    for part in segments if isinstance(segments, tuple) else (segments,):
        if shared and any(size > 1 for size in part.shape[:-1][-shared:]):
            return ["segments that differ among heads that share keys are not taken"]
    if not are_runs(segments):
        return ["a segment that is interrupted and goes on later is not an interval"]
    return []


def _plan(q, k, v, pattern, segments, scale, e=None) -> Plan:
    reach = Reach.of(pattern)
    assert reach is not None, f"{pattern}: see objections"
    where = intervals(reach, q.shape[-2], k.shape[-2], segments, q.device)
    return Plan(launches.heads(q, k, v), where, reach, scale, e)


def _on(x: Tensor):
    """Triton launches on the current device: make it that of x where it is not."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, pattern, segments, scale):
        plan = _plan(q, k, v, pattern, segments, scale)
        o, lse = launches.attend(plan)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = pattern, segments, scale
        return o.reshape(*plan.at.batch, *o.shape[-2:])

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        plan = _plan(q, k, v, *ctx.rest)
        at = plan.at
        do = do.expand(*at.batch, *do.shape[-2:]).to(o.dtype)
        do = do if do.stride(-1) == 1 else do.contiguous()
        with as_given(q), _on(q):
            grads = launches.gradients(plan, o, lse, do.reshape(o.shape))
        tail = (1,) * at.shared
        lead = at.batch[: len(at.batch) - at.shared]
        dq = grads[0].reshape(*at.batch, *q.shape[-2:])
        dk, dv = (x.reshape(*lead, *tail, *x.shape[-2:]) for x in grads[1:])
        return *(g.sum_to_size(x.shape) for g, x in zip((dq, dk, dv), (q, k, v), strict=True)), None, None, None
