"""The runner: what happens to one claim happens to no other, nothing that was found is lost, nothing stale is fresh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toys

from heedful.theory import run, workers
from heedful.theory.claim import Case, Claim, Text, equal, evidence
from heedful.theory.journal import Journal, fingerprints
from heedful.theory.records import EXPECTED, controls, counts, differing
from heedful.theory.run import Plan


@pytest.fixture(scope="module")
def theory(tmp_path_factory):
    """A package of toy chapters that processes can import."""
    folder = tmp_path_factory.mktemp("theory")
    package = toys.write(folder, "toy_theory")
    sys.path.insert(0, str(folder))
    yield package
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def wild(theory, tmp_path_factory):
    """One run over the chapter in which claims crash, hang and die: (records by id, folder)."""
    (theory / "hang").touch()
    out = tmp_path_factory.mktemp("wild")
    told = []
    plan = Plan(out, chapter="wild", jobs=2, limit=4.0, registry="toy_theory")
    records = run.run(plan, lambda record, done, total: told.append((record["id"], done, total)))
    assert sorted(done for _, done, _ in told) == list(range(1, 8)) and {total for *_, total in told} == {7}
    return {record["id"]: record for record in records}, out


def test_a_claim_that_crashes_is_undecided_and_says_why(wild):
    records, out = wild
    assert records["crash"]["verdict"] == "UNDECIDED"
    assert "ZeroDivisionError: nothing to divide by (wild.py, line" in records["crash"]["because"]
    assert "said on the way" in (out / "workers.log").read_text()


def test_a_claim_that_hangs_is_stopped_at_its_limit(wild):
    assert wild[0]["hang"]["because"] == "it took longer than its limit of 4 s"


def test_a_process_that_dies_takes_one_claim_with_it(wild):
    assert wild[0]["die"]["because"].startswith("its process died: SIGKILL")


def test_the_others_are_judged_all_the_same(wild):
    records, _ = wild
    assert records["quick"]["verdict"] == "HOLDS"
    assert records["study"]["because"] == "decided by a study that has not run"
    assert list(records) == ["quick", "die", "crash", "same", "study", "hang", "late"]


def test_a_slow_claim_is_told_as_not_run(wild):
    late = wild[0]["late"]
    assert not late["ran"] and late["verdict"] == "UNDECIDED" and not late["differs"]


def test_a_control_that_does_not_flip_is_seen(wild):
    records, _ = wild
    assert not records["same"]["control"]["flipped"] and records["same"]["verdict"] == "UNDECIDED"
    assert [one["id"] for one in controls(list(records.values())) if not one["control"]["flipped"]] == ["same"]
    assert counts(list(records.values())) == {"HOLDS": 1, "HOLDS_WHEN": 0, "FAILS": 0, "UNDECIDED": 6}
    assert {one["id"] for one in differing(list(records.values()))} == {"crash", "hang", "die", "same", "study"}


def test_every_line_of_the_journal_is_whole_json(wild):
    lines = (wild[1] / "findings.jsonl").read_text().splitlines()
    assert {json.loads(line)["id"] for line in lines} == {"quick", "crash", "hang", "die", "same", "study"}


def wait_for(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
    package = toys.write(tmp_path, "toy_killed")
    (package / "hang").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom heedful.theory.run import Plan, run\n"
        "if __name__ == '__main__':\n"
        "    run(Plan(Path(sys.argv[1]), ids=('C1', 'quick', 'hang'), jobs=1, registry='toy_killed'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = subprocess.Popen([sys.executable, script, out], env=environment)
    try:
        wait_for(lambda: "hang" in toys.ran(package))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(map(alive, children)))  # nobody goes on behind our back
    journal = out / "findings.jsonl"
    assert [json.loads(line)["id"] for line in journal.read_text().splitlines()] == ["C1", "quick"]
    with open(journal, "a") as file:
        file.write('{"id": "hang", "fingerpr')  # as if it had been killed while writing

    (package / "hang").unlink()
    before = toys.ran(package)
    records = run.run(Plan(out, ids=("C1", "quick", "hang"), jobs=1, registry="toy_killed"))
    assert [record["verdict"] for record in records] == ["HOLDS"] * 3
    assert toys.ran(package)[len(before) :] == ["hang", "hang"]  # its case and its control, and nothing else
    assert run.run(Plan(out, ids=("C1", "quick", "hang"), jobs=1, registry="toy_killed")) == records
    assert len(toys.ran(package)) == len(before) + 2


def marks(package):
    return fingerprints({name: package / f"{name}.py" for name in ("calm", "wild")})


def test_a_finding_is_stale_when_its_chapter_changes(tmp_path):
    package = toys.write(tmp_path, "toy_stale")
    before = marks(package)
    source = package / "calm.py"
    source.write_text(source.read_text().replace("n % 2, 0", "n % 2, 1"))
    after = marks(package)
    assert after["calm"] != before["calm"] and after["wild"] == before["wild"]


def test_a_finding_is_stale_when_a_chapter_changes_that_its_own_imports(tmp_path):
    package = toys.write(tmp_path, "toy_imports")
    wild = package / "wild.py"
    wild.write_text("from toy_imports.calm import even\n" + wild.read_text())
    before = marks(package)
    calm = package / "calm.py"
    calm.write_text(calm.read_text() + "# changed\n")
    after = marks(package)
    assert after["calm"] != before["calm"] and after["wild"] != before["wild"]


def test_a_finding_is_stale_when_the_library_or_a_version_changes(tmp_path, monkeypatch):
    import heedful
    from heedful.theory import journal

    package = toys.write(tmp_path, "toy_library")
    library = tmp_path / "heedful"
    (library / "show").mkdir(parents=True)
    (library / "__init__.py").touch()
    monkeypatch.setattr(heedful, "__file__", str(library / "__init__.py"))
    before = marks(package)
    (library / "show" / "claims.py").write_text("shown otherwise")
    assert marks(package) == before, "how findings are shown changes none of them"
    (library / "prose.txt").write_text("another text")
    between = marks(package)
    assert all(between[name] != before[name] for name in before)
    monkeypatch.setattr(journal, "_versions", lambda: {"torch": "another"})
    assert all(marks(package)[name] != between[name] for name in before)


def test_a_stale_finding_is_not_fresh(tmp_path):
    journal = Journal(tmp_path / "findings.jsonl")
    journal.add("A", "old", {"verdict": "HOLDS"})
    journal.add("B", "new", {"verdict": "FAILS"})
    journal.add("B", "new", {"verdict": "HOLDS"})
    fresh = journal.fresh({"A": "new", "B": "new"})
    assert {name: line["outcome"]["verdict"] for name, line in fresh.items()} == {"B": "HOLDS"}


def test_a_torn_line_spoils_no_other(tmp_path):
    journal = Journal(tmp_path / "findings.jsonl")
    journal.add("A", "1", {})
    with open(journal.path, "a") as file:
        file.write('{"id": "B", "fing')
    journal.add("C", "1", {})
    assert [line["id"] for line in journal.lines()] == ["A", "C"]


def test_numbers_that_are_not_finite_are_written_as_words():
    def check(value):
        return evidence(equal("n", value, float("inf")))

    claim = Claim("N", "1", "exact", Text("n", "n"), "", check, Case("nan", float("nan")), Case("1", 1.0))
    outcome = workers.judge(claim)
    row = outcome["evidence"]["comparisons"][0]
    assert (row["measured"], row["expected"], outcome["evidence"]["holds"]) == ("NaN", "Infinity", None)
    json.dumps(outcome, allow_nan=False)


def test_a_figure_that_fails_changes_no_verdict():
    claim = Claim(
        "F", "1", "exact", Text("n", "n"), "", lambda n: evidence(equal("n", n, 0)), Case("0", 0), Case("1", 1),
        figure=lambda: 1 / 0,
    )  # fmt: skip
    outcome = workers.judge(claim)
    assert outcome["verdict"] == "HOLDS" and "ZeroDivisionError" in outcome["figure"]["error"]


def test_what_agrees_with_a_first_reading():
    assert EXPECTED["conditional"] == {"HOLDS", "HOLDS_WHEN"} and EXPECTED["design"] == {"UNDECIDED"}
    assert len(EXPECTED["empirical"]) == 4 and EXPECTED["false"] == {"FAILS"} and EXPECTED["holds"] == {"HOLDS"}


@pytest.mark.parametrize(
    "plan, wanted",
    [
        ({}, ["C1", "C2", "C3", "W1", "quick", "die", "crash", "same", "study", "hang", "late"]),
        ({"chapter": "calm"}, ["C1", "C2", "C3", "W1"]),
        ({"kind": "statistical"}, ["C3"]),
        ({"ids": ("c2*", "C1")}, ["C1", "C2"]),
    ],
)
def test_what_a_plan_selects(theory, tmp_path, plan, wanted):
    assert [claim.id for claim in run.select(Plan(tmp_path, registry="toy_theory", **plan))] == wanted


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"ids": ("quik",)}, "no claim is called 'quik'. Near to it: quick."),
        ({"ids": ("@",)}, "`heedful theory` lists them"),
        ({"chapter": "clam"}, "no chapter is called 'clam'; the chapters are calm, wild."),
        ({"kind": "vague"}, "no claim is of the kind 'vague'; the kinds are exact,"),
    ],
)
def test_a_name_that_there_is_not_is_told_with_those_near_to_it(theory, tmp_path, plan, said):
    with pytest.raises(ValueError) as mistake:
        run.select(Plan(tmp_path, registry="toy_theory", **plan))
    assert said in str(mistake.value)


def test_a_finding_by_sources_that_changed_meanwhile_is_none(theory, tmp_path, monkeypatch):
    claim = run.claims_of("toy_theory")["C1"]
    monkeypatch.setattr(run, "outcomes", lambda *given, **more: iter([("C1", "another", workers.judge(claim))]))
    plan = Plan(tmp_path, ids=("C1",), registry="toy_theory")
    (record,) = run.run(plan)
    assert record["verdict"] == "UNDECIDED" and record["because"].startswith("the sources changed")
    assert Journal(tmp_path / "findings.jsonl").fresh(run.fingerprints_of("toy_theory")) == {}


def test_ids_are_unique_over_all_chapters():
    assert len(run.claims_of()) == sum(len(chapter.claims) for chapter in run.chapters_of())
    assert set(run.fingerprints_of()) == set(run.claims_of())
