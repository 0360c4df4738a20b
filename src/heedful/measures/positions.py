"""The positional pattern that a head follows, and how closely.

Raganato et al. (2020, arXiv:2002.10260) found that most heads of a trained encoder learn simple positional patterns.
Each pattern below is compared with A by two shares, and its score is the smaller one:

    mass      the part of Σ|a| that lies on the pattern's support
    energy    the part of ‖A‖²_F that the nearest matrix of the pattern's kind explains

kind                                             nearest matrix, and its energy
current previous next left right start end last  a multiple of one matrix P, as `FixedPattern` gives it:
uniform induction                                ⟨A, P⟩² / ‖A‖²‖P‖², over the rows where P is defined
band                                             one number for each offset −w…w: Σ_o (Σ_i a_{i,i+o})² / N_o
window, sink                                     A itself inside ±w, on the first tokens: Σ_inside a²
stripes                                          one number for each of a few columns: Σ_j (Σ_i a_ij)² / N_j

⟨A, P⟩ = Σ_i a_i·p_i needs no matrix: for shifts, a_i·p_i is a single weight; for contexts, it is
Σ_{j ≤ i−2} a_ij (j+1)³ / Σ_{s<i} s³, and the sums Σ s³, Σ s⁶ have closed forms. One pass of row statistics computes all
of this, and one product Aᵀ1 the column sums.

A support that contains a large part of the visible keys explains much by chance. So the shares of the last four kinds
are corrected, (x − c) / (1 − c), where c is the share of attention that is uniform over the visible keys.

Among the kinds whose score reaches the threshold, the one with the least freedom names the head: first a pattern
without fitted numbers, or a sink; then a band; then a window; then stripes. If none does, the head follows *content*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from heedful.kernels.row_statistics.sums import Band, Receiver, Request, RowSums
from heedful.measures.key_index import Places
from heedful.measures.render import Measurement, altair, indices
from heedful.measures.rows import check_count, check_operator, checked_sums
from heedful.operator import AttentionOperator
from heedful.segments import Layout, take_tokens
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes

FIXED = ("current", "previous", "next", "left", "right", "start", "end", "last", "uniform")
LEVELS = ((*FIXED, "sink", "induction"), ("band",), ("window",), ("stripes",))
"""Kinds by their number of fitted parameters, fewest first."""
CONTAINS = {
    "band": {"current", "previous", "next"},
    "window": {"current", "previous", "next", "band"},
    "stripes": {"sink", "last"},
}
"""The kinds that each kind contains. It explains at least as much as these, so it does not compete with them."""
CONTENT = "content"
LEAST_COVERAGE = 0.1  # smallest share of rows with a target for which a pattern is scored


@dataclass(frozen=True, eq=False, repr=False)
class PositionalPattern(Measurement):
    """Shares and scores of every kind for every head; see `positional_pattern`.

    `index` points into `names`. The last name is "content"; its score is 1 minus the score of the best kind.
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
        """Return headings and rows as in other measurements, with the names of the pattern and of the runner-up."""
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
        """Plot the scores, one row per head and one column per kind (needs altair)."""
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
        """The kind with the largest score, except the head's own kind."""
        kinds = torch.arange(self.scores.shape[-1], device=self.scores.device)
        return self.scores.masked_fill(kinds == self.index[..., None], -1).argmax(-1)


