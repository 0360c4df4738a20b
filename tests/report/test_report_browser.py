"""The page in a real browser: it draws, links, filters, sorts, exports, speaks two languages, and asks for nothing."""

from __future__ import annotations

import csv
import io
import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("polars", reason="polars is not installed: pip install 'heedful[report]'")

from synthetic import HOSTILE, changing, sort_of, synthetic, uneven

from heedful.scan import Scan

LAYERS, HEADS = 3, 4
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One scan alone, and the same against another."""
    folder = tmp_path_factory.mktemp("reports")
    scan = synthetic(folder / "a", "trained", LAYERS, HEADS)
    scan.report(folder / "one.html")
    scan.report(folder / "two.html", against=synthetic(folder / "b", "untrained", LAYERS, HEADS, shift=1.3, seed=1))
    uneven(folder / "c").report(folder / "uneven.html")
    synthetic(folder / "d", texts=3, planned=9, lengths=(64,), precision=0.01).report(folder / "short.html")
    changing(folder / "e").report(folder / "lengths.html")
    return folder


@pytest.fixture
def visit(browser, reports):
    """Opens a report; at the end nothing was asked of the network and nothing went wrong."""
    opened, troubles = [], []

    def open_page(name="one", anchor="", **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: troubles.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        address = (reports / f"{name}.html").as_uri()
        page.on("request", lambda r: r.url.startswith((address, "data:")) or troubles.append(f"request: {r.url}"))
        page.goto(address + anchor)
        opened.append(context)
        return page

    yield open_page
    for context in opened:
        context.close()
    assert troubles == []


def cell(page, layer, head, figure="figure-map"):
    return page.locator(f"#{figure} [role=row]").nth(layer).locator("[role=gridcell]").nth(head)


def title(page):
    return page.locator("#panel-title").inner_text()


def rows(page):
    """Layer and head of every row of the table, in their order."""
    script = "all => all.map(row => [...row.cells].slice(0, 2).map(cell => Number(cell.textContent)))"
    return [tuple(place) for place in page.locator("#table tbody tr").evaluate_all(script)]


def choose(page, measure):
    page.select_option("#measure", measure)


def saved(page, button):
    with page.expect_download() as waiting:
        button.click()
    return waiting.value.suggested_filename, waiting.value.path().read_bytes()


def test_it_draws_every_head_and_every_figure(visit):
    page = visit()
    assert page.title() == "Attention heads of trained"
    assert page.locator("#figure-map [role=gridcell]").count() == LAYERS * HEADS
    for figure in ("map", "spectrum", "weights", "growth"):
        box = page.locator(f"#figure-{figure} svg").first.bounding_box()
        assert box["width"] > 150 and box["height"] > 100, figure
    assert page.locator("#compare-section").is_hidden()
    assert page.locator("#table tbody tr").count() == LAYERS * HEADS
    kinds = {"previous": "positional", "low rank": "low rank"}
    expected = [kinds.get(sort_of(i, j), sort_of(i, j)) for i in range(LAYERS) for j in range(HEADS)]
    for kind in ("positional", "sink", "low rank", "content"):
        assert page.locator(f".card[data-kind='{kind}'] .card-count").inner_text().startswith(str(expected.count(kind)))


def test_every_measure_can_be_drawn(visit):
    page = visit("two")
    drawn = page.evaluate(
        """() => [...document.querySelectorAll("#measure option")].map(({ value }) => {
            const chooser = document.getElementById("measure");
            chooser.value = value;
            chooser.dispatchEvent(new Event("change"));
            const cells = document.querySelectorAll("#figure-map [role=gridcell] rect[fill^=rgb]").length;
            return [value, cells, document.querySelector("main").innerHTML.includes("NaN")];
        })"""
    )
    smooth = sum(sort_of(i, j) != "previous" for i in range(LAYERS) for j in range(HEADS))  # the others have no decay
    assert len(drawn) > 20
    for measure, cells, broken in drawn:
        assert cells == (smooth if measure == "decay" else LAYERS * HEADS) and not broken, measure


def test_a_click_on_a_cell_shows_that_head(visit):
    page = visit()
    cell(page, 2, 1).click()
    assert title(page) == "Layer 2, head 1"
    assert page.locator("#table tr[aria-selected=true]").inner_text().split("\t")[:2] == ["2", "1"]
    picture = page.locator("#figure-weights image").get_attribute("href")
    page.locator("#table tbody tr").first.click()
    assert title(page) == "Layer 0, head 0"
    assert page.locator("#figure-weights image").get_attribute("href") != picture
    assert page.locator("#figure-map [aria-selected=true]").get_attribute("aria-label").startswith("Layer 0, head 0")


def test_arrow_keys_move_over_heads_with_visible_focus(visit):
    page = visit()
    cell(page, 0, 0).focus()
    for key, expected in (
        ("ArrowRight", (0, 1)),
        ("ArrowDown", (1, 1)),
        ("End", (1, HEADS - 1)),
        ("ArrowRight", (1, HEADS - 1)),
        ("PageDown", (LAYERS - 1, HEADS - 1)),
        ("Home", (LAYERS - 1, 0)),
        ("ArrowUp", (1, 0)),
    ):
        page.keyboard.press(key)
        assert title(page) == "Layer {}, head {}".format(*expected)
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused.startswith("Layer 1, head 0")
    assert page.locator("#figure-map [role=gridcell][tabindex='0']").count() == 1
    ring = page.locator("#figure-map .ring").evaluate("e => getComputedStyle(e).strokeWidth")
    page.locator("#measure").focus()
    assert ring == "3px"
    assert page.locator("#figure-map .ring").evaluate("e => getComputedStyle(e).strokeWidth") == "2px"


def test_everything_is_reached_by_tab_and_has_a_name(visit):
    page = visit("two")
    names = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, [tabindex='0']")]
        .filter(e => e.offsetParent !== null || e.closest("svg"))
        .map(e => [e.outerHTML.slice(0, 80), e.ariaLabel || e.textContent.trim() || e.labels?.[0]?.textContent])"""
    )
    assert len(names) > 30 and [html for html, name in names if not name] == []


