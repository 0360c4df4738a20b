"""Text for a scan, and a model's inputs from it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from heedful.hf.modules import Refused
from heedful.shapes import Tensor


@cache
def passages() -> tuple[str, ...]:
    """24 passages of English prose (Jane Austen, public domain), each long enough for 2,048 tokens.

    >>> len(passages()), passages()[0][:44]
    (24, 'Mr. Elton was the very person fixed on by Em')
    """
    stored = files("heedful.hf").joinpath("texts/austen.txt").read_text(encoding="utf-8")
    return tuple(part.partition("\n")[2].strip() for part in stored.split("# ")[1:])


def longest(model: nn.Module) -> int | None:
    """How many tokens the positions of a model reach; None where nothing bounds them.

    Models with learned positions fail beyond; those with rotary ones run, outside of what they were trained on.
    """
    config = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if not known:
        return None
    shifted = getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet")
    return min(known) - 2 * shifted  # their positions count from the padding token's id plus one


def check_reach(model: nn.Module, length: int, *, beyond: bool = False) -> None:
    """Refuse more tokens than a model has positions for."""
    reach = longest(model)
    if reach is None or length <= reach:
        return
    config: Any = getattr(model, "config", None)
    rotary = getattr(config, "rope_parameters", None) is not None
    if not rotary:
        raise Refused(f"length: {length} tokens, expected at most {reach}: the positions of this model end there.")
    if not beyond:
        raise Refused(
            f"length: {length} tokens, expected at most {reach}: this model was trained on no more. Its rotary "
            "positions go on, and what it does there is measured where asked for (beyond=True, --beyond-positions)."
        )


def encode(
    model: nn.Module, tokenizer: Any, text: str, length: int | None = None, *, beyond: bool = False
) -> dict[str, Tensor]:
    """The inputs of one text: its first `length` tokens, special ones included; all that the model reaches by default.

    A text of fewer tokens is refused where `length` is given, because what is measured depends on it. A model with a
    decoder reads the same text on both sides. `beyond` lets a model with rotary positions read further than it was
    trained to.
    """
    if tokenizer is None:
        raise Refused("tokenizer: this model came without one; give token ids instead of text.")
    if not text.strip():
        raise Refused("text: empty, expected at least one word.")
    reach = longest(model)
    if length is not None:
        check_reach(model, length, beyond=beyond)
    cut = length if length is not None else reach
    encoded = tokenizer(text, truncation=cut is not None, max_length=cut, return_tensors="pt")
    ids = encoded["input_ids"]
    if length is not None and ids.shape[-1] < length:
        raise Refused(f"text: {ids.shape[-1]} tokens, expected at least {length}: give more text or a smaller length.")
    inputs = {"input_ids": ids, "attention_mask": encoded["attention_mask"]}
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        start = ids.new_full((ids.shape[0], 1), config.decoder_start_token_id)
        inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], -1)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in inputs.items()}
