"""The base class of linear mechanisms: features of queries and keys, one chunked kernel, one running state.

    forward     chunks of c: inside by tril(φq φkᵀ), across by S          (kernels/linear_attention chooses the kernel)
    recurrence  S_t = λ S_{t-1} + φ(k_t) v_tᵀ,  z_t = λ z_{t-1} + φ(k_t),  o_t = S_tᵀφ(q_t) / z_t·φ(q_t)
    cost        2n(c(r + e) + 2re) flops, state r(e + 1)

The normaliser is accumulated in float32 or better. Features that are given by their logarithms have one scale each, the
largest key so far, which is part of the state. The normaliser of a query then has a term of 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from heedful.core import Cost, Dims, RecurrentMechanism, Stage
from heedful.feature_maps import FeatureMap, LogFeatureMap
from heedful.kernels.chunked_linear.chunks import CHUNK
from heedful.kernels.dispatch import Kernel, as_given
from heedful.kernels.linear_attention import LinearCall, LinearOptions, linear_attention
from heedful.kernels.linear_step import linear_step
from heedful.patterns import Causal, Full, Pattern
from heedful.segments import in_last, per_segment, resolve, visible
from heedful.shapes import Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs, check_token


class Running(NamedTuple):
    """S = Σ φ(k) vᵀ, z = Σ φ(k), tokens so far.

    If features are given by logarithms, the true rows of S and z are the stored ones times exp(log_scale).
    """

    S: Float[Tensor, "*b r e"]
    z: Float[Tensor, "*b r"] | None
    log_scale: Float[Tensor, "*b r"] | None
    length: Int[Tensor, "*s"]


class LinearBase(RecurrentMechanism):
    """Base class of `Linear`, `Retention` and `GatedLinear`."""

    kernel: Kernel = linear_attention

    def __init__(self, feature_map: FeatureMap, pattern: Pattern, normalise: bool):
        super().__init__(pattern)
        if not isinstance(pattern, Full | Causal):
            raise ValueError(
                f"pattern: {pattern!r}, expected Full() or Causal(): a sum of features can't leave single keys out. "
                "LowRankSparse joins a linear part with a pattern."
            )
        if not isinstance(feature_map, FeatureMap):
            raise TypeError(f"feature_map: expected a FeatureMap such as Elu1(), got {type(feature_map).__name__}.")
        self.feature_map = feature_map
        self.normalise = normalise

    def log_decay(self) -> Float[Tensor, " heads"] | None:
        """log λ of each head, or None without decay."""
        return None

    @property
    def own_heads(self) -> int:
        """Number of heads with separate features or decays, which need one state each; 1 if all heads share them."""
        decay = self.log_decay()
        return max(self.feature_map.heads or 1, 1 if decay is None else decay.numel())

    def fading(self, k: Float[Tensor, "*b 1 d"], dtype: torch.dtype) -> Float[Tensor, "*c #r"] | None:
        """Return the log decay of each row of the state at the token with key k, or None without decay."""
        decay = self.log_decay()
        return None if decay is None else decay[..., None]

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        n, m = q.shape[-2], k.shape[-2]
        layout = resolve(segments, n, m, q.device)
        sees = visible(self.pattern, n, m, segments, q.device)
        distance = layout.query_positions[..., :, None] - layout.key_positions[..., None, :]
        decay = self.log_decay()
        fade = torch.zeros_like(distance) if decay is None else decay[..., None, None] * distance
        fade = fade.masked_fill(~sees, 0).to(q.dtype)
        if isinstance(self.feature_map, LogFeatureMap):
            with as_given(q):
                log = log_products(self.feature_map.log_query(q), self.feature_map.log_key(k)) + fade
            log = log.masked_fill(~sees, -torch.inf)
            if self.normalise and m:
                total = log.logsumexp(-1, keepdim=True)
                log = log - total.masked_fill(total == -torch.inf, 0)
            return log.exp().to(q.dtype)
        with as_given(q):
            x, y = self.feature_map.query(q, layout.query_positions), self.feature_map.key(k, layout.key_positions)
            weights = x @ y.mT
        weights = torch.where(sees, weights * fade.exp(), 0)
        if self.normalise:
            total = weights.sum(-1, keepdim=True)
            weights = torch.where(total == 0, 0, weights / total.masked_fill(total == 0, 1))
        return weights.to(q.dtype)

    def forward(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        if isinstance(segments, tuple):
            return per_segment(self, q, k, v, segments, self.parameters(), together=True)
        return self.kernel(LinearCall(q, k, v, self._options(), segments))[0]

    def _options(self, stateful: bool = False) -> LinearOptions:
        """Return the options of the kernel call."""
        causal = isinstance(self.pattern, Causal)
        return LinearOptions(self.feature_map, self.normalise, causal, self.log_decay(), None, stateful)

    def prefill(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        if isinstance(segments, tuple):
            raise ValueError("segments: a pair, expected one tensor: tokens that follow are queries and keys alike.")
        out, state = self.kernel(LinearCall(q, k, v, self._options(stateful=True), segments))
        batch, wide = out.shape[:-2], state_dtype(q.dtype)
        own = broadcast_shapes(self._state_batch(k, v), () if segments is None else segments.shape[:-1])
        S, z, scale = (
            None if x is None else _one_for_all(x.reshape((*batch, *x.shape[2:])), batch, own).to(wide) for x in state
        )
        ids = resolve(segments, q.shape[-2], k.shape[-2], q.device).key_ids
        return out, Running(S, z, scale, in_last(ids).sum(-1))  # type: ignore[arg-type]

    def init_state(self, q, k, v) -> Running:
        check_inputs(q, k, v, mechanism=self)
        batch, wide = self._state_batch(k, v), state_dtype(q.dtype)
        r = self.feature_map.dim(q.shape[-1])
        logs = isinstance(self.feature_map, LogFeatureMap)
        return Running(
            q.new_zeros(*batch, r, v.shape[-1], dtype=wide),
            q.new_zeros(*batch, r, dtype=wide) if self.normalise else None,
            q.new_zeros(*batch, r, dtype=wide) if logs else None,
            torch.zeros((), dtype=torch.long, device=q.device),
        )

    def _state_batch(self, k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Return the batch axes of a state: those of keys and values, and heads with separate features or decays."""
        token = k.new_zeros(*k.shape[:-2], 1, k.shape[-1])
        where = torch.zeros(1, dtype=torch.long, device=k.device)
        features = self.feature_map.key(token, where)
        fade = self.fading(token, token.dtype)
        return broadcast_shapes(features.shape[:-2], v.shape[:-2], () if fade is None else fade.shape[:-1])

    def step(self, state: Running, q, k, v):
        with as_given(q):
            return self._step(state, q, k, v)

    def _step(self, state: Running, q, k, v):
        check_token(q, k, v, d=q.shape[-1], e=state.S.shape[-1], mechanism=self)
        if self.feature_map.dim(q.shape[-1]) != state.S.shape[-2]:
            raise ValueError(
                f"q: width {q.shape[-1]} gives {self.feature_map.dim(q.shape[-1])} features, expected "
                f"{state.S.shape[-2]} as in the state. Likely cause: a state of another layer."
            )
        dtype, wide, name = q.dtype, state.S.dtype, self.feature_map.kernel_name
        fade = self.fading(k, wide)
        if isinstance(self.feature_map, LogFeatureMap):
            name, q, k = "exp", self.feature_map.log_query(q.to(wide)), self.feature_map.log_key(k.to(wide))
        elif name is None:
            name, here = "identity", state.length[..., None]
            q, k = self.feature_map.query(q.to(wide), here), self.feature_map.key(k.to(wide), here)
        out, S, z, scale = linear_step(
            q, k, v, state.S, state.z, state.log_scale, state.length, feature=name, fade=fade
        )
        return out.to(dtype), Running(S, z, scale, state.length + 1)

    def cost(self, dims: Dims) -> Cost:
        r, e = self.feature_map.dim(dims.d), dims.e
        chunk = CHUNK if isinstance(self.pattern, Causal) else 0
        tokens = max(dims.n, dims.m)
        inside = min(chunk, tokens) * (r + e)
        logs = isinstance(self.feature_map, LogFeatureMap)
        made = dims.batch * (tokens + dims.m)  # features
        return Cost.of_stages(
            Stage("features", made * self.feature_map.flops(dims.d), elementwise=made * r),
            Stage("within chunks", 2 * dims.batch * tokens * inside),
            Stage("state", 2 * made * r * e),
            bytes=dims.io_bytes,
            state=dims.states(self.own_heads) * r * (e + self.normalise + logs),
        )

    def explain(self, q, k, v, *, segments=None):
        if isinstance(segments, tuple):
            return f"{type(self).__name__}: one segment at a time, since queries and keys have segments of their own"
        call = LinearCall(q, k, v, self._options(), segments)
        turned = f"{type(self.feature_map).__name__}: features are made in the kernel, from angles\n"
        return (turned if call.turned else "") + self.kernel.explain(call)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype wider than that of the inputs: a sum over 100,000 tokens rounds 100,000 times."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _one_for_all(x: Tensor, batch: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """Reduce x (*batch, …) to the batch axes `own`: entries that share a state store it once, in a separate tensor."""
    if batch == own:
        return x
    if 0 in batch:
        return x.new_zeros(*own, *x.shape[len(batch) :])
    missing = len(batch) - len(own)
    for axis, size in enumerate(batch):
        if size > 1 and (axis < missing or own[axis - missing] == 1):
            x = x.narrow(axis, 0, 1)
    return x.reshape(*own, *x.shape[len(batch) :]).clone()


def log_products(x: Tensor, y: Tensor) -> Tensor:
    """Return log Σ_r exp(x_ir + y_jr), computed a few rows at a time."""
    rows = [(part[..., :, None, :] + y[..., None, :, :]).logsumexp(-1) for part in x.split(64, -2)]
    return torch.cat(rows, -2) if rows else x @ y.mT
