"""Softmax attention through torch's fused kernel."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F

from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.patterns import Causal, Full, Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Tensor, broadcast_shapes

HONEST = 16  # with fewer keys (less than a SIMD vector), torch on a CPU returns zeros for a row of NaN


def attend(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: SoftmaxRows,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V by `torch.nn.functional.scaled_dot_product_attention`."""
    # is_causal is aligned top-left: right only for n = m; a single last query sees everything.
    is_causal = isinstance(pattern, Causal) and q.shape[-2] > 1
    return fused(q, k, v, None if rows.bias is None else rows.bias.to(q.dtype), is_causal, scale)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """scaled_dot_product_attention for any batch axes and widths; the mask (boolean or additive) broadcasts to
    (*batch, n, m)."""
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    width, e = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    # If the widths differ, torch falls back to a kernel that materialises the matrix; padding with zeros costs less.
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    q, k, v = (_four_axes(x.expand(*batch, *x.shape[-2:])) for x in (q, k, v))
    mask = None if mask is None else _four_axes(mask.expand(*batch, *mask.shape[-2:]))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    return out[..., :e].reshape(*batch, q.shape[-2], e)


def _four_axes(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    return x.reshape(1, -1, *x.shape[-2:]) if x.ndim < 4 else x.flatten(0, -4)


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why torch's fused kernel can't take these inputs."""
    why = []
    if not isinstance(pattern, Full | Causal):
        why.append("patterns other than Full and Causal would need a dense n × m mask")
    if isinstance(pattern, Causal) and q.shape[-2] not in (1, k.shape[-2]):
        why.append("its causal mask is aligned top-left, so n queries after m − n cached keys come out wrong")
    if segments is not None:
        why.append("segments would need a dense n × m mask, and padded rows would be NaN")
    if rows.bias_function is not None:
        why.append("a bias as a function would need the dense n × m tensor")
    if rows.bias is not None:
        why += _about_bias(rows.bias, pattern)
    if rows.softcap is not None:
        why.append("it has no softcap")
    if rows.sink is not None:
        why.append("it has no sink logit")
    if 0 in (*q.shape, *k.shape, *v.shape):
        why.append("it can't take an empty tensor")
    elif q.device.type == "cpu" and k.shape[-2] < HONEST:
        why.append(f"on a CPU it turns NaN into zeros where there are fewer than {HONEST} keys")
    if q.device.type == "cuda" and q.dtype == torch.float64:
        why.append("in float64 on the GPU it forms the n × m matrix")
    return why


def slower_than_triton(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> dict[str, str]:
    """Why the Triton kernel is faster for these inputs, as {"triton": reason}; empty for most inputs."""
    if q.device.type != "cuda":
        return {}
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if learns and q.shape[-2] >= 64 * k.shape[-2]:
        return {"triton": "gradients of so few keys keep few processors of the GPU busy; Triton splits the queries"}
    if not learns and q.dtype == torch.float32:  # the backward passes have not been compared
        return {
            "triton": "in float32 it leaves the tensor cores idle; Triton is as exact by six bf16 products (bf16x6)"
        }
    return {}


def _about_bias(bias: Tensor, pattern: Pattern) -> list[str]:
    """Why this bias can't be taken. A bias that depends on keys only, as for padding, can."""
    if isinstance(pattern, Causal):
        return ["it takes a bias or a causal mask, not both"]
    if bias.requires_grad:
        return ["with a gradient in the bias it forms the n × m matrix"]
    if bias.shape[-2] > 1:
        return ["a bias of queries and keys may hold rows of -inf, which it turns into NaN"]
    if bool((bias == -inf).all(-1).any()):
        return ["all keys are masked in some row, which it turns into NaN"]
    return []
