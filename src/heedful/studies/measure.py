"""How long a step takes at the real shapes, for one process and for several that share the device."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from heedful.studies.config import Run
from heedful.studies.data import Pairs, Side, batches, gather, load
from heedful.studies.train import make_optimiser, start, train_step
from heedful.studies.translate import translate


def measure(runs: list[Run], data: Path, parallel: int, out: Path, seconds: float) -> int:
    """Time the first run of each cell with 1, 2, 4 … processes; print and write the rows."""
    cells = list({run.cell: run for run in reversed(runs)}.values())[::-1]
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
        rows.append(results.get(timeout=120))
        print(json.dumps(rows[-1]), flush=True)
    finally:
        out.mkdir(parents=True, exist_ok=True)
        (out / "measured.json").write_text(json.dumps(rows, indent=1))
        for process in processes:
            process.terminate()
    return 0


def _process(
    at: int, cells: list[Run], data: Path, rounds: list[int], share: float, barrier, results, compiled
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ready = []
    if at:
        compiled.wait(timeout=60)
    for run in cells:
        corpus = load(data / run.corpus, run.direction)
        model = start(run, corpus.vocabulary, device)
        optimiser = make_optimiser(model, run.training)
        pairs = corpus.splits["train"]
        rows = list(islice(batches(pairs, run.training.tokens, at), 40))
        began = time.time()
        for step in range(1, 4):
            train_step(model, optimiser, gather(pairs, rows[step], device), run.training, step)
        _wait(device)
        ready.append((run, model, optimiser, pairs, rows, time.time() - began))
    compiled.set()
    barrier.wait()
    for count in rounds:
        for run, model, optimiser, pairs, rows, first in ready:
            barrier.wait()
            if at < count:
                began, steps = time.time(), 0
                while time.time() - began < share:
                    batch = gather(pairs, rows[steps % len(rows)], device)
                    train_step(model, optimiser, batch, run.training, steps + 1)
                    steps += 1
                    if steps % 10 == 0:
                        _wait(device)
                _wait(device)
                rate = steps / (time.time() - began)
                peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
                results.put({"steps_a_second": rate, "first_three_seconds": first, "peak_bytes": peak})
            barrier.wait()
    if at == 0:
        run, model, *_ = ready[0]
        corpus = load(data / run.corpus, run.direction)
        began = time.time()
        translate(model, _first(corpus.splits["test"], 1000), device)
        _wait(device)
        results.put({"cell": run.cell, "translate_untrained_seconds": time.time() - began})


def _first(pairs: Pairs, count: int) -> Pairs:
    return Pairs(*(Side(side.tokens, side.begins, side.starts[: count + 1]) for side in pairs))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
