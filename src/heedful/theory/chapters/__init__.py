"""The chapters of the running theory, one for each text: `CHAPTERS`, and every claim by its id: `CLAIMS`.

A chapter is a package with one file for each section of its text; each file ends with its list of claims.
"""

from __future__ import annotations

from heedful.theory.chapters import bidirectional, concentration, fixed_and_efficient, low_rank, scaled_dot_product
from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Claim

CHAPTERS: tuple[Chapter, ...] = (
    low_rank.CHAPTER,
    scaled_dot_product.CHAPTER,
    concentration.CHAPTER,
    fixed_and_efficient.CHAPTER,
    bidirectional.CHAPTER,
)
CLAIMS: dict[str, Claim] = {claim.id: claim for chapter in CHAPTERS for claim in chapter.claims}
