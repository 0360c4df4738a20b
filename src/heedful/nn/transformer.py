"""A small Transformer with a choice of mechanism and projections per layer and per group of heads.

encoder     x ← x + attend(norm x);  x ← x + feed(norm x)                        (pre-norm)
decoder     the same with causal attention, followed by x ← x + attend(norm x, memory) if there is an encoder
positions   PE(p, 2t) = sin(p / 10000^(2t/D)),  PE(p, 2t+1) = cos(p / 10000^(2t/D))  added to the tokens; or RoPE
logits      norm(x) Eᵀ, E the embedding of all tokens, source and target
init        learned projections into heads N(0, 2 / (D + d)), D the width of a token and d that of a head; other weights
            N(0, 2 / (width in + width out))
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from heedful.core import Mechanism
from heedful.mechanisms import Mixture, Softmax
from heedful.nn.attention import Attention, HeadProjection
from heedful.nn.projections import FrozenProjection, LoRA, seeds
from heedful.nn.rope import Rope
from heedful.patterns import Causal, Full, Pattern
from heedful.segments import positions as positions_of
from heedful.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Heads:
    """A group of adjacent heads of one layer.

    count       number of heads
    mechanism   any Mechanism, copied for each layer if it has parameters; exact softmax by default, causal in a decoder
    qk          builds the query and key projections, as in Attention; learned by default
    v           builds the value projection; learned by default

    >>> import heedful as h
    >>> Heads(4, h.Linear(), qk=h.nn.Orthogonal).count
    4
    """

    count: int
    mechanism: Mechanism | None = None
    qk: HeadProjection | None = None
    v: HeadProjection | None = None


LEARNED = (Heads(8),)
"""The groups of heads of a standard layer: eight heads of softmax attention with learned projections."""


class Sinusoidal(nn.Module):
    """Adds the sines and cosines of positions to tokens (Vaswani et al. 2017, arXiv:1706.03762, §3.5).

    >>> x = Sinusoidal(4)(torch.zeros(1, 3, 4))
    >>> x[0, 2]
    tensor([ 0.9093, -0.4161,  0.0200,  0.9998])
    """

    def __init__(self, width: int):
        super().__init__()
        if width % 2:
            raise ValueError(f"width: expected an even number, got {width}: sines and cosines come in pairs.")
        self.width = width

    def forward(
        self, x: Float[Tensor, "*b n d"], positions: Int[Tensor, "*s n"] | None = None
    ) -> Float[Tensor, "*b n d"]:
        if positions is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        index = torch.arange(0, self.width, 2, device=x.device, dtype=torch.float64)
        angles = positions[..., None].double() * 10000.0 ** (-index / self.width)
        return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)


class Joined(nn.Module):
    """Projections of several groups of heads, with concatenated outputs."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b m"]:
        return torch.cat([part(x) for part in self.parts], -1)


