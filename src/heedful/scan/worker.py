"""One worker of a scan: a model, and the rows of one text at one length, a layer at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

import heedful
from heedful.hf.calls import Call
from heedful.hf.modules import Refused
from heedful.hf.probe import Enough, Probe
from heedful.measures import effective_rank
from heedful.scan import thread_pool
from heedful.scan.baseline import Baselines
from heedful.scan.fused_capture import BufferPool, FusedCapture, of_call
from heedful.scan.heads import Kept, Matrix, Measuring, Pass, measured, read, thumbnails, together
from heedful.scan.memory import limited
from heedful.scan.texts import Unit
from heedful.scan.thread_pool import Job, ThreadPool
from heedful.shapes import Tensor

Row = dict[str, Any]
Tick = Callable[[float], None]


@dataclass
class Result:
    """The results of one unit: rows of the model, of the second model, of their difference, and pictures."""

    unit: Unit
    rows: list[Row]
    other: list[Row]
    delta: list[Row]
    thumbnails: list[Row]


class _Own(threading.local):
    """The cache of each thread."""

    def __init__(self) -> None:
        self.kept = Kept()


Part = tuple[int, int]
"""A range of heads: (first, last + 1)."""
Look = Callable[[Call], Callable[[Part, Matrix], list[Row]]]
"""Extra work for a call: returns a function of a range of heads and their weights, to run when they are measured."""


@dataclass(frozen=True)
class Task:
    """What to measure for every unit.

    how      how to measure heads
    device   device on which the model runs
    layers   attention calls to measure; None: all
    calls    number of attention calls after which a forward pass may stop
    last     name of the module that makes the last of these calls
    """

    how: Measuring
    device: str
    layers: tuple[int, ...] | None
    calls: int
    last: str


class Worker:
    """Measures units. Each process makes one; the rows of a unit do not depend on the units before.

    tick     called after each layer with the fraction of the unit that is done
    memory   bytes that the process may use while it measures
    """

    def __init__(
        self,
        model: Probe,
        against: Probe | None,
        task: Task,
        tick: Tick | None = None,
        memory: int | None = None,
    ):
        self.probe, self.other = model, against
        for probe in (model, against):
            if probe is not None:
                probe.model.to(task.device)
        self.task, self.tick, self.memory = task, tick, memory
        how, device = task.how, task.device
        self.baselines = Baselines(seed=how.seed, values=how.values, budget=how.budget)
        # With a GPU, two threads measure while this one runs the model: short sequences are CPU-bound.
        self.threads = ThreadPool(torch.get_num_threads() if torch.device(device).type == "cpu" else 4)
        if torch.device(device).type == "cuda":
            # torch loads its GPU linear algebra at first use, and fails if two threads do so at once.
            torch.linalg.cholesky(torch.ones(1, 1, device=device))
        self.own = _Own()
        self.buffers = BufferPool()

    def __call__(self, unit: Unit) -> Result:
        with limited(self.memory), self.threads.running():
            return self._all(unit)

    def _all(self, unit: Unit) -> Result:
        kept: dict[int, Call] = {}

        def look(call: Call) -> Callable[[Part, Matrix], list[Row]]:
            if self.other is not None:
                kept[call.at] = call
            if not unit.first:
                return _nothing
            return lambda part, matrix: [
                {"layer": call.at, "head": head, **picture} for head, picture in enumerate(thumbnails(matrix), part[0])
            ]

        rows, pictures = self._measure(self.probe, unit, unit.inputs, look, self.task.calls)
        other: list[Row] = []
        delta: list[Row] = []
        if self.other is not None:
            assert unit.other is not None
            same = _same(unit.inputs, unit.other)
            energies = {(row["layer"], row["head"]): row["energy"] for row in rows}

            def compare(call: Call) -> Callable[[Part, Matrix], list[Row]]:
                mine = kept.pop(call.at, None)
                if not same or mine is None or not _alike(mine, call):
                    return _nothing
                key = {"text": unit.text, "length": rows[0]["length"], "layer": call.at}
                return lambda part, matrix: [
                    {**key, **row, "relative": (row["energy"] / energies[call.at, row["head"]]) ** 0.5}
                    for row in apart(mine, call, part, self.task.how)
                ]

            other, delta = self._measure(self.other, unit, unit.other, compare)
        return Result(unit, rows, other, delta, pictures)

    def _measure(
        self, probe: Probe, unit: Unit, inputs: dict[str, Any], look: Look, count: int | None = None
    ) -> tuple[list[Row], list[Row]]:
        """Rows of the chosen layers, and the rows from `look`. The forward pass stops after the last chosen layer, or
        after `count` calls if that is known.

        Stopping is safe: the probe ran the whole model when it checked inputs of this form.
        """
        given = {name: x.to(self.task.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        tokens = given.get("input_ids")
        jobs: list[Job[tuple[list[Row], list[Row]]]] = []
        layers = self.task.layers
        last = max(layers) if layers is not None else None if count is None else count - 1
        capture = FusedCapture(layers, tokens, lambda: self.own.kept, self.buffers, self.threads)

        def visit(call: Call) -> None:
            if layers is None or call.at in layers:
                jobs.extend(self._jobs(unit, replace(call, v=call.v[..., :0].clone()), tokens, look, capture.take()))
            if self.tick is not None:
                self.tick((call.at + 1) / self.task.calls)
            # If the model calls other modules on this text than on the first one, run it to the end.
            if call.at == last and (layers is not None or call.name == self.task.last):
                raise Enough

        probe(given, visit, capture)
        found = [job.result() for job in jobs]
        return [row for rows, _ in found for row in rows], [row for _, looked in found for row in looked]

    def _jobs(
        self, unit: Unit, call: Call, tokens: Tensor | None, look: Look, passed: Pass | None
    ) -> Iterator[Job[tuple[list[Row], list[Row]]]]:
        """Jobs for the heads of a call: in groups, or all in one job if `passed` holds the pass over their rows."""
        measure = partial(self._part, unit, call, more=look(call), written=_writes(call))
        if passed is not None:
            yield self.threads.submit(partial(measure, (0, call.heads), lambda: passed), thread_pool.HOLDING)
            return
        parts = together(call)
        for part in parts:
            job = self.threads.submit(partial(measure, part, partial(self._read, call, part, of_call(tokens, call))))
            if call.q.device.type != "cpu" and len(parts) > 1:
                job.result()  # each group may use all of the allowed memory, so run them one by one
            yield job

    def _read(self, call: Call, part: Part, tokens: Tensor | None) -> Pass:
        return read(call.part(*part), tokens, self.own.kept, self.buffers.borrow())

    def _part(
        self,
        unit: Unit,
        call: Call,
        part: Part,
        read: Callable[[], Pass],
        more: Callable[[Part, Matrix], list[Row]],
        written: list[int],
    ) -> tuple[list[Row], list[Row]]:
        start = perf_counter()
        with (
            torch.cuda.device(call.q.device) if call.q.is_cuda else nullcontext()
        ):  # a new thread would use the first GPU
            passed = read()
            looked = more(part, passed.matrix)
            found = measured(call.part(*part), passed, self.task.how, self.baselines, first=part[0])
        self.buffers.give_back(passed.room)
        if _writes(call) != written:
            raise Refused(
                f"{call.name}: the model writes over queries or keys that are still being measured. Likely cause: "
                "arithmetic in place in its own code; scan with a single thread (torch.set_num_threads(1))."
            )
        seconds = (passed.seconds + perf_counter() - start) / len(found)
        return [self._row(unit, call, row, seconds) for row in found], looked

    def _row(self, unit: Unit, call: Call, row: Row, seconds: float) -> Row:
        return {
            "text": unit.text,
            "length": unit.length or call.q.shape[-2],
            "layer": call.at,
            "name": call.name,
            "kind": call.kind,
            "turn": call.turn,
            **row,
            "seconds": seconds,
            "seed": self.task.how.seed,
            "device": self.task.device,
            "version": heedful.__version__,
        }


def survey(probe: Probe, inputs: dict[str, Any], layers: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The attention calls of a model in execution order; `layer` is the index in this list.

    layers   calls that will be measured; the check runs them through the same code as the measurement
    """
    found: list[dict[str, Any]] = []
    kept = Kept()
    capture = FusedCapture(layers, inputs.get("input_ids"), lambda: kept, BufferPool(), ThreadPool(threads=1))

    def visit(call: Call) -> None:
        found.append(
            {
                "layer": call.at,
                "name": call.name,
                "kind": call.kind,
                "heads": call.heads,
                "kv_heads": call.k.shape[1],
                "width": call.q.shape[-1],
                "items": len(call.q),
            }
        )

    if probe.sees_all(inputs):  # the check of the first inputs is needed anyway
        probe.check(inputs, visit, capture)
    else:
        probe(inputs, visit, capture)
    return found


