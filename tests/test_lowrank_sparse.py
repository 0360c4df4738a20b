"""Low rank plus sparse: what the contract can't see, limits above all."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.partial import join, partial_softmax
from heedful.testing import CHECKS, Case, DoesNotApply
from heedful.testing.case import assert_agrees, dense, oracles, with_gradients

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=DOUBLE) for _ in range(count)]


def favor(d: int = 8, features: int = 16, **options) -> h.FavorPlus:
    return h.FavorPlus(d, features, **options).to(DOUBLE)


VARIANTS = {
    "both ways": lambda: h.LowRankSparse(h.FavorPlus(8, 16), 4, h.Full()),
    "both ways, no window": lambda: h.LowRankSparse(h.FavorPlus(8, 16), 0, h.Full()),
    "learned features for each head": lambda: h.LowRankSparse(h.Hedgehog(8, 2), 3),
    "linformer, not shared, a projection for each head": lambda: h.LinformerSparse(2048, 8, 3, shared=False, heads=2),
}
DEAR = (
    "compiled_equals_eager",
    "flops_are_what_cost_says",
    "precision_is_no_worse_than_naive",
    "products_and_steps_are_as_precise",
)
"""They take seconds, and see nothing in a variant that they do not see in the catalogue's entry."""


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in DEAR])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_the_contract(name, check):
    try:
        CHECKS[check](Case(VARIANTS[name], length=300))
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("pattern", [h.Causal(), h.Full()], ids=repr)
def test_the_flops_of_both_directions_are_counted(pattern):
    CHECKS["flops_are_what_cost_says"](Case(lambda: h.LowRankSparse(h.FavorPlus(8, 64), 128, pattern), length=1024))


@pytest.mark.parametrize("pattern", [h.Causal(), h.Full()], ids=repr)
@pytest.mark.parametrize("ids", [None, torch.tensor([0] * 12 + [1] * 21 + [-1] * 4)], ids=["whole", "packed"])
def test_a_window_over_everything_is_softmax(pattern, ids):
    q, k, v = draw(2, 37, 8)
    inputs, (weight,) = (q, k, v), draw(2, 37, 8, seed=1, count=1)
    exact = h.Softmax(pattern)
    want = oracles(lambda *x: with_gradients(lambda *y: dense(exact, *y, ids), x, weight), *inputs, terms=45)
    for window in (37, 1000):
        attend = h.LowRankSparse(favor(), window, pattern)
        got = with_gradients(lambda *y, f=attend: f(*y, segments=ids), inputs, weight)
        for name, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
            assert_agrees(one, other, f"{name} with a window of {window} for 37 tokens", "features where all is near")


@pytest.mark.parametrize("pattern", [h.Causal(), h.Full()], ids=repr)
def test_no_window_is_linear_attention(pattern):
    q, k, v = draw(2, 300, 8)
    phi = favor()
    assert torch.allclose(h.LowRankSparse(phi, 0, pattern)(q, k, v), h.Linear(phi, pattern)(q, k, v), atol=1e-12)


def test_it_is_the_low_rank_matrix_with_a_sparse_correction():
    """Scatterbrain's form: φφᵀ everywhere, plus exp(S) − φφᵀ on the pattern, then one normaliser."""
    q, k, v = draw(50, 8)
    phi, near = favor(), h.Window(5).allows(torch.arange(50)[:, None], torch.arange(50))
    low = (phi.query(q) @ phi.key(k).mT).tril()
    weights = low + torch.where(near, (q @ k.mT * 8**-0.5).exp() - low, 0)
    want = weights / weights.sum(-1, keepdim=True) @ v
    assert torch.allclose(h.LowRankSparse(phi, 6)(q, k, v), want, atol=1e-12)


@pytest.mark.parametrize("kind", [h.FavorPlus, h.FavorPlusPlus, h.FavorSharp])
def test_more_features_come_nearer_to_softmax(kind):
    q, k, v = (x / 3 for x in draw(4, 300, 8))  # short, so that the features' variance is small and their tails light
    truth = h.Softmax()(q, k, v)

    def error(features: int) -> float:
        maps = [kind(8, features, seed).to(DOUBLE) for seed in range(4)]
        for phi in maps:
            if kind is not h.FavorPlus:
                phi.calibrate(q, k)
        return sum((h.LowRankSparse(phi, 16)(q, k, v) - truth).norm().item() for phi in maps) / len(maps)

    few, more, many = error(8), error(64), error(512)
    assert many < 0.5 * more < 0.25 * few  # 8 × the features: 8^-½ = 0.35 × the error


