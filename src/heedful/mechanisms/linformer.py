"""Linformer (Wang et al. 2020, arXiv:2006.04768): N keys and values projected to r of each.

matrix      A = softmax(scale · Q (E K)ᵀ) F,   E, F ∈ R^{r×N}          so rank A ≤ r
fast        softmax attention of n queries to the r keys E K with the r values F V
cost        2 r (n + m)(d + e) flops
in a layer  E (X W) = (E X) W: a layer that applies E to its tokens first projects r tokens, not N (`mixed_tokens`)

There is no causal version: each projected key mixes the whole sequence, including later tokens.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Literal

import torch
from torch import nn

from heedful.constants import rounded_anew
from heedful.core import Cost, Dims, Mechanism, Stage, softmax_stages
from heedful.kernels.blocked.reference import blocked_adjoint
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.dispatch import as_given
from heedful.kernels.softmax import softmax
from heedful.patterns import Full, Pattern
from heedful.segments import Segments, differ_by_head, of_head, per_segment, resolve, take_tokens
from heedful.shapes import Float, Tensor, broadcast_shapes
from heedful.validation import check_inputs

PROJECTIONS = ("learned", "pooled", "random")


class Linformer(Mechanism):
    """Softmax attention to r linear combinations of the keys.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 1, 8, 4096, 64).unbind()
    >>> h.Linformer(length=4096, rank=128)(q, k, v).shape
    torch.Size([1, 8, 4096, 64])

    length       the longest sequence. A sequence of m < length tokens uses the first m columns of E and F, as if padded
                 with zeros. Because of F, rows of A do not sum to 1
    rank         r, the number of projected keys
    projection   "learned": random initial values, trained; "random": the same, frozen; "pooled": the means of r
                 consecutive pieces of `length`; if r does not divide it, the first pieces are one token longer
    shared       True: F is E
    heads        1: all heads share E and F; more: separate E and F per head, the last batch axis
    seed         seed of the random entries, N(0, 1/length); projected keys then have the size of keys
    """

    F: Tensor | None

    def __init__(
        self,
        length: int,
        rank: int = 256,
        *,
        projection: Literal["learned", "pooled", "random"] = "learned",
        shared: bool = True,
        heads: int = 1,
        seed: int = 0,
        scale: float | None = None,
        pattern: Pattern = Full(),  # noqa: B008  (frozen)
    ):
        super().__init__(pattern)
        if not isinstance(pattern, Full):
            raise ValueError(
                f"pattern: {pattern!r}, expected Full(): Linformer has no causal or sparse form, because each "
                "projected key mixes all tokens, later ones too. For a causal mechanism of linear cost see Linear."
            )
        for name, value in (("length", length), ("rank", rank), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}.")
        if rank > length:
            raise ValueError(
                f"rank: {rank}, expected at most length = {length}: more projected keys than keys cost more than "
                "softmax attention itself and give nothing. Likely cause: rank and length are swapped."
            )
        if projection not in PROJECTIONS:
            raise ValueError(f"projection: expected one of {', '.join(PROJECTIONS)}, got {projection!r}.")
        self.length, self.rank, self.heads = length, rank, heads
        self.projection, self.shared, self.scale = projection, shared, scale
        generator = torch.Generator().manual_seed(seed)
        self.E = self._hold(generator)
        self.F = None if shared else self._hold(generator)

    def _hold(self, generator: torch.Generator) -> nn.Parameter | nn.Buffer:
        if self.projection == "pooled":
            return nn.Buffer(self._pooled().to(torch.get_default_dtype()))
        entries = torch.randn(self._shape, generator=generator) * self.length**-0.5
        return nn.Parameter(entries) if self.projection == "learned" else nn.Buffer(entries)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.rank, self.length) if self.heads == 1 else (self.heads, self.rank, self.length)

    def _pooled(self) -> Tensor:
        return _means(self.rank, self.length).expand(self._shape).clone()

    def _apply(self, fn, recurse=True):
        before = zip("EF", self._projections(), strict=True)
        super()._apply(fn, recurse)
        for name, old in before:
            new = self._buffers.get(name)
            if self.projection == "pooled" and new is not None:
                self._buffers[name] = rounded_anew(old, new, self._pooled)
        return self

    def matrix(self, q, k, *, segments=None):
        self._check(q, k, None, segments)
        n, m, scale = q.shape[-2], k.shape[-2], self._scale(q)
        layout = resolve(segments, n, m, q.device)
        real = layout.key_positions[layout.key_ids >= 0]
        self._check_length(m if segments is None else int(real.max()) + 1 if len(real) else 0)
        at = layout.key_positions.clamp(max=self.length - 1)  # only padding lies beyond
        E, F = (take_tokens(P.to(q.dtype).mT, at).mT for P in self._projections())  # (*b, r, m): the column of each key
        A = q.new_zeros(*broadcast_shapes(q.shape[:-2], k.shape[:-2]), n, m)
        for segment in layout.key_ids[layout.key_ids >= 0].unique().tolist():
            own = (layout.key_ids == segment)[..., None]
            here = (layout.query_ids == segment)[..., None]
            with as_given(q):
                weights = (q @ (E @ torch.where(own, k, 0)).mT * scale).softmax(-1)
                A = torch.where(here, weights @ torch.where(own.mT, F, 0), A)
        return A

    def forward(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments)
        E, F = self._projections()
        if segments is None:
            return self._attend(E, F, q, k, v)
        if self.heads == 1 or not differ_by_head(segments):
            return per_segment(partial(self._attend, E, F), q, k, v, segments, (E, F))
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
        rows = []
        for head in range(self.heads):
            attend = partial(self._attend, E[head], F[head])
            each = q.select(-3, head), k.select(-3, head), v.select(-3, head)
            rows.append(per_segment(attend, each[0], each[1], each[2], of_head(segments, head), (E, F)))
        return torch.stack(rows, -3)

    def _attend(
        self,
        E: Float[Tensor, "*#h r N"],
        F: Float[Tensor, "*#h r N"],
        q: Float[Tensor, "*#b n d"],
        k: Float[Tensor, "*#b m d"],
        v: Float[Tensor, "*#b m e"],
    ) -> Float[Tensor, "*b n e"]:
        """Return the output for one sequence that begins at position 0."""
        m = k.shape[-2]
        self._check_length(m)
        with as_given(q):
            keys, values = (_mixed(P[..., :m].to(q.dtype), x) for P, x in ((E, k), (F, v)))
        return self.attend_mixed(q, keys, values)

    def mixed_tokens(
        self, x: Float[Tensor, "*b m w"]
    ) -> tuple[Float[Tensor, "*b r w"], Float[Tensor, "*b r w"], Float[Tensor, " r"], Float[Tensor, " r"]]:
        """Return E x and F x, and E 1 and F 1 for the biases, for a layer that projects them to keys and values."""
        m = x.shape[-2]
        self._check_length(m)
        E, F = (P[..., :m].to(x.dtype) for P in self._projections())
        first, ones = _times(E, x), E.sum(-1)
        return (first, first, ones, ones) if self.shared else (first, _times(F, x), ones, F.sum(-1))

    def attend_mixed(
        self, q: Float[Tensor, "*#b n d"], keys: Float[Tensor, "*#b r d"], values: Float[Tensor, "*#b r e"]
    ) -> Float[Tensor, "*b n e"]:
        """Return attention to keys and values that E and F were already applied to."""
        return softmax(q, keys, values, SoftmaxRows(), Full(), None, self._scale(q))

    def products(self, q, k, *, segments=None):
        products = super().products(q, k, segments=segments)

        @torch.no_grad()
        def transposed(y):
            """Aᵀ y = Fᵀ (softmax(Q (E K)ᵀ)ᵀ y)."""
            (E, F), m = self._projections(), k.shape[-2]
            self._check_length(m)
            with as_given(q):
                keys = E[..., :m].to(q.dtype) @ k
                slots = blocked_adjoint(q, keys, y, SoftmaxRows(), Full(), None, self._scale(q))
                return F[..., :m].to(q.dtype).mT @ slots

        return products._replace(adjoint=transposed) if segments is None else products

    def _scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def _projections(self) -> tuple[Tensor, Tensor]:
        return self.E, self.E if self.F is None else self.F

    def _check(self, q: Tensor, k: Tensor, v: Tensor | None, segments: Segments | None) -> None:
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        batch = broadcast_shapes(q.shape[:-2], k.shape[:-2])
        if self.heads > 1 and batch[-1:] != (self.heads,):
            raise ValueError(
                f"q, k: batch axes {tuple(batch)}, expected the last to be heads = {self.heads}, each of which has its "
                "own projection. Likely cause: the mechanism was built for another layer; heads=1 shares one among all."
            )

    def _check_length(self, m: int) -> None:
        if m > self.length:
            raise ValueError(
                f"k: a sequence of {m} tokens, expected at most length = {self.length}, the columns of E and F. Build "
                "Linformer for the longest sequence: a learned projection does not extend to positions it never saw."
            )

    def cost(self, dims: Dims) -> Cost:
        projections = (1 if self.shared else 2) * self.heads * self.rank * min(dims.m, self.length)
        return Cost.of_stages(
            Stage("mixing", 2 * dims.states(self.heads) * self.rank * dims.m * (dims.d + dims.e)),
            *softmax_stages(dims.batch * dims.n * self.rank, dims.d, dims.e),
            bytes=dims.io_bytes + projections * self.E.element_size(),
        )

    def explain(self, q, k, v, *, segments=None):
        keys, values = (x[..., : self.rank, :] for x in (k, v))  # stand-ins with the shape of the projected ones
        return softmax.explain(q, keys, values, SoftmaxRows(), Full(), None, self._scale(q))

    def extra_repr(self) -> str:
        parts = [f"length={self.length}, rank={self.rank}, {self.projection}"]
        parts += ["shared"] * self.shared + [f"heads={self.heads}"] * (self.heads > 1)
        parts += [] if self.scale is None else [f"scale={self.scale}"]
        return ", ".join(parts)


def _mixed(P: Float[Tensor, "*#h r m"], x: Float[Tensor, "*b m w"]) -> Float[Tensor, "*c r w"]:
    """Return P x. Heads that share P and are adjacent in memory, as in the output of a layer, become one product.

    The gradient in P is then one product too, instead of one per head and a sum over a buffer heads times as large.
    """
    if P.ndim > 2 or x.ndim < 3 or x.stride(-3) != x.shape[-1] or x.stride(-1) != 1:
        return (P if torch.is_grad_enabled() else P.detach()) @ x  # if P requires grad, torch transposes x
    rows = x.transpose(-3, -2).flatten(-2)
    return _times(P, rows).unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2)


def _times(P: Float[Tensor, "r m"], x: Float[Tensor, "*b m w"]) -> Float[Tensor, "*b r w"]:
    """Return P x without torch's own path, which computes (xᵀ Pᵀ)ᵀ with copies and transposed gradients."""
    lead = x.shape[:-2]
    if prod(lead) == 1:
        return (P @ x.reshape(x.shape[-2:])).reshape(*lead, len(P), x.shape[-1])
    return P.expand(*lead, *P.shape) @ x


def _means(rank: int, length: int) -> Float[Tensor, "r N"]:
    """Return the matrix whose rows average the pieces, in float64."""
    pieces = torch.arange(length).tensor_split(rank)
    rows = torch.zeros(rank, length, dtype=torch.float64)
    for row, piece in zip(rows, pieces, strict=True):
        row[piece] = 1 / len(piece)
    return rows
