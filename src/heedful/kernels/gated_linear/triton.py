"""Gated linear attention in Triton, a gate for each channel: the same call as reference.py.

This file launches the kernels, allocates their buffers, and saves what the backward pass needs; triton_forward.py and
triton_backward.py have the kernels. There are three launches forward, four or five back.

    tokens      in chunks, one program each, which processes its chunk in blocks with the state in registers
    exponents   sums of gates are products with matrices of zeros and ones, one for each level s = 1, 2, 4, …:
                  X_t = Σ g_u,  u of the s tokens around t,  u ≤ t in a later half and u > t in an earlier one
                and for the state  into_t = exp Σ_{u≤t} g_u,  leave_t = exp Σ_{u>t} g_u,  keep = exp Σ g_u
    forward     states    each chunk alone: S = Σ_j (leave_j ∘ φk_j) v_jᵀ, z = Σ_j leave_j ∘ φk_j
                scan      x_c ← keep_{c−1} ∘ x_{c−1} + x_c over the chunks: the state before each chunk
                outputs   each chunk from the state before it:  P_ij = (φq_i ∘ e^{X_i})·(φk_j ∘ e^{X_j}), X of the level
                          num = P v + (into ∘ φq) S,  den = Σ_j P_ij + (into ∘ φq)·z,  o = num / den
    backward    the normaliser is one more value column: ψ_i = φq_i / den_i, δ_i = do_i·o_i, D_ij = do_i·v_j − δ_i
                adjoints  each chunk alone: δ, R = Σ_i (into_i ∘ ψ_i) do_iᵀ, y = −Σ_i δ_i into_i ∘ ψ_i
                scan      the same backwards: R and y after each chunk
                queries   forwards:   dφq_i = (Σ_j D_ij e^{X_i} ∘ e^{X_j} ∘ φk_j + into_i ∘ (S do_i − δ_i z)) / den_i
                keys      backwards:  dφk_j = Σ_i D_ij e^{X_i} ∘ e^{X_j} ∘ ψ_i + leave_j ∘ (R v_j + y)
                                      dv = Pᵀ do with ψ for φq, + (leave ∘ φk) R
                gates     dg_t = Σ_{i≥t} (φq_i ∘ dφq_i − φk_i ∘ dφk_i) inside the chunk, only of pairs j < i,
                          + Σ_e S ∘ R + z ∘ y after it
    precision   states, normaliser and all sums in float32. Operands of a product: bfloat16 for bfloat16, tf32 for
                float16, bf16x6 for float32; gates in two bfloat16 parts, or in three

Tiles of q, k and gates are channels × tokens: sums of gates have the layout that the next product needs, the matrices
of ones stay in shared memory, and a state, which is channels × values, goes to the tensor cores from registers.
No exponent is a difference, so none is positive. A shut gate (−∞) counts as 2⁻¹⁵⁰, which is 0 in float32. One program
writes each element, in a fixed order: runs are bit-equal. README.md has the derivation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.kernels import launching
from heedful.kernels.chunked_linear.features import LinearState, runs
from heedful.kernels.dispatch import on_device, uncompiled
from heedful.kernels.gated_linear import reference, triton_backward, triton_forward
from heedful.kernels.launching import INTERPRETED, columns, either, learns, over, packed, power, precision, steps, up
from heedful.kernels.parallel_compile import compile_both_passes
from heedful.kernels.state_slots import fill, layout, state_in, tokens

WIDEST = 128
TYPES = torch.bfloat16, torch.float16, torch.float32


class Config(NamedTuple):
    """Of one kernel: tokens per block, columns per program on the split axis, warps, stages, most registers."""

    block: int
    split: int
    warps: int
    stages: int
    registers: int | None = None


LAUNCHES = ("states", "outputs", "adjoints", "queries", "keys")
# Chosen on an H200; the key is the width (r and e up to it) and the operands.
CONFIGS = {
    (64, "bf16"): dict(
        states=Config(64, 64, 4, 1, 168),
        outputs=Config(16, 64, 4, 2, 128),
        adjoints=Config(32, 64, 4, 3),
        queries=Config(16, 64, 4, 2, 168),
        keys=Config(16, 64, 4, 3),
    ),
    (128, "bf16"): dict(
        states=Config(32, 64, 4, 3),
        outputs=Config(16, 128, 8, 3),
        adjoints=Config(32, 64, 4, 3),
        queries=Config(16, 64, 4, 3),
        keys=Config(16, 128, 8, 3),
    ),
    (64, "fp32"): dict.fromkeys(LAUNCHES, Config(16, 64, 4, 1)),
    (128, "fp32"): dict.fromkeys(LAUNCHES, Config(16, 64, 8, 1)),
}
PROGRAMS = 1024  # chunks in flight that fill 132 multiprocessors a few times
LONGEST = 512  # tokens per chunk: the sums of a gate's gradient, and their errors, accumulate inside a chunk
SHORTEST = 128


def objections(q, k, v, *, log_decay, feature="identity", normalise=False, segments=None, state=None) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    options = dict(log_decay=log_decay, feature=feature, normalise=normalise)
    said = reference.objections(q, k, v, **options, segments=segments, state=state)
    if said:
        return said
    if not (q.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {q.device}.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in TYPES:
        said.append(f"q, k, v must share bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}.")
    elif max(q.shape[-1], v.shape[-1]) > WIDEST:
        said.append(f"widths go up to {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}.")
    if 0 in (*q.shape, *v.shape):
        said.append("there is nothing to launch for an empty tensor.")
    if log_decay.shape != q.shape:
        said.append("these kernels have a gate for each channel, not one for a whole head.")
    return said


@uncompiled  # launches need addresses
def gated_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    feature: str = "identity",
    normalise: bool = False,
    segments: Tensor | None = None,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Gated linear attention and the state after the last token; the same call as `reference.gated_linear`.

    The caller must have checked `objections`; the dispatcher does.
    """
    code = None if segments is None else runs(segments)[0]
    S, z = (None, None) if state is None else (state.S, state.z if normalise else None)
    q, k, v = packed(q), packed(k), packed(v)
    g = packed(log_decay if log_decay.dtype in TYPES else log_decay.float())
    setup = _setup(q, k, v, g, code, feature, normalise, S is not None)
    with on_device(q):
        if learns(q, k, v, g, S, z):
            o, S, z = _Outputs.apply(q, k, v, g, S, z, code, setup)
        else:
            o, final, _ = _attend(setup, q, k, v, g, S, z, code)
            S, z = state_in(setup, final)
    return o, LinearState(S, z)


