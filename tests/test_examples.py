"""The examples run, and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = {
    "hybrid_layer.py": "heads with queries and keys: [7]",
    "packed_batch.py": "packed − alone",
    "streaming_decoder.py": "state after 200 tokens",
}


def test_every_example_is_here():
    assert {path.name for path in (Path(__file__).parents[1] / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, capsys):
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / name))
    assert EXAMPLES[name] in capsys.readouterr().out
