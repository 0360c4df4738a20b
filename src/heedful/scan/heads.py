"""Everything that a scan records about one head on one text.

For one text a call may have several items in its batch: windows of an image, channels of a series, frames of a film.
Every item is measured; the record holds the mean over items (`over_items`).

One pass over the rows computes sums, weights at offsets and at the first tokens, distances, and everything else that
the positional patterns need. It also stores the matrices if materialising them pays off. Products with them give the
spectra. Heads are measured in groups that fit in memory together; on a CPU, heads that are not materialised are
measured one by one.

position share    energy of the nearest matrix that is constant along each offset −8 … 8 and on the first key, and zero
                  elsewhere:  (Σ_o (Σ_i a_{i,i+o})² / N_o + (Σ_i a_{i,first})² / N_first) / ‖A‖²_F;  an entry that is
                  on both counts for the first key
distance          mean over queries of Σ_j a_ij |i − j| / Σ_j a_ij
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any

import torch

from heedful.column_slabs import Trimmed
from heedful.hf.calls import Call
from heedful.kernels.row_statistics.sums import RowSums
from heedful.linalg import Matrices
from heedful.measures import (
    Spectrum,
    decay_exponent,
    effective_rank,
    energy_share,
    entropic_rank,
    spectrum,
    stable_rank,
)
from heedful.measures.heads import Room, matrix_of
from heedful.measures.positions import Asked, PositionalPattern, pattern_of
from heedful.measures.profile import BLOCK
from heedful.measures.rows import check_sums, over_rows
from heedful.measures.search import FORMED, SearchOptions, block_of, pays_to_form
from heedful.operator import AttentionOperator
from heedful.scan.baseline import BUDGET, Baselines, RandomHead, logit_spreads
from heedful.segments import Layout, visible
from heedful.shapes import Tensor
from heedful.store.scans import OFFSETS

Matrix = AttentionOperator | Matrices
"""The weights of some heads: as an operator, as a dense tensor, or in slabs."""

TOGETHER = 3 << 22  # entries of the heads materialised together on a CPU: 48 MiB in float32
TOGETHER_ON_GPU = 1 << 28  # the same on a GPU, matrices or sketches: 1 GiB; short lengths are bound by launches
SKETCH_COLUMNS = 416  # columns of a sketch on a GPU, on each side of A: 13 blocks of 64 for both sides
REACH = 8  # offsets on either side that count as positional
FIRST = 4  # tokens that count as the first ones
CERTIFIED = 0.01  # a singular value is certified if its bounds are this close


@dataclass(frozen=True)
class Measuring:
    """How heads are measured.

    values   singular values to record
    budget   products to spend on one head's spectrum, in blocks of 16; wider blocks get the same number of blocks.
             A larger budget narrows the bounds of the rank, which are deterministic (docs/measures.md)
    """

    seed: int = 0
    values: int = 32
    budget: int = BUDGET

    def spectrum(self, op: Matrix, k: int, energy: Tensor | None = None) -> Spectrum:
        """The first k singular values, and bounds for the effective ranks at .9 and .95."""
        budget = self.budget * block_of(op) // BLOCK
        search = SearchOptions(budget, failure=0, seed=self.seed)
        return spectrum(op, k, tau=(0.9, 0.95), energy=energy, search=search)


class Kept:
    """Cache from pass to pass: scratch buffers, and the requested row statistics if layout and tokens are the same."""

    def __init__(self) -> None:
        self.scratch: dict[str, Any] = {}
        self._asked: Asked | None = None

    def asked(self, layout: Layout, tokens: Tensor | None) -> Asked:
        last = self._asked
        if last is None or not _same(last, layout, tokens):
            self._asked = last = Asked(layout, tokens, REACH, FIRST)
        return last


def _same(asked: Asked, layout: Layout, tokens: Tensor | None) -> bool:
    known = asked.tokens
    same = tokens is known if tokens is None or known is None else torch.equal(tokens, known)
    return same and all(map(torch.equal, layout, asked.layout))


@dataclass(frozen=True)
class Pass:
    """The results of one pass over the rows of some heads.

    matrix    A: dense in the buffer `room` if materialising it pays off, in slabs if it will be sketched
    columns   the column sums Aᵀ1
    seconds   how long the pass took, if the model waited for it
    """

    asked: Asked
    sums: RowSums
    energy: Tensor
    matrix: Matrix
    columns: Tensor
    room: Room
    seconds: float = 0.0


def slabs_of(call: Call, room: Room) -> Trimmed | None:
    """Slabs in the buffer for the matrices of one text's heads; None, for dense storage, unless only the pattern hides
    keys.
    """
    if len(call.q) > 1 or call.segments is not None or call.bias is not None or call.minus is not None:
        return None
    return room.slabs(call.operator().float(), call.pattern)


def read(
    call: Call,
    tokens: Tensor | None,
    kept: Kept,
    room: Room,
    values: Tensor | None = None,
    slabs: Trimmed | None = None,
) -> Pass:
    """Make one pass over the rows of a call's heads.

    tokens   tokens of the text, needed to find induction heads
    kept     cache shared by consecutive passes
    values   V; if given, the same pass computes A V, `RowSums.product`
    slabs    the part of a shared buffer that belongs to these heads
    """
    op = call.operator().float()
    asked = kept.asked(op.layout, None if call.kind == "cross" else tokens)
    slabs = slabs_of(call, room) if slabs is None else slabs
    into = room.of(op) if slabs is None else slabs
    where = op.layout.key_positions[..., None].double() / op.shape[-1]
    down = torch.zeros(*op.shape[:-2], op.shape[-1], dtype=op.dtype, device=op.device)
    sums = op.row_sums(replace(asked.request(where, into, down, kept.scratch), values=values))
    energy = sums.square.double().sum(-1).cpu()  # copied now: see measures.heads
    matrix = matrix_of(op, into if sums.left else None)
    return Pass(asked, sums, energy, matrix, down if sums.left else _column_sums(op, matrix), room)


def rows_of(
    call: Call, tokens: Tensor | None, how: Measuring, baselines: Baselines, kept: Kept | None = None
) -> list[dict[str, Any]]:
    """The measures of every head of a call on one text, by the names of `records.NUMBERS`.

    kept    cache shared by consecutive calls
    """
    kept, room = Kept() if kept is None else kept, Room()
    rows: list[dict[str, Any]] = []
    for start, stop in together(call):
        part = call.part(start, stop)
        rows += measured(part, read(part, tokens, kept, room), how, baselines, first=start)
    return rows


def together(call: Call) -> list[tuple[int, int]]:
    """Ranges of heads to measure together, in even groups; on a CPU, heads that are not materialised go one by one."""
    n, m = call.q.shape[-2], call.k.shape[-2]
    if call.q.device.type == "cpu":
        most = max(1, TOGETHER // max(len(call.q) * n * m, 1)) if n * m <= FORMED else 1
    else:
        formed = pays_to_form(call.part(0, 1).operator().float())
        each = len(call.q) * (n * m if formed else SKETCH_COLUMNS * (n + m))
        most = max(1, TOGETHER_ON_GPU // max(each, 1))
    step = ceil(call.heads / ceil(call.heads / most))
    return [(at, min(at + step, call.heads)) for at in range(0, call.heads, step)]


def measured(call: Call, passed: Pass, how: Measuring, baselines: Baselines, first: int = 0) -> list[dict[str, Any]]:
    """The records of a call's heads from the pass over their rows; heads are numbered from `first` on."""
    asked, sums = passed.asked, passed.sums
    check_sums(sums, call.name)
    m = call.k.shape[-2]
    k = min(how.values, call.q.shape[-2], m)
    pattern = pattern_of(asked, sums, passed.columns)
    found = how.spectrum(passed.matrix, k, passed.energy)
    columns = {
        **_of_spectrum(found),
        **_of_rows(sums, _visible(call, sums), sink=call.sink is not None),
        **_of_places(sums, asked, None if call.kind == "cross" else m, signed=call.minus is not None),
        "label_score": _explained(pattern),
    }
    lists, labels, spreads = {name: x.tolist() for name, x in columns.items()}, pattern.labels, logit_spreads(call)

    def row(item: int, head: int) -> dict[str, Any]:
        found = {name: _plain(x[item][head]) for name, x in lists.items()}
        return {**found, "label": labels[item][head], **_of_random(call, spreads[item][head], baselines)}

    items = range(len(call.q))
    return [
        {"head": first + head, **over_items([row(item, head) for item in items]), "items": len(items)}
        for head in range(call.heads)
    ]


