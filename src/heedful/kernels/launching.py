"""Launching Triton programs: compiled once for each kind of inputs, called directly from then on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from heedful.kernels import parallel_compile

INTERPRETED = triton.knobs.runtime.interpret
# A float32 is the sum of three bfloat16, and of the nine products the three least are below its last bit. Tensor cores
# take the other six in about the time of three of tf32, which lose two bits. The interpreter is exact anyway.
SIXFOLD = "ieee" if INTERPRETED else "bf16x6"
# How a compiled kernel wants to be called is Triton's own affair: seen from 3.6 to 3.9; later ones are called its way.
KNOWN = tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 10)


def launch(ready: dict, key: Hashable, pointers: Sequence, describe: Callable[[], tuple]) -> None:
    """Launches what `describe` says, which is what `first` takes; from the second time on by the compiled program.

    Triton's own launch looks at every argument again, up to 50 µs each time. `ready` belongs to inputs of one kind,
    and with the key it must stand for all that Triton looks at: dtypes, alignment, the integers and the grid.
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
    """What launches need to know, by kind of input: sizes, constants, compiled programs.

    The key must hold all that Triton looks at: sizes, strides, dtypes, alignment, device. A full cache starts afresh.
    """

    MOST = 1024

    def find(self, key: Hashable, make: Callable[..., Any], *args) -> Any:
        """What is cached for the key; if nothing is, make(*args), which is cached from then on."""
        found = self.get(key)
        if found is None:
            if len(self) >= self.MOST:
                self.clear()
            found = self[key] = make(*args)
        return found


class Program:
    """A compiled kernel with its grid, integers and constants: only the addresses are left to give.

    Of a tensor Triton asks the driver where it lies; of an address it asks nothing. Hooks, which profilers set, are
    looked for each time, but an empty chain of them is not called.
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
    """The stream that torch would use; Triton's own way to it takes longer than the launch."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def current_stream() -> int:
    """The stream that launches go to; 0 where there are none."""
    return 0 if INTERPRETED else _stream()


def current_device() -> int:
    """The device that launches go to; -1, like the device of a tensor that is on none, where there are none."""
    return -1 if INTERPRETED else torch._C._cuda_getDevice()


def first(
    pointers: Sequence, kernel: Any, grid: tuple[int, ...], numbers: Sequence, constants: dict, options: dict
) -> Program | None:
    """Compiles, launches, and returns what a further launch needs; None where nothing is compiled."""
    compiled = kernel[grid](*pointers, *numbers, **constants, **options)
    rest = [constants[x] for x in kernel.arg_names[len(pointers) + len(numbers) :]]
    return None if INTERPRETED else Program(compiled, grid, (*numbers, *rest))


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every output and workspace is born here, so that a test can fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def packed(x: Tensor) -> Tensor:
    """Tokens whose coordinates lie side by side, as the programs read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def steps(*tensors: Tensor) -> tuple[int, ...]:
    """From one batch entry, head and token of each tensor to the next."""
    return tuple(step for x in tensors for step in x.stride()[:3])


def either(pointer: Tensor | None, other: Tensor) -> Tensor:
    """Triton wants a pointer even where the program never reads it."""
    return other if pointer is None else pointer


def learns(*tensors: Tensor | None) -> bool:
    """Whether anything asks for a gradient; where nothing does, autograd's bookkeeping is left out."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def precision(dtype: torch.dtype, *, pairs: bool = False) -> str:
    """Of a product of float32 operands: tf32 holds all of a float16, six products of bfloat16 all of a float32.

    Triton 3.6 does not compile a product of pairs of columns in plain tf32.
    """
    if dtype == torch.float16:
        return "tf32x3" if pairs else "tf32"
    return SIXFOLD


def columns(x: int) -> int:
    """Of a tile for x of them: a power of two, 64 at least, for which the interpreter has no reason.

    Of narrower tiles Triton 3.6 and 3.7 may compile a wgmma that reads shared memory where there is none (its issues
    10573 and 11366); and they took as long.
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
