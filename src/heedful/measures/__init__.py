"""Measures: functions of an `AttentionOperator`; their results include certified bounds where these exist."""

from heedful.measures.concentration import Concentration, concentration
from heedful.measures.heads import HeadMeasures, head_measures
from heedful.measures.positions import PositionalPattern, positional_pattern
from heedful.measures.rows import RowStatistics, entropy, row_statistics, sink_mass
from heedful.measures.search import SearchOptions
from heedful.measures.spectrum import (
    Decay,
    EffectiveRank,
    Interval,
    Spectrum,
    decay_exponent,
    effective_rank,
    energy_share,
    entropic_rank,
    numerical_rank,
    row_correlation,
    spectrum,
    stable_rank,
    svdvals,
)

__all__ = [
    "Concentration",
    "Decay",
    "EffectiveRank",
    "HeadMeasures",
    "Interval",
    "PositionalPattern",
    "RowStatistics",
    "SearchOptions",
    "Spectrum",
    "concentration",
    "decay_exponent",
    "effective_rank",
    "energy_share",
    "entropic_rank",
    "entropy",
    "head_measures",
    "numerical_rank",
    "positional_pattern",
    "row_correlation",
    "row_statistics",
    "sink_mass",
    "spectrum",
    "stable_rank",
    "svdvals",
]
