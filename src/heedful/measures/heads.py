"""All measures that a scan takes of a head, computed together.

Row statistics and spectrum both need the weights. Up to a few thousand tokens it is faster to materialise A: one pass
over its tiles computes the row sums and writes the matrix for the products of the spectrum. For longer sequences the
pass computes the row sums and the energy, and A is never materialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from heedful.column_slabs import Trimmed
from heedful.linalg import Matrices
from heedful.measures.render import Measurement
from heedful.measures.rows import RowStatistics, check_operator, over_rows, statistics_into
from heedful.measures.search import DEFAULT, EXACT, SearchOptions, pays_to_form, with_old_keywords
from heedful.measures.spectrum import Spectrum, spectrum
from heedful.operator import AttentionOperator
from heedful.patterns import Pattern
from heedful.shapes import Float, Tensor


@dataclass(frozen=True, eq=False, repr=False)
class HeadMeasures(Measurement):
    """The rows and the singular values of each head; see `head_measures`."""

    rows: RowStatistics
    spectrum: Spectrum

    def columns(self) -> dict[str, Tensor]:
        seeing = self.rows.mass > 0
        found = self.spectrum.columns()
        return {
            "entropy": over_rows(self.rows.entropy, seeing),
            "largest": over_rows(self.rows.largest, seeing),
            "first": over_rows(self.rows.first, seeing),
            **{name: found[name] for name in ("σ₁", "energy", "stable rank", "rank (.9)")},
        }

    def caption(self) -> str:
        return f"{self.rows.mass.shape[-1]} queries; {self.spectrum.caption()}"

    def to_dict(self):
        return {"rows": self.rows.to_dict(), "spectrum": self.spectrum.to_dict()}

    def plot(self):
        """Plot the singular values above the row statistics (needs altair)."""
        return self.spectrum.plot() & self.rows.plot()


@with_old_keywords
def head_measures(
    op: AttentionOperator,
    k: int = 32,
    *,
    tau: float | Sequence[float] = 0.9,
    search: SearchOptions = DEFAULT,
) -> HeadMeasures:
    """Return row statistics, the first k singular values, and effective ranks at tau.

    This is faster than separate calls, because they share one pass over the weights.

    >>> import heedful as h
    >>> q, k = torch.randn(2, 3, 600, 16, generator=torch.Generator().manual_seed(0)).unbind()
    >>> found = h.head_measures(h.Softmax(h.Causal()).operator(q, k))
    >>> found.rows.entropy.shape, found.spectrum.values.shape
    (torch.Size([3, 600]), torch.Size([3, 32]))
    >>> h.effective_rank(found.spectrum, 0.9).estimate.shape
    torch.Size([3])
    """
    check_operator(op)
    op = op.float()
    dense = Room().of(op)
    rows, left = statistics_into(op, dense)
    energy = rows.frobenius.square().cpu()  # read before the matrix is queued: a later read would wait for it
    matrix = matrix_of(op, dense if left else None)
    found = spectrum(matrix, k, tau=tau, energy=energy, search=search)
    return HeadMeasures(rows, found)


class Room:
    """Buffer that is reused for the matrices of heads that are measured one after the other.

    The pass over the rows writes the matrix into it. Allocating new pages would cost as much as computing the weights.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def of(self, op: AttentionOperator) -> Float[Tensor, "*b n m"] | None:
        """Return an uninitialised buffer for the matrix of op, or None if materialising it does not pay.

        None on a GPU, where one launch computes the row sums and a few others compute A.
        """
        if op.device.type != "cpu" or not pays_to_form(op):
            return None
        return self._sized(prod(op.shape), op.dtype).view(op.shape)

    def slabs(self, op: AttentionOperator, pattern: Pattern) -> Trimmed | None:
        """Return a buffer in the layout for products, which stores half of a causal matrix; None if it does not apply.

        pattern   pattern of op; every entry outside it is zero
        """
        n, m = op.shape[-2:]
        if op.device.type != "cpu" or not pays_to_form(op) or not EXACT < n <= m:
            return None
        return Trimmed.room(op.shape, pattern, op.dtype, self._sized)

    def _sized(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._kept.dtype != dtype or self._kept.numel() < size:
            self._kept = torch.empty(0)  # frees the old buffer before allocating a larger one
            self._kept = torch.empty(size, dtype=dtype)
        return self._kept[:size]


def matrix_of(op: AttentionOperator, left: Matrices | None) -> AttentionOperator | Matrices:
    """Return the input of `spectrum`: the matrix that a pass wrote, A materialised if that pays, or the operator."""
    if left is not None:
        return left
    return op.materialise() if pays_to_form(op) else op
