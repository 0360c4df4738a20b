"""A limit on the memory of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heedful.hf.modules import Refused

TRIM, MAPPED = -1, -3  # mallopt's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse(text: str) -> int:
    """Bytes from a text such as 4G, 512MiB or 1.5 GB; units are powers of 1024.

    >>> parse("4GiB") == parse("4 g") == 4 * 2**30
    True
    """
    kept = text.strip().upper().removesuffix("B").removesuffix("I").strip()
    number, unit = (kept[:-1], kept[-1]) if kept and kept[-1].isalpha() else (kept, "")
    try:
        found = int(float(number) * UNITS[unit])
    except (KeyError, ValueError):
        found = 0
    if found <= 0:
        raise ValueError(f"memory: {text!r}, expected a size such as 4G or 512M.")
    return found


def keep_pages(kept: int = 256 << 20) -> None:
    """Let malloc reuse up to `kept` bytes of freed memory instead of returning them. For a process that only scans.

    A scan frees and allocates the same few tensors for every layer, and fresh pages cost more than the writes to them.
    Works with glibc only, and cannot be undone.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(MAPPED, 32 << 20)
    libc.mallopt(TRIM, kept)


@contextmanager
def limited(memory: int | None) -> Iterator[None]:
    """Limit this process to `memory` bytes inside the context; an allocation beyond raises MemoryError.

    The limit counts memory that is resident on entry and everything mapped from then on.
    """
    if memory is None:
        yield
        return
    try:
        import resource

        page = resource.getpagesize()
        mapped, resident = (int(x) * page for x in Path("/proc/self/statm").read_text().split()[:2])
    except (ImportError, OSError) as missing:
        raise Refused("memory: only Linux tells and bounds what a process takes; leave it out here.") from missing
    if memory <= resident:
        raise Refused(
            f"memory: {_size(memory)}, expected more than {_size(resident)}, which the model and torch take already."
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + memory - resident
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise MemoryError(
            f"memory: {_size(memory)} did not do. What was measured before is kept; resume with more, with shorter "
            "lengths, or with fewer layers."
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def lifted() -> Iterator[None]:
    """Lift the limit inside the context, for code that can't handle a refused allocation (polars ends the process).

    Memory that it still holds afterwards does not count towards the limit.
    """
    try:
        import resource
    except ImportError:  # then there is no limit to lift
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    before = _mapped()
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        wanted = soft + max(0, _mapped() - before)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _mapped() -> int:
    """Bytes of address space that this process has mapped."""
    import resource

    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
