"""Low rank plus sparse (Chen et al. 2021, Scatterbrain, arXiv:2110.15343): near keys exact, far keys by features.

matrix      A_ij = w_ij / Σ_{l visible} w_il,   w_ij = exp(scale · q_i·k_j) where |i − j| < w,  φ(q_i)·φ(k_j) elsewhere
fast        softmax over the window, with log Σ exp of each row (kernels/partial); linear attention of the queries
            from w on to the keys up to m − w, which is the rest delayed by w, with the logarithm of its normaliser
            (where queries look both ways, once more backwards in time; old keys of a cache, which all queries see, in
            one sum); joined, o = Σ_p exp(lse_p − lse) o_p
recurrence  k_t, v_t enter a queue of w; what leaves it enters S, z as in `Linear`; o_t joins the queue and S
cost        2 · pairs · (d + e) + 2(n − w)(c(r + e + 1) + 2r(e + 1)) flops; state r(e + 2) + w(d + e)

Scatterbrain writes the same matrix as a low-rank one with a sparse correction, w = φφᵀ + (exp(S) − φφᵀ) on the pattern.
Here no key is ever in both parts, so nothing is added in order to be subtracted again. One normaliser for both only
means something where φ(q)·φ(k) is near exp(scale · q·k): positive random features, or features that were trained to be.
Everything is kept in logarithms until the parts are joined, and each feature is on the scale of its largest key so far,
so nothing overflows, nothing vanishes and nothing looks ahead.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heedful.core import Cost, Dims, RecurrentMechanism
from heedful.feature_maps import LogFeatureMap
from heedful.kernels.chunked_linear import attend_to_logs
from heedful.kernels.chunked_linear.groups import CHUNK
from heedful.kernels.delayed_linear import Part, attend_after, attend_before, kernel_inputs
from heedful.kernels.dispatch import as_given
from heedful.kernels.partial import join, partial_softmax
from heedful.mechanisms.linear_base import log_products, state_dtype
from heedful.patterns import Causal, Full, Pattern, Window
from heedful.random_features.maps import RandomFeatures
from heedful.segments import in_last, per_segment, resolve, take_tokens, visible
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs, check_token


class Queue(NamedTuple):
    """The last w keys and values, and of those before them S = Σ φ(k) vᵀ and z = Σ φ(k), rows times exp(log_scale).

    Rows that have seen fewer tokens than others have empty places at the front of their queue.
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

    feature_map   features of the far keys, given by their logarithms: FavorPlus, FavorPlusPlus, FavorSharp, or Hedgehog
                  once it is trained
    window        how many of the nearest keys are exact, a query's own among them; 0 leaves linear attention
    pattern       Causal(), or Full() where queries look both ways and the window is as wide on each side
    scale         of q·k; that of the random features, or d^-½
    """

    kernel = attend_to_logs  # of the far part, which is most of the work

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
        if segments is not None:  # padding may hold anything
            q = q.masked_fill(segments[..., m - n :, None] < 0, 0)
            k, v = (x.masked_fill(segments[..., None] < 0, 0) for x in (k, v))
        parts = [
            (out[..., out.shape[-2] - n :, :], lse[..., lse.shape[-1] - n :])
            for out, lse in self._far(q, k, v, segments)
        ]
        if self.window:
            parts.append(partial_softmax(q, k, v, self._near(), segments, self._scale(q)))
        return join(*parts).to(v.dtype)

    def _far(self, q, k, v, segments: Tensor | None) -> list[Part]:
        """The parts of the keys before the window and, where queries see them, after it; rows for the last of all time.

        Time ends with the last query and the last key. There may be more keys than queries, or more queries than keys.
        """
        x, y = self.feature_map.log_query(q), self.feature_map.log_key(k)
        parts = []
        if segments is None and (old := self._old(q.shape[-2], k.shape[-2])):
            parts.append(_total(x, y[..., :old, :], v[..., :old, :]))
            y, v = y[..., old:, :], v[..., old:, :]
        length = max(q.shape[-2], y.shape[-2])
        x, y, v = _at_end(x, length, 0.0), _at_end(y, length, -inf), _at_end(v, length, 0.0)
        parts.append(attend_before(x, y, v, segments, self.window))
        if isinstance(self.pattern, Full):  # a query's own key is in one part
            parts.append(attend_after(x, y, v, segments, max(self.window, 1)))
        return parts

    def _old(self, n: int, m: int) -> int:
        """How many keys of a cache lie beyond the window of every query."""
        return max(m - n - self.window, 0)

    def _near(self) -> Window:
        reach = self.window - 1
        return Window(reach, reach if isinstance(self.pattern, Full) else 0)

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def init_state(self, q, k, v) -> Queue:
        return self._empty(k[..., :0, :], v[..., :0, :], torch.zeros((), dtype=torch.long, device=q.device))

    def _empty(self, k: Tensor, v: Tensor, length: Tensor) -> Queue:
        """A state with a queue and nothing that has left it."""
        batch = broadcast_shapes(k.shape[:-2], v.shape[:-2], length.shape)
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
            order = live.int().argsort(dim=-1, stable=True)  # the tokens to go on with come last
            k, v, live = take_tokens(k, order), take_tokens(v, order), live.gather(-1, order)
        cut = max(m - self.window, 0)
        state = self._empty(k[..., cut:, :], v[..., cut:, :], live.sum(-1))
        with as_given(q):
            return out, self._absorb(state, k[..., :cut, :], v[..., :cut, :], live[..., :cut])

    def _absorb(self, state: Queue, k: Tensor, v: Tensor, real: Bool[Tensor, "*s l"]) -> Queue:
        """The state with more tokens that have left the queue; places that are not real held none."""
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
        out = size - min(size, self.window)  # 1 where the queue is full: its first token leaves before the query looks
        state = self._absorb(state, k[..., :out, :], v[..., :out, :], real[..., :out])
        state = state._replace(k=k[..., out:, :], v=v[..., out:, :], length=length)
        wide = state.S.dtype
        parts = [_to_state(self.feature_map.log_query(q.to(wide)), state.S, state.z, state.log_scale)]
        if self.window:
            scores = (q.to(wide) * self._scale(q)) @ state.k.to(wide).mT
            scores = scores.masked_fill(~real[..., None, out:], -inf)
            parts.append((scores.softmax(-1) @ state.v.to(wide), scores.logsumexp(-1)))
        return join(*parts).to(q.dtype), state

    def cost(self, dims: Dims) -> Cost:
        r, e, both = self.feature_map.dim(dims.d), dims.e + 1, isinstance(self.pattern, Full)
        pairs = self._near().pairs(dims.n, dims.m) if self.window else 0
        old = self._old(dims.n, dims.m)
        time = max(dims.n, dims.m - old)
        far = sum(
            tokens * (min(CHUNK, tokens) * (r + e) + 2 * r * e)
            for delay in [self.window] + [max(self.window, 1)] * both
            if (tokens := max(time - delay, 0))
        )
        far += (dims.n + old) * r * e * bool(old)
        features = (dims.n + dims.m) * self.feature_map.flops(dims.d)
        return Cost(
            flops=dims.batch * (2 * (pairs * (dims.d + dims.e) + far) + features),
            bytes=dims.io_bytes,
            state=dims.batch * (r * (e + 1) + min(dims.m, self.window) * (dims.d + dims.e)),
        )

    def explain(self, q, k, v, *, segments=None):
        if isinstance(segments, tuple):
            return f"{type(self).__name__}: one segment at a time, since queries and keys have segments of their own"
        x, y = self.feature_map.log_query(q[..., :1, :]), self.feature_map.log_key(k[..., :1, :])
        near = partial_softmax.explain(q, k, v, self._near(), segments, self._scale(q)) if self.window else "none"
        return f"far: {attend_to_logs.explain(*kernel_inputs(x, y, v[..., :1, :], None))}\nnear: {near}"

    def extra_repr(self) -> str:
        return f"window={self.window}, {self.pattern!r}" + (f", scale={self.scale:.4g}" if self.scale else "")


def _total(x: Float[Tensor, "*#b n r"], y: Float[Tensor, "*#b l r"], v: Float[Tensor, "*#b l e"]) -> Part:
    """Linear attention to all keys, from the logarithms of features."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y, v = x.to(wide), y.to(wide), v.to(wide)
    scale = y.detach().amax(-2)
    y = (y - scale[..., None, :]).exp()
    return _to_state(x, y.mT @ v, y.sum(-2), scale)


def _to_state(
    x: Float[Tensor, "*#b n r"], S: Float[Tensor, "*#b r e"], z: Float[Tensor, "*#b r"], scale: Float[Tensor, "*#b r"]
) -> Part:
    """Of queries, given by the logarithms of their features, to sums over keys; nothing where there were no keys."""
    some = scale[..., :1] > -inf
    x = x + torch.where(some, scale, 0)[..., None, :]
    top = x.detach().amax(-1)
    x = (x - top[..., None]).exp()
    total = torch.where(some, (x @ z[..., None])[..., 0], 1)
    out = (x @ S) / total[..., None]
    return out, torch.where(some, total.log() + top, -inf).expand(out.shape[:-1])


def _at_end(x: Float[Tensor, "*b n w"], length: int, fill: float) -> Float[Tensor, "*b l w"]:
    """x as the last tokens of `length`."""
    missing = length - x.shape[-2]
    return F.pad(x, (0, 0, missing, 0), value=fill) if missing else x
