"""One token of linear attention: one signature, in plain torch and in Triton."""

from __future__ import annotations

from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.linear_step import reference

linear_step = Kernel(
    "linear_step",
    triton_backend("heedful.kernels.linear_step.triton", "linear_step"),
    Backend("torch", reference.linear_step, reference.objections),
)
