"""The heads of one layer, grouped by mechanism: one call for each mechanism.

What the module passes besides q, k and v (scale, mask, softcap, sink, bias) is a `Setting`. A softmax mechanism
applies all of it; its pattern is intersected with that of the layer. Other mechanisms can't apply a bias, a cap or a
sink, and are refused in a layer that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isclose
from typing import Any

import torch
from torch import nn

from heedful.core import Mechanism
from heedful.hf.modules import Refused
from heedful.hf.plan import LayerPlan, Plan
from heedful.mechanisms.head_index import HeadIndex, join, take
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Full, Pattern, Window
from heedful.segments import Segments
from heedful.shapes import Bool, Float, Tensor


@dataclass
class Setting:
    """What one call of a module passes besides q, k and v.

    scale      factor of q·k
    pattern    which query may attend to which key, from the layer's own mask
    segments   padding and packing
    hidden     True for keys that are padding, if every query sees all other keys
    bias       added to the scores, (b or 1, heads or 1, n, m)
    softcap    bound of the scores
    sink       a logit for each head, which takes mass and adds nothing to the output
    shortened  True if the first keys of the text are missing, because the cache of a windowed layer dropped them
    aligned    True if the last query is at the position of the last key, as patterns assume; a user's mask need not be
    """

    scale: float
    pattern: Pattern
    segments: Segments | None = None
    hidden: Bool[Tensor, "b m"] | None = None
    bias: Float[Tensor, "#b #h n m"] | None = None
    softcap: float | None = None
    sink: Float[Tensor, " h"] | None = None
    shortened: bool = False
    aligned: bool = True

    @property
    def is_plain(self) -> bool:
        return self.bias is None and self.softcap is None and self.sink is None


@dataclass(frozen=True)
class Part:
    """Some heads of a layer and their mechanism; None is the module's own attention."""

    index: HeadIndex
    mechanism: Mechanism | None = None
    label: str = "exact"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Float[Tensor, "b h n e"]:
        """The outputs of these heads; q, k and v are those of the whole layer."""
        mechanism = self.bound(setting)
        q, k, v = self.index.queries(q), self.index.keys(k), self.index.keys(v)
        ids = None if _hides(mechanism.pattern, setting) else self.segments(setting, q.ndim)
        out = mechanism(self.scaled(q, setting), k, v, segments=ids)
        return self.index.heads_of(out)

    def bound(self, setting: Setting) -> Mechanism:
        """The mechanism with the module's setting applied."""
        own = self.mechanism
        if own is not None and not setting.aligned:
            raise Refused(
                f"{self.label}: a dense mask over fewer queries than keys does not say where the queries stand. Give "
                "attention_mask (batch, tokens), and leave the cache to heedful (the default of an attached model)."
            )
        if own is not None and not isinstance(own, Softmax):
            self._check(own, setting)
            return own
        pattern = setting.pattern if own is None else intersection(own.pattern, setting.pattern)
        if setting.shortened and not _same_everywhere(pattern):
            raise Refused(
                f"{self.label}: the first keys of the text were dropped by a cache of the layer's own window, and "
                f"{pattern!r} counts from them; generate with heedful's cache (the default of an attached model)."
            )
        temperature = 1.0 if own is None else own.temperature
        hides = _hides(pattern, setting)
        if setting.is_plain and not hides:
            return _softmax(pattern, setting.scale, temperature, None)
        bias, sink = self._of_heads(setting.bias), setting.sink
        if hides and setting.hidden is not None:
            keys = torch.zeros(setting.hidden.shape, device=setting.hidden.device).masked_fill_(
                setting.hidden, -torch.inf
            )
            keys = keys[:, None, None] if (self.index.per_group or 1) == 1 else keys[:, None, None, None]
            bias = keys if bias is None else bias + keys
        if sink is not None:
            sink = take(sink, 0, self.index.heads)
            sink = sink if (self.index.per_group or 1) == 1 else sink.unflatten(0, (-1, self.index.per_group or 1))
        if bias is None and sink is None:
            return _softmax(pattern, setting.scale, temperature, setting.softcap)
        return Softmax(pattern, setting.scale, temperature, bias=bias, softcap=setting.softcap, sink=sink)

    def scaled(self, q: Tensor, setting: Setting) -> Tensor:
        """Queries rescaled for a mechanism that itself scales by d^-½."""
        if self.mechanism is None or isinstance(self.mechanism, Softmax):
            return q
        factor = setting.scale * q.shape[-1] ** 0.5
        return q if isclose(factor, 1, rel_tol=1e-6) else q * factor

    def segments(self, setting: Setting, axes: int) -> Segments | None:
        """Segments for tensors of 4 axes, or of 5 if keys are shared."""
        ids = setting.segments
        if ids is None or axes == 4:
            return ids
        return (ids[0].unsqueeze(1), ids[1].unsqueeze(1)) if isinstance(ids, tuple) else ids.unsqueeze(1)

    def _check(self, own: Mechanism, setting: Setting) -> None:
        brings = [name for name in ("bias", "softcap", "sink") if getattr(setting, name) is not None]
        if brings:
            raise Refused(f"{self.label}: the layer has a {brings[0]}, which only softmax mechanisms can apply.")
        if isinstance(setting.pattern, Causal) and not own.pattern.is_causal:
            raise Refused(f"{self.label} sees later keys, and the layer is causal: expected a causal mechanism.")
        if not isinstance(setting.pattern, Causal | Full):
            raise Refused(
                f"{self.label}: the layer has a pattern of its own, {setting.pattern!r}, which only softmax mechanisms "
                "can intersect with theirs."
            )

    def _of_heads(self, bias: Tensor | None) -> Tensor | None:
        """The bias of these heads, with the axes of `queries`."""
        if bias is None:
            return None
        each = self.index.per_group or 1
        if bias.shape[1] > 1:
            bias = take(bias, 1, self.index.heads)
        if each == 1:
            return bias
        return bias.unflatten(1, (-1, each)) if bias.shape[1] > 1 else bias.unsqueeze(1)


