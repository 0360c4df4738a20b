"""One token of linear attention, in torch and in Triton (interpreted on the CPU)."""

from __future__ import annotations

import pytest
import torch

from heedful.kernels.linear_step import reference

pytest.importorskip("triton", reason="triton is not installed")
from heedful.kernels.linear_step import triton as form

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = ["identity", "elu1", "relu", "exp"]


def inputs(feature, normalise, r=20, e=12, batch=(2, 3)):
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(*batch, 1, r, generator=g).to(DEVICE) for _ in range(2))
    v = torch.randn(*batch, 1, e, generator=g).to(DEVICE)
    S = torch.randn(*batch, r, e, generator=g).to(DEVICE)
    z = torch.rand(*batch, r, generator=g).to(DEVICE) if normalise else None
    scale = torch.randn(*batch, r, generator=g).to(DEVICE) if feature == "exp" else None
    return q, k, v, S, z, scale, torch.tensor(5, device=DEVICE)


def wide(x):
    return x.double() if x is not None and x.is_floating_point() else x


@torch.no_grad()
@pytest.mark.parametrize("form", [reference, form], ids=["torch", "triton"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("fade", [0, 1, 100])
def test_both_forms_give_the_step_of_float64(form, feature, normalise, fade):
    """By norms: without a normaliser outputs go up to 1500, and one where that cancels has few digits of its own."""
    given = inputs(feature, normalise, r=100, e=70)
    fades = -torch.rand(3, fade, device=DEVICE) if fade else None
    wanted = reference.linear_step(*map(wide, given), feature=feature, fade=wide(fades))
    got = form.linear_step(*given, feature=feature, fade=fades)
    for want, have in zip(wanted, got, strict=True):
        assert (want is None) == (have is None)
        if want is not None:
            assert (have - want).norm() <= 2e-6 * want.norm()


@torch.no_grad()
@pytest.mark.parametrize("feature", ["elu1", "exp"])
@pytest.mark.parametrize(
    ("queries", "own"),
    [((2, 3, 4), (2, 3, 1)), ((4, 2, 3), (2, 3)), ((2, 3), (2, 3)), ((4, 2, 3, 2), (1, 2, 3, 1))],
    ids=["last axis shared", "first axis shared", "none shared", "both shared"],
)
def test_queries_that_share_keys_share_a_state(feature, queries, own):
    given = inputs(feature, True, batch=queries)[0], *inputs(feature, True, batch=own)[1:]
    out, *states = form.linear_step(*given, feature=feature)
    wanted, *after = reference.linear_step(*map(wide, given), feature=feature)
    assert (out - wanted).norm() <= 2e-6 * wanted.norm()
    for have, want in zip(states, after, strict=True):
        assert have is want or (have.shape == want.shape and (have - want).norm() <= 2e-6 * want.norm())


@torch.no_grad()
def test_heads_may_share_their_inputs():
    q, k, v, S, z, _, length = inputs("elu1", True)
    given = q, k[:1, :1], v[:, :1], S, z, None, length
    options = dict(feature="elu1", fade=torch.tensor([-0.3], device=DEVICE))
    for want, have in zip(reference.linear_step(*given, **options), form.linear_step(*given, **options), strict=True):
        assert (want is None) == (have is None)
        if want is not None:
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("form", [reference, form], ids=["torch", "triton"])
@pytest.mark.parametrize("fade", [None, -30.0])
def test_exp_features_of_any_size_are_right(form, fade):
    """Eight tokens whose logarithms go to ±10⁴, against the softmax of log Σ_r exp(q_r + k_r)."""
    r, e = 20, 12
    g = torch.Generator().manual_seed(1)
    q, k = (3e3 * torch.randn(8, 2, 3, 1, r, generator=g).to(DEVICE) for _ in range(2))
    v = torch.randn(8, 2, 3, 1, e, generator=g).to(DEVICE)
    S, z, scale = (torch.zeros(2, 3, *tail, device=DEVICE) for tail in ((r, e), (r,), (r,)))
    fades = None if fade is None else torch.full((1,), fade, device=DEVICE)
    for t in range(8):
        length = torch.tensor(t, device=DEVICE)
        out, S, z, scale = form.linear_step(q[t], k[t], v[t], S, z, scale, length, feature="exp", fade=fades)
        logs = (q[t].double() + k[: t + 1].double()).logsumexp(-1)
        if fade is not None:
            logs = logs + fade * torch.arange(t, -1, -1, device=DEVICE)[:, None, None, None]
        want = (logs.softmax(0)[..., None] * v[: t + 1].double()).sum(0)
        assert (out - want).abs().max() <= 5e-3  # a logarithm of 10⁴ is known to 10⁻³ in float32


@torch.no_grad()
@pytest.mark.parametrize("form", [reference, form], ids=["torch", "triton"])
def test_an_empty_state_has_no_scale_yet(form):
    q, k, v, S, z, scale, _ = inputs("exp", True)
    none = torch.tensor(0, device=DEVICE)
    out, _, _, after = form.linear_step(
        q, k - 50, v, S.zero_(), z.zero_(), torch.zeros_like(scale), none, feature="exp"
    )
    torch.testing.assert_close(after, (k - 50)[..., 0, :])
    torch.testing.assert_close(out, v)  # one token attends to itself


@torch.no_grad()
def test_every_element_is_written(monkeypatch):
    def poisoned(*shape, **options):
        shape = shape[0] if isinstance(shape[0], tuple | torch.Size) else shape
        return torch.full(shape, torch.nan, **options)

    given = inputs("exp", True, r=33, e=65)
    monkeypatch.setattr(form.torch, "empty", poisoned)
    for x in form.linear_step(*given, feature="exp"):
        assert x.isfinite().all()


def test_it_says_what_it_cannot_take():
    q, k, v, S, z, scale, length = inputs("elu1", True)
    assert "float64" in form.objections(q, k, v, S.double(), z, None, length, feature="elu1")[0]
    assert "no_grad" in form.objections(q.requires_grad_(), k, v, S, z, None, length, feature="elu1")[0]
    with pytest.raises(ValueError, match="log_scale"):
        reference.linear_step(q, k, v, S, z, scale, length, feature="exp")
