"""Texts for a scan, and the inputs of a model made from a text."""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from heedful.hf.modules import Refused
from heedful.hf.weights import loaded
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
    """The largest number of tokens that a model has positions for; None if there is no limit.

    Beyond it, models with learned positions fail; models with rotary positions run, outside their training range.
    """
    config = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if not known:
        return None
    shifted = getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet")
    return min(known) - 2 * shifted  # their positions start at padding_idx + 1


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


def unknown_share(tokenizer: Any, ids: Tensor) -> float:
    """The share of unknown tokens among the tokens of a text.

    Special tokens and blanks do not count: SentencePiece puts a blank before each word, known or not.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or not ids.numel():
        return 0.0
    found = Counter(ids.flatten().tolist())
    blank = [x for x in found if x != unknown and not tokenizer.convert_ids_to_tokens(x).strip("▁Ġ ")]
    for each in {*blank, *(getattr(tokenizer, "all_special_ids", ()))} - {unknown}:
        found.pop(each, None)
    return found[unknown] / max(1, found.total())


def decoder_start(model: nn.Module) -> int:
    """The token that a decoder reads first: decoder_start_token_id, else bos_token_id, else pad_token_id.

    Looked up in the model's configuration, then in its generation configuration, then in its decoder's.
    """
    config: Any = getattr(model, "config", None)
    asked = (config, getattr(model, "generation_config", None), getattr(config, "decoder", None))
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        for each in asked:
            found = getattr(each, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    raise Refused(
        f"{type(model).__name__}: its configuration has no decoder_start_token_id, bos_token_id or pad_token_id, so "
        "there is no telling what its decoder reads first. Set one in config.json, or give inputs with "
        "decoder_input_ids."
    )


def check_reads_tokens(model: nn.Module) -> None:
    """Raise `Refused` if a model reads images or sound instead of tokens."""
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise Refused(
            f"{type(model).__name__} reads {takes}, not text. Give what it takes, such as {{{takes!r}: …}}, one at a "
            "time, with tokenizer None."
        )


def check_ids(model: nn.Module, ids: Tensor, tokenizer: Any = None) -> None:
    """Raise `Refused` if a model has no embedding for some of the tokens."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(table, "num_embeddings", None) or getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(known, int) or (int(ids.min()) >= 0 and int(ids.max()) < known):
        return
    if tokenizer is None:
        raise Refused(f"token ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {known - 1}.")
    raise Refused(
        f"the tokenizer gives token {int(ids.max())} ({tokenizer.decode([int(ids.max())])!r}), the model has "
        f"embeddings for 0 to {known - 1}. Likely cause: the two do not belong together, or tokens were added later."
    )


def with_decoder(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, with decoder inputs added if the model has a decoder: the same text, shifted by one token."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return inputs
    ids = inputs["input_ids"]
    start = ids.new_full((ids.shape[0], 1), decoder_start(model))
    return {**inputs, "decoder_input_ids": torch.cat([start, ids[:, :-1]], -1)}


def encode(
    model: nn.Module, tokenizer: Any, text: str, length: int | None = None, *, beyond: bool = False
) -> dict[str, Tensor]:
    """The inputs of one text: its first `length` tokens, special ones included; by default as many as the model takes.

    If `length` is given, a text with fewer tokens is refused, because the measures depend on length. A model with a
    decoder reads the same text on both sides. `beyond` allows more tokens than a model with rotary positions was
    trained on.
    """
    check_reads_tokens(model)
    if tokenizer is None:
        unread = loaded(model).unread
        why = f"the one that came with this model can't be read ({unread})" if unread else "this model came without one"
        raise Refused(f"tokenizer: {why}; give token ids instead of text.")
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
    check_ids(model, ids, tokenizer)
    inputs = with_decoder(model, {"input_ids": ids, "attention_mask": encoded["attention_mask"]})
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in inputs.items()}
