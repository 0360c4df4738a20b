"""heedful measures the structure of Transformer attention, and puts it to work."""

from heedful import nn, segments, testing
from heedful.core import (
    Cost,
    Dims,
    Mechanism,
    RecurrentMechanism,
    check_finite,
    group_heads,
)
from heedful.kernels.dispatch import backend
from heedful.mechanisms import CATALOG, Quadratic, Softmax, build, identity, relu2
from heedful.operator import AttentionOperator
from heedful.patterns import (
    Blocks,
    Causal,
    Full,
    Global,
    Pattern,
    RandomBlocks,
    SparseFixed,
    Strided,
    Tree,
    Window,
)

__version__ = "0.1.0"

__all__ = [
    "CATALOG",
    "AttentionOperator",
    "Blocks",
    "Causal",
    "Cost",
    "Dims",
    "Full",
    "Global",
    "Mechanism",
    "Pattern",
    "Quadratic",
    "RandomBlocks",
    "RecurrentMechanism",
    "Softmax",
    "SparseFixed",
    "Strided",
    "Tree",
    "Window",
    "backend",
    "build",
    "check_finite",
    "group_heads",
    "identity",
    "nn",
    "relu2",
    "segments",
    "testing",
]
