"""The Triton programs of gated linear attention; triton.py launches them, three forward and four or five backward.

    tokens      in chunks, one program each, which walks its chunk in blocks with the state in registers
    exponents   sums of gates are products with matrices of zeros and ones, one for each level s = 1, 2, 4, …:
                  X_t = Σ g_u,  u of the s tokens around t,  u ≤ t in a later half and u > t in an earlier one
                and for the state  into_t = exp Σ_{u≤t} g_u,  leave_t = exp Σ_{u>t} g_u,  keep = exp Σ g_u
    forward     states    each chunk by itself: S = Σ_j (leave_j ∘ φk_j) v_jᵀ, z = Σ_j leave_j ∘ φk_j
                scan      x_c ← keep_{c−1} ∘ x_{c−1} + x_c over the chunks: the state before each chunk
                outputs   each chunk from the state before it:  P_ij = (φq_i ∘ e^{X_i})·(φk_j ∘ e^{X_j}), X of the level
                          num = P v + (into ∘ φq) S,  den = Σ_j P_ij + (into ∘ φq)·z,  o = num / den
    backward    the normaliser is one more value column: ψ_i = φq_i / den_i, δ_i = do_i·o_i, D_ij = do_i·v_j − δ_i
                adjoints  each chunk by itself: δ, R = Σ_i (into_i ∘ ψ_i) do_iᵀ, y = −Σ_i δ_i into_i ∘ ψ_i
                scan      the same backwards: R and y after each chunk
                queries   forwards:   dφq_i = (Σ_j D_ij e^{X_i} ∘ e^{X_j} ∘ φk_j + into_i ∘ (S do_i − δ_i z)) / den_i
                keys      backwards:  dφk_j = Σ_i D_ij e^{X_i} ∘ e^{X_j} ∘ ψ_i + leave_j ∘ (R v_j + y)
                                      dv = Pᵀ do with ψ for φq, + (leave ∘ φk) R
                gates     dg_t = Σ_{i≥t} (φq_i ∘ dφq_i − φk_i ∘ dφk_i) inside the chunk, of pairs j < i alone,
                          + Σ_e S ∘ R + z ∘ y after it
    precision   states, normaliser and all sums in float32. Operands of a product: bfloat16 for bfloat16, tf32 for
                float16, six products of bfloat16 for float32; gates in two parts of bfloat16, or in three

Tiles of q, k and gates are channels × tokens: sums of gates come out where the next product wants them, the matrices of
ones lie in shared memory all along, and a state, which is channels × values, goes to the tensor cores from registers.
No exponent is a difference, so none is positive. A shut gate (−∞) counts as 2⁻¹⁵⁰, which is 0 in float32. Each element
is written by one program in a fixed order: runs are bit-equal. README.md has the derivation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LOG2E, exp2, link, reciprocal
from heedful.kernels.launching import SIXFOLD
from heedful.kernels.tiles import features, pulled, read, write

EXACTLY = tl.constexpr(SIXFOLD)
SHUT = tl.constexpr(-150.0)  # 2 to this power is 0 in float32, and zeros times it are zeros


if triton.knobs.runtime.interpret:

    @triton.jit
    def _rounded(x, OPERAND: tl.constexpr):
        return x
else:

    @triton.jit
    def _rounded(x, OPERAND: tl.constexpr):
        """x as an operand of a product has it, in float32; two at a time, where one alone takes as long as eight."""
        if tl.bfloat16 == OPERAND:
            return tl.inline_asm_elementwise(
                "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
                "=f,=f,f,f",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        else:
            return x


@triton.jit
def _place(chunks, span, H: tl.constexpr, PARTS: tl.constexpr):
    """Of a program: which part of the axis that is split, which chunk, row, batch entry and head; its first token."""
    pid = tl.program_id(0)
    part = pid % PARTS
    chunk = (pid // PARTS) % chunks
    row = (pid // PARTS // chunks).to(tl.int64)
    return part, chunk, row, row // H, row % H, chunk * span


@triton.jit
def _tokens(code, start, n, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr):
    """Of the block at `start`: which tokens are real, their runs, and where a state enters, leaves, stays (1 or 0)."""
    t = start + tl.arange(0, BLOCK)
    real = t < n
    run = tl.zeros([BLOCK], tl.int32)
    enters = tl.full([BLOCK], 1.0, tl.float32)
    leaves = enters
    stays = 1.0
    if SEGMENTS:
        c = tl.load(code + t, mask=real, other=-1)
        run = tl.maximum(c, -1 - c)
        before = tl.load(code + start - 1, mask=start > 0, other=0)
        before = tl.maximum(before, -1 - before)
        last = tl.load(code + tl.minimum(start + BLOCK, n) - 1)
        last = tl.maximum(last, -1 - last)
        real = real & (c >= 0)
        enters = tl.where(run == before, 1.0, 0.0)
        leaves = tl.where(run == last, 1.0, 0.0)
        stays = tl.where(before == last, 1.0, 0.0)
    return real, run, enters, leaves, stays


@triton.jit
def _gates(pointer, t, stride, column, width, real, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """A tile of log-gates to base 2, channels × tokens; nothing fades outside and at padding."""
    x = tl.trans(read(pointer, t, stride, column, width, real, EVEN_N, EVEN_C)).to(tl.float32) * LOG2E
    return tl.where(x < SHUT, SHUT, x)


@triton.jit
def _sums(x, which, OPERAND: tl.constexpr):
    """Sums of columns of x, chosen by a matrix of zeros and ones."""
    if tl.bfloat16 == OPERAND:
        chosen = tl.where(which, 1.0, 0.0).to(tl.bfloat16)
        high = _rounded(x, OPERAND)
        return tl.dot((x - high).to(tl.bfloat16), chosen, tl.dot(high.to(tl.bfloat16), chosen))
    else:
        return tl.dot(x, tl.where(which, 1.0, 0.0), input_precision=EXACTLY)


@triton.jit
def _places(t, R: tl.constexpr, OPERAND: tl.constexpr):
    """Places of tokens for `_sums`: if constant, the matrices stay in shared memory, where wide products read them."""
    if tl.bfloat16 == OPERAND and R >= 64:
        return tl.arange(0, t.shape[0])
    else:
        return t


@triton.jit
def _into(x, b, OPERAND: tl.constexpr):
    """What is left at each token of what was there before the block."""
    return exp2(_sums(x, b[:, None] <= b[None, :], OPERAND))


@triton.jit
def _leave(x, b, OPERAND: tl.constexpr):
    """What is left after the block of what each token adds."""
    return exp2(_sums(x, b[:, None] > b[None, :], OPERAND))


@triton.jit
def _level(x, b, k: tl.constexpr, OPERAND: tl.constexpr):
    """Factors between halves of 2^k tokens: from the middle to a token of the later, from one of the earlier to it."""
    u, i = b[:, None], b[None, :]
    later = ((i >> k) & 1) == 1
    return exp2(_sums(x, (((i ^ u) >> k) == 0) & ((u <= i) == later), OPERAND))


@triton.jit
def _phi(pointer, t, stride, column, width, real, FEATURE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr,
         CLEAR: tl.constexpr):  # fmt: skip
    """A tile of features, channels × tokens."""
    return tl.trans(
        features(pointer, pointer, pointer, t, 0, stride, column, width, real, FEATURE, False, EVEN_N, EVEN_C, CLEAR)
    )


@triton.jit
def _psi(q, den, t, stride, column, width, real, FEATURE: tl.constexpr, NORMALISE: tl.constexpr,
         EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):  # fmt: skip
    """A tile of ψ = φq / den, channels × tokens."""
    psi = _phi(q, t, stride, column, width, real, FEATURE, EVEN_N, EVEN_C, 0)
    if NORMALISE:
        psi = psi * reciprocal(tl.load(den + t, mask=real, other=0.0))[None, :]
    return psi


@triton.jit
def _pairs(t, ADJOINT: tl.constexpr):
    """Of [query, key], or [key, query] with ADJOINT: i xor j, whose highest bit is the level, where i > j; −1 on the
    diagonal, 0 elsewhere. From t, not from a constant, so that no level's mask is held through the walk."""
    a, b = t[:, None], t[None, :]
    past = a < b if ADJOINT else a > b
    return tl.where(a == b, -1, tl.where(past, a ^ b, 0))


