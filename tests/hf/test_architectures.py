"""The table of all architectures in docs/models.md is that of the results; none is wrong; risky ones are run again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")
pytest.importorskip("polars", reason="polars is not installed: pip install 'heedful[report]'")

FILE = Path(__file__).parents[2] / "benchmarks" / "architectures.py"

RISKY = ["swin", "patchtst", "diffllama", "gpt_oss", "falcon", "bloom", "deberta-v2", "mamba"]
CHANGING = ["siglip", "vit_mae"]
"""A pooling head and random masks, which may be refused or measured."""


@pytest.fixture(scope="module")
def architectures():
    spec = importlib.util.spec_from_file_location("architectures", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_the_results(architectures):
    page = architectures.PAGE.read_text(encoding="utf-8")
    wanted = architectures.table(architectures.read_results())
    assert architectures.TABLE.search(page)[2] == wanted, "run python benchmarks/architectures.py --page"


def test_no_architecture_is_wrong(architectures):
    rows = architectures.read_results()
    assert [name for name, row in rows.items() if row["verdict"] == "wrong"] == []
    assert sum(row["verdict"] in ("exact", "refused") for row in rows.values()) >= 250
    assert all(row["why"] for row in rows.values() if row["verdict"] != "exact")


@pytest.mark.parametrize("name", RISKY)
def test_the_verdict_on_a_risky_one_is_that_of_the_results(architectures, name):
    found, recorded = architectures.attempt(name), architectures.read_results()[name]
    assert {key: found.get(key) for key in ("verdict", "why", "calls", "items")} == {
        key: recorded.get(key) for key in ("verdict", "why", "calls", "items")
    }


@pytest.mark.parametrize("name", CHANGING)
def test_one_that_may_be_refused_is_not_wrong(architectures, name):
    assert architectures.attempt(name)["verdict"] in ("exact", "refused")


@pytest.mark.parametrize("column", ["energy", "entropy"])
def test_a_scan_of_the_first_item_alone_is_called_wrong(architectures, column, monkeypatch):
    """The verdict can come out the other way."""
    from heedful.scan import heads

    monkeypatch.setattr(heads, "over_items", lambda rows: {**rows[-1], column: rows[0][column]})
    found = architectures.attempt("patchtst")
    assert found["verdict"] == "wrong" and "in the scan" in found["why"]
