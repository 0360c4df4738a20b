"""A window, sinks, and one mean key and value for the keys in between (RazorAttention, Tang et al. 2024,
arXiv:2407.15891).

matrix      A_ij = exp(scale · q_i·k_j) / Z_i for j ∈ N_i: the first s keys, the last w keys before i, and i itself
            A_ij = exp(scale · q_i·k̄_i) / Z_i for j ∈ D_i, the keys in between, k̄_i their mean
            Z_i = Σ_{j ∈ N_i} exp(scale · q_i·k_j) + |D_i| exp(scale · q_i·k̄_i)
fast        softmax over N_i with log Σ exp of each row (kernels/partial), combined with one key k̄_i of weight |D_i|;
            means by prefix sums
recurrence  s + w keys and values; a key that leaves the window is added to the sums of keys and of values
cost        2 · pairs · (d + e) + 2(m + 2n)(d + e) flops, state (s + w + 1)(d + e)

Every key in between gets the weight of the mean key, so all values contribute to the output. If these keys are equal,
the result is exact softmax attention. RazorAttention uses the summary in heads that do not retrieve.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from heedful.core import Cost, Dims, RecurrentMechanism, Stage, softmax_stages
from heedful.kernels.dispatch import as_given
from heedful.kernels.partial import join, partial_softmax
from heedful.mechanisms.linear_base import state_dtype
from heedful.patterns import Causal, Window
from heedful.segments import in_last, per_segment, resolve, take_tokens
from heedful.shapes import Float, Int, Tensor
from heedful.validation import check_inputs, check_token


class Summary(NamedTuple):
    """Exact keys and values, with their positions (-1: empty place), and the sums of those that left the window."""

    k: Float[Tensor, "*#b l d"]
    v: Float[Tensor, "*#b l e"]
    positions: Int[Tensor, "*s l"]
    key_sum: Float[Tensor, "*#b 1 d"]
    value_sum: Float[Tensor, "*#b 1 e"]
    length: Int[Tensor, "*s"]


class WindowSummary(RecurrentMechanism):
    """Exact weights for the nearest and the first keys, and one summary for the keys in between.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 1024, 16).unbind()
    >>> h.WindowSummary(before=128, sinks=4)(q, k, v).shape
    torch.Size([1, 8, 1024, 16])
    >>> torch.allclose(h.WindowSummary(before=1024)(q, k, v), h.Softmax()(q, k, v), atol=1e-5)
    True

    before   number of exact keys before the query's own
    sinks    number of exact keys at the start
    scale    factor of q·k; d^-½ by default
    """

    def __init__(self, before: int = 512, sinks: int = 4, scale: float | None = None):
        super().__init__(Causal())
        self.near = Window(before, sinks=sinks)
        self.scale = scale

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        layout = resolve(segments, q.shape[-2], k.shape[-2], q.device)
        i, j = layout.query_positions[..., :, None], layout.key_positions[..., None, :]
        same = (layout.query_ids[..., :, None] == layout.key_ids[..., None, :]) & (layout.query_ids[..., :, None] >= 0)
        near, between = same & self.near.allows(i, j), same & (j <= i) & ~self.near.allows(i, j)
        with as_given(q):
            share = between.to(k.dtype) / between.sum(-1, keepdim=True).clamp(min=1)
            mean = share @ k.masked_fill(layout.key_ids[..., None] < 0, 0)
            far = (q * mean).sum(-1, keepdim=True) * self._scale(q)
            z = torch.where(between, far, q @ k.mT * self._scale(q)).masked_fill(~(near | between), -inf)
        if not k.shape[-2]:
            return z
        top = z.amax(-1, keepdim=True)
        weights = (z - top.masked_fill(top == -inf, 0)).exp()
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1)

    def forward(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        if isinstance(segments, tuple):
            return per_segment(self, q, k, v, segments)
        with as_given(q):
            if segments is not None:  # padding may contain arbitrary numbers
                q = q.masked_fill(segments[..., k.shape[-2] - q.shape[-2] :, None] < 0, 0)
                k, v = (x.masked_fill(segments[..., None] < 0, 0) for x in (k, v))
            near = partial_softmax(q, k, v, self.near, segments, self._scale(q))
            return join(near, self._between(q, k, v, segments)).to(v.dtype)

    def _between(self, q, k, v, segments: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean value of the keys in between, and the logarithm of their total weight."""
        n, m = q.shape[-2], k.shape[-2]
        layout = resolve(segments, n, m, q.device)
        count = (layout.query_positions - self.near.before - self.near.sinks).clamp(min=0)
        if segments is None:
            first = torch.full_like(layout.query_positions, min(self.near.sinks, m))
        else:
            count = torch.where(layout.query_ids >= 0, count, 0)
            order = layout.key_ids.argsort(dim=-1, stable=True)  # makes each segment contiguous
            k, v = take_tokens(k, order), take_tokens(v, order)
            place = torch.empty_like(order).scatter_(-1, order, torch.arange(m, device=q.device).expand_as(order))
            first = (place - layout.key_positions)[..., m - n :] + self.near.sinks
            first = first.clamp(max=m)
        wide = state_dtype(q.dtype)
        mean_k, mean_v = (_mean(x.to(wide), first, count) for x in (k, v))
        score = (q.to(wide) * mean_k).sum(-1) * self._scale(q) + count.clamp(min=1).to(wide).log()
        return mean_v, score.masked_fill(count == 0, -inf)

    def init_state(self, q, k, v) -> Summary:
        none = torch.zeros(0, dtype=torch.long, device=q.device)
        return self._state(k[..., :0, :], v[..., :0, :], none, torch.zeros((), dtype=torch.long, device=q.device))

    def _state(self, k: Tensor, v: Tensor, positions: Tensor, length: Tensor) -> Summary:
        wide = state_dtype(k.dtype)
        key_sum, value_sum = (x.new_zeros(*x.shape[:-2], 1, x.shape[-1], dtype=wide) for x in (k, v))
        return Summary(k, v, positions, key_sum, value_sum, length)

    def prefill(self, q, k, v, *, segments=None):
        if isinstance(segments, tuple):
            raise ValueError("segments: a pair, expected one tensor: tokens that follow are queries and keys alike.")
        out = self(q, k, v, segments=segments)
        layout = resolve(segments, q.shape[-2], k.shape[-2], q.device)
        live = in_last(layout.key_ids)
        length = live.sum(-1)
        positions = torch.where(live, layout.key_positions, -1)
        keep = live & self.near.remembers(positions, length[..., None])
        width = min(k.shape[-2], self.near.before + self.near.sinks)
        order = keep.int().argsort(dim=-1, stable=True)[..., k.shape[-2] - width :]
        held = torch.where(keep, positions, -1).gather(-1, order)
        state = self._state(take_tokens(k, order), take_tokens(v, order), held, length)
        left = (live & ~keep)[..., None]
        sums = ((x.to(state.key_sum.dtype).masked_fill(~left, 0)).sum(-2, keepdim=True) for x in (k, v))
        return out, state._replace(**dict(zip(("key_sum", "value_sum"), sums, strict=True)))

    def step(self, state: Summary, q, k, v):
        check_token(q, k, v, d=state.k.shape[-1], e=state.v.shape[-1], mechanism=self)
        with as_given(q):
            return self._step(state, q, k, v)

    def _step(self, state: Summary, q, k, v):
        wide, now = state.key_sum.dtype, state.length[..., None]
        k = torch.cat([state.k, k.expand(*state.k.shape[:-2], *k.shape[-2:])], -2)
        v = torch.cat([state.v, v.expand(*state.v.shape[:-2], *v.shape[-2:])], -2)
        at = torch.cat([state.positions, now], -1)
        scores = (q.to(wide) * self._scale(q)) @ k.to(wide).mT
        scores = scores.masked_fill(~(self.near.allows(now, at) & (at >= 0))[..., None, :], -inf)
        count = (now - self.near.before - self.near.sinks).clamp(min=0)
        some = count.clamp(min=1)[..., None]
        far = (q.to(wide) * (state.key_sum / some)).sum(-1) * self._scale(q) + some[..., 0].to(wide).log()
        far = far.masked_fill(count == 0, -inf)
        near = scores.softmax(-1) @ v.to(wide), scores.logsumexp(-1)
        out = join(near, ((state.value_sum / some).expand_as(near[0]), far)).to(q.dtype)
        return out, self._forget(state._replace(k=k, v=v, positions=at, length=state.length + 1))

    def _forget(self, state: Summary) -> Summary:
        """Remove one place if there are too many: an empty one, or the oldest key that is not a sink."""
        size = state.positions.shape[-1] - 1
        if size < self.near.before + self.near.sinks:
            return state
        at, behind = state.positions, state.positions >= self.near.sinks
        last = torch.iinfo(torch.long).max
        leaves = torch.where(behind, at, torch.where(at < 0, -1, last)).argmin(-1, keepdim=True)
        real = (at.gather(-1, leaves) >= 0)[..., None]
        others = torch.arange(size, device=at.device)
        others = others + (others >= leaves)
        wide = state.key_sum.dtype
        gone = (torch.where(real, take_tokens(x, leaves).to(wide), 0) for x in (state.k, state.v))
        key_sum, value_sum = (a + b for a, b in zip((state.key_sum, state.value_sum), gone, strict=True))
        k, v = (take_tokens(x, others) for x in (state.k, state.v))
        return Summary(k, v, at.gather(-1, others), key_sum, value_sum, state.length)

    def cost(self, dims: Dims) -> Cost:
        pairs, both = self.near.pairs(dims.n, dims.m), dims.d + dims.e
        held = min(dims.m, self.near.before + self.near.sinks)
        return Cost.of_stages(
            *softmax_stages(dims.batch * pairs, dims.d, dims.e),
            Stage("summary", dims.batch * (dims.m + 4 * dims.n) * both),
            bytes=dims.io_bytes,
            state=dims.kv_batch * (held + 1) * both,
        )

    def explain(self, q, k, v, *, segments=None):
        if isinstance(segments, tuple):
            return f"{type(self).__name__}: one segment at a time, since queries and keys have segments of their own"
        return partial_softmax.explain(q, k, v, self.near, segments, self._scale(q))

    def extra_repr(self) -> str:
        return f"before={self.near.before}, sinks={self.near.sinks}"


def _mean(
    x: Float[Tensor, "*b m w"], first: Int[Tensor, "*s n"], count: Int[Tensor, "*s n"]
) -> Float[Tensor, "*b n w"]:
    """Return the means of `count` tokens of x from `first` on; zeros if `count` is 0."""
    sums = torch.nn.functional.pad(x.cumsum(-2), (0, 0, 1, 0))
    total = take_tokens(sums, first + count) - take_tokens(sums, torch.where(count > 0, first, 0 * first))
    return torch.where(count[..., None] > 0, total / count.clamp(min=1)[..., None], 0)
