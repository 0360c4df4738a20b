"""Strided attention by residue classes is softmax over its pattern, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.blocked.reference import blocked
from heedful.kernels.softmax.rows import SoftmaxRows
from heedful.kernels.strided import reference
from heedful.mechanisms.strided import StridedSoftmax
from heedful.testing import CHECKS, Case, DoesNotApply
from heedful.testing.case import assert_agrees, dense, oracles, with_gradients

# The laws at a small size, and the options of real use for the check of the cost.
MECHANISMS = {
    "with a window": (lambda: StridedSoftmax(4, 9), lambda: StridedSoftmax(64, 128)),
    "both ways, window": (lambda: StridedSoftmax(4, 6, False), lambda: StridedSoftmax(128, 128, False)),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_strided_attention_keeps_the_contract(name, check, request):
    if check != "compiled_equals_eager":
        request.getfixturevalue("annotations_enforced")
    small, large = MECHANISMS[name]
    try:
        CHECKS[check](Case(small, large=large))
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("stride, window", [(1, 3), (7, None), (7, 1), (7, 7), (7, 15), (300, 40)])
@pytest.mark.parametrize("n, m", [(1, 1), (49, 49), (150, 150), (13, 150), (1, 29)])
def test_it_is_softmax_over_the_pattern_with_each_key_once(stride, window, causal, n, m):
    mechanism = StridedSoftmax(stride, window, causal)
    pattern = h.Strided(stride)
    if window is not None:
        pattern = pattern | h.Window(window - 1, 0 if causal else window - 1)
    definition = h.Softmax(pattern & h.Causal() if causal else pattern)
    generator = torch.Generator().manual_seed(n * 1000 + m)
    q, k, v, weight = (
        torch.randn(2, size, width, generator=generator, dtype=torch.float64)
        for size, width in ((n, 5), (m, 5), (m, 3), (n, 3))
    )
    assert "→ strided" in mechanism.explain(q, k, v)
    want = oracles(lambda *x: with_gradients(lambda *y: dense(definition, *y), x, weight), q, k, v, terms=m + 5)
    got = with_gradients(mechanism, (q, k, v), weight)
    for name, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{name} of {mechanism}", "a key in both parts is counted twice, or in neither")


@pytest.mark.parametrize("causal", [True, False])
def test_tiles_of_any_size_give_the_same(causal, monkeypatch):
    mechanism = StridedSoftmax(6, 8, causal)
    q, k, v = torch.randn(3, 3, 2, 101, 4, dtype=torch.float64).unbind()
    want = dense(mechanism, q, k, v)
    for rows, budget in ((1, 1), (3, 40), (5, 200), (64, 1 << 12)):
        monkeypatch.setattr(reference, "ROWS", rows)
        monkeypatch.setattr(reference, "BUDGET", budget)
        assert torch.allclose(mechanism(q, k, v), want, atol=1e-12)


def test_the_cost_counts_the_pairs_of_the_pattern():
    for stride, window, causal in ((5, None, True), (5, 3, True), (3, 11, True), (4, None, False), (4, 6, False)):
        mechanism = StridedSoftmax(stride, window, causal)
        for n, m in ((0, 0), (1, 1), (20, 20), (7, 33), (1, 40)):
            flops = mechanism.cost(h.Dims(n, m, 2, 3)).flops
            assert flops == 10 * mechanism.pattern.pairs(n, m), (mechanism, n, m)


def test_no_tensor_grows_with_the_square_of_the_length():
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found = out if isinstance(out, tuple | list) else [out]
            seen.extend(x.untyped_storage().nbytes() for x in found if isinstance(x, torch.Tensor))
            return out

    q, k, v = (torch.randn(8192, 8, requires_grad=True) for _ in range(3))
    with Sizes():
        StridedSoftmax(128, 128)(q, k, v).sum().backward()
    assert max(seen) <= 4 * reference.BUDGET + 4096  # one tile


def test_it_reads_the_pattern_in_any_order_and_refuses_others():
    strided, window, causal = h.Strided(4), h.Window(2), h.Causal()
    for pattern in ((strided | window) & causal, causal & (window | strided)):
        assert reference.Shape.of(pattern) == (4, 3, True)
    assert reference.Shape.of(strided) == (4, 0, False)
    assert reference.Shape.of(h.Window(2, 2) | strided) == (4, 3, False)
    others = (causal, window, strided | window, strided & window, (strided | h.Window(2, sinks=1)) & causal)
    assert [reference.Shape.of(pattern) for pattern in others] == [None] * len(others)


def test_segments_and_empty_inputs_go_by_the_pattern():
    mechanism = StridedSoftmax(4, 3)
    q, k, v = torch.randn(3, 2, 20, 4, dtype=torch.float64).unbind()
    ids = torch.tensor([0] * 7 + [1] * 13)
    assert "residue classes of their own" in mechanism.explain(q, k, v, segments=ids)
    apart = torch.cat([mechanism(*(x[:, part] for x in (q, k, v))) for part in (slice(0, 7), slice(7, 20))], -2)
    assert torch.allclose(mechanism(q, k, v, segments=ids), apart)
    with h.backend("torch"):
        forced = mechanism(q, k, v)
    assert torch.allclose(forced, mechanism(q, k, v))
    plain = blocked(q, k, v, SoftmaxRows(), mechanism.pattern, None, 0.5)
    assert torch.equal(forced, plain)


def test_temperature_divides_the_logits():
    q, k, v = torch.randn(3, 2, 50, 4, dtype=torch.float64).unbind()
    assert torch.allclose(StridedSoftmax(4, 3, temperature=2.0)(q, k, v), StridedSoftmax(4, 3)(q / 2, k, v))


@pytest.mark.parametrize("arguments, name", [((0,), "stride"), ((4, 0), "window"), ((4.0,), "stride")])
def test_a_bad_option_is_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        StridedSoftmax(*arguments)
    with pytest.raises(ValueError, match="temperature"):
        StridedSoftmax(4, temperature=0)


class FlashByDefinition:
    """torch's flash operators, which exist on a GPU alone, as their definitions: what views and merge rely on."""

    @staticmethod
    def _visible(n, m):
        return torch.arange(n)[:, None] >= torch.arange(m)

    def _scaled_dot_product_flash_attention(self, q, k, v, p, causal, debug, scale):
        s = (q @ k.mT * scale).masked_fill(~self._visible(q.shape[-2], k.shape[-2]), -torch.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1), *[None] * 7

    def _scaled_dot_product_flash_attention_backward(self, g, q, k, v, o, lse, *rest, scale):
        s = (q @ k.mT * scale).masked_fill(~self._visible(q.shape[-2], k.shape[-2]), -torch.inf)
        P = (s - lse[..., None]).exp()
        ds = P * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, P.mT @ g


@pytest.fixture
def fused():
    pytest.importorskip("triton", reason="triton is not installed")
    from heedful.kernels.strided import fused as form

    return form


@pytest.mark.parametrize("stride, window", [(4, None), (4, 4), (4, 9), (7, 3), (50, 20)])
@pytest.mark.parametrize("n", [1, 45])
def test_views_and_merge_of_the_gpu_form_are_softmax_over_the_pattern(stride, window, n, fused, monkeypatch):
    monkeypatch.setattr(fused, "aten", FlashByDefinition())
    mechanism = StridedSoftmax(stride, window)
    q, k, v = (torch.randn(2, 3, n, 16, requires_grad=True) for _ in range(3))
    g = torch.randn(2, 3, n, 16)
    out = fused.attend(q, k, v, mechanism.rows(), mechanism.pattern, None, mechanism.score_scale(16))
    wanted = mechanism.matrix(q, k) @ v
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(wanted, (q, k, v), g), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_gpu_form_says_what_it_cannot_take(fused):
    q = torch.randn(2, 3, 10, 8)
    mechanism = StridedSoftmax(4)
    assert "GPU" in fused.objections(q, q, q, mechanism.rows(), mechanism.pattern, None, 1.0)[0]
