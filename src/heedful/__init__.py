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
from heedful.feature_maps import (
    Cos,
    CosFormer,
    Elu1,
    Exp,
    FeatureMap,
    Hedgehog,
    Identity,
    LogFeatureMap,
    Polynomial,
    Relu,
    Taylor,
)
from heedful.kernels.dispatch import backend
from heedful.mechanisms import CATALOG, FixedPattern, Linear, Quadratic, Retention, Softmax, build, identity, relu2
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
from heedful.random_features import FavorPlus, FavorPlusPlus, FavorSharp, ReluFeatures, Trig

__version__ = "0.1.0"

__all__ = [
    "CATALOG",
    "AttentionOperator",
    "Blocks",
    "Causal",
    "Cos",
    "CosFormer",
    "Cost",
    "Dims",
    "Elu1",
    "Exp",
    "FavorPlus",
    "FavorPlusPlus",
    "FavorSharp",
    "FeatureMap",
    "FixedPattern",
    "Full",
    "Global",
    "Hedgehog",
    "Identity",
    "Linear",
    "LogFeatureMap",
    "Mechanism",
    "Pattern",
    "Polynomial",
    "Quadratic",
    "RandomBlocks",
    "RecurrentMechanism",
    "Relu",
    "ReluFeatures",
    "Retention",
    "Softmax",
    "SparseFixed",
    "Strided",
    "Taylor",
    "Tree",
    "Trig",
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
