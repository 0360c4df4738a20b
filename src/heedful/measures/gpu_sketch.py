"""`linalg.Sketch` for a GPU, with few launches and one synchronisation.

A product with A takes little longer than its launch; a synchronisation takes as long as several launches. So

    columns are orthonormalised by Cholesky QR, X L⁻ᵀ with L Lᵀ = XᵀX in float64, instead of Householder reflections
    whether that succeeded is checked once, in `solve`; heads where it failed are sketched again by Householder
    only the lower half of the Gram matrix is computed, which is all that `eigh` reads
    the small eigenproblems run on the CPU cores, one matrix to a core
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from typing import NamedTuple

import torch

from heedful.linalg import LOST, Linear, Ritz, Sketch
from heedful.shapes import Bool, Float, Int, Tensor

CORES = os.cpu_count() or 1
ASTRAY = 1e-3  # ‖UᵀU − 1‖ of columns that can't be called orthonormal: rounding leaves 1e-5


class _Made(NamedTuple):
    """Evidence that a block of columns was orthonormalised, in float64."""

    lengths: Float[Tensor, "b p"]  # of each column without its part in the columns before it: the diagonal of L
    squares: Float[Tensor, "b p"]  # squared lengths of the columns themselves
    size: Float[Tensor, "b 1"]  # norm of the block before it was projected; one number for each block


class LaunchedSketch(Sketch):
    """A sketch with few launches and one synchronisation.

    >>> A = torch.diag(torch.tensor([5.0, 4.0, 3.0, 1e-3, 0, 0, 0, 0]))
    >>> sketch = LaunchedSketch(A, block=2, most=4)
    >>> sketch.grow(), sketch.grow()
    (None, None)
    >>> [round(float(square), 3) for square in sketch.solve().squares[:3]]
    [25.0, 16.0, 9.0]
    """

    careful: tuple[Int[Tensor, " c"], Sketch] | None = None
    """Heads where Cholesky QR failed, and their sketch by Householder reflections."""

    @torch.no_grad()
    def _begin(self) -> None:
        super()._begin()
        self._size = self._size.double()
        self._made: list[_Made] = []
        self._told: tuple[Tensor, Tensor] | None = None
        self._flat = tuple(_heads(x) for x in (self._basis, self._image, self._gram))

    @torch.no_grad()
    def grow(self) -> None:
        if self.careful is not None:
            self.careful[1].grow()
        self._told = None
        p = min(self.block, self.most - self.width)
        before, self.width = self.width, self.width + p
        basis, image, inner = self._flat
        x = without(_heads(self._next).narrow(2, 0, p), basis.narrow(1, 0, before))
        rows, factor, made = orthonormal_rows(x, self._size)
        if not before:
            self._first = factor
        self._made.append(made)
        basis.narrow(1, before, p).copy_(rows)
        down = self.op.mT @ self._basis.narrow(-2, before, p).mT
        w = image.narrow(1, before, p).copy_(_heads(down).mT)
        torch.bmm(w, image.narrow(1, 0, self.width).mT, out=inner.narrow(1, before, p).narrow(2, 0, self.width))
        up = self.op @ down
        self._size = torch.linalg.vector_norm(up, dim=(-2, -1), dtype=torch.float64)
        self._next = without(_heads(up), basis.narrow(1, 0, self.width)).view_as(up)
        self.products += 2 * p

    @property
    def captured(self) -> Float[Tensor, "*b"]:
        return super().captured if self._told is None else self._told[0]

    @property
    def defect(self) -> Float[Tensor, "*b"]:
        return super().defect if self._told is None else self._told[1]

    @torch.no_grad()
    def solve(self) -> Ritz:
        k, batch = self.width, self._size.shape
        basis, _, inner = (x.narrow(1, 0, k) for x in self._flat)
        # Launch everything before `_ritz`, which synchronises.
        after = _heads(self._next).double()
        left, apart = torch.bmm(after.mT, after), torch.bmm(basis, basis.mT)
        apart.diagonal(dim1=-2, dim2=-1).sub_(1)
        defect = torch.linalg.vector_norm(apart, dim=(-2, -1), keepdim=True, dtype=torch.float64)[..., 0]
        # `eigh` would raise on NaN; heads with NaN are found by `sound` below.
        inner = torch.nan_to_num(inner.narrow(2, 0, k), 0, 0, 0)
        first = self._first.shape[-1]
        found = _ritz(inner, left, self._first)  # synchronises
        signs = [x for made in zip(*self._made, strict=True) for x in made]
        defect, *signs = torch.cat([defect, *signs], -1).cpu().split([1, k, k, len(self._made)], -1)
        squares, leaks, shares = found.unbind(-2)
        good = sound(_Made(*signs), [made.lengths.shape[-1] for made in self._made], torch.finfo(self.op.dtype).eps)
        bad = (~(good & (defect[:, 0] < ASTRAY))).nonzero()[:, 0]
        captured, defect = squares.sum(-1), defect[:, 0]
        squares, leaks, shares = (x.flip(-1) for x in (squares.clamp(min=0), leaks.clamp(min=0).sqrt(), shares / first))
        if len(bad):
            again = self._sketched_again(bad)
            ritz = again.solve()
            squares[bad], leaks[bad], shares[bad] = ritz.squares, ritz.leaks, ritz.shares
            captured[bad], defect[bad] = again.captured, again.defect
            _heads(self._basis)[bad.to(self.op.device), :k] = again.basis
        self._told = captured.view(batch), defect.view(batch)
        squares, leaks, shares = (x.view(*batch, k) for x in (squares, leaks, shares))
        return Ritz(squares, leaks, left.shape[-1], shares)

    def _sketched_again(self, bad: Int[Tensor, " c"]) -> Sketch:
        """A sketch of these heads, as wide as this one, by Householder reflections."""
        if self.careful is None or not torch.equal(self.careful[0], bad):
            heads = bad.to(self.op.device)
            op = self.op[heads] if isinstance(self.op, Tensor) and self.op.ndim == 3 else _Some(self.op, heads)
            self.careful = bad, Sketch(op, self.block, self.most, self.seed)
        again = self.careful[1]
        while again.width < self.width:
            again.grow()
        return again

    def take(self, heads: Int[Tensor, " c"]) -> LaunchedSketch:
        part = super().take(heads)
        assert isinstance(part, LaunchedSketch)
        part._flat = tuple(_heads(x) for x in (part._basis, part._image, part._gram))
        part._made, part._told = [_Made(*(x[heads] for x in made)) for made in self._made], None
        if self._made:
            part._first = self._first[heads]
        part.careful = None
        return part


class _Some:
    """Some heads of an operator that can't be indexed: products with all heads, zeros for the others."""

    def __init__(self, op: Linear, heads: Int[Tensor, " c"]):
        self.op, self.heads, self.dtype, self.device = op, heads, op.dtype, op.device
        self.shape = (len(heads), *op.shape[-2:])

    def __matmul__(self, x: Tensor) -> Tensor:
        *batch, n, m = self.op.shape
        whole = x.new_zeros(prod(batch), m, x.shape[-1])
        whole[self.heads] = x
        return (self.op @ whole.view(*batch, m, -1)).reshape(-1, n, x.shape[-1])[self.heads]

    @property
    def mT(self) -> _Some:
        return _Some(self.op.mT, self.heads)


