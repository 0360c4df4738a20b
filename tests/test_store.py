"""The records of a scan: whole or not there, and every refusal in a sentence."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("polars", reason="polars is not installed: pip install 'heedful[report]'")

import polars as pl

from heedful import store
from heedful.store import AnotherScan, Broken, Damaged, Run, Unwritable

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
    assert found.columns == list(store.ROWS)
    assert found.select("text", "layer", "head").rows() == [
        ("0000", 0, 0),
        ("0000", 0, 1),
        ("0000", 1, 0),
        ("0001", 0, 0),
    ]
    assert found["sigma"][0].to_list() == [1.0, 0.5] and found["decay"][0] is None
    assert found.schema == store.ROWS


def test_a_write_that_fails_leaves_no_part_and_no_draft(tmp_path, monkeypatch):
    run = Run.begin(tmp_path / "run", MANIFEST)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(records, "_flush", full)
    with pytest.raises(Unwritable, match="the disk is full"):
        run.write("0000", 8, [row()])
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [tmp_path / "run" / "scan.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
def test_a_disk_that_is_really_full_is_said_to_be(tmp_path, monkeypatch):
    run = Run.begin(tmp_path / "run", MANIFEST)
    monkeypatch.setattr(pl.DataFrame, "write_parquet", lambda self, path, **options: Path("/dev/full").write_text("x"))
    with pytest.raises(Unwritable, match="the disk is full"):
        run.write("0000", 8, [row()])


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
    draft = tmp_path / "run" / "rows" / ".draft-0001-8.parquet.77"
    draft.write_bytes(b"PAR1 half of")
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


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_any_damaged_byte_is_noticed_before_anything_is_decoded(tmp_path):
    """Parquet decodes some damaged pages to other numbers, and panics on others."""
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0000", 8, [row(0, head) for head in range(8)])
    part = tmp_path / "run" / "rows" / "0000-8.parquet"
    whole = part.read_bytes()
    assert len(pl.read_parquet(part)) == 8  # any tool reads it
    for at in range(0, len(whole), 11):
        damage(part, at)
        with pytest.raises(
            Broken, match=r"0000-8.parquet: damaged, its bytes do not fit its checksum.*Resume the scan"
        ):
            run.rows()
        part.write_bytes(whole)
    for length in (0, 1, len(whole) - 40, len(whole) - 1):
        part.write_bytes(whole[:length])
        with pytest.raises(Broken, match="damaged"):
            run.rows()
    part.write_bytes(whole)
    assert len(run.rows()) == 8 and run.done() == {("0000", 8)}


@pytest.mark.parametrize("table", ["rows", "delta", "thumbnails"])
def test_a_damaged_part_is_set_aside_with_a_sentence_and_never_deleted(tmp_path, table):
    run = Run.begin(tmp_path / "run", MANIFEST)
    part = tmp_path / "run" / table / "0000-8.parquet"
    for name in ("0000-8.parquet.damaged", "0000-8.parquet.damaged-1"):
        run.write("0000", 8, [row()], table=table)
        assert run.done(table) == {("0000", 8)}
        damage(part, 10)
        left = part.read_bytes()
        with pytest.warns(Damaged, match=f"damaged, .* set aside as {name}; its text is measured again"):
            assert run.done(table) == set()
        assert part.with_name(name).read_bytes() == left and not part.exists()


def test_records_without_a_manifest_are_adopted_by_nobody(tmp_path):
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0000", 8, [row()])
    (tmp_path / "run" / "scan.json").unlink()
    for resume in (False, True):
        with pytest.raises(AnotherScan, match=r"holds records \(rows/0000-8.parquet\) but no scan.json"):
            Run.begin(tmp_path / "run", {**MANIFEST, "model": "other"}, resume=resume)
    assert not (tmp_path / "run" / "scan.json").exists()


def test_a_folder_that_a_scan_was_killed_in_before_its_first_record_is_used(tmp_path):
    for name in ("rows", "delta", "thumbnails"):
        (tmp_path / "run" / name).mkdir(parents=True)
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
    manifest.write_text(json.dumps({"format": store.FORMAT, **MANIFEST, **changed}))
    before = manifest.read_bytes()
    with pytest.raises(AnotherScan, match=f"rows/0000-8.parquet does not belong to the scan of scan.json: {said}"):
        Run.begin(tmp_path / "run", {**MANIFEST, **changed}, resume=True)
    with pytest.raises(AnotherScan, match=said):
        Run.open(tmp_path / "run").rows()
    assert manifest.read_bytes() == before


def test_a_part_under_another_name_is_refused(tmp_path):
    run = Run.begin(tmp_path / "run", MANIFEST)
    run.write("0000", 8, [row()])
    part = tmp_path / "run" / "rows" / "0000-8.parquet"
    part.rename(part.with_name("0001-8.parquet"))
    with pytest.raises(AnotherScan, match="it was written as 0000-8"):
        Run.begin(tmp_path / "run", MANIFEST, resume=True)


def test_a_part_of_another_version_is_named(tmp_path, monkeypatch):
    run = Run.begin(tmp_path / "run", MANIFEST)
    monkeypatch.setitem(store.TABLES, "rows", {"text": pl.String})
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
