"""Debian packages as a source of text: downloaded, checked and read without being installed."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A downloaded package: name, version, file and the file's checksum."""

    name: str
    version: str
    path: Path
    sha256: str


def download(names: list[str], folder: Path) -> list[Package]:
    """Download packages that are not in the folder yet with `apt-get download`; return all that are there.

    Leaves out packages that this Debian release does not have; raises if there are none at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not _held(name, folder)]
    if missing and (shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None):
        raise FileNotFoundError(
            f"apt-get, dpkg-deb: not found, expected a Debian system to download {len(missing)} packages such as "
            f"{missing[0]!r}. Give your own parallel files instead: --source FILE --target FILE."
        )
    for name in missing:
        subprocess.run(["apt-get", "download", "-q", name], cwd=folder, capture_output=True)
    found = [_describe(name, path) for name in names if (path := _held(name, folder))]
    if not found:
        raise FileNotFoundError(
            f"none of {len(names)} packages such as {names[0]!r} could be downloaded to {folder}. Likely cause: no "
            "network, or package lists that `apt-get update` has never fetched. Your own parallel files work too: "
            "--source FILE --target FILE."
        )
    return found


def members(package: Package, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Path and content of each plain file of a package whose path is wanted."""
    unpacked = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package.path)], stdout=subprocess.PIPE)
    assert unpacked.stdout is not None
    with unpacked.stdout, tarfile.open(fileobj=unpacked.stdout, mode="r|") as archive:
        for entry in archive:
            path = entry.name.removeprefix("./")
            if entry.isreg() and wanted(path):
                content = archive.extractfile(entry)
                assert content is not None
                yield path, content.read()
    unpacked.wait()


def licences(copyright_file: str) -> list[str]:
    """Names of the licences that a package's copyright file lists, or that its text mentions.

    >>> licences("Published under the GNU Free Documentation License, Version 1.2; EXAMPLES included.")
    ['GNU Free Documentation License']
    """
    named = re.findall(r"^License: *(\S[^\n]*)", copyright_file, re.MULTILINE)
    if not named:
        gnu = r"GNU (?:Free Documentation|(?:Lesser |Affero )?General Public) License"
        named = re.findall(rf"{gnu}|GFDL|\bMPL\b|Creative Commons[^.,\n]*", copyright_file)
    return sorted({" ".join(name.split()) for name in named})


def _held(name: str, folder: Path) -> Path | None:
    return min(folder.glob(f"{name}_*.deb"), default=None)


def _describe(name: str, path: Path) -> Package:
    version = path.name.split("_")[1].replace("%3a", ":")
    return Package(name, version, path, hashlib.sha256(path.read_bytes()).hexdigest())
