"""Linear attention in Triton: the same call as reference.py.

Here is which programs are launched, on what memory, and what is kept for the backward pass; triton_forward.py and
triton_backward.py have the programs, launches.py the sizes. There are one to three launches forward, one to five back.

    tokens      in chunks, one program each, which walks its chunk in blocks with the state in registers
    forward     states    each chunk by itself: Sᵀ = Σ_j leave_j v_j φk_jᵀ, z = Σ_j leave_j φk_j
                scan      x_c ← keep_{c−1} x_{c−1} + x_c over the chunks: the state before each chunk
                outputs   each chunk from the state before it:  P = W ∘ φq φkᵀ
                          num = P v + into (φq S),  den = Σ_j P_ij + into (φq·z),  o = num / den
    backward    the normaliser is one more value column, so with ψ_i = φq_i / den_i and δ_i = do_i·o_i
                dv_j  = Σ_i w_ij (φk_j·ψ_i) do_i          dφk_j = Σ_i w_ij (v_j·do_i − δ_i) ψ_i
                dφq_i = Σ_j w_ij (do_i·v_j − δ_i) φk_j / den_i
                adjoints  each chunk by itself: δ, Rᵀ = Σ_i into_i do_i ψ_iᵀ, y = −Σ_i into_i δ_i ψ_i
                scan      the same backwards: R and y after each chunk
                queries   forwards:   dφq = (D φk + into (do Sᵀ − δ zᵀ)) / den,  D = W ∘ (do vᵀ − δ 1ᵀ)
                keys      backwards:  dφk = Dᵀ ψ + leave (v Rᵀ + yᵀ),  dv = (W ∘ ψ φkᵀ)ᵀ do + leave (φk R)
                decay     b_i gains φq_i·dφq_i and loses φk_i·dφk_i; log_decay_t gets the sum of that over i ≥ t.
                          What a pair of tokens adds to both has to be the same number, rounded alike: see README.md
        exp         rows whose normaliser is faint are taken again in log space (triton_rows.py)
    angles      cos(a_i − a_j) = cos cos + sin sin: twice the features, φ cos a and φ sin a in turn, made in registers;
                their gradients are turned back there
    joining     of few chunks the scan is left out: outputs, queries and keys add up the states they need (2 launches).
                Of one chunk states and adjoints are too: z, y and δ are made in the walk (1 launch)
    weights     b = cumsum of log_decay in the block;  W_ij = exp(b_i − b_j), into_i = exp(b_i),
                leave_j = exp(b_last − b_j), keep = exp(b_last); zero between segments
    precision   states, normaliser and all sums in float32. Operands of a product: bfloat16 for bfloat16,
                tf32 for float16 (its mantissa without its overflow), six products of bfloat16 for float32

do and v go to the tensor cores as they lie in memory, only φk and ψ pass through registers: this is why 1/den
stands on φq and the states are held transposed. z before each block is written by `states` (y after it by
`adjoints`), so that no other walk has to sum over tokens. Each element is written by one program in a fixed
order: runs are bit-equal. README.md has the floors, the measurements and what did not work.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from heedful.kernels import launching
from heedful.kernels.chunked_linear import launches, reference, triton_backward, triton_forward
from heedful.kernels.chunked_linear.features import LinearState, exp_shifts, exp_state, runs, turns_of
from heedful.kernels.dispatch import on_device
from heedful.kernels.launching import INTERPRETED, current_device, either, learns, over, packed, power, steps
from heedful.kernels.parallel_compile import rehearse
from heedful.kernels.state_slots import fill, state_in, tokens
from heedful.kernels.tensor_cache import kept

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

    Inputs are such that `objections` has none: the dispatcher has asked.
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
    plan = launches.plan(key, q, k, v, *kind)
    inputs = q, k, v, S, z, decay, code, shift_q, shift_k, *turns
    with on_device(q):
        if feature == "exp":
            o = _Outputs.apply(*inputs, plan, False) if learns(q, k, v) else _attend(plan, *inputs, False)[0]
            return o, exp_state(k, v, code) if stateful else None
        if learns(q, k, v, S, z, decay):
            o, S, z = _Outputs.apply(*inputs, plan, True)
        else:
            o, final, *_ = _attend(plan, *inputs, True)
            S, z = state_in(plan, final)
    return o, LinearState(S, z)


def again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature: str,
    normalise: bool,
    causal: bool,
    decay: Tensor | None = None,
    angles: Tensor | None = None,
) -> Tensor | None:
    """The output for inputs of a kind that was taken before, which nobody asks about again; None for any other.

    Inputs are such that they have a meaning: tokens of one type on one device, a decay (H,) in float32. There are no
    segments, no state before and none after: this is the way of short sequences, where the host takes longer than
    the card.
    """
    rest, turns = None, _turns(angles, q, k)
    if decay is not None or angles is not None:
        rest = _rest(k.shape[1] if decay is None else q.shape[1], None, decay, None, None, turns[0])
    plan = launches.PLANS.get(launches.key(q, k, v, feature, normalise, causal, rest))
    if plan is None or q.get_device() != current_device() or (decay is not None and decay.requires_grad):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Outputs.apply(q, k, v, None, None, decay, None, None, None, *turns, plan, False)
    return _attend(plan, q, k, v, None, None, decay, None, None, None, *turns, False)[0]


_TURNS = WeakIdKeyDictionary()


def _turns(angles: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines, (B, 2, tokens), of the queries' angles and of the keys'; made once for a tensor of angles."""
    if angles is None:
        return None, None
    B, n, m = q.shape[0], q.shape[2], k.shape[2]

    def make():
        turns = turns_of(angles, B, torch.float32).mT
        first, second = (turns[..., turns.shape[-1] - size :].contiguous() for size in (n, m))
        return first, second

    return kept(_TURNS, [angles], (B, n, m), make)


