"""Linear attention with decay, segments and state: one signature, in plain torch and in Triton."""

from __future__ import annotations

from importlib.util import find_spec

from heedful.kernels.chunked_linear import reference
from heedful.kernels.dispatch import Backend, Kernel


def _triton_run(*args, **kwargs):
    from heedful.kernels.chunked_linear import triton

    return triton.chunked_linear(*args, **kwargs)


def _triton_objections(q, *args, **kwargs) -> list[str]:
    if q.device.type != "cuda":
        return [f"Triton kernels run on a GPU, the inputs are on {q.device}."]
    if find_spec("triton") is None:
        return ["Triton is not installed: pip install 'heedful[kernels]'."]
    from heedful.kernels.chunked_linear import triton

    return triton.objections(q, *args, **kwargs)


chunked_linear = Kernel(
    "chunked_linear",
    Backend("triton", _triton_run, _triton_objections),
    Backend("torch", reference.chunked_linear, reference.objections),
)
