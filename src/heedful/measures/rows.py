"""Statistics of the rows of an attention matrix, in one streaming pass and O(n) memory.

log-sum-exp     log Σ_j exp(s_ij), for softmax attention
total, mass     Σ_j a_ij and Σ_j |a_ij|; square Σ_j a_ij², whose sum is ‖A‖²_F
entropy         −Σ_j p_ij log p_ij with p_ij = |a_ij| / Σ_l |a_il|, which is also defined for signed and unnormalised
                rows; for a softmax with a sink, p = a, and the weight of the sink, 1 − Σ_l a_il, is one more outcome
masses          Σ |a_ij| at chosen offsets j − i, on the first tokens, on the last, inside a window

Rows of softmax, and of any other row function of the scores, are computed by tiles that the pattern allows, also under
segments. Rows of other mechanisms come from the adjoint on unit vectors, n products with one column in total. Sums are
computed in float32 or better. A query that sees nothing has masses 0, entropy 0, a log-sum-exp of −∞ and position −1 of
its largest weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import torch

from heedful.kernels.row_statistics.sums import Request, RowSums
from heedful.measures.key_index import Places
from heedful.measures.render import Measurement, by_query
from heedful.operator import AttentionOperator
from heedful.segments import resolve
from heedful.shapes import Bool, Float, Int, Tensor

SHOWN_OFFSETS = 3  # largest number of offsets that a printed table shows


@dataclass(frozen=True, eq=False, repr=False)
class RowStatistics(Measurement):
    """Statistics of each row; see `row_statistics`. A table shows means over the queries that see a key."""

    total: Float[Tensor, "*b n"]
    mass: Float[Tensor, "*b n"]
    square: Float[Tensor, "*b n"]
    entropy: Float[Tensor, "*b n"]
    largest: Float[Tensor, "*b n"]
    where: Int[Tensor, "*b n"]
    visible: Int[Tensor, "*b n"]
    offsets: tuple[int, ...]
    at_offset: Float[Tensor, "*b n o"]
    first: Float[Tensor, "*b n"]
    last: Float[Tensor, "*b n"]
    inside: Float[Tensor, "*b n"] | None
    log_sum_exp: Float[Tensor, "*b n"] | None

    @property
    def frobenius(self) -> Float[Tensor, "*b"]:
        """‖A‖_F, summed in float64."""
        return self.square.double().sum(-1).sqrt()

    @property
    def perplexity(self) -> Float[Tensor, "*b n"]:
        """e^entropy: the effective number of keys of a row, 0 if it sees none."""
        return torch.where(self.mass > 0, self.entropy.exp(), 0)

    def columns(self) -> dict[str, Tensor]:
        offsets = {
            f"at {offset:+d}" if offset else "at 0": at for at, offset in enumerate(self.offsets[:SHOWN_OFFSETS])
        }
        shown = {
            "entropy": self.entropy,
            "largest": self.largest,
            **{name: self.at_offset[..., at] for name, at in offsets.items()},
            "first": self.first,
        }
        if self.inside is not None:
            shown["inside"] = self.inside
        seeing = self.mass > 0
        return {name: over_rows(x, seeing) for name, x in shown.items()} | {"‖A‖": self.frobenius}

    def caption(self) -> str:
        return f"row statistics: means over {self.mass.shape[-1]} queries, masses as they are (not shares)"

    def plot(self):
        """Plot entropy, largest weight and masses on the first and last tokens by query, a line per head (altair)."""
        shown = {"entropy": self.entropy, "largest": self.largest, "first": self.first, "last": self.last}
        return by_query(shown, self.mass > 0)


def row_statistics(
    op: AttentionOperator,
    *,
    offsets: Sequence[int] = (-1, 0, 1),
    first: int = 4,
    last: int = 1,
    window: int | tuple[int, int] | None = None,
) -> RowStatistics:
    """Return statistics of every row of A, without materialising A.

    >>> import torch, heedful as h
    >>> x = torch.zeros(4, 8)
    >>> rows = h.row_statistics(h.Softmax(h.Causal()).operator(x, x))
    >>> rows.perplexity.round()
    tensor([1., 2., 3., 4.])
    >>> rows.frobenius ** 2  # 1 + 1/2 + 1/3 + 1/4
    tensor(2.0833, dtype=torch.float64)

    offsets   distances j − i at which to sum weights; negative means before the query
    first     number of first tokens that count as sinks
    last      number of last tokens
    window    number of keys before and after a query, or a pair (before, after)

    Tokens are counted inside each segment. The n queries are the last n of the m positions.
    """
    return statistics_into(op, None, offsets=offsets, first=first, last=last, window=window)[0]


def statistics_into(
    op: AttentionOperator,
    into: Float[Tensor, "*b n m"] | None,
    *,
    offsets: Sequence[int] = (-1, 0, 1),
    first: int = 4,
    last: int = 1,
    window: int | tuple[int, int] | None = None,
) -> tuple[RowStatistics, bool]:
    """Return the statistics, and True if the same pass also wrote the matrix into the buffer `into`."""
    check_operator(op)
    offsets = _check_offsets(offsets, op.shape[-1])
    check_count("first", first)
    check_count("last", last)
    band = None if window is None else _band(window)
    targets = _targets(op, offsets, first, last)
    sums = checked_sums(op, Request(targets, () if band is None else (band,), into=into))
    at_offset, at_first, at_last = sums.at.abs().split([len(offsets), first, last], -1)
    found = RowStatistics(
        total=sums.total,
        mass=sums.mass,
        square=sums.square,
        entropy=sums.entropy,
        largest=sums.largest,
        where=sums.where,
        visible=sums.count,
        offsets=offsets,
        at_offset=at_offset,
        first=at_first.sum(-1),
        last=at_last.sum(-1),
        inside=None if band is None else sums.band_mass[..., 0],
        log_sum_exp=sums.lse,
    )
    return found, sums.left


def _targets(op: AttentionOperator, offsets: tuple[int, ...], first: int, last: int) -> Int[Tensor, "*s n t"]:
    """Return the keys at the offsets from each query, and the first and the last keys of its segment."""
    if op.is_one_segment:
        return _plain_targets(*op.shape[-2:], op.device, offsets, first, last)
    return _chosen(Places(op.layout), offsets, first, last)


@lru_cache(2)
def _plain_targets(
    n: int, m: int, device: torch.device, offsets: tuple[int, ...], first: int, last: int
) -> Int[Tensor, "n t"]:
    """Cached `_targets` without segments: on a GPU their forty launches would cost as much as the sums."""
    return _chosen(Places(resolve(None, n, m, device)), offsets, first, last)


def _chosen(places: Places, offsets: tuple[int, ...], first: int, last: int) -> Int[Tensor, "*s n t"]:
    return torch.cat([places.at_offset(offsets), places.first(first), places.last(last)], -1)


def over_rows(x: Float[Tensor, "*b n"], seeing: Bool[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return the mean over the queries that see a key; NaN if there is none."""
    return torch.where(seeing, x, 0).double().sum(-1) / seeing.sum(-1)


