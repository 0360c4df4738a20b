"""Chunked linear attention, in torch and in Triton (interpreted on the CPU), against the formula."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

import heedful as h  # noqa: E402
from heedful.kernels import dispatch  # noqa: E402
from heedful.kernels.chunked_linear import chunks, reference  # noqa: E402
from heedful.kernels.chunked_linear.reference import LinearState  # noqa: E402
from heedful.kernels.dispatch import Backend, Kernel  # noqa: E402
from heedful.kernels.linear_attention import LinearCall, linear_attention  # noqa: E402


def _triton_form():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.chunked_linear import triton as form

    return form


@pytest.fixture(params=["reference", "triton"])
def form(request):
    return reference if request.param == "reference" else _triton_form()


@pytest.fixture(params=["reference", "one launch", "two launches", "three launches"])
def way(request, monkeypatch):
    """A form; of the Triton one, each way to join the chunks, of which the sizes would choose one."""
    if request.param == "reference":
        return reference
    form, count = _triton_form(), ["one launch", "two launches", "three launches"].index(request.param) + 1
    monkeypatch.setattr(form.launches, "joined", lambda *_: count)
    monkeypatch.setattr(form.launches, "merged", lambda *_: count == 1)
    return form


def phi(x, feature):
    return {
        "identity": lambda x: x,
        "elu1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
        "relu": torch.relu,
        "exp": torch.exp,
    }[feature](x)


def true_state(state):
    """S and z with their scale multiplied in."""
    if state.log_scale is None:
        return state.S, state.z
    scale = state.log_scale.exp()
    return state.S * scale[..., None], None if state.z is None else state.z * scale


def dense(
    q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, angles=None, segments=None, state=None
) -> tuple[torch.Tensor, LinearState]:
    """The definition, written out in full, in the dtype it is given."""
    (B, H, n, _), (_, Hkv, m, _) = q.shape, v.shape
    heads = Hkv if log_decay is None else H
    fq = phi(q, feature)
    fk, v = (x.repeat_interleave(H // Hkv, 1) for x in (phi(k, feature), v))
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)[None]
    allowed = (j <= i if causal else i >= 0).expand(n, m)[None, None]
    real = torch.ones(B, m, dtype=torch.bool, device=q.device)
    if segments is not None:
        real = segments >= 0
        same = (segments[:, :, None] == segments[:, None]) & real[:, None] & real[:, :, None]
        allowed = allowed & same[:, None]
    w = allowed.to(q.dtype)
    total = q.new_zeros(B, H, n)
    if log_decay is not None:
        per_token = log_decay[None, :, None].expand(B, H, n) if log_decay.ndim == 1 else log_decay
        total = torch.where(real[:, None], per_token, 0.0).cumsum(-1)
        gap = total[..., :, None] - total[..., None, :]
        w = torch.where(allowed, gap, -torch.inf).exp().to(q.dtype)
    a = w * (fq @ fk.mT)
    if angles is not None:
        of_q, of_k = angles[:, angles.shape[1] - n :].to(q.dtype), angles[:, angles.shape[1] - m :].to(q.dtype)
        a = a * (of_q[:, :, None] - of_k[:, None]).cos()[:, None]
        fq, fk = (
            torch.cat([x * by.cos()[:, None, :, None], x * by.sin()[:, None, :, None]], -1)
            for x, by in ((fq, of_q), (fk, of_k))
        )
    num, den = a @ v, a.sum(-1)
    # the state is one more key before token 0, in the first segment of its row
    first = torch.ones(B, n, dtype=torch.bool, device=q.device)
    last = torch.ones(B, m, dtype=torch.bool, device=q.device)
    if segments is not None:
        ids = [row[row >= 0] for row in segments]
        first = torch.stack([row == (x[0] if len(x) else 0) for row, x in zip(segments, ids, strict=True)])
        last = torch.stack([row == (x[-1] if len(x) else 0) for row, x in zip(segments, ids, strict=True)])
    left = total[..., -1:] - total if causal else fk.new_zeros(B, H, m)
    leave = (last[:, None] * left.exp()).to(q.dtype)
    S = (fk * leave[..., None]).mT @ v
    z = (fk * leave[..., None]).sum(-2)
    if state is not None:
        S0, z0 = (x.repeat_interleave(H // heads, 1) for x in true_state(state))
        into = first[:, None] * total.exp()
        num = num + into[..., None] * (fq @ S0)
        den = den + into * (fq @ z0[..., None])[..., 0]
        carried = torch.ones(B, device=q.device)
        if segments is not None:
            carried = (first & last).any(-1) | ~real.any(-1)
        decayed = carried.to(q)[:, None, None] * total[..., -1:].exp()
        S, z = S + decayed[..., None] * S0, z + decayed * z0
    o = num
    if normalise:
        o = torch.where(den[..., None] != 0, num / torch.where(den != 0, den, 1.0)[..., None], 0.0)
    return o, LinearState(S[:, :: H // heads], z[:, :: H // heads] if normalise else None)


def draw(B, H, Hkv, n, r, e, *, m=None, dtype=torch.float64, seed=0, scale=1.0):
    """q, k, v: positive on the whole, so that an identity feature map has denominators away from zero."""
    g = torch.Generator().manual_seed(seed)
    m = n if m is None else m
    shapes = (B, H, n, r), (B, Hkv, m, r), (B, Hkv, m, e)
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) * scale for s in shapes)
    return [x.to(dtype).to(DEVICE) for x in (q * 0.3 + 0.5, k * 0.3 + 0.5, v)]


def draw_state(B, heads, r, e, *, seed=1, log_scale=False):
    g = torch.Generator().manual_seed(seed)
    S, z = torch.randn(B, heads, r, e, generator=g), torch.rand(B, heads, r, generator=g) + 0.5
    s = torch.rand(B, heads, r, generator=g) if log_scale else None
    return LinearState(*(None if x is None else x.double().to(DEVICE) for x in (S, z, s)))


SEGMENTS = {
    "packed": [[0] * 9 + [1] * 20 + [2] * 4 + [3] * 67, [5] * 50 + [2] * 50],
    "padded": [[-1] * 40 + [0] * 60, [0] * 70 + [-1] * 30],
    "mixed": [
        [-1] * 3 + [0] * 30 + [-1] * 40 + [0] * 7 + [1] * 20,
        [0] * 16 + [-1] * 16 + [1] * 32 + [-1] * 36,
    ],
    "nothing": [[-1] * 100, [4] * 100],
}

CASES = {
    "one token": dict(n=1),
    "63 tokens": dict(n=63),
    "100 tokens, elu1": dict(n=100, feature="elu1"),
    "257 tokens, elu1": dict(n=257, feature="elu1", B=1),
    "relu": dict(n=40, feature="relu"),
    "exp": dict(n=100, feature="exp"),
    "exp, decay and segments": dict(r=8, e=8, n=100, feature="exp", decay="token", segments="packed"),
    "exp, state": dict(n=40, feature="exp", state=True),
    "exp, not causal": dict(n=40, feature="exp", causal=False, state=True),
    "not normalised": dict(n=100, normalise=False),
    "decay a head": dict(r=8, e=8, n=100, decay="head"),
    "decay a token": dict(r=8, e=8, n=257, decay="token", B=1),
    "decay, not normalised": dict(r=8, e=8, n=100, decay="head", normalise=False),
    "shared heads": dict(n=100, B=1, H=4, Hkv=2, feature="elu1"),
    "shared heads, decay": dict(r=8, e=8, n=70, B=1, H=4, Hkv=2, decay="token"),
    "shared heads, state": dict(n=70, H=4, Hkv=1, state=True),
    "packed": dict(n=100, segments="packed", feature="elu1"),
    "packed, decay": dict(r=8, e=8, n=100, segments="packed", decay="head", state=True),
    "padded": dict(n=100, segments="padded", feature="elu1", state=True),
    "padded, decay": dict(r=8, e=8, n=100, segments="padded", decay="token", state=True),
    "mixed": dict(n=100, segments="mixed", feature="elu1", H=2, Hkv=1),
    "nothing to attend to": dict(n=100, segments="nothing", feature="elu1"),
    "state": dict(n=100, state=True, feature="elu1"),
    "state, decay": dict(r=8, e=8, n=257, state=True, decay="head", B=1),
    "not causal": dict(n=100, m=37, causal=False, feature="elu1"),
    "not causal, state": dict(n=17, m=100, causal=False, feature="elu1", state=True, H=4, Hkv=2),
    "not causal, padded": dict(n=100, causal=False, segments="padded", feature="elu1"),
    "angles": dict(n=100, feature="relu", angles=True),
    "angles, not normalised, 63 tokens": dict(n=63, feature="relu", angles=True, normalise=False),
    "angles, packed": dict(n=100, feature="relu", angles=True, segments="packed", state=True),
    "angles, mixed": dict(n=100, feature="elu1", angles=True, segments="mixed", H=2, Hkv=1),
    "angles, shared heads, odd widths": dict(n=70, B=1, r=5, e=19, feature="elu1", angles=True, H=4, Hkv=2, state=True),
    "angles, decay": dict(r=8, e=8, n=70, B=1, H=2, Hkv=1, angles=True, decay="token", state=True),
    "angles, not causal": dict(n=17, m=100, causal=False, feature="relu", angles=True, state=True, H=4, Hkv=2),
    "angles, wide": dict(n=20, r=70, e=70, feature="relu", angles=True, B=1, H=1, Hkv=1),
    "odd widths": dict(n=70, r=5, e=19, feature="elu1"),
    "wide": dict(n=20, r=130, e=20, feature="elu1", B=1, H=1, Hkv=1),
    "wide values": dict(n=20, r=20, e=140, feature="elu1", B=1, H=1, Hkv=1),
}


def build(B=2, H=2, Hkv=2, n=100, m=None, r=16, e=16, decay=None, angles=False, segments=None, state=False, **rest):
    q, k, v = draw(B, H, Hkv, n, r, e, m=m)
    g = torch.Generator().manual_seed(3)
    options = dict(rest)
    if angles:
        options["angles"] = (1.5 * torch.rand(B, max(n, m or n), generator=g)).double().to(DEVICE)
    if decay is not None:
        shape = (H,) if decay == "head" else (B, H, n)
        options["log_decay"] = (-0.3 * torch.rand(shape, generator=g)).double().to(DEVICE)
    if segments is not None:
        options["segments"] = torch.tensor(SEGMENTS[segments], device=DEVICE)[:B]
    if state:
        heads = Hkv if decay is None else H
        options["state"] = draw_state(B, heads, 2 * r if angles else r, e, log_scale=rest.get("feature") == "exp")
    return (q, k, v), options


def outcome(function, inputs, options, dtype):
    """Output, final state and all gradients of one call, in `dtype`, brought to float64."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    options = dict(options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [q, k, v]
    state = options.get("state")
    if state is not None:
        S, z = (x.detach().to(wide).requires_grad_() for x in (state.S, state.z))
        options["state"] = LinearState(S, z, None if state.log_scale is None else state.log_scale.to(wide))
        leaves += [S, z] if options.get("normalise", True) else [S]
    if options.get("log_decay") is not None:
        options["log_decay"] = options["log_decay"].to(wide)
    o, after = function(q, k, v, **options)
    results = [o, *(x for x in true_state(after) if x is not None)]
    g = torch.Generator().manual_seed(9)
    loss = sum((x.double() * torch.randn(x.shape, generator=g).double().to(x.device)).sum() for x in results)
    grads = torch.autograd.grad(loss, leaves)
    return [x.detach().double() for x in (*results, *grads)]


