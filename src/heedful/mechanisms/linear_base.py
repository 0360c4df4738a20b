"""What linear mechanisms share: features of queries and keys, one chunked kernel, one running state.

    forward     chunks of c: inside by tril(φq φkᵀ), across by S      (kernels/chunked_linear)
                features that the kernel knows are made inside, and turned there by angles (cosFormer's)
                where log φ is linear in a token, features are made inside (kernels/random_features)
    recurrence  S_t = λ S_{t-1} + φ(k_t) v_tᵀ,  z_t = λ z_{t-1} + φ(k_t),  o_t = S_tᵀφ(q_t) / z_t·φ(q_t)
    cost        2n(c(r + e) + 2re) flops, state r(e + 1)

The normaliser is kept in float32 or better; sums, not products, make it. Features given by their logarithms have a
scale each, the largest key so far, which is part of the state: the normaliser of a query then has a term of 1.
"""

from __future__ import annotations

from math import log, prod
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from heedful.core import Cost, Dims, RecurrentMechanism, Stage
from heedful.feature_maps import FeatureMap, LogFeatureMap, TurnedFeatureMap
from heedful.kernels.chunked_linear import chunked_linear
from heedful.kernels.chunked_linear.features import LinearState, runs
from heedful.kernels.chunked_linear.groups import CHUNK, LEAST
from heedful.kernels.dispatch import Kernel, as_given
from heedful.kernels.linear_step import linear_step
from heedful.kernels.random_features import random_features
from heedful.kernels.tensor_cache import kept
from heedful.patterns import Causal, Full, Pattern
from heedful.segments import differ_by_head, in_last, of_head, per_segment, resolve, take_tokens, visible
from heedful.shapes import Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs, check_token

_DECAYS = WeakIdKeyDictionary()


class Running(NamedTuple):
    """S = Σ φ(k) vᵀ, z = Σ φ(k), tokens so far.

    Where features are given by logarithms, rows of S and of z are to be multiplied by exp(log_scale).
    """

    S: Float[Tensor, "*b r e"]
    z: Float[Tensor, "*b r"] | None
    log_scale: Float[Tensor, "*b r"] | None
    length: Int[Tensor, "*s"]


