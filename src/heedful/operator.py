"""Attention as a linear operator: a matrix that is multiplied but never materialised.

operator    A = Σ_t c_t A_t         A_t = A(q_t, k_t) of one mechanism, or its transpose, or the sum of its heads
products    A x = Σ_t c_t A_t x     by the fast path of each mechanism;  Aᵀ y by its adjoint
algebra     A + B,  A − B,  2 A,  A.mT,  A.sum_heads()     are operators too, and every measure takes them
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cached_property, reduce
from math import prod
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from heedful.kernels.row_statistics.reference import by_blocks
from heedful.kernels.row_statistics.sums import Request, RowSums
from heedful.patterns import Full, Pattern
from heedful.segments import Layout, Segments, resolve
from heedful.shapes import Float, Int, Tensor, broadcast_shapes
from heedful.validation import check_inputs

if TYPE_CHECKING:
    from heedful.core import Mechanism

ROWS_FROM_MATRIX = 1 << 24  # entries up to which the row sums of a combination are read from the materialised matrix


class Products(NamedTuple):
    """Products with A and Aᵀ for one q and k. They share intermediate results that do not depend on x and y.

    apply     x ↦ A x
    adjoint   y ↦ Aᵀ y
    fused     True if these products are faster than products with a materialised A
    """

    apply: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    fused: bool = False


class Term(NamedTuple):
    """One attention matrix of an operator: coefficient · A(q, k).

    products     products with A(q, k) and its transpose, in float32 if `raised`
    transposed   True if the term is A(q, k)ᵀ
    summed       number of last batch axes that the term sums over
    raised       True if q and k have 16 bits and the term computes in float32
    """

    mechanism: Mechanism
    q: Float[Tensor, "*#b n d"]
    k: Float[Tensor, "*#b m d"]
    segments: Segments | None
    products: Products
    coefficient: float = 1.0
    transposed: bool = False
    summed: int = 0
    raised: bool = False

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch axes of q and k, including the axes that the term sums over."""
        return tuple(broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2]))

    @property
    def shape(self) -> tuple[int, ...]:
        sides = self.q.shape[-2], self.k.shape[-2]
        return (*self.batch[: len(self.batch) - self.summed], *(sides[::-1] if self.transposed else sides))

    @property
    def is_one_segment(self) -> bool:
        """True if its rows are the last tokens of one sequence."""
        return self.segments is None and (not self.transposed or self.q.shape[-2] == self.k.shape[-2])

    @property
    def layout(self) -> Layout:
        """Ids and positions of rows and columns."""
        layout = resolve(self.segments, self.q.shape[-2], self.k.shape[-2], self.q.device)
        if self.transposed:
            layout = Layout(*(layout[at] for at in (1, 0, 3, 2)))
        for _ in range(self.summed):
            layout = Layout(*map(_same_for_all_heads, layout))
        return layout

    @property
    def is_plain(self) -> bool:
        """True if the term is A(q, k) itself."""
        return self.coefficient == 1 and not self.transposed and not self.summed

    def times(self, x: Float[Tensor, "*b m c"]) -> Float[Tensor, "*b n c"]:
        """The product with x, without the coefficient."""
        if self.summed:
            heads = self.batch[len(self.batch) - self.summed :]
            *batch, rows, columns = x.shape
            x = x.view(*batch, *(1,) * self.summed, rows, columns).expand(*batch, *heads, rows, columns)
        out = (self.products.adjoint if self.transposed else self.products.apply)(x)
        return self._reduced(out)

    def matrix(self, of: Callable[..., Tensor]) -> Float[Tensor, "*b n m"]:
        """The matrix, without the coefficient. `of` is the mechanism's method `matrix` or `materialise`."""
        q, k = (self.q.float(), self.k.float()) if self.raised else (self.q, self.k)
        dense = self._reduced(of(q, k, segments=self.segments))
        return dense.mT if self.transposed else dense

    def row_sums(self, request: Request) -> RowSums:
        """Sums over the rows of A(q, k)."""
        of = self.mechanism.float32_row_sums if self.raised else self.mechanism.row_sums
        return of(self.q, self.k, request, segments=self.segments)

    def norm(self) -> Float[Tensor, "*b"]:
        """|c| ‖A(q, k)‖_F in float64; if the term sums over heads, the sum of their norms."""
        norms = self.row_sums(Request()).square.double().sum(-1).sqrt()
        return abs(self.coefficient) * (norms.sum(tuple(range(-self.summed, 0))) if self.summed else norms)

    def float(self) -> Term:
        if self.raised or self.q.dtype.itemsize >= 4:
            return self
        products = self.mechanism.float32_products(self.q, self.k, segments=self.segments)
        return self._replace(products=Products(*products), raised=True)

    def _reduced(self, x: Tensor) -> Tensor:
        if not self.summed:
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.sum(tuple(range(-2 - self.summed, -2)), dtype=wide).to(x.dtype)


