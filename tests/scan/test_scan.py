"""A scan from end to end, on tiny models."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import time
from pathlib import Path

import polars as pl
import pytest
import tiny
import torch
import zoo

import heedful.hf as hf
from heedful.hf import Refused
from heedful.scan import Execution, Scan, ScanOptions, scan
from heedful.scan.heads import Measuring
from heedful.scan.memory import parse
from heedful.scan.statistics import bootstrap
from heedful.scan.texts import Unit
from heedful.scan.worker import Task, Worker
from heedful.store import Log
from heedful.store.scans import UNTIMED, AnotherScan, Damaged, Run


def timeless(found: Scan) -> pl.DataFrame:
    return found.rows.select(UNTIMED)


# ---- what comes out


def test_every_head_of_every_text_has_a_row_and_the_table_is_over_texts(model, tmp_path):
    found = scan(model, None, tiny.ids(3, 40), lengths=[16, 32], out=tmp_path / "run")
    assert len(found.rows) == 3 * 2 * 2 * 4
    table = found.table()
    assert len(table) == 2 * 2 * 4 and set(table["texts"]) == {3}
    row = table.filter((pl.col("length") == 32) & (pl.col("layer") == 1) & (pl.col("head") == 2)).row(0, named=True)
    own = found.rows.filter((pl.col("length") == 32) & (pl.col("layer") == 1) & (pl.col("head") == 2))
    assert row["rank90"] == pytest.approx(own["rank90"].mean())
    assert row["rank90_certified_high"] == pytest.approx(own["rank90_high"].mean())
    expected = bootstrap(torch.tensor(own["rank90"].to_list(), dtype=torch.float64)[:, None])
    assert (row["rank90_low"], row["rank90_high"]) == (float(expected.low), float(expected.high))
    assert row["sigma"][0] == pytest.approx(own["sigma1"].mean(), rel=1e-6)
    assert row["kind_of_head"] in ("positional", "sink", "low rank", "content")
    manifest = json.loads((tmp_path / "run" / "scan.json").read_text())
    assert [layer["name"] for layer in manifest["layers"]] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert manifest["layers"][0] | {"name": ""} == {
        "layer": 0, "name": "", "kind": "causal", "heads": 4, "kv_heads": 2, "width": 8, "items": 1,
    }  # fmt: skip
    pictures = found.thumbnails()
    assert [len(part) for _, part in pictures.group_by("length", maintain_order=True)] == [8, 8]
    assert set(pictures["text"]) == {"0000"} and pictures["width"].unique().sort().to_list() == [16, 32]
    assert {length: len(tokens) for length, tokens in manifest["thumbnail_tokens"].items()} == {"16": 16, "32": 32}


def test_numbers_do_not_depend_on_the_other_texts(model, tmp_path):
    texts = tiny.ids(3, 24)
    together = scan(model, None, texts, out=tmp_path / "all")
    alone = scan(model, None, [texts[0], texts[2]], out=tmp_path / "some")
    drop = [name for name in UNTIMED if name not in ("text", "length")]
    assert (
        together.rows.filter(pl.col("text") == "0002")
        .select(drop)
        .equals(alone.rows.filter(pl.col("text") == "0001").select(drop))
    )


def test_a_scan_is_read_again_and_says_what_it_found(model, tmp_path):
    made = scan(model, None, tiny.ids(3, 48), out=tmp_path / "run", options=ScanOptions(name="<tiny>"))
    found = Scan.open(tmp_path / "run")
    assert timeless(found).equals(timeless(made))
    assert re.match(r"At 48 tokens, \d of its 8 attention heads ", found.words())
    assert "Measured on 3 texts of 48 tokens" in found.words()
    assert found.words("zh").startswith("在 48 个词元处，8 个注意力头中有 ")
    with pytest.raises(ValueError, match="expected one of en, zh"):
        found.words("de")
    assert "&lt;tiny&gt;" in found._repr_html_() and "<tiny>" not in found._repr_html_()
    head = found.head(1, 3)
    assert len(head.rows) == 3 and len(head.table) == 1 and head.thumbnail["width"] == 48
    assert repr(head).startswith("head 3 of layer 1 (model.layers.1.self_attn)")
    with pytest.raises(ValueError, match="layers 0, 1, with heads from 0 to 3"):
        found.head(2, 0)


def slope(lengths, values) -> float:
    x, y = (torch.tensor(each, dtype=torch.float64).log() for each in (lengths, values))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def test_growth_is_the_slope_through_the_means_over_texts(model, tmp_path):
    found = scan(model, None, tiny.ids(3, 32), lengths=[8, 16, 32], out=tmp_path / "run")
    table = found.table()
    own = table.filter((pl.col("layer") == 0) & (pl.col("head") == 1)).sort("length")
    row = found.growth().filter((pl.col("layer") == 0) & (pl.col("head") == 1)).row(0, named=True)
    assert row["exponent"] == pytest.approx(slope([8, 16, 32], own["rank90"].to_list()), rel=1e-6)
    assert row["exponent_low"] <= row["exponent"] <= row["exponent_high"]
    means = table.group_by("length").agg(pl.col("rank90").mean()).sort("length")["rank90"].to_list()
    trend = found.trend()
    assert float(trend.mean) == pytest.approx(slope([8, 16, 32], means), rel=1e-6)
    assert float(trend.low) <= float(trend.mean) <= float(trend.high)
    with pytest.raises(ValueError, match="1 lengths in this scan"):
        scan(model, None, tiny.ids(1, 32), lengths=[8], out=tmp_path / "one").growth()


def test_growth_of_a_scan_that_was_cut_off_goes_through_what_is_there(model, tmp_path):
    scan(model, None, tiny.ids(3, 16), lengths=[8, 16], out=tmp_path / "run")
    forget(tmp_path / "run" / "rows.jsonl.gz", "0002", 16)
    found = Scan.open(tmp_path / "run")
    means = [found.table().filter(pl.col("length") == n)["rank90"].mean() for n in (8, 16)]
    assert float(found.trend().mean) == pytest.approx(slope([8, 16], means), rel=1e-6)
    assert "2 of 3 texts have been measured so far" in found.words()


def test_chosen_layers_are_those_of_the_whole_scan_and_the_model_stops_there(model, tmp_path):
    texts = tiny.ids(1, 24)
    whole = scan(model, None, texts, out=tmp_path / "whole")
    ran = []
    hook = model.model.layers[1].register_forward_hook(lambda *_: ran.append(1))
    try:
        first = scan(
            model,
            None,
            texts,
            out=tmp_path / "first",
            options=ScanOptions(layers=[0]),
            execution=Execution(progress=lambda done, total: None),
        )
    finally:
        hook.remove()
    assert timeless(first).equals(timeless(whole).filter(pl.col("layer") == 0))
    assert len(ran) == 2  # the two runs of the check, one of which is the survey, and no more
    with pytest.raises(Refused, match="this model makes 2 attention calls"):
        scan(model, None, texts, out=tmp_path / "none", options=ScanOptions(layers=[2]))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["bart", "vit"])
def test_models_with_two_sequences_or_images_are_scanned(name, tmp_path):
    species = tiny.species(name)
    inputs = zoo.texts(species, batch=1)
    found = scan(zoo.grow(species), None, [inputs, inputs], out=tmp_path / "run")
    calls: list[hf.Call] = []
    hf.probe(zoo.grow(species), inputs, calls.append)
    assert found.rows["layer"].n_unique() == len(calls)
    kinds = found.table().group_by("layer").agg(pl.col("kind").first()).sort("layer")["kind"].to_list()
    assert kinds == [call.kind for call in calls]
    assert set(found.rows["length"]) == {calls[0].q.shape[-2]}


def test_a_model_stops_after_its_last_attention_call():
    species = tiny.species("llama")
    model, unit = zoo.grow(species), Unit("0", 24, zoo.texts(species, batch=1, n=24))
    count = len(model.model.layers)
    worker = Worker(hf.Probe(model), None, Task(Measuring(), "cpu", None, count, f"model.layers.{count - 1}.self_attn"))
    once, ran = worker(unit), []
    hooks = [
        layer.mlp.register_forward_hook(lambda *_, at=at: ran.append(at)) for at, layer in enumerate(model.model.layers)
    ]
    again = worker(unit)
    for hook in hooks:
        hook.remove()
    assert ran == list(range(count - 1))
    assert [{**row, "seconds": 0} for row in once.rows] == [{**row, "seconds": 0} for row in again.rows]


def test_a_text_with_other_calls_than_the_first_is_read_to_its_end():
    species = tiny.species("llama")
    model, unit = zoo.grow(species), Unit("0", 24, zoo.texts(species, batch=1, n=24))
    count = len(model.model.layers)
    found = Worker(
        hf.Probe(model), None, Task(Measuring(), "cpu", None, count - 1, f"model.layers.{count - 1}.self_attn")
    )(unit)
    assert {row["layer"] for row in found.rows} == set(range(count))


def test_texts_are_read_whole_and_averaged_under_their_mean_length(model, tmp_path):
    found = scan(model, tiny.tokenizer(), [tiny.prose(20), tiny.prose(30, seed=1)], out=tmp_path / "run")
    assert found.lengths == [25] and set(found.table()["texts"]) == {2}
    assert Run.open(tmp_path / "run").done() == {("0000", 20), ("0001", 30)}


# ---- precision


def test_texts_are_added_until_the_mean_is_precise(model, tmp_path):
    texts = tiny.ids(12, 24)
    loose = scan(model, None, texts, lengths=[24], out=tmp_path / "loose", options=ScanOptions(precision=0.5))
    assert loose.texts == 5 and "was reached with 5 of 12 texts" in loose.words()
    strict = scan(model, None, texts, lengths=[24], out=tmp_path / "strict", options=ScanOptions(precision=1e-6))
    assert strict.texts == 12 and "was not reached: at 24 tokens" in strict.words()
    assert "12 of 12 texts measured. Give more texts." in strict.words()
    found = strict.mean("rank90")
    wanted = float(found.half_width / found.mean) * 1.2
    some = scan(model, None, texts, lengths=[24], out=tmp_path / "some", options=ScanOptions(precision=wanted))
    reached = some.mean("rank90")
    assert 5 <= some.texts <= 12 and float(reached.half_width / reached.mean) <= wanted
    again = scan(
        model, None, texts, lengths=[24], out=tmp_path / "some", resume=True, options=ScanOptions(precision=wanted)
    )
    assert again.texts == some.texts


# ---- two models


def test_both_models_of_a_comparison_know_the_precision_that_was_asked_for(model, tmp_path):
    found = scan(
        model,
        None,
        tiny.ids(7, 16),
        out=tmp_path / "run",
        options=ScanOptions(precision=0.9, against=tiny.llama(seed=3)),
    )
    assert found.texts == 5
    assert all("was reached with 5 of 7 texts" in each.words() for each in (found, found.against))


def test_a_model_against_itself_differs_by_nothing(model, tmp_path):
    found = scan(model, None, tiny.ids(2, 24), out=tmp_path / "run", options=ScanOptions(against=tiny.llama()))
    assert timeless(found).equals(timeless(found.against))
    table = found.compare(found.against)
    assert set(table["rank90"]) == {0.0} and set(table["delta_energy"]) == {0.0} and set(table["delta_rank90"]) == {0.0}


def test_two_models_are_compared_text_by_text(model, tmp_path):
    other = tiny.llama(seed=3)
    texts = tiny.ids(3, 24)
    found = scan(model, None, texts, out=tmp_path / "run", options=ScanOptions(against=other))
    table = found.compare(found.against)
    assert len(table) == 8
    one, two = ([], [])
    hf.probe(model, {"input_ids": texts[1][None]}, one.append)
    hf.probe(other, {"input_ids": texts[1][None]}, two.append)
    gap = one[1].operator().to_dense()[0, 2].double() - two[1].operator().to_dense()[0, 2].double()
    row = Run.open(tmp_path / "run").delta().filter(
        (pl.col("text") == "0001") & (pl.col("layer") == 1) & (pl.col("head") == 2)
    ).row(0, named=True)  # fmt: skip
    sums = torch.linalg.svdvals(gap).square().cumsum(0)
    assert row["rank90"] == int((sums < 0.9 * sums[-1]).sum()) + 1
    assert row["energy"] == pytest.approx(float(gap.square().sum()), rel=1e-4)
    assert row["relative"] == pytest.approx(float(gap.norm() / one[1].operator().to_dense()[0, 2].norm()), rel=1e-4)
    apart = found.rows["rank90"].to_numpy() - found.against.rows["rank90"].to_numpy()
    assert table["rank90"].to_list() == pytest.approx(apart.reshape(3, -1).mean(0).tolist())
    with pytest.raises(ValueError, match="share no text"):
        found.compare(scan(model, None, tiny.ids(1, 24, seed=9), out=tmp_path / "other"))


# ---- interrupted


def forget(path: Path, text: str, length: int) -> None:
    """Remove one record from a table."""
    content, pieces = path.read_bytes(), list(Log(path).pieces())
    heads = [json.loads(piece.lines[0]) for piece in pieces]
    kept = [
        piece for piece, head in zip(pieces, heads, strict=True) if (head["text"], head["length"]) != (text, length)
    ]
    assert len(kept) < len(pieces)
    path.write_bytes(b"".join(content[piece.start : piece.end] for piece in kept))


def test_a_scan_that_was_stopped_goes_on_where_it_was(model, tmp_path):
    texts = tiny.ids(4, 24)
    whole = scan(model, None, texts, out=tmp_path / "whole")
    stopped = tmp_path / "stopped"

    def interrupt(done: float, total: int) -> None:
        if done > 2.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(model, None, texts, out=stopped, execution=Execution(progress=interrupt))
    kept = (stopped / "rows.jsonl.gz").read_bytes()
    assert len(Run.open(stopped).done()) == 2
    with pytest.raises(AnotherScan, match="holds a scan already"):
        scan(model, None, texts, out=stopped)
    with pytest.raises(AnotherScan, match="seed was 0, not 1"):
        scan(model, None, texts, out=stopped, resume=True, options=ScanOptions(seed=1))
    with pytest.raises(AnotherScan, match="the weights or the configuration of the model changed"):
        scan(tiny.llama(seed=3), None, texts, out=stopped, resume=True)
    resumed = scan(model, None, texts, out=stopped, resume=True)
    assert timeless(resumed).equals(timeless(whole))
    assert (stopped / "rows.jsonl.gz").read_bytes().startswith(kept)


@pytest.mark.parametrize("table", ["rows", "delta", "thumbnails", "against/rows"])
@pytest.mark.parametrize("lost", [True, False])
def test_parts_that_were_lost_or_damaged_are_made_again(model, tmp_path, table, lost):
    options = ScanOptions(against=tiny.llama(seed=3))
    arguments = {"lengths": [8, 16], "options": options, "out": tmp_path / "run"}
    whole = scan(model, None, tiny.ids(2, 16), **arguments)
    before = timeless(whole), timeless(whole.against), whole.thumbnails(), Run.open(tmp_path / "run").delta()
    path = tmp_path / "run" / f"{table}.jsonl.gz"
    if lost:
        forget(path, "0000", 16)
        again = scan(model, None, tiny.ids(2, 16), **arguments, resume=True)
    else:
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)
        with pytest.warns(Damaged, match="set aside as .*jsonl.gz.damaged"):
            again = scan(model, None, tiny.ids(2, 16), **arguments, resume=True)
        aside = path.with_name(path.name + ".damaged").read_bytes()
        assert content.startswith(aside) and len(aside) > 40
    after = timeless(again), timeless(again.against), again.thumbnails(), Run.open(tmp_path / "run").delta()
    assert all(a.equals(b) for a, b in zip(before, after, strict=True))


def test_lost_parts_of_a_scan_that_is_precise_are_made_again_and_nothing_else(model, tmp_path):
    arguments = {"lengths": [8, 16], "options": ScanOptions(precision=0.9), "out": tmp_path / "run"}
    assert scan(model, None, tiny.ids(9, 16), **arguments).texts == 5
    for length in (8, 16):
        forget(tmp_path / "run" / "thumbnails.jsonl.gz", "0000", length)
    again = scan(model, None, tiny.ids(9, 16), **arguments, resume=True)
    assert again.texts == 5 and again.thumbnails()["length"].unique().sort().to_list() == [8, 16]


def _scan_in_a_process(folder: str, log: str) -> None:
    """Every unit that is begun leaves a line in the log."""
    from heedful.scan import worker

    torch.set_num_threads(1)
    begin = worker.Worker.__call__

    def logged(self, unit):
        with open(log, "a") as file:
            file.write(f"{unit.text}-{unit.length}\n")
        return begin(self, unit)

    worker.Worker.__call__ = logged
    scan(tiny.llama(), None, tiny.ids(6, 24), lengths=[16, 24], out=folder, resume=True)


def test_kills_at_random_moments_lose_nothing(model, tmp_path):
    """SIGKILL, three times, at moments spread over the run; the records are those of a run without, bit for bit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "heedful.scan", "transformers.models.llama.modeling_llama"])
    whole = scan(model, None, tiny.ids(6, 24), lengths=[16, 24], out=tmp_path / "whole")
    run, log = tmp_path / "killed", tmp_path / "begun"
    log.touch()
    draw = random.Random(0)
    kills = 0
    for _ in range(3):
        child = context.Process(target=_scan_in_a_process, args=(str(run), str(log)))
        child.start()
        seen = len(log.read_text().splitlines())
        target = seen + draw.randint(1, 3)
        deadline = time.monotonic() + 120
        while child.is_alive() and len(log.read_text().splitlines()) < target and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        child.kill()
        child.join()
        kills += child.exitcode == -9
    assert kills == 3
    last = context.Process(target=_scan_in_a_process, args=(str(run), str(log)))
    last.start()
    last.join()
    assert last.exitcode == 0
    assert timeless(Scan.open(run)).equals(timeless(whole))
    assert Scan.open(run).thumbnails().equals(whole.thumbnails())
    assert len(log.read_text().splitlines()) <= 12 + kills
    assert not [path for path in run.rglob("*") if path.name.startswith(".draft")]


