"""Patterns: the keys that each query may attend to.

A pattern is a predicate on two positions, i of the query and j of the key. It holds no tensor of shape n × n and no
length. Patterns compose with `&` and `|`.

    allows      the definition, elementwise
    spans       the keys that a block of queries may see, as intervals; a blocked kernel reads only these
    remembers   the keys that later queries may see; a decoder must cache them
    offsets     the visible keys as distances from the query, if they are the same at all positions

Positions are absolute. If there are fewer queries than keys, the queries are the last positions (the other keys come
from a cache), so `Causal` is aligned bottom-right.
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
