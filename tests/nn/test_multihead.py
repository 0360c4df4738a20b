"""The drop-in for torch.nn.MultiheadAttention, against torch's own module, alone and inside torch's layers."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from itertools import product
from random import Random

import pytest
import torch
from torch import nn

from heedful import Causal, Full, Quadratic, Softmax, Window
from heedful.nn import MultiheadAttention

EMBED, HEADS, BATCH, N, M = 16, 4, 2, 7, 9
FLAGS = ("batch_first", "bias", "add_bias_kv", "add_zero_attn")
CONSTRUCTORS = [
    dict(zip(FLAGS, flags, strict=True)) | widths
    for *flags, widths in product(*([False, True] for _ in FLAGS), [{}, {"kdim": 12, "vdim": 20}])
]
NARROW = Softmax(Window(1, 1))
"""A mechanism whose results can't be mistaken for full attention."""


def pair(seed=0, *, mechanism=None, dtype=None, **options):
    """torch's module and ours, from the same seed."""
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=dtype, **options)
    torch.manual_seed(seed)
    return theirs, MultiheadAttention(EMBED, HEADS, dtype=dtype, mechanism=mechanism, **options)


def attn_mask(kind, n, m, draw):
    match kind:
        case "none":
            return None
        case "causal":
            return torch.ones(n, m, dtype=torch.bool).triu(1)
        case "causal float":
            return torch.full((n, m), -torch.inf).triu(1)
    shape = (BATCH * HEADS, n, m) if "3-D" in kind else (n, m)
    if "float" in kind:
        return torch.randn(shape, generator=draw)
    hidden = torch.rand(shape, generator=draw) < 0.4
    hidden[..., 0] = False
    return hidden


def padding_mask(kind, m, draw):
    match kind:
        case "none":
            return None
        case "bool":
            return torch.arange(m) >= torch.tensor([m, m // 2])[:, None]
        case "float":
            return torch.randn(BATCH, m, generator=draw)


def inputs(options, crossed, draw, dtype=torch.float32):
    n, m = (N, M) if crossed else (M, M)
    widths = [options["kdim"], options["vdim"]] if "kdim" in options else [EMBED] * crossed
    sizes = [(n, EMBED), *((m, width) for width in widths)]
    shapes = [(BATCH, *size) if options.get("batch_first") else (size[0], BATCH, size[1]) for size in sizes]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


def results(layer, leaves, **arguments):
    """Output, weights, and gradients in the inputs and parameters, of a fixed random function of the first two."""
    query, key, value = [*leaves, leaves[-1], leaves[-1]][:3]
    out, weights = layer(query, key, value, **arguments)
    draw = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=draw).to(out)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=draw).to(weights)).sum()
    wanted = dict(enumerate(leaves)) | dict(layer.named_parameters())
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return out.detach(), weights if weights is None else weights.detach(), dict(zip(wanted, gradients, strict=True))


