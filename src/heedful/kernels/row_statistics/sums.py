"""What is asked of the rows of a matrix, and what comes back.

A request names places by their keys and bands by their offsets j − i, and nothing else: sinks, neighbours, the last
token and the target of an induction head are all *targets*; windows and contexts are all *bands*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from heedful.kernels.blocked.tiles import pick
from heedful.shapes import Bool, Float, Int, Tensor

Band = tuple[int | None, int | None]
"""The least and the largest offset j − i, both inside; None: no limit."""


class Receiver(ABC):
    """Somewhere to leave a matrix that is no tensor."""

    @abstractmethod
    def put(
        self,
        at: tuple[int, ...],
        rows: slice,
        first: int,
        weights: Float[Tensor, "*b r c"],
        factor: Float[Tensor, "*#b r 1"],
    ) -> None:
        """These rows: weights times a factor on the keys from `first` on, zeros on all others.

        at   indexes the leading batch axes, as in a tile
        """


@dataclass(frozen=True)
class Request:
    """Beyond the sums of whole rows.

    targets   keys whose weights are wanted, for each query, by index; −1: none
    bands     offsets (least, largest) whose share of a row is wanted
    columns   vectors that the rows of each band are multiplied by
    values    vectors that whole rows are multiplied by, such as a layer's values
    into      room in which the weights themselves are left, zeros too, where the matrix is wanted as well
    down      zeros to which the sums of the columns are added, where the matrix is left
    places    whether the key of each row's largest weight is wanted, which a CPU finds no faster than a softmax
    scratch   memory that passes which follow one another may use again; a backend keeps there what it likes,
              what it knows of `into` too
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

    kept    σ, the share of the keys, whose proportions have the entropy H
    taken   1 − σ, the share of the sink, by itself: a difference would round small shares away

    >>> with_sink(torch.tensor(2.0).log(), torch.tensor(2 / 3), torch.tensor(1 / 3)).exp().round()
    tensor(3.)
    """
    return kept * entropy + torch.special.entr(kept) + torch.special.entr(taken)


@dataclass(frozen=True)
class RowSums:
    """Sums over each row of A; those that were not asked for have a last axis of 0.

    A row that sees nothing has sums of 0, a log-sum-exp of −∞ and its largest weight at −1.
    """

    total: Float[Tensor, "*b n"]  # Σ a
    mass: Float[Tensor, "*b n"]  # Σ |a|
    square: Float[Tensor, "*b n"]  # Σ a²
    entropy: Float[
        Tensor, "*b n"
    ]  # −Σ p log p,  p = |a| / Σ |a|;  with a sink p = a, and the sink's share is one more p
    largest: Float[Tensor, "*b n"]  # max |a|
    where: Int[Tensor, "*b n"]  # the key of the largest, by index; −1 where it was not asked for
    count: Int[Tensor, "*b n"]  # keys that pattern and segments let the query see
    at: Float[Tensor, "*b n t"]  # a at the targets
    seen: Bool[Tensor, "*b n t"]  # whether pattern and segments let the query see the target
    band_mass: Float[Tensor, "*b n w"]  # Σ |a| inside each band
    band_dot: Float[Tensor, "*b n w x"]  # Σ a_ij X_j
    product: Float[Tensor, "*b n e"]  # A V
    lse: Float[Tensor, "*b n"] | None = None  # log Σ exp, for weights that are a softmax
    left: bool = False  # whether `into` and `down` have what the request wanted there

    @classmethod
    def blank(
        cls, batch: tuple[int, ...], n: int, request: Request, dtype: torch.dtype, device: torch.device, softmax: bool
    ) -> RowSums:
        """Rows that see nothing."""
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
            if name not in without:  # an assignment to a slice takes twice as long
                pick(mine, batch).narrow(axis, start, stop - start).copy_(getattr(part, name))

    def scaled(self, by: Float[Tensor, "*b n"]) -> RowSums:
        """The sums of by_i · a_i for factors ≥ 0; the entropy, which is of proportions, stays (see `with_sink`)."""
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
        """Parts side by side along a batch axis. The log-sum-exp is kept where all have one."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            if field.name == "left":
                continue
            tensors = [getattr(part, field.name) for part in parts]
            found[field.name] = None if any(x is None for x in tensors) else torch.cat(tensors, axis)
        return cls(**found, left=all(part.left for part in parts))

    def tensors(self) -> dict[str, Tensor]:
        """By name, without those that are missing."""
        return {field.name: x for field in fields(self) if isinstance(x := getattr(self, field.name), Tensor)}