class LinearBase(RecurrentMechanism):
    """Base of `Linear`, `Retention` and `GatedLinear`."""

    kernel: Kernel = chunked_linear

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
        """log λ of each head, or None where nothing decays."""
        return None

    @property
    def own_heads(self) -> int:
        """How many heads have features or decays of their own, and so a state each; 1 where all share them."""
        decay = self.log_decay()
        return max(self.feature_map.heads or 1, 1 if decay is None else decay.numel())

    def fading(self, k: Float[Tensor, "*b 1 d"], dtype: torch.dtype) -> Float[Tensor, "*c #r"] | None:
        """log of what the token of key k leaves of each row of the state, or None where nothing decays."""
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
                log = _log_products(self.feature_map.log_query(q), self.feature_map.log_key(k)) + fade
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
        if segments is None and q.is_cuda and not torch.compiler.is_compiling():
            out = self._again(q, k, v)
            if out is not None:
                return out
        if isinstance(segments, tuple) and differ_by_head(segments):
            return self._head_by_head(q, k, v, segments)
        if isinstance(segments, tuple):
            return per_segment(self, q, k, v, segments, self.parameters())
        if isinstance(self.feature_map, LogFeatureMap):
            with as_given(q):
                refused, inputs, options = self._fused(q, k, v, segments)
                if not refused:
                    out = random_features(*inputs, **options)
                    return out.reshape(*broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), *out.shape[-2:])
        return self._run(q, k, v, segments, False)[0]

    def _head_by_head(self, q, k, v, segments: tuple[Tensor, Tensor]) -> Tensor:
        """A pair of segments for each head: all heads under those of one, of which that one is kept.

        Features and decays may be those of a head, so a call always has all heads.
        """
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
        rows = []
        for head in range(batch[-1]):
            queries, keys = (ids if ids.ndim < 2 else ids[..., None, :] for ids in of_head(segments, head))
            rows.append(per_segment(self, q, k, v, (queries, keys))[..., head, :, :])
        return torch.stack(rows, -3)

    def _again(self, q, k, v) -> Tensor | None:
        """The output, where the kernel has taken inputs of this kind before: a short way to the launch. Or None."""
        turned, name = self._turned(), self._known().kernel_name
        if name is None or self.kernel is not chunked_linear or not q.ndim == k.ndim == v.ndim == 4:
            return None
        decay, heads = self.log_decay(), q.shape[1]
        if decay is not None:
            if decay.requires_grad or k.shape[1] != heads:
                return None
            own = decay
            decay = kept(_DECAYS, [own], heads, lambda: own.expand(heads).float().contiguous())
        angles = None if turned is None else _angles(turned, None, q.shape[-2], k.shape[-2], q.device)
        return chunked_linear.again(q, k, v, name, self.normalise, isinstance(self.pattern, Causal), decay, angles)

    def _turned(self) -> TurnedFeatureMap | None:
        """The feature map, where the kernel turns features by itself."""
        turned = self.feature_map
        if not isinstance(turned, TurnedFeatureMap) or self.kernel is not chunked_linear:
            return None
        return None if turned.still.kernel_name is None else turned

    def _known(self) -> FeatureMap:
        """The features that the kernel may know: those before they are turned, where it does that."""
        turned = self._turned()
        return self.feature_map if turned is None else turned.still

    def _fused(self, q, k, v, segments: Tensor | None) -> tuple[list[str], list[Tensor], dict[str, Any]]:
        """Why the kernel that makes features itself can't run; if nothing speaks against it, its inputs."""
        said = []
        if not self.normalise:
            said.append("features are shifted there, which only the normaliser takes out again.")
        if self.log_decay() is not None or self.kernel is not chunked_linear:
            said.append("there is no decay.")
        if segments is not None:
            said.append("there are no segments.")
        if 0 in (*q.shape, *k.shape, *v.shape):
            said.append("there is nothing to make features of in an empty tensor.")
        if not isinstance(self.feature_map, LogFeatureMap):
            said.append(f"{type(self.feature_map).__name__} does not give logarithms of features.")
        if said or not isinstance(self.feature_map, LogFeatureMap):
            return said, [], {}
        logs = self.feature_map.linear_logs()
        if logs is None:
            return [f"the logarithms of {type(self.feature_map).__name__} are not linear in a token."], [], {}
        if logs.query_weight.shape[-2] != k.shape[-1]:
            return [f"the projection is {logs.query_weight.shape[-2]} wide, k {k.shape[-1]}."], [], {}
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        heads = batch[-1] if batch else 1
        # heads that share their keys share them in the kernel too
        shared = heads > 1 and len(logs.query_weight) == 1 and all(x.ndim < 3 or x.shape[-3] == 1 for x in (k, v))
        own = (*batch[:-1], 1) if shared else batch
        key_bias = None
        if logs.key_axes is not None:
            moved = k.to(logs.key_axes.dtype) @ logs.key_axes.mT
            key_bias = (moved.square().sum(-1) / -2).expand(*own, -1).reshape(-1, own[-1] if own else 1, k.shape[-2])
        shapes = (batch, own, own)
        inputs = [
            x.expand(*lead, *x.shape[-2:]).reshape(prod(lead[:-1]), lead[-1] if lead else 1, *x.shape[-2:])
            for x, lead in zip((q, k, v), shapes, strict=True)
        ]
        options = logs._asdict() | dict(key_bias=key_bias, causal=isinstance(self.pattern, Causal))
        del options["key_axes"]
        refused = {name: random_features.refuses(name, *inputs, **options) for name in ("triton", "groups")}
        if all(refused.values()):
            said = [f"{name}: {reason}" for name, why in refused.items() for reason in why]
        return said, inputs, options

    def prefill(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        if isinstance(segments, tuple):
            raise ValueError("segments: a pair, expected one tensor: tokens that follow are queries and keys alike.")
        out, state = self._run(q, k, v, segments)
        batch, wide = out.shape[:-2], _state_dtype(q.dtype)
        own = broadcast_shapes(self._state_batch(k, v), () if segments is None else segments.shape[:-1])
        S, z, scale = (
            None if x is None else _one_for_all(x.reshape((*batch, *x.shape[2:])), batch, own).to(wide) for x in state
        )
        ids = resolve(segments, q.shape[-2], k.shape[-2], q.device).key_ids
        return out, Running(S, z, scale, in_last(ids).sum(-1))  # type: ignore[arg-type]

    def _run(self, q, k, v, segments: Tensor | None, stateful: bool = True) -> tuple[Tensor, LinearState]:
        """Output, and the state as the kernel has it; it may be None where it is not asked for."""
        n, m = q.shape[-2], k.shape[-2]
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        if n < m:  # the queries follow a cache: give the cached tokens queries too, and drop their rows
            q = torch.cat([q.new_zeros(*q.shape[:-2], m - n, q.shape[-1]), q], -2)
        back = None
        if segments is not None:
            q, k, v = (x.masked_fill(segments[..., None] < 0, 0) for x in (q, k, v))  # padding may hold anything
            if not _in_runs(segments):
                order, back = _into_runs(segments)
                q, k, v = (take_tokens(x, order) for x in (q, k, v))
                segments = segments.gather(-1, order)
        dtype = q.dtype
        if self._needs_float64(q, k):
            q, k, v = (x.double() for x in (q, k, v))
        with as_given(q):
            inputs, options = self._kernel_inputs(q, k, v, segments)
            if options["feature"] == "exp":
                options["stateful"] = stateful
            out, state = self.kernel(*inputs, **options)
        out = out.to(dtype)
        out = out if out.shape[:-2] == batch else out.reshape(*batch, *out.shape[-2:])
        out = out if back is None else take_tokens(out, back)
        return out if n >= m else out[..., m - n :, :], state

    def _kernel_inputs(self, q, k, v, segments: Tensor | None) -> tuple[list[Tensor], dict[str, Any]]:
        """The kernel takes (batch, heads, tokens, width) and (batch, tokens), segments in runs, n = m or Full."""
        n, m = q.shape[-2], k.shape[-2]
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        turned, name = self._turned(), self._known().kernel_name
        angles = None if turned is None else _angles(turned, segments, n, m, q.device)
        if isinstance(self.feature_map, LogFeatureMap):
            name, q, k = "exp", self.feature_map.log_query(q), self.feature_map.log_key(k)
        elif name is None:
            layout = resolve(segments, n, m, q.device)
            name = "identity"
            q = self.feature_map.query(q, layout.query_positions)
            k = self.feature_map.key(k, layout.key_positions)
        shared = segments is None or segments.ndim < 2 or segments.shape[-2] == 1  # all heads have the same segments
        shared = shared and 0 not in batch[-1:]  # kernels take an empty batch, but not zero heads
        rows, heads = (batch[:-1], batch[-1]) if shared and batch else (batch, 1)
        size = prod(rows), heads
        if segments is not None:
            ids = segments.squeeze(-2) if shared and segments.ndim > 1 else segments
            segments = ids.expand(*rows, m).reshape(size[0], m)
            if angles is not None:
                angles = angles.squeeze(-2) if shared and angles.ndim > 1 else angles
                angles = angles.expand(*rows, m).reshape(size[0], m)
        decay = self.log_decay()
        if decay is not None:
            own = shared and batch  # rows of the kernel's batch share one decay a head
            decay = decay.expand(heads) if own else decay.expand(batch).reshape(*size, 1).expand(*size, max(n, m))
        options = {
            "feature": name,
            "normalise": self.normalise,
            "causal": isinstance(self.pattern, Causal),
            "log_decay": decay,
            "segments": segments,
        }
        if angles is not None:
            options["angles"] = angles
        return [_as_batch(x, batch, size) for x in (q, k, v)], options

    def _needs_float64(self, q, k) -> bool:
        """Whether a normaliser of elu + 1 may be too small to divide by in float32: φ(x) = e^x where x < 0.

        It is at least e^(min(q, 0) + min(k, 0)). Only on the CPU: on a GPU the host would have to wait for the numbers.
        """
        if not self.normalise or self.feature_map.kernel_name != "elu1" or q.dtype == torch.float64:
            return False
        if q.device.type != "cpu" or torch.compiler.is_compiling() or not q.numel() or not k.numel():
            return False
        return sum(min(float(x.detach().amin()), 0.0) for x in (q, k)) < log(LEAST[torch.float32])

    def init_state(self, q, k, v) -> Running:
        check_inputs(q, k, v, mechanism=self)
        batch, wide = self._state_batch(k, v), _state_dtype(q.dtype)
        r = self.feature_map.dim(q.shape[-1])
        logs = isinstance(self.feature_map, LogFeatureMap)
        return Running(
            q.new_zeros(*batch, r, v.shape[-1], dtype=wide),
            q.new_zeros(*batch, r, dtype=wide) if self.normalise else None,
            q.new_zeros(*batch, r, dtype=wide) if logs else None,
            torch.zeros((), dtype=torch.long, device=q.device),
        )

    def _state_batch(self, k: Tensor, v: Tensor) -> tuple[int, ...]:
        """Batch axes of a state: those of keys and values, and of features and decays that heads do not share."""
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
        first = ""
        if isinstance(self.feature_map, LogFeatureMap):
            refused, inputs, options = self._fused(q, k, v, segments)
            if not refused:
                return random_features.explain(*inputs, **options)
            first = f"random_features: {'; '.join(refused)}\n"
        if self._turned() is not None:
            first = f"{type(self.feature_map).__name__}: features are made in the kernel, from angles\n"
        if q.shape[-2] < k.shape[-2]:
            q = q.new_zeros(*q.shape[:-2], *k.shape[-2:])
        inputs, options = self._kernel_inputs(q, k, v, segments)
        return first + self.kernel.explain(*inputs, **options)


def _angles(turned: TurnedFeatureMap, segments: Tensor | None, n: int, m: int, device) -> Float[Tensor, "*s l"]:
    """Of the last of n queries and m keys, as many as there are of the more."""
    if segments is None:
        return turned.line(min(m - n, 0), m, device)
    return turned.angles(resolve(segments, n, m, device).key_positions)


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    """One size up from the inputs: a sum over a hundred thousand tokens rounds as often."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _one_for_all(x: Tensor, batch: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """x (*batch, …) with the batch axes `own`: what entries share is kept once, in memory of its own."""
    if batch == own:
        return x
    missing = len(batch) - len(own)
    for axis, size in enumerate(batch):
        if size > 1 and (axis < missing or own[axis - missing] == 1):
            x = x.narrow(axis, 0, 1)
    return x.reshape(*own, *x.shape[len(batch) :]).clone()


def _as_batch(x: Tensor, batch: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """x with the batch axes that a kernel takes."""
    return x if x.shape[:-2] == size else x.expand(*batch, *x.shape[-2:]).reshape(*size, *x.shape[-2:])


def _in_runs(segments: Tensor) -> bool:
    """Whether each segment is one run of tokens, which is what kernels take."""
    return runs(segments.reshape(prod(segments.shape[:-1]), segments.shape[-1]))[1]


def _into_runs(segments: Tensor) -> tuple[Tensor, Tensor]:
    """An order of the tokens in which each segment is one run, the last one last, and the way back."""
    order = torch.where(in_last(segments), segments.max() + 1, segments).argsort(dim=-1, stable=True)
    return order, order.argsort(dim=-1)


def _log_products(x: Tensor, y: Tensor) -> Tensor:
    """log Σ_r exp(x_ir + y_jr), a few rows at a time."""
    rows = [(part[..., :, None, :] + y[..., None, :, :]).logsumexp(-1) for part in x.split(64, -2)]
    return torch.cat(rows, -2) if rows else x @ y.mT
