"""The data of a scan that a page needs: columns of numbers, and short strings for spectra and pictures.

Numbers have four digits, spectra the indices of a grid, pictures 64 shades: a model of 30 layers × 32 heads at four
lengths fits into 5 MB. If the pictures alone would take half of that, cells are pooled, and the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import polars as pl

from heedful.report.encode import GRID, picture, short, spectrum
from heedful.store.scans import RANK, title_of

PICTURES = 2_500_000
"""Maximal number of characters for all pictures of a page."""
KEY = ("length", "layer", "head")
MANIFEST = ("model", "model_type", "fingerprint", "device", "versions")
Row = dict[str, Any]
Place = tuple[int, int]


@runtime_checkable
class Records(Protocol):
    """The part of a scan that a report reads; `heedful.scan.Scan` implements it."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...
    @property
    def rows(self) -> pl.DataFrame: ...
    def thumbnails(self) -> pl.DataFrame: ...
    def table(self) -> pl.DataFrame: ...
    def mean(self, column: str, length: int) -> Any: ...
    def trend(self, column: str) -> Any: ...
    def compare(self, other: Any) -> pl.DataFrame: ...
    def answer(self, language: Any, *, against: Any = None) -> Any: ...


def payload(scan: Records, against: Records | None, measures: Sequence[str]) -> dict[str, Any]:
    """Everything that the page draws, for one scan or two. `measures` are the columns that the page has names for."""
    scans = [scan] if against is None else [scan, against]
    thumbnails = [each.thumbnails() for each in scans]
    shrink = _shrink(thumbnails)
    made = [_scan(each, drawn, measures, shrink) for each, drawn in zip(scans, thumbnails, strict=True)]
    if against is None:
        return {"grid": GRID, "rank": RANK, "scans": made}
    pairs = _pairs(scan, against, made[0], measures)
    for block, apart in zip(made[0]["blocks"], pairs, strict=True):  # measures of ΔA are shown like all others
        block |= {name: apart.pop(name) for name in list(apart) if name.startswith("delta_")}
    return {"grid": GRID, "rank": RANK, "scans": made, "pairs": pairs}


def _scan(scan: Records, thumbnails: pl.DataFrame, measures: Sequence[str], shrink: int) -> dict[str, Any]:
    table, manifest, measured = scan.table(), scan.manifest, set(scan.rows["text"].unique())
    heads = table.select("layer", "head").unique().sort("layer", "head").rows()
    lengths = table["length"].unique().sort().to_list()
    texts = manifest.get("texts", [])
    return {
        "title": title_of(manifest),
        "manifest": {name: manifest.get(name) for name in MANIFEST},
        "texts": [{name: text.get(name) for name in ("id", "title")} for text in texts if text["id"] in measured],
        "planned": len(texts),
        "layers": manifest.get("layers", []),
        "seconds": short(_seconds(table)),
        "heads": [list(head) for head in heads],
        "lengths": lengths,
        "blocks": [_block(_at(table, length, heads), measures) for length in lengths],
        **_over_heads(scan, [name for name in measures if name in table.columns], lengths),
        "pictures": [_pictures(_of_length(thumbnails, length), heads, shrink) for length in lengths],
        "tokens": _tokens(manifest, lengths),
    }


def _over_heads(scan: Records, measures: Sequence[str], lengths: Sequence[int]) -> dict[str, Any]:
    """For every measure: means over heads at each length and their growth, as in the answer."""
    means = {name: [short(float(scan.mean(name, length).mean), 6) for length in lengths] for name in measures}
    several = measures if len(lengths) > 1 else []
    return {"means": means, "exponents": {name: short(float(scan.trend(name).mean), 6) for name in several}}


def _of_length(thumbnails: pl.DataFrame, length: int) -> pl.DataFrame:
    return thumbnails.filter(pl.col("length") == length)


def _tokens(manifest: Mapping[str, Any], lengths: Sequence[int]) -> list[list[str]]:
    """The tokens of the pictures at each length. A text read whole has a single length."""
    found = manifest.get("thumbnail_tokens") or {}
    whole = not manifest.get("lengths")
    return [next(iter(found.values()), []) if whole else found.get(str(length), []) for length in lengths]