def _same_for_all_heads(x: Int[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Ids or positions without the axis of the heads."""
    if x.ndim == 1:
        return x
    if x.shape[-2] > 1 and not bool((x == x[..., :1, :]).all()):
        raise ValueError(
            f"segments: different for each of {x.shape[-2]} heads, expected the same for all heads that are summed: a "
            "row of the sum has one position. Materialise instead: A.to_dense().sum(-3)."
        )
    return x[..., 0, :]


@final
class AttentionOperator:
    """The linear map x ↦ A x of a mechanism on given q and k, with its adjoint; or a linear combination of such maps.

    >>> import torch, heedful as h
    >>> q, k = torch.randn(2, 4, 1000, 16).unbind()
    >>> A = h.Softmax(h.Causal()).operator(q, k)
    >>> A.shape
    (4, 1000, 1000)
    >>> x = torch.randn(1000, 3)
    >>> (A @ x).shape, (A.mT @ x).shape
    (torch.Size([4, 1000, 3]), torch.Size([4, 1000, 3]))

    Operators of one shape can be added, subtracted and scaled, and heads can be summed:

    >>> B = h.Softmax(h.Causal(), temperature=2.0).operator(q, k)
    >>> difference = A - 0.5 * B
    >>> torch.allclose(difference @ x, A @ x - 0.5 * (B @ x), atol=1e-6)
    True
    >>> A.sum_heads()
    AttentionOperator(1000, 1000), torch.float32, cpu
    """

    terms: tuple[Term, ...]
    """The attention matrices that the operator sums; a single one unless operators were added."""

    def __init__(
        self,
        mechanism: Mechanism,
        q: Float[Tensor, "*#b n d"],
        k: Float[Tensor, "*#b m d"],
        segments: Segments | None = None,
    ):
        check_inputs(q, k, segments=segments, pattern=mechanism.pattern, mechanism=mechanism)
        products = Products(*mechanism.products(q, k, segments=segments))
        self._hold((Term(mechanism, q, k, segments, products),))

    def _hold(self, terms: tuple[Term, ...]) -> None:
        first = terms[0]
        self.terms = terms
        self.shape = first.shape
        self.dtype = torch.float32 if first.raised else first.q.dtype
        self.device = first.q.device

    @classmethod
    def _of(cls, terms: Iterable[Term]) -> AttentionOperator:
        made = cls.__new__(cls)
        made._hold(tuple(terms))
        return made

    @property
    def is_one_segment(self) -> bool:
        """True if the operator was created without segments: each row of the batch is one sequence."""
        return self.terms[0].is_one_segment

    @cached_property
    def layout(self) -> Layout:
        """Ids and positions of queries and keys."""
        return self.terms[0].layout

    @property
    def pattern(self) -> Pattern:
        """The pattern of the visible keys: the union of the terms' patterns. Transposed terms count as `Full`."""
        patterns: list[Pattern] = []
        for term in self.terms:
            shown = Full() if term.transposed else term.mechanism.pattern
            patterns += [] if shown in patterns else [shown]
        return reduce(or_, patterns)

    @property
    def fused(self) -> bool:
        """True if products are faster than products with the materialised matrix."""
        return all(term.products.fused for term in self.terms)

    @property
    def may_cancel(self) -> bool:
        """True if it is a sum of terms or heads: its entries may be much smaller than those of the summands."""
        return len(self.terms) > 1 or self.terms[0].summed > 0

    @cached_property
    def entries(self) -> int:
        """Number of entries that `materialise` writes for the largest term."""
        return max(prod(term.batch) for term in self.terms) * self.shape[-2] * self.shape[-1]

    def __matmul__(self, x: Float[Tensor, "*#b m c"] | Float[Tensor, " m"]) -> Tensor:
        """A x by the mechanism's fast path; x is (*batch, m, columns), or a vector (m,)."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}.")
        if x.ndim == 1:
            return (self @ x[:, None])[..., 0]
        if x.shape[-2] != self.shape[-1]:
            raise ValueError(
                f"x: {x.shape[-2]} rows {tuple(x.shape)}, expected {self.shape[-1]}: A is {self.shape}. Likely cause: "
                "the adjoint A.mT was meant."
            )
        if x.dtype != self.dtype:
            raise TypeError(f"x: dtype {x.dtype}, expected {self.dtype} like q and k.")
        try:
            batch = broadcast_shapes(self.shape[:-2], x.shape[:-2])
        except RuntimeError:
            raise ValueError(
                f"x: batch axes {tuple(x.shape[:-2])}, expected {self.shape[:-2]} or fewer: A is {self.shape}."
            ) from None
        x = x.expand(*batch, *x.shape[-2:])
        return self._combined(term.times(x) for term in self.terms)

    @property
    def mT(self) -> AttentionOperator:
        """The adjoint."""
        return self._of(term._replace(transposed=not term.transposed) for term in self.terms)

    def __add__(self, other: AttentionOperator) -> AttentionOperator:
        if not isinstance(other, AttentionOperator):
            return NotImplemented
        _check_addition(self, other)
        return self._of((*self.terms, *other.terms))

    def __radd__(self, other: int) -> AttentionOperator:
        """Return 0 + A, the first step of Python's `sum`."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: AttentionOperator) -> AttentionOperator:
        return self + -other if isinstance(other, AttentionOperator) else NotImplemented

    def __mul__(self, factor: float) -> AttentionOperator:
        if not isinstance(factor, int | float) or isinstance(factor, bool):
            return NotImplemented
        return self._of(term._replace(coefficient=factor * term.coefficient) for term in self.terms)

    __rmul__ = __mul__

    def __truediv__(self, factor: float) -> AttentionOperator:
        return self * (1 / factor) if isinstance(factor, int | float) else NotImplemented

    def __neg__(self) -> AttentionOperator:
        return -1 * self

    def sum_heads(self) -> AttentionOperator:
        """Σ_h A_h, the sum over the last batch axis: one map for all heads of a layer.

        >>> import torch, heedful as h
        >>> A = h.Softmax().operator(*torch.randn(2, 4, 10, 8).unbind())
        >>> torch.allclose(A.sum_heads().to_dense(), A.to_dense().sum(0))
        True
        """
        if len(self.shape) < 3:
            raise ValueError(f"A is {self.shape}, expected (*batch, heads, n, m): there are no heads to sum over.")
        return self._of(term._replace(summed=term.summed + 1) for term in self.terms)

    def rows(self, index: Int[Tensor, " r"] | slice | list[int]) -> Float[Tensor, "*b r m"]:
        """The chosen rows of A, by the adjoint on unit vectors."""
        index = torch.arange(self.shape[-2], device=self.device)[index]
        unit = torch.zeros(self.shape[-2], len(index), dtype=self.dtype, device=self.device)
        unit[index, torch.arange(len(index), device=self.device)] = 1
        return (self.mT @ unit).mT

    def row_sums(self, request: Request) -> RowSums:
        """Return sums over every row, computed in blocks of rows. `heedful.row_statistics` uses them."""
        if len(self.terms) == 1 and self.terms[0].is_plain:
            return self.terms[0].row_sums(request)
        op = self.float()
        rows: Callable[[slice], Tensor] = op.rows
        if op.entries <= ROWS_FROM_MATRIX:
            with torch.no_grad():
                dense = op.materialise()
            rows = lambda part: dense[..., part, :]  # noqa: E731
        return by_blocks(rows, op.shape, op.layout, op.pattern, request, op.dtype, op.device)

    def to_dense(self) -> Float[Tensor, "*b n m"]:
        """The matrix itself, by the mechanism's definition: n × m numbers for each head."""
        return self._combined(term.matrix(term.mechanism.matrix) for term in self.terms)

    def materialise(self) -> Float[Tensor, "*b n m"]:
        """The matrix itself, by the mechanism's fastest method; equal to `to_dense` up to rounding."""
        with torch.autocast(self.device.type, enabled=False):
            return self._combined(term.matrix(term.mechanism.materialise) for term in self.terms)

    def magnitude(self) -> Float[Tensor, "*b"]:
        """Σ_t |c_t| ‖A_t‖_F in float64: an upper bound of ‖A‖_F. Rounding errors of A are proportional to it."""
        return torch.stack([term.norm() for term in self.float().terms]).sum(0)

    def form(self) -> Float[Tensor, "*b n m"]:
        """Deprecated: `materialise`."""
        warnings.warn("AttentionOperator.form() is now materialise().", DeprecationWarning, stacklevel=2)
        return self.materialise()

    def float(self) -> AttentionOperator:
        """Return the same map computed in float32 if q and k have 16 bits; otherwise the operator itself."""
        return self if self.dtype.itemsize >= 4 else self._of(term.float() for term in self.terms)

    def _combined(self, parts: Iterable[Tensor]) -> Tensor:
        """Σ_t c_t x_t, in float32 or better, rounded once."""
        total: Any = None
        for term, part in zip(self.terms, parts, strict=True):
            if len(self.terms) > 1:
                part = part.to(torch.promote_types(self.dtype, torch.float32))
            if total is not None:
                total = torch.add(total, part, alpha=term.coefficient)
            else:
                total = part if term.coefficient == 1 else term.coefficient * part
        return total.to(self.dtype)

    def __repr__(self) -> str:
        return f"AttentionOperator{self.shape}, {self.dtype}, {self.device}"


def _check_addition(a: AttentionOperator, b: AttentionOperator) -> None:
    for name in ("shape", "dtype", "device"):
        one, two = getattr(a, name), getattr(b, name)
        if one != two:
            raise ValueError(f"A + B: {name} {one} and {two}, expected the same for both operators.")
    first, second = a.terms[0], b.terms[0]
    shared = first.segments is second.segments and first.transposed == second.transposed
    known = shared or (first.is_one_segment and second.is_one_segment)
    if not known and not all(map(_equal, a.layout, b.layout)):
        raise ValueError(
            "A + B: the operators have different segments, expected the same for both: a query of the sum has one "
            "position. Likely cause: segments were given to one of them only."
        )


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape[-1] == y.shape[-1] and bool((x == y).all())
