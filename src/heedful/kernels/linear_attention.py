"""Linear attention of any feature map: which kernel computes it, and the inputs as that kernel takes them.

random_features   makes the features itself, where their logarithms are linear in a token (FAVOR+, FAVOR++, FAVOR#)
chunked_linear    takes features, or makes those it knows by name (elu + 1, relu, exp), turned by angles for cosFormer
gated_linear      the same with a gate for each token

These kernels take (batch, heads, tokens, width), segments (batch, tokens) that are one run of tokens each, and as many
queries as keys where attention is causal. A `LinearCall` has q, k, v of any batch axes and makes all that of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import log, prod
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from heedful.feature_maps import FeatureMap, LinearLogs, LogFeatureMap, TurnedFeatureMap
from heedful.kernels.chunked_linear import chunked_linear
from heedful.kernels.chunked_linear.features import LinearState, runs
from heedful.kernels.chunked_linear.groups import LEAST
from heedful.kernels.dispatch import Backend, Kernel, as_given
from heedful.kernels.gated_linear import gated_linear
from heedful.kernels.random_features import random_features
from heedful.kernels.tensor_cache import cached
from heedful.segments import in_last, resolve, take_tokens
from heedful.shapes import Tensor, broadcast_shapes

Arguments = tuple[list[Tensor], dict[str, Any]]
"""Tensors and options of a kernel."""
Output = tuple[Tensor, LinearState | None]
"""A V, and the state after the last token where it was asked for."""
_decays, _logs = WeakIdKeyDictionary(), WeakIdKeyDictionary()


class LinearOptions(NamedTuple):
    """What a mechanism asks of linear attention.

    normalise   rows sum to 1
    causal      a query sees the keys up to its own position; otherwise all
    log_decay   (heads,) or (): log λ a token
    log_gates   a function of keys: (*batch, m, features or 1), log α of each token
    stateful    the state after the last token is wanted
    """

    feature_map: FeatureMap
    normalise: bool
    causal: bool
    log_decay: Tensor | None = None
    log_gates: Callable[[Tensor], Tensor] | None = None
    stateful: bool = False


class LinearCall:
    """One call of linear attention: q, k, v, options, segments, and the arguments of each kernel, made once.

    kernel_name   what kernels call the features, where they make them by themselves, else None
    turned        the feature map, where the kernel also turns its features by angles, else None
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: LinearOptions, segments: Tensor | None = None):
        self.q, self.k, self.v, self.options, self.segments = q, k, v, options, segments
        phi = options.feature_map
        self.kernel_name, self.turned = phi.kernel_name, None
        if self.kernel_name is None and isinstance(phi, TurnedFeatureMap) and options.log_gates is None:
            self.kernel_name = phi.still.kernel_name
            self.turned = None if self.kernel_name is None else phi

    @property
    def device(self) -> torch.device:
        return self.q.device

    @cached_property
    def batch(self) -> torch.Size:
        q, k, v = self.q.shape[:-2], self.k.shape[:-2], self.v.shape[:-2]
        return q if q == k == v else broadcast_shapes(q, k, v)

    @cached_property
    def logs(self) -> LinearLogs | None:
        """Logarithms of features that are linear in a token, cached until the feature map changes."""
        phi = self.options.feature_map
        if not isinstance(phi, LogFeatureMap):
            return None
        with as_given(self.q):
            if phi.logs_depend_on is None:
                return phi.linear_logs()
            key = type(phi), *(getattr(phi, name) for name in phi.logs_depend_on)
            return cached(_logs, (*phi.buffers(),), key, phi.linear_logs)

    def kind(self) -> tuple | None:
        """What the choice of a backend and its launches depend on; None where values matter or no kernel has the map.

        On a GPU that includes what Triton looks at: strides and alignment.
        """
        q, k, v, options = self.q, self.k, self.v, self.options
        features: Any = self.kernel_name
        if self.segments is not None or options.log_gates is not None:
            return None
        if features is None:
            if self.logs is None:
                return None
            features = *((x.shape, x.dtype, x.requires_grad) for x in self.logs[:3]), self.logs.key_axes is None
        decay, memory, fade = options.log_decay, None, None
        if q.is_cuda:
            at = q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16
            memory = q.stride(), k.stride(), v.stride(), at
        if decay is not None:
            fade = decay.shape, decay.dtype, decay.requires_grad, decay.data_ptr() % 16 if q.is_cuda else 0
        return (
            *(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, memory),
            *(features, self.turned is None, options.normalise, options.causal, options.stateful, fade),
        )

    @cached_property
    def why_no_features_inside(self) -> list[str]:
        """Why the kernel that makes random features can't take this call, whichever backend runs it."""
        phi, options, why = self.options.feature_map, self.options, []
        if not options.normalise:
            why.append("features are shifted there, and only the normaliser takes that out again.")
        if options.log_decay is not None:
            why.append("it has no decay.")
        if self.segments is not None:
            why.append("it has no segments.")
        if options.stateful:
            why.append("it does not return the state.")
        if 0 in (*self.q.shape, *self.k.shape, *self.v.shape):
            why.append("there is nothing to make features of in an empty tensor.")
        if not isinstance(phi, LogFeatureMap):
            why.append(f"{type(phi).__name__} does not give logarithms of features.")
        elif self.logs is None:
            why.append(f"the logarithms of {type(phi).__name__} are not linear in a token.")
        elif self.logs.query_weight.shape[-2] != self.k.shape[-1]:
            why.append(f"the projection is {self.logs.query_weight.shape[-2]} wide, k {self.k.shape[-1]}.")
        return why

    @cached_property
    def tokens(self) -> Arguments:
        """For the kernel that makes random features: q, k, v, and the weights that features are made with."""
        logs, k, batch = self.logs, self.k, self.batch
        assert logs is not None
        heads = batch[-1] if batch else 1
        # heads that share their keys share them in the kernel too
        shared = heads > 1 and len(logs.query_weight) == 1 and all(x.ndim < 3 or x.shape[-3] == 1 for x in (k, self.v))
        own = (*batch[:-1], 1) if shared else batch
        key_bias = None
        if logs.key_axes is not None:
            moved = k.to(logs.key_axes.dtype) @ logs.key_axes.mT
            key_bias = (moved.square().sum(-1) / -2).expand(*own, -1).reshape(-1, own[-1] if own else 1, k.shape[-2])
        inputs = [
            _as_batch(x, lead, (prod(lead[:-1]), lead[-1] if lead else 1))
            for x, lead in ((self.q, batch), (k, own), (self.v, own))
        ]
        options = logs._asdict() | dict(key_bias=key_bias, causal=self.options.causal)
        del options["key_axes"]
        return inputs, options

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor] | None:
        """An order of the tokens in which each segment is one run, and the way back; None where they are already."""
        if self.segments is None or _are_runs(self.segments):
            return None
        ids = self.segments
        order = torch.where(in_last(ids), ids.max() + 1, ids).argsort(dim=-1, stable=True)  # the last segment last
        return order, order.argsort(dim=-1)

    @cached_property
    def chunks(self) -> Arguments:
        """For the chunked kernels: features or tokens with the batch axes that they take, and their options."""
        q, k, v, segments, given = self.q, self.k, self.v, self.segments, self.options
        n, m, batch = q.shape[-2], k.shape[-2], self.batch
        if n < m:  # the queries follow a cache: give the cached tokens queries too; `outputs` drops their rows
            q = torch.cat([q.new_zeros(*q.shape[:-2], m - n, q.shape[-1]), q], -2)
        if segments is not None:
            q, k, v = (x.masked_fill(segments[..., None] < 0, 0) for x in (q, k, v))  # padding may hold anything
            if self._order is not None:
                order = self._order[0]
                q, k, v = (take_tokens(x, order) for x in (q, k, v))
                segments = segments.gather(-1, order)
        if self._needs_float64(q, k):
            q, k, v = (x.double() for x in (q, k, v))
        rows, heads = rows_and_heads(batch, segments)
        size, options = (prod(rows), heads), dict[str, Any](normalise=given.normalise, segments=segments)
        if given.log_gates is None:
            options |= dict(causal=given.causal, log_decay=self._decay(rows, size, max(n, m)))
        else:
            gates = given.log_gates(k)
            options["log_decay"] = gates.expand(*batch, *gates.shape[-2:]).reshape(*size, *gates.shape[-2:])
        q, k, options["feature"], angles = self._features(q, k, segments)
        if angles is not None:
            options["angles"] = angles
        if options["feature"] == "exp":
            options["stateful"] = given.stateful
        if segments is not None:
            of_tokens = ("segments",) if angles is None else ("segments", "angles")
            options |= {name: by_row(options[name], batch, rows) for name in of_tokens}
        return [_as_batch(x, batch, size) for x in (q, k, v)], options

    def _features(self, q: Tensor, k: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor, str, Tensor | None]:
        """What the kernel makes features of, its name for them, and the angles that turn them."""
        phi, name, n, m = self.options.feature_map, self.kernel_name, q.shape[-2], k.shape[-2]
        if isinstance(phi, LogFeatureMap):
            return phi.log_query(q), phi.log_key(k), "exp", None
        if name is not None:
            return q, k, name, None if self.turned is None else angles_of(self.turned, segments, n, m, q.device)
        layout = resolve(segments, n, m, q.device)
        return phi.query(q, layout.query_positions), phi.key(k, layout.key_positions), "identity", None

    def _decay(self, rows: tuple[int, ...], size: tuple[int, int], tokens: int) -> Tensor | None:
        """(heads,) where rows of the kernel's batch share one decay a head, else one for each token."""
        decay = self.options.log_decay
        if decay is None:
            return None
        if len(rows) < len(self.batch):
            return decay.expand(size[1])
        return decay.expand(self.batch).reshape(*size, 1).expand(*size, tokens)

    def _needs_float64(self, q: Tensor, k: Tensor) -> bool:
        """Whether a normaliser of elu + 1 may be too small to divide by in float32: φ(x) = e^x where x < 0.

        It is at least e^(min(q, 0) + min(k, 0)). Only on the CPU: a GPU would have to finish before the host knows.
        """
        if not self.options.normalise or self.options.feature_map.kernel_name != "elu1" or q.dtype == torch.float64:
            return False
        if q.device.type != "cpu" or torch.compiler.is_compiling() or not q.numel() or not k.numel():
            return False
        return sum(min(float(x.detach().amin()), 0.0) for x in (q, k)) < log(LEAST[torch.float32])

    def outputs(self, out: Tensor) -> Tensor:
        """A kernel's output with the batch axes, the dtype, the order and the queries of this call."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        out = out.to(self.q.dtype)
        out = out if out.shape[:-2] == self.batch else out.reshape(*self.batch, *out.shape[-2:])
        out = out if self._order is None else take_tokens(out, self._order[1])
        return out if n >= m else out[..., m - n :, :]


def _inside(name: str) -> Backend:
    """A backend of random_features, for calls of linear attention."""

    def run(call: LinearCall) -> Output:
        inputs, options = call.tokens
        out = random_features.backends[name].run(*inputs, **options)
        return out.reshape(*call.batch, *out.shape[-2:]), None

    def objections(call: LinearCall) -> list[str]:
        if call.why_no_features_inside:
            return call.why_no_features_inside
        inputs, options = call.tokens
        return random_features.backends[name].objections(*inputs, **options)

    return Backend(f"random_features/{name}", run, objections)


def _chunked(kernel: Kernel, name: str, relaunch=None) -> Backend:
    """A backend of chunked_linear or of gated_linear, for calls of linear attention."""

    def run(call: LinearCall) -> Output:
        inputs, options = call.chunks
        out, state = kernel.backends[name].run(*inputs, **options)
        return call.outputs(out), state

    def objections(call: LinearCall) -> list[str]:
        inputs, options = call.chunks
        return kernel.backends[name].objections(*inputs, **options)

    return Backend(f"{kernel.name}/{name}", run, objections, relaunch=relaunch)


def _relaunch(call: LinearCall):
    """The launches of chunked_linear for calls of this kind, or None: this is for short calls, which are CPU-bound."""
    q, k, v, options, decay = call.q, call.k, call.v, call.options, call.options.log_decay
    if call.kernel_name is None or options.stateful or not q.ndim == k.ndim == v.ndim == 4 or q.shape[2] < k.shape[2]:
        return None
    if decay is not None and (decay.requires_grad or k.shape[1] != q.shape[1]):
        return None
    from heedful.kernels.chunked_linear import triton  # imports Triton

    launches = triton.relaunch(q, k, v, call.kernel_name, options.normalise, options.causal, *_decay_and_angles(call))
    return None if launches is None else lambda call: (launches(call.q, call.k, call.v, *_decay_and_angles(call)), None)


def _decay_and_angles(call: LinearCall) -> tuple[Tensor | None, Tensor | None]:
    """A decay (heads,) in float32, made once for each tensor, and the angles of all positions."""
    q, k, decay = call.q, call.k, call.options.log_decay
    if decay is not None:
        own, heads = decay, q.shape[1]
        decay = cached(_decays, [own], heads, lambda: own.expand(heads).float().contiguous())
    turned = call.turned
    return decay, None if turned is None else angles_of(turned, None, q.shape[-2], k.shape[-2], q.device)


linear_attention = Kernel(
    "linear_attention",
    _inside("triton"),
    _inside("cpu_groups"),
    _chunked(chunked_linear, "triton", _relaunch),
    _chunked(chunked_linear, "torch"),
    kind=LinearCall.kind,
)
gated_attention = Kernel("gated_attention", _chunked(gated_linear, "triton"), _chunked(gated_linear, "torch"))


def angles_of(turned: TurnedFeatureMap, segments: Tensor | None, n: int, m: int, device: torch.device) -> Tensor:
    """(*batch, tokens): the angles of n queries and m keys, both of which end with the last of all."""
    if segments is None:
        return turned.line(min(m - n, 0), m, device)
    return turned.angles(resolve(segments, n, m, device).key_positions)


def rows_and_heads(batch: tuple[int, ...], segments: Tensor | None) -> tuple[tuple[int, ...], int]:
    """The batch axes as kernels take them: rows, each with its segments, and heads that share them.

    Where heads have segments of their own, each head is a row.
    """
    shared = segments is None or segments.ndim < 2 or segments.shape[-2] == 1
    shared = shared and 0 not in batch[-1:]  # kernels take an empty batch, but not zero heads
    return (tuple(batch[:-1]), batch[-1]) if shared and batch else (tuple(batch), 1)


def by_row(x: Tensor, batch: tuple[int, ...], rows: tuple[int, ...]) -> Tensor:
    """(rows, tokens) of one number a token, (*batch, tokens): heads, where they are no rows, share it."""
    x = x.squeeze(-2) if len(rows) < len(batch) and x.ndim > 1 else x
    return x.expand(*rows, x.shape[-1]).reshape(prod(rows), x.shape[-1])


def _as_batch(x: Tensor, batch: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """x with the batch axes that a kernel takes."""
    return x if x.shape[:-2] == size else x.expand(*batch, *x.shape[-2:]).reshape(*size, *x.shape[-2:])


def _are_runs(segments: Tensor) -> bool:
    """Whether each segment is one run of tokens."""
    return runs(segments.reshape(prod(segments.shape[:-1]), segments.shape[-1]))[1]
