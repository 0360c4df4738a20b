"""The theory book in a browser: two languages, filters, links, copying, a phone, and not one request."""

from __future__ import annotations

import pytest
from test_book import told

from heedful.report.book import book
from heedful.theory.chapters import low_rank
from heedful.theory.claim import Case, Claim, Text, equal, evidence
from heedful.theory.judge import judge
from heedful.theory.records import record

LONG = r"\sum_{i=1}^{N}\left(" + "+".join(rf"\sigma_{{{i}}}^2" for i in range(40)) + r"\right)"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The two claims of the softmax bottleneck, which fail, a dozen that hold, and one of wording."""
    chapter = low_rank.CHAPTER
    bottleneck = [claim for claim in chapter.claims if claim.id in ("C11.9", "T11.23")]
    true = [
        Claim(f"P{i}", "1", "asymptotic", Text(f"Zero is zero, {i}.", f"零是零，{i}。"), LONG, lambda n: evidence(
            equal("a long name of what was measured, at N = 65536 and d = 64", n, 0.0)), Case("0", 0), Case("1", 1))
        for i in range(12)
    ]  # fmt: skip
    wording = Claim("W1", "2", "wording", Text("A definition.", "一个定义。"), first="design")
    records = [record(chapter, claim, judge(claim)) for claim in (*bottleneck, *true, wording)]
    path = tmp_path_factory.mktemp("book") / "book.html"
    path.write_text(book(records, told([chapter])), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser, address):
    """Opens the book; at the end nothing was asked of the network and nothing went wrong."""
    contexts, troubles = [], []

    def open_page(hash_="", **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(address + hash_)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles


def shown(page):
    return page.locator("article.claim:visible").count()


def test_the_switch_changes_every_text(visit):
    page = visit()
    assert page.locator("#P0 .statement").inner_text() == "Zero is zero, 0."
    page.click("[data-language=zh]")
    assert page.locator("#P0 .statement").inner_text() == "零是零，0。"
    assert page.title() == "注意力理论的逐条检验"
    assert page.locator("#kind option").first.inner_text() == "所有类别"
    page.keyboard.press("l")
    assert page.locator("#P0 .statement").inner_text() == "Zero is zero, 0."


def test_filters_by_verdict_kind_and_text(visit):
    page = visit()
    assert shown(page) == 15
    page.click("[data-verdict-chip=FAILS]")
    assert shown(page) == 2 and page.locator("#shown").inner_text() == "2 of 15 claims"
    page.click("[data-verdict-chip=UNDECIDED]")
    assert shown(page) == 3
    page.select_option("#kind", "wording")
    assert shown(page) == 1
    page.keyboard.press("Escape")
    assert shown(page) == 15
    page.keyboard.press("/")
    page.keyboard.type("尖锐 rank")
    assert shown(page) == 1 and page.locator("#C11\\.9").is_visible()
    page.fill("#search", "no such thing")
    assert shown(page) == 0 and page.locator("#nothing").is_visible()


def test_a_link_leads_to_its_claim_even_when_it_is_hidden(visit):
    page = visit("#P7")
    assert 0 <= page.locator("#P7").bounding_box()["y"] < 300
    page.click("[data-verdict-chip=FAILS]")
    page.evaluate("location.hash = '#C11.9*'")
    assert page.locator("#C11\\.9\\*").is_visible()
    page.evaluate("location.hash = '#P11'")
    page.wait_for_function("!document.getElementById('P11').hidden")
    assert page.locator("#P11").bounding_box()["y"] < 900


def test_keys_go_from_claim_to_claim(visit):
    page = visit("#P3")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "P4"
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.textContent") == "P3"


def test_the_counterexample_is_copied_as_it_is(visit):
    page = visit()
    page.locator("#T11\\.23 button.copy").click()
    page.wait_for_function("document.querySelector('#T11\\\\.23 button.copy').innerText === 'Copied'")
    claim = next(claim for claim in low_rank.CHAPTER.claims if claim.id == "T11.23")
    assert page.evaluate("navigator.clipboard.readText()") == claim.counterexample


def test_formulas_are_set_with_the_font_of_the_page(visit):
    page = visit()
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px \"Book Math\"'))")
    height = page.locator("#P0 munderover").first.bounding_box()["height"]
    assert height > 1.6 * page.locator("#P0 math mn").first.bounding_box()["height"]  # limits above and below
    root = page.locator("#T11\\.23 msqrt").first.bounding_box()
    inside = page.locator("#T11\\.23 msqrt > *").first.bounding_box()
    assert root["width"] > inside["width"] + 3  # there is a root sign


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("width", [320, 390, 820, 1280])
def test_nothing_is_wider_than_the_window(visit, width, language):
    page = visit(viewport={"width": width, "height": 800})
    page.click(f"[data-language={language}]")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_colours_follow_the_system_and_the_switch(visit):
    page = visit(color_scheme="dark")
    ink = "getComputedStyle(document.querySelector('.plot .axis')).stroke"
    dark = page.evaluate(ink)
    page.click("[data-theme-choice=light]")
    assert page.evaluate(ink) != dark


def test_print_shows_the_claims_and_no_controls(visit):
    page = visit()
    page.emulate_media(media="print")
    assert not page.locator(".toolbar").is_visible() and not page.locator(".contents").is_visible()
    assert shown(page) == 15
