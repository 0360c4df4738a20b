"""Where tasks run: in this process, in processes of this machine with time limits, or on a Ray cluster.

    pool = Executor("processes", workers=4, limit=lambda item: 300.0)
    for done in pool.run(make, items):                 # make() returns a function of one item
        row = done.result()                            # its value, or raises what it raised

Each process calls `make()` once; the function that it returns may hold a model. Items do not depend on each other, so
the results are the same on every engine. If a task raises, exceeds its time limit or its process dies, only its own
result is lost; `Done.error` names the task and says what happened.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

Item = TypeVar("Item")
Result = TypeVar("Result")
Engine = Literal["local", "processes", "ray"]
Make = Callable[[], Callable[[Item], Result]]

RETRIES = 3  # per item if its Ray worker dies; bounded, since the item itself may be what kills it


class EngineFailed(RuntimeError):
    """The cluster can't be reached."""


class TaskFailed(RuntimeError):
    """A task returned no result: its process died, or it took too long.

    reason    what happened, without the name of the task
    seconds   how long it ran, if that is known
    """

    def __init__(self, task: str, reason: str, seconds: float = 0.0):
        super().__init__(f"{task}: {reason}")
        self.reason, self.seconds = reason, seconds


@dataclass(frozen=True)
class Done(Generic[Item, Result]):
    """The outcome of an item: a value or an error."""

    item: Item
    value: Result | None = None
    error: Exception | None = None

    def result(self) -> Result:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


@dataclass(frozen=True)
class Executor:
    """How to run tasks.

    engine    "local": one after another in this process. "processes": spawned on this machine; `make` and the items
              must be picklable. "ray": actors of a Ray cluster (`pip install 'heedful[ray]'`)
    workers   number of processes; by default one for each core, or as many as the cluster has capacity for
    address   address of a running Ray cluster; None: start a local one and stop it after the last item
    gpus      GPUs for each worker of a Ray cluster
    threads   torch threads in each process; by default as many as in this process
    limit     returns the time limit of an item in seconds; only "processes" can stop an item
    log       file for the output of the processes; None: discard it
    name      returns the name of an item for error messages
    """

    engine: Engine = "local"
    workers: int | None = None
    address: str | None = None
    gpus: int = 0
    threads: int | None = None
    limit: Callable[[Any], float] | None = None
    log: Path | None = None
    name: Callable[[Any], str] = str

    def __post_init__(self) -> None:
        if self.engine not in get_args(Engine):
            raise ValueError(f"engine: {self.engine!r}, expected one of {', '.join(get_args(Engine))}.")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers: {self.workers}, expected 1 or more.")
        if self.engine == "local" and self.workers is not None:
            raise ValueError("workers: the local engine has one. Ask for engine='processes' or engine='ray'.")
        if self.engine != "ray" and self.address is not None:
            raise ValueError("address: of a Ray cluster. Ask for engine='ray'.")
        if self.engine != "processes" and self.limit is not None:
            raise ValueError(f"limit: engine {self.engine!r} can't stop a task. Ask for engine='processes'.")

    def run(
        self, make: Make[Item, Result], items: Iterable[Item], *, in_order: bool = True
    ) -> Iterator[Done[Item, Result]]:
        """Yield the outcome of each item, in the order of the items or as they finish.

        >>> [done.result() for done in Executor().run(lambda: lambda x: x * x, [1, 2, 3])]
        [1, 4, 9]

        Takes the next item when a worker is free. Closing the iterator stops the work.
        """
        if self.engine == "local":
            work = make()
            for item in items:
                try:
                    done = Done(item, work(item))
                except Exception as error:
                    done = Done(item, error=error)
                yield done
        elif self.engine == "processes":
            yield from _schedule(_Processes(self, make), items, in_order)
        else:
            with _cluster(self.address, self.workers) as ray:
                yield from _schedule(_Actors(self, make, ray), items, in_order)


@contextmanager
def using(threads: int) -> Iterator[None]:
    """Let torch use `threads` threads inside the context."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_threads(threads: int) -> None:
    """Set the number of torch threads; through environment variables if torch is not imported yet."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def get_threads() -> int:
    """Threads that torch uses in this process."""
    import torch

    return torch.get_num_threads()


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1


# ── scheduling


