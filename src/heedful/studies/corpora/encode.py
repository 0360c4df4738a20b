"""Encode pairs of sentences as tokens: one BPE vocabulary for both languages, learned from the training pairs only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from heedful.studies.data import SPECIAL, UNKNOWN

Texts = list[tuple[str, str]]
LONGEST = 126
"""Maximal tokens of a sentence; longer ones are dropped in training and truncated in tests."""


def learn(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A BPE tokenizer; words end at spaces and at punctuation."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), limit_alphabet=400, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(
    folder: Path, languages: tuple[str, str], splits: dict[str, Texts], vocabulary: int, card: dict[str, Any]
) -> dict[str, Any]:
    """Encode the splits into a folder: ids.safetensors, tokenizer.json, card.json, and the texts of the tests."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = learn((side for pair in splits["train"] for side in pair), vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors: dict[str, torch.Tensor] = {}
    tokens: dict[str, dict[str, int]] = {}
    for name, pairs in splits.items():
        sides = [_encode(tokenizer, [pair[side] for pair in pairs]) for side in (0, 1)]
        if name == "train":
            short = [at for at in range(len(pairs)) if all(len(side[at][0]) <= LONGEST for side in sides)]
            sides = [[side[at] for at in short] for side in sides]
        tokens[name] = {}
        for language, sentences in zip(languages, sides, strict=True):
            lengths = torch.tensor([0, *(min(len(ids), LONGEST) for ids, _ in sentences)])
            tensors[f"{name}.{language}.tokens"] = _flat([ids[:LONGEST] for ids, _ in sentences], torch.int16)
            tensors[f"{name}.{language}.begins"] = _flat([begins[:LONGEST] for _, begins in sentences], torch.uint8)
            tensors[f"{name}.{language}.starts"] = lengths.cumsum(0).int()
            tokens[name][language] = int(lengths.sum())
        if name != "train":
            for language, side in zip(languages, (0, 1), strict=True):
                lines = "".join(pair[side] + "\n" for pair in pairs)
                (folder / f"{name}.{language}.txt").write_text(lines)
    save_file(tensors, folder / "ids.safetensors")
    card = {
        **card,
        "languages": list(languages),
        "vocabulary": tokenizer.get_vocab_size(),
        "pairs": {name: len(tensors[f"{name}.{languages[0]}.starts"]) - 1 for name in splits},
        "tokens": tokens,
        "checksum": hashlib.sha256((folder / "ids.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return card


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Tokens of each sentence, and 1 for each token that begins a word."""
    found = []
    for encoded in tokenizer.encode_batch(texts):
        words = encoded.word_ids
        found.append((encoded.ids, [int(at == 0 or word != words[at - 1]) for at, word in enumerate(words)]))
    return found


def _flat(lists: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([x for line in lists for x in line], dtype=dtype)
