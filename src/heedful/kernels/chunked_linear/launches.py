"""The table of configurations of the kernels, and the setup that the launches of a call share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from heedful.kernels import launching
from heedful.kernels.chunked_linear.triton_rows import rows_of
from heedful.kernels.launching import INTERPRETED, LaunchCache, columns, over, power, precision, up
from heedful.kernels.state_slots import layout


class Config(NamedTuple):
    """Of one kernel: columns per program on the axis that it may split, warps, stages, most registers."""

    split: int
    warps: int
    stages: int
    registers: int | None = None


# Chosen on an H200 with benchmarks/gpu_chunked_linear.py --tune; "walk" of width 256 and float32 only by what fits.
# The key is the width (features and e up to it) and the operands; the value is the number of tokens per block.
BLOCKS = {
    (64, "bf16"): 64,
    (128, "bf16"): 64,
    (256, "bf16"): 64,
    (64, "fp32"): 64,
    (128, "fp32"): 32,
    (256, "fp32"): 16,
}
# Up to this many tokens, one program is faster than several with a second launch, if half of the GPU is idle.
WALKED = {
    (64, "bf16"): 2048,
    (128, "bf16"): 1024,
    (256, "bf16"): 512,
    (64, "fp32"): 512,
    (128, "fp32"): 256,
    (256, "fp32"): 256,
}
LAUNCHES = ("states", "outputs", "adjoints", "queries", "keys", "both", "walk", "walk_back")
CONFIGS = {
    (64, "bf16"): dict(
        states=Config(64, 4, 3),
        outputs=Config(64, 4, 4),
        adjoints=Config(64, 4, 3, 128),
        queries=Config(64, 4, 4),
        keys=Config(64, 4, 3),
        both=Config(64, 4, 3),
        walk=Config(64, 4, 3),
        walk_back=Config(64, 4, 3),
    ),
    (128, "bf16"): dict(
        states=Config(64, 4, 3),
        outputs=Config(64, 4, 2),
        adjoints=Config(128, 4, 3),
        queries=Config(64, 4, 2),
        keys=Config(64, 4, 2),
        both=Config(64, 4, 2),
        walk=Config(64, 4, 2),
        walk_back=Config(64, 4, 2),
    ),
    (256, "bf16"): dict(
        states=Config(64, 4, 2),
        outputs=Config(64, 4, 2),
        adjoints=Config(64, 8, 2),
        queries=Config(64, 4, 2),
        keys=Config(64, 4, 2),
        both=Config(64, 8, 2),
        walk=Config(64, 8, 1),
        walk_back=Config(64, 8, 2),
    ),
    (64, "fp32"): dict.fromkeys(LAUNCHES, Config(64, 4, 1)),
    (128, "fp32"): dict.fromkeys(LAUNCHES, Config(64, 8, 1)),
    (256, "fp32"): dict.fromkeys(LAUNCHES, Config(64, 8, 1)),
}
# With angles, features are twice as wide as their columns but values are not, so a program has registers for more.
TURNED = {
    (128, "bf16"): CONFIGS[128, "bf16"]
    | dict(
        states=Config(128, 4, 3),
        outputs=Config(64, 4, 3),
        adjoints=Config(128, 4, 3),
        queries=Config(128, 4, 3),
        keys=Config(128, 4, 3),
    ),
    (256, "bf16"): CONFIGS[256, "bf16"] | dict(adjoints=Config(64, 4, 2)),
}
PROGRAMS = 512  # chunks in flight that fill 132 multiprocessors a few times
LONGEST = 2048  # tokens per chunk
SHORTEST = 128
MANY = 256  # rows that fill the GPU without chunks; half as many for short sequences
FEW = 8  # chunks whose states a program adds by itself
LITTLE = 1 << 18  # tokens over all heads below which calls are CPU-bound


class Room:
    """Aligned float32 buffers in one allocation; the second holds slots, the last one state per head."""

    def __init__(self, slots: tuple[int, int, int, int], *sizes: int):
        first, *others = sizes
        sizes = (first, prod(slots), *others, slots[0] * slots[1] * slots[3])
        padded = [max(64, up(x, 64)) for x in sizes]
        self.shape, self.size, self.sizes = slots, sum(padded), padded
        self.offsets = [sum(padded[:i]) for i in range(len(padded))]
        self.bytes = [4 * x for x in self.offsets]

    def parts(self, x: Tensor, compiled: bool) -> Sequence:
        """The buffers; as addresses, which are faster to create, once the kernels are compiled."""
        if compiled:
            start = x.data_ptr()
            return [start + offset for offset in self.bytes]
        return x.split(self.sizes)

    def slots(self, x: Tensor) -> Tensor:
        """The slots of all heads, (B, heads, chunks + 1, numbers)."""
        return x[self.offsets[1] :][: prod(self.shape)].view(self.shape)

    def end(self, x: Tensor) -> Tensor:
        """The last buffer, (B, heads, numbers)."""
        B, heads, _, width = self.shape
        return x[self.offsets[-1] :][: B * heads * width].view(B, heads, width)


def span(n, rows) -> int:
    """Tokens per chunk: the longest chunk that still gives every multiprocessor several chunks."""
    chunks = max(1, over(PROGRAMS, rows))
    return min(LONGEST, max(SHORTEST, power(over(n, chunks))))


def joined(n, rows, chunks, kind) -> int:
    """The number of launches of a forward pass: 1 without chunks; with 2 each chunk adds the states before it.

    A program that processes a whole sequence takes the same time per block however idle the GPU is, so a single launch
    needs many heads or a short sequence. It reads keys and values once, not twice, and needs no workspace for states.
    """
    little = rows * n <= LITTLE
    if n <= SHORTEST or (rows >= MANY // 2 and n <= WALKED[kind] and little) or (rows >= MANY and kind == (64, "bf16")):
        return 1
    return 2 if chunks == 1 or (chunks <= FEW and little) else 3


def merged(n, rows) -> bool:
    """True if one launch computes dq, dk and dv: faster while calls are CPU-bound, slower otherwise."""
    return rows * n <= LITTLE


class ChunkedSetup:
    """Data shared by the launches for inputs of one kind: sizes, the kernels' constants, the compiled kernels."""

    def __init__(self, q, k, v, decay, code, turned, feature, normalise, causal, heads, given):
        self.B, self.H, self.n, self.d = q.shape
        self.r = 2 * self.d if turned else self.d  # features
        self.Hkv, self.m, self.e = v.shape[1:]
        self.heads, self.normalise, self.causal = heads, normalise, causal
        bf16 = q.dtype == torch.bfloat16
        kind = max(64, columns(max(self.r, self.e))), "bf16" if bf16 else "fp32"
        self.R, self.E = columns(self.r), columns(self.e)
        roomy = turned and kind in TURNED and self.R >= 2 * self.E
        self.block, self.configs = BLOCKS[kind], TURNED[kind] if roomy else CONFIGS[kind]
        longest, rows = max(self.n, self.m), self.B * heads
        self.narrow = max(self.R, self.E) <= self.configs["both"].split
        self.merged = self.narrow and merged(longest, rows)
        self.span = span(longest, rows)
        self.launches = joined(longest, rows, over(self.m, self.span), kind) if causal else 3
        if self.launches == 1:
            self.span = up(longest, self.block)
        self.chunks_q, self.chunks_k = over(self.n, self.span), over(self.m, self.span)
        self.slot = self.r * (self.e + 1 if normalise else self.e)
        self.like_q, self.like_k, self.like_v = layout(q, self.H), layout(k, heads), layout(v, heads)
        self.forward, self.backward = self._room(self.m, given), self._room(self.n, True)
        self.constants = dict(
            FEATURE=feature,
            NORMALISE=normalise,
            CAUSAL=causal,
            DECAY=0 if decay is None else (1 if decay.ndim == 1 else 2),
            SEGMENTS=code is not None,
            TURNED=turned,
            # the interpreter's dot does not support bfloat16
            OPERAND=tl.bfloat16 if bf16 and not INTERPRETED else tl.float32,
            PRECISION=precision(q.dtype, pairs=turned),
            EVEN_N=self.n % self.block == self.m % self.block == 0 and code is None,
            EVEN_C=(self.r, self.e) == (self.R, self.E),
            BLOCK=self.block,
        )
        self.ready: dict = {}
        self.rows = None
        if feature == "exp":
            sizes = dict(n=self.n, m=self.m, d=self.d, r=self.r, e=self.e)
            own = dict(H=self.H, KV=self.Hkv, M=self.R, E=self.E, dtype=q.dtype)
            self.rows = rows_of(self.ready, sizes, CAUSAL=causal, SEGMENTS=code is not None, **own)

    def parts(self, name) -> int:
        """The number of parts into which launches of this name split the features."""
        return 1 if self.narrow else over(self.R, self.configs[name].split)

    def _room(self, tokens, given) -> Room:
        """Buffers: one number per query (den, δ), slots, keeps of chunks, z before (y after) each block, last state."""
        walk, rows, chunks = self.launches == 1, self.B * self.heads, over(tokens, self.span)
        slots = 0 if walk and not given else chunks + 1
        sums = rows * over(tokens, self.block) * self.r * self.normalise * self.causal
        each = self.B * self.H * self.n * self.normalise
        return Room((self.B, self.heads, slots, self.slot), each, rows * chunks, sums)


