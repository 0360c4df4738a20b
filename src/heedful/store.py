"""The records of a scan: flat rows in a folder, whole after every text. What writes them and what shows them meet here.

    scan.json                       the manifest: which model, layers, texts, lengths, options, versions
    rows/<text>-<length>.parquet    one row for each layer and head of one text at one length
    delta/<text>-<length>.parquet   where two models were scanned together: how far apart their heads are
    thumbnails/<text>-<length>.parquet   small pictures of every head, on the first text at each length

A part file is written beside its place, flushed to the disk and renamed, so that it is there whole or not at all: a
process that is killed loses the text it was at, and nothing else. Each part holds a checksum of its own bytes and says
which scan it belongs to; both are verified before anything in it is decoded. Needs `pip install 'heedful[report]'`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

try:
    import polars as pl
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "records of a scan are kept by polars, which is not installed: pip install 'heedful[report]'", name="polars"
    ) from missing

FORMAT = 2
OFFSETS = (-2, -1, 0, 1, 2)
RANK = "rank90"
"""The rank that a scan reports, steers by and calls low (docs/decisions/0018)."""
DRAFT = ".draft-"
SUM, SCAN = "heedful.sha256", "heedful.scan"  # what a part says of itself, in the metadata of its Parquet footer
MARK = b"heedful-sha256:"
BLANK = MARK + b"0" * 64

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
"""The columns that two runs of the same scan agree on, bit for bit."""


class AnotherScan(ValueError):
    """A run folder that holds something else than what it was opened for."""


class Broken(ValueError):
    """A file of a run folder that can't be read."""


