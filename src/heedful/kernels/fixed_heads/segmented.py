"""Fixed heads with segments and words, in plain torch: among keys sorted by segment, each row reads one place.

current, previous, next   the value at that place, or the mean of its word
left, right               the weighted mean that ends, or begins, at that place
start, end, last          one place for all rows of a segment
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from heedful.kernels.prefix import weighted_prefix_mean
from heedful.segments import Layout
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes


def by_segment(
    v: Float[Tensor, "*b m e"], kind: str, layout: Layout, words: Int[Tensor, "*#b m"] | None, edge: str
) -> Float[Tensor, "*b n e"]:
    """The rows of a fixed head of that kind; `edge` says which token row 0 of "previous" attends to."""
    m = v.shape[-2]
    order, ids, words, query_ids, query_positions = _in_order(layout, words)
    at = torch.arange(m, device=v.device)
    opens = _differs(ids)
    breaks = torch.ones_like(opens) if words is None else opens | _differs(words)
    lo, hi = torch.searchsorted(ids, query_ids), torch.searchsorted(ids, query_ids, right=True) - 1
    begins, ends = _extent(opens)
    row = _places(kind, edge, lo, hi, lo + query_positions, *_extent(breaks))
    row = row.clamp(0, m - 1)
    some = ((query_ids >= 0) & (lo <= hi))[..., None]
    if not is_mean(kind, words) and kind != "last":
        return torch.where(some, take_rows(v, order.gather(-1, row)), 0)
    wide = torch.promote_types(v.dtype, torch.float32)
    x = torch.where((ids >= 0)[..., None], take_rows(v, order).to(wide), 0)
    if kind in ("left", "end"):
        x = weighted_prefix_mean(x, (at - begins + 1).double() ** 3, first=opens)
    elif kind in ("right", "start"):
        x = weighted_prefix_mean(x, (ends - at + 1).double() ** 3, first=opens, reverse=True)
    elif kind != "last":
        x = weighted_prefix_mean(x, torch.ones_like(ids, dtype=torch.float64), first=breaks)
    if kind in ("start", "end", "last"):
        # One place for all rows of a segment: spread it as a mean with one weight, whose gradient is a blockwise sum.
        here = begins if kind == "start" else ends
        x = weighted_prefix_mean(x, (at == here).double(), first=opens, reverse=kind != "start")
    return torch.where(some, take_rows(x, row).to(v.dtype), 0)


def is_mean(kind: str, words: Tensor | None) -> bool:
    """True if rows are means, not single tokens."""
    return kind in ("left", "right", "start", "end") or words is not None


def _places(
    kind: str, edge: str, lo: Tensor, hi: Tensor, own: Tensor, begins: Tensor, ends: Tensor
) -> Int[Tensor, "*s n"]:
    """The key whose value, or whose running mean, is each query's row.

    lo and hi are the first and last key of the query's segment, and own is the key at its position. begins and ends are
    the first and last key of each key's word; without words, the key itself.
    """

    def begin(i: Tensor) -> Tensor:
        return begins.gather(-1, i.clamp(0, begins.shape[-1] - 1))

    def end(i: Tensor) -> Tensor:
        return ends.gather(-1, i.clamp(0, ends.shape[-1] - 1))

    match kind:
        case "current":
            return end(own)
        case "previous":
            return torch.where(begin(own) > lo, begin(own) - 1, hi if edge == "last" else end(own))
        case "next":
            return end(torch.where(end(own) < hi, end(own) + 1, lo))
        case "left":
            place = begin(begin(own) - 1) - 1
            return torch.where(place >= lo, place, end(lo))
        case "right":
            place = end(end(own) + 1) + 1
            return torch.where(place <= hi, place, begin(hi))
        case _:
            return own


def _in_order(layout: Layout, words: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Keys sorted by segment (order, ids, words), and the ids and positions of the queries; all with the same batch."""
    given = (layout.query_ids, layout.key_ids) if words is None else (layout.query_ids, layout.key_ids, words)
    lead = broadcast_shapes(*(x.shape[:-1] for x in given))
    keys = layout.key_ids.expand(*lead, -1)
    order = keys.argsort(dim=-1, stable=True)
    words = None if words is None else words.expand(*lead, -1).gather(-1, order)
    queries, positions = (x.expand(*lead, -1).contiguous() for x in (layout.query_ids, layout.query_positions))
    return order, keys.gather(-1, order), words, queries, positions


def _differs(x: Int[Tensor, "*s m"]) -> Bool[Tensor, "*s m"]:
    """True where an entry differs from the one before it."""
    return pad(x[..., 1:] != x[..., :-1], (1, 0), value=True)


def _extent(opens: Bool[Tensor, "*s m"]) -> tuple[Int[Tensor, "*s m"], Int[Tensor, "*s m"]]:
    """The first and the last place of the run to which each place belongs."""
    m = opens.shape[-1]
    at = torch.arange(m, device=opens.device).expand_as(opens)
    closes = pad(opens[..., 1:], (0, 1), value=True)
    first = torch.where(opens, at, 0).cummax(-1).values
    last = torch.where(closes, at, m - 1).flip(-1).cummin(-1).values.flip(-1)
    return first, last


def take_rows(x: Float[Tensor, "*#b m e"], index: Int[Tensor, "*s n"]) -> Float[Tensor, "*b n e"]:
    """x[…, index, :], with a different index for each batch entry."""
    if index.ndim == 1:
        return x.index_select(-2, index)
    batch = broadcast_shapes(x.shape[:-2], index.shape[:-1])
    index = index[..., None].expand(*batch, index.shape[-1], x.shape[-1])
    return x.expand(*batch, *x.shape[-2:]).gather(-2, index)
