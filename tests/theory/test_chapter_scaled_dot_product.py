"""The verdicts on the text about scaled dot-product attention (5.1)."""

from __future__ import annotations

import contextlib
import io
import os

import pytest

from heedful.theory import Claim, Verdict, decide
from heedful.theory.chapters.scaled_dot_product import CHAPTER
from heedful.theory.claim import Undecided

HOLDS, WHEN, FAILS, UNDECIDED = Verdict.HOLDS, Verdict.HOLDS_WHEN, Verdict.FAILS, Verdict.UNDECIDED

VERDICTS = {
    "P5.1-path": HOLDS,
    "D5.1.1-QMA": UNDECIDED,  # wording
    "N5.1.1-nonlinear": FAILS,
    "N5.1.1-asym": HOLDS,
    "E5.1.1": HOLDS,
    "E5.1.1-dk": FAILS,
    "E5.1.1-cos": HOLDS,
    "E5.1.2": HOLDS,
    "E5.1.2-allparams": WHEN,
    "P5.1.3-3d2": HOLDS,
    "P5.1.3-squash": HOLDS,
    "E5.1.3": HOLDS,
    "N5.1.4-contrib": WHEN,
    "E5.1.4": HOLDS,
    "E5.1.5": HOLDS,
    "E5.1.5-scaled": WHEN,
    "E5.1.5-range": WHEN,
    "E5.1.6": HOLDS,
    "S5.1.5-hard": WHEN,
    "S5.1.5-addC": FAILS,
    "E5.1.7": HOLDS,
    "E5.1.7-pgm": UNDECIDED,  # wording
    "E5.1.8": HOLDS,
    "S5.1.5-sat": HOLDS,
    "S5.1.5-unscaledgrad": WHEN,
    "C5.1.6-time": WHEN,
    "C5.1.6-space": WHEN,
    "C5.1.6-par": UNDECIDED,  # wording
    "E5.1.10-shift": WHEN,
    "E5.1.9-10": HOLDS,
    "E5.1.10-lower": FAILS,
    "E5.1.10-1e9": WHEN,
    "E5.1.11": WHEN,
    "E5.1.11-combine": WHEN,
    "V5.1.8-svd": HOLDS,
    "V5.1.8-order": FAILS,
    "X5.1.8-var": HOLDS,
    "X5.1.8-ensures": WHEN,
    "G5.1.8-chain": WHEN,
    "G5.1.8-stable": FAILS,
}


def test_every_row_of_the_text_has_a_claim_in_its_order():
    assert [claim.id for claim in CHAPTER.claims] == list(VERDICTS)


@pytest.mark.parametrize("claim", CHAPTER.claims, ids=lambda claim: claim.id)
def test_verdict(claim: Claim):
    if claim.slow and not os.environ.get("HEEDFUL_SLOW"):
        pytest.skip("slow: set HEEDFUL_SLOW=1")
    finding = decide(claim)
    if finding.because.startswith("needs"):
        pytest.skip(finding.because)
    assert finding.verdict == VERDICTS[claim.id], (finding.because, str(finding.evidence), str(finding.control))
    if claim.kind == "wording":
        assert claim.reason is not None
    if finding.verdict is FAILS:
        assert claim.counterexample


@pytest.mark.parametrize("claim", [c for c in CHAPTER.claims if c.counterexample], ids=lambda claim: claim.id)
def test_counterexample_runs_as_it_stands(claim: Claim):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(claim.counterexample, claim.id, "exec"), {})
    except Undecided as why:
        pytest.skip(str(why))
    assert printed.getvalue().strip()


@pytest.mark.parametrize("claim", [c for c in CHAPTER.claims if c.figure], ids=lambda claim: claim.id)
def test_figure_is_small(claim: Claim):
    assert claim.figure is not None
    figure = claim.figure()
    assert figure.series and sum(len(x) for x, _ in figure.series.values()) <= 300
    for x, y in figure.series.values():
        assert len(x) == len(y) and all(value > 0 for value in (*x, *y))  # all of them have logarithmic axes


@pytest.mark.parametrize("claim", CHAPTER.claims, ids=lambda claim: claim.id)
def test_both_languages_are_there(claim: Claim):
    for one in (claim, claim.corrected):
        for text in () if one is None else (one.statement, one.condition, one.reason):
            if text is not None:
                assert not any("一" <= letter <= "鿿" for letter in text.en)
                assert any("一" <= letter <= "鿿" for letter in text.zh)
