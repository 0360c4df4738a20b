"""Padding and packing in one integer tensor.

`segments` has shape (*batch, n) and broadcasts against the batch. A token attends only inside its segment. A negative
id marks padding. Positions count the tokens of a segment from its start; tokens of other segments in between do not
count. So a padded or packed batch gives, row for row, the outputs of the separate sequences.

If there are fewer queries than keys, the ids are those of the keys, and the queries are the last tokens. If queries and
keys are different sequences (cross-attention), `segments` is a pair: ids of the queries, ids of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import torch

from heedful.patterns import Pattern
from heedful.shapes import Bool, Float, Int, Tensor, broadcast_shapes

Segments = Tensor | tuple[Tensor, Tensor]


class Layout(NamedTuple):
    """Ids and positions of the queries and of the keys; leading axes broadcast against the batch."""

    query_ids: Int[Tensor, "*b n"]
    key_ids: Int[Tensor, "*b m"]
    query_positions: Int[Tensor, "*b n"]
    key_positions: Int[Tensor, "*b m"]


def from_mask(mask: Bool[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """Segments from a mask that is True on real tokens and False on padding.

    >>> from_mask(torch.tensor([[True, True, False]]))
    tensor([[ 0,  0, -1]])
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask: expected bool (True on real tokens), got {mask.dtype}. An attention mask of 0 and 1 needs "
            "`.bool()`; an additive mask (0 and -inf) needs `mask == 0`."
        )
    return mask.long() - 1


def from_lengths(lengths: Int[Tensor, "*b"], n: int, *, padding: str = "right") -> Int[Tensor, "*b n"]:
    """Segments of sequences of the given lengths, padded to n on the "right" or on the "left".

    >>> from_lengths(torch.tensor([2, 3]), 3)
    tensor([[ 0,  0, -1],
            [ 0,  0,  0]])
    """
    if padding not in ("right", "left"):
        raise ValueError(f'padding: expected "right" or "left", got {padding!r}.')
    if lengths.numel() and (int(lengths.max()) > n or int(lengths.min()) < 0):
        raise ValueError(f"lengths: expected values in 0…{n} (n), got {int(lengths.min())}…{int(lengths.max())}.")
    index = torch.arange(n, device=lengths.device)
    if padding == "left":
        index = index.flip(0)
    return from_mask(index < lengths[..., None])


def from_cu_seqlens(cu_seqlens: Int[Tensor, " sequences_plus_one"], n: int | None = None) -> Int[Tensor, " n"]:
    """Segments of sequences packed end to end, from their cumulative lengths (0, l₁, l₁+l₂, …).

    Tokens beyond the last boundary, up to n, are padding.

    >>> from_cu_seqlens(torch.tensor([0, 2, 5]), n=6)
    tensor([ 0,  0,  1,  1,  1, -1])
    """
    bounds = cu_seqlens.long()
    if bounds.ndim != 1 or len(bounds) < 1 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
        raise ValueError(f"cu_seqlens: expected a vector 0 = c₀ ≤ c₁ ≤ …, got {cu_seqlens.tolist()}.")
    total = int(bounds[-1])
    n = total if n is None else n
    if n < total:
        raise ValueError(f"n: expected at least {total}, the last of cu_seqlens, got {n}.")
    index = torch.arange(n, device=bounds.device)
    ids = torch.searchsorted(bounds, index, right=True) - 1
    return torch.where(index < total, ids, -1)


def positions(ids: Int[Tensor, "*b n"]) -> Int[Tensor, "*b n"]:
    """The number of earlier tokens of the same segment.

    >>> positions(torch.tensor([0, 0, -1, 1, 1, 0]))
    tensor([0, 1, 0, 0, 1, 2])
    """
    order = ids.argsort(dim=-1, stable=True)
    ordered = ids.gather(-1, order)
    index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    rank = index - torch.where(starts, index, 0).cummax(-1).values if ids.shape[-1] else index
    return torch.empty_like(order).scatter_(-1, order, rank)


def in_last(ids: Int[Tensor, "*b n"]) -> Bool[Tensor, "*b n"]:
    """Return a mask of the tokens in the last segment of each row, the segment that decoding continues.

    >>> in_last(torch.tensor([0, 0, 1, 1, -1]))
    tensor([False, False,  True,  True, False])
    """
    if not ids.shape[-1]:
        return torch.zeros_like(ids, dtype=torch.bool)
    index = torch.arange(ids.shape[-1], device=ids.device)
    last = ids.gather(-1, torch.where(ids >= 0, index, 0).amax(-1, keepdim=True))
    return (ids == last) & (ids >= 0)


def take_tokens(x: Float[Tensor, "*#b n w"], order: Int[Tensor, "*#b l"]) -> Float[Tensor, "*b l w"]:
    """Return the tokens of x in the given order, which may differ between rows of the batch."""
    batch = broadcast_shapes(x.shape[:-2], order.shape[:-1])
    return x.expand(*batch, *x.shape[-2:]).gather(-2, order[..., None].expand(*batch, -1, x.shape[-1]))


