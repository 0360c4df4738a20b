"""Multi-head attention: projections around any mechanism.

q, k, v     x W_q, c W_k, c W_v  split into heads and, with a `rope`, rotated by position; c is x or the context. Heads
            that read no q and k (fixed patterns) have no columns in W_q. They have none in W_k either, unless another
            head of their group reads k
forward     [A(q, k) v of all heads, concatenated] W_o
streaming   the mechanism's recurrence, and the position of each row's next token
Linformer   applies E and F to tokens, which commute with projections, E (c W) = (E c) W; the layer applies them before
            the projections if that is less work
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from heedful.core import (
    Cost,
    Dims,
    Mechanism,
    RecurrentMechanism,
    Stage,
    State,
    group_heads,
    softmax_stages,
)
from heedful.mechanisms import Linformer, Softmax
from heedful.nn.projections import seeds, token_flops
from heedful.nn.rope import Rope
from heedful.segments import Segments, in_last, resolve
from heedful.shapes import Float, Int, Tensor
from heedful.words import check_takes_words


@runtime_checkable
class HeadProjection(Protocol):
    """Builds a projection into heads: `Orthogonal`, `Hadamard`, `Gaussian`, or a `partial` of one of them."""

    def __call__(
        self, in_features: int, heads: int, head_dim: int, *, seed: int, device: Any, dtype: torch.dtype | None
    ) -> nn.Module: ...


class AttentionState(NamedTuple):
    """The state for `step`: the mechanism's state, and the position of the next token of each row."""

    inner: State
    position: Int[Tensor, "*s"]


