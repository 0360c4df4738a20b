"""The page of a scan: the answer in words, which needs no script, and placeholders for what the scripts draw."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from heedful.report.data import Records, payload
from heedful.report.shell import LANGUAGES, asset, check_language, page, say
from heedful.store.scans import title_of

SCRIPTS = ("base.js", "export.js", "map.js", "panel.js", "growth.js", "compare.js", "table.js", "report.js")
GLYPHS = {
    "positional": "M3 3L13 13",
    "sink": "M4 3V13",
    "low rank": "M4.5 4.5H11.5V11.5H4.5Z",
    "content": "M4 5h.01M11 4h.01M7.5 8.5h.01M12 11h.01M4.5 12h.01",
}
"""The icon of each kind in a 16 × 16 box: a picture of its matrix, so that no kind depends on colour alone."""


HEADINGS = {
    "one": {"en": "What the attention heads are", "zh": "注意力头的构成"},
    "two": {"en": "Two models, head by head", "zh": "两个模型逐头对比"},
    "one ranks": {"en": "How large their ranks are", "zh": "秩有多大"},
    "two ranks": {"en": "How their ranks differ", "zh": "秩有何不同"},
    "one kinds": {"en": "What could be cheaper", "zh": "哪些可以更省"},
    "two kinds": {"en": "Heads of each kind", "zh": "各类别的头"},
}


def html(scan: Records, *, against: Records | None = None, language: str = "en") -> str:
    """The whole page as text."""
    check_language(language)
    text = json.loads(asset("text.json"))
    said = {code: scan.answer(code, against=against) for code in LANGUAGES}
    names = [title_of(each.manifest) for each in (scan, against) if each is not None]
    measures = [measure["id"] for measure in text["measures"]]
    data = {**payload(scan, against, measures), "text": text, "glyphs": GLYPHS}
    sections = asset("report.html")
    if against is not None:  # the comparison comes first, with its controls
        choosers = re.search(r"<!-- choosers -->.*?<!-- end -->\n", sections, re.S)
        assert choosers is not None
        sections = asset("compare.html").replace("<!-- choosers -->", choosers[0]) + sections.replace(choosers[0], "")
    body = "\n".join([_notices(said), _answer(names, said, text), sections])
    script = "".join(asset(each) for each in SCRIPTS)
    return page(_title(names), body, asset("report.css"), script, data, language=language)


def _title(names: list[str]) -> dict[str, str]:
    if len(names) == 1:
        return {"en": f"Attention heads of {names[0]}", "zh": f"{names[0]} 的注意力头"}
    return {"en": f"{names[0]} against {names[1]}: attention heads", "zh": f"{names[0]} 与 {names[1]} 的注意力头对比"}


def _answer(names: list[str], said: dict[str, Any], text: dict[str, Any]) -> str:
    """The first screen: one sentence, four counts, ranks, and what the kinds mean for cost or how they changed."""
    which = "one" if len(names) == 1 else "two"
    ranks = "".join(
        f"<p>{say({code: said[code].more[at] for code in LANGUAGES})}</p>" for at in range(len(said["en"].more))
    )
    kinds = "".join(
        f"<li>{_glyph(kind)}<span>{say({code: dict(said[code].kinds)[kind] for code in LANGUAGES})}</span></li>"
        for kind, _ in said["en"].kinds
    )
    notes = "".join(
        f'<p class="note" role="note">{say(dict(zip(LANGUAGES, each, strict=True)))}</p>'
        for each in zip(*(said[code].notes for code in LANGUAGES), strict=True)
    )
    caveat = f'<p class="caveat">{say({code: found.caveat for code, found in said.items()})}</p>'
    return f"""<section class="answer" aria-label="heedful">
<p class="eyebrow">{say(HEADINGS[which])}</p>
<h1>{_heading(names)}</h1>
<p class="opening">{say({code: found.lead for code, found in said.items()})}</p>
{notes}
<p class="cards-head" id="cards-head"></p>
<div class="kinds" id="kinds">{_cards(said["en"].counts, text)}</div>
<div class="columns">
<div><h2>{say(HEADINGS[f"{which} ranks"])}</h2>
{ranks}</div>
<div><h2>{say(HEADINGS[f"{which} kinds"])}</h2>
<ul class="cheaper">{kinds}</ul>
{caveat if said["en"].caveat else ""}</div>
</div>
</section>"""


def _notices(said: dict[str, Any]) -> str:
    """Warnings to read before the numbers; "" for most scans."""
    each = zip(*(said[code].notices for code in LANGUAGES), strict=True)
    items = "".join(f"<li>{say(dict(zip(LANGUAGES, sentences, strict=True)))}</li>" for sentences in each)
    return f'<ul class="notices" role="note">{items}</ul>' if items else ""


def _heading(names: list[str]) -> str:
    if len(names) == 1:
        return escape(names[0])
    return say({"en": f"{names[0]} against {names[1]}", "zh": f"{names[0]} 与 {names[1]} 对比"})


def _glyph(kind: str) -> str:
    return (
        f'<svg class="glyph" data-kind="{kind}" viewBox="0 0 16 16" aria-hidden="true"><path d="{GLYPHS[kind]}"/></svg>'
    )


def _cards(counts: dict[str, int], text: dict[str, Any]) -> str:
    """One card per kind; a click filters map and table. The script updates the counts for the selected length."""
    total = sum(counts.values()) or 1
    cards = []
    for kind in counts:
        names = {code: text["kinds"][kind][code][0] for code in LANGUAGES}
        about = {code: text["kinds"][kind][code][1] for code in LANGUAGES}
        share = f"{100 * counts[kind] / total:.0f}\u202f%"
        cards.append(
            f'<button type="button" class="card" data-kind="{kind}" aria-pressed="false">'
            f'<span class="card-top">{_glyph(kind)}<span class="card-name">{say(names)}</span></span>'
            f'<span class="card-count">{counts[kind]} <span class="card-share">{share}</span></span>'
            f'<span class="card-about">{say(about)}</span></button>'
        )
    return "".join(cards)