def trained(
    start: HeadProjection, in_features: int, heads: int, head_dim: int, *, seed: int, device: Any, dtype: Any
) -> nn.Linear:
    """Build a learned projection that starts from a random one: qk=partial(trained, Orthogonal).

    >>> from functools import partial
    >>> import heedful as h
    >>> layer = h.nn.Attention(64, heads=8, qk=partial(h.nn.trained, h.nn.Orthogonal))
    >>> layer.q_proj.weight.requires_grad
    True
    """
    drawn = start(in_features, heads, head_dim, seed=seed, device=device, dtype=dtype)
    assert isinstance(drawn, FrozenProjection)
    linear = nn.Linear(in_features, heads * head_dim, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(drawn.dense())
    return linear


def adapted(
    start: HeadProjection, rank: int, in_features: int, heads: int, head_dim: int, *, seed: int, device: Any, dtype: Any
) -> LoRA:
    """Build a frozen projection with a trained low-rank update: qk=partial(adapted, Orthogonal, 8).

    >>> from functools import partial
    >>> import heedful as h
    >>> layer = h.nn.Attention(64, heads=8, qk=partial(h.nn.adapted, h.nn.Orthogonal, 4))
    >>> [name for name, _ in layer.q_proj.named_parameters()]
    ['A', 'B']
    """
    return LoRA(start(in_features, heads, head_dim, seed=seed, device=device, dtype=dtype), rank)


class Layer(nn.Module):
    """Self-attention, attention to a memory if `cross` is given, and a feed-forward net; each on normalised tokens."""

    def __init__(self, attention: Attention, cross: Attention | None, feed: nn.Module, dropout: float):
        super().__init__()
        width = attention.embed_dim
        self.attention, self.cross, self.feed = attention, cross, feed
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 if cross is None else 3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        memory: Float[Tensor, "b m d"] | None = None,
        *,
        segments: Int[Tensor, "b n"] | None = None,
        memory_segments: tuple[Tensor, Tensor] | None = None,
        words: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        first, *between, last = self.norms
        counts_words = self.attention.mechanism.takes_words()
        x = x + self.dropout(self.attention(first(x), segments=segments, words=words if counts_words else None))
        if self.cross is not None and memory is not None:
            x = x + self.dropout(self.cross(between[0](x), memory, segments=memory_segments))
        return x + self.dropout(self.feed(last(x)))


class Transformer(nn.Module):
    """An encoder, a decoder, or both, over one vocabulary.

    >>> import torch, heedful as h
    >>> fixed = [h.nn.Heads(1, h.FixedPattern(kind)) for kind in ("previous", "next", "left")]
    >>> model = h.nn.Transformer(100, 64, encoder=[[*fixed, h.nn.Heads(1)]] * 2, decoder=[h.nn.LEARNED] * 2)
    >>> source, target = torch.randint(100, (2, 5, 9)).unbind()
    >>> model(source, target).shape
    torch.Size([5, 9, 100])

    vocabulary   number of tokens
    width        width of a token
    encoder      the groups of heads of each layer; empty for a decoder-only model
    decoder      the same; empty for an encoder-only model, which returns tokens of `width` instead of logits
    cross        the groups of heads of the decoder's attention to the memory
    head_dim     width of a head; width / number of heads by default. Set it if layers with different numbers of heads
                 should have heads of the same width
    hidden       width of the feed-forward nets; 4 · width by default
    positions    "sinusoidal", added to the tokens, or "rope", in self-attention
    init         "xavier", see the top of this file, or "torch" for the initial values of nn.Linear
    shared       names among q_proj, k_proj, v_proj: all layers of a stack share the first layer's projections
    """

    def __init__(
        self,
        vocabulary: int,
        width: int = 256,
        *,
        encoder: Sequence[Sequence[Heads]] = (),
        decoder: Sequence[Sequence[Heads]] = (),
        cross: Sequence[Heads] = LEARNED,
        head_dim: int | None = None,
        hidden: int | None = None,
        positions: Literal["sinusoidal", "rope"] = "sinusoidal",
        dropout: float = 0.0,
        init: Literal["xavier", "torch"] = "xavier",
        shared: Sequence[str] = (),
    ):
        super().__init__()
        if not encoder and not decoder:
            raise ValueError("encoder, decoder: no layers, expected the heads of at least one layer in one of them.")
        if positions not in ("sinusoidal", "rope"):
            raise ValueError(f'positions: {positions!r}, expected "sinusoidal" or "rope".')
        if init not in ("xavier", "torch"):
            raise ValueError(f'init: {init!r}, expected "xavier" or "torch".')
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.positions = Sinusoidal(width) if positions == "sinusoidal" else None
        self.dropout = nn.Dropout(dropout)
        xavier = init == "xavier"
        attend = partial(_attention, width, head_dim=head_dim, xavier=xavier)
        feed = partial(_feed, width, 4 * width if hidden is None else hidden, dropout, xavier)
        rope = positions == "rope"
        self.encoder = nn.ModuleList(
            Layer(attend(groups, Full(), rope=rope), None, feed(), dropout) for groups in encoder
        )
        self.decoder = nn.ModuleList(
            Layer(attend(groups, Causal(), rope=rope), attend(cross, Full()) if encoder else None, feed(), dropout)
            for groups in decoder
        )
        self.encoder_norm = nn.LayerNorm(width) if encoder else None
        self.decoder_norm = nn.LayerNorm(width) if decoder else None
        for stack in (self.encoder, self.decoder):
            _share(stack, shared)

    def forward(
        self,
        source: Int[Tensor, "b n"],
        target: Int[Tensor, "b m"] | None = None,
        *,
        segments: Int[Tensor, "b n"] | None = None,
        target_segments: Int[Tensor, "b m"] | None = None,
        words: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n out"]:
        """Return the logits of the next token at each token of the target; of the source in a decoder-only model.

        segments   segment ids of the source's tokens, negative for padding. A target with padding on the right needs
                   none, since its attention is causal
        words      word ids of the source's tokens, for mechanisms that take them
        """
        if not self.decoder:
            return self.encode(source, segments=segments, words=words)
        if not self.encoder:
            return self.logits(self.decode(source, segments=segments))
        if target is None:
            raise ValueError("target: missing, expected tokens for the decoder, (batch, tokens).")
        memory = self.encode(source, segments=segments, words=words)
        return self.logits(self.decode(target, memory, segments=target_segments, memory_segments=segments))

    def encode(
        self,
        source: Int[Tensor, "b n"],
        *,
        segments: Int[Tensor, "b n"] | None = None,
        words: Int[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the memory that the decoder attends to: the normalised tokens after the last layer of the encoder.

        positions   positions of the tokens; by default they are counted in each segment, which needs a sort
        """
        if self.encoder_norm is None:
            raise TypeError("encode: this Transformer has no encoder; build it with encoder=[…].")
        x = self.embed(source, segments, positions)
        for layer in self.encoder:
            x = layer(x, segments=segments, words=words)
        return self.encoder_norm(x)

    def decode(
        self,
        target: Int[Tensor, "b m"],
        memory: Float[Tensor, "b n d"] | None = None,
        *,
        segments: Int[Tensor, "b m"] | None = None,
        memory_segments: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b m d"]:
        """Return the normalised tokens after the last layer of the decoder."""
        if self.decoder_norm is None:
            raise TypeError("decode: this Transformer has no decoder; build it with decoder=[…].")
        both = None
        if memory is not None and not (segments is None and memory_segments is None):
            ids = torch.zeros_like(target) if segments is None else segments
            keys = torch.zeros_like(memory[..., 0], dtype=torch.long) if memory_segments is None else memory_segments
            both = ids, keys
        x = self.embed(target, segments)
        for layer in self.decoder:
            x = layer(x, memory, segments=segments, memory_segments=both)
        return self.decoder_norm(x)

    def logits(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b vocabulary"]:
        return nn.functional.linear(x, self.embedding.weight)

    def embed(
        self,
        tokens: Int[Tensor, "b n"],
        segments: Int[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "*b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Return the input of the first layer: embeddings plus sinusoidal positions, by default counted in segments."""
        x = self.embedding(tokens) * self.width**0.5
        if self.positions is not None:
            if positions is None and segments is not None:
                positions = positions_of(segments)
            x = self.positions(x, positions)
        return self.dropout(x)


class Counts(NamedTuple):
    """Numbers of trainable, frozen and absent weights of a model; see `count_weights`.

    trainable   number of parameters that are trained
    frozen      numbers that are stored and never trained
    none        weights of projections that a learned model of the same shape would have and this one does not store:
                those of heads that ignore queries and keys, of projections shared with another layer, and of Hadamard's
                matrix

    >>> Counts(trainable=9216, frozen=0, none=7168).none
    7168
    """

    trainable: int
    frozen: int
    none: int


def count_weights(model: nn.Module) -> Counts:
    """Count the weights of a model that are trainable, frozen, and absent.

    >>> import heedful as h
    >>> count_weights(h.nn.Attention(64, heads=8, mechanism=h.Mixture([h.FixedPattern("next")] * 7 + [h.Softmax()])))
    Counts(trainable=9216, frozen=0, none=7168)
    """
    frozen: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
    frozen += [b for m in model.modules() if isinstance(m, FrozenProjection) for b in m.buffers(recurse=False)]
    seen: set[int] = set()
    none = 0
    for layer in (m for m in model.modules() if isinstance(m, Attention)):
        heads = layer.kv_heads
        for projection, full in (
            (layer.q_proj, layer.heads * layer.head_dim * layer.embed_dim),
            (layer.k_proj, heads * layer.head_dim * layer.context_dim),
            (layer.v_proj, heads * layer.value_dim * layer.context_dim),
        ):
            none += full - _stored(projection, seen)
    return Counts(sum(p.numel() for p in model.parameters() if p.requires_grad), sum(b.numel() for b in frozen), none)


def _stored(projection: nn.Module | None, seen: set[int]) -> int:
    """Return how many numbers store the matrix of a projection, without biases and updates; 0 if counted before."""
    if projection is None or id(projection) in seen:
        return 0
    seen.add(id(projection))
    if isinstance(projection, Joined):
        return sum(_stored(part, seen) for part in projection.parts)
    if isinstance(projection, LoRA):
        return _stored(projection.base, seen)
    if isinstance(projection, FrozenProjection):
        return sum(b.numel() for b in projection.buffers(recurse=False))
    return sum(p.numel() for p in projection.parameters() if p.ndim == 2)


def _attention(
    width: int, groups: Sequence[Heads], pattern: Pattern, *, head_dim: int | None, xavier: bool, rope: bool = False
) -> Attention:
    """Return one attention layer with the given groups of heads."""
    groups = list(groups)
    heads = sum(group.count for group in groups)
    head_dim = width // heads if head_dim is None else head_dim
    each = [Softmax(pattern) if group.mechanism is None else _own(group.mechanism) for group in groups]
    mechanism = each[0] if len(groups) == 1 else Mixture(each, [group.count for group in groups])

    def learned(width_in: int, width_out: int, fan_out: int = head_dim) -> nn.Linear:
        linear = nn.Linear(width_in, width_out, bias=False)
        if xavier:
            nn.init.normal_(linear.weight, std=(2 / (width_in + fan_out)) ** 0.5)
        return linear

    layer = Attention(
        width, heads, mechanism, head_dim=head_dim, projection=learned, rope=Rope(head_dim) if rope else None
    )
    layer.out_proj = learned(heads * head_dim, width, width)
    reads = [sum(one.reads_qk(group.count)) for one, group in zip(each, groups, strict=True)]
    for name, schemes, counts in (
        ("q_proj", [group.qk for group in groups], reads),
        ("k_proj", [group.qk for group in groups], reads),
        ("v_proj", [group.v for group in groups], [group.count for group in groups]),
    ):
        if any(scheme is not None and count for scheme, count in zip(schemes, counts, strict=True)):
            parts: list[nn.Module] = []
            for scheme, count in zip(schemes, counts, strict=True):
                if count and scheme is None:
                    parts.append(learned(width, count * head_dim))
                elif count and scheme is not None:
                    (seed,) = seeds(None, 1)
                    parts.append(scheme(width, count, head_dim, seed=seed, device=None, dtype=None))
            setattr(layer, name, parts[0] if len(parts) == 1 else Joined(parts))
    return layer


def _feed(width: int, hidden: int, dropout: float, xavier: bool) -> nn.Sequential:
    layers = nn.Linear(width, hidden), nn.Linear(hidden, width)
    if xavier:
        for linear in layers:
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
    return nn.Sequential(layers[0], nn.ReLU(), nn.Dropout(dropout), layers[1])


def _share(stack: nn.ModuleList, names: Sequence[str]) -> None:
    """Share the first layer's projections of these names in the whole stack, in self-attention and cross-attention."""
    unknown = set(names) - {"q_proj", "k_proj", "v_proj"}
    if unknown:
        raise ValueError(f"shared: {sorted(unknown)}, expected names among q_proj, k_proj, v_proj.")
    for kind in ("attention", "cross"):
        layers = [getattr(layer, kind) for layer in stack if getattr(layer, kind) is not None]
        for layer in layers[1:]:
            if layer.query_heads != layers[0].query_heads:
                raise ValueError(
                    "shared: layers whose learned heads differ, expected the same heads in all of a stack."
                )
            for name in names:
                setattr(layer, name, getattr(layers[0], name))


def _own(mechanism: Mechanism) -> Mechanism:
    """Return the mechanism for another layer: a copy if it has parameters, otherwise the mechanism itself."""
    return deepcopy(mechanism) if any(True for _ in mechanism.parameters()) else mechanism
