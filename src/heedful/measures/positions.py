"""Which positional pattern a head follows, and how far.

Raganato et al. (2020, arXiv:2002.10260) found that most heads of a trained encoder learn simple positional patterns.
Each pattern below is held against A by two shares, and its score is the smaller one:

    mass      the part of Σ|a| that lies on the pattern's support
    energy    the part of ‖A‖²_F that the nearest matrix of the pattern's kind explains

kind                                             nearest matrix, and its energy
current previous next left right start end last  a multiple of one matrix P, as `FixedPattern` gives it:
uniform induction                                ⟨A, P⟩² / ‖A‖²‖P‖², over the rows where P is defined
band                                             one number for each offset −w…w: Σ_o (Σ_i a_{i,i+o})² / N_o
window, sink                                     A itself inside ±w, on the first tokens: Σ_inside a²
stripes                                          one number for each of a few columns: Σ_j (Σ_i a_ij)² / N_j

⟨A, P⟩ = Σ_i a_i·p_i needs no matrix: rows of the shifts are single weights, those of the contexts are
Σ_{j ≤ i−2} a_ij (j+1)³ / Σ_{s<i} s³, and the sums Σ s³, Σ s⁶ have closed forms. All of it comes from one pass of row
statistics; the columns' sums from one product Aᵀ1.

A support that holds a large part of what is visible explains much by chance. So the shares of the last four kinds are
corrected, (x − c) / (1 − c), where c is what attention spread evenly over the visible keys would have there.

Of the kinds whose score reaches the threshold the one with the least freedom names the head: first a pattern with
nothing to fit, or a sink; then a band; then a window; then stripes. If none does, the head follows its *content*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from heedful.kernels.row_statistics.sums import Band, Request, RowSums
from heedful.measures.places import Places
from heedful.measures.render import Measurement, altair, indices
from heedful.measures.rows import check_count, check_operator, checked_sums
from heedful.operator import AttentionOperator
from heedful.segments import Layout, take_tokens
from heedful.shapes import Float, Int, Tensor, broadcast_shapes

FIXED = ("current", "previous", "next", "left", "right", "start", "end", "last", "uniform")
LEVELS = ((*FIXED, "sink", "induction"), ("band",), ("window",), ("stripes",))
"""Kinds by their freedom, the least first."""
CONTAINS = {
    "band": {"current", "previous", "next"},
    "window": {"current", "previous", "next", "band"},
    "stripes": {"sink", "last"},
}
"""A kind that contains another explains at least as much, and is no rival of it."""
CONTENT = "content"
LEAST_COVERAGE = 0.1  # of the rows must have a target, or a pattern says nothing about the head


@dataclass(frozen=True, eq=False, repr=False)
class PositionalPattern(Measurement):
    """Shares and scores of every kind for every head; see `positional_pattern`.

    `index` points into `names`; the last name is "content", whose score is what the best kind leaves unexplained.
    """

    names: tuple[str, ...]
    mass: Float[Tensor, "*b kinds"]
    energy: Float[Tensor, "*b kinds"]
    scores: Float[Tensor, "*b kinds"]
    index: Int[Tensor, "*b"]
    score: Float[Tensor, "*b"]
    margin: Float[Tensor, "*b"]
    threshold: float

    @property
    def labels(self) -> Any:
        """The name of each head's pattern, in lists nested like the batch axes; a string for a single head."""
        return _named(self.index.tolist(), self.names)

    def of(self, name: str) -> Float[Tensor, "*b"]:
        """The score of one kind."""
        if name not in self.names[:-1]:
            raise ValueError(f"name: expected one of {', '.join(self.names[:-1])}, got {name!r}.")
        return self.scores[..., self.names.index(name)]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"labels": self.labels}

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """As any measurement's, with the names of the pattern and of the runner-up among all kinds."""
        head, rows = super().cells()
        at = 1 if self.index.ndim else 0
        own = [self.names[i] for i in self.index.reshape(-1).tolist()]
        second = [self.names[i] for i in self._runner_up().reshape(-1).tolist()]
        rows = [
            [*row[:at], name, *row[at:-1], other, row[-1]] for row, name, other in zip(rows, own, second, strict=True)
        ]
        return [*head[:at], "pattern", *head[at:-1], "next best", head[-1]], rows

    def columns(self) -> dict[str, Tensor]:
        best = self._runner_up()[..., None]
        return {"score": self.score, "margin": self.margin, "its score": self.scores.gather(-1, best)[..., 0]}

    def caption(self) -> str:
        return f"positional patterns that explain {self.threshold:g} or more of a head"

    def plot(self):
        """The scores, a row a head and a column a kind (needs altair)."""
        alt = altair()
        kinds, flat = self.names[:-1], self.scores.reshape(-1, self.scores.shape[-1]).cpu().tolist()
        rows = [
            {"head": head or "0", "pattern": kind, "score": value}
            for head, values in zip(indices(self.index.shape), flat, strict=True)
            for kind, value in zip(kinds, values, strict=True)
        ]
        return (
            alt.Chart(alt.Data(values=rows))
            .mark_rect()
            .encode(
                x=alt.X("pattern:N", sort=list(kinds)),
                y=alt.Y("head:N", sort=None),
                color=alt.Color("score:Q", scale=alt.Scale(domain=[0, 1])),
            )
        )

    def _runner_up(self) -> Int[Tensor, "*b"]:
        """The kind with the largest score but for the head's own."""
        kinds = torch.arange(self.scores.shape[-1], device=self.scores.device)
        return self.scores.masked_fill(kinds == self.index[..., None], -1).argmax(-1)


