"""What is known of a spectrum (`Profile`), and when that is enough (`Goal`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from heedful.shapes import Bool, Float, Int, Tensor

BLOCK = 16  # columns of a block where A is materialised; narrower blocks need fewer products, but each costs more
TIE = 1 / 64  # an estimate reaches its target if it misses it by less than this part of the slack
CAUTION = 3  # residuals understate the error of close values: without this factor 9 % of real heads exceed 1 %


@dataclass(frozen=True)
class Profile:
    """Σ_{i≤r} σ_i² for r = 1 … min(n, m): no less than `lower`, no more than `upper`, about `middle`."""

    squares: Float[Tensor, "*b k"]
    ceilings: Float[Tensor, "*b k"]
    errors: Float[Tensor, "*b k"]
    energy: Float[Tensor, "*b"]
    lower: Float[Tensor, "*b s"]
    upper: Float[Tensor, "*b s"]
    middle: Float[Tensor, "*b s"]
    slack: Float[Tensor, "*b"]
    products: Int[Tensor, "*b"]
    failure: float
    stopped: str
    _ranks: dict[float, tuple[Tensor, Tensor, Tensor]] = field(init=False, repr=False, default_factory=dict)

    @property
    def size(self) -> int:
        return self.lower.shape[-1]

    def rank(self, tau: float) -> tuple[Int[Tensor, "*b"], Int[Tensor, "*b"], Int[Tensor, "*b"]]:
        """The effective rank at tau: lower bound, estimate, upper bound; 0 for a matrix of zeros."""
        if tau not in self._ranks:
            self._ranks[tau] = self._rank(tau)
        return self._ranks[tau]

    def _rank(self, tau: float) -> tuple[Int[Tensor, "*b"], Int[Tensor, "*b"], Int[Tensor, "*b"]]:
        target = tau * self.energy
        least = _first(self.upper, target - self.slack)
        most = _first(self.lower, target + self.slack)
        guess = _first(self.middle, target - TIE * self.slack)
        some = self.energy > 0
        return least * some, guess.clamp(least, most) * some, most * some

    def knowing(self, ranks: Mapping[float, tuple[Tensor, ...]]) -> Profile:
        """The same profile, with ranks that were computed before."""
        self._ranks.update(ranks)  # type: ignore[arg-type]
        return self

    def to(self, device: torch.device) -> Profile:
        """The same profile on a device, by one copy for each dtype: a small copy takes as long as a large one."""
        if self.energy.device == device:
            return self
        arrays: dict[Any, Any] = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        ranks: dict[Any, Tensor] = {(tau, at): x for tau, rank in self._ranks.items() for at, x in enumerate(rank)}
        there = _moved({**arrays, **ranks}, device)
        known = {tau: tuple(there[tau, at] for at in range(3)) for tau in self._ranks}
        arrays = {name: there[name] for name in arrays}
        return replace(self, **arrays).knowing(known)

    def share(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """The share of the first r values in the energy: lower bound, estimate, upper bound."""
        whole = self.energy.clamp(min=torch.finfo(torch.float64).tiny)
        part = self.slack / whole
        low, guess, high = (x[..., r - 1] / whole for x in (self.lower, self.middle, self.upper))
        low, high = (low - part).clamp(0, 1), (high + part).clamp(0, 1)
        return low, guess.clamp(low, high), high


def _moved(arrays: dict[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
    there: dict[Any, Tensor] = {}
    for dtype in {x.dtype for x in arrays.values()}:
        alike = {name: x for name, x in arrays.items() if x.dtype == dtype}
        whole = torch.cat([x.reshape(-1) for x in alike.values()]).to(device)
        parts = whole.split([x.numel() for x in alike.values()])
        there |= {name: part.view(x.shape) for (name, x), part in zip(alike.items(), parts, strict=True)}
    return there


def _first(sums: Float[Tensor, "*b s"], target: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """The fewest terms whose sum reaches the target; all of them where rounding keeps it out of reach."""
    return ((sums < target[..., None]).sum(-1) + 1).clamp(max=sums.shape[-1])


class Goal(ABC):
    """A condition on which the sketch of a head may stop growing. All methods answer for each head."""

    first = 1  # columns before which it is not worth checking
    otherwise = "beyond the budget"  # the reason that is given where the goal is not reached

    @abstractmethod
    def reached(self, profile: Profile) -> Bool[Tensor, "*b"]: ...

    @abstractmethod
    def columns(self, profile: Profile) -> Float[Tensor, "*b"]:
        """Columns needed to reach the goal, as an estimate; ∞ means that more columns will not help."""

    def lacks_ceiling(self, profile: Profile) -> Bool[Tensor, "*b"]:
        """True where only an upper bound is missing, which a few Lanczos steps may give."""
        return torch.zeros_like(profile.energy, dtype=torch.bool)


@dataclass(frozen=True)
class TopValues(Goal):
    """The first k values to a relative accuracy, judged by their residuals."""

    k: int
    within: float

    @property
    def first(self) -> int:  # type: ignore[override]
        return 3 * self.k  # real heads hardly ever converge before

    def reached(self, profile: Profile) -> Bool[Tensor, "*b"]:
        if profile.squares.shape[-1] < self.k:
            return torch.zeros_like(profile.energy, dtype=torch.bool)
        return (CAUTION * profile.errors[..., : self.k] <= self.within).all(-1)

    def columns(self, profile: Profile) -> Float[Tensor, "*b"]:
        # Values that have not converged in 3 k columns lie close together: many more columns would not help.
        enough = 3 * self.k
        return torch.full_like(profile.energy, enough if profile.squares.shape[-1] < enough else inf)


@dataclass(frozen=True)
class RankInterval(Goal):
    """An interval for the effective rank that is narrow against the estimate."""

    tau: float
    within: float

    def reached(self, profile: Profile) -> Bool[Tensor, "*b"]:
        low, guess, high = profile.rank(self.tau)
        narrow = high - low <= self.within * guess
        if bool((narrow | (high - low > 1)).all()):
            return narrow
        # An interval of two ranks is the narrowest possible where rounding decides between them.
        tie = _first(profile.upper, self.tau * profile.energy) == _first(profile.lower, self.tau * profile.energy)
        return narrow | (high - low <= tie.double())

    def columns(self, profile: Profile) -> Float[Tensor, "*b"]:
        return 1.1 * profile.rank(self.tau)[1].double() + BLOCK

    def lacks_ceiling(self, profile: Profile) -> Bool[Tensor, "*b"]:
        _, guess, high = profile.rank(self.tau)
        return high - guess <= self.within / 2 * guess


@dataclass(frozen=True)
class ShareInterval(Goal):
    """An interval for the energy share of the first r values."""

    r: int
    within: float

    def reached(self, profile: Profile) -> Bool[Tensor, "*b"]:
        low, _, high = profile.share(self.r)
        return high - low <= self.within

    def columns(self, profile: Profile) -> Float[Tensor, "*b"]:
        return torch.full_like(profile.energy, self.r + BLOCK)

    def lacks_ceiling(self, profile: Profile) -> Bool[Tensor, "*b"]:
        low, guess, _ = profile.share(self.r)
        return guess - low <= self.within / 2


@dataclass(frozen=True)
class FirstValue(Goal):
    """An interval for σ_1² that is narrow against it."""

    within: float

    def reached(self, profile: Profile) -> Bool[Tensor, "*b"]:
        low, high = profile.lower[..., 0], profile.upper[..., 0]
        return high - low <= self.within * high + profile.slack

    def columns(self, profile: Profile) -> Float[Tensor, "*b"]:
        return torch.full_like(profile.energy, 2 * BLOCK)

    def lacks_ceiling(self, profile: Profile) -> Bool[Tensor, "*b"]:
        return torch.ones_like(profile.energy, dtype=torch.bool)


@dataclass(frozen=True)
class WholeSpectrum(Goal):
    """All values as an estimate; reached only if the sketch holds all of the energy."""

    otherwise = "estimated"

    def reached(self, profile: Profile) -> Bool[Tensor, "*b"]:
        return profile.energy - profile.squares.sum(-1) <= profile.slack

    def columns(self, profile: Profile) -> Float[Tensor, "*b"]:
        return torch.full_like(profile.energy, inf)
