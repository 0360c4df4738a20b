"""Heads that are formed have their rows read where the model attends: weights are computed once, for both.

    the model     O = A V
    the measures  sums over the rows of A, and A itself, in room that is lent until the heads are measured

Which calls are read so depends on their shapes alone, never on who is busy, so that records do not either.
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
from heedful.scan.thread_pool import Team
from heedful.shapes import Int, Tensor


class Rooms:
    """Rooms for matrices, lent by one thread and given back by another; a new one where none is free."""

    def __init__(self) -> None:
        self._free: list[Room] = []

    def lend(self) -> Room:
        try:
            return self._free.pop()
        except IndexError:
            return Room()

    def give_back(self, room: Room) -> None:
        self._free.append(room)


class Along(Attending):
    """Attends for the model, and keeps the pass over the rows that it took.

    layers   those that are measured; None: all
    tokens   of the text
    kept     by the thread that asks for it
    team     that may take a part of the heads, who waits for nothing else then
    """

    def __init__(
        self,
        layers: Sequence[int] | None,
        tokens: Int[Tensor, "b t"] | None,
        kept: Callable[[], Kept],
        rooms: Rooms,
        team: Team,
    ):
        self.layers, self.tokens, self.kept, self.rooms, self.team = layers, tokens, kept, rooms, team
        self._last: Pass | None = None

    def attend(self, call: Call) -> tuple[Tensor, Tensor] | None:
        self._drop()
        if (self.layers is not None and call.at not in self.layers) or not _fits(call):
            return None
        start = perf_counter()
        k, v = (self._per_head(name, call, x) for name, x in (("keys", call.k), ("values", call.v)))
        found = self._read(replace(call, k=k, v=v))
        out = found.sums.product
        sums = replace(found.sums, product=out[..., :0].clone())  # what it holds is the model's from here on
        self._last = replace(found, sums=sums, seconds=perf_counter() - start)
        return out.to(call.v.dtype), _beside(found)

    def _read(self, call: Call) -> Pass:
        """The pass over all heads, in parts that are joined; it is the same whoever reads them."""
        room, parts = self.rooms.lend(), self.team.parts(call.heads)
        slabs = slabs_of(call, room)
        if slabs is None or len(parts) == 1:  # what does not go into slabs takes little time, beside what follows it
            return read(call, of_call(self.tokens, call), self.kept(), room, call.v)

        def work(part: tuple[int, int]) -> Callable[[], Pass]:
            some, own = call.part(*part), slabs.part(*part)
            return lambda: read(some, of_call(self.tokens, some), self.kept(), room, some.v, own)

        found = self.team.share([work(part) for part in parts])
        return Pass(
            found[0].asked,
            RowSums.join([one.sums for one in found], axis=1),
            torch.cat([one.energy for one in found], -1),
            slabs,
            torch.cat([one.columns for one in found], 1),
            room,
        )

    def _per_head(self, name: str, call: Call, x: Tensor) -> Tensor:
        """`Call.per_head` on pages that are there already."""
        if x.shape[1] == call.heads:
            return x
        spread = x[:, :, None].expand(-1, -1, call.heads // x.shape[1], -1, -1)
        scratch = self.kept().scratch
        kept = scratch.get(name)
        if kept is None or kept.shape != spread.shape or kept.dtype != x.dtype:
            kept = scratch[name] = x.new_empty(spread.shape)
        return kept.copy_(spread).flatten(1, 2)

    def take(self) -> Pass | None:
        """The pass over the last call's rows; None where it was not read here."""
        last, self._last = self._last, None
        return last

    def _drop(self) -> None:
        """What nobody took: the calls of a check."""
        last = self.take()
        if last is not None:
            self.rooms.give_back(last.room)


def of_call(tokens: Int[Tensor, "b t"] | None, call: Call) -> Int[Tensor, "b 1 t"] | None:
    """The tokens of a text, where they are what a call attends to."""
    n, m = call.q.shape[-2], call.k.shape[-2]
    fits = tokens is not None and len(call.q) == len(tokens) and n == m == tokens.shape[-1]
    return tokens[:, None] if fits and tokens is not None else None


def _beside(passed: Pass) -> Tensor:
    """What each row sums to, as the columns have it too, and its mass on all keys after the query."""
    mass = passed.sums.mass
    found = passed.columns.double().sum(-1) / mass.double().sum(-1).clamp(min=1e-300)
    near = passed.asked.split(passed.sums.at)["offset"][..., passed.asked.near]  # offsets −1, 0, 1
    _, beyond = passed.sums.band_mass.unbind(-1)  # of −2 and less, of 2 and more
    return torch.stack([mass * found[..., None], near[..., -1] + beyond], -1)


def _fits(call: Call) -> bool:
    """Whether all heads of a call are formed together, on a CPU."""
    small = call.q.shape[-2] * call.k.shape[-2] <= FORMED
    return call.q.device.type == "cpu" and small and len(together(call)) == 1
