"""Row statistics in plain torch, a block of whole rows at a time. Each block is used for all sums, then discarded.

softmax     t = max s,  e = exp(s − t),  Z = Σ e,  p = e / Z,  lse = t + log Z
            the sums of e are taken first and then multiplied by 1 / Z: there are fewer rows than weights
            entropy = log Z − Σ e (s − t) / Z                two terms ≥ 0: nothing cancels
sink        p over the keys alone first; then every sum is multiplied by σ = exp(lse − log(exp lse + exp sink)), and
            the entropy becomes that of σp and 1 − σ together
otherwise   p = |a| / Σ |a|,  entropy = −Σ p log p,  0 log 0 = 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, log, prod
from typing import Any
from weakref import ref

import torch

from heedful.kernels.blocked.reference import Work
from heedful.kernels.blocked.tiles import Keys, Mask, RowFunction, SoftmaxRows, Tile, pick, size_on, with_axes
from heedful.kernels.dispatch import uncompiled
from heedful.kernels.row_statistics.block import Block, largest, sums_of
from heedful.kernels.row_statistics.sums import Receiver, Request, RowSums, with_sink
from heedful.patterns import Full, Pattern
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Bool, Float, Tensor, broadcast_shapes


@uncompiled
@torch.no_grad()
def row_statistics(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    request: Request,
) -> RowSums:
    """Sums over the rows of A = W(scale · Q Kᵀ), over the tiles that the pattern allows."""
    if segments is not None:  # values at padding, even NaN, must not reach any sum
        layout = resolve(segments, q.shape[-2], k.shape[-2])
        q = q.masked_fill(layout.query_ids[..., None] < 0, 0)
        k = k.masked_fill(layout.key_ids[..., None] < 0, 0)
        if request.values is not None:
            request = replace(request, values=request.values.masked_fill(layout.key_ids[..., None] < 0, 0))
    values = k if request.values is None else request.values
    work = Work(q, k, values, rows.bias, pattern, segments, scale, request.scratch)
    softmax = isinstance(rows, SoftmaxRows)
    out = RowSums.blank(work.batch, work.n, request, work.dtype, q.device, softmax)
    request = _prepared(request, pattern, work.dtype)
    layout = resolve(segments, work.n, work.m, q.device)
    later = ("seen", "product", *(("mass", "largest") if softmax else ()))  # filled elsewhere, not by a block's sums
    around = isinstance(request.into, Tensor) and not _blank_around(request.into, pattern, segments, work.scratch)
    for tile in work.tiles():
        scores, bias = work.scores(tile), work.bias_of(tile)
        first = None if segments is not None else tile.rows.start + work.m - work.n
        block = _block(tile, request, first, len(work.batch))
        if isinstance(rows, SoftmaxRows):
            part, weights, factor = _of_softmax(work, rows, scores, tile, bias, block)
        else:
            weights = rows.weights(scores, tile, bias, rows.parameters)
            part, factor = of_weights(weights, block), weights.new_ones(weights.shape[-2], 1)
        out.put(tile.batch, tile.rows, part, later)
        if request.down is not None:  # a product takes half as long as a sum over rows
            tile.cols.add(pick(request.down, tile.batch)[..., None], (factor.mT @ weights).mT)
        if request.values is not None:
            target = pick(out.product, tile.batch)[..., tile.rows, :]
            torch.mul(work.product("product", weights, work.cols_of(2, tile)), factor, out=target)
        if isinstance(request.into, Receiver):
            _hand_over(request.into, tile, weights, factor, work.m)
        elif request.into is not None:
            _leave(request.into, tile, weights, factor, around)
    if request.into is not None:
        _blank(request.into, out.count == 0)  # tiles need not cover such queries
    if isinstance(request.into, Tensor):
        _remember(request.into, None if segments is not None else pattern, work.scratch)
    out = _normalised(out, rows) if isinstance(rows, SoftmaxRows) else out
    return replace(out, seen=_seen(out.seen, request, layout, pattern), left=request.into is not None)


def objections(q, k, rows, pattern, segments, scale, request) -> list[str]:
    """Empty: this backend takes all inputs."""
    return []


@torch.no_grad()
def by_blocks(
    rows: Callable[[slice], Float[Tensor, "*b r m"]],
    shape: tuple[int, ...],
    layout: Layout,
    pattern: Pattern | None,
    request: Request,
    dtype: torch.dtype,
    device: torch.device,
) -> RowSums:
    """The same sums for any matrix whose rows can be computed in blocks."""
    *batch, n, m = shape
    wide = torch.promote_types(dtype, torch.float32)
    out = RowSums.blank(tuple(batch), n, request, wide, device, softmax=False)
    if 0 in shape:
        return out
    step = max(1, min(n, size_on(device).scores // (prod(batch) * m)))
    axes = len(batch)
    request = _prepared(request, pattern, wide)
    query_ids, key_ids, i, j = (with_axes(x, axes, 1) for x in layout)
    targets = None if request.targets is None else with_axes(request.targets, axes, 2)
    columns = None if request.columns is None else with_axes(request.columns, axes, 2).mT
    values = None if request.values is None else request.values.to(wide)
    keys = Keys([(0, m)])
    for lo in range(0, n, step):
        part = slice(lo, min(lo + step, n))
        here, there = query_ids[..., part, None], key_ids[..., None, :]
        visible = (here == there) & (here >= 0)
        if pattern is not None and not isinstance(pattern, Full):
            visible &= pattern.allows(i[..., part, None], j[..., None, :])
        block = Block(
            i[..., part, None],
            j[..., None, :],
            keys,
            Mask(visible),
            0,
            None,
            None if targets is None else targets[..., part, :],
            columns,
            request.bands,
            request.places,
        )
        weights = rows(part).to(wide)
        out.put((), part, of_weights(weights, block), ("seen", "product"))
        if values is not None:
            out.product[..., part, :] = weights @ values
        if isinstance(request.into, Receiver):
            request.into.put((), part, 0, weights, weights.new_ones(1, 1))
        elif request.into is not None:
            request.into[..., part, :] = weights
        if request.down is not None:
            request.down.add_(weights.sum(-2))
    return replace(out, seen=_seen(out.seen, request, layout, pattern), left=request.into is not None)


def _seen(
    none: Bool[Tensor, "*b n t"], request: Request, layout: Layout, pattern: Pattern | None
) -> Bool[Tensor, "*b n t"]:
    """True where pattern and segments let a query see its target."""
    ids, key_ids, i, j = layout
    if request.targets is None or not none.numel() or not key_ids.shape[-1]:
        return none
    key = request.targets.clamp(0, key_ids.shape[-1] - 1)

    def at(x):
        batch = broadcast_shapes(x.shape[:-1], key.shape[:-2])
        found = x.expand(*batch, -1).gather(-1, key.expand(*batch, -1, -1).flatten(-2))
        return found.unflatten(-1, key.shape[-2:])

    seen = (key == request.targets) & (at(key_ids) == ids[..., None]) & (ids[..., None] >= 0)
    seen = seen if pattern is None else seen & pattern.allows(i[..., None], at(j))
    return seen.expand(none.shape)


def _prepared(request: Request, pattern: Pattern | None, dtype: torch.dtype) -> Request:
    """The request as blocks use it: bands cut to the pattern, and columns contiguous along the tokens.

    (A product with few columns is five times slower than its transpose.)
    """
    bands = request.bands
    if pattern is not None and pattern.is_causal:
        bands = tuple((least, 0 if most is None else min(most, 0)) for least, most in bands)
    columns = request.columns
    return replace(request, bands=bands, columns=None if columns is None else columns.to(dtype).mT.contiguous().mT)


def _leave(
    into: Float[Tensor, "*b n m"],
    tile: Tile,
    weights: Float[Tensor, "*b r c"],
    factor: Float[Tensor, "*#b r 1"],
    around: bool,
) -> None:
    """Write a tile's weights, times a factor for each row, into the matrix; if `around`, write zeros beside them."""
    rows = pick(into, tile.batch)[..., tile.rows, :]
    if tile.cols.interval is None:
        rows = rows.zero_() if around else rows
        rows.index_copy_(-1, tile.cols.index.to(into.device), (weights * factor).to(into.dtype))
        return
    start, stop = tile.cols.interval
    torch.mul(weights, factor, out=rows[..., start:stop])
    if around and start:
        rows[..., :start].zero_()
    if around and stop < rows.shape[-1]:
        rows[..., stop:].zero_()


