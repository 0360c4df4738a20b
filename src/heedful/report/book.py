"""The theory book: every claim with its formula, its verdict and the numbers behind it, on one page in two languages.

Made only from records, as `heedful theory --json` prints them (defined in `heedful/theory/records.py`). Formulas are
MathML, plots are SVG. The page embeds a mathematics font: without one, browsers omit roots and do not stretch brackets.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from heedful import svg
from heedful.latex import to_mathml
from heedful.report import shell
from heedful.report.numbers import measured_text, number_text
from heedful.report.shell import Said, say

Record = Mapping[str, Any]

VERDICTS: dict[str, tuple[str, Said]] = {
    "HOLDS": ("✓", {"en": "Holds", "zh": "成立"}),
    "HOLDS_WHEN": ("◑", {"en": "Holds when", "zh": "有条件成立"}),
    "FAILS": ("✗", {"en": "Fails", "zh": "不成立"}),
    "UNDECIDED": ("?", {"en": "Undecided", "zh": "未定"}),
}
"""A sign and a word for each verdict, so that none depends on colour alone."""

KINDS: dict[str, Said] = {
    "exact": {"en": "exact", "zh": "精确"},
    "asymptotic": {"en": "asymptotic", "zh": "渐近"},
    "statistical": {"en": "statistical", "zh": "统计"},
    "complexity": {"en": "complexity", "zh": "复杂度"},
    "empirical": {"en": "empirical", "zh": "实证"},
    "wording": {"en": "wording", "zh": "表述"},
}
FIRST: dict[str, Said] = {
    "holds": {"en": "holds", "zh": "成立"},
    "conditional": {"en": "holds under a condition", "zh": "有条件成立"},
    "false": {"en": "false", "zh": "不成立"},
    "empirical": {"en": "needs a model", "zh": "须用模型测量"},
    "design": {"en": "wording", "zh": "表述，无可判定"},
}
BECAUSE: dict[str, Said] = {
    "wording: nothing to decide": {"en": "Wording: nothing to decide.", "zh": "属于表述，无可判定。"},
    "no check decides it": {"en": "No check decides it.", "zh": "没有可以判定它的检验。"},
    "a number is missing (NaN)": {"en": "A number is missing (NaN).", "zh": "缺少一个数值（NaN）。"},
    "it fails, but nothing is said of what is true instead": {
        "en": "It fails, but nothing is said of what is true instead.",
        "zh": "它不成立，但尚未给出正确的说法。",
    },
    "slow: not run": {
        "en": "Slow, and not run for this book: heedful theory --all runs it.",
        "zh": "耗时较长，本书未运行；heedful theory --all 会运行它。",
    },
}
"""Translations of the judge's reasons; a check's own reasons are shown unchanged."""

TITLE = {"en": "The theory of attention, put to the test", "zh": "注意力理论的逐条检验"}


def book(
    records: Sequence[Record], chapters: Sequence[Mapping[str, Any]], *, made: str = "", language: str = "en"
) -> str:
    """The book as one HTML page.

    records    records in the order of the texts
    chapters   {name, title: {en, zh}, text}, in order; chapters without a record are left out
    made       which version made it and when, for the footer
    """
    present = [one for one in chapters if any(record["chapter"] == one["name"] for record in records)]
    body = [
        _opening(records, present),
        _toolbar(),
        '<div class="pages">',
        _contents(records, present),
        '<div class="chapters">',
        *(_chapter(one, [record for record in records if record["chapter"] == one["name"]]) for one in present),
        f'<p id="nothing" hidden>{say({"en": "No claim fits.", "zh": "没有符合条件的命题。"})}</p>',
        "</div></div>",
        _foot(records, made),
    ]
    css = _font() + shell.asset("book.css")
    return shell.page(TITLE, "\n".join(body), css, shell.asset("book.js"), {"claims": len(records)}, language=language)


def _font() -> str:
    data = (files("heedful.report") / "assets" / "math.woff2").read_bytes()
    return f'@font-face{{font-family:"Book Math";src:url(data:font/woff2;base64,{base64.b64encode(data).decode()})}}\n'


def anchor(claim: str) -> str:
    """An id without blanks, for use in a URL."""
    return re.sub(r"\s+", "_", claim)


INDEX = re.compile(r"(?<![a-z]{2})(?<![.`_])([A-Za-zΑ-ω)\]|‖])_(\{[^{}]*\}|model|[A-Za-z0-9α-ω]{1,3})(?![A-Za-z0-9_])")
EXPONENT = re.compile(r"(?<=[\w)\]|‖>])\^(\{[^{}]*\}|\([^()]*\)|[−-]?(?:\([^()]*\)|\d+(?:\.\d+)?|[A-Za-zα-ω¼½]))")


def typeset(text: str) -> str:
    """Escaped HTML with subscripts and superscripts; names in code stay unchanged.

    >>> typeset("|A_ij| < e^{-x} in R^d, q_proj, S_exp"), typeset("k^(a−1) W_Kᵀ, x^−0.5")
    ('|A<sub>ij</sub>| &lt; e<sup>-x</sup> in R<sup>d</sup>, q_proj, S<sub>exp</sub>',
     'k<sup>a−1</sup> W<sub>K</sub>ᵀ, x<sup>−0.5</sup>')
    """
    lowered = INDEX.sub(lambda found: f"{found[1]}<sub>{found[2].strip('{}')}</sub>", escape(text))
    return EXPONENT.sub(lambda found: f"<sup>{_without_brackets(found[1])}</sup>", lowered)


def _without_brackets(text: str) -> str:
    return text[1:-1] if text[0] in "{(" else text


def _prose(text: Said) -> str:
    """Like `say`, for sentences with mathematics."""
    return "".join(f'<span lang="{code}">{typeset(text[code])}</span>' for code in shell.LANGUAGES)


def _t(en: str, zh: str, tag: str = "span") -> str:
    return say({"en": en, "zh": zh}, tag)


def _badge(record: Record) -> str:
    sign, name = VERDICTS[record["verdict"]]
    if not record["ran"]:
        sign, name = "–", {"en": "Not run", "zh": "未运行"}
    return f'<span class="verdict {record["verdict"]}"><b aria-hidden="true">{sign}</b>{say(name)}</span>'


# ── the head of the book


def _opening(records: Sequence[Record], chapters: Sequence[Mapping[str, Any]]) -> str:
    texts = len(chapters)
    lead_en = (
        f"{len(records)} statements of {texts} text{'s' if texts != 1 else ''} on attention, each decided by a "
        "program. A check measures what the statement says. The same check then runs on a control, a variant broken "
        "on purpose, and has to come out the other way; a check that can’t tell the two apart decides nothing. What "
        "fails is followed by a counterexample to run and by what is true instead, which is put to the same test."
    )
    lead_zh = (
        f"{texts} 篇关于注意力的文稿中的 {len(records)} 条命题，逐条由程序判定。检验先测量命题所说的量，"
        "再在对照（有意改错的变体）上重做一遍，结果必须相反；分不清二者的检验不作数。不成立的命题附有可以直接运行的反例，以及同样经过检验的正确说法。"
    )
    return f"""<section class="opening">