def distance(got, want):
    assert got.shape == want.shape
    assert got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp(min=1)).item()


def poisoned(shape, like, dtype=torch.float32):
    """NaN in every output and workspace beforehand: what is not written shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=like.device)


def small(form, monkeypatch):
    """Chunks so short that a few dozen tokens make several."""
    if form is reference:
        for name, size in dict(CHUNK=16, GROUP=32, CACHED=512).items():
            monkeypatch.setattr(chunks, name, size)
    else:
        monkeypatch.setattr(form.launches, "SETUPS", form.launching.LaunchCache())
        monkeypatch.setattr(form.launching, "empty", poisoned)
        monkeypatch.setattr(form.launches, "span", lambda n, rows: 64)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula_and_so_are_its_gradients(way, case, monkeypatch):
    if way is not reference and CASES[case].get("feature") == "exp" and {"decay", "state"} & set(CASES[case]):
        pytest.skip("exp features with a decay or a state are taken by the reference alone")
    small(way, monkeypatch)
    inputs, options = build(**CASES[case])
    want = outcome(dense, inputs, options, torch.float64)
    got = outcome(way.chunked_linear, inputs, options, torch.float64 if way is reference else torch.float32)
    for x, y in zip(got, want, strict=True):
        assert distance(x, y) < (1e-11 if way is reference else 2e-5)


@pytest.mark.parametrize(
    "case",
    [
        dict(n=100, decay="token", segments="packed", state=True),
        dict(n=100, decay="token", segments="mixed", feature="elu1"),
        dict(n=70, decay="head", H=4, Hkv=2, normalise=False),
        dict(n=40, decay="token", feature="exp", state=True),
        dict(n=20, decay="token", r=130, e=20, feature="elu1", B=1, H=1, Hkv=1),
        dict(n=100, decay="token", feature="elu1", angles=True, segments="packed", r=8, e=8, state=True),
    ],
    ids=["packed", "padded", "a head", "exp", "wide", "angles"],
)
def test_the_gradient_of_the_decay(way, case, monkeypatch):
    if way is not reference and case.get("feature") == "exp":
        pytest.skip("exp features with a decay are taken by the reference alone")
    small(way, monkeypatch)
    if way is reference:
        monkeypatch.setattr(chunks, "CACHED", 1)  # groups of two chunks, one head at a time
    inputs, options = build(**case)
    wide = torch.float64 if way is reference else torch.float32
    grads = []
    for function, dtype in ((dense, torch.float64), (way.chunked_linear, wide)):
        decay = options["log_decay"].to(dtype).requires_grad_()
        given = {**options, "log_decay": decay}
        if "state" in options:
            given["state"] = LinearState(*(None if x is None else x.to(dtype) for x in options["state"]))
        o, after = function(*(x.to(dtype) for x in inputs), **given)
        weight = torch.linspace(-1, 2, o.numel(), dtype=o.dtype, device=o.device).view(o.shape)
        loss = (o * weight).sum() + sum(x.square().sum() for x in true_state(after) if x is not None)
        grads.append(torch.autograd.grad(loss, decay)[0].double())
    assert distance(grads[1], grads[0]) < (1e-11 if way is reference else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_good_as_the_naive_way(form, dtype, monkeypatch):
    """At most twice the error of the formula computed in that precision throughout, forward and gradients."""
    small(form, monkeypatch)
    inputs, options = build(n=150, feature="elu1", B=1, r=32, e=32)
    inputs = [x.to(dtype) for x in inputs]
    want = outcome(dense, inputs, options, torch.float64)
    got, naive = (outcome(f, inputs, options, dtype) for f in (form.chunked_linear, dense))
    for x, y, truth in zip(got, naive, want, strict=True):
        assert distance(x, truth) <= 2 * distance(y, truth)


@pytest.mark.parametrize("case", [dict(normalise=False), dict(feature="elu1")], ids=["retention", "normalised"])
def test_the_gradient_of_one_decay_a_head_does_not_lose_what_cancels(way, case, monkeypatch, bf16_products):
    """A sum over tokens of gains less losses, each times its position, that comes to pairs times their distance."""
    if way is reference:
        pytest.skip("it has no operands of 16 bits")
    small(way, monkeypatch)
    inputs = [torch.randn(1, 4, 200, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    q, k, v, do = (x.bfloat16().to(DEVICE) for x in inputs)

    def gradient(function, dtype):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        decay = torch.tensor([0.7, 0.9, 0.97, 0.99], device=DEVICE).log().to(wide).requires_grad_()
        o, _ = function(*(x.to(dtype) for x in (q, k, v)), log_decay=decay, **case)
        return torch.autograd.grad(o, decay, do.to(dtype))[0].double()

    want = gradient(dense, torch.float64)
    mine, naive = (gradient(f, torch.bfloat16) - want for f in (way.chunked_linear, dense))
    assert mine.norm() <= 1.5 * naive.norm()


@pytest.mark.parametrize("case", [dict(normalise=False), dict(feature="elu1")], ids=["retention", "normalised"])
def test_the_gradient_of_one_decay_a_head_in_float32(case):
    inputs = [torch.randn(1, 3, 600, 16, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(4)]
    q, k, v, do = inputs

    def gradient(function, dtype):
        decay = torch.tensor([0.5, 0.9, 0.99], device=DEVICE).log().to(dtype).requires_grad_()
        o, state = function(*(x.to(dtype) for x in (q, k, v)), log_decay=decay, **case)
        assert function is dense or (o.dtype == state.S.dtype == dtype)
        return torch.autograd.grad(o, decay, do.to(dtype))[0].double()

    want = gradient(dense, torch.float64)
    mine, naive = (gradient(f, torch.float32) - want for f in (reference.chunked_linear, dense))
    assert mine.norm() <= naive.norm()


def test_the_state_continues_the_sequence(form, monkeypatch):
    small(form, monkeypatch)
    for feature, decay in (("elu1", None), ("exp", "token"))[: 2 if form is reference else 1]:
        (q, k, v), options = build(n=80, feature=feature, decay=decay, B=1, H=2, Hkv=1, r=8, e=8)
        q, k, v = (x.float() for x in (q, k, v))
        decay = options.pop("log_decay", None)
        whole, last = form.chunked_linear(q, k, v, log_decay=decay, **options)
        state, outputs = None, []
        for part in (slice(0, 37), slice(37, 38), slice(38, 80)):
            here = None if decay is None else decay[..., part]
            o, state = form.chunked_linear(
                q[:, :, part], k[:, :, part], v[:, :, part], log_decay=here, state=state, **options
            )
            outputs.append(o)
        assert distance(torch.cat(outputs, 2), whole) < 5e-6
        for x, y in zip(true_state(state), true_state(last), strict=True):
            assert distance(x, y) < 5e-6


def test_a_first_token_has_nothing_to_choose_from():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 150, 64, requires_grad=True) for _ in range(3))
    (pull,) = torch.autograd.grad(reference.chunked_linear(q, k, v)[0].square().sum(), q)
    assert not pull[:, :, 0].any() and pull[:, :, 1:].all()
    state = reference.chunked_linear(q, k, v)[1]
    (pull,) = torch.autograd.grad(reference.chunked_linear(q, k, v, state=state)[0].square().sum(), q)
    assert pull.all()  # there is something before the first


def test_the_past_does_not_feel_the_future(form, monkeypatch):
    small(form, monkeypatch)
    for feature in ("elu1", "exp"):
        (q, k, v), options = build(n=100, feature=feature, B=1)
        q, k, v = (x.float() for x in (q, k, v))
        before, _ = form.chunked_linear(q, k, v, **options)
        for x in (q, k, v):
            x[:, :, 70:] *= 30
        after, _ = form.chunked_linear(q, k, v, **options)
        assert torch.equal(before[:, :, :70], after[:, :, :70])


def test_padded_is_packed_is_separate_whatever_the_padding_holds(form, monkeypatch):
    small(form, monkeypatch)
    (q, k, v), _ = build(n=60, B=1)
    q, k, v = (x.float() for x in (q, k, v))
    decay = torch.tensor([-0.1, -0.01], device=DEVICE)
    options = dict(feature="elu1", log_decay=decay)
    parts = [slice(0, 25), slice(25, 60)]
    alone = [form.chunked_linear(q[:, :, s], k[:, :, s], v[:, :, s], **options) for s in parts]
    ids = torch.tensor([[0] * 25 + [1] * 35], device=DEVICE)
    packed, state = form.chunked_linear(q, k, v, segments=ids, **options)
    assert distance(packed, torch.cat([o for o, _ in alone], 2)) < 1e-6
    assert distance(state.S, alone[1][1].S) < 1e-6
    for order in ((10, 0), (0, 10)):  # padding before, padding after
        padded = [torch.nn.functional.pad(x, (0, 0, *order), value=torch.nan) for x in (q, k, v)]
        where = torch.nn.functional.pad(ids, order, value=-1)
        o, state = form.chunked_linear(*padded, segments=where, **options)
        assert distance(o[where[:, None].expand(o.shape[:3]) >= 0].view_as(packed), packed) < 1e-6
        assert (o[where[:, None].expand(o.shape[:3]) < 0] == 0).all()
        assert distance(state.S, alone[1][1].S) < 1e-6


def test_large_keys_do_not_overflow_exp(form, monkeypatch):
    small(form, monkeypatch)
    (q, k, v), _ = build(n=40, B=1)
    q, k, v = (x.float() for x in (q * 10, k * 300, v))
    o, state = form.chunked_linear(q, k, v, feature="exp")
    logits = (q.double()[..., :, None, :] + k.double()[..., None, :, :]).logsumexp(-1)
    logits = logits.masked_fill(torch.ones(40, 40, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
    assert distance(o.double(), logits.softmax(-1) @ v.double()) < 1e-4
    assert state.S.isfinite().all()


def test_strides_do_not_matter(form, monkeypatch):
    small(form, monkeypatch)
    (q, k, v), options = build(n=70, feature="elu1")
    q, k, v = (x.float() for x in (q, k, v))
    want, _ = form.chunked_linear(q, k, v, **options)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spread = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]
    alike = [x[:1].expand_as(x) for x in (q, k, v)]
    for inputs in (swapped, spread):
        assert distance(form.chunked_linear(*inputs, **options)[0], want) < 1e-6
    assert distance(form.chunked_linear(*alike, **options)[0], want[:1].expand_as(want)) < 1e-6


def test_runs_are_bit_equal(form, monkeypatch):
    small(form, monkeypatch)
    inputs, options = build(n=70, feature="elu1", B=1, H=2, Hkv=1)
    first, second = (outcome(form.chunked_linear, inputs, options, torch.float32) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_no_way_to_join_chunks_leaves_its_memory(way, monkeypatch, fenced):
    if way is reference:
        pytest.skip("the fence is around Triton programs")
    small(way, monkeypatch)
    inputs, options = build(n=70, r=5, e=19, B=1, feature="elu1", segments=None, state=True)
    outcome(way.chunked_linear, inputs, options, torch.float32)


def test_sizes_choose_the_launches():
    joined = _triton_form().launches.joined
    kind = 64, "bf16"
    assert joined(128, 1, 1, kind) == joined(2048, 128, 4, kind) == joined(1 << 20, 1000, 1, kind) == 1
    assert joined(2048, 64, 8, kind) == joined(2048, 512, 1, (128, "bf16")) == 2
    assert joined(65536, 16, 32, kind) == joined(8192, 64, 8, kind) == 3


def test_short_sequences_take_one_launch_each_way(monkeypatch):
    fused = _triton_form()
    from heedful.kernels import parallel_compile

    real, keys = fused.launches.launch, []

    def launch(setup, key, *rest):
        if not parallel_compile.COMPILING.get():  # a first call compiles before it launches
            keys.append(key)
        return real(setup, key, *rest)

    monkeypatch.setattr(fused.launches, "launch", launch)
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 2, 100, 8, 8, dtype=torch.float32))
    o, _ = fused.chunked_linear(q, k, v, feature="elu1")
    assert len(keys) == 1
    o.sum().backward()
    assert len(keys) == 2


@pytest.fixture
def on_triton(monkeypatch):
    """Linear attention that finds Triton's interpreter, with small tiles and nothing cached."""
    fused = _triton_form()
    small(fused, monkeypatch)
    monkeypatch.setattr(dispatch, "triton_unavailable", lambda q: [])
    monkeypatch.setattr(linear_attention, "decisions", {})
    return fused


