"""Extract aligned sentences from translated files: gettext catalogues, HTML or XML pages, manual pages.

Translations of one document keep its structure, so blocks (paragraphs, headings, table cells) are paired by position.
If the structures differ, nothing is used. Inside a pair of blocks, sentences are paired if both have the same number.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from html.parser import HTMLParser

Block = tuple[str, str]
"""The mark of a block (a tag with its id, or a macro) and its text."""


def catalogue(content: bytes) -> Iterator[tuple[str, str]]:
    """Original and translation of each message of a gettext .mo file, without its plural forms and contexts."""
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    if struct.unpack(f"{order}I", content[:4])[0] != 0x950412DE:
        raise ValueError(f"content: begins with {content[:4]!r}, expected the magic number of a .mo file.")
    count, originals, translations = struct.unpack(f"{order}III", content[8:20])

    def text(table: int, index: int) -> str:
        length, start = struct.unpack_from(f"{order}II", content, table + 8 * index)
        return content[start : start + length].decode("utf-8", "replace")

    for index in range(count):
        original = text(originals, index).split("\x04")[-1].split("\x00")[0]
        translation = text(translations, index).split("\x00")[0]
        if original and translation:
            yield plain(original), plain(translation)


def plain(message: str) -> str:
    """A program's message as prose: without tags and without the markers of menu shortcuts."""
    message = re.sub(r"<[^<>]*>", " ", message)
    message = re.sub(r"[_&~](?=\w)", "", message) if len(re.findall(r"[_&~]\w", message)) == 1 else message
    return " ".join(message.replace("\\n", " ").split())


