"""The table of configurations of the kernels, and the setup that the launches of a call share."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from heedful.kernels import launching
from heedful.kernels.chunked_linear.triton_rows import rows_of
from heedful.kernels.launching import INTERPRETED, columns, over, precision
from heedful.kernels.random_features import triton_forward
from heedful.kernels.tensor_cache import cached


class Config(NamedTuple):
    """Of one launch: features at a time, warps, stages."""

    features: int
    warps: int
    stages: int


LAUNCHES = ("peaks", "states", "outputs", "adjoints", "queries", "dk", "dv")
PARTED = ("states", "adjoints")  # one program for a few features; programs of the other launches loop over all features
EXACT = dict.fromkeys(PARTED, Config(64, 8, 1)) | dict.fromkeys(("outputs", "dv"), Config(16, 8, 1))
EXACT |= dict.fromkeys(("peaks", "queries", "dk"), Config(32, 8, 1))
# Tokens per block, and the configuration of each launch. gpu_random_features.py --tune found the first on an H200; the
# others were chosen by registers and spills, compiled for sm_90. The key is the largest of d and e (up to it) and the
# operands.
CONFIGS = {
    (64, "bf16"): (
        128,
        dict(
            peaks=Config(64, 8, 2),
            states=Config(128, 8, 1),
            outputs=Config(64, 8, 3),
            adjoints=Config(128, 8, 2),
            queries=Config(64, 8, 3),
            dk=Config(64, 8, 3),
            dv=Config(64, 8, 3),
        ),
    ),
    (128, "bf16"): (64, dict.fromkeys(LAUNCHES, Config(64, 8, 2))),
    (256, "bf16"): (64, dict.fromkeys(LAUNCHES, Config(64, 8, 1))),
    (64, "fp32"): (32, EXACT | dict.fromkeys(("peaks", "outputs", "queries", "dk", "dv"), Config(32, 4, 1))),
    (128, "fp32"): (32, EXACT),
    (256, "fp32"): (16, EXACT),
}
PARTS = 512  # partial sums over all keys in flight, without `causal`
SPLIT = True  # W as a sum of two bfloat16
GROUP, TILE = 8, 256  # blocks × numbers that a program of the scan processes at a time
LEVELS = 1024  # blocks whose levels are computed at a time


def config(low: bool, widest: int) -> tuple[int, dict[str, Config]]:
    """Tokens per block, and the configuration of each launch by name."""
    return CONFIGS[next(x for x in (64, 128, 256) if widest <= x), "bf16" if low else "fp32"]


class FeatureSetup:
    """Data shared by the launches for inputs of one kind: sizes, constants, the compiled kernels."""

    def __init__(self, q, v, weight, curvature, causal, biased):
        self.B, self.H, self.n, self.d = q.shape
        self.KV, self.m, self.e = v.shape[1:]
        self.causal, self.biased = causal, biased
        self.half = curvature * log2(torch.e) / 2
        low = q.dtype == torch.bfloat16
        self.D, self.M, self.E = (columns(x) for x in (self.d, weight.shape[-1], self.e))
        widest = max(self.D, self.E)
        self.block, self.configs = config(low, widest)
        self.blocks_q, self.blocks_k = over(self.n, self.block), over(self.m, self.block)
        # the interpreter's dot does not support bfloat16
        self.operand = torch.bfloat16 if low and not INTERPRETED else torch.float32
        self.shared = dict(
            WEIGHTS=weight.shape[0],
            CAUSAL=causal,
            SPLIT=SPLIT and low,
            OPERAND=tl.bfloat16 if self.operand == torch.bfloat16 else tl.float32,
            PRECISION=precision(q.dtype),
            EVEN_N=self.n % self.block == self.m % self.block == 0,
            EVEN_D=self.d == self.D,
            EVEN_E=self.e == self.E,
            BLOCK=self.block,
            D=self.D,
            M=self.M,
            E=self.E,
            H=self.H,
            KV=self.KV,
        )
        self.ready: dict = {}
        sizes = dict(n=self.n, m=self.m, d=self.d, r=weight.shape[-1], e=self.e)
        names = "WEIGHTS", "CAUSAL", "SPLIT", "OPERAND", "PRECISION", "D", "M", "E", "H", "KV"
        own = {x: self.shared[x] for x in names}
        self.rows = rows_of(self.ready, sizes, MADE=True, BIASED=biased, dtype=q.dtype, **own)

    def span(self, name, n, rows) -> int:
        """Tokens per chunk: one block if causal, otherwise as many as leave enough chunks."""
        if self.causal:
            return self.block
        chunks = max(1, PARTS // (self.B * rows * self.parts(name)))
        return over(over(n, chunks), self.block) * self.block

    def parts(self, name) -> int:
        return over(self.M, self.configs[name].features)

    def launch(self, name, kernel, blocks, rows, pointers, numbers, key=(), **constants):
        """Launch a kernel, directly once it is compiled; `key` adds what the setup's own key does not cover."""

        def describe():
            features, warps, stages = self.configs[name]
            every = {**self.shared, "R": min(self.M, features), **constants}
            own = {x: every[x] for x in kernel.arg_names if x in every}
            grid = blocks * (self.parts(name) if name in PARTED else 1), self.B * rows
            return kernel, grid, numbers, own, dict(num_warps=warps, num_stages=stages)

        launching.launch(self.ready, (name, key, tuple(constants.items())), pointers, describe)

    def find_levels(self, maxima, levels) -> None:
        """Compute the running maximum before each block, and after the last."""

        def describe():
            return triton_forward.levels, (self.B * self.KV,), (self.blocks_k,), dict(GROUP=LEVELS), dict(num_warps=4)

        launching.launch(self.ready, "levels", (maxima, levels), describe)

    def room(self, rows, chunks, like, dtype) -> tuple[Tensor, Tensor]:
        """Empty buffers for the states of all chunks; if causal, one more than chunks, with S in `dtype`."""
        chunks, dtype = (chunks + 1, dtype) if self.causal else (chunks, torch.float32)
        S = launching.empty((self.B, rows, chunks, self.E, self.M), like, dtype)
        return S, launching.empty((self.B, rows, chunks, self.M), like)

    def join(self, rows, slots, sums, levels, reverse) -> tuple[Tensor, Tensor]:
        """The states before (or after) each block, in place; without `causal`, the one state of all keys."""
        if not self.causal:
            return slots.sum(2).to(self.operand), sums.sum(2)
        for name, x, width, tile in (("slots", slots, self.E * self.M, TILE), ("sums", sums, self.M, 32)):
            constants = dict(G=rows // self.KV, REVERSE=reverse, GROUP=GROUP, TILE=tile)

            def describe(width=width, tile=tile, constants=constants):
                grid, numbers = (over(width, tile), self.B * rows), (slots.shape[2] - 1, width)
                # one warp, so that each thread holds all blocks of its numbers
                return triton_forward.scan, grid, numbers, constants, dict(num_warps=1, num_stages=3)

            launching.launch(self.ready, (name, rows, reverse), (x, levels), describe)
        return slots, sums


SETUPS = launching.LaunchCache()


def setup_for(q, k, v, key_bias, weight, curvature, causal) -> FeatureSetup:
    """The cached setup for inputs that Triton would treat alike: sizes, strides, dtype, alignment, device, rest."""
    tensors = [x for x in (q, k, v, key_bias) if x is not None]
    key: tuple = (q.shape, v.shape, weight.shape, q.dtype, q.device, curvature, causal, SPLIT, config)
    key += tuple(x.stride() for x in tensors) + tuple(x.data_ptr() % 16 == 0 for x in tensors)
    return SETUPS.find(key, FeatureSetup, q, v, weight, curvature, causal, key_bias is not None)


PADDED = WeakIdKeyDictionary()
BIASES = WeakIdKeyDictionary()


def padded(weight: Tensor, setup: FeatureSetup) -> Tensor:
    """W in base 2 as (heads, 2, D, M) operands: W rounded, and the rounding error."""

    def make():
        wide = weight.detach().float() * log2(torch.e)
        wide = torch.nn.functional.pad(wide, (0, setup.M - wide.shape[-1], 0, setup.D - wide.shape[-2]))
        high = wide.to(setup.operand)
        return torch.stack([high, (wide - high.float()).to(setup.operand)], 1)

    return cached(PADDED, (weight,), (setup.D, setup.M, setup.operand), make)


def biases(bias: Tensor | None, weight: Tensor, setup: FeatureSetup) -> Tensor:
    """c in base 2, −∞ for the features beyond the last."""

    def make():
        own = weight.new_zeros(weight.shape[0], weight.shape[-1]) if bias is None else bias.detach()
        return torch.nn.functional.pad(own.float() * log2(torch.e), (0, setup.M - own.shape[-1]), value=-torch.inf)

    return cached(BIASES, (weight if bias is None else bias,), (bias is None, setup.M), make)
