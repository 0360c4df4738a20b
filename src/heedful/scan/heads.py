"""Everything that a scan records of one head on one text.

One pass over the rows gives sums, weights at offsets and at the first tokens, distances, all that positional patterns
ask for, and leaves the matrices where it pays to form them; products with them give the spectra. Heads go in groups
that are small together, one by one where they are not formed.

position share    energy of the nearest matrix that is constant along each offset −8 … 8, and on the first key, and zero
                  elsewhere:  (Σ_o (Σ_i a_{i,i+o})² / N_o + (Σ_i a_{i,first})² / N_first) / ‖A‖²_F;  a pair that is
                  both counts for the first key
distance          mean over queries of Σ_j a_ij |i − j| / Σ_j a_ij
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any

import torch

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
from heedful.measures.goals import BLOCK
from heedful.measures.heads import Room, matrix_of
from heedful.measures.positions import Asked, PositionalPattern, pattern_of
from heedful.measures.rows import check_sums, over_rows
from heedful.measures.search import FORMED, block_of
from heedful.operator import AttentionOperator
from heedful.records import OFFSETS
from heedful.scan.baseline import BUDGET, Baselines, logit_spreads
from heedful.segments import Layout
from heedful.shapes import Tensor
from heedful.trimmed import Trimmed

Matrix = AttentionOperator | Matrices
"""The weights of some heads: as a map, as they are, or in slabs."""

TOGETHER = 3 << 22  # entries of the heads that are formed together: 48 MiB in float32
REACH = 8  # offsets on either side that count as positional
FIRST = 4  # tokens that count as the first ones
CERTIFIED = 0.01  # a singular value is certified where its bounds are so close


@dataclass(frozen=True)
class Measuring:
    """How heads are measured.

    values   singular values to record
    budget   products to spend on one head's spectrum, in blocks of 16, and as many blocks where they are wider: more
             narrows the bounds of its rank (docs/measures.md), which leave nothing to chance
    """

    seed: int = 0
    values: int = 32
    budget: int = BUDGET

    def spectrum(self, op: Matrix, k: int, energy: Tensor | None = None) -> Spectrum:
        """The first k values, and what they and the rest tell of the effective ranks."""
        budget = self.budget * block_of(op) // BLOCK
        return spectrum(op, k, tau=(0.9, 0.95), energy=energy, budget=budget, failure=0, seed=self.seed)


class Kept:
    """What a pass leaves to the next: memory, and what is asked of rows where tokens stand in the same places."""

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
    """What one pass over the rows of some heads gave.

    matrix    A, in the room, where it pays to form it; in slabs where it is to be sketched
    columns   the sums of its columns, Aᵀ1
    seconds   that it took, where the model waited for it
    """

    asked: Asked
    sums: RowSums
    energy: Tensor
    matrix: Matrix
    columns: Tensor
    room: Room
    seconds: float = 0.0


def slabs_of(call: Call, room: Room) -> Trimmed | None:
    """Room for the matrices of one text's heads where the pattern alone hides keys; None where they go there whole."""
    if len(call.q) > 1 or call.segments is not None or call.bias is not None:
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
    """Pass over the rows of a call's heads; `values` ride along, and their product is among the sums.

    tokens   of the text, which induction needs
    kept     by passes that follow one another
    slabs    that are these heads' in a room which others have a part of
    """
    op = call.operator().float()
    asked = kept.asked(op.layout, None if call.kind == "cross" else tokens)
    slabs = slabs_of(call, room) if slabs is None else slabs
    into = room.of(op) if slabs is None else slabs
    where = op.layout.key_positions[..., None].double() / op.shape[-1]
    down = torch.zeros(*op.shape[:-2], op.shape[-1], dtype=op.dtype, device=op.device)
    sums = op.row_sums(replace(asked.request(where, into, down, kept.scratch), values=values))
    energy = sums.square.double().sum(-1).cpu()  # now that it is there: see measures.heads
    matrix = matrix_of(op, into if sums.left else None)
    return Pass(asked, sums, energy, matrix, down if sums.left else _column_sums(op, matrix), room)


def rows_of(
    call: Call, tokens: Tensor | None, how: Measuring, baselines: Baselines, kept: Kept | None = None
) -> list[dict[str, Any]]:
    """The measures of every head of a call on one text, by the names of `records.NUMBERS`.

    kept    by calls that follow one another
    """
    kept, room = Kept() if kept is None else kept, Room()
    rows: list[dict[str, Any]] = []
    for start, stop in together(call):
        part = call.part(start, stop)
        rows += measured(part, read(part, tokens, kept, room), how, baselines, first=start)
    return rows