def _hand_over(
    into: Receiver, tile: Tile, weights: Float[Tensor, "*b r c"], factor: Float[Tensor, "*#b r 1"], m: int
) -> None:
    first = 0
    if tile.cols.interval is None:
        whole = weights.new_zeros(*weights.shape[:-1], m)
        weights = whole.index_copy_(-1, tile.cols.index.to(weights.device), weights)
    else:
        first, _ = tile.cols.interval
    into.put(tile.batch, tile.rows, first, weights, factor)


def _blank(into: Float[Tensor, "*b n m"] | Receiver, blind: Bool[Tensor, "*b n"]) -> None:
    """Write zeros into the rows of these queries."""
    if not bool(blind.any()):
        return
    if isinstance(into, Tensor):
        into.masked_fill_(blind[..., None], 0)
        return
    for *at, row in blind.nonzero().tolist():
        into.put(tuple(at), slice(row, row + 1), 0, *torch.zeros(2, 1, 1).unbind())


def _blank_around(
    into: Float[Tensor, "*b n m"], pattern: Pattern, segments: Segments | None, scratch: dict[str, Any]
) -> bool:
    """True if `into` holds a matrix of the same pattern, written by an earlier pass and not modified since."""
    room, *known = scratch.get("left", {}).get(into.data_ptr(), (None, None))
    return segments is None and room is not None and room() is not None and known == [*_place(into), pattern]


