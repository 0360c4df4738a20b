"""The store: whole or not there after a kill, every damaged byte noticed, and every refusal in a sentence."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from heedful.store import Damaged, Log, Unwritable, log, write_whole

NAMES = ["rows.jsonl", "rows.jsonl.gz"]


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def numbers(one: Log) -> list[int]:
    return [record["n"] for record in one.records()]


def fill(path: Path, count: int = 3) -> Log:
    made = Log(path)
    for n in range(count):
        made.append({"n": n, "text": f"τ = {n / 7}"})
    return made


@pytest.mark.parametrize("name", NAMES)
def test_records_come_back_in_order_and_any_tool_reads_them(tmp_path, name):
    made = fill(tmp_path / "new" / name)
    made.append({"n": 1, "text": "again"}, {"n": 3, "text": "more"})
    assert numbers(Log(made.path)) == [0, 1, 2, 1, 3]
    assert made.latest("n")[1,]["text"] == "again" and list(made.latest("n")) == [(0,), (1,), (2,), (3,)]
    text = gzip.decompress(made.path.read_bytes()) if name.endswith(".gz") else made.path.read_bytes()
    assert [json.loads(line)["n"] for line in text.splitlines()] == [0, 1, 2, 1, 3]
    made.replace([{"n": 7}])
    made.append({"n": 8})
    assert numbers(made) == [7, 8]


@pytest.mark.parametrize("name", NAMES)
def test_an_end_that_was_cut_off_costs_one_record(tmp_path, name):
    path = tmp_path / name
    fill(path, 2)
    before = len(path.read_bytes())
    fill(path, 1)
    whole = path.read_bytes()
    for size in range(before + 1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.warns(Damaged, match="its last record is cut off"):
            assert numbers(Log(path)) == [0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Log(path).append({"n": 5})
        assert numbers(Log(path)) == [0, 1, 5]
    assert path.with_name(name + ".damaged").read_bytes() == whole[before : len(whole) - 1]


@pytest.mark.parametrize("name", NAMES)
def test_any_damaged_byte_is_told_or_changes_nothing(tmp_path, name):
    """Bytes of a gzip header that hold no data are the only ones that may go unnoticed."""
    path = tmp_path / name
    made = fill(path, 3)
    expected, whole = list(made.records()), path.read_bytes()
    unnoticed = 0
    for at in range(len(whole)):
        damage(path, at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = list(Log(path).records())
        unnoticed += not caught
        assert found == expected if not caught else all(record in expected for record in found)
        assert len(found) >= 1, "damage in one append costs its neighbour at most"
        path.write_bytes(whole)
    assert unnoticed <= 3 * 7


@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_is_set_aside_and_never_deleted(tmp_path, name):
    path = tmp_path / name
    made = fill(path, 1)
    middle = len(path.read_bytes())
    fill(path, 2)
    damage(path, middle + 30)
    left = path.read_bytes()
    with pytest.warns(Damaged, match=rf"do not fit their checksum.*set aside as {name}.damaged"):
        made.append({"n": 9})
    assert numbers(made) == [0, 1, 9]
    assert path.with_name(name + ".damaged").read_bytes() in left


def test_a_plain_line_without_a_checksum_is_not_believed(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 4}\n')
    with pytest.warns(Damaged):
        assert numbers(Log(path)) == []


def test_appends_of_several_processes_lose_nothing(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    script = "import sys; from heedful.store import Log; log = Log(sys.argv[1])\n"
    script += "for n in range(20): log.append({'n': n, 'by': sys.argv[2]})"
    children = [subprocess.Popen([sys.executable, "-c", script, path, str(by)]) for by in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    found = [(record["by"], record["n"]) for record in Log(path).records()]
    assert sorted(found) == sorted((str(by), n) for by in range(3) for n in range(20))


@pytest.mark.skipif(os.name == "nt", reason="kill -9 is of POSIX")
def test_a_process_that_is_killed_loses_nothing_that_it_appended(tmp_path):
    path = tmp_path / "rows.jsonl"
    script = "import sys; from heedful.store import Log; log = Log(sys.argv[1])\n"
    script += "for n in range(10**6): log.append({'n': n, 'pad': 'x' * 5000}); print(n, flush=True)"
    child = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE, text=True)
    for _ in range(20):
        last = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    said = child.communicate()[0].split()
    last = int(said[-1]) if said and said[-1].isdigit() else last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Damaged)
        assert numbers(Log(path))[: last + 1] == list(range(last + 1))


def test_the_log_needs_the_standard_library_alone(tmp_path):
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "heedful"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from heedful.store import Log, provenance
Log(sys.argv[1]).append(provenance())
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "a.jsonl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def full(*given):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    made = fill(tmp_path / "rows.jsonl")
    page = tmp_path / "page.html"
    write_whole(page, "old")
    before = made.path.read_bytes()
    monkeypatch.setattr(log, "flush", full)
    with pytest.raises(Unwritable, match="the disk is full"):
        made.append({"n": 4})
    with pytest.raises(OSError, match="No space left"):
        write_whole(page, "new")
    assert made.path.read_bytes() == before and page.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "page.html"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_a_disk_that_is_really_full_is_said_to_be(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(Unwritable, match="the disk is full"):
        Log(tmp_path / "rows.jsonl").append({"n": 1})


# ── the tables of a scan

pl = pytest.importorskip("polars", reason="polars is not installed: pip install 'heedful[report]'")

from heedful.store import scans  # noqa: E402
from heedful.store.scans import AnotherScan, Broken, Run  # noqa: E402

MANIFEST = {
    "model": "tiny",
    "fingerprint": "1f",
    "options": {"seed": 0},
    "texts": [{"id": "0000", "sha256": "a"}],
    "lengths": [8],
}


def row(layer: int = 0, head: int = 0, **more) -> dict:
    return {"text": "0000", "length": 8, "layer": layer, "head": head, "rank90": 3.0, "sigma": [1.0, 0.5], **more}


def test_rows_come_back_as_they_went_in_and_in_order(tmp_path):
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0001", 8, [row(text="0001")])
    run.write("0000", 8, [row(1, 0), row(0, 1, rank90=float("nan")), row(0, 0)])
    found = Run.open(tmp_path / "run").rows()
    assert found.columns == list(scans.ROWS)
    assert found.select("text", "layer", "head").rows() == [
        ("0000", 0, 0),
        ("0000", 0, 1),
        ("0000", 1, 0),
        ("0001", 0, 0),
    ]
    assert found["sigma"][0].to_list() == [1.0, 0.5] and found["decay"][0] is None
    assert found.schema == scans.ROWS


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(Unwritable, match="can't be written to"):
            Run.begin(tmp_path / "run", MANIFEST)
    finally:
        tmp_path.chmod(0o700)


def test_a_refusal_of_the_system_is_named(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Unwritable, match="Read-only file system"):
        Run.begin(tmp_path / "run", MANIFEST)


def test_drafts_of_a_killed_process_are_swept_and_not_read(tmp_path):
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0000", 8, [row()])
    draft = tmp_path / "run" / ".draft-scan.json.77"
    draft.write_bytes(b"half of")
    assert len(run.rows()) == 1 and run.done() == {("0000", 8)}
    Run.begin(tmp_path / "run", MANIFEST, resume=True)
    assert not draft.exists()


def test_a_folder_with_a_scan_is_not_written_over(tmp_path):
    Run.begin(tmp_path / "run", MANIFEST)
    with pytest.raises(AnotherScan, match="holds a scan already"):
        Run.begin(tmp_path / "run", MANIFEST)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "other"}, "the model was 'tiny', not 'other'"),
        ({"options": {"seed": 1}}, "seed was 0, not 1"),
        ({"options": {}}, "seed was 0, not None"),
        ({"options": {"seed": 0, "against": "3c"}}, "against was None, not '3c'"),
        ({"fingerprint": "2e"}, "the weights or the configuration of the model changed"),
        ({"fingerprint": "2e", "versions": {"heedful": "9"}}, "heedful was None, not 9"),
        ({"lengths": []}, "texts were cut to lengths, not read whole"),
        ({"texts": [{"id": "0000", "sha256": "b"}]}, "text 0000 was another one"),
    ],
)
def test_a_folder_of_another_scan_is_refused_and_left_alone(tmp_path, changed, said):
    Run.begin(tmp_path / "run", MANIFEST)
    before = (tmp_path / "run" / "scan.json").read_bytes()
    with pytest.raises(AnotherScan, match=said):
        Run.begin(tmp_path / "run", {**MANIFEST, **changed}, resume=True)
    assert (tmp_path / "run" / "scan.json").read_bytes() == before


def test_a_scan_that_is_resumed_may_have_more_texts_and_lengths(tmp_path):
    Run.begin(tmp_path / "run", MANIFEST)
    more = {**MANIFEST, "texts": [*MANIFEST["texts"], {"id": "0001", "sha256": "b"}], "lengths": [16]}
    run = Run.begin(tmp_path / "run", more, resume=True)
    assert run.manifest["lengths"] == [8, 16] and len(run.manifest["texts"]) == 2


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(AnotherScan, match=r"holds other things \(thesis.tex\)"):
        Run.begin(tmp_path, MANIFEST)
    with pytest.raises(AnotherScan, match="a file; expected a folder"):
        Run.begin(tmp_path / "thesis.tex", MANIFEST)


def test_records_without_a_manifest_are_adopted_by_nobody(tmp_path):
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0000", 8, [row()])
    (tmp_path / "run" / "scan.json").unlink()
    for resume in (False, True):
        with pytest.raises(AnotherScan, match=r"holds records \(rows.jsonl.gz\) but no scan.json"):
            Run.begin(tmp_path / "run", {**MANIFEST, "model": "other"}, resume=resume)
    assert not (tmp_path / "run" / "scan.json").exists()


def test_a_folder_that_a_scan_was_killed_in_before_its_first_record_is_used(tmp_path):
    (tmp_path / "run" / "against").mkdir(parents=True)
    (tmp_path / "run" / ".draft-scan.json.7").write_text("{")
    assert Run.begin(tmp_path / "run", MANIFEST).done() == set()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "other"}, "the model was 'tiny', not 'other'"),
        ({"options": {"seed": 1}}, "seed was 0, not 1"),
        ({"texts": [{"id": "0000", "sha256": "b"}]}, "text 0000 was another one"),
    ],
)
def test_parts_of_another_scan_are_refused_whatever_the_manifest_says(tmp_path, changed, said):
    """scan.json of one scan over the rows of another."""
    Run.begin(tmp_path / "run", MANIFEST).write("0000", 8, [row()])
    manifest = tmp_path / "run" / "scan.json"
    manifest.write_text(json.dumps({"format": scans.FORMAT, **MANIFEST, **changed}))
    before = manifest.read_bytes()
    with pytest.raises(
        AnotherScan, match=f"text 0000 at length 8 in rows.jsonl.gz does not belong to the scan of scan.json: {said}"
    ):
        Run.begin(tmp_path / "run", {**MANIFEST, **changed}, resume=True)
    with pytest.raises(AnotherScan, match=said):
        Run.open(tmp_path / "run").rows()
    assert manifest.read_bytes() == before


def test_a_part_of_another_version_is_named(tmp_path, monkeypatch):
    run = Run.begin(tmp_path / "run", MANIFEST)
    monkeypatch.setitem(scans.TABLES, "rows", {"text": pl.String})
    run.write("0000", 8, [row()])
    with pytest.raises(Broken, match="has no column 'length'"):
        run.rows()


def test_a_folder_without_a_manifest_or_with_a_strange_one_is_refused(tmp_path):
    with pytest.raises(Broken, match=r"no scan.json in it"):
        Run.open(tmp_path)
    (tmp_path / "scan.json").write_text("[]")
    with pytest.raises(Broken, match="no manifest of a scan"):
        Run.open(tmp_path)
    (tmp_path / "scan.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(Broken, match=r"records of form 9, .* Scan again into another folder"):
        Run.open(tmp_path)


def test_a_scan_of_an_earlier_version_is_refused_in_a_sentence(tmp_path):
    """Its tables were Parquet files, a folder each."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "0000-8.parquet").write_bytes(b"PAR1")
    (tmp_path / "scan.json").write_text(json.dumps({"format": 2, **MANIFEST}))
    for open_it in (Run.open, lambda folder: Run.begin(folder, MANIFEST, resume=True)):
        with pytest.raises(Broken, match=r"records of form 2, this version of heedful reads form 3. Scan again"):
            open_it(tmp_path)


