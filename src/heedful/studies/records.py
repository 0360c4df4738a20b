"""Records of runs: JSON lines, each with the key of its run, in a few logs of `heedful.store`.

All lines of a run are written in one append when it has ended, so a file never contains half a run. The last line of a
run is its `result`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heedful.store import Log

LIMIT = 14 * 2**20
"""Size of a file in bytes after which the next file is started."""


def append(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Append the lines of a run to the last file of the folder, in one append."""
    files = sorted(folder.glob("records-*.jsonl.gz"))
    number = len(files) - 1 if files and files[-1].stat().st_size < LIMIT else len(files)
    Log(folder / f"records-{number:02d}.jsonl.gz", allow_nan=True).append(*lines)  # a loss may be NaN


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """All lines of a folder's files; truncated or damaged appends are skipped, with a warning."""
    for path in sorted(folder.glob("records-*.jsonl.gz")):
        yield from Log(path).records()


def finished(*folders: Path) -> set[str]:
    """Keys of the runs that have a result in one of the folders."""
    return {line["run"] for folder in folders for line in read(folder) if line["kind"] == "result"}
