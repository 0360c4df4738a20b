"""`heedful scan` and `heedful report` as a user runs them: what they print, and what bad input gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from heedful.cli.app import app
from heedful.scan import Scan, run
from heedful.store import log
from heedful.store.scans import Run


def heedful(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr on one line."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text(tiny.prose(60))
    return path


def test_a_scan_prints_the_answer_and_where_the_records_are(folder, text, tmp_path):
    code, out, _ = heedful("scan", folder, "--texts", text, "--lengths", "16,32", "--out", tmp_path / "run")
    assert code == 0
    said = " ".join(out.split())
    assert (
        said.startswith("At 32 tokens, ")
        and "of its 8 attention heads" in said
        and "Measured on 1 text of 32 tokens" in said
    )
    assert "From 16 to 32 tokens (N) it grows as N^" in said and "heedful report" in said
    assert Scan.open(tmp_path / "run").manifest["texts"][0]["title"] == "prose.txt"


def test_json_is_the_table_and_nothing_else(folder, text, tmp_path):
    code, out, _ = heedful("scan", folder, "--texts", text, "--lengths", 16, "--out", tmp_path / "run", "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 8 and {"rank90", "base_rank90", "kind_of_head"} <= rows[0].keys()


def test_a_long_file_is_cut_into_texts(folder, tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(tiny.prose(2000))
    code, _, _ = heedful(
        "scan",
        folder,
        "--texts",
        path,
        "--texts-count",
        3,
        "--lengths",
        16,
        "--layers",
        "0-1",
        "--out",
        tmp_path / "run",
    )
    assert code == 0 and Scan.open(tmp_path / "run").texts == 3
    code, _, said = heedful("scan", folder, "--texts", path, "--texts-count", 99, "--lengths", 64)
    assert code == 2 and "--texts-count 99: the files hold 14 texts of 64 tokens" in said


def test_two_models_are_compared(folder, text, tmp_path):
    other = tiny.saved(tmp_path / "other", seed=4)
    code, out, _ = heedful("scan", folder, "--against", other, "--texts", text, "--out", tmp_path / "run", "--json")
    assert code == 0 and {"delta_rank90", "delta_relative"} <= json.loads(out)[0].keys()


def test_a_scan_resumes(folder, text, tmp_path):
    arguments = ("scan", folder, "--texts", text, "--lengths", 16, "--out", tmp_path / "run")
    assert heedful(*arguments)[0] == 0
    code, _, said = heedful(*arguments)
    assert code == 2 and "holds a scan already" in said
    assert heedful(*arguments, "--resume")[0] == 0
    code, _, said = heedful(*arguments, "--resume", "--seed", 1)
    assert code == 2 and "belongs to another scan: seed was 0, not 1." in said


def test_a_damaged_part_is_told_and_measured_again(folder, text, tmp_path):
    arguments = ("scan", folder, "--texts", text, "--lengths", 16, "--out", tmp_path / "run")
    assert heedful(*arguments)[0] == 0
    part = tmp_path / "run" / "rows.jsonl.gz"
    part.write_bytes(part.read_bytes()[:60] + b"?" + part.read_bytes()[61:])
    code, _, said = heedful("report", tmp_path / "run")
    assert code == 2 and "Resume the scan" in said and "Traceback" not in said
    code, _, said = heedful(*arguments, "--resume")
    assert code == 0 and "set aside as rows.jsonl.gz.damaged. Its text is measured again" in said
    assert heedful("report", tmp_path / "run")[0] == 0


def test_a_model_runs_in_the_precision_that_was_asked_for(folder, text, tmp_path):
    arguments = ("scan", folder, "--texts", text, "--lengths", 32, "--out", tmp_path / "run")
    assert heedful(*arguments, "--dtype", "bfloat16")[0] == 0
    found = Scan.open(tmp_path / "run")
    assert found.manifest["options"]["dtype"] == "bfloat16"
    assert heedful(*arguments[:-1], tmp_path / "stored")[0] == 0
    stored = Scan.open(tmp_path / "stored")
    assert stored.manifest["options"]["dtype"] == "float32"
    assert stored.manifest["fingerprint"] != found.manifest["fingerprint"]
    one, two = (x.mean("entropy").mean for x in (found, stored))
    assert 0 < abs(one - two) < 0.05 * two
    code, _, said = heedful(*arguments, "--resume")
    assert code == 2 and "dtype was 'bfloat16', not 'float32'" in said
    assert heedful(*arguments, "--resume", "--dtype", "bfloat16")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "int4"], "'int4', expected one of float32, bfloat16, float16"),
        (["--lengths", "64,x"], "--lengths 64,x: expected numbers"),
        (["--layers", "7"], "this model makes 2 attention calls"),
        (["--lengths", "80"], "80 tokens, expected at most 64"),
        (["--lengths", "62"], "60 tokens, expected at least 62"),
        (["--precision", "3"], "expected a share of the mean"),
        (["--memory", "lots"], "expected a size such as 4G"),
        (["--memory", "1M"], "which the model and torch take already"),
        (["--engine", "slurm"], "expected one of local, processes, ray"),
        (["--device", "abacus"], "--device abacus: expected cpu or cuda"),
        (["--texts", "nowhere.txt"], "nowhere.txt: can't be read: No such file"),
        (["--texts-count", "0"], "--texts-count 0: expected 1 to 9999"),
    ],
)
def test_a_mistake_gets_a_sentence_and_exit_code_two(folder, text, tmp_path, arguments, said):
    code, out, err = heedful("scan", folder, "--texts", text, "--out", tmp_path / "run", *arguments)
    assert code == 2 and said in err and "Traceback" not in err and not out
    assert not (tmp_path / "run").exists()


def test_an_empty_text_and_one_that_is_no_text_are_named(folder, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    code, _, said = heedful("scan", folder, "--texts", tmp_path / "empty.txt")
    assert code == 2 and "empty.txt:empty,expectedatleastoneword" in "".join(said.split())  # lines end anywhere
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)))
    code, _, said = heedful("scan", folder, "--texts", tmp_path / "noise.bin")
    assert code == 2 and "noise.bin:notextinUTF-8" in "".join(said.split())


def test_a_text_longer_than_the_positions_is_told_what_to_do(folder, tmp_path):
    (tmp_path / "long.txt").write_text(tiny.prose(100))
    code, _, said = heedful("scan", folder, "--texts", tmp_path / "long.txt", "--out", tmp_path / "run")
    assert code == 2 and "100 tokens, expected at most 64" in said and "Give a length" in said


def test_a_name_that_is_no_model_is_told(tmp_path):
    code, _, said = heedful("scan", "no-such/model")
    assert code == 2 and "no-such/model: no such folder" in said
    code, _, said = heedful("scan", tmp_path)
    assert code == 2 and "a folder without config.json" in said


def test_pickled_weights_are_refused_unless_asked_for(folder, text, tmp_path):
    pickled = tiny.saved(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(tiny.llama().state_dict(), pickled / "pytorch_model.bin")
    arguments = ("scan", pickled, "--texts", text, "--lengths", 16, "--out", tmp_path / "run")
    code, _, said = heedful(*arguments)
    assert code == 2 and "no safetensors among its weights" in said and "--allow-pickle" in said
    assert heedful(*arguments, "--allow-pickle")[0] == 0


def test_code_of_a_model_is_not_run_unless_asked_for(folder, text, tmp_path):
    strange = tiny.saved(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (strange / "config.json").write_text(json.dumps(config))
    (strange / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code, _, said = heedful("scan", strange, "--texts", text, "--out", tmp_path / "run")
    assert code == 2 and "brings Python code of its own" in said and "--trust-remote-code" in said
    assert not (tmp_path / "ran").exists()


OWN_CODE = """
from transformers import LlamaConfig, LlamaModel

