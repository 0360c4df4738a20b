"""Random projections x ↦ (ω₁ᵀx, …, ω_mᵀx), each ω ~ N(0, I_d).

Gaussian     independent rows
Orthogonal   blocks of d orthogonal rows, each a uniform direction times an independent χ_d norm, so that every row
             by itself is still N(0, I_d) and the estimates are unbiased; with rows of unit norm they would not be
             (Yu et al. 2016, arXiv:1610.09072; Choromanski et al. 2020, arXiv:2009.14794)
Hadamard     the directions are rows of HD₁HD₂HD₃, D random signs, H the Walsh–Hadamard matrix: O(d log d) per block;
             only signs and norms are stored. Approximate: a row has one of finitely many directions. They agree with
             uniform directions in their second moments but not in the fourth, so estimates have a bias that vanishes
             with growing d (see benchmarks/random_features.py). A width that is not a power of two is padded to one;
             the rows of a block are then no longer orthogonal, but each has the same distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import nn

from heedful.shapes import Float, Tensor


class Projection(nn.Module, ABC):
    """Base class of projections: m rows of width d, shared by all heads or separate for each head."""

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
        """Return the rows ω."""

    def flops(self) -> int:
        """Flops for one token, as `Cost` counts them: a multiply-add is two."""
        return 2 * self.d * self.features

    @abstractmethod
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new rows from the same distribution, in place."""

    def normal(self, *shape: int, generator: torch.Generator | None) -> Tensor:
        """Draw standard normal numbers in float64, so that a seed gives the same rows in every precision."""
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
    """Rows of HD₁HD₂HD₃ with χ norms, never materialised."""

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
    """Return orthonormal columns; they are uniform (Haar) if the given entries are independent N(0, 1); r ≤ d."""
    Q, R = torch.linalg.qr(gaussian)
    # A Householder QR fixes the signs of R; only with a positive diagonal is Q uniform on the orthogonal group.
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


RADIX = 64
"""Width of the small matrix product that replaces six butterfly passes: more arithmetic, but far faster."""


def walsh_hadamard(x: Float[Tensor, "*b p"]) -> Float[Tensor, "*b p"]:
    """Return H x along the last axis in O(p log p); p is a power of two, H has entries ±1 (Sylvester's order).

    H_p = H_{p/64} ⊗ H_64: transform the rows of 64, then the columns.

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
    return walsh_hadamard(rows.mT.contiguous()).mT.flatten(-2)  # contiguous: one product, not one per token


def walsh_hadamard_flops(p: int) -> int:
    """Return the flops of one `walsh_hadamard` of width p: one product with an H of at most RADIX per digit."""
    flops, width = 0, p
    while width > 1:
        radix = min(width, RADIX)
        flops, width = flops + 2 * radix * p, width // radix
    return flops


def projection(
    d: int, features: int, seed: int, orthogonal: bool | Literal["hadamard"], heads: int | None
) -> Projection:
    """Return the projection that the option `orthogonal` names, drawn from the seed."""
    if orthogonal == "hadamard":
        kind: type[Projection] = Hadamard
    elif isinstance(orthogonal, bool):
        kind = Orthogonal if orthogonal else Gaussian
    else:
        raise ValueError(f'orthogonal: expected True, False or "hadamard", got {orthogonal!r}.')
    drawn = kind(d, features, heads)
    drawn.redraw(torch.Generator().manual_seed(seed))
    return drawn
