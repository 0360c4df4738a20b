"""Attention by positive random features, computed inside the kernel: one signature, in plain torch and in Triton."""

from __future__ import annotations

from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.random_features import groups, reference

random_features = Kernel(
    "random_features",
    triton_backend("heedful.kernels.random_features.triton", "random_features"),
    Backend("cpu_groups", groups.random_features, groups.objections),
    Backend("torch", reference.random_features, reference.objections),
)
