"""Layers: projections around a mechanism."""

from heedful.nn.attention import Attention
from heedful.nn.multihead import MultiheadAttention
from heedful.nn.rope import Rope

__all__ = ["Attention", "MultiheadAttention", "Rope"]
