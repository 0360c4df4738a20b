"""Softmax attention: torch's fused kernel where it fits, tiles where it does not."""

from heedful.kernels.blocked import reference
from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.softmax import sdpa

softmax = Kernel(
    "softmax",
    Backend("sdpa", sdpa.attend, sdpa.objections),
    Backend("torch", reference.blocked, reference.objections),
)
