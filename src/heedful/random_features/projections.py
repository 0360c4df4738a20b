"""Random projections x ↦ (ω₁ᵀx, …, ω_mᵀx), each ω ~ N(0, I_d).

Gaussian     independent rows
Orthogonal   blocks of d orthogonal rows, each a uniform direction times an independent χ_d norm, so that every row
             by itself is still N(0, I_d) and the estimates stay unbiased; rows of unit norm would not do
             (Yu et al. 2016, arXiv:1610.09072; Choromanski et al. 2020, arXiv:2009.14794)
Hadamard     the directions are rows of HD₁HD₂HD₃, D random signs, H the Walsh–Hadamard matrix: O(d log d) a block,
             nothing stored but signs and norms. Approximate: a row takes one of finitely many directions, which
             agree with uniform ones in their second moments but not in the fourth, so that estimates have a bias
             that vanishes with growing d (see benchmarks/random_features.py). A width that is no power of two is
             padded to one, after which rows of one block are no longer orthogonal, though their law stays the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import nn

from heedful.shapes import Float, Tensor


class Projection(nn.Module, ABC):
    """m rows of width d, one set for all heads or one for each."""

    def __init__(self, d: int, features: int, heads: int | None = None):
        super().__init__()
        self.d = d
        self.features = features
        self.lead = () if heads is None else (heads,)

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n m"]:
        """ωᵀx for every row ω."""

    @abstractmethod
    def rows(self) -> Float[Tensor, "*h m d"]:
        """The rows ω themselves."""

    def flops(self) -> int:
        """Of one token, as `Cost` counts them: a multiply-add is two."""
        return 2 * self.d * self.features

    @abstractmethod
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Other rows of the same law, in place."""

    def normal(self, *shape: int, generator: torch.Generator | None) -> Tensor:
        """Standard normal numbers in float64, so that a seed means the same in every precision."""
        device = None if generator is None else generator.device
        return torch.randn(*self.lead, *shape, generator=generator, dtype=torch.float64, device=device)

    def extra_repr(self) -> str:
        return ", ".join(map(str, (self.d, self.features, *self.lead)))


class Gaussian(Projection):
    """Independent rows."""

    omega: Tensor

    def __init__(self, d: int, features: int, heads: int | None = None):
        super().__init__(d, features, heads)
        self.register_buffer("omega", torch.zeros(*self.lead, features, d))

    def forward(self, x):
        return x @ self.omega.to(x.dtype).mT

    def rows(self):
        return self.omega

    def redraw(self, generator=None):
        self.omega.copy_(self.normal(self.features, self.d, generator=generator))


class Orthogonal(Gaussian):
    """Blocks of orthogonal rows with χ_d norms."""

    def redraw(self, generator=None):
        m, d = self.features, self.d
        blocks = -(-m // d)
        Q = orthonormal_columns(self.normal(blocks, d, d, generator=generator))
        norms = self.normal(m, d, generator=generator).norm(dim=-1, keepdim=True)
        self.omega.copy_(Q.mT.flatten(-3, -2)[..., :m, :] * norms)


class Hadamard(Projection):
    """Rows of HD₁HD₂HD₃ with χ norms, never formed."""

    signs: Tensor
    norms: Tensor

    def __init__(self, d: int, features: int, heads: int | None = None):
        super().__init__(d, features, heads)
        self.width = 1 << (d - 1).bit_length()
        self.register_buffer("signs", torch.zeros(3, *self.lead, -(-features // self.width), self.width))
        self.register_buffer("norms", torch.zeros(*self.lead, features))

    def forward(self, x):
        x = nn.functional.pad(x, (0, self.width - self.d))[..., None, :]
        for signs in self.signs.to(x.dtype):
            x = walsh_hadamard(x * signs[..., None, :, :])
        return x.flatten(-2)[..., : self.features] * (self.norms * self.width**-1.5).to(x.dtype)[..., None, :]

    def flops(self):
        return 3 * walsh_hadamard_flops(self.width) * self.signs.shape[-2]

    def rows(self):
        return self(torch.eye(self.d, dtype=self.norms.dtype, device=self.norms.device)).mT

    def redraw(self, generator=None):
        draws = [self.normal(*self.signs.shape[-2:], generator=generator) for _ in range(3)]
        self.signs.copy_(torch.where(torch.stack(draws) < 0, -1.0, 1.0))
        self.norms.copy_(self.normal(self.features, self.width, generator=generator).norm(dim=-1))


def orthonormal_columns(gaussian: Float[Tensor, "*b d r"]) -> Float[Tensor, "*b d r"]:
    """Orthonormal columns, uniform (Haar) where the entries given are independent N(0, 1); r ≤ d."""
    Q, R = torch.linalg.qr(gaussian)
    # A Householder QR fixes the signs of R; only with a positive diagonal is Q uniform on the orthogonal group.
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


RADIX = 64
"""The width that one small matrix product transforms at once: more arithmetic than six passes, but far faster."""


def walsh_hadamard(x: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
    """H x along the last axis, p a power of two, H of entries ±1 (Sylvester's order), in O(p log p).

    H_p = H_{p/64} ⊗ H_64: transform rows of 64, then columns the same way.

    >>> walsh_hadamard(torch.tensor([1.0, 0.0, 0.0, 2.0]))
    tensor([ 3., -1., -1.,  3.])
    """
    p = x.shape[-1]
    H = x.new_ones(1, 1)
    while len(H) < min(p, RADIX):
        H = torch.cat([torch.cat([H, H], -1), torch.cat([H, -H], -1)])
    if p <= RADIX:
        return x @ H
    rows = x.unflatten(-1, (p // RADIX, RADIX)) @ H
    return walsh_hadamard(rows.mT.contiguous()).mT.flatten(-2)  # contiguous: one product, not one a token


def walsh_hadamard_flops(p: int) -> int:
    """Flops of one `walsh_hadamard` of width p: a product with H of at most RADIX for each digit."""
    flops, width = 0, p
    while width > 1:
        radix = min(width, RADIX)
        flops, width = flops + 2 * radix * p, width // radix
    return flops


def projection(
    d: int, features: int, seed: int, orthogonal: bool | Literal["hadamard"], heads: int | None
) -> Projection:
    """The projection that `orthogonal` asks for, drawn from the seed."""
    if orthogonal == "hadamard":
        kind: type[Projection] = Hadamard
    elif isinstance(orthogonal, bool):
        kind = Orthogonal if orthogonal else Gaussian
    else:
        raise ValueError(f'orthogonal: expected True, False or "hadamard", got {orthogonal!r}.')
    drawn = kind(d, features, heads)
    drawn.redraw(torch.Generator().manual_seed(seed))
    return drawn