def entropy(op: AttentionOperator) -> Float[Tensor, "*b n"]:
    """Return −Σ p log p of every row, p = |a| / Σ|a|, in nats; 0 for a query that sees nothing.

    The sink of a softmax is one more outcome: then p = a, and the sink has the remaining weight 1 − Σa.

    >>> import torch, heedful as h
    >>> x = torch.zeros(3, 8)
    >>> h.entropy(h.Softmax(h.Causal()).operator(x, x)).exp().round()
    tensor([1., 2., 3.])
    >>> h.entropy(h.Softmax(h.Causal(), sink=torch.tensor(0.0)).operator(x, x)).exp().round()
    tensor([2., 3., 4.])
    """
    check_operator(op)
    return checked_sums(op, Request()).entropy


def sink_mass(op: AttentionOperator, sinks: int = 4) -> Float[Tensor, "*b"]:
    """Return the share of each head's mass Σ|a| on the first `sinks` tokens (Xiao et al. 2023, arXiv:2309.17453).

    The result is the mean over the queries after the sinks, each with equal weight; 0 if there is none. Rows of a
    softmax have a mass of 1; the part that a sink logit takes lies on no token.

    >>> import torch, heedful as h
    >>> x = torch.zeros(100, 8)
    >>> h.sink_mass(h.Softmax(h.Full()).operator(x, x))
    tensor(0.0400)
    """
    check_operator(op)
    check_count("sinks", sinks, least=1)
    places = Places(op.layout)
    sums = checked_sums(op, Request(places.first(sinks)))
    counts = (sums.mass > 0) & (places.position >= sinks)
    whole = sums.mass if sums.lse is None else torch.ones_like(sums.mass)
    share = sums.at.abs().sum(-1) / torch.where(sums.mass > 0, whole, 1)
    return (share * counts).sum(-1) / counts.sum(-1).clamp(min=1)


def checked_sums(op: AttentionOperator, request: Request) -> RowSums:
    """Return the sums; raise if a row has weights that are NaN or infinite."""
    sums = op.row_sums(request)
    check_sums(sums, op)
    return sums


def check_sums(sums: RowSums, of: object) -> None:
    """Raise if a row has weights that are NaN or infinite."""
    whole = (sums.mass + sums.square + sums.entropy).detach()
    if isfinite(whole.sum(dtype=torch.float64).item()):  # one synchronisation in the usual case
        return
    bad = ~torch.isfinite(whole)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"op: {int(bad.sum())} of {bad.numel()} rows have weights that are NaN or infinite, the first at {where} "
            f"(batch axes, then the query) of {of}. Expected finite ones. Likely cause: NaN in q or k, which "
            "heedful.check_finite() finds, or weights without a normaliser that overflow."
        )


def check_operator(op: AttentionOperator) -> None:
    if not isinstance(op, AttentionOperator):
        raise TypeError(
            f"op: expected an AttentionOperator, got {type(op).__name__}. A mechanism gives one with "
            "mechanism.operator(q, k)."
        )


def _check_offsets(offsets: Sequence[int], m: int) -> tuple[int, ...]:
    offsets = tuple(offsets)
    limit = max(m - 1, 1)
    for offset in offsets:
        if not isinstance(offset, int) or abs(offset) > limit:
            raise ValueError(
                f"offsets: {offset!r}, expected integers from −{limit} to {limit}: A has {m} keys. Likely cause: a "
                "position was given where a distance from the query is meant."
            )
    return offsets


def check_count(name: str, count: int, least: int = 0) -> None:
    if not isinstance(count, int) or count < least:
        raise ValueError(f"{name}: expected an integer ≥ {least}, got {count!r}.")


def _band(window: int | tuple[int, int]) -> tuple[int, int]:
    before, after = window if isinstance(window, tuple) else (window, window)
    for side in (before, after):
        if not isinstance(side, int) or side < 0:
            raise ValueError(
                f"window: {window!r}, expected a number of keys ≥ 0, or a pair (before, after) of them. Likely cause: "
                "an offset was given where a width is meant."
            )
    return -before, after
