"""Records of runs: JSON lines, each with the key of its run, in a few logs of `heedful.store`.

A run's lines are appended when it has ended, all at once, so that a file never holds a part of a run that counts. The
last line of a run is its `result`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heedful.store import Log

LIMIT = 14 * 2**20
"""Bytes of a file after which the next is begun."""


def append(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Add the lines of a run to the last file of the folder, in one append."""
    files = sorted(folder.glob("records-*.jsonl.gz"))
    number = len(files) - 1 if files and files[-1].stat().st_size < LIMIT else len(files)
    Log(folder / f"records-{number:02d}.jsonl.gz", allow_nan=True).append(*lines)  # a loss may be NaN


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """All lines of a folder's files; an append that was cut off or damaged is left out, with a warning."""
    for path in sorted(folder.glob("records-*.jsonl.gz")):
        yield from Log(path).records()


def finished(*folders: Path) -> set[str]:
    """Keys of the runs that have a result in one of the folders."""
    return {line["run"] for folder in folders for line in read(folder) if line["kind"] == "result"}
