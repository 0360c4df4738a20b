"""Everything that a scan wants to know of a head, in one go.

Row statistics and spectrum both need the weights. Where A is formed, which pays up to a few thousand tokens, one pass
over its tiles gives the sums of the rows and leaves the matrix for the products; beyond, the same pass gives the
energy, and A is never formed.
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
        """The singular values above the rows (needs altair)."""
        return self.spectrum.plot() & self.rows.plot()


@with_old_keywords
def head_measures(
    op: AttentionOperator,
    k: int = 32,
    *,
    tau: float | Sequence[float] = 0.9,
    search: SearchOptions = DEFAULT,
) -> HeadMeasures:
    """Row statistics, the first k singular values, and effective ranks at tau, for less than one after the other.

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
    energy = rows.frobenius.square().cpu()  # asked for here, a GPU has it; later it would first finish the matrix
    matrix = matrix_of(op, dense if left else None)
    found = spectrum(matrix, k, tau=tau, energy=energy, search=search)
    return HeadMeasures(rows, found)


class Room:
    """Memory for the matrices of heads that are measured one after the other.

    The pass over the rows leaves the matrix there. Fresh pages would cost as much as the weights that are put on them.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def of(self, op: AttentionOperator) -> Float[Tensor, "*b n m"] | None:
        """Room for the matrix of op, with whatever stood in it, where it pays to have it.

        None on a GPU, which has the rows in one launch, and A in a few others.
        """
        if op.device.type != "cpu" or not pays_to_form(op):
            return None
        return self._sized(prod(op.shape), op.dtype).view(op.shape)

    def slabs(self, op: AttentionOperator, pattern: Pattern) -> Trimmed | None:
        """The same in the form in which it is multiplied, half of it where op is causal; None where it never is.

        pattern   of op, whose zeros it tells all of
        """
        n, m = op.shape[-2:]
        if op.device.type != "cpu" or not pays_to_form(op) or not EXACT < n <= m:
            return None
        return Trimmed.room(op.shape, pattern, op.dtype, self._sized)

    def _sized(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._kept.dtype != dtype or self._kept.numel() < size:
            self._kept = torch.empty(0)  # what was kept goes before more is taken
            self._kept = torch.empty(size, dtype=dtype)
        return self._kept[:size]


def matrix_of(op: AttentionOperator, left: Matrices | None) -> AttentionOperator | Matrices:
    """What to take the spectrum of: the matrix that a pass left, or A formed, or A itself."""
    if left is not None:
        return left
    return op.materialise() if pays_to_form(op) else op
