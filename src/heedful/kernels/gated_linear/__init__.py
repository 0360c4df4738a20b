"""Linear attention with gates that differ from token to token, segments and state.

One signature, in plain torch and in Triton. In Triton, one gate for a whole head is a decay of `chunked_linear`.
"""

from __future__ import annotations

from heedful.kernels.chunked_linear import chunked_linear
from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.gated_linear import reference

_decay = chunked_linear.backends["triton"]
_channels = triton_backend("heedful.kernels.gated_linear.triton", "gated_linear")
LEAST = -104.0  # its exp() is 0 in float32; sums of such gates stay small, and so does the rounding of differences


def _as_decay(q, k, v, *, log_decay, **options):
    return (q, k, v), options | {"causal": True, "log_decay": log_decay[..., 0].clamp(min=LEAST)}


def _triton_run(*args, **kwargs):
    if kwargs["log_decay"].shape[-1] != 1:
        return _channels.run(*args, **kwargs)
    args, kwargs = _as_decay(*args, **kwargs)
    return _decay.run(*args, **kwargs)


def _triton_objections(*args, **kwargs) -> list[str]:
    if kwargs["log_decay"].shape[-1] != 1:
        return _channels.objections(*args, **kwargs)
    args, kwargs = _as_decay(*args, **kwargs)
    return _decay.objections(*args, **kwargs)


gated_linear = Kernel(
    "gated_linear",
    Backend("triton", _triton_run, _triton_objections),
    Backend("torch", reference.gated_linear, reference.objections),
)
