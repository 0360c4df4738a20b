"""Linear attention in Triton: the same call as reference.py.

This file launches the kernels, allocates their buffers, and saves what the backward pass needs. triton_forward.py and
triton_backward.py have the kernels, launches.py the sizes. There are one to three launches forward, one to five back.

    tokens      in chunks, one program each, which processes its chunk in blocks with the state in registers
    forward     states    each chunk alone: Sᵀ = Σ_j leave_j v_j φk_jᵀ, z = Σ_j leave_j φk_j
                scan      x_c ← keep_{c−1} x_{c−1} + x_c over the chunks: the state before each chunk
                outputs   each chunk from the state before it:  P = W ∘ φq φkᵀ
                          num = P v + into (φq S),  den = Σ_j P_ij + into (φq·z),  o = num / den
    backward    the normaliser is one more value column, so with ψ_i = φq_i / den_i and δ_i = do_i·o_i
                dv_j  = Σ_i w_ij (φk_j·ψ_i) do_i          dφk_j = Σ_i w_ij (v_j·do_i − δ_i) ψ_i
                dφq_i = Σ_j w_ij (do_i·v_j − δ_i) φk_j / den_i
                adjoints  each chunk alone: δ, Rᵀ = Σ_i into_i do_i ψ_iᵀ, y = −Σ_i into_i δ_i ψ_i
                scan      the same backwards: R and y after each chunk
                queries   forwards:   dφq = (D φk + into (do Sᵀ − δ zᵀ)) / den,  D = W ∘ (do vᵀ − δ 1ᵀ)
                keys      backwards:  dφk = Dᵀ ψ + leave (v Rᵀ + yᵀ),  dv = (W ∘ ψ φkᵀ)ᵀ do + leave (φk R)
                decay     b_i gains φq_i·dφq_i and loses φk_i·dφk_i; log_decay_t gets the sum of that over i ≥ t.
                          A pair of tokens must add the same number to both, rounded alike: see README.md
    exp         rows whose normaliser is faint are computed again in log space (triton_rows.py)
    angles      cos(a_i − a_j) = cos cos + sin sin: twice the features, φ cos a and φ sin a alternating, computed in
                registers; their gradients are rotated back there
    joining     few chunks: no scan; outputs, queries and keys add the states that they need (2 launches)
                one chunk: no states and adjoints either; the other kernels compute z, y and δ (1 launch)
    weights     b = cumsum of log_decay in the block;  W_ij = exp(b_i − b_j), into_i = exp(b_i),
                leave_j = exp(b_last − b_j), keep = exp(b_last); zero between segments
    precision   states, normaliser and all sums in float32. Operands of a product: bfloat16 for bfloat16,
                tf32 for float16 (the same mantissa, without overflow), bf16x6 for float32

The tensor cores read do and v as they lie in memory; only φk and ψ pass through registers. This is why 1/den is applied
to φq and the states are transposed. `states` writes z before each block (`adjoints` y after it), so that no other
kernel has to sum over tokens. One program writes each element, in a fixed order: runs are bit-equal. README.md has the
lower bounds, the measurements and what did not work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from heedful.kernels import launching
from heedful.kernels.chunked_linear import launches, reference, triton_backward, triton_forward
from heedful.kernels.chunked_linear.features import LinearState, exp_shifts, exp_state, runs, turns_of
from heedful.kernels.dispatch import on_device
from heedful.kernels.launching import INTERPRETED, current_device, either, learns, over, packed, power, steps
from heedful.kernels.parallel_compile import compile_both_passes
from heedful.kernels.state_slots import fill, state_in, tokens
from heedful.kernels.tensor_cache import cached

WIDEST = 256


def objections(
    q,
    k,
    v,
    *,
    feature="identity",
    normalise=True,
    causal=True,
    log_decay=None,
    angles=None,
    segments=None,
    state=None,
    stateful=True,
) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    options = dict(feature=feature, normalise=normalise, causal=causal, log_decay=log_decay, angles=angles)
    said = reference.objections(q, k, v, **options, segments=segments, state=state)
    if said:
        return said
    if not (q.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {q.device}.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        said.append(f"q, k, v must share bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if reference.cancels(q, log_decay):
        said.append("the gradient of one decay a head wants more than float32.")
    features = q.shape[-1] if angles is None else 2 * q.shape[-1]
    if max(features, v.shape[-1]) > WIDEST:
        said.append(f"widths go up to {WIDEST}, got {features} features and {v.shape[-1]}.")
    if 0 in (*q.shape, *v.shape):
        said.append("there is nothing to launch for an empty tensor.")
    if feature == "exp" and not normalise:
        said.append("exp features are shifted here, which only the normaliser takes out again.")
    if feature == "exp" and (log_decay is not None or state is not None):
        said.append("exp features are taken here without a decay and without a state before.")
    if segments is not None and not causal and bool((runs(segments)[0] > 0).any()):
        said.append("several segments in a row are taken only where causal is true.")
    return said


def chunked_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature: str = "identity",
    normalise: bool = True,
    causal: bool = True,
    log_decay: Tensor | None = None,
    angles: Tensor | None = None,
    segments: Tensor | None = None,
    state: LinearState | None = None,
    stateful: bool = True,
) -> tuple[Tensor, LinearState | None]:
    """Linear attention and the state after the last token; the same call as `reference.chunked_linear`.

    The caller must have checked `objections`; the dispatcher does.
    """
    heads = k.shape[1] if log_decay is None else q.shape[1]
    code = None if segments is None else runs(segments)[0]
    shift_q = shift_k = None
    decay = log_decay
    if feature == "exp":
        shift_q, shift_k, decay = exp_shifts(q, k, causal, code)
    S, z = (None, None) if state is None else (state.S, state.z)
    q, k, v = packed(q), packed(k), packed(v)
    decay = None if decay is None else decay.float().contiguous()
    turns = _turns(angles, q, k)
    rest = _rest(heads, S, decay, code, shift_q, turns[0])
    key = launches.key(q, k, v, feature, normalise, causal, rest)
    kind = decay, code, angles is not None, feature, normalise, causal, heads, S is not None
    setup = launches.setup(key, q, k, v, *kind)
    inputs = q, k, v, S, z, decay, code, shift_q, shift_k, *turns
    with on_device(q):
        if feature == "exp":
            o = _Outputs.apply(*inputs, setup, False) if learns(q, k, v) else _attend(setup, *inputs, False)[0]
            return o, exp_state(k, v, code) if stateful else None
        if learns(q, k, v, S, z, decay):
            o, S, z = _Outputs.apply(*inputs, setup, True)
        else:
            o, final, *_ = _attend(setup, *inputs, True)
            S, z = state_in(setup, final)
    return o, LinearState(S, z)


def relaunch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature: str,
    normalise: bool,
    causal: bool,
    decay: Tensor | None,
    angles: Tensor | None,
) -> Callable[..., Tensor] | None:
    """A function of (q, k, v, decay, angles) that launches for inputs of this kind; None if inputs must be copied.

    decay is (H,) in float32. There are no segments, no initial state and no returned state.
    """
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return None
    turned, heads = _turns(angles, q, k)[0], k.shape[1] if decay is None else q.shape[1]
    key = launches.key(q, k, v, feature, normalise, causal, _rest(heads, None, decay, None, None, turned))
    setup = launches.setup(key, q, k, v, decay, None, angles is not None, feature, normalise, causal, heads, False)

    def launch(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, angles: Tensor | None) -> Tensor:
        turns = _turns(angles, q, k)
        if q.get_device() != current_device():
            with on_device(q):
                return launch(q, k, v, decay, angles)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Outputs.apply(q, k, v, None, None, decay, None, None, None, *turns, setup, False)
        return _attend(setup, q, k, v, None, None, decay, None, None, None, *turns, False)[0]

    return launch


_TURNS = WeakIdKeyDictionary()


def _turns(angles: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines (B, 2, tokens) of the angles of queries and of keys; cached for each tensor of angles."""
    if angles is None:
        return None, None
    B, n, m = q.shape[0], q.shape[2], k.shape[2]

    def make():
        turns = turns_of(angles, B, torch.float32).mT
        first, second = (turns[..., turns.shape[-1] - size :].contiguous() for size in (n, m))
        return first, second

    return cached(_TURNS, [angles], (B, n, m), make)


