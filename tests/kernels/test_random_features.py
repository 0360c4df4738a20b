"""Random feature attention with the features made inside, in torch and in Triton (interpreted on the CPU)."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from heedful.kernels.random_features import reference  # noqa: E402


def _triton_form():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.random_features import triton as form

    return form


@pytest.fixture(params=["reference", "triton"])
def form(request, monkeypatch):
    if request.param == "reference":
        return reference
    form = _triton_form()
    monkeypatch.setattr(form, "empty", poisoned)
    small = form.Config(block=32, features=16, warps=4, stages=1, apart=True)  # a few dozen tokens make several blocks
    monkeypatch.setattr(form, "config", lambda low, widest: small)
    return form


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
    "one token": dict(n=1),
    "63 tokens": dict(n=63),
    "128 tokens": dict(n=128, B=1, H=1, Hkv=1),
    "150 tokens, a bias a key": dict(n=150, B=1, key_bias=True),
    "shared heads": dict(n=70, B=1, H=4, Hkv=2, key_bias=True),
    "one projection a head": dict(n=70, per_head=True),
    "not causal": dict(n=100, m=37, causal=False),
    "not causal, shared heads": dict(n=20, m=150, causal=False, B=1, H=2, Hkv=1, key_bias=True),
    "odd widths": dict(n=70, d=5, e=19, m_features=11),
    "more features": dict(n=20, d=20, e=8, m_features=100, B=1, H=1, Hkv=1),
    "long keys": dict(n=100, B=1, scale=6.0),
}


def build(B=2, H=2, Hkv=2, n=100, m=None, d=16, e=16, m_features=32, per_head=False, key_bias=False, scale=1.0, **rest):
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
