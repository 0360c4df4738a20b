"""Attention without softmax: weights are any function of q·k, normalised or not.

    matrix      A_ij = f(scale · q_i·k_j) / z_i over visible j
                z_i = Σ_j |f|  (l1) · √Σ_j f²  (l2) · number of visible keys  (length) · 1  (None)
    fast        the same by tiles that the pattern allows, by residue classes, or over lists of visible keys
    recurrence  a cache of the keys and values that later queries may see
    cost        2 · pairs · (d + e) flops, state (d + e) · remembered keys

With l1 or l2, the exponential is computed from scores minus the row maximum, so that it cannot overflow. relu² with
"length" is the attention of the gated attention unit (Hua et al. 2022, arXiv:2202.10447). The code in its appendix
divides q·k by n inside the square, a factor 1/n². Here the factor is 1/(n d), with n the number of visible keys, as in
Su 2022 (kexue.fm/archives/8934): the output then does not vanish with growing length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import nn

from heedful.kernels.blocked import reference
from heedful.kernels.blocked.tiles import Tile
from heedful.kernels.dispatch import Backend, Kernel, as_given
from heedful.kernels.softmax.neighbours import reference as neighbours
from heedful.kernels.softmax.recognise import about_classes, about_lists
from heedful.kernels.softmax.strided import classes
from heedful.mechanisms.score_base import ScoreBase
from heedful.patterns import Causal, Pattern
from heedful.segments import visible
from heedful.shapes import Tensor
from heedful.validation import check_inputs

Normaliser = Literal["l1", "l2", "length"]


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)².

    >>> relu2(torch.tensor([-1.0, 2.0]))
    tensor([0., 4.])
    """
    return x.relu().square()


def no_activation(x: Tensor) -> Tensor:
    """x itself: weights are the scores.

    >>> no_activation(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """
    return x


@dataclass(frozen=True)
class QuadraticRows:
    """Row function: f of the scores, divided by the chosen norm of the row; a row of zeros stays zero."""

    activation: Callable[[Tensor], Tensor]
    normalise: Normaliser | None
    bias: None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(self.activation.parameters()) if isinstance(self.activation, nn.Module) else ()

    def weights(self, scores, tile: Tile, bias, parameters):
        if self.activation is torch.exp and self.normalise in ("l1", "l2"):
            scores = _below_top(tile.lower(scores))
        weights = tile.blank(self._activate(scores, parameters))
        match self.normalise:
            case "l1":
                return weights / _or_one(weights.abs().sum(-1, keepdim=True))
            case "l2":
                return weights / _or_one(weights.square().sum(-1, keepdim=True)).sqrt()
            case "length":
                return weights / tile.count
            case _:
                return weights

    def _activate(self, scores, parameters):
        if not isinstance(self.activation, nn.Module):
            return self.activation(scores)
        names = [name for name, _ in self.activation.named_parameters()]
        return torch.func.functional_call(self.activation, dict(zip(names, parameters, strict=True)), (scores,))

    def pull_back(self, weights, grad, dot):
        return None


def _below_top(scores: Tensor) -> Tensor:
    """Return scores minus the row maximum: the same normalised weights, without overflow."""
    top = scores.detach().amax(-1, keepdim=True)
    return scores - top.masked_fill(top == -torch.inf, 0)


def _or_one(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1)


def _kernel(name: str, by_class: Callable, by_list: Callable, by_tile: Callable) -> Kernel:
    """Return a kernel with those backends of softmax that take any row function."""
    tiles = Backend("torch", by_tile, reference.objections)
    inside = Kernel(f"{name} inside residue classes", tiles)
    return Kernel(
        name,
        Backend("strided", partial(by_class, inside), about_classes),
        Backend("neighbours", by_list, about_lists),
        tiles,
    )


class Quadratic(ScoreBase):
    """Attention with weights f(scale · q·k); by default relu² divided by the number of visible keys.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind()
    >>> h.Quadratic(torch.sigmoid, h.Causal(), normalise="l1")(q, k, v).shape
    torch.Size([2, 4, 100, 16])
    """

    weights_stage = "activation"
    kernel = _kernel("quadratic", classes.attend, neighbours.attend, reference.blocked)
    adjoint_kernel = _kernel("quadratic adjoint", classes.adjoint, neighbours.adjoint, reference.blocked_adjoint)

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor] = relu2,
        pattern: Pattern = Causal(),  # noqa: B008  (frozen)
        scale: float | None = None,
        *,
        normalise: Normaliser | None = "length",
    ):
        super().__init__(pattern, scale)
        if not callable(activation):
            raise TypeError(f"activation: expected a function of a tensor, got {type(activation).__name__}.")
        if normalise is not None and normalise not in get_args(Normaliser):
            raise ValueError(f"normalise: expected one of {get_args(Normaliser)} or None, got {normalise!r}.")
        self.activation = activation
        self.normalise = normalise

    def rows(self) -> QuadraticRows:
        return QuadraticRows(self.activation, self.normalise)

    def matrix(self, q, k, *, segments=None):
        check_inputs(q, k, segments=segments, pattern=self.pattern, mechanism=self)
        sees = visible(self.pattern, q.shape[-2], k.shape[-2], segments, q.device)
        with as_given(q):
            scores = q @ k.mT * self.score_scale(q.shape[-1])
        if self.activation is torch.exp and self.normalise in ("l1", "l2"):
            p = {"l1": 1, "l2": 2}[self.normalise]
            scores = scores.masked_fill(~sees, -torch.inf)
            norm = (p * scores).logsumexp(-1, keepdim=True) / p
            return (scores - norm.masked_fill(norm == -torch.inf, 0)).exp()
        raw = torch.where(sees, self.activation(scores), 0)
        if self.normalise is None:
            return raw
        norm = {
            "l1": lambda: torch.linalg.vector_norm(raw, 1, -1, keepdim=True),
            "l2": lambda: torch.linalg.vector_norm(raw, 2, -1, keepdim=True),
            "length": lambda: sees.sum(-1, keepdim=True).to(raw.dtype),
        }[self.normalise]()
        return torch.where(norm == 0, 0, raw / norm)

    def extra_repr(self) -> str:
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        return f"{name}, {self.pattern!r}, normalise={self.normalise!r}"
