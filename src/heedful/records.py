"""The records of a scan: flat rows in a folder, whole after every text. What writes them and what shows them meet here.

    scan.json                       the manifest: which model, layers, texts, lengths, options, versions
    rows/<text>-<length>.parquet    one row for each layer and head of one text at one length
    delta/<text>-<length>.parquet   where two models were scanned together: how far apart their heads are
    thumbnails/first.parquet        small pictures of every head, on the first text

A part file is written beside its place, flushed to the disk and renamed, so that it is there whole or not at all: a
process that is killed loses the text it was at, and nothing else. Needs `pip install 'heedful[report]'`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import polars as pl
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "records of a scan are kept by polars, which is not installed: pip install 'heedful[report]'", name="polars"
    ) from missing

FORMAT = 1
OFFSETS = (-2, -1, 0, 1, 2)
DRAFT = ".draft-"

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
"""Everything that has a mean over texts."""
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
    "layer": pl.Int64,
    "head": pl.Int64,
    "height": pl.Int64,
    "width": pl.Int64,
    "cells": pl.List(pl.UInt8),
    "scale": pl.Float64,
    "pooling": pl.String,
    "tokens_per_cell": pl.Float64,
}

UNTIMED = [name for name in ROWS if name != "seconds"]
"""The columns that two runs of the same scan agree on, bit for bit."""


class AnotherScan(ValueError):
    """A run folder that holds something else than what it was opened for."""


class Broken(ValueError):
    """A file of a run folder that can't be read."""


