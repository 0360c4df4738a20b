"""Heads are measured beside the forward pass, by threads that share the cores.

torch splits one operation over its threads. What is done to a head are many small operations, of which two threads do
1.5 times as many as one; two heads at once, a thread each, are twice as many. So half of the threads that torch may use
run the model, and the others measure what it gives. Whoever runs the model measures too when the others are behind.

Sums are rounded by how many threads share them. Jobs have the same number, whoever does them, so that the results do
not depend on who did.
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

MOST = 8  # threads that measure: more would wait for each other's Python
BEHIND = 2  # jobs that may wait for each of them, with the queries and keys that they are about
OWN = 2  # how much more of shared work the one who shares it does
HOLDING = 0.5  # where they hold matrices as well; one may wait in any case


class Job(Generic[Result]):
    """Something to do, by the first who comes to it."""

    def __init__(self, work: Callable[[], Result]):
        self._work: Callable[[], Result] | None = work
        self._future: Future[Result] | None = None

    def offer(self, pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(self._do)

    def _do(self) -> Result:
        work, self._work = self._work, None  # what it is about goes when it is done
        assert work is not None
        return work()

    @property
    def is_waiting(self) -> bool:
        return self._future is not None and not self._future.running() and not self._future.done()

    def drop(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def result(self) -> Result:
        """What it gave; done here and now if nobody has begun."""
        if self._future is None or self._future.cancel():
            done: Future[Result] = Future()
            done.set_result(self._do())
            self._future = done
        return self._future.result()


class Team:
    """The threads of a worker. Jobs are done in any order; with one thread, where they are handed in.

    leading   threads of torch for whoever hands jobs in, meanwhile

    >>> team = Team(threads=2)
    >>> with team.at_work():
    ...     jobs = [team.hand(lambda x=x: x * x) for x in range(5)]
    ...     print([job.result() for job in jobs])
    [0, 1, 4, 9, 16]
    """

    def __init__(self, threads: int):
        others = min(threads // 2, MOST)
        self.threads, self.leading = threads, threads - threads // 2
        self._each = max(1, threads // 2 // max(others, 1))
        self._pool = ThreadPoolExecutor(others, "heedful") if others else None
        self._others, self._handed = others, deque[Job[Any]]()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, jobs may be handed in; those that are left when something breaks are not done."""
        try:
            with using(self.leading):
                yield
        finally:
            while self._handed:
                self._handed.popleft().drop()

    def hand(self, work: Callable[[], Result], behind: float | None = None) -> Job[Result]:
        """Have this done, now or later, here or by another thread.

        behind   how many jobs may wait for each of the others; when there are more, the oldest is done here
        """
        job = Job(partial(self._alike, work))
        if self._pool is None:
            job.result()
            return job
        job.offer(self._pool)
        self._handed.append(job)
        while self._handed and not self._handed[0].is_waiting:
            self._handed.popleft()
        if len(self._handed) > max(1, (BEHIND if behind is None else behind) * self._others):
            self._handed.popleft().result()
        return job

    def parts(self, count: int) -> list[tuple[int, int]]:
        """Ranges of so many things: a larger one for whoever shares them, as the others come to theirs later."""
        many = min(count, self._others + 1)
        ends = [0, *(count * (at + OWN) // (many - 1 + OWN) for at in range(many))]
        return list(pairwise(ends))

    def share(self, works: Sequence[Callable[[], Result]]) -> list[Result]:
        """All of them, now: the first here, the others by whoever is free, which may be nobody else."""
        first, *others = (Job(partial(self._alike, work)) for work in works)
        for job in others:
            if self._pool is not None:
                job.offer(self._pool)
        try:
            found = [first.result()]
            for job in reversed(others):  # those that nobody has come to
                job.result()
            return found + [job.result() for job in others]
        finally:
            for job in others:  # where one of them failed
                job.drop()

    def _alike(self, work: Callable[[], Result]) -> Result:
        with using(self._each), torch.no_grad():
            return work()
