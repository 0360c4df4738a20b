"""What exact mechanisms share: weights that are a row function of the scores, and a cache of keys and values.

forward     A V,  A = W(scale · Q Kᵀ)           tiles that the pattern allows, or torch's fused kernel
recurrence  append k_t, v_t; forget what no later query may see; o_t = W(scale · q_t Kᵀ) V
cost        2 · pairs · (d + e) flops; state (d + e) numbers for each key that the pattern remembers
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from heedful.core import Cost, Dims, RecurrentMechanism, softmax_stages
from heedful.kernels.blocked import reference
from heedful.kernels.blocked.reference import blocked_matrix
from heedful.kernels.blocked.tiles import Keys, Mask, RowFunction, Tile
from heedful.kernels.dispatch import Backend, Kernel, as_given
from heedful.kernels.row_statistics import row_statistics
from heedful.operator import Products
from heedful.patterns import Pattern
from heedful.segments import in_last, resolve, take_tokens
from heedful.shapes import Float, Int, Tensor
from heedful.validation import check_inputs, check_token


class Cache(NamedTuple):
    """Keys and values that later queries may see, with the positions they had (-1: an empty place).

    Grouped queries share them: k and v keep their own batch axes.
    """

    k: Float[Tensor, "*#b l d"]
    v: Float[Tensor, "*#b l e"]
    positions: Int[Tensor, "*s l"]
    length: Int[Tensor, "*s"]


class ScoreBase(RecurrentMechanism):
    """Base of `Softmax` and `Quadratic`: subclasses give `rows`, `matrix` and a kernel."""

    kernel: Kernel
    weights_stage = "softmax"
    """What `Cost.stages` calls the row function."""
    adjoint_kernel = Kernel("adjoint", Backend("torch", reference.blocked_adjoint, reference.objections))

    def __init__(self, pattern: Pattern, scale: float | None):
        super().__init__(pattern)
        self.scale = scale

    @abstractmethod
    def rows(self) -> RowFunction:
        """The row function."""

    def score_scale(self, d: int) -> float:
        """The factor of q·k."""
        return d**-0.5 if self.scale is None else self.scale

    def forward(self, q, k, v, *, segments=None):
        check_inputs(q, k, v, segments=segments, pattern=self.pattern, mechanism=self)
        return self.kernel(*self._kernel_inputs(q, k, v, segments))

    def explain(self, q, k, v, *, segments=None):
        return self.kernel.explain(*self._kernel_inputs(q, k, v, segments))

    def products(self, q, k, *, segments=None):
        memory: dict[str, Tensor] = {}  # what a backend finds out about q and k once for all products

        def adjoint(y):
            check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
            return self.adjoint_kernel(*self._kernel_inputs(q, k, y, segments), memory=memory)

        return Products(lambda x: self(q, k, x, segments=segments), adjoint)

    def row_sums(self, q, k, request, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        return row_statistics(q, k, self.rows(), self.pattern, segments, self.score_scale(q.shape[-1]), request)

    def float32_row_sums(self, q, k, request, *, segments=None):
        return self.row_sums(q, k, request, segments=segments)  # its backends compute in float32 from 16-bit q and k

    def materialise(self, q, k, *, segments=None):
        if q.is_cuda:  # tiles spare a CPU's cache; a GPU pays for each of them with launches
            return self.matrix(q, k, segments=segments)
        return blocked_matrix(q, k, self.rows(), self.pattern, segments, self.score_scale(q.shape[-1]))

    def _kernel_inputs(self, q, k, v, segments):
        return q, k, v, self.rows(), self.pattern, segments, self.score_scale(q.shape[-1])

    def cost(self, dims: Dims) -> Cost:
        kept = self.pattern.remembers(torch.arange(dims.m), torch.tensor(dims.m)).sum()
        return self._exact_cost(dims, self.pattern.pairs(dims.n, dims.m), int(kept))

    def _exact_cost(self, dims: Dims, pairs: int, kept: int) -> Cost:
        """The cost of `pairs` weights in each entry of the batch, and of `kept` keys and values in the cache."""
        return Cost.of_stages(
            *softmax_stages(dims.batch * pairs, dims.d, dims.e, self.weights_stage),
            bytes=dims.io_bytes,
            state=dims.kv_batch * kept * (dims.d + dims.e),
        )

    def init_state(self, q, k, v) -> Cache:
        none = torch.zeros(0, dtype=torch.long, device=q.device)
        return Cache(
            k.new_zeros(*k.shape[:-2], 0, k.shape[-1]),
            v.new_zeros(*v.shape[:-2], 0, v.shape[-1]),
            none,
            torch.zeros((), dtype=torch.long, device=q.device),
        )

    def step(self, state: Cache, q, k, v):
        check_token(q, k, v, d=state.k.shape[-1], e=state.v.shape[-1], mechanism=self)
        k = torch.cat([state.k, k.expand(*state.k.shape[:-2], *k.shape[-2:])], -2)
        v = torch.cat([state.v, v.expand(*state.v.shape[:-2], *v.shape[-2:])], -2)
        now = state.length[..., None]
        positions = torch.cat([state.positions, now], -1)
        with as_given(q):
            out = self._attend_one(q, k, v, now, positions)
        return out, self._forget(Cache(k, v, positions, state.length + 1))

    def _attend_one(self, q, k, v, now, positions):
        """One row of attention over the cache, in the row function's own words."""
        rows, scale = self.rows(), self.score_scale(q.shape[-1])
        if rows.bias is not None:
            raise ValueError(
                "bias: a tensor belongs to one length and can't be used token by token; expected a function of "
                "(query position, key position)."
            )
        i, j = now[..., None], positions[..., None, :]
        mask = self.pattern.allows(i, j) & (j >= 0)
        tile = Tile((), slice(0, 1), Keys([(0, k.shape[-2])]), i, j, Mask(mask))
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(dtype) * scale) @ k.to(dtype).mT
        weights = rows.weights(scores, tile, None, rows.parameters)
        return (weights @ v.to(dtype)).to(q.dtype)

    def prefill(self, q, k, v, *, segments=None):
        out = self(q, k, v, segments=segments)
        layout = resolve(segments, q.shape[-2], k.shape[-2], q.device)
        live = in_last(layout.key_ids)
        return out, self._forget(Cache(k, v, torch.where(live, layout.key_positions, -1), live.sum(-1)))

    def _forget(self, state: Cache) -> Cache:
        """Drop what no later query may see, row by row; rows that keep fewer keys get empty places."""
        keep = self.pattern.remembers(state.positions, state.length[..., None]) & (state.positions >= 0)
        if keep.all():
            return state
        if keep.ndim == 1:
            index = keep.nonzero().flatten()
            return Cache(state.k[..., index, :], state.v[..., index, :], state.positions[index], state.length)
        width = int(keep.sum(-1).max())
        order = keep.int().argsort(dim=-1, stable=True)[..., keep.shape[-1] - width :]
        positions = torch.where(keep, state.positions, -1).gather(-1, order)
        return Cache(take_tokens(state.k, order), take_tokens(state.v, order), positions, state.length)
