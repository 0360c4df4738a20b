"""Every chapter of the theory: each check reaches its verdict again, and each counterexample prints what it says."""

from __future__ import annotations

import math
import os
import re

import pytest
import torch
from verdicts import PRINTED, VERDICTS

from heedful.patterns import Causal, Strided, Window
from heedful.theory import study_rows
from heedful.theory.chapters import CHAPTERS, CLAIMS
from heedful.theory.chapters.fixed_and_efficient.orthogonal_projections import bad_pairs
from heedful.theory.chapters.fixed_and_efficient.sparse_patterns import reached
from heedful.theory.claim import Claim, Undecided, decide

VERDICT = {name: verdict for chapter in VERDICTS.values() for name, verdict in chapter.items()}
MISSING = ("needs real models", "needs minilm", "needs smollm2")  # models that may not be installed
QUICK = {"N004-posenc", "N004-causal-vs-bidir"}  # slow checks with a quick counterexample or figure
slow = pytest.mark.skipif(os.environ.get("HEEDFUL_SLOW") != "1", reason="slow: set HEEDFUL_SLOW=1")


def each(claims, quick=frozenset()):
    """A test for each claim; slow ones only when asked for."""
    return pytest.mark.parametrize(
        "claim",
        [
            pytest.param(claim, id=claim.id, marks=slow if claim.slow and claim.id not in quick else ())
            for claim in claims
        ],
    )


def test_every_statement_of_the_texts_is_there_in_its_order():
    assert {chapter.name: [claim.id for claim in chapter.claims] for chapter in CHAPTERS} == {
        name: list(verdicts) for name, verdicts in VERDICTS.items()
    }


@each(CLAIMS.values())
def test_the_check_finds_the_verdict(claim: Claim):
    found = decide(claim)
    if VERDICT[claim.id] != "UNDECIDED" and any(words in found.because for words in MISSING):
        pytest.skip(found.because)
    assert found.verdict == VERDICT[claim.id], f"{found.because} {found.evidence} | control: {found.control}"


def test_what_fails_has_a_counterexample_and_nothing_else_has():
    failing = {name for name, verdict in VERDICT.items() if verdict == "FAILS"}
    assert {claim.id for claim in CLAIMS.values() if claim.counterexample} == failing == set(PRINTED)


@each((claim for claim in CLAIMS.values() if claim.counterexample), QUICK)
def test_a_counterexample_prints_what_it_says(claim: Claim, capsys):
    with torch.random.fork_rng(devices=[]):
        try:
            exec(claim.counterexample, {})
        except Undecided as missing:
            pytest.skip(str(missing))
    printed, expected = capsys.readouterr().out, PRINTED[claim.id]
    if isinstance(expected, str):
        assert expected in printed
    else:
        numbers = re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", re.sub(r"dtype=torch\.\w+", "", printed))
        assert [float(number) for number in numbers] == pytest.approx(expected, rel=0.02, abs=0.01)


@each((claim for claim in CLAIMS.values() if claim.figure), QUICK)
def test_a_figure_has_few_points_that_can_be_drawn(claim: Claim):
    try:
        figure = claim.figure()
    except Undecided as missing:
        pytest.skip(str(missing))
    assert 0 < sum(len(xs) for xs, _ in figure.series.values()) <= 300
    for xs, ys in figure.series.values():
        assert len(xs) == len(ys) > 1 and all(map(math.isfinite, (*xs, *ys)))
        assert not figure.log_x or min(xs) > 0
        assert not figure.log_y or min(ys) > 0


def chinese(text: str) -> bool:
    return any("一" <= letter <= "鿿" or letter in "，。：；" for letter in text)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.id)
def test_both_languages_are_there(claim: Claim):
    forms = [claim] if claim.corrected is None else [claim, claim.corrected]
    texts = [text for form in forms for text in (form.statement, form.condition, form.reason)]
    for text in filter(None, texts):
        assert not chinese(re.sub("“[^”]*”", "", text.en)), "only quotations are in the text's own language"
        assert chinese(text.zh)


def test_wording_says_why_nothing_is_decided():
    assert [name for name, claim in CLAIMS.items() if claim.kind == "wording" and claim.reason is None] == []


@pytest.mark.parametrize("name, study", [("R003-BLEU-table", "fixed-heads"), ("R003-4.4-lowres", "frozen-projections")])
def test_what_needs_more_training_names_its_study(name, study):
    assert f"study {study}" in decide(CLAIMS[name]).because


@pytest.mark.parametrize("name", ["R003-BLEU-3", "R003-why", "R003-4.1", "R003-4.2.2-gen"])
def test_what_studies_decide_is_undecided_without_their_runs(name, monkeypatch):
    monkeypatch.setattr(study_rows, "_rows", lambda study: ())
    found = decide(CLAIMS[name])
    assert found.verdict == "UNDECIDED" and "it has 0 of 3 seeds" in found.because


@pytest.mark.parametrize("layers", [(Window(2), Strided(3) & Causal()), (Strided(3) & Causal(), Window(1))])
def test_reached_is_a_search_along_the_edges(layers):
    n = 13
    found = reached(layers, n)
    for i in range(n):
        seen = {i}
        for pattern in reversed(layers):  # from an output down through the layers
            allowed = pattern.allows(torch.arange(n)[:, None], torch.arange(n))
            seen = {j for p in seen for j in allowed[p].nonzero().flatten().tolist()}
        assert set(found[i].nonzero().flatten().tolist()) == seen


@pytest.mark.parametrize(("n", "eps", "k"), [(8, 0.5, 20), (30, 0.3, 60)])
def test_bad_pairs_are_as_many_as_samples_have(n, eps, k):
    draws = 200_000
    ratio = torch.randn(draws, k, generator=torch.Generator().manual_seed(0)).square().mean(-1)
    share = ((ratio - 1).abs() > eps).double()
    error = float(share.std()) / draws**0.5
    assert abs(bad_pairs(n, eps, k) / (n * (n - 1) / 2) - float(share.mean())) < 4 * error
