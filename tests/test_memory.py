"""External memory at its limits, its ties, and the store that outlives a call."""

from __future__ import annotations

from math import log

import pytest
import torch

import heedful as h
from heedful.testing.case import Case


def drawn(n=40, m=None, **options):
    return Case(lambda: None).draw(n, m, seed=1, **options)


def gated(at: float, **options) -> h.ExternalMemory:
    attend = h.ExternalMemory(**options).double()
    with torch.no_grad():
        attend.gate.fill_(at)
    return attend


def test_a_window_over_everything_is_softmax():
    q, k, v = drawn()
    torch.testing.assert_close(gated(3.0, before=40, k=4)(q, k, v), h.Softmax()(q, k, v))


def test_a_gate_that_shuts_the_memory_is_a_window():
    q, k, v = drawn()
    torch.testing.assert_close(gated(-800.0, before=5, k=4)(q, k, v), h.Softmax(h.Window(5))(q, k, v))


def test_a_gate_that_shuts_the_window_is_top_k_of_the_rest():
    """With w = 0 only one's own key is local: far from the first row, the rest is top-k of the sequence before."""
    q, k, v = drawn()
    out = gated(800.0, before=0, k=4)(q, k, v)
    torch.testing.assert_close(out[..., :1, :], v[..., :1, :])
    torch.testing.assert_close(out[..., 1:, :], h.TopK(4)(q[..., 1:, :], k[..., :-1, :], v[..., :-1, :]))


def test_with_k_of_all_keys_both_parts_are_softmax():
    q, k, v = drawn()
    A = h.Softmax().matrix(q, k)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    near, far = (A * where for where in (j >= i - 5, j < i - 5))
    parts = [x / x.sum(-1, keepdim=True).clamp(min=1e-300) for x in (near, far)]
    share = torch.where(i > 5, torch.tensor(0.7, dtype=torch.float64), 0)
    want = (1 - share) * parts[0] + share * parts[1]
    torch.testing.assert_close(gated(log(0.7 / 0.3), before=5, k=40)(q, k, v), want @ v)


