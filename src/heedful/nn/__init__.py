"""Layers: projections around a mechanism."""

from heedful.nn.attention import Attention
from heedful.nn.fixed_heads import FixedHeads
from heedful.nn.masked_softmax import MaskedSoftmax
from heedful.nn.materialised_linear import MaterialisedLinear
from heedful.nn.multihead import MultiheadAttention
from heedful.nn.projections import FrozenProjection, Gaussian, Hadamard, LoRA, Orthogonal
from heedful.nn.rope import Rope
from heedful.nn.transformer import (
    LEARNED,
    Counts,
    Heads,
    Sinusoidal,
    Transformer,
    adapted,
    count_weights,
    trained,
)

__all__ = [
    "LEARNED",
    "Attention",
    "Counts",
    "FixedHeads",
    "FrozenProjection",
    "Gaussian",
    "Hadamard",
    "Heads",
    "LoRA",
    "MaskedSoftmax",
    "MaterialisedLinear",
    "MultiheadAttention",
    "Orthogonal",
    "Rope",
    "Sinusoidal",
    "Transformer",
    "adapted",
    "count_weights",
    "trained",
]
