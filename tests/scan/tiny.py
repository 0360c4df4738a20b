"""A tiny Llama, its tokenizer, and text for them."""

from __future__ import annotations

from pathlib import Path

import torch
import zoo

WORDS = [f"w{i}" for i in range(zoo.VOCABULARY - 3)]


def llama(seed: int = 0) -> torch.nn.Module:
    species = next(species for species in zoo.CAPTURED if species.name == "llama")
    return zoo.grow(species, seed=seed)


def species(name: str) -> zoo.Species:
    return next(species for species in [*zoo.CAPTURED, *zoo.OTHERS, *zoo.ITEMS] if species.name == name)


def ids(count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, zoo.VOCABULARY, (length,), generator=generator) for _ in range(count)]


def prose(length: int, seed: int = 0) -> str:
    return " ".join(WORDS[x % len(WORDS)] for x in ids(1, length, seed)[0].tolist())


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<s>", pad_token="<pad>")


def saved(folder: Path, seed: int = 0) -> Path:
    llama(seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
