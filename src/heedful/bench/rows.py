"""Measurements as flat rows with their provenance, kept in a JSON file that is whole after every row.

A run that was interrupted goes on where it stopped: rows of the same code, versions and setting are not taken again.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from heedful.bench.setting import Setting

Row = dict[str, Any]

SAME = ("commit", "torch", "python", "cpu", "batch", "heads", "d", "dtype", "device", "threads", "clock", "seed")
"""The part of the provenance that must agree for a row to be used again."""


def provenance(setting: Setting) -> Row:
    """Where a row comes from; the date is the row's own."""
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu(),
        "gpu": torch.cuda.get_device_name() if setting.device == "cuda" else None,
        **asdict(setting),
    }


def machine(row: Row) -> str:
    """What did the work of a row: the card, or the processor and its threads."""
    if row.get("gpu"):
        return row["gpu"]
    return f"{row['cpu']}, {row['threads']} thread" + "s" * (row["threads"] != 1)


def version(package: str | None) -> str | None:
    try:
        return None if package is None else metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def problem(error: Exception) -> str:
    """An exception as one short line, for the row that has no time."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


def commit() -> str:
    """The last commit that changed the library, with a plus where it was changed since; its version outside git."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", here, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        last = git("log", "-1", "--format=%h", "--", ".")
        return last + ("+" if git("status", "--porcelain", "--", ".") else "") if last else _released()
    except (OSError, subprocess.CalledProcessError):
        return _released()


def _released() -> str:
    return f"heedful {version('heedful')}"


def cpu() -> str:
    """The processor's name and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), name
        )
    return f"{name}, {len(os.sched_getaffinity(0)) if platform.system() == 'Linux' else os.cpu_count()} cores"


class Journal:
    """The rows of one table.

    key     fields that tell one measurement from another
    stamp   the provenance of rows to come; those with another one stay in the file until they are taken again
    fresh   rows with this stamp are to be taken again, too; those that are not asked for stay
    """

    def __init__(self, path: Path, key: tuple[str, ...], stamp: Mapping[str, Any], *, fresh: bool = False):
        self.path, self.key, self.stamp = path, key, dict(stamp)
        self._rows: dict[tuple, Row] = {}
        if path.exists():
            self._rows = {self._of(row): row for row in json.loads(path.read_text())}
        self._again = set(self._rows) if fresh else set()

    def _of(self, row: Mapping[str, Any]) -> tuple:
        return tuple(row.get(field) for field in self.key)

    def rows(self) -> list[Row]:
        """Those with this stamp."""
        return [row for row in self._rows.values() if all(row.get(name) == self.stamp.get(name) for name in SAME)]

    def find(self, **key: Any) -> Row | None:
        if self._of(key) in self._again:
            return None
        row = self._rows.get(self._of(key))
        return row if row is not None and row in self.rows() else None

    def add(self, rows: Iterable[Row]) -> None:
        """Write them down, stamped and dated."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        for row in rows:
            self._rows.pop(self._of(row), None)
            self._again.discard(self._of(row))
            self._rows[self._of(row)] = {**row, **self.stamp, "date": date}
        self._save()

    def forget_others(self) -> None:
        """Drop rows with another stamp: after a whole run they are of no use."""
        self._rows = {self._of(row): row for row in self.rows()}
        self._save()

    def _save(self) -> None:
        """One row a line; the file is replaced at once, so a kill leaves the old one or the new one."""
        text = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in self._rows.values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(self.path.name + f".{os.getpid()}")
        aside.write_text(f"[\n{text}\n]\n")
        aside.replace(self.path)
