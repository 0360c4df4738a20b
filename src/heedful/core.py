"""The contract of an attention mechanism: the base classes, and the types that describe sizes and costs.

Tensors have shape (*batch, n, d), and heads are the last batch axis: q (*b, n, d), k (*b, m, d), v (*b, m, e). Batch
axes broadcast. Grouped queries use this to share keys: q (B, groups, per group, n, d), k (B, groups, 1, m, d).

Every mechanism is linear in the values, O = A(q, k) V. So `forward` with a matrix X in place of V computes A @ X, and
its gradient in V computes A.mT @ Y. `operator` offers both products.
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
"""The state that a recurrent mechanism carries from token to token: a NamedTuple of tensors."""


@dataclass(frozen=True)
class Dims:
    """The sizes of one call.

    n, m         queries and keys of one sequence
    d, e         widths of a key and of a value
    batch        number of query sequences, counted per head: batch rows · heads
    itemsize     bytes per number
    group_size   number of batch entries that share one sequence of keys and values: heads / kv_heads for grouped
                 queries, 1 if every entry has separate keys. Heads are the last batch axis, so a multiple of the number
                 of heads means that all heads of several batch rows share the same keys

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
        """Return the sizes of forward(q, k, v). `kv_batch` is the broadcast batch of keys and values together."""
        own = broadcast_shapes(k.shape[:-2], v.shape[:-2])
        batch, kv_batch = prod(broadcast_shapes(q.shape[:-2], own)), prod(own)
        group_size = batch // kv_batch if batch else 1
        return cls(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], batch, q.element_size(), group_size)

    @property
    def kv_batch(self) -> int:
        """Number of sequences of keys and values: batch rows · kv_heads."""
        return self.batch // self.group_size

    def states(self, heads: int = 1) -> int:
        """Number of states that a recurrence stores: one per sequence of keys and values.

        heads   number of heads with separate feature maps or decays. Heads that share keys but map or decay them
                differently need one state each
        """
        return self.kv_batch * (heads if self.group_size % heads == 0 else 1)

    @property
    def io_bytes(self) -> int:
        """Bytes to read each input once and write the output once: a lower bound for every implementation."""
        return self.itemsize * (self.d + self.e) * (self.batch * self.n + self.kv_batch * self.m)


@dataclass(frozen=True)
class Stage:
    """One stage of a call, such as the scores.

    flops         flops of this stage; the stages of a `Cost` add up to `Cost.flops`
    elementwise   number of elementwise function evaluations, such as exponentials; not counted as flops

    >>> Stage("softmax", flops=0, elementwise=1024 * 1024)
    Stage(name='softmax', flops=0, elementwise=1048576)
    """

    name: str
    flops: int
    elementwise: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of one call.

    flops    flops of matrix products and prefix sums; a multiply-add counts as two
    bytes    lower bound on the bytes moved
    state    numbers in the decoding state after m tokens, or None if the mechanism has no recurrence
    stages   the flops by stage, in the order of execution; they add up to `flops`. Default: one stage, "attention"

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
        """Return the cost of these stages. Stages with the same name are merged, stages without work are dropped."""
        named: dict[str, Stage] = {}
        for stage in stages:
            sofar = named.get(stage.name, Stage(stage.name, 0))
            named[stage.name] = Stage(stage.name, sofar.flops + stage.flops, sofar.elementwise + stage.elementwise)
        kept = tuple(stage for stage in named.values() if stage.flops or stage.elementwise)
        return cls(sum(stage.flops for stage in kept), bytes, state, kept)


def softmax_stages(pairs: int, d: int, e: int, weights: str = "softmax") -> tuple[Stage, Stage, Stage]:
    """Return the stages of exact attention: scores q·k, weights from the scores, and the weighted sum of values.

    pairs     number of pairs of a query and a visible key, over the whole batch
    weights   name of the second stage
    """
    return Stage("scores", 2 * pairs * d), Stage(weights, 0, pairs), Stage("aggregation", 2 * pairs * e)


