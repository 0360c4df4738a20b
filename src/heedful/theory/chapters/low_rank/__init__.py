"""The low-rank structure of attention (11.3): spectra, the softmax bottleneck, projections, kernels, LoRA, layers."""

from heedful.theory.chapters.chapter import Chapter
from heedful.theory.chapters.low_rank import (
    compression,
    energies,
    estimators,
    geometry,
    kernels,
    layers,
    linformers,
    lora,
    projections,
    softmax_bottleneck,
    spectra,
)
from heedful.theory.claim import Text

CHAPTER = Chapter(
    "low-rank",
    Text("The low-rank structure of attention", "注意力矩阵的低秩结构"),
    "000_a0ad15dda516ed1d.txt",
    (
        *spectra.CLAIMS,
        *energies.CLAIMS,
        *softmax_bottleneck.CLAIMS,
        *geometry.CLAIMS,
        *projections.CLAIMS,
        *linformers.CLAIMS,
        *kernels.CLAIMS,
        *estimators.CLAIMS,
        *lora.CLAIMS,
        *layers.CLAIMS,
        *compression.CLAIMS,
    ),
)