class GatedSetup:
    """Data shared by the launches for inputs of one kind: sizes, the kernels' constants, the compiled kernels."""

    def __init__(self, q, k, v, g, code, feature, normalise, given):
        (self.B, self.heads, self.n, self.r), self.e = q.shape, v.shape[-1]
        self.d = self.r  # as many features as columns
        self.normalise, self.given = normalise, given
        bf16 = q.dtype == torch.bfloat16
        kind = max(64, columns(max(self.r, self.e))), "bf16" if bf16 else "fp32"
        self.configs = CONFIGS[kind]
        self.R, self.E = columns(self.r), columns(self.e)
        self.rows = self.B * self.heads
        self.span = span(self.n, self.rows)
        self.chunks = over(self.n, self.span)
        self.slot = self.r * (self.e + 1) if normalise else self.r * self.e
        self.like_q, self.like_k, self.like_v, self.like_g = (layout(x, self.heads) for x in (q, k, v, g))
        # one number per query (den, δ), and slots; the forward pass also has the keeps of chunks
        sizes = self.rows * self.n * normalise, self.rows * (self.chunks + 1) * self.slot
        self.sizes = [max(64, up(x, 64)) for x in sizes]
        self.kept = self.rows * self.chunks * self.r
        self.constants = dict(
            H=self.heads,
            FEATURE=feature,
            NORMALISE=normalise,
            SEGMENTS=code is not None,
            # the interpreter's dot does not support bfloat16
            OPERAND=tl.bfloat16 if bf16 and not INTERPRETED else tl.float32,
            PRECISION=precision(q.dtype),
            EVEN_C=(self.r, self.e) == (self.R, self.E),
        )
        self.ready: dict = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.n, self.span, self.chunks, self.r, self.e

    def slots(self, work: Tensor) -> Tensor:
        """The slots of a workspace, (B, heads, chunks + 1, numbers)."""
        start, shape = self.sizes[0], (self.B, self.heads, self.chunks + 1, self.slot)
        return work[start : start + self.rows * shape[2] * self.slot].view(shape)

    def launch(self, name, key, pointers, program, numbers, splits, **flags):
        """Launch one program for each row of heads, chunk and part of the split axis."""

        def describe():
            R, E, parts, config = self.R, self.E, 1, self.configs[name]
            if splits == "r":
                R, parts = min(R, config.split), over(R, config.split)
            else:
                E, parts = min(E, config.split), over(E, config.split)
            blocks = dict(BLOCK=config.block, LEVELS=config.block.bit_length() - 1, EVEN_N=self._even(config.block))
            constants = {**self.constants, **blocks, **flags, "R": R, "E": E, "PARTS": parts}
            options = dict(num_warps=warps(config, R), num_stages=config.stages, maxnreg=config.registers)
            return program, (self.rows * self.chunks * parts,), (*numbers, *self.numbers), constants, options

        launching.launch(self.ready, (name, key), pointers, describe)

    def _even(self, block) -> bool:
        """True if every block is full, without padding."""
        return self.n % block == 0 and not self.constants["SEGMENTS"]

    def scan(self, slots, keeps, end, given, reverse):
        def describe():
            tile = 64
            constants = dict(GIVEN=given, REVERSE=reverse, GROUP=min(64, power(self.chunks)), TILE=tile)
            grid = over(self.slot, tile), self.rows
            return triton_forward.scan, grid, (self.chunks, self.slot, self.r), constants, dict(num_warps=4)

        launching.launch(self.ready, ("scan", given, reverse), (slots, keeps, end), describe)


