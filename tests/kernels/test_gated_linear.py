"""The gated kernel against its recurrence, for gates that are open, shut, and anything between."""

from __future__ import annotations

import pytest
import torch

import heedful.kernels.gated_linear as gated_package
from heedful.kernels.chunked_linear.reference import LinearState, chunked_linear
from heedful.kernels.dispatch import Backend
from heedful.kernels.gated_linear import gated_linear as gated_linear_kernel
from heedful.kernels.gated_linear import reference
from heedful.kernels.gated_linear.reference import gated_linear

GATES = {
    "mild": lambda u: -u / 10,
    "open": lambda u: 0 * u,
    "strong": lambda u: torch.where(u < 0.3, -1e4, -u / 10),
    "shut": lambda u: torch.where(u < 0.3, -torch.inf, -u / 10),
    "all shut": lambda u: torch.full_like(u, -torch.inf),
}


def replay(q, k, v, g, ids=None, S=None):
    """S ← α ∘ S + k vᵀ, o = Sᵀ q, token by token; a new segment begins with nothing, and padding is no token."""
    S = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if S is None else S
    rows, last = [], None
    for t in range(q.shape[-2]):
        real = ids is None or ids[t] >= 0
        if real:
            S = torch.zeros_like(S) if ids is not None and last not in (None, int(ids[t])) else S
            last = None if ids is None else int(ids[t])
            S = g[..., t, :, None].exp() * S + k[..., t, :, None] * v[..., t, None, :]
        rows.append((q[..., t, :, None] * S).sum(-2) if real else torch.zeros_like(v[..., t, :]))
    return torch.stack(rows, -2), S


def drawn(n, kind, dtype=torch.float64, r=5, e=3):
    generator = torch.Generator().manual_seed(n)
    q, k, v, u = (
        make(2, 3, n, w, generator=generator, dtype=torch.float64).to(dtype)
        for make, w in ((torch.randn, r), (torch.randn, r), (torch.randn, e), (torch.rand, r))
    )
    return q, k, v, GATES[kind](u)


