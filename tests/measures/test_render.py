"""How results are shown: text of 80 columns, tables, pages, charts and plain data, for every measurement."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import heedful as h
from heedful.measures.render import SHOWN

MEASURES = {
    "rows": lambda op: h.row_statistics(op, window=4),
    "concentration": h.concentration,
    "positions": h.positional_pattern,
    "heads": lambda op: h.head_measures(op, 4),
    "spectrum": lambda op: h.spectrum(op, 4),
    "rank": h.effective_rank,
}


def operator(*heads, n=40, pattern=None):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, *heads, n, 8, generator=generator).unbind()
    return h.Softmax(h.Causal() if pattern is None else pattern).operator(q, k)


@pytest.fixture(params=MEASURES)
def measure(request):
    return MEASURES[request.param]


@pytest.mark.parametrize("heads", [(), (3,), (2, 20)])
def test_a_result_prints_in_80_columns_a_line_a_head(measure, heads):
    lines = repr(measure(operator(*heads))).splitlines()
    assert max(map(len, lines)) <= 80
    shown = min(torch.Size(heads).numel(), SHOWN)
    assert len(lines) == 2 + shown + (shown == SHOWN)
    assert "tensor(" not in "".join(lines)


def test_columns_that_do_not_fit_go_below():
    x = torch.zeros(3, 40, 8)
    found = h.row_statistics(h.Softmax(h.Causal()).operator(x, x), offsets=(-10, -20, -30), window=3)
    wide = type(found)(**{**vars(found), "entropy": found.entropy / 3e5, "largest": -found.largest / 3e5})
    wide = type(found)(**{**vars(wide), "at_offset": -found.at_offset / 3e5, "first": -found.first / 3e9})
    lines = repr(wide).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 1 + 2 * 4
    assert lines[1].split()[0] == lines[5].split()[0] == "head" and "‖A‖" in lines[5]


def test_a_table_has_a_row_a_head_and_a_page_the_same_cells(measure):
    found = measure(operator(2, 3))
    head, rows = found.cells()
    assert found.__rich__().row_count == len(rows) == 6
    page = found._repr_html_()
    assert page.count("<tr>") == 7 and page.count("<th>") == len(head)
    assert all(f"<td>{cell}</td>" in page for row in rows for cell in row)


def test_data_are_plain(measure):
    found = measure(operator(2))
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_means_leave_out_queries_that_see_nothing():
    segments = torch.tensor([0] * 10 + [-1] * 30)
    x = torch.zeros(40, 8)
    op = h.Softmax(h.Full()).operator(x, x, segments=segments)
    columns = h.row_statistics(op).columns()
    torch.testing.assert_close(columns["entropy"].exp(), torch.tensor(10.0, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(columns["largest"], torch.tensor(0.1, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        h.concentration(op).columns()["S of rows"], torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_a_head_without_any_row_shows_a_dash():
    x = torch.zeros(4, 8)
    op = h.Softmax(h.Full()).operator(x, x, segments=torch.full((4,), -1))
    assert "—" in repr(h.row_statistics(op)) and "—" in repr(h.concentration(op))


def test_a_pattern_shows_its_name_and_the_next_best():
    x = torch.zeros(2, 50, 8)
    found = h.positional_pattern(h.FixedPattern("previous").operator(x, x))
    head, rows = found.cells()
    assert head == ["head", "pattern", "score", "margin", "next best", "its score"]
    assert [row[1] for row in rows] == ["previous", "previous"]
    assert rows[0][4] == "band"
    assert found.to_dict()["labels"] == ["previous", "previous"]


def test_names_are_escaped_in_a_page():
    found = h.positional_pattern(operator())
    named = type(found)(**{**vars(found), "names": ("<script>",) * len(found.names)})
    assert "<script>" not in named._repr_html_() and "&lt;script&gt;" in named._repr_html_()


@pytest.mark.parametrize("heads", [(), (2,)])
def test_a_plot_is_a_chart(measure, heads):
    pytest.importorskip("altair", reason="altair is not installed: pip install 'heedful[plot]'")
    found = measure(operator(*heads))
    chart = found.plot().to_dict()
    assert "$schema" in chart and "values" in json.dumps(chart)


def test_a_plot_of_rows_has_every_head_and_leaves_blind_queries_blank():
    pytest.importorskip("altair", reason="altair is not installed: pip install 'heedful[plot]'")
    x = torch.zeros(2, 6, 8)
    op = h.Softmax(h.Full()).operator(x, x, segments=torch.tensor([0, 0, 0, 0, -1, -1]))
    chart = h.row_statistics(op).plot().to_dict()
    points = chart.get("data", chart.get("spec", {}).get("data"))["values"]
    assert {point["head"] for point in points} == {"0", "1"}
    assert all((point["value"] is None) == (point["query"] >= 4) for point in points)


@pytest.mark.parametrize("name", ["rows", "concentration", "positions", "heads"])
def test_without_altair_a_plot_says_how_to_install_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ImportError, match=r"pip install 'heedful\[plot\]'"):
        MEASURES[name](operator()).plot()
