"""Weighted prefix means in plain torch, on any device, in any float type.

    definition  o_i = Σ_{l ≤ j ≤ i} w_j v_j / W_i,  W_i = Σ_{l ≤ j ≤ i} w_j,  l the token at which the run of i begins
    fast        blocks of c:  o = T v + a·carry,  T_ij = w_j / W_i inside a block and a run,
                a_i = W_before / W_i; carry is the prefix mean of the blocks' own means, by the same two lines again
    gradient    the transpose of each line: dv = Tᵀ g + tᵀ·(the recursion, transposed, of aᵀ g)
    cost        2m(c + 2)e flops, m·c weights shared by all heads, O(log m) levels

Every weight lies in [0, 1] and is a ratio of float64 numbers, so nothing overflows, no sum is the difference of two
larger ones, and rounding grows with c · log m instead of m. See README.md.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from heedful.shapes import Bool, Float, Tensor, broadcast_shapes

BLOCK = 32
TERMS = 256
"""The longest product of one row; longer ones round once per term (1e-4 at 131,072 terms in float32)."""
FEW = 2**14
"""With fewer weights than this, one broadcast product is faster than one product for each batch entry."""


def objections(v, weights, *, first=None, delay=0, reverse=False) -> list[str]:
    """Why these inputs are invalid, in sentences; empty if they are valid."""
    said = []
    if v.ndim < 2 or not v.is_floating_point():
        return [f"v must be floating point (*batch, tokens, width), got {v.dtype} {tuple(v.shape)}."]
    for name, x in (("weights", weights), ("first", first)):
        if x is not None and (x.ndim < 1 or x.shape[-1] != v.shape[-2]):
            said.append(f"{name} must be (*batch, {v.shape[-2]}), one for each token, got {tuple(x.shape)}.")
    if first is not None and first.dtype != torch.bool:
        said.append(f"first must be bool, True where a run begins, got {first.dtype}.")
    if delay < 0 or (delay and first is not None):
        said.append(f"delay must be 0, or positive where all tokens are one run; got {delay}.")
    return said


def weighted_prefix_mean(
    v: Float[Tensor, "*#b m e"],
    weights: Float[Tensor, "*#b m"],
    *,
    first: Bool[Tensor, "*#b m"] | None = None,
    delay: int = 0,
    reverse: bool = False,
) -> Float[Tensor, "*b m e"]:
    """The weighted mean of the tokens up to each one; zeros if all weights so far are zero.

    >>> v = torch.tensor([[1.0], [4.0], [10.0]])
    >>> weighted_prefix_mean(v, torch.tensor([1.0, 2.0, 1.0])).flatten()
    tensor([1.0000, 3.0000, 4.7500])

    first     True where a run begins; means do not cross it. By default there is one run
    delay     row i is the mean up to token i − delay; earlier rows repeat the mean of the first token
    reverse   the mean from each token to the end of its run instead
    """
    if said := objections(v, weights, first=first, delay=delay, reverse=reverse):
        raise ValueError(" ".join(said))
    batch = broadcast_shapes(v.shape[:-2], weights.shape[:-1], () if first is None else first.shape[:-1])
    m = v.shape[-2]
    wide = torch.promote_types(v.dtype, torch.float32)
    x = v.to(wide).expand(*batch, *v.shape[-2:])
    if x.numel() == 0:
        return x.to(v.dtype)
    delay = min(delay, m - 1)
    weights = weights.double()
    if reverse:
        weights = weights.flip(-1)
        first = None if first is None else pad(first, (-1, 1), value=True).flip(-1)
    factors = _factors(weights[..., : m - delay], first, wide)
    factors = _mirrored(factors) if reverse else factors
    return _PrefixMean.apply(x, factors, delay, reverse, False).to(v.dtype)


def weighted_mean(v: Float[Tensor, "*#b m e"], weights: Float[Tensor, "*#b m"]) -> Float[Tensor, "*b 1 e"]:
    """The last row of `weighted_prefix_mean` alone, in float32 or better.

    >>> weighted_mean(torch.tensor([[1.0], [4.0], [10.0]]), torch.tensor([1.0, 2.0, 1.0]))
    tensor([[4.7500]])
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    weights = weights.double()
    share = _ratio(weights, weights.sum(-1, keepdim=True)).to(wide)[..., None]
    (whole, part), (w, rest) = (_blocks(x, TERMS, reverse=False) for x in (v.to(wide), share))
    with torch.autocast(v.device.type, enabled=False):
        return (w.mT @ whole).sum(-3) + rest.mT @ part


class BlockFactors(NamedTuple):
    """The weights of one level in blocks of c tokens (zeros beyond the last), and the level above, of whole blocks.

    inside   T, from a token to the later ones of its block
    into     a, from the blocks before to a token
    leave    t, from a token to the mean of its block, or of the run with which its block ends
    total    W, the weight so far
    """

    inside: Float[Tensor, "*s blocks c c"]
    into: Float[Tensor, "*s blocks c 1"]
    leave: Float[Tensor, "*s blocks 1 c"]
    total: Float[Tensor, "*s m"]
    above: BlockFactors | None


