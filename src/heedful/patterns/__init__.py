"""Who may attend to whom.

A pattern is a predicate on two positions, i of the query and j of the key, and nothing else: no tensor of
shape n × n, no length. Patterns compose with `&` and `|`.

    allows      the definition, element by element
    spans       the keys that a block of queries may see, as intervals: what a blocked kernel visits
    remembers   the keys that queries still to come may see: what a decoder must keep
    offsets     what every query sees, as distances from it, where that is the same at all positions

Positions are absolute. Where there are fewer queries than keys, the queries are the last ones (they follow a
cache), so `Causal` is aligned bottom-right.
"""

from heedful.patterns.base import And, Or, Pattern, Span
from heedful.patterns.kinds import (
    Blocks,
    Causal,
    Full,
    Global,
    RandomBlocks,
    SparseFixed,
    Strided,
    Summaries,
    Window,
)
from heedful.patterns.offsets import FAR, Offsets
from heedful.patterns.reach import Reachability, reach
from heedful.patterns.tree import Tree, balanced_tree, forest

__all__ = [
    "FAR",
    "And",
    "Blocks",
    "Causal",
    "Full",
    "Global",
    "Offsets",
    "Or",
    "Pattern",
    "RandomBlocks",
    "Reachability",
    "Span",
    "SparseFixed",
    "Strided",
    "Summaries",
    "Tree",
    "Window",
    "balanced_tree",
    "forest",
    "reach",
]
