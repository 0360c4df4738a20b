"""The inputs of a scan: texts, token ids or ready-made inputs, at the requested lengths.

All texts are encoded before anything is measured, so an unusable text is reported at once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from heedful.hf.modules import Notice, Refused
from heedful.hf.prose import check_ids, check_reach, check_reads_tokens, encode, passages, unknown_share, with_decoder
from heedful.notices import REFUSE_UNKNOWN, notices
from heedful.shapes import Tensor

Text = str | Tensor | Sequence[int] | Mapping[str, Any]
PASSAGE = 2048  # each of heedful's passages has at least this many tokens


@dataclass(frozen=True)
class Unit:
    """One text at one length: the unit in which a scan measures and writes.

    other   the inputs of the second model, if two are compared
    first   True for the first text, of which pictures are taken
    """

    text: str
    length: int
    inputs: dict[str, Any]
    other: dict[str, Any] | None = None
    first: bool = False


@dataclass(frozen=True)
class Reading:
    """A text with its inputs at each length; length 0 means the whole text.

    unknown   the share of tokens that the tokenizer does not know, the largest over lengths
    """

    id: str
    title: str
    sha256: str
    inputs: dict[int, dict[str, Any]]
    unknown: float = 0.0

    def described(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "sha256": self.sha256,
            "tokens": max(token_count(inputs) for inputs in self.inputs.values()),
            "unknown": round(self.unknown, 4),
        }


def token_count(inputs: Mapping[str, Any]) -> int:
    """The number of tokens in these inputs; 0 if only the model knows it, as with images."""
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        if isinstance(inputs.get(name), Tensor):
            return inputs[name].shape[1]
    return 0


def builtin(length: int, count: int | None = None) -> list[str]:
    """Passages that come with heedful, joined if one is too short; each is used once."""
    each, stored = -(-length // PASSAGE), passages()
    joined = ["\n\n".join(stored[at : at + each]) for at in range(0, len(stored) - each + 1, each)]
    if not joined:
        raise Refused(
            f"length: {length} tokens, more than the passages that come with heedful have together "
            f"({len(passages()) * PASSAGE}). Give texts of your own."
        )
    if count is not None and count > len(joined):
        raise Refused(
            f"{count} texts of {length} tokens asked for; heedful brings {len(joined)} of that length. Give texts of "
            "your own, or fewer tokens."
        )
    return joined if count is None else joined[:count]


def pieces(text: str, length: int, count: int) -> list[str]:
    """A long text cut into at most `count` consecutive pieces of `length` tokens of English prose or more."""
    size = 8 * length
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    if len(cut) > 1 and len(cut[-1]) < size:
        cut.pop()
    return cut[:count]


def read(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[Text],
    lengths: Sequence[int],
    *,
    titles: Sequence[str] | None = None,
    beyond: bool = False,
    allow_unknown: bool = False,
) -> list[Reading]:
    """Encode every text at every length, or whole if no lengths are given.

    Refuses a text if the tokenizer does not know half of its tokens, unless `allow_unknown`. From 5 % on, a `Notice`
    names the worst text.
    """
    if isinstance(texts, str | Tensor | Mapping):
        raise TypeError(f"texts: a single {type(texts).__name__}, expected a list of them: [text].")
    if not texts:
        raise Refused("texts: none, expected at least one.")
    if titles is not None and len(titles) != len(texts):
        raise ValueError(f"titles: {len(titles)} for {len(texts)} texts.")
    found = []
    for at, text in enumerate(map(_as_tensor, texts)):
        title = titles[at] if titles is not None else _title(text, at)
        try:
            inputs = {length: _encoded(model, tokenizer, text, length, beyond) for length in lengths or [0]}
            unknown = _unknown(tokenizer, inputs) if isinstance(text, str) else 0.0
            if unknown >= REFUSE_UNKNOWN and not allow_unknown:
                raise Refused(
                    f"the tokenizer does not know {100 * unknown:.0f} % of its tokens, so the model would read noise. "
                    "Likely cause: a tokenizer of another model, or text of another language or field. Give text that "
                    "it knows, or ask for this one all the same (allow_unknown=True)."
                )
        except Refused as reason:
            raise Refused(f"text {at} ({title}): {reason}") from reason
        found.append(Reading(f"{at:04d}", title, _digest(text), inputs, unknown))
    for sentence in notices({"texts": [reading.described() for reading in found]}):
        warnings.warn(sentence, Notice, stacklevel=4)
    return found


def _unknown(tokenizer: Any, inputs: Mapping[int, Mapping[str, Any]]) -> float:
    return max(unknown_share(tokenizer, each["input_ids"]) for each in inputs.values())


def _as_tensor(text: Text) -> str | Tensor | Mapping[str, Any]:
    """Convert a list of token ids to a tensor; return everything else unchanged."""
    if isinstance(text, str | Tensor | Mapping):
        return text
    try:
        return torch.tensor(text, dtype=torch.long if not len(text) else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"texts: one is a {type(text).__name__}, expected a string, token ids, or a dictionary of what the model "
            "takes."
        ) from error


def _title(text: str | Tensor | Mapping[str, Any], at: int) -> str:
    return " ".join(text.split())[:48] if isinstance(text, str) and text.strip() else f"input {at}"


def _encoded(
    model: nn.Module, tokenizer: Any, text: str | Tensor | Mapping[str, Any], length: int, beyond: bool
) -> dict[str, Any]:
    if isinstance(text, str):
        return _of_string(model, tokenizer, text, length, beyond)
    if isinstance(text, Tensor):
        return _of_ids(model, text, length, beyond)
    return _of_inputs(text, length)


def _of_string(model: nn.Module, tokenizer: Any, text: str, length: int, beyond: bool) -> dict[str, Any]:
    if length:
        return encode(model, tokenizer, text, length, beyond=beyond)
    if tokenizer is not None and text.strip():
        count = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
        try:
            check_reach(model, count, beyond=beyond)
        except Refused as reason:
            raise Refused(f"{reason} Give a length, and the first tokens are read.") from reason
        return encode(model, tokenizer, text, count, beyond=beyond)
    return encode(model, tokenizer, text)  # raises, and says how many tokens are missing


def _of_ids(model: nn.Module, ids: Tensor, length: int, beyond: bool) -> dict[str, Any]:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise Refused(f"{ids.dtype}, expected token ids, which are integers. Likely cause: embeddings.")
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise Refused(f"token ids of shape {tuple(ids.shape)}, expected (n,), one text each.")
    if not len(ids):
        raise Refused("no token ids, expected at least one.")
    if length and len(ids) < length:
        raise Refused(f"{len(ids)} tokens, expected at least {length}: give more text or a smaller length.")
    ids = ids[:length] if length else ids
    check_reach(model, len(ids), beyond=beyond)
    check_reads_tokens(model)
    check_ids(model, ids)
    ids = ids.long()[None].cpu()
    return with_decoder(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _of_inputs(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    if length:
        raise Refused("ready inputs are measured as they are: give no lengths.")
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    if not tensors:
        raise Refused(f"inputs {', '.join(inputs) or '(none)'} without a tensor, expected what the model takes.")
    sizes = {x.shape[0] for x in tensors if x.ndim}
    if sizes != {1}:
        raise Refused(f"a batch of {max(sizes)}, expected one text or image at a time, batch axis 1.")
    return dict(inputs)


def _digest(text: str | Tensor | Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    if isinstance(text, str):
        digest.update(text.encode())
    elif isinstance(text, Tensor):
        digest.update(_bytes(text))
    else:
        for name in sorted(text):
            digest.update(name.encode())
            value = text[name]
            digest.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
