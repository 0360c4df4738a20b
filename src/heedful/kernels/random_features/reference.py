"""Random feature attention in plain torch: the same call as in Triton, on any device, in any float type.

    definition  o_i = Σ_j (φq_i·φk_j) v_j / Σ_j (φq_i·φk_j),   j ≤ i if causal
                log φq = q Wq + c,   log φk = k Wk + c − curvature ‖k‖²/2 + key_bias
    fast        the logarithms go to chunked_linear, which stabilises them without looking ahead

A factor that depends on the query alone cancels in the quotient, so ‖q‖² does not appear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.kernels.chunked_linear.reference import chunked_linear


def objections(q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True) -> list[str]:
    """Why these inputs are invalid, in sentences; empty if they are valid."""
    if not q.ndim == k.ndim == v.ndim == 4:
        return [f"q, k, v must be (batch, heads, tokens, width), got {q.ndim}, {k.ndim} and {v.ndim} axes."]
    (B, H, n, d), (_, KV, m, _) = q.shape, v.shape
    said = []
    if k.shape != (B, KV, m, d) or v.shape[0] != B:
        said.append(f"k must be {(B, KV, m, d)} to go with q and v {tuple(v.shape)}, got {tuple(k.shape)}.")
    if KV == 0 or H % KV:
        said.append(f"the {H} query heads must be a multiple of the {KV} key heads.")
    if not all(x.is_floating_point() for x in (q, k, v)):
        said.append(f"q, k and v must be floating point, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if query_weight.ndim != 3 or query_weight.shape[0] not in (1, H) or query_weight.shape[1] != d:
        said.append(f"query_weight must be (1 or {H}, {d}, features), got {tuple(query_weight.shape)}.")
    elif query_weight.shape[0] > 1 and H != KV:
        said.append(f"one projection a head needs as many key heads as query heads, got {KV} and {H}.")
    if key_weight.shape != query_weight.shape:
        said.append(f"key_weight must be {tuple(query_weight.shape)} as query_weight, got {tuple(key_weight.shape)}.")
    if bias is not None and tuple(bias.shape) != (query_weight.shape[0], query_weight.shape[-1]):
        wanted = query_weight.shape[0], query_weight.shape[-1]
        said.append(f"bias must be {wanted} to go with query_weight, got {tuple(bias.shape)}.")
    if key_bias is not None and tuple(key_bias.shape) != (B, KV, m):
        said.append(f"key_bias must be {(B, KV, m)}, got {tuple(key_bias.shape)}.")
    if causal and n != m:
        said.append(f"causal needs as many queries as keys, got {n} and {m}.")
    return said


def log_features(
    q: Tensor,
    k: Tensor,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    bias: Tensor | None = None,
    curvature: float = 0.0,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log φ of queries and of keys, (B, heads, tokens, features) in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    x, y = q.to(wide), k.to(wide)
    own = 0 if bias is None else bias.to(wide)[:, None, :]
    length = -curvature / 2 * y.square().sum(-1)
    if key_bias is not None:
        length = length + key_bias.to(wide)
    return x @ query_weight.to(wide) + own, y @ key_weight.to(wide) + own + length[..., None]


def random_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_weight: Tensor,
    key_weight: Tensor,
    bias: Tensor | None = None,
    curvature: float = 0.0,
    key_bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention by positive features: exponentials of functions that are linear in the token.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    >>> omega = torch.randn(1, 4, 16)
    >>> random_features(q, k, v, query_weight=omega, key_weight=omega, curvature=1.0).shape
    torch.Size([1, 2, 10, 4])

    Choromanski et al. 2020, arXiv:2009.14794; Likhosherstov et al. 2022 and 2023, arXiv:2205.15317, arXiv:2302.00787.
    """
    options: dict[str, Any] = dict(query_weight=query_weight, key_weight=key_weight, bias=bias, curvature=curvature)
    options["key_bias"] = key_bias
    if said := objections(q, k, v, **options, causal=causal):
        raise ValueError(" ".join(said))
    x, y = log_features(q, k, **options)
    return chunked_linear(x, y, v.to(x.dtype), feature="exp", causal=causal)[0].to(v.dtype)
