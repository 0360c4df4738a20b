"""Attention by positive random features, the features made inside: one signature, in plain torch and in Triton."""

from __future__ import annotations

from importlib.util import find_spec

from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.random_features import reference


def _triton_run(*args, **kwargs):
    from heedful.kernels.random_features import triton

    return triton.random_features(*args, **kwargs)


def out_of_reach(q) -> list[str]:
    """Why no Triton kernel could run for inputs where q is, whatever they are."""
    if q.device.type != "cuda":
        return [f"Triton kernels run on a GPU, the inputs are on {q.device}."]
    if find_spec("triton") is None:
        return ["Triton is not installed: pip install 'heedful[kernels]'."]
    return []


def _triton_objections(q, *args, **kwargs) -> list[str]:
    if said := out_of_reach(q):
        return said
    from heedful.kernels.random_features import triton

    return triton.objections(q, *args, **kwargs)


random_features = Kernel(
    "random_features",
    Backend("triton", _triton_run, _triton_objections),
    Backend("torch", reference.random_features, reference.objections),
)
