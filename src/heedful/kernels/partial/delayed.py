"""Linear attention to the keys beyond a window, as parts of one softmax; the window itself is another part.

Beyond a window of w, query t sees the keys up to t − w. That is causal linear attention of the queries from w on to
the keys up to m − w, delayed by w. If queries look both ways, it is done once more backwards in time. Old keys of a
cache, which all queries see, are one sum.
"""

from __future__ import annotations

from math import inf, prod

import torch
import torch.nn.functional as F

from heedful.kernels.chunked_linear import attend_to_logs
from heedful.segments import positions, take_tokens
from heedful.shapes import Float, Int, Tensor, broadcast_shapes

Part = tuple[Tensor, Tensor]
"""The output of a part, (*batch, rows, e), and the logarithm of its normaliser, (*batch, rows)."""


def old_keys(n: int, m: int, window: int) -> int:
    """The number of cached keys that lie beyond the window of every query."""
    return max(m - n - window, 0)


def far_parts(
    x: Float[Tensor, "*#b n r"],
    y: Float[Tensor, "*#b m r"],
    v: Float[Tensor, "*#b m e"],
    window: int,
    *,
    both_ways: bool,
    segments: Int[Tensor, "*s l"] | None,
) -> list[Part]:
    """The parts of the keys before the window and, if `both_ways`, after it; the rows of each end with the last query.

    x and y are the logarithms of the features of queries and keys. The last query and the last key are at the same
    time; there may be more keys than queries, or more queries than keys.
    """
    parts = []
    if segments is None and (old := old_keys(x.shape[-2], y.shape[-2], window)):
        parts.append(part_of_all(x, y[..., :old, :], v[..., :old, :]))
        y, v = y[..., old:, :], v[..., old:, :]
    length = max(x.shape[-2], y.shape[-2])
    x, y, v = _at_end(x, length, 0.0), _at_end(y, length, -inf), _at_end(v, length, 0.0)
    delay = Delay(segments, length, window)
    before = part_of_earlier(delay.late(x), delay.early(y), delay.early(v), delay.runs)
    parts.append(delay.place_late(*before))
    if both_ways:
        delay = Delay(segments, length, max(window, 1))  # a query's own key must be in only one part
        x, y, v = (a.flip(-2) for a in (delay.early(x), delay.late(y), delay.late(v)))
        out, lse = part_of_earlier(x, y, v, None if delay.runs is None else delay.runs.flip(-1))
        parts.append(delay.place_early(out.flip(-2), lse.flip(-1)))
    return parts


class Delay:
    """Tokens that have another one `delay` places before them in their segment (late), and those others (early).

    Both are sequences of equal length, in the order of time, each segment one run. With segments, `runs` holds their
    ids, with −1 where a row has fewer tokens than others.
    """

    def __init__(self, ids: Int[Tensor, "*s n"] | None, length: int, delay: int):
        self.length, self.cut, self.runs = length, min(delay, length), None
        if ids is None:
            return
        order = ids.argsort(dim=-1, stable=True)
        ids = ids.gather(-1, order).long()
        late = (positions(ids) >= delay) & (ids >= 0)
        size = int(late.sum(-1).max()) if late.numel() else 0
        at = (~late).int().argsort(dim=-1, stable=True)[..., :size]
        self.runs = torch.where(late.gather(-1, at), ids.gather(-1, at), -1)
        self.late_at, self.early_at = order.gather(-1, at), order.gather(-1, (at - delay).clamp(min=0))

    def late(self, x: Float[Tensor, "*#b n w"]) -> Float[Tensor, "*b l w"]:
        return x[..., self.cut :, :] if self.runs is None else take_tokens(x, self.late_at)

    def early(self, x: Float[Tensor, "*#b n w"]) -> Float[Tensor, "*b l w"]:
        return x[..., : self.length - self.cut, :] if self.runs is None else take_tokens(x, self.early_at)

    def place_late(self, out: Tensor, lse: Tensor) -> Part:
        """The results of the late tokens at their places; the others get zeros and −∞."""
        if self.runs is None:
            return F.pad(out, (0, 0, self.cut, 0)), F.pad(lse, (self.cut, 0), value=-inf)
        return self._place(self.late_at, out, lse)

    def place_early(self, out: Tensor, lse: Tensor) -> Part:
        if self.runs is None:
            return F.pad(out, (0, 0, 0, self.cut)), F.pad(lse, (0, self.cut), value=-inf)
        return self._place(self.early_at, out, lse)

    def _place(self, at: Tensor, out: Tensor, lse: Tensor) -> Part:
        assert self.runs is not None
        at = torch.where(self.runs >= 0, at, self.length).expand(lse.shape)  # an extra place takes the unused entries
        rows = out.new_zeros(*out.shape[:-2], self.length + 1, out.shape[-1])
        rows = rows.scatter(-2, at[..., None].expand_as(out), out)
        logs = lse.new_full((*lse.shape[:-1], self.length + 1), -inf).scatter(-1, at, lse)
        return rows[..., : self.length, :], logs[..., : self.length]


