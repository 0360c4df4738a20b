"""A cache for transformers that stores, for each head, only what its mechanism needs.

`update` takes the new keys and values and returns them unchanged. The attention function, which the module calls next,
claims the layer, attends to the stored and the new keys, and then writes the new ones. So a chunk of a long prompt
still sees the keys that it overwrites.

A layer has a `KeyStore` for each kind of context (all tokens, or a window), shared by the heads of a group, and a
`StateStore` for each mechanism with a running state.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from heedful.core import Mechanism, RecurrentMechanism
from heedful.hf.head_groups import HeadGroups, Part, Setting, exact
from heedful.hf.layers import base_of, swappable
from heedful.hf.modules import Refused, source_of
from heedful.hf.shares import Share, share, stores_for
from heedful.hf.stores import FullStore, KeyStore, RingStore, StateStore, Tokens
from heedful.mechanisms.head_index import join, take
from heedful.mechanisms.score_base import ScoreBase
from heedful.shapes import Bool, Float, Tensor

UNDO = 64  # tokens that `crop` can remove after a forward pass of several tokens, without `activate_past_recording`

_claims = threading.local()


class HeedfulCache(Cache):
    """Keys, values and states of an attached model; made by `heedful.hf.cache`."""

    def __init__(self, layers: list, max_length: int | None):
        super().__init__(layers=layers)
        self.max_length = max_length
        self.real: Bool[Tensor, "b t"] | None = None
        """True for tokens so far that are not padding; None if there is no padding."""
        self._current: Tokens | None = None
        self._late: tuple[int, Tensor, Tensor, Any] | None = None
        for layer in self.own_layers():
            layer.cache = self

    def own_layers(self) -> list[HeedfulLayer]:
        return [layer for layer in self.layers if isinstance(layer, HeedfulLayer)]

    def bytes(self) -> int:
        """Bytes allocated for keys, values and states."""
        return sum(layer.bytes() for layer in self.own_layers())

    def tokens(self, mask: Bool[Tensor, "b t"] | None, before: int, new: int) -> Tokens:
        """The tokens of a forward pass, the same object for all of its layers."""
        known = self._current
        if known is not None and (known.before, known.new) == (before, new):
            return known
        self._current = tokens = self._read(mask, before, new)
        if tokens.real is not None:
            self.real = tokens.real
        return tokens

    def _read(self, mask: Tensor | None, before: int, new: int) -> Tokens:
        fresh = None
        if mask is not None:
            if mask.shape[1] not in (new, before + new):
                raise ValueError(
                    f"attention_mask: {mask.shape[1]} tokens, expected {before + new}, {before} of them in the cache."
                )
            fresh = mask[:, mask.shape[1] - new :]
        self._catch_up(before)
        if self.real is None and fresh is not None:
            if new == 1 and self._reads_late(fresh):
                return Tokens(before, new, unread=self._read_later(fresh, before))
            if bool(fresh.all()):
                fresh = None
        if self.real is None and fresh is None:
            return Tokens(before, new)
        rows = (self.real if fresh is None else fresh).shape[0]  # type: ignore[union-attr]
        device = (self.real if fresh is None else fresh).device  # type: ignore[union-attr]
        everything = torch.ones(rows, 1, dtype=torch.bool, device=device)
        old = everything.expand(-1, before) if self.real is None else self.real[:, :before]
        return Tokens(before, new, torch.cat([old, everything.expand(-1, new) if fresh is None else fresh], 1))

    @staticmethod
    def _reads_late(fresh: Tensor) -> bool:
        """True if reading a number makes the CPU wait for the device."""
        return fresh.is_cuda

    def _read_later(self, fresh: Tensor, before: int) -> Tensor:
        """Start copying a flag: True if the step has no padding. The next forward pass reads it; nothing waits now."""
        flag = torch.empty((), dtype=torch.bool, pin_memory=fresh.is_cuda)
        flag.copy_(fresh.all(), non_blocking=True)
        done = torch.cuda.Event() if fresh.is_cuda else None
        if done is not None:
            done.record()
        self._late = before, fresh[:, 0], flag, done
        return fresh[:, 0]

    def _catch_up(self, before: int) -> None:
        if self._late is None or self._late[0] >= before:
            return
        at, fresh, flag, done = self._late
        self._late = None
        if done is not None:
            done.synchronize()
        if not bool(flag):
            ones = fresh.new_ones(fresh.shape[0], 1)
            self.real = torch.cat([ones.expand(-1, at), fresh[:, None], ones.expand(-1, before - at - 1)], 1)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._catch_up(self.get_seq_length() + abs(tokens_to_remove))
        if self.real is not None:
            self.real = self.real[:, : self.get_seq_length()]
        self._current = None

    def reset(self) -> None:
        super().reset()
        self.real = self._current = self._late = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(lambda x: x[indices])

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self._catch_up(self.get_seq_length())
        self._current = None
        self.real = None if self.real is None else change(self.real)


class HeedfulLayer(CacheLayerMixin):
    """The cache of one layer.

    module      the id of the attention module whose keys it takes: copies of a cache serve the same one
    shows_all   the module takes the total number of keys from the tensors that `update` returns, as T5 does for its
                bias. Then all tokens are stored, and `update` returns all of them
    """

    is_sliding = False
    supports_early_init = False
    cache: HeedfulCache

    def __init__(self, max_length: int | None, module: int, name: str, shows_all: bool):
        super().__init__()
        self.module = module
        self.max_length = max_length
        self.name = name
        self.shows_all = shows_all
        self.seen = 0
        self.rows = 0
        self.keys_of: list[KeyStore] | None = None
        self.states: dict[str, StateStore] = {}
        self._shares: list[Share] | None = None
        self._known: tuple[object, dict[str, Mechanism]] | None = None
        self.record_past = False
        self._new: tuple[Tensor, Tensor] | None = None
        self._undo: _Undo | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values and return them; the attention function claims them."""
        if self._new is not None:
            self._new = None
            raise RuntimeError(
                "heedful's cache was given keys that nobody attended to through heedful: it serves models with "
                'attn_implementation="heedful" (heedful.hf.attach) alone.'
            )
        total = self.seen + key_states.shape[-2]
        if self.max_length is not None and total > self.max_length:
            raise ValueError(
                f"{total} tokens, and the cache was made for {self.max_length}: heedful.hf.cache(model, max_length=…)."
            )
        if self.rows and key_states.shape[0] != self.rows:
            raise ValueError(f"a batch of {key_states.shape[0]} rows, and the cache holds {self.rows}.")
        self.rows = key_states.shape[0]
        self.is_initialized = True
        self._new = key_states, value_states
        _claims.layer = self
        if not self.shows_all:
            return key_states, value_states
        if self.keys_of is None:
            self.keys_of = [FullStore(tuple(range(key_states.shape[1])), self.max_length)]
        whole = self.keys_of[0]
        assert isinstance(whole, FullStore)
        whole.write(key_states, value_states, Tokens(self.seen, key_states.shape[-2]))
        return whole.seen(total)

    def attend(
        self, parts: Sequence[Part], q: Tensor, k: Tensor, v: Tensor, setting: Setting, tokens: Tokens
    ) -> Float[Tensor, "b h n e"]:
        """Outputs of all heads for the new tokens, which are then added to the cache."""
        self._new = None
        bound = self._bound(parts, setting)
        if self._shares is None:
            stores = self.keys_of or stores_for(parts, bound, setting.bias is not None, self.max_length)
            self.keys_of, self._shares = list(stores), [share(store, parts, bound) for store in stores]
        self._remember(k, v, tokens, any(not isinstance(mechanism, ScoreBase) for mechanism in bound.values()))
        outs = [
            (part.index, self._run_state(part, bound[part.label], q, k, v, setting, tokens))
            for part in parts
            if not isinstance(bound[part.label], ScoreBase)
        ]
        if not tokens.before and tokens.new > 1:  # the cache is empty: one call for each mechanism
            setting.segments = tokens.ids
            outs += [(part.index, part(q, k, v, setting)) for part in parts if isinstance(bound[part.label], ScoreBase)]
            for store in self.keys_of or ():
                store.write(take(k, 1, store.groups), take(v, 1, store.groups), tokens)
        else:
            for mine in self._shares:
                outs += mine.attend(bound, q, k, v, setting, tokens)
        self.seen = tokens.total
        return join(outs)

    def _bound(self, parts: Sequence[Part], setting: Setting) -> dict[str, Mechanism]:
        """The mechanism of each part, cached as long as the module's settings stay the same."""
        key = (setting.pattern, setting.scale, setting.softcap) if setting.bias is setting.sink is None else None
        if key is None or self._known is None or self._known[0] != key:
            self._known = key, {part.label: part.bound(setting) for part in parts}
        return self._known[1]

    def _run_state(self, part: Part, mechanism: Mechanism, q, k, v, setting: Setting, tokens: Tokens) -> Tensor:
        if not isinstance(mechanism, RecurrentMechanism):
            raise Refused(f"{part.label} can't go token by token: generate with use_cache=False.")
        store = self.states.setdefault(part.label, StateStore(mechanism, part.index))
        return part.index.heads_of(store.attend(part.scaled(q, setting), k, v, tokens))

    def bytes(self) -> int:
        return sum(store.bytes() for store in (*(self.keys_of or ()), *self.states.values()))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    # ---- rows of the batch

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rows(lambda x: x.repeat_interleave(repeats, 0))
        self.rows *= repeats

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rows(lambda x: x[indices])
        self.rows = len(torch.arange(self.rows)[indices.cpu()])

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for store in self.keys_of or ():
            store.tensors(change)
        for state in self.states.values():
            state.tensors(change, self.rows)
        if self._undo is not None:
            self._undo.rows(change)

    def reset(self) -> None:
        self.seen = self.rows = 0
        self.keys_of, self._shares, self.states, self._undo, self._new = None, None, {}, None, None
        self.is_initialized = False

    # ---- removing tokens

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """True if any number of tokens can be removed at any time."""
        return not self.states and all(isinstance(store, FullStore) for store in self.keys_of or ())

    def activate_past_recording(self) -> None:
        """Save what forward passes overwrite, until the next `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; a negative number says how many."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: {tokens_to_remove}, expected minus the number of tokens to take back.")
        undo, self._undo = self._undo, None
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        left = self.seen + tokens_to_remove
        if left < 0:
            raise ValueError(f"crop: {-tokens_to_remove} tokens, and the cache holds {self.seen}.")
        if not self.is_croppable:
            rings = [store for store in self.keys_of or () if isinstance(store, RingStore)]
            fits = not self.states and all(self.seen <= store.size and store.places is None for store in rings)
            if not fits:
                if undo is None or not undo.reaches(left):
                    raise RuntimeError(
                        f"crop: {-tokens_to_remove} tokens can't be taken back, since a window or a state has gone on; "
                        "call activate_past_recording() on the cache before the forward pass."
                    )
                undo.restore(rings, self.states, left)
        self.seen = left

    def _remember(self, k: Tensor, v: Tensor, tokens: Tokens, streams: bool) -> None:
        rings = [store for store in self.keys_of or () if isinstance(store, RingStore)]
        if not rings and not streams:
            return
        if not rings and not self.record_past and tokens.new > 4 * UNDO:
            self._undo = None
            return
        if self._undo is None or not self.record_past:
            self._undo = None
            if not self.record_past and tokens.new == 1:
                return
            whole = self.record_past or tokens.new <= 4 * UNDO
            self._undo = _Undo(self.seen, rings, self.states, None if whole else max(x.size for x in rings) + UNDO)
        self._undo.add(k, v, tokens)


class _Undo:
    """A snapshot of a layer before some forward passes, and the keys and values that these passes added."""

    def __init__(self, seen: int, rings: list[RingStore], states: dict[str, StateStore], keep: int | None):
        self.seen = seen
        self.rings = [store.snapshot() for store in rings]
        self.states = {label: store.state for label, store in states.items()}
        self.keep = keep
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.tokens: Tokens | None = None
        self.first = seen  # the first token whose keys are saved

    def add(self, k: Tensor, v: Tensor, tokens: Tokens) -> None:
        if self.keep is not None and tokens.new > self.keep:
            self.first = tokens.total - self.keep
            k, v = (x[:, :, -self.keep :].clone() for x in (k, v))
        self.parts.append((k, v))
        self.tokens = tokens

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rings = [tuple(None if x is None else change(x) for x in saved) for saved in self.rings]
        self.parts = [(change(k), change(v)) for k, v in self.parts]
        if self.tokens is not None and self.tokens.real is not None:
            self.tokens = Tokens(self.tokens.before, self.tokens.new, change(self.tokens.real))

    def reaches(self, left: int) -> bool:
        """True if the layer can be restored to `left` tokens."""
        if left < self.seen or (self.states and left != self.seen and self.keep is not None):
            return False
        return self.first == self.seen or (self.keep is not None and left >= self.tokens.total - UNDO)  # type: ignore[union-attr]

    def restore(self, rings: list[RingStore], states: dict[str, StateStore], left: int) -> None:
        k, v = (torch.cat(x, 2) for x in zip(*self.parts, strict=True))
        assert self.tokens is not None
        real = None if self.tokens.real is None else self.tokens.real[:, :left]
        for store, saved in zip(rings, self.rings, strict=True):
            store.restore(saved)
            mine = [take(x, 1, store.groups)[:, :, : left - self.first] for x in (k, v)]
            if left > self.first:
                store.write(mine[0], mine[1], Tokens(self.first, left - self.first, real))
        for label, running in states.items():
            running.state = self.states.get(label)  # None if there were no tokens yet
            running.replay(
                k[:, :, : left - self.seen], v[:, :, : left - self.seen], Tokens(self.seen, left - self.seen, real)
            )


def claimed(module: nn.Module, k: Tensor) -> HeedfulLayer | None:
    """The layer that has just taken the keys of this module; None where no cache of heedful did."""
    layer = getattr(_claims, "layer", None)
    forget_claims()
    if layer is None or layer._new is None or layer.module != id(module):
        return None  # or another module left it behind when it failed
    given = layer._new[0].shape[-2] + (layer.seen if layer.shows_all else 0)
    if given != k.shape[-2]:
        raise Refused(f"{layer.name}: {k.shape[-2]} keys, and the cache gave {given}: the module changes them.")
    return layer


@torch.compiler.disable
def forget_claims() -> None:
    """Forget keys that no attention function took: a forward pass that failed leaves them behind."""
    _claims.layer = None


def cache(model: nn.Module, max_length: int | None = None) -> HeedfulCache:
    """An empty cache for a model with attn_implementation="heedful".

    max_length   capacity in tokens; buffers are allocated once. None: buffers of exact heads grow

    `generate` on an attached model makes one by itself.
    """
    if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
        raise ValueError(f"max_length: {max_length!r}, expected a number of tokens, or None.")
    base = base_of(model)
    config = base.config.get_text_config(decoder=True)
    if config._attn_implementation != "heedful":
        raise Refused(
            f'{type(base).__name__} attends by {config._attn_implementation}, expected "heedful": '
            "heedful.hf.attach(model, plan) first."
        )
    own: dict[int, tuple[int, str, bool]] = {}
    for name, (layer, module) in swappable(model).items():
        at = getattr(module, "layer_idx", None)
        if layer.kind != "causal" or not isinstance(at, int):
            continue
        source = source_of(type(module))
        if "update_indexer" in source:
            raise Refused(
                f"{name}: {type(module).__name__} selects keys by a cache of its own, which heedful's has not."
            )
        own[at] = id(module), name, re.search(r"key_states\.shape\[-?2\]", source) is not None
        groups = getattr(module, "heedful", None)
        for part in groups.parts if isinstance(groups, HeadGroups) else exact(layer.heads, layer.kv_heads):
            if part.mechanism is not None and not isinstance(part.mechanism, RecurrentMechanism):
                raise Refused(
                    f"{part.label} can't go token by token, so there is no cache: generate with use_cache=False."
                )
    if not own:
        raise Refused(f"{type(base).__name__} has no causal layer, so nothing is generated token by token.")
    others = DynamicCache(config=config).layers
    count = max([len(others), *(at + 1 for at in own)])
    layers = [HeedfulLayer(max_length, *own[at]) if at in own else others[at] for at in range(count)]
    return HeedfulCache(layers, max_length)
