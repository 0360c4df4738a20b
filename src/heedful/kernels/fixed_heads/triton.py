"""Fixed positional heads in Triton: all kinds of a layer in two launches, forward and backward.

    sums      of each span of tokens, for the heads that are means:  Σ a_c x_c
    rows      shifts copy; left and right add the spans before theirs and a running sum inside it:
              o = b_c Σ_{c' ≤ c−2} a_c' x_c';  start and end are the sum of all spans times b
    weights   c counts from the end at which the head starts:  a_c = (c + 1)³,  b_c = 1 / W_{c−2},
              W_c = ((c+1)(c+2)/2)²
    gradient  the transpose of a head has the same form: a and b are exchanged, and c runs in reverse

All sums have terms of one sign for values of one sign; they are in float32, in a fixed order. See README.md.
"""

# ruff: noqa: SIM102 (a compile-time condition and a run-time one stay two ifs)
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from heedful.kernels.dispatch import on_device
from heedful.kernels.fixed_heads import reference
from heedful.kernels.fixed_heads.reference import KINDS
from heedful.kernels.launching import INTERPRETED, LaunchCache, current_device, launch, over, power

BLOCK = 128  # tokens that a program holds at once
SPANS = 256  # the most sums that a program has to add
LONGEST = 1 << 24  # up to here (c + 1)³ and W are far inside the range of float32
WARPS = {"num_warps": 4}
SETUPS = LaunchCache()
CURRENT, PREVIOUS, NEXT, LEFT, RIGHT, START, END, LAST, EARLIER = map(tl.constexpr, range(9))


def objections(v, kinds: tuple[str, ...], n: int) -> list[str]:
    """Why the Triton kernels can't take these inputs, in sentences; an empty list if they can."""
    said = reference.objections(v, kinds, n)
    if said:
        return said
    if not (v.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {v.device}.")
    if v.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        said.append(f"v must be bfloat16, float16 or float32, got {v.dtype}.")
    if v.numel() == 0:
        said.append("there is nothing to launch for an empty tensor.")
    if v.shape[-2] > LONGEST:
        said.append(f"sequences go up to {LONGEST} tokens, got {v.shape[-2]}.")
    return said


def fixed_heads(v: Tensor, kinds: tuple[str, ...], n: int) -> Tensor:
    """The last n rows of A v; the same call as `reference.fixed_heads`. The dispatcher has checked `objections`."""
    batch, m = v.shape[:-2], v.shape[-2]
    heads = batch[-1] if batch else 1
    x = v if v.ndim == 4 else v.reshape(-1, heads, m, v.shape[-1])
    codes = _codes(kinds if len(kinds) == heads else kinds * heads, v.device)
    learns = torch.is_grad_enabled() and x.requires_grad
    out = (_FixedHeads.apply if learns else _launch)(x, codes, n, m, False)
    return out if v.ndim == 4 else out.reshape(*batch, n, v.shape[-1])


def relaunch(v: Tensor, kinds: tuple[str, ...], n: int) -> Callable[..., Tensor] | None:
    """Both launches for values of this kind; None if values must be copied first or need a gradient."""
    if v.ndim != 4 or len(kinds) != v.shape[1] or v.stride(-1) != 1 or (v.requires_grad and torch.is_grad_enabled()):
        return None
    setup, codes = _setup(v, n, v.shape[2], False), _codes(kinds, v.device)

    def launch(v: Tensor, kinds: tuple[str, ...], n: int) -> Tensor:
        if v.get_device() == current_device():
            return setup(v, codes)
        with on_device(v):
            return setup(v, codes)

    return launch


_CODES: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}


def _codes(kinds: tuple[str, ...], device: torch.device) -> Tensor:
    """The kinds as numbers on the device; cached."""
    key = kinds, device
    if key not in _CODES:
        _CODES[key] = torch.tensor([KINDS.index(kind) for kind in kinds], dtype=torch.int32, device=device)
    return _CODES[key]


class _FixedHeads(torch.autograd.Function):
    """A linear map: its derivative is its transpose, whose derivative is the map."""

    @staticmethod
    def forward(ctx, x, codes, n, m, transposed):
        ctx.rest = codes, n, m, transposed
        return _launch(x, codes, n, m, transposed)

    @staticmethod
    def backward(ctx, grad):
        codes, n, m, transposed = ctx.rest
        return _FixedHeads.apply(grad, codes, n, m, not transposed), None, None, None, None


