"""Weighted means of all tokens so far: one signature, in plain torch."""

from __future__ import annotations

from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.prefix import reference

weighted_prefix_mean = Kernel(
    "weighted_prefix_mean",
    Backend("torch", reference.weighted_prefix_mean, reference.objections),
)
