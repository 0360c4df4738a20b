"""Concentration of attention weights.

For a vector of c entries, S(a) = E|a| / √E[a²] = ‖a‖₁ / (√c ‖a‖₂) (Su 2023, kexue.fm/archives/9889). It lies between
1/√c (one nonzero entry) and 1 (all equal), is defined for signed and unnormalised weights, and does not depend on their
scale. The *participation* c·S² = (Σ|a|)² / Σa² is the effective number of entries: 1 for a single nonzero entry, c for
equal entries. For a window of fixed width, S tends to 0 as c grows, but the participation stays bounded.

The mean is over the entries that pattern and segments let a query see (`over="visible"`), or over all n × m entries of
the matrix (`over="all"`). For an N × N matrix with non-negative rows that sum to one, over all entries,

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
    """S of each row and of the whole matrix; see `concentration`. A zero row has S = NaN and participation 0."""

    over: Over
    rows: Float[Tensor, "*b n"]
    matrix: Float[Tensor, "*b"]
    participation: Float[Tensor, "*b n"]
    entropy: Float[Tensor, "*b n"]

    @property
    def perplexity(self) -> Float[Tensor, "*b n"]:
        """e^entropy: the effective number of keys of a row, 0 if it sees none."""
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
        """Plot S of the matrix, one bar per head (needs altair)."""
        alt = altair()
        heads, values = indices(self.matrix.shape), self.matrix.reshape(-1).cpu().tolist()
        rows = [{"head": head or "0", "S": value} for head, value in zip(heads, values, strict=True)]
        return (
            alt.Chart(alt.Data(values=rows))
            .mark_bar()
            .encode(x=alt.X("head:N", sort=None), y=alt.Y("S:Q", scale=alt.Scale(domain=[0, 1])))
        )


def concentration(op: AttentionOperator, over: Over = "visible") -> Concentration:
    """Return S = E|a| / √E[a²], participation and entropy of each row, and S of the whole matrix.

    over   "visible": S over the entries that a query may see; "all": over all entries of the matrix

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
    """Return mass / √square; NaN if both are 0."""
    return mass / square.sqrt()
