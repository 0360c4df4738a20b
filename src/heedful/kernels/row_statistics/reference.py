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

from heedful.kernels.blocked.reference import RowFunction, Work, put_tile
from heedful.kernels.blocked.tiles import Tile, pick, size_on, with_axes
from heedful.kernels.row_statistics.sums import Band, Request, RowSums
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.kernels.uncompiled import uncompiled
from heedful.patterns import Full, Pattern
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes

CHUNK = 64  # numbers of a row whose largest is found together


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
    if segments is not None:  # what stands in padding, NaN too, must reach no sum
        layout = resolve(segments, q.shape[-2], k.shape[-2])
        q = q.masked_fill(layout.query_ids[..., None] < 0, 0)
        k = k.masked_fill(layout.key_ids[..., None] < 0, 0)
    work = Work(q, k, k, rows.bias, pattern, segments, scale, request.scratch)
    softmax = isinstance(rows, SoftmaxRows)
    out = RowSums.blank(work.batch, work.n, request, work.dtype, q.device, softmax)
    request = _prepared(request, pattern, work.dtype)
    for tile in work.tiles():
        scores, bias = work.scores(tile), work.bias_of(tile)
        block = _block(tile, request, len(work.batch))
        if isinstance(rows, SoftmaxRows):
            part, weights = _of_softmax(work, rows, scores, tile, bias, block)
        else:
            weights = rows.weights(scores, tile, bias, rows.parameters)
            part = of_weights(weights, block)
        out.put(tile.batch, tile.rows, part)
        if request.into is not None:
            _leave(request.into, tile, weights)
        if request.down is not None:
            tile.cols.add(pick(request.down, tile.batch)[..., None], weights.sum(-2)[..., None])
    if request.into is not None and bool((out.count == 0).any()):  # such queries may be in no tile
        request.into.masked_fill_((out.count == 0)[..., None], 0)
    return replace(out, left=request.into is not None)


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
    step = max(1, min(n, size_on(device).scores // (prod(batch) * m)))
    axes = len(batch)
    request = _prepared(request, pattern, wide)
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
            None if request.columns is None else with_axes(request.columns, axes, 2).mT,
            request.bands,
            request.places,
        )
        weights = rows(part).to(wide)
        out.put((), part, of_weights(weights, block))
        if request.into is not None:
            request.into[..., part, :] = weights
        if request.down is not None:
            request.down.add_(weights.sum(-2))
    return replace(out, left=request.into is not None)


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
    columns: Float[Tensor, "*#b x c"] | None
    bands: tuple[Band, ...]
    places: bool

    def count(self) -> Int[Tensor, "*s r"]:
        """How many keys each query sees."""
        if self.visible is None:
            return torch.full(self.i.shape[:-1], len(self.keys), device=self.i.device)
        return self.visible.sum(-1) + self.clear

    def sees(self, place: Int[Tensor, "*#b r t"]) -> Bool[Tensor, "*b r t"]:
        """Whether each query sees the keys at these places among those of the block."""
        if self.visible is None or not self.visible.shape[-1]:
            return torch.ones_like(place, dtype=torch.bool)
        batch = broadcast_shapes(self.visible.shape[:-2], place.shape[:-2])
        place = place.expand(*batch, *place.shape[-2:])
        behind = self.visible.expand(*batch, *self.visible.shape[-2:]).gather(-1, (place - self.clear).clamp(min=0))
        return behind | (place < self.clear)

    def pieces(self, band: Band) -> Iterator[tuple[slice, Bool[Tensor, "*s r c"] | None]]:
        """The keys of a band in a few slices, each with who is inside; None: all are.

        Where positions ascend, as they do without segments, only the band's edges need a mask, and a narrow band costs
        what it holds.
        """
        least, most = band
        if least is not None and most is not None and least > most:
            return
        if self._span is None:
            yield slice(None), self._inside(slice(None), band)
            return
        j, (first, last) = self.j.flatten(), self._span
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
    def _span(self) -> tuple[int, int] | None:
        """The first and the last position of the queries; None where positions do not ascend."""
        plain = self.j.numel() == len(self.keys) and self.i.numel() == self.i.shape[-2]
        if not plain or not self.i.numel() or not bool((self.j.flatten().diff() > 0).all()):
            return None
        first, last = self.i.aminmax()
        return int(first), int(last)

    def _inside(self, part: slice, band: Band) -> Bool[Tensor, "*s r c"]:
        least, most = band
        offset = self.j[..., part] - self.i
        inside = torch.ones_like(offset, dtype=torch.bool) if least is None else offset >= least
        return inside if most is None else inside & (offset <= most)


def _before(j: Int[Tensor, " c"], position: int) -> int:
    """How many keys stand before a position."""
    return int(torch.searchsorted(j, position))


def _prepared(request: Request, pattern: Pattern | None, dtype: torch.dtype) -> Request:
    """The same request as blocks take it: bands end where the pattern does; columns are rows in memory.

    (A product with few columns is five times slower than its transpose.)
    """
    bands = request.bands
    if pattern is not None and pattern.is_causal:
        bands = tuple((least, 0 if most is None else min(most, 0)) for least, most in bands)
    columns = request.columns
    return replace(request, bands=bands, columns=None if columns is None else columns.to(dtype).mT.contiguous().mT)


def _leave(into: Float[Tensor, "*b n m"], tile: Tile, weights: Float[Tensor, "*b r c"]) -> None:
    """Whole rows of the matrix: the weights of a tile, and zeros around them."""
    rows = pick(into, tile.batch)[..., tile.rows, :]
    if tile.cols.is_interval:
        start, stop = int(tile.cols.index[0]), int(tile.cols.index[-1]) + 1
        rows[..., :start] = 0
        rows[..., stop:] = 0
    else:
        rows.zero_()
    put_tile(into, tile, weights)


def _block(tile: Tile, request: Request, axes: int) -> Block:
    keys = tile.cols.index.to(tile.i.device)
    targets, columns = request.targets, request.columns
    if targets is not None:
        targets = pick(with_axes(targets, axes, 2), tile.batch)[..., tile.rows, :]
    if columns is not None:
        columns = tile.cols.take(pick(with_axes(columns, axes, 2), tile.batch)).mT
    visible = None if tile.mask is None else tile.mask.visible
    return Block(tile.i, tile.j, keys, visible, tile.clear, targets, columns, request.bands, request.places)


def _of_softmax(
    work: Work, rows: SoftmaxRows, scores: Tensor, tile: Tile, bias: Tensor | None, block: Block
) -> tuple[RowSums, Tensor]:
    """The sums of a tile, and its weights, which the next tile overwrites."""
    logits = rows.logits(scores, tile, bias, rows.parameters)
    top, place = largest(logits) if block.places else (logits.amax(-1, keepdim=True), None)
    dead = top == -inf
    logits = logits.sub_(top.masked_fill(dead, 0))
    weights = torch.softmax(logits, -1, out=work.buffer("weights", *logits.shape))
    if dead.any():
        weights.masked_fill_(dead, 0)
    most = weights.amax(-1, keepdim=True) if place is None else weights.gather(-1, place)
    log_largest = most.masked_fill(dead, 1).log()
    hidden = logits[..., tile.clear :] if bias is None and rows.bias_function is None else logits
    hidden.clamp_(min=torch.finfo(logits.dtype).min / 2)  # 0 · −∞ is no number
    entropy = -log_largest - logits.mul_(weights).sum(-1, keepdim=True)
    lse = top - log_largest
    mass = torch.where(dead, 0, torch.ones_like(top))[..., 0]
    found = _sums(weights, weights, mass, most, place, entropy[..., 0], block)
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
    most, place = largest(mass) if block.places else (mass.amax(-1, keepdim=True), None)
    return _sums(weights, mass, total[..., 0], most, place, entropy, block)


def _sums(
    weights: Float[Tensor, "*b r c"],
    absolute: Float[Tensor, "*b r c"],
    mass: Float[Tensor, "*b r"],
    most: Float[Tensor, "*b r 1"],
    place: Int[Tensor, "*b r 1"] | None,
    entropy: Float[Tensor, "*b r"],
    block: Block,
) -> RowSums:
    signed = absolute is not weights
    bands = [_band_sums(weights, signed, block, band) for band in block.bands]
    none = weights.new_zeros(*mass.shape, 0)
    at, seen = (none, none.bool()) if block.targets is None else _gather(weights, block)
    width = 0 if block.columns is None else block.columns.shape[-2]
    where = torch.full_like(most, -1, dtype=torch.long) if place is None else block.keys[place]
    return RowSums(
        total=mass if absolute is weights else weights.sum(-1),
        mass=mass,
        square=torch.linalg.vector_norm(weights, dim=-1).square(),
        entropy=entropy,
        largest=most[..., 0],
        where=torch.where(most > 0, where, -1)[..., 0],
        count=block.count().expand(mass.shape),
        at=at,
        seen=seen,
        band_mass=torch.stack([x[0] for x in bands], -1) if bands else none,
        band_dot=torch.stack([x[1] for x in bands], -2) if bands else weights.new_zeros(*mass.shape, 0, width),
    )


def largest(x: Float[Tensor, "*b r c"]) -> tuple[Float[Tensor, "*b r 1"], Int[Tensor, "*b r 1"]]:
    """The largest number of each row, and the first place where it stands.

    On a CPU `max` with its index goes number by number, and takes ten times as long as `amax`; so the largest of each
    chunk first.
    """
    chunks = x.shape[-1] // CHUNK
    if x.device.type != "cpu" or chunks < 2:
        return x.max(-1, keepdim=True)
    whole = x[..., : chunks * CHUNK].unflatten(-1, (chunks, CHUNK))
    top, chunk = whole.amax(-1).max(-1, keepdim=True)
    chosen = chunk[..., None].expand(*chunk.shape, CHUNK)
    inside = whole.gather(-2, chosen)[..., 0, :].argmax(-1, keepdim=True)
    place = chunk * CHUNK + inside
    if chunks * CHUNK == x.shape[-1]:
        return top, place
    rest, after = x[..., chunks * CHUNK :].max(-1, keepdim=True)
    later = (rest > top) | rest.isnan()
    return torch.where(later, rest, top), torch.where(later, after + chunks * CHUNK, place)


def _band_sums(weights: Float[Tensor, "*b r c"], signed: bool, block: Block, band: Band) -> tuple[Tensor, Tensor]:
    """Σ|a| and Σ a X inside one band."""
    mass = weights.new_zeros(weights.shape[:-1])
    width = 0 if block.columns is None else block.columns.shape[-2]
    dot = weights.new_zeros(*weights.shape[:-2], width, weights.shape[-2])
    for part, inside in block.pieces(band):
        piece = weights[..., part]
        if inside is not None:
            piece = piece * inside.to(piece.dtype)
        mass += piece.abs().sum(-1) if signed else piece.sum(-1)
        if block.columns is not None:
            dot += block.columns[..., part] @ piece.mT
    return mass, dot.mT


def _gather(weights: Float[Tensor, "*b r c"], block: Block) -> tuple[Float[Tensor, "*b r t"], Bool[Tensor, "*b r t"]]:
    """The weights at the target keys, 0 for a target that is not among these keys; and whether they are seen."""
    targets, keys = block.targets, block.keys
    assert targets is not None
    place = torch.searchsorted(keys, targets.contiguous()).clamp(max=len(keys) - 1)
    found = keys[place] == targets
    batch = broadcast_shapes(weights.shape[:-2], targets.shape[:-2])
    at = weights.gather(-1, place.expand(*batch, *targets.shape[-2:])) * found
    return at, (found & block.sees(place)).expand(at.shape)
