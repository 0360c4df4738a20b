"""Estimates the singular values that a sketch has not resolved, from the quadrature rule of its random start.

quadrature   a sketch of t blocks from A Ω is a rule of t nodes: so much energy near each (`linalg`)
curve        ρ(σ²), the energy of all values below σ². A part f of a node's energy lies below the node: f = 1/2 inside
             a spectrum, less at its end at 0 (EDGE)
between      log σ² is a smooth function of log ρ: spectra of attention fall like powers, piece by piece
count        r = ∫ dρ / σ² along the curve

All of this is an estimate; certified bounds are in `linalg`.
"""

from __future__ import annotations

import torch

from heedful.linalg import Ritz
from heedful.shapes import Bool, Float, Int, Tensor

MANY = 4096  # from so many steps on, sorting takes longer than the rest
UNRESOLVED = 0.2  # a block of Ritz values is one node if their mean relative residual exceeds this
EDGE = 0.39, 0.48, 0.49  # f of the last node and of the two before it
FINE = 8  # pieces of the curve from one node to the next


def spread(ritz: Ritz, count: Int[Tensor, "*b"], energy: Float[Tensor, "*b"], n: int) -> Float[Tensor, "*b n"]:
    """Estimates of Σ_{i≤r} σ_i² for r = 1 … n: the first `count` Ritz values as they are, then a curve.

    The curve is σ² against the energy ρ that the smaller values hold, smooth in log ρ and log σ² (`_smooth`), through
    the nodes of the quadrature rule (`_nodes`). Values are counted along it: dr = dρ / σ². Its end, the whole energy,
    is certain.

    >>> exact = Ritz(torch.tensor([4.0, 1.0]).double(), torch.zeros(2), 1, torch.tensor([4.0, 2.0]).double())
    >>> spread(exact, torch.tensor(1), torch.tensor(6.0).double(), 4).tolist()
    [4.0, 5.0, 6.0, 6.0]
    """
    tiny = torch.finfo(torch.float64).tiny
    known = torch.arange(ritz.squares.shape[-1]) < count[..., None]
    left = (energy - torch.where(known, ritz.squares, 0).sum(-1)).clamp(min=0)[..., None]
    room = (n - count[..., None]).double()
    below, height = _smooth(*_nodes(ritz, known, left, room))
    # Between two points of the curve σ² is a power of ρ; beyond the last one the power goes on.
    fall, drop = -height.diff(dim=-1), below.diff(dim=-1)
    power = torch.where(drop > 0, fall / drop.clamp(min=1e-12), 0)
    power = torch.cat([power, _last(power, drop > 0)], -1)
    held, value = (-below).exp(), height.exp()
    many = held[..., :-1] / value[..., :-1] * drop * _growth((power[..., :-1] - 1) * drop)
    places = torch.nn.functional.pad(many.cumsum(-1), (1, 0))
    least = places[..., -1:] + held[..., -1:] / value[..., -1:].clamp(min=tiny)  # values that this energy takes
    shrink = (room / least.clamp(min=tiny)).clamp(max=1)
    places, value = places * shrink, value / shrink.clamp(min=tiny)
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    beyond = (ranks - count[..., None]).clamp(min=0)
    piece = _pieces(places + count[..., None], n)
    start, rest, size, power = (x.gather(-1, piece) for x in (places, held, value, power))
    part = (beyond - start).clamp(min=0) * size / rest.clamp(min=tiny)
    rest = rest * torch.exp(-part * _slowing(((power - 1) * part).clamp(min=-1)))
    # What the power leaves to values beyond the last one, all values after the last node share.
    after = (beyond - places[..., -1:]).clamp(min=0)
    rest = (rest - rest[..., -1:] * after / after[..., -1:].clamp(min=tiny)).clamp(min=0)
    sums = torch.nn.functional.pad(torch.where(known, ritz.squares, 0).cumsum(-1), (0, n - known.shape[-1]))
    sums = torch.where(beyond > 0, energy[..., None] - rest, sums[..., :n])
    sums = torch.minimum(sums, energy[..., None])
    sums[..., -1] = energy
    return _falling(sums.diff(dim=-1, prepend=torch.zeros_like(left))).cumsum(-1)


