"""Data of the other tasks: `python -m heedful.studies.corpora.tasks --task prose --out carry/corpora`.

prose      language modelling: English prose of Debian documentation in blocks of 255 tokens
manuals    classification: which of five manuals a paragraph comes from; the decoder predicts one token, the label
recall     multi-query recall (Arora et al. 2023, arXiv:2312.04927): 15 random keys with their values, then each key
           again in another order; after each, the model predicts its value

A folder has the format of a parallel corpus. Tests of the first two come from documents that training sees in part
("test") and from unseen documents or packages ("test_unseen"); the unseen test of recall has 31 keys.

Each card has trivial baselines: frequencies of tokens and of pairs of tokens, a naive Bayes classifier over bags of
words, and guessing among the values that were shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from heedful.shapes import Tensor
from heedful.studies.corpora.encode import LONGEST, learn
from heedful.studies.corpora.extract import page
from heedful.studies.corpora.packages import Package, download, licences, members
from heedful.studies.data import END, SPECIAL

BLOCK = 255
"""Tokens of a block of prose: 256 with the start token."""

MANUALS = {
    "debian-handbook": r"/html/en-US/.*\.html$",
    "debian-reference-en": r"/ch\d+\.en\.html$",
    "developers-reference": r"share/developers-reference/[\w-]+\.html$",
    "debian-edu-doc-en": r"bookworm-manual\.html$",
    "maint-guide": r"/html/[\w-]+\.en\.html$",
}
"""The five manuals, and which files of their packages are English text."""

PROSE = MANUALS | {
    "debian-faq": r"/FAQ/[\w-]+\.en\.html$",
    "libreoffice-help-en-us": r"/text/.*\.html$",
    "gimp-help-en": r"/en/.*\.html$",
    "kicad-doc-en": r"/en/.*\.html$",
    "lilypond-doc-html": r"/Documentation/[\w-]+/[\w-]+\.html$",
    "linuxcnc-doc-en": r"\.html$",
}
UNSEEN = ("kicad-doc-en", "debian-faq")
"""Packages used only for the unseen tests of prose."""

KEYS, VALUES, SHOWN = 64, 64, {"train": 15, "dev": 15, "test": 15, "test_unseen": 31}


class Paragraph(NamedTuple):
    package: str
    document: str
    text: str


class Example(NamedTuple):
    """What the encoder reads, what the decoder should predict, and which of these tokens count."""

    source: list[int]
    begins: list[int]
    target: list[int]
    counts: list[int]


def paragraphs(packages: Iterable[Package], wanted: dict[str, str]) -> tuple[list[Paragraph], dict[str, list[str]]]:
    """All distinct paragraphs of English prose in document order, and the packages' licences."""
    found, seen, named = [], set(), {}
    for package in packages:
        pattern = re.compile(wanted[package.name])
        pages = {}
        for path, content in members(package, lambda x: bool(pattern.search(x)) or x.endswith("/copyright")):  # noqa: B023
            if path.endswith("/copyright"):
                named[package.name] = licences(content.decode("utf-8", "replace"))
            else:
                pages[path] = content
        for path in sorted(pages):
            for _, text in page(pages[path]):
                if text not in seen and _is_prose(text):
                    seen.add(text)
                    found.append(Paragraph(package.name, path, text))
    return found, named


def _is_prose(text: str) -> bool:
    words = re.findall(r"[A-Za-z]+", text)
    return len(words) >= 8 and sum(map(len, words)) >= 0.7 * len(text.replace(" ", "")) and text[-1:] in ".!?:)"