# ---- bad input


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ([""], {}, "text: empty"),
        ([], {}, "texts: none"),
        ([tiny.prose(20), " "], {}, r"text 1 \(input 1\): text: empty"),
        ([tiny.prose(20)], {"lengths": [32]}, "20 tokens, expected at least 32"),
        ([tiny.prose(80)], {}, "80 tokens, expected at most 64.*Give a length"),
        ([tiny.prose(80)], {"lengths": [80]}, "80 tokens, expected at most 64"),
        ([torch.tensor([1, 2, 99])], {}, "token ids from 1 to 99, expected 0 to 60"),
        ([torch.tensor([0.5])], {}, "expected token ids, which are integers"),
        ([torch.tensor([], dtype=torch.long)], {}, "no token ids"),
        ([torch.ones(2, 3, dtype=torch.long)], {}, "expected \\(n,\\), one text each"),
        ([{"input_ids": torch.ones(2, 3, dtype=torch.long)}], {}, "a batch of 2, expected one text"),
        ([{"input_ids": torch.ones(1, 3, dtype=torch.long)}], {"lengths": [3]}, "give no lengths"),
        ([{}], {}, "without a tensor"),
        ([[1, 2, 99]], {}, "token ids from 1 to 99, expected 0 to 60"),
        ([[]], {}, "no token ids"),
        (["w1 w2"], {"lengths": [1]}, "expected numbers of tokens, 2 or more"),
    ],
)
def test_what_will_not_do_is_told_before_anything_is_measured(model, tmp_path, texts, options, said):
    with pytest.raises(ValueError, match=said):
        scan(model, tiny.tokenizer(), texts, out=tmp_path / "run", **options)
    assert not list(tmp_path.rglob("*.jsonl.gz"))


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (ScanOptions, {"layers": []}, "expected numbers from 0"),
        (ScanOptions, {"precision": 5.0}, "expected a share of the mean"),
        (ScanOptions, {"values": 0}, "expected 1 or more"),
        (Execution, {"engine": "spark"}, "expected one of local, processes, ray"),
        (Execution, {"address": "auto"}, "engine='ray'"),
    ],
)
def test_options_that_will_not_do_are_refused_where_they_are_made(kind, given, said):
    with pytest.raises(ValueError, match=said):
        kind(**given)