def _nodes(
    ritz: Ritz, known: Bool[Tensor, "*b k"], left: Float[Tensor, "*b 1"], room: Float[Tensor, "*b 1"]
) -> tuple[Float[Tensor, "*b g"], Float[Tensor, "*b g"]]:
    """−log ρ and log σ² at the nodes of the quadrature rule, in order; the last one is repeated.

    A sketch of t blocks has t nodes for what it has not resolved: the Ritz values of a block are one node, split by the
    random start, and their geometric mean is its place. Values that are resolved are nodes of their own. Half of a
    node's energy lies below it, but less at the end of the spectrum, at 0: 0.39, 0.46, 0.49 by the rule of Gauss and
    Legendre with six nodes, which is that of a flat density. EDGE is what real heads have (docs/measures.md).
    """
    p, k = ritz.block, known.shape[-1]
    tiny = torch.finfo(torch.float64).tiny
    least = torch.finfo(torch.float32).eps * ritz.squares[..., :1]  # below it a Ritz value is rounding
    squares = torch.maximum(ritz.squares, least).clamp(min=tiny)
    told = torch.where(known, 0, ritz.shares)
    told = told * (left / told.sum(-1, keepdim=True).clamp(min=tiny))
    blocks = -(-k // p)

    def in_blocks(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (blocks * p - k, 0)).unflatten(-1, (blocks, p))

    weight, height, leak, own = map(in_blocks, (told, squares.log(), ritz.leaks / squares, (~known).double()))
    coarse = (leak * own).sum(-1) > UNRESOLVED * own.sum(-1)
    whole = weight.sum(-1)
    mean = (weight * height).sum(-1) / whole.clamp(min=tiny)
    first = torch.arange(p) == 0
    weight = torch.where(coarse[..., None], whole[..., None] * first, weight).flatten(-2)
    height = torch.where(coarse[..., None], mean[..., None], height).flatten(-2)
    edge = torch.tensor([0.5] * blocks + [*reversed(EDGE)], dtype=torch.float64)[-blocks:]
    part = torch.where(coarse, edge, 0.5)[..., None].expand(*coarse.shape, p).flatten(-2)
    below = left - weight.cumsum(-1) + weight * part
    some = (weight > 1e-12 * left) & (below > 1e-12 * left)
    number = some.sum(-1, keepdim=True)
    order = (~some).to(torch.uint8).sort(dim=-1, stable=True).indices
    order = order.gather(-1, torch.minimum(torch.arange(order.shape[-1]), (number - 1).clamp(min=0)))
    below, height = below.gather(-1, order), height.gather(-1, order)
    # Where nothing tells of the rest, its values are taken to be equal.
    below = torch.where(number > 0, below, left)
    height = torch.where(number > 0, height, (left / room.clamp(min=1)).clamp(min=tiny).log())
    below = torch.cat([left, below], -1).clamp(min=tiny)
    return -below.log(), torch.cat([height[..., :1], height], -1)


def _smooth(x: Float[Tensor, "*b g"], y: Float[Tensor, "*b g"]) -> tuple[Float[Tensor, "*b f"], Float[Tensor, "*b f"]]:
    """FINE points from each node to the next, on cubic pieces that rise or fall where the nodes do.

    Slopes are the harmonic means of those on either side (Fritsch and Butland 1984); at the ends, those of the chord.
    """
    width = x.diff(dim=-1).clamp(min=0)
    chord = torch.where(width > 0, y.diff(dim=-1) / width.clamp(min=1e-12), 0)
    one, two = width[..., :-1], width[..., 1:]
    left, right = chord[..., :-1], chord[..., 1:]
    near, far = 2 * two + one, two + 2 * one
    tiny = torch.finfo(torch.float64).tiny
    mean = (near + far) * left * right / (near * right + far * left).abs().clamp(min=tiny) * left.sign()
    slope = torch.where(left * right > 0, mean, 0)
    slope = torch.where(two > 0, slope, left)  # the last node
    slope = torch.cat([chord[..., :1], slope, chord[..., -1:]], -1)
    s = torch.arange(FINE, dtype=torch.float64) / FINE
    x0, y0, y1, d0, d1 = (z[..., None] for z in (x[..., :-1], y[..., :-1], y[..., 1:], slope[..., :-1], slope[..., 1:]))
    h = width[..., None]
    fine = (
        (1 + 2 * s) * (1 - s) ** 2 * y0
        + s * (1 - s) ** 2 * h * d0
        + s * s * (3 - 2 * s) * y1
        + s * s * (s - 1) * h * d1
    )
    along, fine = ((x0 + s * h).flatten(-2), fine.flatten(-2))
    return torch.cat([along, x[..., -1:]], -1), torch.cat([fine, y[..., -1:]], -1)


def _last(x: Float[Tensor, "*b f"], some: Bool[Tensor, "*b f"]) -> Float[Tensor, "*b 1"]:
    """The last marked entry; the first entry where none is marked."""
    at = torch.where(some, torch.arange(some.shape[-1]), 0).amax(-1, keepdim=True)
    return x.gather(-1, at)


def _growth(x: Tensor) -> Tensor:
    """(eˣ − 1) / x"""
    small = x.abs() < 1e-6
    return torch.where(small, 1 + x / 2, torch.expm1(x) / torch.where(small, 1, x))


def _slowing(x: Tensor) -> Tensor:
    """log(1 + x) / x"""
    small = x.abs() < 1e-6
    return torch.where(small, 1 - x / 2, torch.log1p(x) / torch.where(small, 1, x))


def _falling(steps: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """The steps in descending order. They nearly always are; for long rows it is faster to check that than to sort."""
    if steps.shape[-1] > MANY and bool((steps.diff(dim=-1) <= 1e-13 * steps[..., :1]).all()):
        return steps
    return steps.sort(-1, descending=True).values


def _pieces(x: Float[Tensor, "*b f"], n: int) -> Int[Tensor, "*b n"]:
    """For each rank 1 … n the index of the last x ≤ rank, x ascending; 0 where there is none.

    Counts instead of `searchsorted`, which would start all of torch's threads.
    """
    after = x.clamp(max=n + 1).ceil().long().clamp(max=n + 1)  # the first rank that reaches each
    counts = torch.zeros(*x.shape[:-1], n + 2, dtype=torch.long).scatter_add(-1, after, torch.ones_like(after))
    return (counts.cumsum(-1)[..., 1 : n + 1] - 1).clamp(0, x.shape[-1] - 1)
