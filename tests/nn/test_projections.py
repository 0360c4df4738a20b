"""Frozen projections, LoRA, and layers whose heads have queries and keys only where they read them."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import heedful as h
from heedful.nn import Attention, Gaussian, Hadamard, LoRA, Orthogonal, Rope
from heedful.testing import FlopCounter

KINDS = {
    "gaussian": Gaussian,
    "orthogonal": Orthogonal,
    "orthogonal, global": partial(Orthogonal, per_head=False),
    "hadamard": Hadamard,
    "hadamard, per head": partial(Hadamard, per_head=True),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FIXED = ("current", "previous", "next", "left", "right", "start", "end")


def tokens(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def same(x, y, atol=1e-12) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=atol)


def trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def is_identity(x: torch.Tensor) -> bool:
    return same(x, torch.eye(x.shape[-1], dtype=x.dtype).expand_as(x), atol=1e-14 * x.shape[-1])


# What is drawn.


@pytest.mark.parametrize("width", [1, 5, 24, 31, 64, 130])
def test_the_rows_of_every_head_are_orthonormal(width):
    d = max(width // 4, 1)
    for kind in (Orthogonal, Hadamard, partial(Hadamard, per_head=True)):
        for heads in (1, 4, 7):  # 7 heads do not fit into one orthogonal map
            W = kind(width, heads, d, seed=3, dtype=torch.float64).dense().unflatten(0, (heads, d))
            assert is_identity(W @ W.mT), (kind, heads)


@pytest.mark.parametrize("width", [1, 5, 24, 31, 64, 130])
def test_heads_of_one_map_are_orthogonal_to_each_other(width):
    for kind in (partial(Orthogonal, per_head=False), Hadamard):
        W = kind(width, width, 1, seed=3, dtype=torch.float64).dense()
        assert is_identity(W @ W.mT) and is_identity(W.mT @ W)
    if width > 1:
        W = Orthogonal(width, width, 1, seed=3, dtype=torch.float64).dense()
        assert not is_identity(W @ W.mT)


def test_orthogonal_rows_are_uniform():
    """Moments of an entry, and none of the sign that a plain QR would leave on the diagonal.

    Of a uniform unit vector in D = 6: E w = 0, E w² = 1/D, E w⁴ = 3/(D(D + 2)). 4000 draws: five standard errors.
    """
    D, draws = 6, 4000
    W = Orthogonal(D, draws, D, seed=0, dtype=torch.float64).dense().unflatten(0, (draws, D))
    second, fourth, eighth = 1 / D, 3 / (D * (D + 2)), 105 / (D * (D + 2) * (D + 4) * (D + 6))
    for power, mean, square in ((1, 0, second), (2, second, fourth), (4, fourth, eighth)):
        error = ((square - mean**2) / draws) ** 0.5
        assert ((W**power).mean(0) - mean).abs().max() < 5 * error, power
    assert (torch.linalg.det(W).sign().mean()).abs() < 5 * draws**-0.5  # reflections as often as rotations


def test_hadamard_rows_have_the_second_moments_of_uniform_ones():
    D, draws = 24, 3000
    W = Hadamard(D, draws, 1, seed=0, per_head=True, dtype=torch.float64).dense()
    assert W.mean(0).abs().max() < 5 * (draws * D) ** -0.5
    error = (W**2).std(0) / draws**0.5
    assert (((W**2).mean(0) - 1 / D).abs() < 5 * error).all()


@EVERY_KIND
def test_scores_are_on_the_scale_of_the_tokens(kind):
    """Var(q) = Var(x), and q·k / √d of different tokens varies as x does, squared: the claim at the file's head."""
    D, heads, d = 64, 4, 16
    q, k = (kind(D, heads, d, seed=seed, dtype=torch.float64).dense().unflatten(0, (heads, d)) for seed in (0, 1))
    exact = kind is not Gaussian
    assert same((q * q).sum(-1), torch.ones(heads, d).double(), atol=1e-12 if exact else 5 * (2 / D) ** 0.5)
    variance = (q.mT @ k).square().sum((-2, -1)) / d
    assert same(variance, torch.ones(heads).double(), atol=1e-12 if exact else 5 * (4 / D) ** 0.5)


