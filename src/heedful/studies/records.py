"""Records of runs: JSON lines, each with the key of its run, in a few compressed files that only grow.

A run's lines are appended when it has ended, all at once, so that a file never holds a part of a run that counts. The
last line of a run is its `result`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 14 * 2**20
"""Bytes of a file after which the next is begun."""


def append(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Add the lines of a run to the last file of the folder; one gzip member a run."""
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("records-*.jsonl.gz"))
    number = len(files) - 1 if files and files[-1].stat().st_size < LIMIT else len(files)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with open(folder / f"records-{number:02d}.jsonl.gz", "ab") as file:
        file.write(gzip.compress(text.encode()))


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """All lines of a folder's files; what an interruption cut off at the end of a file is left out."""
    for path in sorted(folder.glob("records-*.jsonl.gz")):
        try:
            with gzip.open(path, "rt") as file:
                for line in file:
                    yield json.loads(line)
        except (EOFError, gzip.BadGzipFile, zlib.error, json.JSONDecodeError):
            continue


def finished(*folders: Path) -> set[str]:
    """Keys of the runs that have a result in one of the folders."""
    return {line["run"] for folder in folders for line in read(folder) if line["kind"] == "result"}