def _rest(heads, S, *tensors) -> tuple | None:
    """What a setup depends on beside q, k and v; None if there is nothing else."""
    if S is None and all(x is None for x in tensors):
        return None
    return heads, S is not None, *(None if x is None else (x.ndim, x.data_ptr() % 16) for x in tensors)


def _scan_slots(setup, slots, keeps, end, chunks, given, reverse):
    def describe():
        c, tile = setup.constants, 64
        constants = dict(
            GIVEN=given,
            WEIGHTED=c["DECAY"] > 0 or c["SEGMENTS"],
            REVERSE=reverse,
            GROUP=min(64, power(chunks)),
            TILE=tile,
        )
        grid = over(setup.slot, tile), setup.B * setup.heads
        return "scan", triton_forward.scan, grid, (chunks, setup.slot), constants

    launches.launch(setup, ("scan", given, reverse), (slots, keeps, end), describe)


def _attend(setup, q, k, v, S, z, decay, code, shift_q, shift_k, turns_q, turns_k, stateful):
    """Launch the forward pass; return o, the last state if requested (slots of Sᵀ and z), and the workspaces."""
    o = tokens(setup.like_q, q, setup.e)
    work = launching.empty((setup.forward.size,), q)
    final = launching.empty((setup.B, setup.heads, setup.slot), q) if stateful else None
    if S is not None:
        fill(setup, setup.forward.slots(work), 0, S, z)
    den, slots, keeps, sums, spare = setup.forward.parts(work, "outputs" in setup.ready)
    end = spare if final is None else final
    sq, sk, tq, tk, dec, runs = (either(x, q) for x in (shift_q, shift_k, turns_q, turns_k, decay, code))
    held = slots if setup.causal else end

    def states():
        grid, tile = launches.parted(setup, "states", "r", setup.heads, setup.chunks_k)
        numbers = *steps(k, v), setup.m, setup.span, setup.chunks_k, setup.r, setup.e
        return "states", triton_forward.states, grid, numbers, dict(KV=setup.Hkv, HEADS=setup.heads, **tile)

    def outputs():
        name = "walk" if setup.launches == 1 else "outputs"
        grid, tile = launches.parted(setup, name, "e", setup.H, setup.chunks_q)
        numbers = *steps(q, k, v, o), setup.n, setup.span, setup.chunks_q, setup.r, setup.e
        given = S is not None or not setup.causal
        constants = dict(H=setup.H, KV=setup.Hkv, HEADS=setup.heads, GIVEN=given, LAUNCHES=setup.launches)
        return name, triton_forward.outputs, grid, numbers, {**constants, **tile}

    if setup.launches > 1:
        launches.launch(setup, "states", (k, v, sk, tk, dec, runs, slots, keeps, sums), states)
    if setup.launches > 2:
        _scan_slots(setup, slots, keeps, end, setup.chunks_k, S is not None, False)
    launches.launch(setup, "outputs", (q, k, v, o, den, sq, sk, tq, dec, runs, held, keeps, sums, end), outputs)
    lse = flags = None
    if setup.rows is not None:
        lse, flags = setup.rows.workspace(q)
        setup.rows.outputs(q, k, v, o, (q, q, q, q, q), runs, den, lse, flags)
    return o, final, work, lse, flags