@EVERY_KIND
def test_gain_is_a_factor(kind):
    x = tokens(3, 20)
    assert same(kind(20, 2, 5, gain=0.5)(x.float()), 0.5 * kind(20, 2, 5)(x.float()), atol=1e-6)


@EVERY_KIND
def test_the_seed_decides_and_nothing_else(kind):
    torch.manual_seed(1)
    one = kind(20, 2, 5, seed=7)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    two = kind(20, 2, 5, seed=7)
    assert torch.equal(one.dense(), two.dense())
    assert not torch.equal(one.dense(), kind(20, 2, 5, seed=8).dense())
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator was not touched
    two.redraw(8)
    assert torch.equal(two.dense(), kind(20, 2, 5, seed=8).dense()) and two.seed == 8
    exact = kind(20, 2, 5, seed=7, dtype=torch.float64).dense()
    for dtype in (torch.float32, torch.bfloat16):
        error = (kind(20, 2, 5, seed=7, dtype=dtype).dense().double() - exact).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps, dtype


@EVERY_KIND
@pytest.mark.usefixtures("annotations_enforced")
def test_forward_is_the_dense_matrix_and_so_is_its_gradient(kind):
    heads = 5 if kind is KINDS["orthogonal, global"] else 7  # 7 · 4 > 20, where Hadamard takes a second map
    project = kind(20, heads, 4, seed=0, dtype=torch.float64)
    x = tokens(2, 3, 20).requires_grad_()
    y = project(x)
    assert project.dense().shape == (heads * 4, 20) and same(y, x @ project.dense().mT)
    weight = tokens(2, 3, heads * 4)
    assert same(torch.autograd.grad(y, x, weight)[0], weight @ project.dense())
    assert project(x[:, :0]).shape == (2, 0, heads * 4) and same(project(x[0, 0]), y[0, 0])
    assert same(project(tokens(3, 20, 2).transpose(-1, -2)), tokens(3, 20, 2).transpose(-1, -2) @ project.dense().mT)


@EVERY_KIND
def test_nothing_is_trained(kind):
    project = kind(20, 2, 5)
    assert not list(project.parameters()) and all(not buffer.requires_grad for buffer in project.buffers())
    assert not project.dense().requires_grad
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD(project.parameters(), lr=1.0)


@EVERY_KIND
def test_a_state_dict_carries_the_draw_across_precisions(kind):
    old, x = kind(24, 2, 5, seed=0, dtype=torch.float64), tokens(3, 24)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        new = kind(24, 2, 5, seed=1, dtype=dtype)
        assert not torch.equal(new.dense().double(), old.dense())
        new.load_state_dict(old.state_dict())
        assert new(x.to(dtype)).dtype == dtype
        assert torch.equal(new.dense(), kind(24, 2, 5, seed=0, dtype=dtype).dense())
    for other in (copy.deepcopy(old), pickle.loads(pickle.dumps(old))):
        assert torch.equal(other(x), old(x)) and repr(other) == repr(old)


def test_hadamard_stores_signs_and_needs_few_operations():
    """O(D log D): the products H of width at most 64 that each number takes part in, three rounds of them."""
    x = torch.randn(1, 4096)
    project = Hadamard(4096, heads=64, head_dim=64)
    assert sum(buffer.numel() for buffer in project.buffers()) == 3 * 4096
    with FlopCounter() as counter:
        project(x)
    assert counter.flops == 3 * 2 * 4096 * (64 + 64)
    with FlopCounter() as dense:
        Gaussian(4096, heads=64, head_dim=64)(x)
    assert dense.flops == 2 * 4096**2 > 10 * counter.flops
    with FlopCounter() as odd:  # 576 = 512 + 64: both parts in full
        Hadamard(576, heads=9, head_dim=64)(x[:, :576])
    assert odd.flops == 3 * 2 * (512 * (64 + 8) + 64 * 64)


