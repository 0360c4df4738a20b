"""What the terminal shows keeps its shape."""

import pytest

from heedful.cli import terminal


def test_formulas_break_outside_innermost_brackets():
    folded = terminal.fold_formula(
        "A_ij = exp(z_ij / T) / (exp(sink / T) + Σ_{l visible} exp(z_il / T))", 30
    ).splitlines()
    assert all(len(line) <= 30 for line in folded)
    assert all(line.count("{") == line.count("}") for line in folded)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (999.6, "1 k"), (1234567, "1.23 M"), (2e15, "2 P")]
)
def test_amounts_have_three_digits_and_a_unit(count, text):
    assert terminal._amount(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (4096, "4 KiB"), (3 * 2**40, "3 TiB"), (2**50, "1024 TiB")])
def test_bytes_come_in_powers_of_1024(count, text):
    assert terminal._bytes(count) == text
