"""Judge one claim and return the outcome as plain data. An exception makes a claim undecided, never true or false."""

from __future__ import annotations

import math
import time
import traceback
from pathlib import Path
from typing import Any

from heedful.theory.claim import Claim, Evidence, Figure, Finding, Verdict, decide

Outcome = dict[str, Any]
"""The outcome of a claim as JSON data: verdict, evidence, control, corrected, because, seconds, figure."""


def judge(claim: Claim) -> Outcome:
    """Decide a claim and draw its figure. An exception makes the claim undecided, with the exception as reason."""
    start = time.perf_counter()
    try:
        finding = decide(claim)
    except (Exception, SystemExit) as error:
        finding = Finding(claim.id, Verdict.UNDECIDED, because=f"the check failed to run: {sentence(error)}")
    return {**_outcome(claim, finding), "seconds": round(time.perf_counter() - start, 4), "ran": True}


def undecided(because: str, seconds: float = 0.0, *, ran: bool = True) -> Outcome:
    """The outcome of a claim without measurements."""
    empty = {"evidence": None, "control": None, "corrected": None, "figure": None}
    return {"verdict": str(Verdict.UNDECIDED), **empty, "because": because, "seconds": round(seconds, 4), "ran": ran}


def number(value: float) -> float | str:
    """A float for JSON; non-finite values become "NaN", "Infinity" or "-Infinity"."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _outcome(claim: Claim, finding: Finding) -> Outcome:
    corrected = None
    if claim.corrected is not None and finding.corrected is not None:
        corrected = _outcome(claim.corrected, finding.corrected)
    return {
        "verdict": str(finding.verdict),
        "evidence": _measured(finding.evidence),
        "control": _measured(finding.control),
        "corrected": corrected,
        "because": finding.because,
        "figure": _drawn(claim),
    }


def _measured(evidence: Evidence | None) -> dict[str, Any] | None:
    if evidence is None:
        return None
    comparisons = [
        {
            "name": one.name,
            "measured": number(one.measured),
            "relation": one.relation,
            "expected": number(one.expected),
            "holds": bool(one.holds),
            "noise": None if one.noise is None else number(float(one.noise)),
            "alarm": one.alarm,
        }
        for one in evidence.comparisons
    ]
    return {"holds": evidence.holds, "text": str(evidence), "note": evidence.note, "comparisons": comparisons}


def _drawn(claim: Claim) -> dict[str, Any] | None:
    """The figure of a claim, or the reason why it can't be drawn; this does not change the verdict."""
    if claim.figure is None:
        return None
    try:
        return _figure(claim.figure())
    except (Exception, SystemExit) as error:
        return {"error": sentence(error)}


def _figure(figure: Figure) -> dict[str, Any]:
    series = {
        name: [[number(float(x)) for x in xs], [number(float(y)) for y in ys]]
        for name, (xs, ys) in figure.series.items()
    }
    return {
        "title": {"en": figure.title.en, "zh": figure.title.zh},
        "x": figure.x,
        "y": figure.y,
        "series": series,
        "log_x": figure.log_x,
        "log_y": figure.log_y,
        "points": figure.points,
    }


def sentence(error: BaseException) -> str:
    """The error in one line, with the place where it was raised."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 200 else said[:199] + "…"
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {said}' if said else ''}{at}"
