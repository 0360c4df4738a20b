"""Why bidirectional attention may be of low rank, and what mends it."""

from heedful.theory.chapters.bidirectional import causes, definition, effects, note, phenomena, remedies, summary
from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "bidirectional",
    Text("The rank of bidirectional attention", "双向注意力的秩"),
    "004_ab5bd5ab0e7f4d86.txt",
    (
        *note.CLAIMS,
        *definition.CLAIMS,
        *phenomena.CLAIMS,
        *causes.CLAIMS,
        *effects.CLAIMS,
        *remedies.CLAIMS,
        *summary.CLAIMS,
    ),
)
