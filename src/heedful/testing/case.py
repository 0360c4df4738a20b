"""Shared parts of the checks: a mechanism under test, inputs drawn from explicit seeds, and a derived tolerance.

    tolerance   32 · terms · (|f(x moved by one rounding) − f(x)| + eps · max |f(x)|)

f is `matrix` in float64, and terms is the length of its sums: a different order of summation rounds that many times. To
estimate the effect of one rounding, every input is moved by one unit in the last place. So only an ill-conditioned
mechanism gets a large tolerance. The factor 32 covers intermediate results that are more sensitive than the inputs
(such as a small normaliser, in gradients). At 100 tokens the tolerance is about 10⁻¹²; a real error is a million times
larger.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from heedful.core import Mechanism, RecurrentMechanism
from heedful.patterns import Full, Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Int, Tensor


class DoesNotApply(Exception):
    """Raised by a check whose law does not apply to the mechanism; the message says why.

    >>> import heedful as h
    >>> try:
    ...     h.testing.CHECKS["future_leaves_the_past_alone"](h.testing.Case(lambda: h.Softmax(h.Full())))
    ... except h.testing.DoesNotApply:
    ...     print("not causal")
    not causal
    """


@dataclass(frozen=True)
class Case:
    """A mechanism under test and the sizes to test it at.

    build    a function without arguments that returns the mechanism, or the mechanism itself (it is copied)
    length   the longest sequence that it takes
    large    like `build`, with options for sequences of `length`, for the check of the cost; `build` by default

    >>> import heedful as h
    >>> case = h.testing.Case(h.Softmax, d=16, heads=4)
    >>> h.testing.CHECKS["forward_is_matrix_times_v"](case)
    """

    build: Callable[[], Mechanism] | Mechanism
    d: int = 8
    e: int = 6
    heads: int = 2
    length: int = 2048
    large: Callable[[], Mechanism] | Mechanism | None = None

    def mechanism(self, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> Mechanism:
        """Return a new instance in this dtype; the seed determines random initial values."""
        return _built(self.build, seed).to(dtype).eval()

    def full_size(self) -> Mechanism:
        """Return a new instance in float32 with the options for full-size sequences."""
        return _built(self.build if self.large is None else self.large, 0).to(torch.float32).eval()

    def recurrent(self, dtype: torch.dtype = torch.float64) -> RecurrentMechanism:
        """Return a new instance; raise DoesNotApply if the mechanism cannot decode token by token."""
        mechanism = self.mechanism(dtype)
        if not isinstance(mechanism, RecurrentMechanism):
            raise DoesNotApply(f"{type(mechanism).__name__} is no RecurrentMechanism")
        return mechanism

    @cached_property
    def pattern(self) -> Pattern:
        return self.mechanism().pattern

    @property
    def takes_more_queries_than_keys(self) -> bool:
        """True if every query sees every key: only then positions, and so the alignment, do not matter."""
        return isinstance(self.pattern, Full)

    def require_causal(self) -> None:
        if not self.pattern.is_causal:
            raise DoesNotApply(f"{self.pattern!r} lets queries see later keys")

    def draw(
        self,
        n: int,
        m: int | None = None,
        *,
        seed: int,
        batch: tuple[int, ...] = (2,),
        e: int | None = None,
        dtype: torch.dtype = torch.float64,
        spread: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw Gaussian q (*batch, heads, n, d), k (…, m, d) and v (…, m, e)."""
        m = n if m is None else m
        shapes = (n, self.d), (m, self.d), (m, self.e if e is None else e)
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(*batch, self.heads, *s, generator=generator, dtype=torch.float64) for s in shapes)
        return (q * spread).to(dtype), (k * spread).to(dtype), v.to(dtype)


