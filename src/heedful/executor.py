"""Where work is done: in this process, or spread over a Ray cluster. The answers are the same, and in the same order.

`make()` gives a worker, a function of one item, once in each process: it may hold a model. Items are whole pieces of
work that do not know of each other, so that an item whose process was killed is simply done again, elsewhere.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Engine = Literal["local", "ray"]

RETRIES = 3  # of one item whose worker dies; a worker that dies of the item itself would die for ever


class EngineFailed(RuntimeError):
    """The cluster can't be had, or an item's workers died again and again."""


def check(engine: str, address: str | None, workers: int | None) -> None:
    """Refuse what can't be meant, before any work."""
    if engine not in get_args(Engine):
        raise ValueError(f"engine: {engine!r}, expected one of {', '.join(get_args(Engine))}.")
    if workers is not None and workers < 1:
        raise ValueError(f"workers: {workers}, expected 1 or more.")
    if engine == "local" and (address is not None or workers is not None):
        given = "address" if address is not None else "workers"
        raise ValueError(f"{given}: of a Ray cluster, which the local engine does not use. Ask for engine='ray'.")


def run(
    make: Callable[[], Callable[[Item], Result]],
    items: Iterable[Item],
    *,
    engine: Engine = "local",
    address: str | None = None,
    workers: int | None = None,
    gpus: int = 0,
) -> Iterator[Result]:
    """The result of each item, in order, as soon as it is there.

    >>> list(run(lambda: lambda x: x * x, [1, 2, 3]))
    [1, 4, 9]

    engine    "local", or "ray" (needs `pip install 'heedful[ray]'`)
    address   of a Ray cluster that is running; without it a local one is started, and ended after the last item
    workers   processes; by default as many as the cluster has room for at this process's number of threads
    gpus      for each process

    Whoever stops asking stops the work.
    """
    check(engine, address, workers)
    if engine == "local":
        yield from map(make(), items)
        return
    with _cluster(address, workers) as ray:
        yield from _spread(ray, make, items, workers, gpus)


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Inside, torch splits its operations among so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _spread(ray: Any, make: Callable, items: Iterable[Item], workers: int | None, gpus: int) -> Iterator[Any]:
    threads = torch.get_num_threads()
    count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
    hand = ray.remote(_Hand).options(
        num_cpus=0 if workers else threads, num_gpus=gpus, max_restarts=-1, max_task_retries=RETRIES
    )
    recipe = ray.put(make)  # sent once, however many workers read it
    hands = [hand.remote(recipe, threads) for _ in range(count)]
    idle, waiting, feed = deque(hands), deque[Any](), iter(items)
    busy: dict[Any, Any] = {}
    ended = False
    try:
        while True:
            # No more items are begun than there are workers and a few: a consumer that stops wastes little.
            while idle and not ended and len(waiting) < 2 * count:
                try:
                    item = next(feed)
                except StopIteration:
                    ended = True
                    break
                worker = idle.popleft()
                answer = worker.work.remote(item)
                busy[answer] = worker
                waiting.append(answer)
            if not waiting:
                return
            if waiting[0] not in busy:
                yield _answer(ray, waiting.popleft())
                continue
            ready, _ = ray.wait(list(busy), num_returns=1)
            for answer in ready:
                idle.append(busy.pop(answer))
    finally:
        for worker in hands:
            ray.kill(worker)


class _Hand:
    """One process of a cluster."""

    def __init__(self, make: Callable[[], Callable], threads: int):
        torch.set_num_threads(threads)  # sums are split by it: another number would round otherwise
        self._work = make()

    def work(self, item: Any) -> Any:
        return self._work(item)


def _answer(ray: Any, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise EngineFailed(
            f"a worker died {RETRIES + 1} times over the same piece of work. Likely cause: it takes more memory than "
            "the machine has; give fewer workers or shorter texts."
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes before it says that nobody answers."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # "auto", or a name that only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise EngineFailed(f"address {address}: no Ray cluster could be reached there ({error}).") from error


@contextmanager
def _cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    try:
        import ray
    except ModuleNotFoundError as missing:
        raise EngineFailed("engine ray: Ray is not installed: pip install 'heedful[ray]'") from missing
    if ray.is_initialized():
        yield ray
        return
    if address is not None:
        _check_reachable(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        options |= {"include_dashboard": False, "num_cpus": workers}
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EngineFailed(f"address {address}: no Ray cluster could be reached there ({reason}).") from error
    try:
        yield ray
    finally:
        ray.shutdown()
