"""Random feature attention in Triton: the same call as reference.py.

This file launches the kernels, allocates their buffers, and saves what the backward pass needs; triton_forward.py and
triton_backward.py have the kernels, launches.py the sizes. Every launch computes features from q and k; they are never
written to device memory.

    features    fq_i = 2^(q_i Wq + c − a_i),  a_i = max_r;   fk_j = 2^(k_j Wk + c − b_j),  b_j = max_r;  all in (0, 1]
    weights     top_j = b_j − curvature ‖k_j‖²/2 + key_bias_j (in base 2),  s_i = max_{j ≤ i} top_j
                w_ij = 2^(top_j − s_i) ≤ 1 for j ≤ i:   num_i = Σ_j w_ij (fq_i·fk_j) v_j,  den_i = Σ_j w_ij (fq_i·fk_j)
    forward     peaks     a, b, top and its running maximum within each block
                levels    the running maximum before each block
                states    each block alone: Sᵀ = Σ_j leave_j v_j fk_jᵀ,  z = Σ_j leave_j fk_j
                scan      over the blocks: the state before each
                outputs   P = w ∘ fq fkᵀ,  num = P v + into (fq S),  den = P 1 + into (fq·z),  o = num / den
    backward    g_i = do_i / den_i,  δ_i = do_i·o_i / den_i
                adjoints  each block alone: Rᵀ = Σ_i into_i g_i fq_iᵀ,  y = −Σ_i into_i δ_i fq_i
                scan      the same backwards: R and y after each block
                queries   dfq = D fk + into (g Sᵀ − δ zᵀ),  D = w ∘ (g vᵀ − δ 1ᵀ);   dq = (dfq ∘ fq) Wqᵀ
                dk, dv    dfk = Dᵀ fq + leave (v Rᵀ + yᵀ),  dv = (w ∘ fq fkᵀ)ᵀ g + leave (fk R)
                          dk = (dfk ∘ fk) Wkᵀ − curvature (dfk·fk) k,  d key_bias = dfk·fk
    rare rows   if den is faint, o and the gradients are computed in log space (chunked_linear/triton_rows.py)
    moving      into_i = 2^(s_before − s_i), leave_j = 2^(top_j − s_last), keep = 2^(s_before − s_last) of a block
    precision   logarithms, normaliser and sums in float32. Operands of a product: bfloat16 for bfloat16, with W as
                a sum of two (an error in ωᵀx is an error in a logarithm); tf32 for float16, bf16x6 for float32.
                Tensors in bfloat16 (v, do) are operands as they are: their factors are applied after the product, or
                to the features, which are rounded anyway. R, whose errors matter most, is stored in float32

Every program loops over the features, a few dozen at a time, so its registers do not grow with their number. ‖q‖² and
the shifts a, b, s cancel in the quotient, so no gradient flows through them. s depends on no later token. One program
writes each element, in a fixed order: runs are bit-equal. README.md has the lower bounds and the measurements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heedful.kernels import launching
from heedful.kernels.dispatch import on_device
from heedful.kernels.launching import INTERPRETED, over, packed, steps
from heedful.kernels.parallel_compile import compile_both_passes
from heedful.kernels.random_features import launches, reference, triton_backward, triton_forward
from heedful.kernels.state_slots import layout, tokens

WIDEST = 256
MOST = 256


def objections(q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    options = dict(query_weight=query_weight, key_weight=key_weight, bias=bias, curvature=curvature)
    said = reference.objections(q, k, v, **options, key_bias=key_bias, causal=causal)
    if said:
        return said
    if not (q.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {q.device}.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        said.append(f"q, k, v must share bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        said.append(f"widths go up to {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}.")
    if query_weight.shape[-1] > MOST:
        said.append(f"features go up to {MOST}, got {query_weight.shape[-1]}.")
    if 0 in (*q.shape, *v.shape):
        said.append("there is nothing to launch for an empty tensor.")
    if q.shape[0] * q.shape[1] > 65535:
        said.append(f"batch times heads goes up to 65535, got {q.shape[0] * q.shape[1]}.")
    learned = [x for x in (query_weight, key_weight, bias) if x is not None and x.requires_grad]
    if learned and torch.is_grad_enabled():
        said.append("the gradient of the projection is not computed here.")
    return said


def random_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    bias: Tensor | None = None,
    curvature: float = 0.0,
    key_bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention by positive features; the same call as `reference.random_features`."""
    options = dict(query_weight=query_weight, key_weight=key_weight, bias=bias, curvature=curvature)
    if said := objections(q, k, v, **options, key_bias=key_bias, causal=causal):
        raise ValueError(" ".join(said))
    with on_device(q):
        return _Attention.apply(q, k, v, key_bias, query_weight, key_weight, bias, float(curvature), causal)