def test_hadamard_rounds_low_precision_once():
    project, x = Hadamard(96, 4, 24, seed=0), tokens(200, 96, dtype=torch.bfloat16)
    exact = x.double() @ Hadamard(96, 4, 24, seed=0, dtype=torch.float64).dense().mT
    error = (project.bfloat16()(x).double() - exact).abs()
    assert (error <= 0.501 * torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-6).all()


@EVERY_KIND
def test_autocast_gives_what_a_linear_layer_gives(kind):
    project, linear, x = kind(20, 4, 5), nn.Linear(20, 20), tokens(3, 20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert project(x).dtype == linear(x).dtype == torch.bfloat16
        assert Attention(20, 4, qk=kind)(x).dtype == torch.bfloat16
        assert Attention(20, 4, h.FixedPattern("left"))(x).dtype == torch.bfloat16


# LoRA.


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(20, 10, dtype=torch.float64),
        lambda: nn.Linear(20, 10, bias=False, dtype=torch.float64).requires_grad_(False),
        lambda: Orthogonal(20, 2, 5, dtype=torch.float64),
        lambda: Gaussian(20, 2, 5, dtype=torch.float64),
        lambda: LoRA(Orthogonal(20, 2, 5, dtype=torch.float64), rank=3),
    ],
    ids=["linear", "frozen linear", "orthogonal", "gaussian", "lora"],
)
def test_lora_starts_as_its_base_and_merges_into_a_linear_layer(make):
    torch.manual_seed(0)
    base, x = make(), tokens(3, 4, 20)
    before = trained(base)
    adapted = LoRA(base, rank=2, alpha=6.0)
    assert torch.equal(adapted(x), base(x)) and trained(adapted) == before + 2 * (20 + 10)
    nn.init.normal_(adapted.B)
    assert not same(adapted(x), base(x), atol=0.1)
    assert same(adapted(x), base(x) + 3.0 * x @ adapted.A.mT @ adapted.B.mT)
    kept = copy.deepcopy(adapted.state_dict())
    merged = adapted.merge()
    assert type(merged) is nn.Linear and same(merged(x), adapted(x))
    assert (trained(merged) > 0) == (isinstance(base, nn.Linear) and before > 0)
    assert all(torch.equal(value, kept[name]) for name, value in adapted.state_dict().items())  # left as it was


