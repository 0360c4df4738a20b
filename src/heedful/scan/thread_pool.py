"""A thread pool that measures heads while the main thread runs the model.

Measuring a head takes many small operations. Two torch threads that share each operation are 1.5 times as fast as one;
two threads that measure one head each are twice as fast. So half of torch's threads run the model and the other half
measure its heads. The main thread measures too when the pool falls behind.

The number of torch threads decides how sums are rounded. Every job runs with the same number in every thread, so the
results do not depend on the thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch

from heedful.executor import using

Result = TypeVar("Result")

MOST = 8  # threads of the pool: more would wait for the GIL
BEHIND = 2  # queued jobs per thread; each holds queries and keys
HOLDING = 0.5  # queued jobs per thread if jobs also hold matrices; one job may always wait
OWN = 2  # the main thread's part of shared work, relative to another thread's part


class Job(Generic[Result]):
    """A job: whichever thread reaches it first runs it."""

    def __init__(self, work: Callable[[], Result]):
        self._work: Callable[[], Result] | None = work
        self._future: Future[Result] | None = None

    def offer(self, pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(self._do)

    def _do(self) -> Result:
        work, self._work = self._work, None  # frees its tensors when the job ends
        assert work is not None
        return work()

    @property
    def is_waiting(self) -> bool:
        return self._future is not None and not self._future.running() and not self._future.done()

    def drop(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def result(self) -> Result:
        """The result; runs the job in this thread if no other thread has started it."""
        if self._future is None or self._future.cancel():
            done: Future[Result] = Future()
            done.set_result(self._do())
            self._future = done
        return self._future.result()


class ThreadPool:
    """Runs jobs in any order. With one thread, the thread that submits a job runs it at once.

    leading   torch threads of the main thread while the pool runs

    >>> pool = ThreadPool(threads=2)
    >>> with pool.running():
    ...     jobs = [pool.submit(lambda x=x: x * x) for x in range(5)]
    ...     print([job.result() for job in jobs])
    [0, 1, 4, 9, 16]
    """

    def __init__(self, threads: int):
        others = min(threads // 2, MOST)
        self.threads, self.leading = threads, threads - threads // 2
        self._each = max(1, threads // 2 // max(others, 1))
        self._pool = ThreadPoolExecutor(others, "heedful") if others else None
        self._others, self._submitted = others, deque[Job[Any]]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Accept jobs inside the context; after an error, drop jobs that have not started."""
        try:
            with using(self.leading):
                yield
        finally:
            while self._submitted:
                self._submitted.popleft().drop()

    def submit(self, work: Callable[[], Result], behind: float | None = None) -> Job[Result]:
        """Queue a job; any thread may run it.

        behind   queued jobs per thread; if there are more, this thread runs the oldest
        """
        job = Job(partial(self._with_equal_threads, work))
        if self._pool is None:
            job.result()
            return job
        job.offer(self._pool)
        self._submitted.append(job)
        while self._submitted and not self._submitted[0].is_waiting:
            self._submitted.popleft()
        if len(self._submitted) > max(1, (BEHIND if behind is None else behind) * self._others):
            self._submitted.popleft().result()
        return job

    def parts(self, count: int) -> list[tuple[int, int]]:
        """Split `count` items into ranges, a larger one first: the main thread starts before the others do."""
        many = min(count, self._others + 1)
        ends = [0, *(count * (at + OWN) // (many - 1 + OWN) for at in range(many))]
        return list(pairwise(ends))

    def run_all(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run all of them and wait: the first in this thread, the others in free threads, or here if none is free."""
        first, *others = (Job(partial(self._with_equal_threads, work)) for work in works)
        for job in others:
            if self._pool is not None:
                job.offer(self._pool)
        try:
            found = [first.result()]
            for job in reversed(others):  # run here those that no other thread has started
                job.result()
            return found + [job.result() for job in others]
        finally:
            for job in others:  # if one of them failed
                job.drop()

    def _with_equal_threads(self, work: Callable[[], Result]) -> Result:
        with using(self._each), torch.no_grad():
            return work()
