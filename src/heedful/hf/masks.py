"""Masks of transformers' models, represented as rules instead of tensors.

A model requests a mask from `AttentionMaskInterface` with a predicate on (batch, head, query, key), a padding mask and,
for local attention, a window size. Heedful returns a `DeferredMask`: a tensor of the right shape that allocates no
memory. It becomes the model's dense mask as soon as the model computes with it. If it reaches the attention call
untouched, it is read as a `Rule`: a `Pattern`, the padding, and a dense bias if no pattern fits. The pattern is a guess
that is always compared with the predicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import eager_mask, sdpa_mask

from heedful.patterns import Blocks, Causal, Full, Pattern, Window
from heedful.segments import Segments, from_mask, resolve
from heedful.shapes import Bool, Float, Int, Tensor

DENSE_LIMIT = 2**28  # a mask that no pattern describes is refused if it has more entries
HIDDEN = -1e9  # a mask entry this low or lower hides the key
COMPARED_WHOLE = 2**22  # up to this many pairs, compare pattern and predicate on every pair; beyond, on some rows


class MaskNotUnderstood(RuntimeError):
    """A mask that can't be turned into a pattern, padding and bias."""


@dataclass(frozen=True)
class Rule:
    """Which query sees which key in one call: pattern, segments, and a bias of 0 and -inf if no pattern fits."""

    pattern: Pattern
    segments: Segments | None = None
    bias: Float[Tensor, "#b #h n m"] | None = None


