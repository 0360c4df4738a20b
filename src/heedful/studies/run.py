"""Train the runs of a study: `python -m heedful.studies.run --study fixed-heads --out records`.

Several processes share one GPU, because at this size a single process is bound by kernel launches. Each run is written
when it ends; runs that are already recorded are skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import queue
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from tokenizers import Tokenizer

from heedful.kernels.dispatch import backend
from heedful.studies import fixed_heads, frozen_projections, measure
from heedful.studies.config import Run
from heedful.studies.data import load
from heedful.studies.heads import describe_heads
from heedful.studies.records import append, finished
from heedful.studies.results import BASELINES
from heedful.studies.step import prepare
from heedful.studies.train import summary, train
from heedful.studies.translate import translate

STUDIES = {"fixed-heads": fixed_heads, "frozen-projections": frozen_projections}


def work(
    run: Run, data: Path, device: torch.device, notice: Callable[[], None] = lambda: None, *, graphs: bool = True
) -> list[dict[str, Any]]:
    """Train, test and translate one run, and return its record. Calls `notice` every few steps."""
    config = {"kind": "config", "config": asdict(run), "hardware": hardware(device), "graphs": graphs}
    lines: list[dict[str, Any]] = [config]
    corpus = load(data / run.corpus, run.direction)
    lines[0]["corpus"] = {key: corpus.card[key] for key in ("checksum", "vocabulary")}
    began = time.perf_counter()

    def record(line: dict[str, Any]) -> None:
        lines.append(line)
        notice()

    model = train(run, corpus, device, record, graphs=graphs)
    trained = time.perf_counter()
    outputs = {}
    if corpus.task == "translation":
        outputs = {name: translate(model, corpus.splits[name], device) for name in ("test", "test_unseen")}
    steps = [line for line in lines if line["kind"] == "steps"]
    later = steps[1:] or steps
    lines.append(
        {
            "kind": "result",
            **summary(run, model, corpus, device),
            "heads": describe_heads(model, corpus.splits["dev"], device) if corpus.has_source else [],
            "step_seconds": sum(x["seconds"] for x in later) / sum(len(x["loss"]) for x in later),
            "train_seconds": round(trained - began, 2),
            "translate_seconds": round(time.perf_counter() - trained, 2),
            "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            "outputs": {name: _text(data / run.corpus, lines_) for name, lines_ in outputs.items()},
        }
    )
    return [{"run": run.key, **line} for line in lines]


def hardware(device: torch.device) -> dict[str, str]:
    """The machine and versions that a run used."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def _text(folder: Path, sentences: list[list[int]]) -> list[str]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode_batch(sentences)


def select(args: argparse.Namespace) -> list[Run]:
    """The runs that the command line requests, in execution order."""
    first, _, last = args.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    runs = STUDIES[args.study].runs(seeds, args.corpora.split(","), args.direction)
    if args.cells:
        wanted = args.cells.split(";")
        unknown = set(wanted) - {run.cell for run in runs}
        if unknown:
            known = "; ".join(dict.fromkeys(run.cell for run in runs))
            raise SystemExit(f"--cells: {sorted(unknown)}, expected names among: {known}")
        runs = [run for run in runs if run.cell in wanted]
    if args.shuffled:
        runs = [replace(run, shuffled=True) for run in runs]
    if args.tiny:
        small = {"width": 32, "head_dim": 4, "hidden": 64, "layers": 1}
        runs = [
            replace(run, model=replace(run.model, **small), training=replace(run.training, tokens=1024)) for run in runs
        ]
    for change in (*args.set, *([f"training.steps={args.steps}"] if args.steps else [])):
        runs = [_changed(run, change) for run in runs]
    return runs


def _changed(run: Run, change: str) -> Run:
    """The run with one field of its training or model replaced, such as "training.rate=5e-4"."""
    part, _, rest = change.partition(".")
    name, _, value = rest.partition("=")
    inner: Any = getattr(run, part, None)
    if part not in ("training", "model") or not isinstance(getattr(inner, name, None), int | float):
        raise SystemExit(f"--set: {change!r}, expected a number of training or model, such as training.rate=5e-4")
    kind = type(getattr(inner, name))
    whole: dict[str, Any] = {part: replace(inner, **{name: kind(value)})}
    return replace(run, **whole)


def _worker(tasks, results, data: Path, deadline: float, options: dict[str, Any], compiled, leads: bool) -> None:
    """Take runs from a queue until it is empty or the remaining time is too short for another run.

    The leader's first steps compile the kernels; the other workers wait, then find them in Triton's cache.
    """
    if not leads:
        compiled.wait(timeout=60)
    device = prepare()
    pace = 0.0
    while True:
        try:
            run: Run = tasks.get(timeout=1)
        except queue.Empty:
            return
        if time.time() + 1.1 * pace * run.training.steps > deadline:
            results.put((run.key, run.cell, "skipped: too little time is left"))
            continue
        began = time.time()
        found = _attempt(run, data, device, options, compiled)
        if isinstance(found, list):
            pace = max(pace, (time.time() - began) / run.training.steps)
        results.put((run.key, run.cell, found))
        compiled.set()