def warps(config: Config, channels: int) -> int:
    """The number of warps, at most four for each 64 channels.

    Eight would split the 16 tokens of a block in two, and products of 8 columns ended in an illegal access in float32:
    they seem to read shared memory beyond their operands (Triton's issue 10629; README.md).
    """
    return config.warps if channels >= 128 else min(4, config.warps)


SETUPS = launching.LaunchCache()


def _setup(q, k, v, g, code, feature, normalise, given) -> GatedSetup:
    """The cached setup for inputs that Triton would treat alike."""
    at = tuple((x.stride(), x.data_ptr() % 16) for x in (q, k, v, g))
    coded = None if code is None else code.data_ptr() % 16
    key = q.shape, v.shape[-1], at, q.dtype, g.dtype, q.device, coded, feature, normalise, given
    return SETUPS.find(key, GatedSetup, q, k, v, g, code, feature, normalise, given)


def span(n: int, rows: int) -> int:
    """Tokens per chunk: the longest chunk that still gives every multiprocessor several chunks."""
    return min(LONGEST, max(SHORTEST, power(over(n, max(1, over(PROGRAMS, rows))))))


def _attend(setup, q, k, v, g, S, z, code):
    """Launch the forward pass; return o, the last state (slots of Sᵀ and z), and the workspaces."""
    o = tokens(setup.like_q, q, setup.e)
    work, keeps = launching.empty((sum(setup.sizes),), q), launching.empty((setup.kept,), q)
    final = launching.empty((setup.B, setup.heads, setup.slot), q)
    if S is not None:
        fill(setup, setup.slots(work), 0, S, z)
    den, slots = work.split(setup.sizes)
    runs = either(code, q)
    setup.launch("states", None, (k, v, g, runs, slots, keeps), triton_forward.states, steps(k, v, g), "r")
    setup.scan(slots, keeps, final, setup.given, False)
    pointers = q, k, v, g, o, den, runs, slots
    setup.launch("outputs", None, pointers, triton_forward.outputs, steps(q, k, v, g, o), "e", GIVEN=setup.given)
    return o, final, (work, keeps)


class _Outputs(torch.autograd.Function):
    """The forward pass; saves q, k, v, o, the gates, den and the states of chunks."""

    @staticmethod
    def forward(ctx, q, k, v, g, S, z, code, setup):
        compile_both_passes(_Outputs, ctx, setup.ready, q, k, v, g, S, z, code, setup)
        o, final, kept = _attend(setup, q, k, v, g, S, z, code)
        ctx.save_for_backward(q, k, v, g, o, code, *kept)
        ctx.set_materialize_grads(False)
        ctx.setup = setup
        return (o, *state_in(setup, final))

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dS, dz):
        q, k, v, g, o, code, work, keeps = ctx.saved_tensors
        setup, given, gated = ctx.setup, dS is not None or dz is not None, ctx.needs_input_grad[3]
        do = torch.zeros_like(o) if do is None else packed(do)
        dq, dk, dv = (
            tokens(setup.like_q, q, setup.r),
            tokens(setup.like_k, k, setup.r),
            tokens(setup.like_v, v, setup.e),
        )
        dg, gain = (tokens(setup.like_g, g, setup.r), launching.empty(q.shape, q)) if gated else (q, q)
        room, first = launching.empty((sum(setup.sizes),), q), launching.empty((setup.B, setup.heads, setup.slot), q)
        if given:
            fill(setup, setup.slots(room), setup.chunks, dS, dz)
        (den, slots), (delta, back) = work.split(setup.sizes), room.split(setup.sizes)
        runs, key = either(code, q), (do.stride(), do.data_ptr() % 16, given, gated)
        setup.launch(
            *("adjoints", key, (q, g, o, do, den, delta, runs, back)),
            *(triton_backward.adjoints, steps(q, g, o, do), "r"),
        )
        setup.scan(back, keeps, first, given, True)
        setup.launch(
            *("queries", key, (q, k, v, g, do, den, delta, dq, gain, runs, slots)),
            *(triton_backward.queries, steps(q, k, v, g, do, dq), "r"),
            GIVEN=setup.given,
            GATED=gated,
        )
        narrow = max(setup.R, setup.E) <= setup.configs["keys"].split
        for splits, DK, DV in [("r", True, True)] if narrow else [("r", True, False), ("e", False, True)]:
            setup.launch(
                *("keys", (*key, DK, DV), (q, k, v, g, do, den, delta, dk, dv, dg, gain, runs, slots, back)),
                *(triton_backward.keys, steps(q, k, v, g, do, dk, dv, dg), splits),
                GIVEN=given,
                GATED=gated,
                DK=DK,
                DV=DV,
            )
        dS, dz = state_in(setup, first) if setup.given else (None, None)
        return dq, dk, dv, dg if gated else None, dS, dz, None, None