@dataclass
class MaskRequest:
    """A model's request for a mask."""

    batch: int
    n: int
    m: int
    arguments: dict[str, Any]
    known: dict[bool, Rule] = field(default_factory=dict)

    @property
    def padding(self) -> Bool[Tensor, "b m"] | None:
        """True for real keys; None if all are real."""
        mask, start = self.arguments["attention_mask"], self.arguments["kv_offset"]
        if mask is None:
            return None
        mask = mask.bool()[:, start : start + self.m]
        missing = self.m - mask.shape[-1]
        return torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask

    def dense(self) -> Tensor:
        """The additive mask that the model's own eager attention would receive."""
        options = {**self.arguments, "allow_is_bidirectional_skip": False}
        return eager_mask(batch_size=self.batch, q_length=self.n, kv_length=self.m, **options)

    def allowed(self, rows: Int[Tensor, " r"]) -> Bool[Tensor, "#b #h r m"]:
        """The given rows of the mask, computed by the predicate."""
        if self.arguments["use_vmap"]:  # the predicate may not broadcast: let transformers call it
            options = {**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            whole = sdpa_mask(batch_size=self.batch, q_length=self.n, kv_length=self.m, **options)
            assert whole is not None  # transformers returns None only if the caller allowed it
            return whole[..., rows, :]
        where = rows.device
        index = (
            torch.arange(self.batch, device=where)[:, None, None, None],
            torch.zeros(1, dtype=torch.long, device=where)[None, :, None, None],
            (rows + self.arguments["q_offset"])[None, None, :, None],
            (torch.arange(self.m, device=where) + self.arguments["kv_offset"])[None, None, None, :],
        )
        allowed = self.arguments["mask_function"](*index).expand(self.batch, -1, len(rows), self.m)
        keys = self.padding
        return allowed if keys is None else allowed & keys[:, None, None, :]

    @cached_property
    def read(self) -> tuple[Pattern, Int[Tensor, "b n"] | None] | None:
        """Pattern and packing if the predicate is one of transformers' own; None for any other predicate."""
        known = _read_predicate(self.arguments["mask_function"])
        return None if known is None else (known.pattern(), known.packed)

    @cached_property
    def hides(self) -> bool:
        """True if padding hides a key. Reads a number from the device, once for all layers."""
        return self.padding is not None and not bool(self.padding.all())

    @cached_property
    def has_gaps(self) -> bool:
        """True if there is padding between tokens: then a window of columns is not a window of tokens."""
        if not self.hides or self.padding is None:
            return False
        starts = self.padding[:, 1:] & ~self.padding[:, :-1]
        return bool((starts.sum(-1) + self.padding[:, 0] > 1).any())

    def rule(self, crosses: bool, queries: Bool[Tensor, "b n"] | None) -> Rule:
        """The rule of a call; `queries` says which queries are real if the keys are another sequence."""
        if crosses not in self.known:
            self.known[crosses] = self._find(crosses, queries)
        return self.known[crosses]

    def _find(self, crosses: bool, queries: Tensor | None) -> Rule:
        device = torch.device(self.arguments["device"])
        segments = _segments(self.padding, queries, self.n, self.m, crosses)
        size = self.arguments["local_size"]
        if self.n <= self.m or crosses:
            for pattern in _candidates(size, crosses):
                rows = _rows_to_compare(self.n, self.m, size, device)
                if self._agrees(pattern, segments, rows):
                    return Rule(pattern, segments)
        if self.batch * self.n * self.m > DENSE_LIMIT:
            raise MaskNotUnderstood(
                f"a mask of {self.n} × {self.m} that is neither full, causal, a window nor blocks. It would have to be "
                f"held whole, and {self.batch * self.n * self.m:,} entries are more than {DENSE_LIMIT:,}. Likely "
                "cause: packed sequences or a mask of one's own; give shorter texts, one a row."
            )
        allowed = self.allowed(torch.arange(self.n, device=device))
        return Rule(_outline(allowed), segments, _additive(allowed))

    def _agrees(self, pattern: Pattern, segments: Segments | None, rows: Tensor) -> bool:
        """True if pattern and segments agree with the predicate on these rows, for all real queries."""
        layout = resolve(segments, self.n, self.m, rows.device)
        ids, positions = layout.query_ids[..., rows, None], layout.query_positions[..., rows, None]
        seen = (ids == layout.key_ids[..., None, :]) & pattern.allows(positions, layout.key_positions[..., None, :])
        return bool(((seen == self.allowed(rows)) | (ids < 0)).all())


@dataclass(frozen=True)
class _Predicate:
    """The meaning of a transformers predicate: all of these conditions hold."""

    causal: bool = False
    before: int | None = None
    after: int | None = None
    packed: Int[Tensor, "b n"] | None = None

    def pattern(self) -> Pattern:
        if self.before is None:
            return Causal() if self.causal else Full()
        return Window(self.before, 0 if self.causal or self.after is None else self.after)


def _read_predicate(function: Callable, so_far: _Predicate | None = _Predicate()) -> _Predicate | None:  # noqa: B008
    """The meaning of a function from `transformers.masking_utils`; None for any other function.

    These functions are closures over a size or a tensor. The function's name identifies it, its cells hold the value.
    """
    if so_far is None or getattr(function, "__module__", "") != masking_utils.__name__:
        return None
    held = dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )
    match function.__qualname__:
        case "causal_mask_function":
            return replace(so_far, causal=True)
        case "bidirectional_mask_function":
            return so_far
        case "sliding_window_overlay.<locals>.inner_mask" if so_far.before is None:
            return replace(so_far, before=held["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask" if so_far.before is None:
            return replace(so_far, before=held["sliding_window"], after=held["sliding_window"])
        case "packed_sequence_mask_function.<locals>.inner_mask" if so_far.packed is None:
            return replace(so_far, packed=held["packed_sequence_mask"])
        case "and_masks.<locals>.and_mask":
            found: _Predicate | None = so_far
            for part in held["mask_functions"]:
                found = _read_predicate(part, found)
            one_sided = found is not None and found.before is not None and found.after is None and not found.causal
            return None if one_sided else found
    return None


class DeferredMask(Tensor):
    """The mask of a request; allocates no memory until something computes with it."""

    request: MaskRequest

    @staticmethod
    def of(request: MaskRequest, dtype: torch.dtype, device: torch.device) -> DeferredMask:
        blank = torch.zeros(1, dtype=dtype, device=device).expand(request.batch, 1, request.n, request.m)
        mask = torch.Tensor._make_subclass(DeferredMask, blank)
        mask.request = request
        return mask

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _ABOUT_SHAPE:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in _LEAVES_NUMBERS:
            return args[0]
        if func is Tensor.to:
            target = torch.empty(0, dtype=args[0].dtype, device=args[0].device).to(*args[1:], **(kwargs or {}))
            if target.dtype == args[0].dtype:
                return cls.of(args[0].request, target.dtype, target.device)
        args, kwargs = tree_map(lambda x: x.request.dense() if isinstance(x, DeferredMask) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def _getter(name: str) -> Callable:
    return getattr(Tensor, name).__get__


_ABOUT_SHAPE = {
    *map(_getter, ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")),
    Tensor.size,
    Tensor.stride,
    Tensor.storage_offset,
    Tensor.is_contiguous,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
}
_LEAVES_NUMBERS = {Tensor.contiguous, Tensor.clone, Tensor.detach}


def deferred_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DeferredMask:
    """The function that `AttentionMaskInterface` calls; ignores options meant for other implementations."""
    arguments = {
        "q_offset": int(q_offset),
        "kv_offset": int(kv_offset),
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "local_size": local_size,
        "use_vmap": use_vmap,
        "dtype": dtype,
        "device": device,
    }
    return DeferredMask.of(MaskRequest(batch_size, q_length, kv_length, arguments), dtype, torch.device(device))


def rule_of(
    mask: Tensor | None, n: int, m: int, *, crosses: bool, queries: Bool[Tensor, "b n"] | None, keys: Tensor | None
) -> Rule:
    """The rule behind the mask of an attention call.

    `queries` and `keys` are the padding masks of the call's sequences, if the model's inputs have them.
    """
    if mask is None:
        return Rule(Full(), _segments(None, queries, n, m, crosses))
    if isinstance(mask, DeferredMask):
        request = mask.request
        if (request.n, request.m) != (n, m):
            raise MaskNotUnderstood(f"a mask made for {request.n} × {request.m} in a call of {n} × {m}.")
        return request.rule(crosses, queries)
    return _rule_of_dense(mask, n, m, crosses, queries, keys)


def _rule_of_dense(mask: Tensor, n: int, m: int, crosses: bool, queries: Tensor | None, keys: Tensor | None) -> Rule:
    """The rule of a mask that the model made itself: additive or boolean, (b, heads or 1, n or 1, m or more)."""
    if mask.ndim != 4 or mask.shape[-2] not in (1, n) or mask.shape[-1] < m:
        raise MaskNotUnderstood(
            f"a mask of shape {tuple(mask.shape)}, expected (batch, heads or 1, {n} or 1, {m} or more)."
        )
    mask = mask[..., :m]
    allowed = mask if mask.dtype == torch.bool else mask > max(torch.finfo(mask.dtype).min / 2, HIDDEN)
    plain = mask.dtype == torch.bool or bool(((mask == 0) | ~allowed).all())
    if plain and mask.shape[1] == mask.shape[-2] == 1:  # depends on keys alone: padding
        return Rule(Full(), _segments(allowed[:, 0, 0], queries, n, m, crosses))
    bias = _additive(allowed) if plain else mask.float().masked_fill(~allowed, -inf)
    if keys is not None and bool((allowed & ~keys.to(allowed.device)[:, None, None]).any()):
        keys = None  # the model attends to padding, so the rule does too
    return Rule(_outline(allowed.expand(-1, -1, n, -1)), _segments(keys, queries, n, m, crosses), bias)


def _segments(
    keys: Bool[Tensor, "b m"] | None, queries: Bool[Tensor, "b n"] | None, n: int, m: int, crosses: bool
) -> Segments | None:
    """Segments (b, 1, ·) from padding masks; a pair if queries and keys are different sequences."""
    if not crosses:
        return None if keys is None or bool(keys.all()) else from_mask(keys)[:, None]
    known = [real for real in (keys, queries) if real is not None]
    if all(bool(real.all()) for real in known):
        return None
    everyone = known[0].new_ones(known[0].shape[0], 1)
    queries = everyone.expand(-1, n) if queries is None else queries.to(everyone.device)
    keys = everyone.expand(-1, m) if keys is None else keys
    return from_mask(queries)[:, None], from_mask(keys)[:, None]


def _candidates(size: int | None, crosses: bool) -> list[Pattern]:
    """Patterns that transformers' own predicates may mean, simplest first."""
    if crosses:
        return [Full()]
    if size is None:
        return [Full(), Causal()]
    return [Full(), Causal(), Window(size - 1), Window(size, size), Causal() & Blocks(size)]


def _rows_to_compare(n: int, m: int, size: int | None, device: torch.device) -> Tensor:
    if n * m <= COMPARED_WHOLE:
        return torch.arange(n, device=device)
    edges = [] if size is None else [k * size + step for k in (1, 2) for step in (-1, 0, 1)]
    spread = torch.linspace(0, n - 1, 64).long().tolist()
    return torch.tensor(sorted({row for row in [*spread, *edges] if 0 <= row < n}), device=device)


def _outline(allowed: Tensor) -> Pattern:
    """`Causal` if the dense mask lets no query see a later key, else `Full`."""
    n, m = allowed.shape[-2:]
    ahead = torch.ones(n, m, dtype=torch.bool, device=allowed.device).triu(1)
    return Causal() if n == m and not bool((allowed & ahead).any()) else Full()


def _additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -inf)
