"""Why bidirectional attention may be of low rank, and what mends it."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "bidirectional", Text("The rank of bidirectional attention", "双向注意力的秩"), "004_ab5bd5ab0e7f4d86.txt", ()
)
