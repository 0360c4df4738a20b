"""How far the sums Σ_{i≤r} σ_i² of an operator can be told, from products with A and Aᵀ alone.

Three routes, by size alone. One core, float32, causal, seconds a head at 1024 · 2048: full SVD 0.19 · 1.4; forming A
0.01 · 0.06; a product with 16 columns 0.0005 · 0.002 where A is formed, 0.005 · 0.01 where it is not.
    min(n, m) ≤ EXACT        the full decomposition in float64: nothing iterative is cheaper there
    n · m ≤ FORMED           A is formed once, and products are matrix products; heads of a batch that are done drop out
                             (a GPU forms larger ones, unless products are fused, and faster)
    beyond                   A is never formed: O(n + m) memory; a batch goes on until its last head is done

A sketch grows until every goal is reached. Goals that need more columns than the budget are abandoned: from `resolved`
columns on, more of them hardly improve the estimate of the other values, and the search ends there.

The bounds of `linalg.floor` and `linalg.ceiling` are certified, for the matrix as its own precision computes it. They
are deterministic, except for the bound on the norm of what the sketch leaves out: it fails with probability `failure`
at most, over the random starts, and `failure=0` does without it. `slack` allows for rounding: an energy may be off by
ROUNDING epsilons (real heads: 2), and U by its measured departure from orthonormality.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from math import ceil, inf, prod
from typing import Any, NamedTuple, TypeVar

import torch

from heedful import linalg
from heedful.column_slabs import Pages, Trimmed
from heedful.kernels.row_statistics.sums import Request
from heedful.measures.gpu_sketch import LaunchedSketch
from heedful.measures.profile import BLOCK, Goal, Profile, spread
from heedful.operator import AttentionOperator
from heedful.shapes import Bool, Float, Int, Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

EXACT = 512  # shorter side up to which the full decomposition is cheapest
FORMED = 1 << 23  # entries of a head up to which forming it pays: 32 MiB in float32
FORMED_ON_GPU = 1 << 27  # there: 512 MiB, a product with which takes less than a launch of anything cleverer
FORMED_RATHER_THAN_FUSED = 1 << 24  # and where products are fused: they take more launches, but less time
HELD = 1 << 28  # entries of a batch that are formed together at most: 1 GiB in float32
GPU_BLOCK = 64  # columns of a block on a GPU: fewer take as long
WIDE_BLOCK = 32  # of a block where computing the scores again costs as much as this many columns (a CPU, A not formed),
# and on a GPU where several heads are formed: there the eigenproblems of the sketches take longest, and these have half
# as many columns for the same number of blocks
GROUP = 3 << 22  # entries of heads that are measured in one batch on a CPU, to share the cost of many small operations
PROBES, GLANCE = 16, 4  # random starts and Lanczos steps of a glance: its bound is about twice the norm
SETTLED = 0.01  # a Ritz value with a smaller relative residual stands for one singular value, not for several
BUDGET = 1024
ROUNDING = 64  # relative error of an energy, in units of the dtype's epsilon


@dataclass(frozen=True)
class SearchOptions:
    """How far a search for singular values goes.

    budget    products (columns through A or Aᵀ) to spend at most; a batch that is not materialised shares them
    failure   probability that a bound fails, over the random starts; 0 leaves nothing to chance, and widens intervals
    seed      of the random starts

    >>> import heedful as h
    >>> A = h.Softmax().operator(*torch.randn(2, 600, 16).unbind())
    >>> int(h.effective_rank(A, search=h.SearchOptions(budget=128)).products) <= 128
    True
    """

    budget: int = BUDGET
    failure: float = 1e-9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget: {self.budget} products, expected 1 or more.")
        if not 0 <= self.failure < 1:
            raise ValueError(f"failure: expected a probability from 0 (deterministic) to below 1, got {self.failure}.")


DEFAULT = SearchOptions()


def with_old_keywords(function: Function) -> Function:
    """Let a measure take budget=, failure= and seed= for one more release, with a DeprecationWarning."""

    @wraps(function)
    def call(*args, **kwargs):
        old = {name: kwargs.pop(name) for name in ("budget", "failure", "seed") if name in kwargs}
        if old:
            given = ", ".join(f"{name}={value!r}" for name, value in old.items())
            warnings.warn(
                f"{function.__name__}({given}) is now {function.__name__}(search=heedful.SearchOptions({given})).",
                DeprecationWarning,
                stacklevel=2,
            )
            kwargs["search"] = replace(kwargs.get("search", DEFAULT), **old)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def measure(
    op: AttentionOperator | linalg.Matrices,
    *goals: Goal,
    energy: Float[Tensor, "*b"] | None = None,
    search: SearchOptions = DEFAULT,
) -> Profile:
    """Grow a sketch by the cheapest route until the goals are reached, or out of reach of the budget."""
    _check(op, energy)
    # In 16 bits rounding would drown the small singular values: A and what it is multiplied by are float32 at least.
    with torch.autocast(op.device.type, enabled=False):
        if isinstance(op, Trimmed):
            return _sketched(op, goals, energy, search)
        return _by_route(op.float() if op.dtype.itemsize < 4 else op, goals, energy, search)


def _by_route(
    op: AttentionOperator | Tensor, goals: Sequence[Goal], energy: Tensor | None, search: SearchOptions
) -> Profile:
    *batch, n, m = op.shape
    magnitude = op.magnitude().cpu() if isinstance(op, AttentionOperator) and op.may_cancel else None
    if isinstance(op, Tensor) or pays_to_form(op):
        dense = op if isinstance(op, Tensor) else op.materialise()
        if min(n, m) <= EXACT:
            return _allowing(_exact(dense), magnitude, dense.dtype)
        known = None if energy is None else energy.double().expand(batch).reshape(-1)
        found = _formed(dense.reshape(-1, n, m), known, goals, search)
        return _allowing(_joined(found, tuple(batch)), magnitude, dense.dtype)
    if energy is None:
        energy = squared_row_norms(op).sum(-1)
    energy = _finite(energy.double().expand(batch))
    [whole] = _iterate(op if n <= m else op.mT, energy, goals, search, block_of(op))
    profile = replace(whole.profile, stopped=_in_words(whole.reasons)).knowing(whole.profile._ranks)
    return _allowing(profile, magnitude, op.dtype)


def _allowing(profile: Profile, magnitude: Float[Tensor, "*b"] | None, dtype: torch.dtype) -> Profile:
    """The profile of a sum whose terms have these norms together: where they cancel, rounding errors do not.

    Entries are off by ε Σ_t |c_t| |A_t|, so ‖A‖² is off by 2 ε ‖A‖ · magnitude + (ε · magnitude)². For one matrix,
    whose magnitude is ‖A‖, that is what the slack allows for anyway.
    """
    if magnitude is None:
        return profile
    error = ROUNDING * torch.finfo(dtype).eps * magnitude.to(profile.energy.device)
    return replace(profile, slack=torch.maximum(profile.slack, error * (profile.energy.sqrt() + error)))


def pays_to_form(op: AttentionOperator) -> bool:
    """True if these heads are measured from their matrices: each is small enough, and all of them together are."""
    n, m = op.shape[-2:]
    most = FORMED if op.device.type == "cpu" else FORMED_RATHER_THAN_FUSED if op.fused else FORMED_ON_GPU
    return (min(n, m) <= EXACT or n * m <= most) and op.entries <= HELD


def block_of(op: AttentionOperator | linalg.Matrices) -> int:
    """Columns of a block, by the route. For the same number of blocks, a budget grows with the columns of a block."""
    formed = isinstance(op, linalg.Matrices) or pays_to_form(op)
    if op.device.type == "cpu":
        return BLOCK if formed else WIDE_BLOCK
    return WIDE_BLOCK if formed and prod(op.shape[:-2]) > 1 else GPU_BLOCK


def squared_row_norms(op: AttentionOperator) -> Float[Tensor, "*b n"]:
    """Σ_j A_ij² in float64: one streaming pass where the mechanism has one, else blocks of rows; O(n + m) memory."""
    return op.float().row_sums(Request()).square.double()


def _check(op: AttentionOperator | linalg.Matrices, energy: Tensor | None) -> None:
    if not isinstance(op, AttentionOperator | Tensor | Trimmed):
        raise TypeError(
            f"op: expected an AttentionOperator or a tensor (*batch, n, m), got {type(op).__name__}. Likely cause: a "
            "mechanism instead of mechanism.operator(q, k)."
        )
    if not op.dtype.is_floating_point:
        raise TypeError(f"op: {op.dtype}, expected real numbers. Likely cause: a mask; mask.float() has a spectrum.")
    if len(op.shape) < 2 or 0 in op.shape:
        raise ValueError(f"op: shape {tuple(op.shape)}, expected (*batch, n, m) with n, m ≥ 1: nothing to measure.")
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


class _Part(NamedTuple):
    """Heads that were finished together: their indices in the batch, and the reason for each."""

    heads: Int[Tensor, " c"]
    profile: Profile
    reasons: list[str]


_pages = Pages()


def _formed(
    dense: Float[Tensor, "b n m"], energy: Tensor | None, goals: Sequence[Goal], search: SearchOptions
) -> list[_Part]:
    b, n, m = dense.shape
    if energy is None:
        energy = torch.linalg.vector_norm(dense, dim=-1).double().square().sum(-1)
    energy = _finite(energy)
    if n > m:
        dense = dense.mT
    if dense.device.type != "cpu":
        return _iterate(dense, energy, goals, search, block_of(dense))
    step = ceil(b / ceil(b / max(1, GROUP // (n * m))))
    found = []
    for at in range(0, b, step):
        _pages.begin()
        part = Trimmed.of(dense[at : at + step], _pages.empty)
        parts = _iterate(part, energy[at : at + step], goals, search, BLOCK)
        found += [part._replace(heads=part.heads + at) for part in parts]
    return found


def _sketched(slabs: Trimmed, goals: Sequence[Goal], energy: Tensor | None, search: SearchOptions) -> Profile:
    """The profile of matrices that a pass over their rows left in slabs; the pass computed their energies, too."""
    if energy is None:
        raise ValueError(f"energy: None, expected that of every head: a pass that leaves slabs {slabs.shape} has it.")
    _pages.begin()
    parts = _iterate(slabs, _finite(energy.double().reshape(-1)), goals, search, BLOCK)
    return _joined(parts, tuple(energy.shape))


def _iterate(
    op: linalg.Linear, energy: Tensor, goals: Sequence[Goal], options: SearchOptions, block: int
) -> list[_Part]:
    """Grow a sketch, and bound the norm of what it leaves out, until the goals are reached or abandoned.

    Finished heads are dropped from a batch of matrices; an operator goes on until its last head is finished.
    """
    search = _Search(op, energy.cpu(), options, block)
    most = search.sketch.most
    found: list[_Part] = []
    check = float(max(goal.first for goal in goals))
    if op.device.type != "cpu":  # there columns cost little, and one check as much as half of all columns
        check = max(check, search.resolved)
        check = check if most > 1.5 * check else most
    while True:
        search.sketch.grow()
        width = search.sketch.width
        if width < min(check, most):
            continue
        profile = search.profile()
        unmet = _unmet(goals, profile)
        # If other goals need more columns anyway, glance later, at a smaller remainder.
        if width >= min(search.resolved, most) or len(goals) == 1:
            lacking = unmet & torch.stack([goal.lacks_ceiling(profile) for goal in goals])
            if search.glance(lacking.any(0)):
                profile = search.profile()
                unmet = _unmet(goals, profile)
        target, why = _target(goals, profile, unmet, width, search.resolved, most)
        done = torch.isinf(target) | search.sketch.full
        if bool(done.all()):
            return [*found, _Part(search.heads, search.finished(profile, ...), why)]
        if isinstance(op, linalg.Matrices) and bool(done.any()):
            out, on = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
            found.append(_Part(search.heads[out], search.finished(profile, out), [why[at] for at in out.tolist()]))
            search.keep(on)
        # By then solving costs as much as growing: check again only when a goal may have been reached.
        check = max(width * 1.5, width + block, min(2.0 * width, float(target.min())))


def _unmet(goals: Sequence[Goal], profile: Profile) -> Bool[Tensor, "g ..."]:
    return ~torch.stack([goal.reached(profile) for goal in goals])


def _target(
    goals: Sequence[Goal], profile: Profile, unmet: Bool[Tensor, "g ..."], width: int, resolved: int, most: int
) -> tuple[Float[Tensor, "*b"], list[str]]:
    """Columns needed to reach the next goal of each head, ∞ to stop; and the reason for stopping."""
    columns = torch.stack([goal.columns(profile) for goal in goals])
    hopeful = unmet & (columns <= most)
    target = torch.where(hopeful, columns, inf).amin(0)
    if width < min(resolved, most):
        target = torch.where(unmet.any(0), target.clamp(max=resolved), target)
    missed = torch.where(unmet.any(0), unmet.int().argmax(0), -1).flatten().tolist()
    return target, [goals[at].otherwise if at >= 0 else "narrow enough" for at in missed]


class _Search:
    """A sketch of some heads, the bound on the norm of what it leaves out, and the products that both have cost."""

    def __init__(self, op: linalg.Linear, energy: Tensor, options: SearchOptions, block: int):
        self.energy = energy
        self.failure, self.seed, self.budget = options.failure, options.seed, options.budget
        # As many columns as leave room for a glance, but half of a small budget; at least one block.
        room = self.budget - block
        columns = (room if self.failure == 0 else max(room - PROBES * (2 * GLANCE - 1), room // 2)) // 2
        kind = linalg.Sketch if op.device.type == "cpu" else LaunchedSketch
        empty = _pages.empty if isinstance(op, Trimmed) else torch.empty
        self.sketch = kind(op, block, max(block, columns // block * block), self.seed, empty)
        self.resolved = min(64 + 4 * block, 256)
        self.heads = torch.arange(len(energy) if energy.ndim else 1)
        self.ritz: linalg.Ritz | None = None
        self.told: dict[str, Any] = {}
        self.norm = torch.full_like(energy, inf)
        self.spent = torch.zeros_like(energy, dtype=torch.long)
        self.glanced, self.sent = 0, 0

    def keep(self, heads: Int[Tensor, " c"]) -> None:
        """Go on with these heads alone."""
        self.sketch = self.sketch.take(heads.to(self.sketch.op.device))
        for name in ("energy", "norm", "spent", "heads"):
            setattr(self, name, getattr(self, name)[heads])
        self.ritz = None

    def glance(self, heads: Bool[Tensor, "*b"]) -> bool:
        """Bound the norm of what the sketch of these heads leaves out, by a few Lanczos steps. False if it was skipped:
        where `failure` is 0, the budget is used up, or the sketch has hardly grown since the last time.
        """
        cost = PROBES * (2 * GLANCE - 1)
        left = self.budget - self.sketch.products - int(self.spent.max())
        if self.failure == 0 or not bool(heads.any()) or left < cost or self.sketch.width < 1.5 * self.glanced:
            return False
        self.glanced, self.sent = self.sketch.width, self.sent + 1
        op, basis, at = self.sketch.op, self.sketch.basis, None
        if isinstance(op, linalg.Matrices) and not bool(heads.all()):
            at = heads.nonzero()[:, 0]
            op, basis = linalg.taken(op, at.to(op.device)), basis[at.to(op.device)]
        largest = linalg.Probes(op, basis, PROBES, self.seed + self.sent).largest(GLANCE)
        # The t-th bound may fail with probability failure / 2ᵗ: all of them together with less than failure.
        # A bound stays valid as the sketch grows, since what is left out only shrinks.
        bound = largest / (1 - linalg.norm_slack(op.shape[-2], PROBES, GLANCE, self.failure / 2**self.sent))
        chosen: Any = ... if at is None else at
        self.norm[chosen] = torch.minimum(self.norm[chosen], bound)
        self.spent[chosen] += cost
        return True

    def profile(self) -> Profile:
        n, sketch = self.sketch.op.shape[-2], self.sketch
        if self.ritz is None or self.ritz.squares.shape[-1] != sketch.width:
            self.ritz = sketch.solve()
            self.told = self._told_by(self.ritz, n)
        ritz = self.ritz
        residual, norm = self._left_out()
        self.cut = linalg.cuts(ritz, norm)
        return Profile(
            **self.told,
            ceilings=ritz.squares + norm[..., None],
            upper=linalg.ceiling(ritz, residual, norm, n, self.cut),
            products=sketch.products + self.spent,
            failure=self.failure if self.sent else 0.0,
            stopped="",
        )

    def _told_by(self, ritz: linalg.Ritz, n: int) -> dict[str, Any]:
        """The fields of a profile that a glance does not change."""
        settled = (ritz.leaks <= SETTLED * ritz.squares).long().cumprod(-1).sum(-1)
        rounding = ROUNDING * torch.finfo(self.sketch.op.dtype).eps
        return dict(
            squares=ritz.squares,
            errors=_relative_errors(ritz),
            energy=self.energy,
            lower=linalg.floor(ritz.squares, self._left_out()[0], n),
            middle=spread(ritz, settled, self.energy, n),
            slack=(rounding + 2 * self.sketch.defect) * self.energy,
        )

    def _left_out(self) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        """‖R‖² and a bound of ‖R‖₂²."""
        residual = (self.energy - self.sketch.captured).clamp(min=0)
        return residual, torch.minimum(self.norm, residual)

    def finished(self, profile: Profile, at: Any) -> Profile:
        """The profile of some heads, on the device of A, with the tightest bounds of single values."""
        assert self.ritz is not None
        _, norm = self._left_out()
        device = self.sketch.op.device
        whole = replace(profile, ceilings=linalg.ceilings(self.ritz, norm, self.cut)).knowing(profile._ranks)
        if at is ...:
            return whole.to(device)
        arrays: dict[str, Any] = {name: x[at] for name, x in vars(whole).items() if isinstance(x, Tensor)}
        ranks = {tau: tuple(x[at] for x in rank) for tau, rank in profile._ranks.items()}
        return replace(whole, **arrays).knowing(ranks).to(device)


def _relative_errors(ritz: linalg.Ritz) -> Float[Tensor, "*b k"]:
    """How far each θ may be below its σ, relative to it: an estimate from its residual and its distance to the rest."""
    leaks, squares = ritz.leaks, ritz.squares
    tiny = torch.finfo(torch.float64).tiny
    gaps = (squares - squares[..., -1:]).clamp(min=tiny)
    noise = torch.finfo(torch.float32).eps * squares[..., :1]  # smaller values are rounding noise
    return torch.minimum(leaks, leaks.square() / gaps) / (2 * torch.maximum(squares, noise).clamp(min=tiny))


def _joined(parts: list[_Part], batch: tuple[int, ...]) -> Profile:
    """The profile of all heads of a batch; narrower sketches are padded with NaN."""
    if len(parts) == 1:
        return _shaped(parts[0], batch)
    widest = max(part.profile.squares.shape[-1] for part in parts)
    order = torch.cat([part.heads for part in parts]).argsort()

    def joined(name: str) -> Tensor:
        arrays = [getattr(part.profile, name) for part in parts]
        if name in ("squares", "ceilings", "errors"):
            arrays = [torch.nn.functional.pad(x, (0, widest - x.shape[-1]), value=torch.nan) for x in arrays]
        whole = torch.cat(arrays)[order]
        return whole.reshape((*batch, *whole.shape[1:]))

    names = ("squares", "ceilings", "errors", "energy", "lower", "upper", "middle", "slack", "products")
    return Profile(
        **{name: joined(name) for name in names},
        failure=max(part.profile.failure for part in parts),
        stopped=_in_words([reason for part in parts for reason in part.reasons]),
    )


def _shaped(part: _Part, batch: tuple[int, ...]) -> Profile:
    """The profile of heads that were finished together, which are in order already."""
    profile = part.profile
    arrays: dict[str, Any] = {name: _by_head(x, batch) for name, x in vars(profile).items() if isinstance(x, Tensor)}
    ranks = {tau: tuple(_by_head(x, batch) for x in rank) for tau, rank in profile._ranks.items()}
    return replace(profile, **arrays, stopped=_in_words(part.reasons)).knowing(ranks)


def _by_head(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    return x.reshape((*batch, *x.shape[1:]))


def _in_words(reasons: list[str]) -> str:
    kinds = sorted(set(reasons))
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} in {reasons.count(kind)} of {len(reasons)} heads" for kind in kinds)