def together(call: Call) -> list[tuple[int, int]]:
    """Which heads are measured together: groups as even as can be, single heads where they are not formed."""
    pairs = call.q.shape[-2] * call.k.shape[-2]
    most = max(1, TOGETHER // max(pairs, 1)) if pairs <= FORMED else 1
    step = ceil(call.heads / ceil(call.heads / most))
    return [(at, min(at + step, call.heads)) for at in range(0, call.heads, step)]


def measured(call: Call, passed: Pass, how: Measuring, baselines: Baselines, first: int = 0) -> list[dict[str, Any]]:
    """The rows of a call's heads, of which the first is called `first`, from the pass over theirs."""
    asked, sums = passed.asked, passed.sums
    check_sums(sums, call.name)
    m = call.k.shape[-2]
    k = min(how.values, call.q.shape[-2], m)
    pattern = pattern_of(asked, sums, passed.columns)
    found = how.spectrum(passed.matrix, k, passed.energy)
    columns = {
        **_of_spectrum(found),
        **_of_rows(sums),
        **_of_places(sums, asked, None if call.kind == "cross" else m),
        "label_score": _explained(pattern),
    }
    lists = {name: x[0].tolist() for name, x in columns.items()}
    rows = [{"head": first + at} | {name: _plain(x[at]) for name, x in lists.items()} for at in range(call.heads)]
    return [
        {**row, "label": label, **_of_random(call, spread, baselines)}
        for row, label, spread in zip(rows, pattern.labels[0], logit_spreads(call), strict=True)
    ]


def _explained(pattern: PositionalPattern) -> Tensor:
    """How much of each head its pattern explains; where none explains half, how much the best one does."""
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


def _of_rows(sums: RowSums) -> dict[str, Tensor]:
    seeing = sums.mass > 0
    several = seeing & (sums.count > 1)
    share = sums.entropy / sums.count.clamp(min=2).double().log()
    pairs = sums.count.double().sum(-1) * sums.square.double().sum(-1)
    return {
        "entropy": over_rows(sums.entropy, seeing),
        "entropy_share": over_rows(share, several),
        "concentration": sums.mass.double().sum(-1) / pairs.sqrt(),
        "largest": over_rows(sums.largest, seeing),
    }


def _of_places(sums: RowSums, asked: Asked, m: int | None) -> dict[str, Tensor]:
    """Masses by place; without m keys in the sequence of the queries, offsets mean nothing."""
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
    i = places.position.double()
    mass, dot = sums.band_mass.double(), sums.band_dot[..., -1].double() * m
    away = (i * mass[..., 0] - dot[..., 0]) + (dot[..., 1] - i * mass[..., 1])  # at distances of 2 and more
    away += offsets[..., REACH - 1] + offsets[..., REACH + 1]
    found["distance"] = over_rows(away / sums.mass.clamp(min=torch.finfo(torch.float32).tiny), seeing)
    return found | {"position_share": _position_share(sums, asked, offsets, first, seeing)}


def _position_share(sums: RowSums, asked: Asked, offsets: Tensor, first: Tensor, seeing: Tensor) -> Tensor:
    keys = asked.targets["offset"]
    apart = (keys >= 0) & (keys != asked.targets["first"][..., :1]) & seeing[..., None]
    along = torch.where(apart, offsets, 0).sum(-2, dtype=torch.float64).square() / apart.sum(-2).clamp(min=1)
    down = torch.where(seeing, first[..., 0], 0).sum(-1, dtype=torch.float64).square() / seeing.sum(-1).clamp(min=1)
    return (along.sum(-1) + down) / sums.square.double().sum(-1)


def _of_random(call: Call, spread: float, baselines: Baselines) -> dict[str, Any]:
    (n, width), m = call.q.shape[-2:], call.k.shape[-2]
    base = baselines.of(n, m, call.pattern, width, spread)
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
    """Nothing where there is no number."""
    return None if isinstance(value, float) and not isfinite(value) else value


def thumbnails(weights: Matrix, cells: int = 48) -> list[dict[str, Any]]:
    """The weights of each head on one text as a small picture: means over blocks of queries and keys, by products.

    Rows of blocks from the top, the largest mean at 255.
    """
    n, m = weights.shape[-2:]
    down, across = _blocks(n, cells, weights), _blocks(m, cells, weights)
    means = (down.mT @ (weights @ across)).reshape(-1, down.shape[1], across.shape[1]).double().cpu()
    return [_picture(head, "none" if max(n, m) <= cells else "mean", max(n, m)) for head in means]


def _picture(means: Tensor, pooling: str, tokens: int) -> dict[str, Any]:
    scale = float(means.max())
    shown = (means / max(scale, 1e-300) * 255).round().clamp(0, 255).to(torch.uint8)
    return {
        "height": shown.shape[0],
        "width": shown.shape[1],
        "cells": shown.flatten().tolist(),
        "scale": scale,
        "pooling": pooling,
        "tokens_per_cell": tokens / max(shown.shape),
    }


def _blocks(length: int, cells: int, op: Matrix) -> Tensor:
    """A column for each block of tokens, with their number's inverse on them."""
    cells = min(cells, length)
    block = torch.arange(length, device=op.device) * cells // length
    member = torch.nn.functional.one_hot(block, cells).to(op.dtype)
    return member / member.sum(0)