class HeadGroups(nn.Module):
    """The mechanisms of one layer. A child of the attention module, so they are moved, trained and saved with it."""

    def __init__(self, own: LayerPlan, plan: Plan):
        super().__init__()
        layer, labels = own.layer, own.by_head()
        self.heads, self.kv_heads = layer.heads, layer.kv_heads
        self.mechanisms = nn.ModuleDict()
        self._heads: dict[str, HeadIndex] = {}
        self._labels: dict[str, str] = {}
        for label in dict.fromkeys(labels):
            heads = tuple(head for head, other in enumerate(labels) if other == label)
            spec, name = plan.mechanisms[label], str(len(self._heads))
            self._heads[name] = HeadIndex(heads, layer.heads, layer.kv_heads)
            self._labels[name] = f"{layer.name}: {label}"
            if not spec.is_exact:
                self.mechanisms[name] = spec.build(layer, len(heads), plan.length)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Each mechanism with its heads."""
        own: dict[str, Any] = dict(self.mechanisms.items())
        return tuple(Part(index, own.get(name), self._labels[name]) for name, index in self._heads.items())


@lru_cache(maxsize=64)
def exact(heads: int, kv_heads: int) -> tuple[Part, ...]:
    """All heads as one part that runs the module's own attention."""
    return (Part(HeadIndex(tuple(range(heads)), heads, kv_heads)),)


def attend(parts: Sequence[Part], q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Float[Tensor, "b h n e"]:
    """The outputs of all heads of a layer, without a cache."""
    return join([(part.index, part(q, k, v, setting)) for part in parts])


def intersection(one: Pattern, other: Pattern) -> Pattern:
    """The intersection of two patterns, as a single window if one can express it."""
    for pattern, rest in ((one, other), (other, one)):
        if isinstance(rest, Full) or (isinstance(rest, Causal) and pattern.is_causal):
            return pattern
    if isinstance(one, Window) and isinstance(other, Window):
        near, far = (one, other) if one.before <= other.before else (other, one)
        if not near.sinks:  # the far window contains a near one without sinks
            return Window(near.before, min(near.after, far.after))
    return one & other


def _hides(pattern: Pattern, setting: Setting) -> bool:
    """True if padding can be a bias on keys, which torch's fused kernel accepts, instead of segments."""
    return setting.hidden is not None and isinstance(pattern, Full)


def _same_everywhere(pattern: Pattern) -> bool:
    """True if a pattern depends only on distances."""
    return isinstance(pattern, Causal | Full) or (isinstance(pattern, Window) and not pattern.sinks)


@lru_cache(maxsize=256)
def _softmax(pattern: Pattern, scale: float, temperature: float, softcap: float | None) -> Softmax:
    return Softmax(pattern, scale, temperature, softcap=softcap)


def check_shapes(groups: HeadGroups, q: Tensor, k: Tensor) -> None:
    """Raise unless the heads of a call are those of the plan."""
    if (q.shape[1], k.shape[1]) != (groups.heads, groups.kv_heads):
        raise Refused(
            f"a call with {q.shape[1]} heads and {k.shape[1]} of keys, and the plan has {groups.heads} and "
            f"{groups.kv_heads}. Likely cause: another version of transformers than the plan was made with."
        )
