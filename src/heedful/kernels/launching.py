"""Launch Triton kernels: compile once for each kind of inputs, then call the compiled kernel directly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from heedful.kernels import parallel_compile

INTERPRETED = triton.knobs.runtime.interpret
# A float32 is the sum of three bfloat16 numbers. Of the nine products of two such sums, the three smallest lie below
# the last bit of a float32. Tensor cores compute the other six (bf16x6) in about the time of three tf32 products
# (tf32x3), which lose two bits. The interpreter computes exact products anyway.
SIXFOLD = "ieee" if INTERPRETED else "bf16x6"
# The calling convention of a compiled kernel is private to Triton. We know it for 3.6 to 3.9; for later versions we use
# Triton's own launch.
KNOWN = tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 10)


def launch(ready: dict, key: Hashable, pointers: Sequence, describe: Callable[[], tuple]) -> None:
    """Launch the kernel that `describe` returns; from the second call on, call the compiled program directly.

    describe   returns the arguments of `first` after `pointers`
    ready      compiled programs for inputs of one kind

    Triton's own launch inspects every argument again, up to 50 µs per launch. So `ready` and `key` together must
    determine all that Triton inspects: dtypes, alignment, the integers and the grid.
    """
    known = ready.get(key)
    if known is None:
        if parallel_compile.COMPILING.get():
            parallel_compile.compile_only(pointers, *describe())
            return
        known = first(pointers, *describe())
        if known is not None:
            ready[key] = known
    else:
        known(*[x if x.__class__ is int else x.data_ptr() for x in pointers])


class LaunchCache(dict):
    """Launch data by kind of input: sizes, constants, compiled programs.

    The key must hold all that Triton inspects: sizes, strides, dtypes, alignment, device. A full cache is cleared.
    """

    MOST = 1024

    def find(self, key: Hashable, make: Callable[..., Any], *args) -> Any:
        """Return the entry for the key; on a miss, cache and return make(*args)."""
        found = self.get(key)
        if found is None:
            if len(self) >= self.MOST:
                self.clear()
            found = self[key] = make(*args)
        return found


class Program:
    """A compiled kernel with its grid, integers and constants; a call passes only the addresses.

    For a tensor, Triton asks the driver where it lies; for an address it does not. Each call checks for launch hooks,
    which profilers set, but does not call an empty chain of hooks.
    """

    __slots__ = ("grid", "handles", "rest", "run", "watched")

    def __init__(self, compiled: Any, grid: tuple[int, ...], rest: tuple):
        self.grid, self.rest = (*grid, 1, 1)[:3], rest
        self.watched = compiled[self.grid]  # loads the kernel
        self.run, self.handles = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

    def __call__(self, *addresses: int) -> None:
        hook = triton.knobs.runtime.launch_enter_hook
        stream = _stream()
        if KNOWN and (hook is None or not hook.calls):
            self.run(*self.grid, stream, *self.handles, *addresses, *self.rest)
        else:
            self.watched(*addresses, *self.rest, stream=stream)


def _stream() -> int:
    """torch's current stream; Triton's own lookup takes longer than the launch."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def current_stream() -> int:
    """The stream that launches use; 0 under the interpreter."""
    return 0 if INTERPRETED else _stream()


def current_device() -> int:
    """The device that launches use; −1 under the interpreter, like `Tensor.get_device` of a CPU tensor."""
    return -1 if INTERPRETED else torch._C._cuda_getDevice()


def first(
    pointers: Sequence, kernel: Any, grid: tuple[int, ...], numbers: Sequence, constants: dict, options: dict
) -> Program | None:
    """Compile and launch a kernel; return the program for further launches, or None under the interpreter."""
    compiled = kernel[grid](*pointers, *numbers, **constants, **options)
    rest = [constants[x] for x in kernel.arg_names[len(pointers) + len(numbers) :]]
    return None if INTERPRETED else Program(compiled, grid, (*numbers, *rest))


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised tensor. Every output and workspace comes from here, so that a test can fill it with NaN."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def packed(x: Tensor) -> Tensor:
    """x with stride 1 along the last axis, as the kernels read it; a copy where it has another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def steps(*tensors: Tensor) -> tuple[int, ...]:
    """The strides of the batch, head and token axes of each tensor."""
    return tuple(step for x in tensors for step in x.stride()[:3])


def either(pointer: Tensor | None, other: Tensor) -> Tensor:
    """The pointer, or `other` if it is None: Triton needs a pointer even if the kernel never reads it."""
    return other if pointer is None else pointer


def learns(*tensors: Tensor | None) -> bool:
    """True if any tensor needs a gradient; otherwise the caller skips autograd."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def precision(dtype: torch.dtype, *, pairs: bool = False) -> str:
    """Triton's precision for a product of float32 operands that hold values of this dtype.

    tf32 represents every float16 exactly, and bf16x6 every float32.

    pairs   the operand's columns come in pairs; Triton 3.6 does not compile such a product in plain tf32
    """
    if dtype == torch.float16:
        return "tf32x3" if pairs else "tf32"
    return SIXFOLD


def columns(x: int) -> int:
    """The width of a tile for x columns: a power of two, at least 64 (at least 16 under the interpreter).

    For narrower tiles, Triton 3.6 and 3.7 may compile a wgmma instruction that reads outside shared memory (Triton
    issues 10573 and 11366). Narrower tiles were no faster either.
    """
    return max(16 if INTERPRETED else 64, power(x))


def over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def up(a: int, b: int) -> int:
    """a, rounded up to a multiple of b."""
    return over(a, b) * b


def power(x: int) -> int:
    """x, rounded up to a power of two."""
    return 1 << (x - 1).bit_length()