def apart(one: Call, two: Call, part: Part, how: Measuring) -> list[Row]:
    """Norm and effective rank of ΔA = A₁ − A₂ for some heads, from products with A₁ and A₂."""
    op = one.part(*part).operator().float() - two.part(*part).operator().float()
    found = how.spectrum(op, 1)
    r90, r95 = effective_rank(found, 0.9), effective_rank(found, 0.95)
    columns = {
        **{"rank90": r90.estimate, "rank90_low": r90.lower, "rank90_high": r90.upper},
        **{"rank95": r95.estimate, "rank95_low": r95.lower, "rank95_high": r95.upper},
        **{"energy": found.energy, "sigma1": found.values[..., 0]},
    }
    lists = {name: x.double().mean(0).tolist() for name, x in columns.items()}  # over the items of a batch
    return [{"head": head, **{name: x[i] for name, x in lists.items()}} for i, head in enumerate(range(*part))]


def _writes(call: Call) -> list[int]:
    """Version counters of q, k and bias: they change if the model writes to these tensors."""
    return [x._version for x in (call.q, call.k, call.bias) if x is not None]


def _nothing(part: Part, matrix: Matrix) -> list[Row]:
    return []


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(x, two[name]) if isinstance(x, Tensor) else True for name, x in one.items()
    )


def _alike(one: Call, two: Call) -> bool:
    return one.kind == two.kind and one.q.shape[:3] == two.q.shape[:3] and one.k.shape[2] == two.k.shape[2]
