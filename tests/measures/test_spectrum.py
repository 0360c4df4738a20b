"""Spectra from products alone: closed forms, bounds that hold, routes that agree, and errors that teach."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from math import ceil, cos, pi, sin, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful as h
from heedful import linalg
from heedful.column_slabs import Trimmed
from heedful.measures import gpu_sketch, numerical_rank, profile, row_correlation, search
from heedful.scan.baseline import BUDGET

ROUTES = {
    "exact": {},
    "formed": {"EXACT": 0},
    "not formed": {"EXACT": 0, "FORMED": 0},
}


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    for name, value in ROUTES[request.param].items():
        monkeypatch.setattr(search, name, value)
    return request.param


def operator(n=160, m=None, d=8, heads=(), contrast=2.0, pattern=None, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q = contrast * torch.randn(*heads, n, d, generator=generator, dtype=dtype)
    k = torch.randn(*heads, m or n, d, generator=generator, dtype=dtype)
    return h.Softmax(h.Causal() if pattern is None else pattern).operator(q, k)


def truth(op, tau):
    """The effective rank by its definition, in float64."""
    squares = h.svdvals(op).square()
    return (squares.cumsum(-1) < tau * squares.sum(-1, keepdim=True) * (1 - 1e-12)).sum(-1) + 1


# Closed forms


@pytest.mark.parametrize("tau", [0.5, 0.9, 0.999])
def test_uniform_attention_has_effective_rank_1(route, tau):
    q, k = torch.zeros(2, 100, 4).unbind()
    found = h.effective_rank(h.Softmax(h.Full()).operator(q, k), tau)
    assert (int(found.lower), int(found.estimate), int(found.upper)) == (1, 1, 1)


def test_all_of_the_energy_can_be_told_up_to_rounding_only(route):
    q, k = torch.zeros(2, 100, 4).unbind()
    found = h.effective_rank(h.Softmax(h.Full()).operator(q, k), 1.0)
    assert (int(found.lower), int(found.estimate), int(found.upper)) == (1, 1, 100)


@pytest.mark.parametrize("tau", [0.5, 0.9, 0.95])
def test_the_identity_has_effective_rank_tau_n(route, tau):
    n = 128
    q, k = torch.zeros(2, n, 4).unbind()
    found = h.effective_rank(h.FixedPattern("current").operator(q, k), tau, search=h.SearchOptions(16 * n))
    assert int(found.estimate) == ceil(tau * n)
    assert int(found.lower) <= ceil(tau * n) <= int(found.upper) <= ceil(tau * n) + 1


def test_causal_uniform_attention(route):
    q, k = torch.zeros(2, 512, 4, dtype=torch.float64).unbind()
    op = h.Softmax(h.Causal()).operator(q, k)
    assert round(float(h.spectrum(op, 1, within=1e-9).values[0]), 5) == 1.72028
    for tau, rank in ((0.9, 7), (0.95, 11)):
        found = h.effective_rank(op, tau, within=0)
        assert (int(found.lower), int(found.estimate), int(found.upper)) == (rank, rank, rank)


def test_the_rank_of_attention_on_a_circle_is_not_bounded_by_its_width(route):
    angles = [2 * pi * i / 256 for i in range(256)]
    q = 20 * torch.tensor([[cos(a), sin(a)] for a in angles], dtype=torch.float64)
    found = h.effective_rank(h.Softmax(h.Full(), scale=1.0).operator(q, q), 0.9)
    assert int(found.estimate) == 47
    assert int(found.lower) <= 47 <= int(found.upper)


# Bounds and routes


@pytest.mark.parametrize("tau", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("contrast", [0.3, 1.0, 3.0, 10.0])
def test_the_interval_holds_the_effective_rank(route, tau, contrast):
    op = operator(n=200, heads=(3,), contrast=contrast)
    found = h.effective_rank(op, tau, search=h.SearchOptions(512))
    rank = truth(op, tau)
    assert (found.lower <= rank).all() and (rank <= found.upper).all()
    assert (found.lower <= found.estimate).all() and (found.estimate <= found.upper).all()
    assert ((found.estimate - rank).abs() <= (0.1 * rank).clamp(min=1)).all()


def test_a_larger_budget_gives_a_narrower_interval(route):
    op = operator(n=300, contrast=3.0)
    widths = []
    for budget in (64, 512, 4096):
        found = h.effective_rank(op, 0.9, within=0, search=h.SearchOptions(budget))
        assert found.lower <= truth(op, 0.9) <= found.upper
        widths.append(int(found.upper - found.lower))
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] <= 1
    if route != "exact":
        assert (
            widths[0] > 10
            and h.effective_rank(op, 0.9, within=0, search=h.SearchOptions(64)).stopped == "beyond the budget"
        )


def test_without_probability_the_interval_is_wider_but_holds(route):
    op = operator(n=300, contrast=3.0)
    sure, likely = (h.effective_rank(op, 0.9, within=0, search=h.SearchOptions(700, failure)) for failure in (0, 1e-9))
    assert sure.failure == 0
    assert sure.lower <= likely.lower <= truth(op, 0.9) <= likely.upper <= sure.upper


@pytest.mark.parametrize("shape", [(120, 120), (70, 150)])
def test_the_first_values_are_those_of_the_matrix(route, shape):
    op = operator(*shape, heads=(2,), dtype=torch.float64)
    found, exact = h.spectrum(op, 8), h.svdvals(op)
    torch.testing.assert_close(found.values, exact[..., :8], rtol=0.005, atol=0)
    assert (found.values <= exact[..., :8] * (1 + 1e-9)).all() and (exact[..., :8] <= found.ceilings * (1 + 1e-9)).all()
    torch.testing.assert_close(found.energy, exact.square().sum(-1), rtol=1e-9, atol=0)
    torch.testing.assert_close(found.residual, found.energy - found.values.square().sum(-1))


def test_more_queries_than_keys(route):
    op = operator(150, 70, pattern=h.Full())
    found = h.effective_rank(op, 0.9)
    assert found.lower <= truth(op, 0.9) <= found.upper


def test_every_measure_is_inside_its_bounds(route):
    op = operator(n=200, heads=(2,), contrast=3.0)
    squares = h.svdvals(op).square()
    shares = squares / squares.sum(-1, keepdim=True)
    expected = {
        h.stable_rank: 1 / shares[..., 0],
        h.entropic_rank: torch.special.entr(shares).sum(-1).exp(),
        h.energy_share: shares[..., :20].sum(-1),
    }
    for function, value in expected.items():
        found = function(op)
        assert (found.lower <= value).all() and (value <= found.upper).all(), function
        torch.testing.assert_close(found.estimate, value, rtol=0.05, atol=0)


def test_a_spectrum_serves_every_other_measure_without_products():
    op = operator(n=100)
    found = h.spectrum(op, 16)
    for function in (h.effective_rank, h.stable_rank, h.entropic_rank, h.energy_share):
        torch.testing.assert_close(function(found).estimate, function(op).estimate)
    assert torch.equal(h.decay_exponent(found, 16).fits, h.decay_exponent(op, 16).fits)


def test_one_spectrum_answers_for_several_shares(route):
    op = operator(n=200, contrast=3.0)
    found = h.spectrum(op, 8, tau=(0.5, 0.9), search=h.SearchOptions(4096))
    assert found.stopped in ("narrow enough", "exact")
    for tau in (0.5, 0.9):
        rank = h.effective_rank(found, tau)
        assert rank.lower <= truth(op, tau) <= rank.upper
        assert rank.upper - rank.lower <= max(1, 0.1 * rank.estimate)


def test_heads_of_a_batch_are_measured_as_if_alone():
    """Formed heads go one by one: batch mates can't matter."""
    q, k = torch.randn(2, 2, 3, 600, 8, generator=torch.Generator().manual_seed(0)).unbind()
    whole = h.effective_rank(h.Softmax().operator(q, k[:, :1]))
    alone = h.effective_rank(h.Softmax().operator(q[1, 2], k[1, 0]))
    assert whole.estimate.shape == (2, 3)
    assert (whole.lower[1, 2], whole.upper[1, 2]) == (alone.lower, alone.upper)