def test_options_passed_by_themselves_work_for_one_more_release(model, tmp_path):
    texts, told = tiny.ids(1, 24), []
    new = scan(
        model, None, texts, out=tmp_path / "new", options=ScanOptions(layers=[1], values=3),
        execution=Execution(progress=lambda *at: told.append(at)),
    )  # fmt: skip
    with pytest.warns(DeprecationWarning) as warned:
        old = scan(model, None, texts, out=tmp_path / "old", layers=[1], values=3, progress=lambda *at: None)
    assert [str(warning.message).partition(": ")[2] for warning in warned] == [
        "pass options=ScanOptions(layers=…).",
        "pass options=ScanOptions(values=…).",
        "pass execution=Execution(progress=…).",
    ]
    assert told
    assert timeless(old).equals(timeless(new)) and old.rows["layer"].unique().to_list() == [1]
    with pytest.raises(TypeError, match=r"no parameter 'layer'. Expected lengths, .* layers, against"):
        scan(model, None, texts, layer=[1])


def test_token_ids_may_stand_in_a_list(model, tmp_path):
    texts = tiny.ids(1, 24)
    one, two = (scan(model, None, x, out=tmp_path / str(i)) for i, x in enumerate((texts, [texts[0].tolist()])))
    assert timeless(one).equals(timeless(two))
    with pytest.raises(TypeError, match="one is a set, expected a string, token ids"):
        scan(model, None, [{"words"}], out=tmp_path / "no")


