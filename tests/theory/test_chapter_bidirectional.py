"""The verdicts of the chapter on the rank of bidirectional attention, as the checks find them."""

import os

import pytest

from heedful.theory.chapters.bidirectional import CHAPTER
from heedful.theory.claim import Undecided, decide

VERDICTS = {
    "N004-zeroshot": "UNDECIDED",
    "N004-encdec": "UNDECIDED",
    "N004-bidir-lowrank": "FAILS",
    "N004-causal-vs-bidir": "HOLDS_WHEN",
    "N004-correlated": "HOLDS_WHEN",
    "N004-rank-def": "HOLDS",
    "N004-lowrank-def": "FAILS",
    "N004-redundant": "HOLDS",
    "N004-diag": "FAILS",
    "N004-svd": "HOLDS",
    "N004-data": "HOLDS_WHEN",
    "N004-softmax": "FAILS",
    "N004-posenc": "FAILS",
    "N004-effects": "HOLDS",
    "N004-approx-cost": "HOLDS_WHEN",
    "N004-multihead": "HOLDS_WHEN",
    "N004-sparse": "HOLDS_WHEN",
    "N004-linformer": "FAILS",
    "N004-rope": "HOLDS_WHEN",
    "N004-prior": "UNDECIDED",
    "N004-flash": "FAILS",
}


def test_every_statement_of_the_text_is_there_in_its_order():
    assert [claim.id for claim in CHAPTER.claims] == list(VERDICTS)


@pytest.mark.parametrize("claim", CHAPTER.claims, ids=lambda claim: claim.id)
def test_the_check_finds_the_verdict(claim):
    if claim.slow and os.environ.get("HEEDFUL_SLOW") != "1":
        pytest.skip("slow: set HEEDFUL_SLOW=1")
    found = decide(claim)
    if "needs real models" in found.because or "needs minilm" in found.because or "needs smollm2" in found.because:
        pytest.skip(found.because)
    assert found.verdict == VERDICTS[claim.id], f"{found.because} {found.evidence} | control: {found.control}"


@pytest.mark.parametrize(
    "claim", [claim for claim in CHAPTER.claims if claim.counterexample], ids=lambda claim: claim.id
)
def test_the_counterexample_runs_and_prints_numbers(claim, capsys):
    exec(claim.counterexample, {})
    assert any(character.isdigit() for character in capsys.readouterr().out)


@pytest.mark.parametrize("claim", [claim for claim in CHAPTER.claims if claim.figure], ids=lambda claim: claim.id)
def test_the_figure_is_small_and_finite(claim):
    try:
        figure = claim.figure()
    except Undecided as why:
        pytest.skip(str(why))
    points = [number for x, y in figure.series.values() for number in (*x, *y)]
    assert len(points) <= 600 and all(abs(number) < float("inf") for number in points)