def test_any_mechanism_will_do(route):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 90, 4, generator=generator).unbind()
    for mechanism in (h.Linear(), h.Retention(0.9), h.Quadratic(), h.Nystrom(8)):
        op = mechanism.operator(q, k)
        found = h.effective_rank(op, 0.9, search=h.SearchOptions(512))
        assert found.lower <= truth(op, 0.9) <= found.upper, mechanism


@pytest.mark.parametrize("name", h.CATALOG)
def test_a_formed_matrix_is_the_definition(name):
    q, k = torch.randn(2, 2, 40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    op = h.CATALOG[name].sample(d=4, heads=2, length=40).double().operator(q, k)
    torch.testing.assert_close(op.materialise(), op.to_dense())
    torch.testing.assert_close(op.mT.materialise(), op.to_dense().mT)


# Edges


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (40, 40)])
def test_zeros_have_no_rank(route, shape):
    found = h.effective_rank(torch.zeros(shape))
    assert (int(found.lower), int(found.estimate), int(found.upper)) == (0, 0, 0)
    assert float(h.stable_rank(torch.zeros(shape)).estimate) == float(h.entropic_rank(torch.zeros(shape)).estimate) == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1)])
def test_a_single_row_or_column(route, shape):
    assert int(h.effective_rank(torch.ones(shape)).estimate) == 1
    assert float(h.spectrum(torch.ones(shape), 1).values[0]) == pytest.approx(sqrt(max(shape)))


