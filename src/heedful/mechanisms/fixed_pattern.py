"""Fixed attention patterns (Raganato et al. 2020, arXiv:2002.10260): weights that depend on positions alone.

    matrix      current   A_ij = [j = i]
                previous  A_ij = [j = i − 1], row 0 attends the last token
                next      A_ij = [j = i + 1], the last row attends the first
                left      A_ij ∝ (j + 1)³ over j ≤ max(i − 2, 0)
                right     A_ij ∝ (L − j)³ over j ≥ min(i + 2, L − 1)
                start     A_ij ∝ (L − j)³
                end       A_ij ∝ (j + 1)³
                last      A_ij = [j = L − 1]
    fast        shifts; weighted prefix means in blocks (kernels/fixed_heads); one product for start and end
    recurrence  left      μ_t = μ_{t-1} + 4(t − 1)/t² · (v_{t-2} − μ_{t-1}), as (t − 1)³ / Σ_{s<t} s³ = 4(t − 1)/t²
    cost        left, right 2m(c + 2)e flops, start, end 2me, shifts none; state 3e, e or 0

i, j and the length L count tokens of one segment. With `words`, neighbours are words: current, previous and next are
uniform over the tokens of one word, and left and right skip two words instead of two tokens. Word ids belong to a
batch, so they are passed to each call, like segments. `cost` is the cost of a call without words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism, Stage
from heedful.kernels.fixed_heads import fixed_heads
from heedful.kernels.fixed_heads.reference import APART
from heedful.kernels.fixed_heads.segmented import by_segment, is_mean, take_rows
from heedful.kernels.prefix import weighted_prefix_mean
from heedful.kernels.prefix.reference import BLOCK, weighted_mean
from heedful.patterns import Causal, Pattern
from heedful.segments import Layout, Segments, in_last, nothing_seen, resolve
from heedful.shapes import Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs
from heedful.words import check_words, count_words

KINDS = ("current", "previous", "next", "left", "right", "start", "end", "last")


@dataclass(frozen=True, repr=False)
class _Aligned(Pattern):
    """Every query may see every key, but positions matter: the n queries are the last n positions of the keys."""

    def allows(self, i, j):
        return torch.ones_like(i - j, dtype=torch.bool)

    def __repr__(self) -> str:
        return "fixed positions"


class FixedPattern(Mechanism):
    """Attention with fixed weights that depend on positions, not on the values of queries and keys.

    >>> import torch, heedful as h
    >>> x = torch.randn(4, 1)
    >>> h.FixedPattern("left").matrix(x, x)
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [1.0000, 0.0000, 0.0000, 0.0000],
            [1.0000, 0.0000, 0.0000, 0.0000],
            [0.1111, 0.8889, 0.0000, 0.0000]])

    Only the shapes of q and k are used, and their gradients are zero. The causal kinds (current, left, and previous
    with edge="first") can also decode token by token: `FixedPattern` then returns a `StreamingFixedPattern`.

    kind    current, previous, next, left, right, start, end or last
    edge    the token that row 0 of "previous" attends to: the "last" of its sequence, as in the paper, or the "first",
            itself

    `forward`, `matrix`, `operator` and `explain` take `words`, the word id of each token: (*batch, m), broadcast like
    segments. Adjacent tokens of a segment with equal ids are one word. A row then sees whole words, including tokens
    after the query, for all kinds. `prefill` and `step` take no words.

    >>> words = torch.tensor([0, 1, 1, 2])  # four tokens in three words
    >>> h.FixedPattern("current").matrix(x, x, words=words)
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.0000, 0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000, 1.0000]])

    Checkpoints hold no word ids. Those of earlier releases may have an entry `words`; loading ignores it.
    """

    def __new__(cls, kind: str, *, edge: Literal["last", "first"] = "last", words: None = None):
        streams = kind in ("current", "left") or (kind == "previous" and edge == "first")
        return super().__new__(StreamingFixedPattern if streams and cls is FixedPattern else cls)

    def __getnewargs_ex__(self):  # pickle and copy then select the same class
        return (self.kind,), {"edge": self.edge}

    def __init__(self, kind: str, *, edge: Literal["last", "first"] = "last", words: None = None):
        if words is not None:
            raise TypeError(
                "words: given to the constructor, expected with the call: FixedPattern(kind)(q, k, v, words=ids). Word "
                "ids belong to one batch, so the mechanism does not keep them."
            )
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}.")
        if edge not in ("last", "first"):
            raise ValueError(f'edge: expected "last" or "first", got {edge!r}.')
        if edge == "first" and kind != "previous":
            raise ValueError(
                f'edge: "first" is for kind "previous", whose row 0 has none before it; got kind {kind!r}.'
            )
        super().__init__(Causal() if isinstance(self, RecurrentMechanism) else _Aligned())
        self.kind = kind
        self.edge = edge

    def takes_words(self):
        return True

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(f"{prefix}words", None)  # earlier releases stored the word ids of one batch
        super()._load_from_state_dict(state_dict, prefix, *args)

    def matrix(self, q, k, *, segments=None, words=None):
        self._check(q, k, None, segments, words)
        n, m = q.shape[-2], k.shape[-2]
        layout = resolve(segments, n, m, q.device)
        ids, where = layout.key_ids, layout.key_positions
        i, j = layout.query_positions[..., :, None], where[..., None, :]
        sees = (layout.query_ids[..., :, None] == ids[..., None, :]) & (layout.query_ids[..., :, None] >= 0)
        L = sees.sum(-1, keepdim=True)
        U, u, K = (i, j, L) if words is None else count_words(words, ids, where, sees & (i == j), sees)
        one = torch.ones((), dtype=torch.float64, device=q.device)
        match self.kind:
            case "current":
                weights = one * (u == U)
            case "previous":
                weights = one * (u == torch.where(U > 0, U - 1, K - 1 if self.edge == "last" else 0))
            case "next":
                weights = one * (u == torch.where(U < K - 1, U + 1, 0))
            case "left":
                weights = (one * (j + 1)) ** 3 * (u <= (U - APART).clamp(min=0))
            case "right":
                weights = (one * (L - j)) ** 3 * (u >= torch.minimum(U + APART, K - 1))
            case "end":
                weights = (one * (j + 1)) ** 3
            case "start":
                weights = (one * (L - j)) ** 3
            case _:
                weights = one * (j == L - 1)
        weights = torch.where(sees, weights, 0)
        total = weights.sum(-1, keepdim=True)
        weights = (weights / total.masked_fill(total == 0, 1)).to(q.dtype)
        return weights.expand(*broadcast_shapes(q.shape[:-2], k.shape[:-2]), n, m)

    def reads_qk(self, heads):
        return (False,) * heads

    def forward(self, q, k, v, *, segments=None, words=None):
        self._check(q, k, v, segments, words)
        words = self._words(words)
        n, m = q.shape[-2], k.shape[-2]
        shape = (*broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), n, v.shape[-1])
        if 0 in shape or m == 0:
            rows = nothing_seen(q, k, v)
        elif segments is None and words is None:
            rows = fixed_heads(v, (self.kernel_kind,), n)
        else:
            rows = by_segment(v, self.kind, resolve(segments, n, m, v.device), words, self.edge)
        if rows.shape != shape:
            rows = rows.expand(shape).clone()
        return _unread(rows, q, k)

    def _words(self, words: Tensor | None) -> Tensor | None:
        """Return the word ids if this kind uses them, else None."""
        return None if self.kind in ("start", "end", "last") else words

    @property
    def kernel_kind(self) -> str:
        """The name of this kind, without words, in `kernels/fixed_heads`."""
        return "earlier" if self.edge == "first" else self.kind

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor | None, segments: Segments | None, words: Tensor | None = None
    ) -> None:
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        check_words(words, q, k)

    def cost(self, dims: Dims) -> Cost:
        if self.kind in ("start", "end"):
            terms = dims.m
        elif self.kind in ("left", "right"):
            tokens = dims.n if self.kind == "right" else dims.m
            terms = tokens * (min(BLOCK, tokens) + 2)
        else:
            terms = 0
        return Cost.of_stages(Stage("aggregation", 2 * dims.kv_batch * terms * dims.e), bytes=dims.io_bytes)

    def explain(self, q, k, v, *, segments=None, words=None):
        words = self._words(words)
        if segments is None and words is None:
            return fixed_heads.explain(v, (self.kernel_kind,), q.shape[-2])
        if is_mean(self.kind, words):
            return weighted_prefix_mean.explain(v, torch.ones(v.shape[-2], device=v.device))
        return super().explain(q, k, v, segments=segments)

    def extra_repr(self) -> str:
        return self.kind + (', edge="first"' if self.edge == "first" else "")


def heads_together(kinds: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run all fixed heads in one call, one `kernel_kind` per head, without segments."""
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    n = q.shape[-2]
    if v.shape[:-2] != batch:
        v = v.expand(*batch, *v.shape[-2:])
    if 0 in (*batch, n, *v.shape[-2:]):
        return nothing_seen(q, k, v)
    return _unread(fixed_heads(v, kinds, n), q, k)


