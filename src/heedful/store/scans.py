"""The records of a scan: tables in a folder, complete after every text. Scans write them, reports read them.

    scan.json               the manifest: model, layers, texts, lengths, options, versions
    rows.jsonl.gz           for each text and length, a row for each layer and head
    delta.jsonl.gz          if two models were scanned together: how far apart their heads are
    thumbnails.jsonl.gz     small pictures of every head, on the first text at each length

The tables are logs of `heedful.store`. An append has two lines: the text, the length and the scan that it belongs to;
then the columns. If there are several appends for one text and length, the last counts. A killed process loses only the
current text. Needs `pip install 'heedful[report]'`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.store.log import DRAFT, Damaged, Log, explained, write_whole

try:
    import polars as pl
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "the tables of a scan are made by polars, which is not installed: pip install 'heedful[report]'", name="polars"
    ) from missing

FORMAT = 3
OFFSETS = (-2, -1, 0, 1, 2)
RANK = "rank90"
"""The rank that a scan reports, uses for its stopping rule, and uses to call a head low rank (docs/decisions/0018)."""
KEY = {"text": pl.String, "length": pl.Int64, "layer": pl.Int64, "head": pl.Int64}
NAMES = {"name": pl.String, "kind": pl.String, "turn": pl.Int64, "items": pl.Int64}
NUMBERS = {
    name: pl.Float64
    for name in (
        *("rank90", "rank90_low", "rank90_high", "rank95", "rank95_low", "rank95_high"),
        *("sigma1", "energy", "energy10", "decay", "stable_rank", "entropic_rank"),
        *("entropy", "entropy_share", "concentration", "largest", "sink", "first"),
        *(f"offset_{offset}" for offset in OFFSETS),
        *("distance", "label_score", "position_share"),
        *("base_rank90", "base_rank95", "base_energy10", "base_entropy", "logit_std"),
    )
}
"""All columns that have a mean over texts."""
PROVENANCE = {"seconds": pl.Float64, "seed": pl.Int64, "device": pl.String, "version": pl.String}
ROWS: dict[str, Any] = {
    **KEY,
    **NAMES,
    **NUMBERS,
    "label": pl.String,
    "sigma": pl.List(pl.Float32),
    "sigma_certified": pl.Int64,
    "base_sigma": pl.List(pl.Float32),
    **PROVENANCE,
}
DELTA: dict[str, Any] = {
    **KEY,
    **{
        name: pl.Float64
        for name in (
            *("rank90", "rank90_low", "rank90_high", "rank95", "rank95_low", "rank95_high"),
            *("energy", "relative", "sigma1"),
        )
    },
}
THUMBNAILS: dict[str, Any] = {
    **KEY,
    "height": pl.Int64,
    "width": pl.Int64,
    "cells": pl.List(pl.UInt8),
    "scale": pl.Float64,
    "pooling": pl.String,
    "tokens_per_cell": pl.Float64,
}
TABLES = {"rows": ROWS, "delta": DELTA, "thumbnails": THUMBNAILS}

UNTIMED = [name for name in ROWS if name != "seconds"]
"""The columns that are bit-identical in two runs of the same scan."""


class AnotherScan(ValueError):
    """A run folder holds another scan, or something else."""


class Broken(ValueError):
    """A file of a run folder can't be read."""


