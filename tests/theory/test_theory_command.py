"""`heedful theory`: the table, one claim in full, JSON, and what is said of names that there are not."""

from __future__ import annotations

import json
import sys

import pytest
import toys
from rich.cells import cell_len
from typer.testing import CliRunner

from heedful.cli import app as cli
from heedful.store import Log
from heedful.theory import registry
from heedful.theory import run as runner
from heedful.theory.fingerprint import fingerprints_of
from heedful.theory.judge import judge
from heedful.theory.registry import claims_of

FIELDS = {
    "id", "chapter", "source", "section", "kind", "slow", "statement", "formula", "condition", "verdict", "because",
    "ran", "first", "differs", "reason", "evidence", "control", "counterexample", "corrected", "figure", "seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Findings of the toy theory's calm chapter, so that the tests below start no process."""
    folder = tmp_path_factory.mktemp("command")
    toys.write(folder, "toy_command")
    sys.path.insert(0, str(folder))
    runner.run(runner.TheoryOptions(folder / "out", chapter="calm", jobs=1, registry="toy_command"))
    yield folder / "out"
    sys.path.remove(str(folder))


@pytest.fixture
def run(out, monkeypatch):
    monkeypatch.setattr(registry, "REGISTRY", "toy_command")

    def invoke(*arguments, columns=80):
        given = ["theory", *map(str, arguments), "--out", str(out)]
        return CliRunner().invoke(cli.app, given, env={"COLUMNS": str(columns)}, prog_name="heedful")

    return invoke


def widest(text):
    return max(cell_len(line) for line in text.splitlines())


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits(run, language, columns):
    result = run("--chapter", "calm", "--language", language, columns=columns)
    assert result.exit_code == 0, result.output
    assert widest(result.output) <= columns
    for name in ("C1", "C2", "C3", "W1"):
        assert name in result.output


def test_the_table_says_what_it_comes_to(run):
    said = run("--chapter", "calm").output
    assert "remainder of <b>n</b> & 2: 0 = 0" in said  # of a claim that holds its first number
    assert "size: 5 not ≤ 3 (+1)" in said  # of one that fails the number that fails
    assert "mean: 1.010 ± 0.010 = 1" in said
    assert "1 unlike a first reading" in said and "holds → fails" in said and "It was counted." in said
    assert "controls that came out the other way: 4 of 4" in said
    assert "wall time" in said
    assert ["calm", "1", "1", "1", "1", "4"] in [line.split() for line in said.splitlines()]


def test_failed_shows_those_alone(run):
    rows = json.loads(run("--chapter", "calm", "--failed", "--json").output)
    assert [row["id"] for row in rows] == ["C2"]


def test_json_has_everything(run):
    rows = json.loads(run("--chapter", "calm", "--json").stdout)
    assert [row["id"] for row in rows] == ["C1", "C2", "C3", "W1"]
    assert [row["verdict"] for row in rows] == ["HOLDS", "FAILS", "HOLDS_WHEN", "UNDECIDED"]
    assert all(set(row) == FIELDS for row in rows)
    first, second = rows[:2]
    assert first["evidence"]["comparisons"][0]["measured"] == 0 and first["control"]["flipped"] is True
    assert first["figure"]["series"]["one"][1][2] == "NaN"
    assert second["corrected"]["verdict"] == "HOLDS" and second["corrected"]["control"]["flipped"]
    assert rows[3]["evidence"] is None and rows[3]["control"] is None


def test_one_claim_is_told_in_full(run):
    said = run("c2").output
    assert "C2  ✗ fails" in said and "Five is at most three." in said and "5 ≤ 3" in said
    assert "as stated: 5 – does not hold" in said and "control: 2 – comes out the other way" in said
    assert "print(5 <= 3)  # </pre><script>" in said
    assert "true instead  C2*  ✓ holds" in said and "2 ≤ √9" in said
    assert "It was counted." in said and widest(said) <= 80


def test_one_claim_in_chinese(run):
    said = run("C3", "--language", "zh").output
    assert "有条件成立" in said and "均值为一。" in said and "样本足够大" in said and "结果相反" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("C11",), "no claim is called 'C11'. Near to it: C1"),
        (("--chapter", "storm"), "the chapters are calm, wild."),
        (("--kind", "vague"), "the kinds are exact,"),
        (("--language", "fr"), "'en', 'zh'"),
        (("--jobs", -1), "--jobs"),
    ],
)
def test_what_there_is_not_is_told_in_a_sentence(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split()) and not result.stdout


def test_a_control_that_does_not_flip_ends_with_one(run, out):
    mark = fingerprints_of("toy_command")["same"]
    outcome = judge(claims_of("toy_command")["same"])
    Log(out / "findings.jsonl").append({"id": "same", "fingerprint": mark, "outcome": outcome})
    result = run("same", "C1")
    assert result.exit_code == 1
    assert "not told from their control: same" in result.output


def test_the_book_is_written(run, tmp_path):
    result = run("--chapter", "calm", "--html", tmp_path / "deep" / "book.html", "--language", "zh")
    page = (tmp_path / "deep" / "book.html").read_text()
    assert result.exit_code == 0 and '<html lang="zh"' in page and 'id="C2"' in page
    assert "wrote" in result.output


def test_help_fits(run):
    result = CliRunner().invoke(cli.app, ["theory", "--help"], env={"COLUMNS": "80"}, prog_name="heedful")
    assert result.exit_code == 0 and widest(result.output) <= 80