def _attempt(run: Run, data: Path, device: torch.device, options: dict[str, Any], compiled) -> list | str:
    """The record of a run, or why it failed. If a step can't be captured in a CUDA graph, runs without graphs."""
    for graphs in (True, False) if options["graphs"] and device.type == "cuda" else (False,):
        try:
            with backend(options["kernels"]):
                return work(run, data, device, compiled.set, graphs=graphs)
        except Exception:
            failed = traceback.format_exc()
            print(f"{run.key} {run.cell}, graphs={graphs}: {failed[-1500:]}", flush=True)
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return failed


def is_baseline(config: dict[str, Any]) -> bool:
    """True if other cells of the study are compared with this run's cell; then it should have learned something."""
    return (
        config["cell"] == BASELINES[config["study"]] and not config["shuffled"] and config["training"]["steps"] >= 500
    )


def work_through(
    runs: list[Run],
    data: Path,
    out: Path,
    parallel: int,
    seconds: float,
    *,
    kernels: str | None = None,
    graphs: bool = True,
) -> int:
    """Distribute runs over processes, write each when it ends, stop at the deadline; return the number of runs left."""
    options = {"kernels": kernels, "graphs": graphs}
    deadline = time.time() + seconds
    context = multiprocessing.get_context("spawn")
    tasks, results, compiled = context.Queue(), context.Queue(), context.Event()
    for run in runs:
        tasks.put(run)
    workers = [
        context.Process(target=_worker, args=(tasks, results, data, deadline, options, compiled, at == 0), daemon=True)
        for at in range(min(parallel, len(runs)))
    ]
    for worker in workers:
        worker.start()
    left = {run.key for run in runs}
    reported = 0
    while reported < len(runs) and time.time() < deadline:
        try:
            key, cell, found = results.get(timeout=1)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers) and results.empty():
                break
            continue
        reported += 1
        if isinstance(found, str):
            print(f"{key} {cell}: {found}", flush=True)
            continue
        append(out, found)
        left.discard(key)
        last = found[-1]
        if is_baseline(found[0]["config"]) and last["losses"]["test"] >= last["unigram_loss"]:
            print(
                f"stopped: the baseline {cell} has a test loss of {last['losses']['test']:.3f}, expected less than "
                f"{last['unigram_loss']:.3f}, that of the frequencies of tokens.",
                flush=True,
            )
            break
        print(
            f"{key} {cell}: dev {last['losses']['dev']:.3f}, train {last['train_seconds']:.0f} s "
            f"({1e3 * last['step_seconds']:.1f} ms a step), translate {last['translate_seconds']:.1f} s",
            flush=True,
        )
    for worker in workers:
        worker.terminate()
    return len(left)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=sorted(STUDIES), default="fixed-heads")
    parser.add_argument("--data", type=Path, default=Path("carry/corpora"), help="folder of the encoded corpora")
    parser.add_argument("--out", type=Path, default=Path("runs/records"), help="folder of the records")
    parser.add_argument("--done", type=Path, action="append", default=[], help="another folder of records to skip")
    parser.add_argument("--cells", default="", help="names of cells, separated by ;  (all by default)")
    parser.add_argument("--seeds", default="0-2", help="one number or first-last")
    parser.add_argument("--corpora", default="de-5000,de-20000", help="folders of --data, separated by commas")
    parser.add_argument("--direction", default="de-en", help="from which language to which")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        help="runs to do after these: options that change, as 'seeds=3-4|cells=8L'",
    )
    parser.add_argument("--steps", type=int, default=0, help="other than the study's")
    parser.add_argument("--set", action="append", default=[], help="another number, as training.rate=5e-4")
    parser.add_argument("--tiny", action="store_true", help="models small enough to try everything on a CPU")
    parser.add_argument("--shuffled", action="store_true", help="the control: targets of other pairs")
    parser.add_argument("--parallel", type=int, default=4, help="processes that share the device")
    parser.add_argument("--seconds", type=float, default=540, help="stop after this long")
    parser.add_argument("--backend", choices=("torch", "triton"), help="kernels to insist on, as heedful.backend does")
    parser.add_argument("--no-graphs", action="store_true", help="launch every step instead of replaying CUDA graphs")
    parser.add_argument("--measure", action="store_true", help="time steps with 1, 2, 4… processes and stop")
    parser.add_argument("--profile", action="store_true", help="check and time one step of each cell and stop")
    parser.add_argument("--list", action="store_true", help="print the runs and stop")
    args = parser.parse_args(arguments)
    runs = select(args)
    for more in args.also:
        changed = [f"--{option}" for option in more.split("|")]
        runs += select(parser.parse_args(changed, argparse.Namespace(**{**vars(args), "also": []})))
    if args.profile:
        return measure.profile(runs, args.data, prepare(), args.out)
    if args.measure:
        return measure.measure(runs, args.data, args.parallel, args.out, args.seconds)
    known = finished(args.out, *args.done)
    todo = [run for run in runs if run.key not in known]
    if args.list:
        for run in todo:
            print(json.dumps({"run": run.key, "cell": run.cell, "corpus": run.corpus, "seed": run.seed}))
        return 0
    print(f"{len(todo)} runs to do, {len(runs) - len(todo)} recorded already", flush=True)
    options = {"kernels": args.backend, "graphs": not args.no_graphs}
    left = work_through(todo, args.data, args.out, args.parallel, args.seconds, **options) if todo else 0
    print(f"{left} runs left", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
