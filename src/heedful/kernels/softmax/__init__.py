"""Softmax attention: torch's fused kernel where it fits, Triton's over intervals or lists, else tiles."""

from heedful.kernels.blocked import reference
from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.softmax import sdpa
from heedful.kernels.softmax.rows import kind

softmax = Kernel(
    "softmax",
    Backend("sdpa", sdpa.attend, sdpa.objections, yields=sdpa.slower_than_triton),
    triton_backend("heedful.kernels.softmax.fused", "attend"),
    Backend("torch", reference.blocked, reference.objections),
    kind=kind,
)
softmax_adjoint = Kernel(
    "softmax adjoint",
    triton_backend("heedful.kernels.softmax.fused", "adjoint"),
    Backend("torch", reference.blocked_adjoint, reference.objections),
    kind=kind,
)
softmax_products = Kernel("softmax products", triton_backend("heedful.kernels.softmax.products", "Products"))
