"""Attention along a tree (Li et al. 2020, syntax-aware local attention, arXiv:2012.15150): near is near in the syntax.

matrix      softmax over the keys within `radius` edges of the query in a given tree
fast        each query with a list of its own keys, queries with lists of about one length together
recurrence  a cache of all keys and values: any of them may have a child to come
cost        2 · pairs · (d + e) flops, state (d + e) · m;  pairs ≈ N · neighbours

Positions are those of the tree: one tree serves every row of a batch and every segment. Where each sentence has a tree
of its own, sentences are packed into one sequence and their trees into one forest, whose trees do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from heedful.core import Mechanism
from heedful.kernels.neighbours import neighbours
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Tree


class TreeSoftmax(Softmax):
    """Softmax over the tokens within `radius` edges in a tree.

    >>> import torch, heedful as h
    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
    >>> heads = [1, -1, 4, 4, 1]  # "dogs chase the small cat": chase is the root, cat its child, the and small cat's
    >>> attend = h.TreeSoftmax(heads, radius=1)
    >>> attend(q, k, v).shape
    torch.Size([2, 8, 5, 16])
    >>> (attend.matrix(q, k)[0, 0, 2] > 0).tolist()  # "the" sees itself and "cat"
    [False, False, True, False, True]

    Sentences with a tree each, padded to 5 tokens: fold the batch into the tokens, and the trees into a forest.

    >>> trees = h.forest([heads, [1, -1, 1]], length=5)
    >>> folded = (x.movedim(0, -3).flatten(-3, -2) for x in (q, k, v))  # (8, 2 · 5, 16)
    >>> out = h.TreeSoftmax(trees, radius=1)(*folded).unflatten(-2, (2, 5)).movedim(-3, 0)
    >>> out.shape, out[1, :, 3:].any().item()  # padding gets zeros
    (torch.Size([2, 8, 5, 16]), False)

    parents   the position of each token's parent, -1 at a root, -2 where there is no token
    radius    how many edges away a key may be; 1: parent and children
    causal    whether a query sees earlier keys only
    """

    kernel = neighbours

    def __init__(
        self,
        parents: Sequence[int],
        radius: int = 2,
        causal: bool = False,
        scale: float | None = None,
        temperature: float = 1.0,
    ):
        tree = Tree(tuple(parents), radius)
        super().__init__(tree & Causal() if causal else tree, scale, temperature)

    def products(self, q, k, *, segments=None):
        return Mechanism.products(self, q, k, segments=segments)  # by the gradient in v, which the lists give too
