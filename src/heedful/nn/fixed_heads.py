"""Several fixed patterns by one product with their materialised matrix, for batches of short sequences.

matrix      A of head h is the matrix of FixedPattern(kinds[h])
fast        A v; A is materialised once per batch: it depends on segments and words alone, so all layers share it
cost        2 · heads · n · m · e flops

`FixedPattern` takes O(n) work for n tokens, but many small launches under segments. For sentences of about a hundred
tokens one product is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heedful.core import Cost, Dims, Mechanism, Stage
from heedful.mechanisms import FixedPattern
from heedful.segments import Segments
from heedful.shapes import Tensor
from heedful.validation import check_inputs


class FixedHeads(Mechanism):
    """One fixed pattern per head, by products with a matrix that is cached until the next batch.

    >>> import torch, heedful as h
    >>> heads = h.nn.FixedHeads(["previous", "next"])
    >>> v = torch.randn(3, 2, 5, 4)
    >>> torch.allclose(heads(v, v, v), h.Mixture([h.FixedPattern("previous"), h.FixedPattern("next")])(v, v, v))
    True

    kinds   one kind of FixedPattern per head
    words   True if the heads count words; each call must then pass word ids, as for FixedPattern
    """

    def __init__(self, kinds: Sequence[str], *, words: bool = False):
        super().__init__((FixedPattern("next")).pattern)
        for kind in kinds:
            FixedPattern(kind)  # raises on an unknown kind
        self.kinds = tuple(kinds)
        self.words = words
        self._kept: tuple[list[Tensor], tuple, Tensor] | None = None

    def takes_words(self):
        return self.words

    def matrix(self, q, k, *, segments=None, words=None):
        self._check_words(words)
        parts = [
            FixedPattern(kind).matrix(_head(q, at), _head(k, at), segments=segments, words=words)
            for at, kind in enumerate(self.kinds)
        ]
        return torch.cat(parts, -3)

    def forward(self, q, k, v, *, segments=None, words=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern)
        self._check_words(words)
        return self._matrix_of_batch(q, k, v.dtype, segments, words) @ v

    def _check_words(self, words: Tensor | None) -> None:
        if self.words != (words is not None):
            given, wanted = ("none", "word ids") if self.words else ("word ids", "none")
            raise ValueError(
                f"words: {given} given, expected {wanted}: these heads were built with words={self.words}."
            )

    @torch.no_grad()
    def _matrix_of_batch(
        self, q: Tensor, k: Tensor, dtype: torch.dtype, segments: Segments | None, words: Tensor | None
    ) -> Tensor:
        """Return the matrix, from the cache if segments, words and shapes are those of the last call.

        The cache holds a reference to the tensors of the last call, so that no new tensor can reuse their memory.
        """
        ids = segments if isinstance(segments, tuple) else (segments,)
        held = [x for x in (*ids, words) if x is not None]
        now = (q.shape, k.shape, dtype, segments is None, *((x.data_ptr(), x.shape, x._version) for x in held))
        if self._kept is None or self._kept[1] != now:
            wide = torch.promote_types(dtype, torch.float32)
            self._kept = held, now, self.matrix(q.to(wide), k.to(wide), segments=segments, words=words).to(dtype)
        return self._kept[2]

    def reads_qk(self, heads):
        return (False,) * heads

    def cost(self, dims: Dims) -> Cost:
        return Cost.of_stages(Stage("aggregation", 2 * dims.batch * dims.n * dims.m * dims.e), bytes=dims.io_bytes)

    def extra_repr(self) -> str:
        return ", ".join(self.kinds) + (", words" if self.words else "")


def _head(x: Tensor, at: int) -> Tensor:
    """Return one head of x; a head axis of size 1 serves all heads."""
    return x[..., at : at + 1, :, :] if x.shape[-3] > 1 else x