def test_one_text_is_not_a_list_of_letters(model):
    with pytest.raises(TypeError, match=r"expected a list of them: \[text\]"):
        scan(model, tiny.tokenizer(), "w1 w2 w3")


def test_rotary_models_read_beyond_their_positions_where_asked_to(model, tmp_path):
    found = scan(model, tiny.tokenizer(), [tiny.prose(80)], out=tmp_path / "run", options=ScanOptions(beyond=True))
    assert found.lengths == [80]


def test_passages_that_come_with_heedful_are_joined_and_never_used_twice():
    from heedful.scan.texts import builtin, pieces

    assert len(builtin(512)) == 24 and len(builtin(4096)) == 12 and len(builtin(32768)) == 1
    assert builtin(4096)[0].startswith(hf.passages()[0]) and builtin(4096)[1].startswith(hf.passages()[2])
    with pytest.raises(Refused, match="heedful brings 12 of that length"):
        builtin(4096, 13)
    with pytest.raises(Refused, match="Give texts of your own"):
        builtin(100_000)
    assert [len(part) for part in pieces("x" * 1000, 30, 9)] == [240] * 4


def test_a_bound_on_memory_is_kept_and_told(model, tmp_path):
    assert parse("1.5G") == 3 * 2**29 and parse("512 MiB") == 2**29
    with pytest.raises(ValueError, match="expected a size such as 4G"):
        parse("much")
    with pytest.raises(Refused, match="which the model and torch take already"):
        scan(model, None, tiny.ids(1, 24), out=tmp_path / "run", execution=Execution(memory=2**20))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux bounds what a process takes")
