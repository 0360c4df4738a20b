"""Softmax attention over padded batches of short sequences, without waiting for the device.

matrix      that of Softmax(Full())
fast        torch's fused kernel with a dense mask of 0 and −∞, formed once a batch: all layers share it

`Softmax` avoids dense masks and looks at the segments, which waits for the device. For sentences of a hundred tokens
the mask is small, and a step that never waits can be captured in a CUDA graph.
"""

from __future__ import annotations

from math import inf

import torch

from heedful.kernels.softmax.reach import recent
from heedful.kernels.softmax.sdpa import fused
from heedful.mechanisms import Softmax
from heedful.patterns import Full
from heedful.segments import Segments
from heedful.shapes import Tensor
from heedful.validation import check_inputs


class MaskedSoftmax(Softmax):
    """Softmax over all keys of a segment; calls with segments use a dense mask.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    >>> ids = h.segments.from_lengths(torch.tensor([16, 9]), 16)[:, None]
    >>> out = h.nn.MaskedSoftmax()(q, k, v, segments=ids)
    >>> torch.allclose(out, h.Softmax(h.Full())(q, k, v, segments=ids), atol=1e-6)
    True
    """

    def __init__(self) -> None:
        super().__init__(Full())

    def forward(self, q, k, v, *, segments=None):
        if segments is None:
            return super().forward(q, k, v)
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        n, m = q.shape[-2], k.shape[-2]
        mask, real = recent((MaskedSoftmax, n, m, q.dtype), segments, lambda: _mask(n, m, segments, q.dtype))
        return fused(q, k, v, mask, False, self.score_scale(q.shape[-1])) * real


@torch.no_grad()
def _mask(n: int, m: int, segments: Segments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is added to the scores, and 1 for the queries that see a key, 0 for the others.

    A query that sees nothing is given all keys, and the factor 0 removes the result: a row of −∞ would be NaN.
    """
    queries, keys = segments if isinstance(segments, tuple) else (segments[..., m - n :], segments)
    sees = (queries[..., :, None] == keys[..., None, :]) & (keys >= 0)[..., None, :]
    real = sees.any(-1, keepdim=True)
    mask = torch.zeros(sees.shape, dtype=dtype, device=keys.device).masked_fill_(~sees & real, -inf)
    return mask, real.to(dtype)