def _ritz(
    gram: Float[Tensor, "b k k"], left: Float[Tensor, "b p p"], first: Float[Tensor, "b f f"]
) -> Float[Tensor, "b 3 k"]:
    """Ritz values, squared residuals and shares, on the CPU.

    A GPU decomposes one matrix after the other: 32 matrices of 192 columns take 47 ms on an H200, 8 ms on 16 cores, and
    the GPU is free for other work meanwhile. With fewer than 8 cores the GPU does it.
    """
    if gram.device.type == "cpu" or len(gram) == 1 or CORES < 8:
        return _decomposed(gram, left, first).cpu()
    parts = [_on_host(x).chunk(CORES) for x in (gram, left, first)]
    torch.cuda.current_stream(gram.device).synchronize()
    return torch.cat(list(_pool().map(_decomposed, *parts)))


def _decomposed(gram: Tensor, left: Tensor, first: Tensor) -> Float[Tensor, "*b 3 k"]:
    squares, vectors = torch.linalg.eigh(gram)
    # Only the last block has a residual; A Ω = U_0 Lᵀ, which is how U_0 was made.
    last, start = vectors[..., -left.shape[-1] :, :], vectors[..., : first.shape[-1], :]
    return torch.stack([squares, (last * (left @ last)).sum(-2), (first @ start).square().sum(-2)], -2)


def _on_host(x: Tensor) -> Tensor:
    """An asynchronous copy in pinned memory."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, "heedful-eigh", initializer=torch.set_num_threads, initargs=(1,))


def _heads(x: Float[Tensor, "*b n m"]) -> Float[Tensor, "b n m"]:
    return x.reshape(-1, *x.shape[-2:])


def without(x: Float[Tensor, "b n p"], basis: Float[Tensor, "b k n"]) -> Float[Tensor, "b n p"]:
    """x minus its projection on the orthonormal rows of `basis`. Overwrites x."""
    return x.baddbmm_(basis.mT, torch.bmm(basis, x), alpha=-1) if basis.shape[-2] else x


def orthonormal_rows(
    x: Float[Tensor, "b n p"], size: Float[Tensor, "*b"]
) -> tuple[Float[Tensor, "b p n"], Float[Tensor, "b p p"], _Made]:
    """Cholesky QR without a synchronisation: an orthonormal basis of x as rows in float64, L, and evidence for `sound`.

    size   norm of x before it was projected. Rounding left a part of the earlier columns in x, which grows by the
           condition number of x. So this fails where a column nearly lies in the span of the others, or is rounding
           noise.
    """
    wide = x.double()
    inner = torch.bmm(wide.mT, wide)
    factor, _ = torch.linalg.cholesky_ex(inner)
    rows = torch.linalg.solve_triangular(factor, wide.mT, upper=False)
    lengths, squares = (y.diagonal(dim1=-2, dim2=-1) for y in (factor, inner))
    return rows, factor, _Made(lengths, squares, size.reshape(-1, 1))


def sound(made: _Made, blocks: list[int], eps: float) -> Bool[Tensor, " b"]:
    """True for heads whose columns were all linearly independent and longer than rounding noise.

    blocks   columns of each block, in the order of `made`
    """
    rounding = LOST * eps * made.size.repeat_interleave(torch.tensor(blocks), -1)
    return (made.lengths > torch.maximum(rounding, 1e-3 * made.squares.sqrt())).all(-1)
