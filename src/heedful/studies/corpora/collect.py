"""Collect all pairs of sentences from a list of packages.

The paths of a page and its translation differ only in the name of the language: help/C/clock.page and
help/de/clock.page, ch04.en.html and ch04.de.html, man1/ls.1.gz and de/man1/ls.1.gz.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from typing import NamedTuple

from heedful.studies.corpora.extract import Block, catalogue, manual, page, pair_blocks, pair_sentences
from heedful.studies.corpora.packages import Package, licences, members

ENGLISH = frozenset({"C", "en", "en-US", "en_US"})
REGIONS = {"de": frozenset({"de", "de-DE", "de_DE"}), "vi": frozenset({"vi", "vi-VN", "vi_VN"})}

PACKAGES = {
    "de": [
        *("manpages-de", "manpages-de-dev", "manpages", "manpages-dev", "coreutils", "util-linux", "systemd", "dpkg"),
        *("apt", "debhelper", "devscripts", "libreoffice-help-de", "libreoffice-help-en-us", "gnome-user-docs"),
        *("evolution-common", "debian-reference-de", "debian-reference-en", "developers-reference-de"),
        *("developers-reference", "debian-faq-de", "debian-faq", "lilypond-doc-html-de", "lilypond-doc-html"),
        *("kicad-doc-de", "kicad-doc-en", "debian-handbook", "gimp-help-de", "gimp-help-en", "adduser", "passwd"),
        *("login", "aptitude-common", "inkscape", "libreoffice-l10n-de", "gcc-12-locales", "postgresql-15", "git"),
        *("binutils-common", "bash", "gnupg-l10n", "gimp-data", "krita-l10n", "digikam-data", "vlc-l10n"),
        *("freeciv-data", "gettext", "pidgin-data", "kdevelop-l10n", "cinnamon-l10n", "claws-mail-i18n", "synaptic"),
        *("util-linux-locales", "wesnoth-1.16-data"),
    ],
    "vi": [
        *("libreoffice-help-vi", "libreoffice-help-en-us", "libreoffice-l10n-vi", "gcc-12-locales", "gnome-user-docs"),
        *("evolution-common", "git", "binutils-common", "bash", "coreutils", "gnupg-l10n", "gimp-data", "inkscape"),
        *("vlc-l10n", "gettext", "pidgin-data", "cinnamon-l10n", "claws-mail-i18n", "synaptic", "util-linux-locales"),
        *(
            "wesnoth-1.16-data",
            "dpkg",
            "apt",
            "adduser",
            "passwd",
            "login",
            "aptitude-common",
            "postgresql-15",
            "digikam-data",
        ),
    ],
}
"""Packages whose files contain pairs with English; both sides of a page must be among them."""

UNSEEN = {
    "de": frozenset(
        {"debian-handbook", "gnome-user-docs", "apt", "debian-faq-de", "passwd", "login", "adduser", "evolution-common"}
    ),
    "vi": frozenset({"gnome-user-docs"}),
}
"""Packages whose sentences are used only for testing."""


class Pair(NamedTuple):
    """A sentence, its English form, and where they come from."""

    kind: str
    """prose (manuals, help pages) or messages (catalogues of programs)"""
    package: str
    document: str
    other: str
    english: str


def collect(packages: list[Package], language: str) -> tuple[list[Pair], dict[str, list[str]]]:
    """All pairs of sentences in the packages, and the licences of each package."""
    regions = REGIONS.get(language, frozenset({language}))
    pairs: list[Pair] = []
    found: dict[str, list[str]] = {}
    english: dict[str, bytes] = {}
    translated: dict[str, tuple[str, bytes]] = {}
    for package in packages:
        for path, content in members(package, lambda path: _readable(path, regions)):
            if path.endswith("/copyright"):
                found[package.name] = licences(content.decode("utf-8", "replace"))
            elif path.endswith(".mo"):
                pairs += [Pair("messages", package.name, path, b, a) for a, b in catalogue(content)]
            else:
                key, is_translation = without_language(path, regions)
                if is_translation:
                    translated[key] = package.name, content
                else:
                    english[key] = content
    for key, (name, content) in translated.items():
        if key in english:
            sides = _blocks(key, content), _blocks(key, english[key])
            pairs += [Pair("prose", name, key, *both) for both in _sentences(*sides)]
    return pairs, found


def _blocks(path: str, content: bytes) -> list[Block]:
    return manual(gzip.decompress(content)) if path.endswith(".gz") else page(content)


def without_language(path: str, regions: frozenset[str]) -> tuple[str, bool]:
    """A path without the name of its language, and True if that language is one of the regions.

    >>> without_language("usr/share/help/de/gnome-help/clock.page", frozenset({"de"}))
    ('usr/share/help/gnome-help/clock.page', True)
    >>> without_language("usr/share/debian-reference/ch04.en.html", frozenset({"de"}))
    ('usr/share/debian-reference/ch04.html', False)
    """
    *folders, name = path.split("/")
    stem, *suffixes = name.split(".")
    is_translation = any(x in regions for x in (*folders, *suffixes))
    kept = [x for x in folders if x not in regions | ENGLISH]
    ends = [x for x in suffixes if x not in regions | ENGLISH]
    return "/".join([*kept, ".".join([stem, *ends])]), is_translation


def _sentences(ours: list[Block], theirs: list[Block]) -> Iterator[tuple[str, str]]:
    for one, other in pair_blocks(ours, theirs):
        yield from pair_sentences(one, other)


def _readable(path: str, regions: frozenset[str]) -> bool:
    if re.fullmatch(r"usr/share/doc/[^/]+/copyright", path):
        return True
    if path.endswith(".mo"):
        return any(f"/{region}/LC_MESSAGES/" in path for region in regions)
    if path.endswith((".html", ".page", ".docbook")):
        return True
    pages = re.fullmatch(r"usr/share/man/(?:([^/]+)/)?man\d[^/]*/[^/]+\.gz", path)
    return pages is not None and (pages[1] is None or pages[1] in regions)
