"""Operators add, subtract, scale, transpose and sum over heads, and every measure takes the result.

The oracle is the same combination of `matrix(q, k)` in float64.
"""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.measures import numerical_rank, row_correlation, search

N, HEADS = 48, 3
PACKED = torch.tensor([0] * 20 + [1] * 22 + [-1] * 6)
MECHANISMS = {
    "causal": lambda: (h.Softmax(h.Causal()), h.Softmax(h.Causal(), temperature=2.0)),
    "window": lambda: (h.Softmax(h.Window(5, sinks=2)), h.Softmax(h.Causal())),
    "sink": lambda: (
        h.Softmax(h.Full(), sink=torch.tensor([0.5, -1.0, 0.0], dtype=torch.float64)),
        h.Softmax(h.Full()),
    ),
    "linear": lambda: (h.Linear(), h.Softmax(h.Causal())),
    "signed": lambda: (h.Quadratic(lambda x: x, h.Causal(), normalise=None), h.Linear()),
    "fixed": lambda: (h.FixedPattern("left"), h.FixedPattern("current")),
    "mixture": lambda: (h.Mixture([h.FixedPattern("previous"), h.Softmax(h.Causal()), h.Linear()]), h.Linear()),
}
"""Two mechanisms each: A and B."""
COMBINATIONS = {
    "A + B": lambda a, b: a + b,
    "A − B": lambda a, b: a - b,
    "2 A": lambda a, b: 2 * a,
    "−A / 3": lambda a, b: -a / 3,
    "(A − 0.5 B)ᵀ": lambda a, b: (a - 0.5 * b).mT,
    "Aᵀ + 3 B": lambda a, b: a.mT + 3 * b,
    "Σ A_h": lambda a, b: heads_of(a),
    "(Σ A_h − Σ B_h)ᵀ": lambda a, b: (heads_of(a) - heads_of(b)).mT,
    "sum of a list": lambda a, b: sum([a, b, a]),
}


def heads_of(x):
    return x.sum_heads() if isinstance(x, h.AttentionOperator) else x.sum(-3)


def draw(seed, dtype=torch.float64, n=N, d=8):
    return torch.randn(2, HEADS, n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype).unbind()


def pair(name, segments=None, dtype=torch.float64):
    """Two operators, each with q and k of its own, and their matrices in float64."""
    operators, matrices = [], []
    for seed, attend in enumerate(MECHANISMS[name]()):
        q, k = draw(seed, dtype)
        operators.append(attend.operator(q, k, segments=segments))
        matrices.append(attend.matrix(q.double(), k.double(), segments=segments))
    return operators, matrices


@pytest.fixture(params=[None, PACKED], ids=["plain", "packed"])
def segments(request):
    return request.param


