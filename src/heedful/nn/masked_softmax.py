"""Softmax attention over padded batches of short sequences, without synchronising with the GPU.

matrix      the matrix of Softmax(pattern)
fast        torch's fused kernel with a dense mask of 0 and −∞; under segments, all layers share one mask per batch

`Softmax` avoids dense masks, but it reads the segments on the CPU, which synchronises with the GPU. For sentences of
about a hundred tokens the mask is small, and a step without synchronisation can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch

from heedful.kernels.softmax.reach import recent
from heedful.kernels.softmax.sdpa import fused
from heedful.mechanisms import Softmax
from heedful.patterns import Causal, Full, Pattern
from heedful.segments import Segments, visible
from heedful.shapes import Tensor
from heedful.validation import check_inputs


class MaskedSoftmax(Softmax):
    """Softmax attention that turns segments and pattern into a dense mask.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    >>> ids = h.segments.from_lengths(torch.tensor([16, 9]), 16)[:, None]
    >>> out = h.nn.MaskedSoftmax()(q, k, v, segments=ids)
    >>> torch.allclose(out, h.Softmax(h.Full())(q, k, v, segments=ids), atol=1e-6)
    True
    """

    def __init__(self, pattern: Pattern = Full()):  # noqa: B008  (frozen)
        super().__init__(pattern)

    def forward(self, q, k, v, *, segments=None):
        if segments is None and isinstance(self.pattern, Full | Causal):
            return super().forward(q, k, v)
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        n, m = q.shape[-2], k.shape[-2]
        mask, real = mask_of(self.pattern, n, m, segments, q)
        return fused(q, k, v, mask, False, self.score_scale(q.shape[-1])) * real


def mask_of(pattern: Pattern, n: int, m: int, segments: Segments | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask to add to the scores of q, and a factor per query: 1 if it sees a key, else 0.

    Under segments the last masks are cached, so that all layers of a model share them.
    """
    make = partial(_mask, pattern, n, m, segments, q)
    return make() if segments is None else recent((_mask, pattern, n, m, q.dtype), segments, make)


@torch.no_grad()
def _mask(pattern: Pattern, n: int, m: int, segments: Segments | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mask and the factor.

    The mask shows all keys to a query that sees nothing, because a row of −∞ would give NaN; the factor 0 then makes
    its output zero.
    """
    if segments is not None and isinstance(pattern, Full):  # skips the positions, which need a sort
        queries, keys = segments if isinstance(segments, tuple) else (segments[..., m - n :], segments)
        sees = (queries[..., :, None] == keys[..., None, :]) & (keys >= 0)[..., None, :]
    else:
        sees = visible(pattern, n, m, segments, q.device)
    real = sees.any(-1, keepdim=True)
    mask = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill_(~sees & real, -inf)
    return mask, real.to(q.dtype)
