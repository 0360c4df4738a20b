"""What a scan found: rows for each text, and tables over texts with intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal

import polars as pl
import torch

from heedful.notices import too_few
from heedful.scan.answer import BASE, Answer, answer, compared, number
from heedful.scan.statistics import Mean, bootstrap, exponent
from heedful.shapes import Tensor
from heedful.store import scans as store
from heedful.store.scans import NUMBERS, RANK, Run

Language = Literal["en", "zh"]
POSITIONAL = frozenset(
    {"current", "previous", "next", "left", "right", "start", "end", "last", "uniform", "band", "window"}
)
"""Labels of patterns that depend on positions alone, not on tokens."""
SINK = 0.5  # a head is a sink if more than this share of its mass is on the first token
LOW = 0.5  # a head has low rank below this share of the random head's rank

# The interval of a mean is named …_low and …_high, so bounds of single measurements get longer names.
BOUNDS = {f"rank{tau}_{side}": f"rank{tau}_certified_{side}" for tau in (90, 95) for side in ("low", "high")}
LISTS = ("sigma", "base_sigma")
COMPARED = [name for name in NUMBERS if name not in BOUNDS]


@dataclass(frozen=True, eq=False)
class Head:
    """One head: its rows in `Scan.table()` (one per length), its rows per text, its picture at the longest length."""

    layer: int
    head: int
    table: pl.DataFrame
    rows: pl.DataFrame
    thumbnail: dict[str, Any] | None

    def __repr__(self) -> str:
        last = self.table.row(-1, named=True)
        return (
            f"head {self.head} of layer {self.layer} ({last['name']}): {last['kind_of_head'] or 'no verdict'}, "
            f"{last['label']}; effective rank (.9) {number(last[RANK])} of {last['length']}"
        )


class Scan:
    """The records of a scan and what is computed from them. `heedful.hf.scan` returns one, `Scan.open` reads one."""

    def __init__(self, run: Run):
        self._run = run

    @classmethod
    def open(cls, folder: str | Path) -> Scan:
        """The scan in a run folder."""
        return cls(Run.open(folder))

    @property
    def folder(self) -> Path:
        return self._run.folder

    @property
    def manifest(self) -> dict[str, Any]:
        return self._run.manifest

    @cached_property
    def rows(self) -> pl.DataFrame:
        """One row for each text, length, layer and head. Texts read whole all get their mean length as length."""
        found = self._run.rows()
        if found.is_empty():
            raise store.Broken(f"{self.folder}: no records yet. Resume the scan.")
        return self._under_one_length(found)

    def _under_one_length(self, rows: pl.DataFrame) -> pl.DataFrame:
        if self.manifest.get("lengths") or rows.is_empty():
            return rows
        mean = self._run.rows().group_by("text").agg(pl.col("length").max())["length"].mean()
        return rows.with_columns(pl.lit(round(float(mean)), dtype=pl.Int64).alias("length"))  # type: ignore[arg-type]

    def thumbnails(self) -> pl.DataFrame:
        """Small pictures of the heads on the first text at each length: see `store.THUMBNAILS`."""
        return self._under_one_length(self._run.thumbnails())

    @cached_property
    def against(self) -> Scan | None:
        """The scan of the model that this one was compared with, on the same texts."""
        folder = self.folder / "against"
        return Scan.open(folder) if (folder / "scan.json").exists() else None

    @property
    def texts(self) -> int:
        """Texts that were measured."""
        return self.rows["text"].n_unique()

    @property
    def lengths(self) -> list[int]:
        """Tokens, ascending."""
        return self.rows["length"].unique().sort().to_list()

    def table(self) -> pl.DataFrame:
        """One row for each length, layer and head: means over texts, with 95 % intervals in `…_low` and `…_high`.

        `rank90_certified_low` and so on are means of the bounds of single measurements. `label` is the most frequent
        label over texts, `label_texts` the number of texts with it, `label_score` the mean score on them.
        `kind_of_head` is the first of these that applies:

            positional   the label depends on positions alone, not on tokens
            sink         more than half of the mass lies on the first token
            low rank     rank90, with its whole interval, is below half of the random head's
            content      all others

        It is empty for fewer than 32 tokens, which are too few to tell.
        """
        return self._table

    @cached_property
    def _table(self) -> pl.DataFrame:
        return pl.concat([_group(length, rows) for length, rows in _by_length(self.rows)])

    def head(self, layer: int, head: int) -> Head:
        """Everything about one head."""

        def own(frame: pl.DataFrame) -> pl.DataFrame:
            return frame.filter((pl.col("layer") == layer) & (pl.col("head") == head))

        table = own(self.table())
        if table.is_empty():
            layers = sorted(self.rows["layer"].unique())
            raise ValueError(
                f"layer {layer}, head {head}: not in this scan. It has layers {', '.join(map(str, layers))}, with "
                f"heads from 0 to {max(self.rows['head'].to_list())}."
            )
        pictures = own(self.thumbnails())
        return Head(layer, head, table, own(self.rows), None if pictures.is_empty() else pictures.row(-1, named=True))

    def growth(self, column: str = RANK) -> pl.DataFrame:
        """How a measure grows with length, for each head: α of mean ∝ lengthᵅ, with an interval over texts.

        The line is fitted to the head's means over texts at all lengths.
        """
        values = self._by_text(column)
        found = exponent(torch.tensor(self.lengths, dtype=torch.float64), values)
        keys = self.rows.select("layer", "head").unique().sort("layer", "head")
        return keys.with_columns(*_series("exponent", found)).fill_nan(None)

    def trend(self, column: str = RANK) -> Mean:
        """How the mean of a measure over heads grows with length: α of mean ∝ lengthᵅ, with an interval over texts."""
        values = self._by_text(column).nanmean(-1, keepdim=True)
        found = exponent(torch.tensor(self.lengths, dtype=torch.float64), values)
        return Mean(*(x[0] for x in found))

    def _by_text(self, column: str) -> Tensor:
        """A measure as (texts, lengths, heads), NaN for texts that have not been measured."""
        if column not in NUMBERS:
            raise ValueError(f"column: {column!r}, expected one of {', '.join(NUMBERS)}.")
        if len(self.lengths) < 2:
            raise ValueError(f"growth: {len(self.lengths)} lengths in this scan, expected two or more.")
        names = (["text"], ["length"], ["layer", "head"])
        keys = [self.rows.select(*each).unique(maintain_order=True) for each in names]
        whole = keys[0].join(keys[1], how="cross").join(keys[2], how="cross")
        whole = whole.join(self.rows.select(*store.KEY, column), on=list(store.KEY), how="left").sort(*store.KEY)
        return _cube(whole, [column]).reshape(len(keys[0]), len(keys[1]), -1)

    def mean(self, column: str, length: int | None = None, layers: Callable[[int], bool] | None = None) -> Mean:
        """The mean of a measure over heads, with its interval over texts; at the longest length by default."""
        groups = dict(_by_length(self.rows))
        rows = groups[max(groups) if length is None else length]
        if layers is not None:
            rows = rows.filter(pl.col("layer").is_in([x for x in rows["layer"].unique() if layers(x)]))
        return bootstrap(_cube(rows.sort("text", "layer", "head"), [column])[..., 0].nanmean(1))

    def compare(self, other: Scan) -> pl.DataFrame:
        """Differences, this scan minus the other on the same texts, with paired intervals: one row for each head.

        If both were scanned together (`against`), `delta_rank90` and so on measure ΔA = A₁ − A₂ itself, and
        `delta_relative` is ‖ΔA‖ / ‖A₁‖.
        """
        apart, key = self.paired(other), list(store.KEY)
        table = pl.concat([_means(length, rows, COMPARED) for length, rows in _by_length(apart)])
        delta = (
            self._under_one_length(self._run.delta())
            if self.against is not None and other.folder == self.folder / "against"
            else None
        )
        if delta is None or delta.is_empty():
            return table
        names = [name for name in store.DELTA if name not in (*key, *BOUNDS)]
        delta = pl.concat([_means(length, rows, names) for length, rows in _by_length(delta)])
        delta = delta.drop("texts").rename(lambda name: name if name in key else f"delta_{name}")
        return table.join(delta, on=["length", "layer", "head"], how="left").sort("length", "layer", "head")

    def paired(self, other: Scan) -> pl.DataFrame:
        """Differences, this scan minus the other, for each text, length, layer and head that both have."""
        known = {text["id"]: text["sha256"] for text in other.manifest["texts"]}
        shared = [text["id"] for text in self.manifest["texts"] if known.get(text["id"]) == text["sha256"]]
        if not shared:
            raise ValueError("compare: the two scans share no text. Expected the same texts in both.")
        key = list(store.KEY)
        pairs = self.rows.join(other.rows, on=key, suffix="_other").filter(pl.col("text").is_in(shared))
        if pairs.is_empty():
            raise ValueError("compare: the two scans share no length, layer and head. Likely cause: other lengths.")
        return pairs.select(*key, *(pl.col(name) - pl.col(f"{name}_other") for name in COMPARED)).sort(*key)

    def answer(self, language: Language = "en", *, against: Scan | None = None) -> Answer:
        """What was found, in sentences; with `against`, how this scan differs from that one."""
        return answer(self, language) if against is None else compared(self, against, language)

    def words(self, language: Language = "en") -> str:
        """The answer in a few sentences: what kinds of heads there are, and what could be cheaper."""
        return self.answer(language).text

    def report(self, path: str | Path, *, against: Scan | None = None, language: Language = "en") -> Path:
        """Write everything to one HTML file (needs `pip install 'heedful[report]'`)."""
        try:
            from heedful.report import write  # has more dependencies than a scan
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"the page of a scan can't be made here: {missing}. pip install 'heedful[report]'", name=missing.name
            ) from missing
        write(self, path, against=self.against if against is None else against, language=language)
        return Path(path)

    def __repr__(self) -> str:
        return f"Scan of {self.manifest['model']} in {self.folder}\n{self.words()}"

    def _repr_html_(self) -> str:
        shown = self.table().select(
            *("length", "layer", "head", "kind_of_head", "label", RANK, BASE, "entropy", "sink", "texts")
        )
        head = f"<p><b>Scan of {escape(str(self.manifest['model']))}</b><br>{escape(self.words())}</p>"
        return head + shown._repr_html_()


def _by_length(rows: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    return [(length, rows.filter(pl.col("length") == length)) for length in rows["length"].unique().sort()]


def _cube(rows: pl.DataFrame, columns: list[str]) -> Tensor:
    """The columns as (texts, heads, columns) in float64, NaN for missing numbers. Sort rows by text first, then in the
    same order in each text.
    """
    texts = rows["text"].n_unique()
    flat = torch.tensor(rows.select(pl.col(columns).cast(pl.Float64).fill_null(float("nan"))).to_numpy())
    if len(flat) % texts:
        raise store.Broken("rows: texts have different numbers of heads. Likely cause: part files of two scans.")
    return flat.reshape(texts, -1, len(columns))


def _series(name: str, found: Mean, at: int | None = None) -> list[pl.Series]:
    parts = {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    return [pl.Series(key, (x if at is None else x[:, at]).reshape(-1).numpy()) for key, x in parts.items()]


def _means(length: int, rows: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    rows = rows.sort("text", "layer", "head")
    found = bootstrap(_cube(rows, columns))
    keys = rows.select("layer", "head").unique().sort("layer", "head")
    made = [series for at, name in enumerate(columns) for series in _series(name, found, at)]
    return (
        keys.with_columns(*made)
        .fill_nan(None)
        .select(
            pl.lit(length, dtype=pl.Int64).alias("length"),
            pl.all(),
            pl.lit(rows["text"].n_unique()).alias("texts"),
        )
    )


def _group(length: int, rows: pl.DataFrame) -> pl.DataFrame:
    """The table of one length."""
    rows = rows.rename(BOUNDS).sort("text", "layer", "head")
    labels = (
        rows.sort("label")
        .group_by("layer", "head")
        .agg(pl.col("label").mode(maintain_order=True).first().alias("named"))
    )
    rows = rows.join(labels, on=["layer", "head"]).with_columns(agrees=pl.col("label") == pl.col("named"))
    rows = rows.with_columns(pl.when("agrees").then(pl.col("label_score")))  # scores of the head's label only
    columns = [BOUNDS.get(name, name) for name in NUMBERS]
    table = _means(length, rows, [*columns, "seconds"])
    drop = [f"{name}_{side}" for name in (*BOUNDS.values(), "seconds") for side in ("low", "high")]
    fixed = rows.group_by("layer", "head").agg(
        pl.col("name", "kind", "turn", "items").first(),
        pl.col("named").first().alias("label"),
        pl.col("agrees").sum().cast(pl.Int64).alias("label_texts"),
    )
    table = table.drop(drop).join(fixed, on=["layer", "head"])
    for name in LISTS:
        table = table.join(_mean_lists(rows, name), on=["layer", "head"], how="left")
    table = table.sort("layer", "head")
    kind = pl.lit(None, pl.String) if too_few(length) else _kind_of_head()
    return table.with_columns(kind.alias("kind_of_head"))


def _mean_lists(rows: pl.DataFrame, name: str) -> pl.DataFrame:
    """Lists averaged over texts entry by entry, up to the shortest length; one row for each head that has lists."""
    some = rows.select("layer", "head", pl.col(name)).drop_nulls()
    width = min(some[name].list.len().to_list(), default=0)
    entries = some.with_columns(pl.col(name).list.head(width), pl.lit(list(range(width))).alias("at"))
    means = entries.explode(name, "at").group_by("layer", "head", "at").agg(pl.col(name).mean())
    return means.sort("layer", "head", "at").group_by("layer", "head", maintain_order=True).agg(name)


def _kind_of_head() -> pl.Expr:
    worst = pl.max_horizontal(RANK, f"{RANK}_high")
    return (
        pl.when(pl.col("label").is_in(list(POSITIONAL)))
        .then(pl.lit("positional"))
        .when(pl.col("sink") > SINK)
        .then(pl.lit("sink"))
        .when(worst < LOW * pl.col(BASE))
        .then(pl.lit("low rank"))
        .otherwise(pl.lit("content"))
    )