def test_the_second_call_of_a_kind_goes_straight_to_its_launches(on_triton, monkeypatch):
    fused, asked = on_triton, []
    real = fused.objections
    monkeypatch.setattr(fused, "objections", lambda *x, **y: asked.append(1) or real(*x, **y))
    q, k, v = draw(1, 2, 2, 70, 8, 16, dtype=torch.float32)
    fading, turned = h.Retention(0.9, normalise=True).to(DEVICE), h.Linear(h.CosFormer(100))
    angles = torch.arange(70, device=DEVICE)[None] * (torch.pi / 200)
    lam = fading.log_lambda.expand(2).float()
    for attend, options in (
        (h.Linear(h.Elu1()), dict(feature="elu1")),
        (fading, dict(feature="elu1", log_decay=lam)),
        (turned, dict(feature="relu", angles=angles)),
    ):
        want, _ = fused.chunked_linear(q, k, v, **options)
        asked.clear()
        first = attend(q, k, v)
        assert asked == [1]
        with monkeypatch.context() as patch:
            patch.setattr(fused, "chunked_linear", None)
            second = attend(q, k, v)
        assert asked == [1]
        assert torch.equal(first, second) and distance(second, want) < 1e-6
        assert attend.explain(q, k, v).endswith("→ chunked_linear/triton")
    with h.backend("torch"):
        assert turned.explain(q, k, v).endswith("→ chunked_linear/torch")
        assert distance(turned(q, k, v), want) < 1e-5
    fading.log_lambda.mul_(2)
    want, _ = fused.chunked_linear(q, k, v, feature="elu1", log_decay=2 * lam)
    assert torch.equal(fading(q, k, v), want)  # a decay written to is read anew


