"""Each closed form against quadrature in float64, sums, or samples within their standard errors."""

from __future__ import annotations

from math import log, pi, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful import random_features
from heedful.theory import closed_forms as cf
from heedful.theory.random_energy import _gauss_legendre
from heedful.theory.random_matrices import _count_above


def moment(f, z, points=200_001):
    """E f(z + ε) by the trapezoid rule on [−40, 40] around the mean."""
    x = torch.linspace(-40, 40, points, dtype=torch.float64)
    return float((f(z + x) * torch.exp(-x.square() / 2)).sum() * 80 / (points - 1) / sqrt(2 * pi))


def S_by_quadrature(f, beta, gamma):
    return moment(lambda x: f(gamma * x).abs(), beta / gamma) / sqrt(moment(lambda x: f(gamma * x) ** 2, beta / gamma))


def within(samples, wanted, errors=4.0):
    """The mean of the samples is the wanted number within so many standard errors."""
    samples = samples.double()
    error = float(samples.std() / sqrt(len(samples)))
    assert abs(float(samples.mean()) - wanted) <= errors * error, (float(samples.mean()), error, wanted)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 2.0, 3.0])
def test_S_of_exp(gamma):
    assert float(cf.S_exp(gamma)) == pytest.approx(S_by_quadrature(torch.exp, 0.0, gamma), rel=1e-12)


