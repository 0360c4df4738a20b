"""A statement of the texts, the check that decides it, and what the check found.

A check is a function of a *case*. It runs twice: on the case that the statement is about, and on a control, a
deliberately broken variant for which it must give the opposite result. A check that can't distinguish the two decides
nothing. So the verdict is never written by hand; it follows from the measurements:

    check holds, control does not                               HOLDS, or HOLDS_WHEN if a condition is stated
    check does not hold, control does, corrected form holds     FAILS
    anything else                                               UNDECIDED, with the reason
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import NormalDist
from typing import Any, Literal, SupportsFloat

Number = float | SupportsFloat  # including tensors with one entry
Kind = Literal["exact", "asymptotic", "statistical", "complexity", "empirical", "wording"]
First = Literal["holds", "conditional", "false", "empirical", "design"]  # the verdict of a first reading


class Verdict(StrEnum):
    HOLDS = "HOLDS"
    HOLDS_WHEN = "HOLDS_WHEN"
    FAILS = "FAILS"
    UNDECIDED = "UNDECIDED"


class Undecided(Exception):
    """Raised by a check that can't decide: a study has not run, a model is not installed."""


@dataclass(frozen=True)
class Text:
    """The same sentence in English and in Chinese."""

    en: str
    zh: str


@dataclass(frozen=True)
class Comparison:
    """A measured number and the number that it is compared with. `noise` is the standard error of a sample."""

    name: str
    measured: float
    relation: Literal["=", "≤", "≥", "<", ">"]
    expected: float
    holds: bool
    noise: float | None = None
    alarm: float | None = None  # probability of calling a true statement false by chance

    def __str__(self) -> str:
        error = "" if self.noise is None else f" ± {self.noise:.2g}"
        relation = self.relation if self.holds else f"not {self.relation}"
        return f"{self.name}: {self.measured:.6g}{error} {relation} {self.expected:.6g}"


def equal(name: str, measured: Number, expected: Number, *, within: float = 0.0) -> Comparison:
    """Equal up to `within`, a bound on rounding (or on a truncation error that the check derives).

    >>> str(equal("rank", 3, 3)), equal("sum", 1.0 + 1e-9, 1.0, within=1e-12).holds
    ('rank: 3 = 3', False)
    """
    measured, expected = float(measured), float(expected)
    return Comparison(name, measured, "=", expected, abs(measured - expected) <= within)


def at_most(name: str, measured: Number, bound: Number, *, slack: float = 0.0) -> Comparison:
    """At most the bound, up to `slack` of rounding."""
    measured, bound = float(measured), float(bound)
    return Comparison(name, measured, "≤", bound, measured <= bound + slack)


def at_least(name: str, measured: Number, bound: Number, *, slack: float = 0.0) -> Comparison:
    """At least the bound, up to `slack` of rounding."""
    measured, bound = float(measured), float(bound)
    return Comparison(name, measured, "≥", bound, measured >= bound - slack)


def agrees(name: str, measured: Number, expected: Number, *, error: Number, alarm: float = 1e-4) -> Comparison:
    """A sample mean equals its expectation within its standard error.

    A true statement is called false with probability `alarm` if the mean is normally distributed.

    >>> agrees("mean", 1.02, 1.0, error=0.01).holds, agrees("mean", 1.05, 1.0, error=0.01).holds
    (True, False)
    """
    measured, expected, error = float(measured), float(expected), float(error)
    sigmas = NormalDist().inv_cdf(1 - alarm / 2)
    return Comparison(name, measured, "=", expected, abs(measured - expected) <= sigmas * error, error, alarm)


def surely_above(name: str, measured: Number, bound: Number, *, error: Number, alarm: float = 1e-4) -> Comparison:
    """A sample mean lies above the bound by more than chance explains."""
    measured, bound, error = float(measured), float(bound), float(error)
    sigmas = NormalDist().inv_cdf(1 - alarm)
    return Comparison(name, measured, ">", bound, measured > bound + sigmas * error, error, alarm)


def surely_below(name: str, measured: Number, bound: Number, *, error: Number, alarm: float = 1e-4) -> Comparison:
    """A sample mean lies below the bound by more than chance explains."""
    measured, bound, error = float(measured), float(bound), float(error)
    sigmas = NormalDist().inv_cdf(1 - alarm)
    return Comparison(name, measured, "<", bound, measured < bound - sigmas * error, error, alarm)


