"""Fixed patterns, efficient Transformers, orthogonal random attention."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "fixed-and-efficient",
    Text("Fixed patterns and efficient attention", "固定模式与高效注意力"),
    "003_50e5c44f07166b50.txt",
    (),
)
