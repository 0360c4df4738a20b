"""Where a record comes from: commit, versions, machine, time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def provenance() -> dict[str, str | None]:
    """Commit, versions and CPU of this process."""
    return {"commit": commit(), "torch": version("torch"), "python": platform.python_version(), "cpu": cpu()}


def now() -> str:
    """The current time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def version(package: str | None) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return None if package is None else metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The last commit that changed the library, with "+" if it was edited since; outside git, the version."""
    here = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", here, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        last = git("log", "-1", "--format=%h", "--", ".")
        edited = "+" if last and git("status", "--porcelain", "--", ".") else ""
    except (OSError, subprocess.CalledProcessError):
        last = edited = ""
    return last + edited if last else f"heedful {version('heedful')}"


def cpu() -> str:
    """The CPU's name and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        name = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), name
        )
    return f"{name}, {len(os.sched_getaffinity(0)) if platform.system() == 'Linux' else os.cpu_count()} cores"
