"""Softmax attention through torch's fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.patterns import Causal, Full, Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Tensor


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
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    width, e = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    # Where widths differ the fused kernels give way to one that forms the matrix; zeros cost less.
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    q, k, v = (_four_axes(x.expand(*batch, *x.shape[-2:])) for x in (q, k, v))
    # is_causal is aligned top-left: right for n = m only, and a single last query sees everything.
    is_causal = isinstance(pattern, Causal) and q.shape[-2] > 1
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    return out[..., :e].reshape(*batch, q.shape[-2], e)


def _four_axes(x: Tensor) -> Tensor:
    if x.ndim == 4:
        return x
    return x.reshape(1, -1, *x.shape[-2:]) if x.ndim < 4 else x.flatten(0, -4)


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why torch's fused kernel can't take these inputs."""
    why = []
    if not isinstance(pattern, Full | Causal):
        why.append(f"{pattern!r} would need a dense n × m mask")
    if isinstance(pattern, Causal) and q.shape[-2] not in (1, k.shape[-2]):
        why.append("its causal mask is aligned top-left, so n queries after m − n cached keys come out wrong")
    if segments is not None:
        why.append("segments would need a dense n × m mask, and padded rows would be NaN")
    if rows.bias is not None or rows.bias_function is not None:
        why.append("a bias would need the dense n × m tensor, and rows of -inf would be NaN")
    if rows.softcap is not None:
        why.append("it has no softcap")
    if rows.sink is not None:
        why.append("it has no sink logit")
    if 0 in (*q.shape, *k.shape, *v.shape):
        why.append("it can't take an empty tensor")
    if q.device.type == "cuda" and q.dtype == torch.float64:
        why.append("in float64 on the GPU it forms the n × m matrix")
    return why