def _rest(heads, S, *tensors) -> tuple | None:
    """What a plan depends on beside q, k and v; None where there is nothing of it."""
    if S is None and all(x is None for x in tensors):
        return None
    return heads, S is not None, *(None if x is None else (x.ndim, x.data_ptr() % 16) for x in tensors)


def _scan_slots(plan, slots, keeps, end, chunks, given, reverse):
    def describe():
        c, tile = plan.constants, 64
        constants = dict(
            GIVEN=given,
            WEIGHTED=c["DECAY"] > 0 or c["SEGMENTS"],
            REVERSE=reverse,
            GROUP=min(64, power(chunks)),
            TILE=tile,
        )
        grid = over(plan.slot, tile), plan.B * plan.heads
        return "scan", triton_forward.scan, grid, (chunks, plan.slot), constants

    launches.launch(plan, ("scan", given, reverse), (slots, keeps, end), describe)


def _attend(plan, q, k, v, S, z, decay, code, shift_q, shift_k, turns_q, turns_k, stateful):
    """The launches: o, the last state if it is asked for (as slots of Sᵀ and z), the workspaces."""
    o = tokens(plan.like_q, q, plan.e)
    work = launching.empty((plan.forward.size,), q)
    final = launching.empty((plan.B, plan.heads, plan.slot), q) if stateful else None
    if S is not None:
        fill(plan, plan.forward.slots(work), 0, S, z)
    den, slots, keeps, sums, spare = plan.forward.parts(work, "outputs" in plan.ready)
    end = spare if final is None else final
    sq, sk, tq, tk, dec, runs = (either(x, q) for x in (shift_q, shift_k, turns_q, turns_k, decay, code))
    held = slots if plan.causal else end

    def states():
        grid, tile = launches.parted(plan, "states", "r", plan.heads, plan.chunks_k)
        numbers = *steps(k, v), plan.m, plan.span, plan.chunks_k, plan.r, plan.e
        return "states", triton_forward.states, grid, numbers, dict(KV=plan.Hkv, HEADS=plan.heads, **tile)

    def outputs():
        name = "walk" if plan.launches == 1 else "outputs"
        grid, tile = launches.parted(plan, name, "e", plan.H, plan.chunks_q)
        numbers = *steps(q, k, v, o), plan.n, plan.span, plan.chunks_q, plan.r, plan.e
        given = S is not None or not plan.causal
        constants = dict(H=plan.H, KV=plan.Hkv, HEADS=plan.heads, GIVEN=given, LAUNCHES=plan.launches)
        return name, triton_forward.outputs, grid, numbers, {**constants, **tile}

    if plan.launches > 1:
        launches.launch(plan, "states", (k, v, sk, tk, dec, runs, slots, keeps, sums), states)
    if plan.launches > 2:
        _scan_slots(plan, slots, keeps, end, plan.chunks_k, S is not None, False)
    launches.launch(plan, "outputs", (q, k, v, o, den, sq, sk, tq, dec, runs, held, keeps, sums, end), outputs)
    lse = flags = None
    if plan.rows is not None:
        lse, flags = plan.rows.workspace(q)
        plan.rows.outputs(q, k, v, o, (q, q, q, q, q), runs, den, lse, flags)
    return o, final, work, lse, flags