def test_a_wider_window_comes_nearer_to_softmax():
    """Where keys near a query are alike to it, as in text: the window takes the large weights off the features."""
    generator = torch.Generator().manual_seed(0)
    path = torch.randn(600, 8, generator=generator, dtype=DOUBLE)
    path = torch.stack([path[max(0, t - 20) : t + 1].sum(0) for t in range(600)]) / 20**0.5
    v = draw(600, 8, seed=1, count=1)[0]
    truth = h.Softmax()(path * 2, path, v)
    errors = [
        (h.LowRankSparse(favor(features=64), w)(path * 2, path, v) - truth).norm().item() for w in (0, 16, 64, 256)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_far_part_survives_beside_large_scores(size):
    """Exact scores of hundreds and features of other sizes share one shift: nothing overflows, nothing is lost."""
    q, k, v = draw(2, 80, 8)
    q, k = q * size**0.5, k * size**0.5
    attend = h.LowRankSparse(favor(features=256), 7)
    assert torch.allclose(attend(q, k, v), dense(attend, q, k, v), atol=1e-9)
    single = attend.float()(q.float(), k.float(), v.float())
    assert torch.isfinite(single).all()


def test_what_leaves_the_queue_enters_the_sums():
    attend = h.LowRankSparse(favor(), 3)
    q, k, v = draw(1, 9, 8)
    state = attend.init_state(q, k, v)
    for t in range(9):
        _, state = attend.step(state, *(x[:, t : t + 1] for x in (q, k, v)))
        assert state.k.shape[-2] == min(t + 1, 3)
    gone = attend.feature_map.key(k[:, :6])
    scale = state.log_scale.exp()
    assert torch.allclose(state.z * scale, gone.sum(-2))
    assert torch.allclose(state.S * scale[..., None], gone.mT @ v[:, :6])
    _, at_once = attend.prefill(q, k, v)
    for one, other in zip(state, at_once, strict=True):
        assert torch.allclose(one.double(), other.double())


def test_a_state_does_not_grow_and_keeps_grouped_keys_shared():
    attend = h.LowRankSparse(favor(), 4)
    q, k, v = draw(2, 6, 30, 8)
    k, v = k[:, :1], v[:, :1]
    _, state = attend.prefill(q, k, v)
    assert state.k.shape == (2, 1, 4, 8) and state.S.shape == (2, 1, 16, 8)
    out, state = attend.step(state, *(x[..., :1, :] for x in (q, k, v)))
    assert out.shape == (2, 6, 1, 8) and state.S.shape == (2, 1, 16, 8)


@pytest.mark.parametrize("pattern", [h.Full(), h.Window(3, 2), h.Window(2, sinks=1)], ids=repr)
def test_parts_of_a_softmax_join_to_the_whole(pattern):
    q, k, v = draw(2, 3, 40, 5)
    weight, slope = draw(2, 3, 40, 5, seed=1, count=1)[0], draw(2, 3, 40, seed=2, count=1)[0]

    def plain(q, k, v):
        i = torch.arange(40)
        s = (q @ k.mT * 0.4).masked_fill(~pattern.allows(i[:, None], i), -torch.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1)

    def both(call):
        def run(q, k, v):
            out, lse = call(q, k, v)
            return (out * weight).sum(-1) + lse * slope  # the gradient in the logarithm counts too

        return run

    ones = torch.ones(2, 3, 40, dtype=DOUBLE)
    want = oracles(lambda *x: with_gradients(both(plain), x, ones), q, k, v, terms=45)
    got = with_gradients(both(lambda *x: partial_softmax(*x, pattern, None, 0.4)), (q, k, v), ones)
    for name, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{name} of a part", "dlse is left out")
    parts = [partial_softmax(q, k[..., s, :], v[..., s, :], h.Full(), None, 0.4) for s in (slice(0, 9), slice(9, 40))]
    assert torch.allclose(join(*parts), h.Softmax(h.Full(), scale=0.4)(q, k, v))


def test_a_part_without_keys_takes_no_share_and_passes_no_gradient():
    lse = torch.tensor([0.0, -torch.inf], requires_grad=True)
    out = join((torch.ones(2, 3), lse), (torch.zeros(2, 3), torch.tensor([-torch.inf, -torch.inf])))
    out.sum().backward()
    assert out[0].eq(1).all() and torch.isfinite(lse.grad).all()


def test_linformer_sparse_with_every_projection_far_away_is_the_window():
    """Mixtures that no query scores leave the window alone."""
    q, k, v = draw(2, 30, 8)
    q, k = q.abs(), k.abs()
    attend = h.LinformerSparse(30, 4, 6, projection="pooled").to(DOUBLE)
    attend.E *= -1e4
    assert torch.allclose(attend(q, k, v), h.Softmax(h.Window(5, 5))(q, k, v))


@pytest.mark.parametrize(
    "build, name",
    [
        (lambda: h.LowRankSparse(h.Elu1()), "feature_map"),
        (lambda: h.LowRankSparse(h.FavorPlus(8, 4), -1), "window"),
        (lambda: h.LowRankSparse(h.FavorPlus(8, 4), 4, h.Window(3)), "pattern"),
        (lambda: h.LowRankSparse(h.FavorPlus(8, 4), 4, scale=1.0), "scale"),
        (lambda: h.LinformerSparse(30, 4, 0), "window"),
        (lambda: h.LinformerSparse(30, 4, pattern=h.Causal()), "pattern"),
        (lambda: h.build("lowrank-sparse", d=8, kind="favor"), "kind"),
    ],
)
def test_a_bad_option_is_named(build, name):
    with pytest.raises((TypeError, ValueError), match=name):
        build()
