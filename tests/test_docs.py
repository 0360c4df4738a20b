"""The examples of the pages run, and print what they show."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [path.name for path in sorted(DOCS.glob("*.md")) if ">>> " in path.read_text(encoding="utf-8")]


def test_the_page_of_measures_has_examples():
    assert "measures.md" in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name):
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile(str(DOCS / name), module_relative=False, optionflags=options, encoding="utf-8")
    assert found.attempted and not found.failed