def _share(text: str) -> float:
    """A number in [0, 1) that depends only on the text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def prose(found: list[Paragraph], vocabulary: int) -> tuple[dict[str, list[Example]], Tokenizer, dict[str, Any]]:
    """Blocks of prose; each document is in one split."""

    def split_of(paragraph: Paragraph) -> str:
        side = _share(paragraph.document)
        if paragraph.package in UNSEEN:
            return "dev_unseen" if side < 0.5 else "test_unseen"
        return "dev" if side < 0.04 else "test" if side < 0.08 else "train"

    texts: dict[str, list[Paragraph]] = defaultdict(list)
    for paragraph in found:
        texts[split_of(paragraph)].append(paragraph)
    tokenizer = learn((x.text for x in texts["train"]), vocabulary)
    splits = {}
    for name, some in texts.items():
        ids = [token for one in tokenizer.encode_batch([x.text for x in some]) for token in (*one.ids, END)]
        blocks = [ids[at : at + BLOCK] for at in range(0, len(ids) - BLOCK + 1, BLOCK)]
        splits[name] = [Example([], [], block, [1] * BLOCK) for block in blocks[: None if name == "train" else 400]]
    return splits, tokenizer, {"pairs_of_tokens_loss": pairs_of_tokens(splits, tokenizer.get_vocab_size())}


def pairs_of_tokens(splits: dict[str, list[Example]], vocabulary: int) -> dict[str, float]:
    """Cross-entropy per token of a bigram model: half by frequencies of pairs, half by frequencies of tokens."""
    single: Counter[int] = Counter()
    double: dict[int, Counter[int]] = defaultdict(Counter)
    for example in splits["train"]:
        single.update(example.target)
        for before, token in zip(example.target, example.target[1:], strict=False):
            double[before][token] += 1
    total = sum(single.values())
    sums = {before: sum(counts.values()) for before, counts in double.items()}

    def loss(examples: list[Example]) -> float:
        logs = [
            -math.log(
                0.5 * (single[token] + 1) / (total + vocabulary)
                + 0.5 * (double[before][token] / sums[before] if before in sums else 0)
            )
            for example in examples
            for before, token in zip(example.target, example.target[1:], strict=False)
        ]
        return round(sum(logs) / len(logs), 4)

    return {name: loss(examples) for name, examples in splits.items() if name != "train"}


def manuals(found: list[Paragraph], vocabulary: int) -> tuple[dict[str, list[Example]], Tokenizer, dict[str, Any]]:
    """Paragraphs labelled by their manual; a tenth of the documents is unseen."""
    names = list(MANUALS)
    texts: dict[str, list[Paragraph]] = defaultdict(list)
    for paragraph in (x for x in found if x.package in MANUALS):
        side = _share(paragraph.text)
        if _share(paragraph.document) < 0.1 and paragraph.package != "debian-edu-doc-en":  # one document
            texts["dev_unseen" if side < 0.5 else "test_unseen"].append(paragraph)
        else:
            texts["dev" if side < 0.1 else "test" if side < 0.2 else "train"].append(paragraph)
    tokenizer = learn((x.text for x in texts["train"]), vocabulary)
    tokenizer.add_special_tokens([f"<{name}>" for name in names])
    labels = {name: len(tokenizer.get_vocab()) - len(names) + at for at, name in enumerate(names)}
    splits = {}
    for name, some in texts.items():
        encoded = tokenizer.encode_batch([x.text for x in some])
        splits[name] = [
            Example(
                one.ids[:LONGEST],
                [int(at == 0 or word != one.word_ids[at - 1]) for at, word in enumerate(one.word_ids)][:LONGEST],
                [labels[paragraph.package]],
                [1],
            )
            for one, paragraph in zip(encoded, some, strict=True)
        ]
    largest = Counter(x.package for x in texts["train"]).most_common(1)[0][0]
    guessed = {name: _round_mean(x.package == largest for x in some) for name, some in texts.items()}
    return splits, tokenizer, {"largest_class_accuracy": guessed, "bag_of_words_accuracy": bag_of_words(texts)}


def bag_of_words(texts: dict[str, list[Paragraph]]) -> dict[str, float]:
    """Accuracy of multinomial naive Bayes with add-one counts, learned from the training split."""

    def words(text: str) -> list[str]:
        return re.findall(r"[a-z]+", text.lower())

    counts: dict[str, Counter[str]] = defaultdict(Counter)
    classes = Counter(x.package for x in texts["train"])
    for paragraph in texts["train"]:
        counts[paragraph.package].update(words(paragraph.text))
    known = len(set().union(*counts.values()))
    totals = {name: sum(some.values()) + known for name, some in counts.items()}

    def guess(text: str) -> str:
        given = words(text)
        scores = {
            name: math.log(classes[name]) + sum(math.log((counts[name][x] + 1) / totals[name]) for x in given)
            for name in classes
        }
        return max(scores, key=scores.__getitem__)

    return {
        name: _round_mean(guess(x.text) == x.package for x in some) for name, some in texts.items() if name != "train"
    }


def _round_mean(facts: Iterable[bool]) -> float:
    facts = list(facts)
    return round(sum(facts) / len(facts), 4)


def recall(count: int, seed: int = 0) -> tuple[dict[str, list[Example]], None, dict[str, Any]]:
    """Sequences k₁ v₁ … k_p v_p, then each key again followed by its value; only these values count."""
    generator = torch.Generator().manual_seed(seed)
    first = len(SPECIAL)

    def example(shown: int) -> Example:
        keys = torch.randperm(KEYS, generator=generator)[:shown] + first
        values = torch.randint(VALUES, (shown,), generator=generator) + first + KEYS
        pairs = torch.stack([keys, values], 1)
        asked = pairs[torch.randperm(shown, generator=generator)]
        return Example([], [], torch.cat([pairs, asked]).flatten().tolist(), [0] * 2 * shown + [0, 1] * shown)

    sizes = {"train": count, "dev": 1000, "test": 1000, "test_unseen": 500}
    splits = {name: [example(SHOWN[name]) for _ in range(size)] for name, size in sizes.items()}
    shown = {name: round(1 / SHOWN[name], 4) for name in sizes}
    return splits, None, {"chance_accuracy": dict.fromkeys(sizes, 1 / VALUES), "any_shown_value_accuracy": shown}


def write(folder: Path, splits: dict[str, list[Example]], vocabulary: int, card: dict[str, Any]) -> dict[str, Any]:
    """Write a folder that `heedful.studies.data.load` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}

    def side(name: str, lists: Iterable[list[int]], marks: Iterable[list[int]]) -> Iterator[tuple[str, Tensor]]:
        lists = list(lists)
        yield f"{name}.tokens", torch.tensor([x for line in lists for x in line], dtype=torch.int16)
        yield f"{name}.begins", torch.tensor([x for line in marks for x in line], dtype=torch.uint8)
        yield f"{name}.starts", torch.tensor([0, *map(len, lists)]).cumsum(0).int()

    for name, some in splits.items():
        tensors |= side(f"{name}.source", (x.source for x in some), (x.begins for x in some))
        tensors |= side(f"{name}.target", (x.target for x in some), (x.counts for x in some))
    save_file(tensors, folder / "ids.safetensors")
    card = {
        **card,
        "languages": ["source", "target"],
        "vocabulary": vocabulary,
        "pairs": {name: len(some) for name, some in splits.items()},
        "tokens": {name: sum(len(x.source) + len(x.target) for x in some) for name, some in splits.items()},
        "checksum": hashlib.sha256((folder / "ids.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    return card


def build(task: str, out: Path, cache: Path, size: int) -> dict[str, Any]:
    """Write the folder of a task and return its card."""
    if task == "recall":
        splits, _, baselines = recall(size)
        return write(out / task, splits, len(SPECIAL) + KEYS + VALUES, {"task": task, "baselines": baselines})
    wanted = MANUALS if task == "manuals" else PROSE
    packages = download(list(wanted), cache / "packages")
    found, named = paragraphs(packages, wanted)
    splits, tokenizer, baselines = (manuals if task == "manuals" else prose)(found, 8_000 if task == "prose" else 4_000)
    card = {
        "task": task,
        "baselines": baselines,
        "packages": [
            {"package": x.name, "version": x.version, "sha256": x.sha256, "licences": named.get(x.name, [])}
            for x in packages
        ],
        "paragraphs": dict(Counter(x.package for x in found)),
    }
    written = write(out / task, splits, tokenizer.get_vocab_size(), card)
    tokenizer.save(str(out / task / "tokenizer.json"))
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("prose", "manuals", "recall"), required=True)
    parser.add_argument("--out", type=Path, default=Path("carry/corpora"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/heedful/corpora")
    parser.add_argument("--size", type=int, default=40_000, help="training sequences of recall")
    args = parser.parse_args(arguments)
    card = build(args.task, args.out, args.cache, args.size)
    print(json.dumps({name: card[name] for name in ("pairs", "tokens", "vocabulary", "baselines")}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
