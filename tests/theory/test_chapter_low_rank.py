"""The verdicts on chapter 11.3, as they were found, and its counterexamples, as they print."""

from __future__ import annotations

import os
import re

import pytest

from heedful.theory.chapters.low_rank import CHAPTER
from heedful.theory.claim import Claim, Undecided, Verdict, decide

# fmt: off
VERDICTS = {  # in the text's order
    "I11.3-cost": "HOLDS_WHEN",
    "D11.24": "HOLDS_WHEN",
    "L11.33": "HOLDS",
    "SVD11.3.1": "HOLDS",
    "D11.25": "HOLDS",
    "T11.21": "FAILS",
    "C11.8": "HOLDS_WHEN",
    "L11.34.1": "HOLDS",
    "L11.34.2": "HOLDS",
    "L11.34.3": "FAILS",
    "L11.34-formal": "HOLDS_WHEN",
    "Tab11.3.1-maxrank": "FAILS",
    "Tab11.3.1-values": "FAILS",
    "L11.35": "HOLDS_WHEN",
    "T11.22": "HOLDS_WHEN",
    "C11.9": "FAILS",
    "T11.23": "FAILS",
    "T11.23-proof": "FAILS",
    "L11.36": "FAILS",
    "G11.3.2-NN": "FAILS",
    "L11.37": "FAILS",
    "T11.24": "FAILS",
    "T11.25": "HOLDS",
    "C11.10": "FAILS",
    "LF11.3.3": "HOLDS_WHEN",
    "D11.26": "FAILS",
    "L11.38": "HOLDS_WHEN",
    "T11.26": "FAILS",
    "T11.26-proof": "FAILS",
    "Tab11.3.2-lin": "FAILS",
    "K11.3.4-core": "HOLDS_WHEN",
    "L11.39": "HOLDS_WHEN",
    "K11.3.4-exp": "FAILS",
    "K11.3.4-relu": "FAILS",
    "L11.40": "FAILS",
    "T11.27": "FAILS",
    "C11.11": "FAILS",
    "L11.41": "UNDECIDED",  # needs a study
    "T11.28": "FAILS",
    "L11.42": "UNDECIDED",  # wording
    "Tab11.3.3": "FAILS",
    "L11.43-value": "UNDECIDED",  # needs BERT-base
    "L11.43-arith": "HOLDS",
    "T11.29-trend": "FAILS",
    "T11.29-wording": "FAILS",
    "C11.12": "UNDECIDED",  # needs a study
    "L11.44-params": "FAILS",
    "L11.44-speed": "HOLDS_WHEN",
    "L11.44-acc": "UNDECIDED",  # needs a study
    "S11.3.7-feature": "HOLDS_WHEN",
}

PRINTED = {  # the numbers that a counterexample prints, to 2 % or 0.01
    "T11.21": [64, 6.46, 128, 12.3, 256, 24.1],
    "L11.34.3": [47],
    "Tab11.3.1-maxrank": [512],
    "Tab11.3.1-values": [0.9, 51.2, 0.95, 71],
    "C11.9": [0, 1, 2, 46, 10, 58],
    "T11.23": [3, 0.0244],
    "T11.23-proof": [0.1497],
    "L11.36": [128],
    "G11.3.2-NN": [1, 10, 0, 13.45],
    "L11.37": [4, 0.467, 64, 0.351, 1024, 0.370],
    "T11.24": [100, 0.055, 10_000, 0.002, 1_000_000, 0.0002],
    "C11.10": [1, 1.01, 0.905, 0, 0.1],
    "D11.26": [3, 4, 0, 0],
    "T11.26": [5, 5, 5],
    "T11.26-proof": [1],
    "Tab11.3.2-lin": [64, 67_108_864, 128, 268_435_456, 256, 1_073_741_824],
    "K11.3.4-exp": [0.4724, 23.45, 2],
    "K11.3.4-relu": [0.5, 0, -0.414, 0, 0, 1, 1, 2, 2, 2.414],
    "L11.40": [4, 64],
    "T11.27": [2.72, 0.368, 2.72, 0.368, 0.76, 0.881],
    "C11.11": [0, 1, 0],
    "T11.28": [0.937],
    "Tab11.3.3": [64, 64, 64, 8],
    "T11.29-trend": [14.2, 17.3, 7.7],
    "T11.29-wording": [5.54, 1, 5.04, 69, 0.693, 109],
    "L11.44-params": [2_359_296, 2_359_296, 2_621_440],
}
# fmt: on

CLAIMS = {claim.id: claim for claim in CHAPTER.claims}


def parameters(claims):
    """Slow claims need real models and a minute or two each."""
    wanted = os.environ.get("HEEDFUL_SLOW") == "1"
    off = pytest.mark.skipif(not wanted, reason="slow: set HEEDFUL_SLOW=1")
    return [pytest.param(claim, id=claim.id, marks=[off] if claim.slow else []) for claim in claims]


def test_the_chapter_has_every_row_of_its_text_in_order():
    assert list(CLAIMS) == list(VERDICTS)


@pytest.mark.parametrize("claim", parameters(CHAPTER.claims))
def test_the_verdict_is_the_one_on_record(claim: Claim):
    found = decide(claim)
    assert found.verdict == Verdict(VERDICTS[claim.id]), f"{found.because}\n{found.evidence}\n{found.control}"


def test_what_fails_has_a_counterexample():
    failing = {name for name, verdict in VERDICTS.items() if verdict == "FAILS"}
    assert {claim.id for claim in CHAPTER.claims if claim.counterexample} == failing == set(PRINTED)


@pytest.mark.parametrize("claim", parameters(claim for claim in CHAPTER.claims if claim.counterexample))
def test_a_counterexample_prints_what_it_says(claim: Claim, capsys):
    exec(claim.counterexample, {})
    printed = re.sub(r"dtype=torch\.\w+", "", capsys.readouterr().out)
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", printed)]
    assert numbers == pytest.approx(PRINTED[claim.id], rel=0.02, abs=0.01)


@pytest.mark.parametrize("claim", parameters(claim for claim in CHAPTER.claims if claim.figure))
def test_a_figure_has_few_finite_points(claim: Claim):
    try:
        figure = claim.figure()
    except Undecided as missing:
        pytest.skip(str(missing))
    points = [value for xs, ys in figure.series.values() for pair in zip(xs, ys, strict=True) for value in pair]
    assert 0 < len(points) <= 600 and all(abs(value) < float("inf") for value in points)
    assert not figure.log_y or all(y > 0 for _, ys in figure.series.values() for y in ys)
