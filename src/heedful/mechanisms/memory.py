"""External memory (Wu et al. 2022, arXiv:2203.08913): local attention plus the k nearest of all earlier keys.

    matrix      A = g · A_far + (1 − g) · A_near,   g = σ(γ) per head;   a row with one part only has weight 1 for it
                A_near: softmax over the last w keys and the query's own;   A_far: over the k largest scores before them
    fast        causal tiles; each row is split into near and far, and the k-th largest far score is a threshold
    recurrence  append k_t, v_t to a cache of all tokens, since any key may be nearest to a later query
    cost        2 · pairs · (d + e) flops, state (d + e) · m

The mechanism stores no memory itself: it attends to the keys and values of the call. So A depends on q and k alone, two
equal calls give the same output, and gradients, segments and decoding work as for other mechanisms. Tokens persist
between calls either in the state of `prefill` and `step`, or in a `KeyValueMemory`, which puts its tokens before the
keys of the next call: n queries and l + m keys, with the queries last, as with any cache. The window of near keys then
extends into the store, as in the paper's Transformer-XL.

Among equal scores the earlier key comes first. Scores are computed in float32 or better, also in `matrix` (see `TopK`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import nn

from heedful.kernels.blocked import reference
from heedful.kernels.blocked.tiles import Tile, pick, with_axes
from heedful.kernels.dispatch import Backend, Kernel, as_given
from heedful.mechanisms.score_base import ScoreBase
from heedful.mechanisms.top_k import largest
from heedful.patterns import Causal, Window
from heedful.segments import visible
from heedful.shapes import Tensor, broadcast_shapes
from heedful.validation import check_inputs


@dataclass(frozen=True)
class MemoryRows:
    """Row function: near softmax plus far top-k softmax; a row without visible keys is zero."""

    k: int
    before: int
    gate: Tensor
    bias: None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.gate,)

    def weights(self, scores, tile: Tile, bias, parameters):
        gate = pick(with_axes(parameters[0], scores.ndim - 2 + len(tile.batch), 0), tile.batch)[..., None, None]
        scores = tile.lower(scores)
        near = tile.j >= tile.i - self.before
        hide = torch.where(near, 0.0, -inf), torch.where(near, -inf, 0.0)  # adding is faster than masked_fill
        local, far = scores + hide[0].to(scores.dtype), scores + hide[1].to(scores.dtype)
        if scores.shape[-1] > self.k:
            far = far.masked_fill(~largest(far.detach(), self.k), -inf)
        local, has_local = _softmax(local)
        far, has_far = _softmax(far)
        share = gate.to(scores.dtype).sigmoid()
        share = torch.where(has_far, torch.where(has_local, share, 1), 0)
        return share * far + (1 - share) * local

    def pull_back(self, weights, grad, dot):
        return None


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax of each row, zeros if all entries are −∞, and a mask of the rows that have a finite entry."""
    some = scores.detach().amax(-1, keepdim=True) > -inf
    if some.all():
        return scores.softmax(-1), some
    return torch.where(some, scores.masked_fill(~some, 0).softmax(-1), 0), some


class ExternalMemory(ScoreBase):
    """Attention to the last keys, and to the k nearest of all earlier keys.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 1000, 16).unbind()
    >>> attend = h.ExternalMemory(before=64, k=8, heads=8)
    >>> attend(q, k, v).shape
    torch.Size([1, 8, 1000, 16])

    With a store, queries also attend to the tokens of earlier calls:

    >>> store = h.KeyValueMemory(4096, d=16, e=16, batch=(1, 8))
    >>> for q, k, v in torch.randn(3, 3, 1, 8, 100, 16):
    ...     out = attend(q, *store.before(k, v))
    ...     store.add(k, v)
    >>> len(store), out.shape
    (300, torch.Size([1, 8, 100, 16]))

    before   w, the number of local keys before the query's own, as in `Window`
    k        number of earlier keys to retrieve
    heads    1: one gate for all heads; more: one gate per head, the last batch axis
    scale    factor of q·k; d^-½ by default

    The gate γ is learned and starts at 0, which gives each part half of the weight. The choice of keys has no gradient.
    """

    kernel = Kernel("external_memory", Backend("torch", reference.blocked, reference.objections))

    def __init__(self, before: int = 512, k: int = 32, *, heads: int = 1, scale: float | None = None):
        super().__init__(Causal(), scale)
        for name, value, least in (("before", before, 0), ("k", k, 1), ("heads", heads, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer ≥ {least}, got {value!r}.")
        self.before, self.k, self.heads = before, k, heads
        self.gate = nn.Parameter(torch.zeros(() if heads == 1 else heads))

    def rows(self) -> MemoryRows:
        return MemoryRows(self.k, self.before, self.gate)

    def matrix(self, q, k, *, segments=None):
        self._check(q, k, segments=segments)
        n, m = q.shape[-2], k.shape[-2]
        wide = torch.promote_types(q.dtype, torch.float32)
        with as_given(q):
            z = (q.to(wide) * self.score_scale(q.shape[-1])) @ k.to(wide).mT
        sees = visible(self.pattern, n, m, segments, q.device)
        near = visible(Window(self.before), n, m, segments, q.device)
        far = z.detach().masked_fill(~sees | near, -inf)
        rank = far.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        far = sees & ~near & (rank < self.k)
        gate = self.gate[..., None, None].to(wide).sigmoid().expand(*z.shape[:-1], 1)
        gate = gate.masked_fill(~far.any(-1, keepdim=True), 0)
        return (gate * _normalised(z, far) + (1 - gate) * _normalised(z, near)).to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments=segments)
        return super().forward(q, k, v, segments=segments)

    def step(self, state, q, k, v):
        self._check(q, k, v)
        return super().step(state, q, k, v)

    def _check(self, *qkv, segments=None) -> None:
        check_inputs(*qkv, segments=segments, pattern=self.pattern, mechanism=self)
        batch = broadcast_shapes(*(x.shape[:-2] for x in qkv))
        if self.heads > 1 and batch[-1:] != (self.heads,):
            raise ValueError(
                f"q, k: batch axes {tuple(batch)}, expected the last to be heads = {self.heads}, each of which has its "
                "own gate. Likely cause: the mechanism was built for another layer; heads=1 shares one among all."
            )

    def extra_repr(self) -> str:
        parts = [f"before={self.before}, k={self.k}"]
        parts += [f"heads={self.heads}"] * (self.heads > 1) + [f"scale={self.scale}"] * (self.scale is not None)
        return ", ".join(parts)


def _normalised(z: Tensor, where: Tensor) -> Tensor:
    """Return the softmax of z over the entries of `where`; zeros if there are none."""
    z = z.masked_fill(~where, -inf)
    total = z.logsumexp(-1, keepdim=True)
    return (z - total.masked_fill(total == -inf, 0)).exp()
