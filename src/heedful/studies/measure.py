"""Measure the time of a step at real shapes, its kernels, and the throughput of several processes together."""

from __future__ import annotations

import json
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from heedful.studies.config import Run
from heedful.studies.data import Batch, Pairs, Side, batches, gather, load
from heedful.studies.step import Steps, prepare
from heedful.studies.train import start
from heedful.studies.translate import translate


def profile(runs: list[Run], data: Path, device: torch.device, out: Path) -> int:
    """Check that a step replayed from a CUDA graph equals a launched one, time both, and print the kernels of one.

    The exit code is 0 if graphs work for the first run of every cell.
    """
    rows, failed = [], 0
    out.mkdir(parents=True, exist_ok=True)
    for run in _first_of_cells(runs):
        row: dict[str, Any] = {"cell": run.cell}
        try:
            row |= _compare(run, data, device, out)
            failed += not row["agree"]
        except Exception:
            row["error"] = traceback.format_exc()
            failed += 1
        rows.append(row)
        print(json.dumps(row), flush=True)
    (out / "profile.json").write_text(json.dumps(rows, indent=1))
    return min(failed, 1)


def _compare(run: Run, data: Path, device: torch.device, out: Path) -> dict[str, Any]:
    corpus = load(data / run.corpus, run.direction)
    pairs = corpus.splits["train"]
    rows = list(islice(batches(pairs, run.training.tokens, 0), 12))
    given = [gather(pairs, rows[at], device) for at in range(2)]
    losses = {}
    for graphs in (False, True):  # no dropout, so both compute the same; six steps on two batches
        torch.manual_seed(0)
        model = start(run, corpus, device)
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        steps = Steps(model, run.training, graphs=graphs)
        losses[graphs] = [float(steps(given[at % 2], 100 + at)[0]) for at in range(8)]
    agree = all(abs(a - b) < 0.02 * abs(a) for a, b in zip(losses[False], losses[True], strict=True))
    found: dict[str, Any] = {"agree": agree, "launched": losses[False], "replayed": losses[True]}
    for graphs in (False, True):
        model = start(run, corpus, device)
        steps = Steps(model, run.training, graphs=graphs)
        shapes = {tuple(batch.source.shape): batch for batch in (gather(pairs, x, device) for x in rows)}
        for batch in (*shapes.values(),) * 3:
            steps(batch, 1)
        found["graphs" if graphs else "no_graphs"] = _timed(steps, list(shapes.values()), device)
    _table(steps, next(iter(shapes.values())), device, out / f"kernels-{run.key}.txt")
    began = time.perf_counter()
    translate(model, _first(corpus.splits["test"], 200), device)
    found["translate_200_untrained_seconds"] = time.perf_counter() - began
    return found


def _timed(steps: Steps, given: list[Batch], device: torch.device) -> dict[str, float]:
    """Milliseconds per step: CPU time until the step is launched, and total time."""
    _wait(device)
    began, count = time.perf_counter(), 0
    while count < 100 and time.perf_counter() - began < 1.5:
        steps(given[count % len(given)], 1)
        count += 1
    host = time.perf_counter() - began
    _wait(device)
    return {"host_ms": 1e3 * host / count, "ms": 1e3 * (time.perf_counter() - began) / count, "steps": count}


def _table(steps: Steps, batch: Batch, device: torch.device, path: Path) -> None:
    """Write the kernels of five steps, longest first."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    with profile(activities=kinds) as found:
        for _ in range(5):
            steps(batch, 1)
        _wait(device)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    path.write_text(found.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=110))


def measure(runs: list[Run], data: Path, parallel: int, out: Path, seconds: float) -> int:
    """Time the first run of each cell with 1, 2, 4 … processes; print and write the rows."""
    cells = _first_of_cells(runs)
    rounds = [count for count in (1, 2, 4, 8, 16) if count <= parallel]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(parallel + 1)
    results, compiled = context.Queue(), context.Event()
    share = max(1.0, (seconds - 40) / (len(rounds) * len(cells)))
    processes = [
        context.Process(target=_process, args=(at, cells, data, rounds, share, barrier, results, compiled), daemon=True)
        for at in range(parallel)
    ]
    began = time.time()
    for process in processes:
        process.start()
    rows = []
    try:
        barrier.wait(timeout=seconds + 120)
        print(f"started in {time.time() - began:.0f} s", flush=True)
        for count in rounds:
            for run in cells:
                barrier.wait(timeout=seconds + 120)
                barrier.wait(timeout=seconds + 120)
                timed = [results.get(timeout=60) for _ in range(count)]
                steps = sum(x["steps_a_second"] for x in timed)
                row = {"cell": run.cell, "corpus": run.corpus, "processes": count, "steps_a_second": round(steps, 2)}
                rows.append({**row, "each": timed})
                print(json.dumps(row), flush=True)
    finally:
        out.mkdir(parents=True, exist_ok=True)
        (out / "measured.json").write_text(json.dumps(rows, indent=1))
        for process in processes:
            process.terminate()
    return 0


def _process(
    at: int, cells: list[Run], data: Path, rounds: list[int], share: float, barrier, results, compiled
) -> None:
    device = prepare()
    ready = []
    if at:
        compiled.wait(timeout=60)
    for run in cells:
        corpus = load(data / run.corpus, run.direction)
        steps = Steps(start(run, corpus, device), run.training)
        pairs = corpus.splits["train"]
        given = [gather(pairs, rows, device) for rows in islice(batches(pairs, run.training.tokens, at), 20)]
        for batch in given * 2:
            steps(batch, 1)
        _wait(device)
        ready.append((run, steps, given))
    compiled.set()
    barrier.wait()
    for count in rounds:
        for _, steps, given in ready:
            barrier.wait()
            if at < count:
                began, taken = time.time(), 0
                while time.time() - began < share:
                    steps(given[taken % len(given)], 1)
                    taken += 1
                    if taken % 10 == 0:
                        _wait(device)
                _wait(device)
                peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
                results.put({"steps_a_second": taken / (time.time() - began), "peak_bytes": peak})
            barrier.wait()


def _first_of_cells(runs: list[Run]) -> list[Run]:
    return list({run.cell: run for run in reversed(runs)}.values())[::-1]


def _first(pairs: Pairs, count: int) -> Pairs:
    return Pairs(*(Side(side.tokens, side.begins, side.starts[: count + 1]) for side in pairs))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
