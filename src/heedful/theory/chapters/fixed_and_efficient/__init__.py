"""Fixed patterns, efficient Transformers, orthogonal random attention."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.chapters.fixed_and_efficient import (
    abstract,
    comparison,
    fixed_heads,
    kernel_trick,
    learned_heads,
    linear,
    orthogonal_attention,
    orthogonal_features,
    orthogonal_projections,
    random_features,
    sparse_patterns,
    translation,
    variances,
)
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "fixed-and-efficient",
    Text("Fixed patterns and efficient attention", "固定模式与高效注意力"),
    "003_50e5c44f07166b50.txt",
    (
        *abstract.CLAIMS,
        *fixed_heads.CLAIMS,
        *learned_heads.CLAIMS,
        *translation.CLAIMS,
        *linear.CLAIMS,
        *random_features.CLAIMS,
        *variances.CLAIMS,
        *sparse_patterns.CLAIMS,
        *kernel_trick.CLAIMS,
        *orthogonal_features.CLAIMS,
        *orthogonal_attention.CLAIMS,
        *orthogonal_projections.CLAIMS,
        *comparison.CLAIMS,
    ),
)
