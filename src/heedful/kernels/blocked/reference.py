"""Blocked attention: O = W(scale · Q Kᵀ) V for any row function W, over the tiles that the pattern allows.

    forward     S = scale · Q Kᵀ,  P = W(S),  O = P V                          tile by tile
    backward    dV += Pᵀ dO,  dP = dO Vᵀ,  dS = Wᵀ(dP),  dQ = scale · dS K,  dK += scale · dSᵀ Q
    adjoint     Aᵀ Y = Σ_tiles Pᵀ Y                                            the first term alone
    matrix      A = the tiles side by side

P is recomputed in the backward pass; nothing of size n × m outlives a tile. A low-precision input is raised to
float32 tile by tile, so scores and weights are never rounded to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from heedful.kernels.blocked.schedule import cached_tiles, tiles
from heedful.kernels.blocked.tiles import Keys, RowFunction, Tile, pick, size_on, with_axes
from heedful.kernels.dispatch import as_given, uncompiled
from heedful.patterns import Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Float, Tensor, broadcast_shapes


@uncompiled
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
    (q,), (k, v) = without_padding(segments, (q,), (k, v))
    return _Blocked.apply(q, k, v, rows.bias, rows, pattern, segments, scale, *rows.parameters)


@uncompiled
@torch.no_grad()
def blocked_adjoint(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    y: Float[Tensor, "*#b n e"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
    *,
    memory: dict[str, Tensor] | None = None,
) -> Float[Tensor, "*b m e"]:
    """Aᵀ Y, without the gradients in q and k and without the matrix. (Call it under `as_given`, as `Kernel` does.)

    Other backends remember in `memory` what they found out about q and k; here nothing is.
    """
    (q, y), (k,) = without_padding(segments, (q, y), (k,))
    work = Work(q, k, y, rows.bias, pattern, segments, scale)
    out = work.zeros(work.m, y.shape[-1])
    for tile in work.tiles():
        weights = rows.weights(work.scores(tile), tile, work.bias_of(tile), rows.parameters)
        add_at(pick(out, tile.batch), tile.cols, weights.mT @ work.rows_of(2, tile))
    return out.to(y.dtype)


@uncompiled
def blocked_matrix(
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    rows: RowFunction,
    pattern: Pattern,
    segments: Segments | None,
    scale: float,
) -> Float[Tensor, "*b n m"]:
    """A itself, tile by tile: one pass over the weights that the pattern allows. (Call it under `as_given`.)"""
    with torch.no_grad():
        (q,), (k,) = without_padding(segments, (q,), (k,))
        work = Work(q, k, k[..., :1], rows.bias, pattern, segments, scale)
        out = work.zeros(work.n, work.m)
        for tile in work.tiles():
            weights = rows.weights(work.scores(tile), tile, work.bias_of(tile), rows.parameters)
            put_tile(out, tile, weights)
        return out.to(q.dtype)


def put_tile(out: Float[Tensor, "*b n m"], tile: Tile, weights: Tensor) -> None:
    """Write the weights of a tile to where they stand in the matrix."""
    target = pick(out, tile.batch)[..., tile.rows, :]
    if tile.cols.interval is not None:
        target[..., slice(*tile.cols.interval)] = weights
    else:
        target.index_copy_(-1, tile.cols.index.to(out.device), weights.to(out.dtype))


def without_padding(
    segments: Segments | None, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Zeros where padding stands: what was there, NaN too, must reach neither output nor gradient."""
    if segments is None:
        return queries, keys
    layout = resolve(segments, queries[0].shape[-2], keys[0].shape[-2])
    return (
        tuple(x.masked_fill(layout.query_ids[..., None] < 0, 0) for x in queries),
        tuple(x.masked_fill(layout.key_ids[..., None] < 0, 0) for x in keys),
    )