SETUPS = LaunchCache()


def key(q, k, v, feature, normalise, causal, rest) -> tuple:
    """All that Triton inspects: sizes, strides, dtype, alignment, device; `rest` stands for the other tensors."""
    at = q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
    sizes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
    return *sizes, at, q.dtype, q.device, feature, normalise, causal, rest


def setup(key, *inputs) -> ChunkedSetup:
    """The cached setup for inputs that Triton would treat alike."""
    return SETUPS.find(key, ChunkedSetup, *inputs)


def launch(setup, key, pointers, describe):
    """Run a launch of the setup. `describe` returns its name, kernel, grid, numbers and constants."""
    launching.launch(setup.ready, key, pointers, lambda: told(setup, *describe()))


def first(setup, pointers, *description):
    """Compile and launch; return the program for further launches."""
    return launching.first(pointers, *told(setup, *description))


def told(setup, name, kernel, grid, numbers, constants):
    """The arguments of a launch, with the setup's constants and the configuration of that name."""
    config = setup.configs.get(name)
    if config is None:
        return kernel, grid, numbers, constants, dict(num_warps=4)
    options = dict(num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers)
    return kernel, grid, numbers, {**setup.constants, **constants}, options


def parted(setup, name, splits, rows, chunks):
    """The grid and the tile: one program for each row of heads, chunk and part of the split axis."""
    R, E, parts, width = setup.R, setup.E, 1, setup.configs[name].split
    if splits == "r":
        R, parts = min(R, width), over(R, width)
    else:
        E, parts = min(E, width), over(E, width)
    return (setup.B * rows * chunks * parts,), dict(R=R, E=E, PARTS=parts)