def part_of_earlier(
    x: Float[Tensor, "*#b l r"],
    y: Float[Tensor, "*#b l r"],
    v: Float[Tensor, "*#b l e"],
    ids: Int[Tensor, "*s l"] | None,
) -> Part:
    """Causal linear attention from the logarithms of features."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], v.shape[:-2])
    out, lse = attend_to_logs(*kernel_inputs(x, y, v, ids))
    return out.reshape(*batch, *out.shape[-2:]), lse.reshape(*batch, lse.shape[-1])


def part_of_all(x: Float[Tensor, "*#b n r"], y: Float[Tensor, "*#b l r"], v: Float[Tensor, "*#b l e"]) -> Part:
    """Linear attention to all keys, from the logarithms of features."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y, v = x.to(wide), y.to(wide), v.to(wide)
    scale = y.detach().amax(-2)
    y = (y - scale[..., None, :]).exp()
    return part_of_state(x, y.mT @ v, y.sum(-2), scale)


def part_of_state(
    x: Float[Tensor, "*#b n r"], S: Float[Tensor, "*#b r e"], z: Float[Tensor, "*#b r"], scale: Float[Tensor, "*#b r"]
) -> Part:
    """Linear attention of queries (logarithms of their features) to sums over keys; empty if there were no keys."""
    some = scale[..., :1] > -inf
    x = x + torch.where(some, scale, 0)[..., None, :]
    top = x.detach().amax(-1)
    x = (x - top[..., None]).exp()
    total = torch.where(some, (x @ z[..., None])[..., 0], 1)
    out = (x @ S) / total[..., None]
    return out, torch.where(some, total.log() + top, -inf).expand(out.shape[:-1])


def kernel_inputs(x: Tensor, y: Tensor, v: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, y and v as (batch, heads, tokens, width) in float32 or better, ids as (batch, tokens)."""
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], v.shape[:-2])
    shared = ids is None or ids.ndim < 2 or ids.shape[-2] == 1  # all heads have the same segments
    rows, heads = (batch[:-1], batch[-1]) if shared and batch else (batch, 1)
    if ids is not None:
        ids = ids.squeeze(-2) if shared and ids.ndim > 1 else ids
        ids = ids.expand(*rows, ids.shape[-1]).reshape(prod(rows), ids.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y, v = (a.to(wide).expand(*batch, *a.shape[-2:]).reshape(prod(rows), heads, *a.shape[-2:]) for a in (x, y, v))
    return x, y, v, ids


def _at_end(x: Float[Tensor, "*b n w"], length: int, fill: float) -> Float[Tensor, "*b l w"]:
    """x as the last tokens of a sequence of `length`, with `fill` before them."""
    missing = length - x.shape[-2]
    return F.pad(x, (0, 0, missing, 0), value=fill) if missing else x