class Mechanism(nn.Module, ABC):
    """Base class of attention mechanisms.

    A subclass implements `forward`, `matrix` and `cost`. `heedful.testing.check_mechanism` tests it.

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
        """Return A(q, k) v, computed by the fast path."""

    @abstractmethod
    def matrix(
        self, q: Float[Tensor, "*#b n d"], k: Float[Tensor, "*#b m d"], *, segments: Segments | None = None
    ) -> Float[Tensor, "*b n m"]:
        """Return A(q, k) by the paper's formula, independently of `forward`. Tests use it as the oracle."""

    @abstractmethod
    def cost(self, dims: Dims) -> Cost:
        """Return the cost of `forward` at these sizes."""

    def reads_qk(self, heads: int) -> tuple[bool, ...]:
        """For each of `heads` heads, True if A depends on the values of q and k and not on their shapes alone.

        Override it to return False for heads that ignore q and k. A layer then creates no query and key weights for
        these heads, so a wrong False gives wrong results.
        """
        return (True,) * heads

    def takes_words(self) -> bool:
        """True if `forward` and `matrix` take `words=`, the word ids of the keys.

        Override it where A depends on words, as in `FixedPattern`. Word ids, like segments, are arguments of each call.
        """
        return False

    # Methods that the measures call. Each has a default; a mechanism overrides it if it has a faster way.

    def products(self, q: Tensor, k: Tensor, *, segments: Segments | None = None) -> Products:
        """Return x ↦ A x, by `forward`, and y ↦ Aᵀ y, by its gradient in v. Override it if Aᵀ y has a cheaper form."""

        def adjoint(y: Tensor) -> Tensor:
            batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], y.shape[:-2])
            with torch.enable_grad(), as_given(q):
                v = y.new_zeros(*batch, k.shape[-2], y.shape[-1], requires_grad=True)
                out = self(q.detach(), k.detach(), v, segments=segments)
                return torch.autograd.grad(out, v, y.expand_as(out))[0]

        return Products(lambda x: self(q, k, x, segments=segments), adjoint)

    def row_sums(self, q: Tensor, k: Tensor, request: Request, *, segments: Segments | None = None) -> RowSums:
        """Return sums over the rows of A. The default applies the adjoint to unit vectors; override it if slow."""
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
        """Return A(q, k) as a dense tensor, for measuring. Override it if there is a faster way than `matrix`.

        The operator calls it with checked inputs and with autocast disabled.
        """
        return self.matrix(q, k, segments=segments)

    def float32_products(self, q: Tensor, k: Tensor, *, segments: Segments | None = None) -> Products:
        """`products` of 16-bit q and k with float32 columns. Override it to avoid the float32 copies of q and k."""
        return self.products(q.float(), k.float(), segments=segments)

    def float32_row_sums(self, q: Tensor, k: Tensor, request: Request, *, segments: Segments | None = None) -> RowSums:
        """`row_sums` of 16-bit q and k in float32. Override it to avoid the float32 copies of q and k."""
        return self.row_sums(q.float(), k.float(), request, segments=segments)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, *, segments: Segments | None = None) -> str:
        """Return which backend this call would use, and why the others are not eligible."""
        return f"{type(self).__name__}: plain torch, no kernel to choose"

    @final
    def operator(
        self, q: Tensor, k: Tensor, *, segments: Segments | None = None, words: Tensor | None = None
    ) -> AttentionOperator:
        """Return A(q, k) as a linear operator, without materialising it."""
        return AttentionOperator(self if words is None else _OnWords(self, words), q, k, segments)

    def _apply(self, fn, recurse=True):  # called by `to`, `cuda` and `double`
        forget_device(self)
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return repr(self.pattern)


