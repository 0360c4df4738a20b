"""Measurements as flat rows with their provenance, in logs of `heedful.store`.

An interrupted run continues where it stopped: rows with the same code, versions and setting are not measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from heedful import store
from heedful.bench.setting import Setting

Row = dict[str, Any]

SAME = ("commit", "torch", "python", "cpu", "batch", "heads", "d", "dtype", "device", "threads", "clock", "seed")
"""Fields of the provenance that must agree for a row to be reused."""


def provenance(setting: Setting) -> Row:
    """Where rows come from; `Rows.add` adds the date of each row."""
    gpu = torch.cuda.get_device_name() if setting.device == "cuda" else None
    return {**store.provenance(), "gpu": gpu, **asdict(setting)}


def machine(row: Row) -> str:
    """The hardware of a row: the GPU, or the CPU and its threads."""
    if row.get("gpu"):
        return row["gpu"]
    return f"{row['cpu']}, {row['threads']} thread" + "s" * (row["threads"] != 1)


def problem(error: Exception) -> str:
    """An exception as one short line, for a row without a time."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


class Rows:
    """The rows of one table, the latest for each measurement.

    key     fields that identify a measurement
    stamp   the provenance of new rows; rows with another one stay in the log until they are measured again
    fresh   measure rows with this stamp again, too; rows that are not requested stay
    """

    def __init__(self, path: Path, key: tuple[str, ...], stamp: Mapping[str, Any], *, fresh: bool = False):
        self.log, self.key, self.stamp = store.Log(path), key, dict(stamp)
        self._rows = self.log.latest(*key)
        self._again = set(self._rows) if fresh else set()

    def _of(self, row: Mapping[str, Any]) -> tuple:
        return tuple(row.get(field) for field in self.key)

    def rows(self) -> list[Row]:
        """The rows with this stamp."""
        return [row for row in self._rows.values() if self._is_ours(row)]

    def _is_ours(self, row: Row) -> bool:
        return all(row.get(name) == self.stamp.get(name) for name in SAME)

    def find(self, **key: Any) -> Row | None:
        """The row of a measurement; None if it must be measured."""
        row = self._rows.get(self._of(key))
        return row if row is not None and self._of(key) not in self._again and self._is_ours(row) else None

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows to the log, with stamp and date."""
        made = [{**row, **self.stamp, "date": store.now()} for row in rows]
        self.log.append(*made)
        for row in made:
            self._rows.pop(self._of(row), None)
            self._again.discard(self._of(row))
            self._rows[self._of(row)] = row

    def forget_others(self) -> None:
        """Drop superseded rows and rows with another stamp: after a complete run they are useless."""
        self._rows = {self._of(row): row for row in self.rows()}
        self.log.replace(self._rows.values())
