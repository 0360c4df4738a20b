"""Linear attention to keys that lie at least `delay` tokens before a query, or after it, in its segment.

before   query t sees the keys up to t − delay: causal attention of the late tokens to the early ones
after    query t sees the keys from t + delay on: the same, backwards in time

Features are given by their logarithms. The result is a part of attention: its output, and the logarithm of its
normaliser, −∞ where a query sees nothing.
"""

from __future__ import annotations

from math import inf, prod

import torch
import torch.nn.functional as F

from heedful.kernels.chunked_linear import attend_to_logs
from heedful.kernels.linear_attention import by_row, rows_and_heads
from heedful.segments import positions, take_tokens
from heedful.shapes import Float, Int, Tensor, broadcast_shapes

Part = tuple[Float[Tensor, "*b n e"], Float[Tensor, "*b n"]]
"""The output of a part, and the logarithm of its normaliser."""


def attend_before(
    x: Float[Tensor, "*#b n r"],
    y: Float[Tensor, "*#b n r"],
    v: Float[Tensor, "*#b n e"],
    segments: Int[Tensor, "*s n"] | None,
    delay: int,
) -> Part:
    """Each query, log φ(q) = x, attends to the keys, log φ(k) = y, that lie `delay` tokens or more before it."""
    lag = Delay(segments, x.shape[-2], delay)
    return lag.place_late(*_prefix(lag.late(x), lag.early(y), lag.early(v), lag.ids))


def attend_after(
    x: Float[Tensor, "*#b n r"],
    y: Float[Tensor, "*#b n r"],
    v: Float[Tensor, "*#b n e"],
    segments: Int[Tensor, "*s n"] | None,
    delay: int,
) -> Part:
    """Each query attends to the keys that lie `delay` tokens or more after it."""
    lag = Delay(segments, x.shape[-2], delay)
    x, y, v = (a.flip(-2) for a in (lag.early(x), lag.late(y), lag.late(v)))
    out, lse = _prefix(x, y, v, None if lag.ids is None else lag.ids.flip(-1))
    return lag.place_early(out.flip(-2), lse.flip(-1))


class Delay:
    """The tokens that have another one `delay` places before them in their segment (late), and those others (early).

    Two sequences of equal length, in the order of time, each segment one run. `ids` are their segments, -1 where a row
    has fewer tokens than others; None where there are no segments.
    """

    def __init__(self, ids: Int[Tensor, "*s n"] | None, length: int, delay: int):
        self.length, self.cut, self.ids = length, min(delay, length), None
        if ids is None:
            return
        order = ids.argsort(dim=-1, stable=True)
        ids = ids.gather(-1, order).long()
        late = (positions(ids) >= delay) & (ids >= 0)
        size = int(late.sum(-1).max()) if late.numel() else 0
        at = (~late).int().argsort(dim=-1, stable=True)[..., :size]
        self.ids = torch.where(late.gather(-1, at), ids.gather(-1, at), -1)
        self.late_at, self.early_at = order.gather(-1, at), order.gather(-1, (at - delay).clamp(min=0))

    def late(self, x: Float[Tensor, "*#b n w"]) -> Float[Tensor, "*b l w"]:
        return x[..., self.cut :, :] if self.ids is None else take_tokens(x, self.late_at)

    def early(self, x: Float[Tensor, "*#b n w"]) -> Float[Tensor, "*b l w"]:
        return x[..., : self.length - self.cut, :] if self.ids is None else take_tokens(x, self.early_at)

    def place_late(self, out: Tensor, lse: Tensor) -> Part:
        """Results of the late tokens in their places; the others get nothing."""
        if self.ids is None:
            return F.pad(out, (0, 0, self.cut, 0)), F.pad(lse, (self.cut, 0), value=-inf)
        return self._place(self.late_at, out, lse)

    def place_early(self, out: Tensor, lse: Tensor) -> Part:
        if self.ids is None:
            return F.pad(out, (0, 0, 0, self.cut)), F.pad(lse, (0, self.cut), value=-inf)
        return self._place(self.early_at, out, lse)

    def _place(self, at: Tensor, out: Tensor, lse: Tensor) -> Part:
        assert self.ids is not None
        at = torch.where(self.ids >= 0, at, self.length).expand(lse.shape)  # one place more, for what belongs nowhere
        rows = out.new_zeros(*out.shape[:-2], self.length + 1, out.shape[-1])
        rows = rows.scatter(-2, at[..., None].expand_as(out), out)
        logs = lse.new_full((*lse.shape[:-1], self.length + 1), -inf).scatter(-1, at, lse)
        return rows[..., : self.length, :], logs[..., : self.length]


def _prefix(
    x: Float[Tensor, "*#b l r"],
    y: Float[Tensor, "*#b l r"],
    v: Float[Tensor, "*#b l e"],
    ids: Int[Tensor, "*s l"] | None,
) -> Part:
    """Causal linear attention from the logarithms of features."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], v.shape[:-2])
    out, lse = attend_to_logs(*kernel_inputs(x, y, v, ids))
    return out.reshape(*batch, *out.shape[-2:]), lse.reshape(*batch, lse.shape[-1])


def kernel_inputs(x: Tensor, y: Tensor, v: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, y and v as (batch, heads, tokens, width) in float32 or better, ids as (batch, tokens)."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], v.shape[:-2])
    rows, heads = rows_and_heads(batch, ids)
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y, v = (a.to(wide).expand(*batch, *a.shape[-2:]).reshape(prod(rows), heads, *a.shape[-2:]) for a in (x, y, v))
    return x, y, v, None if ids is None else by_row(ids, batch, rows)