def test_inputs_of_another_kind_are_asked_about(on_triton, monkeypatch):
    attend, asked = h.Linear(h.Elu1()), []
    real = on_triton.objections
    monkeypatch.setattr(on_triton, "objections", lambda *x, **y: asked.append(1) or real(*x, **y))
    q, k, v = draw(1, 2, 2, 70, 8, 16, dtype=torch.float32)
    attend(q, k, v)
    others = [
        ("shorter", [x[:, :, :-1] for x in (q, k, v)]),
        ("another dtype", [x.bfloat16() for x in (q, k, v)]),
        ("another width", [q, k, v[..., :4]]),
    ]
    for name, inputs in others:
        asked.clear()
        want = attend.matrix(*(x.double() for x in inputs[:2])) @ inputs[2].double()
        assert distance(attend(*inputs), want) < 2e-2
        assert asked == [1], name
    decisions = len(linear_attention.decisions)
    with torch.no_grad():
        attend(*[x.clone().requires_grad_() for x in (q, k, v)])
    assert len(linear_attention.decisions) == decisions + 1


@pytest.mark.parametrize("learning", ["qkv", "v", "qk"])
def test_gradients_of_a_second_call(learning, on_triton):
    inputs = draw(1, 2, 2, 70, 8, 16, dtype=torch.float32)
    for name, x in zip("qkv", inputs, strict=True):
        x.requires_grad_(name in learning)
    leaves = [x for x in inputs if x.requires_grad]
    attend = h.Linear(h.Elu1())
    want, got = attend(*inputs), attend(*inputs)
    g = torch.randn_like(want)
    for x, y in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        assert torch.equal(x, y)


