"""One pass computes the model's output and the row statistics of its heads, so that weights are computed once.

    for the model      O = A V
    for the measures   sums over the rows of A, and A itself, in a buffer borrowed until the heads are measured

This applies to heads that are materialised on a CPU. The choice depends only on the shapes of the call, never on which
threads are busy, so the records do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from heedful.hf.calls import Call
from heedful.hf.probe import Attending
from heedful.kernels.row_statistics.sums import RowSums
from heedful.measures.heads import Room
from heedful.scan.heads import FORMED, Kept, Pass, read, slabs_of, together
from heedful.scan.thread_pool import ThreadPool
from heedful.shapes import Int, Tensor


class BufferPool:
    """A pool of buffers for matrices: one thread borrows a buffer, another may return it. It grows if none is free."""

    def __init__(self) -> None:
        self._free: list[Room] = []

    def borrow(self) -> Room:
        try:
            return self._free.pop()
        except IndexError:
            return Room()

    def give_back(self, room: Room) -> None:
        self._free.append(room)


class FusedCapture(Attending):
    """Computes the outputs of attention calls, and stores the row statistics of the last call.

    layers    layers to measure; None: all
    tokens    tokens of the text
    kept      returns the cache of the current thread, reused from pass to pass
    buffers   pool of buffers for the matrices
    threads   thread pool; the heads of a call are split among its threads
    """

    def __init__(
        self,
        layers: Sequence[int] | None,
        tokens: Int[Tensor, "b t"] | None,
        kept: Callable[[], Kept],
        buffers: BufferPool,
        threads: ThreadPool,
    ):
        self.layers, self.tokens, self.kept, self.buffers, self.threads = layers, tokens, kept, buffers, threads
        self._last: Pass | None = None

    def attend(self, call: Call) -> tuple[Tensor, Tensor] | None:
        self._drop()
        if (self.layers is not None and call.at not in self.layers) or not _fits(call):
            return None
        start = perf_counter()
        k, v = (self._per_head(name, call, x) for name, x in (("keys", call.k), ("values", call.v)))
        found = self._read(replace(call, k=k, v=v))
        out = found.sums.product
        sums = replace(found.sums, product=out[..., :0].clone())  # drop the output: the model has it
        self._last = replace(found, sums=sums, seconds=perf_counter() - start)
        return out.to(call.v.dtype), _beside(found)

    def _read(self, call: Call) -> Pass:
        """One pass over all heads, split among threads; the result does not depend on the split."""
        room, parts = self.buffers.borrow(), self.threads.parts(call.heads)
        slabs = slabs_of(call, room)
        if slabs is None or len(parts) == 1:  # without slabs, the pass takes little time beside the decomposition
            return read(call, of_call(self.tokens, call), self.kept(), room, call.v)

        def work(part: tuple[int, int]) -> Callable[[], Pass]:
            some, own = call.part(*part), slabs.part(*part)
            return lambda: read(some, of_call(self.tokens, some), self.kept(), room, some.v, own)

        found = self.threads.run_all([work(part) for part in parts])
        return Pass(
            found[0].asked,
            RowSums.join([one.sums for one in found], axis=1),
            torch.cat([one.energy for one in found], -1),
            slabs,
            torch.cat([one.columns for one in found], 1),
            room,
        )

    def _per_head(self, name: str, call: Call, x: Tensor) -> Tensor:
        """`Call.per_head`, written into a reused buffer."""
        if x.shape[1] == call.heads:
            return x
        spread = x[:, :, None].expand(-1, -1, call.heads // x.shape[1], -1, -1)
        scratch = self.kept().scratch
        kept = scratch.get(name)
        if kept is None or kept.shape != spread.shape or kept.dtype != x.dtype:
            kept = scratch[name] = x.new_empty(spread.shape)
        return kept.copy_(spread).flatten(1, 2)

    def take(self) -> Pass | None:
        """The pass over the last call; None if that call was not captured here."""
        last, self._last = self._last, None
        return last

    def _drop(self) -> None:
        """Return the buffer of a pass that `take` did not fetch, as happens in a check."""
        last = self.take()
        if last is not None:
            self.buffers.give_back(last.room)


def of_call(tokens: Int[Tensor, "b t"] | None, call: Call) -> Int[Tensor, "b 1 t"] | None:
    """The tokens of a text if the call has one key for each of them; else None."""
    n, m = call.q.shape[-2], call.k.shape[-2]
    fits = tokens is not None and len(call.q) == len(tokens) and n == m == tokens.shape[-1]
    return tokens[:, None] if fits and tokens is not None else None


def _beside(passed: Pass) -> Tensor:
    """For each row: its sum, scaled to agree with the column sums, and its mass on later keys."""
    mass = passed.sums.mass
    found = passed.columns.double().sum(-1) / mass.double().sum(-1).clamp(min=1e-300)
    near = passed.asked.split(passed.sums.at)["offset"][..., passed.asked.near]  # offsets −1, 0, 1
    _, beyond = passed.sums.band_mass.unbind(-1)  # masses at offsets ≤ −2 and ≥ 2
    return torch.stack([mass * found[..., None], near[..., -1] + beyond], -1)


def _fits(call: Call) -> bool:
    """True if all heads of the call are materialised together on a CPU."""
    small = call.q.shape[-2] * call.k.shape[-2] <= FORMED
    return call.q.device.type == "cpu" and small and len(together(call)) == 1
