"""The gated kernel against its recurrence, for gates that are open, shut, and anything between."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import heedful as h  # noqa: E402
import heedful.kernels.gated_linear as gated_package  # noqa: E402
from heedful.kernels import dispatch  # noqa: E402
from heedful.kernels.chunked_linear.reference import LinearState, chunked_linear  # noqa: E402
from heedful.kernels.dispatch import Backend  # noqa: E402
from heedful.kernels.gated_linear import gated_linear as gated_linear_kernel  # noqa: E402
from heedful.kernels.gated_linear import reference  # noqa: E402
from heedful.kernels.gated_linear.reference import gated_linear  # noqa: E402

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


def test_triton_says_what_it_can_not_take():
    q, k, v, g = drawn(10, "mild")
    for gates in (g, g[..., :1]):
        said = gated_linear_kernel.explain(q, k, v, log_decay=gates)
        assert "run on a GPU" in said and said.endswith("→ torch")
    form = _triton_form()
    wide = [torch.zeros(1, 1, 4, 129)] * 3
    for inputs, gates, reason in (
        ((q, k, v), g, "must share bfloat16, float16 or float32"),
        (wide, wide[0], "widths go up to 128, got 129"),
        ([x[:, :, :0].float() for x in (q, k, v)], g[:, :, :0], "nothing to launch"),
        ([x.float() for x in (q, k, v)], g[..., :1], "a gate for each channel"),
        ((q, k[:1], v), g, "k must be"),
    ):
        assert any(reason in x for x in form.objections(*inputs, log_decay=gates))


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


def _triton_form():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.gated_linear import triton as form

    return form


def poisoned(shape, like, dtype=torch.float32):
    """NaN in every output and workspace beforehand: what is not written shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=like.device)


def blocked(form, monkeypatch, block):
    """Blocks of that many tokens, and parts of 16 columns where an axis is split."""
    configs = {kind: {k: x._replace(block=block, split=16) for k, x in c.items()} for kind, c in form.CONFIGS.items()}
    monkeypatch.setattr(form, "CONFIGS", configs)


@pytest.fixture
def form(monkeypatch):
    """The Triton form with chunks of two blocks, so that a few dozen tokens make several."""
    form = _triton_form()
    monkeypatch.setattr(form, "SETUPS", form.launching.LaunchCache())
    blocked(form, monkeypatch, 16)
    monkeypatch.setattr(form, "span", lambda n, rows: 32)
    monkeypatch.setattr(form.launching, "empty", poisoned)
    return form


MIXED = [[-1] * 3 + [0] * 30 + [-1] * 20 + [0] * 7 + [1] * 25, [0] * 16 + [-1] * 16 + [1] * 32 + [-1] * 21]

TWO = dict(B=2, H=1)
CASES = {
    "one token": dict(n=1),
    "63 tokens, shut": dict(n=63, kind="shut"),
    "64 tokens, strong, state": dict(n=64, kind="strong", state=True),
    "all shut, state": dict(n=40, kind="all shut", state=True),
    "normalised, state": dict(n=70, normalise=True, feature="elu1", state=True, e=5),
    "relu, padded": dict(**TWO, normalise=True, feature="relu", segments=MIXED, state=True, r=20),
    "segments, shut": dict(**TWO, kind="shut", feature="elu1", segments=MIXED, state=True),
    "nothing but padding": dict(
        **TWO, n=20, normalise=True, feature="elu1", segments=[[-1] * 20, [3] * 20], state=True
    ),
    "wide features": dict(H=1, n=40, r=40, e=12, normalise=True, feature="elu1", state=True),
    "wide values": dict(H=1, n=40, r=12, e=40, state=True),
    "as wide as can be": dict(H=1, n=20, r=100, e=128, state=True),
}


def build(n=85, r=16, e=16, kind="mild", segments=None, state=False, B=1, H=2, **rest):
    generator = torch.Generator().manual_seed(n)
    q, k, v, u = (
        make(B, H, n, w, generator=generator).double().to(DEVICE)
        for make, w in ((torch.randn, r), (torch.randn, r), (torch.randn, e), (torch.rand, r))
    )
    shift = 0.8 * rest.get("normalise", False)  # denominators away from zero
    inputs = [q / 2 + shift, k / 2 + shift, v, GATES[kind](u)]
    options = rest | {"segments": None if segments is None else torch.tensor(segments, device=DEVICE)}
    if state:
        S, z = torch.randn(B, H, r, e, generator=generator), torch.rand(B, H, r, generator=generator)
        inputs += [x.double().to(DEVICE) for x in ((S, z) if rest.get("normalise") else (S,))]
    return inputs, options


