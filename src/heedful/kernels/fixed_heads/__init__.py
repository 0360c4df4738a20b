"""Fixed positional heads of one sequence: one signature, in plain torch and in Triton."""

from __future__ import annotations

from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.fixed_heads import reference

fixed_heads = Kernel(
    "fixed_heads",
    triton_backend("heedful.kernels.fixed_heads.triton", "fixed_heads", relaunches=True),
    Backend("torch", reference.fixed_heads, reference.objections),
    kind=reference.kind,
)