def test_a_matrix_of_low_rank(route):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, 3, generator=generator) @ torch.randn(3, 200, generator=generator)
    assert int(h.effective_rank(a, 1.0).lower) <= 3 <= int(h.effective_rank(a, 1.0).upper)
    found = h.effective_rank(a, 0.999)
    assert int(found.lower) == int(found.upper) == int(truth(a, 0.999))
    assert int(numerical_rank(a)) == 3


def test_a_mask_is_refused():
    with pytest.raises(TypeError, match=r"mask\.float"):
        h.effective_rank(torch.ones(8, 8, dtype=torch.bool))


@pytest.mark.parametrize("tau", [0.0, -1.0, 1.5, 90.0])
def test_tau_is_a_share(tau):
    with pytest.raises(ValueError, match="tau"):
        h.effective_rank(torch.eye(4), tau)


@pytest.mark.parametrize("k", [0, 5])
def test_k_is_at_most_the_size(k):
    with pytest.raises(ValueError, match=f"k: {k} singular values"):
        h.spectrum(torch.eye(4), k)


def test_nan_is_an_error(route):
    q, k = torch.randn(2, 40, 4).unbind()
    q[3, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        h.effective_rank(h.Softmax(h.Full()).operator(q, k))


def test_an_empty_matrix_and_a_mechanism_are_errors():
    with pytest.raises(ValueError, match="nothing to measure"):
        h.effective_rank(torch.zeros(0, 4))
    with pytest.raises(TypeError, match=r"mechanism\.operator"):
        h.effective_rank(h.Softmax())


def test_what_is_not_linear_is_found_out_on_request():
    class Bent:
        shape, dtype, device = (5, 5), torch.float32, torch.device("cpu")
        mT = torch.eye(5)

        def __matmul__(self, x):
            return x.relu()

    class Askew(Bent):
        mT = 2 * torch.eye(5)

        def __matmul__(self, x):
            return x

    linalg.check_linear(operator(n=30))
    with pytest.raises(ValueError, match="linear in the values"):
        linalg.check_linear(Bent())
    with pytest.raises(ValueError, match="adjoint"):
        linalg.check_linear(Askew())


# Shapes of decay and rows


def test_a_power_law_is_recognised_with_its_exponent(route):
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(0.02).exp()
    found = h.decay_exponent(torch.diag(noise * torch.arange(1, 201) ** -1.3), 24)
    assert found.fits and abs(found.exponent - 1.3) < 3 * found.error


@pytest.mark.parametrize("values", [torch.exp(-0.3 * torch.arange(60)), torch.ones(60), torch.arange(60, 0, -1.0)])
def test_no_power_law_is_refused(values):
    found = h.decay_exponent(torch.diag(values), 24)
    assert not found.fits and found.exponent.isnan() and found.error.isnan()


def test_row_correlation_is_the_mean_cosine_of_pairs():
    op = operator(n=50, heads=(2,))
    a = torch.nn.functional.normalize(op.to_dense().double(), dim=-1)
    cosines = a @ a.mT
    expected = (cosines.sum((-2, -1)) - 50) / (50 * 49)
    torch.testing.assert_close(row_correlation(op), expected, rtol=1e-5, atol=1e-6)
    assert row_correlation(torch.ones(1, 3)).isnan()


# How results show


def test_results_show_themselves():
    found = h.spectrum(operator(n=60, heads=(2, 8)), 4)
    assert "σ₄" in repr(found) and "1.3" in repr(found) and "… and 4 more" in repr(found)
    assert "<td>1.7</td>" in found._repr_html_()
    plain = json.loads(json.dumps(found.to_dict()))
    assert len(plain["values"][1][7]) == 4 and "profile" not in plain
    assert found.__rich__().row_count == 16


def test_html_is_escaped():
    found = h.stable_rank(torch.eye(3))
    object.__setattr__(found, "stopped", "<script>")
    assert "<script>" not in found._repr_html_() and "&lt;script&gt;" in found._repr_html_()


def test_a_plot_is_a_chart_of_all_heads():
    pytest.importorskip("altair", reason="altair is not installed: pip install 'heedful[plot]'")
    chart = h.spectrum(operator(n=60, heads=(2,)), 4).plot().to_dict()
    assert len(next(iter(chart["datasets"].values())) if "datasets" in chart else chart["data"]["values"]) == 8


# The mathematics of the bounds, on any matrix


def spectra():
    return st.lists(st.floats(0, 10), min_size=12, max_size=12)


@settings(max_examples=40, deadline=None)
@given(spectra(), st.integers(1, 12), st.integers(0, 1000))
def test_floor_and_ceiling_hold_the_sums_for_any_basis(values, width, seed):
    generator = torch.Generator().manual_seed(seed)
    left, right, basis = (
        torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))[0] for _ in range(3)
    )
    a = left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right
    u = basis[:, :width]
    rest = a - u @ (u.mT @ a)
    w = a.mT @ u
    squares, vectors = torch.linalg.eigh(w.mT @ w)
    leaks = (rest @ w @ vectors).norm(dim=0)
    ritz = linalg.Ritz(squares.flip(-1).clamp(min=0), leaks.flip(-1), width, squares)
    residual, norm = rest.square().sum(), torch.linalg.matrix_norm(rest, 2) ** 2
    exact = torch.linalg.svdvals(a).square()
    slack = 1e-9 * (1 + exact.sum())
    for bound in (norm, residual):
        assert (exact.cumsum(-1) <= linalg.ceiling(ritz, residual, bound, 12) + slack).all()
        assert (exact[:width] <= linalg.ceilings(ritz, bound) + slack).all()
    assert (linalg.floor(ritz.squares, residual, 12) <= exact.cumsum(-1) + slack).all()


