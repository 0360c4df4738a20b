"""Softmax attention through torch's fused kernel and a dense mask: for patterns that are not intervals, on a GPU.

The kernel computes every score and reads the mask once for each head, but keeps none of them; up to a few thousand
tokens that takes less time than gathering the keys that a block of queries sees.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod

import torch
import torch.nn.functional as F

from heedful.kernels.blocked.reference import without_padding
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.kernels.softmax.sdpa import fused
from heedful.kernels.uncompiled import uncompiled
from heedful.patterns import Pattern
from heedful.segments import Segments, visible
from heedful.shapes import Float, Tensor, broadcast_shapes

MOST = 1 << 26  # numbers in a mask, which are of the inputs' type: 128 MiB in 16 bits


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
    """A V, with gradients in q, k and v."""
    n, m, e = q.shape[-2], k.shape[-2], v.shape[-1]
    which = pattern, n, m, q.dtype, q.device
    penalty, blind = _kept(*which) if segments is None else _masks(*which, segments)
    (q,), (k, v) = without_padding(segments, (q,), (k, v))
    # Other widths are not for the fused kernel with a mask: torch would form the n × m matrix.
    q, k, v = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in (q, k, v))
    return fused(q, k, v, penalty, False, scale)[..., :e].masked_fill(blind, 0)


def _masks(
    pattern: Pattern, n: int, m: int, dtype: torch.dtype, device: torch.device, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """0 for the keys that a query looks at and −∞ for others; and which queries see nothing.

    Their softmax would be NaN, so they look at every key. Numbers, in rows that begin at multiples of 16, are what the
    kernel reads: of anything else torch would make a copy for every head.
    """
    seen = visible(pattern, n, m, segments, device)
    blind = ~seen.any(-1, keepdim=True)
    penalty = torch.zeros(*seen.shape[:-1], m + -m % 16, dtype=dtype, device=device)[..., :m]
    return penalty.masked_fill_(~(seen | blind), -inf), blind


@lru_cache(maxsize=1)
def _kept(pattern: Pattern, n: int, m: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The last one: layers mostly share a pattern, and share it in memory until the backward pass."""
    with torch.inference_mode(False):  # a later call may want a gradient
        return _masks(pattern, n, m, dtype, device)


def objections(q, k, v, rows: SoftmaxRows, pattern, segments, scale) -> list[str]:
    """Why a dense mask is not the way for these inputs."""
    why = []
    if q.device.type != "cuda":
        why.append(f"a dense mask pays on a GPU, the inputs are on {q.device}")
    if q.dtype == torch.float64:
        why.append("in float64 the fused kernel forms the n × m matrix")
    if rows.bias is not None or rows.bias_function is not None or rows.softcap is not None or rows.sink is not None:
        why.append("it has a mask, but no bias, softcap or sink")
    if 0 in (*q.shape, *k.shape, *v.shape):
        why.append("it can't take an empty tensor")
    ids = () if segments is None else segments if isinstance(segments, tuple) else (segments,)
    masks = prod(broadcast_shapes(*(x.shape[:-1] for x in ids))) if ids else 1
    numbers = masks * q.shape[-2] * k.shape[-2]
    if numbers > MOST:
        why.append(f"the mask would have {numbers} numbers, more than {MOST}")
    if masks > 1 and len(broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])) > 2:
        why.append("segments over more than two batch axes would need a mask for each head")
    return why
