"""Checks of q, k, v and segments that all mechanisms share, with their error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from heedful.patterns import Full, Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Tensor, broadcast_shapes

_finite_required = False  # a global: torch.compile can trace it


@contextmanager
def check_finite(enabled: bool = True) -> Iterator[None]:
    """Raise an error if q, k or v contains NaN or infinity in a call inside this block.

    >>> import torch, heedful
    >>> q, k, v = torch.randn(3, 10, 4).unbind()
    >>> with heedful.check_finite():
    ...     out = heedful.Softmax()(q, k, v)
    """
    global _finite_required
    before, _finite_required = _finite_required, enabled
    try:
        yield
    finally:
        _finite_required = before


def finite_is_required() -> bool:
    """True inside a `check_finite` block."""
    return _finite_required


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    segments: Segments | None = None,
    pattern: Pattern | None = None,
    mechanism: nn.Module | None = None,
) -> None:
    """Raise if q, k, v or segments are invalid. The error names the argument, its value, what was expected and why.

    mechanism   the called mechanism; its parameters and buffers must be on the device of q
    """
    if mechanism is not None and isinstance(q, Tensor) and not torch.compiler.is_compiling():
        known = _devices.get(mechanism)
        if known != q.device:
            _check_device(mechanism, q)
    if segments is None and not _finite_required and _are_alike(q, k, v):
        return  # the usual case returns early: the remaining checks would take longer than a kernel
    named = {"q": q, "k": k} | ({} if v is None else {"v": v})
    for name, x in named.items():
        _check_tensor(name, x, q)
    n, m = q.shape[-2], k.shape[-2]
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k: width {k.shape[-1]}, expected {q.shape[-1]} to match q {_shape(q)}; got k {_shape(k)}. Likely cause: "
            "heads were not split, or the last two axes are swapped."
        )
    if not q.shape[-1]:
        raise ValueError(f"q: width 0 {_shape(q)}, expected at least 1: without a width there is no product q·k.")
    if v is not None and v.shape[-2] != m:
        raise ValueError(
            f"v: {v.shape[-2]} tokens, expected {m} to match k {_shape(k)}; got v {_shape(v)}. Likely cause: k and v "
            "come from different sequences, or one was cached and the other not."
        )
    _check_batch(named)
    if pattern is not None and not isinstance(pattern, Full) and n > m and not isinstance(segments, tuple):
        raise ValueError(
            f"q: {n} queries for {m} keys under {pattern!r}, expected n ≤ m: the queries are the last n positions. "
            "Likely cause: cross-attention with a causal mechanism (use Full()), or a cache that was not passed on."
        )
    if segments is not None:
        _check_segments(segments, q, k)
        if isinstance(segments, tuple) and pattern is not None and not isinstance(pattern, Full):
            _check_alignment(segments, n, m, pattern)
    if _finite_required:
        _check_finite(named)


def _are_alike(q: Tensor, k: Tensor, v: Tensor | None) -> bool:
    """True if all are floating-point tensors with the same shape, dtype and device: all checks would pass."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return False
    shape, dtype, device = q.shape, q.dtype, q.device
    return (
        len(shape) >= 2
        and shape[-1] > 0
        and dtype.is_floating_point
        and shape == k.shape == v.shape
        and dtype is k.dtype is v.dtype
        and device == k.device == v.device
    )


def check_token(q: Tensor, k: Tensor, v: Tensor, *, d: int, e: int, mechanism: nn.Module | None = None) -> None:
    """Raise if the inputs of `step` are invalid: `check_inputs`, one token each, and the state's widths d and e."""
    check_inputs(q, k, v, mechanism=mechanism)
    for name, x, width in (("q", q, d), ("k", k, d), ("v", v, e)):
        if x.shape[-2] != 1:
            raise ValueError(
                f"{name}: {x.shape[-2]} tokens {_shape(x)}, expected one. Likely cause: `prefill` was meant, which "
                "takes many tokens at once."
            )
        if x.shape[-1] != width:
            raise ValueError(
                f"{name}: width {x.shape[-1]} {_shape(x)}, expected {width} as in the state. Likely cause: a state of "
                "another layer."
            )


_devices: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
"""Cached device of each mechanism. Iterating over the parameters and buffers would cost microseconds in each call."""


def forget_device(mechanism: nn.Module) -> None:
    """Drop the cached device of a mechanism whose tensors were moved."""
    _devices.pop(mechanism, None)