def test_a_second_derivative_is_refused_not_forgotten():
    fused = _triton_form()
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 1, 20, 8, 8, dtype=torch.float32))
    (dq,) = torch.autograd.grad(fused.chunked_linear(q, k, v)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("segments", [None, "packed", "mixed"])
@pytest.mark.parametrize("pattern", [h.Causal(), h.Full()], ids=["causal", "full"])
def test_features_turned_in_the_kernel_are_those_given_to_it(pattern, segments, monkeypatch):
    """cosFormer by itself, and by features of twice the width."""
    (q, k, v), options = build(n=100, H=2, Hkv=1, segments=segments)
    ids = None if segments is None else options["segments"][:, None]
    attend = h.Linear(h.CosFormer(100), pattern)
    assert LinearCall(q, k, v, attend._options(), ids).chunks[1]["feature"] == "relu"
    assert "features are made in the kernel" in h.backend.explain(attend, q, k, v, segments=ids)
    turned, state = attend.prefill(q, k, v, segments=ids)
    monkeypatch.setattr(h.Relu, "kernel_name", None)
    assert LinearCall(q, k, v, attend._options(), ids).chunks[1]["feature"] == "identity"
    given, last = attend.prefill(q, k, v, segments=ids)
    for x, y in zip((turned, state.S, state.z), (given, last.S, last.z), strict=True):
        assert distance(x, y) < 1e-12


def test_what_it_cannot_take_it_refuses_in_words(form):
    q, k, v = draw(1, 4, 2, 10, 8, 8, dtype=torch.float32)

    def refused(words, *tensors, **options):
        said = form.objections(*tensors, **options)
        assert any(words in x for x in said), said
        with pytest.raises(RuntimeError, match=words):  # every way in goes through the dispatcher, which asks
            Kernel("chunked_linear", Backend("form", form.chunked_linear, form.objections))(*tensors, **options)

    refused("as many queries as keys", q[:, :, :5], k, v)
    refused("multiple of", q[:, :3], k, v)
    refused("feature must be one of", q, k, v, feature="cosine")
    refused("log_decay must be", q, k, v, log_decay=torch.zeros(3, device=DEVICE))
    angles = torch.zeros(1, 10, device=DEVICE)
    refused("angles must be", q, k, v, angles=angles[:, :9])
    refused("no gradient", q, k, v, angles=angles.clone().requires_grad_())
    refused("state.S must be", q, k, v, angles=angles, state=form.chunked_linear(q, k, v)[1])
    refused("log_decay needs causal", q, k, v, causal=False, log_decay=torch.zeros(4, device=DEVICE))
    ids = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2, 2]], device=DEVICE)
    refused("comes back", q, k, v, segments=ids)
    ids[:, 4:6] = 2
    assert form.objections(q, k, v, segments=ids) == []  # the same tensor, changed in place: looked at anew
    refused("integers", q, k, v, segments=ids.float())
    _, state = form.chunked_linear(q, k, v, normalise=False)
    refused("state.z must be", q, k, v, state=state)


