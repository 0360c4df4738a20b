"""Strided attention on a GPU by torch's flash kernels: residue classes are strided views, nothing is copied.

classes   (batch, a·l + r, d) viewed as (batch, r, a, d): l short sequences whose tokens lie l·d numbers apart
window    the sliding window of kernels/softmax
merge     o = Σ_p exp(lse_p − lse) o_p,  lse = log Σ_p exp(lse_p)
backward  each part's own backward pass, given the *merged* o and lse (README.md)
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import on_device, uncompiled
from heedful.kernels.softmax import fused as softmax
from heedful.kernels.softmax.recognise import StridedKeys, StridedWindow, recognise
from heedful.patterns import FAR, Offsets, Pattern, Window
from heedful.segments import Segments
from heedful.shapes import Float, Tensor, broadcast_shapes

aten = torch.ops.aten


class Shape(NamedTuple):
    """Keys at multiples of `stride` or nearer than `window`, none of them after the query."""

    stride: int
    window: int

    @property
    def skip(self) -> int:
        """The number of strides inside the window; the window part covers these keys."""
        return -(-self.window // self.stride)

    @classmethod
    def of(cls, pattern: Pattern) -> Shape | None:
        """The shape of a pattern; None unless it looks back, and over the whole class."""
        match recognise(pattern):
            case StridedKeys(Offsets(before, 0, stride)) if before >= FAR:
                return cls(stride, 0)
            case StridedWindow(Offsets(before, 0, stride), Offsets(near, 0)) if before >= FAR:
                return cls(stride, near + 1)
        return None


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale, *, memory=None) -> list[str]:
    """Why flash kernels can't take these inputs."""
    if q.device.type != "cuda":
        return [f"flash kernels run on a GPU, the inputs are on {q.device}"]
    if Shape.of(pattern) is None:
        return ["it takes Strided & Causal(), or (Strided | Window) & Causal()"]
    why = []
    if segments is not None:
        why.append("segments have residue classes of their own, of other lengths in each row")
    if rows != SoftmaxRows(temperature=rows.temperature):
        why.append("it has no bias, softcap or sink")
    if q.shape[-2] != k.shape[-2]:
        why.append("it takes as many queries as keys")
    if q.dtype not in (torch.float16, torch.bfloat16):
        why.append(f"flash kernels take float16 and bfloat16, got {q.dtype}")
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        why.append("flash kernels take equal widths of keys and values, multiples of 8 up to 256")
    if 0 in (*q.shape, *k.shape, *v.shape):
        why.append("it can't take an empty tensor")
    return why


