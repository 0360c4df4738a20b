"""How sparsely a mechanism focuses.

S(a) = E|a| / √E[a²] of a vector of c entries is ‖a‖₁ / (√c ‖a‖₂) (Su 2023, kexue.fm/archives/9889). It lies between
1/√c (one entry) and 1 (all alike), takes signed and unnormalised weights, and does not change with their scale. The
*participation* c·S² = (Σ|a|)² / Σa² is how many entries take part: 1 for a single one, c for all alike. S tends to 0
for any window of fixed width as c grows; focus on few tokens is a participation that stays bounded.

What the mean is over decides what S says, so it has a name: `over="visible"`, the entries that pattern and segments let
a query see, or `over="all"`, all n × m of the matrix. For an N × N matrix with rows of non-negative weights that sum to
one, over all entries,

    S = (N / N²) / √(‖A‖²_F / N²) = 1 / ‖A‖_F
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from heedful.kernels.row_statistics.sums import Request
from heedful.measures.render import Measurement, altair, indices
from heedful.measures.rows import check_operator, checked_sums, over_rows
from heedful.operator import AttentionOperator
from heedful.shapes import Float, Tensor

Over = Literal["visible", "all"]


@dataclass(frozen=True, eq=False, repr=False)
class Concentration(Measurement):
    """Of each row and of the whole matrix; see `concentration`. A row that is zero has S = NaN and participation 0."""

    over: Over
    rows: Float[Tensor, "*b n"]
    matrix: Float[Tensor, "*b"]
    participation: Float[Tensor, "*b n"]
    entropy: Float[Tensor, "*b n"]

    @property
    def perplexity(self) -> Float[Tensor, "*b n"]:
        """e^entropy: over how many keys a row spreads, 0 where it sees none."""
        return torch.where(self.participation > 0, self.entropy.exp(), 0)

    def columns(self) -> dict[str, Tensor]:
        seeing = self.participation > 0
        shown = {"S of rows": self.rows, "participation": self.participation, "entropy": self.entropy}
        means = {name: over_rows(x, seeing) for name, x in shown.items()}
        return {"S": self.matrix} | means | {"perplexity": over_rows(self.perplexity, seeing)}

    def caption(self) -> str:
        where = "visible entries" if self.over == "visible" else "all entries"
        return f"concentration over {where}; rows by their means"

    def plot(self):
        """S of the matrix, a bar a head (needs altair)."""
        alt = altair()
        heads, values = indices(self.matrix.shape), self.matrix.reshape(-1).cpu().tolist()
        rows = [{"head": head or "0", "S": value} for head, value in zip(heads, values, strict=True)]
        return (
            alt.Chart(alt.Data(values=rows))
            .mark_bar()
            .encode(x=alt.X("head:N", sort=None), y=alt.Y("S:Q", scale=alt.Scale(domain=[0, 1])))
        )


def concentration(op: AttentionOperator, over: Over = "visible") -> Concentration:
    """S = E|a| / √E[a²], participation and entropy of the rows, and S of the matrix as a whole.

    >>> import torch, heedful as h
    >>> x = torch.zeros(100, 8)
    >>> A = h.Softmax(h.Causal()).operator(x, x)
    >>> h.concentration(A).participation[-1].round()
    tensor(100.)
    >>> S = h.concentration(A, over="all").matrix
    >>> torch.allclose(S, 1 / h.row_statistics(A).frobenius)
    True
    """
    check_operator(op)
    if over not in get_args(Over):
        raise ValueError(
            f'over: {over!r}, expected "visible" (the entries that pattern and segments allow) or "all" (n × m).'
        )
    sums = checked_sums(op, Request())
    counts = sums.count if over == "visible" else torch.full_like(sums.count, op.shape[-1])
    return Concentration(
        over=over,
        rows=_ratio(sums.mass, counts * sums.square),
        matrix=_ratio(sums.mass.double().sum(-1), counts.double().sum(-1) * sums.square.double().sum(-1)),
        participation=sums.mass.square() / torch.where(sums.square > 0, sums.square, 1),
        entropy=sums.entropy,
    )


def _ratio(mass: Tensor, square: Tensor) -> Tensor:
    """mass / √square, NaN where both are 0."""
    return mass / square.sqrt()
