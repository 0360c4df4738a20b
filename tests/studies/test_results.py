"""Tables, differences and pages made of rows of runs."""

from __future__ import annotations

import json
from html import escape
from statistics import mean

import pytest
from typer.testing import CliRunner

from heedful.cli.app import app
from heedful.studies.page import html
from heedful.studies.results import (
    BLEU,
    Setting,
    by_seed,
    cells,
    difference,
    of_study,
    published,
    save,
    settings,
    spread,
)
from heedful.studies.tables import latex, markdown, table
from heedful.studies.texts import TEXTS


def rows(cell, scores, corpus="de-5000", study="fixed-heads", **other):
    common = {"study": study, "corpus": corpus, "direction": "de-en", "shuffled": False, "cell": cell, "steps": 1500}
    common |= {"losses": {"train": 1.0, "dev": 2.0, "test": 2.5}, "step_seconds": 0.01, "optimiser_bytes": 2**20}
    common |= {
        "weights": {"trainable": 10**6, "frozen": 0, "none": 0},
        "hardware": "a GPU",
        "samples": [["a", "b", "c"]],
    }
    common |= {"curve": [[10, 4.0, 4.5], [20, 3.0, 3.5]], "heads": [], "norm": {}, **other}
    tests = [
        {name: {"bleu": x, "chrf": 2 * x, "empty": 0.0, "copies": 0.01} for name in ("test", "test_unseen")}
        for x in scores
    ]
    return [{**common, "seed": seed, "tests": test} for seed, test in enumerate(tests)]


BASE, OTHER = rows("8L", [10.0, 12.0, 14.0]), rows("7Ftoken+1L", [11.0, 13.1, 14.9])


def test_differences_are_paired_by_seed():
    gap = difference(by_seed(OTHER, BLEU), by_seed(BASE, BLEU))
    assert str(gap) == "+1.00 ± 0.25" and gap.p < 0.01  # 4.303 · 0.1 / √3
    assert str(spread([10.0, 12.0, 14.0])) == "12.00 ± 4.97"  # of the cell alone, not paired
    assert difference(by_seed(OTHER, BLEU), {}) is None
    only = difference(by_seed(OTHER[1:], BLEU), by_seed(BASE[:2], BLEU))
    assert only.seeds == 1 and only.half is None


def test_a_table_has_the_baseline_first_and_every_setting_its_own():
    more = rows("8L", [20.0, 21.0], "de-20000") + rows("8L", [5.0], shuffled=True)
    found = table([*OTHER, *BASE, *more], Setting("de-5000", "de-en", 1500))
    assert [line[0] for line in found.rows] == ["8L", "7Ftoken+1L", "8L (shuffled pairs)"]
    assert found.rows[1][3] == "+1.00 ± 0.25 **" and found.rows[0][3] == ""
    assert [x.corpus for x in settings([*more, *BASE])] == ["de-5000", "de-20000"]
    text, tex = markdown([*BASE, *OTHER]), latex([*BASE, *OTHER])
    assert "| 7Ftoken+1L | 3 | 13.00 ± 4.85 | +1.00 ± 0.25 ** |" in text
    assert r"+1.00 $\pm$ 0.25 **" in tex and tex.count(r"\begin{tabular}") == 1


def test_a_cell_that_two_studies_share_is_found_in_both():
    frozen = rows("orthogonal", [9.0, 9.5], study="frozen-projections")
    found = of_study([*BASE, *OTHER, *rows("8L", [30.0], "de-20000"), *frozen], "frozen-projections")
    assert sorted({(row["cell"], row["corpus"]) for row in found}) == [
        ("learned", "de-5000"),
        ("orthogonal", "de-5000"),
    ]


def test_rows_are_written_as_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save(BASE, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("study", ["fixed-heads", "frozen-projections"])
def test_the_page_shows_every_run_in_both_languages(study):
    rows = published(study)
    text = html(rows)
    scored = [row for row in rows if BLEU.of(row) is not None]
    assert text.count('class="run"') == len(rows) >= len(scored) > 30
    assert "\\begin{tabular}" in text and escape(TEXTS[study].question["zh"]) in text
    assert all(escape(row["samples"][0][2]) in text for row in rows if row.get("samples"))
    assert "http" not in text.replace("http-equiv", "")


def test_what_the_pages_say_is_what_the_rows_say():
    """Sentences of texts.py that hold numbers."""
    rows = published("fixed-heads")
    heads = [head for row in rows if row["cell"] == "8L" for head in row.get("heads") or []]
    assert len(heads) == 2 * 4 * 8 and max(max(head["previous"], head["next"]) for head in heads) < 1 / 5
    frozen = published("frozen-projections")
    means = {}
    for setting in settings(frozen):
        for cell, some in cells(frozen, setting).items():
            means[setting.corpus, cell] = mean(by_seed(some, BLEU).values())
    assert 0.45 < means["de-5000", "orthogonal"] / means["de-5000", "learned"] < 0.55
    assert means["de-20000", "orthogonal"] / means["de-20000", "learned"] < 0.75
    loss, saved = (means["de-5000", "learned"] - means["de-5000", x] for x in ("orthogonal", "orthogonal + LoRA 8"))
    assert 0.4 < saved / loss < 0.6


def test_a_sound_baseline_gains_from_data_and_seldom_copies():
    rows = [row for row in published("fixed-heads") if row["cell"] == "8L"]
    few, many = (mean(by_seed([r for r in rows if r["corpus"] == x], BLEU).values()) for x in ("de-5000", "de-20000"))
    assert many > few + 10
    assert all(test["empty"] < 0.01 and test["copies"] < 0.01 for row in rows for test in row["tests"].values())
    assert all(row["losses"]["test"] < 4 for row in rows)


def test_the_command_prints_tables_and_refuses_unknown_names(tmp_path):
    runner = CliRunner()
    assert runner.invoke(app, ["study"]).output.split() == ["fixed-heads", "frozen-projections"]
    shown = runner.invoke(app, ["study", "fixed-heads"])
    assert shown.exit_code == 0 and "| 7Ftoken+1L | 5 |" in shown.output
    assert "\\toprule" in runner.invoke(app, ["study", "fixed-heads", "--latex"]).output
    assert len(json.loads(runner.invoke(app, ["study", "frozen-projections", "--json"]).output)) > 30
    page = tmp_path / "page.html"
    assert runner.invoke(app, ["study", "fixed-heads", "--html", str(page)]).exit_code == 0 and page.exists()
    assert runner.invoke(app, ["study", "heads"]).exit_code == 2