def _built(build: Callable[[], Mechanism] | Mechanism, seed: int) -> Mechanism:
    if isinstance(build, Mechanism):
        return copy.deepcopy(build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mechanism = build()
    if not isinstance(mechanism, Mechanism):
        raise TypeError(f"build: expected a function that returns a heedful.Mechanism, got {type(mechanism).__name__}.")
    return mechanism


def dense(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, segments: Segments | None = None) -> Tensor:
    """Return the oracle: `matrix`, then one matrix product."""
    return mechanism.matrix(q, k, segments=segments) @ v


def separate(
    mechanism: Mechanism,
    q: Float[Tensor, "B *h n d"],
    k: Float[Tensor, "B *h m d"],
    v: Float[Tensor, "B *h m e"],
    query_ids: Int[Tensor, "B n"],
    key_ids: Int[Tensor, "B m"],
) -> Float[Tensor, "B *h n e"]:
    """Return the oracle of padding and packing: attention in each segment separately, outside its batch."""
    rows = []
    for at, (ids, among) in enumerate(zip(query_ids, key_ids, strict=True)):
        out = torch.zeros(*q.shape[1:-1], v.shape[-1], dtype=v.dtype)
        for segment in ids[ids >= 0].unique().tolist():
            here, there = (ids == segment).nonzero()[:, 0], (among == segment).nonzero()[:, 0]
            if len(there):
                part = dense(mechanism, q[at][..., here, :], k[at][..., there, :], v[at][..., there, :])
                out = out.index_copy(-2, here, part)
        rows.append(out)
    return torch.stack(rows)


def with_gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """Return the output of a call, and the gradients of ⟨output, weight⟩ in its inputs (zeros for unused inputs)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    if not out.requires_grad:
        raise AssertionError(
            f"backward of an output {tuple(out.shape)} raises, expected gradients: the output does not depend on q, k "
            "or v. Likely cause: fresh zeros where nothing is seen; heedful.segments.nothing_seen(q, k, v) depends on "
            "them."
        )
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype), allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


@dataclass(frozen=True)
class Oracle:
    """A reference value, and the tolerance for rounding in another computation of it."""

    value: Tensor
    bound: float


def oracles(function: Callable[..., Sequence[Tensor]], *inputs: Tensor, terms: int) -> list[Oracle]:
    """Return the results of `function` on float64 inputs, each with its tolerance (see the top of this file)."""
    eps = torch.finfo(torch.float64).eps
    generator = torch.Generator().manual_seed(0)
    values = function(*inputs)
    moved = function(*(x * (1 + eps * torch.randn(x.shape, generator=generator, dtype=x.dtype)) for x in inputs))
    found = []
    scale = max(map(_largest, values))  # over all results: a gradient that cancels has the rounding error of its terms
    for value, other in zip(values, moved, strict=True):
        if not torch.isfinite(value).all():
            bad = int((~torch.isfinite(value)).sum())
            raise AssertionError(
                f"the definition itself is not finite: {bad} of {value.numel()} numbers from matrix(q, k) @ v are NaN "
                "or infinite. Likely cause: a row without visible keys is divided by zero."
            )
        bound = 32 * terms * (_largest(other - value) + eps * scale)
        found.append(Oracle(value.detach(), bound))
    return found


def oracle(function: Callable[..., Tensor], *inputs: Tensor, terms: int) -> Oracle:
    """`oracles` for a function with one result."""
    return oracles(lambda *given: [function(*given)], *inputs, terms=terms)[0]


def assert_agrees(got: Tensor, want: Oracle, law: str, cause: str) -> None:
    """Raise an error with the broken law, the error of the result and the likely cause, unless `got` agrees."""
    if got.shape != want.value.shape:
        raise AssertionError(
            f"{law}: shape {tuple(got.shape)}, expected {tuple(want.value.shape)}. Likely cause: {cause}."
        )
    if got.dtype != want.value.dtype:
        raise AssertionError(f"{law}: dtype {got.dtype}, expected {want.value.dtype}. Likely cause: {cause}.")
    got = got.detach()
    if not torch.isfinite(got).all():
        count = int((~torch.isfinite(got)).sum())
        raise AssertionError(f"{law}: {count} of {got.numel()} numbers are NaN or infinite. Likely cause: {cause}.")
    gap = (got - want.value).abs()
    if _largest(gap) > want.bound:
        first = tuple((gap > want.bound).nonzero()[0].tolist())
        raise AssertionError(
            f"{law}: off by {_largest(gap):.1e} where rounding explains {want.bound:.1e}; first at {first}, "
            f"{got[first].item():.6g} instead of {want.value[first].item():.6g}. Likely cause: {cause}."
        )


def assert_same(got: Tensor, want: Tensor, law: str, cause: str) -> None:
    """Raise unless the two are bit-equal."""
    if got.shape != want.shape or not torch.equal(got, want):
        gap = (
            f"off by {_largest((got - want).detach()):.1e}" if got.shape == want.shape else f"shape {tuple(got.shape)}"
        )
        raise AssertionError(f"{law}: {gap}, expected bit-equal {tuple(want.shape)}. Likely cause: {cause}.")


def assert_zero(x: Tensor, law: str, cause: str) -> None:
    """Raise unless all entries are exactly zero."""
    if not (x == 0).all():
        wrong = x[x != 0]
        raise AssertionError(
            f"{law}: {wrong.numel()} of {x.numel()} numbers are not zero ({wrong[0].item():.3g} for one). "
            f"Likely cause: {cause}."
        )


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0