def test_a_norm_that_is_too_small_breaks_the_ceiling():
    """The planted fault: the bounds above are not so wide that anything would pass."""
    a = torch.eye(12, dtype=torch.float64)
    ones, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    ritz = linalg.Ritz(ones, zeros, 4, ones)
    sums = torch.linalg.svdvals(a).square().cumsum(-1)
    residual = torch.tensor(8.0, dtype=torch.float64)
    assert (sums <= linalg.ceiling(ritz, residual, torch.tensor(1.0, dtype=torch.float64), 12) + 1e-9).all()
    assert not (sums <= linalg.ceiling(ritz, residual, torch.tensor(0.9, dtype=torch.float64), 12) + 1e-9).all()


def test_the_norm_bound_fails_no_more_often_than_it_says():
    """Few steps and a high allowance, so that failures would be seen: a lone large value among 200."""
    a = torch.diag(torch.cat([torch.tensor([1.05]), torch.linspace(0, 1, 199)])).double().sqrt()
    none = torch.zeros(0, 200, dtype=torch.float64)
    failure, wrong, trials = 0.2, 0, 200
    loss = linalg.norm_slack(200, 1, 6, failure)
    for seed in range(trials):
        largest = linalg.Probes(a, none, 1, seed).largest(6)
        assert largest <= 1.05 + 1e-9
        wrong += bool(largest / (1 - loss) < 1.05)
    assert wrong <= failure * trials
    assert 0 < loss < 0.9 and linalg.norm_slack(200, 16, 12, 1e-9) < loss