def close(found, wanted, tolerance=1e-10):
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("combine", COMBINATIONS.values(), ids=COMBINATIONS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_combination_is_that_of_the_matrices(name, segments, combine):
    operators, matrices = pair(name, segments)
    A, full = combine(*operators), combine(*matrices)
    n, m = full.shape[-2:]
    assert A.shape == tuple(full.shape) and A.mT.shape == tuple(full.mT.shape)
    x, y = torch.randn(m, 3, dtype=full.dtype), torch.randn(2, *full.shape[:-1], 2, dtype=full.dtype)
    for found, wanted in {
        A @ x: full @ x,
        A.mT @ y: full.mT @ y,
        A @ x[:, 0]: full @ x[:, 0],
        A.to_dense(): full,
        A.materialise(): full,
        A.mT.mT.materialise(): full,
        A.rows([1, n - 2]): full[..., [1, n - 2], :],
    }.items():
        close(found, wanted)


TURNS = [
    (name, combination, PACKED if at % 2 else None, 0 if at % 3 else None)
    for at, combination in enumerate(COMBINATIONS)
    for name in ("causal", list(MECHANISMS)[1 + at % (len(MECHANISMS) - 1)])
]


@pytest.mark.parametrize("name, combination, segments, most", TURNS, ids=[f"{x[0]}: {x[1]}" for x in TURNS])
def test_every_measure_takes_a_combination(name, combination, segments, most, monkeypatch):
    """Row sums read from the matrix, and by products where `most` forbids it."""
    if most is not None:
        monkeypatch.setattr("heedful.operator.ROWS_FROM_MATRIX", most)
    combine = COMBINATIONS[combination]
    operators, matrices = pair(name, segments)
    A, full = combine(*operators), combine(*matrices)
    values, mass = torch.linalg.svdvals(full), full.abs().sum(-1)
    shares = values.square().cumsum(-1) / values.square().sum(-1, keepdim=True)
    close(h.svdvals(A), values, 1e-8)
    close(h.spectrum(A, 4).values, values[..., :4], 1e-8)
    rank = h.effective_rank(A, 0.9)
    true = (shares < 0.9).sum(-1) + 1
    assert ((rank.lower <= true) & (true <= rank.upper) & (rank.lower <= rank.estimate)).all()
    close(h.stable_rank(A).estimate, values.square().sum(-1) / values[..., 0].square(), 1e-8)
    close(h.energy_share(A, 0.1).estimate, shares[..., 4], 1e-8)
    close(h.entropic_rank(A).estimate, torch.special.entr(shares.diff(prepend=0 * shares[..., :1])).sum(-1).exp(), 1e-6)
    assert h.decay_exponent(A, 8).goodness.isfinite().all()
    assert torch.equal(numerical_rank(A, 1e-6), (values > 1e-6 * values[..., :1]).sum(-1))
    rows = h.row_statistics(A, window=3)
    p = full.abs() / mass.masked_fill(mass == 0, 1)[..., None]
    close(rows.total, full.sum(-1))
    close(rows.mass, mass)
    close(rows.frobenius.square(), full.square().sum((-2, -1)))
    close(rows.largest, full.abs().amax(-1))
    close(rows.entropy, torch.special.entr(p).sum(-1), 1e-8)
    close(h.entropy(A), rows.entropy)
    assert rows.log_sum_exp is None  # no longer a softmax
    close(h.head_measures(A, 4).spectrum.energy, full.square().sum((-2, -1)))
    pattern = h.positional_pattern(A)
    assert pattern.scores.isfinite().all() and pattern.index.shape == full.shape[:-2]
    spread = h.concentration(A, over="all")
    close(spread.matrix, mass.sum(-1) / N / full.square().sum((-2, -1)).sqrt())
    assert ((h.sink_mass(A) >= 0) & (h.sink_mass(A) <= 1 + 1e-12)).all()
    cosine = full / full.norm(dim=-1, keepdim=True).masked_fill(mass[..., None] == 0, 1)
    seen = (mass > 0).sum(-1)
    close(row_correlation(A), ((cosine @ cosine.mT).sum((-2, -1)) - seen) / (seen * (seen - 1)), 1e-8)


@pytest.mark.parametrize("route", [{}, {"EXACT": 0}, {"EXACT": 0, "FORMED": 0}], ids=["exact", "matrix", "products"])
def test_bounds_hold_where_operators_nearly_cancel(route, monkeypatch):
    """A − B of a fine-tuning that moved q by little: in float32 the entries of the difference are mostly rounding."""
    for name, value in route.items():
        monkeypatch.setattr(search, name, value)
    for size in (1e-3, 1e-5, 1e-7):
        (q, k), (step, _) = draw(0, torch.float32, n=96), draw(1, torch.float32, n=96)
        both = h.Softmax(), h.Softmax()
        moved = q + size * step
        A = both[0].operator(q, k) - both[1].operator(moved, k)
        full = both[0].matrix(q.double(), k.double()) - both[1].matrix(moved.double(), k.double())
        squares = torch.linalg.svdvals(full).square()
        sums = squares.cumsum(-1)
        for tau in (0.5, 0.9, 0.99):
            true = (sums < tau * sums[..., -1:]).sum(-1) + 1
            found = h.effective_rank(A, tau)
            assert ((found.lower <= true) & (true <= found.upper)).all(), (size, tau, true, found)
        found, stable = h.stable_rank(A), sums[..., -1] / squares[..., 0]
        assert ((found.lower <= stable) & (stable <= found.upper)).all(), (size, stable, found)


def test_sixteen_bits_are_raised_term_by_term():
    """The measures of A − B of 16-bit operators are those of float32 operators."""
    operators, _ = pair("causal", dtype=torch.bfloat16)
    A = operators[0] - operators[1]
    wide = operators[0].float() - operators[1].float()
    assert A.dtype == torch.bfloat16 and A.float().dtype == wide.dtype == torch.float32
    assert torch.equal(h.effective_rank(A).estimate, h.effective_rank(wide).estimate)
    assert torch.equal(h.entropy(A), h.entropy(wide))
    x = torch.randn(N, 2)
    assert torch.equal(A.float() @ x, wide @ x)
    weights = [term.matrix(term.mechanism.matrix) for term in A.terms]
    assert torch.equal(A.to_dense(), (weights[0].float() - weights[1].float()).bfloat16())  # rounded once


def test_gradients_go_through_a_combination():
    (q, k), (p, _) = draw(0), draw(1)
    x = torch.randn(N, 2, dtype=q.dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, p)]
    attend = h.Softmax()
    found = (attend.operator(leaves[0], leaves[1]) - 2 * attend.operator(leaves[2], leaves[1])).sum_heads() @ x
    wanted = (attend.matrix(leaves[0], leaves[1]) - 2 * attend.matrix(leaves[2], leaves[1])).sum(0) @ x
    for one, two in zip(
        torch.autograd.grad(found.square().sum(), leaves),
        torch.autograd.grad(wanted.square().sum(), leaves),
        strict=True,
    ):
        close(one, two)


def test_what_cannot_be_combined_is_refused():
    (q, k), (short, _) = draw(0), draw(0, n=10)
    attend = h.Softmax()
    A = attend.operator(q, k)
    for other, words in {
        attend.operator(short, short): "shape",
        attend.operator(q.float(), k.float()): "dtype",
        attend.operator(q, k, segments=PACKED): "segments",
    }.items():
        with pytest.raises(ValueError, match=f"A \\+ B: .*{words}.*expected the same"):
            A + other
    for wrong in (lambda: A + 1, lambda: A * "2", lambda: A - torch.zeros(1), lambda: A * A):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="no heads to sum over"):
        A.sum_heads().sum_heads()
    different = torch.stack([PACKED, PACKED.flip(0), PACKED])
    with pytest.raises(ValueError, match="different for each of 3 heads"):
        h.row_statistics(attend.operator(q, k, segments=different).sum_heads())
    with pytest.warns(DeprecationWarning, match="materialise"):
        assert torch.equal(A.form(), A.materialise())


def test_old_keywords_of_a_search_still_work():
    A = h.Softmax().operator(*draw(0))
    with pytest.warns(DeprecationWarning, match=r"search=heedful.SearchOptions\(budget=64, failure=0\)"):
        found = h.effective_rank(A, budget=64, failure=0)
    assert torch.equal(found.estimate, h.effective_rank(A, search=h.SearchOptions(64, 0)).estimate)
    with pytest.raises(ValueError, match="budget: 0 products, expected 1 or more"):
        h.SearchOptions(budget=0)
