"""What is known of a spectrum (`Profile`), when that is enough (`Goal`), and estimates of what a sketch leaves open.

Estimates (`spread`) come from the quadrature rule of the sketch's random start; certified bounds are in `linalg`.

quadrature   a sketch of t blocks from A Ω is a rule of t nodes: so much energy near each (`linalg`)
curve        ρ(σ²), the energy of all values below σ². A part f of a node's energy lies below the node: f = 1/2 inside
             a spectrum, less at its end at 0 (EDGE)
between      log σ² is a smooth function of log ρ: spectra of attention fall like powers, piece by piece
count        r = ∫ dρ / σ² along the curve
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch

from heedful.linalg import Ritz
from heedful.shapes import Bool, Float, Int, Tensor

BLOCK = 16  # columns of a block where A is materialised; narrower blocks need fewer products, but each costs more
TIE = 1 / 64  # an estimate reaches its target if it misses it by less than this part of the slack
CAUTION = 3  # residuals understate the error of close values: without this factor 9 % of real heads exceed 1 %
MANY = 4096  # from so many steps on, sorting takes longer than the rest
UNRESOLVED = 0.2  # a block of Ritz values is one node if their mean relative residual exceeds this
EDGE = 0.39, 0.48, 0.49  # f of the last node and of the two before it
FINE = 8  # pieces of the curve from one node to the next


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


def spread(ritz: Ritz, count: Int[Tensor, "*b"], energy: Float[Tensor, "*b"], n: int) -> Float[Tensor, "*b n"]:
    """Estimates of Σ_{i≤r} σ_i² for r = 1 … n: the first `count` Ritz values as they are, then a curve.

    The curve is σ² against the energy ρ that the smaller values hold, smooth in log ρ and log σ² (`_smooth`), through
    the nodes of the quadrature rule (`_nodes`). Values are counted along it: dr = dρ / σ². Its end, the whole energy,
    is certain.

    >>> exact = Ritz(torch.tensor([4.0, 1.0]).double(), torch.zeros(2), 1, torch.tensor([4.0, 2.0]).double())
    >>> spread(exact, torch.tensor(1), torch.tensor(6.0).double(), 4).tolist()
    [4.0, 5.0, 6.0, 6.0]
    """
    tiny = torch.finfo(torch.float64).tiny
    known = torch.arange(ritz.squares.shape[-1]) < count[..., None]
    left = (energy - torch.where(known, ritz.squares, 0).sum(-1)).clamp(min=0)[..., None]
    room = (n - count[..., None]).double()
    below, height = _smooth(*_nodes(ritz, known, left, room))
    # Between two points of the curve σ² is a power of ρ; beyond the last one the power goes on.
    fall, drop = -height.diff(dim=-1), below.diff(dim=-1)
    power = torch.where(drop > 0, fall / drop.clamp(min=1e-12), 0)
    power = torch.cat([power, _last(power, drop > 0)], -1)
    held, value = (-below).exp(), height.exp()
    many = held[..., :-1] / value[..., :-1] * drop * _growth((power[..., :-1] - 1) * drop)
    places = torch.nn.functional.pad(many.cumsum(-1), (1, 0))
    least = places[..., -1:] + held[..., -1:] / value[..., -1:].clamp(min=tiny)  # values that this energy takes
    shrink = (room / least.clamp(min=tiny)).clamp(max=1)
    places, value = places * shrink, value / shrink.clamp(min=tiny)
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    beyond = (ranks - count[..., None]).clamp(min=0)
    piece = _pieces(places + count[..., None], n)
    start, rest, size, power = (x.gather(-1, piece) for x in (places, held, value, power))
    part = (beyond - start).clamp(min=0) * size / rest.clamp(min=tiny)
    rest = rest * torch.exp(-part * _slowing(((power - 1) * part).clamp(min=-1)))
    # What the power leaves to values beyond the last one, all values after the last node share.
    after = (beyond - places[..., -1:]).clamp(min=0)
    rest = (rest - rest[..., -1:] * after / after[..., -1:].clamp(min=tiny)).clamp(min=0)
    sums = torch.nn.functional.pad(torch.where(known, ritz.squares, 0).cumsum(-1), (0, n - known.shape[-1]))
    sums = torch.where(beyond > 0, energy[..., None] - rest, sums[..., :n])
    sums = torch.minimum(sums, energy[..., None])
    sums[..., -1] = energy
    return _falling(sums.diff(dim=-1, prepend=torch.zeros_like(left))).cumsum(-1)


def _nodes(
    ritz: Ritz, known: Bool[Tensor, "*b k"], left: Float[Tensor, "*b 1"], room: Float[Tensor, "*b 1"]
) -> tuple[Float[Tensor, "*b g"], Float[Tensor, "*b g"]]:
    """−log ρ and log σ² at the nodes of the quadrature rule, in order; the last one is repeated.

    A sketch of t blocks has t nodes for what it has not resolved: the Ritz values of a block are one node, split by the
    random start, and their geometric mean is its place. Values that are resolved are nodes of their own. Half of a
    node's energy lies below it, but less at the end of the spectrum, at 0: 0.39, 0.46, 0.49 by the rule of Gauss and
    Legendre with six nodes, which is that of a flat density. EDGE is what real heads have (docs/measures.md).
    """
    p, k = ritz.block, known.shape[-1]
    tiny = torch.finfo(torch.float64).tiny
    least = torch.finfo(torch.float32).eps * ritz.squares[..., :1]  # below it a Ritz value is rounding
    squares = torch.maximum(ritz.squares, least).clamp(min=tiny)
    told = torch.where(known, 0, ritz.shares)
    told = told * (left / told.sum(-1, keepdim=True).clamp(min=tiny))
    blocks = -(-k // p)

    def in_blocks(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (blocks * p - k, 0)).unflatten(-1, (blocks, p))

    weight, height, leak, own = map(in_blocks, (told, squares.log(), ritz.leaks / squares, (~known).double()))
    coarse = (leak * own).sum(-1) > UNRESOLVED * own.sum(-1)
    whole = weight.sum(-1)
    mean = (weight * height).sum(-1) / whole.clamp(min=tiny)
    first = torch.arange(p) == 0
    weight = torch.where(coarse[..., None], whole[..., None] * first, weight).flatten(-2)
    height = torch.where(coarse[..., None], mean[..., None], height).flatten(-2)
    edge = torch.tensor([0.5] * blocks + [*reversed(EDGE)], dtype=torch.float64)[-blocks:]
    part = torch.where(coarse, edge, 0.5)[..., None].expand(*coarse.shape, p).flatten(-2)
    below = left - weight.cumsum(-1) + weight * part
    some = (weight > 1e-12 * left) & (below > 1e-12 * left)
    number = some.sum(-1, keepdim=True)
    order = (~some).to(torch.uint8).sort(dim=-1, stable=True).indices
    order = order.gather(-1, torch.minimum(torch.arange(order.shape[-1]), (number - 1).clamp(min=0)))
    below, height = below.gather(-1, order), height.gather(-1, order)
    # Where nothing tells of the rest, its values are taken to be equal.
    below = torch.where(number > 0, below, left)
    height = torch.where(number > 0, height, (left / room.clamp(min=1)).clamp(min=tiny).log())
    below = torch.cat([left, below], -1).clamp(min=tiny)
    return -below.log(), torch.cat([height[..., :1], height], -1)


def _smooth(x: Float[Tensor, "*b g"], y: Float[Tensor, "*b g"]) -> tuple[Float[Tensor, "*b f"], Float[Tensor, "*b f"]]:
    """FINE points from each node to the next, on cubic pieces that rise or fall where the nodes do.

    Slopes are the harmonic means of those on either side (Fritsch and Butland 1984); at the ends, those of the chord.
    """
    width = x.diff(dim=-1).clamp(min=0)
    chord = torch.where(width > 0, y.diff(dim=-1) / width.clamp(min=1e-12), 0)
    one, two = width[..., :-1], width[..., 1:]
    left, right = chord[..., :-1], chord[..., 1:]
    near, far = 2 * two + one, two + 2 * one
    tiny = torch.finfo(torch.float64).tiny
    mean = (near + far) * left * right / (near * right + far * left).abs().clamp(min=tiny) * left.sign()
    slope = torch.where(left * right > 0, mean, 0)
    slope = torch.where(two > 0, slope, left)  # the last node
    slope = torch.cat([chord[..., :1], slope, chord[..., -1:]], -1)
    s = torch.arange(FINE, dtype=torch.float64) / FINE
    x0, y0, y1, d0, d1 = (z[..., None] for z in (x[..., :-1], y[..., :-1], y[..., 1:], slope[..., :-1], slope[..., 1:]))
    h = width[..., None]
    fine = (
        (1 + 2 * s) * (1 - s) ** 2 * y0
        + s * (1 - s) ** 2 * h * d0
        + s * s * (3 - 2 * s) * y1
        + s * s * (s - 1) * h * d1
    )
    along, fine = ((x0 + s * h).flatten(-2), fine.flatten(-2))
    return torch.cat([along, x[..., -1:]], -1), torch.cat([fine, y[..., -1:]], -1)


def _last(x: Float[Tensor, "*b f"], some: Bool[Tensor, "*b f"]) -> Float[Tensor, "*b 1"]:
    """The last marked entry; the first entry where none is marked."""
    at = torch.where(some, torch.arange(some.shape[-1]), 0).amax(-1, keepdim=True)
    return x.gather(-1, at)


def _growth(x: Tensor) -> Tensor:
    """(eˣ − 1) / x"""
    small = x.abs() < 1e-6
    return torch.where(small, 1 + x / 2, torch.expm1(x) / torch.where(small, 1, x))


def _slowing(x: Tensor) -> Tensor:
    """log(1 + x) / x"""
    small = x.abs() < 1e-6
    return torch.where(small, 1 - x / 2, torch.log1p(x) / torch.where(small, 1, x))


def _falling(steps: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """The steps in descending order. They nearly always are; for long rows it is faster to check that than to sort."""
    if steps.shape[-1] > MANY and bool((steps.diff(dim=-1) <= 1e-13 * steps[..., :1]).all()):
        return steps
    return steps.sort(-1, descending=True).values


def _pieces(x: Float[Tensor, "*b f"], n: int) -> Int[Tensor, "*b n"]:
    """For each rank 1 … n the index of the last x ≤ rank, x ascending; 0 where there is none.

    Counts instead of `searchsorted`, which would start all of torch's threads.
    """
    after = x.clamp(max=n + 1).ceil().long().clamp(max=n + 1)  # the first rank that reaches each
    counts = torch.zeros(*x.shape[:-1], n + 2, dtype=torch.long).scatter_add(-1, after, torch.ones_like(after))
    return (counts.cumsum(-1)[..., 1 : n + 1] - 1).clamp(0, x.shape[-1] - 1)