def _unread(rows: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return `rows` as a constant function of q and k, so that these get zero gradients instead of None."""
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return _Unread.apply(rows, q, k) if learns else rows


class _Unread(torch.autograd.Function):
    """Return `rows`; the gradients of q and k are zeros."""

    @staticmethod
    def forward(ctx, rows, q, k):
        ctx.save_for_backward(q, k)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        q, k = (
            torch.zeros_like(x) if n else None for x, n in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        )
        return grad, q, k


class Recent(NamedTuple):
    """Values of the last tokens, the float64 mean of the values before them (kind "left" only), tokens so far."""

    values: Float[Tensor, "*b r e"]
    mean: Float[Tensor, "*b 1 e"] | None
    length: Int[Tensor, "*s"]


class StreamingFixedPattern(FixedPattern, RecurrentMechanism):
    """A causal `FixedPattern`, which can decode token by token; `FixedPattern(kind)` returns one if the kind is causal.

    The state of "left" is a running mean, because a sum would grow as t⁴. It is in float64: in float32, each step would
    round a mean of size 1 by 6e-8, while the mean changes by 4/t.
    """

    @property
    def _kept(self) -> int:
        return {"current": 0, "previous": 1, "left": APART}[self.kind]

    def init_state(self, q, k, v) -> Recent:
        return self._state(v[..., :0, :], resolve(None, 0, 0, v.device))

    def prefill(self, q, k, v, *, segments=None):
        out = self(q, k, v, segments=segments)
        return out, self._state(v, resolve(segments, q.shape[-2], k.shape[-2], v.device))

    def _state(self, v: Float[Tensor, "*b m e"], layout: Layout) -> Recent:
        """Return the state after the last segment of each row."""
        live = in_last(layout.key_ids)
        length = live.sum(-1)
        order = live.int().argsort(dim=-1, stable=True)[..., max(v.shape[-2] - self._kept, 0) :]
        values = torch.where(live.gather(-1, order)[..., None], take_rows(v, order), 0)
        values = pad(values, (0, 0, self._kept - values.shape[-2], 0))
        if self.kind != "left":
            return Recent(values, None, length)
        past = live & (layout.key_positions < length[..., None] - APART)
        weights = torch.where(past, (layout.key_positions + 1).double() ** 3, 0)
        mean = weighted_mean(torch.where(past[..., None], v, 0), weights)
        return Recent(values, mean.double(), length)

    def step(self, state: Recent, q, k, v):
        check_inputs(q, k, v, mechanism=self)
        for name, x in (("q", q), ("k", k)):
            if x.shape[-2] != 1:
                raise ValueError(f"{name}: {x.shape[-2]} tokens, expected 1: step takes one at a time; see prefill.")
        if v.shape[-1] != state.values.shape[-1]:
            raise ValueError(f"v: width {v.shape[-1]}, expected {state.values.shape[-1]} like the state's values.")
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], state.values.shape[:-2])
        own = broadcast_shapes(v.shape[:-2], state.values.shape[:-2])
        v, values = (x.expand(*own, *x.shape[-2:]) for x in (v, state.values))
        t = state.length[..., None, None]
        out, mean = v, state.mean
        if self.kind == "previous":
            out = torch.where(t == 0, v, values)
        elif mean is not None:
            share = 4 * (t - 1).double() / t.clamp(min=1) ** 2
            mean = torch.where(t >= APART, mean + share * (values[..., :1, :] - mean), mean)
            out = torch.where(t >= APART, mean.to(v.dtype), torch.where(t == 0, v, values[..., 1:, :]))
        values = torch.cat([values, v], -2)[..., 1:, :] if self._kept else values
        return out.expand(*batch, -1, -1).clone(), Recent(values, mean, state.length + 1)

    def cost(self, dims: Dims) -> Cost:
        return replace(super().cost(dims), state=dims.kv_batch * dims.e * (self._kept + (self.kind == "left")))
