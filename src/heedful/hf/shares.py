"""Attention over a key store, for the heads of a layer whose keys are in it.

A step (one new token) runs all heads of the store's groups in one call of torch's fused kernel, directly on the buffer;
outputs of heads that belong to another mechanism are dropped. A chunk (several new tokens) uses the mechanism's own
fast path, on the keys in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from heedful.core import Mechanism
from heedful.hf.head_groups import Part, Setting
from heedful.hf.stores import FullStore, KeyStore, RingStore, Tokens, window_of
from heedful.kernels.dispatch import as_given
from heedful.mechanisms.head_index import HeadIndex, take
from heedful.mechanisms.score_base import ScoreBase
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Pattern
from heedful.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Own:
    """The heads of one part in a share: their indices in the layer, and among the heads of the share."""

    part: Part
    index: HeadIndex
    inside: Part
    """The same mechanism, with heads indexed inside the share."""

    @property
    def places(self) -> tuple[int, ...]:
        return self.inside.index.heads


@dataclass(frozen=True)
class Share:
    """A store, the heads of its groups, and the parts that these heads belong to."""

    store: FullStore | RingStore
    heads: tuple[int, ...]
    owns: tuple[Own, ...]

    def attend(
        self, bound: dict[str, Mechanism], q: Tensor, k: Tensor, v: Tensor, setting: Setting, tokens: Tokens
    ) -> list[tuple[HeadIndex, Float[Tensor, "b h n e"]]]:
        """Write the new tokens and return the outputs of each part; q, k and v are those of the whole layer."""
        store = self.store
        q, new_k, new_v = take(q, 1, self.heads), take(k, 1, store.groups), take(v, 1, store.groups)
        if tokens.new == 1:
            k, v, positions = store.step(new_k, new_v, tokens)
            outs = []
            for own in self.owns:
                mechanism = bound[own.part.label]
                assert isinstance(mechanism, ScoreBase)
                out = self._step(mechanism, q, k, v, positions, setting, tokens)
                outs.append((own.index, take(out, 1, own.places)))
            return outs
        k, v, ids = store.chunk(new_k, new_v, tokens)
        setting = self._setting(setting, None if ids is None else ids[:, None])
        outs = [(own.index, own.inside(q, k, v, setting)) for own in self.owns]
        store.write(new_k, new_v, tokens)
        return outs

    def _setting(self, setting: Setting, ids: Int[Tensor, "b 1 l"] | None) -> Setting:
        """The module's setting, restricted to the heads of this share."""
        bias, sink = setting.bias, setting.sink
        return Setting(
            setting.scale,
            setting.pattern,
            ids,
            bias=bias if bias is None or bias.shape[1] == 1 else take(bias, 1, self.heads),
            softcap=setting.softcap,
            sink=None if sink is None else take(sink, 0, self.heads),
        )

    def _step(
        self, mechanism: ScoreBase, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, setting: Setting, tokens
    ) -> Float[Tensor, "b h 1 e"]:
        """The outputs of all heads for one new token, without copying keys and without waiting for the device."""
        grouped = q.unflatten(1, (k.shape[1], -1))  # (b, groups, heads of a group, 1, d)
        if not isinstance(mechanism, Softmax) or setting.softcap is not None or setting.sink is not None:
            now, at = self._positions(positions, tokens, q.device)
            if isinstance(mechanism, Softmax) and setting.sink is not None:
                sink = take(setting.sink, 0, self.heads).unflatten(0, (k.shape[1], -1))
                heat, cap = mechanism.temperature, setting.softcap
                mechanism = Softmax(mechanism.pattern, mechanism.scale, heat, softcap=cap, sink=sink)
            with as_given(q):
                keys = k.unsqueeze(2), v.unsqueeze(2)
                return mechanism._attend_one(grouped, *keys, now[:, None, None], at[:, None, None]).flatten(1, 2)
        mask = self._visible(mechanism.pattern, positions, tokens, q.device)
        if setting.bias is not None:
            bias = setting.bias[..., 0, :] / mechanism.temperature  # (b, heads or 1, l)
            one = bias.shape[1] == 1
            bias = bias.unsqueeze(2) if one else take(bias, 1, self.heads).unflatten(1, (k.shape[1], -1))
            mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, -torch.inf)
        scale = mechanism.score_scale(q.shape[-1])
        return F.scaled_dot_product_attention(grouped[..., 0, :], k, v, mask, scale=scale).flatten(1, 2).unsqueeze(2)

    def _visible(self, pattern: Pattern, positions: Tensor | None, tokens: Tokens, device) -> Tensor | None:
        """The stored keys that one new token sees, (b or 1, 1, 1, places); None: all."""
        if positions is None and self._holds_just(pattern):
            return None
        now, at = self._positions(positions, tokens, device)
        seen = (pattern.allows(now, at) & (at >= 0))[:, None, None]
        if tokens.real is None:
            return seen
        return seen | ~tokens.real[:, -1, None, None, None]  # a padding row sees every key, so its output is finite

    def _holds_just(self, pattern: Pattern) -> bool:
        """True if a store without padding holds exactly the keys that one new token sees."""
        if isinstance(self.store, FullStore):
            return isinstance(pattern, Causal)
        return window_of(pattern) == (self.store.before, self.store.sinks)

    def _positions(self, positions: Tensor | None, tokens: Tokens, device) -> tuple[Tensor, Tensor]:
        """The position of the new token, (b or 1, 1), and of the stored keys, (b or 1, places)."""
        if positions is not None and tokens.real is not None:
            return tokens.real.sum(-1, keepdim=True) - 1, positions
        at = torch.arange(tokens.total, device=device)
        if isinstance(self.store, RingStore):
            store, newest = self.store, tokens.before
            at = at[: store.size]
            if tokens.total > store.size:  # each place of the ring holds the last token written there
                ring = at[store.sinks :]
                at = torch.cat([at[: store.sinks], newest - (newest - ring) % store.ring])
        return torch.full((1, 1), tokens.before, device=device), at[None]


