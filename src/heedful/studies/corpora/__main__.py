"""Build corpora: `python -m heedful.studies.corpora --language de --sizes 5000,20000 --out carry/corpora`.

Packages are downloaded to --cache, never installed. Their texts have their own licences; do not redistribute them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from heedful.studies.corpora.clean import Split, is_clean, split, unique
from heedful.studies.corpora.collect import PACKAGES, UNSEEN, Pair, collect
from heedful.studies.corpora.encode import write
from heedful.studies.corpora.packages import download

SMALL = Path(__file__).parent / "small.tsv"
"""200 pairs, German and English, written for tests."""

VOCABULARY = {5_000: 4_000}
"""Sizes of the vocabulary other than 8,000: fewer merges suit fewer sentences."""


def from_packages(language: str, cache: Path) -> tuple[Split, dict[str, Any]]:
    """Clean, split pairs of a language and English, and where they come from; cached in a folder."""
    kept = cache / f"pairs-{language}.json"
    packages = download(PACKAGES[language], cache / "packages")
    identity = {package.name: package.sha256 for package in packages}
    if kept.exists():
        stored = json.loads(kept.read_text())
        if stored["card"]["checksums"] == identity:
            return Split(*([Pair(*pair) for pair in part] for part in stored["splits"])), stored["card"]
    found, licences = collect(packages, language)
    clean = unique(
        sorted((pair for pair in found if is_clean(pair.other, pair.english)), key=lambda pair: pair.kind != "prose")
    )
    parts = split(clean, UNSEEN[language])
    card = {
        "found": len(found),
        "clean_and_unique": len(clean),
        "checksums": identity,
        "packages": [
            {
                "package": package.name,
                "version": package.version,
                "licences": licences.get(package.name) or ["not read: see its copyright file"],
                "pairs": {
                    kind: sum(pair.package == package.name and pair.kind == kind for pair in clean)
                    for kind in ("prose", "messages")
                },
                "unseen": package.name in UNSEEN[language],
            }
            for package in packages
        ],
    }
    kept.write_text(json.dumps({"card": card, "splits": parts}, ensure_ascii=False))
    return parts, card


def from_files(source: Path, target: Path) -> Split:
    """The same from two files with one sentence per line. Without unseen packages, both tests are the same pairs."""
    ours, theirs = (path.read_text().splitlines() for path in (source, target))
    if len(ours) != len(theirs):
        raise ValueError(f"{source}: {len(ours)} lines, expected {len(theirs)} as in {target}, one for each sentence.")
    pairs = [Pair("prose", "files", source.name, one, other) for one, other in zip(ours, theirs, strict=True)]
    parts = split(unique(pairs), frozenset())
    return parts._replace(dev_unseen=parts.dev, test_unseen=parts.test)


def small() -> Split:
    """Pairs for tests: 160 to train on and two tests of 20."""
    lines = [line.split("\t") for line in SMALL.read_text().splitlines()]
    pairs = [Pair("prose", "small", "small", *line) for line in lines]
    return Split(pairs[40:], pairs[:20], pairs[:20], pairs[20:40], pairs[20:40])


def encode(parts: Split, languages: tuple[str, str], size: int, vocabulary: int, folder: Path, card: dict) -> dict:
    """Write the first `size` training pairs and the tests; return the card with what was written."""
    chosen = parts._replace(train=parts.train[:size])
    if len(chosen.train) < size:
        raise ValueError(f"sizes: {size} training pairs, but there are {len(chosen.train)}; ask for at most these.")
    texts = {name: [(pair.other, pair.english) for pair in part] for name, part in chosen._asdict().items()}
    counts = Counter(f"{pair.package} ({pair.kind})" for pair in chosen.train)
    return write(folder, languages, texts, vocabulary, {**card, "train_by_package": dict(counts.most_common())})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language", default="de", help="de, vi, or any name with --source and --target; small")
    parser.add_argument("--sizes", default="5000,20000", help="training pairs, separated by commas; all: every pair")
    parser.add_argument("--out", type=Path, default=Path("carry/corpora"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/heedful/corpora")
    parser.add_argument("--source", type=Path, help="your own file of sentences, one a line")
    parser.add_argument("--target", type=Path, help="their English translations, one a line")
    args = parser.parse_args(arguments)
    if (args.source is None) != (args.target is None):
        parser.error("--source and --target: one of them is missing, expected both.")
    card: dict[str, Any] = {}
    language = args.language
    if language == "small":
        parts, language = small(), "de"
    elif args.source:
        parts = from_files(args.source, args.target)
    elif language in PACKAGES:
        parts, card = from_packages(language, args.cache)
    else:
        parser.error(f"--language: {language!r}, expected {', '.join(PACKAGES)}, small, or your own files.")
    print({name: len(part) for name, part in parts._asdict().items()}, flush=True)
    for name in args.sizes.split(","):
        size = len(parts.train) if name == "all" else int(name)
        folder = args.out / f"{args.language}-{name}"
        vocabulary = 400 if args.language == "small" else VOCABULARY.get(size, 8_000)
        written = encode(parts, (language, "en"), size, vocabulary, folder, card)
        print(folder, written["pairs"], written["tokens"]["train"], "vocabulary", written["vocabulary"], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
