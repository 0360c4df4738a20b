"""Top-k attention (Gupta et al. 2021, arXiv:2106.06899): softmax over the k largest scores of each row.

    matrix      A_ij = exp(z_ij) / Σ_{l kept} exp(z_il),  z_ij = scale · q_i·k_j,  j among the k largest visible from i
    fast        tiles that the pattern allows; the k-th largest score of a row is a threshold
    recurrence  a cache of the keys and values that later queries may see
    cost        2 · pairs · (d + e) flops, state (d + e) · remembered keys

Among equal scores the earlier key comes first. Scores are computed in float32 or better, also in `matrix`, so that the
selection of keys does not depend on rounding to bfloat16. With k or fewer visible keys, this is softmax attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from heedful.kernels.blocked import reference
from heedful.kernels.blocked.tiles import Tile
from heedful.kernels.dispatch import Backend, Kernel, as_given
from heedful.mechanisms.score_base import ScoreBase
from heedful.patterns import Causal, Pattern
from heedful.segments import visible
from heedful.shapes import Bool, Float, Tensor
from heedful.validation import check_inputs


@dataclass(frozen=True)
class TopKRows:
    """Row function: softmax over the k largest scores; a row without visible keys is zero."""

    k: int
    bias: None = None
    parameters: tuple[Tensor, ...] = ()

    def weights(self, scores, tile: Tile, bias, parameters):
        scores = tile.lower(scores)
        if scores.shape[-1] > self.k:
            scores = scores.masked_fill(~largest(scores.detach(), self.k), -inf)
        dead = tile.blind
        if dead is None:
            return scores.softmax(-1)
        return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)

    def pull_back(self, weights, grad, dot):
        return grad.sub_(dot).mul_(weights)


def largest(scores: Float[Tensor, "*b r c"], k: int) -> Bool[Tensor, "*b r c"]:
    """Return a mask of the k largest entries per row, the first among equal ones (`topk` breaks ties arbitrarily)."""
    least = scores.topk(k, -1, sorted=False).values.amin(-1, keepdim=True)
    kept = scores >= least
    if bool((kept.sum(-1) > k).any()):
        above = scores > least
        equal = kept & ~above
        room = k - above.sum(-1, keepdim=True)
        kept = above | (equal & (equal.cumsum(-1) <= room))
    return kept


class TopK(ScoreBase):
    """Softmax over the k largest visible scores of each query.

    >>> import torch, heedful as h
    >>> q = torch.ones(4, 1)
    >>> h.TopK(2).matrix(q, torch.tensor([[0.0], [3.0], [3.0], [3.0]]))
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.0474, 0.9526, 0.0000, 0.0000],
            [0.0000, 0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000, 0.0000]])

    Gradients flow through the weights of the selected keys; the selection itself has no gradient.
    """

    kernel = Kernel("top_k", Backend("torch", reference.blocked, reference.objections))

    def __init__(
        self,
        k: int,
        pattern: Pattern = Causal(),  # noqa: B008  (frozen)
        scale: float | None = None,
    ):
        super().__init__(pattern, scale)
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected an integer ≥ 1, the number of keys that a query keeps, got {k!r}.")
        self.k = k

    def rows(self) -> TopKRows:
        return TopKRows(self.k)

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        wide = torch.promote_types(q.dtype, torch.float32)
        with as_given(q):
            z = (q.to(wide) * self.score_scale(q.shape[-1])) @ k.to(wide).mT
        z = z.masked_fill(~visible(self.pattern, q.shape[-2], k.shape[-2], segments, q.device), -inf)
        order = z.detach().argsort(dim=-1, descending=True, stable=True)
        rank = order.argsort(dim=-1)
        z = z.masked_fill(rank >= self.k, -inf)
        total = z.logsumexp(-1, keepdim=True)
        return (z - total.masked_fill(total == -inf, 0)).exp().to(q.dtype)

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"{self.k}, {self.pattern!r}{scale}"
