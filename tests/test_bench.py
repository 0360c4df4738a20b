"""The benchmark's machinery, on synthetic numbers and on a few tokens. What it measures is for `make bench` to say."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import inf
from xml.etree import ElementTree

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

from heedful import CATALOG
from heedful.bench import gpu, measure, peers, run, tables
from heedful.bench.cases import CASES, Case, Goal
from heedful.bench.fits import crossover, growth
from heedful.bench.memory import allocated, limited_memory, measure_apart
from heedful.bench.peers import Contender
from heedful.bench.plot import crossover_svg
from heedful.bench.rows import SAME, Rows, provenance
from heedful.bench.setting import BOTH, FORWARD, PASSES, Setting, Work
from heedful.bench.timing import Pace, race, summary
from heedful.cli.app import app
from heedful.store import Log

TINY = Setting(heads=2, d=8, threads=1, clock="cpu")
QUICK = Pace(least=1, budget=0.0, patience=1.0)
SOME = ("linear", "window", "current")


def plan(path, **changes):
    return replace(run.BenchOptions(path, TINY, ("growth",), SOME, (32, 64), pace=QUICK), **changes)


def widest(text):
    return max(cell_len(line) for line in text.splitlines())


# ── fits


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 3.0])
def test_the_exponent_of_a_power_is_found(p):
    fit = growth({n: 7.0 * n**p for n in (1024, 2048, 4096, 8192)})
    assert fit.exponent == pytest.approx(p, abs=1e-12) and fit.error == pytest.approx(0, abs=1e-12)


def test_the_standard_error_is_that_of_the_textbook():
    # residuals of (0, 1, 0) about its mean, over the x's of three doublings: sqrt((2/3) / 1 / (2 log²2))
    fit = growth({1024: 1.0, 2048: torch.e, 4096: 1.0})
    assert fit.exponent == pytest.approx(0)
    assert fit.error == pytest.approx((2 / 3 / 2) ** 0.5 / torch.log(torch.tensor(2.0)).item(), rel=1e-6)


def test_short_lengths_count_only_where_long_ones_are_few():
    long = {128: 100.0, 256: 100.0} | {n: float(n) for n in (1024, 2048, 4096)}
    assert growth(long).exponent == pytest.approx(1)
    assert growth({n: float(n) ** 2 for n in (128, 256, 512)}).exponent == pytest.approx(2)
    assert growth({128: 1.0}) is None and growth({128: 1.0, 256: 2.0}).error is None


@pytest.mark.parametrize("meet", [100.0, 300.0, 1000.0, 5000.0])
def test_the_crossover_of_two_powers_is_where_they_meet(meet):
    sizes = [2**p for p in range(6, 14)]
    assert crossover({n: meet * n for n in sizes}, {n: n**2 for n in sizes}) == pytest.approx(meet)


def test_a_crossover_outside_the_lengths_is_no_number():
    sizes = (64, 128)
    slow, fast = {n: 2.0 for n in sizes}, {n: 1.0 for n in sizes}
    assert crossover(fast, slow) == 0 and crossover(slow, fast) == inf
    assert crossover({1: 1.0}, {2: 1.0}) is None


def test_a_mechanism_that_falls_behind_again_crosses_later():
    dense = {64: 1.0, 128: 1.0, 256: 1.0, 512: 1.0}
    assert 256 < crossover({64: 0.5, 128: 0.5, 256: 2.0, 512: 0.5}, dense) < 512


# ── timing


def test_rounds_are_interleaved_and_slow_calls_are_few():
    calls, clock = [], [0.0]

    def call(name, seconds):
        def act():
            calls.append(name)
            clock[0] += seconds

        return act

    found = race({"fast": call("fast", 1), "slow": call("slow", 20)}, lambda: clock[0], Pace(3, 3.0, 15.0))
    assert found == {"fast": [1, 1, 1], "slow": [20]}  # the slow one's first call is its sample
    assert calls == ["fast", "slow", "fast", "fast", "fast"]
    calls.clear()
    race({"a": call("a", 1), "b": call("b", 1)}, lambda: clock[0], Pace(2, 1.0, 15.0))
    assert calls == ["a", "b"] * 3


def test_one_that_breaks_leaves_the_others_their_times():
    def broken():
        raise RuntimeError("out of memory")

    found = race({"broken": broken, "sound": lambda: None}, time.process_time, QUICK)
    assert isinstance(found["broken"], RuntimeError) and len(found["sound"]) >= 1


def test_a_summary_is_a_median_with_its_spread():
    said = summary([4.0, 1.0, 2.0, 3.0, 100.0])
    assert said["seconds"] == 3 and said["fastest"] == 1 and said["samples"] == 5
    assert said["spread"] == pytest.approx((52 - 1.5) / 3)


def test_both_passes_give_every_gradient_and_leave_none_behind():
    weight = torch.nn.Parameter(torch.ones(8))
    work = Work(lambda q, k, v: (q + k * v) * weight, TINY.draw(4), [weight])
    assert len(work.call(BOTH)()) == 4 and weight.grad is None
    assert not work.call(FORWARD)().requires_grad


# ── memory


def test_allocations_are_counted_to_the_byte():
    x = torch.randn(1000)
    assert allocated(lambda: x + x) == (4000, 4000)
    assert allocated(lambda: ((x + x) * x) * x).peak == 8000  # the first is freed before the third is made


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_request_beyond_the_memory_is_an_error_and_the_limit_goes_again():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited_memory(), pytest.raises(RuntimeError, match="memory"):
        torch.empty(2**44, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_memory_is_measured_in_a_process_of_its_own():
    rows = list(measure_apart("linear", TINY, [64, 128]))
    assert [(row["n"], row["pass"]) for row in rows] == [(n, which) for n in (64, 128) for which in PASSES]
    assert all(row["largest_bytes"] <= row["peak_bytes"] and row["input_bytes"] == row["n"] * 192 for row in rows)


def test_a_process_that_dies_leaves_a_row_that_says_so():
    (row,) = measure_apart("no-such-entry", TINY, [64])
    assert row["entry"] == "no-such-entry" and "KeyError" in row["problem"]


# ── rows


def test_rows_are_flat_stamped_and_dated(tmp_path):
    rows = run.run(plan(tmp_path))["growth"]
    assert list(Log(tmp_path / "cpu_growth.jsonl").records()) == rows
    ways = {*SOME, *tables.DENSE_NAMES}
    assert {(row["entry"], row["n"], row["pass"]) for row in rows} == {
        (way, n, which) for way in ways for n in (32, 64) for which in PASSES
    }
    for row in rows:
        assert set(SAME) | {"date", "seconds", "spread", "samples", "flops"} <= row.keys()
        assert all(value is None or isinstance(value, (str, int, float, bool)) for value in row.values())
        assert row["seconds"] > 0 and row["problem"] is None


def test_what_was_taken_is_not_taken_again_unless_asked(tmp_path, monkeypatch):
    taken = []
    row_of = measure._growth_row
    monkeypatch.setattr(measure, "_growth_row", lambda name, *rest: taken.append(name) or row_of(name, *rest))
    first = run.run(plan(tmp_path))
    count = len(taken)
    assert run.run(plan(tmp_path)) == first and len(taken) == count
    run.run(plan(tmp_path, fresh=True))
    assert len(taken) == 2 * count
    run.run(plan(tmp_path, setting=replace(TINY, seed=1)))
    assert len(taken) == 3 * count


def test_a_length_that_an_entry_refuses_is_left_out(tmp_path):
    rows = run.run(plan(tmp_path, only=("linformer",), sizes=(128, 256)))["growth"]
    assert {row["n"] for row in rows if row["entry"] == "linformer"} == {256}


def test_rows_of_other_code_stay_but_are_not_shown(tmp_path):
    path, stamp = tmp_path / "rows.jsonl", provenance(TINY)
    Rows(path, ("entry",), {**stamp, "commit": "older"}).add([{"entry": "a"}, {"entry": "b"}])
    journal = Rows(path, ("entry",), stamp)
    assert journal.rows() == [] and journal.find(entry="a") is None
    journal.add([{"entry": "a"}])
    assert [row["entry"] for row in journal.rows()] == ["a"] and len(Log(path).latest("entry")) == 2
    journal.forget_others()
    assert [row["entry"] for row in Log(path).records()] == ["a"]


@pytest.mark.skipif(os.name == "nt", reason="kill -9 is of POSIX")
def test_a_run_that_was_killed_goes_on(tmp_path):
    path = tmp_path / "cpu_growth.jsonl"
    command = [sys.executable, "-m", "heedful", "bench", "growth", "--out", str(tmp_path), "--heads", "1", "--d", "8"]
    command += [part for n in (32, 64, 128) for part in ("--n", str(n))] + ["--threads", "1", "--budget", "0.2"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not (path.exists() and len(path.read_bytes().splitlines()) > 3):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    before = list(Log(path).records())
    some = tuple(dict.fromkeys(row["entry"] for row in before if row["entry"] in CATALOG)) or ("softmax",)
    setting = Setting(heads=1, d=8, threads=1)
    after = run.run(run.BenchOptions(tmp_path, setting, ("growth",), some, (32,), pace=QUICK))["growth"]
    assert all(row in after for row in before)  # dates too: they were not taken again
    assert len(after) >= len(before)


# ── peers


def test_every_case_compares_ours_with_somebody_and_names_are_unique():
    for case in CASES.values():
        names = [contender.name for contender in case.contenders]
        assert case.ours and case.rivals and len(set(names)) == len(names)
        assert case.goals.keys() <= {rival.name for rival in case.rivals}


def test_a_missing_peer_is_named_and_stops_nothing(tmp_path, monkeypatch):
    gone = Contender("gone", lambda setting, n: 1 / 0, "gone-attention", "gone_attention")
    case = Case("alone", CASES["linear"].ours, (gone, peers.DENSE_CAUSAL), {"gone": Goal(2, (64,))})
    monkeypatch.setitem(tables.CASES, "alone", case)
    journal = Rows(tmp_path / "rows.jsonl", measure.PEER_KEY, provenance(TINY))
    measure.measure_peers([case], [64], TINY, journal, QUICK, lambda text: None)
    rows = journal.rows()
    assert {row["contender"]: row["problem"] for row in rows}["gone"] == "not installed: pip install gone-attention"
    assert all(row["seconds"] for row in rows if row["contender"] != "gone") and len(rows) == 6
    text = tables.peers_table(rows)
    assert "pip install gone-attention" in text and "? 2×" in text and "not measured" in text


def test_gains_of_several_runs_are_a_range_judged_by_its_lowest(tmp_path, monkeypatch):
    rival = Contender("rival", CASES["linear"].ours[0].make)
    case = Case("alone", CASES["linear"].ours[:1], (rival,), {"rival": Goal(2, (64,))})
    monkeypatch.setattr(tables, "CASES", {"alone": case})
    journal = Rows(tmp_path / "rows.jsonl", measure.PEER_KEY, provenance(TINY))
    for run_number in (1, 2, 3):
        measure.measure_peers([case], [64], TINY, journal, QUICK, lambda text: None, run_number)
    rows = journal.rows()
    assert len(rows) == 2 * 2 * 3
    for row in rows:  # as if the rival had taken 3, 1.5 and 6 times as long
        row["seconds"] = 0.01 * ({1: 3, 2: 1.5, 3: 6}[row["run"]] if row["contender"] == "rival" else 1)
    found = tables.verdicts(rows)[0]
    assert found["gain"] == pytest.approx(1.5) and found["most"] == pytest.approx(6) and found["met"] is False
    assert "1.5–6" in tables.peers_table(rows)


def test_a_peer_that_breaks_is_reported(tmp_path):
    def broken(setting, n):
        raise AssertionError("sequence length must be divisible by 512")

    case = Case("alone", CASES["linear"].ours, (Contender("broken", broken),))
    journal = Rows(tmp_path / "rows.jsonl", measure.PEER_KEY, provenance(TINY))
    measure.measure_peers([case], [64], TINY, journal, QUICK, lambda text: None)
    assert journal.find(case="alone", contender="broken", n=64, run=1, **{"pass": FORWARD})["problem"] == (
        "AssertionError: sequence length must be divisible by 512"
    )


@pytest.mark.parametrize("name", ["linear", "linformer", "nystrom-64", "window", "favor", "favor-causal"])
def test_a_peer_computes_what_it_is_compared_with(name, monkeypatch):
    case = CASES[name]
    rivals = [rival for rival in case.rivals if rival.same]
    if not all(rival.installed for rival in rivals):
        pytest.skip(f"nothing to compare with: make peers installs {', '.join(rival.name for rival in rivals)}")
    draw = Setting.draw  # small inputs: performer-pytorch's 1e-4 would swamp the features of large ones
    monkeypatch.setattr(Setting, "draw", lambda self, n: tuple(0.1 * x for x in draw(self, n)))
    found = measure._differences(case, Setting(heads=2, d=64, threads=1), 512)
    assert all(found[rival.name] < (0.02 if "favor" in name else 1e-3) for rival in rivals), found


# ── tables, picture, command


def some_rows():
    """Growth rows of made-up times."""
    stamp = provenance(TINY)
    powers = {"dense causal SDPA": (2, 1.0), "dense SDPA": (2, 2.0), "linear": (1, 900.0), "current": (1, 0.1)}
    return [
        {**stamp, "entry": entry, "n": n, "pass": which, "seconds": 1e-9 * a * n**p, "causal": True, "flops": n**p}
        | {"bytes": n, "problem": None}
        for entry, (p, a) in powers.items()
        for n in (128, 512, 2048, 8192)
        for which in PASSES
    ]


def test_the_crossover_table_says_where():
    text = tables.crossover_table(some_rows())
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "900" in lines["linear"] and "< 128" in lines["current"] and widest(text) <= 80


def test_the_growth_table_says_how():
    text = tables.growth_table(some_rows(), [])
    assert "2.00 ±0.00" in text and "1.00 ±0.00" in text and widest(text) <= 80


def test_tables_of_nothing_say_so():
    empty = {table: [] for table in run.TABLES}
    assert run.report(empty, run.TABLES).count("nothing was measured") == 4


def test_the_picture_is_sound_and_names_every_entry():
    root = ElementTree.fromstring(crossover_svg(some_rows()))
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"linear", "current"} <= set(words) and "dense SDPA" not in words
    with pytest.raises(ValueError, match="nothing to draw"):
        crossover_svg([])


def command(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "80"}, prog_name="heedful")


def test_the_command_prints_tables_or_rows(tmp_path):
    where = ("--out", tmp_path, "--heads", 2, "--d", 8, "--n", 64, "--threads", 1, "--budget", 1e-6, "--cpu-time")
    picture = tmp_path / "new" / "crossover.svg"
    shown = command("peers", "growth", "--only", "linear", *where, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    assert "dense causal SDPA" in shown.stdout and widest(shown.stdout) <= 80 and picture.exists()
    rows = json.loads(command("growth", "--only", "linear", *where, "--json").stdout)
    assert {row["table"] for row in rows} == {"growth"} and {"linear", "dense SDPA"} <= {row["entry"] for row in rows}


def test_the_memory_table_fits_eighty_columns(tmp_path):
    text = command("memory", "--only", "linear", "--out", tmp_path, "--d", 8, "--n", 64, "--threads", 1).stdout
    assert "linear" in text and widest(text) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("speed",), "no table is called 'speed'"),
        (("--only", "liner"), "'liner' is neither a case"),
        (("--n", 0), "--n 0: expected 1 to"),
        (("--budget", 0), "--budget 0: expected"),
        (("--threads", 0), "--threads 0: expected"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, said, tmp_path):
    result = command(*arguments, "--out", tmp_path)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


def test_help_fits_eighty_columns():
    text = command("--help").stdout
    assert widest(text) <= 80 and "heedful bench peers --only window" in text


def test_without_a_gpu_its_table_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "--gpu", "peers"])
    assert result.exit_code == 1
    assert "no GPU" in result.output


def test_the_gpu_table_shows_times_goals_floors_and_problems():
    case = gpu.GPU_CASES[0]
    stamp = {"card": "a card, 1.0", "triton": "3", "torch": "2", "commit": "abc", "size": case.size, "work": case.name}
    row = {"contender": "heedful", "ours": True, "problem": None, "version": None, "peak_bytes": 2**30, **stamp}
    rows = [
        {**row, "pass": FORWARD, "milliseconds": 0.3, "reach": 0.35, "floor": 0.1},
        {**row, "pass": BOTH, "milliseconds": 1.4, "reach": 1.3, "floor": 0.4},
        {
            **row,
            **{"contender": "fla", "pass": FORWARD, "milliseconds": None, "peak_bytes": None, "reach": None},
            **{"floor": None, "problem": "not installed: pip install x"},
        },
    ]
    text = gpu.gpu_table(rows)
    assert "✗ 0.35 / 1.3" in text and "3.0 / 3.5" in text and "1.00" in text and "not installed" in text
    assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_every_piece_of_gpu_work_has_a_row_of_its_own():
    keys = [(case.name, case.size) for case in gpu.GPU_CASES]
    assert len(set(keys)) == len(keys)


def test_fresh_takes_again_what_is_asked_for_and_keeps_the_rest(tmp_path):
    path, stamp = tmp_path / "rows.jsonl", provenance(TINY)
    Rows(path, ("entry",), stamp).add([{"entry": "a"}, {"entry": "b"}])
    journal = Rows(path, ("entry",), stamp, fresh=True)
    assert journal.find(entry="a") is None and journal.find(entry="b") is None
    journal.add([{"entry": "a", "seconds": 1.0}])
    assert journal.find(entry="a") is not None and journal.find(entry="b") is None
    assert {row["entry"] for row in Log(path).records()} == {"a", "b"}
