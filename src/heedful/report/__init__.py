"""Reports: turn the records of a scan into one self-contained HTML file.

    write(scan, "report.html")                      one model
    write(scan, "report.html", against=other)       two, paired text by text

A report is a pure function of records: nothing is measured here. The page consists of `shell` (the parts common to all
pages of heedful), `words` (the answer), `data` (compact numbers and pictures) and the scripts in `assets`, which draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from heedful.store import write_whole

if TYPE_CHECKING:
    from heedful.report.data import Records


def write(scan: Records, path: str | Path, *, against: Records | None = None, language: str = "en") -> Path:
    """Write the report of a scan as one HTML file, atomically, in both languages; `language` is shown first."""
    from heedful.report.page import html

    path = Path(path)
    text = html(scan, against=against, language=language)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder; expected the name of a file, such as report.html")
        write_whole(path, text)
    except OSError as error:
        why = error.strerror or str(error)
        raise type(error)(
            error.errno, f"{path}: the report can't be written ({why}). Give a file in a folder of your own."
        ) from error
    return path
