"""One mechanism per head, or per group of heads.

    matrix      A of head h is the matrix of its mechanism
    fast        one call for all heads with equal mechanisms, adjacent or not, and one for all fixed heads; concatenated
    recurrence  the recurrences of the parts, if all have one; the state is a tuple of their states
    cost        the sum of the costs of the parts, each for its share of the heads

The heads are the last batch axis or, for grouped queries, the last two. Raganato et al. (2020, arXiv:2002.10260) use
fixed patterns in seven heads of an encoder and learned attention in one:
Mixture([FixedPattern(kind) for kind in …] + [Softmax(Full())]).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import nn

from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism, Stage, State
from heedful.kernels.row_statistics.sums import RowSums
from heedful.mechanisms.fixed_pattern import FixedPattern, heads_together
from heedful.mechanisms.head_index import HeadIndex, place_of_heads
from heedful.mechanisms.head_index import take as take_places
from heedful.operator import Products
from heedful.patterns import Causal, Pattern
from heedful.segments import Segments
from heedful.shapes import Tensor, broadcast_shapes
from heedful.validation import check_inputs
from heedful.words import check_takes_words

Piece = tuple[Mechanism, tuple[int, ...]]
"""A mechanism and its heads."""


class Mixture(Mechanism):
    """A different mechanism for each head. It can decode token by token if all its mechanisms can.

    >>> import torch, heedful as h
    >>> attend = h.Mixture([h.FixedPattern("left")] * 7 + [h.Softmax()])
    >>> q, k, v = torch.randn(3, 2, 8, 100, 16).unbind()
    >>> attend(q, k, v).shape
    torch.Size([2, 8, 100, 16])
    >>> attend.groups
    (7, 1)

    mechanisms   one per head, in the order of the heads, or one per group of heads
    groups       number of adjacent heads that each mechanism serves; one each by default
    kv_heads     for grouped queries, as from `group_heads`: q (*b, kv_heads, heads / kv_heads, n, d) and k, v
                 (*b, kv_heads, 1, m, ·). There is one mechanism per query head, and k, v are not copied

    Heads share keys and values if k and v have a head axis of size 1. Equal mechanisms are merged into one part, which
    runs in one call: `parts` holds each mechanism once, `index` its heads and `groups` their number. Mechanisms with
    parameters or buffers are merged only if they are the same object, so that heads do not share learned weights by
    accident. With kv_heads, the heads of a part share their keys if every group has equally many of them; otherwise
    keys are copied for each head.
    """

    def __new__(
        cls, mechanisms: Sequence[Mechanism] = (), groups: Sequence[int] | None = None, *, kv_heads: int | None = None
    ):
        return super().__new__(StreamingMixture if cls is Mixture and all_recurrent(mechanisms) else cls)

    def __init__(
        self, mechanisms: Sequence[Mechanism], groups: Sequence[int] | None = None, *, kv_heads: int | None = None
    ):
        check_parts(mechanisms)
        sizes = [1] * len(mechanisms) if groups is None else list(groups)
        if len(sizes) != len(mechanisms) or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(
                f"groups: {groups!r}, expected {len(mechanisms)} integers ≥ 1, the number of heads of each mechanism."
            )
        if kv_heads is not None and (not isinstance(kv_heads, int) or kv_heads < 1 or sum(sizes) % kv_heads):
            raise ValueError(f"kv_heads: {kv_heads!r}, expected a divisor of the {sum(sizes)} heads of this mixture.")
        parts: list[Mechanism] = []
        index: list[list[int]] = []
        first = 0
        for mechanism, size in zip(mechanisms, sizes, strict=True):
            own = next((at for at, part in enumerate(parts) if _alike(part, mechanism)), len(parts))
            if own == len(parts):
                parts.append(mechanism)
                index.append([])
            index[own] += range(first, first + size)
            first += size
        super().__init__(union(parts))
        self.parts = nn.ModuleList(parts)
        self.index = tuple(map(tuple, index))
        self.groups = tuple(map(len, index))
        self.kv_heads = kv_heads
        self.fixed = _kinds(parts, self.index) if all(isinstance(part, FixedPattern) for part in parts) else None

    @property
    def heads(self) -> int:
        """Number of heads."""
        return sum(self.groups)

    def takes_words(self):
        return any(part.takes_words() for part, _ in self._sized())

    def forward(self, q, k, v, *, segments=None, words=None):
        self._check(q, k, v, segments=segments, words=words)
        alone = segments is not None or words is not None or self.kv_heads is not None
        if self.fixed is not None and not alone:
            return heads_together(self.fixed, q, k, v)
        fixed = [] if alone else [piece for piece in self._pieces() if isinstance(piece[0], FixedPattern)]
        fixed = fixed if len(fixed) > 1 else []
        others = [piece for piece in self._pieces() if piece not in fixed]
        outs = [part(*qkv, **given) for part, qkv, given in self._split(segments, q, k, v, pieces=others, words=words)]
        order = [heads for _, heads in others]
        if fixed:  # one call for all kinds
            together = tuple(sorted(head for _, heads in fixed for head in heads))
            kinds = dict(zip((head for _, heads in fixed for head in heads), _kinds_of(fixed), strict=True))
            qkv = [_take(x, -3, together) for x in (q, k, v)]
            outs.append(heads_together(tuple(kinds[head] for head in together), *qkv))
            order.append(together)
        return self._join(outs, order)

    def matrix(self, q, k, *, segments=None, words=None):
        self._check(q, k, segments=segments, words=words)
        return self._join([part.matrix(*qk, **given) for part, qk, given in self._split(segments, q, k, words=words)])

    def products(self, q, k, *, segments=None):
        self._check(q, k, segments=segments)
        adjoints: list[Callable[[Tensor], Tensor]] = [
            part.products(*qk, **given)[1] for part, qk, given in self._split(segments, q, k)
        ]

        def adjoint(y):
            return self._join([back(x) for back, (_, (x,), _) in zip(adjoints, self._split(None, y), strict=True)])

        return Products(lambda x: self(q, k, x, segments=segments), adjoint)

    def row_sums(self, q, k, request, *, segments=None):
        self._check(q, k, segments=segments)
        apart = any(heads != tuple(range(heads[0], heads[0] + len(heads))) for heads in self.index)
        if self.kv_heads is not None or apart:  # row sums are written into slices of one head axis
            return super().row_sums(q, k, request, segments=segments)
        found = []
        for heads, (part, (own_q, own_k), given) in zip(self.index, self._split(segments, q, k), strict=True):
            asked = {name: _if_any(getattr(request, name), heads) for name in ("targets", "columns", "into", "values")}
            asked["down"] = None if request.down is None else request.down.narrow(-2, heads[0], len(heads))
            found.append(part.row_sums(own_q, own_k, replace(request, **asked), **given))
        return RowSums.join(found, max(q.ndim, k.ndim) - 3)

    def cost(self, dims: Dims) -> Cost:
        width = self.heads // (self.kv_heads or 1)
        shared = dims.group_size % width == 0  # the query heads of a group share their keys
        times = dims.group_size // width if shared else dims.group_size  # other batch entries that share the keys
        stages: list[Stage] = []
        state, parameters = 0, {}  # bytes of the parameters of each part
        for part, heads in self._pieces():
            counts = set(Counter(head // width for head in heads).values())  # of this part's heads in each group
            together = counts.pop() if shared and len(counts) == 1 else 1  # else keys are copied for each head
            own = replace(dims, batch=times * len(heads), group_size=times * together)
            cost = part.cost(own)
            stages += cost.stages
            parameters[part] = cost.bytes - own.io_bytes
            state += cost.state or 0

        def share(total: int) -> int:  # the batch of `dims` counts all heads of all rows
            return total * dims.batch // (self.heads * times)

        return Cost.of_stages(
            *(Stage(stage.name, share(stage.flops), share(stage.elementwise)) for stage in stages),
            bytes=dims.io_bytes + sum(parameters.values()),
            state=share(state) if isinstance(self, RecurrentMechanism) else None,
        )

    def reads_qk(self, heads):
        if heads % self.heads:
            raise ValueError(
                f"heads: {heads}, expected {self.heads}, or a multiple where the mixture names the heads of one group: "
                f"this mixture has {' + '.join(map(str, self.groups))} heads."
            )
        reads = {
            head: own for part, mine in self._pieces() for head, own in zip(mine, part.reads_qk(len(mine)), strict=True)
        }
        return tuple(reads[head] for head in range(self.heads)) * (heads // self.heads)

    def explain(self, q, k, v, *, segments=None, words=None):
        self._check(q, k, v, segments=segments, words=words)
        lines = []
        split = self._split(segments, q, k, v, words=words)
        for heads, (part, qkv, given) in zip(self.index, split, strict=True):
            name = _named(heads)
            lines += [f"{name}: {line}" for line in part.explain(*qkv, **given).splitlines()]
        return "\n".join(lines)

    def _check(self, *qkv, segments=None, words=None) -> None:
        check_inputs(*qkv, segments=segments, pattern=self.pattern, mechanism=self)
        if words is not None:
            check_takes_words(self)
        batch = broadcast_shapes(*(x.shape[:-2] for x in qkv))
        if self.kv_heads is None and batch[-1:] == (self.heads,):
            return
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", qkv, strict=False))
        if self.kv_heads is not None:
            wanted = self.kv_heads, self.heads // self.kv_heads
            if batch[-2:] != wanted:
                raise ValueError(
                    f"q: head axes {tuple(batch[-2:])} in {shapes}, expected {wanted}: this mixture has {self.heads} "
                    f"heads and kv_heads = {self.kv_heads}. Likely cause: heads that were not grouped; see "
                    "heedful.group_heads(q, k, v)."
                )
        elif batch[-1:] != (self.heads,):
            given = f"{batch[-1]} heads" if batch else "no head axis"
            raise ValueError(
                f"q: {given} in {shapes}, expected {self.heads} on the last batch axis, (*batch, {self.heads}, tokens, "
                f"width): this mixture has {' + '.join(map(str, self.groups))} heads. Likely cause: a mixture for "
                "another number of heads, heads that were not split, or grouped queries (B, groups, per group, n, d), "
                "for which the mixture names all heads and kv_heads=groups, or the heads of one group alone."
            )

    def _sized(self) -> Iterator[tuple[Mechanism, int]]:
        for part, size in zip(self.parts, self.groups, strict=True):
            assert isinstance(part, Mechanism)
            yield part, size

    def _pieces(self) -> Iterator[Piece]:
        """Yield each part with its heads."""
        for (part, _), heads in zip(self._sized(), self.index, strict=True):
            yield part, heads

    def _split(
        self,
        segments: Segments | None,
        *tensors: Tensor,
        pieces: Iterable[Piece] | None = None,
        words: Tensor | None = None,
    ) -> Iterator[tuple[Mechanism, list[Tensor], dict[str, Any]]]:
        """Yield each part with its heads of the tensors and segments and, if the part takes them, of the words.

        An axis of size 1 serves all heads.
        """
        for part, heads in self._pieces() if pieces is None else pieces:

            def take(x: Tensor, tail: int, heads: tuple[int, ...] = heads) -> Tensor:
                return _take(x, -tail - 1, heads) if self.kv_heads is None else self._take_grouped(x, tail, heads)

            if isinstance(segments, tuple):
                ids: Segments | None = (take(segments[0], 1), take(segments[1], 1))
            else:
                ids = None if segments is None else take(segments, 1)
            given: dict[str, Any] = {"segments": ids}
            if isinstance(words, Tensor) and part.takes_words():
                given["words"] = take(words, 1)
            yield part, [take(x, 2) for x in tensors], given

    def _take_grouped(self, x: Tensor, tail: int, heads: tuple[int, ...]) -> Tensor:
        """Return heads of a tensor with head axes (kv_heads, per group); an axis of size 1 serves all heads.

        The result has axes (groups, heads of a group) if every group has equally many of these heads, else (heads, 1).
        """
        if x.ndim < tail + 2 or len(heads) == self.heads:
            return x if x.ndim != tail + 1 or x.shape[-tail - 1] == 1 else x.unsqueeze(-tail - 2)
        width = self.heads // (self.kv_heads or 1)
        mine = HeadIndex(heads, self.heads, self.kv_heads or 1)
        groups, each = mine.own_groups, mine.per_group
        columns = tuple(head % width for head in heads)
        if x.shape[-tail - 1] == 1:  # shared by the heads of a group
            return _take(x, -tail - 2, groups if each else mine.group_of_head)
        if each and columns == columns[:each] * len(groups):  # the same columns in every group
            return _take(_take(x, -tail - 2, groups), -tail - 1, columns[:each])
        x = x.expand(*x.shape[: -tail - 2], self.kv_heads or 1, *x.shape[-tail - 1 :]).flatten(-tail - 2, -tail - 1)
        return _take(x, -tail - 1, heads).unflatten(-tail - 1, (len(groups), each) if each else (len(heads), 1))

    def _join(self, outs: list[Tensor], order: Sequence[tuple[int, ...]] | None = None) -> Tensor:
        """Concatenate the heads of all pieces, in the order of the heads."""
        if len(outs) == 1:
            return outs[0]
        back = place_of_heads(tuple(self.index if order is None else order))
        heads = torch.cat(outs if self.kv_heads is None else [out.flatten(-4, -3) for out in outs], -3)
        heads = heads if back is None else take_places(heads, -3, back)
        return heads if self.kv_heads is None else heads.unflatten(-3, (self.kv_heads, self.heads // self.kv_heads))

    def extra_repr(self) -> str:
        grouped = "" if self.kv_heads is None else f", kv_heads={self.kv_heads}"
        return f"heads {' + '.join(map(str, self.groups))}{grouped}"


class StreamingMixture(Mixture, RecurrentMechanism):
    """A mixture that can decode token by token; `Mixture(…)` returns one if all its parts can."""

    def init_state(self, q, k, v) -> tuple[State, ...]:
        self._check(q, k, v)
        return tuple(part.init_state(*qkv) for part, qkv, _ in self._split_streams(None, q, k, v))

    def prefill(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments=segments)
        results = [part.prefill(*qkv, **given) for part, qkv, given in self._split_streams(segments, q, k, v)]
        return self._join([out for out, _ in results]), tuple(state for _, state in results)

    def step(self, state: tuple[State, ...], q, k, v):
        self._check(q, k, v)
        streams = self._split_streams(None, q, k, v)
        results = [part.step(own, *qkv) for own, (part, qkv, _) in zip(state, streams, strict=True)]
        return self._join([out for out, _ in results]), tuple(after for _, after in results)

    def _split_streams(
        self, segments: Segments | None, *tensors: Tensor
    ) -> Iterator[tuple[RecurrentMechanism, list[Tensor], dict[str, Any]]]:
        for part, own, given in self._split(segments, *tensors):
            assert isinstance(part, RecurrentMechanism)
            yield part, own, given


def check_parts(mechanisms: Sequence[Mechanism]) -> None:
    """Raise unless this is a list of at least one mechanism."""
    if not isinstance(mechanisms, Sequence) or not mechanisms:
        raise TypeError(f"mechanisms: expected a list of at least one Mechanism, got {mechanisms!r}.")
    for at, mechanism in enumerate(mechanisms):
        if not isinstance(mechanism, Mechanism):
            raise TypeError(
                f"mechanisms[{at}]: expected a Mechanism such as heedful.Softmax(), got {mechanism!r}. A name becomes "
                "one with heedful.build(name)."
            )


def all_recurrent(mechanisms: Sequence[Mechanism]) -> bool:
    """True if all mechanisms can decode token by token. False for an invalid list: `check_parts` raises on it later."""
    return (
        isinstance(mechanisms, Sequence)
        and bool(mechanisms)
        and all(isinstance(mechanism, RecurrentMechanism) for mechanism in mechanisms)
    )


def union(mechanisms: Sequence[Mechanism]) -> Pattern:
    """Return the union of the patterns, or `Causal` if no query sees a later key."""
    patterns: list[Pattern] = []
    for mechanism in mechanisms:
        if mechanism.pattern not in patterns:
            patterns.append(mechanism.pattern)
    if len(patterns) > 1 and all(pattern.is_causal for pattern in patterns):
        return Causal()
    return reduce(or_, patterns)


def _kinds(parts: Sequence[Mechanism], index: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Return the `kernel_kind` of each head, in the order of the heads."""
    pieces = list(zip(parts, index, strict=True))
    kinds = dict(zip((head for heads in index for head in heads), _kinds_of(pieces), strict=True))
    return tuple(kinds[head] for head in sorted(kinds))


