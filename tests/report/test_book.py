"""The theory book as a file: whole, in two languages, escaped, self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from heedful.report.book import VERDICTS, anchor, book, typeset
from heedful.report.numbers import measured_text, number_text
from heedful.svg import line_plot, linear_ticks, log_ticks
from heedful.theory.chapters.chapter import Chapter
from heedful.theory.claim import Case, Claim, Figure, Text, agrees, equal, evidence
from heedful.theory.judge import judge, undecided
from heedful.theory.records import record
from heedful.theory.registry import chapters_of, claims_of

EVIL = "<script>alert('x')</script>\"&'<img src=x onerror=alert(1)>"
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Reader(HTMLParser):
    """Checks that tags are closed in order; collects ids, text by language, and what could ask the network."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.tags, self.urls, self.texts = [], [], [], [], {"en": [], "zh": []}
        self.languages = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href", "action") and value]
        self.ids += [given["id"]] if "id" in given else []
        if tag not in VOID:
            self.open.append((tag, given.get("lang")))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        code = next((lang for _, lang in reversed(self.open) if lang), None)
        if code:
            self.texts[code].append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def told(chapters):
    return [{"name": one.name, "title": {"en": one.title.en, "zh": one.title.zh}, "text": one.text} for one in chapters]


@pytest.fixture(scope="module")
def evil():
    """A claim whose every text would like to be markup."""

    def check(value):
        return evidence(equal(EVIL, value, 1), agrees("mean", 0.5, 0.5, error=0.01), note=EVIL)

    def figure():
        return Figure(Text(EVIL, EVIL), EVIL, EVIL, {EVIL: ([1, 2], [3, 4])})

    claim = Claim(
        EVIL, EVIL, "statistical", Text(EVIL, EVIL), r"\text{</math><script>}", check, Case(EVIL, 2), Case(EVIL, 1),
        counterexample=EVIL, reason=Text(EVIL, EVIL), figure=figure,
        corrected=Claim(EVIL + "*", EVIL, "exact", Text(EVIL, EVIL), r"\bad{<b>}", check, Case(EVIL, 1), Case(EVIL, 2)),
    )  # fmt: skip
    chapter = Chapter("evil", Text(EVIL, EVIL), EVIL, (claim,))
    return book([record(chapter, claim, judge(claim))], told([chapter]), made=EVIL)


def test_everything_shown_is_escaped(evil):
    reader = read(evil)
    assert reader.tags.count("script") == 2 and "img" not in reader.tags  # the data and the one script
    assert "onerror" not in re.sub(r"onerror=alert\(1\)&gt;", "", evil)
    assert "</math><script>" not in evil


def test_a_formula_that_can_not_be_set_is_shown_as_it_was_written(evil):
    assert r"\bad{&lt;b&gt;}" in evil


@pytest.fixture(scope="module")
def whole():
    """Every claim of the theory, none of them run."""
    records = [
        record(chapter, claim, undecided("not run", ran=False)) for chapter in chapters_of() for claim in chapter.claims
    ]
    return book(records, told(chapters_of()))


def test_every_claim_is_there_in_both_languages(whole):
    reader = read(whole)
    for claim in claims_of().values():
        assert anchor(claim.id) in reader.ids
        for language in ("en", "zh"):
            said = typeset(getattr(claim.statement, language))
            assert f'<span lang="{language}">{said}</span>' in whole
    assert len(reader.ids) == len(set(reader.ids))


def test_every_formula_is_mathml(whole):
    wanted = sum(bool(one and one.formula) for claim in claims_of().values() for one in (claim, claim.corrected))
    assert whole.count('<math display="block"') == wanted > 0


def test_the_book_is_one_small_file_that_asks_for_nothing(whole):
    assert len(whole.encode()) < 5_000_000
    assert all(url.startswith(("#", "data:")) for url in read(whole).urls)
    assert "default-src 'none'" in whole
    assert not re.search(r"url\((?!data:)|@import", whole)


def test_every_verdict_has_a_sign_and_a_word():
    assert len({sign for sign, _ in VERDICTS.values()}) == 4
    assert all(name["en"] and name["zh"] for _, name in VERDICTS.values())


def test_a_link_from_the_contents_finds_its_claim(whole):
    reader = read(whole)
    assert {url[1:] for url in reader.urls if url.startswith("#")} <= set(reader.ids)


@pytest.mark.parametrize(
    "value, wanted",
    [(0.0, "0"), (-3.0, "−3"), (1e-12, "10⁻¹²"), (-1e20, "−10²⁰"), (12345678.0, "1.23×10⁷"), ("NaN", "NaN")],
)
def test_numbers(value, wanted):
    assert number_text(value) == wanted


@pytest.mark.parametrize(
    "value, noise, wanted",
    [(0.5, 0.0, "0.5 ± 0"), (1234.5, 67.0, "1234 ± 67"), (1e-9, 1e-10, "10⁻⁹ ± 10⁻¹⁰"), (1.0, "NaN", "1 ± NaN")],
)
def test_a_number_with_its_error(value, noise, wanted):
    assert measured_text(value, noise) == wanted


@pytest.mark.parametrize("low, high", [(0, 1), (-3.7, 12.2), (1e-9, 3e-9), (5, 5.001)])
def test_ticks_lie_inside(low, high):
    ticks = linear_ticks(low, high)
    assert 2 <= len(ticks) <= 11 and all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in ticks)
    assert log_ticks(3, 7) == [5]


def figure(series, **more):
    return {"x": "x", "y": "y", "series": series, "log_x": False, "log_y": False, "points": False, **more}


def test_points_without_a_place_are_left_out():
    drawn = line_plot(figure({"a": [[1, 2, 3], [1.0, "NaN", 4.0]], "b": [[1, 2], [0.0, 1.0]]}, log_y=True))
    assert drawn.count("<circle") == 2 and "nan" not in drawn.lower()


def test_a_plot_of_one_value_or_none():
    assert "<svg" in line_plot(figure({"a": [[1, 2], [5.0, 5.0]]})) and line_plot(figure({"a": [[], []]})) == ""
