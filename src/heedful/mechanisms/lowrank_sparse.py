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

from math import inf, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from heedful.core import Cost, Dims, RecurrentMechanism, Stage, softmax_stages
from heedful.feature_maps import LogFeatureMap
from heedful.kernels.chunked_linear import attend_to_logs
from heedful.kernels.chunked_linear.groups import CHUNK
from heedful.kernels.dispatch import as_given
from heedful.kernels.partial import join, partial_softmax
from heedful.mechanisms.linear_base import log_products, state_dtype
from heedful.patterns import Causal, Full, Pattern, Window
from heedful.random_features.maps import RandomFeatures
from heedful.segments import in_last, per_segment, positions, resolve, take_tokens, visible
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs, check_token

Part = tuple[Float[Tensor, "*b n e"], Float[Tensor, "*b n"]]
"""The output of a part, and the logarithm of its normaliser."""


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
        lag = _Lag(segments, length, self.window)
        before = _prefix(lag.late(x), lag.early(y), lag.early(v), lag.runs)
        parts.append(lag.place_late(*before))
        if isinstance(self.pattern, Full):
            lag = _Lag(segments, length, max(self.window, 1))  # a query's own key is in one part
            x, y, v = (a.flip(-2) for a in (lag.early(x), lag.late(y), lag.late(v)))
            out, lse = _prefix(x, y, v, None if lag.runs is None else lag.runs.flip(-1))
            parts.append(lag.place_early(out.flip(-2), lse.flip(-1)))
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
        heads = self.feature_map.heads or 1
        own = (heads,) if heads > 1 else ()  # heads with features of their own have a state each
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
        x, y = self.feature_map.log_query(q[..., :1, :]), self.feature_map.log_key(k[..., :1, :])
        near = partial_softmax.explain(q, k, v, self._near(), segments, self._scale(q)) if self.window else "none"
        return f"far: {attend_to_logs.explain(*_kernel_inputs(x, y, v[..., :1, :], None))}\nnear: {near}"

    def extra_repr(self) -> str:
        return f"window={self.window}, {self.pattern!r}" + (f", scale={self.scale:.4g}" if self.scale else "")


class _Lag:
    """The tokens that have another one `delay` places before them in their segment (late), and those others (early).

    Two sequences of equal length, in the order of time, each segment one run; ids `runs` where there are segments, -1
    where a row has fewer tokens than others.
    """

    def __init__(self, ids: Int[Tensor, "*s n"] | None, length: int, delay: int):
        self.length, self.cut, self.runs = length, min(delay, length), None
        if ids is None:
            return
        order = ids.argsort(dim=-1, stable=True)
        ids = ids.gather(-1, order).long()
        late = (positions(ids) >= delay) & (ids >= 0)
        size = int(late.sum(-1).max()) if late.numel() else 0
        at = (~late).int().argsort(dim=-1, stable=True)[..., :size]
        self.runs = torch.where(late.gather(-1, at), ids.gather(-1, at), -1)
        self.late_at, self.early_at = order.gather(-1, at), order.gather(-1, (at - delay).clamp(min=0))

    def late(self, x: Float[Tensor, "*#b n w"]) -> Float[Tensor, "*b l w"]:
        return x[..., self.cut :, :] if self.runs is None else take_tokens(x, self.late_at)

    def early(self, x: Float[Tensor, "*#b n w"]) -> Float[Tensor, "*b l w"]:
        return x[..., : self.length - self.cut, :] if self.runs is None else take_tokens(x, self.early_at)

    def place_late(self, out: Tensor, lse: Tensor) -> Part:
        """Results of the late tokens in their places; the others get nothing."""
        if self.runs is None:
            return F.pad(out, (0, 0, self.cut, 0)), F.pad(lse, (self.cut, 0), value=-inf)
        return self._place(self.late_at, out, lse)

    def place_early(self, out: Tensor, lse: Tensor) -> Part:
        if self.runs is None:
            return F.pad(out, (0, 0, 0, self.cut)), F.pad(lse, (0, self.cut), value=-inf)
        return self._place(self.early_at, out, lse)

    def _place(self, at: Tensor, out: Tensor, lse: Tensor) -> Part:
        assert self.runs is not None
        at = torch.where(self.runs >= 0, at, self.length).expand(lse.shape)  # one place more, for what belongs nowhere
        rows = out.new_zeros(*out.shape[:-2], self.length + 1, out.shape[-1])
        rows = rows.scatter(-2, at[..., None].expand_as(out), out)
        logs = lse.new_full((*lse.shape[:-1], self.length + 1), -inf).scatter(-1, at, lse)
        return rows[..., : self.length, :], logs[..., : self.length]


def _prefix(
    x: Float[Tensor, "*#b l r"],
    y: Float[Tensor, "*#b l r"],
    v: Float[Tensor, "*#b l e"],
    ids: Int[Tensor, "*s l"] | None,
) -> Part:
    """Causal linear attention from the logarithms of features."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], v.shape[:-2])
    out, lse = attend_to_logs(*_kernel_inputs(x, y, v, ids))
    return out.reshape(*batch, *out.shape[-2:]), lse.reshape(*batch, lse.shape[-1])


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


def _kernel_inputs(x: Tensor, y: Tensor, v: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, y and v as (batch, heads, tokens, width) in float32 or better, ids as (batch, tokens)."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], v.shape[:-2])
    shared = ids is None or ids.ndim < 2 or ids.shape[-2] == 1  # all heads have the same segments
    rows, heads = (batch[:-1], batch[-1]) if shared and batch else (batch, 1)
    if ids is not None:
        ids = ids.squeeze(-2) if shared and ids.ndim > 1 else ids
        ids = ids.expand(*rows, ids.shape[-1]).reshape(prod(rows), ids.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y, v = (a.to(wide).expand(*batch, *a.shape[-2:]).reshape(prod(rows), heads, *a.shape[-2:]) for a in (x, y, v))
    return x, y, v, ids


def _at_end(x: Float[Tensor, "*b n w"], length: int, fill: float) -> Float[Tensor, "*b l w"]:
    """x as the last tokens of `length`."""
    missing = length - x.shape[-2]
    return F.pad(x, (0, 0, missing, 0), value=fill) if missing else x