<h1>{say(TITLE)}</h1>
<p class="lead">{_t(lead_en, lead_zh)}</p>
{_tallies(records)}
{_by_chapter(records, chapters)}
{_differing(records)}
</section>"""


def _tallies(records: Sequence[Record]) -> str:
    items = []
    for verdict, (sign, name) in VERDICTS.items():
        count = sum(record["verdict"] == verdict for record in records)
        items.append(
            f'<li class="{verdict}"><span class="count">{count}</span>'
            f'<span class="what"><b aria-hidden="true">{sign}</b> {say(name)}</span></li>'
        )
    return f'<ul class="tallies">{"".join(items)}</ul>'


def _by_chapter(records: Sequence[Record], chapters: Sequence[Mapping[str, Any]]) -> str:
    heads = "".join(
        f'<th scope="col"><b class="{verdict}" aria-hidden="true">{sign}</b><span class="wide">{say(name)}</span>'
        f'<span class="visually-hidden">{say(name)}</span></th>'
        for verdict, (sign, name) in VERDICTS.items()
    )
    rows = []
    for chapter in chapters:
        own = [record for record in records if record["chapter"] == chapter["name"]]
        counts = {verdict: sum(record["verdict"] == verdict for record in own) for verdict in VERDICTS}
        cells = "".join(f"<td>{count or '·'}</td>" for count in counts.values())
        bar = "".join(
            f'<i class="{verdict}" style="flex-grow:{count}"></i>' for verdict, count in counts.items() if count
        )
        link = f'<a href="#chapter-{escape(chapter["name"])}">{say(chapter["title"])}</a>'
        strip = f'<span class="strip" aria-hidden="true">{bar}</span>'
        rows.append(f'<tr><th scope="row">{link}{strip}</th>{cells}<td>{len(own)}</td></tr>')
    return (
        f'<table class="by-chapter"><thead><tr><th scope="col">{_t("Chapter", "章")}</th>{heads}'
        f'<th scope="col">{_t("All", "合计")}</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _differing(records: Sequence[Record]) -> str:
    found = [record for record in records if record["differs"]]
    if not found:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><a href="#{escape(anchor(one["id"]))}">{escape(one["id"])}</a></th>'
        f"<td>{say(FIRST[one['first']])}</td><td>{_badge(one)}</td><td>{_reason(one)}</td></tr>"
        for one in found
    )
    heads = "".join(
        f'<th scope="col">{_t(*head)}</th>'
        for head in (("Claim", "命题"), ("First reading", "初读"), ("Measured", "检验"), ("Why", "原因"))
    )
    n = len(found)
    title = _t(
        f"{n} verdict{'s' if n != 1 else ''} differ{'s' if n == 1 else ''} from a first reading",
        f"{n} 条与初读的判断不同",
    )
    return (
        f'<details class="differing"><summary>{title}</summary><div class="scroll"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _reason(record: Record) -> str:
    if record["reason"]:
        return _prose(record["reason"])
    return _because(record["because"]) if record["because"] else ""


def _because(sentence: str) -> str:
    if sentence in BECAUSE:
        return say(BECAUSE[sentence])
    return escape(sentence[:1].upper() + sentence[1:] + ("" if sentence.endswith((".", "。")) else "."))


def _toolbar() -> str:
    chips = "".join(
        f'<button type="button" class="chip {verdict}" data-verdict-chip="{verdict}" aria-pressed="false">'
        f'<b aria-hidden="true">{sign}</b>{say(name)}</button>'
        for verdict, (sign, name) in VERDICTS.items()
    )
    options = "".join(f'<option value="{kind}">{kind}</option>' for kind in KINDS)
    names = {code: [name[code] for name in KINDS.values()] for code in shell.LANGUAGES}
    kinds = "".join(f' data-{code}-kinds="{escape("|".join(words))}"' for code, words in names.items())
    return f"""<div class="toolbar" role="search">