class Shares(NamedTuple):
    """What one kind explains of each head."""

    mass: Float[Tensor, "*b"]
    energy: Float[Tensor, "*b"]
    score: Float[Tensor, "*b"]


def positional_pattern(
    op: AttentionOperator,
    tokens: Int[Tensor, "*#b m"] | None = None,
    *,
    width: int = 8,
    sinks: int = 4,
    stripes: int = 8,
    threshold: float = 0.5,
) -> PositionalPattern:
    """Which positional pattern each head follows, with the scores of all of them.

    >>> import torch, heedful as h
    >>> q, k = torch.randn(2, 3, 100, 16).unbind()
    >>> heads = h.Mixture([h.FixedPattern("previous"), h.FixedPattern("left"), h.Softmax(h.Full(), scale=1.0)])
    >>> h.positional_pattern(heads.operator(q, k)).labels
    ['previous', 'left', 'content']

    tokens      ids of the keys' tokens, which induction needs: mass on the token that followed the previous
                occurrence of the current one (Olsson et al. 2022, arXiv:2209.11895)
    width       of bands and windows: so many tokens before a query, and as many after it
    sinks       how many of the first tokens are sinks
    stripes     how many columns may stand out, in each segment
    threshold   the score from which on a kind explains a head
    """
    check_operator(op)
    check_count("width", width, least=1)
    check_count("sinks", sinks, least=1)
    check_count("stripes", stripes, least=1)
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold: expected a score in (0, 1], got {threshold}.")
    if tokens is not None:
        _check_tokens(tokens, op)
    asked = Asked(op.layout, tokens, width, sinks)
    sums = checked_sums(op, asked.request())
    columns = op.mT @ torch.ones(op.shape[-2], dtype=op.dtype, device=op.device)
    return pattern_of(asked, sums, columns, stripes, threshold)


def pattern_of(
    asked: Asked, sums: RowSums, columns: Float[Tensor, "*b m"], stripes: int = 8, threshold: float = 0.5
) -> PositionalPattern:
    """The same from sums over the rows, which may have been taken with others, and the sums Aᵀ1 of the columns."""
    found = _Head(asked, sums, columns).shares(stripes)
    names = tuple(found)
    mass, energy, scores = (torch.stack(column, -1) for column in zip(*found.values(), strict=True))
    return _labelled(names, mass, energy, scores, threshold)


