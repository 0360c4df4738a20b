"""The chapters and claims of a module that defines `CHAPTERS`: heedful's own, or another theory's."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Claim

REGISTRY = "heedful.theory.chapters"


@cache
def chapters_of(registry: str = REGISTRY) -> tuple[Chapter, ...]:
    """The chapters, in order."""
    return tuple(import_module(registry).CHAPTERS)


def claims_of(registry: str = REGISTRY) -> dict[str, Claim]:
    """Every claim by its id, in the order of the texts."""
    found: dict[str, Claim] = {}
    for chapter in chapters_of(registry):
        for claim in chapter.claims:
            if claim.id in found:
                raise ValueError(f"{claim.id}: two claims have this id.")
            found[claim.id] = claim
    return found
