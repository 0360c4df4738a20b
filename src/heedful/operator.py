"""Attention as a matrix that is never formed: the narrow waist between mechanisms and measures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, final

import torch

from heedful.kernels.row_statistics.reference import by_blocks
from heedful.kernels.row_statistics.sums import Request, RowSums
from heedful.segments import Layout, resolve
from heedful.shapes import Float, Int, Tensor, broadcast_shapes


class Walked(NamedTuple):
    """Products with A and Aᵀ that walk over q and k: a GPU has many of them before it has formed a large A."""

    apply: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]


@final
class AttentionOperator:
    """The linear map x ↦ A x of a mechanism on given q and k, with its adjoint. Built by `Mechanism.operator`.

    >>> import torch, heedful as h
    >>> q, k = torch.randn(2, 4, 1000, 16).unbind()
    >>> A = h.Softmax(h.Causal()).operator(q, k)
    >>> A.shape
    (4, 1000, 1000)
    >>> x = torch.randn(1000, 3)
    >>> (A @ x).shape, (A.mT @ x).shape
    (torch.Size([4, 1000, 3]), torch.Size([4, 1000, 3]))
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        apply: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        dense: Callable[[], Tensor],
        row_sums: Callable[[Request], RowSums] | None = None,
        layout: Layout | None = None,
        formed: Callable[[], Tensor] | None = None,
        raised: Callable[[], AttentionOperator] | None = None,
        walked: bool = False,
    ):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self._apply = apply
        self._adjoint = adjoint
        self._dense = dense
        self._row_sums = row_sums
        self._layout = layout
        self._formed = dense if formed is None else formed
        self._raised = raised
        self.walked = walked
        """Whether its products are `Walked`."""

    @property
    def is_one_segment(self) -> bool:
        """Whether it was made without segments: all queries see the same tokens before them."""
        return self._layout is None

    @cached_property
    def layout(self) -> Layout:
        """Ids and positions of queries and keys."""
        *_, n, m = self.shape
        return resolve(None, n, m, self.device) if self._layout is None else self._layout

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
        return self._apply(x.expand(*batch, *x.shape[-2:]))

    @property
    def mT(self) -> AttentionOperator:
        """The adjoint."""
        *batch, n, m = self.shape
        return AttentionOperator(
            (*batch, m, n),
            self.dtype,
            self.device,
            self._adjoint,
            self._apply,
            lambda: self._dense().mT,
            layout=None if self.is_one_segment and n == m else Layout(*(self.layout[at] for at in (1, 0, 3, 2))),
            formed=lambda: self._formed().mT,
            raised=lambda: self.float().mT,
            walked=self.walked,
        )

    def rows(self, index: Int[Tensor, " r"] | slice | list[int]) -> Float[Tensor, "*b r m"]:
        """The chosen rows of A, by the adjoint on unit vectors."""
        index = torch.arange(self.shape[-2], device=self.device)[index]
        unit = torch.zeros(self.shape[-2], len(index), dtype=self.dtype, device=self.device)
        unit[index, torch.arange(len(index), device=self.device)] = 1
        return (self.mT @ unit).mT

    def row_sums(self, request: Request) -> RowSums:
        """Sums over every row, in blocks of rows: what `heedful.row_statistics` is made of."""
        if self._row_sums is not None:
            return self._row_sums(request)
        return by_blocks(self.rows, self.shape, self.layout, None, request, self.dtype, self.device)

    def to_dense(self) -> Float[Tensor, "*b n m"]:
        """The matrix itself, by the mechanism's definition: n × m numbers for each head."""
        return self._dense()

    def form(self) -> Float[Tensor, "*b n m"]:
        """The matrix itself, by the fastest way that the mechanism knows; equal to `to_dense` but for rounding."""
        return self._formed()

    def float(self) -> AttentionOperator:
        """The same map in float32 where q and k have 16 bits, as if they were raised; itself where they have more."""
        if self.dtype.itemsize >= 4:
            return self
        if self._raised is None:
            raise TypeError(f"{self}: made without a way to float32. Build the operator from q.float() and k.float().")
        return self._raised()

    def __repr__(self) -> str:
        return f"AttentionOperator{self.shape}, {self.dtype}, {self.device}"
