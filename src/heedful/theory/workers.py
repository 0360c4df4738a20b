"""Claims judged in processes of their own: one that crashes, hangs or is killed costs its own verdict and no other.

A process is started once and judges one claim after another, since importing torch takes longer than most checks and
loaded models are kept. It has one thread of torch; what it prints goes to a log file.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from heedful.theory.claim import Claim, Evidence, Figure, Finding, Verdict, decide

Outcome = dict[str, Any]
"""What became of a claim, as JSON has it: verdict, evidence, control, corrected, because, seconds, figure."""


def judge(claim: Claim) -> Outcome:
    """Decide a claim and draw its figure; an exception is a reason for not knowing, never a verdict."""
    start = time.perf_counter()
    try:
        finding = decide(claim)
    except (Exception, SystemExit) as error:
        finding = Finding(claim.id, Verdict.UNDECIDED, because=f"the check failed to run: {_sentence(error)}")
    return {**_outcome(claim, finding), "seconds": round(time.perf_counter() - start, 4), "ran": True}


def undecided(because: str, seconds: float = 0.0, *, ran: bool = True) -> Outcome:
    """The outcome of a claim that nothing was measured for."""
    empty = {"evidence": None, "control": None, "corrected": None, "figure": None}
    return {"verdict": str(Verdict.UNDECIDED), **empty, "because": because, "seconds": round(seconds, 4), "ran": ran}


def number(value: float) -> float | str:
    """A float as JSON takes it; what is not finite becomes "NaN", "Infinity" or "-Infinity"."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _outcome(claim: Claim, finding: Finding) -> Outcome:
    corrected = None
    if claim.corrected is not None and finding.corrected is not None:
        corrected = _outcome(claim.corrected, finding.corrected)
    return {
        "verdict": str(finding.verdict),
        "evidence": _measured(finding.evidence),
        "control": _measured(finding.control),
        "corrected": corrected,
        "because": finding.because,
        "figure": _drawn(claim),
    }


def _measured(evidence: Evidence | None) -> dict[str, Any] | None:
    if evidence is None:
        return None
    comparisons = [
        {
            "name": one.name,
            "measured": number(one.measured),
            "relation": one.relation,
            "expected": number(one.expected),
            "holds": bool(one.holds),
            "noise": None if one.noise is None else number(float(one.noise)),
            "alarm": one.alarm,
        }
        for one in evidence.comparisons
    ]
    return {"holds": evidence.holds, "text": str(evidence), "note": evidence.note, "comparisons": comparisons}


def _drawn(claim: Claim) -> dict[str, Any] | None:
    """A figure that can't be drawn says why; it changes no verdict."""
    if claim.figure is None:
        return None
    try:
        return _figure(claim.figure())
    except (Exception, SystemExit) as error:
        return {"error": _sentence(error)}


def _figure(figure: Figure) -> dict[str, Any]:
    series = {
        name: [[number(float(x)) for x in xs], [number(float(y)) for y in ys]]
        for name, (xs, ys) in figure.series.items()
    }
    return {
        "title": {"en": figure.title.en, "zh": figure.title.zh},
        "x": figure.x,
        "y": figure.y,
        "series": series,
        "log_x": figure.log_x,
        "log_y": figure.log_y,
        "points": figure.points,
    }


def _sentence(error: BaseException) -> str:
    """The error in a line, and where it was raised."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 200 else said[:199] + "…"
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {said}' if said else ''}{at}"


# ── the processes


def outcomes(
    registry: str,
    claims: Iterable[str],
    *,
    jobs: int,
    limit: Callable[[str], float],
    log: Path,
) -> Iterator[tuple[str, str, Outcome]]:
    """(id, fingerprint of the sources it was judged by, outcome) of each claim, as they come.

    registry    the module that has `CHAPTERS`
    limit       seconds that a claim may take, by its id
    """
    waiting = deque(claims)
    workers = [_Worker(registry, log) for _ in range(min(jobs, len(waiting)))]
    try:
        while waiting or any(worker.claim for worker in workers):
            for place, worker in enumerate(workers):
                if worker.claim is None and waiting:
                    worker = workers[place] = worker if worker.alive else _Worker(registry, log)
                    worker.give(waiting.popleft())
            busy = {worker.pipe: worker for worker in workers if worker.claim}
            soonest = min(worker.deadline for worker in busy.values())
            timeout = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
            ready = wait(list(busy), timeout)
            for pipe, worker in busy.items():
                if pipe in ready:
                    answer = worker.answer(limit)
                elif time.monotonic() >= worker.deadline:
                    answer = worker.late(limit)
                else:
                    continue
                if answer is not None:
                    yield answer
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """One process and the claim it is at."""

    def __init__(self, registry: str, log: Path):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, registry, str(log)), daemon=True)
        self.process.start()
        theirs.close()  # so that its end is seen when the process dies
        self.claim: str | None = None
        self.deadline = math.inf
        self.alive = True

    def give(self, claim: str) -> None:
        self.claim, self.deadline = claim, math.inf
        with suppress(OSError):  # it died meanwhile: reading from it tells how
            self.pipe.send(claim)

    def answer(self, limit: Callable[[str], float]) -> tuple[str, str, Outcome] | None:
        """What the process says; None where it only says that it has begun, from when on its time counts."""
        claim = str(self.claim)
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.end()
            return claim, "", undecided(f"its process died: {_death(self.process.exitcode)}")
        if message is None:
            self.deadline = time.monotonic() + limit(claim)
            return None
        self.claim = None
        return claim, *message

    def late(self, limit: Callable[[str], float]) -> tuple[str, str, Outcome]:
        claim = str(self.claim)
        self.end()
        return claim, "", undecided(f"it took longer than its limit of {limit(claim):g} s", limit(claim))

    def end(self) -> None:
        """At once where it is at a claim; else it is told by the end of the pipe and goes by itself."""
        if self.alive:
            busy, self.claim, self.alive = self.claim is not None, None, False
            self.pipe.close()
            self.process.join(0.0 if busy else 5.0)
            self.process.kill()
            self.process.join()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}, most often for want of memory" if name == "SIGKILL" else name
    return f"exit code {code}"


def _work(pipe: Connection, registry: str, log: str) -> None:
    """What a process does: read an id, judge the claim, answer, until nobody asks any more."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started the run ends it
    _end_with_parent()
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from heedful.theory.run import claims_of, fingerprints_of

    torch.set_num_threads(1)
    claims = claims_of(registry)
    while True:
        try:
            claim = pipe.recv()
            pipe.send(None)
            outcome = judge(claims[claim])
            sys.stdout.flush()
            pipe.send((fingerprints_of(registry)[claim], outcome))  # now: a check may import as it goes
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    """A parent that was killed can't end its children; they see it go."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def load(registry: str) -> ModuleType:
    """The module of that name, with its `CHAPTERS`."""
    return import_module(registry)
