"""A report as text: whole, small, safe, and true to its records."""

from __future__ import annotations

import contextlib
import io
import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

pl = pytest.importorskip("polars")

from synthetic import HOSTILE, synthetic  # noqa: E402

from heedful.report import write  # noqa: E402
from heedful.report.page import html  # noqa: E402
from heedful.report.shell import LANGUAGES, embed, page, say  # noqa: E402

VOID = {"meta", "link", "input", "path", "br", "img"}


class Outline(HTMLParser):
    """Every tag is closed where it should be; scripts and ids are noted."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.scripts, self.ids, self.sources = [], [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.sources += [given[name] for name in ("src", "href") if name in given]
        if tag == "script":
            self.scripts.append([given.get("type"), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes what is not open"

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][1] += text


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("scan") / "run")


@pytest.fixture(scope="module")
def text(scan):
    return html(scan)


@pytest.fixture(scope="module")
def data(text):
    return json.loads(next(body for kind, body in outline(text).scripts if kind == "application/json"))


def test_the_page_is_whole_and_points_nowhere(text):
    found = outline(text)
    assert len(found.ids) == len(set(found.ids))
    assert set(found.sources) == {"#main", "data:,"}
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)


def test_tokens_of_markup_stay_data(text, data):
    found = outline(text)
    assert [kind for kind, _ in found.scripts] == ["application/json", None]
    assert HOSTILE not in text and "\u2028" not in text
    assert HOSTILE in data["scans"][0]["tokens"][0]


def test_a_model_named_in_markup_stays_text(tmp_path):
    scan = synthetic(tmp_path / "run", name='<img src=y onerror="alert(1)">', lengths=(64,))
    for against in (None, scan):
        assert set(outline(html(scan, against=against)).sources) == {"#main", "data:,"}


def test_the_policy_names_the_one_script(text):
    from base64 import b64encode
    from hashlib import sha256

    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    script = outline(text).scripts[1][1]
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy


def test_numbers_are_those_of_the_table(scan, data):
    table = scan.table()
    for at, length in enumerate(data["scans"][0]["lengths"]):
        block, part = data["scans"][0]["blocks"][at], table.filter(pl.col("length") == length).sort("layer", "head")
        for name in ("rank95", "rank95_low", "rank95_high", "rank90_certified_low", "sink", "base_rank95"):
            assert block[name] == pytest.approx(part[name].to_list(), rel=5e-4)
        assert block["kind_of_head"] == part["kind_of_head"].to_list()
        assert block["decay"][0] is None and part["decay"][0] is None


def test_both_languages_say_the_counts(scan, text):
    longest = scan.table().filter(pl.col("length") == 128)
    counts = dict(longest["kind_of_head"].value_counts().iter_rows())
    opening = re.search(r'<p class="opening">(.*?)</p>', text)[1]
    for code in LANGUAGES:
        sentence = re.search(rf'<span lang="{code}">(.*?)</span>', opening)[1]
        assert sorted(map(int, re.findall(r"\d+", sentence))) == sorted([128, len(longest), *counts.values()])


def test_words_of_the_page_are_in_both_languages(data):
    def walk(node, path=""):
        if isinstance(node, dict):
            if "en" in node or "zh" in node:
                assert node.get("en") and node.get("zh"), path
                holes = [set(re.findall(r"\{\w+\}", str(node[code]))) for code in ("en", "zh")]
                assert holes[0] == holes[1], path
            for key, value in node.items():
                walk(value, f"{path}/{key}")

    walk(data["text"])
    assert all(measure["en"] and measure["zh"] for measure in data["text"]["measures"])


class Grown:
    """The heads of a small scan over and over, as a model of 30 layers × 32 heads."""

    def __init__(self, scan):
        self.scan, self.manifest = scan, scan.manifest

    def _tiled(self, frame):
        own = frame.filter((pl.col("layer") < 2) & (pl.col("head") < 4))
        places = [(layer, head) for layer in range(15) for head in range(8)]
        shift = lambda layer, head: own.with_columns(pl.col("layer") + 2 * layer, pl.col("head") + 4 * head)  # noqa: E731
        return pl.concat([shift(layer, head) for layer, head in places])

    def table(self):
        return self._tiled(self.scan.table())

    def thumbnails(self):
        return self._tiled(self.scan.thumbnails())

    def compare(self, other):
        return self._tiled(self.scan.compare(other.scan))

    def answer(self, language, *, against=None):
        return self.scan.answer(language, against=against and against.scan)

    def __getattr__(self, name):
        return getattr(self.scan, name)  # rows, means and trends, which are over all heads


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    lengths = (256, 512, 1024, 2048)
    return Grown(synthetic(tmp_path_factory.mktemp("scan") / "run", layers=2, texts=2, lengths=lengths))


def test_a_report_of_30_by_32_heads_at_four_lengths_is_under_5_mb(grown):
    text = html(grown)
    assert len(grown.table()) == 4 * 960
    assert len(text.encode()) < 5_000_000


def test_two_scans_of_30_by_32_heads_fit_too(grown):
    one = Grown(grown.scan)
    one.table = lambda: grown.table().filter(pl.col("length") == 512)
    assert len(html(one, against=one).encode()) < 5_000_000


def test_two_large_scans_pool_their_pictures():
    from heedful.report.data import _picture, _shrink

    frame = pl.DataFrame({"cells": [list(range(48)) * 48] * 960})
    assert _shrink([frame]) == 1 and _shrink([frame, frame]) == 2
    row = {"height": 3, "width": 3, "cells": [255, 0, 0, 0, 0, 0, 0, 0, 255], "scale": 1.0, "tokens_per_cell": 2.0}
    found = _picture({**row, "pooling": "mean"}, 2)
    assert (found["rows"], found["columns"], found["per"], found["pooling"]) == (2, 2, 4, "mean")
    assert found["cells"] == "gAA/"  # a quarter of 255 is 64, whose root is half; the corner has one cell


def test_a_page_is_written_whole_or_not_at_all(scan, tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.html"
    assert write(scan, path) == path
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"report.html: the report can't be written \(No space left"):
        write(scan, path, language="zh")
    assert path.read_text(encoding="utf-8") == before
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_a_place_that_takes_no_file_gets_a_sentence(scan, tmp_path):
    with pytest.raises(OSError, match=r"the report can't be written \(it is a folder"):
        write(scan, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Give a file in a folder of your own"):
        write(scan, tmp_path / "file" / "report.html")


def test_a_folder_that_is_read_only_gets_a_sentence(scan, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("heedful.store.log.flush", refuse)  # root may write anywhere
    with pytest.raises(PermissionError, match=r"report.html: the report can't be written \(Permission denied\)"):
        write(scan, tmp_path / "report.html")


def test_a_language_that_there_is_not_is_refused(scan):
    with pytest.raises(ValueError, match="'fr': pages are written in 'en', 'zh'"):
        html(scan, language="fr")


def test_a_script_that_would_end_itself_is_refused():
    title = {"en": "a", "zh": "b"}
    with pytest.raises(ValueError, match="script holds '</script'"):
        page(title, "", "", "'</SCRIPT>'", {})
    with pytest.raises(ValueError, match="css holds"):
        page(title, "", "</style>", "", {})


@pytest.mark.parametrize("token", ["<", "</script>", "&amp;", "\u2028", "\ud800", "<!--", "\x00", "🙂"])
def test_any_token_survives_the_way_into_the_page(token):
    text = embed({"token": token})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text)["token"] == token
    text.encode("utf-8")


def test_text_is_escaped_in_both_languages():
    assert say({"en": "<b>", "zh": "&"}) == '<span lang="en">&lt;b&gt;</span><span lang="zh">&amp;</span>'


def test_scans_without_a_common_text_are_compared_unpaired(scan, tmp_path):
    other = synthetic(tmp_path / "run", name="other", salt=b"others")
    text = html(scan, against=other)
    found = json.loads(next(body for kind, body in outline(text).scripts if kind == "application/json"))
    assert found["pairs"] == [{}, {}] and len(found["scans"]) == 2


def test_paired_differences_are_those_of_the_scans(scan, tmp_path):
    other = synthetic(tmp_path / "run", name="other", shift=1.2)
    text = html(scan, against=other)
    found = json.loads(next(body for kind, body in outline(text).scripts if kind == "application/json"))
    truth = scan.compare(other).filter(pl.col("length") == 128).sort("layer", "head")
    assert found["pairs"][1]["rank95"] == pytest.approx(truth["rank95"].to_list(), rel=5e-4)
    assert found["pairs"][1]["rank95_low"] == pytest.approx(truth["rank95_low"].to_list(), rel=5e-4)


# ---- one answer everywhere


def told_in_the_terminal(scan) -> str:
    from heedful.cli.scan_terminal import print_scan

    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_scan(scan, width=4000)
    return out.getvalue()


def told_on_the_page(text: str, code: str) -> str:
    answer = text[text.index('<section class="answer"') : text.index("</section>")]
    return " ".join(unescape(each) for each in re.findall(rf'<span lang="{code}">(.*?)</span>', answer))


@pytest.mark.parametrize("precision", [None, 0.001, 0.9])
def test_terminal_page_and_words_say_the_same_sentences_and_numbers(tmp_path, precision):
    scan = synthetic(tmp_path / "run", texts=6, precision=precision)
    text, terminal = html(scan), told_in_the_terminal(scan)
    for code in LANGUAGES:
        words, page_says = scan.words(code), told_on_the_page(text, code)
        found = scan.answer(code)
        sentences = [found.lead, *found.more, *found.notes, *dict(found.kinds).values(), found.caveat]
        assert len(sentences) > 8 and len(found.notes) == (precision is not None)
        for sentence in sentences:
            assert sentence in words and sentence in page_says
            assert code != "en" or sentence in terminal
        assert "".join(sentences).replace(" ", "") == re.sub(r"\s", "", words.replace("\u202f", "\x00")).replace(
            "\x00", "\u202f"
        )
    mean, growth = scan.mean("rank90"), scan.trend("rank90")
    for said in (scan.words(), told_on_the_page(text, "en"), terminal):
        assert f"Its mean over heads is {float(mean.mean):.1f} of 128" in said
        assert f"interval {float(mean.low):.1f} to {float(mean.high):.1f})" in said
        assert f"it grows as N^{float(growth.mean):.2f} (95" in said
        assert ("was not reached" in said) == (precision == 0.001) and ("was reached" in said) == (precision == 0.9)


def test_a_comparison_says_the_same_everywhere(tmp_path):
    scan = synthetic(tmp_path / "run", name="trained")
    other = synthetic(tmp_path / "run" / "against", name="untrained", shift=1.3, seed=1)
    text, terminal = html(scan, against=other), told_in_the_terminal(scan)
    for code in LANGUAGES:
        found = scan.answer(code, against=other)
        for sentence in (found.lead, *found.more, *dict(found.kinds).values()):
            assert sentence in told_on_the_page(text, code) and (code != "en" or sentence in terminal)
    assert scan.words() in terminal and other.words() in terminal
    table = scan.compare(other).filter(pl.col("length") == 128)
    lower, higher = (table["rank90_high"] < 0).sum(), (table["rank90_low"] > 0).sum()
    assert f"{lower} of 12 heads have a lower effective rank in trained than in untrained and {higher} a" in terminal


def test_what_a_window_leaves_out_is_measured(scan):
    own = scan.table().filter((pl.col("length") == 128) & (pl.col("kind_of_head") == "sink"))
    share = round(100 * own["first"].mean())
    sentence = dict(scan.answer("en").kinds)["sink"]
    assert (
        f"the first four tokens hold {share}\u202f%" in sentence
        and f"leave out {100 - share}\u202f% at most" in sentence
    )
    assert "loses little" not in html(scan)


def test_a_label_is_scored_over_the_texts_that_give_it(tmp_path):
    scan = synthetic(tmp_path / "run", texts=3, lengths=(64,))
    rows = scan.rows.with_columns(
        label=pl.when(pl.col("text") == "0002").then(pl.lit("content")).otherwise("label"),
        label_score=pl.when(pl.col("text") == "0002").then(0.1).otherwise("label_score"),
    )
    object.__setattr__(scan, "rows", rows)
    table = scan.table().filter(pl.col("kind_of_head") == "positional")
    assert len(table) and set(table["label_texts"]) == {2} and set(table["label"]) == {"previous"}
    assert table["label_score"].min() > 0.8


def test_every_sentence_is_in_both_languages_with_the_same_numbers():
    from heedful.scan.phrases import CHINESE, ENGLISH

    assert ENGLISH.keys() == CHINESE.keys()
    for name in ENGLISH:
        holes = [set(re.findall(r"\{(\w+)\}", phrases[name])) for phrases in (ENGLISH, CHINESE)]
        assert holes[0] == holes[1], name
