"""All of a head in one go: the same numbers as one measure after the other, by every route and from 16 bits too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import heedful as h
from heedful.kernels.row_statistics.sums import Request
from heedful.measures import search

ROUTES = {"exact": {}, "formed": {"EXACT": 0}, "not formed": {"EXACT": 0, "FORMED": 0}}


def inputs(*heads, n=96, d=8, dtype=torch.float32):
    q, k = torch.randn(2, *heads, n, d, generator=torch.Generator().manual_seed(0)).unbind()
    return (2 * q).to(dtype), k.to(dtype)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("mechanism", [h.Softmax(h.Causal()), h.Softmax(h.Window(9)), h.Linear(pattern=h.Causal())])
def test_all_in_one_is_one_after_the_other(route, mechanism, monkeypatch):
    for name, value in ROUTES[route].items():
        monkeypatch.setattr(search, name, value)
    op = mechanism.operator(*inputs(2))
    both = h.head_measures(op, 8, tau=(0.9, 0.95))
    rows, values = h.row_statistics(op), h.spectrum(op, 8, tau=(0.9, 0.95)).values
    torch.testing.assert_close(both.rows.entropy, rows.entropy)
    torch.testing.assert_close(both.rows.first, rows.first)
    torch.testing.assert_close(both.spectrum.values, values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.spectrum.energy, rows.frobenius.square(), rtol=1e-5, atol=0)


SINK = h.Softmax(h.Causal(), sink=torch.tensor([0.5, -1.0]))
MIXED = h.Mixture([h.Softmax(h.Causal()), h.FixedPattern("previous")])


@pytest.mark.parametrize(
    "mechanism",
    [h.Softmax(h.Strided(4) & h.Causal()), h.Softmax(h.Full()), SINK, MIXED, h.Linear(pattern=h.Causal())],
    ids=["strided", "full", "sink", "mixture", "linear"],
)
@pytest.mark.parametrize("segments", [None, torch.tensor([0] * 40 + [1] * 50 + [-1] * 6)], ids=["plain", "packed"])
def test_the_pass_over_the_rows_leaves_the_matrix(mechanism, segments):
    op = mechanism.operator(*inputs(2), segments=segments)
    into = torch.zeros(op.shape)
    op.row_sums(Request(into=into))
    torch.testing.assert_close(into, op.to_dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_raised_to_float32(name, dtype):
    mechanism = h.Softmax(h.Causal()) if name == "softmax" else h.Linear(pattern=h.Causal())
    q, k = inputs(2, dtype=dtype)
    op, wide = mechanism.operator(q, k), mechanism.operator(q.float(), k.float())
    for measure in (h.effective_rank, h.stable_rank, h.entropic_rank):
        assert torch.equal(measure(op).estimate, measure(wide).estimate)
    assert torch.equal(h.spectrum(op, 8).values, h.spectrum(wide, 8).values)
    assert torch.equal(h.spectrum(op.mT, 8).values, h.spectrum(wide.mT, 8).values)
    assert torch.equal(h.svdvals(op), h.svdvals(wide))
    assert torch.equal(h.measures.row_correlation(op), h.measures.row_correlation(wide))
    assert torch.equal(h.head_measures(op, 8).rows.entropy, h.row_statistics(wide).entropy)
    assert h.spectrum(op.float().to_dense().to(dtype), 8).values.dtype == torch.float64


class LeavesNothing(h.Softmax):
    """A mechanism whose own way to the sums knows nothing of the matrix."""

    def row_sums(self, q, k, request, *, segments=None):
        return super().row_sums(q, k, replace(request, into=None), segments=segments)


def test_a_pass_that_leaves_no_matrix_is_noticed():
    q, k = inputs(2)
    found, expected = (h.head_measures(kind(h.Causal()).operator(q, k), 8) for kind in (LeavesNothing, h.Softmax))
    torch.testing.assert_close(found.spectrum.values, expected.spectrum.values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.rows.entropy, expected.rows.entropy)
