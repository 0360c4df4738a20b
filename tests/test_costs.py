"""What a call takes, by hand: sizes, stages, and keys and values that queries share."""

from __future__ import annotations

import inspect

import pytest
import torch

import heedful as h
from heedful.core import Stage

FACTS = {"d": 8, "heads": 2, "length": 256}


def built(entry):
    asked = inspect.signature(entry.build).parameters
    return entry.build(**{name: fact for name, fact in FACTS.items() if name in asked})


@pytest.mark.parametrize(
    ("queries", "keys"),
    [((2, 9), (2, 9)), ((2, 3, 3), (2, 3, 1)), ((4, 2), (2,)), ((5,), ()), ((0, 2), (1, 2))],
    ids=str,
)
def test_dims_count_each_tensor_once(queries, keys):
    q, k, v = torch.zeros(*queries, 7, 4), torch.zeros(*keys, 10, 4), torch.zeros(*keys, 10, 3)
    dims, out = h.Dims.of(q, k, v), torch.zeros(*queries, 7, 3)
    if 0 not in queries:
        assert dims.kv_batch == torch.zeros(keys).numel()
        assert dims.io_bytes == sum(x.numel() * x.element_size() for x in (q, k, v, out))
    assert h.Softmax(h.Full()).cost(dims).flops == 2 * out[..., 0, 0].numel() * 7 * 10 * (4 + 3)


def test_grouped_queries_share_the_cache():
    """SmolLM2 135M: 9 query heads, 3 KV heads of width 64."""
    dims = h.Dims(1000, 1000, 64, 64, batch=9, group_size=3)
    assert h.Softmax().cost(dims).state == 3 * 1000 * (64 + 64)
    assert h.Linear().cost(dims).state == 3 * 64 * (64 + 1)
    assert h.Retention(torch.linspace(0.9, 0.99, 3)).cost(dims).state == 9 * 64 * 64  # a decay for each head of a group


def test_a_group_must_divide_the_batch():
    with pytest.raises(ValueError, match="group_size: 2, expected a divisor of batch = 9"):
        h.Dims(1, 1, 1, 1, batch=9, group_size=2)


def test_a_mixture_keeps_the_kv_heads_of_each_part():
    """Of 6 query heads in 3 groups; where a part has unequal shares of its groups, keys are copied for each head."""
    q, k, v = h.group_heads(torch.randn(2, 6, 20, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8))
    near, linear = h.Softmax(h.Window(3)), h.Linear()
    for heads in ([near, linear] * 3, [near] * 3 + [linear] * 3, [near] * 2 + [linear] * 4):
        attend = h.Mixture(heads, kv_heads=3)
        _, state = attend.prefill(q, k, v)
        kept = sum(x.numel() for part in state for x in part if x is not None and x.is_floating_point())
        assert attend.cost(h.Dims.of(q, k, v)).state == kept
    attend = h.Mixture([near, near, linear, linear, linear, linear], kv_heads=1)
    assert attend.cost(h.Dims(20, 20, 8, 8, batch=6, group_size=6)).state == 3 * 16 + 8 * 9


@pytest.mark.parametrize("entry", h.CATALOG.values(), ids=h.CATALOG)
def test_stages_add_up(entry):
    cost = built(entry).cost(h.Dims(200, 256, 8, 6, batch=4))
    assert sum(stage.flops for stage in cost.stages) == cost.flops
    assert len({stage.name for stage in cost.stages}) == len(cost.stages)
    assert "attention" not in {stage.name for stage in cost.stages if stage.flops}, "the mechanism names no stages"


def test_the_stages_of_softmax_by_hand():
    pairs = 3 * (1 + 2 + 3 + 4 + 4 * 4)  # 8 causal queries that see 4 keys at most, in 3 heads
    stages = h.Softmax(h.Window(3)).cost(h.Dims(8, 8, d=5, e=7, batch=3)).stages
    assert stages == (
        Stage("scores", 2 * pairs * 5),
        Stage("softmax", 0, elementwise=pairs),
        Stage("aggregation", 2 * pairs * 7),
    )
    assert [stage.name for stage in h.Quadratic().cost(h.Dims(8, 8, 5, 7)).stages] == [
        "scores",
        "activation",
        "aggregation",
    ]


def test_stages_that_do_not_add_up_are_refused():
    assert h.Cost(7, 1).stages == (Stage("attention", 7),)
    with pytest.raises(ValueError, match="add up to 6 flops, expected 7"):
        h.Cost(7, 1, stages=(Stage("scores", 6),))


LAYERS = {
    "softmax, full": dict(mechanism=h.Softmax(h.Full())),
    "grouped queries": dict(mechanism=h.Softmax(h.Full()), kv_heads=2),
    "wider values": dict(mechanism=h.Linear(), value_dim=24),
    "linformer, tokens mixed first": dict(mechanism=h.Linformer(256, 4)),
    "linformer, keys mixed": dict(mechanism=h.Linformer(256, 200, shared=False)),
    "fixed heads without queries": dict(mechanism=h.Mixture([h.FixedPattern("start")] * 3 + [h.Softmax(h.Full())])),
    "frozen orthogonal projections": dict(mechanism=h.Softmax(h.Full()), qk=h.nn.Orthogonal),
    "hadamard rotations": dict(mechanism=h.Softmax(h.Full()), qk=h.nn.Hadamard),
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_the_cost_of_a_layer_is_what_runs(options):
    layer, n = h.nn.Attention(64, heads=4, **options), 256
    with torch.no_grad(), h.testing.FlopCounter() as counter:
        layer(torch.randn(2, n, 64))
    cost = layer.cost(n, batch=2)
    assert cost.stages[0].name == "projections" and cost.stages[-1].name == "output projection"
    assert cost.flops == pytest.approx(counter.flops, rel=0.02)


def test_adapters_and_a_context_count():
    layer = h.nn.Attention(64, heads=4, mechanism=h.Softmax(h.Full()), context_dim=32)
    layer.q_proj = h.nn.LoRA(layer.q_proj, rank=4)
    with torch.no_grad(), h.testing.FlopCounter() as counter:
        layer(torch.randn(1, 100, 64), torch.randn(1, 50, 32))
    cost = layer.cost(100, 50)
    assert cost.flops == counter.flops
    numbers = 2 * 100 * 64 + 50 * 32 + sum(x.numel() for x in layer.parameters())
    assert cost.bytes == 4 * numbers


def test_the_stages_of_a_layer_by_hand():
    """GPT-2's: 12 heads of 64 over 1024 tokens, causal."""
    stages = {stage.name: stage.flops for stage in h.nn.Attention(768, heads=12).cost(1024).stages}
    pairs = 12 * 1024 * 1025 // 2
    assert stages == {
        "projections": 3 * 2 * 1024 * 768**2,
        "scores": 2 * pairs * 64,
        "softmax": 0,
        "aggregation": 2 * pairs * 64,
        "output projection": 2 * 1024 * 768**2,
    }