class Run:
    """One folder of records.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "run"
    >>> run = Run.begin(folder, {"model": "tiny", "fingerprint": "1f", "texts": [], "lengths": [8]})
    >>> run.write("0000", 8, [{"text": "0000", "length": 8, "layer": 0, "head": 0, "rank90": 3.0}])
    >>> Run.open(folder).rows()["rank90"].to_list(), sorted(run.done())
    ([3.0], [('0000', 8)])
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        self._logs: dict[str, Log] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open an existing run folder."""
        folder = Path(folder)
        return cls(folder, read_manifest(folder))

    @classmethod
    def begin(cls, folder: str | Path, manifest: Mapping[str, Any], *, resume: bool = False) -> Run:
        """Open a folder for writing: a new one or, to resume, one of the same scan."""
        folder, manifest = Path(folder), {"format": FORMAT, **manifest}
        if folder.exists() and not folder.is_dir():
            raise AnotherScan(f"{folder}: a file; expected a folder for the records, or none yet.")
        manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as it will be read back: lists, not tuples
        there = (folder / "scan.json").exists()
        if there and not resume:
            raise AnotherScan(
                f"{folder}: holds a scan already. Continue it with --resume (resume=True), or choose another folder; "
                "nothing in it was changed."
            )
        if not there and folder.is_dir():
            _check_empty(folder)
        if there:
            before = read_manifest(folder)
            why = differences(before, manifest)
            if why:
                raise AnotherScan(
                    f"{folder}: belongs to another scan: {' '.join(why)} Give another folder; nothing was touched."
                )
            manifest = _joined(before, manifest)
        run = cls(folder, dict(manifest))
        for table in TABLES if there else ():
            for head, _ in run._parts(table, damaged=lambda sentence: None):  # `done` warns about them
                run._check_owner(table, head)
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for draft in folder.glob(DRAFT + "*"):  # unfinished files of a killed process
                draft.unlink()
        run.save_manifest()
        return run

    def save_manifest(self) -> None:
        """Replace scan.json atomically."""
        text = json.dumps(self.manifest, indent=1, ensure_ascii=False, allow_nan=False)
        with explained(self.folder):
            write_whole(self.folder / "scan.json", text + "\n")

    def done(self, table: str = "rows") -> set[tuple[str, int]]:
        """Texts and lengths with an undamaged record, which need not be measured again.

        Reads every byte. Moves damaged bytes to `<table>.jsonl.gz.damaged`, with a warning; they do not count.
        """
        for sentence in self._log(table).set_aside():
            warnings.warn(f"{sentence} Its text is measured again.", Damaged, stacklevel=2)
        return {(head["text"], head["length"]) for head, _ in self._parts(table)}

    def write(self, text: str, length: int, rows: Sequence[Mapping[str, Any]], table: str = "rows") -> None:
        """Append the rows of one text at one length."""
        columns = {name: _plain([row.get(name) for row in rows]) for name in TABLES[table]}
        self._log(table).append({"text": text, "length": length, "scan": self._owner(text)}, columns)

    def rows(self) -> pl.DataFrame:
        """All rows, in the order of text, length, layer, head."""
        return self._read("rows", ROWS)

    def delta(self) -> pl.DataFrame:
        """How far apart the heads of two models are; no rows if one model was scanned alone."""
        return self._read("delta", DELTA)

    def thumbnails(self) -> pl.DataFrame:
        """Pictures of every head on the first text, at each length."""
        return self._read("thumbnails", THUMBNAILS)

    def _log(self, table: str) -> Log:
        return self._logs.setdefault(table, Log(self.folder / f"{table}.jsonl.gz"))

    def _parts(
        self, table: str, damaged: Callable[[str], None] | None = None
    ) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The appends in order: (header, undecoded columns)."""
        for head, columns in self._log(table).appends(damaged):
            yield json.loads(head), columns

    def _read(self, table: str, schema: Mapping[str, Any]) -> pl.DataFrame:
        def refuse(sentence: str) -> None:
            raise Broken(f"{sentence} Resume the scan: what is damaged is measured again.")

        found = {}
        for head, columns in self._parts(table, refuse):
            self._check_owner(table, head)
            found[head["text"], head["length"]] = columns  # the last append for a text and length counts
        path = self._log(table).path
        frames = [self._frame(path, json.loads(columns), schema) for columns in found.values()]
        return pl.concat(frames or [pl.DataFrame(schema=dict(schema))]).sort(*KEY)

    def _frame(self, path: Path, columns: Mapping[str, list[Any]], schema: Mapping[str, Any]) -> pl.DataFrame:
        missing = [name for name in schema if name not in columns]
        if missing:
            raise Broken(f"{path}: has no column {missing[0]!r}. Likely cause: another version of heedful wrote it.")
        return pl.DataFrame({name: _numbers(columns[name], kind) for name, kind in schema.items()}, schema=dict(schema))

    def _owner(self, text: str) -> dict[str, Any]:
        """The fields of the manifest that each record repeats, to identify its scan."""
        kept = {name: self.manifest.get(name) for name in ("model", "fingerprint", "options", "versions")}
        return {**kept, "texts": [each for each in self.manifest.get("texts", []) if each["id"] == text]}

    def _check_owner(self, table: str, part: Mapping[str, Any]) -> None:
        """Refuse a record that another scan wrote."""
        why = differences(part["scan"], self.manifest)
        if why:
            raise AnotherScan(
                f"{self.folder}: text {part['text']} at length {part['length']} in {table}.jsonl.gz does not belong to "
                f"the scan of scan.json: {' '.join(why)} Give another folder; nothing was touched."
            )


def _plain(values: list[Any]) -> list[Any]:
    """A column for JSON: non-finite numbers become "NaN", "Infinity" or "-Infinity"."""
    plain = []
    for value in values:
        if isinstance(value, list) and not math.isfinite(sum(value)):
            value = _plain(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        plain.append(value)
    return plain


def _numbers(values: list[Any], kind: Any) -> list[Any]:
    """The values of a column, decoded."""
    if kind == pl.Float64:
        return [float(x) if isinstance(x, str) else x for x in values]
    if kind == pl.List(pl.Float32):
        return [_numbers(x, pl.Float64) if isinstance(x, list) and not all(map(_is_float, x)) else x for x in values]
    return values


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    path = folder / "scan.json"
    if not path.is_file():
        raise Broken(f"{folder}: no scan.json in it, so no records of a scan. Likely cause: another folder was meant.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        form = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(
            f"{path}: no manifest of a scan ({error}). Likely cause: it was edited by hand, or the disk is damaged. "
            "Put the right one back, or scan into another folder."
        ) from error
    if form != FORMAT:
        raise Broken(
            f"{path}: records of form {form}, this version of heedful reads form {FORMAT}. Scan again into another "
            "folder, or use the version that wrote them."
        )
    return manifest


def title_of(manifest: Mapping[str, Any]) -> str:
    """A model's name without its folders.

    >>> title_of({"model": "/models/all-MiniLM-L6-v2/"})
    'all-MiniLM-L6-v2'
    """
    name = str(manifest.get("model") or "model").rstrip("/")
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Sentences on why two manifests belong to different scans; added texts and lengths do not count.

    >>> differences({"model": "a", "options": {"seed": 0}}, {"model": "b", "options": {"seed": 1}})
    ["the model was 'a', not 'b'.", 'seed was 0, not 1.']
    """
    why = []
    if before.get("model") != after.get("model"):
        why.append(f"the model was {before.get('model')!r}, not {after.get('model')!r}.")
    old, new = before.get("options") or {}, after.get("options") or {}
    why += [
        f"{name} was {old.get(name)!r}, not {new.get(name)!r}."
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    if before.get("fingerprint") != after.get("fingerprint"):
        versions = [(each.get("versions") or {}).get("heedful") for each in (before, after)]
        if versions[0] != versions[1]:
            why.append(f"heedful was {versions[0]}, not {versions[1]}.")
        elif not why:
            why.append("the weights or the configuration of the model changed.")
    if "lengths" in before and before.get("texts") and bool(before["lengths"]) != bool(after.get("lengths")):
        cut, whole = "cut to lengths", "read whole"
        was, now = (cut, whole) if before["lengths"] else (whole, cut)
        why.append(f"texts were {was}, not {now}.")
    known = {text["id"]: text["sha256"] for text in before.get("texts", [])}
    changed = [text["id"] for text in after.get("texts", []) if known.get(text["id"], text["sha256"]) != text["sha256"]]
    if changed:
        why.append(f"text {changed[0]} was another one.")
    return why


def _joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    texts = {text["id"]: text for text in [*before.get("texts", []), *after.get("texts", [])]}
    lengths = dict.fromkeys([*before.get("lengths", []), *after.get("lengths", [])])
    return {**before, **after, "texts": [texts[key] for key in sorted(texts)], "lengths": sorted(lengths)}


def _check_empty(folder: Path) -> None:
    """Refuse a folder that has no manifest but holds more than what a scan leaves if killed before its first record."""
    others = sorted(path for path in folder.iterdir() if not path.name.startswith(DRAFT))
    tables = [path for path in others if path.name in {f"{name}.jsonl.gz" for name in TABLES}]
    if tables:
        raise AnotherScan(
            f"{folder}: holds records ({tables[0].name}) but no scan.json, so nothing says which model, texts and "
            "options they belong to. Put scan.json back, or give another folder; nothing was touched."
        )
    if others and [path.name for path in others] != ["against"]:
        raise AnotherScan(
            f"{folder}: holds other things ({others[0].name}) and no scan; expected an empty folder, or none yet."
        )
