"""Blocked attention: O = W(scale · Q Kᵀ) V for any row function W, over the tiles that the pattern allows.

    forward     S = scale · Q Kᵀ,  P = W(S),  O = P V                          tile by tile
    backward    dV += Pᵀ dO,  dP = dO Vᵀ,  dS = Wᵀ(dP),  dQ = scale · dS K,  dK += scale · dSᵀ Q
    adjoint     Aᵀ Y = Σ_tiles Pᵀ Y                                            the first term alone

P is recomputed in the backward pass; nothing of size n × m outlives a tile. A low-precision input is raised to
float32 tile by tile, so scores and weights are never rounded to it.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.tiles import Tile, pick, tiles, with_axes
from heedful.patterns import Pattern
from heedful.segments import Segments
from heedful.shapes import Float, Tensor


class RowFunction(Protocol):
    """Weights from scores, row by row."""

    bias: Tensor | None
    """Added to the scores where it is given; broadcasts to (*batch, n, m) and receives a gradient."""
    parameters: tuple[Tensor, ...]
    """Small tensors that receive a gradient."""

    def weights(self, scores: Tensor, tile: Tile, bias: Tensor | None, parameters: tuple[Tensor, ...]) -> Tensor:
        """(…, r, c) from (…, r, c); may overwrite the scores when no gradient is recorded."""
        ...

    def pull_back(self, weights: Tensor, grad: Tensor) -> Tensor | None:
        """The gradient in the scores from that in the weights, or None to have autograd find it."""
        ...


@torch.compiler.disable
def blocked(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n e"]:
    """A V for A = W(scale · Q Kᵀ), with gradients in q, k, v, the bias and the row function's parameters."""
    return _Blocked.apply(q, k, v, rows.bias, rows, pattern, segments, scale, *rows.parameters)


