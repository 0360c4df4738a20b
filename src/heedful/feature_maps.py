"""Feature maps of linear attention: weights are φ(q)·φ(k).

A map implements `query(x)`, `key(x)` and `dim(d)`. A `LogFeatureMap` returns the logarithms of positive features, so
that a causal mechanism can rescale them without reading later tokens. Maps that depend on positions take them as a
second argument; the others ignore it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import comb, factorial, pi, sqrt
from typing import NamedTuple

import torch
from torch import nn

from heedful.shapes import Float, Int, Tensor


class FeatureMap(nn.Module, ABC):
    """Base class of feature maps φ for queries and keys, (*b, n, d) → (*b, n, dim(d)).

    >>> import torch, heedful as h
    >>> class Square(h.FeatureMap):
    ...     def query(self, x, positions=None):
    ...         return x**2
    >>> q, k, v = torch.randn(3, 4, 100, 16).unbind()
    >>> h.Linear(Square(), h.Causal())(q, k, v).shape
    torch.Size([4, 100, 16])
    """

    kernel_name: str | None = None
    """Name of the map in the fused kernels, if they compute it; else None."""
    heads: int | None = None
    """Number of heads, the last batch axis, if each has a separate map; None or 1: all heads share one map."""

    @abstractmethod
    def query(
        self, x: Float[Tensor, "*b n d"], positions: Int[Tensor, "*s n"] | None = None
    ) -> Float[Tensor, "*c n r"]:
        """Features of queries."""

    def key(self, x: Float[Tensor, "*b n d"], positions: Int[Tensor, "*s n"] | None = None) -> Float[Tensor, "*c n r"]:
        """Features of keys; by default the same map as for queries."""
        return self.query(x, positions)

    def dim(self, d: int) -> int:
        """The number of features."""
        return d

    def flops(self, d: int) -> int:
        """Flops of the matrix products that compute the features of one token."""
        return 0


class LinearLogs(NamedTuple):
    """Log-features that are linear in a token, up to one scalar per token:

        log φ(q) = q Wq + c + (scalar),   log φ(k) = k Wk + c − curvature ‖k‖²/2 − ‖key_axes k‖²/2

    Wq, Wk and c exist once per head or once for all heads. The scalar of a query cancels in normalised weights. Fused
    kernels compute such features themselves.
    """

    query_weight: Float[Tensor, "h d r"]
    key_weight: Float[Tensor, "h d r"]
    bias: Float[Tensor, "h r"]
    curvature: float
    key_axes: Float[Tensor, "*h d d"] | None = None


class LogFeatureMap(FeatureMap):
    """Base class of maps with positive features that are given by their logarithms.

    >>> import torch, heedful as h
    >>> class Double(h.LogFeatureMap):  # φ(x) = exp(2x)
    ...     def log_query(self, x):
    ...         return 2 * x
    >>> q, k, v = torch.randn(3, 4, 100, 16).unbind()
    >>> h.Linear(Double(), h.Causal())(q, k, v).shape
    torch.Size([4, 100, 16])
    """

    logs_depend_on: tuple[str, ...] | None = None
    """Attributes that `linear_logs` depends on besides the buffers: linear attention caches it by both. None: never."""

    def linear_logs(self) -> LinearLogs | None:
        """Return the coefficients if the logarithms are linear in a token, else None."""
        return None

    @abstractmethod
    def log_query(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*c n r"]:
        """log φ of queries."""

    def log_key(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*c n r"]:
        """log φ of keys."""
        return self.log_query(x)

    def query(self, x, positions=None):
        return self.log_query(x).exp()

    def key(self, x, positions=None):
        return self.log_key(x).exp()


class Identity(FeatureMap):
    """φ(x) = x: weights are q·k, which may be negative.

    >>> Identity().query(torch.tensor([[0.5, -1.0]]))
    tensor([[ 0.5000, -1.0000]])
    """

    kernel_name = "identity"

    def query(self, x, positions=None):
        return x


class Elu1(FeatureMap):
    """φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, arXiv:2006.16236).

    >>> Elu1().query(torch.tensor([[0.5, -1.0]]))
    tensor([[1.5000, 0.3679]])
    """

    kernel_name = "elu1"

    def query(self, x, positions=None):
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # elu(x) + 1 would lose e^x to rounding


class Relu(FeatureMap):
    """φ(x) = max(x, 0). Its kernel is Σ_l max(q_l, 0) max(k_l, 0), not max(q·k, 0), which has no feature map.

    >>> Relu().query(torch.tensor([[0.5, -1.0]]))
    tensor([[0.5000, 0.0000]])
    """

    kernel_name = "relu"

    def query(self, x, positions=None):
        return x.relu()


class Exp(LogFeatureMap):
    """φ(x) = exp(x), elementwise. Its kernel is Σ_l exp(q_l + k_l), not exp(q·k).

    >>> Exp().query(torch.tensor([[0.5, -1.0]]))
    tensor([[1.6487, 0.3679]])
    """

    def log_query(self, x):
        return x


class Cos(FeatureMap):
    """φ(x) = cos(x), elementwise. Features may be negative, so the normaliser of a row may vanish.

    >>> Cos().query(torch.tensor([[0.5, -1.0]]))
    tensor([[0.8776, 0.5403]])
    """

    def query(self, x, positions=None):
        return x.cos()


class TurnedFeatureMap(FeatureMap):
    """[φ(x) cos a, φ(x) sin a] with an angle a per position: weights are φ(q)·φ(k) cos(a_i − a_j).

    `still` is φ. Kernels that implement this φ compute the features themselves, from the angles.
    """

    still: FeatureMap

    @abstractmethod
    def angles(self, positions: Int[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        """The angle of each position, in float64."""

    def line(self, first: int, stop: int, device: torch.device) -> Float[Tensor, "1 n"]:
        """The angles of the positions `first` to `stop` − 1."""
        return self.angles(torch.arange(first, stop, device=device)[None])

    def query(self, x, positions=None):
        angle = self.line(0, x.shape[-2], x.device)[0] if positions is None else self.angles(positions)
        x, angle = self.still.query(x), angle[..., None]
        return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], -1)

    def dim(self, d):
        return 2 * self.still.dim(d)


class CosFormer(TurnedFeatureMap):
    """relu(q)·relu(k) cos(π (i − j) / 2M) (Qin et al. 2022, arXiv:2202.08791).

    cos(a − b) = cos a cos b + sin a sin b splits the factor into features of each position.

    length   M, an upper bound on the sequence length. It is fixed, so that outputs do not depend on padding

    >>> phi = CosFormer(length=16)
    >>> phi.query(torch.tensor([[0.5, -1.0]]), positions=torch.tensor([4]))
    tensor([[0.4619, 0.0000, 0.1913, 0.0000]])
    """

    still = Relu()

    def __init__(self, length: int):
        super().__init__()
        if length < 1:
            raise ValueError(f"length: expected the longest sequence there will be, got {length}.")
        self.length = length

    def angles(self, positions):
        if positions.numel():
            self._check(int(positions.max()))
        return positions.double() * (pi / 2 / self.length)

    def line(self, first, stop, device):
        self._check(stop - 1)
        # kernels cache results by their tensor of angles; one created while a graph is captured holds no numbers yet
        fresh = device.type != "cuda" or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
        return (_line.__wrapped__ if fresh else _line)(self.length, first, stop, device)

    def _check(self, last: int) -> None:
        if last >= self.length:
            raise ValueError(
                f"positions: {last}, expected below length = {self.length}: beyond it the cosine turns negative. Build "
                "CosFormer for the longest sequence."
            )


@lru_cache(maxsize=32)
def _line(length: int, first: int, stop: int, device: torch.device) -> Float[Tensor, "1 n"]:
    """Return cosFormer's angles of the positions `first` to `stop` − 1."""
    with torch.inference_mode(False):
        return torch.arange(first, stop, dtype=torch.float64, device=device)[None] * (pi / 2 / length)