def test_what_only_the_reference_takes():
    fused = _triton_form()
    q, k, v = draw(1, 2, 2, 10, 8, 8, dtype=torch.float32)
    assert "bfloat16" in fused.objections(q.double(), k.double(), v.double())[0]
    ids = torch.tensor([[0] * 5 + [1] * 5], device=DEVICE)
    assert "several segments" in fused.objections(q, k, v, causal=False, segments=ids)[0]
    assert "normaliser takes out" in fused.objections(q, k, v, feature="exp", normalise=False)[0]
    assert "without a decay" in fused.objections(q, k, v, feature="exp", log_decay=torch.zeros(q.shape[1]))[-1]
    wide = draw(1, 1, 1, 10, 300, 8, dtype=torch.float32)
    assert "widths" in fused.objections(*wide)[0]
    wide = draw(1, 1, 1, 10, 130, 8, dtype=torch.float32)
    narrow = draw(1, 1, 1, 10, 8, 8, dtype=torch.float32)
    decay = torch.zeros(1, device=DEVICE, requires_grad=True)
    assert "more than float32" in fused.objections(*narrow, log_decay=decay)[0]
    assert not fused.objections(*narrow, log_decay=decay.detach())
    assert "260 features" in fused.objections(*wide, angles=torch.zeros(1, 10, device=DEVICE))[0]
    o, _ = reference.chunked_linear(*draw(1, 2, 2, 10, 8, 8), causal=False, segments=ids)
    want, _ = dense(*draw(1, 2, 2, 10, 8, 8), causal=False, segments=ids)
    assert distance(o, want) < 1e-11


def test_no_tokens_no_trouble():
    q, k, v = draw(2, 2, 2, 0, 4, 4)
    decay = torch.zeros(2, dtype=torch.float64, device=DEVICE)
    for options in (dict(), dict(feature="exp"), dict(causal=False), dict(log_decay=decay)):
        o, state = reference.chunked_linear(q, k, v, **options)
        assert o.shape == (2, 2, 0, 4)
        assert (state.S == 0).all()


@pytest.mark.skipif(not ON_GPU, reason="full size wants a GPU")
def test_at_full_size_the_error_does_not_grow():
    fused = _triton_form()
    found = []
    for n in (2048, 65536):
        inputs = [torch.randn(1, 4, n, 64, device="cuda").bfloat16() for _ in range(3)]
        want = outcome(reference.chunked_linear, inputs, dict(feature="elu1"), torch.float64)
        got = outcome(fused.chunked_linear, inputs, dict(feature="elu1"), torch.bfloat16)
        found.append([distance(x, y) for x, y in zip(got, want, strict=True)])
    assert all(long < 1.3 * short for short, long in zip(*found, strict=True))
