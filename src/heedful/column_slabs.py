"""Formed matrices on a CPU, laid out for many products with A and Aᵀ: in slabs, on pages that a thread keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from math import prod

import torch

from heedful.kernels.row_statistics.sums import Receiver
from heedful.patterns import Pattern
from heedful.segments import visible
from heedful.shapes import Bool, Float, Int, Tensor

Spans = list[tuple[slice, slice]]
"""Some rows at a time, with the columns beyond which they are zeros."""


class Pages(threading.local):
    """Memory on the CPU that a thread keeps from one measurement to the next, since fresh pages have their price.

    All that was given out is taken back by `begin`.

    >>> pages = Pages()
    >>> first = pages.empty(2, 3, dtype=torch.float64)
    >>> pages.begin()
    >>> pages.empty(5, dtype=torch.float32).data_ptr() == first.data_ptr()
    True
    """

    LARGEST = 1 << 26  # bytes of an array that is kept

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        self._given = 0

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        count = prod(size) * dtype.itemsize
        if count > self.LARGEST:
            return torch.empty(size, dtype=dtype, device=device)
        if self._given == len(self._kept):
            self._kept.append(torch.empty(0, dtype=torch.uint8))
        if self._kept[self._given].numel() < count:
            with torch.inference_mode(False):  # what is made in that mode can't be written to in another
                self._kept[self._given] = torch.empty(count, dtype=torch.uint8)
        self._given += 1
        return self._kept[self._given - 1][:count].view(dtype).view(size)


class Trimmed(Receiver):
    """Matrices as slabs of columns, each without the rows of zeros above and below: half the work where it is causal.

    A Aᵀ is the sum of what it is for each slab, so one pass over A does for both products: a slab is still in the cache
    when it comes to the second. Columns are best handed over each in one piece, as rows of a transposed tensor.

    >>> A = torch.ones(2, 600, 600).tril()
    >>> x = torch.ones(2, 600, 1)
    >>> T = Trimmed.of(A)
    >>> bool((T @ x == A @ x).all()), bool((T.mT @ x == A.mT @ x).all())
    (True, True)
    >>> bool((T.there_and_back(x)[1] == A @ (A.mT @ x)).all())
    True
    """

    WIDTH = 64  # of a slab: small enough for those of a layer's heads to stay in a cache together

    def __init__(self, shape: tuple[int, int, int], spans: Spans, dtype: torch.dtype, empty: Callable[..., Tensor]):
        """With whatever stands in the memory; see `of` and `room`."""
        b, _, m = self.shape = shape
        self.batch: tuple[int, ...] = (b,)  # which a pass may know as more axes than one
        columns = [slice(at, min(at + self.WIDTH, m)) for at in range(0, m, self.WIDTH)]
        places = [(_rows(spans, cols), cols) for cols in columns]
        # Each in one piece, since lines that are a power of two apart have few places in a cache.
        sizes = [(b, rows.stop - rows.start, cols.stop - cols.start) for rows, cols in places]
        room = empty(sum(map(prod, sizes)), dtype=dtype)
        pieces = room.split(list(map(prod, sizes)))
        slabs = [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]
        self.slabs = [(*place, slab) for place, slab in zip(places, slabs, strict=True)]
        self.dtype, self.device = room.dtype, room.device

    @classmethod
    def of(cls, dense: Float[Tensor, "b n m"], empty: Callable[..., Tensor] = torch.empty) -> Trimmed:
        """A copy of these matrices."""
        dense = dense.detach()  # products are written in place, which has no derivative
        b, n, m = dense.shape
        made = cls((b, n, m), _spans(dense, cls.WIDTH), dense.dtype, empty)
        for rows, cols, slab in made.slabs:
            slab.copy_(dense[:, rows, cols])
        return made

    @classmethod
    def room(
        cls, shape: tuple[int, ...], pattern: Pattern, dtype: torch.dtype, empty: Callable[..., Tensor]
    ) -> Trimmed:
        """For matrices with zeros where a pattern hides keys: a pass over their rows leaves them there.

        >>> import heedful as h
        >>> from heedful.kernels.row_statistics.sums import Request
        >>> A = h.Softmax(h.Causal()).operator(*torch.randn(2, 3, 600, 16).unbind())
        >>> room = Trimmed.room(A.shape, h.Causal(), A.dtype, torch.empty)
        >>> A.row_sums(Request(into=room)).left, torch.allclose(room @ torch.ones(600, 1), torch.ones(600, 1))
        (True, True)
        """
        *batch, n, m = shape
        made = cls((prod(batch), n, m), _spans_of(pattern, n, m, cls.WIDTH), dtype, empty)
        made.batch = tuple(batch)
        return made

    def put(self, at, rows, first, weights, factor):
        top, bottom, _ = rows.indices(self.shape[1])
        last = first + weights.shape[-1]
        weights, factor = (x.reshape(-1, *x.shape[-2:]) for x in (weights, factor))
        heads = self._heads(at)
        for inside, cols, slab in self.slabs:
            low, high = max(top, inside.start), min(bottom, inside.stop)
            if low >= high:
                continue
            target = slab[heads, low - inside.start : high - inside.start]
            left, right = (min(max(key, cols.start), cols.stop) for key in (first, last))
            if left < right:
                part, by = (x[:, low - top : high - top] for x in (weights, factor))
                to = target[..., left - cols.start : right - cols.start]
                torch.mul(part[..., left - first : right - first], by, out=to)
            if left > cols.start:
                target[..., : left - cols.start].zero_()
            if right < cols.stop:
                target[..., right - cols.start :].zero_()

    def _heads(self, at: tuple[int, ...]) -> slice:
        """What an index of the leading batch axes means among heads in one line."""
        count, first = prod(self.batch[len(at) :]), 0
        for size, index in zip(self.batch, at, strict=False):
            first = first * size + index
        return slice(first * count, (first + 1) * count)

    def part(self, start: int, stop: int) -> Trimmed:
        """Room for some of the heads of one text, inside this one."""
        part = copy(self)
        part.shape, part.batch = (stop - start, *self.shape[1:]), (1, stop - start)
        part.slabs = [(rows, cols, slab[start:stop]) for rows, cols, slab in self.slabs]
        return part

    def __matmul__(self, x: Float[Tensor, "*#b m p"]) -> Float[Tensor, "b n p"]:
        x = x.expand(self.shape[0], *x.shape[-2:])
        out = x.new_zeros(*self.shape[:2], x.shape[-1])
        for rows, cols, slab in self.slabs:
            out[:, rows].baddbmm_(slab, x[:, cols])
        return out

    @property
    def mT(self) -> _Adjoint:
        return _Adjoint(self)

    def there_and_back(self, u: Float[Tensor, "b n p"]) -> tuple[Float[Tensor, "b m p"], Float[Tensor, "b n p"]]:
        """Aᵀ u and A Aᵀ u."""
        lines, there, back = u.mT.contiguous(), [], torch.zeros_like(u, memory_format=torch.contiguous_format)
        for rows, _, slab in self.slabs:
            there.append(torch.bmm(lines[..., rows], slab))
            back[:, rows].baddbmm_(slab, there[-1].mT)
        return torch.cat(there, -1).mT, back

    def take(self, heads: Int[Tensor, " c"]) -> Trimmed:
        """Some of the heads."""
        part = copy(self)
        part.shape = (len(heads), *self.shape[1:])
        part.slabs = [(rows, cols, slab[heads]) for rows, cols, slab in self.slabs]
        return part


class _Adjoint:
    def __init__(self, of: Trimmed):
        b, n, m = of.shape
        self.shape, self.dtype, self.device, self.mT = (b, m, n), of.dtype, of.device, of

    def __matmul__(self, y: Float[Tensor, "b n p"]) -> Float[Tensor, "b m p"]:
        lines = y.mT.contiguous()
        return torch.cat([torch.bmm(lines[..., rows], slab) for rows, _, slab in self.mT.slabs], -1).mT


def _rows(spans: Spans, cols: slice) -> slice:
    """The rows that have anything in these columns."""
    used = [rows for rows, span in spans if span.start < cols.stop and cols.start < span.stop]
    return slice(used[0].start, used[-1].stop) if used else slice(0, 0)


@lru_cache(maxsize=16)
def _spans_of(pattern: Pattern, n: int, m: int, step: int) -> Spans:
    return _spans(visible(pattern, n, m, None)[None].float(), step)


def _spans(dense: Float[Tensor, "b n m"], step: int) -> Spans:
    n = dense.shape[-2]
    parts = [slice(at, min(at + step, n)) for at in range(0, n, step)]
    # Where A is causal, or a band, the first row and the last tell what the others have.
    last = torch.cat([dense[:, step - 1 : n - 1 : step], dense[:, -1:]], 1)
    guessed = _ends(dense[:, ::step].abs().amax(0) + last.abs().amax(0) != 0)
    return [(rows, _checked(dense[:, rows], cols)) for rows, cols in zip(parts, guessed, strict=True)]


def _ends(used: Bool[Tensor, "s m"]) -> list[slice]:
    """From the first that is to the last, in each line."""
    first, last = used.int().argmax(-1), used.shape[-1] - used.flip(-1).int().argmax(-1)
    return [slice(*ends) for ends in torch.stack([first, last * used.any(-1)], -1).tolist()]


def _checked(x: Float[Tensor, "b r m"], cols: slice) -> slice:
    """The columns that were guessed, if all others are zeros; else from the first that is not to the last."""
    if _zeros(x[..., : cols.start]) and _zeros(x[..., cols.stop :]):
        return cols
    return _ends((x != 0).any(0).any(0, keepdim=True))[0]


def _zeros(x: Float[Tensor, "b r c"]) -> bool:
    """Whether there is nothing else. The largest byte tells it in one pass; `any` takes twice as long."""
    sizes = x.view(torch.uint8) if x.stride(-1) == 1 else x.abs()
    return x.numel() == 0 or not bool(sizes.amax(-1).any())
