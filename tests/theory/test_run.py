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

from heedful.executor import Done
from heedful.store import Damaged, Log
from heedful.theory import fingerprint, run
from heedful.theory.claim import Case, Claim, Text, equal, evidence
from heedful.theory.fingerprint import fingerprints_of
from heedful.theory.judge import judge
from heedful.theory.records import EXPECTED, controls, counts, differing
from heedful.theory.registry import chapters_of, claims_of
from heedful.theory.run import TheoryOptions


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
    (theory.parent / "hang").touch()
    out = tmp_path_factory.mktemp("wild")
    told = []
    plan = TheoryOptions(out, chapter="wild", jobs=2, limit=4.0, registry="toy_theory")
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
    (package.parent / "hang").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "out"
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom heedful.theory.run import TheoryOptions, run\n"
        "if __name__ == '__main__':\n"
        "    run(TheoryOptions(Path(sys.argv[1]), ids=('C1', 'quick', 'hang'), jobs=1, registry='toy_killed'))\n"
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
        file.write('{"sum":"0123456789abcdef","id":"hang","fingerpr')  # as if it had been killed while writing

    (package.parent / "hang").unlink()
    before = toys.ran(package)
    with pytest.warns(Damaged, match="its last record is cut off"):
        records = run.run(TheoryOptions(out, ids=("C1", "quick", "hang"), jobs=1, registry="toy_killed"))
    assert [record["verdict"] for record in records] == ["HOLDS"] * 3
    assert toys.ran(package)[len(before) :] == ["hang", "hang"]  # its case and its control, and nothing else
    assert run.run(TheoryOptions(out, ids=("C1", "quick", "hang"), jobs=1, registry="toy_killed")) == records
    assert len(toys.ran(package)) == len(before) + 2


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Writes a toy theory and gives its folder, and the fingerprints of its claims as they are now."""

    def make(name, **more):
        package = toys.write(tmp_path, name)
        for module, text in more.items():
            (package / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return package, lambda: fingerprints_of(name)

    return make


def edit(path):
    path.write_text(path.read_text() + "# changed\n")


def test_a_finding_is_stale_when_its_module_changes_and_not_when_another_does(toy):
    package, marks = toy("toy_stale")
    before = marks()
    edit(package / "calm.py")
    after = marks()
    assert after["C1"] != before["C1"] and after["quick"] == before["quick"]


def test_a_finding_is_stale_when_a_module_changes_that_its_own_reaches(toy):
    """calm imports near inside a function, near imports far by a name in a string; nobody imports aside."""
    package, marks = toy("toy_imports", near="FAR = 'toy_imports.far'\n", far="", aside="")
    source = package / "calm.py"
    source.write_text(source.read_text() + "\ndef later():\n    from toy_imports import near\n    return near\n")
    before = marks()
    edit(package / "aside.py")
    assert marks() == before
    for name in ("near", "far"):
        edit(package / f"{name}.py")
        after = marks()
        assert after["C1"] != before["C1"] and after["quick"] == before["quick"], name
        before = after


def test_a_finding_is_stale_when_data_or_a_version_changes(toy, monkeypatch):
    package, marks = toy("toy_data")
    before = marks()
    (package / "texts").mkdir()
    (package / "texts" / "prose.txt").write_text("another text")
    between = marks()
    assert all(between[name] != before[name] for name in before)
    monkeypatch.setattr(fingerprint, "versions", lambda: {"torch": "another"})
    assert all(marks()[name] != between[name] for name in before)


def test_claims_reach_what_they_import_and_not_what_shows_them():
    """bench/fits.py was left out once, though five claims import it."""
    sources = fingerprint.Sources("heedful")
    found = {claim.id: sources.reached(fingerprint.modules_of(claim)) for claim in claims_of().values()}
    assert sum("heedful.bench.fits" in names for names in found.values()) >= 5
    assert {"heedful.linalg", "heedful.kernels.dispatch"} <= set().union(*found.values())
    assert not {name for names in found.values() for name in names if name.startswith(("heedful.cli", "heedful.scan"))}
    assert len(set(fingerprints_of().values())) > 5


def test_a_stale_finding_is_not_fresh(tmp_path):
    log = Log(tmp_path / "findings.jsonl")
    for name, mark, verdict in (("A", "old", "HOLDS"), ("B", "new", "FAILS"), ("B", "new", "HOLDS"), ("B", "old", "X")):
        log.append({"id": name, "fingerprint": mark, "outcome": {"verdict": verdict}})
    assert run.fresh(log, {"A": "new", "B": "new"}) == {"B": {"verdict": "HOLDS"}}


def test_numbers_that_are_not_finite_are_written_as_words():
    def check(value):
        return evidence(equal("n", value, float("inf")))

    claim = Claim("N", "1", "exact", Text("n", "n"), "", check, Case("nan", float("nan")), Case("1", 1.0))
    outcome = judge(claim)
    row = outcome["evidence"]["comparisons"][0]
    assert (row["measured"], row["expected"], outcome["evidence"]["holds"]) == ("NaN", "Infinity", None)
    json.dumps(outcome, allow_nan=False)


def test_a_figure_that_fails_changes_no_verdict():
    claim = Claim(
        "F", "1", "exact", Text("n", "n"), "", lambda n: evidence(equal("n", n, 0)), Case("0", 0), Case("1", 1),
        figure=lambda: 1 / 0,
    )  # fmt: skip
    outcome = judge(claim)
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
    assert [claim.id for claim in run.select(TheoryOptions(tmp_path, registry="toy_theory", **plan))] == wanted


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
        run.select(TheoryOptions(tmp_path, registry="toy_theory", **plan))
    assert said in str(mistake.value)


def test_a_finding_by_sources_that_changed_meanwhile_is_none(theory, tmp_path, monkeypatch):
    claim = claims_of("toy_theory")["C1"]
    found = Done("C1", ("another", judge(claim)))
    monkeypatch.setattr(run.Executor, "run", lambda self, make, items, in_order: iter([found]))
    plan = TheoryOptions(tmp_path, ids=("C1",), registry="toy_theory")
    (record,) = run.run(plan)
    assert record["verdict"] == "UNDECIDED" and record["because"].startswith("the sources changed")
    assert run.fresh(Log(tmp_path / "findings.jsonl"), fingerprints_of("toy_theory")) == {}


def test_ids_are_unique_over_all_chapters():
    assert len(claims_of()) == sum(len(chapter.claims) for chapter in chapters_of())
    assert set(fingerprints_of()) == set(claims_of())