class _OnWords(Mechanism):
    """A mechanism with the word ids of one batch, for an operator. The ids are neither parameter nor buffer."""

    def __init__(self, mechanism: Mechanism, words: Tensor):
        check_takes_words(mechanism)
        super().__init__(mechanism.pattern | Full())  # a row sees whole words, including their later tokens
        self.mechanism = mechanism
        self.words = words

    def forward(self, q, k, v, *, segments=None):
        return self.mechanism(q, k, v, segments=segments, words=self.words)

    def matrix(self, q, k, *, segments=None):
        return self.mechanism.matrix(q, k, segments=segments, words=self.words)  # type: ignore[call-arg]

    def cost(self, dims: Dims) -> Cost:
        return self.mechanism.cost(dims)


class RecurrentMechanism(Mechanism):
    """Base class of mechanisms that can also decode token by token.

    A subclass also implements `init_state`, `step` and `prefill`, and its cost has a `state`. A complete example,
    attention by q·k without a softmax; saved as a file, it passes all checks of the contract::

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

    check_inputs      first line of `forward` and `matrix`: raises on wrong shapes, dtypes, devices and segments, and on
                      more queries than keys if the pattern depends on positions
    check_token       first line of `step`: the same checks; also checks that q, k and v are one token each, with the
                      widths d and e of the state
    segments.visible  mask of the pattern under segments, (*batch, n, m); `matrix` uses it
    segments.resolve  ids and positions of queries and keys, also if `segments` is None; padding has a negative id
    segments.in_last  mask of the tokens of the last segment of each row, which decoding continues. Padding and earlier
                      segments must not enter the state
    per_segment       `forward` on each segment separately: correct for every mechanism, one call per segment

    The state is a NamedTuple of tensors. `step` returns a new state and leaves the old one unchanged. The state has a
    higher precision than 16-bit inputs, at least float32, because every step rounds it. `cost.state` counts its
    floating-point numbers. Parts that depend on keys and values alone are stored once for all queries that share these
    keys: dims.kv_batch times, not dims.batch.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 8, 100, 16).unbind()
    >>> attend = h.Linear()
    >>> out, state = attend.prefill(q[..., :99, :], k[..., :99, :], v[..., :99, :])
    >>> last, state = attend.step(state, q[..., 99:, :], k[..., 99:, :], v[..., 99:, :])
    >>> torch.allclose(last, attend(q, k, v)[..., 99:, :], atol=1e-5)
    True
    """

    @abstractmethod
    def init_state(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        """Return the state before the first token. It reads batch shape, widths, dtype and device of q, k, v only."""

    @abstractmethod
    def step(
        self,
        state: State,
        q: Float[Tensor, "*#b 1 d"],
        k: Float[Tensor, "*#b 1 d"],
        v: Float[Tensor, "*#b 1 e"],
    ) -> tuple[Float[Tensor, "*b 1 e"], State]:
        """Process one token: return its output and the new state.

        The output equals the last row of `forward` on all tokens so far.
        """

    @abstractmethod
    def prefill(self, q: Tensor, k: Tensor, v: Tensor, *, segments: Segments | None = None) -> tuple[Tensor, State]:
        """Return the output of `forward` and the state after it.

        With `segments`, later steps continue the last segment of each row.
        """


def group_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views for grouped-query attention: q (B, H, n, d) and k, v (B, groups, m, ·), with an axis of groups.

    Query head h belongs to group h // (H / groups). The result has one more batch axis; `out.flatten(-4, -3)` merges
    the two head axes again.

    >>> import torch
    >>> q, kv = torch.randn(2, 8, 10, 4), torch.randn(2, 2, 10, 4)
    >>> [tuple(x.shape) for x in group_heads(q, kv, kv)]
    [(2, 2, 4, 10, 4), (2, 2, 1, 10, 4), (2, 2, 1, 10, 4)]
    """
    heads, groups = q.shape[-3], k.shape[-3]
    if heads % groups:
        raise ValueError(f"q: {heads} heads, expected a multiple of the {groups} heads of k.")
    return q.unflatten(-3, (groups, heads // groups)), k.unsqueeze(-3), v.unsqueeze(-3)
