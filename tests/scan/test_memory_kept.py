"""Memory that is freed and taken again costs no fresh pages."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from heedful.scan.memory import MAPPED, TRIM, keep_pages


def fresh_pages(rounds: int = 5) -> int:
    """Of taking three pieces of 8 MiB at once, again and again."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        pieces = [b"x" * (8 << 20) for _ in range(3)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child computes nothing with torch
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_freed_pages_are_kept():
    there, here = os.pipe()
    child = os.fork()  # what malloc was told stays in this process
    if not child:
        try:
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(MAPPED, 128 << 10)
            libc.mallopt(TRIM, 128 << 10)
            usual = fresh_pages()
            keep_pages()
            fresh_pages(1)
            os.write(here, f"{usual} {fresh_pages()}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    usual, kept = map(int, os.read(there, 100).split())
    assert usual > 10 * kept