def results(call, inputs):
    """Output, last state, and the gradients of both in q, k, v and the gates."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, S = call(*leaves)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (out, S)]
    grads = torch.autograd.grad((out * weights[0]).sum() + (S * weights[1]).sum(), leaves)
    return [out.detach(), S.detach(), *grads]


def fast(q, k, v, g, segments=None):
    out, state = gated_linear(q, k, v, log_decay=g, segments=segments)
    return out, state.S


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_it_is_the_recurrence_with_its_gradients(n, kind):
    inputs = drawn(n, kind)
    for one, other in zip(results(fast, inputs), results(replay, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", GATES)
def test_one_gate_serves_all_channels(kind):
    q, k, v, g = drawn(150, kind)
    wide = results(lambda q, k, v, g: replay(q, k, v, g.expand_as(q)), (q, k, v, g[..., :1]))
    for one, other in zip(results(fast, (q, k, v, g[..., :1])), wide, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", GATES)
def test_float32_is_exact_to_its_last_places_after_shut_gates_too(kind):
    """A difference of cumulative sums would keep three places of what follows a gate of e^-10000."""
    inputs = drawn(200, kind, torch.float32)
    exact = replay(*(x.double() for x in inputs))[0]
    error = (gated_linear(*inputs[:3], log_decay=inputs[3])[0] - exact).abs().max() / exact.abs().max()
    assert error < 8 * torch.finfo(torch.float32).eps


def test_gates_that_overflow_the_naive_form_do_not():
    q, k, v, _ = drawn(200, "open", torch.float32)
    g = torch.full_like(q, -2.0)
    assert (-g.cumsum(-2)).exp().isinf().any()  # k ∘ e^-b
    out, S = results(fast, (q, k, v, g))[:2]
    want, state = replay(*(x.double() for x in (q, k, v, g)))
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(S.double(), state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["mild", "shut"])
def test_segments_and_padding_anywhere_in_chunks(kind):
    n = 150
    ids = torch.tensor([0] * 10 + [-1] * 3 + [0] * 55 + [4] * 60 + [-1] * 2 + [1] + [7] * 10 + [-1] * 9)
    inputs = drawn(n, kind)
    segments = ids.expand(2, n)
    got = results(lambda *x: fast(*x, segments), inputs)
    want = results(lambda *x: replay(*x, ids), inputs)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_state_goes_on_where_the_last_call_ended(normalise):
    q, k, v, g = drawn(150, "mild")
    q, k = q.abs(), k.abs()
    whole, last = gated_linear(q, k, v, log_decay=g, normalise=normalise)
    state, parts = None, []
    for a, z in ((0, 70), (70, 71), (71, 150)):
        cut = [x[..., a:z, :] for x in (q, k, v, g)]
        out, state = gated_linear(*cut[:3], log_decay=cut[3], normalise=normalise, state=state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, -2), whole)
    torch.testing.assert_close(state.S, last.S)
    assert (state.z is None) is (not normalise)


def test_the_first_state_has_a_gradient():
    q, k, v, g = drawn(70, "mild")
    S = torch.randn(2, 3, 5, 3, dtype=torch.float64, requires_grad=True)
    ours = gated_linear(q, k, v, log_decay=g, state=LinearState(S, None))[0]
    torch.testing.assert_close(ours, replay(q, k, v, g, S=S)[0])
    (one,) = torch.autograd.grad(ours.square().sum(), S)
    (other,) = torch.autograd.grad(replay(q, k, v, g, S=S)[0].square().sum(), S)
    torch.testing.assert_close(one, other)


def test_groups_of_chunks_change_nothing(monkeypatch):
    inputs = drawn(500, "mild")
    ids = torch.tensor([0] * 130 + [1] * 370).expand(2, -1)
    want = results(lambda *x: fast(*x, ids), inputs)
    monkeypatch.setattr(reference, "BUDGET", 1)
    for one, other in zip(results(lambda *x: fast(*x, ids), inputs), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_what_it_can_not_take_it_says():
    q, k, v, g = drawn(10, "mild")
    back = torch.tensor([0] * 4 + [1] * 3 + [0] * 3).expand(2, -1)
    for wrong, said in (
        (dict(log_decay=g[..., :2]), "one for each channel"),
        (dict(log_decay=g, feature="exp"), "feature must be one of"),
        (dict(log_decay=g, segments=back), "comes back"),
        (dict(log_decay=g, segments=back[:1]), "segments must be"),
        (dict(log_decay=g, state=LinearState(g[0], None)), "state.S must be"),
    ):
        with pytest.raises(ValueError, match=said):
            gated_linear(q, k, v, **wrong)


def test_a_backend_that_needs_one_gate_a_head_says_so():
    q, k, v, g = drawn(10, "mild")
    said = gated_linear_kernel.explain(q, k, v, log_decay=g)
    assert "not one for each channel" in said and said.endswith("→ torch")
    assert "run on a GPU" in gated_linear_kernel.explain(q, k, v, log_decay=g[..., :1])


def test_triton_takes_one_gate_a_head_as_a_decay(monkeypatch):
    """What the Triton form is called with is the decay that gives the same result."""
    q, k, v, g = drawn(150, "strong")
    taken = Backend("triton", chunked_linear, lambda *args, **options: [])
    monkeypatch.setattr(gated_package, "_decay", taken)
    ids = torch.tensor([0] * 70 + [1] * 80).expand(2, -1)
    out, state = gated_linear_kernel(q, k, v, log_decay=g[..., :1], segments=ids, normalise=False)
    want, last = gated_linear(q, k, v, log_decay=g[..., :1], segments=ids)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(state.S, last.S)


def test_nothing_larger_than_the_inputs_is_kept_for_the_backward_pass():
    q, k, v, g = (x.requires_grad_() for x in drawn(1000, "mild"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        gated_linear(q, k, v, log_decay=g)
    assert max(kept) == q.numel() and sum(kept) < 8 * q.numel()
