"""Softmax over a dilated window: plain windows inside residue classes."""

from heedful.kernels.blocked import reference as blocked
from heedful.kernels.dilated import reference
from heedful.kernels.dispatch import Backend, Kernel

dilated = Kernel(
    "dilated",
    Backend("classes", reference.attend, reference.objections),
    Backend("torch", blocked.blocked, blocked.objections),
)
