"""Singular values of attention and the ranks made from them, each with bounds, at any length.

values          σ_1 ≥ σ_2 ≥ …                                     Ritz values of a block Lanczos sketch (`linalg`)
energy          E = Σ σ_i² = Σ_ij A_ij²                           exact, row by row
effective rank  fewest r with Σ_{i≤r} σ_i² ≥ τ E
energy share    Σ_{i≤r} σ_i² / E,  r = ⌈share · min(n, m)⌉
stable rank     E / σ_1²
entropic rank   exp(− Σ p_i ln p_i),  p_i = σ_i² / E              (Roy and Vetterli 2007, with σ² in place of σ)
decay           α where σ_i ∝ i^−α

Each of them but the last grows or shrinks with the sums Σ_{i≤r} σ_i² (the entropy is Schur-concave), so bounds on the
sums (`search`) are bounds on all. An operator, a tensor, or a `Spectrum` that was measured before will do; the last
costs no products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import torch

from heedful.linalg import Matrices
from heedful.measures.profile import FirstValue, Goal, Profile, RankInterval, ShareInterval, TopValues, WholeSpectrum
from heedful.measures.render import Measurement, altair, bars
from heedful.measures.search import DEFAULT, HELD, SearchOptions, measure, squared_row_norms, with_old_keywords
from heedful.operator import AttentionOperator
from heedful.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Measurement):
    """The first k singular values of each head; what all of them hold together, and what the others hold.

    values     at most the singular values that they stand for, but for rounding
    ceilings   at least those
    energy     Σ σ_i² over all values, exact
    residual   the part of it that the first k leave
    products   columns that went through A or Aᵀ, for each head
    failure    probability that a bound is wrong; 0 where all are deterministic
    """

    values: Float[Tensor, "*b k"]
    ceilings: Float[Tensor, "*b k"]
    energy: Float[Tensor, "*b"]
    residual: Float[Tensor, "*b"]
    products: Int[Tensor, "*b"]
    stopped: str
    failure: float
    profile: Profile = field(metadata={"hidden": True})

    def columns(self) -> dict[str, Tensor]:
        k = self.values.shape[-1]
        whole = self.energy.clamp(min=torch.finfo(torch.float64).tiny)
        return {
            "σ₁": self.values[..., 0],
            f"σ{_subscript(k)}": self.values[..., -1],
            "energy": self.energy,
            "left": self.residual / whole,
            "stable rank": self.energy / self.values[..., 0].square().clamp(min=torch.finfo(torch.float64).tiny),
            "rank (.9)": self.profile.rank(0.9)[1],
            "products": self.products,
        }

    def caption(self) -> str:
        *_, k = self.values.shape
        return f"{k} of {self.profile.size} singular values; {self.stopped}"

    def plot(self):
        """σ_i against i, both logarithmic, a line a head, with the range that is certain (needs altair)."""
        alt = altair()
        values, tops = (x.reshape(-1, x.shape[-1]).cpu().tolist() for x in (self.values, self.ceilings))
        rows = [
            {"head": head, "i": i + 1, "σ": low, "at most": high}
            for head, (lows, highs) in enumerate(zip(values, tops, strict=True))
            for i, (low, high) in enumerate(zip(lows, highs, strict=True))
            if low > 0
        ]
        base = alt.Chart(alt.Data(values=rows)).encode(
            x=alt.X("i:Q", scale=alt.Scale(type="log"), title="i"), color=alt.Color("head:N")
        )
        scale = alt.Scale(type="log")
        band = base.mark_area(opacity=0.2).encode(y=alt.Y("σ:Q", scale=scale, title="σ"), y2="at most:Q")
        return band + base.mark_line().encode(y=alt.Y("σ:Q", scale=scale))


@dataclass(frozen=True, eq=False, repr=False)
class Interval(Measurement):
    """A number for each head, with a lower and an upper bound."""

    name: str
    estimate: Tensor
    lower: Tensor
    upper: Tensor
    products: Int[Tensor, "*b"]
    stopped: str
    failure: float

    def columns(self) -> dict[str, Tensor]:
        return {self.name: self.estimate, "at least": self.lower, "at most": self.upper, "products": self.products}

    def caption(self) -> str:
        chance = f", bounds fail with probability {self.failure:g}" if self.failure else ""
        return f"{self.name}; {self.stopped}{chance}"

    def plot(self):
        """The estimate of each head between its bounds (needs altair)."""
        return bars(self.name.split(" (")[0], self.estimate, self.lower, self.upper)


@dataclass(frozen=True, eq=False, repr=False)
class EffectiveRank(Interval):
    """The fewest singular values that hold a share tau of the energy."""

    tau: float


@dataclass(frozen=True, eq=False, repr=False)
class Decay(Measurement):
    """σ_i ∝ i^−exponent over the first values; NaN where no power law fits.

    error      standard error of the slope, or half the difference between the slopes of the two halves if that is more
    goodness   R² of the straight line in log-log coordinates
    fits       whether the line is good, and better than an exponential
    """

    exponent: Float[Tensor, "*b"]
    error: Float[Tensor, "*b"]
    goodness: Float[Tensor, "*b"]
    fits: Bool[Tensor, "*b"]
    k: int

    def columns(self) -> dict[str, Tensor]:
        return {"exponent": self.exponent, "±": self.error, "R²": self.goodness, "power law": self.fits}

    def caption(self) -> str:
        return f"σᵢ ∝ i^−α over the first {self.k} values"

    def plot(self):
        """The exponent of each head that has one, with its standard error (needs altair)."""
        return bars("exponent", self.exponent, self.exponent - self.error, self.exponent + self.error)


Measurable = AttentionOperator | Tensor | Spectrum


def svdvals(op: AttentionOperator | Tensor) -> Float[Tensor, "*b s"]:
    """All singular values in float64, from the matrix itself: for small problems, and to check the rest by.

    >>> import heedful as h
    >>> q, k = torch.zeros(2, 8, 4).unbind()
    >>> [round(value, 6) for value in h.svdvals(h.Softmax(h.Full()).operator(q, k)).tolist()[:2]]
    [1.0, 0.0]
    """
    *batch, n, m = op.shape
    entries = torch.Size(batch).numel() * n * m
    if entries > HELD // 4:
        raise ValueError(
            f"op: {tuple(op.shape)} has {entries:.2g} entries, expected {HELD // 4:.2g} at most: all singular values "
            "take the matrix itself. The first k are spectrum(op, k)."
        )
    dense = op if isinstance(op, Tensor) else op.float().to_dense()
    return torch.linalg.svdvals(dense.double())


@with_old_keywords
def spectrum(
    op: AttentionOperator | Matrices,
    k: int = 32,
    *,
    tau: float | Sequence[float] = (),
    within: float = 0.005,
    energy: Float[Tensor, "*b"] | None = None,
    search: SearchOptions = DEFAULT,
) -> Spectrum:
    """The first k singular values, and the energy of all.

    >>> import heedful as h
    >>> q, k = torch.randn(2, 600, 16, generator=torch.Generator().manual_seed(0)).unbind()
    >>> found = h.spectrum(h.Softmax(h.Causal()).operator(q, k), 4)
    >>> bool(found.values[0] > 1), found.stopped
    (True, 'narrow enough')

    tau       also go on until the effective rank at this share, or at these, is told to one part in ten
    within    relative accuracy at which to stop
    energy    Σ_ij A_ij² where it is known already
    search    how many products to spend at most, and what to leave to chance
    """
    goals: list[Goal] = [TopValues(_check_k(k, op), within)]
    goals += [RankInterval(_check_tau(share), 0.1) for share in ([tau] if isinstance(tau, int | float) else tau)]
    profile = measure(op, *goals, energy=energy, search=search)
    squares = profile.squares[..., :k]
    return Spectrum(
        values=squares.sqrt(),
        ceilings=profile.ceilings[..., :k].sqrt(),
        energy=profile.energy,
        residual=(profile.energy - squares.sum(-1)).clamp(min=0),
        products=profile.products,
        stopped=profile.stopped,
        failure=profile.failure,
        profile=profile,
    )


@with_old_keywords
def effective_rank(
    op: Measurable,
    tau: float = 0.9,
    *,
    within: float = 0.1,
    energy: Float[Tensor, "*b"] | None = None,
    search: SearchOptions = DEFAULT,
) -> EffectiveRank:
    """The fewest singular values that hold a share tau of the energy Σσ², with bounds.

    >>> import heedful as h
    >>> q, k = torch.zeros(2, 512, 4).unbind()
    >>> found = h.effective_rank(h.Softmax(h.Causal()).operator(q, k))
    >>> int(found.estimate), int(found.lower), int(found.upper)
    (7, 7, 7)

    It stops when upper − lower ≤ within · estimate, or when the budget of products will not do: `stopped` says which.
    """
    profile = _profile(op, RankInterval(_check_tau(tau), within), energy, search)
    low, guess, high = profile.rank(tau)
    return EffectiveRank(
        f"effective rank ({tau:g})", guess, low, high, profile.products, profile.stopped, profile.failure, tau
    )


@with_old_keywords
def energy_share(
    op: Measurable,
    share: float = 0.1,
    *,
    within: float = 0.02,
    energy: Float[Tensor, "*b"] | None = None,
    search: SearchOptions = DEFAULT,
) -> Interval:
    """The share of the energy in the largest singular values, `share` of them all.

    >>> import heedful as h
    >>> float(h.energy_share(torch.eye(50), 0.1).estimate)
    0.1
    """
    if not 0 < share <= 1:
        raise ValueError(f"share: expected a share of the singular values in (0, 1], got {share}.")
    size = op.profile.size if isinstance(op, Spectrum) else min(op.shape[-2:])
    r = max(1, ceil(share * size - 1e-9))
    profile = _profile(op, ShareInterval(r, within), energy, search)
    low, guess, high = profile.share(r)
    return _interval(f"energy in the first {r}", guess, low, high, profile)


@with_old_keywords
def stable_rank(
    op: Measurable,
    *,
    within: float = 0.05,
    energy: Float[Tensor, "*b"] | None = None,
    search: SearchOptions = DEFAULT,
) -> Interval:
    """E / σ₁²: at most the rank, and steady under small changes.

    >>> import heedful as h
    >>> float(h.stable_rank(torch.eye(50)).estimate)
    50.0
    """
    profile = _profile(op, FirstValue(within), energy, search)
    tiny = torch.finfo(torch.float64).tiny
    top, most = profile.squares[..., 0], profile.upper[..., 0]
    whole, some = profile.energy, profile.energy > 0
    guess = whole / top.clamp(min=tiny) * some
    low = (whole - profile.slack) / (most + profile.slack).clamp(min=tiny) * some
    high = (whole + profile.slack) / (top - profile.slack).clamp(min=tiny) * some
    size = profile.size
    return _interval("stable rank", guess.clamp(max=size), low.clamp(max=size), high.clamp(max=size), profile)


@with_old_keywords
def entropic_rank(
    op: Measurable,
    *,
    energy: Float[Tensor, "*b"] | None = None,
    search: SearchOptions = DEFAULT,
) -> Interval:
    """The exponential of the entropy of σ² / E: how many equal values would be as spread.

    Bounds: of two distributions the one whose partial sums are larger has less entropy.

    >>> import heedful as h
    >>> round(float(h.entropic_rank(torch.eye(50)).estimate), 6)
    50.0
    """
    profile = _profile(op, WholeSpectrum(), energy, search)
    low, guess, high = (_spread(sums) for sums in (profile.upper, profile.middle, profile.lower))
    some = profile.energy > 0
    # Entropy moves by δ ln(s / δ) at most where shares move by δ in all.
    part = (profile.slack / profile.energy.clamp(min=torch.finfo(torch.float64).tiny)).clamp(1e-300, 0.3)
    give = (part * (profile.size / part).log()).exp()
    low, high = (low / give).clamp(min=1), (high * give).clamp(max=profile.size)
    return _interval("entropic rank", guess.clamp(low, high) * some, low * some, high * some, profile)


def numerical_rank(op: AttentionOperator | Tensor, rtol: float | None = None) -> Int[Tensor, "*b"]:
    """How many singular values exceed rtol · σ₁, from the matrix itself: the small ones can't be told by products.

    >>> numerical_rank(torch.ones(4, 4))
    tensor(1)
    """
    if rtol is None:
        rtol = max(op.shape[-2:]) * torch.finfo(op.dtype).eps
    values = svdvals(op)
    return (values > rtol * values[..., :1]).sum(-1)


@with_old_keywords
def decay_exponent(
    op: Measurable, k: int = 32, *, energy: Float[Tensor, "*b"] | None = None, search: SearchOptions = DEFAULT
) -> Decay:
    """The exponent α of σ_i ∝ i^−α over the first k values, where a power law fits; NaN where it does not.

    >>> import heedful as h
    >>> made = h.decay_exponent(torch.diag(torch.arange(1, 101) ** -0.7))
    >>> round(float(made.exponent), 3), bool(made.fits)
    (0.7, True)
    >>> bool(h.decay_exponent(torch.diag(torch.exp(-0.2 * torch.arange(100)))).fits)
    False
    """
    if k < 4:
        raise ValueError(f"k: a power law through {k} values, expected 4 or more.")
    found = op if isinstance(op, Spectrum) else spectrum(op, k, energy=energy, search=search)
    _check_k(k, found)
    if found.values.shape[-1] < k:
        raise ValueError(f"k: {k} values asked of a Spectrum of {found.values.shape[-1]}. Measure spectrum(op, {k}).")
    return _fit(found.values[..., :k], found.values[..., :1] * torch.finfo(torch.float32).eps)


def row_correlation(op: AttentionOperator | Tensor) -> Float[Tensor, "*b"]:
    """The mean cosine between two different rows: 1 where every query attends alike, 0 where none share a key.

    Σ_ij cos(a_i, a_j) = ‖Aᵀ (1 / ‖a_i‖)‖², one product. Rows of zeros are left out; NaN where fewer than two are left.

    >>> round(float(row_correlation(torch.ones(3, 5))), 6), float(row_correlation(torch.eye(3)))
    (1.0, 0.0)
    """
    op = op.float() if op.dtype.itemsize < 4 else op
    norms = (op.double().square().sum(-1) if isinstance(op, Tensor) else squared_row_norms(op)).sqrt()
    some = norms > 0
    inverse = torch.where(some, 1 / norms, 0)
    together = (op.mT @ inverse[..., None].to(op.dtype)).double().square().sum((-2, -1))
    rows = some.sum(-1)
    pairs = torch.where(rows > 1, rows * (rows - 1), torch.nan)
    return ((together - rows) / pairs).clamp(-1, 1)


def _profile(op: Measurable, goal: Goal, energy: Tensor | None, search: SearchOptions) -> Profile:
    if isinstance(op, Spectrum):
        return op.profile
    return measure(op, goal, energy=energy, search=search)


def _interval(name: str, guess: Tensor, low: Tensor, high: Tensor, profile: Profile) -> Interval:
    return Interval(name, guess, low, high, profile.products, profile.stopped, profile.failure)


def _spread(sums: Float[Tensor, "*b s"]) -> Float[Tensor, "*b"]:
    parts = sums.diff(dim=-1, prepend=torch.zeros_like(sums[..., :1])).clamp(min=0)
    shares = parts / parts.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.special.entr(shares).sum(-1).exp()


def _fit(values: Float[Tensor, "*b k"], least: Float[Tensor, "*b 1"]) -> Decay:
    k = values.shape[-1]
    ranks = torch.arange(1, k + 1, dtype=torch.float64, device=values.device)
    heights = values.clamp(min=torch.finfo(torch.float64).tiny).log()
    slope, error, goodness, misfit = _line(ranks.log(), heights)
    *_, exponential = _line(ranks, heights)
    # Neighbouring values err together, so the usual standard error is too kind: the halves have a say too.
    first, second = (_line(ranks[part].log(), heights[..., part])[0] for part in (slice(0, k // 2), slice(k // 2, k)))
    error = torch.maximum(error, (first - second).abs() / 2)
    fits = (goodness >= 0.95) & (misfit < exponential) & (values > least).all(-1)
    return Decay(torch.where(fits, -slope, torch.nan), torch.where(fits, error, torch.nan), goodness, fits, k)


def _line(x: Float[Tensor, " k"], y: Float[Tensor, "*b k"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Least squares: slope, its standard error, R², sum of squared misfits."""
    x, y = x - x.mean(), y - y.mean(-1, keepdim=True)
    slope = (x * y).sum(-1) / x.square().sum()
    misfit = (y - slope[..., None] * x).square().sum(-1)
    spread = y.square().sum(-1)
    error = (misfit / max(len(x) - 2, 1) / x.square().sum()).sqrt()
    return slope, error, torch.where(spread > 1e-20, 1 - misfit / spread.clamp(min=1e-20), 0.0), misfit


def _check_k(k: int, op: Measurable | Matrices) -> int:
    size = op.profile.size if isinstance(op, Spectrum) else min(op.shape[-2:])
    if not 1 <= k <= size:
        shape = "" if isinstance(op, Spectrum) else f": A is {tuple(op.shape)}"
        raise ValueError(f"k: {k} singular values asked for, expected 1 to {size}{shape}.")
    return k


def _check_tau(tau: float) -> float:
    if not 0 < tau <= 1:
        raise ValueError(f"tau: expected a share of the energy in (0, 1], got {tau}. Likely cause: a percentage.")
    return tau


def _subscript(k: int) -> str:
    return str(k).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