class Asked:
    """What the kinds ask of the rows, and all that they know without the weights.

    targets   keys by name: "offset" (−width … width), "first" (the sinks), "last", "induction" where there are tokens
    cubes     ((j + 1) / L)³ and ((L − j) / L)³ of every key, L the length of its segment
    """

    bands: tuple[Band, ...] = ((None, -2), (2, None))
    """With the offsets −1, 0, 1, which are targets, they are the whole row."""

    def __init__(self, layout: Layout, tokens: Int[Tensor, "*#b m"] | None = None, width: int = 8, sinks: int = 4):
        self.layout, self.sinks = layout, sinks
        self.places = places = Places(layout)
        self.offsets = tuple(range(-width, width + 1))
        groups = {
            "offset": places.at_offset(self.offsets),
            "first": places.first(sinks),
            "last": places.last(1),
        }
        if tokens is not None:
            groups["induction"] = places.after_previous(tokens)
        lead = broadcast_shapes(*(x.shape[:-1] for x in groups.values()))
        self.targets = {name: x.expand(*lead, -1) for name, x in groups.items()}
        own = Places(Layout(layout.key_ids, layout.key_ids, layout.key_positions, layout.key_positions))
        self.cubes = _cubes(layout.key_positions, own.length)
        self._key_lengths = own.length

    def request(
        self,
        columns: Float[Tensor, "*s m x"] | None = None,
        into: Float[Tensor, "*b n m"] | None = None,
        scratch: dict[str, Tensor] | None = None,
    ) -> Request:
        """One pass over the rows, which may multiply the bands by columns of others too, and leave the matrix."""
        wanted = self.cubes if columns is None else torch.cat([self.cubes, columns], -1)
        targets = torch.cat(list(self.targets.values()), -1)
        return Request(targets, self.bands, wanted, into, places=False, scratch=scratch)

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """What a pass found at the targets, (*b, n, t), by their names."""
        return dict(zip(self.targets, x.split([keys.shape[-1] for keys in self.targets.values()], -1), strict=True))

    @cached_property
    def viewers(self) -> tuple[Int[Tensor, "*s m"], Int[Tensor, "*s m"]]:
        """How many queries there are in each key's segment, and how many of them at the key or after it."""
        ids, keys, i, j = self.layout
        length = Places(Layout(keys, ids, j, i)).length
        return length, torch.minimum(length, self._key_lengths - j)


