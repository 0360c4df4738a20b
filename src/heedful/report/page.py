"""The page of a scan: the answer in words, which needs no script, and places for what the scripts draw."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from heedful.notices import notices
from heedful.report.data import Records, payload
from heedful.report.shell import LANGUAGES, asset, check_language, page, say
from heedful.report.words import KINDS, THIN, answer, title_of

SCRIPTS = ("base.js", "export.js", "map.js", "panel.js", "growth.js", "compare.js", "table.js", "report.js")
GLYPHS = {
    "positional": "M3 3L13 13",
    "sink": "M4 3V13",
    "low rank": "M4.5 4.5H11.5V11.5H4.5Z",
    "content": "M4 5h.01M11 4h.01M7.5 8.5h.01M12 11h.01M4.5 12h.01",
}
"""Each kind's mark, in a box of 16: a picture of its matrix. Colour never tells alone."""


def html(scan: Records, *, against: Records | None = None, language: str = "en") -> str:
    """The whole page as text."""
    check_language(language)
    text = json.loads(asset("text.json"))
    table = scan.table()
    said = {code: answer(table, code) for code in LANGUAGES}
    name = title_of(scan.manifest)
    versus = "" if against is None else f" · {title_of(against.manifest)}"
    title = {"en": f"Attention heads of {name}{versus}", "zh": f"{name}{versus} 的注意力头"}
    measures = [measure["id"] for measure in text["measures"]]
    data = {**payload(scan, against, measures), "text": text, "glyphs": GLYPHS}
    body = "\n".join([_notices(scan, against), _answer(name, said, text), asset("report.html")])
    return page(title, body, asset("report.css"), "".join(asset(each) for each in SCRIPTS), data, language=language)


def _answer(name: str, said: dict[str, Any], text: dict[str, Any]) -> str:
    """The first screen: one sentence, four counts, what they mean for the cost."""
    each = {
        code: {**found, "more": " ".join(found["more"]) if code == "en" else "".join(found["more"])}
        for code, found in said.items()
    }
    heading = say({"en": "What the attention heads are", "zh": "注意力头的构成"})
    cheaper = "".join(
        f"<li>{_glyph(kind)}<span>{say({code: dict(said[code]['cheaper'])[kind] for code in LANGUAGES})}</span></li>"
        for kind, _ in said["en"]["cheaper"]
    )
    return f"""<section class="answer" aria-label="heedful">
<p class="eyebrow">{heading}</p>
<h1>{escape(name)}</h1>
<p class="opening">{say({code: found["lead"] for code, found in each.items()})}</p>
<div class="kinds" id="kinds">{_cards(said["en"]["counts"], text)}</div>
<div class="columns">
<div><h2>{say({"en": "How large their ranks are", "zh": "秩有多大"})}</h2>
<p>{say({code: found["more"] for code, found in each.items()})}</p></div>
<div><h2>{say({"en": "What could be cheaper", "zh": "哪些可以更省"})}</h2>
<ul class="cheaper">{cheaper}</ul>
<p class="caveat">{say({code: found["caveat"] for code, found in each.items()})}</p></div>
</div>
</section>"""


def _notices(*scans: Records | None) -> str:
    """What a reader has to know before the numbers; "" for most scans."""
    found = []
    for scan in filter(None, scans):
        each = {code: notices(scan.manifest, code) for code in LANGUAGES}
        whose = f"{title_of(scan.manifest)}: " if scans[-1] is not None else ""
        found += [{code: whose + each[code][at] for code in LANGUAGES} for at in range(len(each["en"]))]
    items = "".join(f"<li>{say(sentence)}</li>" for sentence in found)
    return f'<ul class="notices" role="note">{items}</ul>' if items else ""


def _glyph(kind: str) -> str:
    return (
        f'<svg class="glyph" data-kind="{kind}" viewBox="0 0 16 16" aria-hidden="true"><path d="{GLYPHS[kind]}"/></svg>'
    )


def _cards(counts: dict[str, int], text: dict[str, Any]) -> str:
    """A card a kind; pressing one filters map and table."""
    total = sum(counts.values()) or 1
    cards = []
    for kind in KINDS:
        names = {code: text["kinds"][kind][code][0] for code in LANGUAGES}
        about = {code: text["kinds"][kind][code][1] for code in LANGUAGES}
        share = f"{100 * counts[kind] / total:.0f}{THIN}%"
        cards.append(
            f'<button type="button" class="card" data-kind="{kind}" aria-pressed="false">'
            f'<span class="card-top">{_glyph(kind)}<span class="card-name">{say(names)}</span></span>'
            f'<span class="card-count">{counts[kind]}<span class="card-share">{share}</span></span>'
            f'<span class="card-about">{say(about)}</span></button>'
        )
    return "".join(cards)