def test_lora_trains_while_its_frozen_base_stays():
    torch.manual_seed(0)
    adapted, x = LoRA(Hadamard(16, 2, 4), rank=2), tokens(64, 16, dtype=torch.float32)
    before = copy.deepcopy(dict(adapted.base.named_buffers()))
    wanted = adapted.base(x) + x @ torch.randn(16, 1) @ torch.randn(1, 8)
    optimiser = torch.optim.Adam(adapted.parameters(), lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        loss = (adapted(x) - wanted).square().mean()
        loss.backward()
        optimiser.step()
    assert loss < 1e-2 * (adapted.base(x) - wanted).square().mean()
    assert all(torch.equal(buffer, before[name]) for name, buffer in adapted.base.named_buffers())


@pytest.mark.usefixtures("annotations_enforced")
def test_lora_takes_any_module_whose_widths_it_is_told():
    base = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    adapted = LoRA(base, rank=2, in_features=6, out_features=4)
    assert adapted(torch.randn(3, 6)).shape == (3, 4)
    low = LoRA(Orthogonal(6, 2, 2, dtype=torch.bfloat16), rank=1)
    assert low.A.dtype == torch.bfloat16 and low.merge().weight.dtype == torch.bfloat16


# Layers.


@EVERY_KIND
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.usefixtures("annotations_enforced")
def test_a_layer_with_frozen_queries_and_keys_trains_the_rest_and_streams(kind, kv_heads):
    layer = Attention(24, 4, qk=kind, seed=0, kv_heads=kv_heads, rope=Rope(6), dtype=torch.float64)
    assert {name for name, _ in layer.named_parameters()} == {"v_proj.weight", "out_proj.weight"}
    assert layer.q_proj.dense().dtype == torch.float64 and layer.k_proj.heads == kv_heads
    x = tokens(2, 9, 24).requires_grad_()
    out, state = layer.prefill(x[:, :8])
    last, _ = layer.step(state, x[:, 8:])
    assert same(torch.cat([out, last], 1), layer(x))
    layer(x).square().sum().backward()
    assert x.grad is not None and layer.v_proj.weight.grad is not None


def test_an_orthogonal_layer_trains_half_of_the_weights():
    assert trained(Attention(64, 8)) == 4 * 64**2
    assert trained(Attention(64, 8, qk=Orthogonal)) == 2 * 64**2
    adapted = Attention(64, 8, qk=lambda *shape, **how: LoRA(Orthogonal(*shape, **how), rank=4))
    assert trained(adapted) == 2 * 64**2 + 2 * 4 * (64 + 64)


def test_queries_and_keys_layers_and_seeds_differ():
    layer = Attention(24, 4, qk=Orthogonal, seed=5)
    assert not torch.equal(layer.q_proj.weight, layer.k_proj.weight)
    assert torch.equal(layer.q_proj.weight, Attention(24, 4, qk=Orthogonal, seed=5).q_proj.weight)
    torch.manual_seed(0)
    one, two = Attention(24, 4, qk=Orthogonal), Attention(24, 4, qk=Orthogonal)
    torch.manual_seed(0)
    again = Attention(24, 4, qk=Orthogonal)
    assert not torch.equal(one.q_proj.weight, two.q_proj.weight)
    assert torch.equal(one.q_proj.weight, again.q_proj.weight) and torch.equal(one.k_proj.weight, again.k_proj.weight)


def test_qk_goes_before_projection_for_queries_and_keys_alone():
    layer = Attention(24, 4, projection=partial(nn.Linear, bias=True), qk=Hadamard)
    assert isinstance(layer.q_proj, Hadamard) and isinstance(layer.k_proj, Hadamard)
    assert layer.v_proj.bias is not None and layer.out_proj.bias is not None


ENTRIES = list({entry.family: entry for entry in h.CATALOG.values()}.values())


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.family)
@pytest.mark.parametrize("kind", [Orthogonal, Hadamard], ids=["orthogonal", "hadamard"])
def test_frozen_queries_and_keys_go_with_every_family(entry, kind):
    torch.manual_seed(0)
    mechanism = entry.sample(d=6, heads=4, length=16)
    layer = Attention(24, 4, mechanism, qk=kind, seed=0).double()
    x = tokens(2, 16, 24)
    q, k, v = (tokens(2, 4, 16, 6) for _ in range(3))
    reads = mechanism.reads_qk(4)
    if any(reads):
        q[:, list(reads)] = layer.q_proj(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        k[:, list(reads)] = layer.k_proj(x).unflatten(-1, (-1, 6)).transpose(1, 2)
    v = layer.v_proj(x).unflatten(-1, (4, 6)).transpose(1, 2)
    want = layer.out_proj((mechanism.matrix(q, k) @ v).transpose(1, 2).flatten(-2))
    assert same(layer(x), want, atol=1e-9)


@pytest.mark.parametrize("name", h.CATALOG)
def test_reads_qk_is_true_where_other_queries_and_keys_change_the_weights(name):
    torch.manual_seed(0)
    mechanism = h.CATALOG[name].sample(d=6, heads=4, length=16).double()
    one, two = tokens(4, 4, 16, 6).chunk(2)
    moved = (mechanism.matrix(*one) - mechanism.matrix(*two)).abs().amax((-2, -1))
    assert mechanism.reads_qk(4) == tuple((moved > 0).tolist())


def test_a_layer_of_fixed_heads_has_no_queries_and_no_keys():
    layer = Attention(24, 4, h.FixedPattern("left"), rope=Rope(6)).double()
    assert layer.q_proj is None and layer.k_proj is None and trained(layer) == 2 * 24**2
    assert set(layer.state_dict()) == {"v_proj.weight", "out_proj.weight"}
    assert Attention(24, 4, h.FixedPattern("left"), qk=Orthogonal).q_proj is None
    x = tokens(2, 9, 24)
    out, state = layer.prefill(x[:, :8])
    last, _ = layer.step(state, x[:, 8:])
    assert same(torch.cat([out, last], 1), layer(x))
    layer(x).sum().backward()


def test_seven_fixed_heads_and_a_learned_one_save_seven_eighths_of_queries_and_keys():
    mixture = h.Mixture([*map(h.FixedPattern, FIXED), h.Softmax(h.Full())])
    layer, full = Attention(64, 8, mixture).double(), Attention(64, 8).double()
    assert trained(layer.q_proj) + trained(layer.k_proj) == (trained(full.q_proj) + trained(full.k_proj)) // 8
    assert layer.query_heads == (False,) * 7 + (True,) and "queries of heads [7]" in repr(layer)
    full.mechanism = mixture  # all heads have queries and keys, and seven of them no use for them
    with torch.no_grad():
        full.v_proj.weight.copy_(layer.v_proj.weight)
        full.out_proj.weight.copy_(layer.out_proj.weight)
        full.q_proj.weight[56:] = layer.q_proj.weight
        full.k_proj.weight[56:] = layer.k_proj.weight
    x, ids = tokens(2, 10, 64), h.segments.from_lengths(torch.tensor([10, 6]), 10)
    assert same(layer(x), full(x)) and same(layer(x, segments=ids), full(x, segments=ids))


@pytest.mark.usefixtures("annotations_enforced")
def test_heads_with_queries_may_lie_anywhere():
    heads = [h.Softmax(), h.FixedPattern("left"), h.Linear(), h.FixedPattern("current")]
    layer = Attention(24, 4, h.Mixture(heads), rope=Rope(6), bias=True).double()
    x = tokens(2, 9, 24)
    q = layer.rope(layer.q_proj(x).unflatten(-1, (2, 6)).transpose(1, 2))
    k = layer.rope(layer.k_proj(x).unflatten(-1, (2, 6)).transpose(1, 2))
    v = layer.v_proj(x).unflatten(-1, (4, 6)).transpose(1, 2)
    used = (0, 0, 1, 1)  # of the fixed heads, any
    out = [head.matrix(q[:, i], k[:, i]) @ v[:, at] for at, (head, i) in enumerate(zip(heads, used, strict=True))]
    assert same(layer(x), layer.out_proj(torch.cat(out, -1)))
    first, state = layer.prefill(x[:, :7])
    parts = [first]
    for t in (7, 8):
        step, state = layer.step(state, x[:, t : t + 1])
        parts.append(step)
    assert same(torch.cat(parts, 1), layer(x))


def test_a_mechanism_assigned_later_must_not_read_what_is_not_there():
    layer, x = Attention(24, 4, h.FixedPattern("left")).double(), tokens(2, 5, 24)
    layer.mechanism = h.FixedPattern("current")
    assert layer(x).shape == x.shape
    layer.mechanism = h.Softmax()
    for call in (layer, layer.prefill):
        with pytest.raises(TypeError, match=r"Softmax reads queries and keys of heads \[0, 1, 2, 3\]"):
            call(x)


def test_the_layers_compile_copy_and_pickle():
    mixture = h.Mixture([h.FixedPattern("left"), h.Softmax(), h.FixedPattern("current"), h.Softmax()])
    layer, x = Attention(24, 4, mixture, qk=Orthogonal, seed=0).double(), tokens(2, 6, 24)
    want = layer(x)
    for other in (torch.compile(layer, backend="aot_eager"), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same(other(x), want)
    twin = Attention(24, 4, mixture, qk=Orthogonal, seed=1).double()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), want)


