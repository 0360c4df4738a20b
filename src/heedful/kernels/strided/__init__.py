"""Softmax attention over a strided pattern, with or without a window: dense attention inside residue classes."""

from heedful.kernels.blocked import reference as blocked
from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.strided import fused, reference

strided = Kernel(
    "strided",
    Backend("sdpa", fused.attend, fused.objections),
    Backend("strided", reference.attend, reference.objections),
    Backend("torch", blocked.blocked, blocked.objections),
)