def test_numbers_that_are_not_finite_come_back(tmp_path):
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0000", 8, [row(rank90=float("nan"), rank95=float("-inf"), decay=None, sigma=[float("inf"), 0.1])])
    found = run.rows().row(0, named=True)
    assert math.isnan(found["rank90"]) and found["rank95"] == -math.inf and found["decay"] is None
    assert found["sigma"] == [math.inf, pytest.approx(0.1)]


@pytest.mark.parametrize("table", ["rows", "delta", "thumbnails"])
def test_damage_stops_a_reader_and_is_measured_again(tmp_path, table):
    run = Run.begin(tmp_path / "run", MANIFEST)
    path = tmp_path / "run" / f"{table}.jsonl.gz"
    run.write("0000", 8, [row()], table=table)
    first = len(path.read_bytes())
    run.write("0001", 8, [row(text="0001")], table=table)
    damage(path, first // 2)
    with pytest.raises(Broken, match=f"{table}.jsonl.gz: bytes 0 to {first} are damaged.*Resume the scan"):
        getattr(Run.open(tmp_path / "run"), table)()
    with pytest.warns(Damaged, match=f"set aside as {table}.jsonl.gz.damaged. Its text is measured again"):
        assert run.done(table) == {("0001", 8)}
    run.write("0000", 8, [row(head=5)], table=table)
    run.write("0000", 8, [row(head=6)], table=table)  # the last one counts
    assert getattr(run, table)()["head"].to_list() == [6, 0] and run.done(table) == {("0000", 8), ("0001", 8)}
