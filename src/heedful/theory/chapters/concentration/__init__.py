"""How sparsely attention can focus: S(a) for exp, relu², no activation, linear, decay."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.chapters.concentration import (
    general_linear,
    intro,
    linear_decay,
    minimal_linear,
    number_of_features,
    simplified_form,
    sparsity,
    summary,
    two_examples,
)
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "concentration",
    Text("Can attention concentrate?", "注意力能否集中？"),
    "002_adade95d33d3717f.txt",
    (
        *intro.CLAIMS,
        *sparsity.CLAIMS,
        *simplified_form.CLAIMS,
        *two_examples.CLAIMS,
        *minimal_linear.CLAIMS,
        *general_linear.CLAIMS,
        *number_of_features.CLAIMS,
        *linear_decay.CLAIMS,
        *summary.CLAIMS,
    ),
)
