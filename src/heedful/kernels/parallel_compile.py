"""The first training call compiles the kernels of both passes in parallel, before it launches any.

Both passes run once in a mode in which a launch only compiles. One kernel takes up to six seconds to compile, and a
forward and backward pass launch up to a dozen. Compiled one after the other, the first call of float32 heads took half
a minute.
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
COMPILING: ContextVar[bool] = ContextVar("compiling", default=False)  # for this thread only: others launch as usual
DONE = "compiled"


class CompileContext:
    """Replaces the context of an autograd function while its kernels compile."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()

    def save_for_backward(self, *tensors) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def compile_both_passes(function: Any, ctx: Any, ready: dict, *inputs) -> None:
    """Compile the kernels of both passes of an autograd function; the function's forward pass calls this.

    ready   the compiled programs for inputs of this kind; only the first call of a kind compiles

    A kernel that does not compile raises its error when it is launched.
    """
    if DONE in ready or triton.knobs.runtime.interpret or COMPILING.get() or not any(ctx.needs_input_grad):
        return
    ready[DONE] = True
    before = COMPILING.set(True)
    try:
        with ThreadPoolExecutor(WORKERS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            _run(function, CompileContext(ctx.needs_input_grad), inputs)
    except torch.OutOfMemoryError:
        pass  # memory may be free by the backward pass; its kernels are compiled one by one then
    finally:
        COMPILING.reset(before)


def _run(function: Any, ctx: CompileContext, inputs: tuple) -> None:
    outputs = function.forward(ctx, *inputs)
    first, *others = (outputs,) if isinstance(outputs, Tensor) else outputs
    function.backward(ctx, torch.empty_like(first), *[None] * len(others))


def compile_only(pointers, kernel, grid, numbers, constants, options) -> None:
    """Start to compile a kernel, without a launch."""
    kernel.warmup(*pointers, *numbers, grid=grid, **constants, **options)
