"""What only Perceiver latents are: of low rank, blind to order, and softmax attention where latents are the keys."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.testing.case import Case


def drawn(n=40, m=None, **options):
    return Case(lambda: None).draw(n, m, seed=1, **options)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_the_rank_is_that_of_the_latents_and_rows_sum_to_one(rounds):
    q, k, _ = drawn(40, 50)
    A = h.Perceiver(8, 5, rounds=rounds, heads=2).double().matrix(q, k)
    values = torch.linalg.svdvals(A)
    assert (values[..., 4] > 1e-8).all() and (values[..., 5] < 1e-14).all()
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 2, 40, dtype=torch.float64))
    assert (A > 0).all()


def test_the_order_of_the_keys_does_not_matter():
    q, k, v = drawn()
    attend = h.Perceiver(8, 5, heads=2).double()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attend(q, k[..., order, :], v[..., order, :]), attend(q, k, v))


def test_without_scores_it_is_the_mean():
    q, k, v = drawn()
    torch.testing.assert_close(h.Perceiver(8, 5, scale=0.0).double()(q, k, v), v.mean(-2, keepdim=True).expand_as(v))


def test_latents_that_find_one_key_each_give_softmax_attention():
    """L = 30 K with orthonormal K: C is the identity, X = 31 K, and without rounds A is softmax(31 s · Q Kᵀ)."""
    q, _, v = drawn(8)
    k = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    attend = h.Perceiver(8, 8, rounds=0, scale=2.0).double()
    with torch.no_grad():
        attend.L.copy_(30 * k)
    k = k.expand(2, 2, 8, 8)
    torch.testing.assert_close(attend(q, k, v), h.Softmax(h.Full(), scale=62.0)(q, k, v))


def test_latents_talk():
    """A round moves values from one latent to another, as long as there is more than one."""
    q, k, v = drawn()
    none, some = (h.Perceiver(8, 5, rounds=rounds).double() for rounds in (0, 2))
    assert torch.equal(none.L, some.L)
    assert (none(q, k, v) - some(q, k, v)).abs().max() > 1e-3
    one, two = (h.Perceiver(8, 1, rounds=rounds).double() for rounds in (0, 2))
    torch.testing.assert_close(one(q, k, v), two(q, k, v))


def test_heads_may_have_segments_of_their_own():
    q, k, v = drawn()
    attend = h.Perceiver(8, 5, heads=2).double()
    ids = torch.stack([torch.tensor([0] * 15 + [1] * 25), torch.tensor([-1] * 10 + [3] * 30)])
    out, A = attend(q, k, v, segments=ids), attend.matrix(q, k, segments=ids)
    torch.testing.assert_close(A @ v, out)
    for head, spans in enumerate([[(0, 15), (15, 40)], [(10, 40)]]):
        for a, z in spans:
            alone = attend(*(x[..., a:z, :] for x in (q, k, v)))[:, head]
            torch.testing.assert_close(out[:, head, a:z], alone)
    assert not out[:, 1, :10].any()


def test_there_is_no_causal_form():
    with pytest.raises(ValueError, match="each latent attends to all tokens"):
        h.Perceiver(8, pattern=h.Causal())


@pytest.mark.parametrize("options", [dict(d=0), dict(d=8, latents=0), dict(d=8, rounds=-1), dict(d=8, heads=0)])
def test_bad_options_are_named(options):
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"{name}: expected an integer"):
        h.Perceiver(**options)


def test_inputs_of_another_layer_are_named():
    q, k, v = drawn(5)
    with pytest.raises(ValueError, match="width 8, expected d = 16"):
        h.Perceiver(16).double()(q, k, v)
    with pytest.raises(ValueError, match="heads = 3"):
        h.Perceiver(8, heads=3).double()(q, k, v)
