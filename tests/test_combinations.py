"""Mechanisms made of mechanisms (mixtures by head, sums), and top-k."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import heedful as h
from heedful.mechanisms.fixed_pattern import KINDS
from heedful.mechanisms.mixture import Mixture
from heedful.mechanisms.sum import Sum
from heedful.mechanisms.top_k import TopK
from heedful.testing import CHECKS, Case, DoesNotApply


def logits():
    return nn.Parameter(torch.tensor([[0.3, -0.5], [0.1, 0.8]]))


MECHANISMS = {
    "mixture of streams": lambda: Mixture([h.FixedPattern("left"), h.Softmax()]),
    "mixture, not causal": lambda: Mixture([h.FixedPattern("next"), h.Softmax(h.Full())]),
    "sum with weights": lambda: Sum(h.Softmax(), h.Linear(), weights=[0.7, -0.3]),
    "sum, softmax gate": lambda: Sum(h.Softmax(h.Full()), h.Linear(pattern=h.Full()), gate="softmax", heads=2),
    "sum, sigmoid gate": lambda: Sum(h.FixedPattern("end"), h.Softmax(), weights=logits(), gate="sigmoid"),
    "top-k": lambda: TopK(5),
    "top-k, full": lambda: TopK(5, h.Full(), scale=0.7),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_combinations_keep_the_contract(name, check, request):
    if check != "compiled_equals_eager":
        request.getfixturevalue("annotations_enforced")
    try:
        CHECKS[check](Case(MECHANISMS[name]))
    except DoesNotApply as why:
        pytest.skip(str(why))


def inputs(*batch, n=12, d=4, e=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*batch, n, w, generator=generator, dtype=torch.float64) for w in (d, d, e)]


def test_each_head_of_a_mixture_has_its_own_mechanism():
    mechanisms = [h.FixedPattern("left"), h.FixedPattern("left"), h.Softmax(), h.Linear(), h.Softmax(h.Window(2))]
    q, k, v = inputs(2, 5)
    out, matrix = Mixture(mechanisms)(q, k, v), Mixture(mechanisms).matrix(q, k)
    for head, mechanism in enumerate(mechanisms):
        own = q[:, head], k[:, head], v[:, head]
        assert torch.allclose(out[:, head], mechanism(*own))
        assert torch.allclose(matrix[:, head], mechanism.matrix(*own[:2]))


def test_equal_neighbours_run_in_one_call():
    calls = []
    left, exact = h.FixedPattern("left"), h.Softmax()
    for part in (left, exact):
        part.register_forward_hook(lambda module, args, out: calls.append((module, out.shape[1])))
    Mixture([left] * 7 + [exact])(*inputs(2, 8))
    assert calls == [(left, 7), (exact, 1)]
    assert Mixture([h.Linear() for _ in range(3)] + [h.Linear(h.Relu())]).groups == (3, 1)
    assert Mixture([h.Softmax(), h.Softmax(temperature=2.0), h.Softmax(h.Window(3))]).groups == (1, 1, 1)


def test_what_heads_learn_stays_their_own():
    learned = [h.Softmax(sink=nn.Parameter(torch.zeros(1))) for _ in range(2)]
    mixture = Mixture(learned)
    assert mixture.groups == (1, 1) and len(list(mixture.parameters())) == 2


def test_groups_of_heads_may_have_parameters_for_each_head():
    sink = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
    q, k, v = inputs(2, 5)
    out = Mixture([h.Softmax(sink=sink), h.Linear()], groups=(3, 2))(q, k, v)
    assert torch.allclose(out[:, :3], h.Softmax(sink=sink)(q[:, :3], k[:, :3], v[:, :3]))
    assert torch.allclose(out[:, 3:], h.Linear()(q[:, 3:], k[:, 3:], v[:, 3:]))


def test_segments_may_differ_by_head():
    q, k, v = inputs(2, 3)
    mixture = Mixture([h.Softmax(), h.FixedPattern("left"), h.Linear()])
    ids = torch.tensor([[[0] * 12, [0] * 5 + [1] * 7, [-1] * 3 + [0] * 9]] * 2)
    out = mixture(q, k, v, segments=ids)
    for head, part in enumerate((h.Softmax(), h.FixedPattern("left"), h.Linear())):
        alone = part(q[:, head], k[:, head], v[:, head], segments=ids[:, head])
        assert torch.allclose(out[:, head], alone)
    assert torch.allclose(mixture(q, k, v, segments=(ids, ids)), out)


def test_heads_share_keys_and_values():
    q, k, v = inputs(2, 3)
    mixture = Mixture([h.Softmax(), h.Softmax(), h.FixedPattern("left")])
    shared = mixture(q, k[:, :1], v[:, :1])
    assert torch.allclose(shared, mixture(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)))
    _, state = mixture.prefill(q, k[:, :1], v[:, :1])
    last, _ = mixture.step(state, q[..., -1:, :], k[:, :1, -1:], v[:, :1, -1:])
    assert last.shape == (2, 3, 1, 3)


def test_a_wrong_number_of_heads_is_explained():
    mixture = Mixture([h.FixedPattern("left")] * 7 + [h.Softmax()])
    for batch, given in (((2, 4), "4 heads"), ((), "no head axis")):
        q, k, v = inputs(*batch)
        for call in (lambda q=q, k=k, v=v: mixture(q, k, v), lambda q=q, k=k: mixture.operator(q, k)):
            with pytest.raises(ValueError, match=rf"q: {given}.*expected 8 .*7 \+ 1 heads"):
                call()


def test_the_cost_of_a_mixture_is_that_of_its_heads():
    dims = h.Dims(100, 100, 8, 6, batch=16)
    whole = Mixture([h.Linear()] * 6 + [h.Softmax()] * 2).cost(dims)
    linear, exact = h.Linear().cost(h.Dims(100, 100, 8, 6, 12)), h.Softmax().cost(h.Dims(100, 100, 8, 6, 4))
    assert (whole.flops, whole.state) == (linear.flops + exact.flops, linear.state + exact.state)
    assert whole.bytes == dims.io_bytes


@pytest.mark.parametrize("make", [lambda *parts: Mixture(parts), Sum], ids=["mixture", "sum"])
def test_a_combination_streams_if_all_its_parts_do(make):
    assert isinstance(make(h.Softmax(), h.Linear()), h.RecurrentMechanism)
    still = make(h.Softmax(), h.FixedPattern("end"))
    assert not isinstance(still, h.RecurrentMechanism) and still.cost(h.Dims(4, 4, 2, 2, 2)).state is None
    for one in (make(h.Softmax(), h.Linear()), still):
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert type(other) is type(one) and repr(other) == repr(one)
    assert make(h.Softmax(), h.Softmax(h.Window(3))).pattern == h.Causal()
    assert make(h.Softmax(h.Full()), h.Softmax(h.Full())).pattern == h.Full()
    assert not make(h.Softmax(h.Full()), h.Softmax()).pattern.is_causal


def test_explain_tells_for_each_part():
    q, k, v = (x.repeat_interleave(3, -2) for x in inputs(2, 3))
    text = Mixture([h.Linear(), h.Linear(), h.Softmax()]).explain(q, k, v)
    assert "heads 0 to 1: chunked_linear" in text and "head 2: softmax/sdpa: can run" in text
    assert "part 1: softmax/sdpa: can run" in Sum(h.Linear(), h.Softmax()).explain(q, k, v)


def test_a_sum_adds_its_parts_by_their_shares():
    q, k, v = inputs(2, 3)
    exact, linear = h.Softmax(), h.Linear()
    assert torch.allclose(Sum(exact, linear)(q, k, v), exact(q, k, v) + linear(q, k, v))
    weights = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    for gate, g in ((None, weights), ("sigmoid", weights.sigmoid()), ("softmax", weights.softmax(0))):
        mechanism = Sum(exact, linear, weights=weights, gate=gate)
        want = g[0, :, None, None] * exact(q, k, v) + g[1, :, None, None] * linear(q, k, v)
        assert torch.allclose(mechanism(q, k, v), want) and torch.equal(mechanism.shares(), g)
    assert torch.allclose(Sum(exact, weights=[2.0])(q[0, 0], k[0, 0], v[0, 0]), 2 * exact(q[0, 0], k[0, 0], v[0, 0]))


def test_combinations_nest():
    q, k, v = inputs(2, 3)
    mechanism = Sum(h.Linear(), Mixture([h.Softmax(), h.FixedPattern("current"), Sum(h.Softmax(), weights=[0.5])]))
    assert torch.allclose(mechanism(q, k, v), mechanism.matrix(q, k) @ v)
    out, state = mechanism.prefill(*(x[..., :-1, :] for x in (q, k, v)))
    last, _ = mechanism.step(state, *(x[..., -1:, :] for x in (q, k, v)))
    assert torch.allclose(torch.cat([out, last], -2), mechanism(q, k, v))


def test_a_gate_learns_which_part_is_right():
    torch.manual_seed(0)
    q, k, v = inputs(2, 2)
    gated = Sum(h.FixedPattern("current"), h.FixedPattern("left"), gate="softmax", heads=2).double()
    wanted = torch.stack([v[:, 0], h.FixedPattern("left")(q, k, v)[:, 1]], 1)
    optimiser = torch.optim.Adam(gated.parameters(), lr=0.3)
    for _ in range(60):
        optimiser.zero_grad()
        (gated(q, k, v) - wanted).square().mean().backward()
        optimiser.step()
    assert (gated.shares().detach() - torch.eye(2)).abs().max() < 0.02


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: Mixture([]), "mechanisms"),
        (lambda: Mixture(["softmax"]), r"mechanisms\[0\]"),
        (lambda: Mixture(h.Softmax()), "mechanisms"),
        (lambda: Mixture([h.Softmax()], groups=(1, 2)), "groups"),
        (lambda: Mixture([h.Softmax()], groups=(0,)), "groups"),
        (lambda: Sum(), "mechanisms"),
        (lambda: Sum(h.Softmax(), weights=[1.0, 2.0]), "weights"),
        (lambda: Sum(h.Softmax(), gate="tanh"), "gate"),
        (lambda: Sum(h.Softmax(), heads=2), "heads"),
        (lambda: Sum(h.Softmax(), weights=torch.ones(1, 3))(*inputs(2, 2)), "weights"),
        (lambda: TopK(0), "k: expected"),
    ],
)
def test_a_bad_option_is_named(make, name):
    with pytest.raises((TypeError, ValueError), match=name):
        make()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_k_prefers_the_earlier_of_equal_keys_everywhere(dtype):
    q = torch.ones(1, 40, 4, dtype=dtype)
    k = torch.tensor([1.0, 3.0, 2.0, 3.0])[torch.arange(40) % 4][None, :, None].expand(1, 40, 4).to(dtype)
    v = torch.eye(40, dtype=dtype)[None]
    mechanism, n = TopK(3), 40
    kept = [sorted(range(i + 1), key=lambda j: (-k[0, j, 0].item(), j))[:3] for i in range(n)]
    want = torch.zeros(n, n, dtype=torch.bool)
    for i, columns in enumerate(kept):
        want[i, columns] = True
    assert torch.equal(mechanism.matrix(q, k)[0] > 0, want)
    assert torch.equal(mechanism(q, k, v)[0] > 0, want)
    state, rows = mechanism.init_state(q, k, v), []
    for t in range(n):
        out, state = mechanism.step(state, *(x[:, t : t + 1] for x in (q, k, v)))
        rows.append(out)
    assert torch.equal(torch.cat(rows, 1)[0] > 0, want)


def test_top_k_of_all_keys_is_softmax():
    q, k, v = inputs(2, 3)
    assert torch.allclose(TopK(12)(q, k, v), h.Softmax()(q, k, v))
    assert torch.allclose(TopK(100, h.Full()).matrix(q, k), h.Softmax(h.Full()).matrix(q, k))
    one = TopK(1, h.Full())(q, k, v)
    best = (q @ k.mT).argmax(-1)
    assert torch.allclose(one, v.gather(-2, best[..., None].expand_as(v)))


def test_a_hybrid_layer_of_seven_fixed_heads_and_one_learned_one():
    """Raganato et al. 2020: an encoder layer whose heads know where to look, but for one."""
    torch.manual_seed(0)
    fixed = [h.FixedPattern(kind) for kind in KINDS if kind != "last"]
    layer = h.nn.Attention(64, heads=8, mechanism=Mixture([*fixed, h.Softmax(h.Full())]))
    x = torch.randn(2, 50, 64)
    ids = h.segments.from_lengths(torch.tensor([50, 30]), 50)
    padded, alone = layer(x, segments=ids), layer(x[1:, :30])
    assert padded.shape == (2, 50, 64) and torch.allclose(padded[1, :30], alone[0], atol=1e-5)
    padded.square().mean().backward()
    assert layer.q_proj.weight.shape == layer.k_proj.weight.shape == (8, 64)  # fixed heads need no queries and no keys
    assert (layer.q_proj.weight.grad != 0).any() and (layer.k_proj.weight.grad != 0).any()


def test_a_hybrid_decoder_layer_goes_token_by_token():
    torch.manual_seed(0)
    heads = [h.FixedPattern("left")] * 4 + [h.FixedPattern("current")] * 2 + [h.FixedPattern("previous", edge="first")]
    layer = h.nn.Attention(64, heads=8, mechanism=Mixture([*heads, h.Softmax()]), rope=h.nn.Rope(8))
    x = torch.randn(2, 20, 64)
    _, state = layer.prefill(x[:, :15])
    for t in range(15, 20):
        out, state = layer.step(state, x[:, t : t + 1])
        assert torch.allclose(out, layer(x[:, : t + 1])[:, -1:], atol=1e-5)


@pytest.mark.parametrize("kv_heads", [None, 2, 3])
def test_equal_mechanisms_run_in_one_call_wherever_their_heads_are(kv_heads):
    near, exact, left = h.Softmax(h.Window(2)), h.Softmax(), h.FixedPattern("left")
    each = [near, exact, near, left, exact, near]  # groups of three: two and one near heads; of two: one each
    mixture, calls = Mixture(each, kv_heads=kv_heads), []
    assert mixture.index == ((0, 2, 5), (1, 4), (3,)) and mixture.groups == (3, 2, 1)
    for part in (near, exact):
        part.register_forward_hook(lambda module, args, out: calls.append(module))
    q, k, v = inputs(2, 6)
    if kv_heads is not None:
        k, v = k[:, :kv_heads], v[:, :kv_heads]
        q, k, v = h.group_heads(q, k, v)
    out, matrix = mixture(q, k, v), mixture.matrix(q, k)
    assert calls == [near, exact]
    torch.testing.assert_close(out, matrix @ v)
    flat = (matrix if kv_heads is None else matrix.flatten(1, 2)).unbind(1)
    keys = (k if kv_heads is None else k.expand(-1, -1, 6 // kv_heads, -1, -1).flatten(1, 2)).unbind(1)
    queries = (q if kv_heads is None else q.flatten(1, 2)).unbind(1)
    for mechanism, found, own_q, own_k in zip(each, flat, queries, keys, strict=True):
        torch.testing.assert_close(found, mechanism.matrix(own_q, own_k))
    state, steps = mixture.init_state(q[..., :1, :], k[..., :1, :], v[..., :1, :]), []
    for at in range(q.shape[-2]):
        one, state = mixture.step(state, *(x[..., at : at + 1, :] for x in (q, k, v)))
        steps.append(one)
    torch.testing.assert_close(torch.cat(steps, -2), out)
    ids = torch.tensor([[0] * 7 + [1] * 5, [0] * 12]).reshape(2, *(1,) * (q.ndim - 3), 12)
    torch.testing.assert_close(mixture(q, k, v, segments=ids), mixture.matrix(q, k, segments=ids) @ v)
    a = mixture.operator(q, k)
    torch.testing.assert_close(a.mT @ v.expand(*out.shape), matrix.mT @ v.expand(*out.shape))
