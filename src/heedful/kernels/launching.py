"""Launching Triton programs: compiled once for each kind of inputs, called directly from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton

INTERPRETED = triton.knobs.runtime.interpret


def launch(ready: dict, key: Hashable, pointers: Sequence, describe: Callable[[], tuple]) -> None:
    """Launches what `describe` says, which is what `first` takes; from the second time on by the compiled program.

    Triton's own launch looks at every argument again, up to 50 µs each time. `ready` belongs to inputs of one kind,
    and with the key it must stand for all that Triton looks at: dtypes, alignment, the integers and the grid.
    """
    known = ready.get(key)
    if known is None:
        known = first(pointers, *describe())
        if known is not None:
            ready[key] = known
    else:
        run, rest = known
        run(*pointers, *rest, stream=_stream())


def _stream() -> int:
    """The stream that torch would use; Triton's own way to it takes longer than the launch."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def first(
    pointers: Sequence, kernel: Any, grid: tuple[int, ...], numbers: Sequence, constants: dict, options: dict
) -> tuple[Callable, tuple] | None:
    """Compiles, launches, and returns what a further launch needs; None where nothing is compiled."""
    compiled = kernel[grid](*pointers, *numbers, **constants, **options)
    rest = [constants[x] for x in kernel.arg_names[len(pointers) + len(numbers) :]]
    return None if INTERPRETED else (compiled[(*grid, 1, 1)[:3]], (*numbers, *rest))


def over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def up(a: int, b: int) -> int:
    """a, rounded up to a multiple of b."""
    return over(a, b) * b


def power(x: int) -> int:
    """x, rounded up to a power of two."""
    return 1 << (x - 1).bit_length()