def _kinds_of(pieces: Sequence[Piece]) -> list[str]:
    """Return the `kernel_kind` of each head of these pieces, in the order of the pieces."""
    return [part.kernel_kind for part, heads in pieces if isinstance(part, FixedPattern) for _ in heads]


def _named(heads: tuple[int, ...]) -> str:
    if len(heads) == 1:
        return f"head {heads[0]}"
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return f"heads {heads[0]} to {heads[-1]}"
    return f"heads {', '.join(map(str, heads))}"


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """True if one call can serve both: the same object, or the same type with equal options and no tensors."""
    if one is other:
        return True
    if type(one) is not type(other) or any((*m.parameters(), *m.buffers()) for m in (one, other)):
        return False
    own, its = (dict(module.named_children()) for module in (one, other))
    return own.keys() == its.keys() and all(_alike(own[name], its[name]) for name in own) and _same_options(one, other)


def _same_options(one: nn.Module, other: nn.Module) -> bool:
    common = vars(nn.Module())  # hooks, flags and other attributes of torch
    own, its = ({name: value for name, value in vars(m).items() if name not in common} for m in (one, other))
    try:
        return bool(own == its)
    except (RuntimeError, ValueError):  # `==` of tensors or arrays has no single truth value
        return False


def _take(x: Tensor, axis: int, heads: tuple[int, ...]) -> Tensor:
    """Return some heads of an axis of x; an axis of size 1, or a missing one, serves all heads."""
    return x if x.ndim < -axis or x.shape[axis] == 1 else take_places(x, axis, heads)


def _if_any(x: Tensor | None, heads: tuple[int, ...]) -> Tensor | None:
    return None if x is None else _take(x, -3, heads)