@torch.compiler.disable
@torch.no_grad()
def blocked_adjoint(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    y: Float[Tensor, "*#b n e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b m e"]:
    """Aᵀ Y, without the gradients in q and k and without the matrix."""
    work = _Work(q, k, y, rows.bias, pattern, segments, scale)
    out = work.zeros(work.m, y.shape[-1])
    for tile in work.tiles():
        weights = rows.weights(work.scores(tile), tile, work.bias_of(tile), rows.parameters)
        _add_rows(pick(out, tile.batch), tile.cols, weights.mT @ work.rows_of(2, tile))
    return out.to(y.dtype)


class _Work:
    """The inputs with equal numbers of batch axes, cut into tiles in the precision of the computation."""

    def __init__(self, q, k, v, bias, pattern, segments, scale):
        self.batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        self.q, self.k, self.v = self.inputs = tuple(with_axes(x, len(self.batch), 2) for x in (q, k, v))
        self.bias = None if bias is None else with_axes(bias, len(self.batch), 2)
        self.n, self.m = q.shape[-2], k.shape[-2]
        self.pattern, self.segments, self.scale = pattern, segments, scale
        self.dtype = torch.promote_types(q.dtype, torch.float32)

    def tiles(self):
        return tiles(self.pattern, self.batch, self.n, self.m, self.segments, self.q.device)

    def zeros(self, *tail: int) -> Tensor:
        return self.q.new_zeros(*self.batch, *tail, dtype=self.dtype)

    def rows_of(self, which: int, tile: Tile) -> Tensor:
        return pick(self.inputs[which], tile.batch)[..., tile.rows, :].to(self.dtype)

    def cols_of(self, which: int, tile: Tile) -> Tensor:
        return pick(self.inputs[which], tile.batch)[..., tile.cols, :].to(self.dtype)

    def scores(self, tile: Tile) -> Tensor:
        return (self.rows_of(0, tile) * self.scale) @ self.cols_of(1, tile).mT

    def bias_of(self, tile: Tile) -> Tensor | None:
        if self.bias is None:
            return None
        bias = pick(self.bias, tile.batch)
        bias = bias[..., tile.rows, :] if bias.shape[-2] > 1 else bias
        bias = bias[..., tile.cols] if bias.shape[-1] > 1 else bias
        return bias.to(self.dtype)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, rows, pattern, segments, scale, *parameters):
        ctx.save_for_backward(q, k, v, bias, *parameters)
        ctx.rest = rows, pattern, segments, scale
        work = _Work(q, k, v, bias, pattern, segments, scale)
        out = q.new_zeros(*work.batch, work.n, v.shape[-1])
        for tile in work.tiles():
            weights = rows.weights(work.scores(tile), tile, work.bias_of(tile), parameters)
            pick(out, tile.batch)[..., tile.rows, :] = weights @ work.cols_of(2, tile)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, bias, *parameters = ctx.saved_tensors
        rows, pattern, segments, scale = ctx.rest
        wants = ctx.needs_input_grad
        work = _Work(q, k, v, bias, pattern, segments, scale)
        dq, dk, dv, dbias = (
            torch.zeros_like(x, dtype=work.dtype, memory_format=torch.contiguous_format) if want else None
            for x, want in zip((*work.inputs, work.bias), wants[:4], strict=True)
        )
        dparameters = [torch.zeros_like(p) if want else None for p, want in zip(parameters, wants[8:], strict=True)]
        grad = with_axes(grad, len(work.batch), 2)
        needs_scores = wants[0] or wants[1] or wants[3] or any(wants[8:])
        for tile in work.tiles():
            dout = pick(grad, tile.batch)[..., tile.rows, :].to(work.dtype)
            scores, part = work.scores(tile), work.bias_of(tile)
            small = [p.detach().requires_grad_(want) for p, want in zip(parameters, wants[8:], strict=True)]
            own = wants[3] or any(wants[8:])
            weights = None if own else rows.weights(scores, tile, part, parameters)
            dscores = None
            if needs_scores:
                dweights = dout @ work.cols_of(2, tile).mT
                dscores = None if own else rows.pull_back(weights, dweights)
                if dscores is None:
                    weights, dscores = _by_autograd(work, rows, tile, part, small, dweights, dbias, dparameters)
            if dv is not None:
                _add_rows(pick(dv, tile.batch), tile.cols, weights.mT @ dout)
            if dq is not None:
                _add_rows(pick(dq, tile.batch), tile.rows, (dscores @ work.cols_of(1, tile)).mul_(scale))
            if dk is not None:
                _add_rows(pick(dk, tile.batch), tile.cols, dscores.mT @ (work.rows_of(0, tile) * scale))
        grads = (
            None if g is None else g.reshape(x.shape).to(x.dtype)
            for g, x in zip((dq, dk, dv, dbias), (q, k, v, bias), strict=True)
        )
        return *grads, None, None, None, None, *dparameters


def _by_autograd(work, rows, tile, bias, parameters, dweights, dbias, dparameters):
    """Weights and the gradient in the scores; gradients in bias and parameters are added where they belong."""
    scores = work.scores(tile).requires_grad_()
    if dbias is not None:
        bias = bias.detach().requires_grad_()
    with torch.enable_grad():
        weights = rows.weights(scores, tile, bias, parameters)
    wanted = [scores, *([bias] if dbias is not None else []), *(p for p in parameters if p.requires_grad)]
    dscores, *rest = torch.autograd.grad(weights, wanted, dweights, allow_unused=True, materialize_grads=True)
    if dbias is not None:
        target, part = pick(dbias, tile.batch), rest.pop(0)
        target = target[..., tile.rows, :] if target.shape[-2] > 1 else target
        _add_rows(target.mT, tile.cols if target.shape[-1] > 1 else slice(None), part.mT)
    for total in dparameters:
        if total is not None:
            total += rest.pop(0)
    return weights.detach(), dscores


def _add_rows(target: Tensor, index: slice | Tensor, part: Tensor) -> None:
    """target[…, index, :] += part, summed over the axes that target lacks."""
    part = part.sum_to_size(*target.shape[:-2], *part.shape[-2:])
    if isinstance(index, slice):
        target[..., index, :] += part
    else:
        target.index_add_(-2, index, part)


def objections(q, k, v, rows, pattern, segments, scale) -> list[str]:
    """None: this is the path that takes everything."""
    return []
