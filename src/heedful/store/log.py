"""Append-only files of JSON lines, and atomic replacement of files. See `heedful.store` for how to use them."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # Windows: one process at a time
    flock = None  # type: ignore[assignment]

Record = dict[str, Any]

DRAFT = ".draft-"
"""Prefix of the name of a file that is being written."""
SUM = b'{"sum":"'
DIGITS = 16  # of a line's SHA-256
GZIP = b"\x1f\x8b\x08"  # first bytes of a gzip member
CHUNK = 1 << 16  # bytes decompressed at a time
LEVEL = 1  # compression level: columns of numbers take 5 ms instead of 39 at level 6, and 6 % more bytes


class Damaged(UserWarning):
    """Some bytes of a log differ from those that were written."""


class Unwritable(OSError):
    """The system refused to write to a file."""


@dataclass(frozen=True)
class Piece:
    """Some bytes of a log: an append (compressed) or a line (plain).

    lines    JSON, one record each; None if the bytes are damaged or incomplete
    cut      the end of the file is truncated: a process was killed while it wrote
    """

    start: int
    end: int
    lines: list[bytes] | None
    cut: bool = False


class Log:
    """A file of JSON lines that only grows; compressed if its name ends with .gz.

    allow_nan   write NaN and infinities as Python's json does; if False they raise ValueError, as JSON has none

    >>> import tempfile
    >>> log = Log(Path(tempfile.mkdtemp()) / "rows.jsonl")
    >>> log.append({"id": "a", "x": 1}, {"id": "b", "x": 2})
    >>> log.append({"id": "a", "x": 3})
    >>> [record["x"] for record in log.records()], log.latest("id")["a",]["x"]
    ([1, 2, 3], 3)
    """

    def __init__(self, path: str | Path, *, allow_nan: bool = False):
        self.path, self.allow_nan = Path(path), allow_nan
        self._whole = 0  # size of the file when it was last known to be undamaged

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records; they are on disk when this returns. In a compressed log, all are stored or none."""
        data = self._encode(records)
        with explained(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists()
            if not new and self.path.stat().st_size != self._whole:
                self._repair()
            with self._locked() as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    file.write(data)
                    flush(file)
                except OSError:
                    with suppress(OSError):
                        file.truncate(size)
                    raise
                self._whole = size + len(data)
            if new:
                flush_folder(self.path.parent)

    def records(self, damaged: Callable[[str], None] | None = None) -> Iterator[Record]:
        """All undamaged records, in the order of the file.

        damaged   called with a sentence about damaged bytes; by default a `Damaged` warning. A truncated end always
                  gives a warning.
        """
        for lines in self.appends(damaged):
            yield from map(json.loads, lines)

    def appends(self, damaged: Callable[[str], None] | None = None) -> Iterator[list[bytes]]:
        """The same as undecoded lines of JSON; in a compressed log, the lines of one append together."""
        for piece in self.pieces():
            if piece.lines is not None:
                yield piece.lines
            elif damaged is None or piece.cut:
                warnings.warn(self._sentence(piece), Damaged, stacklevel=2)
            else:
                damaged(self._sentence(piece))

    def latest(self, *fields: str) -> dict[tuple, Record]:
        """The last record for each value of these fields, in the order of their first appearance."""
        return {tuple(record.get(field) for field in fields): record for record in self.records()}

    def replace(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole log atomically."""
        with explained(self.path.parent):
            write_whole(self.path, b"".join(self._encode([record]) for record in records))
        self._whole = 0

    def set_aside(self) -> list[str]:
        """Move damaged bytes to `<name>.damaged`; return sentences about them, except for a truncated end."""
        if not self.path.exists():
            return []
        with explained(self.path.parent), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._repair()
        return [str(one.message) for one in caught if issubclass(one.category, Damaged)]

    def pieces(self) -> Iterator[Piece]:
        """The bytes of the file, append by append (compressed) or line by line (plain)."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        yield from _members(content) if self._packed else _lines(content)

    @property
    def _packed(self) -> bool:
        return self.path.suffix == ".gz"

    def _encode(self, records: Iterable[Mapping[str, Any]]) -> bytes:
        bodies = [
            json.dumps(one, ensure_ascii=False, allow_nan=self.allow_nan, separators=(",", ":")).encode()
            for one in records
        ]
        if self._packed:
            return gzip.compress(b"".join(body + b"\n" for body in bodies), LEVEL, mtime=0) if bodies else b""
        return b"".join(SUM + _digest(body[1:]) + b'",' + body[1:] + b"\n" for body in bodies)

    def _sentence(self, piece: Piece) -> str:
        if piece.cut:
            return f"{self.path}: its last record is cut off and left out. Likely cause: a process was killed here."
        return (
            f"{self.path}: bytes {piece.start} to {piece.end} are damaged, they do not fit their checksum. Likely "
            "cause: a damaged disk, or a copy that was cut short."
        )

    def _repair(self) -> None:
        """Rewrite the log with its undamaged pieces and move the rest to `<name>.damaged`."""
        with self._locked() as file:
            pieces = list(self.pieces())
            broken = [piece for piece in pieces if piece.lines is None]
            self._whole = file.seek(0, os.SEEK_END)
            if not broken:
                return
            file.seek(0)
            content = file.read()
            aside = self.path.with_name(self.path.name + ".damaged")
            with open(aside, "ab") as kept:
                kept.write(b"".join(content[piece.start : piece.end] for piece in broken))
                flush(kept)
            whole = [content[piece.start : piece.end] for piece in pieces if piece.lines is not None]
            write_whole(self.path, b"".join(whole))
            self._whole = sum(map(len, whole))
        for piece in broken:
            if not piece.cut:
                warnings.warn(f"{self._sentence(piece)} They were set aside as {aside.name}.", Damaged, stacklevel=4)

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        """The file, opened for reading and appending and locked against other writers."""
        while True:
            with open(self.path, "ab+") as file:
                if flock is not None:
                    flock(file, LOCK_EX)
                    if not self.path.exists() or os.fstat(file.fileno()).st_ino != self.path.stat().st_ino:
                        continue  # another process replaced the file while this one waited
                yield file
                return


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:DIGITS].encode()


def _lines(content: bytes) -> Iterator[Piece]:
    start = 0
    while start < len(content):
        end = content.find(b"\n", start) + 1
        if not end:
            yield Piece(start, len(content), None, cut=True)
            return
        line, head = content[start:end], len(SUM) + DIGITS
        lines = None
        if line[: len(SUM)] == SUM and line[head : head + 2] == b'",':
            body = line[head + 2 : -1]
            if line[len(SUM) : head] == _digest(body):
                lines = [b"{" + body]
        yield Piece(start, end, lines)
        start = end


def _members(content: bytes) -> Iterator[Piece]:
    start = 0
    while start < len(content):
        end, text = _member(content, start)
        if text is not None:
            yield Piece(start, end, text.splitlines())
            start = end
            continue
        cut, following = end == len(content), start
        while (following := content.find(GZIP, following + 1)) >= 0:
            if _member(content, following)[1] is not None:
                break
        end = following if following >= 0 else len(content)
        yield Piece(start, end, None, cut=cut and end == len(content))
        start = end


def _member(content: bytes, start: int) -> tuple[int, bytes | None]:
    """The end of a gzip member and its content; (end of the file, None) if it is truncated, (start, None) if it is
    damaged.
    """
    unpack, parts, at = zlib.decompressobj(wbits=31), [], start
    try:
        while not unpack.eof:
            if at >= len(content):
                return len(content), None
            parts.append(unpack.decompress(content[at : at + CHUNK]))
            at += CHUNK
    except zlib.error:
        return start, None
    return min(at, len(content)) - len(unpack.unused_data), b"".join(parts)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Replace a file atomically: a killed process leaves either the old or the new file."""
    path = Path(path)
    draft = path.with_name(f"{DRAFT}{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(draft, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            flush(file)
        draft.replace(path)
        flush_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def flush(file: IO[bytes]) -> None:
    """Flush written bytes to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush the entries of a folder to the disk."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an OSError inside the context into `Unwritable` with a sentence."""
    try:
        yield
    except Unwritable:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            sentence = f"{folder}: the disk is full. What was measured before is kept; resume when there is room."
            raise Unwritable(errno.ENOSPC, sentence) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            reason = f"can't be written to ({os.strerror(error.errno)}). Give a folder of your own by --out."
            raise Unwritable(error.errno, f"{folder}: {reason}") from error
        raise Unwritable(error.errno or errno.EIO, f"{folder}: can't be written to: {error}.") from error
