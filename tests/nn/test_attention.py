"""The attention layer: projections, grouped heads, rotary positions, cross-attention, streaming."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from heedful import Causal, Cost, Full, Linformer, Mechanism, Quadratic, Softmax, Window
from heedful.nn import Attention, Rope
from heedful.segments import from_cu_seqlens, from_lengths

EMBED, HEADS = 24, 4
KV_HEADS = pytest.mark.parametrize("kv_heads", [4, 2, 1])
ROPES = pytest.mark.parametrize("rope", [None, Rope(6), Rope(6, width=4, interleaved=True)], ids=str)
MECHANISMS = pytest.mark.parametrize(
    "mechanism", [Softmax(), Softmax(Window(3, sinks=1)), Quadratic(pattern=Causal())], ids=str
)


def layer(mechanism=None, **options) -> Attention:
    torch.manual_seed(0)
    return Attention(EMBED, HEADS, mechanism, **options).double()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same(x, y) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=1e-12)


class Average(Mechanism):
    """Every key counts the same: a mechanism without a recurrence."""

    def forward(self, q, k, v, *, segments=None):
        return self.matrix(q, k) @ v

    def matrix(self, q, k, *, segments=None):
        return torch.full_like(q @ k.mT, 1 / k.shape[-2])

    def cost(self, dims):
        return Cost(0, 0)


def head_by_head(attention: Attention, x, context, pattern_mask):
    """The definition, one head at a time, from the weights of the projections."""
    d, e, share = attention.head_dim, attention.value_dim, attention.heads // attention.kv_heads
    n, m = x.shape[-2], context.shape[-2]
    out = []
    for head in range(attention.heads):
        kv = head // share
        q = attention.q_proj(x)[..., head * d : (head + 1) * d]
        k = attention.k_proj(context)[..., kv * d : (kv + 1) * d]
        v = attention.v_proj(context)[..., kv * e : (kv + 1) * e]
        if attention.rope is not None:
            q, k = attention.rope(q, offset=m - n), attention.rope(k)
        scores = (q @ k.mT * d**-0.5).masked_fill(~pattern_mask, -torch.inf)
        out.append(scores.softmax(-1) @ v)
    return attention.out_proj(torch.cat(out, -1))


@KV_HEADS
@ROPES
def test_forward_is_the_definition_head_by_head(kv_heads, rope):
    attention = layer(kv_heads=kv_heads, rope=rope, value_dim=5, bias=True, head_dim=6)
    x = tokens(2, 3, 10)
    mask = torch.ones(10, 10, dtype=torch.bool).tril()
    assert same(attention(x), head_by_head(attention, x, x, mask))


@KV_HEADS
@ROPES
@pytest.mark.parametrize(("n", "m"), [(5, 9), (9, 5), (4, 4), (0, 3), (3, 0), (1, 1)])
def test_cross_attention_is_the_definition_head_by_head(kv_heads, rope, n, m):
    attention = layer(Softmax(Full()), kv_heads=kv_heads, rope=rope, context_dim=7)
    x, context = tokens(2, n), tokens(2, m)[..., :7]
    if m == 0:
        assert same(attention(x, context), torch.zeros_like(x))
    else:
        assert same(attention(x, context), head_by_head(attention, x, context, torch.ones(n, m, dtype=torch.bool)))


def test_the_batch_may_have_any_number_of_axes():
    attention, x = layer(kv_heads=2, rope=Rope(6)), tokens(2, 3, 5)
    assert same(attention(x)[1, 2], attention(x[1, 2]))


@KV_HEADS
@MECHANISMS
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_padded_batch_gives_what_the_separate_sequences_give(kv_heads, mechanism, padding):
    attention, lengths = layer(mechanism, kv_heads=kv_heads, rope=Rope(6)), [9, 4, 0, 6]
    x = tokens(4, 9)
    out = attention(x, segments=from_lengths(torch.tensor(lengths), 9, padding=padding))
    for row, length in enumerate(lengths):
        part = slice(9 - length, 9) if padding == "left" else slice(0, length)
        assert same(out[row, part], attention(x[row, part]))


@KV_HEADS
def test_a_packed_row_gives_what_the_separate_sequences_give(kv_heads):
    attention, x = layer(kv_heads=kv_heads, rope=Rope(6)), tokens(2, 11)
    out = attention(x, segments=from_cu_seqlens(torch.tensor([0, 3, 9]), 11))
    assert same(out[:, :3], attention(x[:, :3])) and same(out[:, 3:9], attention(x[:, 3:9]))


@KV_HEADS
def test_cross_attention_under_segments_gives_what_the_separate_pairs_give(kv_heads):
    attention = layer(Softmax(Full()), kv_heads=kv_heads, rope=Rope(6))
    x, context, shorter, lengths = tokens(2, 5), tokens(2, 8), [5, 2], [6, 8]
    ids = from_lengths(torch.tensor(shorter), 5), from_lengths(torch.tensor(lengths), 8)
    out = attention(x, context, segments=ids)
    for row, (n, m) in enumerate(zip(shorter, lengths, strict=True)):
        assert same(out[row, :n], attention(x[row, :n], context[row, :m]))


@KV_HEADS
@ROPES
@MECHANISMS
@pytest.mark.parametrize("prompt", [0, 1, 7])
def test_prefill_and_steps_give_the_whole(kv_heads, rope, mechanism, prompt):
    attention, x = layer(mechanism, kv_heads=kv_heads, rope=rope), tokens(2, 12)
    out, state = attention.prefill(x[:, :prompt])
    parts = [out]
    for t in range(prompt, 12):
        out, state = attention.step(state, x[:, t : t + 1])
        parts.append(out)
    assert same(torch.cat(parts, 1), attention(x))


@KV_HEADS
@MECHANISMS
@pytest.mark.parametrize("padding", ["left", "right"])
def test_steps_after_a_padded_prompt_give_the_separate_wholes(kv_heads, mechanism, padding):
    attention, lengths = layer(mechanism, kv_heads=kv_heads, rope=Rope(6)), [8, 3, 5]
    x, more = tokens(3, 8), tokens(3, 4) * 2
    out, state = attention.prefill(x, segments=from_lengths(torch.tensor(lengths), 8, padding=padding))
    parts = []
    for t in range(4):
        token, state = attention.step(state, more[:, t : t + 1])
        parts.append(token)
    steps = torch.cat(parts, 1)
    for row, length in enumerate(lengths):
        part = slice(8 - length, 8) if padding == "left" else slice(0, length)
        whole = attention(torch.cat([x[row, part], more[row]]))
        assert same(out[row, part], whole[:length])
        assert same(steps[row], whole[length:])


def test_steps_after_a_packed_prompt_go_on_with_the_last_sequence():
    attention, x, more = layer(rope=Rope(6)), tokens(2, 9), tokens(2, 1)
    _, state = attention.prefill(x, segments=from_cu_seqlens(torch.tensor([0, 5, 9])))
    out, _ = attention.step(state, more)
    assert same(out, attention(torch.cat([x[:, 5:], more], 1))[:, -1:])


def test_a_mechanism_without_a_recurrence_is_named_when_asked_to_stream():
    attention, x = layer(Average()), tokens(2, 4)
    assert attention(x).shape == x.shape
    for stream in (lambda: attention.prefill(x), lambda: attention.step(None, x[:, :1])):
        with pytest.raises(TypeError, match=r"Average.*no recurrence"):
            stream()


@KV_HEADS
def test_gradients_reach_every_projection(kv_heads):
    attention, x = layer(kv_heads=kv_heads, rope=Rope(6), bias=True), tokens(2, 7)
    attention(x, segments=from_lengths(torch.tensor([7, 4]), 7)).square().sum().backward()
    for name, parameter in attention.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0 or name == "k_proj.bias", name


def test_grouped_heads_have_fewer_weights_and_no_copied_keys():
    seen = []

    class Watch(Softmax):
        def forward(self, q, k, v, *, segments=None):
            seen.append((q.shape, k.shape, v.shape))
            return super().forward(q, k, v, segments=segments)

    attention = layer(Watch(), kv_heads=2)
    attention(tokens(3, 5))
    assert attention.k_proj.weight.shape == (12, 24)
    assert seen == [((3, 2, 2, 5, 6), (3, 2, 1, 5, 6), (3, 2, 1, 5, 6))]


def test_projections_are_parts_to_pass_in_or_to_assign():
    def frozen(width_in, width_out):
        return nn.Linear(width_in, width_out, bias=False).requires_grad_(False)

    attention = layer(projection=frozen)
    assert not [p for p in attention.parameters() if p.requires_grad]
    attention.v_proj = nn.Linear(EMBED, EMBED, dtype=torch.float64)
    attention(tokens(2, 5)).sum().backward()
    assert attention.v_proj.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    attention = Attention(EMBED, HEADS, rope=Rope(6), kv_heads=2, dtype=dtype)
    assert attention(tokens(2, 5).to(dtype)).dtype == dtype


def test_it_survives_state_dict_pickle_and_deepcopy():
    attention, x = layer(kv_heads=2, rope=Rope(6), bias=True), tokens(2, 6)
    twin = Attention(EMBED, HEADS, kv_heads=2, rope=Rope(6), bias=True).double()
    assert not same(twin(x), attention(x))
    twin.load_state_dict(attention.state_dict())
    for other in (twin, copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(other(x), attention(x))
    assert set(attention.state_dict()) == {f"{p}_proj.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")}


def test_it_compiles():
    attention, x = layer(rope=Rope(6), kv_heads=2), tokens(2, 6)
    compiled = torch.compile(attention, backend="aot_eager")
    assert same(compiled(x), attention(x))


ids = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Attention(24, 4, kv_heads=3), ValueError, "kv_heads: expected a divisor of heads = 4, got 3"),
        (lambda: Attention(24, 5), ValueError, "embed_dim: 24 is no multiple of heads = 5"),
        (lambda: Attention(24, 4, "softmax"), TypeError, "mechanism: expected a Mechanism.*'softmax'.*build"),
        (lambda: Attention(24, 4, rope=Rope(8)), ValueError, "rope: built for width 8, expected head_dim = 6"),
        (lambda: layer()(tokens(2, 5)[..., :20]), ValueError, r"x: shape \(2, 5, 20\), expected .*24\)"),
        (lambda: layer()(tokens()), ValueError, r"x: shape \(24,\).*missing token axis"),
        (lambda: layer()(torch.zeros(2, 5, dtype=torch.long)), TypeError, "x: torch.int64, expected a floating-point"),
        (lambda: layer()(tokens(2, 5), tokens(3, 5)), ValueError, r"context: batch axes \(3,\), expected \(2,\)"),
        (lambda: layer()(tokens(2, 5), tokens(2, 5)[..., :7]), ValueError, r"context: shape \(2, 5, 7\)"),
        (lambda: layer(context_dim=7)(tokens(2, 5)), ValueError, "context: None, expected .*7"),
        (lambda: layer()(tokens(2, 4), segments=ids), ValueError, r"segments: shape \(2, 5\), expected \(2, 4\)"),
        (lambda: layer()(tokens(2, 5), segments=ids[:, None]), ValueError, "segments: .*head axis"),
        (lambda: layer()(tokens(3, 5), segments=ids), ValueError, r"segments: shape \(2, 5\), expected \(3, 5\)"),
        (lambda: layer()(tokens(2, 5), segments=ids.bool()), TypeError, "segments: torch.bool.*from_mask"),
        (lambda: layer()(tokens(2, 5), segments=(ids, ids)), TypeError, "segments: a pair, expected one tensor"),
        (lambda: layer()(tokens(2, 5), tokens(2, 5), segments=ids), TypeError, "one tensor, expected a pair"),
        (
            lambda: layer()(tokens(2, 5), tokens(2, 6), segments=(ids, ids)),
            ValueError,
            r"segments\[1\] \(of the context\): shape \(2, 5\), expected \(2, 6\)",
        ),
        (lambda: layer().step(layer().prefill(tokens(2, 3))[1], tokens(2, 2)), ValueError, "expected one token"),
    ],
)
def test_bad_input_gets_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


@KV_HEADS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_linformer_may_mix_tokens_before_they_are_projected(kv_heads, bias, shared, monkeypatch):
    x = tokens(2, 40).requires_grad_()
    attention = layer(Linformer(48, 3, shared=shared), kv_heads=kv_heads, bias=bias, value_dim=5)
    assert attention._mixes_first(40)
    mixed = attention(x)
    given = torch.randn_like(mixed)
    leaves = [x, *attention.parameters()]
    gradients = torch.autograd.grad(mixed, leaves, given)
    monkeypatch.setattr(Attention, "_mixes_first", lambda self, m: False)
    plain = attention(x)
    assert same(mixed, plain)
    assert all(map(same, gradients, torch.autograd.grad(plain, leaves, given)))


def test_tokens_are_mixed_first_only_where_that_is_less_and_the_same():
    assert not layer(Linformer(48, 40), kv_heads=1)._mixes_first(48)  # E k is narrower than E c
    assert not layer(Linformer(48, 3, heads=HEADS))._mixes_first(40)  # each head would mix c by itself
    assert not layer(Linformer(48, 3), rope=Rope(6))._mixes_first(40)
    assert not layer(Linformer(48, 3), projection=lambda *sizes: nn.Sequential(nn.Linear(*sizes)))._mixes_first(40)
    assert not layer(Softmax(Full()))._mixes_first(40)
    with pytest.raises(ValueError, match="a sequence of 49 tokens, expected at most length = 48"):
        layer(Linformer(48, 3))(tokens(1, 49))


def test_a_linformer_with_padding_is_as_without_it():
    attention, x = layer(Linformer(48, 3)), tokens(1, 40)
    ids = from_lengths(torch.tensor([30]), 40)
    assert same(attention(x, segments=ids)[:, :30], attention(x[:, :30]))


def test_layers_of_a_model_hand_on_the_same_tensor_of_segments():
    """Kernels keep what they know of segments by identity: a view of each layer's own would be asked about again."""
    seen = []

    class Watched(Softmax):
        def forward(self, q, k, v, *, segments=None):
            seen.append(segments)
            return super().forward(q, k, v, segments=segments)

    layers = [Attention(8, heads=2, mechanism=Watched(Full())) for _ in range(2)]
    x, ids = torch.randn(3, 5, 8), from_lengths(torch.tensor([5, 2, 4]), 5)
    for layer in layers:
        layer(x, segments=ids)
        layer(x, x, segments=(ids, ids))
    assert all(part is seen[0] for given in seen for part in (given if isinstance(given, tuple) else (given,)))
    ids = from_lengths(torch.tensor([1, 2, 3]), 5)
    layers[0](x, segments=ids)
    assert torch.equal(seen[-1], ids[:, None])