def test_columns_sort_both_ways_by_their_numbers(visit):
    page = visit()
    button = page.locator("[data-sort=rank90]")
    button.click()
    assert page.locator("th[aria-sort=descending] [data-sort=rank90]").count() == 1
    values = [float(x.split()[0]) for x in page.locator("#table tbody tr td:nth-child(5)").all_inner_texts()]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    button.click()
    assert [float(x.split()[0]) for x in page.locator("#table tbody tr td:nth-child(5)").all_inner_texts()] == sorted(
        values
    )
    page.locator("[data-sort=kind]").press("Enter")
    kinds = [x.strip() for x in page.locator("#table tbody tr td:nth-child(3)").all_inner_texts()]
    order = ["Fixed pattern", "Sink", "Low rank", "Content"]
    assert kinds == sorted(kinds, key=order.index)


def test_filters_leave_what_they_say(visit):
    page = visit()
    sinks = [(i, j) for i in range(LAYERS) for j in range(HEADS) if sort_of(i, j) == "sink"]
    page.locator(".chip[data-kind=sink]").click()
    assert rows(page) == sinks
    assert page.locator("#figure-map .cell:not(.dim)").count() == len(sinks)
    assert page.locator("#table-count").inner_text().startswith(f"{len(sinks)} of {LAYERS * HEADS}")
    page.locator(".card[data-kind=sink]").click()  # the same filter, from the answer
    assert len(rows(page)) == LAYERS * HEADS
    page.fill("#query", "previous token")
    assert rows(page) == [(i, j) for i in range(LAYERS) for j in range(HEADS) if sort_of(i, j) == "previous"]
    page.fill("#query", "l2 h3")
    assert rows(page) == [(2, 3)]
    page.fill("#query", "nothing like it")
    assert "No head matches" in page.locator("#table").inner_text()
    page.locator("#clear").click()
    page.select_option("#layer", "1")
    assert rows(page) == [(1, head) for head in range(HEADS)]


