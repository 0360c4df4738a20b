"""The low-rank structure of attention (11.3): spectra, the softmax bottleneck, projections, kernels, LoRA."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.chapters.low_rank import softmax_bottleneck
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "low-rank",
    Text("The low-rank structure of attention", "注意力矩阵的低秩结构"),
    "000_a0ad15dda516ed1d.txt",
    (*softmax_bottleneck.CLAIMS,),
)