class _Attention(torch.autograd.Function):
    """Both passes; saves q, k, v, o, the state before each block and six numbers per token and head."""

    @staticmethod
    def forward(ctx, q, k, v, key_bias, query_weight, key_weight, bias, curvature, causal):
        q, k, v = packed(q), packed(k), packed(v)
        if key_bias is not None:
            key_bias = key_bias.float().contiguous()
        setup = launches.setup_for(q, k, v, key_bias, query_weight, curvature, causal)
        given = q, k, v, key_bias, query_weight, key_weight, bias, curvature, causal
        compile_both_passes(_Attention, ctx, setup.ready, *given)
        B, H, KV, n, m, d, e = setup.B, setup.H, setup.KV, setup.n, setup.m, setup.d, setup.e
        Wq = launches.padded(query_weight, setup)
        Wk = Wq if key_weight is query_weight else launches.padded(key_weight, setup)
        c = launches.biases(bias, query_weight, setup)
        o = tokens(layout(q, H), q, e)
        peaks_q, den = launching.empty((2, B, H, n), q)
        peaks, tops, climbs = launching.empty((3, B, KV, m), q)
        maxima, levels = launching.empty((B, KV, setup.blocks_k), q), launching.empty((B, KV, setup.blocks_k + 1), q)
        pointers: tuple[Tensor, ...] = q, q, Wq, c, peaks_q, q, q, q
        numbers: tuple = *steps(q), setup.half, n, d
        setup.launch(
            "peaks", triton_forward.peaks, setup.blocks_q, H, pointers, numbers, HEADS=H, KEYS=False, BIASED=False
        )
        pointers = k, q if key_bias is None else key_bias, Wk, c, peaks, tops, climbs, maxima
        numbers = *steps(k), setup.half, m, d
        setup.launch(
            "peaks",
            triton_forward.peaks,
            setup.blocks_k,
            KV,
            pointers,
            numbers,
            HEADS=KV,
            KEYS=True,
            BIASED=setup.biased,
        )
        setup.find_levels(maxima, levels)
        span = setup.span("states", m, KV)
        chunks = over(m, span)
        slots, sums = setup.room(KV, chunks, q, setup.operand)
        pointers, numbers = (k, v, Wk, c, peaks, tops, levels, slots, sums), (*steps(k, v), m, span, chunks, d, e)
        setup.launch("states", triton_forward.states, chunks, KV, pointers, numbers)
        slots, sums = setup.join(KV, slots, sums, levels, False)
        pointers = q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, levels, slots, sums
        setup.launch("outputs", triton_forward.outputs, setup.blocks_q, H, pointers, (*steps(q, k, v, o), n, d, e))
        lse, flags = setup.rows.workspace(q)
        setup.rows.outputs(q, k, v, o, (Wq, Wk, c, peaks, tops), q, den, lse, flags)
        known = peaks_q, den, peaks, tops, climbs, levels, slots, sums, lse, flags
        ctx.save_for_backward(q, k, v, o, Wq, Wk, c, *known)
        ctx.setup = setup
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, Wq, Wk, c, peaks_q, den, peaks, tops, climbs, levels, slots, sums, lse, flags = ctx.saved_tensors
        setup, do = ctx.setup, packed(do)
        B, H, KV, n, m, d, e = setup.B, setup.H, setup.KV, setup.n, setup.m, setup.d, setup.e
        key = do.dtype, do.stride(), do.data_ptr() % 16 == 0
        kind = q.dtype if H == KV else torch.float32  # gradients of query heads that share a key head are summed below
        dq = tokens(layout(q, H), q, d)
        dk, dv = tokens(layout(k, H), k, d, kind), tokens(layout(v, H), v, e, kind)
        delta = launching.empty((B, H, n), q)
        shares = launching.empty((B, H, m), q) if setup.biased else delta
        span = setup.span("adjoints", n, H)
        chunks = over(n, span)
        back, after = setup.room(H, chunks, q, torch.float32)
        pointers: tuple[Tensor, ...] = q, o, do, Wq, c, peaks_q, den, delta, climbs, levels, back, after
        setup.launch(
            "adjoints", triton_backward.adjoints, chunks, H, pointers, (*steps(q, o, do), n, span, chunks, d, e), key
        )
        back, after = setup.join(H, back, after, levels, True)
        pointers = q, k, v, do, dq, Wq, Wk, c, peaks_q, den, delta, peaks, tops, climbs, levels, slots, sums
        setup.launch(
            "queries", triton_backward.queries, setup.blocks_q, H, pointers, (*steps(q, k, v, do, dq), n, d, e), key
        )
        pointers = q, k, v, do, dk, dv, Wq, Wk, c, peaks_q, den, delta, peaks, tops, climbs, levels, back, after, shares
        numbers = *steps(q, k, v, do, dk, dv), setup.half, m, d, e
        for name in ("dk", "dv"):
            own = dict(BIASED=setup.biased, DK=name == "dk", DV=name == "dv")
            setup.launch(name, triton_backward.keys, setup.blocks_k, H, pointers, numbers, key, **own)
        made = Wq, Wk, c, peaks, tops
        setup.rows.gradients(q, k, v, o, do, dq, dk, dv, made, q, den, lse, flags, shares, setup.half, key)
        if H > KV:
            dk, dv = (x.unflatten(1, (KV, -1)).sum(2).to(q.dtype) for x in (dk, dv))
        dbias = None
        if setup.biased:
            dbias = shares if H == KV else shares.unflatten(1, (KV, -1)).sum(2)
        return dq, dk, dv, dbias, None, None, None, None, None