def test_memory_that_does_not_do_is_told_in_a_sentence():
    from heedful.scan.memory import limited

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    with pytest.raises(MemoryError, match="did not do"), limited(resident + 2**28):
        torch.zeros(2**30)
    torch.zeros(2**20)  # the limit is gone


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux bounds what a process takes")
def test_records_are_written_outside_the_bound_on_memory(model, tmp_path, monkeypatch):
    """polars ends the process where memory is refused to it."""
    import resource

    from heedful.scan import run
    from heedful.scan.memory import lifted, limited

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    with pytest.raises(MemoryError, match="did not do"), limited(resident + 2**28):
        with lifted():
            torch.empty(2**28)
        torch.empty(2**28)
    free, seen, write = resource.getrlimit(resource.RLIMIT_AS)[0], [], run._write

    def watched(*args):
        seen.append(resource.getrlimit(resource.RLIMIT_AS)[0])
        write(*args)

    monkeypatch.setattr(run, "_write", watched)
    scan(model, None, tiny.ids(2, 24), out=tmp_path / "run", execution=Execution(memory=resident + 2**32))
    assert seen == [free, free]


def test_models_of_sixteen_bits_are_measured_in_thirty_two(model, tmp_path):
    texts = tiny.ids(1, 24)
    found = scan(
        tiny.llama().to(torch.bfloat16), None, texts, out=tmp_path / "run", options=ScanOptions(against=tiny.llama())
    )
    assert found.rows["energy"].to_list() == pytest.approx(found.against.rows["energy"].to_list(), rel=0.1)
    assert found.compare(found.against)["delta_relative"].max() < 0.3
