"""Measures are plain functions of an `AttentionOperator`: none forms the matrix."""

from heedful.measures.concentration import Concentration, concentration
from heedful.measures.positions import PositionalPattern, positional_pattern
from heedful.measures.rows import RowStatistics, entropy, row_statistics, sink_mass

__all__ = [
    "Concentration",
    "PositionalPattern",
    "RowStatistics",
    "concentration",
    "entropy",
    "positional_pattern",
    "row_statistics",
    "sink_mass",
]
