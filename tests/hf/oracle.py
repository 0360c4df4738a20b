"""The oracle of attached models: every forward pass on the whole text, every head by `matrix(q, k) @ v` in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from heedful.hf import head_groups


def by_matrix(part, q, k, v, setting):
    """What `Part` does, by the definition of its mechanism."""
    mechanism = part.bound(setting).double()
    q, k, v = (x.double() for x in (part.index.queries(q), part.index.keys(k), part.index.keys(v)))
    hides = setting.hidden is not None and type(mechanism.pattern).__name__ == "Full"
    ids = None if hides else part.segments(setting, q.ndim)
    return part.index.heads_of(mechanism.matrix(part.scaled(q, setting), k, segments=ids) @ v)


@contextmanager
def defined() -> Iterator[None]:
    fast = head_groups.Part.__call__

    def slow(part, q, k, v, setting):
        own = {name: x.dtype for name, x in ([] if part.mechanism is None else part.mechanism.state_dict().items())}
        out = by_matrix(part, q, k, v, setting).to(q.dtype)
        if own and part.mechanism is not None:
            part.mechanism.to(q.dtype)
        return out

    head_groups.Part.__call__ = slow
    try:
        yield
    finally:
        head_groups.Part.__call__ = fast


def logits(model, ids, mask=None, **more):
    """All logits, recomputed."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), defined():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **more).logits


def greedy(model, inputs, steps):
    """Tokens and logits of so many steps, each recomputed."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    found = []
    for _ in range(steps):
        found.append(logits(model, ids, mask)[:, -1])
        ids = torch.cat([ids, found[-1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids, torch.stack(found, 1)
