"""The facts of a page, and the mathematics it finds in a module."""

import subprocess
import sys

import pytest

from heedful.cli.mechanism_facts import Page, read_mathematics
from heedful.mechanisms import CATALOG


@pytest.mark.parametrize("indent", ["", "    "])
def test_the_mathematics_is_found_however_a_formatter_left_it(indent):
    table = f"{indent}matrix  A_ij = 1,  j ≤ i\n{indent}        z = 2\n{indent}cost    n"
    rows = [("matrix", "A_ij = 1,  j ≤ i"), ("", "z = 2"), ("cost", "n")]
    assert read_mathematics(f"One\nsentence.\n\n{table}\n") == (["One sentence."], rows)
    assert read_mathematics(f"Title.\n\n{table}\n\nMore here.") == (["Title.", "More here."], rows)


@pytest.mark.parametrize("entry", CATALOG.values(), ids=list(CATALOG))
def test_every_mechanism_opens_with_its_mathematics(entry):
    _, mathematics = Page(entry, {}, n=256, d=64, heads=1, tokens=32, seed=0).document
    labels = [label for label, _ in mathematics]
    assert labels[0] == "matrix" and "cost" in labels


def test_the_facts_are_told_without_rich():
    parts = "heedful.cli.catalogue_markdown, heedful.cli.options, heedful.cli.mechanism_facts"
    code = f"import sys, {parts}; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