class Unwritable(OSError):
    """A folder that the system does not let us write to."""


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

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A folder that was written before."""
        folder = Path(folder)
        return cls(folder, read_manifest(folder))

    @classmethod
    def begin(cls, folder: str | Path, manifest: Mapping[str, Any], *, resume: bool = False) -> Run:
        """A folder to write to: a new one or, to resume, one of the same scan."""
        folder, manifest = Path(folder), {"format": FORMAT, **manifest}
        if folder.exists() and not folder.is_dir():
            raise AnotherScan(f"{folder}: a file; expected a folder for the records, or none yet.")
        there = (folder / "scan.json").exists()
        if there and not resume:
            raise AnotherScan(
                f"{folder}: holds a scan already. Go on with it by resuming, or give another folder; nothing in it was "
                "touched."
            )
        if not there and folder.is_dir() and any(_foreign(folder)):
            raise AnotherScan(
                f"{folder}: holds other things ({_foreign(folder)[0].name}) and no scan; expected an empty folder, or "
                "none yet."
            )
        if there:
            before = read_manifest(folder)
            why = differences(before, manifest)
            if why:
                raise AnotherScan(
                    f"{folder}: belongs to another scan: {' '.join(why)} Give another folder; nothing was touched."
                )
            manifest = _joined(before, manifest)
        run = cls(folder, dict(manifest))
        with _teaching(folder):
            for name in ("rows", "delta", "thumbnails"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            for draft in folder.rglob(DRAFT + "*"):  # what a killed process had not finished
                draft.unlink()
        run.save_manifest()
        return run

    def save_manifest(self) -> None:
        """Replace scan.json at once."""
        text = json.dumps(self.manifest, indent=1, ensure_ascii=False, allow_nan=False)
        self._put(self.folder / "scan.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))

    def done(self, table: str = "rows") -> set[tuple[str, int]]:
        """Texts and lengths that need not be measured again. A part that can't be read is put aside, not counted."""
        found = set()
        for path in sorted((self.folder / table).glob("*.parquet")):
            text, _, length = path.stem.rpartition("-")
            try:
                pl.read_parquet_schema(path)
            except (OSError, pl.exceptions.PolarsError):
                with _teaching(self.folder):
                    path.rename(path.with_name(path.name + ".broken"))
                continue
            found.add((text, int(length)))
        return found

    def write(self, text: str, length: int, rows: Sequence[Mapping[str, Any]], table: str = "rows") -> None:
        """The part of one text at one length."""
        schema = DELTA if table == "delta" else ROWS
        self._put_frame(self.folder / table / f"{text}-{length}.parquet", rows, schema)

    def write_thumbnails(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._put_frame(self.folder / "thumbnails" / "first.parquet", rows, THUMBNAILS)

    def rows(self) -> pl.DataFrame:
        """All rows, in the order of text, length, layer, head."""
        return self._read("rows", ROWS).sort(*KEY)

    def delta(self) -> pl.DataFrame:
        """How far the heads of two models are apart; no rows where one was scanned alone."""
        return self._read("delta", DELTA).sort(*KEY)

    def thumbnails(self) -> pl.DataFrame:
        return self._read("thumbnails", THUMBNAILS).sort("layer", "head")

    def _read(self, table: str, schema: Mapping[str, Any]) -> pl.DataFrame:
        parts = [self._part(path, schema) for path in sorted((self.folder / table).glob("*.parquet"))]
        return pl.concat(parts) if parts else pl.DataFrame(schema=dict(schema))

    def _part(self, path: Path, schema: Mapping[str, Any]) -> pl.DataFrame:
        try:
            part = pl.read_parquet(path)
        except (OSError, pl.exceptions.PolarsError) as error:
            raise Broken(
                f"{path}: can't be read as Parquet ({str(error).splitlines()[0]}). Likely cause: a damaged disk, or a "
                "copy that was cut short. Resume the scan: that text is measured again."
            ) from error
        missing = [name for name in schema if name not in part.columns]
        if missing:
            raise Broken(f"{path}: has no column {missing[0]!r}. Likely cause: another version of heedful wrote it.")
        return part.select(*schema)

    def _put_frame(self, path: Path, rows: Iterable[Mapping[str, Any]], schema: Mapping[str, Any]) -> None:
        complete = [{name: row.get(name) for name in schema} for row in rows]
        frame = pl.DataFrame(complete, schema=dict(schema), orient="row")
        self._put(path, lambda draft: frame.write_parquet(draft, compression="zstd"))

    def _put(self, path: Path, write) -> None:
        draft = path.with_name(f"{DRAFT}{path.name}.{os.getpid()}")
        with _teaching(self.folder):
            try:
                write(draft)
                _flush(draft)
                draft.replace(path)
                _flush(path.parent)
            finally:
                draft.unlink(missing_ok=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    path = folder / "scan.json"
    if not path.is_file():
        raise Broken(f"{folder}: no scan.json in it, so no records of a scan. Likely cause: another folder was meant.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        form = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(f"{path}: no manifest of a scan ({error}). Likely cause: it was edited by hand.") from error
    if form != FORMAT:
        raise Broken(f"{path}: records of form {form}, this version of heedful reads form {FORMAT}.")
    return manifest


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Why two manifests are not of one scan; texts and lengths may be added."""
    why = []
    if before.get("model") != after.get("model"):
        why.append(f"of {before.get('model')}, not {after.get('model')}.")
    old, new = before.get("options", {}), after.get("options", {})
    why += [f"{name} was {old.get(name)!r}, not {new[name]!r}." for name in new if old.get(name) != new[name]]
    if not why and before.get("fingerprint") != after.get("fingerprint"):
        why.append("the weights or the version of heedful are others.")
    known = {text["id"]: text["sha256"] for text in before.get("texts", [])}
    changed = [text["id"] for text in after.get("texts", []) if known.get(text["id"], text["sha256"]) != text["sha256"]]
    if changed:
        why.append(f"text {changed[0]} was another one.")
    return why


def _joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    texts = {text["id"]: text for text in [*before.get("texts", []), *after.get("texts", [])]}
    lengths = dict.fromkeys([*before.get("lengths", []), *after.get("lengths", [])])
    return {**before, **after, "texts": [texts[key] for key in sorted(texts)], "lengths": sorted(lengths)}


def _foreign(folder: Path) -> list[Path]:
    """What lies in a folder that a scan, killed before its first record, would not have left there."""
    ours = ("rows", "delta", "thumbnails", "against")
    return sorted(path for path in folder.iterdir() if path.name not in ours and not path.name.startswith(DRAFT))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _teaching:
    """What the system refuses, in a sentence."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Unwritable) or not isinstance(error, OSError | pl.exceptions.ComputeError):
            return
        number = error.errno if isinstance(error, OSError) else None
        kept = "What was measured before is kept; resume when there is room."
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise Unwritable(errno.ENOSPC, f"{self.folder}: the disk is full. {kept}") from error
        if number in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise Unwritable(
                number,
                f"{self.folder}: can't be written to ({os.strerror(number)}). Give a folder of your own by --out.",
            ) from error
        raise Unwritable(number or errno.EIO, f"{self.folder}: can't be written to: {error}.") from error
