"""The first training call compiles the programs of both passes in parallel, before it launches any.

Both passes run once with launches that only compile. One program takes up to six seconds to compile, and a call with
its backward pass launches up to a dozen: one after the other, the first call of float32 heads took half a minute.
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
COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)  # in this thread alone: others go on launching
DONE = "compiled"


class CompileContext:
    """Stands for the context of an autograd function while its programs are compiled."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def compile_both_passes(function: Any, ctx: Any, ready: dict, *inputs) -> None:
    """Compile the programs of both passes of an autograd function; its forward pass calls this.

    ready   the compiled programs for inputs of this kind: nothing happens if this call is not the first of its kind

    A program that does not compile raises its error when it is launched.
    """
    if DONE in ready or triton.knobs.runtime.interpret or COMPILING.get() or not any(ctx.needs_input_grad):
        return
    ready[DONE] = True
    before = COMPILING.set(True)
    try:
        with ThreadPoolExecutor(WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            _run(function, CompileContext(ctx.needs_input_grad), inputs)
    except torch.OutOfMemoryError:
        pass  # there may be room when the second pass comes; its programs are compiled one by one then
    finally:
        COMPILING.reset(before)


def _run(function: Any, ctx: CompileContext, inputs: tuple) -> None:
    outputs = function.forward(ctx, *inputs)
    first, *others = (outputs,) if isinstance(outputs, Tensor) else outputs
    function.backward(ctx, torch.empty_like(first), *[None] * len(others))


def compile_only(pointers, kernel, grid, numbers, constants, options) -> None:
    """Begin to compile a program."""
    kernel.warmup(*pointers, *numbers, grid=grid, **constants, **options)
