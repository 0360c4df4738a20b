"""Fixed heads, in torch and in Triton (interpreted on the CPU), against the definition."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels import dispatch
from heedful.kernels.dispatch import Kernel
from heedful.kernels.fixed_heads import fixed_heads, reference
from heedful.kernels.fixed_heads.reference import KINDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def triton_form():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.fixed_heads import triton as form

    return form


@pytest.fixture(params=["torch", "triton"])
def form(request):
    return reference if request.param == "torch" else triton_form()


def matrices(n, m):
    """The definition of each kind, (heads, n, m), in float64."""
    q, k = torch.zeros(n, 1, dtype=torch.float64), torch.zeros(m, 1, dtype=torch.float64)
    heads = [h.FixedPattern("previous", edge="first") if kind == "earlier" else h.FixedPattern(kind) for kind in KINDS]
    return torch.stack([head.matrix(q, k) for head in heads]).to(DEVICE)


@pytest.mark.parametrize("m, n, e", [(1, 1, 3), (2, 2, 16), (3, 1, 5), (100, 100, 7), (300, 37, 16), (517, 517, 70)])
def test_rows_and_gradients_are_the_definitions(form, m, n, e):
    torch.manual_seed(0)
    v = torch.randn(2, len(KINDS), m, e, device=DEVICE, requires_grad=True)
    A = matrices(n, m)
    out = form.fixed_heads(v, KINDS, n)
    torch.testing.assert_close(out.double(), A @ v.double(), rtol=1e-5, atol=1e-5)
    g = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, g)
    torch.testing.assert_close(dv.double(), A.mT @ g.double(), rtol=1e-5, atol=1e-5)


def test_one_kind_serves_all_heads(form):
    v = torch.randn(2, 3, 50, 4, device=DEVICE)
    torch.testing.assert_close(form.fixed_heads(v, ("left",), 50), form.fixed_heads(v, ("left",) * 3, 50))


def test_values_may_lie_in_any_order(form):
    v = torch.randn(2, 50, len(KINDS), 4, device=DEVICE).transpose(1, 2)
    assert torch.equal(form.fixed_heads(v, KINDS, 50), form.fixed_heads(v.contiguous(), KINDS, 50))


def test_every_element_is_written(monkeypatch):
    form = triton_form()
    v = torch.randn(1, len(KINDS), 300, 20, device=DEVICE)
    wanted = form.fixed_heads(v, KINDS, 300)
    empty = torch.empty
    monkeypatch.setattr(form.torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    assert torch.equal(form.fixed_heads(v, KINDS, 300), wanted)


def test_the_second_call_of_a_kind_goes_straight_to_its_launches(monkeypatch):
    form, asked = triton_form(), []
    real = form.objections
    monkeypatch.setattr(form, "SETUPS", form.LaunchCache())
    monkeypatch.setattr(form, "objections", lambda *x: asked.append(1) or real(*x))
    monkeypatch.setattr(dispatch, "triton_unavailable", lambda v: [])
    monkeypatch.setattr(fixed_heads, "decisions", {})
    v = torch.randn(1, len(KINDS), 50, 4, device=DEVICE)
    wanted = form.fixed_heads(v, KINDS, 50)
    with monkeypatch.context() as patch:
        assert torch.equal(fixed_heads(v, KINDS, 50), wanted)
        patch.setattr(form, "fixed_heads", None)
        assert torch.equal(fixed_heads(v, KINDS, 50), wanted)
    assert asked == [1]
    assert torch.equal(fixed_heads(v, KINDS, 49), wanted[:, :, 1:])
    assert asked == [1, 1]
    (grad,) = torch.autograd.grad(fixed_heads(v.requires_grad_(), KINDS, 50).sum(), v)
    assert grad.shape == v.shape


def test_a_mixture_runs_its_fixed_heads_together(monkeypatch):
    from heedful.mechanisms import fixed_pattern

    calls = []

    class Recorded(Kernel):
        def __call__(self, v, kinds, n):
            calls.append(kinds)
            return super().__call__(v, kinds, n)

    kernel = fixed_pattern.fixed_heads
    monkeypatch.setattr(fixed_pattern, "fixed_heads", Recorded(kernel.name, *kernel.backends.values()))
    heads = [h.FixedPattern("left"), h.FixedPattern("previous", edge="first"), h.FixedPattern("end")]
    attend = h.Mixture([*heads, h.Softmax()])
    q, k, v = torch.randn(3, 2, 4, 30, 8, device=DEVICE).unbind()
    out = attend(q, k, v)
    assert calls == [("left", "earlier", "end")]
    torch.testing.assert_close(out, attend.matrix(q, k) @ v, rtol=1e-4, atol=1e-5)


def test_it_says_what_it_cannot_take():
    v = torch.randn(2, 3, 10, 4)
    with pytest.raises(ValueError, match="one for each head"):
        reference.fixed_heads(v, ("left", "end"), 10)
    with pytest.raises(ValueError, match="sideways"):
        reference.fixed_heads(v, ("sideways",), 10)
    with pytest.raises(ValueError, match="last of the 10 tokens"):
        reference.fixed_heads(v, ("left",), 11)
    assert "float64" in triton_form().objections(v.double().to(DEVICE), ("left",), 10)[0]
