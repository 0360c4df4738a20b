"""Softmax attention: torch's fused kernel where it fits, Triton's where the pattern is intervals, else tiles."""

from __future__ import annotations

from importlib.util import find_spec

from heedful.kernels.blocked import reference
from heedful.kernels.dispatch import Backend, Kernel
from heedful.kernels.softmax import sdpa
from heedful.shapes import Tensor


def _triton_run(*args):
    from heedful.kernels.softmax import fused

    return fused.attend(*args)


def _triton_objections(q, *args, memory: dict | None = None) -> list[str]:
    if q.device.type != "cuda":
        return [f"Triton kernels run on a GPU, the inputs are on {q.device}"]
    if find_spec("triton") is None:
        return ["Triton is not installed: pip install 'heedful[kernels]'"]
    from heedful.kernels.softmax import fused

    return fused.objections(q, *args)


def _triton_adjoint(q, k, y, *rest, memory: dict[str, Tensor]):
    """The log-sum-exps of the rows are the same for every product: they are found once."""
    from heedful.kernels.softmax import fused

    if "lse" not in memory:
        memory["lse"] = fused.log_sum_exp(q, k, *rest)
    return fused.adjoint(q, k, y, *rest, lse=memory["lse"])


softmax = Kernel(
    "softmax",
    Backend("sdpa", sdpa.attend, sdpa.objections),
    Backend("triton", _triton_run, _triton_objections),
    Backend("torch", reference.blocked, reference.objections),
)
softmax_adjoint = Kernel(
    "softmax adjoint",
    Backend("triton", _triton_adjoint, _triton_objections),
    Backend("torch", reference.blocked_adjoint, reference.objections),
)