class FixedHeadsSetup:
    """Data shared by both launches, for inputs that Triton would treat alike."""

    def __init__(self, x: Tensor, n: int, m: int, transposed: bool):
        B, H, _, e = x.shape
        E = min(64, max(16, power(e)))
        span = over(over(m, BLOCK), SPANS) * BLOCK  # tokens
        spans = over(m, span)
        self.out, self.sums = (B, H, m if transposed else n, e), (B, H, spans, e)
        shape = (n, m, e, span, spans, H, *x.stride()[:3])
        self.rest = (spans, B * H, over(e, E)), shape, dict(TRANSPOSED=transposed, BLOCK=BLOCK, E=E), WARPS
        self.ready: dict = {}

    def __call__(self, x: Tensor, codes: Tensor) -> Tensor:
        out = torch.empty(self.out, dtype=x.dtype, device=x.device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=x.device)
        launch(self.ready, "sums", (x, sums, codes), lambda: (_sums, *self.rest))
        launch(self.ready, "rows", (x, sums, out, codes), lambda: (_rows, *self.rest))
        return out


def _launch(x: Tensor, codes: Tensor, n: int, m: int, transposed: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    with on_device(x):
        return _setup(x, n, m, transposed)(x, codes)


def _setup(x: Tensor, n: int, m: int, transposed: bool) -> FixedHeadsSetup:
    """The cached setup for inputs that Triton would treat alike."""
    key = x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16, n, m, transposed
    return SETUPS.find(key, FixedHeadsSetup, x, n, m, transposed)


@triton.jit
def _total(c):
    """W_c = Σ_{s ≤ c} (s + 1)³."""
    half = (c + 1).to(tl.float32) * (c + 2).to(tl.float32) * 0.5
    return half * half


@triton.jit
def _cube(c):
    x = (c + 1).to(tl.float32)
    return x * x * x


@triton.jit
def _load(x, t, lo, m, column, stride, e):
    """Load rows t of x, which holds the rows from lo on; zero for any other."""
    at = (t - lo).to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + at, mask=((t >= lo) & (t < m))[:, None] & (column < e)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _terms(x, kind, p, lo, m, column, stride, e, TRANSPOSED: tl.constexpr):
    """a_c x_c at the places p of the running order; shifted by two places for left and right."""
    mirrored = (kind == RIGHT) | (kind == START)
    late = tl.where((kind == LEFT) | (kind == RIGHT), 2, 0)
    s = p - late
    inside = (s >= 0) & (s < m)
    if TRANSPOSED:
        # left and right run in reverse; start and end need no order
        c = tl.where(late > 0, m - 1 - s, s)
        weight = tl.where(late > 0, tl.where(c >= 2, 1 / _total(tl.maximum(c - 2, 0)), 0.0), 1.0)
    else:
        c = s
        weight = _cube(c)
    t = tl.where(mirrored, m - 1 - c, c)
    rows = _load(x, tl.where(inside, t, -1), lo, m, column, stride, e)
    return rows * tl.where(inside, weight, 0.0)[:, None]


# Lengths are not compiled in: one kernel serves sequences of any length.
LENGTHS = ["n", "m", "span", "spans"]


@triton.jit(do_not_specialize=LENGTHS)
def _sums(
    x, sums, codes, n, m, e, span, spans, H, stride_b, stride_h, stride_t,
    TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    here, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = row // H, row % H
    kind = tl.load(codes + h)
    means = (kind >= LEFT) & (kind <= END)
    if means | ((kind == LAST) & TRANSPOSED):
        x += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        column = part * E + tl.arange(0, E)
        lo = m - n if TRANSPOSED else 0
        total = tl.zeros([E], tl.float32)
        for at in range(here * span, min((here + 1) * span, m), BLOCK):
            p = at + tl.arange(0, BLOCK)
            terms = _terms(x, kind, p, lo, m, column, stride_t, e, TRANSPOSED)
            total += tl.sum(terms, 0)
        tl.store(sums + (row.to(tl.int64) * spans + here) * e + column, total, mask=column < e)


@triton.jit(do_not_specialize=LENGTHS)
def _rows(
    x, sums, out, codes, n, m, e, span, spans, H, stride_b, stride_h, stride_t,
    TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    here, row, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = row // H, row % H
    kind = tl.load(codes + h)
    x += b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    column = part * E + tl.arange(0, E)
    lo = m - n if TRANSPOSED else 0  # the first row of x
    first = 0 if TRANSPOSED else m - n  # the first row of out
    out += row.to(tl.int64) * (m - first) * e
    before = (kind == LEFT) | (kind == RIGHT)
    after = tl.where(before, here, spans)  # spans to add
    if (kind < LEFT) | (kind == EARLIER) | ((kind == LAST) & (not TRANSPOSED)):
        after = 0
    carry = tl.zeros([E], tl.float32)
    for at in range(0, after, 64):
        s = at + tl.arange(0, 64)
        mask = (s < after)[:, None] & (column < e)[None, :]
        rows = tl.load(sums + (row.to(tl.int64) * spans + s[:, None]) * e + column[None, :], mask=mask, other=0.0)
        carry += tl.sum(rows, 0)
    for at in range(here * span, min((here + 1) * span, m), BLOCK):
        p = at + tl.arange(0, BLOCK)
        t = p  # the row of out at each place
        if before:
            terms = _terms(x, kind, p, lo, m, column, stride_t, e, TRANSPOSED)
            running = carry[None, :] + tl.cumsum(terms, 0)
            carry += tl.sum(terms, 0)
            c = m - 1 - p if TRANSPOSED else p
            t = tl.where(kind == RIGHT, m - 1 - c, c)
            if TRANSPOSED:
                value = running * _cube(c)[:, None]
                if at + BLOCK >= m:  # rows 0 and 1 attend to token 0
                    value += tl.where(c == 0, 1.0, 0.0)[:, None] * _edge(x, kind, lo, m, column, stride_t, e)[None, :]
            else:
                value = running / _total(tl.maximum(c - 2, 0))[:, None]
                if at == 0:
                    one = tl.where(kind == RIGHT, m - 1, 0) + tl.zeros([1], tl.int32)
                    value = tl.where((c < 2)[:, None], _load(x, one, lo, m, column, stride_t, e), value)
        elif (kind == START) | (kind == END):
            c = tl.where(kind == START, m - 1 - p, p)
            scale = 1 / _total(m - 1)
            weight = _cube(c) * scale if TRANSPOSED else tl.zeros([BLOCK], tl.float32) + scale
            value = weight[:, None] * carry[None, :]
        elif kind == LAST:
            if TRANSPOSED:
                value = tl.where(p == m - 1, 1.0, 0.0)[:, None] * carry[None, :]
            else:
                value = _load(x, p * 0 + (m - 1), lo, m, column, stride_t, e)
        else:
            value = _shifted(x, kind, p, lo, m, column, stride_t, e, TRANSPOSED)
        keep = ((p < m) & (t >= first))[:, None] & (column < e)[None, :]
        tl.store(out + (t - first).to(tl.int64)[:, None] * e + column[None, :], value, mask=keep)


@triton.jit
def _edge(x, kind, lo, m, column, stride, e):
    """The sum of the two rows that attend to the first token (for a mirrored head, to the last)."""
    two = tl.arange(0, 2)
    t = tl.where(kind == RIGHT, m - 1 - two, two)
    return tl.sum(_load(x, t, tl.maximum(lo, 0), m, column, stride, e), 0)


@triton.jit
def _shifted(x, kind, p, lo, m, column, stride, e, TRANSPOSED: tl.constexpr):
    """For each row (or token, if TRANSPOSED) the one beside it, cyclically; `earlier` repeats its first token."""
    earlier = kind == EARLIER
    back = tl.where(kind == CURRENT, 0, tl.where(((kind == PREVIOUS) | earlier) != TRANSPOSED, 1, -1))
    t = p - back
    t = tl.where(t < 0, tl.where(earlier, 0, m - 1), tl.where(t >= m, tl.where(earlier, m, 0), t))
    value = _load(x, tl.where(p < m, t, m), lo, m, column, stride, e)
    if TRANSPOSED:
        if earlier:  # two rows attend to token 0, none to the last token
            value += tl.where(p == 0, 1.0, 0.0)[:, None] * _load(x, p * 0, lo, m, column, stride, e)
    return value
