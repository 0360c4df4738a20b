"""Compute rows with a faint normaliser again, in log space: the last launches of both kernels with exp features.

    rows        o_i = Σ_j w_ij v_j,  w_ij = Σ_r 2^(a_ir + b_jr − lse_i),  a loop over keys with a running maximum
    gradients   D_ij = do_i·v_j − do_i·o_i:  da_ir = Σ_j D_ij 2^(a_ir + b_jr − lse_i),  db_jr the same over i,
                dv_j = Σ_i w_ij do_i

The other kernels shift all features by the largest key so far. A row that needs features far below that shift has a
normaliser near zero, or zero. The kernels here compute the output of such rows. The other kernels, which divide by a
normaliser only if it is not faint, leave these rows out of every gradient, and the kernels here add their share. The
logarithms a and b are given (`chunked_linear`), or computed from q, k and W (`random_features`, MADE). A program
without such a row ends at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from heedful.kernels import launching
from heedful.kernels.arithmetic import FAINT, LN2, LOG2E, exp2
from heedful.kernels.launching import over
from heedful.kernels.random_features.triton_features import logs_of

ROWS = 64
"""Queries, or keys, per program."""
KEYS = 16
"""Keys per step of a loop."""


@triton.jit
def _rare(den, code, i, SEGMENTS: tl.constexpr):
    """True if row i is computed here: its normaliser is faint or NaN, and it is not padding."""
    rare = tl.load(den + i) < FAINT
    if SEGMENTS:
        rare = rare & (tl.load(code + i) >= 0)
    return rare


@triton.jit
def _query_logs(q, W, bias, at, r, d, MADE: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
                R: tl.constexpr):  # fmt: skip
    """The logarithms of one query's features from `at` on, (R,), −∞ beyond the last; and W, (D, R) in float32."""
    cr = at + tl.arange(0, R)
    W32 = tl.zeros([D, R], tl.float32)
    if MADE:
        cd = tl.arange(0, D)
        x = tl.load(q + cd, mask=cd < d, other=0.0).to(tl.float32)
        here = W + cd[:, None] * M + cr[None, :]
        W32 = tl.load(here).to(tl.float32)
        if SPLIT:
            W32 += tl.load(here + D * M).to(tl.float32)
        logs = tl.sum(x[:, None] * W32, 0) + tl.load(bias + cr)
    else:
        logs = tl.load(q + cr, mask=cr < r, other=float("-inf")).to(tl.float32)
    return logs, W32


