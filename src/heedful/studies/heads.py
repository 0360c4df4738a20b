"""What the encoder heads of a trained model attend to, and which of them are near-copies of each other.

shares      mean weight at current i, previous i − 1, next i + 1, left j ≤ i − 2, right j ≥ i + 2, first 0 and
            last L − 1, over the rows that have such a key
entropy     −Σ_j a_ij log a_ij / log L, mean over the rows
twin        the head of any layer whose matrices have the largest cosine ⟨A, B⟩ / ‖A‖‖B‖, mean over the sentences
"""

from __future__ import annotations

from typing import Any

import torch

from heedful.nn import Attention, Transformer
from heedful.shapes import Bool, Float, Int, Tensor
from heedful.studies.data import Batch, Pairs, by_length, gather
from heedful.studies.step import encode


@torch.no_grad()
def describe_heads(
    model: Transformer, pairs: Pairs, device: torch.device, sentences: int = 256
) -> list[dict[str, Any]]:
    """One row for each head of each encoder layer, from the first sentences of the pairs."""
    model.eval()
    totals: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    likeness = torch.zeros(())
    heads = [layer.heads for layer in _attentions(model)]
    chosen = torch.arange(min(sentences, len(pairs)))
    for rows in by_length(pairs.source.lengths[chosen] + 1, 8192, chosen):
        batch = gather(pairs, rows, device)
        A = torch.cat(_matrices(model, batch), 1)
        lengths = (batch.segments >= 0).sum(-1)
        for name, (share, weighs) in _shares(A, lengths).items():
            totals[name] = totals.get(name, 0) + (share * weighs[:, None]).sum((0, 2)).cpu()
            counts[name] = counts.get(name, 0) + weighs.sum().cpu()
        flat = torch.nn.functional.normalize(A.flatten(2), dim=-1)
        likeness = likeness + (flat @ flat.mT).sum(0).cpu()
    likeness = likeness / len(chosen)
    names = [(layer, head) for layer, count in enumerate(heads) for head in range(count)]
    found = []
    for at, (layer, head) in enumerate(names):
        others = likeness[at].clone()
        others[at] = -1
        twin = int(others.argmax())
        means = {name: round(float(totals[name][at] / counts[name]), 4) for name in totals}
        row = {"layer": layer, "head": head, **means}
        found.append({**row, "twin": list(names[twin]), "twin_cosine": round(float(others[twin]), 4)})
    return found


def _matrices(model: Transformer, batch: Batch) -> list[Float[Tensor, "b h n n"]]:
    """The attention matrices of each encoder layer, materialised from its queries and keys."""
    calls: list[tuple[Any, Tensor, Tensor, dict]] = []

    def note(mechanism, args, kwargs):
        calls.append((mechanism, args[0], args[1], kwargs))

    # Layers may share a mechanism without weights: one hook per mechanism, called for every layer.
    mechanisms = {id(layer.mechanism): layer.mechanism for layer in _attentions(model)}
    hooks = [mechanism.register_forward_pre_hook(note, with_kwargs=True) for mechanism in mechanisms.values()]
    try:
        encode(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return [mechanism.matrix(q.float(), k.float(), **kwargs) for mechanism, q, k, kwargs in calls]


def _attentions(model: Transformer) -> list[Attention]:
    return [layer.attention for layer in model.encoder if isinstance(layer.attention, Attention)]


def _shares(A: Float[Tensor, "b h n n"], lengths: Int[Tensor, " b"]) -> dict[str, tuple[Tensor, Bool[Tensor, "b n"]]]:
    """For each name, one number per row, and the rows to which it applies."""
    n = A.shape[-1]
    i, j = torch.arange(n, device=A.device)[:, None], torch.arange(n, device=A.device)
    L = lengths[:, None, None]
    real = i[:, 0] < lengths[:, None]
    wanted = {
        "current": (j == i) & (L > 0),
        "previous": (j == i - 1) & (L > 0),
        "next": (j == i + 1) & (j < L),
        "left": (j <= i - 2) & (L > 0),
        "right": (j >= i + 2) & (j < L),
        "first": (j == 0) & (i >= 0) & (L > 0),
        "last": (j == L - 1) & (i >= 0),
    }
    found = {name: ((A * keys[:, None]).sum(-1), keys.any(-1) & real) for name, keys in wanted.items()}
    entropy = torch.special.entr(A).sum(-1) / lengths.clamp(min=2).log()[:, None, None]
    return {**found, "entropy": (entropy, real)}