def _seconds(table: pl.DataFrame) -> float:
    """Total measuring time: means over texts, times the number of texts."""
    return float(table.select((pl.col("seconds") * pl.col("texts")).sum()).item() or 0)


def _at(table: pl.DataFrame, length: int, heads: Sequence[Place]) -> pl.DataFrame:
    """The rows of one length in the order of the heads; a missing row is null."""
    order = pl.DataFrame(heads, schema={"layer": pl.Int64, "head": pl.Int64}, orient="row")
    return order.join(table.filter(pl.col("length") == length), on=["layer", "head"], how="left", maintain_order="left")


def _block(part: pl.DataFrame, measures: Sequence[str]) -> Row:
    bounds = [f"{name}_certified_{side}" for name in measures for side in ("low", "high")]
    block = _columns(part, [*_bounded(measures), *bounds, "texts", "label", "label_texts", "kind_of_head"])
    for name in ("sigma", "base_sigma"):
        block[name] = [_spectrum(values) for values in part[name].to_list()]
        block[f"{name}_count"] = part[name].list.len().to_list()
    return block


def _bounded(measures: Sequence[str]) -> list[str]:
    return [name + end for name in measures for end in ("", "_low", "_high")]


def _columns(part: pl.DataFrame, names: Sequence[str]) -> Row:
    return {name: _values(part[name]) for name in names if name in part.columns}


def _values(column: pl.Series) -> list[Any]:
    """Values for JSON: four significant digits, whole numbers as integers, null for non-finite numbers."""
    if not column.dtype.is_float():
        return column.to_list()
    found = column.set(~column.is_finite(), None).round_sig_figs(4).to_list()
    return [int(value) if value is not None and value.is_integer() else value for value in found]


def _spectrum(values: Sequence[float] | None) -> str:
    """The spectrum at the indices of the grid and at the last index, as text."""
    return spectrum([*(values[index - 1] for index in GRID if index < len(values)), values[-1]]) if values else ""


def _pairs(scan: Records, against: Records, made: Mapping[str, Any], measures: Sequence[str]) -> list[Row]:
    """Paired differences at each length; empty if the scans share no texts, lengths or heads."""
    heads = [(layer, head) for layer, head in made["heads"]]
    try:
        table = scan.compare(against)
    except ValueError:  # nothing is shared: the page shows differences of means, and says so
        return [{} for _ in made["lengths"]]
    names = [*_bounded(measures), "texts"]
    return [_columns(_at(table, length, heads), names) for length in made["lengths"]]


def _shrink(pictures: Sequence[pl.DataFrame]) -> int:
    cells = sum(int(frame["cells"].list.len().sum() or 0) for frame in pictures)
    return max(1, math.ceil(math.sqrt(cells / PICTURES)))


def _pictures(frame: pl.DataFrame, heads: Sequence[Place], shrink: int) -> dict[str, Any]:
    """For each head [index of its shape, scale, cells], or null without a picture; and the list of shapes."""
    found = {(row["layer"], row["head"]): _picture(row, shrink) for row in frame.iter_rows(named=True)}
    shapes: list[Row] = []
    packed: list[list[Any] | None] = []
    for head in heads:
        if head not in found:
            packed.append(None)
            continue
        shape = {name: found[head][name] for name in ("rows", "columns", "pooling", "per")}
        if shape not in shapes:
            shapes.append(shape)
        packed.append([shapes.index(shape), found[head]["scale"], found[head]["cells"]])
    return {"shapes": shapes, "heads": packed}


def _picture(row: Row, shrink: int) -> Row:
    height, width = row["height"], row["width"]
    pooling = "max" if row["pooling"] == "max" else "mean"
    return {
        "rows": math.ceil(height / shrink),
        "columns": math.ceil(width / shrink),
        "cells": picture(row["cells"], height, width, shrink, pooling),
        "scale": short(row["scale"]),
        "pooling": row["pooling"] if shrink == 1 else pooling,
        "per": short(row["tokens_per_cell"] * shrink, 8),
    }
