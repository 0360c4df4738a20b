"""A claim and its outcome as plain data: printed by `heedful theory --json`, and used to make the book.

    id, chapter, source, section, kind, slow
    statement, condition, reason      {"en": …, "zh": …}, the last two may be null
    formula                           LaTeX
    verdict, because                  HOLDS, HOLDS_WHEN, FAILS or UNDECIDED, and why it is undecided
    ran                               false for a slow claim that was not requested
    first, differs                    the verdict of a first reading, and whether ours differs
    evidence                          {case, holds, text, note, comparisons}, null if nothing was measured
    control                           {case, holds, flipped, text, note, comparisons}
    counterexample                    Python, "" if there is none
    corrected                         the same for the corrected form, or null
    figure                            {title, x, y, series, log_x, log_y, points}, {error}, or null
    seconds                           time of the check, its control and its corrected form

A comparison is {name, measured, relation, expected, holds, noise, alarm}; non-finite numbers are the strings "NaN",
"Infinity" and "-Infinity".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Claim, Text, Verdict

Record = Mapping[str, Any]

EXPECTED = {
    "holds": {Verdict.HOLDS},
    "conditional": {Verdict.HOLDS, Verdict.HOLDS_WHEN},
    "false": {Verdict.FAILS},
    "empirical": set(Verdict),
    "design": {Verdict.UNDECIDED},
}
"""The verdicts that agree with a first reading."""


def record(chapter: Chapter, claim: Claim, outcome: dict[str, Any]) -> Record:
    """A claim with the outcome of its check."""
    made = {"chapter": chapter.name, "source": chapter.text, **_record(claim, outcome), "seconds": outcome["seconds"]}
    return made if outcome["ran"] else {**made, "ran": False, "differs": False}


def _record(claim: Claim, outcome: dict[str, Any]) -> Record:
    found, control = outcome["evidence"], outcome["control"]
    corrected = None
    if claim.corrected is not None:
        nothing = {"verdict": "UNDECIDED", "evidence": None, "control": None, "because": "not run", "figure": None}
        corrected = _record(claim.corrected, outcome["corrected"] or {**nothing, "corrected": None})
    if found is not None:
        found = {"case": claim.case.name, **found}
    if control is not None and claim.control is not None:
        flipped = None not in (found["holds"], control["holds"]) and found["holds"] != control["holds"]
        control = {"case": claim.control.name, "flipped": flipped, **control}
    return {
        "id": claim.id,
        "section": claim.section,
        "kind": claim.kind,
        "slow": claim.slow,
        "statement": _both(claim.statement),
        "formula": claim.formula,
        "condition": _both(claim.condition),
        "verdict": outcome["verdict"],
        "because": outcome["because"],
        "ran": True,
        "first": claim.first,
        "differs": outcome["verdict"] not in EXPECTED[claim.first],
        "reason": _both(claim.reason),
        "evidence": found,
        "control": control,
        "counterexample": claim.counterexample,
        "corrected": corrected,
        "figure": outcome["figure"],
    }


def _both(text: Text | None) -> dict[str, str] | None:
    return None if text is None else {"en": text.en, "zh": text.zh}


def controls(records: Sequence[Record]) -> Iterator[Record]:
    """All claims with a control that ran, including corrected forms."""
    for one in records:
        if one["control"] is not None:
            yield one
        if one["corrected"] is not None:
            yield from controls([one["corrected"]])


def counts(records: Sequence[Record]) -> dict[str, int]:
    """The number of records with each verdict."""
    found = Counter(one["verdict"] for one in records)
    return {str(verdict): found[str(verdict)] for verdict in Verdict}


def differing(records: Sequence[Record]) -> list[Record]:
    """The records whose verdict differs from the first reading."""
    return [one for one in records if one["differs"]]