def _check_device(mechanism: nn.Module, q: Tensor) -> None:
    kinds = {"parameter": mechanism.named_parameters(), "buffer": mechanism.named_buffers()}
    held = [(f"{kind} {name!r}", x.device) for kind, tensors in kinds.items() for name, x in tensors]
    elsewhere = [f"{name} is on {device}" for name, device in held if device != q.device]
    if elsewhere:
        more = f" and {len(elsewhere) - 3} more" if len(elsewhere) > 3 else ""
        raise ValueError(
            f"{type(mechanism).__name__}: {', '.join(elsewhere[:3])}{more}, but q is on {q.device}, expected the same. "
            "Likely cause: the mechanism was not moved with the inputs: mechanism.to(q.device)."
        )
    _devices[mechanism] = q.device


def _check_tensor(name: str, x: Tensor, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor (*batch, tokens, width), got {type(x).__name__}.")
    if x.ndim < 2:
        raise ValueError(
            f"{name}: {x.ndim} axes {_shape(x)}, expected (*batch, tokens, width). Likely cause: a missing token axis; "
            "one token is x[..., None, :]."
        )
    if not x.is_floating_point():
        raise TypeError(f"{name}: dtype {x.dtype}, expected a floating-point type. Likely cause: token ids.")
    if x.dtype != q.dtype:
        raise TypeError(
            f"{name}: dtype {x.dtype}, expected {q.dtype} like q. Likely cause: mixed precision reached one input only."
        )
    if x.device != q.device:
        raise ValueError(f"{name}: on {x.device}, expected {q.device} like q.")


def _check_batch(named: dict[str, Tensor]) -> None:
    try:
        broadcast_shapes(*(x.shape[:-2] for x in named.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {_shape(x)}" for name, x in named.items())
        raise ValueError(
            f"batch axes do not fit together: {shapes}; expected the same axes before the last two, or 1. Likely "
            "cause: grouped-query heads. Give q as (B, groups, per group, n, d) and k, v as (B, groups, 1, m, d): "
            "heedful.group_heads(q, k, v) does that."
        ) from None


def _check_segments(segments: Segments, q: Tensor, k: Tensor) -> None:
    n, m = q.shape[-2], k.shape[-2]
    if isinstance(segments, tuple):
        wanted = [("segments[0] (queries)", segments[0], n), ("segments[1] (keys)", segments[1], m)]
    else:
        if n > m:
            raise ValueError(
                f"segments: one tensor for {n} queries and {m} keys; expected a pair (ids of the queries, ids of the "
                "keys) where the queries are not the last of the keys."
            )
        wanted = [("segments", segments, m)]
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2])
    for name, ids, length in wanted:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
            given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(
                f"{name}: expected an integer tensor of segment ids (negative: padding), got {given}. A boolean mask "
                "becomes one with heedful.segments.from_mask(mask)."
            )
        if ids.device != q.device:
            raise ValueError(f"{name}: on {ids.device}, expected {q.device} like q: move them with .to(q.device).")
        if ids.ndim < 1 or ids.shape[-1] != length:
            raise ValueError(
                f"{name}: shape {_shape(ids)}, expected (*batch, {length}), one id for each token. Likely cause: with "
                "a cache, segments must cover the cached keys too."
            )
        try:
            fits = broadcast_shapes(ids.shape[:-1], batch) == batch
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"{name}: batch axes {_shape(ids)[:-1] or '()'} do not broadcast to {tuple(batch)}. Likely cause: a "
                "(B, n) tensor for (B, H, n, d) inputs needs a head axis: segments[:, None]."
            )


def _check_alignment(segments: tuple[Tensor, Tensor], n: int, m: int, pattern: Pattern) -> None:
    layout = resolve(segments, n, m)
    early = (layout.query_ids >= 0) & (layout.query_positions < 0)
    if early.any() and torch.isin(layout.query_ids[early], layout.key_ids).any():
        raise ValueError(
            f"segments: a segment has more queries than keys under {pattern!r}, expected at most as many: the queries "
            "are its last positions. Likely cause: cross-attention with a causal mechanism (use Full())."
        )


def _check_finite(named: dict[str, Tensor]) -> None:
    for name, x in named.items():
        bad = ~torch.isfinite(x)
        if bad.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{name}: {int(bad.sum())} of {x.numel()} entries are NaN or infinite, the first at {first} "
                f"({x[first].item()}). Expected finite input under heedful.check_finite(). Likely cause: overflow in "
                "an earlier layer (float16 ends at 65504), or uninitialised memory in padding."
            )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