def outcome(function, inputs, options, dtype):
    """Output, last state and all gradients of one call in `dtype`, gates and states in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [x.to(dtype if i < 3 else wide).requires_grad_() for i, x in enumerate(inputs)]
    state = LinearState(*leaves[4:], *[None] * (6 - len(leaves))) if len(leaves) > 4 else None
    out, last = function(*leaves[:3], log_decay=leaves[3], state=state, **options)
    results = [out, *(x for x in last if x is not None)]
    generator = torch.Generator().manual_seed(9)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in results)
    return [x.detach().double() for x in (*results, *torch.autograd.grad(loss, leaves))]


def distance(got, want, least=1.0):
    assert got.shape == want.shape and got.isfinite().all()
    return ((got - want).norm() / max(want.norm().item(), least)).item()


def check(got, want, inputs):
    """All of an outcome; what a gate gets is a sum of terms k ∘ dk that may cancel, so it is measured by them."""
    first = len(want) - len(inputs)
    for at, (one, other) in enumerate(zip(got, want, strict=True)):
        least = (inputs[1] * want[first + 1]).norm().item() if at == first + 3 else 1.0
        assert distance(one, other, least) < 2e-6


@pytest.mark.parametrize("case", CASES)
def test_triton_gives_the_same_with_its_gradients_and_states(form, case, fenced):
    inputs, options = build(**CASES[case])
    assert not form.objections(*(x.float() for x in inputs[:3]), log_decay=inputs[3], **options)
    want = outcome(gated_linear, inputs, options, torch.float64)
    check(outcome(form.gated_linear, inputs, options, torch.float32), want, inputs)


def test_every_block_and_chunk_gives_the_same(form, monkeypatch):
    inputs, options = build(n=150, H=1, kind="shut")
    want = outcome(gated_linear, inputs, options, torch.float64)
    for block, span in ((32, 64), (64, 128)):
        monkeypatch.setattr(form, "SETUPS", form.launching.LaunchCache())
        blocked(form, monkeypatch, block)
        monkeypatch.setattr(form, "span", lambda n, rows, span=span: span)
        check(outcome(form.gated_linear, inputs, options, torch.float32), want, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("r, e", [(16, 16), (64, 64), (48, 80), (128, 16), (128, 128)])
def test_no_product_has_fewer_than_16_columns_for_four_warps(r, e, dtype, monkeypatch):
    """Of narrower ones Triton may read shared memory where there is none; four warps take 64 channels."""
    form, seen = _triton_form(), []
    monkeypatch.setattr(form, "SETUPS", form.launching.LaunchCache())
    monkeypatch.setattr(form.launching, "launch", lambda ready, key, pointers, describe: seen.append(describe()))
    q, k, v, g = (torch.zeros(1, 1, 40, w, dtype=dtype, requires_grad=True) for w in (r, r, e, r))
    form.gated_linear(q, k, v, log_decay=g)[0].sum().backward()
    assert len(seen) >= 7
    for program, _grid, _numbers, constants, options in seen:
        if program is not form.triton_forward.scan:
            sides = options["num_warps"] / (4 * max(1, constants["R"] // 64))
            assert constants["BLOCK"] / max(1, sides) >= 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_in_triton_is_as_good_as_its_inputs(form, dtype):
    """A few roundings of that precision, no more."""
    inputs, options = build(n=40, normalise=True, feature="elu1")
    rounded = [x.to(dtype).double() for x in inputs[:3]] + inputs[3:]
    want = outcome(gated_linear, rounded, options, torch.float64)
    got = outcome(form.gated_linear, rounded, options, dtype)
    for one, other in zip(got, want, strict=True):
        assert distance(one, other) < 8 * torch.finfo(dtype).eps


def test_a_triton_state_goes_on_where_the_last_call_ended(form):
    (q, k, v, g), _ = build(n=70, normalise=True)
    inputs = [x.float() for x in (q, k, v, g)]
    whole, last = form.gated_linear(*inputs[:3], log_decay=inputs[3], normalise=True)
    state, parts = None, []
    for a, z in ((0, 33), (33, 34), (34, 70)):
        q, k, v, g = (x[..., a:z, :] for x in inputs)
        out, state = form.gated_linear(q, k, v, log_decay=g, normalise=True, state=state)
        parts.append(out)
    assert distance(torch.cat(parts, -2), whole) < 1e-6
    assert distance(state.S, last.S) < 1e-6 and distance(state.z, last.z) < 1e-6


def test_what_padding_holds_reaches_nothing_in_triton(form):
    inputs, options = build(**TWO, n=40, normalise=True, feature="elu1", segments=[x[:40] for x in MIXED])
    want = outcome(form.gated_linear, inputs, options, torch.float32)
    real = (options["segments"] >= 0)[:, None, :, None]
    spoilt = [torch.where(real, x, torch.nan) for x in inputs]
    for one, other in zip(outcome(form.gated_linear, spoilt, options, torch.float32), want, strict=True):
        assert torch.equal(one, other)


def test_strides_do_not_matter_to_triton(form):
    inputs, options = build(n=20)
    want = outcome(form.gated_linear, inputs, options, torch.float32)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for others in (turned, spread):
        for one, other in zip(outcome(form.gated_linear, others, options, torch.float32), want, strict=True):
            assert torch.equal(one, other)


def test_gates_that_learn_nothing_cost_nothing_in_triton(form):
    """Without a gradient for the gates or from the state the others stay as they are."""
    (q, k, v, g), _ = build(n=20)
    q, k, v, g = (x.float().requires_grad_() for x in (q, k, v, g))
    want = torch.autograd.grad(form.gated_linear(q, k, v, log_decay=g)[0].sum(), (q, k, v, g))
    got = torch.autograd.grad(form.gated_linear(q, k, v, log_decay=g.detach())[0].sum(), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=False))
    (alone,) = torch.autograd.grad(form.gated_linear(q, k, v, log_decay=g)[1].S.sum(), g)
    (other,) = torch.autograd.grad(gated_linear(q, k, v, log_decay=g)[1].S.sum(), g)
    assert distance(alone, other) < 1e-6


def test_the_mechanism_runs_on_triton(form, monkeypatch):
    attend = h.GatedLinear(16, 2, normalise=True).to(DEVICE)
    q, k, v = (x.float() for x in build(n=50)[0][:3])
    with h.backend("torch"):
        want = attend(q, k, v)
    monkeypatch.setattr(dispatch, "triton_unavailable", lambda q: [])
    assert attend.explain(q, k, v).endswith("→ gated_linear/triton")
    torch.testing.assert_close(attend(q, k, v), want, rtol=1e-5, atol=1e-5)