def test_rows_hold_the_window_and_k_more():
    q, k, _ = drawn()
    A = h.ExternalMemory(5, 4, heads=2).double().matrix(q, k)
    wanted = torch.minimum(torch.arange(40) + 1, torch.tensor(6)) + (torch.arange(40) - 5).clamp(0, 4)
    assert torch.equal((A > 0).sum(-1), wanted.expand(2, 2, 40))
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 2, 40, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ties_go_to_the_earlier_key_everywhere(dtype):
    """Small integers have exact scores, most of them equal: forward, matrix and steps must choose alike."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randint(-1, 2, (2, 60, 4), generator=generator).to(dtype) for _ in range(2))
    v = torch.eye(60, dtype=dtype).expand(2, 60, 60)  # so that the output is A itself
    attend = h.ExternalMemory(5, 4, heads=2, scale=1.0).to(dtype)
    A = attend.matrix(q, k)
    state, rows = attend.init_state(q, k, v), []
    for t in range(60):
        out, state = attend.step(state, *(x[..., t : t + 1, :] for x in (q, k, v)))
        rows.append(out)
    for other in (attend(q, k, v), torch.cat(rows, -2)):
        assert torch.equal(other > 0, A > 0)
    z = (q.double() @ k.double().mT).tril(-6).masked_fill(~torch.ones(60, 60).tril(-6).bool(), -torch.inf)
    for head, i in ((0, 30), (1, 59)):
        kept = sorted(range(i - 5), key=lambda j: (-z[head, i, j].item(), j))[:4]
        assert (A[head, i, : i - 5] > 0).nonzero().flatten().tolist() == sorted(kept)


def test_the_gate_is_learned_only_where_there_is_something_to_choose():
    q, k, v = drawn(6)
    attend = h.ExternalMemory(5, 4, heads=2).double()
    (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), attend.gate)
    assert not grad.any()
    q, k, v = drawn(7)
    (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), attend.gate)
    assert grad.all()


# The store.


def store_of(capacity: int) -> h.KeyValueMemory:
    return h.KeyValueMemory(capacity, d=8, e=6, batch=(2, 2), dtype=torch.float64)


def test_with_a_store_calls_see_what_earlier_calls_gave():
    """Piece by piece with a store is the whole sequence at once, and what prefill and steps give."""
    q, k, v = drawn()
    attend, store = h.ExternalMemory(5, 4, heads=2).double(), store_of(100)
    rows = []
    for a, z in ((0, 13), (13, 14), (14, 40)):
        piece = [x[..., a:z, :] for x in (q, k, v)]
        rows.append(attend(piece[0], *store.before(*piece[1:])))
        store.add(*piece[1:])
    torch.testing.assert_close(torch.cat(rows, -2), attend(q, k, v))
    _, state = attend.prefill(*(x[..., :39, :] for x in (q, k, v)))
    last, _ = attend.step(state, *(x[..., 39:, :] for x in (q, k, v)))
    torch.testing.assert_close(last, rows[-1][..., -1:, :])


def test_beyond_its_capacity_the_oldest_go():
    _, k, v = drawn()
    store = store_of(10)
    for a, z in ((0, 4), (4, 11), (11, 12)):
        store.add(k[..., a:z, :], v[..., a:z, :])
        keys, values = store.before(k[..., :0, :], v[..., :0, :])
        assert len(store) == min(z, 10)
        assert torch.equal(keys, k[..., max(0, z - 10) : z, :]) and torch.equal(values, v[..., max(0, z - 10) : z, :])
    store.add(k, v)  # more than it holds at once
    assert torch.equal(store.before(k[..., :0, :], v[..., :0, :])[0], k[..., -10:, :])
    store.clear()
    assert len(store) == 0 and torch.equal(store.before(k, v)[1], v)


def test_the_nearest_are_those_that_attention_looks_up():
    q, k, v = drawn(1, 40)
    store = store_of(64)
    store.add(k, v)
    found = store.nearest(q, 4)
    A = h.TopK(4, h.Full()).matrix(q, k)
    torch.testing.assert_close((found.scores * 8**-0.5).softmax(-1)[..., None, :] @ found.v, (A @ v)[..., None, :])
    torch.testing.assert_close((q[..., None, :] * found.k).sum(-1), found.scores)
    assert store.nearest(q, 100).k.shape == (2, 2, 1, 40, 8)
    assert (found.scores.diff(dim=-1) <= 0).all()


def test_of_equally_near_tokens_the_older_is_nearer():
    store = h.KeyValueMemory(8, d=1, e=1)
    store.add(torch.tensor([[1.0], [2.0], [2.0], [1.0], [2.0]]), torch.arange(5.0)[:, None])
    assert store.nearest(torch.ones(3, 1), 4).v[..., 0].tolist() == [[1, 2, 4, 0]] * 3


def test_a_store_travels_by_its_state_dict():
    _, k, v = drawn()
    old, new = store_of(64), store_of(64)
    old.add(k, v)
    new.load_state_dict(old.state_dict())
    assert len(new) == 40
    for one, other in zip(new.before(k, v), old.before(k, v), strict=True):
        assert torch.equal(one, other)


def test_no_gradient_goes_into_the_store_and_all_of_it_into_the_call():
    _, k, v = (x.requires_grad_() for x in drawn())
    store = store_of(64)
    store.add(k, v)
    assert not store.k.requires_grad
    keys, values = store.before(k, v)
    dk, dv = torch.autograd.grad(keys.sum() + values.sum(), (k, v))
    assert (dk == 1).all() and (dv == 1).all()


def test_one_row_serves_a_whole_batch():
    _, k, v = drawn()
    store = store_of(64)
    store.add(k[:1], v[0, 0])
    assert torch.equal(store.before(k, v)[1][1, 1, :40], v[0, 0])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda s, k, v: s.add(k[..., :5], v), "k:"),
        (lambda s, k, v: s.add(k, v[..., :3, :]), "v:"),
        (lambda s, k, v: s.before(k.expand(3, 2, 2, 40, 8), v), "k:"),
        (lambda s, k, v: s.nearest(v, 3), "q: width 6"),
        (lambda s, k, v: h.KeyValueMemory(0, 8, 6), "capacity:"),
        (lambda s, k, v: h.ExternalMemory(-1), "before:"),
        (lambda s, k, v: h.ExternalMemory(k=0), "k:"),
        (lambda s, k, v: h.ExternalMemory(heads=3).double()(k, k, v), "heads = 3"),
    ],
)
def test_mistakes_are_named(call, named):
    _, k, v = drawn()
    with pytest.raises(ValueError, match=named):
        call(store_of(64), k, v)
