"""What several sections use: seeded samples, the scores and a row of softmax from the library, means and fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import torch
from torch import nn

from heedful.mechanisms import Quadratic, Softmax, no_activation
from heedful.nn import Attention
from heedful.patterns import Full, Pattern
from heedful.shapes import Tensor
from heedful.theory.samples import seeded

EPS = torch.finfo(torch.float64).eps


def scores(q: Tensor, k: Tensor, scale: float | None = 1.0) -> Tensor:
    """scale · QKᵀ, unscaled by default; None is the library's own d^-½."""
    return Quadratic(no_activation, Full(), scale, normalise=None).matrix(q, k)


def softmax_of(x: Tensor) -> Tensor:
    """softmax(x) by the fast path: one query 1, keys x of width 1, and the unit vectors for values."""
    one = torch.ones(*x.shape[:-1], 1, 1, dtype=x.dtype)
    values = torch.eye(x.shape[-1], dtype=x.dtype)
    return Softmax(Full(), scale=1.0)(one, x[..., None], values.expand(*x.shape[:-1], -1, -1))[..., 0, :]


def jacobian_norms(weights: Tensor) -> Tensor:
    """‖diag(y) − yyᵀ‖_F = √(Σy² − 2Σy³ + (Σy²)²) of each row."""
    squares = weights.square().sum(-1)
    return (squares - 2 * weights.pow(3).sum(-1) + squares.square()).clamp(min=0).sqrt()


def layer(
    width: int,
    seed: int,
    *,
    heads: int = 1,
    head_dim: int | None = None,
    value_dim: int | None = None,
    pattern: Pattern = Full(),  # noqa: B008  (frozen)
    projection: Callable[[int, int], nn.Module] | None = None,
) -> Attention:
    """Softmax attention, full and of one head by default, with seeded weights of variance 1/width."""
    built = Attention(
        width,
        heads,
        Softmax(pattern),
        head_dim=head_dim,
        value_dim=value_dim,
        projection=projection,
        dtype=torch.float64,
    )
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0, width**-0.5, generator=generator)
    return built


def project(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a layer with one head."""
    assert attention.q_proj is not None and attention.k_proj is not None
    return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)


def variance_and_error(samples: Tensor) -> tuple[float, float]:
    """The variance, and its standard error √((m₄ − m₂²) / count)."""
    squares = (samples - samples.mean()).square()
    return float(samples.var()), float(squares.std() / len(samples) ** 0.5)


def exponent(x: Sequence[float], y: Sequence[float] | Tensor) -> float:
    """The slope of log y against log x by least squares."""
    a = torch.tensor([log(value) for value in x], dtype=torch.float64)
    b = torch.as_tensor(y, dtype=torch.float64).log()
    a = a - a.mean()
    return float((a * b).sum() / a.square().sum())


def exponent_and_error(x: Sequence[float], y: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """The same, with the error that independent errors of the y give it."""
    a = torch.tensor([log(value) for value in x], dtype=torch.float64)
    a = a - a.mean()
    relative = torch.tensor(errors, dtype=torch.float64) / torch.tensor(y, dtype=torch.float64)
    return exponent(x, y), float((a * relative).square().sum().sqrt() / a.square().sum())
