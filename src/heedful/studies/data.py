"""Encoded pairs of sentences, and the batches of a run.

A batch has pairs of similar length, both sides padded on the right to the same width, one of WIDTHS, and as many rows
as fit. So training has only a dozen shapes, and a step is captured once for each. The pairs of a step depend only on
the seed and the number of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from heedful.shapes import Int, Tensor

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


class Side(NamedTuple):
    """The concatenated sentences of one language.

    tokens   tokens of all sentences
    begins   True for tokens that begin a word
    starts   index of the first token of each sentence
    counts   True for target tokens that count in the loss; by default all, and the end of the sentence
    """

    tokens: Int[Tensor, " total"]
    begins: Int[Tensor, " total"]
    starts: Int[Tensor, " sentences_plus_one"]
    counts: Int[Tensor, " total"] | None = None

    @property
    def lengths(self) -> Int[Tensor, " sentences"]:
        return self.starts.diff()


class Pairs(NamedTuple):
    """Sentences and their translations."""

    source: Side
    target: Side

    def __len__(self) -> int:
        return len(self.source.starts) - 1


class Batch(NamedTuple):
    """Padded sentences: the encoder's input, the decoder's input, and what the decoder should predict."""

    source: Int[Tensor, "b n"]
    segments: Int[Tensor, "b n"]
    words: Int[Tensor, "b n"]
    given: Int[Tensor, "b m"]
    wanted: Int[Tensor, "b m"]


class Corpus(NamedTuple):
    """A folder of encoded pairs: its splits, the size of its vocabulary and its data card."""

    splits: dict[str, Pairs]
    vocabulary: int
    card: dict

    @property
    def task(self) -> str:
        """Translation, prose, manuals or recall."""
        return self.card.get("task", "translation")

    @property
    def has_source(self) -> bool:
        """True if there is a source for an encoder to read."""
        return len(self.splits["train"].source.tokens) > 0


def load(folder: Path, direction: str) -> Corpus:
    """Read the pairs of a folder that `heedful.studies.corpora` wrote, from the first language to the second."""
    if not (folder / "ids.safetensors").exists():
        raise FileNotFoundError(
            f"{folder}: no encoded pairs (ids.safetensors), expected a folder written by "
            "`python -m heedful.studies.corpora`."
        )
    card = json.loads((folder / "card.json").read_text())
    source, target = ("source", "target") if "task" in card else direction.split("-")
    if {source, target} != set(card["languages"]):
        raise ValueError(f"direction: {direction!r}, expected two of {card['languages']}, the languages of {folder}.")
    tensors = load_file(folder / "ids.safetensors")

    def side(split: str, language: str) -> Side:
        tokens, begins, starts = (tensors[f"{split}.{language}.{x}"].long() for x in ("tokens", "begins", "starts"))
        return Side(tokens, begins, starts, begins if "task" in card and language == target else None)

    names = sorted({name.split(".")[0] for name in tensors})
    return Corpus({name: Pairs(side(name, source), side(name, target)) for name in names}, card["vocabulary"], card)


def shuffle_targets(pairs: Pairs, seed: int) -> Pairs:
    """Pair each source with the target of another pair: a model can learn the language, but not to translate."""
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    starts, target = pairs.target.starts, pairs.target
    parts = [torch.arange(int(starts[i]), int(starts[i + 1])) for i in order.tolist()]
    index = torch.cat(parts)
    lengths = torch.tensor([0, *map(len, parts)])
    return Pairs(pairs.source, Side(target.tokens[index], target.begins[index], lengths.cumsum(0)))


def batches(pairs: Pairs, tokens: int, seed: int) -> Iterator[Int[Tensor, " b"]]:
    """Yield the indices of the pairs of each step, endlessly: every pair once per epoch; −1 marks unused rows."""
    longest = torch.maximum(pairs.source.lengths, pairs.target.lengths) + 1
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(pairs), generator=generator)
        chunks = by_length(longest, tokens, order)
        for at in torch.randperm(len(chunks), generator=generator).tolist():
            missing = max(1, tokens // padded_width(int(longest[chunks[at]].max()))) - len(chunks[at])
            yield torch.cat([chunks[at], torch.full((missing,), -1)])
        epoch += 1


def by_length(lengths: Int[Tensor, " s"], tokens: int, order: Int[Tensor, " s"]) -> list[Int[Tensor, " b"]]:
    """Divide pairs into batches of similar length, at most `tokens` after padding; ties keep the given order.

    The longest pairs come first, so all batches except the last have as many rows as fit.
    """
    order = order[lengths[order].argsort(stable=True, descending=True)]
    chunks, start = [], 0
    while start < len(order):
        rows = max(1, tokens // padded_width(int(lengths[order[start]])))
        chunks.append(order[start : start + rows])
        start += rows
    return chunks


WIDTHS = (16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)


def padded_width(length: int) -> int:
    """The smallest of WIDTHS that fits `length` tokens; beyond them, a multiple of 64."""
    return next((width for width in WIDTHS if width >= length), -(-length // 64) * 64)


def gather(pairs: Pairs, rows: Int[Tensor, " b"], device: torch.device | None = None) -> Batch:
    """The batch of these pairs, on the device; −1 gives an empty sentence without targets."""
    width = padded_width(max(int(side.lengths[rows[rows >= 0]].max()) for side in pairs) + 1)
    empty = (rows < 0)[:, None]
    rows = rows.clamp(min=0)
    source, begins = _padded(pairs.source, rows, width)
    lengths = pairs.source.lengths[rows][:, None].masked_fill(empty, 0)
    at = torch.arange(width)
    source = torch.where(at == lengths, END, source)
    target, counts = _padded(pairs.target, rows, width)
    ends = pairs.target.lengths[rows][:, None]
    given = torch.cat([torch.full_like(target[:, :1], BEGIN), target[:, :-1]], 1)
    if pairs.target.counts is None:
        wanted = torch.where(at == ends, END, target).masked_fill(empty, PAD)
    else:
        wanted = torch.where(counts.bool(), target, PAD).masked_fill(empty, PAD)
    words = (begins | (at == lengths)).cumsum(1)
    batch = Batch(source, torch.where(at <= lengths, 0, -1), words, given, wanted)
    if device is None or device.type == "cpu":
        return batch
    return Batch(*torch.stack(batch).pin_memory().to(device, non_blocking=True))


def _padded(side: Side, rows: Int[Tensor, " b"], width: int) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Tokens of the sentences, and which of them begin a word, padded to the width."""
    lengths, starts = side.lengths[rows], side.starts[:-1][rows]
    at = torch.arange(width)
    inside = at < lengths[:, None]
    index = torch.where(inside, starts[:, None] + at, 0)
    if not len(side.tokens):
        return torch.full_like(index, PAD), torch.zeros_like(index)
    return torch.where(inside, side.tokens[index], PAD), torch.where(inside, side.begins[index], 0)