class Attention(nn.Module):
    """Attention over x (*b, n, embed_dim) by any mechanism; exact causal softmax by default.

    >>> import torch, heedful as h
    >>> layer = h.nn.Attention(64, heads=8, mechanism=h.Softmax(h.Window(16)), kv_heads=2, rope=h.nn.Rope(8))
    >>> x = torch.randn(2, 100, 64)
    >>> layer(x).shape
    torch.Size([2, 100, 64])
    >>> out, state = layer.prefill(x[:, :99])
    >>> last, state = layer.step(state, x[:, 99:])
    >>> torch.allclose(last, layer(x)[:, 99:], atol=1e-5)
    True

    mechanism     any Mechanism; Softmax(Full()) for an encoder or for cross-attention
    kv_heads      heads of k and v (grouped queries, Ainslie et al. 2023, arXiv:2305.13245); `heads` by default. With
                  fewer, the mechanism gets head axes (kv_heads, heads / kv_heads), and k, v are not copied
    head_dim      width of a head of q and k; embed_dim / heads by default
    value_dim     width of a head of v; head_dim by default
    context_dim   width of the context; embed_dim by default
    bias          True: the projections have biases
    rope          a Rope(head_dim) that rotates q and k by position
    projection    builds each projection from (width in, width out); by default a learned nn.Linear
    qk            builds q_proj and k_proj in place of `projection`, without biases. For frozen orthogonal projections:

                  >>> frozen = h.nn.Attention(64, heads=8, qk=h.nn.Orthogonal)
                  >>> [name for name, _ in frozen.named_parameters()]
                  ['v_proj.weight', 'out_proj.weight']

    seed          seed for `qk`; queries and keys get different seeds derived from it. By default it comes from torch's
                  generator, like learned weights, so that layers differ

    The projections q_proj, k_proj, v_proj, out_proj are plain submodules. Assign a module to replace one, as in
    layer.q_proj = h.nn.LoRA(layer.q_proj, rank=4).

    Heads whose mechanism ignores queries and keys get none: q_proj and k_proj are then narrower, or None. The
    constructor decides which heads have them and stores the result in `query_heads` and `key_heads`.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        mechanism: Mechanism | None = None,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
        rope: Rope | None = None,
        projection: Callable[[int, int], nn.Module] | None = None,
        qk: HeadProjection | None = None,
        seed: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads = {heads}, got {kv_heads}.")
        if head_dim is None and embed_dim % heads:
            raise ValueError(f"embed_dim: {embed_dim} is no multiple of heads = {heads}; give head_dim to go without.")
        if mechanism is not None and not isinstance(mechanism, Mechanism):
            raise TypeError(
                f"mechanism: expected a Mechanism such as heedful.Softmax(), got {mechanism!r}. A name becomes one "
                "with heedful.build(name)."
            )
        head_dim = embed_dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        if rope is not None and rope.d != head_dim:
            raise ValueError(f"rope: built for width {rope.d}, expected head_dim = {head_dim}.")
        self.embed_dim, self.heads, self.kv_heads = embed_dim, heads, kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.context_dim = embed_dim if context_dim is None else context_dim
        self.mechanism = Softmax() if mechanism is None else mechanism
        self.rope = rope
        self.query_heads = self.mechanism.reads_qk(heads)
        self.key_heads = tuple(
            any(self.query_heads[first : first + heads // kv_heads]) for first in range(0, heads, heads // kv_heads)
        )
        if seed is not None and qk is None:
            raise ValueError(f"seed: {seed} without qk, expected both: it is the seed of what qk draws.")
        make = projection or partial(nn.Linear, bias=bias, device=device, dtype=dtype)
        drawn = (
            [None, None] if qk is None else [partial(qk, seed=s, device=device, dtype=dtype) for s in seeds(seed, 2)]
        )

        def into_heads(width: int, count: int, build: Callable[[int, int, int], nn.Module] | None) -> nn.Module | None:
            if not count:
                return None
            return make(width, count * head_dim) if build is None else build(width, count, head_dim)

        self.q_proj = into_heads(embed_dim, sum(self.query_heads), drawn[0])
        self.k_proj = into_heads(self.context_dim, sum(self.key_heads), drawn[1])
        self.v_proj = make(self.context_dim, kv_heads * value_dim)
        self.out_proj = make(heads * value_dim, embed_dim)

    def forward(
        self,
        x: Float[Tensor, "*b n embed"],
        context: Float[Tensor, "*b m context"] | None = None,
        *,
        segments: Segments | None = None,
        words: Int[Tensor, "*s m"] | None = None,
    ) -> Float[Tensor, "*b n embed"]:
        """Return the attention of x to itself, or to the context.

        segments   ids of x, (*b, n); with a context, a pair: ids of x and ids of the context
        words      word ids of the context or, without one, of x, (*b, m), for a mechanism with word-based heads

        If the pattern or a rope uses positions, x holds the last n positions of the context, as after a cache.

        >>> import torch, heedful as h
        >>> heads = h.Mixture([h.FixedPattern("previous"), h.FixedPattern("next"), h.Softmax(h.Full())])
        >>> layer = h.nn.Attention(24, heads=3, mechanism=heads)
        >>> layer(torch.randn(2, 5, 24), words=torch.tensor([[0, 1, 1, 2, 3], [0, 0, 0, 1, 1]])).shape
        torch.Size([2, 5, 24])
        """
        self._check(x, context, segments)
        context = x if context is None else context
        if words is not None:
            check_takes_words(self.mechanism)
            _check_ids("words", words, context)
        if segments is None and self._mixes_first(context.shape[-2]):
            return self._join(self._mixed(x, context))
        where: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.rope is not None:
            layout = resolve(segments, x.shape[-2], context.shape[-2], x.device)
            where = layout.query_positions, layout.key_positions
        q, k, v = self._project(x, context, *where)
        given = {} if words is None else {"words": self._with_heads(words)}
        return self._join(self.mechanism(q, k, v, segments=self._with_heads(segments), **given))

    def prefill(
        self, x: Float[Tensor, "*b n embed"], *, segments: Int[Tensor, "*s n"] | None = None
    ) -> tuple[Float[Tensor, "*b n embed"], AttentionState]:
        """Return the output of `forward` and the state after it. n = 0 gives the initial state.

        With segments, each row continues its last segment, wherever its padding is.
        """
        mechanism = self._recurrent()
        self._check(x, None, segments)
        layout = resolve(segments, x.shape[-2], x.shape[-2], x.device)
        q, k, v = self._project(x, x, layout.query_positions, layout.key_positions)
        out, inner = mechanism.prefill(q, k, v, segments=self._with_heads(segments))
        return self._join(out), AttentionState(inner, in_last(layout.key_ids).sum(-1))

    def step(
        self, state: AttentionState, x: Float[Tensor, "*b 1 embed"]
    ) -> tuple[Float[Tensor, "*b 1 embed"], AttentionState]:
        """Process one token: return its output and the new state."""
        mechanism = self._recurrent()
        self._check(x, None, None)
        if x.shape[-2] != 1:
            raise ValueError(f"x: shape {tuple(x.shape)}, expected one token. Likely cause: `prefill` was meant.")
        here = state.position[..., None]
        out, inner = mechanism.step(state.inner, *self._project(x, x, here, here))
        return self._join(out), AttentionState(inner, state.position + 1)

    def queries(
        self, x: Float[Tensor, "*b n embed"], positions: Int[Tensor, "*s n"] | None = None
    ) -> Float[Tensor, "*b h n d"]:
        """Return the queries of x, split into heads. `keys_and_values`, the mechanism and `join` complete `forward`.

        positions   positions of the tokens, for a layer with a rope
        """
        return self._read("q_proj", self.q_proj, x, self.query_heads, positions, x)

    def keys_and_values(
        self, context: Float[Tensor, "*b m context"], positions: Int[Tensor, "*s m"] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the context, split into heads."""
        v = self._split("v_proj", self.v_proj(context), self.kv_heads, self.value_dim)
        return self._read("k_proj", self.k_proj, context, self.key_heads, positions, v), v

    def join(self, out: Float[Tensor, "*b h n e"]) -> Float[Tensor, "*b n embed"]:
        """Return the layer's output tokens from the outputs of the heads."""
        return self._join(out)

    def cost(self, n: int, m: int | None = None, *, batch: int = 1) -> Cost:
        """Return the cost of a forward pass over n tokens: projections, stages of the mechanism, output projection.

        m   number of tokens in the context; None for self-attention

        >>> layer = Attention(512, heads=8)
        >>> for stage in layer.cost(1024).stages:
        ...     print(f"{stage.name:17} {stage.flops:>13,}")
        projections       1,610,612,736
        scores              537,395,200
        softmax                       0
        aggregation         537,395,200
        output projection   536,870,912
        """
        keys = n if m is None else m
        number = self.out_proj.weight.element_size() if isinstance(self.out_proj, nn.Linear) else 4
        inner = Dims(
            n, keys, self.head_dim, self.value_dim, batch * self.heads, number, group_size=self.heads // self.kv_heads
        )
        attention = self.mechanism.cost(inner)
        projected, stages = keys, attention.stages  # tokens that k_proj and v_proj project
        if self._mixes_first(keys):
            assert isinstance(self.mechanism, Linformer)
            projected = self.mechanism.rank
            mixed = batch * projected * keys * self.context_dim * (1 if self.mechanism.shared else 2)
            pairs = batch * self.heads * n * projected
            stages = Stage("mixing", 2 * mixed), *softmax_stages(pairs, self.head_dim, self.value_dim)
        into = n * token_flops(self.q_proj) + projected * (token_flops(self.k_proj) + token_flops(self.v_proj))
        around = [module for module in (self.q_proj, self.k_proj, self.v_proj, self.out_proj) if module is not None]
        weights = sum(x.numel() * x.element_size() for module in around for x in module.parameters())
        tokens = 2 * n * self.embed_dim + (0 if m is None else m * self.context_dim)
        return Cost.of_stages(
            Stage("projections", batch * into),
            *stages,
            Stage("output projection", batch * n * token_flops(self.out_proj)),
            bytes=batch * tokens * number + weights + attention.bytes - inner.io_bytes,
            state=attention.state,
        )

    def _project(self, x, context, query_positions, key_positions):
        """Return q, k, v split into heads, rotated by position, and grouped."""
        self._check_readers()
        v = self._split("v_proj", self.v_proj(context), self.kv_heads, self.value_dim)
        q = self._read("q_proj", self.q_proj, x, self.query_heads, query_positions, v)
        k = self._read("k_proj", self.k_proj, context, self.key_heads, key_positions, v)
        return (q, k, v) if self.kv_heads == self.heads else group_heads(q, k, v)

    def _mixes_first(self, m: int) -> bool:
        """True if the layer applies Linformer's E and F before the projections: all are linear, and it is less work."""
        mechanism, linear = self.mechanism, (type(p) is nn.Linear for p in (self.k_proj, self.v_proj))
        if not isinstance(mechanism, Linformer) or mechanism.heads > 1 or self.rope is not None or not all(linear):
            return False
        r, into = mechanism.rank, self.kv_heads * (self.head_dim + self.value_dim)
        mixing = m * self.context_dim * (1 if mechanism.shared else 2)
        return r * (mixing + self.context_dim * into) < m * into * (self.context_dim + r)

    def _mixed(self, x: Tensor, context: Tensor) -> Tensor:
        """Return the outputs of the heads of a Linformer, with E and F applied before the projections."""
        assert isinstance(self.mechanism, Linformer)
        self._check_readers()
        for_keys, for_values, *ones = self.mechanism.mixed_tokens(context)
        k = self._split("k_proj", _of_mixed(self.k_proj, for_keys, ones[0]), self.kv_heads, self.head_dim)
        v = self._split("v_proj", _of_mixed(self.v_proj, for_values, ones[1]), self.kv_heads, self.value_dim)
        q = self._read("q_proj", self.q_proj, x, self.query_heads, None, v)
        q, k, v = (q, k, v) if self.kv_heads == self.heads else group_heads(q, k, v)
        return self.mechanism.attend_mixed(q, k, v)

    def _read(
        self,
        name: str,
        projection: nn.Module | None,
        x: Tensor,
        reads: tuple[bool, ...],
        positions: Tensor | None,
        v: Tensor,
    ) -> Tensor:
        """Return q or k split into heads and rotated by position, with zeros for heads that ignore them."""
        if projection is None:
            return v.new_zeros(()).expand(*x.shape[:-2], len(reads), x.shape[-2], self.head_dim)
        own = self._split(name, projection(x), sum(reads), self.head_dim)
        if self.rope is not None and positions is not None:
            own = self.rope(own, positions[..., None, :])
        return own if all(reads) else _spread(own, reads)

    @staticmethod
    def _split(name: str, x: Tensor, heads: int, width: int) -> Tensor:
        if x.shape[-1] != heads * width:
            raise ValueError(
                f"{name}: gives {x.shape[-1]} numbers a token, expected {heads} heads · {width} = {heads * width}. "
                "Likely cause: it was replaced by a projection for other heads."
            )
        return x.unflatten(-1, (heads, width)).transpose(-3, -2)

    def _join(self, out: Tensor) -> Tensor:
        out = out if self.kv_heads == self.heads else out.flatten(-4, -3)
        return self.out_proj(out.transpose(-3, -2).flatten(-2))

    def _with_heads(self, segments: Segments | None) -> Segments | None:
        """Return segments or word ids with the head axes that the mechanism expects."""
        axes = 1 if self.kv_heads == self.heads else 2
        if isinstance(segments, tuple):
            return _spaced(segments[0], axes), _spaced(segments[1], axes)
        return None if segments is None else _spaced(segments, axes)

    def _check_readers(self) -> None:
        """Raise if a newly assigned mechanism reads the queries of a head that has none."""
        reads = self.mechanism.reads_qk(self.heads)
        missing = [head for head, (wants, has) in enumerate(zip(reads, self.query_heads, strict=True)) if wants > has]
        if missing:
            raise TypeError(
                f"mechanism: {type(self.mechanism).__name__} reads queries and keys of heads {missing}, expected one "
                "that reads those of the layer's `query_heads` alone: it was built without weights for the others. "
                "Likely cause: a mechanism assigned after fixed patterns; build the layer with it instead."
            )

    def _recurrent(self) -> RecurrentMechanism:
        if not isinstance(self.mechanism, RecurrentMechanism):
            raise TypeError(
                f"mechanism: {self.mechanism!r} has no recurrence, so it can't go token by token; expected a "
                "RecurrentMechanism. `forward` on the whole sequence works."
            )
        return self.mechanism

    def _check(self, x: Tensor, context: Tensor | None, segments: Segments | None) -> None:
        """Raise errors that name the arguments of this layer, before the mechanism raises errors about q, k and v."""
        _check_tokens("x", x, self.embed_dim)
        if context is not None:
            _check_tokens("context", context, self.context_dim)
            if context.shape[:-2] != x.shape[:-2]:
                raise ValueError(
                    f"context: batch axes {tuple(context.shape[:-2])}, expected {tuple(x.shape[:-2])} as in x "
                    f"{tuple(x.shape)}. Likely cause: (tokens, batch, width) instead of (batch, tokens, width)."
                )
        elif self.context_dim != self.embed_dim:
            raise ValueError(
                f"context: None, expected (*batch, m, {self.context_dim}): this layer was built with context_dim, for "
                "cross-attention."
            )
        if segments is None:
            return
        if isinstance(segments, tuple) != (context is not None):
            given, wanted = ("a pair", "one tensor") if isinstance(segments, tuple) else ("one tensor", "a pair")
            raise TypeError(
                f"segments: {given}, expected {wanted}: ids (*batch, n) of x for self-attention, a pair (ids of x, ids "
                "of the context) for cross-attention."
            )
        if isinstance(segments, tuple) and context is not None:
            _check_ids("segments[0] (of x)", segments[0], x)
            _check_ids("segments[1] (of the context)", segments[1], context)
        elif isinstance(segments, Tensor):
            _check_ids("segments", segments, x)

    def extra_repr(self) -> str:
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        reading = [head for head, reads in enumerate(self.query_heads) if reads]
        some = "" if all(self.query_heads) else f", queries of heads {reading}"
        return (
            f"{self.embed_dim}, heads={self.heads}{grouped}, head_dim={self.head_dim}, value_dim={self.value_dim}{some}"
        )