def test_figures_leave_as_svg_and_png(visit):
    page = visit("two")
    choose(page, "rank95")
    for figure in ("map", "spectrum", "weights", "differences", "scatter"):
        buttons = page.locator(f"#figure-{figure} .exports button")
        name, content = saved(page, buttons.nth(0))
        drawing = ElementTree.fromstring(content)
        assert name.endswith(".svg") and drawing.tag == SVG + "svg"
        assert drawing.find(SVG + "title").text and len(drawing.findall(f".//{SVG}text")) > 2
        assert b"var(" not in content and b"class=" not in content  # colours are written out
        name, content = saved(page, buttons.nth(1))
        width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
        assert name.endswith(".png") and content.startswith(b"\x89PNG") and min(width, height) > 300
    _, content = saved(page, page.locator("#figure-map .exports button").first)
    assert content.count(b"<rect") > LAYERS * HEADS


def test_the_csv_has_the_rows_that_are_shown(visit):
    page = visit()
    page.locator(".chip[data-kind=positional]").click()
    name, content = saved(page, page.locator("#csv"))
    found = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))))
    shown = [(i, j) for i in range(LAYERS) for j in range(HEADS) if sort_of(i, j) == "previous"]
    assert name == "trained-heads.csv"
    assert [(int(row["length"]), int(row["layer"]), int(row["head"])) for row in found] == [
        (length, *place) for length in (64, 128) for place in shown
    ]
    assert all(float(row["rank95_low"]) <= float(row["rank95"]) <= float(row["rank95_high"]) for row in found)


def test_the_language_can_be_switched(visit):
    page = visit()
    cell(page, 1, 2).click()
    page.locator("[data-language=zh]").click()
    assert page.locator("html").get_attribute("lang") == "zh"
    assert page.title() == "trained 的注意力头" and title(page) == "第 1 层第 2 头"
    words = page.locator("main").inner_text()
    assert "有效秩" in words and "哪些可以更省" in words
    english = re.findall(
        r"\b(?:the|heads?|tokens?|weights?|layers?|random|interval)\b", words.replace("model.layers", "")
    )
    assert english == []
    page.locator("[data-language=en]").click()
    assert title(page) == "Layer 1, head 2"
    assert not re.search(r"[\u4e00-\u9fff]", page.locator("main").inner_text())


@pytest.mark.parametrize("system", ["light", "dark"])
def test_colours_follow_the_system_and_the_switch(visit, system):
    page = visit(color_scheme=system)
    paper = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    colours = {}
    for choice in ("light", "dark", "auto"):
        page.locator(f"[data-theme-choice={choice}]").click()
        colours[choice] = paper()
        assert page.locator(f"[data-theme-choice={choice}]").get_attribute("aria-pressed") == "true"
    assert colours["light"] != colours["dark"] and colours["auto"] == colours[system]


def test_text_stands_out_from_its_ground(visit):
    """4.5 : 1, as WCAG 2 AA asks, for ink and soft ink on every ground of both colour schemes."""
    page = visit()
    ratio = """([ink, ground]) => {
        const probe = document.body.appendChild(document.createElement("i"));
        const light = (name) => {
            probe.style.color = `var(${name})`;
            const shown = getComputedStyle(probe).color.match(/[\\d.]+/g).map((x) => Number(x) / 255);
            const [r, g, b] = shown.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
        probe.remove();
        return (a + 0.05) / (b + 0.05);
    }"""
    for choice in ("light", "dark"):
        page.locator(f"[data-theme-choice={choice}]").click()
        for ink in ("--ink", "--soft", "--accent"):
            for ground in ("--paper", "--sheet", "--well"):
                assert page.evaluate(ratio, [ink, ground]) >= 4.5, (choice, ink, ground)