class Polynomial(FeatureMap):
    """Weights Σ_{p ≤ degree} (scale · q·k)^p / p!, a truncated series of exp; features are tensor powers times 1/√p!.

    >>> Polynomial(degree=2).dim(16)  # 1 + 16 + 16²
    273
    """

    def __init__(self, degree: int = 2, scale: float | None = None):
        super().__init__()
        if degree < 0:
            raise ValueError(f"degree: expected 0 or more, got {degree}.")
        self.degree = degree
        self.scale = scale

    def query(self, x, positions=None):
        x = x * sqrt(x.shape[-1] ** -0.5 if self.scale is None else self.scale)
        power = torch.ones_like(x[..., :1])
        parts = [power]
        for p in range(1, self.degree + 1):
            power = (power[..., :, None] * x[..., None, :]).flatten(-2)
            parts.append(power / sqrt(factorial(p)))
        return torch.cat(parts, -1)

    def dim(self, d):
        return sum(d**p for p in range(self.degree + 1))


class Taylor(FeatureMap):
    """Weights 1 + s + s²/2 with s = scale · q·k, always positive (Arora et al. 2024, arXiv:2402.18668).

    Each product x_a x_b = x_b x_a is one feature, so the map has fewer features than `Polynomial(2)`.

    >>> Taylor().dim(16)  # 1 + 16 + 16 · 17 / 2
    153
    """

    def __init__(self, scale: float | None = None):
        super().__init__()
        self.scale = scale

    def query(self, x, positions=None):
        d = x.shape[-1]
        x = x * sqrt(d**-0.5 if self.scale is None else self.scale)
        a, b = torch.triu_indices(d, d, device=x.device)
        weight = torch.ones(len(a), dtype=x.dtype, device=x.device).masked_fill_(a == b, sqrt(0.5))
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., a] * x[..., b] * weight], -1)

    def dim(self, d):
        return 1 + d + comb(d + 1, 2)


class Hedgehog(LogFeatureMap):
    """φ(x) = [softmax(W x), softmax(−W x)], W learned, one for each head (Zhang et al. 2024, arXiv:2402.04347).

    This is the paper's [exp(W x + b), exp(−W x − b)] with each half divided by its sum, and without b. W starts as the
    identity.

    >>> Hedgehog(d=2).query(torch.tensor([[0.5, -1.0]])).detach()
    tensor([[0.8176, 0.1824, 0.1824, 0.8176]])
    """

    def __init__(self, d: int, heads: int = 1):
        super().__init__()
        for name, number in (("d", d), ("heads", heads)):
            if number < 1:
                raise ValueError(f"{name}: expected 1 or more, got {number}.")
        self.heads = heads
        self.weight = nn.Parameter(torch.eye(d).repeat(heads, 1, 1))

    def log_query(self, x):
        weight = self.weight if len(self.weight) > 1 else self.weight[0]  # shared by all heads: x may have no head axis
        y = x @ weight.to(x.dtype).mT
        return torch.cat([y.log_softmax(-1), (-y).log_softmax(-1)], -1)

    def dim(self, d):
        return 2 * d

    def flops(self, d):
        return 2 * d * d