def share(store: KeyStore, parts: Sequence[Part], bound: dict[str, Mechanism]) -> Share:
    """The share of a store in a layer."""
    assert isinstance(store, FullStore | RingStore)
    index = parts[0].index
    each = index.total // index.groups
    heads = tuple(group * each + at for group in store.groups for at in range(each))
    owns = []
    for part in parts:
        own = tuple(head for head in part.index.heads if head in heads)
        if own and isinstance(bound[part.label], ScoreBase):
            inside = HeadIndex(tuple(heads.index(head) for head in own), len(heads), len(store.groups))
            owns.append(Own(part, HeadIndex(own, index.total, index.groups), Part(inside, part.mechanism, part.label)))
    return Share(store, heads, tuple(owns))


def stores_for(parts: Sequence[Part], bound: dict[str, Mechanism], biased: bool, limit: int | None) -> list[KeyStore]:
    """One store for each kind of context, with the groups whose heads need it. Heads with a bias need all tokens."""
    needs: dict[int, tuple[int, int] | None] = {}
    for part in parts:
        mechanism = bound[part.label]
        if not isinstance(mechanism, ScoreBase):
            continue
        need = None if biased else window_of(mechanism.pattern)
        for group in part.index.own_groups:
            other = needs.get(group, (0, 0))
            longest = None if need is None or other is None else (max(need[0], other[0]), max(need[1], other[1]))
            needs[group] = longest
    kinds: dict[tuple[int, int] | None, list[int]] = {}
    for group in sorted(needs):
        kinds.setdefault(needs[group], []).append(group)
    return [
        FullStore(tuple(groups), limit) if kind is None else RingStore(tuple(groups), *kind, limit)
        for kind, groups in kinds.items()
    ]
