"""What gated linear attention becomes at its limits."""

from __future__ import annotations

from math import log

import pytest
import torch

import heedful as h
from heedful.kernels.gated_linear.reference import gated_linear
from heedful.testing.case import Case, assert_agrees, dense, oracles, with_gradients


def constant(decay: float, **options) -> h.GatedLinear:
    """One whose gate is the same at every key: σ(β)^(1/τ) = decay."""
    attend = h.GatedLinear(8, **options).double()
    with torch.no_grad():
        attend.U.zero_()
        attend.beta.fill_(log(decay**attend.tau / (1 - decay**attend.tau)))
    return attend


def drawn(n=150, **options):
    return Case(lambda: None).draw(n, seed=1, **options)


@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_constant_gate_is_retention(gate, normalise):
    q, k, v = drawn()
    attend, retention = constant(0.9, gate=gate, normalise=normalise), h.Retention(0.9, normalise).double()
    torch.testing.assert_close(attend(q, k, v), retention(q, k, v))
    torch.testing.assert_close(attend.matrix(q, k), retention.matrix(q, k))


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_an_open_gate_is_linear_attention(gate):
    q, k, v = drawn()
    attend = h.GatedLinear(8, gate=gate).double()
    with torch.no_grad():
        attend.beta.fill_(800.0)
    assert not attend.log_gates(k).any()
    torch.testing.assert_close(attend(q, k, v), h.Linear(h.Identity(), normalise=False)(q, k, v))


@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_shut_gate_leaves_each_token_to_itself(gate, dtype):
    q, k, v = drawn(dtype=dtype)
    attend = h.GatedLinear(8, gate=gate).to(dtype)
    with torch.no_grad():
        attend.beta.fill_(-1e6)
    out, *grads = with_gradients(attend, (q, k, v), v)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)
    assert all(x.isfinite().all() for x in grads)


def test_channels_fade_by_themselves():
    """Retention with one λ for each channel, as many heads of width 1 added up."""
    q, k, v = drawn()
    attend = constant(0.9)
    decay = torch.linspace(0.5, 0.99, 8, dtype=torch.float64)
    with torch.no_grad():
        attend.beta.copy_((decay**16 / (1 - decay**16)).log())
    alone = [h.Retention(d.item()).double()(q[..., c, None], k[..., c, None], v) for c, d in enumerate(decay)]
    torch.testing.assert_close(attend(q, k, v), sum(alone))


def test_normalised_rows_sum_to_one_and_gradients_are_those_of_the_matrix():
    case = Case(lambda: h.GatedLinear(8, heads=2, normalise=True))
    attend, inputs, weight = case.mechanism(), case.draw(130, seed=2), case.draw(130, seed=3)[2]
    rows = attend.matrix(*inputs[:2]).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    want = oracles(lambda *x: with_gradients(lambda *y: dense(attend, *y), x, weight), *inputs, terms=260)
    for name, one, other in zip("oqkv", with_gradients(attend, inputs, weight), want, strict=True):
        assert_agrees(one, other, f"{name} with a normaliser", "the normaliser's column is wrong")


def test_a_reset_in_the_middle_forgets_what_was_before():
    """A gate that one key shuts: all later rows are those of the sequence that begins there."""
    q, k, v = drawn()
    k = k.clone()
    attend = h.GatedLinear(8, rank=1).double()
    with torch.no_grad():
        attend.W.zero_()
        attend.W[..., 0] = 1.0
        attend.U.fill_(1e4)
        attend.beta.fill_(5e4)
    k[..., 0] = k[..., 0].clamp(-1, 1)
    k[..., 70, 0] = -1e3
    torch.testing.assert_close(attend(q, k, v)[..., 70:, :], attend(*(x[..., 70:, :] for x in (q, k, v))))


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (dict(d=0), ValueError, "d:"),
        (dict(d=8, gate="token"), ValueError, "gate:"),
        (dict(d=8, tau=0.0), ValueError, "tau:"),
        (dict(d=8, feature_map=h.Exp()), TypeError, "feature_map:"),
    ],
)
def test_bad_options_are_named(options, error, named):
    with pytest.raises(error, match=named):
        h.GatedLinear(**options)


def test_inputs_of_another_layer_are_named():
    q, k, v = drawn(5)
    with pytest.raises(ValueError, match="k: width 8"):
        h.GatedLinear(16).double()(q, k, v)
    with pytest.raises(ValueError, match="heads = 3"):
        h.GatedLinear(8, heads=3).double()(q, k, v)


@pytest.mark.parametrize("feature_map", [h.Taylor(), h.CosFormer(4096)], ids=lambda x: type(x).__name__)
def test_each_feature_has_its_gate(feature_map):
    """Maps that widen, that turn with position: under packing, where positions begin anew."""
    q, k, v = drawn(90)
    attend = h.GatedLinear(8, 2, feature_map=feature_map, normalise=True).double()
    assert attend.log_gates(k).shape[-1] == feature_map.dim(8)
    ids = torch.tensor([0] * 40 + [-1] * 5 + [1] * 45)
    torch.testing.assert_close(attend(q, k, v, segments=ids), attend.matrix(q, k, segments=ids) @ v)
    alone = attend(*(x[..., 45:, :] for x in (q, k, v)))
    torch.testing.assert_close(attend(q, k, v, segments=ids)[..., 45:, :], alone)


def test_a_large_weight_of_a_token_for_itself_leaves_the_gates_alone():
    """No gate changes it, but rounded twice it would drown the gradients of gates that are small."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2, 16, dtype=torch.float64) for _ in range(3))
    q, k = 60 * q, 60 * k
    gates = torch.tensor([-1.0, -60.0], dtype=torch.float64).view(1, 1, 2, 1).expand(1, 1, 2, 16)
    found = {}
    for dtype in (torch.float64, torch.float32):
        g = gates.to(dtype).clone().requires_grad_()
        out, _ = gated_linear(q.to(dtype), k.to(dtype), v.to(dtype), log_decay=g)
        found[dtype] = torch.autograd.grad(out.square().sum(), g)[0].double()
    assert (found[torch.float32] - found[torch.float64]).abs().max() < 1e-12