@pytest.mark.parametrize("settled", [0, 4])
def test_a_sketch_tells_the_values_beyond_it(settled):
    """96 columns of a matrix without structure, whose 300 values it can't find."""
    a = torch.randn(300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a += 10 * torch.randn(300, 4, dtype=torch.float64) @ torch.randn(4, 300, dtype=torch.float64) * (settled > 0)
    sketch = linalg.Sketch(a, block=16, most=96)
    while not sketch.full:
        sketch.grow()
    exact = torch.linalg.svdvals(a).square()
    sums = profile.spread(sketch.solve(), torch.tensor(settled), exact.sum(), 300)
    torch.testing.assert_close(sums[9::10], exact.cumsum(-1)[9::10], rtol=0.05, atol=0)
    assert (sums.diff().diff() <= 1e-9 * exact.sum()).all()
    torch.testing.assert_close(sums[-1], exact.sum())


SPECTRA = {
    "exponential": lambda i: torch.exp(-i / 250),
    "two slopes": lambda i: torch.exp(-i / 30) + 0.1 * torch.exp(-i / 300),
    "a knee": lambda i: 1 / (1 + (i / 80) ** 1.5),
    "to the end": lambda i: (1 - i / 1024) ** 1.5,
    "stretched": lambda i: torch.exp(-((i / 40) ** 0.6)),
}


def test_the_products_of_a_scan_tell_ranks_in_the_hundreds():
    """Known singular values in a matrix without structure; a sketch of 96 columns, ranks from 55 to 540."""
    values = torch.stack([made(torch.arange(1024, dtype=torch.float64) + 0.5) for made in SPECTRA.values()])
    mixed = torch.ones(1, 1)
    while len(mixed) < 1024:
        mixed = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), mixed) / sqrt(2)
    signs = torch.randint(0, 2, (1024,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    found = h.spectrum(
        values.float()[..., None] * (mixed * signs), 32, tau=(0.9, 0.95), search=h.SearchOptions(BUDGET, failure=0)
    )
    errors = []
    for tau in (0.9, 0.95):
        sums = values.square().cumsum(-1)
        true = (sums < tau * sums[:, -1:]).sum(-1) + 1
        rank = h.effective_rank(found, tau)
        assert ((rank.lower <= true) & (true <= rank.upper)).all()
        errors.append((rank.estimate - true) / true)
    errors = torch.stack(errors)
    assert errors.abs().max() <= 0.05, dict(zip(SPECTRA, errors.T.tolist(), strict=True))
    assert errors.mean().abs() <= 0.015


def test_signs_of_a_start_see_no_diagonal_and_no_near_neighbours():
    """tr ΩᵀBΩ / p is exact for what lies inside runs of p; a Gaussian start is right on average alone."""
    b = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = b * (torch.arange(40)[:, None] // 8 == torch.arange(40) // 8)
    start = linalg.random_signs(40, 8, torch.float64, torch.Generator().manual_seed(1))
    torch.testing.assert_close((start.mT @ b @ start).trace() / 8, b.trace())
    torch.testing.assert_close(start.square().sum(-1), torch.full((40,), 8.0, dtype=torch.float64))


def test_an_estimate_is_not_rounded_down():
    """The first two values miss the share by 4e-6 of the energy: within the slack of the bounds, but missed."""
    squares = torch.tensor([0.5, 0.4 - 4e-6, 0.06, 0.04 + 4e-6], dtype=torch.float64)
    rank = h.effective_rank(torch.diag(squares.sqrt()).float(), 0.9)
    assert (int(rank.lower), int(rank.estimate), int(rank.upper)) == (2, 3, 3)


def test_the_energy_near_each_ritz_value_is_told_without_bias():
    """The mean over many starts; a rule of three steps is exact for these moments."""
    a = torch.randn(40, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = torch.linalg.svdvals(a).square()
    found = torch.zeros(3, dtype=torch.float64)
    for seed in range(200):
        sketch = linalg.Sketch(a, block=2, most=6, seed=seed)
        while not sketch.full:
            sketch.grow()
        ritz = sketch.solve()
        found += torch.stack([(ritz.shares * ritz.squares**power).sum() for power in range(3)]) / 200
    expected = torch.stack([squares.pow(1 + power).sum() for power in range(3)])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_a_sketch_stays_orthonormal_when_there_is_nothing_left_to_find():
    a = torch.ones(50, 50)
    sketch = linalg.Sketch(a, block=8, most=50)
    while not sketch.full:
        sketch.grow()
    assert sketch.width == 50 and sketch.defect < 1e-4
    assert float(sketch.captured) == pytest.approx(2500, rel=1e-5)


def test_columns_made_orthonormal_by_products():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, 500, 7, generator=generator))[0].mT
    x = torch.randn(2, 500, 20, generator=generator)
    x = gpu_sketch.without(gpu_sketch.without(x, basis), basis)
    rows, factor, made = gpu_sketch.orthonormal_rows(x, x.double().norm(dim=(-2, -1)))
    assert gpu_sketch.sound(made, [20], 1e-7).all() and ((rows @ rows.mT - torch.eye(20)).abs() < 1e-12).all()
    assert (basis.double() @ rows.mT).abs().max() < 1e-5
    assert torch.allclose(factor @ rows, x.double().mT, atol=1e-10)  # the same span


def test_columns_that_depend_on_each_other_are_not_made_orthonormal_by_products():
    x = torch.randn(4, 500, 20, generator=torch.Generator().manual_seed(0))
    size = x.double().norm(dim=(-2, -1))
    well = gpu_sketch.orthonormal_rows(x[..., :8], size)[2]
    x[1, :, 3] = x[1, :, 4] * (1 + 1e-7)
    x[2] *= 0
    x[3] *= 1e-7  # what is left of it is rounding
    ill = gpu_sketch.orthonormal_rows(x, size)[2]
    assert gpu_sketch.sound(well, [8], 1e-7).all()
    for order in ((well, ill), (ill, well)):
        blocks = [made.lengths.shape[-1] for made in order]
        made = gpu_sketch._Made(*(torch.cat(parts, -1) for parts in zip(*order, strict=True)))
        assert gpu_sketch.sound(made, blocks, 1e-7).tolist() == [True, False, False, False]


@pytest.mark.parametrize("shape", [(300, 320), (2, 300, 300), (2, 1, 250, 250)])
def test_a_launched_sketch_is_the_same_sketch(shape):
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0)).tril()
    one, two = linalg.Sketch(a, block=16, most=88), gpu_sketch.LaunchedSketch(a, block=16, most=88)
    for width in (32, 88):  # the last block is half as wide
        while one.width < width:
            one.grow()
            two.grow()
        known, found = one.solve(), two.solve()
        assert two.careful is None and two.products == one.products and found.block == known.block
        whole = known.squares.amax()
        for name, rtol in (("squares", 1e-6), ("leaks", 1e-3), ("shares", 1e-4)):
            torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=0, atol=float(rtol * whole))
        torch.testing.assert_close(two.captured, one.captured, rtol=1e-6, atol=0)
        assert (two.defect < 1e-5).all()


