"""Settings that are the same within one table: sizes, threads, precision, device, clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from heedful.shapes import Tensor

FORWARD, BOTH = "forward", "forward+backward"
PASSES = (FORWARD, BOTH)


@dataclass(frozen=True)
class Setting:
    """Settings of a table. clock: "wall" for a quiet machine; "cpu" counts this process only, for one thread on a
    shared machine.
    """

    batch: int = 1
    heads: int = 8
    d: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = field(default_factory=torch.get_num_threads)
    clock: Literal["wall", "cpu"] = "wall"
    seed: int = 0

    def draw(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (batch, heads, n, d), the same for every contender."""
        generator = torch.Generator().manual_seed(self.seed)
        kind = {"dtype": getattr(torch, self.dtype), "device": self.device}
        q, k, v = (torch.randn(self.batch, self.heads, n, self.d, generator=generator).to(**kind) for _ in range(3))
        return q, k, v

    def now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return time.perf_counter() if self.clock == "wall" else time.process_time()


@dataclass(frozen=True)
class Work:
    """A function with its inputs; the backward pass computes the gradients of inputs and parameters."""

    function: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    parameters: Sequence[Tensor] = ()

    def call(self, which: str) -> Callable[[], object]:
        """A closure that runs one pass. The incoming gradient is noise: a constant one might be optimised away."""
        if which == FORWARD:
            return torch.no_grad()(lambda: self.function(*self.inputs))
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        wanted = [*leaves, *(p for p in self.parameters if p.requires_grad)]
        above: list[Tensor] = []

        def both() -> object:
            out = self.function(*leaves)
            if not above:
                above.append(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))
            return torch.autograd.grad(out, wanted, above[0])

        return both
