from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "hf")]  # tiny.py, zoo.py

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heedful[hf]'")
pytest.importorskip("polars", reason="polars is not installed: pip install 'heedful[report]'")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, saved as models are."""
    import tiny

    return tiny.saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model():
    import tiny

    return tiny.llama()
