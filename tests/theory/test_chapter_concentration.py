"""The verdicts of the chapter on concentration, as the checks find them."""

import os

import pytest

from heedful.theory.chapters.concentration import CHAPTER
from heedful.theory.claim import decide

VERDICTS = {
    "S002-causal-full-rank": "HOLDS_WHEN",
    "S002-lowrank-linear": "UNDECIDED",
    "S002-S-def": "HOLDS_WHEN",
    "S002-entropy-scope": "HOLDS",
    "S002-Sa": "HOLDS_WHEN",
    "S002-reduce": "HOLDS",
    "S002-exp": "HOLDS",
    "S002-exp-arbitrary": "HOLDS_WHEN",
    "S002-exp-how": "HOLDS",
    "S002-relu2": "HOLDS",
    "S002-relu2-beta": "HOLDS",
    "S002-relu2-bias": "UNDECIDED",
    "S002-identity": "HOLDS",
    "S002-identity-even": "HOLDS",
    "S002-identity-min": "HOLDS",
    "S002-identity-nofocus": "HOLDS_WHEN",
    "S002-nonneg": "HOLDS",
    "S002-nonneg-sparse": "HOLDS",
    "S002-nonneg-snr": "HOLDS_WHEN",
    "S002-nonneg-abs": "HOLDS_WHEN",
    "S002-iid": "HOLDS",
    "S002-l2l1": "FAILS",
    "S002-increase-d": "FAILS",
    "S002-inf-dim": "HOLDS",
    "S002-decay": "HOLDS_WHEN",
    "S002-decay-bound": "HOLDS",
    "S002-decay-limit": "HOLDS",
    "S002-decay-fixed": "HOLDS_WHEN",
    "S002-summary": "HOLDS_WHEN",
}


def test_every_statement_of_the_text_is_there_in_its_order():
    assert [claim.id for claim in CHAPTER.claims] == list(VERDICTS)


@pytest.mark.parametrize("claim", CHAPTER.claims, ids=lambda claim: claim.id)
def test_the_check_finds_the_verdict(claim):
    if claim.slow and os.environ.get("HEEDFUL_SLOW") != "1":
        pytest.skip("slow: set HEEDFUL_SLOW=1")
    found = decide(claim)
    assert found.verdict == VERDICTS[claim.id], f"{found.because} {found.evidence} | control: {found.control}"


@pytest.mark.parametrize(
    "claim", [claim for claim in CHAPTER.claims if claim.counterexample], ids=lambda claim: claim.id
)
def test_the_counterexample_runs_and_prints_numbers(claim, capsys):
    exec(claim.counterexample, {})
    assert any(character.isdigit() for character in capsys.readouterr().out)


@pytest.mark.parametrize("claim", [claim for claim in CHAPTER.claims if claim.figure], ids=lambda claim: claim.id)
def test_the_figure_is_small_and_finite(claim):
    figure = claim.figure()
    points = [number for x, y in figure.series.values() for number in (*x, *y)]
    assert len(points) <= 600 and all(abs(number) < float("inf") for number in points)
