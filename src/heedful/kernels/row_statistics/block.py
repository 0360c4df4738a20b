"""Sums over a block of whole rows, each from one read of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from heedful.kernels.blocked.tiles import VECTOR, Keys, Mask
from heedful.kernels.row_statistics.sums import Band, RowSums
from heedful.shapes import Bool, Float, Int, Tensor

CHUNK = 64  # elements of a row whose maximum is found together


@dataclass(frozen=True)
class Block:
    """The position of a block of whole rows, and the sums requested from it.

    Every query sees the first `clear` keys; `mask` covers the keys after them and is None if all are seen. Without
    segments, positions are indices, and `first` is the index of the first query.
    """

    i: Int[Tensor, "*#s r 1"]
    j: Int[Tensor, "*#s 1 c"] | Int[Tensor, " c"]
    keys: Keys
    mask: Mask | None
    clear: int
    first: int | None
    targets: Int[Tensor, "*#b r t"] | None
    columns: Float[Tensor, "*#b x c"] | None
    bands: tuple[Band, ...]
    places: bool

    def count(self) -> Int[Tensor, "*s r"]:
        """How many keys each query sees."""
        if self.mask is None:
            return torch.full(self.i.shape[:-1], len(self.keys), device=self.i.device)
        return self.mask.count[..., 0] + self.clear

    def pieces(self, band: Band) -> Iterator[tuple[slice, Bool[Tensor, "*s r c"] | None]]:
        """Slices of keys that cover a band, each with a mask of the pairs inside; the mask is None if all pairs are.

        If positions ascend, as they do without segments, only the band's edges need a mask, and the cost is
        proportional to the size of the band.
        """
        least, most = band
        if least is not None and most is not None and least > most:
            return
        if self._span is None:
            yield slice(None), self._inside(slice(None), band)
            return
        first, last = self._span
        start = 0 if least is None else self._before(first + least)  # no query's band has an earlier key
        inner = 0 if least is None else self._before(last + least)  # from here on, keys are above every lower end
        outer = len(self.keys) if most is None else self._before(first + most + 1)
        stop = len(self.keys) if most is None else self._before(last + most + 1)
        inner, outer = inner + -inner % VECTOR, outer - outer % VECTOR
        if inner >= outer:
            inner = outer = stop
        for part, inside in ((slice(start, inner), False), (slice(inner, outer), True), (slice(outer, stop), False)):
            if part.start < part.stop:
                yield part, None if inside else self._inside(part, band)

    @cached_property
    def _span(self) -> tuple[int, int] | None:
        """The first and the last position of the queries; None if positions do not ascend."""
        if self.first is not None:
            return self.first, self.first + self.i.shape[-2] - 1
        plain = self.j.numel() == len(self.keys) and self.i.numel() == self.i.shape[-2]
        if not plain or not self.i.numel() or not bool((self.j.flatten().diff() > 0).all()):
            return None
        first, last = self.i.aminmax()
        return int(first), int(last)

    def _before(self, position: int) -> int:
        """The number of keys before a position."""
        if self.first is not None:
            return self.keys.before(position)
        return int(torch.searchsorted(self.j.flatten(), position))

    def _inside(self, part: slice, band: Band) -> Bool[Tensor, "*s r c"]:
        least, most = band
        offset = self.j[..., part] - self.i
        inside = torch.ones_like(offset, dtype=torch.bool) if least is None else offset >= least
        return inside if most is None else inside & (offset <= most)


def sums_of(
    weights: Float[Tensor, "*b r c"],
    absolute: Float[Tensor, "*b r c"],
    mass: Float[Tensor, "*b r"],
    most: Float[Tensor, "*b r 1"],
    place: Int[Tensor, "*b r 1"] | None,
    entropy: Float[Tensor, "*b r"],
    block: Block,
    spare: Float[Tensor, "*b r c"],
) -> RowSums:
    """All sums of a block; `spare` is a buffer that may be overwritten."""
    signed = absolute is not weights
    bands = [_band_sums(weights, signed, block, band, spare) for band in block.bands]
    none = weights.new_zeros(*mass.shape, 0)
    at = none if block.targets is None else _gather(weights, block.keys, block.targets)
    width = 0 if block.columns is None else block.columns.shape[-2]
    where = torch.full_like(mass, -1, dtype=torch.long)
    if place is not None:
        where = torch.where(most > 0, block.keys.index.to(place.device)[place], -1)[..., 0]
    return RowSums(
        total=mass if absolute is weights else weights.sum(-1),
        mass=mass,
        square=torch.linalg.vector_norm(weights, dim=-1).square(),
        entropy=entropy,
        largest=most[..., 0],
        where=where,
        count=block.count().expand(mass.shape),
        at=at,
        seen=torch.empty_like(at, dtype=torch.bool),  # filled later by _seen
        band_mass=torch.stack([x[0] for x in bands], -1) if bands else none,
        band_dot=torch.stack([x[1] for x in bands], -2) if bands else weights.new_zeros(*mass.shape, 0, width),
        product=none,  # filled later by the pass over the tiles
    )


def largest(x: Float[Tensor, "*b r c"]) -> tuple[Float[Tensor, "*b r 1"], Int[Tensor, "*b r 1"]]:
    """The largest element of each row, and the first place where it occurs.

    On a CPU, `max` with its index is not vectorised and takes ten times as long as `amax`. So this finds the maximum of
    each chunk first.
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


def _band_sums(
    weights: Float[Tensor, "*b r c"], signed: bool, block: Block, band: Band, spare: Float[Tensor, "*b r c"]
) -> tuple[Tensor, Tensor]:
    """Σ|a| and Σ a X inside one band."""
    mass = weights.new_zeros(weights.shape[:-1])
    width = 0 if block.columns is None else block.columns.shape[-2]
    dot = weights.new_zeros(*weights.shape[:-2], width, weights.shape[-2])
    for part, inside in block.pieces(band):
        piece = weights[..., part]
        if inside is not None:
            piece = torch.mul(piece, inside.to(piece.dtype), out=spare[..., part])
        mass += piece.abs().sum(-1) if signed else piece.sum(-1)
        if block.columns is not None:
            dot += block.columns[..., part] @ piece.mT
    return mass, dot.mT


def _gather(weights: Float[Tensor, "*b r c"], keys: Keys, targets: Int[Tensor, "*#b r t"]) -> Float[Tensor, "*b r t"]:
    """The weights at the target keys; 0 for a target that is not among these keys."""
    place, found = keys.find(targets)
    return weights.gather(-1, place.expand(*weights.shape[:-2], -1, -1)) * found
