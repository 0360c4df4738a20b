"""Layers: projections around a mechanism."""

from heedful.nn.attention import Attention
from heedful.nn.multihead import MultiheadAttention
from heedful.nn.projections import FrozenProjection, Gaussian, Hadamard, LoRA, Orthogonal
from heedful.nn.rope import Rope

__all__ = [
    "Attention",
    "FrozenProjection",
    "Gaussian",
    "Hadamard",
    "LoRA",
    "MultiheadAttention",
    "Orthogonal",
    "Rope",
]
