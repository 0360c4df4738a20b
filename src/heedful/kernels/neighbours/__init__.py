"""Softmax over lists of neighbours: work in proportion to the pairs, wherever they lie."""

from heedful.kernels.blocked import reference as blocked
from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.neighbours import reference

neighbours = Kernel(
    "neighbours",
    Backend("lists", reference.attend, reference.objections),
    Backend("torch", blocked.blocked, blocked.objections),
)
