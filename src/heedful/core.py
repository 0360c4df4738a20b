"""The contract: what every attention mechanism is.

Tensors are (*batch, n, d), heads are the last batch axis: q (*b, n, d), k (*b, m, d), v (*b, m, e). Batch axes
broadcast, which is how grouped queries share keys: q (B, groups, per group, n, d), k (B, groups, 1, m, d).

Every mechanism is linear in the values, O = A(q, k) V. So `forward` with any matrix in place of V is the product
A @ X, its gradient in V is the product A.mT @ Y, and `operator` gives both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any, final

import torch
from torch import nn

from heedful.kernels.dispatch import as_given
from heedful.kernels.row_statistics.reference import by_blocks
from heedful.kernels.row_statistics.sums import Request, RowSums
from heedful.operator import AttentionOperator, Products
from heedful.patterns import Full, Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Float, Tensor, broadcast_shapes
from heedful.validation import forget_device
from heedful.words import check_takes_words

State = Any
"""What a recurrent mechanism carries from token to token: a NamedTuple of tensors."""


@dataclass(frozen=True)
class Dims:
    """The sizes of one call.

    n, m         queries and keys of one sequence
    d, e         widths of a key and of a value
    batch        sequences, heads included: rows · heads
    itemsize     bytes of a number
    group_size   how many entries of the batch share one sequence of keys and values: heads / kv_heads for grouped
                 queries, 1 where each has its own. The heads are the last batch axis, so a multiple of the number of
                 heads means that all heads of a group share theirs

    >>> Dims(n=1024, m=1024, d=64, e=64, batch=9, group_size=3).kv_batch  # 9 heads, 3 KV heads
    3
    """

    n: int
    m: int
    d: int
    e: int
    batch: int = 1
    itemsize: int = 4
    group_size: int = 1

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.batch % self.group_size:
            raise ValueError(f"group_size: {self.group_size}, expected a divisor of batch = {self.batch}.")

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Dims:
        """The sizes of forward(q, k, v). Keys and values count alike: as often as either has a sequence of its own."""
        own = broadcast_shapes(k.shape[:-2], v.shape[:-2])
        batch, kv_batch = prod(broadcast_shapes(q.shape[:-2], own)), prod(own)
        group_size = batch // kv_batch if batch else 1
        return cls(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], batch, q.element_size(), group_size)

    @property
    def kv_batch(self) -> int:
        """How many sequences of keys and values there are: rows · kv_heads."""
        return self.batch // self.group_size

    def states(self, heads: int = 1) -> int:
        """How many sums over keys and values a recurrence keeps: one for each sequence of them.

        heads   how many heads turn keys into features, or let them fade, in a way of their own: heads that share their
                keys then still need a state each
        """
        return self.kv_batch * (heads if self.group_size % heads == 0 else 1)

    @property
    def io_bytes(self) -> int:
        """Each input read once, the output written once: no implementation moves less."""
        return self.itemsize * (self.d + self.e) * (self.batch * self.n + self.kv_batch * self.m)


@dataclass(frozen=True)
class Stage:
    """One stage of a call, such as its scores.

    flops         its part of `Cost.flops`
    elementwise   how many numbers get a function of their own, such as an exponential; not among the flops
    """

    name: str
    flops: int
    elementwise: int = 0


@dataclass(frozen=True)
class Cost:
    """What one call takes.

    flops    of matrix products and prefix sums, a multiply-add being two
    bytes    that must move at least
    state    numbers kept for decoding after m tokens, or None where there is no recurrence
    stages   where the flops go, in the order of the work: they add up to `flops`. One stage, "attention", by default

    >>> Cost.of_stages(Stage("scores", 60), Stage("aggregation", 40), bytes=8).flops
    100
    """

    flops: int
    bytes: int
    state: int | None = None
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            object.__setattr__(self, "stages", (Stage("attention", self.flops),))
        total = sum(stage.flops for stage in self.stages)
        if total != self.flops:
            raise ValueError(f"stages: they add up to {total:,} flops, expected {self.flops:,}, those of the call.")

    @classmethod
    def of_stages(cls, *stages: Stage, bytes: int, state: int | None = None) -> Cost:
        """The cost of stages one after the other; those of one name become one, those of no work are left out."""
        named: dict[str, Stage] = {}
        for stage in stages:
            sofar = named.get(stage.name, Stage(stage.name, 0))
            named[stage.name] = Stage(stage.name, sofar.flops + stage.flops, sofar.elementwise + stage.elementwise)
        kept = tuple(stage for stage in named.values() if stage.flops or stage.elementwise)
        return cls(sum(stage.flops for stage in kept), bytes, state, kept)


def softmax_stages(pairs: int, d: int, e: int, weights: str = "softmax") -> tuple[Stage, Stage, Stage]:
    """The stages of exact attention: q·k of each pair, a weight from each score, and the weighted values.

    pairs     of a query and a key that it sees, over the whole batch
    weights   the name of the second stage
    """
    return Stage("scores", 2 * pairs * d), Stage(weights, 0, pairs), Stage("aggregation", 2 * pairs * e)


class Mechanism(nn.Module, ABC):
    """One way to attend. Subclasses give `forward`, `matrix` and `cost`; see `heedful.testing.check_mechanism`.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 8, 100, 16).unbind()
    >>> attend = h.Softmax(h.Causal())
    >>> torch.allclose(attend(q, k, v), attend.matrix(q, k) @ v, atol=1e-5)
    True
    """

    def __init__(self, pattern: Pattern | None = None):
        super().__init__()
        self.pattern = Full() if pattern is None else pattern
        if not isinstance(self.pattern, Pattern):
            raise TypeError(
                f"pattern: expected a Pattern such as Causal() or Window(512), got {type(pattern).__name__}. "
                "A boolean mask is not a pattern: use `segments` for padding, or `bias` for arbitrary scores."
            )

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "*#b n d"],
        k: Float[Tensor, "*#b m d"],
        v: Float[Tensor, "*#b m e"],
        *,
        segments: Segments | None = None,
    ) -> Float[Tensor, "*b n e"]:
        """A(q, k) v by the fast path."""

    @abstractmethod
    def matrix(
        self, q: Float[Tensor, "*#b n d"], k: Float[Tensor, "*#b m d"], *, segments: Segments | None = None
    ) -> Float[Tensor, "*b n m"]:
        """A(q, k) as the paper writes it, derived independently of `forward`: it is the oracle."""

    @abstractmethod
    def cost(self, dims: Dims) -> Cost:
        """What `forward` takes at these sizes."""

    def reads_qk(self, heads: int) -> tuple[bool, ...]:
        """For each of `heads` heads, whether A depends on q and k beyond their shapes; a layer gives no others weights.

        Override where it does not: every False is a promise.
        """
        return (True,) * heads

    def takes_words(self) -> bool:
        """Whether `forward` and `matrix` take `words=`, the word ids of the keys.

        Override where A depends on words, as that of `FixedPattern` does. Like segments they travel with the call.
        """
        return False

    # What measures ask for. Each has a default; a mechanism overrides it where it has something faster.

    def products(self, q: Tensor, k: Tensor, *, segments: Segments | None = None) -> Products:
        """x ↦ A x by `forward`, and y ↦ Aᵀ y by its gradient in v. Override where the adjoint has a cheaper form."""

        def adjoint(y: Tensor) -> Tensor:
            batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], y.shape[:-2])
            with torch.enable_grad(), as_given(q):
                v = y.new_zeros(*batch, k.shape[-2], y.shape[-1], requires_grad=True)
                out = self(q.detach(), k.detach(), v, segments=segments)
                return torch.autograd.grad(out, v, y.expand_as(out))[0]

        return Products(lambda x: self(q, k, x, segments=segments), adjoint)

    def row_sums(self, q: Tensor, k: Tensor, request: Request, *, segments: Segments | None = None) -> RowSums:
        """Sums over the rows of A. Override where rows come cheaper than by the adjoint on unit vectors."""
        n, m = q.shape[-2], k.shape[-2]
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2])
        adjoint = self.products(q, k, segments=segments)[1]

        def rows(part: slice) -> Tensor:
            unit = q.new_zeros(n, part.stop - part.start)
            unit.diagonal(-part.start).fill_(1)
            return adjoint(unit.expand(*batch, -1, -1)).mT

        layout = resolve(segments, n, m, q.device)
        with as_given(q):
            return by_blocks(rows, (*batch, n, m), layout, self.pattern, request, q.dtype, q.device)

    def materialise(self, q: Tensor, k: Tensor, *, segments: Segments | None = None) -> Tensor:
        """A(q, k) in numbers, for measuring. Override where there is a faster way than `matrix`.

        The operator calls it with inputs that it has checked, and without autocast.
        """
        return self.matrix(q, k, segments=segments)

    def float32_products(self, q: Tensor, k: Tensor, *, segments: Segments | None = None) -> Products:
        """`products` of 16-bit q and k with float32 columns. Override where that needs no float32 copy of q and k."""
        return self.products(q.float(), k.float(), segments=segments)

    def float32_row_sums(self, q: Tensor, k: Tensor, request: Request, *, segments: Segments | None = None) -> RowSums:
        """`row_sums` of 16-bit q and k in float32. Override where that needs no float32 copy of q and k."""
        return self.row_sums(q.float(), k.float(), request, segments=segments)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, *, segments: Segments | None = None) -> str:
        """Which backend a call would run on, and why not the others."""
        return f"{type(self).__name__}: plain torch, no kernel to choose"

    @final
    def operator(
        self, q: Tensor, k: Tensor, *, segments: Segments | None = None, words: Tensor | None = None
    ) -> AttentionOperator:
        """A(q, k) as a linear operator that is never materialised."""
        return AttentionOperator(self if words is None else _OnWords(self, words), q, k, segments)

    def _apply(self, fn, recurse=True):  # what `to`, `cuda` and `double` go through
        forget_device(self)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return repr(self.pattern)


class _OnWords(Mechanism):
    """A mechanism and the word ids of one batch, behind an operator: ids are no parameter and no buffer."""

    def __init__(self, mechanism: Mechanism, words: Tensor):
        check_takes_words(mechanism)
        super().__init__(mechanism.pattern | Full())  # a row sees whole words, their later tokens too
        self.mechanism = mechanism
        self.words = words

    def forward(self, q, k, v, *, segments=None):
        return self.mechanism(q, k, v, segments=segments, words=self.words)

    def matrix(self, q, k, *, segments=None):
        return self.mechanism.matrix(q, k, segments=segments, words=self.words)  # type: ignore[call-arg]

    def cost(self, dims: Dims) -> Cost:
        return self.mechanism.cost(dims)


class RecurrentMechanism(Mechanism):
    """A mechanism that can also go token by token: three methods more, and `cost.state`.

    A complete one, q·k without a softmax. Saved as a file it passes the whole contract::

        from typing import NamedTuple

        import torch

        import heedful as h
        from heedful.validation import check_inputs, check_token
        from heedful.segments import in_last, per_segment, resolve, visible
        from heedful.testing import check_mechanism


        class Memory(NamedTuple):
            S: torch.Tensor  # Σ k_j v_jᵀ over the tokens so far, (*batch, d, e)


        class DotProduct(h.RecurrentMechanism):
            '''A_ij = q_i·k_j for j ≤ i, so that o_t = q_t S_t with S_t = S_{t-1} + k_t v_tᵀ.'''

            def __init__(self):
                super().__init__(h.Causal())

            def matrix(self, q, k, *, segments=None):
                check_inputs(q, k, segments=segments, pattern=self.pattern)
                sees = visible(self.pattern, q.shape[-2], k.shape[-2], segments, q.device)
                return torch.where(sees, q @ k.mT, 0)

            def forward(self, q, k, v, *, segments=None):
                check_inputs(q, k, v, segments=segments, pattern=self.pattern)
                if segments is not None:
                    return per_segment(self, q, k, v, segments)
                n, m, wide = q.shape[-2], k.shape[-2], torch.promote_types(q.dtype, torch.float32)
                S = (k.to(wide)[..., :, None] * v.to(wide)[..., None, :]).cumsum(-3)[..., m - n :, :, :]
                return (q.to(wide)[..., None, :] @ S)[..., 0, :].to(q.dtype)

            def init_state(self, q, k, v):
                batch = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
                wide = torch.promote_types(q.dtype, torch.float32)
                return Memory(q.new_zeros(*batch, k.shape[-1], v.shape[-1], dtype=wide))

            def step(self, state, q, k, v):
                check_token(q, k, v, d=state.S.shape[-2], e=state.S.shape[-1])
                S = state.S + k.to(state.S.dtype).mT @ v.to(state.S.dtype)
                return (q.to(S.dtype) @ S).to(q.dtype), Memory(S)

            def prefill(self, q, k, v, *, segments=None):
                out = self(q, k, v, segments=segments)
                ids = resolve(segments, q.shape[-2], k.shape[-2], k.device).key_ids
                wide = torch.promote_types(k.dtype, torch.float32)
                kept = torch.where(in_last(ids)[..., None], k.to(wide), 0)
                return out, Memory(kept.mT @ v.to(wide))

            def cost(self, dims):
                de = dims.d * dims.e
                flops = (dims.kv_batch * dims.m + 2 * dims.batch * dims.n) * de
                return h.Cost(flops, dims.io_bytes, state=dims.kv_batch * de)


        print(check_mechanism(DotProduct))

    check_inputs      first line of `forward` and `matrix`: refuses wrong shapes, dtypes, devices and segments in words,
                      and more queries than keys where the pattern knows positions
    check_token       first line of `step`: the same, and that q, k and v are one token of the widths d and e that the
                      state was made for
    segments.visible  the mask of the pattern under segments, (*batch, n, m): what `matrix` is written with
    segments.resolve  ids and positions of queries and keys, also where `segments` is None; padding has a negative id
    segments.in_last  which tokens a decoder goes on with: those of the last segment of each row. Padding and earlier
                      segments must not enter the state
    per_segment       `forward` on each segment by itself: right for any mechanism, one call for each segment

    The state is a NamedTuple of tensors that `step` does not change; it returns a new one. It is one size up from its
    inputs, at least float32, since every step rounds it. `cost.state` counts its floating-point numbers. What
    depends on keys and values alone is kept once for all queries that share them: dims.kv_batch times, not dims.batch.
    """

    @abstractmethod
    def init_state(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        """The state before the first token; the tensors tell batch, widths, dtype and device, not values."""

    @abstractmethod
    def step(
        self,
        state: State,
        q: Float[Tensor, "*#b 1 d"],
        k: Float[Tensor, "*#b 1 d"],
        v: Float[Tensor, "*#b 1 e"],
    ) -> tuple[Float[Tensor, "*b 1 e"], State]:
        """One token more: its output, equal to the last row of `forward` on all tokens so far, and the new state."""

    @abstractmethod
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, *, segments: Segments | None = None) -> tuple[Tensor, State]:
        """`forward`, and the state after it. Under `segments`, steps go on with the last segment of each row."""


def group_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views for grouped-query attention: q (B, H, n, d) and k, v (B, groups, m, ·) with the groups apart.

    Query head h belongs to group h // (H / groups). The result has one more batch axis; `out.flatten(-4, -3)`
    joins the heads again.

    >>> import torch
    >>> q, kv = torch.randn(2, 8, 10, 4), torch.randn(2, 2, 10, 4)
    >>> [tuple(x.shape) for x in group_heads(q, kv, kv)]
    [(2, 2, 4, 10, 4), (2, 2, 1, 10, 4), (2, 2, 1, 10, 4)]
    """
    heads, groups = q.shape[-3], k.shape[-3]
    if heads % groups:
        raise ValueError(f"q: {heads} heads, expected a multiple of the {groups} heads of k.")
    return q.unflatten(-3, (groups, heads // groups)), k.unsqueeze(-3), v.unsqueeze(-3)
