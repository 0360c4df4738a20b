"""How the kernels are laid out and launched: the table of configurations, what a call's launches share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from heedful.kernels import launching
from heedful.kernels.launching import INTERPRETED, over, power, up


class Config(NamedTuple):
    """Of one kernel: columns a program takes of the axis it may split, warps, stages, most registers."""

    split: int
    warps: int
    stages: int
    registers: int | None = None


# Chosen on an H200 with benchmarks/gpu_chunked_linear.py --tune; width 256 and float32 by what fits alone.
# The key is the width (r and e up to it) and the operands; a block is that many tokens.
BLOCKS = {
    (64, "bf16"): 64,
    (128, "bf16"): 64,
    (256, "bf16"): 64,
    (64, "fp32"): 64,
    (128, "fp32"): 32,
    (256, "fp32"): 16,
}
CONFIGS = {
    (64, "bf16"): dict(
        states=Config(64, 4, 3),
        outputs=Config(64, 4, 4),
        adjoints=Config(64, 4, 3, 128),
        queries=Config(64, 4, 4),
        keys=Config(64, 4, 3),
    ),
    (128, "bf16"): dict(
        states=Config(64, 4, 3),
        outputs=Config(64, 4, 2),
        adjoints=Config(128, 8, 3),
        queries=Config(64, 4, 2),
        keys=Config(64, 4, 2),
    ),
    (256, "bf16"): dict(
        states=Config(64, 4, 2),
        outputs=Config(64, 8, 1),
        adjoints=Config(64, 8, 2),
        queries=Config(64, 8, 2),
        keys=Config(64, 8, 2),
    ),
    (64, "fp32"): dict.fromkeys(("states", "outputs", "adjoints", "queries", "keys"), Config(64, 4, 1)),
    (128, "fp32"): dict.fromkeys(("states", "outputs", "adjoints", "queries", "keys"), Config(64, 8, 1)),
    (256, "fp32"): dict.fromkeys(("states", "outputs", "adjoints", "queries", "keys"), Config(32, 8, 1)),
}
PROGRAMS = 512  # chunks in flight that fill 132 multiprocessors a few times over
LONGEST = 2048  # tokens a chunk
SHORTEST = 128


def empty(shape, like: Tensor, dtype=torch.float32) -> Tensor:
    """Every output and workspace is born here, so that a test can fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def tokens_like(shape, like):
    """(B, heads, n, width) in the memory order of `like`: heads before tokens, or tokens before heads."""
    B, h, n, w = shape
    if like.stride(1) < like.stride(2):
        return empty((B, n, h, w), like, like.dtype).transpose(1, 2)
    return empty(shape, like, like.dtype)


def workspace(sizes, like):
    """Float32 buffers of these sizes, each aligned, out of one allocation."""
    padded = [max(64, up(x, 64)) for x in sizes]
    return empty((sum(padded),), like).split(padded)


def span(n, rows) -> int:
    """Tokens a chunk: the longest that still gives every multiprocessor several chunks."""
    chunks = max(1, over(PROGRAMS, rows))
    return min(LONGEST, max(SHORTEST, power(over(n, chunks))))


def _precision(dtype, width) -> str:
    """Of a product of float32 operands. Over 256 terms 3×tf32 is off by three times what plain float32 is."""
    if dtype == torch.float16:
        return "tf32"
    return "tf32x3" if width < 256 else "ieee"


class Plan:
    """What launches for inputs of one kind share: sizes, the kernels' constants, the compiled kernels."""

    def __init__(self, q, k, v, decay, code, feature, normalise, causal, heads):
        self.B, self.H, self.n, self.r = q.shape
        self.Hkv, self.m, self.e = v.shape[1:]
        self.heads, self.normalise, self.causal = heads, normalise, causal
        bf16 = q.dtype == torch.bfloat16
        kind = max(64, power(max(self.r, self.e))), "bf16" if bf16 else "fp32"
        self.block, self.configs = BLOCKS[kind], CONFIGS[kind]
        self.R, self.E = (max(16, power(x)) for x in (self.r, self.e))
        self.span = span(max(self.n, self.m), self.B * heads)
        self.chunks_q, self.chunks_k = over(self.n, self.span), over(self.m, self.span)
        self.slot = self.r * (self.e + 1) if normalise else self.r * self.e
        self.constants = dict(
            FEATURE=feature,
            NORMALISE=normalise,
            CAUSAL=causal,
            DECAY=0 if decay is None else (1 if decay.ndim == 1 else 2),
            SEGMENTS=code is not None,
            # the interpreter's dot does not know bfloat16
            OPERAND=tl.bfloat16 if bf16 and not INTERPRETED else tl.float32,
            PRECISION=_precision(q.dtype, kind[0]),
            EVEN_N=self.n % self.block == self.m % self.block == 0 and code is None,
            EVEN_C=(self.r, self.e) == (self.R, self.E),
            BLOCK=self.block,
        )
        self.ready = {}


PLANS: dict = {}


def plan(q, k, v, decay, code, shift_q, shift_k, given, *options) -> Plan:
    """One plan for inputs that Triton would treat alike: sizes, strides, dtype, alignment, device, rest."""
    tensors = [x for x in (q, k, v, decay, code, shift_q, shift_k) if x is not None]
    key = (
        q.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        q.device,
        given,
        *options,
        None if decay is None else decay.ndim,
        code is None,
        *(x.data_ptr() % 16 == 0 for x in tensors),
    )
    plan = PLANS.get(key)
    if plan is None:
        if len(PLANS) >= 1024:
            PLANS.clear()
        plan = PLANS[key] = Plan(q, k, v, decay, code, *options)
    return plan


def launch(plan, key, pointers, describe):
    """One of the plan's launches, as `describe` tells it: name, kernel, grid, numbers, constants."""
    launching.launch(plan.ready, key, pointers, lambda: told(plan, *describe()))


def first(plan, pointers, *description):
    """Compiles, launches, and returns what a further launch needs."""
    return launching.first(pointers, *told(plan, *description))


def told(plan, name, kernel, grid, numbers, constants):
    """What is launched, with the plan's constants and the configuration of that name."""
    config = plan.configs.get(name)
    if config is None:
        return kernel, grid, numbers, constants, dict(num_warps=4)
    options = dict(num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers)
    return kernel, grid, numbers, {**plan.constants, **constants}, options


def parted(plan, name, splits, rows, chunks):
    """The grid and the tile: one program for each row of heads, chunk and part of the axis that is split."""
    R, E, parts, width = plan.R, plan.E, 1, plan.configs[name].split
    if splits == "r":
        R, parts = min(R, width), over(R, width)
    else:
        E, parts = min(E, width), over(E, width)
    return (plan.B * rows * chunks * parts,), dict(R=R, E=E, PARTS=parts)
