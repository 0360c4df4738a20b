"""Sums over the rows of an attention matrix in one pass; the matrix is not materialised."""

from functools import partial

from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.row_statistics import reference, strided

_any_pattern = (
    triton_backend("heedful.kernels.row_statistics.fused", "row_statistics"),
    Backend("torch", reference.row_statistics, reference.objections),
)
_inside = Kernel("row_statistics inside residue classes", *_any_pattern)

row_statistics = Kernel(
    "row_statistics",
    Backend("strided", partial(strided.row_statistics, _inside), strided.objections),
    *_any_pattern,
)
