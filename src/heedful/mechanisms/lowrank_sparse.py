"""Low rank plus sparse (Chen et al. 2021, Scatterbrain, arXiv:2110.15343): near keys exact, far keys by features.

matrix      A_ij = w_ij / Σ_{l visible} w_il,   w_ij = exp(scale · q_i·k_j) where |i − j| < w,  φ(q_i)·φ(k_j) elsewhere
fast        softmax over the window, with log Σ exp of each row (kernels/partial); linear attention of queries i ≥ w to
            the keys j ≤ i − w, that is, causal linear attention delayed by w, with the logarithm of its normaliser
            (if queries see later keys, a second time in reverse order; cached keys that all queries see as far keys, in
            one sum); combined, o = Σ_p exp(lse_p − lse) o_p
recurrence  k_t, v_t enter a queue of length w; tokens that leave it enter S, z as in `Linear`; o_t combines queue and S
cost        2 · pairs · (d + e) + 2(n − w)(c(r + e + 1) + 2r(e + 1)) flops; state r(e + 2) + w(d + e)

Scatterbrain writes the same matrix as low rank plus a sparse correction, w = φφᵀ + (exp(S) − φφᵀ) on the pattern. Here
no key is in both parts, so nothing is added and subtracted again. A common normaliser makes sense only if φ(q)·φ(k) is
close to exp(scale · q·k): use positive random features, or features trained for it. All weights are logarithms until
the parts are combined, and each feature is scaled by its largest key so far. So weights neither overflow nor underflow,
and they do not depend on later keys.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from heedful.core import Cost, Dims, RecurrentMechanism, Stage, softmax_stages
from heedful.feature_maps import LogFeatureMap
from heedful.kernels.chunked_linear import attend_to_logs
from heedful.kernels.chunked_linear.chunks import CHUNK
from heedful.kernels.dispatch import as_given
from heedful.kernels.partial import join, partial_softmax
from heedful.kernels.partial.delayed import far_parts, kernel_inputs, old_keys, part_of_state
from heedful.mechanisms.linear_base import log_products, state_dtype
from heedful.patterns import Causal, Full, Pattern, Window
from heedful.random_features.maps import RandomFeatures
from heedful.segments import in_last, per_segment, resolve, take_tokens, visible
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs, check_token


class Queue(NamedTuple):
    """The last w keys and values, and for earlier tokens S = Σ φ(k) vᵀ and z = Σ φ(k), rows times exp(log_scale).

    Batch rows with fewer tokens than others have empty places at the front of their queue.
    """

    S: Float[Tensor, "*b r e"]
    z: Float[Tensor, "*b r"]
    log_scale: Float[Tensor, "*b r"]
    k: Float[Tensor, "*#b l d"]
    v: Float[Tensor, "*#b l e"]
    length: Int[Tensor, "*s"]


class LowRankSparse(RecurrentMechanism):
    """Exact weights for the nearest keys, linear attention for all others, under one normaliser.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 1024, 16).unbind()
    >>> attend = h.LowRankSparse(h.FavorPlus(16, features=64), window=128)
    >>> attend(q, k, v).shape
    torch.Size([1, 8, 1024, 16])
    >>> exact = h.LowRankSparse(h.FavorPlus(16, features=64), window=1024)
    >>> torch.allclose(exact(q, k, v), h.Softmax()(q, k, v), atol=1e-5)
    True

    feature_map   log features of the far keys: FavorPlus, FavorPlusPlus, FavorSharp, or a trained Hedgehog
    window        number of exact nearest keys, including the query's own; 0 gives linear attention
    pattern       Causal(), or Full(): queries also see later keys, with a window of the same width on each side
    scale         factor of q·k; by default that of the random features, or d^-½
    """

    kernel = attend_to_logs  # kernel of the far part, which is most of the work

    def __init__(
        self,
        feature_map: LogFeatureMap,
        window: int = 128,
        pattern: Pattern = Causal(),  # noqa: B008  (frozen)
        scale: float | None = None,
    ):
        super().__init__(pattern)
        if not isinstance(pattern, Full | Causal):
            raise ValueError(f"pattern: {pattern!r}, expected Full() or Causal(); `window` says which keys are exact.")
        if not isinstance(feature_map, LogFeatureMap):
            raise TypeError(
                f"feature_map: expected features given by their logarithms, such as FavorPlus(d, features), got "
                f"{type(feature_map).__name__}. Others do not approximate exp(q·k), so a normaliser that they share "
                "with exact weights would mix two scales; heedful.Sum joins two mechanisms that have one each."
            )
        if not isinstance(window, int) or window < 0:
            raise ValueError(f"window: expected an integer ≥ 0, the number of exact keys, got {window!r}.")
        own = feature_map.scale if isinstance(feature_map, RandomFeatures) else None
        if scale is not None and own is not None and scale != own:
            raise ValueError(f"scale: {scale}, but the features approximate exp({own:.4g} · q·k): expected the same.")
        self.feature_map = feature_map
        self.window = window
        self.scale = own if scale is None else scale

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        n, m = q.shape[-2], k.shape[-2]
        layout = resolve(segments, n, m, q.device)
        distance = layout.query_positions[..., :, None] - layout.key_positions[..., None, :]
        with as_given(q):
            exact = q @ k.mT * self._scale(q)
            log = log_products(self.feature_map.log_query(q), self.feature_map.log_key(k))
        log = torch.where(distance.abs() < self.window, exact.to(log.dtype), log)
        log = log.masked_fill(~visible(self.pattern, n, m, segments, q.device), -inf)
        if m:
            total = log.logsumexp(-1, keepdim=True)
            log = log - total.masked_fill(total == -inf, 0)
        return log.exp().to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        if isinstance(segments, tuple):
            return per_segment(self, q, k, v, segments, self.parameters())
        with as_given(q):
            return self._attend(q, k, v, segments)

    def _attend(self, q, k, v, segments: Tensor | None) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        if segments is not None:  # padding may contain arbitrary numbers
            q = q.masked_fill(segments[..., m - n :, None] < 0, 0)
            k, v = (x.masked_fill(segments[..., None] < 0, 0) for x in (k, v))
        parts = [
            (out[..., out.shape[-2] - n :, :], lse[..., lse.shape[-1] - n :])
            for out, lse in far_parts(
                *self._logs(q, k), v, self.window, both_ways=isinstance(self.pattern, Full), segments=segments
            )
        ]
        if self.window:
            parts.append(partial_softmax(q, k, v, self._near(), segments, self._scale(q)))
        return join(*parts).to(v.dtype)

    def _logs(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log features of queries and keys."""
        return self.feature_map.log_query(q), self.feature_map.log_key(k)

    def _near(self) -> Window:
        reach = self.window - 1
        return Window(reach, reach if isinstance(self.pattern, Full) else 0)

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def init_state(self, q, k, v) -> Queue:
        return self._empty(k[..., :0, :], v[..., :0, :], torch.zeros((), dtype=torch.long, device=q.device))

    def _empty(self, k: Tensor, v: Tensor, length: Tensor) -> Queue:
        """Return a state with this queue and empty S and z."""
        heads = self.feature_map.heads or 1
        own = (heads,) if heads > 1 else ()  # heads with separate features have one state each
        batch = broadcast_shapes(k.shape[:-2], v.shape[:-2], length.shape, own)
        r, wide = self.feature_map.dim(k.shape[-1]), state_dtype(k.dtype)
        zeros = k.new_zeros(*batch, r, v.shape[-1] + 1, dtype=wide)
        scale = k.new_full((*batch, r), -inf, dtype=wide)
        return Queue(zeros[..., :-1], zeros[..., -1], scale, k, v, length)

    def prefill(self, q, k, v, *, segments=None):
        if isinstance(segments, tuple):
            raise ValueError("segments: a pair, expected one tensor: tokens that follow are queries and keys alike.")
        out = self(q, k, v, segments=segments)
        m = k.shape[-2]
        live = in_last(resolve(segments, q.shape[-2], m, q.device).key_ids)
        if segments is not None:
            k, v = (x.masked_fill(~live[..., None], 0) for x in (k, v))
            order = live.int().argsort(dim=-1, stable=True)  # the tokens of the last segment come last
            k, v, live = take_tokens(k, order), take_tokens(v, order), live.gather(-1, order)
        cut = max(m - self.window, 0)
        state = self._empty(k[..., cut:, :], v[..., cut:, :], live.sum(-1))
        with as_given(q):
            return out, self._absorb(state, k[..., :cut, :], v[..., :cut, :], live[..., :cut])

    def _absorb(self, state: Queue, k: Tensor, v: Tensor, real: Bool[Tensor, "*s l"]) -> Queue:
        """Return the state after tokens left the queue and were added to S and z; only `real` places held a token."""
        if not k.shape[-2]:
            return state
        wide = state.S.dtype
        y = self.feature_map.log_key(k.to(wide)).masked_fill(~real[..., None], -inf)
        scale = torch.maximum(state.log_scale, y.amax(-2))
        top = scale.masked_fill(scale == -inf, 0)
        fall, y = (state.log_scale - top).exp(), (y - top[..., None, :]).exp()
        S = state.S * fall[..., None] + y.mT @ v.to(wide)
        return state._replace(S=S, z=state.z * fall + y.sum(-2), log_scale=scale)

    def step(self, state: Queue, q, k, v):
        check_token(q, k, v, d=state.k.shape[-1], e=state.v.shape[-1], mechanism=self)
        with as_given(q):
            return self._step(state, q, k, v)

    def _step(self, state: Queue, q, k, v):
        k = torch.cat([state.k, k.expand(*state.k.shape[:-2], *k.shape[-2:])], -2)
        v = torch.cat([state.v, v.expand(*state.v.shape[:-2], *v.shape[-2:])], -2)
        length, size = state.length + 1, k.shape[-2]
        real = torch.arange(size, device=q.device) >= size - length[..., None]
        out = size - min(size, self.window)  # 1 if the queue is full: its first token then moves to S
        state = self._absorb(state, k[..., :out, :], v[..., :out, :], real[..., :out])
        state = state._replace(k=k[..., out:, :], v=v[..., out:, :], length=length)
        wide = state.S.dtype
        parts = [part_of_state(self.feature_map.log_query(q.to(wide)), state.S, state.z, state.log_scale)]
        if self.window:
            scores = (q.to(wide) * self._scale(q)) @ state.k.to(wide).mT
            scores = scores.masked_fill(~real[..., None, out:], -inf)
            parts.append((scores.softmax(-1) @ state.v.to(wide), scores.logsumexp(-1)))
        return join(*parts).to(q.dtype), state

    def cost(self, dims: Dims) -> Cost:
        r, e, both = self.feature_map.dim(dims.d), dims.e + 1, isinstance(self.pattern, Full)
        pairs = self._near().pairs(dims.n, dims.m) if self.window else 0
        old = old_keys(dims.n, dims.m, self.window)
        time = max(dims.n, dims.m - old)
        far = sum(
            tokens * (min(CHUNK, tokens) * (r + e) + 2 * r * e)
            for delay in [self.window] + [max(self.window, 1)] * both
            if (tokens := max(time - delay, 0))
        )
        far += (dims.n + old) * r * e * bool(old)
        heads = self.feature_map.heads or 1
        made = dims.batch * dims.n + dims.states(heads) * dims.m  # features
        queue = dims.kv_batch * min(dims.m, self.window) * (dims.d + dims.e)
        return Cost.of_stages(
            *softmax_stages(dims.batch * pairs, dims.d, dims.e),
            Stage("features", made * self.feature_map.flops(dims.d), elementwise=made * r),
            Stage("far keys", 2 * dims.batch * far),
            bytes=dims.io_bytes,
            state=dims.states(heads) * r * (e + 1) + queue,
        )

    def explain(self, q, k, v, *, segments=None):
        if isinstance(segments, tuple):
            return f"{type(self).__name__}: one segment at a time, since queries and keys have segments of their own"
        x, y = self._logs(q[..., :1, :], k[..., :1, :])
        near = partial_softmax.explain(q, k, v, self._near(), segments, self._scale(q)) if self.window else "none"
        return f"far: {attend_to_logs.explain(*kernel_inputs(x, y, v[..., :1, :], None))}\nnear: {near}"

    def extra_repr(self) -> str:
        return f"window={self.window}, {self.pattern!r}" + (f", scale={self.scale:.4g}" if self.scale else "")