class Work:
    """The inputs with equal numbers of batch axes, cut into tiles in the precision of the computation."""

    def __init__(self, q, k, v, bias, pattern, segments, scale, scratch: dict[str, Any] | None = None):
        batch = q.shape[:-2]
        alike = batch == k.shape[:-2] == v.shape[:-2]
        self.batch = batch if alike else broadcast_shapes(batch, k.shape[:-2], v.shape[:-2])
        self.q, self.k, self.v = self.inputs = tuple(with_axes(x, len(self.batch), 2) for x in (q, k, v))
        self.bias = None if bias is None else with_axes(bias, len(self.batch), 2)
        self.n, self.m = q.shape[-2], k.shape[-2]
        self.pattern, self.segments, self.scale = pattern, segments, scale
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.scratch: dict[str, Any] = {} if scratch is None else scratch

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Memory that every tile uses again: fresh pages cost as much as the arithmetic on them."""
        size = prod(shape)
        kept = self.scratch.get(name)
        if kept is None or kept.numel() < size or kept.dtype != self.dtype or kept.device != self.q.device:
            self.scratch[name] = self.q.new_empty(max(size, self._most()), dtype=self.dtype)
        return self.scratch[name][:size].view(shape)

    def _most(self) -> int:
        """Scores of the largest tile, or more: pages that no tile touches cost nothing, another buffer does."""
        most = size_on(self.q.device)
        return min(prod(self.batch) * min(self.n, most.rows) * self.m, most.scores)

    def product(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """x @ y, in a buffer."""
        batch = x.shape[:-2] if x.shape[:-2] == y.shape[:-2] else broadcast_shapes(x.shape[:-2], y.shape[:-2])
        return torch.matmul(x, y, out=self.buffer(name, *batch, x.shape[-2], y.shape[-1]))

    def tiles(self) -> Iterable[Tile]:
        device, size = self.q.device, size_on(self.q.device)
        kept = None
        if self.segments is None and device.type == "cpu" and type(self.q) in (Tensor, nn.Parameter):
            with suppress(TypeError):  # a pattern without a hash
                kept = cached_tiles(self.pattern, self.batch, self.n, self.m, size)
        return tiles(self.pattern, self.batch, self.n, self.m, self.segments, device) if kept is None else kept

    def zeros(self, *tail: int) -> Tensor:
        return self.q.new_zeros(*self.batch, *tail, dtype=self.dtype)

    def rows_of(self, which: int, tile: Tile) -> Tensor:
        return pick(self.inputs[which], tile.batch)[..., tile.rows, :].to(self.dtype)

    def cols_of(self, which: int, tile: Tile) -> Tensor:
        x = pick(self.inputs[which], tile.batch)
        if tile.cols.interval is not None or x.dtype != self.dtype:
            return tile.cols.take(x).to(self.dtype)
        return tile.cols.take(x, self.buffer("kv"[which - 1], *x.shape[:-2], len(tile.cols), x.shape[-1]))

    def scores(self, tile: Tile) -> Tensor:
        q = self.rows_of(0, tile)
        q = torch.mul(q, self.scale, out=self.buffer("q", *q.shape))
        return self.product("scores", q, self.cols_of(1, tile).mT)

    def bias_of(self, tile: Tile) -> Tensor | None:
        if self.bias is None:
            return None
        bias = pick(self.bias, tile.batch)
        bias = bias[..., tile.rows, :] if bias.shape[-2] > 1 else bias
        bias = tile.cols.take(bias.mT).mT if bias.shape[-1] > 1 else bias
        return bias.to(self.dtype)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, rows, pattern, segments, scale, *parameters):
        work = Work(q, k, v, bias, pattern, segments, scale)
        out = q.new_zeros(*work.batch, work.n, v.shape[-1])
        for tile in work.tiles():
            weights = rows.weights(work.scores(tile), tile, work.bias_of(tile), parameters)
            pick(out, tile.batch)[..., tile.rows, :] = weights @ work.cols_of(2, tile)
        ctx.save_for_backward(q, k, v, bias, out, *parameters)
        ctx.rest = rows, pattern, segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with as_given(grad):
            return _Blocked._backward(ctx, grad)

    @staticmethod
    def _backward(ctx, grad):
        q, k, v, bias, out, *parameters = ctx.saved_tensors
        rows, pattern, segments, scale = ctx.rest
        work = Work(q, k, v, bias, pattern, segments, scale)
        grad = grad.contiguous()  # of a plain sum it is one number, expanded, which products then copy out every time
        wants = ctx.needs_input_grad
        dq, dk, dv, dbias = (
            None if x is None or not want else q.new_zeros(x.shape, dtype=work.dtype)
            for x, want in zip((*work.inputs, work.bias), wants[:4], strict=True)
        )
        dparameters = [torch.zeros_like(p) if want else None for p, want in zip(parameters, wants[8:], strict=True)]
        only_values = not (wants[0] or wants[1] or wants[3] or any(wants[8:]))
        for tile in work.tiles():
            dout = pick(grad, tile.batch)[..., tile.rows, :].to(work.dtype)
            if only_values:
                weights = rows.weights(work.scores(tile), tile, work.bias_of(tile), parameters)
            else:
                here = pick(out, tile.batch)[..., tile.rows, :]
                weights, dscores = _through_rows(work, rows, tile, dout, here, parameters, dbias, dparameters)
                if dq is not None:
                    target = pick(dq, tile.batch)[..., tile.rows, :]
                    target += (dscores @ work.cols_of(1, tile)).sum_to_size(target.shape).mul_(scale)
                if dk is not None:
                    add_at(pick(dk, tile.batch), tile.cols, dscores.mT @ (work.rows_of(0, tile) * scale))
            if dv is not None:
                add_at(pick(dv, tile.batch), tile.cols, weights.mT @ dout)
        grads = (
            None if g is None else g.reshape(x.shape).to(x.dtype)
            for g, x in zip((dq, dk, dv, dbias), (q, k, v, bias), strict=True)
        )
        return *grads, None, None, None, None, *dparameters


def _through_rows(work, rows, tile, dout, out, parameters, dbias, dparameters):
    """The weights of a tile and the gradient in its scores; gradients in bias and parameters are added up."""
    dweights = work.product("dweights", dout, work.cols_of(2, tile).mT)
    bias = work.bias_of(tile)
    if dbias is None and all(total is None for total in dparameters):
        weights = rows.weights(work.scores(tile), tile, bias, parameters)
        exact = out.dtype == work.dtype  # an output that was rounded would carry that into the gradient
        dot = (dout * out if exact else dweights * weights).sum(-1, keepdim=True)
        dscores = rows.pull_back(weights, dweights, dot)
        if dscores is not None:
            return weights, dscores
    return _by_autograd(work, rows, tile, dweights, bias, parameters, dbias, dparameters)


def _by_autograd(work, rows, tile, dweights, bias, parameters, dbias, dparameters):
    scores = work.scores(tile).clone().requires_grad_()  # autograd keeps it, the buffer moves on
    parameters = [
        p.detach().requires_grad_(total is not None) for p, total in zip(parameters, dparameters, strict=True)
    ]
    wanted = [scores, *(p for p in parameters if p.requires_grad)]
    if dbias is not None:
        bias = bias.detach().requires_grad_()
        wanted.append(bias)
    with torch.enable_grad():
        weights = rows.weights(scores, tile, bias, parameters)
    dweights = dweights.sum_to_size(weights.shape)  # values may have batch axes that the weights lack
    found = list(torch.autograd.grad(weights, wanted, dweights, allow_unused=True, materialize_grads=True))
    if dbias is not None:
        target, part = pick(dbias, tile.batch), found.pop()
        target = target[..., tile.rows, :] if target.shape[-2] > 1 else target
        if target.shape[-1] > 1:
            tile.cols.add(target.mT, part.mT)
        else:
            target += part
    for total in dparameters:
        if total is not None:
            total += found.pop(1)
    return weights.detach(), found[0]


def add_at(target: Tensor, keys: Keys, part: Tensor) -> None:
    """target[…, keys, :] += part, summed over the axes that target lacks."""
    keys.add(target, part.sum_to_size(*target.shape[:-2], *part.shape[-2:]))


def objections(q, k, v, rows, pattern, segments, scale, *, memory=None) -> list[str]:
    """None: this is the path that takes everything."""
    return []
