"""Filter pairs of sentences and split them into training and test sets.

keep        4 to 60 words per side, length ratio 0.4 to 2.5, at least 70 % letters, the same numbers on both sides, at
            most 60 % of the words shared, no format strings
unique      one pair for each sentence of either side, up to case, digits and punctuation
split       tests from packages reserved for testing, and from a sample of the prose of the others; training is the
            rest, without pairs that share half of their word 4-grams with a test sentence
order       by a hash of the sentences, prose before messages: a smaller training set is the start of a larger one
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from heedful.studies.corpora.collect import Pair

FORMAT = re.compile(r"%[-\d.$*]*[a-zA-Z]|%\d|\{\w*\}|\$[\[({]\w+|\$\w+\$|@\w+@|\|\||<[^<>]+>|https?:|[\\{}=|]")
WORD = re.compile(r"[^\W\d_]+")
RUN = 4


class Split(NamedTuple):
    """Training pairs, and test pairs from packages in the training set and from unseen packages."""

    train: list[Pair]
    dev: list[Pair]
    dev_unseen: list[Pair]
    test: list[Pair]
    test_unseen: list[Pair]


def is_clean(one: str, other: str) -> bool:
    """True if two sentences are prose of reasonable length and likely translations of each other.

    >>> is_clean("Das Programm liest die Datei neu ein.", "The program reads the file again.")
    True
    >>> is_clean("Das Programm liest %d Dateien neu ein.", "The program reads %d files again.")
    False
    """
    if one == other or FORMAT.search(one) or FORMAT.search(other):
        return False
    words = [WORD.findall(side.lower()) for side in (one, other)]
    if not all(len(w) >= 4 and len(s.split()) <= 60 for w, s in zip(words, (one, other), strict=True)):
        return False
    if not 0.4 <= len(one) / len(other) <= 2.5:
        return False
    if any(sum(c.isalpha() for c in s) < 0.7 * sum(not c.isspace() for c in s) for s in (one, other)):
        return False
    if Counter(re.findall(r"\d+", one)) != Counter(re.findall(r"\d+", other)):
        return False
    shared = set(words[0]) & set(words[1])
    return len(shared) <= 0.6 * min(len(set(w)) for w in words)


def unique(pairs: Iterable[Pair]) -> list[Pair]:
    """The first pair of each sentence of either side, up to case, digits and punctuation."""
    seen: set[tuple[int, str]] = set()
    kept = []
    for pair in pairs:
        keys = (0, " ".join(WORD.findall(pair.other.lower()))), (1, " ".join(WORD.findall(pair.english.lower())))
        if not seen.intersection(keys):
            kept.append(pair)
        seen.update(keys)
    return kept


def split(pairs: Iterable[Pair], unseen: frozenset[str], size: int = 1000) -> Split:
    """Divide clean, unique pairs into a training set and four test sets of at most `size` pairs."""
    ordered = sorted(pairs, key=lambda pair: (pair.kind != "prose", _rank(pair)))
    apart = [pair for pair in ordered if pair.package in unseen and pair.kind == "prose"]
    inside = [pair for pair in ordered if pair.package not in unseen]
    prose = [pair for pair in inside if pair.kind == "prose"]
    own, its = min(size, len(prose) // 10), min(size, len(apart) // 2)
    tests = prose[:own], prose[own : 2 * own], apart[:its], apart[its : 2 * its]
    held = {(pair.other, pair.english) for test in tests for pair in test}
    known = _index(pair for test in tests for pair in test)
    train = [pair for pair in inside if (pair.other, pair.english) not in held and not _near(pair, known)]
    return Split(train, dev=tests[0], test=tests[1], dev_unseen=tests[2], test_unseen=tests[3])


def _rank(pair: Pair) -> bytes:
    return hashlib.sha256(f"{pair.other}\n{pair.english}".encode()).digest()


def _runs(sentence: str) -> set[str]:
    """The word 4-grams of a sentence."""
    words = WORD.findall(sentence.lower())
    return {" ".join(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def _index(pairs: Iterable[Pair]) -> dict[str, list[tuple[int, int]]]:
    """For each 4-gram, the test sentences in which it occurs, with their number of 4-grams."""
    found: dict[str, list[tuple[int, int]]] = {}
    for at, sentence in enumerate(text for pair in pairs for text in (pair.other, pair.english)):
        runs = _runs(sentence)
        for run in runs:
            found.setdefault(run, []).append((at, len(runs)))
    return found


def _near(pair: Pair, known: dict[str, list[tuple[int, int]]]) -> bool:
    """True if a side and one test sentence share half of the 4-grams of either."""
    for sentence in (pair.other, pair.english):
        runs = _runs(sentence)
        shared: Counter[tuple[int, int]] = Counter(where for run in runs for where in known.get(run, ()))
        if any(2 * count >= min(len(runs), its) for (_, its), count in shared.items()):
            return True
    return False