def resolve(segments: Segments | None, n: int, m: int, device: torch.device | None = None) -> Layout:
    """Return ids and positions of n queries and m keys. The queries of a segment are its last tokens."""
    if segments is None:
        keys = torch.arange(m, device=device)
        queries = torch.arange(m - n, m, device=device)
        return Layout(torch.zeros_like(queries), torch.zeros_like(keys), queries, keys)
    if isinstance(segments, Tensor):
        ids, where = segments.long(), positions(segments.long())
        return Layout(ids[..., m - n :], ids, where[..., m - n :], where)
    query_ids, key_ids = (ids.long() for ids in segments)
    missing = _count(query_ids, key_ids) - _count(query_ids, query_ids)
    return Layout(query_ids, key_ids, positions(query_ids) + missing, positions(key_ids))


def _count(ids: Tensor, among: Tensor) -> Tensor:
    """How often each id occurs in `among`."""
    shape = broadcast_shapes(ids.shape[:-1], among.shape[:-1])
    ids = ids.expand(*shape, -1).contiguous()
    among = among.expand(*shape, -1).sort(-1).values.contiguous()
    return torch.searchsorted(among, ids, right=True) - torch.searchsorted(among, ids)


def visible(pattern: Pattern, n: int, m: int, segments: Segments | None, device=None) -> Bool[Tensor, "*b n m"]:
    """Return the dense mask of a pattern under segments. It is the definition; tests compare fast paths with it."""
    return allowed(pattern, resolve(segments, n, m, device))


def allowed(pattern: Pattern, layout: Layout) -> Bool[Tensor, "*b n m"]:
    """Return the dense mask for the queries and keys of a layout, which may be a subset of the tokens."""
    same = layout.query_ids[..., :, None] == layout.key_ids[..., None, :]
    real = layout.query_ids[..., :, None] >= 0
    return same & real & pattern.allows(layout.query_positions[..., :, None], layout.key_positions[..., None, :])


def nothing_seen(
    q: Float[Tensor, "*#b n d"], k: Float[Tensor, "*#b m d"], v: Float[Tensor, "*#b m e"], *learned: Tensor
) -> Float[Tensor, "*b n e"]:
    """Return the output if no query sees any key: zeros.

    The zeros are computed from q, k, v and `learned`, so that these get zero gradients instead of None.

    >>> q, k, v = torch.randn(3, 2, 4, requires_grad=True).unbind()
    >>> nothing_seen(q, k, v).sum().backward()
    """
    out = q[..., :0].sum(-1, keepdim=True) + v[..., :0, :].sum(-2, keepdim=True)  # an empty sum is 0, never NaN
    for empty in (k[..., :0, :0].sum((-2, -1), keepdim=True), *(x.flatten()[:0].sum() for x in learned)):
        out = out + empty
    return out.to(v.dtype)  # autocast adds in float32


def per_segment(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Float[Tensor, "*#b n d"],
    k: Float[Tensor, "*#b m d"],
    v: Float[Tensor, "*#b m e"],
    segments: Segments,
    learned: Iterable[Tensor] = (),
    *,
    together: bool = False,
) -> Float[Tensor, "*b n e"]:
    """Run `attend(q, k, v)` on each segment separately: correct for every mechanism, one call per segment.

    learned    parameters that `attend` reads; they get zero gradients if no query sees a key
    together   True if `attend` has parameters per head, so that each call needs all heads. If the heads have different
               segments, `attend` runs once with the segments of each head, and only the rows of that head are used
    """
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if together and differ_by_head(segments):
        rows, learned = [], list(learned)
        for head in range(batch[-1]):
            queries, keys = (ids if ids.ndim < 2 else ids[..., None, :] for ids in of_head(segments, head))
            rows.append(per_segment(attend, q, k, v, (queries, keys), learned)[..., head, :, :])
        return torch.stack(rows, -3)
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    layout = resolve(segments, q.shape[-2], k.shape[-2], q.device)
    out, attended = q.new_zeros(*batch, q.shape[-2], v.shape[-1]), False
    for index, query_ids, key_ids in _each_row(layout, len(batch)):
        for segment in query_ids[query_ids >= 0].unique().tolist():
            rows, cols = (query_ids == segment).nonzero()[:, 0], (key_ids == segment).nonzero()[:, 0]
            if not len(cols):
                continue
            part = attend(q[index][..., rows, :], k[index][..., cols, :], v[index][..., cols, :])
            out[index].index_copy_(-2, rows, part)
            attended = True
    return out if attended else nothing_seen(q, k, v, *learned)


def _each_row(layout: Layout, axes: int) -> Iterable[tuple[tuple[int | slice, ...], Tensor, Tensor]]:
    """Yield every row of ids, with the index of the batch entries that share it."""
    lead = broadcast_shapes(layout.query_ids.shape[:-1], layout.key_ids.shape[:-1])
    query_ids = layout.query_ids.expand(*lead, -1)
    key_ids = layout.key_ids.expand(*lead, -1)
    whole = (slice(None),) * (axes - len(lead))
    for at in product(*(range(size) for size in lead)):
        index = whole + tuple(a if size > 1 else slice(None) for a, size in zip(at, lead, strict=True))
        yield index, query_ids[at], key_ids[at]


def differ_by_head(segments: Segments) -> bool:
    """True if the segments may differ between heads, the last batch axis."""
    parts = segments if isinstance(segments, tuple) else (segments,)
    return any(ids.ndim > 1 and ids.shape[-2] > 1 for ids in parts)


def of_head(segments: Segments, head: int) -> Segments:
    """The segments of one head."""

    def select(ids: Tensor) -> Tensor:
        return ids if ids.ndim < 2 else ids.select(-2, head if ids.shape[-2] > 1 else 0)

    return (select(segments[0]), select(segments[1])) if isinstance(segments, tuple) else select(segments)