@triton.jit
def _by_state(S, x, acc, EXACT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + S x; in two parts of S where it has to be EXACT."""
    high = _rounded(S, OPERAND)
    acc = tl.dot(high.to(OPERAND), x, acc, input_precision=PRECISION)
    if EXACT and tl.bfloat16 == OPERAND:
        acc = tl.dot((S - high).to(OPERAND), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _alike(a, run, SEGMENTS: tl.constexpr):
    """a inside segments, 0 between them."""
    if SEGMENTS:
        return tl.where(run[:, None] == run[None, :], a, 0.0)
    else:
        return a


@triton.jit
def _diagonal(d, pairs):
    return tl.sum(tl.where(pairs == -1, d, 0.0), 0)


@triton.jit
def _moved(f, by, ends, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr):
    """Features times what is left of them where they enter the block or after it, rounded as operands are."""
    f = f * by
    if SEGMENTS:
        f = f * ends[None, :]
    return _rounded(f, OPERAND)


@triton.jit
def _carried(x, keep, stays, SEGMENTS: tl.constexpr):
    if SEGMENTS:
        keep = keep * stays
    return x * keep


@triton.jit
def _held(slot, cr, ce, r, e, rows, NORMALISE: tl.constexpr):
    """S and z of a slot, of its first `rows` features."""
    S = tl.load(slot + ce[None, :] * r + cr[:, None], mask=(ce < e)[None, :] & (cr < rows)[:, None], other=0.0)
    z = tl.zeros([cr.shape[0]], tl.float32)
    if NORMALISE:
        z = tl.load(slot + r * e + cr, mask=cr < rows, other=0.0)
    return S, z


@triton.jit
def _hold(slot, cr, ce, r, e, S, z, NORMALISE: tl.constexpr):
    tl.store(slot + ce[None, :] * r + cr[:, None], S, mask=(ce < e)[None, :] & (cr < r)[:, None])
    if NORMALISE:
        tl.store(slot + r * e + cr, z, mask=cr < r)


@triton.jit
def states(
    k, v, g, code, slots, keeps,
    k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    n, span, chunks, r, e,
    H: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's own Sᵀ and z, in slot c + 1 of its head, and what it keeps; splits r."""
    part, chunk, row, batch, head, base = _place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    S = tl.zeros([R, E], tl.float32)
    z = tl.zeros([R], tl.float32)
    kept = tl.full([R], 1.0, tl.float32)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, _run, _enters, leaves, stays = _tokens(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = _gates(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = _places(t, R, OPERAND)
        fk = _phi(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        go = _moved(fk, _leave(x, b, OPERAND), leaves, SEGMENTS, OPERAND)
        keep = exp2(tl.sum(x, 1))
        if NORMALISE:
            z = _carried(z, keep, stays, SEGMENTS) + tl.sum(go, 1)
        kept = _carried(kept, keep, stays, SEGMENTS)
        S = _carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(go.to(OPERAND), vb, S, input_precision=PRECISION)
    slot = slots + (row * (chunks + 1) + chunk + 1) * (r * e + r if NORMALISE else r * e)
    _hold(slot, cr, ce, r, e, S, z, NORMALISE)
    tl.store(keeps + (row * chunks + chunk) * r + cr, kept, mask=cr < r)


@triton.jit
def scan(
    slots, keeps, end,
    chunks, width, r,
    GIVEN: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x_c ← keep_{c−1} ∘ x_{c−1} + x_c over the slots of a head, or x_c ← keep_c ∘ x_{c+1} + x_c backwards.

    The slot it starts from counts as zero unless GIVEN; what it ends with is also left in `end`. A slot is rows of r
    numbers, so that its columns have the gates of column mod r.
    """
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    slots += row * (chunks + 1) * width
    keeps += row * chunks * r
    start = chunks if REVERSE else 0
    x = tl.load(slots + start * width + column, mask=column < width * GIVEN, other=0.0)
    for at in range(0, chunks, GROUP):
        c = at + tl.arange(0, GROUP)
        c = chunks - 1 - c if REVERSE else c
        mask = ((c >= 0) & (c < chunks))[:, None] & (column < width)[None, :]
        here = slots + (c if REVERSE else c + 1)[:, None] * width + column[None, :]
        own = tl.load(here, mask=mask, other=0.0)
        keep = tl.load(keeps + c[:, None] * r + (column % r)[None, :], mask=mask, other=1.0)
        kept, own = tl.associative_scan((keep, own), 0, link)
        own += kept * x[None, :]
        tl.store(here, own, mask=mask)
        x = tl.sum(tl.where((tl.arange(0, GROUP) == GROUP - 1)[:, None], own, 0.0), 0)
    tl.store(end + row * width + column, x, mask=column < width)


@triton.jit
def outputs(
    q, k, v, g, o, den, code, slots,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, o_b, o_h, o_t,
    n, span, chunks, r, e,
    H: tl.constexpr, GIVEN: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's outputs from the state before it; splits e."""
    part, chunk, row, batch, head, base = _place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    o += batch * o_b + head * o_h + skip * o_t
    den += row * n + base
    code += batch * n
    cr, ce = tl.arange(0, R), part * E + tl.arange(0, E)
    slots += (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    S, z = _held(slots, cr, ce, r, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, run, enters, leaves, stays = _tokens(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = _gates(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = _places(t, R, OPERAND)
        fq = _phi(q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
        fk = _phi(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        come = fq * _into(x, b, OPERAND)
        if SEGMENTS:
            come = come * enters[None, :]
        acc = tl.dot(tl.trans(come.to(OPERAND)), S.to(OPERAND), input_precision=PRECISION)
        keep = exp2(tl.sum(x, 1))
        if NORMALISE:
            below = tl.sum(come * z[:, None], 0)
        pairs = _pairs(t, False)
        a = tl.where(pairs == -1, tl.sum(fq * fk, 0)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            f = _level(x, b, level, OPERAND)
            w = tl.dot(tl.trans((fq * f).to(OPERAND)), (fk * f).to(OPERAND), input_precision=PRECISION)
            a = tl.where((pairs >> level) == 1, w, a)
        a = _alike(a, run, SEGMENTS)
        acc = tl.dot(a.to(OPERAND), vb, acc, input_precision=PRECISION)
        go = _moved(fk, _leave(x, b, OPERAND), leaves, SEGMENTS, OPERAND)
        if SEGMENTS:
            acc = tl.where(real[:, None], acc, 0.0)
        S = _carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(go.to(OPERAND), vb, S, input_precision=PRECISION)
        if NORMALISE:
            z = _carried(z, keep, stays, SEGMENTS) + tl.sum(go, 1)
            below += tl.sum(a, 1)
            if SEGMENTS:
                below = tl.where(real, below, 0.0)
            acc = acc * reciprocal(below)[:, None]
            if part == 0:
                tl.store(den + t, below, mask=base + t < n)
        write(o, t, o_t, ce, e, acc, n - base, EVEN_N, EVEN_C)


@triton.jit
def adjoints(
    q, g, o, do, den, delta, code, slots,
    q_b, q_h, q_t, g_b, g_h, g_t, o_b, o_h, o_t, do_b, do_h, do_t,
    n, span, chunks, r, e,
    H: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's own Rᵀ and y, in slot c of its head, and δ; splits r."""
    part, chunk, row, batch, head, base = _place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    g += batch * g_b + head * g_h + skip * g_t
    o += batch * o_b + head * o_h + skip * o_t
    do += batch * do_b + head * do_h + skip * do_t
    den += row * n + base
    delta += row * n + base
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    S = tl.zeros([R, E], tl.float32)
    y = tl.zeros([R], tl.float32)
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, _run, enters, _leaves, stays = _tokens(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = _gates(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = _places(t, R, OPERAND)
        psi = _psi(q, den, t, q_t, cr, r, real, FEATURE, NORMALISE, EVEN_N, EVEN_C)
        dob = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C)
        come = _moved(psi, _into(x, b, OPERAND), enters, SEGMENTS, OPERAND)
        keep = exp2(tl.sum(x, 1))
        if NORMALISE:
            ob = read(o, t, o_t, ce, e, real, EVEN_N, EVEN_C)
            d = tl.sum(dob.to(tl.float32) * ob.to(tl.float32), 1)
            if part == 0:
                tl.store(delta + t, d, mask=base + t < n)
            y = _carried(y, keep, stays, SEGMENTS) - tl.sum(come * d[None, :], 1)
        S = _carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(come.to(OPERAND), dob.to(OPERAND), S, input_precision=PRECISION)
    slot = slots + (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    _hold(slot, cr, ce, r, e, S, y, NORMALISE)


@triton.jit
def queries(
    q, k, v, g, do, den, delta, dq, gain, code, slots,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    n, span, chunks, r, e,
    H: tl.constexpr, GIVEN: tl.constexpr, GATED: tl.constexpr, FEATURE: tl.constexpr, NORMALISE: tl.constexpr,
    SEGMENTS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's dq from the state before it, and φq ∘ dφq if the gates want a gradient; splits r."""
    part, chunk, row, batch, head, base = _place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    do += batch * do_b + head * do_h + skip * do_t
    dq += batch * dq_b + head * dq_h + skip * dq_t
    gain += (row * n + base) * r
    den += row * n + base
    delta += row * n + base
    code += batch * n
    cr, ce = part * R + tl.arange(0, R), tl.arange(0, E)
    slots += (row * (chunks + 1) + chunk) * (r * e + r if NORMALISE else r * e)
    S, z = _held(slots, cr, ce, r, e, tl.where(chunk + GIVEN > 0, r, 0), NORMALISE)
    for at in range(0, tl.minimum(span, n - base), BLOCK):
        real, run, enters, leaves, stays = _tokens(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = _gates(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = _places(t, R, OPERAND)
        fk = _phi(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        dob = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        keep = exp2(tl.sum(x, 1))
        into = _into(x, b, OPERAND)
        if SEGMENTS:
            into = into * enters[None, :]
        grad = tl.zeros([R, BLOCK], tl.float32)
        d = tl.zeros([BLOCK, BLOCK], tl.float32)
        if NORMALISE:
            minus = -tl.load(delta + t, mask=real, other=0.0)
            below = reciprocal(tl.load(den + t, mask=real, other=0.0))[None, :]
            grad += z[:, None] * minus[None, :]
            d += minus[None, :]
        grad = _by_state(S, tl.trans(dob), grad, GATED, OPERAND, PRECISION)
        if GATED:
            psi = _phi(q, t, q_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 0)
            if NORMALISE:
                psi = psi * below
            turn = grad * _rounded(psi * into, OPERAND)
        grad = grad * into
        d = tl.dot(vb, tl.trans(dob), d, input_precision=PRECISION)
        d = _alike(d, run, SEGMENTS)
        pairs = _pairs(t, True)
        for level in tl.static_range(LEVELS):
            f = _level(x, b, level, OPERAND)
            here = tl.where((pairs >> level) == 1, d, 0.0).to(OPERAND)
            got = tl.dot((fk * f).to(OPERAND), here, input_precision=PRECISION)
            grad += f * got
            if GATED:
                turn += got * _rounded(psi * f, OPERAND)
        grad += _diagonal(d, pairs)[None, :] * fk
        go = _moved(fk, _leave(x, b, OPERAND), leaves, SEGMENTS, OPERAND)
        if SEGMENTS:
            grad = tl.where(real[None, :], grad, 0.0)
        S = _carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(go.to(OPERAND), vb, S, input_precision=PRECISION)
        if NORMALISE:
            grad = grad * below
            z = _carried(z, keep, stays, SEGMENTS) + tl.sum(go, 1)
        if GATED:
            write(gain, t, r, cr, r, tl.trans(turn), n - base, EVEN_N, EVEN_C)
        grad = pulled(tl.trans(grad), q, q, q, t, 0, q_t, cr, r, real, FEATURE, False, EVEN_N, EVEN_C)
        write(dq, t, dq_t, cr, r, grad, n - base, EVEN_N, EVEN_C)


@triton.jit
def keys(
    q, k, v, g, do, den, delta, dk, dv, dg, gain, code, slots, back,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h,
    dv_t, dg_b, dg_h, dg_t,
    n, span, chunks, r, e,
    H: tl.constexpr, GIVEN: tl.constexpr, GATED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, SEGMENTS: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One chunk's dk, dg and dv from the adjoint after it; where that is too wide, dk, dg alone split r, dv alone e."""
    part, chunk, row, batch, head, base = _place(chunks, span, H, PARTS)
    skip = base.to(tl.int64)
    q += batch * q_b + head * q_h + skip * q_t
    k += batch * k_b + head * k_h + skip * k_t
    v += batch * v_b + head * v_h + skip * v_t
    g += batch * g_b + head * g_h + skip * g_t
    do += batch * do_b + head * do_h + skip * do_t
    dk += batch * dk_b + head * dk_h + skip * dk_t
    dv += batch * dv_b + head * dv_h + skip * dv_t
    dg += batch * dg_b + head * dg_h + skip * dg_t
    gain += (row * n + base) * r
    den += row * n + base
    delta += row * n + base
    code += batch * n
    cr = (0 if DV else part * R) + tl.arange(0, R)
    ce = (0 if DK else part * E) + tl.arange(0, E)
    width = r * e + r if NORMALISE else r * e
    after = (row * (chunks + 1) + chunk + 1) * width
    S, y = _held(back + after, cr, ce, r, e, tl.where(chunk + 1 - GIVEN < chunks, r, 0), NORMALISE)
    late = tl.zeros([R], tl.float32)  # what the gates of a token and all before it get from pairs that end after it
    if GATED and DK:
        state, sum_before = _held(slots + after, cr, ce, r, e, r, NORMALISE)
        late = tl.sum(state * S, 1) + sum_before * y
    blocks = tl.cdiv(tl.minimum(span, n - base), BLOCK)
    for step in range(0, blocks):
        at = (blocks - 1 - step) * BLOCK
        real, run, enters, leaves, stays = _tokens(code, base + at, n, BLOCK, SEGMENTS)
        t = at + tl.arange(0, BLOCK)
        x = _gates(g, t, g_t, cr, r, real, EVEN_N, EVEN_C)
        b = _places(t, R, OPERAND)
        fk = _phi(k, t, k_t, cr, r, real, FEATURE, EVEN_N, EVEN_C, 2)
        psi = _psi(q, den, t, q_t, cr, r, real, FEATURE, NORMALISE, EVEN_N, EVEN_C)
        vb = read(v, t, v_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        dob = read(do, t, do_t, ce, e, real, EVEN_N, EVEN_C).to(OPERAND)
        pairs = _pairs(t, False)
        turned = _pairs(t, True)
        leave = _leave(x, b, OPERAND)
        if SEGMENTS:
            leave = leave * leaves[None, :]
        go = _rounded(fk * leave, OPERAND)
        if DV:
            gv = tl.dot(tl.trans(go.to(OPERAND)), S.to(OPERAND), input_precision=PRECISION)
            a = tl.where(turned == -1, tl.sum(psi * fk, 0)[:, None], 0.0)
        if NORMALISE:
            minus = -tl.load(delta + t, mask=real, other=0.0)
        if DK:
            gk = tl.zeros([R, BLOCK], tl.float32)
            d = tl.zeros([BLOCK, BLOCK], tl.float32)
            if NORMALISE:
                gk += y[:, None]
                d += minus[:, None]
            gk = _by_state(S, tl.trans(vb), gk, GATED, OPERAND, PRECISION)
            if GATED:
                turn = tl.trans(read(gain, t, r, cr, r, base + t < n, EVEN_N, EVEN_C)) - gk * go
            gk = gk * leave
            d = tl.dot(dob, tl.trans(vb), d, input_precision=PRECISION)
            d = _alike(d, run, SEGMENTS)
        for level in tl.static_range(LEVELS):
            f = _level(x, b, level, OPERAND)
            later, earlier = (psi * f).to(OPERAND), _rounded(fk * f, OPERAND)
            if DV:
                w = tl.dot(tl.trans(earlier.to(OPERAND)), later, input_precision=PRECISION)
                a = tl.where((turned >> level) == 1, w, a)
            if DK:
                here = tl.where((pairs >> level) == 1, d, 0.0).to(OPERAND)
                got = tl.dot(later, here, input_precision=PRECISION)
                gk += f * got
                if GATED:
                    turn -= got * earlier
        if DV:
            gv = tl.dot(_alike(a, run, SEGMENTS).to(OPERAND), dob, gv, input_precision=PRECISION)
            if SEGMENTS:
                gv = tl.where(real[:, None], gv, 0.0)
            write(dv, t, dv_t, ce, e, gv, n - base, EVEN_N, EVEN_C)
        come = _moved(psi, _into(x, b, OPERAND), enters, SEGMENTS, OPERAND)
        keep = exp2(tl.sum(x, 1))
        S = _carried(S, keep[:, None], stays, SEGMENTS)
        S = tl.dot(come.to(OPERAND), dob, S, input_precision=PRECISION)
        if DK:
            if NORMALISE:
                y = _carried(y, keep, stays, SEGMENTS) + tl.sum(come * minus[None, :], 1)
            if GATED:
                change = _sums(turn, b[:, None] >= b[None, :], OPERAND) + late[:, None]
                if SEGMENTS:
                    change = tl.where(real[None, :], change, 0.0)
                write(dg, t, dg_t, cr, r, tl.trans(change), n - base, EVEN_N, EVEN_C)
                late += tl.sum(turn, 1)
            gk += _diagonal(d, pairs)[None, :] * psi
            if SEGMENTS:
                gk = tl.where(real[None, :], gk, 0.0)
            grad = pulled(tl.trans(gk), k, k, k, t, 0, k_t, cr, r, real, FEATURE, False, EVEN_N, EVEN_C)
            write(dk, t, dk_t, cr, r, grad, n - base, EVEN_N, EVEN_C)
