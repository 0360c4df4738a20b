"""Storage of a cache for the heads of one layer: keys and values of all tokens, of a window, or a running state.

    all tokens   one buffer, filled in place; token t is at place t
    a window     the first s tokens at their places, then a ring: token t ≥ s is at s + (t − s) mod (before + 1)
    a state      the running state of the mechanism

`Tokens` describes the new tokens of a forward pass. Without padding every row has the same tokens at the same places,
and the CPU knows which, so a step needs no mask. With padding, each row counts its own tokens, and `places` stores
their positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils._pytree import tree_map

from heedful.core import RecurrentMechanism, State
from heedful.mechanisms.head_index import HeadIndex
from heedful.patterns import Pattern, Window
from heedful.shapes import Bool, Float, Int, Tensor

MARGIN = 256  # spare places after the first forward pass, if the final length is unknown


@dataclass
class Tokens:
    """The new tokens of one forward pass, after `before` earlier ones.

    real     True for tokens so far that are not padding; None if all are real, as far as the CPU knows
    unread   for one new token: True if it is real, as a device tensor that the CPU has not waited for
    """

    before: int
    new: int
    real: Bool[Tensor, "b t"] | None = None
    unread: Bool[Tensor, " b"] | None = None

    @property
    def total(self) -> int:
        return self.before + self.new

    @cached_property
    def positions(self) -> Int[Tensor, "b t"] | None:
        """The number of real tokens before each token in its row; −1 for padding."""
        return None if self.real is None else torch.where(self.real, self.real.cumsum(-1) - 1, -1)

    @cached_property
    def ids(self) -> Int[Tensor, "b 1 t"] | None:
        """Segments of all tokens so far."""
        return None if self.real is None else (self.real.long() - 1)[:, None]


class KeyStore(ABC):
    """Keys and values of some groups of a layer; see the two kinds below."""

    def __init__(self, groups: tuple[int, ...]):
        self.groups = groups
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    @abstractmethod
    def write(self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"], tokens: Tokens) -> None:
        """Write new tokens."""

    def bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in (self.k, self.v) if x is not None)

    def tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor with a batch axis."""
        if self.k is not None and self.v is not None:
            self.k, self.v = change(self.k), change(self.v)


