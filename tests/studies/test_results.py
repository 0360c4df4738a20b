"""Tables, differences and pages made of rows of runs."""

from __future__ import annotations

from heedful.studies.results import BLEU, Setting, by_seed, difference, of_study, save, settings, spread
from heedful.studies.tables import latex, markdown, table


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
