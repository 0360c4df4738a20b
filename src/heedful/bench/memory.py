"""What a call allocates: the peak and the largest piece, from torch's own record of every allocation on the CPU.

    python -m heedful.bench.memory NAME SETTING N …      one entry of the catalogue, a JSON row a line

A process of its own for each entry: nothing that was measured before lies in its memory. `peak_bytes` counts tensors
beyond the inputs, and does not depend on the machine; `resident_bytes` is the growth of the process (Linux), which also
sees what libraries allocate behind torch's back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from heedful.bench.catalogue import affordable, instance
from heedful.bench.rows import Row
from heedful.bench.setting import PASSES, Setting, Work
from heedful.mechanisms import CATALOG


class Allocated(NamedTuple):
    """Bytes: the most at one time, the largest single piece."""

    peak: int
    largest: int


def allocated(call: Callable[[], object]) -> Allocated:
    """What one call allocates on the CPU.

    >>> allocated(lambda: torch.zeros(1000) + torch.zeros(1000))
    Allocated(peak=12000, largest=4000)
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    del result
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak, largest = max(peak, now), max(largest, event.nbytes())
    return Allocated(peak, largest)


def resident_growth(call: Callable[[], Allocated]) -> tuple[Allocated, int | None]:
    """The call's result, and by how much the peak resident set grew; None where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return call(), None
    before = _resident("VmRSS")
    return call(), _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(name: str, setting: Setting, sizes: list[int], longest: float = 60.0) -> Iterator[Row]:
    """Rows of one entry, length by length, until a call would take longer than `longest` seconds."""
    spent: dict[int, float] = {}
    for n in sizes:
        mechanism = instance(CATALOG[name], setting, n)
        if not affordable(mechanism, setting, spent, n, longest):
            return
        work = Work(mechanism, setting.draw(n))
        size = sum(x.numel() * x.element_size() for x in work.inputs)
        for which in PASSES:
            row = {"entry": name, "n": n, "pass": which, "input_bytes": size}
            start = setting.now()
            try:
                call = work.call(which)
                found, resident = resident_growth(lambda call=call: allocated(call))  # type: ignore[misc]
            except RuntimeError as error:
                yield {**row, "problem": str(error).splitlines()[0]}
                return
            spent[n] = setting.now() - start
            yield {**row, "peak_bytes": found.peak, "largest_bytes": found.largest, "resident_bytes": resident}


def measure_apart(name: str, setting: Setting, sizes: list[int]) -> Iterator[Row]:
    """The same from a process of its own; a process that dies leaves a row that says so."""
    command = [sys.executable, "-m", "heedful.bench.memory", name, json.dumps(asdict(setting)), *map(str, sizes)]
    quiet = {**os.environ, "KINETO_LOG_LEVEL": "99"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet) as child:
        assert child.stdout is not None and child.stderr is not None
        row: Row = {"entry": name, "n": sizes[0], "pass": PASSES[0]}
        for line in child.stdout:
            row = json.loads(line)
            yield row
        said = child.stderr.read().strip().splitlines()
    if child.returncode:
        at = {key: row[key] for key in ("entry", "n", "pass")}
        yield {**at, "problem": f"the process ended with {child.returncode} after this: {said[-1] if said else ''}"}


@contextmanager
def limited_memory(share: float = 0.85) -> Iterator[None]:
    """Inside, a request beyond what the machine has free is an error in torch, before the system ends the process."""
    try:
        import resource

        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # no Linux, no limit
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + int(share * free)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    name, given, *sizes = sys.argv[1:]
    setting = Setting(**json.loads(given))
    torch.set_num_threads(setting.threads)
    with limited_memory():
        for row in measure(name, setting, [int(n) for n in sizes]):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
