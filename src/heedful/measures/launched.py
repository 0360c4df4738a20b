"""A sketch on a GPU, where a product with A costs little more than its launch, and a wait as much as several.

What it does is what `linalg.Sketch` does, by as few launches as it takes:

    columns are made orthonormal by products alone, X R⁻¹ with RᵀR = XᵀX in float64, not by Householder's small steps
    whether that did is asked once, when the sketch is solved: where it did not, the sketch is grown again with care
    of the products that the Ritz values come from the lower half alone is kept, which is what `eigh` reads
    all numbers that the host needs come over in one copy
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from heedful.linalg import LOST, Ritz, Sketch, gram
from heedful.shapes import Bool, Float, Int, Tensor


class _Made(NamedTuple):
    """What tells whether a block of columns came out orthonormal."""

    failed: Int[Tensor, " b"]  # not 0 where there is no R
    lengths: Float[Tensor, "b p"]  # of what each column adds to those before it: the diagonal of R
    squares: Float[Tensor, "b p"]  # of the columns' own lengths
    size: Float[Tensor, " b"]  # of what the block was projected from


class LaunchedSketch(Sketch):
    """A sketch that asks for few launches and waits once.

    >>> A = torch.diag(torch.tensor([5.0, 4.0, 3.0, 1e-3, 0, 0, 0, 0]))
    >>> sketch = LaunchedSketch(A, block=2, most=4)
    >>> sketch.grow(), sketch.grow()
    (None, None)
    >>> [round(float(square), 3) for square in sketch.solve().squares[:3]]
    [25.0, 16.0, 9.0]
    """

    careful = False  # whether it is grown as on a CPU, since products alone did not do

    @torch.no_grad()
    def _begin(self) -> None:
        super()._begin()
        self._made: list[_Made] = []
        self._told: tuple[Tensor, Tensor] | None = None
        self._flat = tuple(_heads(x) for x in (self._basis, self._image, self._gram))
        self._one = torch.eye(self._next.shape[-1], dtype=torch.float64, device=self.op.device)

    @torch.no_grad()
    def grow(self) -> None:
        if self.careful:
            return super().grow()
        self._told = None
        p = min(self.block, self.most - self.width)
        before, self.width = self.width, self.width + p
        basis, image, inner = self._flat
        known, kept = basis.narrow(1, 0, before), basis.narrow(1, 0, self.width)
        rows, made = orthonormal_rows(without(_heads(self._next).narrow(2, 0, p), known), self._size, self._one)
        self._made.append(made)
        basis.narrow(1, before, p).copy_(rows)
        down = self.op.mT @ self._basis.narrow(-2, before, p).mT
        w = image.narrow(1, before, p).copy_(_heads(down).mT)
        torch.bmm(w, image.narrow(1, 0, self.width).mT, out=inner.narrow(1, before, p).narrow(2, 0, self.width))
        up = self.op @ down
        self._size = torch.linalg.vector_norm(up, dim=(-2, -1))
        self._next = without(_heads(up), kept).view_as(up)
        self.products += 2 * p

    @property
    def captured(self) -> Float[Tensor, "*b"]:
        return super().captured if self._told is None else self._told[0]

    @property
    def defect(self) -> Float[Tensor, "*b"]:
        return super().defect if self._told is None else self._told[1]

    @torch.no_grad()
    def solve(self) -> Ritz:
        if self.careful:
            return super().solve()
        p, first, k = self._next.shape[-1], self._start.shape[-1], self.width
        # All that can be asked for before the wait, which is in `eigh`.
        left, start = gram(self._next.mT, self._next.mT), self._start_in_basis
        good = sound(self._made).view_as(self._size)
        others = torch.stack([self._captured, self._defect, good.double()], -1)
        squares, vectors = torch.linalg.eigh(torch.where(good[..., None, None], self.gram, 0))  # which takes no NaN
        last = vectors[..., -p:, :]
        leaks = (last * (left @ last)).sum(-2)
        shares = (start.mT @ vectors[..., :first, :]).square().sum(-2)
        squares, leaks, shares, others = torch.cat([squares, leaks, shares, others], -1).cpu().split([k, k, k, 3], -1)
        if not bool(others[..., 2].all()):
            self.careful = True
            self._begin()
            while self.width < k:
                self.grow()
            return self.solve()
        self._told = others[..., 0], others[..., 1]
        ends = squares.clamp(min=0).flip(-1), leaks.clamp(min=0).sqrt().flip(-1), (shares / first).flip(-1)
        return Ritz(ends[0], ends[1], p, ends[2])

    def take(self, heads: Int[Tensor, " c"]) -> LaunchedSketch:
        part = super().take(heads)
        assert isinstance(part, LaunchedSketch)
        part._flat = tuple(_heads(x) for x in (part._basis, part._image, part._gram))
        part._made, part._told = [_Made(*(x[heads] for x in made)) for made in self._made], None
        return part


def _heads(x: Float[Tensor, "*b n m"]) -> Float[Tensor, "b n m"]:
    return x.reshape(-1, *x.shape[-2:])


def without(x: Float[Tensor, "b n p"], basis: Float[Tensor, "b k n"]) -> Float[Tensor, "b n p"]:
    """x, which is written to, without its part in the rows of `basis`, which are orthonormal."""
    return x.baddbmm_(basis.mT, torch.bmm(basis, x), alpha=-1) if basis.shape[-2] else x


def orthonormal_rows(
    x: Float[Tensor, "b n p"], size: Float[Tensor, "*b"], one: Float[Tensor, "q q"]
) -> tuple[Float[Tensor, "b p n"], _Made]:
    """An orthonormal basis of x as rows, in float64, which was projected from `size`; and what tells whether it is one.

    Projecting x grew what rounding left of its part in the basis by the condition of x: so this does where the columns
    are well apart, and none is all rounding. Nothing waits for the GPU.
    """
    p = x.shape[-1]
    wide = x.double()
    inner = torch.bmm(wide.mT, wide)
    factor, failed = torch.linalg.cholesky_ex(inner, upper=True)
    inverse = torch.linalg.solve_triangular(factor, one[:p, :p].expand_as(factor), upper=True)
    lengths, squares = (y.diagonal(dim1=-2, dim2=-1) for y in (factor, inner))
    return torch.bmm(inverse.mT, wide.mT), _Made(failed, lengths, squares, size.reshape(-1))


def sound(made: list[_Made]) -> Bool[Tensor, " b"]:
    """Whether all blocks came out orthonormal."""
    lengths, squares = (torch.cat([block[at] for block in made], -1) for at in (1, 2))
    sizes = torch.cat([block.size[:, None].expand_as(block.lengths) for block in made], -1)
    rounding = LOST * torch.finfo(sizes.dtype).eps * sizes
    failed = torch.stack([block.failed for block in made]).any(0)
    return (lengths > torch.maximum(rounding, 1e-3 * squares.sqrt())).all(-1) & ~failed
