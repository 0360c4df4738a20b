"""Compiling side by side: before a call launches anything, both of its passes run once with launches that only compile.

One program takes up to six seconds to compile, and a call with its backward pass launches up to a dozen: one after the
other, as they are met, the first call of float32 heads took half a minute.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

WORKERS = min(8, os.cpu_count() or 1)
UNDER_WAY: ContextVar[bool] = ContextVar("rehearsal", default=False)  # in this thread alone: others go on launching
DONE = "rehearsed"


class Rehearsed:
    """Stands for the context of an autograd function in a rehearsal."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def rehearse(function: Any, ctx: Any, ready: dict, *inputs) -> None:
    """Compiles what both passes of this autograd function launch, if its forward pass, which calls this, is the first.

    `ready` is where compiled programs of such inputs are kept. What does not compile says so when it is launched.
    """
    if DONE in ready or triton.knobs.runtime.interpret or UNDER_WAY.get() or not any(ctx.needs_input_grad):
        return
    ready[DONE] = True
    before = UNDER_WAY.set(True)
    try:
        with ThreadPoolExecutor(WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            _run(function, Rehearsed(ctx.needs_input_grad), inputs)
    except torch.OutOfMemoryError:
        pass  # there may be room when the second pass comes; its programs are compiled one by one then
    finally:
        UNDER_WAY.reset(before)


def _run(function: Any, ctx: Rehearsed, inputs: tuple) -> None:
    outputs = function.forward(ctx, *inputs)
    first, *others = (outputs,) if isinstance(outputs, Tensor) else outputs
    function.backward(ctx, torch.empty_like(first), *[None] * len(others))


def compile_only(pointers, kernel, grid, numbers, constants, options) -> None:
    """Begins to compile a program, in a rehearsal."""
    kernel.warmup(*pointers, *numbers, grid=grid, **constants, **options)