def _remember(into: Float[Tensor, "*b n m"], pattern: Pattern | None, scratch: dict[str, Any]) -> None:
    """Record that `into` now holds a matrix of this pattern; drop the records of buffers that were freed."""
    left = {at: note for at, note in scratch.get("left", {}).items() if note[0]() is not None}
    if _writes(into) is not None:
        left[into.data_ptr()] = ref(into if into._base is None else into._base), *_place(into), pattern
    scratch["left"] = left


def _place(into: Tensor) -> tuple[Any, ...]:
    return into.shape, into.stride(), _writes(into)


def _writes(x: Tensor) -> int | None:
    """torch's count of writes to x; None for inference tensors, which have none."""
    return None if x.is_inference() else x._version


def _block(tile: Tile, request: Request, first: int | None, axes: int) -> Block:
    targets, columns = request.targets, request.columns
    if targets is not None:
        targets = pick(with_axes(targets, axes, 2), tile.batch)[..., tile.rows, :]
    if columns is not None:
        columns = tile.cols.take(pick(with_axes(columns, axes, 2), tile.batch)).mT
    rest = targets, columns, request.bands, request.places
    return Block(tile.i, tile.j, tile.cols, tile.mask, tile.clear, first, *rest)


def _of_softmax(
    work: Work, rows: SoftmaxRows, scores: Tensor, tile: Tile, bias: Tensor | None, block: Block
) -> tuple[RowSums, Tensor, Tensor]:
    """The sums of e, e itself (the next tile overwrites it), and the factors that turn e into rows of A.

    (On a CPU exp takes nearly three times as long as exp2, and a softmax twice as long.)
    """
    logits = rows.logits(scores, tile, bias, rows.parameters)
    top, place = largest(logits) if block.places else (logits.amax(-1, keepdim=True), None)
    finite = torch.finfo(logits.dtype)
    logits = logits.sub_(top.clamp(min=finite.min)).mul_(1 / log(2))  # a row of only −∞ stays −∞
    weights = torch.exp2(logits, out=work.buffer("weights", *logits.shape))
    hidden = logits[..., tile.clear :] if bias is None and rows.bias_function is None else logits
    hidden.clamp_(min=finite.min / 2)  # 0 · −∞ is NaN
    total, product = weights.sum(-1, keepdim=True), logits.mul_(weights).sum(-1)
    found = sums_of(weights, weights, total[..., 0], total, place, product, block, logits)
    factor = total.clamp(min=1).reciprocal()
    if rows.sink is not None:
        factor *= _beside(top + total.clamp(min=1).log(), rows.sink_of(tile, scores, rows.parameters))[0]
    return replace(found, lse=top[..., 0]), weights, factor


def _normalised(found: RowSums, rows: SoftmaxRows) -> RowSums:
    """The sums of A from those of e; `found` also holds t for the log-sum-exp and Σ e log₂ e for the entropy."""
    assert found.lse is not None
    total = found.total.clamp(min=1)
    lse, mass = found.lse + total.log(), (found.lse != -inf).to(total.dtype)
    entropy = total.log() - found.entropy * log(2) / total
    if rows.sink is not None:
        sink = with_axes(rows.sink, lse.ndim - 1, 0)[..., None].to(lse.dtype) / rows.temperature
        mass, taken, lse = _beside(lse, sink)
        entropy = with_sink(entropy, mass, taken)
    product = found.product  # of A already
    found = replace(found, largest=torch.ones_like(mass), product=product[..., :0]).scaled(mass / total)
    return replace(found, total=mass, mass=mass, entropy=entropy, lse=lse, product=product)


def _beside(
    lse: Float[Tensor, "*b"], sink: Float[Tensor, "*#b"]
) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """The shares of a row's mass that the keys and the sink have, and the log-sum-exp that includes the sink.

    0, 0 and −∞ for a row that sees nothing.
    """
    whole, dead = torch.logaddexp(lse, sink), lse == -inf
    kept, taken = ((x - whole).masked_fill(dead, -inf).exp() for x in (lse, sink))
    return kept, taken, whole.masked_fill(dead, -inf)


def of_weights(weights: Float[Tensor, "*b r c"], block: Block) -> RowSums:
    """The sums of a block of rows with arbitrary weights: signed, unnormalised or zero."""
    mass = weights.abs()
    total = mass.sum(-1, keepdim=True)
    proportions = mass / total.masked_fill(total == 0, 1)
    logs = proportions.clamp(min=torch.finfo(weights.dtype).tiny).log_()
    entropy = -logs.mul_(proportions).sum(-1)
    most, place = largest(mass) if block.places else (mass.amax(-1, keepdim=True), None)
    return sums_of(weights, mass, total[..., 0], most, place, entropy, block, logs)
