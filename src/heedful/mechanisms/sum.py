"""A weighted sum of mechanisms, with weights that are fixed, learned or gated.

    matrix      A = Σ_p g_p A_p;   g = w,  σ(w) elementwise,  or softmax(w) over the parts
    fast        Σ_p g_p (A_p v), each part by its fast path
    recurrence  the recurrences of the parts, if all have one; the state is a tuple of their states
    cost        the sum of the costs of the parts

Two parts with a softmax gate give the gate of the Memorizing Transformer (Wu et al. 2022, arXiv:2203.08913, §3.2):
g A_1 + (1 − g) A_2 with g = σ(w_1 − w_2), one g per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from heedful.constants import rounded_anew
from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism, State
from heedful.mechanisms.mixture import all_recurrent, check_parts, union
from heedful.operator import Products
from heedful.shapes import Float, Tensor, broadcast_shapes
from heedful.validation import check_inputs
from heedful.words import check_takes_words, words_for

Gate = Literal["sigmoid", "softmax"]


class Sum(Mechanism):
    """The weighted sum Σ g_p A_p of mechanisms. It can decode token by token if all its parts can.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 8, 100, 16).unbind()
    >>> h.Sum(h.Softmax(), h.Linear(), weights=[0.8, 0.2])(q, k, v).shape
    torch.Size([2, 8, 100, 16])
    >>> gated = h.Sum(h.Softmax(h.Window(16)), h.Linear(), gate="softmax", heads=8)
    >>> gated.weights.shape, gated(q, k, v).shape
    (torch.Size([2, 8]), torch.Size([2, 8, 100, 16]))

    weights   numbers or a tensor, (parts,) or (parts, heads); an nn.Parameter is learned, other weights are fixed.
              Default: 1 for each part; with a gate, learned weights that start at 0
    gate      None: the weights as they are; "sigmoid": each between 0 and 1; "softmax": positive, summing to 1
    heads     number of heads of the default weights of a gate; 1: all heads share them
    """

    weights: Tensor
    given: list | None = None  # weights that were given as numbers

    def __new__(
        cls,
        *mechanisms: Mechanism,
        weights: Float[Tensor, " p"] | Float[Tensor, "p h"] | Sequence | None = None,
        gate: Gate | None = None,
        heads: int = 1,
    ):
        return super().__new__(StreamingSum if cls is Sum and all_recurrent(mechanisms) else cls)

    def __init__(
        self,
        *mechanisms: Mechanism,
        weights: Float[Tensor, " p"] | Float[Tensor, "p h"] | Sequence | None = None,
        gate: Gate | None = None,
        heads: int = 1,
    ):
        check_parts(mechanisms)
        if gate not in (None, "sigmoid", "softmax"):
            raise ValueError(f'gate: expected "sigmoid", "softmax" or None, got {gate!r}.')
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(f"heads: expected an integer ≥ 1, got {heads!r}.")
        if heads > 1 and (weights is not None or gate is None):
            raise ValueError(
                f"heads: {heads}, which is for the default weights of a gate; expected weights (parts, heads) instead."
            )
        super().__init__(union(mechanisms))
        self.parts = nn.ModuleList(mechanisms)
        self.gate = gate
        count = len(mechanisms)
        if weights is None:
            weights = torch.ones(count) if gate is None else nn.Parameter(torch.zeros(count, heads))
        elif not isinstance(weights, Tensor):
            self.given = torch.tensor(weights, dtype=torch.float64).tolist()
            weights = torch.tensor(weights, dtype=torch.get_default_dtype())
        if not weights.is_floating_point() or weights.ndim not in (1, 2) or len(weights) != count:
            raise ValueError(
                f"weights: {weights.dtype} {tuple(weights.shape)}, expected floating-point ({count},), one for each "
                f"mechanism, or ({count}, heads)."
            )
        if isinstance(weights, nn.Parameter):
            self.weights = weights
        else:
            self.register_buffer("weights", weights)

    def _apply(self, fn, recurse=True):
        before = self.weights
        super()._apply(fn, recurse)
        if self.given is not None:
            self.weights = rounded_anew(before, self.weights, lambda: torch.tensor(self.given, dtype=torch.float64))
        return self

    def shares(self) -> Float[Tensor, " p"] | Float[Tensor, "p h"]:
        """g, the factor of each part, for all heads or per head."""
        return self._gated(self.weights)

    def _gated(self, w: Tensor) -> Tensor:
        if self.gate is None:
            return w
        return w.sigmoid() if self.gate == "sigmoid" else w.softmax(0)

    def _factors(self, like: Tensor) -> Tensor:
        """Return g in the precision of `like` (*batch, rows, columns), with axes that broadcast against it."""
        w = self.weights.to(like.dtype)
        w = w if w.ndim == 2 else w[:, None]
        return self._gated(w)[..., None, None] if like.ndim > 2 else self._gated(w)[..., None]

    def takes_words(self):
        return any(part.takes_words() for part in self._parts())

    def forward(self, q, k, v, *, segments=None, words=None):
        self._check(q, k, v, segments=segments, words=words)
        return self._add(part(q, k, v, segments=segments, **words_for(part, words)) for part in self._parts())

    def matrix(self, q, k, *, segments=None, words=None):
        self._check(q, k, segments=segments, words=words)
        parts = [part.matrix(q, k, segments=segments, **words_for(part, words)) for part in self._parts()]
        return torch.stack([g * A for g, A in zip(self._factors(parts[0]), parts, strict=True)]).sum(0)

    def reads_qk(self, heads):
        return tuple(map(any, zip(*(part.reads_qk(heads) for part in self._parts()), strict=True)))

    def products(self, q, k, *, segments=None):
        self._check(q, k, segments=segments)
        adjoints: list[Callable[[Tensor], Tensor]] = [
            part.products(q, k, segments=segments)[1] for part in self._parts()
        ]
        return Products(lambda x: self(q, k, x, segments=segments), lambda y: self._add(back(y) for back in adjoints))

    def cost(self, dims: Dims) -> Cost:
        costs = [part.cost(dims) for part in self._parts()]
        states = [cost.state for cost in costs if cost.state is not None]
        return Cost.of_stages(
            *(stage for cost in costs for stage in cost.stages),
            bytes=dims.io_bytes + sum(cost.bytes - dims.io_bytes for cost in costs),  # inputs are read once
            state=sum(states) if isinstance(self, RecurrentMechanism) else None,
        )

    def explain(self, q, k, v, *, segments=None, words=None):
        self._check(q, k, v, segments=segments, words=words)
        told = (part.explain(q, k, v, segments=segments, **words_for(part, words)) for part in self._parts())
        lines = [one.splitlines() for one in told]
        return "\n".join(f"part {at}: {line}" for at, part in enumerate(lines) for line in part)

    def _parts(self) -> Iterator[Mechanism]:
        for part in self.parts:
            assert isinstance(part, Mechanism)
            yield part

    def _add(self, outs: Iterable[Tensor]) -> Tensor:
        """Return Σ g_p out_p, computed in float32 or better and rounded once."""
        total = None
        for at, out in enumerate(outs):
            dtype, out = out.dtype, out.to(torch.promote_types(out.dtype, torch.float32))
            term = out * self._factors(out)[at]
            total = term if total is None else total + term
        assert total is not None
        return total.to(dtype)

    def _check(self, *qkv, segments=None, words=None) -> None:
        check_inputs(*qkv, segments=segments, pattern=self.pattern, mechanism=self)
        if words is not None:
            check_takes_words(self)
        batch = broadcast_shapes(*(x.shape[:-2] for x in qkv))
        heads = self.weights.shape[1] if self.weights.ndim == 2 else 1
        if heads > 1 and batch[-1:] != (heads,):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", qkv, strict=False))
            raise ValueError(
                f"q: {batch[-1] if batch else 'no'} heads in {shapes}, expected {heads} on the last batch axis, as in "
                f"weights {tuple(self.weights.shape)}. Likely cause: a sum built for another number of heads."
            )

    def extra_repr(self) -> str:
        fixed = "" if isinstance(self.weights, nn.Parameter) else "fixed "
        return f"{fixed}weights {tuple(self.weights.shape)}" + (f", gate={self.gate!r}" if self.gate else "")


class StreamingSum(Sum, RecurrentMechanism):
    """A sum that can decode token by token; `Sum(…)` returns one if all its parts can."""

    def init_state(self, q, k, v) -> tuple[State, ...]:
        return tuple(part.init_state(q, k, v) for part in self._streams())

    def prefill(self, q, k, v, *, segments=None):
        self._check(q, k, v, segments=segments)
        results = [part.prefill(q, k, v, segments=segments) for part in self._streams()]
        return self._add(out for out, _ in results), tuple(state for _, state in results)

    def step(self, state: tuple[State, ...], q, k, v):
        self._check(q, k, v)
        results = [part.step(own, q, k, v) for own, part in zip(state, self._streams(), strict=True)]
        return self._add(out for out, _ in results), tuple(after for _, after in results)

    def _streams(self) -> Iterator[RecurrentMechanism]:
        for part in self._parts():
            assert isinstance(part, RecurrentMechanism)
            yield part
