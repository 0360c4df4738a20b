"""A request for sums over the rows of a matrix, and the result.

A request names keys by index (*targets*) and ranges of offsets j − i (*bands*), nothing more. Sinks, neighbours, the
last token and the target of an induction head are all targets; windows and contexts are all bands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from heedful.kernels.blocked.tiles import pick
from heedful.shapes import Bool, Float, Int, Tensor

Band = tuple[int | None, int | None]
"""The smallest and the largest offset j − i, both included; None: no limit."""


class Receiver(ABC):
    """Takes the rows of a matrix when the destination is not a tensor."""

    @abstractmethod
    def put(
        self,
        at: tuple[int, ...],
        rows: slice,
        first: int,
        weights: Float[Tensor, "*b r c"],
        factor: Float[Tensor, "*#b r 1"],
    ) -> None:
        """Store these rows: weights times a factor at the keys from `first` on, zeros at all others.

        at   indexes the leading batch axes, as in a tile
        """


@dataclass(frozen=True)
class Request:
    """What to compute beside the sums of whole rows.

    targets   for each query, the indices of keys whose weights are wanted; −1: none
    bands     ranges of offsets (smallest, largest) whose share of a row is wanted
    columns   vectors X; the result has the product of X with the part of each row inside each band
    values    vectors that whole rows are multiplied by, such as a layer's values
    into      a buffer for the matrix, if it is wanted as well; the pass writes all weights, zeros included
    down      zeros, to which the pass adds the column sums of the matrix
    places    whether the key of each row's largest weight is wanted; on a CPU that costs as much as a softmax
    scratch   buffers to reuse in the next pass; a backend may store anything there, also what `into` holds
    """

    targets: Int[Tensor, "*#b n t"] | None = None
    bands: tuple[Band, ...] = ()
    columns: Float[Tensor, "*#b m x"] | None = None
    into: Float[Tensor, "*b n m"] | Receiver | None = None
    down: Float[Tensor, "*b m"] | None = None
    places: bool = True
    scratch: dict[str, Any] | None = None
    values: Float[Tensor, "*#b m e"] | None = None


def with_sink(
    entropy: Float[Tensor, "*b"], kept: Float[Tensor, "*b"], taken: Float[Tensor, "*b"]
) -> Float[Tensor, "*b"]:
    """The entropy of keys and sink together: σ H − σ log σ − (1 − σ) log (1 − σ).

    entropy   H, the entropy of the keys' proportions
    kept      σ, the share of the keys
    taken     1 − σ, the share of the sink; given, because computing 1 − σ would round small shares away

    >>> with_sink(torch.tensor(2.0).log(), torch.tensor(2 / 3), torch.tensor(1 / 3)).exp().round()
    tensor(3.)
    """
    return kept * entropy + torch.special.entr(kept) + torch.special.entr(taken)


@dataclass(frozen=True)
class RowSums:
    """Sums over each row of A; those that were not requested have a last axis of size 0.

    A row that sees nothing has sums of 0, a log-sum-exp of −∞ and its largest weight at −1.
    """

    total: Float[Tensor, "*b n"]  # Σ a
    mass: Float[Tensor, "*b n"]  # Σ |a|
    square: Float[Tensor, "*b n"]  # Σ a²
    entropy: Float[
        Tensor, "*b n"
    ]  # −Σ p log p,  p = |a| / Σ |a|;  with a sink p = a, and the sink's share is one more p
    largest: Float[Tensor, "*b n"]  # max |a|
    where: Int[Tensor, "*b n"]  # the index of that key; −1 if not requested
    count: Int[Tensor, "*b n"]  # number of keys that pattern and segments let the query see
    at: Float[Tensor, "*b n t"]  # a at the targets
    seen: Bool[Tensor, "*b n t"]  # whether pattern and segments let the query see the target
    band_mass: Float[Tensor, "*b n w"]  # Σ |a| inside each band
    band_dot: Float[Tensor, "*b n w x"]  # Σ a_ij X_j
    product: Float[Tensor, "*b n e"]  # A V
    lse: Float[Tensor, "*b n"] | None = None  # log Σ exp, for weights that are a softmax
    left: bool = False  # True if `into` and `down` were filled

    @classmethod
    def blank(
        cls, batch: tuple[int, ...], n: int, request: Request, dtype: torch.dtype, device: torch.device, softmax: bool
    ) -> RowSums:
        """The sums of rows that see nothing."""
        bands, targets = len(request.bands), 0 if request.targets is None else request.targets.shape[-1]
        tails = {
            "at": (targets,),
            "seen": (targets,),
            "band_mass": (bands,),
            "band_dot": (bands, 0 if request.columns is None else request.columns.shape[-1]),
            "product": (0 if request.values is None else request.values.shape[-1],),
        }
        kinds = {"where": torch.long, "count": torch.long, "seen": torch.bool}
        made: dict[str, Any] = {
            field.name: torch.zeros(
                *batch,
                n,
                *tails.get(field.name, ()),
                dtype=kinds.get(field.name, dtype),
                device=device,
            )
            for field in fields(cls)
            if field.name != "left"
        }
        made["where"] -= 1
        lse = made.pop("lse") - torch.inf if softmax else None
        return cls(**{name: x for name, x in made.items() if name != "lse"}, lse=lse)

    def put(self, batch: tuple[int, ...], rows: slice, part: RowSums, without: tuple[str, ...] = ()) -> None:
        """Write a block of rows; `batch` indexes the leading batch axes, as in a tile."""
        axis = self.total.ndim - 1 - len(batch)
        start, stop, _ = rows.indices(self.total.shape[-1])
        for name, mine in self.tensors().items():
            if name not in without:  # copy_ takes half as long as an assignment to a slice
                pick(mine, batch).narrow(axis, start, stop - start).copy_(getattr(part, name))

    def scaled(self, by: Float[Tensor, "*b n"]) -> RowSums:
        """The sums of by_i · a_i for factors ≥ 0. The entropy is of proportions and does not change (`with_sink`)."""
        wide = by[..., None]
        return replace(
            self,
            total=self.total * by,
            mass=self.mass * by,
            square=self.square * by.square(),
            largest=self.largest * by,
            at=self.at * wide,
            band_mass=self.band_mass * wide,
            band_dot=self.band_dot * wide[..., None],
            product=self.product * wide,
        )

    @classmethod
    def join(cls, parts: list[RowSums], axis: int) -> RowSums:
        """Concatenate parts along a batch axis. The log-sum-exp is None unless all parts have one."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            if field.name == "left":
                continue
            tensors = [getattr(part, field.name) for part in parts]
            found[field.name] = None if any(x is None for x in tensors) else torch.cat(tensors, axis)
        return cls(**found, left=all(part.left for part in parts))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        return {field.name: x for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)}