def _of_mixed(projection: Any, mixed: Float[Tensor, "*b r c"], ones: Float[Tensor, " r"]) -> Float[Tensor, "*b r o"]:
    """Return E (c W + b) = (E c) W + (E 1) b. The projection itself computes (E c) W + b."""
    out = projection(mixed)
    return out if projection.bias is None else out + ((ones - 1)[:, None] * projection.bias).to(out.dtype)


_views: list[tuple[weakref.ref[Tensor], int, Tensor]] = []
"""Cache of `_spaced`: the last tensors of ids, the number of head axes, and the results."""


def _spaced(ids: Int[Tensor, "*b n"], axes: int) -> Tensor:
    """Return the ids with head axes of size 1 before the last axis; all layers of a model get the same tensor.

    Kernels cache what they compute from a tensor of segments. A new view in each layer would miss that cache.
    """
    for given, count, view in _views:
        if given() is ids and count == axes:
            return view
    view = ids[..., *(None,) * axes, :]
    _views.append((weakref.ref(ids), axes, view))
    del _views[:-4]
    return view


def _spread(x: Float[Tensor, "*b r n d"], reads: tuple[bool, ...]) -> Float[Tensor, "*b h n d"]:
    """Return a tensor with all heads: the heads of x in their places, zeros in the others."""
    parts, start = [], 0
    for some, run in groupby(reads):
        size = len(list(run))
        if some:
            parts.append(x.narrow(-3, start, size))
            start += size
        else:
            parts.append(x.new_zeros(()).expand(*x.shape[:-3], size, *x.shape[-2:]))
    return torch.cat(parts, -3)


def _check_tokens(name: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: {given}, expected a floating-point tensor (*batch, tokens, {width}).")
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}, expected (*batch, tokens, {width}). Likely cause: a missing token axis, "
            "or a layer built for another width."
        )


def _check_ids(name: str, ids: Tensor, tokens: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        ids_of = (
            "word ids"
            if name == "words"
            else "segment ids (negative: padding). A boolean mask becomes one with heedful.segments.from_mask(mask)"
        )
        raise TypeError(f"{name}: {given}, expected an integer tensor of {ids_of}.")
    wanted = tuple(tokens.shape[:-1])
    axes = zip(reversed(ids.shape[:-1]), reversed(wanted[:-1]), strict=False)
    if ids.ndim > len(wanted) or ids.shape[-1:] != wanted[-1:] or any(given not in (1, size) for given, size in axes):
        raise ValueError(
            f"{name}: shape {tuple(ids.shape)}, expected {wanted}, one id for each token, or fewer batch axes. Likely "
            "cause: a head axis, which this layer adds itself."
        )
