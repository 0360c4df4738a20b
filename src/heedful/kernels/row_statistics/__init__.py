"""Sums over the rows of an attention matrix in one pass, without the matrix."""

from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.row_statistics import reference

row_statistics = Kernel(
    "row_statistics",
    triton_backend("heedful.kernels.row_statistics.fused", "row_statistics"),
    Backend("torch", reference.row_statistics, reference.objections),
)