class Config(LlamaConfig):
    model_type = "strange"

class Model(LlamaModel):
    config_class = Config
"""


def test_a_model_with_code_of_its_own_is_scanned_where_that_is_asked_for(folder, text, tmp_path, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    strange = tiny.saved(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (strange / "config.json").write_text(json.dumps(config))
    (strange / "code.py").write_text(OWN_CODE)
    found = []
    for model, asked in ((strange, ["--trust-remote-code"]), (tiny.saved(tmp_path / "plain"), [])):
        out = tmp_path / f"run of {model.name}"
        code, _, said = heedful("scan", model, "--texts", text, "--lengths", 16, "--out", out, *asked)
        assert code == 0, said
        found.append(Scan.open(out).table())
    own, plain = found
    assert own.height == 8 and own["rank90"].equals(plain["rank90"]) and own["entropy"].equals(plain["entropy"])


def test_a_full_disk_keeps_what_was_measured(folder, tmp_path, monkeypatch):
    paths = []
    for at in range(3):
        path = tmp_path / f"{at}.txt"
        path.write_text(tiny.prose(20, seed=at))
        paths += ["--texts", path]
    write = run._write

    def full(result, *runs):
        if result.unit.text == "0001":
            monkeypatch.setattr(log, "flush", lambda file: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        write(result, *runs)

    monkeypatch.setattr(run, "_write", full)
    arguments = ("scan", folder, *paths, "--lengths", 16, "--out", tmp_path / "run")
    code, _, said = heedful(*arguments)
    assert code == 1 and "the disk is full. What was measured before is kept" in said
    monkeypatch.undo()
    assert Run.open(tmp_path / "run").done() == {("0000", 16)}
    assert heedful(*arguments, "--resume")[0] == 0 and Scan.open(tmp_path / "run").texts == 3


def test_a_folder_that_can_not_be_written_to_is_named(folder, text, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, said = heedful("scan", folder, "--texts", text, "--lengths", 16, "--out", tmp_path / "file" / "run")
    assert code == 1 and "can't be written to" in said
    if Path("/proc/version").exists():
        code, _, said = heedful("scan", folder, "--texts", text, "--lengths", 16, "--out", "/proc/heedful")
        assert code == 1 and "/proc/heedful: can't be written to" in said


def test_a_report_of_what_is_no_scan_is_refused(tmp_path):
    code, _, said = heedful("report", tmp_path)
    assert code == 2 and "no scan.json in it" in said
    code, _, said = heedful("report", tmp_path, "--language", "la")
    assert code == 2 and "expected en or zh" in said
