"""A bound on what this process takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from heedful.hf.modules import Refused

TRIM, MAPPED = -1, -3  # of mallopt: freed memory beyond which some goes back; sizes that are mapped by themselves
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse(text: str) -> int:
    """Bytes from such as 4G, 512MiB or 1.5 GB; units are powers of 1024.

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
    """Keep freed memory, up to so many bytes of it, for whoever asks next: for a process that only scans.

    A scan frees and takes the same few tensors for every layer, and fresh pages cost more than what is written to them.
    Only glibc can be told, and not to forget it again.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(MAPPED, 32 << 20)
    libc.mallopt(TRIM, kept)


@contextmanager
def limited(memory: int | None) -> Iterator[None]:
    """Inside, the process gets no more than so many bytes: an allocation beyond is refused, in a sentence.

    What counts is what is resident now and everything that is mapped from now on.
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
    """Inside, no bound holds: for those who can't be refused memory. (polars ends the process.)

    What they keep is not counted afterwards.
    """
    try:
        import resource
    except ImportError:  # then nothing was bounded
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
    """Bytes of address space."""
    import resource

    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