@pytest.mark.parametrize("beta", [-6.0, -3.0, -1.5, -0.99, 0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("gamma", [0.7, 1.0, 3.0])
def test_S_of_relu2_and_identity(beta, gamma):
    # relu² has a kink, where the trapezoid rule errs by h³
    assert float(cf.S_relu2(beta, gamma)) == pytest.approx(
        S_by_quadrature(lambda x: x.relu() ** 2, beta, gamma), rel=1e-8
    )
    assert float(cf.S_identity(beta, gamma)) == pytest.approx(S_by_quadrature(lambda x: x, beta, gamma), rel=1e-7)


def test_relu2_far_below_zero_where_the_formula_of_the_text_breaks():
    z = torch.tensor([-5.0, -8.0, -12.0, -30.0, -300.0], dtype=torch.float64)
    # J_p = φ(z) ∫ t^p e^{−t²/2 + zt} dt, and Gauss–Legendre in t|z| takes the integral
    nodes, weights = _gauss_legendre(120)
    u, du = 30 * (nodes + 1), 30 * weights
    logs = []
    for p in (2, 4):
        integral = (u**p * torch.exp(-u - (u / z[:, None]) ** 2 / 2) * du).sum(-1)
        logs.append(integral.log() - (p + 1) * (-z).log() - z.square() / 2 - log(2 * pi) / 2)
    torch.testing.assert_close(cf.log_S_relu2(z, 1.0), logs[0] - logs[1] / 2, rtol=1e-12, atol=0)
    Phi, phi = torch.special.ndtr(z[-2]), torch.exp(-z[-2].square() / 2) / sqrt(2 * pi)
    naive = (z[-2] ** 4 + 6 * z[-2] ** 2 + 3) * Phi + z[-2] * (z[-2] ** 2 + 5) * phi
    assert not float(naive) > 0 or abs(float(naive) / float((2 * logs[1][-2]).exp()) - 1) > 1e-3
    assert float(cf.S_relu2(-300.0, 1.0)) == 0.0 and float(cf.log_S_relu2(-300.0, 1.0)) < -22000


def test_relu2_is_smooth_where_its_two_forms_meet_and_rises():
    z = torch.linspace(-8, 8, 3201, dtype=torch.float64)
    S = cf.S_relu2(z, 1.0)
    assert bool((S.diff() > 0).all())
    near = cf.S_relu2(torch.tensor([-1 - 1e-9, -1 + 1e-9], dtype=torch.float64), 1.0)
    assert abs(float(near[1] - near[0])) < 1e-9
    torch.testing.assert_close(cf.S_relu2(z, 1.0), cf.S_relu2(5 * z, 5.0), rtol=1e-13, atol=0)


@pytest.mark.usefixtures("annotations_enforced")
def test_the_ends_of_beta_and_gamma():
    assert float(cf.S_relu2(2.0, 0.0)) == float(cf.S_identity(-2.0, 0.0)) == 1.0
    assert float(cf.S_relu2(-2.0, 0.0)) == 0.0
    assert float(cf.S_relu2(1e200, 1.0)) == pytest.approx(1.0) == float(cf.S_identity(1e200, 1.0))
    assert float(cf.S_relu2(3.0, 1e9)) == pytest.approx(1 / sqrt(6), rel=1e-8)
    assert float(cf.S_identity(0.0, 2.0)) == pytest.approx(sqrt(2 / pi), rel=1e-15)
    assert float(cf.S_identity(1.3, 2.0)) == float(cf.S_identity(-1.3, 2.0))


def test_samples_of_Gaussian_keys():
    generator = torch.Generator().manual_seed(0)
    x = 1.0 + torch.randn(400, 5000, dtype=torch.float64, generator=generator)
    for f, wanted in ((lambda x: x, cf.S_identity(1.0, 1.0)), (lambda x: x.relu() ** 2, cf.S_relu2(1.0, 1.0))):
        a = f(x)
        bias = 5e-4  # of a ratio of means of 5000
        S = a.abs().mean(-1) / a.square().mean(-1).sqrt()
        assert abs(float(S.mean() - wanted)) < 4 * float(S.std() / 20) + bias


@pytest.mark.usefixtures("annotations_enforced")
def test_non_negative_features_have_exactly_the_formula_of_their_moments():
    generator = torch.Generator().manual_seed(0)
    k = torch.rand(1000, 5, dtype=torch.float64, generator=generator) ** 3
    q = torch.rand(5, dtype=torch.float64, generator=generator)
    a = k @ q
    wanted = a.mean() / a.square().mean().sqrt()
    found = cf.S_nonnegative(q, k.mean(0), torch.cov(k.mT, correction=0))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    iid = cf.S_iid(q, 0.3, 0.7)
    same = cf.S_nonnegative(q, torch.full((5,), 0.3), 0.49 * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(iid, same, rtol=1e-7, atol=0)


def test_more_iid_features_make_attention_less_sparse_not_more():
    dense = [float(cf.S_iid(torch.ones(r), 1.0, 1.0)) for r in (4, 64, 1024)]
    assert dense == sorted(dense) and dense[-1] > 0.999
    hot = torch.zeros(64)
    hot[3] = 5.0
    assert float(cf.S_iid(hot, 1.0, 1.0)) == pytest.approx(1 / sqrt(2))  # ‖q‖₂/‖q‖₁ = 1 is the most there is


@settings(max_examples=50, deadline=None)
@given(decay=st.floats(0.0, 1.0), n=st.integers(1, 400))
def test_S_of_a_decay_is_that_of_its_weights(decay, n):
    a = torch.tensor(decay, dtype=torch.float64) ** torch.arange(n, dtype=torch.float64)
    wanted = float(a.mean() / a.square().mean().sqrt())
    assert float(cf.S_decay(decay, n)) == pytest.approx(wanted, rel=1e-12)


def test_decay_near_one_and_far_on():
    assert float(cf.S_decay(1.0, 10)) == 1.0
    assert float(cf.S_decay(1 - 1e-14, 1000)) == pytest.approx(1.0, rel=1e-12)
    assert 1000 * float(cf.S_decay(0.99, 1000)) ** 2 == pytest.approx(198.98, abs=0.02)
    assert 10**9 * float(cf.S_decay(0.9, 10**9)) ** 2 == pytest.approx(19.0, rel=1e-12)


@pytest.mark.parametrize(("N", "s"), [(1, 3.0), (2, 1.0), (64, 0.5), (512, 1.0), (512, 3.0), (512, 8.0)])
def test_softmax_of_iid_logits_by_samples(N, s):
    x = s * torch.randn(4000, N, dtype=torch.float64, generator=torch.Generator().manual_seed(N))
    a = x.softmax(-1)
    if N == 1:
        assert cf.expected_square_sum(N, s) == pytest.approx(1) == cf.expected_largest(N, s)
        return
    within(a.square().sum(-1), cf.expected_square_sum(N, s))
    within(a.amax(-1), cf.expected_largest(N, s))


def test_two_logits_have_a_one_dimensional_integral():
    """a = σ(√2 s ε): E Σa² and E max are moments of one normal variable."""
    for s in (0.3, 2.0, 6.0):
        x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
        density = torch.exp(-x.square() / 2)
        density /= density.sum()
        a = torch.sigmoid(sqrt(2) * s * x)
        assert cf.expected_square_sum(2, s) == pytest.approx(float(((a**2 + (1 - a) ** 2) * density).sum()), rel=1e-11)
        assert cf.expected_largest(2, s) == pytest.approx(float((torch.maximum(a, 1 - a) * density).sum()), rel=1e-8)


def test_small_spreads_follow_the_law_of_large_numbers_and_large_ones_freeze():
    assert cf.expected_square_sum(10**6, 1.0) == pytest.approx(2.718281828 / 10**6, rel=1e-4)
    assert cf.freezing_spread(512) == pytest.approx(3.532, abs=1e-3)
    gaps = []
    for N in (10**2, 10**4, 10**8):
        s = 2 * cf.freezing_spread(N)
        gaps.append(
            (
                abs(cf.expected_square_sum(N, s) - cf.poisson_dirichlet_square_sum(2.0)),
                abs(cf.expected_largest(N, s) - cf.poisson_dirichlet_largest(2.0)),
            )
        )
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2][1] < 0.03
    below = [cf.expected_largest(N, 0.5 * cf.freezing_spread(N)) for N in (10**2, 10**4, 10**6, 10**8)]
    assert below == pytest.approx([0.165, 0.048, 0.014, 0.004], abs=6e-4)
    assert cf.poisson_dirichlet_largest(0.5) == cf.poisson_dirichlet_square_sum(0.9) == 0.0


@pytest.mark.parametrize("c", [1.2, 2.0, 4.0])
def test_the_limit_by_samples_of_the_Poisson_Dirichlet_law(c):
    """Points of intensity α x^{−α−1} dx are Γ_k^{−1/α} for the arrivals Γ_k of a Poisson process."""
    arrivals = torch.empty(3000, 1500, dtype=torch.float64)
    arrivals.exponential_(generator=torch.Generator().manual_seed(1))
    points = arrivals.cumsum(-1) ** -c
    alpha = 1 / c
    rest = alpha / (1 - alpha) * arrivals.sum(-1) ** (1 - c)  # the mean of the points that were cut off
    a = points / (points.sum(-1) + rest)[:, None]
    within(a.square().sum(-1), cf.poisson_dirichlet_square_sum(c))
    within(a.amax(-1), cf.poisson_dirichlet_largest(c))


@pytest.mark.parametrize(("n", "eps"), [(50, 0.5), (200, 0.3)])
def test_projections_on_the_dimension_keep_distances(n, eps):
    generator = torch.Generator().manual_seed(0)
    k, d = cf.johnson_lindenstrauss_dimension(n, eps), 1000
    assert k < d
    x = torch.randn(n, d, dtype=torch.float64, generator=generator)
    basis = torch.linalg.qr(torch.randn(d, k, dtype=torch.float64, generator=generator)).Q
    ratio = (torch.pdist(x @ basis) / torch.pdist(x)).square() * d / k
    assert float((ratio - 1).abs().max()) <= eps
    assert cf.johnson_lindenstrauss_dimension(n, eps, power=2.0) >= 2 * k - 1
    failure = n * (n - 1) * torch.exp(torch.tensor(-k * (eps**2 / 2 - eps**3 / 3) / 2))
    assert float(failure) < 1


@pytest.mark.parametrize(("rows", "columns"), [(500, 500), (300, 900), (60, 3000)])
def test_energy_of_the_top_singular_values_of_a_Gaussian_matrix(rows, columns):
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(5, rows, columns, dtype=torch.float64, generator=generator)
    energy = torch.linalg.eigvalsh(draws @ draws.mT).flip(-1)
    for fraction in (0.1, 0.5, 0.9):
        share = energy[:, : round(fraction * rows)].sum(-1) / energy.sum(-1)
        wanted = cf.marchenko_pastur_share(fraction, rows / columns)
        assert abs(float(share.mean()) - wanted) < 1.5 / rows  # eigenvalues sit within O(1/n) of their places


def test_both_forms_of_the_count_agree_with_quadrature():
    for y in (1.0, 0.7, 0.0101, 0.0099, 1e-6):
        for theta in (0.4, 1.5, 2.9):
            t = torch.linspace(0, theta, 20_001, dtype=torch.float64)
            f = t.sin().square() / (1 + y + 2 * sqrt(y) * t.cos())
            simpson = (f[0] + f[-1] + 4 * f[1:-1:2].sum() + 2 * f[2:-1:2].sum()) * (t[1] - t[0]) / 3
            assert _count_above(theta, y) == pytest.approx(float(simpson) * 2 / pi, rel=1e-10)
    assert cf.marchenko_pastur_share(0.0) == pytest.approx(0, abs=1e-15) and cf.marchenko_pastur_share(1.0) == 1.0
    assert cf.marchenko_pastur_share(0.3, 1e-9) == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cf.expected_largest(0, 1.0), "N: expected the number of logits"),
        (lambda: cf.expected_square_sum(5, -1.0), "s: expected a standard deviation"),
        (lambda: cf.johnson_lindenstrauss_dimension(10, 1.5), "eps: expected a distortion"),
        (lambda: cf.marchenko_pastur_share(0.5, 3.0), "aspect: expected smaller over larger"),
        (lambda: cf.marchenko_pastur_share(1.5), "fraction: expected a part"),
    ],
)
def test_bad_arguments_are_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_variances_of_random_features_are_here_too():
    assert cf.variance_trig is random_features.variance_trig