def test_heads_formed_together_on_a_gpu_get_narrow_blocks():
    """Their eigenproblems, on the host, take longest: they have half as many columns as those of a single head."""
    several, single = (torch.empty(heads, 2048, 2048, device="meta") for heads in (32, 1))
    assert search.block_of(several) == search.WIDE_BLOCK == search.GPU_BLOCK // 2
    assert search.block_of(single) == search.block_of(single[0]) == search.GPU_BLOCK


class Unformed:
    """A batch of matrices that heads can't be taken out of."""

    def __init__(self, a):
        self.a, self.shape, self.dtype, self.device = a, tuple(a.shape), a.dtype, a.device

    def __matmul__(self, x):
        return self.a @ x

    @property
    def mT(self):
        return Unformed(self.a.mT)


@pytest.mark.parametrize("formed", [True, False])
def test_heads_that_products_alone_do_not_do_for_are_sketched_with_care(formed):
    plain = torch.randn(60, 60, generator=torch.Generator().manual_seed(0)).tril()
    a = torch.stack([torch.ones(60, 60), plain, torch.ones(60, 60)])
    sketch = gpu_sketch.LaunchedSketch(a if formed else Unformed(a), block=8, most=32)
    known = linalg.Sketch(a, block=8, most=32)
    for width in (24, 32):
        while sketch.width < width:
            sketch.grow()
            known.grow()
        found = sketch.solve()
        assert sketch.careful is not None and sketch.careful[0].tolist() == [0, 2]
        assert sketch.width == width and (sketch.defect < 1e-4).all()
        torch.testing.assert_close(sketch.captured, known.captured, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.squares, known.solve().squares, rtol=1e-5, atol=1e-2)
        inner = sketch.basis @ sketch.basis.mT
        torch.testing.assert_close(inner, torch.eye(width).expand_as(inner), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [linalg.Sketch, gpu_sketch.LaunchedSketch])
