"""S(a) = E|a| / √E[a²] for weights a = f(q·k), in closed form (Su 2023, kexue.fm/archives/9889).

For keys k ~ N(μ, σ²I) the score q·k is β + γε with β = q·μ, γ = σ‖q‖ and ε ~ N(0, 1), and S is a ratio of
one-dimensional moments: the limit of many keys at fixed q. For n keys S ≥ 1/√n, so the limit of exp is valid only for
γ < √(ln n / 2). Beyond that, the largest term dominates the second moment (see random_energy.py).

All functions take numbers or tensors and compute in float64.
"""

from __future__ import annotations

from math import pi, sqrt

import torch

from heedful.shapes import Float, Tensor

Number = float | Tensor


def S_exp(gamma: Number) -> Tensor:
    """exp:  E e^{γε} / √E e^{2γε} = e^{γ²/2 − γ²} = e^{−γ²/2}, for every β.

    >>> S_exp(1.0)
    tensor(0.6065, dtype=torch.float64)
    """
    return (-wide(gamma).square() / 2).exp()


def S_relu2(beta: Number, gamma: Number) -> Tensor:
    """relu²:  J₂ / √J₄ with J_p = E max(z + ε, 0)^p and z = β/γ; computed as exp of `log_S_relu2`.

    >>> S_relu2(0.0, 1.0)  # 1/√6, and so for every β as γ → ∞
    tensor(0.4082, dtype=torch.float64)
    """
    return log_S_relu2(beta, gamma).exp()


def log_S_relu2(beta: Number, gamma: Number) -> Tensor:
    """log S of relu², finite even where S underflows (z < −53).

    The text's formulas J₀ = Φ(z), J₂ = (z² + 1)Φ + zφ, J₄ = (z⁴ + 6z² + 3)Φ + z(z² + 5)φ cancel for z ≪ 0. But
    z J_p + p J_{p−1} = J_{p+1} (integration by parts), so the ratios ρ_p = J_p / J_{p−1} satisfy

        ρ_p = p / (ρ_{p+1} − z)

    Evaluated from a large p downwards, this has only positive terms for z < 0, and S = √(ρ₁ρ₂ / ρ₃ρ₄ · Φ(z)).
    """
    b, g = torch.broadcast_tensors(wide(beta), wide(gamma))
    z = torch.where(g > 0, b / g, b.sign() * torch.inf)
    return torch.where(z < -1, _log_S_far(z.clamp(max=-1)), _log_S_near(z.clamp(min=-1)))


def _log_S_near(z: Tensor) -> Tensor:
    """log S from the moments, divided by powers of t = max(|z|, 1) so that they can't overflow."""
    t = z.abs().clamp(min=1)
    u, unit = 1 / t, torch.where(torch.isinf(z), z.sign(), z / t)  # z = unit · t
    Phi, phi = torch.special.ndtr(z), (-z.square() / 2).exp() / sqrt(2 * pi)
    second = (unit**2 + u**2) * Phi + unit * u * phi
    fourth = (unit**4 + 6 * unit**2 * u**2 + 3 * u**4) * Phi + unit * u * (unit**2 + 5 * u**2) * phi
    return second.log() - fourth.log() / 2


def _log_S_far(z: Tensor) -> Tensor:
    """log S by the continued fraction; at z = −1, where it converges slowest, 400 terms reach rounding error."""
    terms = 400
    ratio = 2 * terms / (-z + (z.square() + 4 * terms).sqrt())  # the fixed point of the recurrence at p = terms
    ratios = {}
    for p in range(terms - 1, 0, -1):
        ratio = p / (ratio - z)
        ratios[p] = ratio
        ratios.pop(p + 4, None)
    inner = ratios[1].log() + ratios[2].log() - ratios[3].log() - ratios[4].log()
    return (torch.where(torch.isinf(z), 0, inner) + torch.special.log_ndtr(z)) / 2


def S_identity(beta: Number, gamma: Number) -> Tensor:
    """No activation:  (√(2/π) γ e^{−z²/2} + β erf(z/√2)) / √(β² + γ²), at least √(2/π) = 0.798 (at β = 0).

    >>> S_identity(0.0, 1.0)
    tensor(0.7979, dtype=torch.float64)
    """
    b, g = torch.broadcast_tensors(wide(beta).abs(), wide(gamma))
    size = torch.hypot(b, g)
    b, g = b / size, g / size
    z = torch.where(g > 0, b / g, torch.inf)
    return sqrt(2 / pi) * g * (-z.square() / 2).exp() + b * torch.special.erf(z / sqrt(2))


def S_nonnegative(
    q: Float[Tensor, "*b r"], mean: Float[Tensor, "*b r"], covariance: Float[Tensor, "*b r r"]
) -> Float[Tensor, "*b"]:
    """Non-negative linear attention on features with this mean and covariance:  1 / √(1 + qᵀΣq / (qᵀμ)²).

    >>> S_nonnegative(torch.tensor([1.0]), torch.tensor([0.01]), torch.tensor([[0.01 * 0.99]]))  # Bernoulli(p): √p
    tensor(0.1000, dtype=torch.float64)
    """
    q, mean, covariance = wide(q), wide(mean), wide(covariance)
    first = (q * mean).sum(-1)
    spread = (q[..., None, :] @ covariance @ q[..., None])[..., 0, 0]
    return first / torch.hypot(first, spread.clamp(min=0).sqrt())


def S_iid(q: Float[Tensor, "*b r"], mean: Number, std: Number) -> Float[Tensor, "*b"]:
    """`S_nonnegative` for iid features:  1 / √(1 + (σ/μ · ‖q‖₂/‖q‖₁)²).

    ‖q‖₂/‖q‖₁ lies in [1/√r, 1]. (The text takes its maximum to be √r, and concludes that more features make attention
    sparser; the opposite is true: for a dense q the ratio falls as 1/√r and S tends to 1.)

    >>> S_iid(torch.ones(100), 1.0, 1.0)
    tensor(0.9950, dtype=torch.float64)
    """
    q = wide(q)
    first, spread = wide(mean) * q.abs().sum(-1), wide(std) * torch.linalg.vector_norm(q, dim=-1)
    return first / torch.hypot(first, spread)


def S_decay(decay: Number, n: Number) -> Tensor:
    """Weights 1, λ, …, λ^{n−1}:  √((1−λⁿ)(1+λ) / (n(1−λ)(1+λⁿ))) = √(tanh(nℓ/2) / (n tanh(ℓ/2))),  ℓ = −ln λ.

    The second form is 0/0 only at λ = 1, where S = 1. As n grows, n·S² tends to (1+λ)/(1−λ): a window of constant
    width, not one token.

    >>> S_decay(torch.tensor([0.0, 0.9, 1.0]), 100)
    tensor([0.1000, 0.4359, 1.0000], dtype=torch.float64)
    """
    half, n = -wide(decay).log() / 2, wide(n)
    ratio = torch.tanh(n * half) / (n * torch.tanh(half))
    return torch.where(half == 0, 1, ratio).sqrt()


def wide(x: Number) -> Tensor:
    """A float64 tensor; a Python number is converted without passing through float32."""
    return x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