<input type="search" id="search" autocomplete="off" spellcheck="false" data-en-aria-label="Search the claims"
 data-zh-aria-label="搜索命题" data-en-placeholder="Search: rank, T11.23, 温度…"
 data-zh-placeholder="搜索：秩、T11.23、rank…">
<div class="chips" role="group" data-en-aria-label="Verdict" data-zh-aria-label="判定">{chips}
<button type="button" class="chip" id="only-differing" aria-pressed="false">{_t("Differs", "与初读不同")}</button></div>
<select id="kind" data-en-aria-label="Kind" data-zh-aria-label="类别" data-en-any="Every kind" data-zh-any="所有类别"
{kinds}>
<option value="">–</option>{options}</select>
<button type="button" id="reset" hidden>{_t("Show all", "全部显示")}</button>
<output id="shown" aria-live="polite"></output>
</div>"""


def _contents(records: Sequence[Record], chapters: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for chapter in chapters:
        items = "".join(_content_line(one) for one in records if one["chapter"] == chapter["name"])
        link = f'<a href="#chapter-{escape(chapter["name"])}">{say(chapter["title"])}</a>'
        parts.append(f"<li>{link}<ol>{items}</ol></li>")
    return (
        f'<nav class="contents" data-en-aria-label="Contents" data-zh-aria-label="目录"><details id="contents">'
        f"<summary>{_t('Contents', '目录')}</summary><ol>{''.join(parts)}</ol></details></nav>"
    )


def _content_line(record: Record) -> str:
    key, sign = escape(anchor(record["id"])), VERDICTS[record["verdict"]][0]
    mark = f'<b class="{record["verdict"]}" aria-hidden="true">{sign}</b>'
    return f'<li><a href="#{key}" data-for="{key}">{mark}{escape(record["id"])}</a></li>'


def _chapter(chapter: Mapping[str, Any], records: Sequence[Record]) -> str:
    n = len(records)
    counted = _t(f"{n} claim{'s' if n != 1 else ''}", f"{n} 条命题")
    claims = "\n".join(map(_claim, records))
    return (
        f'<section class="chapter" id="chapter-{escape(chapter["name"])}"><h2>{say(chapter["title"])}</h2>'
        f'<p class="counted">{counted}</p>\n{claims}</section>'
    )


# ── one claim


def _claim(record: Record) -> str:
    key, kind = escape(anchor(record["id"])), record["kind"]
    meta = (
        f'<span class="meta">§ {escape(record["section"])} <span aria-hidden="true">·</span> {say(KINDS[kind])}</span>'
    )
    heading = f'<h3><a href="#{key}">{escape(record["id"])}</a></h3>'
    return (
        f'<article class="claim" id="{key}" data-verdict="{record["verdict"]}" data-kind="{kind}"'
        f"{' data-differs' if record['differs'] else ''}>"
        f"<header>{heading}{_badge(record)}{meta}</header>{_content(record)}{_afterwards(record)}</article>"
    )


def _content(record: Record) -> str:
    """The parts that a claim and a corrected form have in common."""
    parts = [f'<p class="statement">{_prose(record["statement"])}</p>', _formula(record["formula"])]
    if record["condition"]:
        parts.append(f'<p class="condition"><b>{_t("When", "条件")}</b> {_prose(record["condition"])}</p>')
    findings = _evidence(record)
    if record["because"] and not record["differs"]:
        parts.append(f'<p class="because">{_because(record["because"])}</p>')
    figure = _figure(record)
    if findings or figure:
        parts.append(f'<div class="findings{" with-figure" if figure else ""}">{findings}{figure}</div>')
    return "".join(parts)


def _afterwards(record: Record) -> str:
    parts = []
    if record["counterexample"]:
        parts.append(_counterexample(record["counterexample"]))
    if record["corrected"]:
        parts.append(_corrected(record))
    if record["differs"]:
        lead = _t("A first reading said:", "初读的判断：")
        reason = _reason(record)
        parts.append(f'<p class="reason"><b>{lead}</b> {say(FIRST[record["first"]])}. {reason}</p>')
    elif record["reason"]:
        parts.append(f'<p class="reason">{_prose(record["reason"])}</p>')
    return "".join(parts)


def _formula(latex: str) -> str:
    if not latex:
        return ""
    try:
        return f'<div class="formula" tabindex="0">{to_mathml(latex)}</div>'
    except ValueError:  # show the LaTeX source instead
        return f'<div class="formula" tabindex="0"><code>{escape(latex)}</code></div>'


def _evidence(record: Record) -> str:
    found, control = record["evidence"], record["control"]
    if found is None:
        return ""
    outcome = {
        True: ("holds", "成立"),
        False: ("does not hold", "不成立"),
        None: ("a number is missing", "缺少数值"),
    }
    groups = [_group(_t("As stated", "原命题"), found, _t(*outcome[found["holds"]]), "")]
    if control is not None:
        flipped = ("comes out the other way", "结果相反") if control["flipped"] else ("is not told apart", "未能区分")
        mark = "✓" if control["flipped"] else "✗"
        groups.append(_group(_t("Control", "对照"), control, f"{mark} {_t(*flipped)}", "control"))
    rows = [*found["comparisons"], *(control or {"comparisons": []})["comparisons"]]
    return f'<div class="evidence"><table>{"".join(groups)}</table>{_sampling(rows)}</div>'


def _group(title: str, evidence: Mapping[str, Any], outcome: str, kind: str) -> str:
    """Table rows: a heading, and one row for each number; `title` and `outcome` are HTML."""
    rows = []
    for one in evidence["comparisons"]:
        told = ("✓", _t("holds", "成立")) if one["holds"] else ("✗", _t("does not hold", "不成立"))
        rows.append(
            f'<tr><th scope="row">{typeset(one["name"])}</th><td class="measured">'
            f'{measured_text(one["measured"], one["noise"])}</td><td class="against">{escape(one["relation"])} '
            f'{number_text(one["expected"])}</td><td class="told {"yes" if one["holds"] else "no"}">'
            f'<span aria-hidden="true">{told[0]}</span><span class="visually-hidden">{told[1]}</span></td></tr>'
        )
    note = f'<tr class="note"><td colspan="4">{typeset(evidence["note"])}</td></tr>' if evidence["note"] else ""
    head = f'<b>{title}</b> {typeset(evidence["case"])} <span class="outcome">{outcome}</span>'
    return (
        f'<tbody class="{kind}"><tr class="group"><th colspan="4" scope="rowgroup">{head}</th></tr>'
        f"{''.join(rows)}{note}</tbody>"
    )


def _sampling(rows: Sequence[Mapping[str, Any]]) -> str:
    alarms = {one["alarm"] for one in rows if one["alarm"]}
    if not alarms:
        return ""
    alarm = number_text(max(alarms), 2)
    en = f"± one standard error. A true statement would be called false by chance with probability {alarm}."
    return f'<p class="sampling">{_t(en, f"± 为一个标准误。真命题因偶然被判为不成立的概率为 {alarm}。")}</p>'


def _figure(record: Record) -> str:
    figure = record["figure"]
    if not figure or "error" in figure:
        return ""
    drawn = svg.line_plot(figure)
    if not drawn:
        return ""
    caption = f"<figcaption>{_prose(figure['title'])}</figcaption>"
    return f"<figure>{caption}{drawn}{svg.legend(figure)}</figure>"


def _counterexample(code: str) -> str:
    label = _t("Counterexample", "反例")
    copy = f'<button type="button" class="copy">{_t("Copy", "复制")}</button>'
    return (
        f'<div class="code"><div class="code-head"><b>{label}</b>{copy}</div>'
        f'<pre tabindex="0"><code>{escape(code)}</code></pre></div>'
    )


def _corrected(record: Record) -> str:
    inner = record["corrected"]
    lead = (
        _t("What is true instead", "正确的说法") if record["verdict"] == "FAILS" else _t("More exactly", "更精确的说法")
    )
    key = escape(anchor(inner["id"]))
    return (
        f'<section class="corrected" id="{key}"><header><h4>{lead}</h4>{_badge(inner)}'
        f'<span class="meta">{escape(inner["id"])}</span></header>{_content(inner)}</section>'
    )


def _foot(records: Sequence[Record], made: str) -> str:
    ran = [one for one in _with_corrected(records) if one["control"] is not None]
    flipped = sum(one["control"]["flipped"] for one in ran)
    seconds = sum(one["seconds"] for one in records)
    en = f"Controls that came out the other way: {flipped} of {len(ran)}. Time of all checks: {seconds:.1f} s."
    zh = f"结果相反的对照：{len(ran)} 个中有 {flipped} 个。全部检验用时 {seconds:.1f} 秒。"
    keys = (
        f"<p><kbd>/</kbd> {_t('search', '搜索')} · <kbd>j</kbd> <kbd>k</kbd> "
        f"{_t('next, previous claim', '下一条、上一条')} · "
        f"<kbd>l</kbd> {_t('language', '语言')} · <kbd>Esc</kbd> {_t('show all', '全部显示')}</p>"
    )
    return f'<footer class="foot"><p>{_t(en, zh)}</p>{keys}<p>{escape(made)}</p></footer>'


def _with_corrected(records: Sequence[Record]) -> list[Record]:
    return [one for record in records for one in (record, record["corrected"]) if one]
