"""What a page needs of a scan, as plain data: columns of numbers, short texts for spectra and pictures.

Numbers keep four digits, spectra the indices of a grid, pictures 64 shades: a model of 30 layers × 32 heads at four
lengths fits into 5 MB. Where the pictures alone would take half of that, cells are pooled, and the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import polars as pl

from heedful.report.encode import GRID, picture, short, spectrum
from heedful.store.scans import RANK, title_of

PICTURES = 2_500_000
"""Characters that all pictures of a page may take."""
KEY = ("length", "layer", "head")
MANIFEST = ("model", "model_type", "fingerprint", "device", "versions")
Row = dict[str, Any]
Place = tuple[int, int]


@runtime_checkable
class Records(Protocol):
    """What a report reads of a scan; `heedful.scan.Scan` is one."""

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
    """Everything that the page draws, of one scan or of two. `measures` are the columns that it has names for."""
    scans = [scan] if against is None else [scan, against]
    thumbnails = [each.thumbnails() for each in scans]
    shrink = _shrink(thumbnails)
    made = [_scan(each, drawn, measures, shrink) for each, drawn in zip(scans, thumbnails, strict=True)]
    if against is None:
        return {"grid": GRID, "rank": RANK, "scans": made}
    pairs = _pairs(scan, against, made[0], measures)
    for block, apart in zip(made[0]["blocks"], pairs, strict=True):  # what is of both models shows as any measure does
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
    """Means over heads at each length, and how they grow: the numbers of the answer, for every measure."""
    means = {name: [short(float(scan.mean(name, length).mean), 6) for length in lengths] for name in measures}
    several = measures if len(lengths) > 1 else []
    return {"means": means, "exponents": {name: short(float(scan.trend(name).mean), 6) for name in several}}


def _of_length(thumbnails: pl.DataFrame, length: int) -> pl.DataFrame:
    return thumbnails.filter(pl.col("length") == length)


def _tokens(manifest: Mapping[str, Any], lengths: Sequence[int]) -> list[list[str]]:
    """The tokens of the pictures at each length. A text that was read whole has one length, its own."""
    found = manifest.get("thumbnail_tokens") or {}
    whole = not manifest.get("lengths")
    return [next(iter(found.values()), []) if whole else found.get(str(length), []) for length in lengths]


def _seconds(table: pl.DataFrame) -> float:
    """All of the measuring: means over texts, times texts."""
    return float(table.select((pl.col("seconds") * pl.col("texts")).sum()).item() or 0)


def _at(table: pl.DataFrame, length: int, heads: Sequence[Place]) -> pl.DataFrame:
    """The rows of one length in the order of the heads; one that is missing has nulls."""
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
    """As JSON should have them: four digits, no fraction where there is none, null where there is no number."""
    if not column.dtype.is_float():
        return column.to_list()
    found = column.set(~column.is_finite(), None).round_sig_figs(4).to_list()
    return [int(value) if value is not None and value.is_integer() else value for value in found]


def _spectrum(values: Sequence[float] | None) -> str:
    """At the indices of the grid, and the last one."""
    return spectrum([*(values[index - 1] for index in GRID if index < len(values)), values[-1]]) if values else ""


def _pairs(scan: Records, against: Records, made: Mapping[str, Any], measures: Sequence[str]) -> list[Row]:
    """Paired differences at each length; none where the scans share no texts, lengths or heads."""
    heads = [(layer, head) for layer, head in made["heads"]]
    try:
        table = scan.compare(against)
    except ValueError:  # nothing shared: the page then shows differences of means, and says so
        return [{} for _ in made["lengths"]]
    names = [*_bounded(measures), "texts"]
    return [_columns(_at(table, length, heads), names) for length in made["lengths"]]


def _shrink(pictures: Sequence[pl.DataFrame]) -> int:
    cells = sum(int(frame["cells"].list.len().sum() or 0) for frame in pictures)
    return max(1, math.ceil(math.sqrt(cells / PICTURES)))


def _pictures(frame: pl.DataFrame, heads: Sequence[Place], shrink: int) -> dict[str, Any]:
    """For each head its scale, its cells and which of a few shapes they have; null for one without a picture."""
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
