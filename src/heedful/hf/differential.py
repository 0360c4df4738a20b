"""Differential attention (Ye et al. 2024, arXiv:2410.05258): heads are A₁ − λA₂, which is linear in the values too.

DiffLlama calls the interface for the softmaxes of both halves of its heads, once for each half of the values, and joins
the outputs itself:

    calls    O₁ = [A₁; A₂] V₁,  O₂ = [A₁; A₂] V₂         the same queries and keys twice
    output   (A₁ − λA₂) [V₁, V₂],  before it is normalised
    λ        exp(λq₁·λk₁) − exp(λq₂·λk₂) + λ_init

So the probe shows one `Call` for the two, and its heads are the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from heedful.hf.calls import Call
from heedful.hf.modules import CheckFailed
from heedful.shapes import Tensor

MODULES = {"DiffLlamaAttention": "groupnorm"}
"""Classes with differential heads, and the name of the module that receives their outputs."""


def subtracted(module: nn.Module) -> float | None:
    """λ of a module whose heads are A₁ − λA₂; None for other modules."""
    if type(module).__name__ not in MODULES:
        return None
    own: Any = module
    with torch.no_grad():
        first, second = (
            (q * k).sum(dtype=torch.float32).exp().to(q.dtype)
            for q, k in ((own.lambda_q1, own.lambda_k1), (own.lambda_q2, own.lambda_k2))
        )
        return float(first - second + own.lambda_init)


def receiver(module: nn.Module) -> nn.Module:
    """The module that receives (A₁ − λA₂) V, (b, n, h, e)."""
    return getattr(module, MODULES[type(module).__name__])


def compare(calls: Sequence[Call], joined: Tensor) -> None:
    """Compare the visited differences times the values of both calls with the outputs that the module joined."""
    first = calls[0].to(torch.float64)
    values = torch.cat([call.to(torch.float64).per_head(call.v.double()) for call in calls], -1)
    found = first.operator().to_dense() @ values[:, : first.heads]
    height = max(float(call.v.abs().max()) for call in calls)
    scores = float((first.q @ first.per_head(first.k).mT).abs().max()) * first.scale
    error = float(torch.where(first.real[:, None, :, None], found - joined.transpose(1, 2).double(), 0).abs().max())
    # A score z has rounding error eps·|z|, its weight the same relative error; two products of weights and values add.
    allowed = 16 * torch.finfo(joined.dtype).eps * (1 + scores) * (1 + abs(first.minus or 0)) * height
    if not error <= allowed:
        raise CheckFailed(
            f"{first.name}: outputs of A₁ − λA₂ differ from the module's own by {error:.2g}, more than {allowed:.2g}. "
            "Likely cause: another version of transformers, which joins the halves otherwise. Nothing was measured."
        )