class _Outputs(torch.autograd.Function):
    """The launches joined: keeps q, k, v, o, and of the workspace den, the states of chunks and z before each block."""

    @staticmethod
    def forward(ctx, q, k, v, S, z, decay, code, shift_q, shift_k, turns_q, turns_k, plan, stateful):
        known = decay, code, shift_q, shift_k, turns_q, turns_k
        rehearse(_Outputs, ctx, plan.ready, q, k, v, S, z, *known, plan, stateful)
        o, final, *work = _attend(plan, q, k, v, S, z, *known, stateful)
        ctx.save_for_backward(q, k, v, o, *work, final, *known)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.given = plan, S is not None
        return (o, *state_in(plan, final)) if stateful else o

    @staticmethod
    def backward(ctx, do, dS=None, dz=None):
        return (_once_differentiable if torch.is_grad_enabled() else _pull_back)(ctx, do, dS, dz)


def _pull_back(ctx, do, dS, dz):
    """The gradients of the inputs of `_Outputs`."""
    q, k, v, o, work, lse, flags, final, decay, code, shift_q, shift_k, turns_q, turns_k = ctx.saved_tensors
    plan, given = ctx.plan, dS is not None or dz is not None
    do = torch.zeros_like(o) if do is None else packed(do)
    dq = tokens(plan.like_q, q, plan.d)
    # with a decay a key head has one gradient for each query head: they are summed below
    dk, dv = tokens(plan.like_k, k, plan.d), tokens(plan.like_v, v, plan.e)
    clocked = decay is not None and ctx.needs_input_grad[5]
    incoming = *do.stride(), do.data_ptr() % 16, given, clocked
    known = ("gradients", plan.merged, plan.narrow, True, incoming) in plan.ready  # the last of the launches
    den, slots, keeps, sums, spare = plan.forward.parts(work, known)
    if not plan.causal:
        slots = spare if final is None else final
    delta = back = keeps_back = after = first = room = q
    if plan.launches > 1 or given or ctx.given:
        room = launching.empty((plan.backward.size,), q)
        if given:
            fill(plan, plan.backward.slots(room), plan.chunks_q, dS, dz)
        delta, back, keeps_back, after, first = plan.backward.parts(room, known)
    gain = loss = q
    if clocked:
        gain, loss = (launching.empty((plan.parts(name), *q.shape[:3]), q) for name in ("queries", "keys"))
    sq, sk, tq, tk, dec, runs = (either(x, q) for x in (shift_q, shift_k, turns_q, turns_k, decay, code))

    def adjoints():
        grid, tile = launches.parted(plan, "adjoints", "r", plan.heads, plan.chunks_q)
        numbers = *steps(q, o, do), plan.n, plan.span, plan.chunks_q, plan.r, plan.e
        return "adjoints", triton_backward.adjoints, grid, numbers, dict(H=plan.H, HEADS=plan.heads, **tile)

    def gradients(splits, queries, DK, DV):
        def describe():
            name = "queries" if queries else "keys"
            if queries and DK:
                name = "walk_back" if plan.launches == 1 else "both"
            grid, tile = launches.parted(plan, name, splits, plan.H * plan.chunks_q * queries, 1)
            split = grid[0]
            if DK or DV:
                keys, tile = launches.parted(plan, name, splits, plan.heads, plan.chunks_k)
                grid = (split + keys[0],)
            numbers = (
                *(*steps(q, k, v, o, do, dq, dk, dv), plan.n, plan.m, plan.span),
                *(plan.chunks_q, plan.chunks_k, split, plan.B * plan.H, plan.r, plan.e),
            )
            flags = dict(GIVEN=ctx.given or not plan.causal, GIVEN_BACK=given, FIRST=ctx.given, LAUNCHES=plan.launches)
            flags["CLOCKED"] = clocked
            roles = dict(QUERIES=queries, DK=DK, DV=DV)
            constants = dict(H=plan.H, KV=plan.Hkv, HEADS=plan.heads, **flags, **roles, **tile)
            return name, triton_backward.gradients, grid, numbers, constants

        pointers = (
            *(q, k, v, o, do, den, delta, dq, dk, dv, sq, sk, tq, tk, dec, runs, slots, keeps, sums),
            *(back if plan.causal else first, keeps_back, after, first, gain, loss),
        )
        launches.launch(plan, ("gradients", queries, DK, DV, incoming), pointers, describe)

    if plan.launches > 1:
        pointers = q, o, do, den, delta, sq, tq, dec, runs, back, keeps_back, after
        launches.launch(plan, ("adjoints", incoming), pointers, adjoints)
    if plan.launches > 2:
        _scan_slots(plan, back, keeps_back, first, plan.chunks_q, given, True)
    if plan.merged:
        gradients("r", True, True, True)
    else:
        gradients("r", True, False, False)
        if plan.narrow:
            gradients("r", False, True, True)
        else:
            gradients("r", False, True, False)
            gradients("e", False, False, True)
    if plan.rows is not None:
        plan.rows.gradients(q, k, v, o, do, dq, dk, dv, (q, q, q, q, q), runs, den, lse, flags, q, key=incoming)
    ddecay = _clock_gradient(plan, gain, loss, final, dS, dz, decay, code) if clocked else None
    if plan.heads > plan.Hkv:
        dk, dv = (x.reshape(plan.B, plan.Hkv, -1, plan.m, x.shape[-1]).sum(2) for x in (dk, dv))
    dS = dz = None
    if ctx.given:
        dS, dz = state_in(plan, plan.backward.end(room))
    return dq, dk, dv, dS, dz, ddecay, *[None] * 7


def _clock_gradient(plan, gain, loss, final, dS, dz, decay, code):
    """The gradient of log_decay: what b gains and loses from each token on, and at the end what the last state gains.

    The sums nearly cancel over a whole segment, so they are in float64.
    """
    change = (gain.sum(0, dtype=torch.float64) - loss.sum(0, dtype=torch.float64)).flip(-1).cumsum(-1).flip(-1)
    for x, dx in zip(state_in(plan, final), (dS, dz), strict=True):
        if x is not None and dx is not None:
            change = change + (x.double() * dx).flatten(2).sum(-1)[..., None]
    if code is not None:
        change = change.masked_fill((code < 0)[:, None], 0)
    return (change if decay.ndim == 3 else change.sum((0, 2))).to(decay.dtype)


_once_differentiable = once_differentiable(_pull_back)
