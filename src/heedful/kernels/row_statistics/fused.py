"""Row statistics of softmax attention by the Triton kernels of kernels/softmax.

rows        one loop over the keys computes lse, Σ a², the entropy, max a and its key
count       the lengths of a query's two intervals
targets     a = exp(s − lse), with s from the one target key
bands       the same loop over the intervals cut to the band computes the lse of the band alone, so that
            Σ a = exp(lse_band − lse) = share;  Σ a X = share · (the band's own A X)
sink        computed without the sink first; then every sum is multiplied by σ = exp(lse − log(exp lse + exp sink)),
            and the entropy becomes that of σp and 1 − σ together
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, log

import torch

from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import on_device, uncompiled
from heedful.kernels.row_statistics.sums import Request, RowSums, with_sink
from heedful.kernels.softmax import fused, launches
from heedful.kernels.softmax.reach import Intervals, Reach, inside, intervals
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Tensor, broadcast_shapes

GATHERED = 1 << 26  # elements of keys gathered at a time for targets


@uncompiled
@torch.no_grad()
def row_statistics(
    q: Tensor,
    k: Tensor,
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    request: Request,
) -> RowSums:
    """Sums over the rows of A; the same call as `reference.row_statistics`."""
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], *_others(request))
    n, m = q.shape[-2], k.shape[-2]
    if broadcast_shapes(q.shape[:-2], k.shape[:-2]) != batch:
        q = q.expand(*batch, *q.shape[-2:])
    reach = Reach.of(pattern)
    assert reach is not None, f"{pattern}: see objections"
    where = intervals(reach, n, m, segments, q.device)
    with on_device(q):
        level, square, entropy, largest, place = _walk(q, k, where, scale, rows.softcap, batch)
        some = level < inf
        mass = some.float()
        if request.targets is None:
            at, seen = level.new_empty(*batch, n, 0), some.new_empty(*batch, n, 0)
        else:
            at, seen = _at(q, k, where, scale, rows.softcap, level, request.targets)
        bands, width = len(request.bands), 0 if request.columns is None else request.columns.shape[-1]
        out = RowSums(
            total=mass,
            mass=mass,
            square=square,
            entropy=entropy,
            largest=largest,
            where=place.long(),
            count=where.counts.expand(*batch, n).clone(),
            at=at,
            seen=seen,
            band_mass=level.new_empty(*batch, n, bands),
            band_dot=level.new_empty(*batch, n, bands, width),
            product=level.new_empty(*batch, n, 0),
            lse=torch.where(some, level * log(2), -inf),
        )
        for index, band in enumerate(request.bands):
            _fill_band(out, index, q, k, inside(where, n, m, *band), scale, rows.softcap, level, request.columns)
    return out if rows.sink is None else _with_sink(out, rows.sink / rows.temperature)


def objections(q, k, rows, pattern, segments, scale, request: Request) -> list[str]:
    """Why the Triton kernels can't take these inputs."""
    if not isinstance(rows, SoftmaxRows):
        return ["only a softmax has its row statistics fused"]
    why = fused.about_scores(q, k, rows, scale) or fused.about_intervals(q, k, k, pattern, segments)
    if request.values is not None:
        why.append("it does not compute the layer's output in the same pass: the layer's own kernel takes as long")
    if request.bands and isinstance(segments, tuple):
        why.append("bands under separate segments of queries and keys are not one interval of offsets")
    return why


def _others(request: Request) -> list[torch.Size]:
    """The batch shapes of the tensors in the request."""
    return [x.shape[:-2] for x in (request.targets, request.columns) if x is not None]


def _walk(q, k, where: Intervals, scale: float, cap: float | None, batch) -> list[Tensor]:
    found = launches.statistics(launches.job(q, k, k, where, scale, cap))
    return [x.reshape(*batch, -1) for x in found]


def _at(q, k, where: Intervals, scale: float, cap: float | None, level: Tensor, targets: Tensor):
    """The weights at the targets (0 where a query does not see its target), and whether it sees it."""
    batch, n = level.shape[:-1], level.shape[-1]
    targets = targets.expand(*batch, *targets.shape[-2:])
    lo, hi, start, stop = (x[..., None] for x in where.bounds)
    seen = (targets >= lo) & (targets < hi)
    if not where.reach.is_plain:
        seen |= (targets >= start) & (targets < stop)
    places, parts = targets.clamp(min=0), []
    q, k = (x.expand(*batch, *x.shape[-2:]) for x in (q, k))
    step = max(1, GATHERED // max(1, targets[..., :1, :].numel() * k.shape[-1]))
    factor = launches.LOG2E * (scale if cap is None else 1)
    for first in range(0, n, step):
        part = slice(first, first + step)
        chosen = places[..., part, :].flatten(-2)[..., None].expand(*batch, -1, k.shape[-1])
        keys = k.gather(-2, chosen).unflatten(-2, places[..., part, :].shape[-2:]).float()
        scores = (keys * q[..., part, None, :].float()).sum(-1)
        if cap is not None:
            scores = cap * torch.tanh(scores * (scale / cap))
        parts.append(torch.exp2(scores * factor - level[..., part, None]))
    weights = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    return torch.where(seen, weights, 0), seen


def _fill_band(out: RowSums, index: int, q, k, where: Intervals, scale, cap, level: Tensor, columns) -> None:
    batch = level.shape[:-1]
    within = _walk(q, k, where, scale, cap, batch)[0]
    share = torch.exp2(within - level).masked_fill_(within == inf, 0)
    out.band_mass[..., index] = share
    if columns is not None:
        # The columns may need all bits of float32; weights rounded to bfloat16 would lose them.
        job = launches.job(q.float(), k.float(), columns.float(), where, scale, cap)
        dot = job.setup.as_given(launches.attend(job)[0], columns.shape[-1])
        out.band_dot[..., index, :] = dot * share[..., None]


def _with_sink(out: RowSums, sink: Tensor) -> RowSums:
    assert out.lse is not None
    sink = sink.float()[..., None]
    whole, seen = torch.logaddexp(out.lse, sink), out.lse > -inf
    kept, taken = (out.lse - whole).exp(), (sink - whole).exp()
    entropy = with_sink(out.entropy, kept, taken)
    return replace(out.scaled(kept), entropy=entropy, lse=whole.masked_fill(~seen, -inf))
