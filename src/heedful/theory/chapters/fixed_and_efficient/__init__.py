"""Fixed patterns, efficient Transformers, orthogonal random attention."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.chapters.fixed_and_efficient import (
    comparison,
    kernel_trick,
    orthogonal_attention,
    orthogonal_features,
    orthogonal_projections,
    sparse_patterns,
)
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "fixed-and-efficient",
    Text("Fixed patterns and efficient attention", "固定模式与高效注意力"),
    "003_50e5c44f07166b50.txt",
    (
        *sparse_patterns.CLAIMS,
        *kernel_trick.CLAIMS,
        *orthogonal_features.CLAIMS,
        *orthogonal_attention.CLAIMS,
        *orthogonal_projections.CLAIMS,
        *comparison.CLAIMS,
    ),
)
