"""S, participation and entropy against their definitions, by both conventions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful as h
from heedful.segments import visible
from heedful.theory import closed_forms

N, D = 50, 8
PACKED = torch.tensor([[0] * 12 + [1] * 29 + [-1] * 9])
MECHANISMS = [
    h.Softmax(h.Causal()),
    h.Softmax(h.Full(), scale=2.0),
    h.Softmax(h.Window(7), sink=torch.tensor(1.0)),
    h.Quadratic(h.no_activation, h.Causal(), normalise=None),
    h.Quadratic(pattern=h.Full()),
    h.Linear(),
    h.Linear(h.Identity(), normalise=False),
    h.Retention(0.9),
    h.FixedPattern("left"),
]


def inputs(n=N, m=N, seed=0):
    torch.manual_seed(seed)
    return torch.randn(2, n, D, dtype=torch.float64), torch.randn(2, m, D, dtype=torch.float64)


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("segments", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_both_conventions_by_their_definition(mechanism, segments):
    q, k = inputs()
    A = mechanism.matrix(q, k, segments=segments)
    sees = visible(mechanism.pattern, N, N, segments).expand_as(A)
    op = mechanism.operator(q, k, segments=segments)
    for over, chosen in (("visible", sees), ("all", torch.ones_like(sees))):
        found = h.concentration(op, over)
        assert found.over == over
        for b in range(2):
            for i in range(N):
                a = A[b, i][chosen[b, i]]
                if float(a.abs().sum()) == 0:
                    assert found.rows[b, i].isnan() and found.participation[b, i] == 0
                    continue
                wanted = a.abs().mean() / a.square().mean().sqrt()
                torch.testing.assert_close(found.rows[b, i], wanted, rtol=1e-10, atol=0)
            entries = A[b][chosen[b]]
            wanted = entries.abs().mean() / entries.square().mean().sqrt()
            torch.testing.assert_close(found.matrix[b], wanted, rtol=1e-10, atol=0)


def test_rows_that_sum_to_one_have_the_inverse_of_the_frobenius_norm():
    q, k = inputs()
    for mechanism in (h.Softmax(h.Full()), h.Softmax(h.Causal()), h.Linear(), h.FixedPattern("end")):
        op = mechanism.operator(q, k)
        S = h.concentration(op, over="all").matrix
        torch.testing.assert_close(S, 1 / torch.linalg.matrix_norm(mechanism.matrix(q, k)), rtol=1e-12, atol=0)
        torch.testing.assert_close(S, 1 / h.row_statistics(op).frobenius, rtol=1e-12, atol=0)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(1e-3, 1e3), n=st.integers(1, 30), seed=st.integers(0, 99))
def test_scale_changes_nothing_and_participation_counts(scale, n, seed):
    q, k = inputs(n, n, seed)
    one, other = (
        h.concentration(h.Quadratic(h.no_activation, h.Full(), scale=s, normalise=None).operator(q, k))
        for s in (1.0, scale)
    )
    torch.testing.assert_close(one.rows, other.rows, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.participation, n * one.rows.square(), rtol=1e-9, atol=0)
    assert bool(((one.participation >= 1 - 1e-9) & (one.participation <= n + 1e-9)).all())
    assert bool((one.perplexity >= one.participation - 1e-9).all())  # Rényi entropies fall with their order


def test_one_hot_and_uniform_rows_are_the_ends():
    q, k = inputs(100, 100)
    hot = h.concentration(h.FixedPattern("last").operator(q, k))
    torch.testing.assert_close(hot.rows, torch.full_like(hot.rows, 0.1))
    flat = h.concentration(h.Softmax(h.Full(), scale=0.0).operator(q, k))
    torch.testing.assert_close(flat.rows, torch.ones_like(flat.rows))
    torch.testing.assert_close(flat.perplexity, torch.full_like(flat.rows, 100.0))


def test_gaussian_keys_give_the_closed_form():
    """q·k over many Gaussian keys: the closed form of S for the same β and γ, within the sampling error."""
    torch.manual_seed(0)
    q = torch.tensor([[0.6, 0.8, 0.0]], dtype=torch.float64)
    k = torch.randn(100, 4000, 3, dtype=torch.float64) + torch.tensor([0.3, 0.3, 0.0], dtype=torch.float64)
    for activation, wanted in (
        (torch.exp, closed_forms.S_exp(0.5)),
        (h.no_activation, closed_forms.S_identity(0.42, 1.0)),
        (h.relu2, closed_forms.S_relu2(0.42, 1.0)),
    ):
        scale = 0.5 if activation is torch.exp else 1.0
        op = h.Quadratic(activation, h.Full(), scale=scale, normalise=None).operator(q, k)
        S = h.concentration(op).rows[:, 0]
        assert abs(float(S.mean() - wanted)) < 4 * float(S.std() / 10)


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 4), (4, 0), (1, 1)])
def test_empty_matrices(n, m):
    found = h.concentration(h.Softmax(h.Full()).operator(torch.randn(2, n, 3), torch.randn(2, m, 3)))
    assert found.rows.shape == (2, n) and found.matrix.shape == (2,)


def test_the_convention_has_a_name():
    with pytest.raises(ValueError, match=r'over: \'some\', expected "visible"'):
        h.concentration(h.Softmax().operator(*inputs()), over="some")
    assert set(h.concentration(h.Softmax().operator(*inputs())).to_dict()) >= {"over", "rows", "matrix"}