@triton.jit
def _key_logs(
    k, W, bias, peaks, tops, t, real, k_t, at, r, d,
    MADE: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The logarithms of the features from `at` on of the keys t, (KEYS, R)."""
    here = k + t.to(tl.int64)[:, None] * k_t
    if MADE:
        cd = tl.arange(0, D)
        y = tl.load(here + cd[None, :], mask=real[:, None] & (cd < d)[None, :], other=0.0).to(OPERAND)
        logs, _high, _low = logs_of(y, W, bias, at, SPLIT, PRECISION, D, M, R)
        length = tl.load(tops + t, mask=real, other=0.0) - tl.load(peaks + t, mask=real, other=0.0)
        return logs + length[:, None]
    else:
        cr = at + tl.arange(0, R)
        return tl.load(here + cr[None, :], mask=real[:, None] & (cr < r)[None, :], other=0.0).to(tl.float32)


@triton.jit
def outputs(
    q, k, v, o, Wq, Wk, bias, peaks, tops, code, den, lse, flags,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    n, m, d, r, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, MADE: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """o and lse of the rare rows of a block of queries, and a flag that there is one."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    base = block * ROWS
    q += batch * q_b + head * q_h + base.to(tl.int64) * q_t
    o += batch * o_b + head * o_h + base.to(tl.int64) * o_t
    k += batch * k_b + kv * k_h
    v += batch * v_b + kv * v_h
    Wq += (head % WEIGHTS) * (2 * D * M)
    Wk += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    peaks += (batch * KV + kv) * m
    tops += (batch * KV + kv) * m
    code += batch * n
    den += row * n + base
    lse += row * n + base
    UNIT: tl.constexpr = 1.0 if MADE else LOG2E
    ce = tl.arange(0, E)
    t = tl.arange(0, ROWS)
    left = tl.minimum(n - base, ROWS)
    faint = tl.load(den + t, mask=t < left, other=1.0) < FAINT
    if SEGMENTS:
        faint = faint & (tl.load(code + base + t, mask=t < left, other=-1) >= 0)
    some = tl.max(tl.where(faint, 1.0, 0.0), 0)
    tl.store(flags + row * tl.num_programs(0) + block, some)
    if some > 0:
        for i in range(0, left):
            if _rare(den, code + base, i, SEGMENTS):
                last = base + i + 1 if CAUSAL else m
                top = -1e30
                total = 0.0
                above = tl.zeros([E], tl.float32)
                for j in range(0, last, KEYS):
                    tj = j + tl.arange(0, KEYS)
                    seen = tj < last
                    if SEGMENTS:
                        seen = seen & (tl.load(code + tj, mask=seen, other=-1) == tl.load(code + base + i))
                    u = tl.load(
                        v + tj.to(tl.int64)[:, None] * v_t + ce[None, :],
                        mask=seen[:, None] & (ce < e)[None, :],
                        other=0.0,
                    ).to(tl.float32)
                    for at in range(0, M, R):
                        a, _W = _query_logs(q + i * q_t, Wq, bias, at, r, d, MADE, SPLIT, D, M, R)
                        b = _key_logs(
                            k, Wk, bias, peaks, tops, tj, seen, k_t, at, r, d, MADE, SPLIT, OPERAND, PRECISION, D, M, R
                        )
                        logs = tl.where(seen[:, None], a[None, :] + b, float("-inf"))
                        most = tl.maximum(top, tl.max(tl.max(logs, 1), 0))
                        w = tl.sum(exp2((logs - most) * UNIT), 1)
                        fade = exp2((top - most) * UNIT)
                        total = total * fade + tl.sum(w, 0)
                        above = above * fade + tl.sum(w[:, None] * u, 0)
                        top = most
                tl.store(o + i * o_t + ce, above / total, mask=ce < e)
                tl.store(lse + i, top + tl.log2(total) / UNIT)
                tl.store(den + i, 0.0)  # so that the other backward kernels leave the row out


@triton.jit
def queries(
    q, k, v, o, do, dq, Wq, Wk, bias, peaks, tops, code, den, lse, flags,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    n, m, d, r, e,
    H: tl.constexpr, KV: tl.constexpr, WEIGHTS: tl.constexpr, MADE: tl.constexpr, CAUSAL: tl.constexpr,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """dq of the rare rows of a block of queries."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    kv = head // (H // KV)
    base = block * ROWS
    q += batch * q_b + head * q_h + base.to(tl.int64) * q_t
    o += batch * o_b + head * o_h + base.to(tl.int64) * o_t
    do += batch * do_b + head * do_h + base.to(tl.int64) * do_t
    dq += batch * dq_b + head * dq_h + base.to(tl.int64) * dq_t
    k += batch * k_b + kv * k_h
    v += batch * v_b + kv * v_h
    Wq += (head % WEIGHTS) * (2 * D * M)
    Wk += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    peaks += (batch * KV + kv) * m
    tops += (batch * KV + kv) * m
    code += batch * n
    den += row * n + base
    lse += row * n + base
    UNIT: tl.constexpr = 1.0 if MADE else LOG2E
    ce = tl.arange(0, E)
    left = tl.minimum(n - base, ROWS)
    if tl.load(flags + row * tl.num_programs(0) + block) > 0:
        for i in range(0, left):
            if _rare(den, code + base, i, SEGMENTS):
                last = base + i + 1 if CAUSAL else m
                g = tl.load(do + i * do_t + ce, mask=ce < e, other=0.0).to(tl.float32)
                out = tl.load(o + i * o_t + ce, mask=ce < e, other=0.0).to(tl.float32)
                delta = tl.sum(g * out, 0)
                level = tl.load(lse + i)
                back = tl.zeros([D], tl.float32)
                for at in range(0, M, R):
                    a, W32 = _query_logs(q + i * q_t, Wq, bias, at, r, d, MADE, SPLIT, D, M, R)
                    grad = tl.zeros([R], tl.float32)
                    for j in range(0, last, KEYS):
                        tj = j + tl.arange(0, KEYS)
                        seen = tj < last
                        if SEGMENTS:
                            seen = seen & (tl.load(code + tj, mask=seen, other=-1) == tl.load(code + base + i))
                        u = tl.load(
                            v + tj.to(tl.int64)[:, None] * v_t + ce[None, :],
                            mask=seen[:, None] & (ce < e)[None, :],
                            other=0.0,
                        ).to(tl.float32)
                        b = _key_logs(
                            k, Wk, bias, peaks, tops, tj, seen, k_t, at, r, d, MADE, SPLIT, OPERAND, PRECISION, D, M, R
                        )
                        p = exp2(tl.where(seen[:, None], (a[None, :] + b - level) * UNIT, float("-inf")))
                        pull = tl.sum(u * g[None, :], 1) - delta
                        grad += tl.sum(p * pull[:, None], 0)
                    if MADE:
                        back += tl.sum(W32 * grad[None, :], 1)
                    else:
                        cr = at + tl.arange(0, R)
                        tl.store(dq + i * dq_t + cr, grad, mask=cr < r)
                if MADE:
                    cd = tl.arange(0, D)
                    tl.store(dq + i * dq_t + cd, back * LN2, mask=cd < d)


@triton.jit
def keys(
    q, k, v, o, do, dk, dv, Wq, Wk, bias, peaks, tops, code, den, lse, flags, shares,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    curvature, n, m, d, r, e, blocks,
    H: tl.constexpr, KV: tl.constexpr, HEADS: tl.constexpr, WEIGHTS: tl.constexpr, MADE: tl.constexpr,
    BIASED: tl.constexpr, CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a head's rare rows to dk and dv of a block of keys; dk and dv have HEADS heads."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch, owner = row // HEADS, row % HEADS
    GROUP: tl.constexpr = H // HEADS
    kv = owner // (HEADS // KV)
    head = owner * GROUP
    base = block * ROWS
    q += batch * q_b + head * q_h
    o += batch * o_b + head * o_h
    do += batch * do_b + head * do_h
    k += batch * k_b + kv * k_h
    v += batch * v_b + kv * v_h
    dk += batch * dk_b + owner * dk_h
    dv += batch * dv_b + owner * dv_h
    Wq += (head % WEIGHTS) * (2 * D * M)
    Wk += (head % WEIGHTS) * (2 * D * M)
    bias += (head % WEIGHTS) * M
    peaks += (batch * KV + kv) * m
    tops += (batch * KV + kv) * m
    shares += row * m
    code += batch * n
    den += (batch * H + head) * n
    lse += (batch * H + head) * n
    flags += (batch * H + head) * blocks
    UNIT: tl.constexpr = 1.0 if MADE else LOG2E
    cd, ce = tl.arange(0, D), tl.arange(0, E)
    none = row * 0  # makes the product of a token and a stride 64-bit
    some = 0.0
    for c in range(0, GROUP * blocks, 256):
        at_flag = c + tl.arange(0, 256)
        some = tl.maximum(some, tl.max(tl.load(flags + at_flag, mask=at_flag < GROUP * blocks, other=0.0), 0))
    if some > 0:
        for j in range(0, tl.minimum(m - base, ROWS), KEYS):
            tj = base + j + tl.arange(0, KEYS)
            real = tj < m
            runs = tl.zeros([KEYS], tl.int32)
            if SEGMENTS:
                runs = tl.load(code + tj, mask=real, other=-1)
            far = tj.to(tl.int64)[:, None]
            wide = real[:, None] & (ce < e)[None, :]
            u = tl.load(v + far * v_t + ce[None, :], mask=wide, other=0.0).to(tl.float32)
            gv = tl.zeros([KEYS, E], tl.float32)
            back = tl.zeros([KEYS, D], tl.float32)
            share = tl.zeros([KEYS], tl.float32)
            for at in range(0, M, R):
                b = _key_logs(
                    k, Wk, bias, peaks, tops, tj, real, k_t, at, r, d, MADE, SPLIT, OPERAND, PRECISION, D, M, R
                )
                grad = tl.zeros([KEYS, R], tl.float32)
                for h in range(0, GROUP):
                    for c in range(block if CAUSAL else 0, blocks):
                        if tl.load(flags + h * blocks + c) > 0:
                            for i in range(c * ROWS, tl.minimum(c * ROWS + ROWS, n)):
                                if _rare(den + h * n, code, i, SEGMENTS):
                                    seen = real
                                    if CAUSAL:
                                        seen = seen & (tj <= i)
                                    if SEGMENTS:
                                        seen = seen & (runs == tl.load(code + i))
                                    there = none + i
                                    here = q + h * q_h + there * q_t
                                    a, _W = _query_logs(here, Wq, bias, at, r, d, MADE, SPLIT, D, M, R)
                                    g = tl.load(do + h * do_h + there * do_t + ce, mask=ce < e, other=0.0).to(
                                        tl.float32
                                    )
                                    out = tl.load(o + h * o_h + there * o_t + ce, mask=ce < e, other=0.0).to(tl.float32)
                                    level = tl.load(lse + h * n + i)
                                    logs = (a[None, :] + b - level) * UNIT
                                    p = exp2(tl.where(seen[:, None], logs, float("-inf")))
                                    pull = tl.sum(u * g[None, :], 1) - tl.sum(g * out, 0)
                                    grad += p * pull[:, None]
                                    gv += tl.sum(p, 1)[:, None] * g[None, :]
                cr = at + tl.arange(0, R)
                if MADE:
                    W = Wk + cd[:, None] * M + cr[None, :]
                    W32 = tl.load(W).to(tl.float32)
                    if SPLIT:
                        W32 += tl.load(W + D * M).to(tl.float32)
                    share += tl.sum(grad, 1)
                    back = tl.dot(grad, tl.trans(W32), back, input_precision="ieee")
                else:
                    inside = real[:, None] & (cr < r)[None, :]
                    spot = dk + far * dk_t + cr[None, :]
                    tl.store(spot, tl.load(spot, mask=inside, other=0.0).to(tl.float32) + grad, mask=inside)
            if MADE:
                inside = real[:, None] & (cd < d)[None, :]
                y = tl.load(k + far * k_t + cd[None, :], mask=inside, other=0.0).to(tl.float32)
                back = (back - 2 * curvature * share[:, None] * y) * LN2  # curvature is in base 2 and halved
                spot = dk + far * dk_t + cd[None, :]
                tl.store(spot, tl.load(spot, mask=inside, other=0.0).to(tl.float32) + back, mask=inside)
                if BIASED:
                    tl.store(shares + tj, tl.load(shares + tj, mask=real, other=0.0) + share, mask=real)
            spot = dv + far * dv_t + ce[None, :]
            tl.store(spot, tl.load(spot, mask=wide, other=0.0).to(tl.float32) + gv, mask=wide)


class Rows:
    """The launches for inputs of one kind, and their arguments beside tokens.

    If logarithms are given, there is neither W nor a bias, and q is passed in their place.
    """

    def __init__(self, ready: dict, sizes: dict[str, int], constants: dict[str, Any]):
        self.ready, self.sizes, self.constants = ready, sizes, constants

    def workspace(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers: lse of rare rows (B, H, n), and a flag for each block of queries that has any."""
        B, H, n, _ = q.shape
        return launching.empty((B, H, n), q), launching.empty((B, H, over(n, ROWS)), q)

    def outputs(self, q, k, v, o, made, code, den, lse, flags) -> None:
        """Write o of the rare rows, lse and flags."""
        pointers = q, k, v, o, *made, code, den, lse, flags
        self._launch("outputs", outputs, "n", q.shape[1], pointers, (q, k, v, o), ())

    def gradients(self, q, k, v, o, do, dq, dk, dv, made, code, den, lse, flags, shares, curvature=0.0, key=()) -> None:
        """Write dq of the rare rows, and add their contribution to dk, dv and shares."""
        pointers: tuple = q, k, v, o, do, dq, *made, code, den, lse, flags
        self._launch("queries", queries, "n", q.shape[1], pointers, (q, k, v, o, do, dq), key)
        pointers = q, k, v, o, do, dk, dv, *made, code, den, lse, flags, shares
        strided = q, k, v, o, do, dk, dv
        self._launch("keys", keys, "m", dk.shape[1], pointers, strided, key, curvature=curvature)

    def _launch(self, name, kernel, along, heads, pointers, strided, key, curvature=None) -> None:
        def describe():
            s = self.sizes
            numbers = *launching.steps(*strided), *(s[x] for x in "nmdre")
            constants = {**self.constants, "HEADS": heads}
            if curvature is not None:
                numbers = *launching.steps(*strided), curvature, *(s[x] for x in "nmdre"), over(s["n"], ROWS)
            own = {x: constants[x] for x in kernel.arg_names if x in constants}
            grid = over(s[along], ROWS), strided[0].shape[0] * heads
            return kernel, grid, numbers, own, dict(num_warps=4, num_stages=1)

        launching.launch(self.ready, ("rows", name, key), pointers, describe)


def rows_of(
    ready: dict, sizes: dict[str, int], *, H: int, KV: int, M: int, E: int, dtype: torch.dtype, **constants
) -> Rows:
    """The launches for rare rows; `constants` are those of a kernel that computes its features, otherwise empty."""
    D = constants.pop("D", 16)
    R = min(M, 64 if D <= 64 else 32)
    every: dict[str, Any] = dict(WEIGHTS=1, MADE=False, BIASED=False, CAUSAL=True, SEGMENTS=False, SPLIT=False)
    every |= dict(OPERAND=tl.float32, PRECISION=launching.precision(dtype), ROWS=ROWS, KEYS=KEYS)
    return Rows(ready, sizes, {**every, **constants, "H": H, "KV": KV, "D": D, "M": M, "R": R, "E": E})
