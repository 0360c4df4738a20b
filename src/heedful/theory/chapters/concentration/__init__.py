"""How sparsely attention can focus: S(a) for exp, relu², no activation, linear, decay."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "concentration", Text("Can attention concentrate?", "注意力能否集中？"), "002_adade95d33d3717f.txt", ()
)
