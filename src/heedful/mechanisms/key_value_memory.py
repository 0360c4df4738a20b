"""A store of keys and values that persists between calls and precedes the keys of the next call, like a cache."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import nn

from heedful.kernels.blocked.tiles import BUDGET
from heedful.kernels.dispatch import as_given
from heedful.shapes import Float, Tensor, broadcast_shapes


class Nearest(NamedTuple):
    """The keys and values that a store found for each query, nearest first."""

    scores: Float[Tensor, "*b n c"]
    k: Float[Tensor, "*b n c d"]
    v: Float[Tensor, "*b n c e"]


class KeyValueMemory(nn.Module):
    """A store of keys and values that persists between calls; it holds the last `capacity` tokens added.

    >>> import torch
    >>> store = KeyValueMemory(3, d=1, e=1)
    >>> store.add(torch.tensor([[0.0], [1.0]]), torch.tensor([[10.0], [11.0]]))
    >>> store.add(torch.tensor([[2.0], [3.0]]), torch.tensor([[12.0], [13.0]]))
    >>> keys, values = store.before(torch.tensor([[9.0]]), torch.tensor([[19.0]]))
    >>> keys.flatten().tolist(), values.flatten().tolist()
    ([1.0, 2.0, 3.0, 9.0], [11.0, 12.0, 13.0, 19.0])
    >>> store.nearest(torch.tensor([[1.0], [-1.0]]), 2).v.flatten(-2).tolist()
    [[13.0, 12.0], [11.0, 12.0]]

    Its buffers have a fixed size, so a state_dict fits every store of the same sizes. No gradient flows into stored
    tokens, as in the paper.

    batch    batch axes, heads last; all rows of a batch hold equally many tokens
    dtype    dtype of the stored tokens; results have the dtype of the arguments
    """

    k: Tensor
    v: Tensor
    length: Tensor

    def __init__(self, capacity: int, d: int, e: int, batch: tuple[int, ...] = (), *, dtype: torch.dtype | None = None):
        super().__init__()
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity: expected an integer ≥ 1, the number of tokens to keep, got {capacity!r}.")
        self.capacity = capacity
        self.register_buffer("k", torch.zeros(*batch, capacity, d, dtype=dtype))
        self.register_buffer("v", torch.zeros(*batch, capacity, e, dtype=dtype))
        self.register_buffer("length", torch.zeros((), dtype=torch.long))

    def __len__(self) -> int:
        """Return the number of tokens in the store."""
        return int(self.length)

    @torch.no_grad()
    def add(self, k: Float[Tensor, "*#b m d"], v: Float[Tensor, "*#b m e"]) -> None:
        """Append tokens; the oldest are dropped if the store exceeds its capacity."""
        self._check(k, v)
        for name, x in (("k", k), ("v", v)):
            kept = getattr(self, name)
            more = x[..., max(0, x.shape[-2] - self.capacity) :, :].to(kept).expand(*kept.shape[:-2], -1, -1)
            setattr(self, name, torch.cat([kept[..., more.shape[-2] :, :], more], -2))
        self.length = (self.length + k.shape[-2]).clamp(max=self.capacity)

    def clear(self) -> None:
        """Remove all tokens."""
        self.length = torch.zeros_like(self.length)

    def before(
        self, k: Float[Tensor, "*#b m d"], v: Float[Tensor, "*#b m e"]
    ) -> tuple[Float[Tensor, "*b l d"], Float[Tensor, "*b l e"]]:
        """Return the stored tokens, oldest first, followed by k and v: the keys and values for a causal mechanism."""
        self._check(k, v)
        keys, values = self._held()
        return _joined(keys, k), _joined(values, v)

    def nearest(self, q: Float[Tensor, "*#b n d"], count: int) -> Nearest:
        """Return the `count` tokens (all if there are fewer) with the largest q·k; older ones first if equal."""
        keys, values = self._held()
        if q.shape[-1] != keys.shape[-1]:
            raise ValueError(f"q: width {q.shape[-1]} {tuple(q.shape)}, expected {keys.shape[-1]} as in the store.")
        wide = torch.promote_types(q.dtype, torch.float32)
        scores_a_row = prod(broadcast_shapes(q.shape[:-2], keys.shape[:-2])) * keys.shape[-2]
        with as_given(q):
            parts = [
                (rows.to(wide) @ keys.to(wide).mT).sort(dim=-1, descending=True, stable=True)
                for rows in q.split(max(1, BUDGET // max(1, scores_a_row)), -2)
            ]
        scores, index = (torch.cat([part[at][..., :count] for part in parts], -2) for at in (0, 1))
        found = (
            x.expand(*index.shape[:-2], *x.shape[-2:])
            .gather(-2, index.flatten(-2)[..., None].expand(*index.shape[:-2], -1, x.shape[-1]))
            .unflatten(-2, index.shape[-2:])
            .to(q.dtype)
            for x in (keys, values)
        )
        return Nearest(scores.to(q.dtype), *found)

    def _held(self) -> tuple[Tensor, Tensor]:
        empty = self.capacity - len(self)
        return self.k[..., empty:, :], self.v[..., empty:, :]

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, x, own in (("k", k, self.k), ("v", v, self.v)):
            fits = x.ndim >= 2 and x.shape[-1] == own.shape[-1] and x.shape[-2] == k.shape[-2]
            try:
                fits = fits and broadcast_shapes(x.shape[:-2], own.shape[:-2]) == own.shape[:-2]
            except RuntimeError:
                fits = False
            if not fits:
                wanted = ", ".join(map(str, (*own.shape[:-2], "tokens", own.shape[-1])))
                raise ValueError(
                    f"{name}: {tuple(x.shape)}, expected ({wanted}), with as many tokens in k and v. Likely cause: a "
                    "store that was made for another layer or batch."
                )

    def extra_repr(self) -> str:
        return f"{len(self)} of {self.capacity} tokens, d={self.k.shape[-1]}, e={self.v.shape[-1]}"


def _joined(held: Tensor, x: Tensor) -> Tensor:
    batch = broadcast_shapes(held.shape[:-2], x.shape[:-2])
    return torch.cat([held.to(x).expand(*batch, -1, -1), x.expand(*batch, -1, -1)], -2)
