"""Random feature attention with the features made inside, in torch and in Triton (interpreted on the CPU)."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from bounds import within_bounds

import heedful as h
from heedful.kernels.dispatch import Backend
from heedful.kernels.linear_attention import LinearCall, LinearOptions, linear_attention
from heedful.kernels.random_features import random_features, reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def _triton_form():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.random_features import triton as form

    return form


def small(low, widest):
    """A configuration in which a few dozen tokens make several blocks."""
    launches = _triton_form().launches
    return 32, dict.fromkeys(launches.LAUNCHES, launches.Config(64 if low else 32, 4, 1))


def shrink(form, monkeypatch):
    monkeypatch.setattr(form.launches, "config", small)
    monkeypatch.setattr(form.launches, "GROUP", 2)
    monkeypatch.setattr(form.launches, "LEVELS", 4)


@pytest.fixture(params=["reference", "triton"])
def form(request, monkeypatch):
    if request.param == "reference":
        yield reference
        return
    form = _triton_form()
    monkeypatch.setattr(form.launching, "empty", poisoned)
    shrink(form, monkeypatch)
    with nullcontext() if ON_GPU else within_bounds():
        yield form


def poisoned(shape, like, dtype=torch.float32):
    """NaN in every output and workspace beforehand: what is not written shows."""
    return torch.full(shape, torch.nan, dtype=dtype, device=like.device)


def dense(q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True):
    """The definition, written out in full, in the dtype it is given."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    own = 0 if bias is None else bias.to(dtype)[:, None]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    x, y = q @ query_weight.to(dtype) + own, k @ key_weight.to(dtype) + own
    y = y - curvature / 2 * k.square().sum(-1, keepdim=True)
    if key_bias is not None:
        y = y + key_bias.to(dtype).repeat_interleave(group, 1)[..., None]
    log = (x[..., :, None, :] + y[..., None, :, :]).logsumexp(-1)
    if causal:
        log = log.masked_fill(torch.ones(log.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return log.softmax(-1) @ v


CASES = {
    "one token": dict(n=1, B=2),
    "63 tokens": dict(n=63, B=2),
    "64 tokens": dict(n=64),
    "300 tokens, a bias a key": dict(n=300, key_bias=True),
    "shared heads": dict(n=70, H=4, Hkv=2, key_bias=True),
    "one projection a head": dict(n=40, H=2, Hkv=2, per_head=True),
    "not causal": dict(n=70, m=37, causal=False, H=2, Hkv=2),
    "not causal, shared heads": dict(n=20, m=100, causal=False, H=2, Hkv=1, key_bias=True),
    "odd widths": dict(n=70, d=5, e=19, m_features=11),
    "widths up to a block": dict(n=20, d=32, e=64, m_features=64),
    "more features": dict(n=20, d=20, e=8, m_features=100),
    "long keys": dict(n=70, scale=6.0),
}


def build(B=1, H=1, Hkv=1, n=100, m=None, d=16, e=16, m_features=32, per_head=False, key_bias=False, scale=1.0, **rest):
    g = torch.Generator().manual_seed(0)
    m = n if m is None else m
    q, k, v = (torch.randn(s, generator=g).double() for s in ((B, H, n, d), (B, Hkv, m, d), (B, Hkv, m, e)))
    heads = H if per_head else 1
    Wq, Wk = (torch.randn(heads, d, m_features, generator=g).double() * 0.5 for _ in range(2))
    options = dict(query_weight=Wq, key_weight=Wk, bias=torch.randn(heads, m_features, generator=g).double() * 0.5)
    options["key_bias"] = torch.randn(B, Hkv, m, generator=g).double() if key_bias else None
    options = {name: None if x is None else x.to(DEVICE) for name, x in options.items()}
    return [x.to(DEVICE) for x in (q, k * scale, v)], dict(options, curvature=0.25, **rest)


def outcome(function, inputs, options, dtype):
    """Output and all gradients of one call, in `dtype`, brought to float64."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options = {name: x.to(wide) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    q, k, v = leaves
    if options["key_bias"] is not None:
        options["key_bias"].requires_grad_()
        leaves.append(options["key_bias"])
    o = function(q, k, v, **options)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(9)).to(o)
    return [x.detach().double() for x in (o, *torch.autograd.grad(o, leaves, do))]


def distance(got, want):
    assert got.shape == want.shape
    assert got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp(min=1)).item()


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula_and_so_are_its_gradients(form, case):
    inputs, options = build(**CASES[case])
    want = outcome(dense, inputs, options, torch.float64)
    got = outcome(form.random_features, inputs, options, torch.float64 if form is reference else torch.float32)
    for x, y in zip(got, want, strict=True):
        assert distance(x, y) < (1e-11 if form is reference else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_good_as_the_naive_way(form, dtype):
    """At most twice the error of the formula computed in that precision throughout, forward and gradients."""
    inputs, options = build(n=70, d=32, e=16)
    inputs = [x.to(dtype) for x in inputs]
    want = outcome(dense, inputs, options, torch.float64)
    got, naive = (outcome(f, inputs, options, dtype) for f in (form.random_features, dense))
    for x, y, truth in zip(got, naive, want, strict=True):
        assert distance(x, truth) <= 2 * distance(y, truth)


def test_the_past_does_not_feel_the_future(form):
    (q, k, v), options = build(n=100)
    q, k, v = (x.float() for x in (q, k, v))
    before = form.random_features(q, k, v, **options)
    for x in (q, k, v):
        x[:, :, 70:] *= 30
    assert torch.equal(before[:, :, :70], form.random_features(q, k, v, **options)[:, :, :70])


def test_strides_do_not_matter(form):
    inputs, options = build(n=70)
    inputs = [x.float() for x in inputs]
    want = form.random_features(*inputs, **options)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for other in (swapped, spread):
        assert torch.equal(form.random_features(*other, **options), want)


def test_objections_are_sentences():
    form = _triton_form()
    (q, k, v), options = build(n=4)
    q, k, v = (x.float() for x in (q, k, v))
    assert form.objections(q, k, v, **options) == []
    learned = dict(options, key_weight=options["key_weight"].clone().requires_grad_())
    wide = dict(options, query_weight=torch.zeros(1, 16, 300), key_weight=torch.zeros(1, 16, 300), bias=None)
    for arguments, given, word in (
        ((q.double(), k, v), options, "share bfloat16"),
        ((q, k, v), learned, "gradient of the projection"),
        ((q, k, v), wide, "features go up to"),
        ((q[:, :, :0], k[:, :, :0], v[:, :, :0]), options, "nothing to launch"),
        ((q, k[:, :, :3], v[:, :, :3]), options, "as many queries as keys"),
        ((q, k, v), dict(options, key_weight=options["key_weight"][..., :3]), "as query_weight"),
    ):
        assert word in " ".join(form.objections(*arguments, **given))


MAPS = {
    "FAVOR+": lambda: h.FavorPlus(8, 20),
    "FAVOR+, hyperbolic, a head": lambda: h.FavorPlus(8, 10, heads=2, hyperbolic=True),
    "FAVOR++": lambda: h.FavorPlusPlus(8, 20, A=-0.3, orthogonal="hadamard"),
    "FAVOR#": lambda: h.FavorSharp(8, 20, kind="aderf"),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_mechanism_that_uses_it_is_the_same_mechanism(name, monkeypatch):
    form = _triton_form()
    shrink(form, monkeypatch)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8, generator=g).to(DEVICE) for _ in range(3))
    phi = MAPS[name]().to(DEVICE)
    if isinstance(phi, h.FavorSharp):
        phi.calibrate(q * 2, k)
    attend = h.Linear(phi, h.Full() if name == "FAVOR++" else h.Causal())
    with h.backend("torch"):
        assert "was asked for" in h.backend.explain(attend, q, k, v)
        want = attend(q, k, v)
    monkeypatch.setattr(linear_attention, "decisions", {})
    backend = Backend("triton", form.random_features, form.objections)
    monkeypatch.setitem(random_features.backends, "triton", backend)
    assert h.backend.explain(attend, q, k, v).endswith("→ random_features/triton")
    assert distance(attend(q, k, v), want) < 2e-5
    segments = torch.zeros(1, 1, 20, dtype=torch.long, device=DEVICE)
    assert "no segments" in h.backend.explain(attend, q, k, v, segments=segments)
    if phi.heads is None:  # heads that share their keys
        with h.backend("torch"):
            want = attend(q, k[:, :1], v[:, :1])
        assert distance(attend(q, k[:, :1], v[:, :1]), want) < 2e-5


def test_what_is_kept_of_a_projection_follows_it(monkeypatch):
    """The kernel's own copy of W is made once, and again when the map draws other rows, is fitted or replaced."""
    form = _triton_form()
    shrink(form, monkeypatch)
    monkeypatch.setattr(linear_attention, "decisions", {})
    monkeypatch.setitem(random_features.backends, "triton", Backend("triton", form.random_features, form.objections))
    q, k, v = torch.randn(3, 1, 1, 20, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE).unbind()
    phi = h.FavorPlusPlus(8, 20).to(DEVICE)
    attend = h.Linear(phi, h.Causal())

    def changed():
        with h.backend("torch"):
            want = attend(q, k, v)
        assert distance(attend(q, k, v), want) < 2e-5
        logs = LinearCall(q, k, v, LinearOptions(phi, normalise=True, causal=True)).logs
        return form.launches.PADDED[logs.query_weight][-1]

    first = changed()
    assert changed() is first
    phi.redraw(torch.Generator().manual_seed(1))
    second = changed()
    assert not torch.equal(second, first)
    phi.calibrate(q * 2, k)
    third = changed()
    assert not torch.equal(third, second)
    phi.projection.omega = phi.projection.omega.clone() * 0.5
    assert not torch.equal(changed(), third)
    with torch.inference_mode():
        kept = attend(q, k, v)
    assert torch.equal(kept, attend(q, k, v))
