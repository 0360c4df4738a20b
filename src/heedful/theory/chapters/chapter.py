from __future__ import annotations

from dataclasses import dataclass

from heedful.theory.claim import Claim, Text


@dataclass(frozen=True)
class Chapter:
    """The claims of one text, in its order."""

    name: str
    title: Text
    text: str  # its file
    claims: tuple[Claim, ...]
