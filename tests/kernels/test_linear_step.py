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
    scale = torch.randn(batch, generator=g).to(DEVICE) if feature == "exp" else None
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
def test_exp_features_of_any_size_stay_finite(form):
    q, k, v, S, z, scale, length = inputs("exp", True)
    out, S, z, scale = form.linear_step(q * 1e4, k * 1e4, v, S, z, scale, length, feature="exp")
    assert all(x.isfinite().all() for x in (out, S, z, scale))


@torch.no_grad()
@pytest.mark.parametrize("form", [reference, form], ids=["torch", "triton"])
def test_an_empty_state_has_no_scale_yet(form):
    q, k, v, S, z, scale, _ = inputs("exp", True)
    none = torch.tensor(0, device=DEVICE)
    out, _, _, after = form.linear_step(
        q, k - 50, v, S.zero_(), z.zero_(), torch.zeros_like(scale), none, feature="exp"
    )
    torch.testing.assert_close(after, (k - 50).amax((-2, -1)))
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