@uncompiled
def attend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V for a strided pattern, with gradients in q, k and v."""
    shape = Shape.of(pattern)
    assert shape is not None, "objections() come first"
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    n = q.shape[-2]
    after = -n % shape.stride  # zeros fill the last row of the grid: the last keys of their class, never seen
    flat = [_as_grid(x, batch, after) for x in (q, k, v)]
    out = _Strided.apply(*flat, shape, scale)
    return (out[:, :n] if after else out).reshape(*batch, n, v.shape[-1])


def adjoint(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    y: Float[Tensor, "*#b n e"],
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    *,
    memory: dict[str, Tensor] | None = None,
) -> Float[Tensor, "*b m e"]:
    """Aᵀ Y, the gradient in v."""
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], y.shape[:-2])
    with torch.enable_grad():
        v = y.new_zeros(*batch, k.shape[-2], y.shape[-1], requires_grad=True)
        out = attend(q.detach(), k.detach(), v, rows, pattern, segments, scale)
        return torch.autograd.grad(out, v, y.expand_as(out))[0]


def _as_grid(x: Tensor, batch: tuple[int, ...], after: int) -> Tensor:
    """x as (b, n + after, w); without `after` there is no copy (torch's `pad` would copy even then)."""
    x = x if x.shape[:-2] == batch else x.expand(*batch, -1, -1)
    x = F.pad(x, (0, 0, 0, after)) if after else x
    return x.reshape(prod(batch), *x.shape[-2:])


class _Classes:
    """The strided part: views of the rows that see keys of their class, and of those keys."""

    def __init__(self, shape: Shape):
        self.stride, self.skip = shape.stride, shape.skip

    def queries(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b r a w"]:
        return x.unflatten(1, (-1, self.stride))[:, self.skip :].transpose(1, 2)

    def keys(self, x: Float[Tensor, "b n w"]) -> Float[Tensor, "b r a w"]:
        rows = x.shape[1] // self.stride
        return x.unflatten(1, (-1, self.stride))[:, : rows - self.skip].transpose(1, 2)


class _Strided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, shape: Shape, scale: float):
        classes = _Classes(shape)
        far = classes.skip * shape.stride  # the first query with a key of its class outside the window
        out = lse = None
        if shape.window:
            out, lse = softmax.forward_with_lse(q, k, v, Window(shape.window - 1), scale)
        if far < q.shape[1]:
            o, log, *_ = aten._scaled_dot_product_flash_attention(
                classes.queries(q), classes.keys(k), classes.keys(v), 0.0, True, False, scale=scale
            )
            o = o.transpose(1, 2).flatten(1, 2)
            if out is None or lse is None:
                out, lse = o, log  # log has the layout that the backward kernel expects: (b, residue, row)
            else:
                _merge(out[:, far:], lse[:, far:], o, log.transpose(1, 2).flatten(1, 2))
        assert out is not None and lse is not None
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = shape, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        shape, scale = ctx.rest
        classes = _Classes(shape)
        far = classes.skip * shape.stride
        grads: list[Tensor] = []
        if shape.window:
            grads = list(softmax.backward_from(q, k, v, out, lse, grad, Window(shape.window - 1), scale))
        if far < q.shape[1]:
            rows = q.shape[1] // shape.stride - classes.skip
            seed = _no_dropout(q)
            log = lse
            if shape.window:
                log = lse.unflatten(1, (-1, shape.stride))[:, classes.skip :].transpose(1, 2).contiguous()
            parts = aten._scaled_dot_product_flash_attention_backward(
                classes.queries(grad), classes.queries(q), classes.keys(k), classes.keys(v), classes.queries(out), log,
                None, None, rows, rows, 0.0, True, seed, seed, scale=scale,
            )  # fmt: skip
            parts = [part.transpose(1, 2).flatten(1, 2) for part in parts]
            if not grads:
                return (*parts, None, None)
            seen = k.shape[1] - far
            for whole, part in zip((grads[0][:, far:], grads[1][:, :seen], grads[2][:, :seen]), parts, strict=True):
                whole += part
        return (*grads, None, None)


BLOCK = 64  # rows that a program merges


def _merge(out: Float[Tensor, "b n e"], lse: Float[Tensor, "b n"], o: Tensor, log: Tensor) -> None:
    """Merge a part into out and lse, in place: one pass over both, with sums in float32."""
    b, n, e = out.shape
    with on_device(out):
        _merge_rows[(triton.cdiv(n, BLOCK), b)](
            out, lse, o, log, n, e, out.stride(0), out.stride(1), lse.stride(0), o.stride(0), o.stride(1),
            log.stride(0), BLOCK=BLOCK, E=triton.next_power_of_2(e),
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _merge_rows(
    out, lse, o, log, n, e, out_b, out_n, lse_b, o_b, o_n, log_b, BLOCK: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, E)
    real = (i < n)[:, None] & (c < e)[None, :]
    here, there = (
        out + b * out_b + i[:, None].to(tl.int64) * out_n + c[None, :],
        o + b * o_b + i[:, None].to(tl.int64) * o_n + c[None, :],
    )
    x, y = (
        tl.load(lse + b * lse_b + i, mask=i < n, other=0.0),
        tl.load(log + b * log_b + i, mask=i < n, other=0.0),
    )
    top = tl.maximum(x, y)
    both = top + tl.log(tl.exp(x - top) + tl.exp(y - top))
    rows = tl.load(here, mask=real, other=0.0).to(tl.float32) * tl.exp(x - both)[:, None]
    rows += tl.load(there, mask=real, other=0.0).to(tl.float32) * tl.exp(y - both)[:, None]
    tl.store(here, rows, mask=real)
    tl.store(lse + b * lse_b + i, both, mask=i < n)


def _no_dropout(like: Tensor) -> Tensor:
    """A placeholder for the state of a random generator; without dropout the kernel does not read it."""
    return torch.empty(2, dtype=torch.uint64, device=like.device)