class _Head:
    """What the kinds read off one pass over the rows. All sums over rows are in float64."""

    def __init__(self, asked: Asked, sums: RowSums, columns: Tensor):
        self.asked, self.columns = asked, columns.double()
        self.offsets, self.targets, self.sinks = asked.offsets, asked.targets, asked.sinks
        wide = {name: x.double() if x.is_floating_point() else x for name, x in sums.tensors().items()}
        self.sums = RowSums(**wide)
        self.at, self.seen = asked.split(self.sums.at), asked.split(sums.seen)
        self.real = self.sums.mass > 0
        self.i, self.length = (x.double() for x in (asked.places.position, asked.places.length))
        self.mass, self.dot = self._parts()

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Σ|a| and Σ a X over the keys well before each query, well after it, and −1 … 1 from it; X the cubes."""
        middle = len(self.offsets) // 2
        near = slice(middle - 1, middle + 2)
        weights, keys = self.at["offset"][..., near], self.targets["offset"][..., near].clamp(min=0)
        cubes = take_tokens(self.asked.cubes, keys.flatten(-2)).unflatten(-2, keys.shape[-2:])
        mass, dot = weights.abs().sum(-1), (weights[..., None] * cubes).sum(-2)
        bands = self.sums.band_dot[..., : cubes.shape[-1]]
        return torch.cat([self.sums.band_mass, mass[..., None]], -1), torch.cat([bands, dot[..., None, :]], -2)

    def shares(self, stripes: int) -> dict[str, Shares]:
        middle = len(self.offsets) // 2
        found = {
            "current": self._single("offset", middle),
            "previous": self._single("offset", middle - 1),
            "next": self._single("offset", middle + 1),
            "left": self._context([0], 0, self.i - 1, "first"),
            "right": self._context([1], 1, self.length - self.i - 2, "last"),
            "start": self._context([0, 1, 2], 1, self.length, "first"),
            "end": self._context([0, 1, 2], 0, self.length, "last"),
            "last": self._single("last", 0),
            "uniform": self._uniform(),
            "sink": self._sink(),
        }
        if "induction" in self.targets:
            found["induction"] = self._single("induction", 0)
        return found | {"band": self._band(), "window": self._window(), "stripes": self._stripes(stripes)}

    def _fixed(self, dot: Tensor, norm: Tensor, mass: Tensor, defined: Tensor) -> Shares:
        """A multiple of one matrix P: ⟨A, P⟩² / ‖A‖²‖P‖² over the rows where P is defined."""
        defined = defined & self.real
        dot, norm, mass, whole, square = (
            torch.where(defined, x, 0).sum(-1) for x in (dot, norm, mass, self.sums.mass, self.sums.square)
        )
        energy = _share(dot.clamp(min=0).square(), norm * square)
        mass = _share(mass, whole)
        enough = defined.sum(-1) >= LEAST_COVERAGE * self.real.sum(-1)
        return Shares(mass, energy, torch.minimum(mass, energy) * enough)

    def _single(self, name: str, which: int) -> Shares:
        """One key for each query."""
        weight = self.at[name][..., which]
        return self._fixed(weight, torch.ones_like(weight), weight.abs(), self.targets[name][..., which] >= 0)

    def _context(self, bands: list[int], column: int, terms: Tensor, edge: str) -> Shares:
        """Weights s³ over `terms` keys; where there are none, all of it on the token at the edge."""
        some = terms >= 1
        terms = torch.where(some, terms, 1)
        cubes = _sum_of_cubes(terms) / self.length.clamp(min=1) ** 3  # the columns hold (s / L)³
        at_edge = self.at[edge][..., 0]
        dot = torch.where(some, self.dot[..., bands, column].sum(-1) / cubes, at_edge)
        norm = torch.where(some, _sum_of_sixth_powers(terms) / _sum_of_cubes(terms) ** 2, 1)
        mass = torch.where(some, self.mass[..., bands].sum(-1), at_edge.abs())
        return self._fixed(dot, norm.expand_as(dot), mass, self.real)

    def _uniform(self) -> Shares:
        count = self.sums.count.clamp(min=1)
        return self._fixed(self.sums.total / count, 1 / count, self.sums.mass, self.real)

    def _support(self, mass: Tensor, energy: Tensor, held: Tensor) -> Shares:
        """Shares of sums over a support that holds `held` of each row's visible keys."""
        part = (held / self.sums.count.clamp(min=1)).clamp(max=1)
        whole, square = self.sums.mass, self.sums.square
        mass, energy = _share(mass, whole.sum(-1)), _share(energy, square.sum(-1))
        by_chance = _share((whole * part).sum(-1), whole.sum(-1)), _share((square * part).sum(-1), square.sum(-1))
        corrected = [_beyond(x, c) for x, c in zip((mass, energy), by_chance, strict=True)]
        return Shares(mass, energy, torch.minimum(*corrected))

    def _sink(self) -> Shares:
        first = self.at["first"]
        held = torch.full_like(self.sums.count, self.sinks)
        return self._support(first.abs().sum((-2, -1)), first.square().sum((-2, -1)), held)

    def _window(self) -> Shares:
        inside = self.at["offset"]
        return self._support(inside.abs().sum((-2, -1)), inside.square().sum((-2, -1)), self.seen["offset"].sum(-1))

    def _band(self) -> Shares:
        inside = self.at["offset"]
        rows = ((self.targets["offset"] >= 0) & self.real[..., None]).sum(-2)
        energy = (inside.sum(-2).square() / rows.clamp(min=1)).sum(-1)
        return self._support(inside.abs().sum((-2, -1)), energy, self.seen["offset"].sum(-1))

    def _stripes(self, stripes: int) -> Shares:
        layout, columns = self.asked.layout, self.columns
        energy = columns.square() / self._viewers().clamp(min=1)
        segments = ((layout.key_positions == 0) & (layout.key_ids >= 0)).sum(-1, keepdim=True)
        order = energy.argsort(dim=-1, descending=True)
        chosen = torch.arange(columns.shape[-1], device=columns.device) < stripes * segments
        mass, energy = ((x.gather(-1, order) * chosen).sum(-1) for x in (columns.abs(), energy))
        return self._support(mass, energy, torch.full_like(self.sums.count, stripes))

    def _viewers(self) -> Tensor:
        """How many queries see each key: all of its segment, or the later ones where the head never looks ahead."""
        ahead = self.at["offset"][..., len(self.offsets) // 2 + 1].abs() + self.sums.band_mass[..., 1]
        every, later = self.asked.viewers
        return torch.where(ahead.sum(-1, keepdim=True) > 0, every, later)


def _labelled(
    names: tuple[str, ...], mass: Tensor, energy: Tensor, scores: Tensor, threshold: float
) -> PositionalPattern:
    index = torch.full(scores.shape[:-1], len(names), device=scores.device)
    for level in reversed(LEVELS):
        members = torch.tensor([at for at, name in enumerate(names) if name in level], device=scores.device)
        best, which = scores[..., members].max(-1)
        index = torch.where(best >= threshold, members[which], index)
    best = scores.amax(-1)
    content = index == len(names)
    rivals = torch.tensor([_is_rival(one, other) for one in names for other in names], device=scores.device)
    own = index.clamp(max=len(names) - 1)
    against = scores.masked_fill(~rivals.view(len(names), -1)[own], 0).amax(-1)
    score = torch.where(content, 1 - best, scores.gather(-1, own[..., None])[..., 0])
    margin = score - torch.where(content, best, against)
    return PositionalPattern((*names, CONTENT), mass, energy, scores, index, score, margin, threshold)


def _is_rival(one: str, other: str) -> bool:
    return one != other and one not in CONTAINS.get(other, ())


def _named(index: Any, names: tuple[str, ...]) -> Any:
    return [_named(part, names) for part in index] if isinstance(index, list) else names[index]


def _cubes(where: Int[Tensor, "*s m"], length: Int[Tensor, "*s m"]) -> Float[Tensor, "*s m 2"]:
    length = length.double().clamp(min=1)
    return torch.stack([(where + 1) / length, ((length - where) / length).clamp(min=0)], -1) ** 3


def _sum_of_cubes(x: Tensor) -> Tensor:
    """1³ + … + x³."""
    return (x * (x + 1) / 2) ** 2


def _sum_of_sixth_powers(x: Tensor) -> Tensor:
    """1⁶ + … + x⁶ (Faulhaber)."""
    return x * (x + 1) * (2 * x + 1) * (3 * x**4 + 6 * x**3 - 3 * x + 1) / 42


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, at most 1 whatever the rounding; 0 of nothing."""
    return (part / torch.where(whole > 0, whole, 1)).clamp(0, 1)


def _beyond(share: Tensor, chance: Tensor) -> Tensor:
    """(share − chance) / (1 − chance), 0 where chance explains all."""
    room = 1 - chance
    return torch.where(room > 1e-6, (share - chance) / room.clamp(min=1e-6), 0).clamp(0, 1)


def _check_tokens(tokens: Tensor, op: AttentionOperator) -> None:
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim < 1:
        given = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens: expected an integer tensor (*batch, m) of token ids, got {given}.")
    *batch, n, m = op.shape
    try:
        fits = broadcast_shapes(tokens.shape[:-1], tuple(batch)) == torch.Size(batch)
    except RuntimeError:
        fits = False
    if not fits or tokens.shape[-1] != m:
        raise ValueError(
            f"tokens: shape {tuple(tokens.shape)}, expected one id for each of the {m} keys, (*batch, {m}) with batch "
            f"axes that broadcast to {tuple(batch)}. Likely cause: a (B, m) tensor for (B, H) heads: tokens[:, None]."
        )
    if n > m:
        raise ValueError(
            f"tokens: {n} queries for {m} keys, expected n ≤ m: induction is about one sequence. Likely cause: "
            "cross-attention, which has no tokens in common."
        )