def over_items(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The measures of one head from those of its items: means over items that have a number, lists entry by entry.

    Bounds of a rank are averaged; the mean rank lies between the averages. The number of certified singular values is
    the smallest of all items. The label is the most frequent one, or the alphabetically first of several.

    >>> over_items([{"rank90": 2.0, "decay": None, "label": "sink"}, {"rank90": 5.0, "decay": 1.5, "label": "band"}])
    {'rank90': 3.5, 'decay': 1.5, 'label': 'band'}
    """
    if len(rows) == 1:
        return rows[0]
    return {name: _joined(name, [row[name] for row in rows if row.get(name) is not None]) for name in rows[0]}


def _joined(name: str, values: list[Any]) -> Any:
    if not values:
        return None
    if name == "label":
        return min(Counter(values).items(), key=lambda found: (-found[1], found[0]))[0]
    if name == "sigma_certified":
        return min(values)
    if isinstance(values[0], list):
        return [sum(entries) / len(entries) for entries in zip(*values, strict=True)]
    return sum(values) / len(values)


def _explained(pattern: PositionalPattern) -> Tensor:
    """The share of each head that its pattern explains; if none explains half, the share of the best pattern."""
    content = pattern.index == len(pattern.names) - 1
    return torch.where(content, 1 - pattern.score, pattern.score)


def _column_sums(op: AttentionOperator, matrix: Matrix) -> Tensor:
    if isinstance(matrix, Tensor):
        return matrix.sum(-2)
    return op.mT @ torch.ones(op.shape[-2], dtype=op.dtype, device=op.device)


def _of_spectrum(found: Spectrum) -> dict[str, Tensor]:
    r90, r95 = effective_rank(found, 0.9), effective_rank(found, 0.95)
    close = (found.ceilings - found.values <= CERTIFIED * found.values).long().cumprod(-1)
    k = found.values.shape[-1]
    power = {"decay": decay_exponent(found, k).exponent} if k >= 4 else {}
    return power | {
        **{"rank90": r90.estimate, "rank90_low": r90.lower, "rank90_high": r90.upper},
        **{"rank95": r95.estimate, "rank95_low": r95.lower, "rank95_high": r95.upper},
        "sigma1": found.values[..., 0],
        "energy": found.energy,
        "energy10": energy_share(found, 0.1).estimate,
        "stable_rank": stable_rank(found).estimate,
        "entropic_rank": entropic_rank(found).estimate,
        "sigma": found.values,
        "sigma_certified": close.sum(-1),
    }


def _visible(call: Call, sums: RowSums) -> Tensor:
    """How many keys each query sees: allowed by pattern and segments, and not hidden by the bias."""
    hidden = call.hidden
    if hidden is None:
        return sums.count
    shown = visible(call.pattern, call.q.shape[-2], call.k.shape[-2], call.segments, call.q.device)
    return (shown & ~hidden).sum(-1).expand(sums.count.shape)


def _of_rows(sums: RowSums, count: Tensor, sink: bool) -> dict[str, Tensor]:
    """Means over rows, each of which sees `count` keys; a sink adds one outcome to each row."""
    seeing, outcomes = sums.mass > 0, count + int(sink)
    several = seeing & (outcomes > 1)
    share = sums.entropy / outcomes.clamp(min=2).double().log()
    pairs = count.double().sum(-1) * sums.square.double().sum(-1)
    return {
        "entropy": over_rows(sums.entropy, seeing),
        "entropy_share": over_rows(share, several),
        "concentration": sums.mass.double().sum(-1) / pairs.sqrt(),
        "largest": over_rows(sums.largest, seeing),
    }


def _of_places(sums: RowSums, asked: Asked, m: int | None, signed: bool) -> dict[str, Tensor]:
    """Masses by position. If m is None (keys of another sequence), offsets have no meaning.

    signed   weights may be negative; then there is no mean distance, because band sums would cancel
    """
    at = asked.split(sums.at.abs())
    offsets, first = at["offset"], at["first"]
    places, seeing = asked.places, sums.mass > 0
    found = {
        "sink": over_rows(first[..., 0], seeing & (places.position > 0)),
        "first": over_rows(first.sum(-1), seeing & (places.position >= FIRST)),
    }
    if m is None:
        return found
    for offset in OFFSETS:
        there = asked.targets["offset"][..., offset + REACH] >= 0
        found[f"offset_{offset}"] = over_rows(offsets[..., offset + REACH], seeing & there)
    share = {"position_share": _position_share(sums, asked, seeing)}
    if signed:
        return found | share
    i = places.position.double()
    mass, dot = sums.band_mass.double(), sums.band_dot[..., -1].double() * m
    away = (i * mass[..., 0] - dot[..., 0]) + (dot[..., 1] - i * mass[..., 1])  # distances ≥ 2
    away += offsets[..., REACH - 1] + offsets[..., REACH + 1]
    found["distance"] = over_rows(away / sums.mass.clamp(min=torch.finfo(torch.float32).tiny), seeing)
    return found | share


def _position_share(sums: RowSums, asked: Asked, seeing: Tensor) -> Tensor:
    keys, at = asked.targets["offset"], asked.split(sums.at)
    offsets, first = at["offset"], at["first"]
    apart = (keys >= 0) & (keys != asked.targets["first"][..., :1]) & seeing[..., None]
    along = torch.where(apart, offsets, 0).sum(-2, dtype=torch.float64).square() / apart.sum(-2).clamp(min=1)
    down = torch.where(seeing, first[..., 0], 0).sum(-1, dtype=torch.float64).square() / seeing.sum(-1).clamp(min=1)
    return (along.sum(-1) + down) / sums.square.double().sum(-1)


def _of_random(call: Call, spread: float, baselines: Baselines) -> dict[str, Any]:
    base = baselines.of(RandomHead.like(call), spread)
    if base is None:
        return {"logit_std": _plain(spread)}
    return {
        "logit_std": spread,
        "base_rank90": base.rank90,
        "base_rank95": base.rank95,
        "base_energy10": base.energy10,
        "base_entropy": base.entropy,
        "base_sigma": list(base.sigma),
    }


def _plain(value: Any) -> Any:
    """The value, or None if it is not finite."""
    return None if isinstance(value, float) and not isfinite(value) else value


def thumbnails(weights: Matrix, cells: int = 48) -> list[dict[str, Any]]:
    """The weights of each head on one text as a small picture: means over blocks of queries and keys, and over items.

    Computed by products with A. Row by row from the top; the largest mean is 255.
    """
    n, m = weights.shape[-2:]
    down, across = _blocks(n, cells, weights), _blocks(m, cells, weights)
    heads = weights.shape[-3] if len(weights.shape) > 2 else 1
    means = (down.mT @ (weights @ across)).reshape(-1, heads, down.shape[1], across.shape[1]).double().mean(0).cpu()
    scales = means.amax((-2, -1))
    shown = (means / scales.clamp(min=1e-300)[:, None, None] * 255).round().clamp(0, 255).to(torch.uint8)
    height, width = shown.shape[1:]
    shared = {
        "height": height,
        "width": width,
        "pooling": "none" if max(n, m) <= cells else "mean",
        "tokens_per_cell": max(n, m) / max(height, width),
    }
    return [
        {**shared, "cells": cells, "scale": scale}
        for cells, scale in zip(shown.flatten(1).tolist(), scales.tolist(), strict=True)
    ]


def _blocks(length: int, cells: int, op: Matrix) -> Tensor:
    """One column per block of tokens: 1 / (size of the block) on its tokens, 0 elsewhere."""
    cells = min(cells, length)
    block = torch.arange(length, device=op.device) * cells // length
    member = torch.nn.functional.one_hot(block, cells).to(op.dtype)
    return member / member.sum(0)
