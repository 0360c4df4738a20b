"""One token of linear attention in Triton: all heads of a layer in one launch.

A program takes one query head and a part of the columns of S, and loops over its rows: it reads S once, writes it
once, and holds the output in registers. That moves 8 r (e + 1) bytes per head, the minimum. Query heads that share keys
and values share S: each reads it, the first writes it. The formulas are those of reference.py.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from heedful.kernels.arithmetic import TINY
from heedful.kernels.dispatch import on_device
from heedful.kernels.launching import INTERPRETED, LaunchCache, launch, over, power
from heedful.kernels.linear_step import reference
from heedful.shapes import broadcast_shapes

PROGRAMS = LaunchCache()


def objections(q, k, v, S, z, log_scale, length, *, feature="identity", fade=None) -> list[str]:
    """Why the Triton kernel can't take these inputs, in sentences; an empty list if it can."""
    said = reference.objections(q, k, v, S, z, log_scale, length, feature=feature, fade=fade)
    if not (q.is_cuda or INTERPRETED):
        said.append(f"Triton kernels run on a GPU, the inputs are on {q.device}.")
    if S.dtype != torch.float32:
        said.append(f"it keeps states in float32, got {S.dtype}: float32 inputs have float64 states.")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, S, z, fade)):
        said.append("it has no gradient: decode under torch.no_grad().")
    if 0 in (*S.shape, *q.shape):
        said.append("there is nothing to launch for an empty tensor.")
    return said


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor | None,
    log_scale: Tensor | None,
    length: Tensor,
    *,
    feature: str = "identity",
    fade: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The output of one token and the state after it; the same call as `reference.linear_step`.

    The caller must have checked `objections`; the dispatcher does.
    """
    fades = () if fade is None else fade.shape[:-1]
    own = broadcast_shapes(k.shape[:-2], v.shape[:-2], S.shape[:-2], length.shape, fades)
    batch = broadcast_shapes(q.shape[:-2], own)
    r, e = S.shape[-2:]
    group = prod(batch) // prod(own)
    if not _shared_last(batch, own):  # queries that share a state are not adjacent: compute one each, return the first
        k = k.expand(*batch, -1, -1)
        out, S, z, log_scale = linear_step(q, k, v, S, z, log_scale, length, feature=feature, fade=fade)
        z, log_scale = (None if x is None else _first_of_shared(x, len(batch), own) for x in (z, log_scale))
        return out, _first_of_shared(S, len(batch), own), z, log_scale

    def rows_of(x: Tensor, tail: int, lead: tuple[int, ...] = own) -> Tensor:
        """One row per head, contiguous; rows are copied if heads share one, since a reshape may leave a stride of 0."""
        shape = x.shape[x.ndim - tail :]
        if x.is_contiguous() and x.shape[: x.ndim - tail] == lead:
            return x
        return x.expand(*lead, *shape).reshape(-1, *shape).contiguous()

    q = rows_of(q, 2, batch)
    k, v, S = (rows_of(x, 2) for x in (k, v, S))
    z = None if z is None else rows_of(z, 1)
    if log_scale is not None:  # there is no scale before the first token
        log_scale = log_scale.masked_fill((length == 0)[..., None], -torch.inf)
        if fade is not None:  # fade the scales, not the sums
            log_scale, fade = log_scale + fade, None
        log_scale = rows_of(log_scale, 1)
    if fade is not None:
        fade = rows_of(fade.float(), 1)
    rows = prod(batch)
    out = torch.empty(*batch, 1, e, dtype=q.dtype, device=q.device)
    S_new = torch.empty(*own, r, e, dtype=S.dtype, device=S.device)
    z_new, scale_new = (
        None if x is None else torch.empty(*own, *x.shape[x.ndim - tail :], dtype=x.dtype, device=x.device)
        for x, tail in ((z, 1), (log_scale, 1))
    )
    R, E = (min(64, max(16, power(x))) for x in (r, e))
    given = (q, k, v, S, z, log_scale, fade, out, S_new, z_new, scale_new)
    pointers = tuple(S if x is None else x for x in given)  # S is a placeholder that the kernel does not read
    constants = dict(FEATURE=feature, NORMALISE=z is not None, FADE=0 if fade is None else fade.shape[-1], R=R, E=E)
    constants["GROUP"] = group
    kinds = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in pointers)
    programs = PROGRAMS.find((kinds, q.device, rows, r, e, *constants.values()), dict)
    with on_device(q):
        launch(programs, None, pointers, lambda: (_step, (rows, over(e, E)), (r, e), constants, {"num_warps": 4}))
    return out, S_new, z_new, scale_new


def _shared_last(batch: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """True if the rows of `batch` that share one of `own` are adjacent: shared axes come after all others."""
    aligned = (1,) * (len(batch) - len(own)) + tuple(own)
    kinds = [size == mine for size, mine in zip(batch, aligned, strict=True) if size > 1]
    return sorted(kinds, reverse=True) == kinds


def _first_of_shared(x: Tensor, axes: int, own: tuple[int, ...]) -> Tensor:
    """x with the axes `own` instead of the batch axes in front: the first entry along each shared axis."""
    aligned = (1,) * (axes - len(own)) + tuple(own)
    for axis, size in enumerate(aligned):
        x = x.narrow(axis, 0, size)
    return x.reshape(*own, *x.shape[axes:])


@triton.jit
def _phi(x, FEATURE: tl.constexpr):
    if FEATURE == "elu1":
        return tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    elif FEATURE == "relu":
        return tl.maximum(x, 0.0)
    else:
        return x


@triton.jit
def _largest(q, k, before, r, R: tl.constexpr):
    """max_r q_r + max(before_r, k_r)"""
    most = float("-inf")
    for at in range(0, r, R):
        c = at + tl.arange(0, R)
        scale = tl.load(before + c, mask=c < r, other=float("-inf"))
        scale = tl.maximum(scale, tl.load(k + c, mask=c < r, other=float("-inf")).to(tl.float32))
        most = tl.maximum(most, tl.max(tl.load(q + c, mask=c < r, other=0.0).to(tl.float32) + scale, 0))
    return most


@triton.jit
def _step(
    q, k, v, S, z, log_scale, fade, out, S_new, z_new, scale_new, r, e,
    FEATURE: tl.constexpr, NORMALISE: tl.constexpr, FADE: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = query // GROUP  # GROUP queries share a state; the first of them writes it
    first = query == row * GROUP
    q += query * r
    k += row * r
    S += row * r * e
    S_new += row * r * e
    column = part * E + tl.arange(0, E)
    u = tl.load(v + row * e + column, mask=column < e, other=0.0).to(tl.float32)
    keep = 1.0
    top = 0.0
    if FEATURE == "exp":
        log_scale += row * r
        scale_new += row * r
        top = _largest(q, k, log_scale, r, R)
    if FADE == 1:
        keep = keep * tl.exp(tl.load(fade + row))
    num = tl.zeros([E], tl.float32)
    den = 0.0
    for at in range(0, r, R):
        c = at + tl.arange(0, R)
        real = c < r
        x = tl.load(q + c, mask=real, other=0.0).to(tl.float32)
        y = tl.load(k + c, mask=real, other=0.0).to(tl.float32)
        left = tl.zeros([R], tl.float32) + keep
        if FEATURE == "exp":
            before = tl.load(log_scale + c, mask=real, other=0.0)
            scale = tl.maximum(before, y)
            x, y = tl.exp(tl.minimum(x + scale - top, 0.0)), tl.exp(y - scale)
            left *= tl.exp(before - scale)
            if first & (part == 0):
                tl.store(scale_new + c, scale, mask=real)
        else:
            x, y = _phi(x, FEATURE), _phi(y, FEATURE)
        x, y = tl.where(real, x, 0.0), tl.where(real, y, 0.0)
        if FADE > 1:
            left *= tl.exp(tl.load(fade + row * FADE + c, mask=real, other=0.0))
        where = c[:, None] * e + column[None, :]
        mask = real[:, None] & (column < e)[None, :]
        state = tl.load(S + where, mask=mask, other=0.0) * left[:, None] + y[:, None] * u[None, :]
        if first:
            tl.store(S_new + where, state, mask=mask)
        num += tl.sum(state * x[:, None], 0)
        if NORMALISE:
            sums = tl.load(z + row * r + c, mask=real, other=0.0) * left + y
            den += tl.sum(sums * x, 0)
            if first & (part == 0):
                tl.store(z_new + row * r + c, sums, mask=real)
    if NORMALISE:
        some = tl.abs(den) >= TINY
        num = tl.where(some, num / tl.where(some, den, 1.0), 0.0)
    elif FEATURE == "exp":
        num = num * tl.exp(top)
    tl.store(out + query * e + column, num, mask=column < e)
