"""Scaled dot-product attention (5.1): definition, gradients, masks, complexity."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.chapters.scaled_dot_product import (
    complexity,
    definition,
    gradients,
    masks,
    paradigm,
    projections,
    scaling,
    softmax,
)
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "scaled-dot-product",
    Text("Scaled dot-product attention", "缩放点积注意力"),
    "001_468dfb8c2b12eb46.txt",
    (
        *paradigm.CLAIMS,
        *definition.CLAIMS,
        *projections.CLAIMS,
        *scaling.CLAIMS,
        *softmax.CLAIMS,
        *complexity.CLAIMS,
        *masks.CLAIMS,
        *gradients.CLAIMS,
    ),
)
