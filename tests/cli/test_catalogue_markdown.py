"""The catalogue as Markdown is a table that renders, with links that lead somewhere."""

import re

import pytest

from heedful.cli.catalogue_markdown import _escaped, _linked, catalogue_markdown
from heedful.mechanisms import CATALOG, Paper


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_entry_has_a_row_and_every_row_as_many_cells(language):
    lines = catalogue_markdown(language).splitlines()
    assert [cells(line)[0] for line in lines[2:]] == [f"`{name}`" for name in CATALOG]
    assert {len(cells(line)) for line in lines} == {7}
    assert all(line == line.strip() and all(cells(line)) for line in lines)


def test_only_the_headings_are_translated():
    english, chinese = (catalogue_markdown(language).splitlines() for language in ("en", "zh"))
    assert english[1:] == chinese[1:] and english[0] != chinese[0]


def test_one_family_alone():
    lines = catalogue_markdown(family="exact").splitlines()[2:]
    assert [cells(line)[0] for line in lines] == [f"`{name}`" for name in CATALOG if CATALOG[name].family == "exact"]


@pytest.mark.parametrize(
    ("where", "address"),
    [
        ("arXiv:1706.03762", "https://arxiv.org/abs/1706.03762"),
        ("arXiv:1706.03762, eq. 1", "https://arxiv.org/abs/1706.03762"),
        ("arXiv:cs/0112017", "https://arxiv.org/abs/cs/0112017"),
        ("kexue.fm/archives/9889", "https://kexue.fm/archives/9889"),
        ("doi:10.1000/182", "https://doi.org/10.1000/182"),
    ],
)
def test_papers_are_linked(where, address):
    assert _linked(Paper("Doe et al.", 2020, where)) == f"[Doe et al. 2020, {where}]({address})"


def test_a_paper_without_an_address_is_plain_text():
    assert _linked(Paper("Doe", 2020, "NeurIPS, p. 1")) == "Doe 2020, NeurIPS, p. 1"


def test_what_markdown_would_read_as_its_own_is_escaped():
    assert _escaped("a|b*c_d") == r"a\|b\*c\_d"
