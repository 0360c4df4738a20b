"""Linear attention with a gate for each channel, segments and state, in plain torch."""

from __future__ import annotations

from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.gated_linear import reference

gated_linear = Kernel("gated_linear", Backend("torch", reference.gated_linear, reference.objections))