def largest_difference(ours, theirs) -> float:
    """Relative to the largest entry of the output, of the weights, and of all the gradients."""
    assert ours[0].shape == theirs[0].shape and (ours[1] is None) == (theirs[1] is None)
    sizes = [(ours[0] - theirs[0]).abs().max() / theirs[0].abs().max()]
    if theirs[1] is not None:
        assert ours[1].shape == theirs[1].shape
        sizes.append((ours[1] - theirs[1]).abs().max() / theirs[1].abs().max())
    scale = max(gradient.abs().max() for gradient in theirs[2].values())
    sizes += [(ours[2][name] - gradient).abs().max() / scale for name, gradient in theirs[2].items()]
    return max(float(size) for size in sizes)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "3-D bool", "3-D float", "causal", "causal float"])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("weights", ["averaged", "each head", "none"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_outputs_weights_and_gradients_are_torchs(mask, padding, weights):
    for seed, options in enumerate(CONSTRUCTORS):
        draw = torch.Generator().manual_seed(seed)
        crossed = Random(f"{mask} {padding} {weights} {seed}").random() < 0.5
        theirs, ours = pair(seed, **options)
        leaves = inputs(options, crossed, draw)
        arguments = {
            "attn_mask": attn_mask(mask, N if crossed else M, M, draw),
            "key_padding_mask": padding_mask(padding, M, draw),
            "need_weights": weights != "none",
            "average_attn_weights": weights != "each head",
        }
        hint = "causal" in mask
        extra = options["add_bias_kv"] or options["add_zero_attn"]
        expected = results(theirs, leaves, **arguments, is_causal=hint and not extra)  # there torch's hint is broken
        found = results(ours, leaves, **arguments, is_causal=hint)
        assert largest_difference(found, expected) <= 1e-6, (options, crossed)


@pytest.mark.parametrize("mask", ["none", "bool", "3-D float", "causal"])
@pytest.mark.parametrize("padding", ["none", "bool"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_other_precisions_are_as_good_as_torchs(mask, padding, need_weights):
    draw = torch.Generator().manual_seed(0)
    masks = {"attn_mask": attn_mask(mask, M, M, draw), "key_padding_mask": padding_mask(padding, M, draw)}

    def run(layer, leaves, dtype):
        cast = {k: x.to(dtype) if x is not None and x.is_floating_point() else x for k, x in masks.items()}
        leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
        return results(layer, leaves, **cast, need_weights=need_weights)

    leaves = inputs({"batch_first": True}, False, draw, torch.bfloat16)
    theirs, ours = pair(batch_first=True, dtype=torch.bfloat16)
    truth = run(copy.deepcopy(theirs).double(), leaves, torch.float64)
    assert largest_difference(run(copy.deepcopy(ours).double(), leaves, torch.float64), truth) <= 1e-14
    error = largest_difference(run(ours, leaves, torch.bfloat16), truth)
    assert error <= 2 * largest_difference(run(theirs, leaves, torch.bfloat16), truth)


@pytest.mark.parametrize("options", CONSTRUCTORS, ids=str)
def test_parameters_have_torchs_names_shapes_and_initial_values_and_load_both_ways(options):
    theirs, ours = pair(3, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    other, another = pair(4, **options)
    assert str(another.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert str(other.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    leaves = inputs(options, False, torch.Generator().manual_seed(0))
    assert largest_difference(results(another, leaves), results(other, leaves)) <= 1e-6


def test_parameters_can_be_reset_as_torchs_can():
    theirs, ours = pair()
    for layer in (theirs, ours):
        torch.manual_seed(9)
        layer._reset_parameters()
    assert torch.equal(theirs.in_proj_weight, ours.in_proj_weight)


def test_the_signatures_are_torchs_with_mechanism_and_words_besides():
    def names(function):
        return [(name, p.default) for name, p in inspect.signature(function).parameters.items()]

    assert names(MultiheadAttention.__init__) == [*names(nn.MultiheadAttention.__init__), ("mechanism", None)]
    assert names(MultiheadAttention.forward) == [*names(nn.MultiheadAttention.forward), ("words", None)]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "3-D"])
@pytest.mark.parametrize("weights", [(True, True), (True, False), (False, True)])
def test_inputs_may_come_without_a_batch(batch_first, mask, weights):
    theirs, ours = pair(batch_first=batch_first)
    draw = torch.Generator().manual_seed(0)
    hidden = None if mask == "none" else torch.rand(HEADS, N, M, generator=draw) < 0.3
    hidden = hidden[0] if mask == "bool" else hidden
    leaves = [torch.randn(size, EMBED, generator=draw, requires_grad=True) for size in (N, M)]
    arguments = {
        "attn_mask": hidden,
        "key_padding_mask": torch.arange(M) > 6,
        "need_weights": weights[0],
        "average_attn_weights": weights[1],
    }
    assert largest_difference(results(ours, leaves, **arguments), results(theirs, leaves, **arguments)) <= 1e-6


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_output_has_a_layout_that_view_accepts(batch_first):
    _, ours = pair(batch_first=batch_first)
    x = torch.randn(3, 5, EMBED)
    assert ours(x, x, x)[0].is_contiguous() and ours(x, x, x, need_weights=False)[0].is_contiguous()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_the_mask_counts_and_the_hint_only_hints(need_weights, extra):
    _, ours = pair(batch_first=True, add_zero_attn=extra)
    x = torch.randn(2, M, EMBED)
    banded = torch.ones(M, M, dtype=torch.bool).triu(1) | torch.ones(M, M, dtype=torch.bool).tril(-3)
    soft = torch.full((M, M), torch.finfo(torch.float32).min).triu(1)
    for mask in (banded, soft, attn_mask("causal", M, M, None)):
        with_hint = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]
        without = ours(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
        assert torch.allclose(with_hint, without, atol=1e-6)


def test_the_hint_without_a_mask_is_an_error_as_in_torch():
    theirs, ours = pair(batch_first=True)
    x = torch.randn(2, M, EMBED)
    for layer in (theirs, ours):
        with pytest.raises(RuntimeError, match="attn_mask"):
            layer(x, x, x, is_causal=True)


class Seen(Softmax):
    calls: list = []  # noqa: RUF012  (shared on purpose: the layer builds its own instances)

    def forward(self, q, k, v, *, segments=None):
        self.calls.append((self.pattern, None if self.bias is None else tuple(self.bias.shape)))
        return super().forward(q, k, v, segments=segments)


def test_nothing_of_size_n_by_m_is_made_for_padding_or_for_the_causal_hint(monkeypatch):
    monkeypatch.setattr("heedful.nn.multihead.Softmax", Seen)
    monkeypatch.setattr(Seen, "calls", [])
    _, ours = pair(batch_first=True)
    x, hidden = torch.randn(BATCH, M, EMBED), padding_mask("bool", M, None)
    causal = {"attn_mask": attn_mask("causal", M, M, None), "is_causal": True, "need_weights": False}
    ours(x, x, x, need_weights=False)
    ours(x, x, x, key_padding_mask=hidden, need_weights=False)
    ours(x, x, x, **causal)
    ours(x, x, x, key_padding_mask=hidden, **causal)
    assert Seen.calls == [(Full(), None), (Full(), (2, 1, 1, M)), (Causal(), None), (Causal(), (2, 1, 1, M))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("how", ["padding", "float padding", "mask", "float mask", "both"])
def test_a_query_with_nothing_to_attend_to_gets_zeros_where_torch_gives_nan(dtype, need_weights, how):
    theirs, ours = pair(batch_first=True, dtype=dtype)
    nn.init.normal_(ours.out_proj.bias)
    x = torch.randn(2, 4, EMBED, dtype=dtype, requires_grad=True)
    hidden = torch.tensor([[False] * 4, [True] * 4])
    dead = {
        "padding": {"key_padding_mask": hidden},
        "float padding": {"key_padding_mask": torch.zeros(2, 4, dtype=dtype).masked_fill(hidden, -torch.inf)},
        "mask": {"attn_mask": torch.eye(4, dtype=torch.bool)[1].expand(4, 4).mT},
        "float mask": {"attn_mask": torch.zeros(4, 4, dtype=dtype).index_fill(0, torch.tensor(1), -torch.inf)},
        "both": {"key_padding_mask": hidden, "attn_mask": torch.eye(4, dtype=torch.bool)},
    }[how]
    out, weights = ours(x, x, x, need_weights=need_weights, **dead)
    rows = (slice(None), 1) if "mask" in how else (1,)
    assert torch.equal(out[rows], ours.out_proj.bias.expand_as(out[rows]))
    assert not need_weights or not weights[rows].any()
    assert torch.isfinite(out).all()
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(ours.in_proj_weight.grad).all()
    if need_weights:
        assert theirs(x, x, x, **dead)[0].isnan().any()


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_no_queries_and_no_keys_work(sizes, need_weights):
    _, ours = pair(batch_first=True)
    query, key = (torch.randn(2, size, EMBED) for size in sizes)
    out, weights = ours(query, key, key, need_weights=need_weights)
    assert out.shape == query.shape and torch.isfinite(out).all()
    assert weights is None or weights.shape == (2, *sizes)


@pytest.mark.parametrize("average", [False, True])
def test_dropout_falls_on_the_weights_in_training_only_and_as_torchs_does(average):
    theirs, ours = pair(batch_first=True, dropout=0.5)
    x = torch.randn(2, M, EMBED)
    found, expected = [], []
    for layer, kept in ((theirs, expected), (ours, found)):
        torch.manual_seed(5)
        kept.extend(layer(x, x, x, average_attn_weights=average))
    assert torch.allclose(found[0], expected[0], atol=1e-6) and torch.allclose(found[1], expected[1], atol=1e-6)
    torch.manual_seed(5)
    assert torch.equal(ours(x, x, x, need_weights=False)[0], found[0])
    ours.eval()
    theirs.eval()
    assert torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    assert not torch.allclose(ours(x, x, x)[0], found[0], atol=1e-2)


def test_a_learned_mask_receives_its_gradient():
    theirs, ours = pair(batch_first=True)
    x, mask = torch.randn(2, M, EMBED), torch.randn(M, M, requires_grad=True)
    gradients = [
        torch.autograd.grad(layer(x, x, x, attn_mask=mask, need_weights=False)[0].square().sum(), mask)[0]
        for layer in (theirs, ours)
    ]
    assert torch.allclose(*gradients, atol=1e-6)


def test_autocast_works_with_and_without_masks():
    theirs, ours = pair(batch_first=True, add_bias_kv=True)
    x = torch.randn(2, M, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        for arguments in ({}, {"key_padding_mask": padding_mask("bool", M, None)}):
            expected, found = theirs(x, x, x, **arguments)[0], ours(x, x, x, **arguments)[0]
            assert found.dtype == expected.dtype and torch.allclose(found, expected, atol=2e-2)


# ---- other mechanisms


def projected(layer, x):
    """q, k, v (heads, n, width) of one sequence (n, embed)."""
    parts = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    return (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in parts)


@pytest.mark.parametrize("mechanism", [Softmax(Full()), Softmax(Causal()), NARROW, Quadratic()], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_mechanism_takes_the_place_of_softmax(mechanism, padded):
    _, ours = pair(batch_first=True, mechanism=mechanism)
    lengths = [M, 4] if padded else [M, M]
    x = torch.randn(2, M, EMBED)
    hidden = torch.arange(M) >= torch.tensor(lengths)[:, None] if padded else None
    out, none = ours(x, x, x, key_padding_mask=hidden, need_weights=False)
    again, weights = ours(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
    assert none is None and torch.allclose(out, again, atol=1e-5)
    for row, length in enumerate(lengths):
        q, k, v = projected(ours, x[row, :length])
        matrix = mechanism.matrix(q, k)
        assert torch.allclose(weights[row, :, :length, :length], matrix, atol=1e-6)
        assert torch.allclose(out[row, :length], ours.out_proj((matrix @ v).transpose(0, 1).flatten(-2)), atol=1e-5)
    assert not weights[1, :, :, lengths[1] :].any()


@pytest.mark.parametrize("n", [3, M, 12])
def test_cross_attention_with_a_mechanism_hides_padded_keys_from_every_query(n):
    theirs, ours = pair(batch_first=True, mechanism=Softmax(Full()))
    x, memory, hidden = torch.randn(2, n, EMBED), torch.randn(2, M, EMBED), padding_mask("bool", M, None)
    expected = theirs(x, memory, memory, key_padding_mask=hidden)[0]
    for need_weights in (False, True):
        found = ours(x, memory, memory, key_padding_mask=hidden, need_weights=need_weights)[0]
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_float_padding_mask_of_zeros_and_infinities_is_padding_to_a_mechanism():
    _, ours = pair(batch_first=True, mechanism=NARROW)
    x, hidden = torch.randn(2, M, EMBED), padding_mask("bool", M, None)
    additive = torch.zeros(2, M).masked_fill(hidden, -torch.inf)
    assert torch.equal(ours(x, x, x, key_padding_mask=hidden)[0], ours(x, x, x, key_padding_mask=additive)[0])


def test_the_causal_mask_is_welcome_to_a_causal_mechanism():
    _, ours = pair(batch_first=True, mechanism=Softmax(Window(3)))
    x = torch.randn(2, M, EMBED)
    plain = ours(x, x, x)[0]
    for kind in ("causal", "causal float"):
        assert torch.equal(ours(x, x, x, attn_mask=attn_mask(kind, M, M, None), is_causal=True)[0], plain)
    assert torch.equal(ours(x, x, x, is_causal=True)[0], plain)


X = torch.zeros(2, M, EMBED)
SQUARE = torch.zeros(M, M, dtype=torch.bool)


def refuse(mechanism=None, **arguments):
    return lambda: pair(batch_first=True, mechanism=mechanism)[1](X, X, X, **arguments)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (refuse(NARROW, attn_mask=SQUARE), ValueError, "attn_mask: given to Softmax.*leave out `mechanism`"),
        (refuse(NARROW, attn_mask=SQUARE, is_causal=True), ValueError, "is_causal: True, but Softmax"),
        (refuse(Softmax(), attn_mask=SQUARE, is_causal=True), ValueError, "attn_mask: given to Softmax"),
        (refuse(Softmax(), attn_mask=SQUARE.triu(1)), ValueError, "attn_mask: given to Softmax"),
        (refuse(NARROW, key_padding_mask=torch.ones(2, M)), ValueError, "key_padding_mask: a float mask with values"),
        (refuse("window"), TypeError, "mechanism: expected a Mechanism.*'window'"),
        (lambda: MultiheadAttention(8, 2, add_zero_attn=True, mechanism=NARROW), ValueError, "no position"),
        (lambda: MultiheadAttention(8, 2, add_bias_kv=True, mechanism=NARROW), ValueError, "no position"),
        (refuse(attn_mask=SQUARE.int()), TypeError, "attn_mask: torch.int32, expected bool"),
        (refuse(attn_mask=SQUARE[:, :3]), ValueError, r"attn_mask: shape \(9, 3\), expected \(9, 9\) or \(8, 9, 9\)"),
        (refuse(attn_mask=SQUARE[None]), ValueError, r"attn_mask: shape \(1, 9, 9\)"),
        (refuse(key_padding_mask=SQUARE), ValueError, r"key_padding_mask: shape \(9, 9\), expected \(2, 9\)"),
        (lambda: pair()[1](X, X, X[:1]), ValueError, r"v \(1, 9, 16\).*takes \(tokens, batch, width\)"),
        (lambda: pair()[1](X, X[:, :4], X[:, :4]), ValueError, "expected one batch size"),
        (lambda: pair()[1](X, X, X[..., :5]), ValueError, r"value: shape \(2, 9, 5\), expected a width of 16"),
        (lambda: pair()[1](X, X[0], X[0]), ValueError, "expected 3 axes each, or 2"),
    ],
)
def test_bad_input_gets_a_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- inside torch's own layers


def swap(module: nn.Module, mechanism=None) -> nn.Module:
    """A copy of the module with ours in place of each of torch's attention modules, on the same weights."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                ours = MultiheadAttention(
                    child.embed_dim,
                    child.num_heads,
                    child.dropout,
                    batch_first=child.batch_first,
                    bias=child.in_proj_bias is not None,
                    mechanism=mechanism if name == "self_attn" else None,
                ).train(child.training)
                ours.load_state_dict(child.state_dict())
                setattr(parent, name, ours)
    return module


def encoder_by_hand(encoder: nn.TransformerEncoder, x, hidden, mechanism):
    """What an encoder of post-norm layers computes, written out, attention by the mechanism's matrix."""
    for layer in encoder.layers:
        attention = layer.self_attn
        rows = []
        for row, pad in zip(x, hidden, strict=True):
            real = ~pad
            q, k, v = projected(attention, row[real])
            out = torch.zeros_like(row)
            out[real] = attention.out_proj((mechanism.matrix(q, k) @ v).transpose(0, 1).flatten(-2))
            rows.append(out)
        x = layer.norm1(x + torch.stack(rows))
        x = layer.norm2(x + layer.linear2(layer.linear1(x).relu()))
    return x


LAYER = {"d_model": EMBED, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("mechanism", [Softmax(Full()), NARROW], ids=str)
@pytest.mark.parametrize("swapped", ["before the encoder is built", "after it"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_our_forward_really_runs_in_an_encoder_whatever_fast_path_torch_has(training, gradients, mechanism, swapped):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(**LAYER)
    if swapped == "after it":
        encoder = swap(nn.TransformerEncoder(layer, 2), mechanism)
        assert encoder.use_nested_tensor
    else:
        encoder = nn.TransformerEncoder(swap(layer, mechanism), 2)
    encoder.train(training)
    x, hidden = torch.randn(2, M, EMBED), padding_mask("bool", M, None)
    with torch.set_grad_enabled(gradients):
        for mask in (hidden, None):
            found = encoder(x, src_key_padding_mask=mask)
            real = ~hidden if mask is not None else torch.ones_like(hidden)
            expected = encoder_by_hand(encoder, x, ~real, mechanism)
            assert torch.allclose(found[real], expected[real], atol=1e-5)
            assert torch.isfinite(found).all()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "causal"])
def test_an_encoder_layer_gives_what_it_gave(norm_first, batch_first, training, mask):
    theirs = nn.TransformerEncoderLayer(**LAYER | {"batch_first": batch_first}, norm_first=norm_first).train(training)
    ours, narrow = swap(theirs), swap(theirs, NARROW)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((BATCH, M, EMBED) if batch_first else (M, BATCH, EMBED), generator=draw)
    arguments = {"src_mask": attn_mask(mask, M, M, draw), "is_causal": mask == "causal"}
    with torch.no_grad():
        assert torch.allclose(ours(x, **arguments), theirs(x, **arguments), atol=2e-6)
        if mask == "none":
            assert not torch.allclose(narrow(x), theirs(x), atol=1e-2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_a_whole_transformer_gives_what_it_gave(training, batch_first):
    torch.manual_seed(0)
    options = {name: value for name, value in LAYER.items() if name != "batch_first"}
    theirs = nn.Transformer(**options, num_encoder_layers=2, num_decoder_layers=2, batch_first=batch_first)
    theirs.train(training)
    ours = swap(theirs)
    source, target, hidden = torch.randn(2, M, EMBED), torch.randn(2, N, EMBED), padding_mask("bool", M, None)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    arguments = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(N),
        "src_key_padding_mask": hidden,
        "memory_key_padding_mask": hidden,
    }
    with torch.no_grad():
        expected = theirs(source, target, **arguments)
        assert torch.allclose(ours(source, target, **arguments), expected, atol=5e-6)
        local = swap(theirs.decoder, Softmax(Window(1)))
        memory = theirs.encoder(source)
        causal = {"tgt_mask": arguments["tgt_mask"]}
        assert not torch.allclose(local(target, memory, **causal), theirs.decoder(target, memory, **causal), atol=1e-2)
    ours.train()
    ours(source, target, **arguments).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in ours.parameters())


def test_a_decoder_layer_may_attend_to_itself_by_any_causal_mechanism():
    theirs = nn.TransformerDecoderLayer(**LAYER).eval()
    ours, local = swap(theirs, Softmax(Causal())), swap(theirs, Softmax(Window(1)))
    x, memory, mask = torch.randn(2, N, EMBED), torch.randn(2, M, EMBED), attn_mask("causal", N, N, None)
    expected = theirs(x, memory, tgt_mask=mask)
    assert torch.allclose(ours(x, memory, tgt_mask=mask, tgt_is_causal=True), expected, atol=2e-6)
    assert not torch.allclose(local(x, memory, tgt_mask=mask, tgt_is_causal=True), expected, atol=1e-2)


def test_nested_tensors_are_taken_only_where_they_make_sense():
    _, ours = pair(batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = torch.nested.nested_tensor([torch.randn(4, EMBED), torch.randn(7, EMBED)])
    out, _ = ours(rows, rows, rows, need_weights=False)
    for found, row in zip(out.unbind(), rows.unbind(), strict=True):
        assert torch.allclose(found, ours(row, row, row)[0], atol=1e-6)
    with pytest.raises(ValueError, match="expected one strided nested tensor as query, key and value"):
        ours(rows, rows.clone(), rows)
    with pytest.raises(ValueError, match="expected no mask"):
        ours(rows, rows, rows, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))


# ---- as a module


@pytest.mark.parametrize("mechanism", [None, NARROW], ids=str)
def test_it_survives_pickle_deepcopy_and_state_dict(mechanism):
    _, ours = pair(batch_first=True, mechanism=mechanism)
    other = pair(1, batch_first=True, mechanism=mechanism)[1]
    other.load_state_dict(ours.state_dict())
    x = torch.randn(2, M, EMBED)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), other):
        assert torch.equal(twin(x, x, x)[0], ours(x, x, x)[0])
        assert not twin._qkv_same_embed_dim  # what keeps torch's layers off their fast path


@pytest.mark.parametrize("mechanism", [None, NARROW], ids=str)
def test_it_compiles(mechanism):
    _, ours = pair(batch_first=True, mechanism=mechanism)
    x, hidden = torch.randn(2, M, EMBED), padding_mask("bool", M, None)
    compiled = torch.compile(ours, backend="aot_eager")
    for arguments in ({"need_weights": False}, {}, {"key_padding_mask": hidden, "need_weights": False}):
        for found, expected in zip(compiled(x, x, x, **arguments), ours(x, x, x, **arguments), strict=True):
            assert found is expected is None or torch.allclose(found, expected, atol=1e-6)
    if mechanism is None:
        causal = {"attn_mask": attn_mask("causal", M, M, None), "is_causal": True, "need_weights": False}
        assert torch.allclose(compiled(x, x, x, **causal)[0], ours(x, x, x, **causal)[0], atol=1e-6)


def test_it_is_an_instance_of_torchs_class():
    assert isinstance(MultiheadAttention(8, 2), nn.MultiheadAttention)