class Shares(NamedTuple):
    """The shares of each head that one kind explains."""

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
    """Return the positional pattern that each head follows, and the scores of all kinds.

    >>> import torch, heedful as h
    >>> q, k = torch.randn(2, 3, 100, 16).unbind()
    >>> heads = h.Mixture([h.FixedPattern("previous"), h.FixedPattern("left"), h.Softmax(h.Full(), scale=1.0)])
    >>> h.positional_pattern(heads.operator(q, k)).labels
    ['previous', 'left', 'content']

    tokens      token ids of the keys, needed for induction: mass on the token that followed the previous occurrence of
                the current one (Olsson et al. 2022, arXiv:2209.11895)
    width       width of bands and windows: this many tokens before a query, and as many after it
    sinks       number of first tokens that are sinks
    stripes     number of columns of the kind "stripes", per segment
    threshold   smallest score at which a kind explains a head
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
    """Return `positional_pattern` from row sums, which a shared pass may have computed, and the column sums Aᵀ1."""
    found = _Head(asked, sums, columns).shares(stripes)
    names = tuple(found)
    mass, energy, scores = (torch.stack(column, -1) for column in zip(*found.values(), strict=True))
    return _labelled(names, mass, energy, scores, threshold)


class Asked:
    """The row sums that the kinds need, and everything that does not depend on the weights.

    targets   keys by name: "offset" (−width … width), "first" (the sinks), "last", and "induction" if there are tokens
    cubes     ((j + 1) / L)³ and ((L − j) / L)³ of every key, L the length of its segment
    near      places of the offsets −1, 0, 1 among all offsets
    """

    bands: tuple[Band, ...] = ((None, -2), (2, None))
    """Offsets ≤ −2 and ≥ 2. Together with the offsets −1, 0, 1, which are targets, they cover the row."""

    def __init__(self, layout: Layout, tokens: Int[Tensor, "*#b m"] | None = None, width: int = 8, sinks: int = 4):
        self.layout, self.tokens, self.sinks = layout, tokens, sinks
        self.places = places = Places(layout)
        self.offsets = tuple(range(-width, width + 1))
        self.near = slice(width - 1, width + 2)
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
        into: Float[Tensor, "*b n m"] | Receiver | None = None,
        down: Float[Tensor, "*b m"] | None = None,
        scratch: dict[str, Any] | None = None,
    ) -> Request:
        """Return the request of one pass over the rows; it may add columns of other measures and write the matrix."""
        wanted = self.cubes if columns is None else torch.cat([self.cubes, columns], -1)
        targets = torch.cat(list(self.targets.values()), -1)
        return Request(targets, self.bands, wanted, into, down, places=False, scratch=scratch)

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """Split the results at the targets, (*b, n, t), by name."""
        return dict(zip(self.targets, x.split([keys.shape[-1] for keys in self.targets.values()], -1), strict=True))

    @cached_property
    def near_cubes(self) -> Float[Tensor, "*s n 3 2"]:
        """The cubes of the keys at offsets −1, 0, 1 from each query."""
        keys = self.targets["offset"][..., self.near].clamp(min=0)
        return take_tokens(self.cubes, keys.flatten(-2)).unflatten(-2, keys.shape[-2:])

    @cached_property
    def contexts(self) -> dict[str, Context]:
        """The contexts of the kinds whose weights are cubes, by kind."""
        i, length = self.places.position.double(), self.places.length.double()
        return {
            "left": _context(0, 0, i - 1, "first", length),
            "right": _context(1, 1, length - i - 2, "last", length),
            "start": _context(2, 1, length, "first", length),
            "end": _context(2, 0, length, "last", length),
        }

    @cached_property
    def viewers(self) -> tuple[Int[Tensor, "*s m"], Int[Tensor, "*s m"]]:
        """Number of queries in each key's segment, and number of those at the key's position or after it."""
        ids, keys, i, j = self.layout
        length = Places(Layout(keys, ids, j, i)).length
        return length, torch.minimum(length, self._key_lengths - j)


class Context(NamedTuple):
    """Weights s³, s = 1, 2, …, on a part of a row; if this part has no key, all weight on the token at the edge.

    part     0: keys at least two before the query; 1: at least two after it; 2: all keys
    column   column of the cubes
    cubes    Σ s³, divided by L³ like the columns
    norm     Σ s⁶ / (Σ s³)²
    """

    part: int
    column: int
    edge: str
    some: Bool[Tensor, "*s n"]
    cubes: Float[Tensor, "*s n"]
    norm: Float[Tensor, "*s n"]


def _context(part: int, column: int, terms: Tensor, edge: str, length: Tensor) -> Context:
    some = terms >= 1
    terms = torch.where(some, terms, 1)
    sums = _sum_of_cubes(terms)
    norm = torch.where(some, _sum_of_sixth_powers(terms) / sums**2, 1)
    return Context(part, column, edge, some, sums / length.clamp(min=1) ** 3, norm)


class Fixed(NamedTuple):
    """A matrix P, by rows: a_i·p_i, |p_i|², Σ|a_i| on the support of p_i, and a mask of the rows where P is defined."""

    dot: Float[Tensor, "*b n"]
    norm: Float[Tensor, "*b n"]
    mass: Float[Tensor, "*b n"]
    defined: Bool[Tensor, "*b n"]


class _Head:
    """Computes the shares of all kinds from one pass over the rows. All sums over rows are in float64."""

    def __init__(self, asked: Asked, sums: RowSums, columns: Tensor):
        self.asked, self.columns = asked, columns.double()
        self.offsets, self.targets, self.sinks = asked.offsets, asked.targets, asked.sinks
        self.sums = sums
        self.whole, self.square = sums.mass.double(), sums.square.double()
        self.at, self.seen = asked.split(sums.at), asked.split(sums.seen)
        self.real = sums.mass > 0
        self.mass, self.dot = self._parts()

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Σ|a| and Σ a X over the keys of each `Context.part`; X are the cubes."""
        weights, cubes = self.at["offset"][..., self.asked.near].double(), self.asked.near_cubes
        mass = weights.abs().sum(-1)
        dot = sum(weights[..., at, None] * cubes[..., at, :] for at in range(3))  # `sum` over an axis of size 3 is slow
        bands = self.sums.band_dot[..., : cubes.shape[-1]].double()
        masses = self.sums.band_mass.double()
        whole = masses.sum(-1) + mass, bands.sum(-2) + dot
        return torch.cat([masses, whole[0][..., None]], -1), torch.cat([bands, whole[1][..., None, :]], -2)

    def shares(self, stripes: int) -> dict[str, Shares]:
        middle = len(self.offsets) // 2
        fixed = {
            "current": self._single("offset", middle),
            "previous": self._single("offset", middle - 1),
            "next": self._single("offset", middle + 1),
            **{name: self._cubic(context) for name, context in self.asked.contexts.items()},
            "last": self._single("last", 0),
            "uniform": self._uniform(),
        }
        if "induction" in self.targets:
            fixed["induction"] = self._single("induction", 0)
        found = self._fixed(fixed) | {
            "sink": self._sink(),
            "band": self._band(),
            "window": self._window(),
            "stripes": self._stripes(stripes),
        }
        return {name: found[name] for level in LEVELS for name in level if name in found}

    def _fixed(self, kinds: dict[str, Fixed]) -> dict[str, Shares]:
        """Return the shares of multiples of one matrix P: ⟨A, P⟩² / ‖A‖²‖P‖² over the rows where P is defined."""
        sums = []
        for kind in kinds.values():
            rows = (kind.defined & self.real).double()
            terms = (kind.dot, kind.norm.expand_as(rows), kind.mass, self.whole, self.square)
            sums.append([rows.sum(-1), *(torch.linalg.vecdot(x, rows) for x in terms)])
        count, dot, norm, mass, whole, square = (torch.stack(column, -1) for column in zip(*sums, strict=True))
        energy = _share(dot.clamp(min=0).square(), norm * square)
        mass = _share(mass, whole)
        enough = count >= LEAST_COVERAGE * self.real.sum(-1)[..., None]
        found = (x.unbind(-1) for x in (mass, energy, torch.minimum(mass, energy) * enough))
        return {name: Shares(*shares) for name, *shares in zip(kinds, *found, strict=True)}

    def _single(self, name: str, which: int) -> Fixed:
        """Return the P with one key per query."""
        weight = self.at[name][..., which].double()
        return Fixed(weight, torch.ones_like(weight), weight.abs(), self.targets[name][..., which] >= 0)

    def _cubic(self, context: Context) -> Fixed:
        at_edge = self.at[context.edge][..., 0].double()
        mass, dot = self.mass[..., context.part], self.dot[..., context.part, context.column]
        dot = torch.where(context.some, dot / context.cubes, at_edge)
        mass = torch.where(context.some, mass, at_edge.abs())
        return Fixed(dot, context.norm, mass, self.real)

    def _uniform(self) -> Fixed:
        count = self.sums.count.clamp(min=1)
        return Fixed(self.sums.total.double() / count, 1 / count.double(), self.whole, self.real)

    def _support(self, mass: Tensor, energy: Tensor, held: Tensor) -> Shares:
        """Return the shares of a support that contains `held` of each row's visible keys."""
        part = (held / self.sums.count.clamp(min=1)).clamp(max=1)
        whole, square = self.whole, self.square
        mass, energy = _share(mass, whole.sum(-1)), _share(energy, square.sum(-1))
        by_chance = _share((whole * part).sum(-1), whole.sum(-1)), _share((square * part).sum(-1), square.sum(-1))
        corrected = [_beyond(x, c) for x, c in zip((mass, energy), by_chance, strict=True)]
        return Shares(mass, energy, torch.minimum(*corrected))

    def _sink(self) -> Shares:
        first = self.at["first"]
        held = torch.full_like(self.sums.count, self.sinks)
        return self._support(_total(first.abs()), _total(first.square()), held)

    def _near(self, energy: Tensor) -> Shares:
        """Return the shares of the keys within ±width."""
        return self._support(_total(self.at["offset"].abs()), energy, self.seen["offset"].sum(-1))

    def _window(self) -> Shares:
        return self._near(_total(self.at["offset"].square()))

    def _band(self) -> Shares:
        exist = (self.targets["offset"] >= 0).double()
        rows = (self.real[..., None, :].double() @ exist)[..., 0, :]
        along = self.at["offset"].sum(-2, dtype=torch.float64)
        return self._near((along.square() / rows.clamp(min=1)).sum(-1))

    def _stripes(self, stripes: int) -> Shares:
        layout, columns = self.asked.layout, self.columns
        energy = columns.square() / self._viewers().clamp(min=1)
        segments = ((layout.key_positions == 0) & (layout.key_ids >= 0)).sum(-1, keepdim=True)
        order = energy.argsort(dim=-1, descending=True)
        chosen = torch.arange(columns.shape[-1], device=columns.device) < stripes * segments
        mass, energy = ((x.gather(-1, order) * chosen).sum(-1) for x in (columns.abs(), energy))
        return self._support(mass, energy, torch.full_like(self.sums.count, stripes))

    def _viewers(self) -> Tensor:
        """Number of queries that see each key: all of its segment or, if the head is causal, the later ones."""
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
    own = index.clamp(max=len(names) - 1)
    against = scores.masked_fill(~_rivals(names).to(scores.device)[own], 0).amax(-1)
    score = torch.where(content, 1 - best, scores.gather(-1, own[..., None])[..., 0])
    margin = score - torch.where(content, best, against)
    return PositionalPattern((*names, CONTENT), mass, energy, scores, index, score, margin, threshold)


@lru_cache(maxsize=4)
def _rivals(names: tuple[str, ...]) -> Bool[Tensor, "k k"]:
    """Return a mask of the kinds that compete with each kind: all but itself and those that contain it."""
    return torch.tensor([[one != other and one not in CONTAINS.get(other, ()) for other in names] for one in names])


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


def _total(x: Tensor) -> Tensor:
    return x.sum((-2, -1), dtype=torch.float64)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, clipped at 1 against rounding; 0 if whole is 0."""
    return (part / torch.where(whole > 0, whole, 1)).clamp(0, 1)


def _beyond(share: Tensor, chance: Tensor) -> Tensor:
    """Return (share − chance) / (1 − chance); 0 if chance explains everything."""
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