def test_heads_taken_out_of_a_sketch_go_on_as_before(kind):
    a = torch.randn(3, 200, 200, generator=torch.Generator().manual_seed(0)).tril()
    whole, part = (kind(Trimmed.of(a) if kind is linalg.Sketch else a, block=8, most=40) for _ in range(2))
    for _ in range(2):
        whole.grow()
        part.grow()
    part = part.take(torch.tensor([0, 2]))
    whole.grow()
    part.grow()
    torch.testing.assert_close(part.solve().squares, whole.solve().squares[[0, 2]], rtol=1e-6, atol=0)


def shapes_of_zeros():
    n, m = 200, 300
    i, j = torch.arange(n)[:, None], torch.arange(m)
    stray = j <= i
    stray[30, 290] = True  # which the first row of its slab and the last say nothing of
    return {
        "none": torch.ones(n, m, dtype=torch.bool),
        "causal": j <= i,
        "from the right": j >= m - i,
        "band": (j - i).abs() < 9,
        "blocks": i // 70 == j // 90,
        "columns between": (j < 5) | (j >= 250),
        "rows between": (i < 5) | (i > 190),
        "a stray entry": stray,
        "all": torch.zeros(n, m, dtype=torch.bool),
    }


@pytest.mark.parametrize("name", shapes_of_zeros())
def test_no_entry_is_trimmed(name):
    generator = torch.Generator().manual_seed(0)
    a, x, y = (
        torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in ((200, 300), (300, 4), (200, 4))
    )
    a = a * shapes_of_zeros()[name]
    a[1, 100:102] = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None] * a[1, 100]  # columns that add up to zero
    for dense, right, left in ((a, x, y), (a.mT, y, x)):
        op = Trimmed.of(dense)
        torch.testing.assert_close(op @ right, dense @ right)
        torch.testing.assert_close(op.mT @ left, dense.mT @ left)
        there, back = op.there_and_back(left)
        torch.testing.assert_close(there, dense.mT @ left)
        torch.testing.assert_close(back, dense @ (dense.mT @ left))
        some = torch.tensor([2, 0])
        torch.testing.assert_close(op.take(some) @ right[some], dense[some] @ right[some])


def test_zeros_are_trimmed():
    a = torch.ones(2, 640, 640).tril()
    assert sum(slab.numel() for *_, slab in Trimmed.of(a).slabs) < 0.56 * a.numel()
    assert sum(slab.numel() for *_, slab in Trimmed.of(a * 0).slabs) == 0


def test_a_measurement_does_not_change_when_the_next_one_is_made():
    """The matrices are copied to where those of the last call were."""
    first, second = (operator(n=600, heads=(2,), contrast=contrast) for contrast in (1.0, 3.0))
    alone = h.spectrum(first, 8)
    with torch.inference_mode():
        found = h.spectrum(first, 8)
    kept = found.values.clone(), found.profile.lower.clone()
    h.spectrum(second, 8)
    h.spectrum(operator(n=700, heads=(3,), dtype=torch.float64), 8)
    assert torch.equal(found.values, kept[0]) and torch.equal(found.profile.lower, kept[1])
    assert torch.equal(alone.values, found.values) and torch.equal(h.spectrum(first, 8).values, alone.values)


def test_threads_do_not_share_the_memory_that_is_kept():
    ops = [operator(n=600, contrast=contrast) for contrast in (0.5, 1.0, 2.0, 3.0)]
    alone = [h.spectrum(op, 8).values for op in ops]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda op: h.spectrum(op, 8).values, ops * 3))
    assert all(map(torch.equal, together, alone * 3))


def test_autocast_does_not_round_what_is_measured(route):
    op = operator(n=200, heads=(2,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = h.spectrum(op, 8)
    assert torch.equal(found.values, h.spectrum(op, 8).values)


def test_a_matrix_with_a_gradient_is_measured():
    a = torch.randn(1, 600, 600, generator=torch.Generator().manual_seed(0))
    assert torch.equal(h.spectrum(a.clone().requires_grad_(), 4).values, h.spectrum(a, 4).values)
