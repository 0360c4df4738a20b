"""Random features made group by group on a CPU: the reference's results and gradients, nothing of size n·r kept."""

import pytest
import torch

import heedful as h
from heedful.bench.memory import allocated
from heedful.kernels.linear_attention import LinearCall, LinearOptions
from heedful.kernels.random_features import groups, random_features, reference

CASES = {
    "causal": dict(H=2, KV=2, own=1, n=300, m=300, causal=True),
    "causal, heads share keys, a bias of keys": dict(H=4, KV=2, own=1, n=70, m=70, causal=True, key_bias=True),
    "causal, a projection a head": dict(H=3, KV=3, own=3, n=77, m=77, causal=True),
    "causal, one token": dict(H=2, KV=2, own=1, n=1, m=1, causal=True),
    "full": dict(H=2, KV=2, own=1, n=300, m=41, causal=False),
    "full, a projection a head, a bias of keys": dict(H=3, KV=3, own=3, n=20, m=600, causal=False, key_bias=True),
}


def inputs(H, KV, own, n, m, causal, key_bias=False, spread=1.0):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(2, H, n, 4), draw(2, KV, m, 4) * spread, draw(2, KV, m, 3)
    options = dict(query_weight=draw(own, 4, 10), key_weight=draw(own, 4, 10), bias=draw(own, 10))
    options |= dict(curvature=1.3, causal=causal)
    if key_bias:
        options["key_bias"] = draw(2, KV, m)
    return [q, k, v], options


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_groups_give_what_the_reference_gives(case, spread):
    tokens, options = inputs(**case, spread=spread)
    learned = [x.requires_grad_() for x in (*tokens, options.get("key_bias")) if x is not None]
    ours, theirs = (module.random_features(*tokens, **options) for module in (groups, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    above = torch.randn_like(ours)
    for one, other in zip(*(torch.autograd.grad(out, learned, above) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_keys_far_apart_overflow_nowhere(causal):
    tokens, options = inputs(2, 2, 1, 90, 90, causal)
    tokens[1][:, :, 40] *= 300  # a key whose features are e^−10⁵ of the others', then one e^10³ times theirs
    options["key_bias"] = torch.zeros(2, 2, 90, dtype=torch.float64)
    options["key_bias"][:, :, 60] = 1000.0
    single = {name: x.float() if torch.is_tensor(x) else x for name, x in options.items()}
    ours = groups.random_features(*(x.float() for x in tokens), **single)
    torch.testing.assert_close(ours.double(), reference.random_features(*tokens, **options), rtol=1e-3, atol=1e-4)


def test_a_cpu_runs_it_and_keeps_no_features():
    n, r = 16384, 256
    mechanism = h.Linear(h.FavorPlus(16, r), h.Causal())
    q, k, v = torch.randn(3, 1, 2, n, 16).unbind()
    assert mechanism.explain(q, k, v).endswith("→ random_features/cpu_groups")
    features = 2 * n * r * q.element_size()
    assert allocated(lambda: mechanism(q, k, v)).peak < features / 2


def test_float64_inputs_are_not_rounded_by_float32_projections():
    mechanism = h.Linear(h.FavorPlus(4, 8), h.Causal())
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64).unbind()
    assert "random_features/cpu_groups: projections in torch.float32 would round" in mechanism.explain(q, k, v)
    torch.testing.assert_close(mechanism(q, k, v), mechanism.matrix(q, k) @ v, rtol=1e-10, atol=1e-12)


def test_a_projection_that_learns_is_left_to_the_reference():
    tokens, options = inputs(2, 2, 1, 9, 9, True)
    options["query_weight"].requires_grad_()
    assert any("gradient of the projection" in said for said in groups.objections(*tokens, **options))
    out = random_features(*tokens, **options)
    assert torch.autograd.grad(out.sum(), options["query_weight"])[0].abs().max() > 0


@pytest.mark.parametrize(
    "phi", [h.FavorPlus(4, 8), h.FavorPlusPlus(4, 8), h.FavorSharp(4, 8)], ids=lambda x: type(x).__name__
)
def test_weights_of_features_are_cached_until_the_map_changes(phi):
    q, k, v = torch.randn(3, 2, 30, 4, generator=torch.Generator().manual_seed(0)).unbind()
    attend = h.Linear(phi)

    def logs():
        torch.testing.assert_close(attend(q, k, v), attend.matrix(q, k) @ v, atol=1e-5, rtol=1e-5)
        return LinearCall(q, k, v, LinearOptions(phi, normalise=True, causal=True)).logs

    first = logs()
    assert logs() is first
    phi.scale *= 2
    second = logs()
    assert second is not first
    phi.redraw(torch.Generator().manual_seed(1))
    assert logs() is not second
