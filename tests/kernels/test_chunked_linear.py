"""Chunked linear attention, in torch and in Triton (interpreted on the CPU), against the formula in float64."""

from __future__ import annotations

import os

import pytest
import torch

from heedful.kernels.chunked_linear import reference
from heedful.kernels.chunked_linear.reference import LinearState

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported


def _triton_form():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.chunked_linear import triton as form

    return form


@pytest.fixture(params=["reference", "triton"])
def form(request):
    return reference if request.param == "reference" else _triton_form()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def phi(x, feature):
    return {
        "identity": lambda x: x,
        "elu1": lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),
        "relu": torch.relu,
        "exp": torch.exp,
    }[feature](x)


def dense(
    q, k, v, *, feature="identity", normalise=True, causal=True, log_decay=None, segments=None, state=None
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
        w = torch.where(allowed, gap, -torch.inf).exp()
    a = w * (fq @ fk.mT)
    num, den = a @ v, a.sum(-1)
    # the state is one more key before token 0, in the first segment of its row
    first = torch.ones(B, n, dtype=torch.bool, device=q.device)
    last = torch.ones(B, m, dtype=torch.bool, device=q.device)
    if segments is not None:
        ids = [row[row >= 0] for row in segments]
        first = torch.stack([row == (x[0] if len(x) else 0) for row, x in zip(segments, ids, strict=True)])
        last = torch.stack([row == (x[-1] if len(x) else 0) for row, x in zip(segments, ids, strict=True)])
    leave = last[:, None] * ((total[..., -1:] - total).exp() if log_decay is not None else torch.ones_like(fk[..., 0]))
    S = (fk * leave[..., None]).mT @ v
    z = (fk * leave[..., None]).sum(-2)
    if state is not None:
        grow = 1.0 if state.log_scale is None else state.log_scale.exp()[..., None]
        S0, z0 = ((x * (grow[..., None] if x.ndim == 4 and feature == "exp" else grow)) for x in (state.S, state.z))
        S0, z0 = (x.repeat_interleave(H // heads, 1) for x in (S0, z0))
        into = first[:, None] * total.exp()
        num = num + into[..., None] * (fq @ S0)
        den = den + into * (fq @ z0[..., None])[..., 0]
        carried = (first & last).any(-1) | ~real.any(-1) if segments is not None else torch.ones(B, device=q.device)
        decayed = carried.to(q)[:, None, None] * total[..., -1:].exp()
        S, z = S + decayed[..., None] * S0, z + decayed * z0
    o = torch.where(den[..., None] != 0, num / torch.where(den != 0, den, 1.0)[..., None], 0.0) if normalise else num
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
    s = torch.rand(B, heads, generator=g) if log_scale else None
    return LinearState(*(None if x is None else x.double().to(DEVICE) for x in (S, z, s)))


SEGMENTS = {
    "packed": [[0] * 9 + [1] * 20 + [2] * 4 + [3] * 67, [5] * 50 + [2] * 50],
    "padded": [[-1] * 40 + [0] * 60, [0] * 70 + [-1] * 30],
    "mixed": [[-1] * 3 + [0] * 30 + [-1] * 40 + [0] * 7 + [1] * 20, [0] * 16 + [-1] * 16 + [1] * 32 + [-1] * 36],
    "nothing": [[-1] * 100, [4] * 100],
}

CASES = {
    "one token": dict(n=1),
    "63 tokens": dict(n=63),
    "100 tokens, elu1": dict(n=100, feature="elu1"),
    "257 tokens, elu1": dict(n=257, feature="elu1", B=1),
    "relu": dict(n=40, feature="relu"),
    "exp": dict(n=100, feature="exp"),
    "exp, decay and segments": dict(n=100, feature="exp", decay="token", segments="packed"),
    "exp, state": dict(n=40, feature="exp", state=True),
    "exp, not causal": dict(n=40, feature="exp", causal=False, state=True),
    "not normalised": dict(n=100, normalise=False),
    "decay a head": dict(n=100, decay="head"),
    "decay a token": dict(n=257, decay="token", B=1),
    "decay, not normalised": dict(n=100, decay="head", normalise=False),
    "shared heads": dict(n=100, H=4, Hkv=2, feature="elu1"),
    "shared heads, decay": dict(n=70, H=4, Hkv=2, decay="token"),
    "shared heads, state": dict(n=70, H=4, Hkv=1, state=True),
    "packed": dict(n=100, segments="packed", feature="elu1"),
    "packed, decay": dict(n=100, segments="packed", decay="head", state=True),
    "padded": dict(n=100, segments="padded", feature="elu1", state=True),
    "padded, decay": dict(n=100, segments="padded", decay="token", state=True),
    "mixed": dict(n=100, segments="mixed", feature="elu1", H=2, Hkv=1),
    "nothing to attend to": dict(n=100, segments="nothing", feature="elu1"),
    "state": dict(n=100, state=True, feature="elu1"),
    "state, decay": dict(n=257, state=True, decay="head", B=1),
    "not causal": dict(n=100, m=37, causal=False, feature="elu1"),
    "not causal, state": dict(n=17, m=100, causal=False, feature="elu1", state=True, H=4, Hkv=2),
    "not causal, padded": dict(n=100, causal=False, segments="padded", feature="elu1"),
    "odd widths": dict(n=70, r=5, e=19, feature="elu1"),
    "wide": dict(n=33, r=130, e=40, feature="elu1", B=1, H=1, Hkv=1),
    "wide values": dict(n=33, r=24, e=140, feature="elu1", B=1, H=1, Hkv=1),
}


def build(B=2, H=2, Hkv=2, n=100, m=None, r=16, e=16, decay=None, segments=None, state=False, dtype=torch.float64, **rest):
    q, k, v = draw(B, H, Hkv, n, r, e, m=m, dtype=dtype)
    g = torch.Generator().manual_seed(3)
    options = dict(rest)
    if decay is not None:
        shape = (H,) if decay == "head" else (B, H, n)
        options["log_decay"] = (-0.3 * torch.rand(shape, generator=g)).double().to(DEVICE)
    if segments is not None:
        options["segments"] = torch.tensor(SEGMENTS[segments], device=DEVICE)[:B]
    if state:
        heads = Hkv if decay is None else H
        options["state"] = draw_state(B, heads, r, e, log_scale=rest.get("feature") == "exp")
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
    grow = 1.0 if after.log_scale is None else after.log_scale.exp()[..., None]
    S, z = after.S * (grow[..., None] if after.log_scale is not None else 1.0), None if after.z is None else after.z * grow
    results = [o, S] + ([] if z is None else [z])
    g = torch.Generator().manual_seed(9)
    # the state's share is kept small beside the output's, so that neither hides the other
    loss = sum((x.double() * torch.randn(x.shape, generator=g).double().to(x.device)).sum() for x in results)
    grads = torch.autograd.grad(loss, leaves)
    return [x.detach().double() for x in (*results, *grads)]


def distance(got, want):
    assert got.shape == want.shape
    assert got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp(min=1)).item()


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_formula_and_so_are_its_gradients(form, case, monkeypatch):
    """NaN in every output and workspace beforehand: what is not written shows."""
    if form is not reference:
        monkeypatch.setattr(form, "empty", lambda shape, like, dtype=torch.float32: torch.full(
            shape, torch.nan, dtype=dtype, device=like.device))
        monkeypatch.setattr(form, "_span", lambda n, rows, block: 64)
    else:
        monkeypatch.setattr(form, "CHUNK", 32)
    inputs, options = build(**CASES[case])
    want = outcome(dense, inputs, options, torch.float64)
    got = outcome(form.chunked_linear, inputs, options, torch.float64 if form is reference else torch.float32)
    for x, y in zip(got, want, strict=True):
        assert distance(x, y) < (1e-11 if form is reference else 2e-5)
