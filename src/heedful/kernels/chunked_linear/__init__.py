"""Linear attention with decay, segments and state: one signature, in plain torch and in Triton."""

from __future__ import annotations

from heedful.kernels.chunked_linear import reference
from heedful.kernels.dispatch import Backend, Kernel, triton_backend

chunked_linear = Kernel(
    "chunked_linear",
    triton_backend("heedful.kernels.chunked_linear.triton", "chunked_linear"),
    Backend("torch", reference.chunked_linear, reference.objections),
)

attend_to_logs = Kernel("attend_to_logs", Backend("torch", reference.attend_to_logs, lambda *given: []))
