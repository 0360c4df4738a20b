"""What a call allocates: the peak and the largest allocation, from torch's record of every CPU allocation.

Each entry runs in a separate process, so earlier measurements do not affect it. `peak_bytes` counts tensors other than
the inputs and does not depend on the machine. `resident_bytes` is the growth of the process (Linux), which includes
allocations that torch does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from heedful.bench.catalogue import affordable, instance
from heedful.bench.rows import Row, problem
from heedful.bench.setting import PASSES, Setting, Work
from heedful.executor import Executor, TaskFailed
from heedful.mechanisms import CATALOG


class Allocated(NamedTuple):
    """Bytes: the peak, and the largest single allocation."""

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
    """The call's result, and the growth of the peak resident set; None if the system does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return call(), None
    before = _resident("VmRSS")
    return call(), _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Meter:
    """Measures one entry at one (length, pass) per call, short lengths first."""

    def __init__(self, name: str, setting: Setting, longest: float = 60.0):
        self.name, self.setting, self.longest = name, setting, longest
        self.spent: dict[int, float] = {}
        self.at: tuple[int, Work | None] = (0, None)
        self.limits = ExitStack()
        self.limits.enter_context(limited_memory())

    def __call__(self, item: tuple[int, str]) -> Row | None:
        """The row of (length, pass); None if a call would take longer than `longest` seconds."""
        n, which = item
        if self.at[0] != n:
            mechanism = instance(CATALOG[self.name], self.setting, n)
            fits = affordable(mechanism, self.setting, self.spent, n, self.longest)
            self.at = n, Work(mechanism, self.setting.draw(n)) if fits else None
        work = self.at[1]
        if work is None:
            return None
        size = sum(x.numel() * x.element_size() for x in work.inputs)
        row = {"entry": self.name, "n": n, "pass": which, "input_bytes": size}
        start = self.setting.now()
        try:
            call = work.call(which)
            found, resident = resident_growth(lambda: allocated(call))
        except RuntimeError as error:
            return {**row, "problem": str(error).splitlines()[0]}
        self.spent[n] = self.setting.now() - start
        return {**row, "peak_bytes": found.peak, "largest_bytes": found.largest, "resident_bytes": resident}


def measure_apart(name: str, setting: Setting, sizes: list[int]) -> Iterator[Row]:
    """Yield the rows of one entry from a separate process, until one fails or would take too long. If the process dies,
    the last row says so.
    """
    process = Executor("processes", workers=1, threads=setting.threads)
    for done in process.run(partial(Meter, name, setting), [(n, which) for n in sizes for which in PASSES]):
        if done.error is not None:
            n, which = done.item
            why = done.error.reason if isinstance(done.error, TaskFailed) else problem(done.error)
            yield {"entry": name, "n": n, "pass": which, "problem": why}
            return
        row = done.result()
        if row is None:
            return
        yield row
        if "problem" in row:
            return


@contextmanager
def limited_memory(share: float = 0.85) -> Iterator[None]:
    """Limit memory inside the context to a share of what is free: torch raises before the system kills the process."""
    try:
        import resource

        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):  # not Linux: no limit
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + int(share * free)
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