class _Outputs(torch.autograd.Function):
    """The forward pass; saves q, k, v, o, and in the workspace den, the states of chunks and z before each block."""

    @staticmethod
    def forward(ctx, q, k, v, S, z, decay, code, shift_q, shift_k, turns_q, turns_k, setup, stateful):
        known = decay, code, shift_q, shift_k, turns_q, turns_k
        compile_both_passes(_Outputs, ctx, setup.ready, q, k, v, S, z, *known, setup, stateful)
        o, final, *work = _attend(setup, q, k, v, S, z, *known, stateful)
        ctx.save_for_backward(q, k, v, o, *work, final, *known)
        ctx.set_materialize_grads(False)
        ctx.setup, ctx.given = setup, S is not None
        return (o, *state_in(setup, final)) if stateful else o

    @staticmethod
    def backward(ctx, do, dS=None, dz=None):
        return (_once_differentiable if torch.is_grad_enabled() else _pull_back)(ctx, do, dS, dz)


def _pull_back(ctx, do, dS, dz):
    """The gradients of the inputs of `_Outputs`."""
    q, k, v, o, work, lse, flags, final, decay, code, shift_q, shift_k, turns_q, turns_k = ctx.saved_tensors
    setup, given = ctx.setup, dS is not None or dz is not None
    do = torch.zeros_like(o) if do is None else packed(do)
    dq = tokens(setup.like_q, q, setup.d)
    # With a decay a key head has one gradient per query head; they are summed below.
    dk, dv = tokens(setup.like_k, k, setup.d), tokens(setup.like_v, v, setup.e)
    clocked = decay is not None and ctx.needs_input_grad[5]
    incoming = *do.stride(), do.data_ptr() % 16, given, clocked
    known = ("gradients", setup.merged, setup.narrow, True, incoming) in setup.ready  # the last launch is compiled
    den, slots, keeps, sums, spare = setup.forward.parts(work, known)
    if not setup.causal:
        slots = spare if final is None else final
    delta = back = keeps_back = after = first = room = q
    if setup.launches > 1 or given or ctx.given:
        room = launching.empty((setup.backward.size,), q)
        if given:
            fill(setup, setup.backward.slots(room), setup.chunks_q, dS, dz)
        delta, back, keeps_back, after, first = setup.backward.parts(room, known)
    gain = loss = q
    if clocked:
        gain, loss = (launching.empty((setup.parts(name), *q.shape[:3]), q) for name in ("queries", "keys"))
    sq, sk, tq, tk, dec, runs = (either(x, q) for x in (shift_q, shift_k, turns_q, turns_k, decay, code))

    def adjoints():
        grid, tile = launches.parted(setup, "adjoints", "r", setup.heads, setup.chunks_q)
        numbers = *steps(q, o, do), setup.n, setup.span, setup.chunks_q, setup.r, setup.e
        return "adjoints", triton_backward.adjoints, grid, numbers, dict(H=setup.H, HEADS=setup.heads, **tile)

    def gradients(splits, queries, DK, DV):
        def describe():
            name = "queries" if queries else "keys"
            if queries and DK:
                name = "walk_back" if setup.launches == 1 else "both"
            grid, tile = launches.parted(setup, name, splits, setup.H * setup.chunks_q * queries, 1)
            split = grid[0]
            if DK or DV:
                keys, tile = launches.parted(setup, name, splits, setup.heads, setup.chunks_k)
                grid = (split + keys[0],)
            numbers = (
                *(*steps(q, k, v, o, do, dq, dk, dv), setup.n, setup.m, setup.span),
                *(setup.chunks_q, setup.chunks_k, split, setup.B * setup.H, setup.r, setup.e),
            )
            flags = dict(
                GIVEN=ctx.given or not setup.causal, GIVEN_BACK=given, FIRST=ctx.given, LAUNCHES=setup.launches
            )
            flags["CLOCKED"] = clocked
            roles = dict(QUERIES=queries, DK=DK, DV=DV)
            constants = dict(H=setup.H, KV=setup.Hkv, HEADS=setup.heads, **flags, **roles, **tile)
            return name, triton_backward.gradients, grid, numbers, constants

        pointers = (
            *(q, k, v, o, do, den, delta, dq, dk, dv, sq, sk, tq, tk, dec, runs, slots, keeps, sums),
            *(back if setup.causal else first, keeps_back, after, first, gain, loss),
        )
        launches.launch(setup, ("gradients", queries, DK, DV, incoming), pointers, describe)

    if setup.launches > 1:
        pointers = q, o, do, den, delta, sq, tq, dec, runs, back, keeps_back, after
        launches.launch(setup, ("adjoints", incoming), pointers, adjoints)
    if setup.launches > 2:
        _scan_slots(setup, back, keeps_back, first, setup.chunks_q, given, True)
    if setup.merged:
        gradients("r", True, True, True)
    else:
        gradients("r", True, False, False)
        if setup.narrow:
            gradients("r", False, True, True)
        else:
            gradients("r", False, True, False)
            gradients("e", False, False, True)
    if setup.rows is not None:
        setup.rows.gradients(q, k, v, o, do, dq, dk, dv, (q, q, q, q, q), runs, den, lse, flags, q, key=incoming)
    ddecay = _clock_gradient(setup, gain, loss, final, dS, dz, decay, code) if clocked else None
    if setup.heads > setup.Hkv:
        dk, dv = (x.reshape(setup.B, setup.Hkv, -1, setup.m, x.shape[-1]).sum(2) for x in (dk, dv))
    dS = dz = None
    if ctx.given:
        dS, dz = state_in(setup, setup.backward.end(room))
    return dq, dk, dv, dS, dz, ddecay, *[None] * 7


def _clock_gradient(setup, gain, loss, final, dS, dz, decay, code):
    """The gradient of log_decay: the gains and losses of b from each token on, plus the gain of the last state.

    The sums nearly cancel over a whole segment, so they are in float64.
    """
    change = (gain.sum(0, dtype=torch.float64) - loss.sum(0, dtype=torch.float64)).flip(-1).cumsum(-1).flip(-1)
    for x, dx in zip(state_in(setup, final), (dS, dz), strict=True):
        if x is not None and dx is not None:
            change = change + (x.double() * dx).flatten(2).sum(-1)[..., None]
    if code is not None:
        change = change.masked_fill((code < 0)[:, None], 0)
    return (change if decay.ndim == 3 else change.sum((0, 2))).to(decay.dtype)


_once_differentiable = once_differentiable(_pull_back)