def _factors(weights: Tensor, first: Tensor | None, wide: torch.dtype) -> BlockFactors:
    m = weights.shape[-1]
    c = min(BLOCK, m)
    blocks = -(-m // c)
    w = pad(weights, (0, blocks * c - m)).unflatten(-1, (blocks, c))
    before = torch.ones(c, c, dtype=torch.bool, device=w.device).tril()
    if first is None:
        run = torch.zeros_like(w, dtype=torch.int32)
    else:
        run = pad(first, (0, blocks * c - m)).unflatten(-1, (blocks, c)).cumsum(-1, dtype=torch.int32)
    same = (run[..., :, None] == run[..., None, :]) & before
    inside = same * w[..., None, :]
    total = inside.sum(-1)
    into = torch.zeros_like(total)
    above = None
    if blocks > 1:
        above = _factors(total[..., -1], None if first is None else run[..., -1] > 0, wide)
        into = pad(above.total, (1, -1))[..., None] * (run == 0)
    leave = _ratio(inside[..., -1:, :], total[..., -1:, None])
    total = total + into
    return BlockFactors(
        _ratio(inside, total[..., None]).to(wide),
        _ratio(into, total)[..., None].to(wide),
        leave.to(wide),
        total.flatten(-2)[..., :m],
        above,
    )


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return part / torch.where(whole > 0, whole, 1)


def _mirrored(factors: BlockFactors) -> BlockFactors:
    """The factors for tokens in reverse order; the values need not be reversed."""
    above = None if factors.above is None else _mirrored(factors.above)
    inside, into, leave = factors.inside.flip(-3, -2, -1), factors.into.flip(-3, -2), factors.leave.flip(-3, -1)
    return BlockFactors(inside, into, leave, factors.total.flip(-1), above)


class _PrefixMean(torch.autograd.Function):
    """A linear map: its derivative is its transpose, whose derivative is the map."""

    @staticmethod
    def forward(ctx, x, factors, delay, reverse, transposed):
        ctx.options = factors, delay, reverse, transposed
        m = x.shape[-2]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        early, late = slice(0, m - delay), slice(delay, m)
        read, write = (late, early) if reverse != transposed else (early, late)
        with torch.autocast(x.device.type, enabled=False):
            _run(x[..., read, :], factors, out[..., write, :], reverse, transposed)
        if delay:
            rest, edge = (slice(m - delay, m), m - 1) if reverse else (slice(0, delay), 0)
            unused = slice(0, delay) if reverse else slice(m - delay, m)
            if transposed:
                out[..., unused, :] = 0
                out[..., edge, :] += x[..., rest, :].sum(-2)
            else:
                out[..., rest, :] = x[..., edge : edge + 1, :]
        return out

    @staticmethod
    def backward(ctx, grad):
        factors, delay, reverse, transposed = ctx.options
        return _PrefixMean.apply(grad, factors, delay, reverse, not transposed), None, None, None, None


def _run(x: Tensor, factors: BlockFactors, out: Tensor, reverse: bool, transposed: bool) -> None:
    """out = T x + a·carry, or its transpose."""
    inside, into, leave = factors.inside, factors.into, factors.leave
    if transposed:
        inside, into, leave = inside.mT, leave.mT, into.mT
    whole, part = _blocks(x, inside.shape[-1], reverse)
    out_whole, out_part = _blocks(out, inside.shape[-1], reverse)
    blocks, rest = whole.shape[-3], part.shape[-2]
    # The incomplete block is the last; in reverse it is the first, and its tokens are at its end.
    full = slice(-blocks if blocks else inside.shape[-3], None) if reverse else slice(0, blocks)
    odd, tokens = (0, slice(-rest, None)) if reverse else (-1, slice(0, rest))
    carry = None
    if factors.above is not None:
        sums = [leave[..., full, :, :] @ whole]
        if rest:
            sums.insert(0 if reverse else 1, (leave[..., odd, :, tokens] @ part)[..., None, :, :])
        means = torch.cat(sums, -3).squeeze(-2)
        carry = torch.empty_like(means)
        ahead = (1, -1) if reverse == transposed else (-1, 1)  # the direction in which the carry moves by one block
        if transposed:
            means = pad(means, (0, 0, *ahead))
        _run(means, factors.above, carry, reverse, transposed)
        if not transposed:
            carry = pad(carry, (0, 0, *ahead))
        carry = carry[..., None, :]
    if blocks:
        _add_products(
            out_whole,
            inside[..., full, :, :],
            whole,
            into[..., full, :, :],
            None if carry is None else carry[..., full, :, :],
        )
    if rest:
        out_part.copy_(inside[..., odd, tokens, tokens] @ part)
        if carry is not None:
            out_part += into[..., odd, tokens, :] @ carry[..., odd, :, :]


def _add_products(out: Tensor, inside: Tensor, x: Tensor, into: Tensor, carry: Tensor | None) -> None:
    """out = inside @ x + into @ carry, without copying the weights for each batch entry."""
    batch = x.shape[:-3]
    if prod(inside.shape[-3:]) < FEW:
        out.copy_(inside @ x)
        if carry is not None:
            out += into @ carry
        return
    inside, into = inside.expand(*batch, -1, -1, -1), into.expand(*batch, -1, -1, -1)
    for at in product(*map(range, batch)):
        out[at].baddbmm_(inside[at], x[at], beta=0)
        if carry is not None:
            out[at].baddbmm_(into[at], carry[at])


def _blocks(x: Tensor, c: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Views of the whole blocks (…, blocks, c, e) and of the rest (…, rest, e), which is after them, or in reverse
    before them."""
    rest = x.shape[-2] % c
    cut = rest if reverse else x.shape[-2] - rest
    head, tail = x[..., :cut, :], x[..., cut:, :]
    whole, part = (tail, head) if reverse else (head, tail)
    return whole.unflatten(-2, (whole.shape[-2] // c, c)), part
