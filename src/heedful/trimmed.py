"""Formed matrices on a CPU, laid out for many products with A and Aᵀ: in slabs, on pages that a thread keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from math import prod

import torch

from heedful.shapes import Bool, Float, Int, Tensor


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


class Trimmed:
    """Matrices as slabs of columns, each without the rows of zeros above and below: half the work where it is causal.

    A Aᵀ is the sum of what it is for each slab, so one pass over A does for both products: a slab is still in the cache
    when it comes to the second. Columns are best handed over each in one piece, as rows of a transposed tensor.

    >>> A = torch.ones(2, 600, 600).tril()
    >>> x = torch.ones(2, 600, 1)
    >>> bool((Trimmed(A) @ x == A @ x).all()), bool((Trimmed(A).mT @ x == A.mT @ x).all())
    (True, True)
    >>> bool((Trimmed(A).there_and_back(x)[1] == A @ (A.mT @ x)).all())
    True
    """

    WIDTH = 64  # of a slab: small enough for those of a layer's heads to stay in a cache together

    def __init__(self, dense: Float[Tensor, "b n m"], empty: Callable[..., Tensor] = torch.empty):
        dense = dense.detach()  # products are written in place, which has no derivative
        self.empty = empty  # where memory for a sketch of it comes from, too
        self.shape, self.dtype, self.device = tuple(dense.shape), dense.dtype, dense.device
        spans = _spans(dense, self.WIDTH)
        columns = [slice(at, at + self.WIDTH) for at in range(0, dense.shape[-1], self.WIDTH)]
        slabs = [(rows, cols, dense[:, rows, cols]) for cols in columns for rows in [_rows(spans, cols)]]
        # Each in one piece, since lines that are a power of two apart have few places in a cache.
        room = empty(sum(slab.numel() for *_, slab in slabs), dtype=dense.dtype)
        pieces = room.split([slab.numel() for *_, slab in slabs])
        self.slabs = [(rows, cols, to.view_as(x).copy_(x)) for (rows, cols, x), to in zip(slabs, pieces, strict=True)]

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


def _rows(spans: list[tuple[slice, slice]], cols: slice) -> slice:
    """The rows that have anything in these columns."""
    used = [rows for rows, span in spans if span.start < cols.stop and cols.start < span.stop]
    return slice(used[0].start, used[-1].stop) if used else slice(0, 0)


def _spans(dense: Float[Tensor, "b n m"], step: int) -> list[tuple[slice, slice]]:
    """Some rows at a time, with the columns beyond which they are zeros."""
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
