"""Functions that compilers leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """The function, which no compiler looks into, nor into what it calls: it would unroll loops over the length.

    >>> uncompiled(lambda x: x + 1)(1)
    2

    `torch.compiler.disable` does the same, but loads the compiler to do so: 140 MiB, and half of the time that it takes
    to import heedful.
    """

    @wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(call.__code__, skip)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):  # of another version of torch
        return torch.compiler.disable(function)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
