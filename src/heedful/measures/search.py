"""How far the sums Σ_{i≤r} σ_i² of an operator can be told, from products with A and Aᵀ alone.

Three routes, by size alone. One core, float32, causal, seconds a head at 1024 · 2048: full SVD 0.19 · 1.4; forming A
0.01 · 0.06; a product with 16 columns 0.0006 · 0.002 where A is formed, 0.005 · 0.01 where it is not.
    min(n, m) ≤ EXACT        the full decomposition in float64: nothing iterative is cheaper there
    n · m ≤ FORMED           A is formed once, and products are matrix products, head by head
    beyond                   A is never formed: O(n + m) memory; a batch goes on until its last head is done

What is certain: the bounds in `linalg.floor` and `linalg.ceiling`, for the matrix as its own precision computes it.
They are deterministic, but for the bound on the norm of what the sketch leaves out, which fails with probability
`failure` at most, over the random starts; `failure=0` does without it. Rounding is allowed for by `slack`: an energy
is taken to be within ROUNDING epsilons (real heads: 2), and U within the departure from orthonormality that it shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import torch

from heedful import linalg
from heedful.kernels.row_statistics.sums import Request
from heedful.operator import AttentionOperator
from heedful.shapes import Bool, Float, Int, Tensor

EXACT = 512  # shorter side up to which the full decomposition is cheapest
FORMED = 1 << 23  # entries of a head up to which forming it pays: 32 MiB in float32
FORMED_ON_GPU = 1 << 27  # there: 512 MiB, a product with which takes less than a launch of anything cleverer
HELD = 1 << 28  # entries of a batch that are formed together at most: 1 GiB in float32
GPU_BLOCK = 64  # columns of a block on a GPU, formed or not: fewer cost the same
BLOCK = 16  # columns of a block where A is formed: fewer converge in fewer products, but those cost more each
WIDE_BLOCK = 32  # where A is not formed, the scores cost as much as this many columns
FIRST = 64  # columns before the rest is probed
PROBES = 16
GLANCE, STEPS = 5, 10  # steps of a probe: enough to bound a norm, enough to tell a distribution
SETTLED = 0.3  # a Ritz vector whose residual is less than this share of its θ² is taken out before the rest is told
CAUTION = 3  # residuals understate the error of values with close neighbours: without it 9 % of real heads exceed 1 %
BUDGET = 1024
ROUNDING = 64  # relative error of an energy, in units of the dtype's epsilon


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

    @property
    def size(self) -> int:
        return self.lower.shape[-1]

    def rank(self, tau: float) -> tuple[Int[Tensor, "*b"], Int[Tensor, "*b"], Int[Tensor, "*b"]]:
        """The effective rank at tau: lower bound, estimate, upper bound; 0 for a matrix of zeros."""
        target = tau * self.energy
        least = _first(self.upper, target - self.slack)
        most = _first(self.lower, target + self.slack)
        guess = _first(self.middle, target - self.slack)
        some = self.energy > 0
        return least * some, guess.clamp(least, most) * some, most * some

    def share(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """The share of the first r values in the energy: lower bound, estimate, upper bound."""
        whole = self.energy.clamp(min=torch.finfo(torch.float64).tiny)
        part = self.slack / whole
        low, guess, high = (x[..., r - 1] / whole for x in (self.lower, self.middle, self.upper))
        low, high = (low - part).clamp(0, 1), (high + part).clamp(0, 1)
        return low, guess.clamp(low, high), high


def _first(sums: Float[Tensor, "*b s"], target: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """The fewest terms whose sum reaches the target; all of them where rounding keeps it out of reach."""
    return ((sums < target[..., None]).sum(-1) + 1).clamp(max=sums.shape[-1])


class Goal(ABC):
    """When a measurement is good enough, how many columns that may take, and whether probes bring it nearer."""

    glances = False
    looks = False
    least = 1  # columns without which there is no answer at all
    otherwise = "beyond the budget"  # what to say where it is not reached

    @abstractmethod
    def reached(self, profile: Profile) -> bool: ...

    @abstractmethod
    def columns(self, profile: Profile) -> float: ...

    def hopeless(self, profile: Profile, most: int) -> bool:
        """Whether the first values tell already that so many columns will not do: a guess, to save a glance."""
        return False

    def beyond(self, profile: Profile) -> Bool[Tensor, "*b"]:
        """In which heads the answer depends on values that the sketch has not found."""
        return torch.ones_like(profile.energy, dtype=torch.bool)


@dataclass(frozen=True)
class TopValues(Goal):
    """The first k values to a relative accuracy, as their residuals tell it."""

    k: int
    within: float

    @property
    def least(self) -> int:  # type: ignore[override]
        return self.k

    def reached(self, profile: Profile) -> bool:
        enough = profile.squares.shape[-1] >= self.k
        return enough and bool((CAUTION * profile.errors[..., : self.k] <= self.within).all())

    def columns(self, profile: Profile) -> float:
        return 3 * self.k


@dataclass(frozen=True)
class RankInterval(Goal):
    """An interval for the effective rank that is narrow against the estimate."""

    tau: float
    within: float
    glances = looks = True

    def reached(self, profile: Profile) -> bool:
        low, guess, high = profile.rank(self.tau)
        # One more or less, where rounding decides which, is as narrow as it gets.
        tie = _first(profile.upper, self.tau * profile.energy) == _first(profile.lower, self.tau * profile.energy)
        return bool((high - low <= torch.maximum(self.within * guess, tie.double())).all())

    def columns(self, profile: Profile) -> float:
        return 1.1 * float(profile.rank(self.tau)[1].max()) + BLOCK

    def hopeless(self, profile: Profile, most: int) -> bool:
        # The first half of the Ritz values have settled more or less, so those to come are hardly larger.
        width = profile.squares.shape[-1]
        reach = profile.squares.sum(-1) + (most - width) * profile.squares[..., width // 2]
        return bool((reach < self.tau * profile.energy).any())

    def beyond(self, profile: Profile) -> Bool[Tensor, "*b"]:
        return profile.rank(self.tau)[1] > 0.8 * profile.squares.shape[-1]


@dataclass(frozen=True)
class ShareInterval(Goal):
    """An interval for the energy share of the first r values."""

    r: int
    within: float
    glances = looks = True

    def reached(self, profile: Profile) -> bool:
        low, _, high = profile.share(self.r)
        return bool((high - low <= self.within).all())

    def columns(self, profile: Profile) -> float:
        return self.r + BLOCK


@dataclass(frozen=True)
class FirstValue(Goal):
    """An interval for σ_1² that is narrow against it."""

    within: float
    glances = looks = True

    def reached(self, profile: Profile) -> bool:
        low, high = profile.lower[..., 0], profile.upper[..., 0]
        return bool((high - low <= self.within * high + profile.slack).all())

    def columns(self, profile: Profile) -> float:
        return 2 * BLOCK

    def beyond(self, profile: Profile) -> Bool[Tensor, "*b"]:
        return torch.zeros_like(profile.energy, dtype=torch.bool)


@dataclass(frozen=True)
class WholeSpectrum(Goal):
    """All values, as an estimate, unless the sketch holds everything."""

    looks = True
    otherwise = "estimated"

    def reached(self, profile: Profile) -> bool:
        return bool((profile.energy - profile.squares.sum(-1) <= profile.slack).all())

    def columns(self, profile: Profile) -> float:
        return inf


def measure(
    op: AttentionOperator | Tensor,
    *goals: Goal,
    energy: Float[Tensor, "*b"] | None = None,
    budget: int = BUDGET,
    failure: float = 1e-9,
    seed: int = 0,
) -> Profile:
    """Products with A and Aᵀ until the goals are reached or the budget will not do; by the route that is cheapest."""
    _check(op, energy, budget, failure)
    op = op.float() if op.dtype.itemsize < 4 else op  # rounding to 16 bits would drown the small singular values
    *batch, n, m = op.shape
    if isinstance(op, Tensor) or pays_to_form(op):
        dense = op if isinstance(op, Tensor) else op.form()
        if min(n, m) <= EXACT:
            return _exact(dense)
        dense = dense.reshape(-1, n, m)
        known = [None] * len(dense) if energy is None else energy.double().expand(batch).reshape(-1)
        heads = [_formed(head, own, goals, budget, failure, seed) for head, own in zip(dense, known, strict=True)]
        return _stack(heads, tuple(batch))
    if energy is None:
        energy = squared_row_norms(op).sum(-1)
    energy = _finite(energy.double().expand(batch))
    block = WIDE_BLOCK if op.device.type == "cpu" else GPU_BLOCK
    return _iterate(op if n <= m else op.mT, energy, goals, budget, failure, seed, block)


def pays_to_form(op: linalg.Linear) -> bool:
    """Whether these heads are measured from their matrices: each small enough, and all of them together."""
    *batch, n, m = op.shape
    most = FORMED if op.device.type == "cpu" else FORMED_ON_GPU
    return (min(n, m) <= EXACT or n * m <= most) and prod(batch) * n * m <= HELD


def squared_row_norms(op: AttentionOperator) -> Float[Tensor, "*b n"]:
    """Σ_j A_ij² in float64: one streaming pass where the mechanism has one, else blocks of rows; O(n + m) memory."""
    return op.float().row_sums(Request()).square.double()


def _check(op: AttentionOperator | Tensor, energy: Tensor | None, budget: int, failure: float) -> None:
    if not isinstance(op, AttentionOperator | Tensor):
        raise TypeError(
            f"op: expected an AttentionOperator or a tensor (*batch, n, m), got {type(op).__name__}. Likely cause: a "
            "mechanism instead of mechanism.operator(q, k)."
        )
    if not op.dtype.is_floating_point:
        raise TypeError(f"op: {op.dtype}, expected real numbers. Likely cause: a mask; mask.float() has a spectrum.")
    if len(op.shape) < 2 or 0 in op.shape:
        raise ValueError(f"op: shape {tuple(op.shape)}, expected (*batch, n, m) with n, m ≥ 1: nothing to measure.")
    if budget < 1:
        raise ValueError(f"budget: {budget} products, expected 1 or more.")
    if not 0 <= failure < 1:
        raise ValueError(f"failure: expected a probability from 0 (deterministic) to below 1, got {failure}.")
    if energy is not None and (energy < 0).any():
        raise ValueError("energy: a sum of squares below 0.")


def _finite(energy: Tensor) -> Tensor:
    if not torch.isfinite(energy).all():
        bad = int((~torch.isfinite(energy)).sum())
        raise ValueError(
            f"op: Σ A_ij² is NaN or infinite in {bad} of {energy.numel()} heads; expected finite numbers. Likely "
            "cause: NaN or infinity in q or k; heedful.check_finite() names the entry."
        )
    return energy


def _exact(dense: Float[Tensor, "*b n m"]) -> Profile:
    _finite(dense.sum((-2, -1)))
    squares = _all_squares(dense)
    sums, energy = squares.cumsum(-1), squares.sum(-1)
    slack = ROUNDING * torch.finfo(dense.dtype).eps * energy
    none = torch.zeros_like(energy, dtype=torch.long)
    return Profile(squares, squares, torch.zeros_like(squares), energy, sums, sums, sums, slack, none, 0.0, "exact")


def _all_squares(dense: Float[Tensor, "*b n m"]) -> Float[Tensor, "*b s"]:
    """All σ², in float64.

    Those of a float32 matrix from its Gram matrix, in half the time: they come out to 1e-16 of the largest, and so σ to
    1e-8 of it, which is less than what is known of the entries.
    """
    wide = dense.double()
    if dense.dtype == torch.float64:
        return torch.linalg.svdvals(wide).square()
    short = wide if wide.shape[-2] <= wide.shape[-1] else wide.mT
    return torch.linalg.eigvalsh(short @ short.mT).flip(-1).clamp(min=0)


def _formed(
    head: Float[Tensor, "n m"], energy: Tensor | None, goals: Sequence[Goal], budget: int, failure: float, seed: int
) -> Profile:
    if energy is None:
        energy = torch.linalg.vector_norm(head, dim=-1).double().square().sum()
    energy = _finite(energy)
    if head.shape[-2] > head.shape[-1]:
        head = head.mT
    if head.device.type != "cpu":
        return _iterate(head, energy, goals, budget, failure, seed, GPU_BLOCK)
    return _iterate(linalg.Trimmed(head), energy, goals, budget, failure, seed, BLOCK)


def _iterate(
    op: linalg.Linear, energy: Tensor, goals: Sequence[Goal], budget: int, failure: float, seed: int, block: int
) -> Profile:
    """Grow a sketch, with glances at what it leaves out, until the goals are reached or out of reach."""
    least = max(goal.least for goal in goals)
    search = _Search(op, energy.cpu(), budget, failure, seed, block, least)
    most, check = search.sketch.most, float(least)
    while True:
        search.sketch.grow()
        width = search.sketch.width
        if width < min(check, most):
            continue
        profile = search.profile()
        unmet = [goal for goal in goals if not goal.reached(profile)]
        hopeful = [goal for goal in unmet if not goal.hopeless(profile, most)]
        if search.rest is not None:
            hopeful = [goal for goal in hopeful if goal.columns(profile) <= most]
        if width >= min(FIRST, most) and search.stale and any(goal.glances for goal in hopeful):
            search.glance()
            profile = search.profile()
            unmet = [goal for goal in unmet if not goal.reached(profile)]
        if not unmet:
            return search.finished(profile, "narrow enough")
        near = [goal.columns(profile) for goal in unmet if goal in hopeful and goal.columns(profile) <= most]
        if not search.sketch.full and (near or width < min(FIRST, most)):
            # Solving costs as much as growing by then: do it when there may be something to see.
            check = max(width * 1.25, width + block, min([2.0 * width, *near]))
            continue
        if any(goal.looks for goal in unmet):
            search.look(torch.stack([goal.beyond(profile) for goal in unmet if goal.looks]).any(0))
            profile = search.profile()
        unmet = [goal for goal in unmet if not goal.reached(profile)]
        return search.finished(profile, unmet[0].otherwise if unmet else "narrow enough")


class _Search:
    """A sketch, the last probes into what it leaves out, and what both have cost."""

    def __init__(
        self, op: linalg.Linear, energy: Tensor, budget: int, failure: float, seed: int, block: int, least: int
    ):
        self.op, self.energy, self.failure, self.seed = op, energy, failure, seed
        # As many columns as leave room for two glances and a look, but half of a small budget.
        columns = max(budget - PROBES * (2 * (STEPS + 2 * GLANCE) - 3) - block, (budget - block) // 2) // 2
        self.sketch = linalg.Sketch(op, block, max(block, columns, least), seed)
        self.budget = budget
        self.ritz: linalg.Ritz | None = None
        self.rest: linalg.Rest | None = None
        self.count = torch.zeros_like(energy, dtype=torch.long)  # Ritz values that the estimate takes as they are
        self.norm: Tensor | None = None
        self.looked = False
        self.glanced, self.spent, self.sent = 0, 0, 0

    @property
    def stale(self) -> bool:
        """Whether the sketch has grown so much that the last glance tells too little of what it leaves out by now."""
        return self.sketch.width >= 1.5 * self.glanced and self.left >= PROBES * (4 * GLANCE - 2)

    @property
    def left(self) -> int:
        """Products that may still be spent."""
        return self.budget - self.sketch.products - self.spent

    def glance(self) -> None:
        """A few steps, for a bound on the norm of what is left out, and a first idea of the rest."""
        self.glanced = self.sketch.width
        width = torch.full_like(self.count, self.sketch.width)
        self._probe(self.sketch.basis, width, GLANCE)

    def look(self, beyond: Bool[Tensor, "*b"]) -> None:
        """Enough steps for the distribution of the rest.

        Where the answer lies beyond the sketch, only what has converged is taken out: a Ritz vector that has not
        would leave its share of the neighbours behind, and flatten both.
        """
        assert self.ritz is not None
        steps = min(STEPS, (self.left // PROBES + 1) // 2)
        if steps < 2:
            return
        settled = (self.ritz.leaks <= SETTLED * self.ritz.squares).long().cumprod(-1).sum(-1)
        width = torch.where(beyond, settled, self.sketch.width)
        self._probe(self.sketch.first(width), width, steps)
        self.looked = True

    def _probe(self, basis: Tensor, width: Tensor, steps: int) -> None:
        self.sent += 1
        probes = linalg.Probes(self.op, basis, width, PROBES, self.seed + self.sent)
        self.rest = probes.advance(steps)
        self.count = width
        self.spent += probes.products
        if self.failure > 0:
            # The t-th bound may fail with probability failure / 2ᵗ: all of them together with less than failure.
            # Each stays good as the sketch grows, since what is left out only shrinks.
            loss = linalg.norm_slack(self.op.shape[-2], PROBES, self.rest.steps, self.failure / 2**self.sent)
            bound = self.rest.largest / (1 - loss)
            self.norm = bound if self.norm is None else torch.minimum(self.norm, bound)

    def profile(self) -> Profile:
        n, sketch = self.op.shape[-2], self.sketch
        if self.ritz is None or self.ritz.squares.shape[-1] != sketch.width:
            self.ritz = sketch.solve()
        ritz = self.ritz
        residual = (self.energy - sketch.captured).clamp(min=0)
        norm = residual if self.norm is None else torch.minimum(self.norm, residual)
        lower = middle = linalg.floor(ritz.squares, residual, n)
        if self.rest is not None:
            count = self.count if self.looked else torch.full_like(self.count, sketch.width)
            middle = linalg.filled(ritz.squares, count, self.energy, self.rest, n).cumsum(-1)
        return Profile(
            squares=ritz.squares,
            ceilings=ritz.squares + norm[..., None],
            errors=_relative_errors(ritz),
            energy=self.energy,
            lower=lower,
            upper=linalg.ceiling(ritz, residual, norm, n),
            middle=middle,
            slack=(ROUNDING * torch.finfo(self.op.dtype).eps + 2 * sketch.defect) * self.energy,
            products=torch.full_like(self.energy, sketch.products + self.spent, dtype=torch.long),
            failure=0.0 if self.norm is None else self.failure,
            stopped="",
        )

    def finished(self, profile: Profile, stopped: str) -> Profile:
        """Where A is, and with the best ceilings of single values, which no goal needs on the way."""
        assert self.ritz is not None
        residual = (self.energy - self.sketch.captured).clamp(min=0)
        norm = residual if self.norm is None else torch.minimum(self.norm, residual)
        profile = replace(profile, ceilings=linalg.ceilings(self.ritz, norm), stopped=stopped)
        arrays: dict[str, Any] = {
            name: value.to(self.op.device) for name, value in vars(profile).items() if isinstance(value, Tensor)
        }
        return replace(profile, **arrays)


def _relative_errors(ritz: linalg.Ritz) -> Float[Tensor, "*b k"]:
    """How far each θ may be below its σ, relative to it: an estimate from its residual and its distance to the rest."""
    leaks, squares = ritz.leaks, ritz.squares
    tiny = torch.finfo(torch.float64).tiny
    gaps = (squares - squares[..., -1:]).clamp(min=tiny)
    noise = torch.finfo(torch.float32).eps * squares[..., :1]  # below it nothing can be told, and nothing is waited for
    return torch.minimum(leaks, leaks.square() / gaps) / (2 * torch.maximum(squares, noise).clamp(min=tiny))


def _stack(heads: list[Profile], batch: tuple[int, ...]) -> Profile:
    """Heads measured one by one, as one; the sketches are as wide as the widest, NaN beyond their own width."""
    widest = max(head.squares.shape[-1] for head in heads)

    def joined(name: str) -> Tensor:
        parts = [getattr(head, name) for head in heads]
        if name in ("squares", "ceilings", "errors"):
            parts = [torch.nn.functional.pad(x, (0, widest - x.shape[-1]), value=torch.nan) for x in parts]
        return torch.stack(parts).reshape((*batch, *parts[0].shape))

    names = ("squares", "ceilings", "errors", "energy", "lower", "upper", "middle", "slack", "products")
    return Profile(
        **{name: joined(name) for name in names},
        failure=max(head.failure for head in heads),
        stopped=_in_words([head.stopped for head in heads]),
    )


def _in_words(reasons: list[str]) -> str:
    kinds = sorted(set(reasons))
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} in {reasons.count(kind)} of {len(reasons)} heads" for kind in kinds)
