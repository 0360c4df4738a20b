"""Word ids: the word that each token belongs to. Like segments, they describe one batch and are passed to each call."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from heedful.shapes import Tensor, broadcast_shapes


class TakesWords(Protocol):
    """The method of a mechanism that this module calls."""

    def takes_words(self) -> bool: ...


def words_for(part: TakesWords, words: Any) -> dict[str, Any]:
    """Return {"words": words} if `part` takes word ids, else {}."""
    return {"words": words} if words is not None and part.takes_words() else {}


def check_takes_words(mechanism: TakesWords) -> None:
    """Raise unless `mechanism` takes word ids."""
    if not mechanism.takes_words():
        raise TypeError(
            f"words: given to {type(mechanism).__name__}, which does not take word ids; expected a "
            "heedful.FixedPattern, or a Mixture or Sum with one among its parts."
        )


def check_words(words: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raise unless `words` are the integer ids (*batch, m) of the keys, or None."""
    if words is None:
        return
    if not isinstance(words, Tensor) or words.is_floating_point() or words.dtype == torch.bool or words.ndim < 1:
        given = f"{words.dtype} {tuple(words.shape)}" if isinstance(words, Tensor) else type(words).__name__
        raise TypeError(
            f"words: expected an integer tensor (*batch, tokens) of word ids, got {given}. Likely cause: a "
            "tokenizer's word_ids(), a list with None at special tokens: give those an id of their own."
        )
    batch = broadcast_shapes(q.shape[:-2], k.shape[:-2])
    try:
        fits = broadcast_shapes(words.shape[:-1], batch) == batch
    except RuntimeError:
        fits = False
    if not fits or words.shape[-1] != k.shape[-2]:
        raise ValueError(
            f"words: shape {tuple(words.shape)}, expected one id for each of the {k.shape[-2]} keys, (*batch, "
            f"{k.shape[-2]}) with batch axes that broadcast to {tuple(batch)}. Likely cause: ids of another batch, "
            "or a (B, m) tensor for (B, H, m, d) inputs, which needs a head axis: words[:, None]."
        )


def count_words(words: Tensor, ids: Tensor, where: Tensor, own: Tensor, sees: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the word index of each query and of each key, counted from the start of the segment, and the word counts.

    By the definition: a word begins at a token if the previous token of its segment has another id.
    """
    same = ids[..., :, None] == ids[..., None, :]
    neighbour = same & (where[..., None, :] == where[..., :, None] - 1)
    begins = ~(neighbour & (words[..., :, None] == words[..., None, :])).any(-1)
    earlier = same & (where[..., None, :] <= where[..., :, None])
    u = (earlier & begins[..., None, :]).sum(-1)[..., None, :] - 1
    return (own * u).sum(-1, keepdim=True), u, (sees & begins[..., None, :]).sum(-1, keepdim=True)