class FullStore(KeyStore):
    """All tokens, in one buffer of `limit` places, or in one that grows if there is no limit."""

    def __init__(self, groups: tuple[int, ...], limit: int | None):
        super().__init__(groups)
        self.limit = limit

    def write(self, k: Float[Tensor, "b g n d"], v: Float[Tensor, "b g n e"], tokens: Tokens) -> None:
        if self.k is None or self.v is None:
            room = self.limit or tokens.total + MARGIN
            self.k, self.v = (x.new_empty(*x.shape[:2], room, x.shape[-1]) for x in (k, v))
        elif self.k.shape[2] < tokens.total:
            more = max(tokens.total, self.k.shape[2] * 5 // 4) + MARGIN - self.k.shape[2]
            self.k, self.v = (torch.cat([x, x.new_empty(*x.shape[:2], more, x.shape[-1])], 2) for x in (self.k, self.v))
        self.k[:, :, tokens.before : tokens.total] = k
        self.v[:, :, tokens.before : tokens.total] = v

    def step(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Int[Tensor, "b t"] | None]:
        """Write one token and return all keys and values, with positions if rows differ."""
        self.write(k, v, tokens)
        return *self.seen(tokens.total), tokens.positions

    def chunk(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Int[Tensor, "b t"] | None]:
        """The same for several tokens, with segments if there is padding."""
        self.write(k, v, tokens)
        return *self.seen(tokens.total), None if tokens.ids is None else tokens.ids[:, 0]

    def seen(self, total: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, as views."""
        assert self.k is not None and self.v is not None
        return self.k[:, :, :total], self.v[:, :, :total]


class RingStore(KeyStore):
    """The first `sinks` tokens, the newest token, and the `before` tokens before it."""

    def __init__(self, groups: tuple[int, ...], before: int, sinks: int, limit: int | None):
        super().__init__(groups)
        self.before, self.sinks = before, sinks
        self.ring = before + 1
        if limit is not None:
            self.ring = max(1, min(self.ring, limit - sinks))
        self.places: Int[Tensor, "b l"] | None = None  # the position at each place; None: no padding so far

    @property
    def size(self) -> int:
        return self.sinks + self.ring

    def tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        super().tensors(change)
        self.places = None if self.places is None else change(self.places)

    def step(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Int[Tensor, "b l"] | None]:
        """Write one token and return what it sees: keys, values, and their positions if rows differ.

        It overwrites the token `before` + 1 positions earlier, which no later query sees.
        """
        self._allocate(k, v)
        assert self.k is not None and self.v is not None
        if tokens.real is None:
            here = self._place(tokens.before)
            self.k[:, :, here], self.v[:, :, here] = k[:, :, 0], v[:, :, 0]
            held = min(tokens.total, self.size)
            return self.k[:, :, :held], self.v[:, :, :held], None
        self._spread(tokens)
        assert self.places is not None and tokens.positions is not None
        own = tokens.positions[:, -1:]
        count = tokens.real.sum(-1, keepdim=True) - 1  # last real token; rows of padding write nothing
        at = self._place_of(torch.where(own >= 0, own, count + 1))
        self._put(at, k, v, own)
        return self.k, self.v, self.places

    def chunk(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Int[Tensor, "b l"] | None]:
        """Keys and values that new tokens may see, in order, with their segments. Does not write to the store."""
        if not tokens.before:
            return k, v, None if tokens.ids is None else tokens.ids[:, 0]
        assert self.k is not None and self.v is not None
        if tokens.real is None:
            spans = self._order(tokens.before)
            held = [torch.cat([x[:, :, part] for part in spans], 2) for x in (self.k, self.v)]
            return torch.cat([held[0], k], 2), torch.cat([held[1], v], 2), None
        self._spread(tokens)
        assert self.places is not None
        order = self.places.argsort(dim=-1, stable=True)
        ids = torch.cat(
            [(self.places.gather(-1, order) >= 0).long() - 1, tokens.real[:, tokens.before :].long() - 1], -1
        )
        both = [
            torch.cat([x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])), new], 2)
            for x, new in ((self.k, k), (self.v, v))
        ]
        return both[0], both[1], ids

    def write(self, k: Tensor, v: Tensor, tokens: Tokens) -> None:
        """Write several new tokens."""
        self._allocate(k, v)
        assert self.k is not None and self.v is not None
        if tokens.real is None:
            for places, part in self._spans(tokens.before, tokens.total):
                self.k[:, :, places], self.v[:, :, places] = k[:, :, part], v[:, :, part]
            return
        self._spread(tokens)
        assert self.places is not None and tokens.positions is not None
        new = tokens.positions[:, tokens.before :]
        last = tokens.real.sum(-1, keepdim=True) - 1
        stays = (new >= 0) & ((new < self.sinks) | (new > last - self.ring))
        at = torch.where(stays, self._place_of(new), self.size)  # an extra place for tokens that are not stored
        source = torch.full((at.shape[0], self.size + 1), -1, device=at.device)
        source.scatter_(1, at, torch.arange(new.shape[1], device=at.device).expand_as(at))
        source = source[:, : self.size]
        for mine, x in ((self.k, k), (self.v, v)):
            index = source.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
            mine.copy_(torch.where((source >= 0)[:, None, :, None], x.gather(2, index), mine))
        self.places.copy_(torch.where(source >= 0, new.gather(1, source.clamp(min=0)), self.places))

    def snapshot(self) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.clone() for x in (self.k, self.v, self.places))

    def restore(self, saved: tuple[Tensor | None, ...]) -> None:
        self.k, self.v, self.places = (None if x is None else x.clone() for x in saved)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        if self.k is None:
            self.k, self.v = (x.new_zeros(*x.shape[:2], self.size, x.shape[-1]) for x in (k, v))

    def _place(self, token: int) -> int:
        return token if token < self.sinks else self.sinks + (token - self.sinks) % self.ring

    def _place_of(self, position: Tensor) -> Tensor:
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.ring)

    def _order(self, total: int) -> list[slice]:
        """The places in the order of their tokens."""
        if total <= self.size:
            return [slice(0, total)]
        oldest = self._place(total)
        return [slice(0, self.sinks), slice(oldest, self.size), slice(self.sinks, oldest)]

    def _spans(self, before: int, total: int) -> list[tuple[slice, slice]]:
        """Pairs of slices (places, new tokens): one for the sinks, one or two for the last `ring` other tokens."""
        spans = []
        if before < self.sinks:
            stop = min(self.sinks, total)
            spans.append((slice(before, stop), slice(0, stop - before)))
        first = max(before, self.sinks, total - self.ring)
        while first < total:
            place = self._place(first)
            size = min(total - first, self.size - place)
            spans.append((slice(place, place + size), slice(first - before, first - before + size)))
            first += size
        return spans

    def _spread(self, tokens: Tokens) -> None:
        """Start to store a position for each place when padding first appears; before that all rows were the same."""
        if self.places is not None:
            return
        assert tokens.real is not None
        token = torch.full((self.size,), -1, device=tokens.real.device)  # the token at each place
        for part, new in self._spans(0, tokens.before):
            token[part] = torch.arange(new.start, new.stop, device=token.device)
        token = token.expand(tokens.real.shape[0], -1)
        assert tokens.positions is not None
        self.places = torch.where(token >= 0, tokens.positions.gather(1, token.clamp(min=0)), -1)

    def _put(self, at: Tensor, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Write one token per row at the row's own place; rows of padding stay unchanged."""
        assert self.k is not None and self.v is not None and self.places is not None
        real = position >= 0
        for mine, x in ((self.k, k), (self.v, v)):
            index = at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
            mine.scatter_(2, index, torch.where(real[:, None, :, None], x, mine.gather(2, index)))
        self.places.scatter_(1, at, torch.where(real, position, self.places.gather(1, at)))


class StateStore:
    """The running state of a recurrent mechanism."""

    def __init__(self, mechanism: RecurrentMechanism, index: HeadIndex):
        self.mechanism = mechanism
        self.index = index
        self.state: State | None = None

    def bytes(self) -> int:
        sizes: list[int] = []
        tree_map(lambda x: sizes.append(x.untyped_storage().nbytes()) if isinstance(x, Tensor) else None, self.state)
        return sum(sizes)

    def tensors(self, change: Callable[[Tensor], Tensor], rows: int) -> None:
        def changed(x):
            return change(x) if isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == rows else x

        self.state = tree_map(changed, self.state)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """Outputs for the new tokens; updates the state. q, k and v are those of the whole layer."""
        q, k, v = self.index.queries(q), self.index.keys(k), self.index.keys(v)
        if not tokens.before and tokens.new > 1:
            ids = tokens.ids if tokens.ids is None or q.ndim == 4 else tokens.ids.unsqueeze(1)
            out, self.state = self.mechanism.prefill(q, k, v, segments=ids)
            return out
        outs = []
        for at in range(tokens.new):
            one = [x[..., at : at + 1, :] for x in (q, k, v)]
            before = self.mechanism.init_state(*one) if self.state is None else self.state
            out, after = self.mechanism.step(before, *one)
            real = tokens.unread if tokens.real is None else tokens.real[:, tokens.before + at]
            self.state = after if real is None else self._kept(real, after, before)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, -2)

    def replay(self, k: Tensor, v: Tensor, tokens: Tokens) -> None:
        """Advance the state over these tokens; it does not depend on the queries."""
        for at in range(tokens.new):
            real = None if tokens.real is None else tokens.real[:, : tokens.before + at + 1]
            own_k, own_v = (x[:, :, at : at + 1] for x in (k, v))
            q = k.new_zeros(k.shape[0], self.index.total, 1, k.shape[-1])
            self.attend(q, own_k, own_v, Tokens(tokens.before + at, 1, real))

    @staticmethod
    def _kept(real: Bool[Tensor, " b"], after: State, before: State) -> State:
        """The new state for rows with a real token, the old one for rows of padding."""

        def choose(new, old):
            if not isinstance(new, Tensor):
                return new
            where = real.reshape(-1, *(1,) * (max(new.ndim, 2) - 1))
            if new.ndim < 2:  # a count that all rows have shared so far
                return torch.where(where, new, old)
            return torch.where(where, new, old.expand_as(new))

        return tree_map(choose, after, before)


def window_of(pattern: Pattern) -> tuple[int, int] | None:
    """(before, sinks): how many keys before its own and how many first keys a query sees; None: no window."""
    return (pattern.before, pattern.sinks) if isinstance(pattern, Window) and not pattern.after else None
