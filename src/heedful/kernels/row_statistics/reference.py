"""Row statistics in plain torch: whole rows, a block at a time, each block used for all sums and then forgotten.

softmax     t = max s,  p = exp(s − t) / Σ exp(s − t),  lse = t − log max p
            entropy = −log max p − Σ p (s − t)               two terms ≥ 0: nothing cancels
sink        p over the keys alone, then every sum times exp(lse − log(exp lse + exp sink))
otherwise   p = |a| / Σ |a|,  entropy = −Σ p log p,  0 log 0 = 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import torch
import torch.nn.functional as F

from heedful.kernels.blocked import tiles as scheduler
from heedful.kernels.blocked.reference import RowFunction, Work, put_tile
from heedful.kernels.blocked.tiles import Tile, pick, with_axes
from heedful.kernels.row_statistics.sums import Band, Request, RowSums
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.patterns import Full, Pattern
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes


@torch.compiler.disable
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
    if segments is not None:  # what stands in padding, NaN too, must reach no sum
        layout = resolve(segments, q.shape[-2], k.shape[-2])
        q = q.masked_fill(layout.query_ids[..., None] < 0, 0)
        k = k.masked_fill(layout.key_ids[..., None] < 0, 0)
    work = Work(q, k, k, rows.bias, pattern, segments, scale)
    softmax = isinstance(rows, SoftmaxRows)
    out = RowSums.blank(work.batch, work.n, request, work.dtype, q.device, softmax)
    for tile in work.tiles():
        scores, bias = work.scores(tile), work.bias_of(tile)
        block = _block(tile, request, len(work.batch), work.dtype)
        if isinstance(rows, SoftmaxRows):
            part, weights = _of_softmax(work, rows, scores, tile, bias, block)
        else:
            weights = rows.weights(scores, tile, bias, rows.parameters)
            part = of_weights(weights, block)
        out.put(tile.batch, tile.rows, part)
        if request.into is not None:
            put_tile(request.into, tile, weights)
    return out


def objections(q, k, rows, pattern, segments, scale, request) -> list[str]:
    """None: this is the path that takes everything."""
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
    """The same for a matrix of any kind whose rows can be had in blocks."""
    *batch, n, m = shape
    wide = torch.promote_types(dtype, torch.float32)
    out = RowSums.blank(tuple(batch), n, request, wide, device, softmax=False)
    if 0 in shape:
        return out
    step = max(1, min(n, scheduler.BUDGET // (prod(batch) * m)))
    axes = len(batch)
    query_ids, key_ids, i, j = (with_axes(x, axes, 1) for x in layout)
    for lo in range(0, n, step):
        part = slice(lo, min(lo + step, n))
        here, there = query_ids[..., part, None], key_ids[..., None, :]
        visible = (here == there) & (here >= 0)
        if pattern is not None and not isinstance(pattern, Full):
            visible &= pattern.allows(i[..., part, None], j[..., None, :])
        block = Block(
            i[..., part, None],
            j[..., None, :],
            torch.arange(m, device=device),
            visible,
            0,
            None if request.targets is None else with_axes(request.targets, axes, 2)[..., part, :],
            None if request.columns is None else with_axes(request.columns, axes, 2).to(wide),
            request.bands,
        )
        weights = rows(part).to(wide)
        out.put((), part, of_weights(weights, block))
        if request.into is not None:
            request.into[..., part, :] = weights
    return out


@dataclass(frozen=True)
class Block:
    """Where a block of whole rows stands, and what is asked of it.

    Every query sees the first `clear` keys; `visible` is about those after them, and None where all are seen.
    """

    i: Int[Tensor, "*#s r 1"]
    j: Int[Tensor, "*#s 1 c"] | Int[Tensor, " c"]
    keys: Int[Tensor, " c"]
    visible: Bool[Tensor, "*#s r behind"] | None
    clear: int
    targets: Int[Tensor, "*#b r t"] | None
    columns: Float[Tensor, "*#b c x"] | None
    bands: tuple[Band, ...]

    def count(self) -> Int[Tensor, "*s r"]:
        """How many keys each query sees."""
        if self.visible is None:
            return torch.full(self.i.shape[:-1], len(self.keys), device=self.i.device)
        return self.visible.sum(-1) + self.clear

    def seen(self, part: slice) -> Int[Tensor, "*s r"]:
        """How many of the keys in `part` each query sees."""
        start, stop, _ = part.indices(len(self.keys))
        if self.visible is None or stop <= self.clear:
            return torch.full(self.i.shape[:-1], stop - start, device=self.i.device)
        behind = slice(max(start - self.clear, 0), stop - self.clear)
        return self.visible[..., behind].sum(-1) + max(self.clear - start, 0)

    def pieces(self, band: Band) -> Iterator[tuple[slice, Bool[Tensor, "*s r c"] | None]]:
        """The keys of a band in a few slices, each with who is inside; None: all are.

        Where positions ascend, as they do without segments, only the band's edges need a mask, and a narrow band costs
        what it holds.
        """
        least, most = band
        if not self._ascends:
            yield slice(None), self._inside(slice(None), band)
            return
        j, (first, last) = self.j.flatten(), (int(x) for x in self.i.aminmax())
        bounds = [
            0 if least is None else _before(j, first + least),  # no query has an earlier key
            0 if least is None else _before(j, last + least),  # from here on all queries are past the lower end
            len(j) if most is None else _before(j, first + most + 1),
            len(j) if most is None else _before(j, last + most + 1),
        ]
        start, stop = bounds[0], bounds[3]
        inner, outer = bounds[1:3] if bounds[1] < bounds[2] else (stop, stop)
        for part, inside in ((slice(start, inner), False), (slice(inner, outer), True), (slice(outer, stop), False)):
            if part.start < part.stop:
                yield part, None if inside else self._inside(part, band)

    @cached_property
    def _ascends(self) -> bool:
        plain = self.j.numel() == len(self.keys) and self.i.numel() == self.i.shape[-2]
        return plain and self.i.numel() > 0 and bool((self.j.flatten().diff() > 0).all())

    def _inside(self, part: slice, band: Band) -> Bool[Tensor, "*s r c"]:
        least, most = band
        offset = self.j[..., part] - self.i
        inside = torch.ones_like(offset, dtype=torch.bool) if least is None else offset >= least
        return inside if most is None else inside & (offset <= most)

    def seen_inside(self, part: slice, inside: Bool[Tensor, "*s r c"]) -> Int[Tensor, "*s r"]:
        if self.visible is None:
            return inside.expand(*self.i.shape[:-1], -1).sum(-1)
        start, stop, _ = part.indices(len(self.keys))
        clear = min(max(self.clear - start, 0), stop - start)
        behind = self.visible[..., max(start - self.clear, 0) : max(stop - self.clear, 0)]
        return (inside & F.pad(behind, (clear, 0), value=True)).sum(-1)


def _before(j: Int[Tensor, " c"], position: int) -> int:
    """How many keys stand before a position."""
    return int(torch.searchsorted(j, position))


def _block(tile: Tile, request: Request, axes: int, dtype: torch.dtype) -> Block:
    keys = tile.cols.index.to(tile.i.device)
    targets, columns = request.targets, request.columns
    if targets is not None:
        targets = pick(with_axes(targets, axes, 2), tile.batch)[..., tile.rows, :]
    if columns is not None:
        columns = tile.cols.take(pick(with_axes(columns, axes, 2), tile.batch)).to(dtype)
    visible = None if tile.mask is None else tile.mask.visible
    return Block(tile.i, tile.j, keys, visible, tile.clear, targets, columns, request.bands)


def _of_softmax(
    work: Work, rows: SoftmaxRows, scores: Tensor, tile: Tile, bias: Tensor | None, block: Block
) -> tuple[RowSums, Tensor]:
    """The sums of a tile, and its weights, which the next tile overwrites."""
    logits = rows.logits(scores, tile, bias, rows.parameters)
    top, place = logits.max(-1, keepdim=True)
    dead = top == -inf
    logits = logits.sub_(top.masked_fill(dead, 0))
    weights = torch.softmax(logits, -1, out=work.buffer("weights", *logits.shape))
    if dead.any():
        weights.masked_fill_(dead, 0)
    largest = weights.gather(-1, place)
    log_largest = largest.masked_fill(dead, 1).log()
    logits.clamp_(min=torch.finfo(logits.dtype).min / 2)  # 0 · −∞ is no number
    entropy = -log_largest - logits.mul_(weights).sum(-1, keepdim=True)
    lse = top - log_largest
    found = _sums(weights, weights, weights.sum(-1), largest, place, entropy[..., 0], block)
    if rows.sink is not None:
        whole = torch.logaddexp(lse, rows.sink_of(tile, scores, rows.parameters))
        share = (lse - whole).masked_fill(dead, -inf).exp()
        found, lse, weights = found.scaled(share[..., 0]), whole, weights.mul_(share)
    return replace(found, lse=lse.masked_fill(dead, -inf)[..., 0]), weights


def of_weights(weights: Float[Tensor, "*b r c"], block: Block) -> RowSums:
    """The sums of a block of rows of any weights: signed, unnormalised, zero."""
    mass = weights.abs()
    total = mass.sum(-1, keepdim=True)
    proportions = mass / total.masked_fill(total == 0, 1)
    logs = proportions.clamp(min=torch.finfo(weights.dtype).tiny).log_()
    entropy = -logs.mul_(proportions).sum(-1)
    largest, place = mass.max(-1, keepdim=True)
    return _sums(weights, mass, total[..., 0], largest, place, entropy, block)


def _sums(
    weights: Float[Tensor, "*b r c"],
    absolute: Float[Tensor, "*b r c"],
    mass: Float[Tensor, "*b r"],
    largest: Float[Tensor, "*b r 1"],
    place: Int[Tensor, "*b r 1"],
    entropy: Float[Tensor, "*b r"],
    block: Block,
) -> RowSums:
    signed = absolute is not weights
    bands = [_band_sums(weights, signed, block, band) for band in block.bands]
    none = weights.new_zeros(*mass.shape, 0)
    width = 0 if block.columns is None else block.columns.shape[-1]
    return RowSums(
        total=mass if absolute is weights else weights.sum(-1),
        mass=mass,
        square=torch.linalg.vector_norm(weights, dim=-1).square(),
        entropy=entropy,
        largest=largest[..., 0],
        where=torch.where(largest > 0, block.keys[place], -1)[..., 0],
        count=block.count().expand(mass.shape),
        at=none if block.targets is None else _gather(weights, block.targets, block.keys),
        band_mass=torch.stack([x[0] for x in bands], -1) if bands else none,
        band_square=torch.stack([x[1] for x in bands], -1) if bands else none,
        band_count=torch.stack([x[2] for x in bands], -1) if bands else none.long(),
        band_dot=torch.stack([x[3] for x in bands], -2) if bands else none[..., None, :].expand(*mass.shape, 0, width),
    )


def _band_sums(
    weights: Float[Tensor, "*b r c"], signed: bool, block: Block, band: Band
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ|a|, Σa², the number of visible keys and Σ a X inside one band."""
    mass, square = weights.new_zeros(2, *weights.shape[:-1]).unbind()
    count = torch.zeros(block.i.shape[:-1], dtype=torch.long, device=weights.device)
    width = 0 if block.columns is None else block.columns.shape[-1]
    dot = weights.new_zeros(*weights.shape[:-1], width)
    for part, inside in block.pieces(band):
        piece = weights[..., part]
        if inside is None:
            count = count + block.seen(part)
        else:
            piece = piece * inside.to(piece.dtype)
            count = count + block.seen_inside(part, inside)
        mass += torch.linalg.vector_norm(piece, 1, -1) if signed else piece.sum(-1)
        square += torch.linalg.vector_norm(piece, dim=-1).square()
        if block.columns is not None:
            dot += piece @ block.columns[..., part, :]
    return mass, square, count.expand(mass.shape), dot


def _gather(
    weights: Float[Tensor, "*b r c"], targets: Int[Tensor, "*#b r t"], keys: Int[Tensor, " c"]
) -> Float[Tensor, "*b r t"]:
    """The weights at the target keys, 0 for a target that is not among these keys."""
    place = torch.searchsorted(keys, targets.contiguous()).clamp(max=len(keys) - 1)
    found = keys[place] == targets
    batch = broadcast_shapes(weights.shape[:-2], targets.shape[:-2])
    place = place.expand(*batch, *targets.shape[-2:])
    return weights.gather(-1, place) * found
