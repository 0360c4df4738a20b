"""Extraction, alignment, cleaning and splitting of parallel text, on files made here."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import tarfile

import pytest

pytest.importorskip("tokenizers")

from heedful.studies.corpora import packages
from heedful.studies.corpora.__main__ import from_files, main, small
from heedful.studies.corpora.clean import WORD, is_clean, split, unique
from heedful.studies.corpora.collect import Pair, collect
from heedful.studies.corpora.extract import catalogue, manual, page, pair_blocks, pair_sentences
from heedful.studies.data import load


def compiled(messages: dict[str, str]) -> bytes:
    """A .mo file as the gettext manual describes it."""
    keys = sorted(messages)
    strings = [text.encode() for text in (*keys, *(messages[key] for key in keys))]
    start = 28 + 8 * len(strings)
    table, body = b"", b""
    for text in strings:
        table += struct.pack("<II", len(text), start + len(body))
        body += text + b"\0"
    head = struct.pack("<IIIIIII", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    return head + table + body


def test_messages_come_without_contexts_plurals_and_menu_keys():
    content = compiled({"": "header", "menu\4_Open <b>file</b>": "Datei ö_ffnen", "%d file\0%d files": "a\0b"})
    assert list(catalogue(content)) == [("%d file", "a"), ("Open file", "Datei öffnen")]
    with pytest.raises(ValueError, match="magic number"):
        list(catalogue(b"text, not a catalogue"))


def test_pages_pair_up_by_ids_or_by_structure():
    english = page(b"<h1>Title</h1><p>First one.</p><pre>code</pre><p>Second <b>one</b>.</p>")
    german = page(b"<h1>Titel</h1><p>Erster.</p><pre>code</pre><p>Zweiter <b>hier</b>.</p>")
    assert list(pair_blocks(german, english)) == [
        ("Titel", "Title"),
        ("Erster.", "First one."),
        ("Zweiter hier.", "Second one."),
    ]
    assert not list(pair_blocks(page(b"<h1>T</h1><p>Eins.</p>"), english))
    ours = page(b'<p id="b">Zwei.</p><p id="a">Eins.</p><p id="c">Drei.</p>')
    theirs = page(b'<p id="a">One.</p><p id="b">Two.</p>')
    assert sorted(pair_blocks(ours, theirs)) == [("Eins.", "One."), ("Zwei.", "Two.")]


ENGLISH = r""".TH LS 1
.SH NAME
ls \- list directory contents
.SH DESCRIPTION
List information about
.BR files ,
sorted.
.PP
Use the long format.
.nf
code here
.fi
.TP
\fB\-a\fR
do not ignore entries"""
GERMAN = r""".TH LS 1
.SH BEZEICHNUNG
ls \- Verzeichnisinhalte auflisten
.SH BESCHREIBUNG
Zeigt Informationen \(:uber \fBDateien\fP, sortiert.
.PP
Das lange Format verwenden.
.nf
code hier
.fi
.TP
\fB\-a\fP
Eintr\(:age nicht auslassen
.SH ÜBERSETZUNG
Von jemandem."""


def test_manuals_pair_up_section_by_section():
    pairs = list(pair_blocks(manual(GERMAN.encode()), manual(ENGLISH.encode())))
    assert ("Zeigt Informationen über Dateien, sortiert.", "List information about files, sorted.") in pairs
    assert ("Einträge nicht auslassen", "do not ignore entries") in pairs
    assert ("Das lange Format verwenden.", "Use the long format.") in pairs
    assert not any("code" in one or "jemandem" in one for one, _ in pairs)
    assert manual(b".Dd today\n.Sh NAME\ntext") == []


def test_sentences_pair_up_where_there_are_as_many():
    assert pair_sentences("Eins ist da, z.B. hier. Zwei auch.", "One is here. Two is too.") == [
        ("Eins ist da, z.B. hier.", "One is here."),
        ("Zwei auch.", "Two is too."),
    ]
    assert pair_sentences("Eins und zwei.", "One. Two.") == [("Eins und zwei.", "One. Two.")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Zu kurz.", "Too short."),
        ("Der Wert von %s ist hier falsch.", "The value of %s is wrong here."),
        ("Es gibt hier 3 neue Dateien.", "There are 4 new files here."),
        ("The same words on both sides.", "The same words on both sides again."),
        (
            "Dieser Satz ist sehr viel länger als der andere, der ihn übersetzt, und das geht so nicht.",
            "This is too short.",
        ),
        ("a b c d 0 1 2 3 4 5 6 7 8 9", "e f g h 0 1 2 3 4 5 6 7 8 9"),
    ],
)
def test_what_is_no_prose_or_no_translation_is_left_out(one, other):
    assert not is_clean(one, other)


def many(count: int = 400) -> list[Pair]:
    """Pairs of made-up words from four packages, of which some differ in a word alone."""
    pairs = []
    for at in range(count):
        words = [f"{'abcdefghij'[(at * k) % 10]}{chr(97 + at % 26)}{chr(97 + at // 26)}{chr(97 + k)}" for k in range(8)]
        pairs.append(Pair("prose", f"package{at % 4}", "page", " ".join(words), " ".join(w + "en" for w in words)))
        if at % 5 == 0:
            changed = [*words[:-1], "other" + chr(97 + at % 26) * 3]
            pairs.append(
                Pair("prose", f"package{(at + 1) % 4}", "page", " ".join(changed), " ".join(w + "en" for w in changed))
            )
    return pairs


def test_no_sentence_of_a_test_is_in_training_nor_one_like_it():
    parts = split(unique(many()), frozenset({"package3"}), size=30)
    assert [len(part) for part in parts[1:]] == [30, 30, 30, 30]
    tests = [pair for part in parts[1:] for pair in part]
    assert len({pair.other for pair in tests}) == 120
    assert all(pair.package != "package3" for pair in (*parts.train, *parts.dev, *parts.test))
    assert all(pair.package == "package3" for pair in (*parts.dev_unseen, *parts.test_unseen))

    def runs(text):
        words = WORD.findall(text.lower())
        return {tuple(words[i : i + 4]) for i in range(len(words) - 3)}

    for side in ("other", "english"):
        known = [runs(getattr(pair, side)) for pair in tests]
        for pair in parts.train:
            own = runs(getattr(pair, side))
            assert all(2 * len(own & its) < min(len(own), len(its)) for its in known)
    # The near-duplicates were there: without the tests they are training pairs.
    assert len(parts.train) < len([p for p in unique(many()) if p.package != "package3"]) - 60


def test_the_order_of_the_training_set_depends_on_the_sentences_alone():
    pairs = unique(many())
    assert split(pairs, frozenset()).train == split(pairs[::-1], frozenset()).train


def test_one_pair_is_kept_for_each_sentence_up_to_case_and_digits():
    pairs = [
        Pair("prose", "a", "x", "Eins Zwei 3.", "One two 3."),
        Pair("prose", "b", "x", "eins zwei 4", "Something else."),
        Pair("prose", "b", "x", "Etwas anderes.", "one, TWO!"),
    ]
    assert unique(pairs) == pairs[:1]


def test_the_small_corpus_has_200_pairs_and_disjoint_tests():
    parts = small()
    assert [len(part) for part in parts] == [160, 20, 20, 20, 20]
    assert not {p.other for p in parts.train} & {p.other for p in (*parts.dev, *parts.test)}


def test_files_of_a_user_work_the_same_way(tmp_path):
    pairs = unique(many())
    (tmp_path / "xx").write_text("".join(pair.other + "\n" for pair in pairs))
    (tmp_path / "en").write_text("".join(pair.english + "\n" for pair in pairs))
    command = ["--language", "xx", "--source", str(tmp_path / "xx"), "--target", str(tmp_path / "en")]
    assert main([*command, "--sizes", "100,all", "--out", str(tmp_path / "out")]) == 0
    corpus = load(tmp_path / "out" / "xx-100", "xx-en")
    assert len(corpus.splits["train"]) == 100 and corpus.card["languages"] == ["xx", "en"]
    (tmp_path / "en").write_text("one line\n")
    with pytest.raises(ValueError, match="1 as in"):
        from_files(tmp_path / "xx", tmp_path / "en")


def test_without_packages_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="--source FILE --target FILE"):
        packages.download(["manpages-de"], tmp_path)


def test_packages_are_read_without_being_installed(tmp_path, monkeypatch):
    """A page, a manual and a catalogue in two packages; `dpkg-deb` is stood in for by cat."""
    files = {
        "one": {
            "./usr/share/help/C/app/index.page": b"<p>Click the button.</p>",
            "./usr/share/man/man1/ls.1.gz": gzip.compress(ENGLISH.encode()),
            "./usr/share/doc/one/copyright": b"License: GPL-2+\n text",
        },
        "two": {
            "./usr/share/help/de/app/index.page": b"<p>Klicken Sie den Knopf.</p>",
            "./usr/share/man/de/man1/ls.1.gz": gzip.compress(GERMAN.encode()),
            "./usr/share/locale/de/LC_MESSAGES/app.mo": compiled({"No file": "Keine Datei"}),
            "./usr/share/locale/fr/LC_MESSAGES/app.mo": compiled({"No file": "Aucun fichier"}),
        },
    }
    found = []
    for name, content in files.items():
        path = tmp_path / f"{name}_1.0_all.deb"
        with tarfile.open(path, "w") as archive:
            for member, data in content.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        found.append(packages.Package(name, "1.0", path, ""))
    start = subprocess.Popen
    monkeypatch.setattr(packages.subprocess, "Popen", lambda command, **rest: start(["cat", command[-1]], **rest))
    pairs, licences = collect(found, "de")
    assert Pair("messages", "two", "usr/share/locale/de/LC_MESSAGES/app.mo", "Keine Datei", "No file") in pairs
    assert Pair("prose", "two", "usr/share/help/app/index.page", "Klicken Sie den Knopf.", "Click the button.") in pairs
    assert ("Das lange Format verwenden.", "Use the long format.") in {pair[3:] for pair in pairs}
    assert len(pairs) == 2 + len(list(pair_blocks(manual(GERMAN.encode()), manual(ENGLISH.encode()))))
    assert licences == {"one": ["GPL-2+"]}
