"""Read and write tiles of tokens, and compute their features; shared by the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from heedful.kernels.arithmetic import LOG2E, exp2


@triton.jit
def _phi(x, shift, FEATURE: tl.constexpr):
    if FEATURE == "elu1":
        return tl.where(x > 0, x + 1, exp2(x * LOG2E))
    elif FEATURE == "relu":
        return tl.maximum(x, 0)
    elif FEATURE == "exp":
        return exp2((x - shift[:, None]) * LOG2E)
    else:
        return x


@triton.jit
def read(pointer, t, stride, column, width, real, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """Load a tile of tokens × columns; zero outside the width and at tokens that are not `real` (padding)."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN_N and EVEN_C:
        return tl.load(at)
    elif EVEN_C:
        return tl.load(at, mask=real[:, None], other=0)
    elif EVEN_N:
        return tl.load(at, mask=(column < width)[None, :], other=0)
    else:
        return tl.load(at, mask=real[:, None] & (column < width)[None, :], other=0)


@triton.jit
def write(pointer, t, stride, column, width, tile, left, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr):
    """Store a tile of tokens × columns: the part inside the first `left` tokens and the width."""
    at = pointer + t[:, None] * stride + column[None, :]
    if EVEN_N and EVEN_C:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=(t < left)[:, None] & (column < width)[None, :])


@triton.jit
def _turn(turns, t, n, real, EVEN_N: tl.constexpr):
    """The cosine and the sine of each token's angle; zero at tokens that are not real."""
    if EVEN_N:
        return tl.load(turns + t)[:, None], tl.load(turns + n + t)[:, None]
    else:
        c, s = tl.load(turns + t, mask=real, other=0.0), tl.load(turns + n + t, mask=real, other=0.0)
        return c[:, None], s[:, None]


@triton.jit
def features(
    pointer, shift, turns, t, n, stride, column, width, real,
    FEATURE: tl.constexpr, TURNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """φ of a tile. Outside the tile the result is φ(0), or zero if CLEAR asks for it: CLEAR = 1 clears columns beyond
    the width (if keys are zero there, queries may hold anything); CLEAR = 2 also clears tokens that are not real."""
    x = read(pointer, t, stride, column, width, real, EVEN_N, EVEN_C).to(tl.float32)
    s = t
    if FEATURE == "exp":
        s = tl.load(shift + t, mask=real, other=0)
    phi = _phi(x, s, FEATURE)
    if FEATURE == "elu1" or FEATURE == "exp":
        # Beyond the width, a shift far below zero makes exp infinite, and 0 · ∞ is NaN.
        if (CLEAR > 0 or FEATURE == "exp") and not EVEN_C:
            phi = tl.where((column < width)[None, :], phi, 0.0)
        if CLEAR == 2 and not EVEN_N:
            phi = tl.where(real[:, None], phi, 0.0)
    if TURNED:
        cosine, sine = _turn(turns, t, n, real, EVEN_N)
        phi = tl.reshape(tl.join(phi * cosine, phi * sine), (phi.shape[0], 2 * phi.shape[1]))
    return phi


@triton.jit
def pulled(
    grad, pointer, shift, turns, t, n, stride, column, width, real,
    FEATURE: tl.constexpr, TURNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_C: tl.constexpr,
):  # fmt: skip
    """The gradient in the columns from that in their features, by φ′ (computed from φ) and the reverse rotation."""
    if TURNED:
        cosine, sine = _turn(turns, t, n, real, EVEN_N)
        first, second = tl.split(tl.reshape(grad, (grad.shape[0], column.shape[0], 2)))
        grad = first * cosine + second * sine
    if FEATURE == "identity":
        return grad
    else:
        phi = features(pointer, shift, turns, t, n, stride, column, width, real, FEATURE, False, EVEN_N, EVEN_C, 0)
        if FEATURE == "elu1":
            return grad * tl.minimum(phi, 1)
        elif FEATURE == "relu":
            return tl.where(phi > 0, grad, 0.0)
        else:
            return grad * phi
