"""Fixed positional heads in plain torch, on any device, in any float type: shifts and weighted prefix means.

current   o_i = v_i                              left    o_i ∝ Σ_{j ≤ i−2} (j + 1)³ v_j, rows 0 and 1 are v_0
previous  o_i = v_{i−1}, row 0 is v_{m−1}        right   its mirror
earlier   o_i = v_{i−1}, row 0 is v_0            end     o_i ∝ Σ_j (j + 1)³ v_j
next      o_i = v_{i+1}, the last row is v_0     start   its mirror
last      o_i = v_{m−1}
"""

from __future__ import annotations

from itertools import groupby

import torch

from heedful.kernels.prefix.reference import weighted_mean, weighted_prefix_mean
from heedful.shapes import Float, Tensor

KINDS = ("current", "previous", "next", "left", "right", "start", "end", "last", "earlier")
APART = 2
"""Left and right context leave out tokens nearer than this: other heads attend to the neighbours."""


def kind(v: Tensor, kinds: tuple[str, ...], n: int) -> tuple:
    """All that the choice of a backend and its launches depend on; on a GPU also what Triton inspects."""
    memory = (v.stride(), v.data_ptr() % 16) if v.is_cuda else None
    return v.shape, v.dtype, v.device, v.requires_grad, memory, kinds, n


def objections(v, kinds: tuple[str, ...], n: int) -> list[str]:
    """Why these inputs are invalid, in sentences; empty if they are valid."""
    if v.ndim < 2 or not v.is_floating_point():
        return [f"v must be floating point (*batch, tokens, width), got {v.dtype} {tuple(v.shape)}."]
    said = []
    if unknown := sorted(set(kinds) - set(KINDS)):
        said.append(f"kinds must be among {', '.join(KINDS)}, got {', '.join(unknown)}.")
    if len(kinds) != 1 and (v.ndim < 3 or v.shape[-3] != len(kinds)):
        said.append(f"kinds must be one, or one for each head of v {tuple(v.shape)}, got {len(kinds)}.")
    if not 1 <= n <= v.shape[-2]:
        said.append(f"the {n} queries must be the last of the {v.shape[-2]} tokens, and at least one.")
    return said


def fixed_heads(v: Float[Tensor, "*b m e"], kinds: tuple[str, ...], n: int) -> Float[Tensor, "*b n e"]:
    """The last n rows of A v, as a new tensor; one kind for each head (the last batch axis) or one for all.

    >>> fixed_heads(torch.tensor([[1.0], [4.0], [10.0]]), ("previous",), 3).flatten()
    tensor([10.,  1.,  4.])
    """
    if said := objections(v, kinds, n):
        raise ValueError(" ".join(said))
    if len(kinds) == 1:
        rows = _rows(v, kinds[0], n)
        return rows if rows.shape[-2] == n else rows.expand(*rows.shape[:-2], n, -1).clone()
    parts, start = [], 0
    for kind, run in groupby(kinds):  # adjacent heads of one kind are computed together
        size = len(list(run))
        rows = _rows(v.narrow(-3, start, size), kind, n)
        parts.append(rows.expand(*rows.shape[:-2], n, -1))
        start += size
    return torch.cat(parts, -3)


def _rows(v: Tensor, kind: str, n: int) -> Tensor:
    """The rows of one kind; a single row if all are equal."""
    m = v.shape[-2]
    match kind:
        case "current":
            return v[..., m - n :, :].clone(memory_format=torch.contiguous_format)
        case "last":
            return v[..., -1:, :].clone()
        case "previous" | "earlier":
            if n < m:
                return v[..., m - n - 1 : m - 1, :].clone(memory_format=torch.contiguous_format)
            return torch.cat([v[..., -1:, :] if kind == "previous" else v[..., :1, :], v[..., :-1, :]], -2)
        case "next":
            return torch.cat([v[..., m - n + 1 :, :], v[..., :1, :]], -2)
        case "left":
            rows = weighted_prefix_mean(v, _cubes(m, v), delay=APART)
            return rows if n == m else rows[..., m - n :, :].clone()
        case "right":
            return weighted_prefix_mean(v[..., m - n :, :], _cubes(n, v).flip(-1), delay=APART, reverse=True)
        case _:
            return weighted_mean(v, _cubes(m, v) if kind == "end" else _cubes(m, v).flip(-1)).to(v.dtype)


def _cubes(m: int, like: Tensor) -> Float[Tensor, " m"]:
    return torch.arange(1, m + 1, device=like.device, dtype=torch.float64) ** 3
