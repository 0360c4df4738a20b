"""Softmax attention with a dense mask, against the definition; on a CPU it runs as it would on a GPU, only slower."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.softmax import masked, softmax
from heedful.kernels.softmax.rows import SoftmaxRows

PACKED = torch.tensor([[0] * 30 + [-1] * 5 + [1] * 25, [4] * 60])[:, None]
APART = torch.tensor([0] * 30 + [5] * 10 + [1] * 20), torch.tensor([0] * 30 + [-1] * 10 + [1] * 20)
PATTERNS = {
    "random, and block 0 sees nothing": h.RandomBlocks(8, 2) & h.Causal(),
    "sparse fixed": h.SparseFixed(8, 2),
    "strided": h.Strided(7),
}


def draw(heads=(4, 1), n=60, m=60, widths=(8, 8, 12)):
    generator = torch.Generator().manual_seed(n)
    shapes = (2, heads[0], n, widths[0]), (2, heads[1], m, widths[1]), (2, heads[1], m, widths[2])
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def attend(q, k, v, pattern, segments=None):
    return masked.attend(q, k, v, SoftmaxRows(), pattern, segments, q.shape[-1] ** -0.5)


@pytest.mark.parametrize("segments", [None, PACKED, APART], ids=["alone", "packed", "two sequences"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_it_is_the_definition_and_so_are_its_gradients(pattern, segments):
    inputs = draw()
    got = attend(*inputs, pattern, segments)
    q, k, v = inputs
    want = h.Softmax(pattern).matrix(q, k, segments=segments) @ v
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    do = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for one, other in zip(*(torch.autograd.grad(x, inputs, do) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rows_that_see_nothing_are_zero_and_give_nothing():
    inputs = draw()
    out = attend(*inputs, PATTERNS["random, and block 0 sees nothing"])
    assert not out[..., :8, :].any() and out[..., 8:, :].any()
    for grad in torch.autograd.grad(out[..., :8, :].sum(), inputs):
        assert not grad.any()


def test_what_padding_holds_reaches_nothing():
    inputs, pattern = draw(), PATTERNS["sparse fixed"]
    want = attend(*inputs, pattern, PACKED)
    spoilt = [torch.where((PACKED >= 0)[..., None], x, torch.nan).detach().requires_grad_() for x in inputs]
    got = attend(*spoilt, pattern, PACKED)
    assert torch.equal(got, want)
    for grad in torch.autograd.grad(got.sum(), spoilt):
        assert grad.isfinite().all()


def test_fewer_queries_than_keys_are_the_last():
    q, k, v = draw(n=20)
    pattern = PATTERNS["strided"]
    want = h.Softmax(pattern).matrix(q, k) @ v
    torch.testing.assert_close(attend(q, k, v, pattern), want, rtol=1e-12, atol=1e-12)


def test_widths_of_any_kind_and_a_mask_made_without_gradients_serve():
    pattern = h.Strided(5)
    inputs = draw(widths=(5, 5, 3))
    with torch.inference_mode():
        first = attend(*inputs, pattern)
    out = attend(*inputs, pattern)
    assert torch.equal(out, first) and out.shape[-1] == 3
    torch.testing.assert_close(out, h.Softmax(pattern).matrix(*inputs[:2]) @ inputs[2], rtol=1e-12, atol=1e-12)
    out.sum().backward()


def test_it_says_what_it_can_not_take():
    q, k, v = draw()
    rest = SoftmaxRows(), PATTERNS["strided"], None, 1.0
    assert masked.objections(q, k, v, *rest)[0] == "a dense mask pays on a GPU, the inputs are on cpu"
    assert "softmax/masked: a dense mask pays on a GPU" in softmax.explain(q, k, v, *rest)
    long = torch.empty(1, 1, 8193, 8, device="meta")
    packed = torch.zeros(2, 1, 6000, dtype=torch.long)
    short = torch.empty(2, 4, 6000, 8, device="meta")
    many = torch.empty(2, 3, 4, 6, 8, device="meta")
    ids = torch.zeros(2, 1, 1, 6, dtype=torch.long)
    for inputs, rows, segments, said in (
        ((q, k, v), SoftmaxRows(), None, "float64"),
        ((q, k, v), SoftmaxRows(softcap=2.0), None, "no bias, softcap or sink"),
        ((q[..., :0, :], k, v), SoftmaxRows(), None, "empty"),
        ((long,) * 3, SoftmaxRows(), None, "67125249 numbers, more than 67108864"),
        ((short,) * 3, SoftmaxRows(), packed, "72000000 numbers"),
        ((many,) * 3, SoftmaxRows(), ids, "more than two batch axes"),
    ):
        assert any(said in x for x in masked.objections(*inputs, rows, rest[1], segments, 1.0))
    assert len(masked.objections(*(short[..., :5000, :],) * 3, SoftmaxRows(), rest[1], packed[..., :5000], 1.0)) == 1