class Damaged(UserWarning):
    """A part that was set aside because its bytes are not those that were written."""


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
        manifest = json.loads(json.dumps(manifest, allow_nan=False))  # as it will be read: lists, not tuples
        there = (folder / "scan.json").exists()
        if there and not resume:
            raise AnotherScan(
                f"{folder}: holds a scan already. Go on with it by resuming, or give another folder; nothing in it was "
                "touched."
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
        for path in run._parts():
            with suppress(Broken):  # `done` sets it aside
                run._check_owner(path, _sealed(path))
        with _teaching(folder):
            for name in TABLES:
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
        """Texts and lengths that need not be measured again: those whose part is there and whole.

        Every byte is read. A damaged part is renamed to `.damaged`, with a warning, and does not count.
        """
        found = set()
        for path in self._parts(table):
            text, _, length = path.stem.rpartition("-")
            try:
                _sealed(path)
            except Broken as damage:
                aside = _free(path)
                with _teaching(self.folder):
                    path.rename(aside)
                warnings.warn(
                    f"{damage} It was set aside as {aside.name}; its text is measured again.", Damaged, stacklevel=2
                )
                continue
            found.add((text, int(length)))
        return found

    def write(self, text: str, length: int, rows: Sequence[Mapping[str, Any]], table: str = "rows") -> None:
        """The part of one text at one length."""
        schema, path = TABLES[table], self.folder / table / f"{text}-{length}.parquet"
        complete = [{name: row.get(name) for name in schema} for row in rows]
        frame = pl.DataFrame(complete, schema=dict(schema), orient="row")
        about = {SUM: BLANK.decode(), SCAN: json.dumps({**self._owner(text), "part": path.stem}, ensure_ascii=True)}
        self._put(path, lambda draft: _seal(frame, draft, about))

    def rows(self) -> pl.DataFrame:
        """All rows, in the order of text, length, layer, head."""
        return self._read("rows", ROWS).sort(*KEY)

    def delta(self) -> pl.DataFrame:
        """How far the heads of two models are apart; no rows where one was scanned alone."""
        return self._read("delta", DELTA).sort(*KEY)

    def thumbnails(self) -> pl.DataFrame:
        """Pictures of every head on the first text, at each length."""
        return self._read("thumbnails", THUMBNAILS).sort(*KEY)

    def _parts(self, table: str | None = None) -> Iterator[Path]:
        for name in TABLES if table is None else (table,):
            yield from sorted((self.folder / name).glob("*.parquet"))

    def _read(self, table: str, schema: Mapping[str, Any]) -> pl.DataFrame:
        parts = [self._part(path, schema) for path in self._parts(table)]
        return pl.concat(parts) if parts else pl.DataFrame(schema=dict(schema))

    def _part(self, path: Path, schema: Mapping[str, Any]) -> pl.DataFrame:
        try:
            content = _sealed(path)
        except Broken as damage:
            raise Broken(f"{damage} Resume the scan: that text is measured again.") from damage
        self._check_owner(path, content)
        try:
            part = pl.read_parquet(content)
        except pl.exceptions.PolarsError as error:
            raise Broken(f"{path}: can't be read as Parquet ({str(error).splitlines()[0]}).") from error
        missing = [name for name in schema if name not in part.columns]
        if missing:
            raise Broken(f"{path}: has no column {missing[0]!r}. Likely cause: another version of heedful wrote it.")
        return part.select(*schema)

    def _owner(self, text: str) -> dict[str, Any]:
        """What a part says of the scan that it belongs to, as the manifest has it."""
        kept = {name: self.manifest.get(name) for name in ("model", "fingerprint", "options", "versions")}
        return {**kept, "texts": [each for each in self.manifest.get("texts", []) if each["id"] == text]}

    def _check_owner(self, path: Path, content: bytes) -> None:
        """Refuse a part that another scan wrote, or that has another part's name."""
        said = json.loads(pl.read_parquet_metadata(BytesIO(content))[SCAN])
        why = differences(said, self.manifest)
        if said["part"] != path.stem:
            why.append(f"it was written as {said['part']}.")
        if why:
            where = path.relative_to(self.folder)
            raise AnotherScan(
                f"{self.folder}: {where} does not belong to the scan of scan.json: {' '.join(why)} Move it away, or "
                "give another folder; nothing was touched."
            )

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
    """A model's name without the folders before it.

    >>> title_of({"model": "/models/all-MiniLM-L6-v2/"})
    'all-MiniLM-L6-v2'
    """
    name = str(manifest.get("model") or "model").rstrip("/")
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Why two manifests are not of one scan, in sentences; texts and lengths may be added.

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
    """Refuse a folder without a manifest that holds more than a scan leaves which is killed before its first record."""
    ours = [path for name in (*TABLES, "against") if (path := folder / name).is_dir()]
    parts = sorted(path for each in ours for path in each.rglob("*") if path.is_file() and not _is_draft(path))
    if parts:
        raise AnotherScan(
            f"{folder}: holds records ({parts[0].relative_to(folder)}) but no scan.json, so nothing says which model, "
            "texts and options they belong to. Put scan.json back, or give another folder; nothing was touched."
        )
    others = sorted(path for path in folder.iterdir() if path not in ours and not _is_draft(path))
    if others:
        raise AnotherScan(
            f"{folder}: holds other things ({others[0].name}) and no scan; expected an empty folder, or none yet."
        )


def _is_draft(path: Path) -> bool:
    return path.name.startswith(DRAFT)


def _seal(frame: pl.DataFrame, path: Path, about: dict[str, str]) -> None:
    """Write a part with the checksum of its own bytes: of the file as it is while the checksum's place is blank."""
    frame.write_parquet(path, compression="zstd", metadata=about)
    content = path.read_bytes()
    path.write_bytes(content.replace(BLANK, MARK + hashlib.sha256(content).hexdigest().encode()))


def _sealed(path: Path) -> bytes:
    """The bytes of a part, once they are known to be those that were written.

    Parquet would decode some damaged pages to other numbers, so nothing is decoded before.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Broken(f"{path}: can't be read ({error.strerror or error}).") from error
    start = content.rfind(MARK)
    said, blank = content[start : start + len(BLANK)], content[:start] + BLANK + content[start + len(BLANK) :]
    if start < 0 or said[len(MARK) :] != hashlib.sha256(blank).hexdigest().encode():
        raise Broken(
            f"{path}: damaged, its bytes do not fit its checksum. Likely cause: a damaged disk, or a copy that was cut "
            "short."
        )
    return content


def _free(path: Path) -> Path:
    """A name for a damaged part that no other has."""
    names = (f"{path.name}.damaged{'' if at == 0 else f'-{at}'}" for at in range(10_000))
    return next(new for new in map(path.with_name, names) if not new.exists())


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