class _Pool(Protocol):
    size: int

    def is_free(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def start(self, at: int, item: Any) -> None: ...

    def finished(self) -> list[tuple[int, Done]]:
        """Wait until a task ends or reports progress; return the tasks that ended, as (index, outcome)."""
        ...

    def close(self) -> None: ...


def _schedule(pool: _Pool, items: Iterable[Any], in_order: bool) -> Iterator[Done]:
    feed, begun, told, ended = iter(items), 0, 0, False
    ready: dict[int, Done] = {}
    try:
        while True:
            # Limit items that are ahead of the consumer: if it stops early, little work is wasted.
            while not ended and pool.is_free() and begun - told < 2 * pool.size:
                try:
                    item = next(feed)
                except StopIteration:
                    ended = True
                else:
                    pool.start(begun, item)
                    begun += 1
            at = told if in_order else next(iter(ready), told)
            if at in ready:
                told += 1
                yield ready.pop(at)
            elif pool.is_busy():
                ready.update(pool.finished())
            else:
                return
    finally:
        pool.close()


# ── processes of this machine


class _Processes:
    def __init__(self, how: Executor, make: Make):
        self.how, self.size = how, how.workers or cores()
        self.recipe, self.threads = pickle.dumps(make), how.threads or get_threads()
        self.workers: list[_Process] = []

    def is_free(self) -> bool:
        return len(self.workers) < self.size or not all(worker.item for worker in self.workers)

    def is_busy(self) -> bool:
        return any(worker.item for worker in self.workers)

    def start(self, at: int, item: Any) -> None:
        idle = next((worker for worker in self.workers if not worker.item), None)
        if idle is None:
            idle = _Process(self.recipe, self.threads, self.how.log)
            self.workers.append(idle)
        idle.give(at, item)

    def finished(self) -> list[tuple[int, Done]]:
        busy = [worker for worker in self.workers if worker.item]
        soonest = min(worker.deadline for worker in busy)
        ready = wait(
            [worker.pipe for worker in busy], max(0.0, soonest - time.monotonic()) if soonest < math.inf else None
        )
        found: list[tuple[int, Done]] = []
        for worker in busy:
            assert worker.item is not None
            (at, item), message = worker.item, None
            name = self.how.name(item)
            try:
                if worker.pipe in ready:
                    message = worker.pipe.recv()
                elif time.monotonic() >= worker.deadline:
                    limit = worker.deadline - worker.begun
                    worker.end()
                    reason = f"it took longer than its limit of {limit:g} s"
                    found.append((at, Done(item, error=TaskFailed(name, reason, limit))))
                    continue
                else:
                    continue
            except (EOFError, OSError):
                worker.end()
                found.append((at, Done(item, error=TaskFailed(name, f"its process died: {worker.death()}"))))
                continue
            if message is None:  # the item starts: its time limit counts from now on
                limit = math.inf if self.how.limit is None else self.how.limit(item)
                worker.begun = time.monotonic()
                worker.deadline = worker.begun + limit
            else:
                worker.item = None
                found.append((at, Done(item, *message)))
        self.workers = [worker for worker in self.workers if worker.alive]
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.end()


class _Process:
    """One process and its current item."""

    def __init__(self, recipe: bytes, threads: int, log: Path | None):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, recipe, threads, str(log or os.devnull)), daemon=True
        )
        self.process.start()
        theirs.close()  # so that recv raises EOFError when the process dies
        self.item: tuple[int, Any] | None = None
        self.begun, self.deadline = 0.0, math.inf
        self.alive = True

    def give(self, at: int, item: Any) -> None:
        self.item, self.deadline = (at, item), math.inf
        with suppress(OSError):  # the process died; `finished` reports it
            self.pipe.send(item)

    def end(self) -> None:
        """Kill the process if it works on an item; else close the pipe, and it exits."""
        if self.alive:
            busy, self.item, self.alive = self.item is not None, None, False
            self.pipe.close()
            self.process.join(0.0 if busy else 5.0)
            self.process.kill()
            self.process.join()

    def death(self) -> str:
        code = self.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"{name}, most often for want of memory" if name == "SIGKILL" else name
        return f"exit code {code}"


def _serve(pipe: Connection, recipe: bytes, threads: int, log: str) -> None:
    """The main loop of a process: receive an item, run it, send the result, until the pipe is closed."""
    set_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    _end_with_parent()
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    work = None
    while True:
        try:
            item = pipe.recv()
            try:
                if work is None:
                    make = pickle.loads(recipe)
                    set_threads(threads)  # the number of threads decides how sums are rounded
                    work = make()
                pipe.send(None)
                answer: tuple[Any, Exception | None] = (work(item), None)
            except Exception as error:
                answer = (None, _portable(error))
            sys.stdout.flush()
            try:
                pipe.send(answer)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                pipe.send((None, RuntimeError(f"the result can't be sent to another process: {error}")))
        except (EOFError, OSError):
            return


def _portable(error: Exception) -> Exception:
    """The exception, or one with the same message if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """Exit when the parent process is gone: a killed parent can't stop its children."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ── a Ray cluster


class _Actors:
    def __init__(self, how: Executor, make: Make, ray: Any):
        threads = how.threads or get_threads()
        self.size = how.workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        self.how, self.ray = how, ray
        actor = ray.remote(_Actor).options(
            num_cpus=0 if how.workers else threads, num_gpus=how.gpus, max_restarts=-1, max_task_retries=RETRIES
        )
        recipe = ray.put(make)  # sent once for all workers
        self.actors = [actor.remote(recipe, threads) for _ in range(self.size)]
        self.idle = deque(self.actors)
        self.busy: dict[Any, tuple[Any, int, Any]] = {}

    def is_free(self) -> bool:
        return bool(self.idle)

    def is_busy(self) -> bool:
        return bool(self.busy)

    def start(self, at: int, item: Any) -> None:
        actor = self.idle.popleft()
        self.busy[actor.work.remote(item)] = actor, at, item

    def finished(self) -> list[tuple[int, Done]]:
        ready, _ = self.ray.wait(list(self.busy), num_returns=1)
        found = []
        for answer in ready:
            actor, at, item = self.busy.pop(answer)
            self.idle.append(actor)
            found.append((at, self._done(item, answer)))
        return found

    def _done(self, item: Any, answer: Any) -> Done:
        try:
            return Done(item, self.ray.get(answer))
        except self.ray.exceptions.RayTaskError as error:
            return Done(item, error=error.cause)
        except self.ray.exceptions.RayActorError:
            reason = (
                f"its worker died {RETRIES + 1} times. Likely cause: it takes more memory than the machine has; give "
                "fewer workers or shorter texts."
            )
            return Done(item, error=TaskFailed(self.how.name(item), reason))

    def close(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)


class _Actor:
    """One process of a cluster."""

    def __init__(self, make: Callable[[], Callable], threads: int):
        set_threads(threads)
        self._work = make()

    def work(self, item: Any) -> Any:
        return self._work(item)


def _check_reachable(address: str) -> None:
    """Raise EngineFailed if nothing listens at the address: Ray itself retries for minutes before it says so."""
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