def test_tokens_show_on_the_weights_and_stay_text(visit):
    page = visit()
    picture = page.locator("#figure-weights svg")
    picture.focus()
    seen = ""
    for _ in range(12):
        picture.press("ArrowDown")
        seen += page.locator("#figure-weights .readout").inner_text()
    assert HOSTILE in seen and "<b>" in seen and "weight" in seen
    assert page.locator("#figure-weights .readout script, #figure-weights .readout b").count() == 0
    caption = "First text, 128 tokens. 48 × 48 cells of 2.7 tokens a side; each shows its mean weight"
    assert caption in page.locator("#figure-weights").inner_text()
    box = picture.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert re.search(r"Query\s+\d+", page.locator("#figure-weights .readout").inner_text())


def test_lengths_can_be_chosen_and_growth_is_drawn(visit):
    page = visit()
    choose(page, "rank95")
    before = page.locator("#panel .numbers").inner_text()
    page.select_option("#length", label="64 tokens")
    assert page.locator("#panel .numbers").inner_text() != before
    assert "∝ N^0." in page.locator("#figure-growth").inner_text()
    assert page.locator("#growth-table tbody tr").count() == 5  # four kinds and all


def test_two_scans_are_compared_head_by_head(visit):
    page = visit("two")
    choose(page, "rank95")
    section = page.locator("#compare-section")
    assert section.locator("h2").inner_text() == "Differences, head by head"
    words = page.locator("#compare-words").inner_text()
    up, everything, down, flat = map(
        int, re.search(r"in (\d+) of (\d+) heads and lower in (\d+); for (\d+)", words).groups()
    )
    assert everything == LAYERS * HEADS == up + down + flat and down > up
    marks = page.locator("#figure-differences [role=gridcell] circle").count()
    assert marks == up + down
    cell(page, 1, 3, "figure-differences").click()
    assert title(page) == "Layer 1, head 3"
    page.locator("#figure-scatter .mark").first.click(force=True)
    assert title(page) != "Layer 1, head 3"
    assert "in untrained" in page.locator("#figure-spectrum").inner_text()
    assert page.locator("#compare-kinds td").count() == 16