class _Blocks(HTMLParser):
    """Collects the text of each block of a page."""

    marks = frozenset(
        {"p", "title", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "li", "td", "th", "caption", "desc", "item"}
        | {"para", "term", "listitem", "div", "section", "figcaption"}
    )
    skipped = frozenset({"script", "style", "pre", "screen", "listing", "nav", "programlisting"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self.mark, self.text, self.depth = "", [""], 0

    def handle_starttag(self, tag, attrs):
        if tag in self.skipped:
            self.depth += 1
        if tag in self.marks:
            self.close_block()
            self.mark = f"{tag}#{dict(attrs).get('id') or ''}"
        elif tag in ("br", "img"):
            self.text.append(" ")

    def handle_startendtag(self, tag, attrs):
        if tag in ("br", "img"):
            self.text.append(" ")

    def handle_endtag(self, tag):
        if tag in self.skipped:
            self.depth = max(0, self.depth - 1)
        if tag in self.marks:
            self.close_block()
            self.mark = f"/{tag}"

    def handle_data(self, data):
        if not self.depth:
            self.text.append(data)

    def close_block(self):
        text = " ".join("".join(self.text).split())
        if text:
            self.blocks.append((self.mark, text))
        self.text = [""]


def page(content: bytes) -> list[Block]:
    """Blocks of an HTML or XML page."""
    parser = _Blocks()
    parser.feed(content.decode("utf-8", "replace"))
    parser.close_block()
    return parser.blocks


STRUCTURE = frozenset(["SH", "SS", "PP", "P", "LP", "TP", "IP", "TQ", "HP", "RS", "RE", "nf", "fi", "EX", "EE"])
INLINE = frozenset(["B", "I", "BR", "RB", "BI", "IB", "IR", "RI", "SM", "SB"])
GLYPHS = {"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "Bq": "„", "bq": "‚", "bu": "•", "co": "©"}
GLYPHS |= {":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "ss": "ß", "Fo": "«", "Fc": "»"}
GLYPHS |= {
    "em": "—",
    "en": "–",
    "hy": "-",
    "ha": "^",
    "ti": "~",
    "rs": "\\",
    "mu": "×",
    "<=": "≤",
    ">=": "≥",
    "->": "→",
}


def manual(content: bytes) -> list[Block]:
    """Blocks of a manual page written with the man macros; empty for other macros."""
    blocks: list[Block] = []
    mark, text, verbatim, tag_follows = "", [""], False, False

    def close_block() -> None:
        joined = " ".join("".join(text).split())
        if joined:
            blocks.append((mark, joined))
        text[:] = [""]

    for line in content.decode("utf-8", "replace").split("\n"):
        line = re.sub(r'\\".*', "", line)
        if not line.startswith((".", "'")):
            if not verbatim and line.strip():
                text.append(_glyphs(line) + " ")
            elif not line.strip():
                close_block()
            if tag_follows and line.strip():
                close_block()
                mark, tag_follows = "body", False
            continue
        macro, _, rest = line[1:].strip().partition(" ")
        if macro in ("Dd", "Sh"):
            return []
        if macro in STRUCTURE:
            close_block()
            mark, tag_follows = macro, macro in ("TP", "TQ")
            verbatim = macro in ("nf", "EX") or (verbatim and macro not in ("fi", "EE"))
            if macro in ("SH", "SS") and rest:
                text.append(_glyphs(" ".join(_arguments(rest))))
                close_block()
                mark = "body"
        elif macro in INLINE and not verbatim:
            joint = " " if macro in ("B", "I", "SM", "SB") else ""
            text.append(_glyphs(joint.join(_arguments(rest))) + " ")
            if tag_follows:
                close_block()
                mark, tag_follows = "body", False
    close_block()
    return blocks


def _arguments(rest: str) -> list[str]:
    return [quoted or bare for quoted, bare in re.findall(r'"((?:[^"]|"")*)"|(\S+)', rest)]


def _glyphs(text: str) -> str:
    """Text of a manual page without its escapes."""
    text = re.sub(r"\\\*\(..", "'", text)
    text = re.sub(r"\\[hvwmlL]'[^']*'|\\m\[[^]]*\]", " ", text)
    text = re.sub(r"\\f(?:\[[^]]*\]|\(..|.)|\\[&/,%:|^c]|\\s[-+]?\d", "", text)
    text = re.sub(r"\\\[u([0-9A-Fa-f]{4,5})\]", lambda found: chr(int(found[1], 16)), text)
    text = re.sub(r"\\(?:\((..)|\[([^]]*)\])", lambda found: GLYPHS.get(found[1] or found[2], " "), text)
    text = re.sub(r"\\[~0 ]", " ", text).replace("\\-", "-").replace("\\'", "'").replace("\\`", "`")
    return re.sub(r"\\e", r"\\", text)


def pair_blocks(ours: list[Block], theirs: list[Block]) -> Iterator[tuple[str, str]]:
    """Texts of corresponding blocks: all blocks of two pages with the same structure, or those of matching sections.

    Blocks with an id are paired by it, regardless of position.
    """
    named = {mark: text for mark, text in theirs if "#" in mark and not mark.endswith("#")}
    if len(named) > len(theirs) / 2:
        yield from ((text, named[mark]) for mark, text in ours if mark in named)
        return
    mine_all, its_all = (_sections(blocks) for blocks in (ours, theirs))
    if abs(len(mine_all) - len(its_all)) > 1:  # a translation may end with a section on the translation
        return
    for mine, its in zip(mine_all, its_all, strict=False):
        if [_tag(mark) for mark, _ in mine] == [_tag(mark) for mark, _ in its]:
            yield from ((one, other) for (_, one), (_, other) in zip(mine, its, strict=True))


def pair_sentences(ours: str, theirs: str) -> list[tuple[str, str]]:
    """Corresponding sentences of two blocks; the whole blocks if their numbers of sentences differ."""
    split = re.compile(r"(?<=[.!?])[)\"”“»]*\s+(?=[(\"„“«]*[A-ZÄÖÜĐ])")
    both = [re.sub(r"\b(z\. ?B|d\. ?h|e\.g|i\.e|usw|etc|bzw|ca|vgl|Nr|No)\.", r"\1․", x) for x in (ours, theirs)]
    one, other = (split.split(x) for x in both)
    pairs = zip(one, other, strict=True) if len(one) == len(other) else [(both[0], both[1])]
    return [(a.replace("․", ".").strip(), b.replace("․", ".").strip()) for a, b in pairs]


def _tag(mark: str) -> str:
    return mark.split("#")[0]


def _sections(blocks: list[Block]) -> list[list[Block]]:
    """Blocks from each heading to the next."""
    found: list[list[Block]] = [[]]
    for mark, text in blocks:
        if _tag(mark) in ("SH", "SS", "h1", "h2", "h3", "h4", "title"):
            found.append([])
        found[-1].append((mark, text))
    return found
