"""A thread pool that measures heads while the main thread runs the model.

Measuring a head takes many small operations. Two torch threads that share each operation are 1.5 times as fast as one;
two threads that take a head each are twice as fast. So half of torch's threads run the model and the other half measure
what it produces. The main thread measures too when the pool falls behind.

The number of torch threads decides how sums are rounded. Every job runs with the same number, in whichever thread, so
the results do not depend on who ran it.
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

MOST = 8  # threads of the pool: more would wait for Python's lock
BEHIND = 2  # jobs per thread that may wait, each of which holds queries and keys
HOLDING = 0.5  # the same for jobs that hold matrices as well; one may always wait
OWN = 2  # the main thread's part of shared work, in units of another thread's part


class Job(Generic[Result]):
    """A job: whichever thread reaches it first runs it."""

    def __init__(self, work: Callable[[], Result]):
        self._work: Callable[[], Result] | None = work
        self._future: Future[Result] | None = None

    def offer(self, pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(self._do)

    def _do(self) -> Result:
        work, self._work = self._work, None  # its tensors are freed when it is done
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
    """Runs jobs in any order; with one thread, at once in the thread that submits them.

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
        """Jobs may be submitted inside; after an error, jobs that have not started are dropped."""
        try:
            with using(self.leading):
                yield
        finally:
            while self._submitted:
                self._submitted.popleft().drop()

    def submit(self, work: Callable[[], Result], behind: float | None = None) -> Job[Result]:
        """Run this now or later, in this thread or another.

        behind   jobs per thread that may wait; when there are more, this thread runs the oldest
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
            for job in reversed(others):  # here, where no other thread has started it
                job.result()
            return found + [job.result() for job in others]
        finally:
            for job in others:  # where one of them failed
                job.drop()

    def _with_equal_threads(self, work: Callable[[], Result]) -> Result:
        with using(self._each), torch.no_grad():
            return work()