def test_a_layer_is_built_on_the_meta_device():
    layer = Attention(24, 4, qk=Hadamard, device="meta")
    assert layer.q_proj.signs.is_meta and layer.q_proj.order.is_meta and layer.v_proj.weight.is_meta


# Grouped queries.

PLANS = {
    "one run over all groups": lambda: [h.Softmax()] * 9,
    "runs across borders": lambda: [h.Softmax()] * 4 + [h.FixedPattern("left")] * 3 + [h.Linear()] * 2,
    "whole groups and rests": lambda: [h.FixedPattern("current")] + [h.Linear()] * 7 + [h.Softmax(h.Window(3))],
    "a fixed group": lambda: [h.Softmax()] * 3 + [h.FixedPattern("left")] * 3 + [h.TopK(2), h.Linear(), h.Softmax()],
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kv_heads", [1, 3, 9])
@pytest.mark.usefixtures("annotations_enforced")
def test_a_plan_by_query_head_runs_on_grouped_keys(plan, kv_heads):
    heads, x = plan(), tokens(2, 3, 10, 27)
    layer = Attention(27, 9, h.Mixture(heads, kv_heads=kv_heads if kv_heads < 9 else None), kv_heads=kv_heads).double()
    reading = [at for at, reads in enumerate(layer.query_heads) if reads]
    keys = [at for at, reads in enumerate(layer.key_heads) if reads]
    q = layer.q_proj(x).unflatten(-1, (-1, 3))
    k = layer.k_proj(x).unflatten(-1, (-1, 3))
    v = layer.v_proj(x).unflatten(-1, (-1, 3))
    out = []
    for at, head in enumerate(heads):
        group = at // (9 // kv_heads)
        own = q[..., reading.index(at) if at in reading else 0, :]
        seen = k[..., keys.index(group) if group in keys else 0, :]
        out.append(head.matrix(own, seen) @ v[..., group, :])
    want = layer.out_proj(torch.cat(out, -1))
    assert same(layer(x), want)
    first, state = layer.prefill(x[..., :8, :])
    parts = [first]
    for t in (8, 9):
        step, state = layer.step(state, x[..., t : t + 1, :])
        parts.append(step)
    assert same(torch.cat(parts, -2), want)
    ids = h.segments.from_lengths(torch.tensor([10, 6, 3]), 10)
    assert same(layer(x, segments=ids)[:, 1, :6], layer(x[:, 1, :6]))


def test_a_group_of_fixed_heads_alone_has_no_keys():
    heads = (
        [h.FixedPattern("left")] * 3 + [h.FixedPattern("current")] * 2 + [h.Softmax()] + [h.FixedPattern("left")] * 3
    )
    layer = Attention(27, 9, h.Mixture(heads, kv_heads=3), kv_heads=3)
    assert layer.key_heads == (False, True, False)
    assert layer.q_proj.weight.shape == layer.k_proj.weight.shape == (3, 27)


def test_grouped_mixtures_keep_operator_matrix_and_words():
    mixture = h.Mixture([h.Softmax()] * 4 + [h.Linear()] * 2, kv_heads=2)
    q, k, v = h.group_heads(tokens(2, 6, 8, 4), tokens(2, 2, 8, 4), tokens(2, 2, 8, 5))
    A = mixture.matrix(q, k)
    assert A.shape == (2, 2, 3, 8, 8) and same(mixture(q, k, v), A @ v)
    y = tokens(2, 2, 3, 8, 2)
    assert same(mixture.operator(q, k).mT @ y, A.mT @ y)
    assert "heads 0 to 3: softmax" in mixture.explain(q, k, v) and "heads 4 to 5: chunked" in mixture.explain(q, k, v)
    assert "kv_heads=2" in repr(mixture)
    seen = []
    watched = h.Softmax()
    watched.register_forward_hook(lambda module, args, out: seen.append(tuple(x.shape[1:3] for x in args)))
    h.Mixture([watched] * 6, kv_heads=2)(q, k, v)
    assert seen == [((2, 3), (2, 1), (2, 1))]  # whole groups are one call, and no key is copied


def test_a_mixture_of_one_group_serves_every_group():
    layer = Attention(24, 4, h.Mixture([h.Softmax(), h.FixedPattern("left")]), kv_heads=2)
    assert layer.query_heads == (True, False, True, False) and layer.key_heads == (True, True)
    assert layer(tokens(2, 5, 24, dtype=torch.float32)).shape == (2, 5, 24)


x24 = torch.randn(2, 5, 24)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Orthogonal(8, 2, 9), ValueError, "head_dim: 9 orthonormal rows of width in_features = 8"),
        (lambda: Orthogonal(8, 3, 4, per_head=False), ValueError, "per_head: False asks for .*= 12 .*per_head=True"),
        (lambda: Hadamard(8, 2, 9), ValueError, "head_dim: 9 orthonormal rows"),
        (lambda: Gaussian(8, 0, 4), ValueError, "heads: expected an integer ≥ 1, got 0"),
        (lambda: Gaussian(8, 2, 4)(x24), ValueError, r"x: shape \(2, 5, 24\), expected \(\*batch, 8\)"),
        (lambda: Hadamard(8, 2, 4)(x24), ValueError, r"x: shape \(2, 5, 24\), expected \(\*batch, 8\)"),
        (lambda: LoRA(nn.Tanh(), 2), TypeError, "base: Tanh, whose widths are not known"),
        (lambda: LoRA(nn.Linear(2, 2), 0), ValueError, "rank: expected an integer ≥ 1, got 0"),
        (lambda: LoRA("q_proj", 2), TypeError, "base: expected a module"),
        (lambda: LoRA(Hadamard(8, 2, 4), 2).merge(), TypeError, "base: Hadamard stores no weight"),
        (lambda: Attention(24, 4, seed=0), ValueError, "seed: 0 without qk"),
        (lambda: Attention(24, 4, h.Mixture([h.Softmax()] * 3)), ValueError, "heads: 4, expected 3"),
        (lambda: h.Mixture([h.Softmax()] * 4, kv_heads=3), ValueError, "kv_heads: 3, expected a divisor of the 4"),
        (
            lambda: h.Mixture([h.Softmax()] * 4, kv_heads=2)(*torch.randn(3, 2, 4, 5, 3)),
            ValueError,
            r"q: head axes \(2, 4\).*expected \(2, 2\).*group_heads",
        ),
    ],
)
def test_bad_input_gets_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_projection_for_other_heads_is_refused():
    layer = Attention(24, 4, h.Mixture([h.FixedPattern("left")] * 3 + [h.Softmax()]))
    layer.q_proj = nn.Linear(24, 24)
    with pytest.raises(ValueError, match=r"q_proj: gives 24 numbers a token, expected 1 heads · 6 = 6"):
        layer(x24)


def test_a_materialised_hadamard_is_the_same_map_until_it_is_drawn_again():
    project, x = Hadamard(24, 3, 8, seed=0), tokens(5, 24, dtype=torch.float32)
    walked = project(x)
    project.materialise()
    torch.testing.assert_close(project(x), walked)
    assert torch.equal(project.dense(), project.dense()) and len(project.state_dict()) == 2
    assert project(x.double()).dtype == torch.float64  # tokens of another precision go by the rounds
    project.redraw(1)
    torch.testing.assert_close(project(x), Hadamard(24, 3, 8, seed=1)(x))
    project.materialise()
    torch.testing.assert_close(
        project.double()(x.double()), Hadamard(24, 3, 8, seed=1, dtype=torch.float64)(x.double())
    )
