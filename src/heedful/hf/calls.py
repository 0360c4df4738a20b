"""One attention call of a model, as heedful sees it.

z_ij = cap · tanh(scale · q_i·k_j / cap) + bias_ij,   A = softmax(z) over what pattern and segments show
differential heads:  A₁ − λA₂, with A₁ from the first half of the query heads, A₂ from the second half
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from heedful.mechanisms.softmax import Softmax
from heedful.operator import AttentionOperator
from heedful.patterns import Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Bool, Float, Tensor

HIDES = 50.0  # a bias this far below another hides a key: its weight is e^−50 of the other, below rounding

Kind = Literal["self", "causal", "cross"]


@dataclass(frozen=True)
class Call:
    """Queries, keys and values of one attention call, with everything that determines its weights.

    name       name of the module in its model; layers that share a module have the same name
    turn       number of earlier calls of that module in the same forward pass
    at         number of earlier calls of any module in the same forward pass; a scan calls this the layer
    kind       "self", "causal" (no query sees a later key) or "cross" (keys of another sequence)
    q, k, v    after rotary embeddings; k and v have fewer heads than q if queries are grouped
    scale      factor of q·k
    pattern    which query may attend to which key
    segments   padding (and packing), in the form that mechanisms take; None if every token is real
    bias       added to the scores: relative positions, masks that no pattern describes
    softcap    bound of the scores, as in Gemma 2
    sink       a logit for each head, which takes mass and adds nothing to the output, as in gpt-oss
    minus      λ of differential heads A₁ − λA₂, as in DiffLlama; there are half as many of them as query heads
    again      True if the module called before with the same queries and keys: these heads were already visited
    """

    name: str
    turn: int
    kind: Kind
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b g m d"]
    v: Float[Tensor, "b g m e"]
    scale: float
    pattern: Pattern
    segments: Segments | None = None
    bias: Float[Tensor, "#b #h #n #m"] | None = None
    softcap: float | None = None
    sink: Float[Tensor, " h"] | None = None
    at: int = 0
    minus: float | None = None
    again: bool = False

    @property
    def heads(self) -> int:
        """The number of attention matrices for each item of the batch."""
        return self.q.shape[1] if self.minus is None else self.q.shape[1] // 2

    @property
    def softmaxes(self) -> Call:
        """The call with one head for each softmax: itself, unless heads are differences of two."""
        return self if self.minus is None else replace(self, minus=None)

    @property
    def real(self) -> Bool[Tensor, "b n"]:
        """True for queries that are tokens of the text, not padding. All other rows of A are zero."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        ids = resolve(self.segments, n, m, self.q.device).query_ids
        return (ids >= 0).reshape(-1, n).expand(self.q.shape[0], -1)

    @property
    def hidden(self) -> Bool[Tensor, "#b #h #n #m"] | None:
        """True for keys that the bias hides: −∞, or so far below the row's largest bias that the weight rounds to zero.

        Models mask with −∞, with the lowest number of the dtype, or with −100 like Swin. None if there is no bias.
        """
        return None if self.bias is None else self.bias <= self.bias.amax(-1, keepdim=True) - HIDES

    @property
    def mechanism(self) -> Softmax:
        """The mechanism that this call ran, on all query heads."""
        return Softmax(self.pattern, self.scale, bias=self.bias, softcap=self.softcap, sink=self.sink)

    def operator(self) -> AttentionOperator:
        """The weights of all heads, (b, h, n, m), never materialised."""
        if self.minus is not None:
            whole, half = self.softmaxes, self.heads
            return whole.part(0, half).operator() - self.minus * whole.part(half, 2 * half).operator()
        return self.mechanism.operator(self.q, self.per_head(self.k), segments=self.segments)

    def forward(self) -> Float[Tensor, "b h n e"]:
        """The outputs of all query heads, before they are joined."""
        return self.mechanism(self.q, self.per_head(self.k), self.per_head(self.v), segments=self.segments)

    def per_head(self, x: Float[Tensor, "b g m w"]) -> Float[Tensor, "b h m w"]:
        """Keys or values repeated for each query head: head h uses group h // (heads / groups)."""
        heads = self.q.shape[1]
        return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)

    def item(self, at: int) -> Call:
        """The same call with one item of its batch: one text, or one window, channel or frame of an input."""

        def one(x: Tensor) -> Tensor:
            return x if x.ndim < 3 or x.shape[0] == 1 else x[at : at + 1]

        segments = self.segments
        if segments is not None:
            segments = (one(segments[0]), one(segments[1])) if isinstance(segments, tuple) else one(segments)
        bias = None if self.bias is None else one(self.bias)
        some = slice(at, at + 1)
        return replace(self, q=self.q[some], k=self.k[some], v=self.v[some], segments=segments, bias=bias)

    def part(self, start: int, stop: int) -> Call:
        """The same call with a range of its heads, keys and values repeated per head; itself if these are all heads."""
        if (start, stop) == (0, self.heads):
            return self
        some: slice | list[int] = slice(start, stop)
        if self.minus is not None:  # both halves of each difference
            some = [*range(start, stop), *range(self.heads + start, self.heads + stop)]
        bias = self.bias if self.bias is None or self.bias.shape[1] == 1 else self.bias[:, some]
        sink = None if self.sink is None else self.sink[some]
        k, v = self.per_head(self.k)[:, some], self.per_head(self.v)[:, some]
        return replace(self, q=self.q[:, some], k=k, v=v, bias=bias, sink=sink)

    def to(self, dtype: torch.dtype) -> Call:
        """The same call in another precision."""
        bias, sink = (None if x is None else x.to(dtype) for x in (self.bias, self.sink))
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype), bias=bias, sink=sink)