@dataclass(frozen=True)
class Evidence:
    """What a check measured. It holds if all its comparisons hold."""

    comparisons: tuple[Comparison, ...]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.comparisons:
            raise ValueError("evidence: no comparison, expected at least one measured number.")

    @property
    def holds(self) -> bool | None:
        """True if all comparisons hold; None if a number is missing (NaN), so nothing was measured."""
        if any(math.isnan(one.measured) or math.isnan(one.expected) for one in self.comparisons):
            return None
        return all(one.holds for one in self.comparisons)

    def __str__(self) -> str:
        return "; ".join([*map(str, self.comparisons), *([self.note] if self.note else [])])


def evidence(*comparisons: Comparison, note: str = "") -> Evidence:
    """Evidence from comparisons: `evidence(equal("rank", 3, 3), at_most("error", 1e-16, 1e-12))`."""
    return Evidence(comparisons, note)


@dataclass(frozen=True)
class Case:
    """The input of a check, with a name."""

    name: str
    value: Any = None


@dataclass(frozen=True)
class Figure:
    """Points for a small plot: one line (or cloud) for each series."""

    title: Text
    x: str
    y: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    points: bool = False


@dataclass(frozen=True)
class Claim:
    """A statement with its check.

    id              number of the statement in its text
    section         section of the text
    statement       the statement in words
    formula         the statement in LaTeX, without dollar signs
    check           takes a case's value, returns Evidence
    case, control   what the statement is about; a broken variant for which the check must give the opposite result
    first           the verdict of a first reading, as a starting point
    condition       what must be added for the statement to hold; the case meets it, the control need not
    counterexample  Python that a reader can paste and run, for statements that fail
    corrected       what is true instead (required if the statement fails), or a sharper form
    reason          why our verdict differs from the first one, or what decides the claim
    figure          returns a small plot
    slow            takes more than a few seconds on one core
    """

    id: str
    section: str
    kind: Kind
    statement: Text
    formula: str = ""
    check: Callable[[Any], Evidence] | None = None
    case: Case = Case("as stated")
    control: Case | None = None
    first: First = "holds"
    condition: Text | None = None
    counterexample: str = ""
    corrected: Claim | None = None
    reason: Text | None = None
    figure: Callable[[], Figure] | None = None
    slow: bool = False

    def __post_init__(self) -> None:
        if self.kind == "wording" and self.check is not None:
            raise ValueError(f"{self.id}: wording has nothing to check; give it another kind.")
        if self.check is not None and self.control is None:
            raise ValueError(f"{self.id}: a check without a control decides nothing.")


@dataclass(frozen=True)
class Finding:
    """The result of deciding a claim."""

    claim: str
    verdict: Verdict
    evidence: Evidence | None = None
    control: Evidence | None = None
    corrected: Finding | None = None
    because: str = ""
    seconds: float = field(default=0.0, compare=False)


def decide(claim: Claim) -> Finding:
    """Run a claim's check, its control and its corrected form, and judge.

    >>> def is_even(n): return evidence(equal("remainder", n % 2, 0))
    >>> claim = Claim("E1", "1", "exact", Text("Four is even.", "四是偶数。"), check=is_even, case=Case("4", 4),
    ...               control=Case("5", 5))
    >>> decide(claim).verdict
    <Verdict.HOLDS: 'HOLDS'>
    """
    if claim.check is None:
        because = "wording: nothing to decide" if claim.kind == "wording" else "no check decides it"
        return Finding(claim.id, Verdict.UNDECIDED, because=because)
    try:
        found = claim.check(claim.case.value)
        control = claim.check(claim.control.value) if claim.control else None
    except Undecided as why:
        return Finding(claim.id, Verdict.UNDECIDED, because=str(why))
    corrected = decide(claim.corrected) if claim.corrected else None
    verdict, because = _judge(claim, found, control, corrected)
    return Finding(claim.id, verdict, found, control, corrected, because)


def _judge(claim: Claim, found: Evidence, control: Evidence | None, corrected: Finding | None) -> tuple[Verdict, str]:
    if found.holds is None or control is None or control.holds is None:
        return Verdict.UNDECIDED, "a number is missing (NaN)"
    if found.holds == control.holds:
        return Verdict.UNDECIDED, f"the check can't tell the case from its control ({claim.control.name})"  # type: ignore[union-attr]
    true = (Verdict.HOLDS, Verdict.HOLDS_WHEN)
    if corrected is not None and corrected.verdict not in true:
        return Verdict.UNDECIDED, f"{corrected.claim}, the corrected form, was not seen to hold: {corrected.because}"
    if found.holds:
        return (Verdict.HOLDS_WHEN, "") if claim.condition else (Verdict.HOLDS, "")
    if corrected is None:
        return Verdict.UNDECIDED, "it fails, but nothing is said of what is true instead"
    return Verdict.FAILS, ""