def test_a_scan_that_lacks_much_is_shown_as_far_as_it_goes(visit):
    page = visit("uneven", viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("h1").inner_text().startswith("<i>a-long-name")
    assert page.locator("#figure-map [role=gridcell]").count() == 2 * 4 + 4 * 8
    assert "no random head was measured" in page.locator(".answer").inner_text()
    assert "One text only" in page.locator("#panel").inner_text()
    assert page.locator("#growth-section").is_hidden()
    page.fill("#query", "cross")
    assert {layer for layer, _ in rows(page)} == {4, 5}
    page.fill("#query", "")
    cell(page, 0, 3).click()
    page.keyboard.press("PageDown")
    assert title(page) == "Layer 5, head 3"
    cell(page, 3, 7).click()
    panel = page.locator("#panel").inner_text()
    assert "No spectrum was kept" in panel and "No picture of this head was kept" in panel


@pytest.mark.parametrize("width", [390, 768])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_narrow_screens_scroll_one_way_only(visit, width, language):
    page = visit("two", viewport={"width": width, "height": 844})
    page.locator(f"[data-language={language}]").click()
    choose(page, "rank95")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    clipped = page.evaluate(
        """() => [...document.querySelectorAll(".figure svg text")].filter(e => { const b = e.getBoundingClientRect();
        return b.width && (b.left < -1 || b.right > innerWidth + 1); }).map(e => e.textContent)"""
    )
    assert clipped == []


# ---- the answer, and what stands beside it


def answer_of(page):
    """The sentences of the first screen, as the reader sees them."""
    return " ".join(page.locator(".answer").inner_text().split())


def test_cards_and_map_agree_on_the_length(visit):
    page = visit("lengths")
    counts = lambda: [int(x.split()[0]) for x in page.locator(".card-count").all_inner_texts()]  # noqa: E731
    texts = lambda: page.locator("#figure-map svg text").all_text_contents()  # noqa: E731
    legend = lambda: [int(x.split()[-1]) for x in texts() if re.search(r"[a-z] \d+$", x)]  # noqa: E731
    seen = []
    for length in ("128 tokens", "64 tokens"):
        page.select_option("#length", label=length)
        assert length in page.locator("#cards-head").inner_text() and length in page.locator("#figure-map").inner_text()
        assert counts() == legend()
        seen.append(counts())
    assert seen[0] != seen[1]


def test_the_weights_are_those_of_the_chosen_length(visit):
    page = visit()
    drawn = lambda: page.locator("#figure-weights image").get_attribute("href")  # noqa: E731
    at = {}
    for length in (64, 128):
        page.select_option("#length", label=f"{length} tokens")
        assert f"First text, {length} tokens" in page.locator("#figure-weights").inner_text()
        at[length] = drawn()
    assert at[64] != at[128]
    for _ in range(48):
        page.locator("#figure-weights svg").press("ArrowDown")
    assert re.search(r"Query 12[56]–127", page.locator("#figure-weights .readout").inner_text())


def test_texts_that_were_measured_are_counted_and_missed_precision_is_said(visit):
    page = visit("short")
    said = answer_of(page)
    assert "was not reached: that takes 5 texts at least, and 3 of 9 were measured. Resume the scan." in said
    assert "Measured on 3 texts of 64 tokens" in said
    facts = page.locator("#facts").inner_text()
    assert "3 of 9 measured" in facts and "Text 2" in facts and "Text 3" not in facts
    page.locator("[data-language=zh]").click()
    assert "未达到要求的精度" in answer_of(page) and "已测 9 篇中的 3 篇" in page.locator("#facts").inner_text()


def test_a_name_never_stands_without_the_number_that_it_rests_on(visit):
    page = visit("lengths")
    page.select_option("#length", label="128 tokens")
    data = page.evaluate("SCAN.blocks[state.at]")
    for at, label in enumerate(data["label"]):
        page.evaluate(f"select({at})")
        said = page.locator(".panel-head").inner_text()
        score = data["label_score"][at]
        assert f"{score:.2f}" in said
        assert ("no simple pattern explains half" in said) == (label == "content") == (score < 0.5)
    assert data["kind_of_head"][1] == "positional" and data["label"][1] == "uniform" and data["position_share"][1] < 0.2
    page.evaluate("select(1)")
    assert "Fixed pattern" in page.locator(".panel-head").inner_text()
    assert "by position" not in page.locator("main").inner_text().lower()


def test_a_comparison_opens_with_the_comparison(visit):
    page = visit("two")
    assert page.title() == "trained against untrained: attention heads"
    assert page.locator("h1").inner_text() == "trained against untrained"
    opening = page.locator(".opening").inner_text()
    down, everything, up, flat = map(
        int, re.search(r"(\d+) of (\d+) heads have a lower .* and (\d+) a higher one; for (\d+) ", opening).groups()
    )
    assert everything == LAYERS * HEADS == up + down + flat and down > up
    assert (
        f"in {up} of {everything} heads and lower in {down}; for {flat}" in page.locator("#compare-words").inner_text()
    )
    order = page.evaluate("[...document.querySelectorAll('section[id]')].map(s => s.id)")
    assert order[0] == "compare-section"
    page.locator("[data-language=zh]").click()
    assert page.locator("h1").inner_text() == "trained 与 untrained 对比"


def test_a_link_leads_to_one_head(visit):
    page = visit(anchor="#L2H3", reduced_motion="reduce")  # no smooth scrolling
    assert title(page) == "Layer 2, head 3"
    assert -5 <= page.locator("#panel").bounding_box()["y"] < 900
    cell(page, 1, 2).click()
    assert page.evaluate("location.hash") == "#L1H2"
    assert page.locator("#head-link").get_attribute("href") == "#L1H2"
    page.evaluate("location.hash = '#l0h1'")
    page.locator("#panel-title", has_text="Layer 0, head 1").wait_for()
    assert title(visit(anchor="#L9H9")) == "Layer 0, head 0"  # no such head
    assert title(visit()) == "Layer 0, head 0"


def test_every_rank_has_its_certified_bounds_beside_it(visit):
    page = visit("lengths")
    cell(page, 1, 0).click()
    data = page.evaluate("[SCAN.blocks[state.at], state.head]")
    for name in ("rank90", "rank95"):
        low, high = (data[0][f"{name}_certified_{side}"][data[1]] for side in ("low", "high"))
        shown = page.locator(f"#panel tr.sub[data-of={name}], #under-map tr.sub[data-of={name}]").inner_text()
        digits = lambda x: f"{x:.0f}" if x >= 99.95 else f"{x:.1f}"  # noqa: E731
        assert low < high and f"{digits(low)} – {digits(high)}" in shown
        assert f"{digits(low)} – {digits(high)}" in page.locator("#table tr[aria-selected=true]").inner_text()
    choose(page, "rank90")
    assert "certified: " in cell(page, 1, 0).get_attribute("aria-label")
    cell(page, 0, 0).click()
    assert "exact" in page.locator("#panel tr.sub[data-of=rank90], #under-map tr.sub[data-of=rank90]").inner_text()


def test_no_colour_of_a_number_looks_like_the_page_and_what_is_missing_is_hatched(visit):
    """Distances in RGB; the lines of a hatch and its entry in the legend say that nothing was measured."""
    page = visit("two")
    apart = """() => {
        const paper = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
        const far = (c) => Math.hypot(...c.map((x, i) => x - paper[i]));
        const along = (stops) => [...Array(41).keys()].map((k) => far(ramp(stops, k / 40)));
        return [...KINDS.map((kind) => far(kindColour(kind))), ...along(scaleStops()), ...along(apart())];
    }"""
    for choice in ("light", "dark"):
        page.locator(f"[data-theme-choice={choice}]").click()
        assert min(page.evaluate(apart)) > 60, choice
    assert page.locator("#figure-map .hatch").count() == 0
    choose(page, "decay")
    missing = sum(sort_of(i, j) == "previous" for i in range(LAYERS) for j in range(HEADS))
    assert page.locator("#figure-map [role=gridcell] .hatch").count() == missing
    assert "not measured" in page.locator("#figure-map").inner_text()


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_term_is_explained_where_it_stands(visit, name, language):
    page = visit(name)
    page.locator(f"[data-language={language}]").click()
    names = page.locator("#panel .numbers tbody th, #under-map .numbers tbody th")
    assert names.count() == page.locator(".numbers tbody th .term").count() > 15
    terms = page.locator(".term")
    for at in range(terms.count()):
        terms.nth(at).focus()
        shown = page.locator("#tip")
        assert shown.is_visible() and len(shown.inner_text()) > 8
    headers = page.locator("#table thead button")
    for at in range(2, headers.count()):  # layer and head need no words
        headers.nth(at).focus()
        assert page.locator("#tip").is_visible() and len(page.locator("#tip").inner_text()) > 8
    listed = page.locator("#table-terms dt").all_inner_texts()
    for header in headers.all_inner_texts()[4:]:
        assert header.startswith("Δ") or header.rstrip("↓↑") in listed
    said = answer_of(page)
    words = {"en": ("the number of singular values", "sum of its squared weights"), "zh": ("奇异值个数", "平方和")}
    assert all(word in said for word in words[language])
    if name == "one":
        assert {"en": "the scores before the softmax", "zh": "softmax 之前的分数"}[language] in said


def test_the_growth_that_is_drawn_is_the_one_that_is_told(visit, reports):
    scan = Scan.open(reports / "a")
    page = visit()
    choose(page, "rank90")
    told = re.search(r"grows as N\^(\d\.\d+).*random heads as N\^(\d\.\d+)", answer_of(page))
    drawn = page.locator("#figure-growth svg").get_attribute("aria-label")
    assert f"mean of heads ∝ N^{told[1]}" in drawn and f"random head ∝ N^{told[2]}" in drawn
    assert told[1] == f"{float(scan.trend().mean):.2f}"
    last = page.locator("#growth-table tbody tr").last.inner_text().split()
    mean = re.search(r"Its mean over heads is ([\d.]+)", answer_of(page))[1]
    assert last[-2:] == [mean, told[1]]
