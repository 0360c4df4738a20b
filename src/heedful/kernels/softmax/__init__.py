"""Softmax attention: a kernel for the pattern's shape, torch's fused kernel, Triton's, or tiles.

The first backend that takes the inputs runs. `recognise` says which shapes of pattern have a specialised kernel.
"""

from dataclasses import replace
from functools import partial

from heedful.kernels.blocked import reference
from heedful.kernels.blocked.tiles import kind
from heedful.kernels.dispatch import Backend, Kernel, triton_backend
from heedful.kernels.softmax import sdpa
from heedful.kernels.softmax.neighbours import reference as neighbours
from heedful.kernels.softmax.recognise import about_classes, about_lists, about_merged
from heedful.kernels.softmax.strided import classes, merged

_flash = "heedful.kernels.softmax.strided.flash"
_sdpa = Backend("sdpa", sdpa.attend, sdpa.objections, yields=sdpa.slower_than_triton)
_any_pattern = (
    triton_backend("heedful.kernels.softmax.fused", "attend"),
    Backend("torch", reference.blocked, reference.objections),
)
_any_adjoint = (
    triton_backend("heedful.kernels.softmax.fused", "adjoint"),
    Backend("torch", reference.blocked_adjoint, reference.objections),
)
_inside = Kernel("softmax inside residue classes", _sdpa, *_any_pattern, kind=kind)
_inside_adjoint = Kernel("softmax adjoint inside residue classes", *_any_adjoint, kind=kind)

softmax = Kernel(
    "softmax",
    _sdpa,
    replace(triton_backend(_flash, "attend"), name="strided-flash"),
    Backend("strided", partial(classes.attend, _inside), about_classes),
    Backend("strided-window", merged.attend, about_merged),
    Backend("neighbours", neighbours.attend, about_lists),
    *_any_pattern,
    kind=kind,
)
softmax_adjoint = Kernel(
    "softmax adjoint",
    replace(triton_backend(_flash, "adjoint"), name="strided-flash"),
    Backend("strided", partial(classes.adjoint, _inside_adjoint), about_classes),
    Backend("strided-window", merged.adjoint, about_merged),
    Backend("neighbours", neighbours.adjoint, about_lists),
    *_any_adjoint,
    kind=kind,
)
softmax_products = Kernel("softmax products", triton_backend("heedful.kernels.softmax.products", "Products"))
