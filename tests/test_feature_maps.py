"""Each feature map's inner products are the kernel that its docstring states."""

from __future__ import annotations

from math import factorial, pi

import pytest
import torch

import heedful as h


def pair(n=20, d=6, seed=0):
    torch.manual_seed(seed)
    return torch.randn(2, n, d, dtype=torch.float64).unbind()


def inner(feature_map, q, k):
    return feature_map.query(q) @ feature_map.key(k).mT


def assert_equal(ours, theirs):
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_identity_is_the_inner_product():
    q, k = pair()
    assert_equal(inner(h.Identity(), q, k), q @ k.mT)


def test_elu1_keeps_small_exponentials():
    x = torch.tensor([[-50.0, -1.0, 0.0, 2.0]], dtype=torch.float32)
    assert torch.allclose(h.Elu1().query(x), torch.tensor([[1.9287e-22, 0.36788, 1.0, 3.0]]), rtol=1e-4)


def test_relu_features_are_not_the_relu_of_the_inner_product():
    q, k = torch.tensor([[-1.0, 0.0]]), torch.tensor([[-1.0, 0.0]])
    assert inner(h.Relu(), q, k).item() == 0
    assert (q @ k.mT).relu().item() == 1


def test_exp_is_the_sum_of_exponentials_entry_by_entry():
    q, k = pair()
    assert_equal(inner(h.Exp(), q, k), (q[:, None] + k[None]).exp().sum(-1))


def test_cos_is_entry_by_entry():
    q, k = pair()
    assert_equal(inner(h.Cos(), q, k), q.cos() @ k.cos().mT)


def test_cosformer_weighs_by_the_distance():
    q, k = pair()
    i = torch.arange(20, dtype=torch.float64)
    distance = (i[:, None] - i) * pi / 2 / 64
    assert_equal(inner(h.CosFormer(64), q, k), q.relu() @ k.relu().mT * distance.cos())


def test_cosformer_refuses_positions_beyond_its_length():
    with pytest.raises(ValueError, match="longest sequence"):
        h.CosFormer(10).query(torch.randn(11, 4))


def test_cosformer_does_not_depend_on_padding():
    attend = h.Linear(h.CosFormer(64))
    q, k = pair()
    short = attend(q[:7], k[:7], k[:7])
    padded = attend(q, k, k, segments=h.segments.from_lengths(torch.tensor(7), 20))
    assert_equal(padded[:7], short)


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_polynomial_is_the_series_of_the_exponential(degree):
    q, k = pair()
    s = q @ k.mT * 6**-0.5
    assert_equal(inner(h.Polynomial(degree), q, k), sum(s**p / factorial(p) for p in range(degree + 1)))


def test_taylor_is_polynomial_of_degree_two_in_half_the_features():
    q, k = pair()
    assert_equal(inner(h.Taylor(), q, k), inner(h.Polynomial(2), q, k))
    assert h.Taylor().dim(6) == 28
    assert h.Polynomial(2).dim(6) == 43


def test_hedgehog_starts_as_softmax_of_both_signs():
    q, _ = pair()
    features = h.Hedgehog(6).double().query(q[None])[0]
    assert_equal(features, torch.cat([q.softmax(-1), (-q).softmax(-1)], -1))


@pytest.mark.parametrize(
    "feature_map",
    [h.Identity(), h.Elu1(), h.Relu(), h.Exp(), h.Cos(), h.CosFormer(64), h.Polynomial(3), h.Taylor(), h.Hedgehog(6)],
    ids=lambda feature_map: type(feature_map).__name__,
)
def test_dim_is_the_number_of_features(feature_map):
    assert feature_map.query(torch.randn(1, 5, 6)).shape[-1] == feature_map.dim(6)


def test_linear_refuses_what_it_can_not_sum():
    with pytest.raises(ValueError, match="can't leave single keys out"):
        h.Linear(pattern=h.Window(4))
    with pytest.raises(TypeError, match="FeatureMap"):
        h.Linear(torch.relu)


@pytest.mark.parametrize("decay", [0.0, 1.5, -1.0, torch.ones(2, 2)])
def test_retention_refuses_a_decay_outside_zero_to_one(decay):
    with pytest.raises(ValueError, match="decay"):
        h.Retention(decay)


def test_retention_without_decay_is_linear_attention():
    q, k = pair()
    assert_equal(h.Retention(1.0)(q, k, k), h.Linear(h.Identity(), normalise=False)(q, k, k))


def test_retention_has_a_decay_for_each_head():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 30, 4, dtype=torch.float64).unbind()
    out = h.Retention(torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64))(q, k, v)
    for head, decay in enumerate((0.5, 0.9, 1.0)):
        assert_equal(out[:, head], h.Retention(decay)(q[:, head], k[:, head], v[:, head]))
