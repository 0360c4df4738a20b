"""Softmax attention over a strided pattern, with or without a window: dense attention inside residue classes."""

from heedful.kernels.blocked import reference as blocked
from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.strided import reference

strided = Kernel(
    "strided",
    triton_backend("heedful.kernels.strided.fused", "attend"),
    Backend("strided", reference.attend, reference.objections),
    Backend("torch", blocked.blocked, blocked.objections),
)
