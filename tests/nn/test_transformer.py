"""The small Transformer: counts by hand, causality, padding, shared and frozen projections."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import heedful as h
from heedful.nn.transformer import Joined
from heedful.testing import check_mechanism

FIXED = [
    h.nn.Heads(1, h.FixedPattern(kind)) for kind in ("current", "previous", "next", "left", "right", "start", "end")
]
D, HEADS, WIDTH, LAYERS, VOCABULARY = 4, 8, 32, 2, 50


def both(encoder=h.nn.LEARNED, decoder=h.nn.LEARNED, cross=h.nn.LEARNED, **options):
    torch.manual_seed(0)
    return h.nn.Transformer(
        VOCABULARY,
        WIDTH,
        encoder=[encoder] * LAYERS,
        decoder=[decoder] * LAYERS,
        cross=cross,
        head_dim=D,
        hidden=64,
        **options,
    ).eval()


def by_hand() -> int:
    attention = 4 * WIDTH * WIDTH
    feed = WIDTH * 64 + 64 + 64 * WIDTH + WIDTH
    norm = 2 * WIDTH
    encoder, decoder = attention + feed + 2 * norm, 2 * attention + feed + 3 * norm
    return VOCABULARY * WIDTH + LAYERS * (encoder + decoder) + 2 * norm


LEARNED_WEIGHTS = by_hand()
PROJECTION = WIDTH * WIDTH  # q, k or v of one attention layer


def test_a_learned_model_has_the_weights_counted_by_hand():
    assert h.nn.count_weights(both()) == (LEARNED_WEIGHTS, 0, 0)


@pytest.mark.parametrize(
    ("options", "frozen", "none"),
    [
        ({"encoder": [*FIXED, h.nn.Heads(1)]}, 0, LAYERS * 2 * 7 * D * WIDTH),
        ({"encoder": [*FIXED, h.nn.Heads(1, h.FixedPattern("last"))]}, 0, LAYERS * 2 * PROJECTION),
        ({"encoder": [h.nn.Heads(8, qk=h.nn.Orthogonal)]}, LAYERS * 2 * PROJECTION, 0),
        ({"decoder": [h.nn.Heads(4), h.nn.Heads(4, qk=h.nn.Gaussian)]}, LAYERS * PROJECTION, 0),
        ({"cross": [h.nn.Heads(8, qk=h.nn.Orthogonal, v=h.nn.Orthogonal)]}, LAYERS * 3 * PROJECTION, 0),
        (
            {"encoder": [h.nn.Heads(8, qk=h.nn.Hadamard)]},
            LAYERS * 2 * 3 * WIDTH,
            LAYERS * 2 * (PROJECTION - 3 * WIDTH),
        ),
        ({"encoder": [h.nn.Heads(8, qk=partial(h.nn.trained, h.nn.Orthogonal))]}, 0, 0),
        ({"shared": ["q_proj", "k_proj"]}, 0, (LAYERS - 1) * 3 * 2 * PROJECTION),
    ],
    ids=["7F+1L", "8F", "orthogonal", "4 of 8", "qkv", "hadamard", "orthogonal start", "shared"],
)
def test_trainable_frozen_and_absent_weights_add_up_to_those_of_a_learned_model(options, frozen, none):
    counts = h.nn.count_weights(both(**options))
    assert counts == (LEARNED_WEIGHTS - frozen - none, frozen, none)


def test_an_update_of_low_rank_is_counted_on_top():
    counts = h.nn.count_weights(both([h.nn.Heads(8, qk=partial(h.nn.adapted, h.nn.Orthogonal, 3))]))
    stored = LAYERS * 2 * PROJECTION
    assert counts == (LEARNED_WEIGHTS - stored + LAYERS * 2 * 3 * 2 * WIDTH, stored, 0)


def test_a_single_head_keeps_its_width():
    layer = both([h.nn.Heads(1)]).encoder[0].attention
    assert (layer.heads, layer.head_dim, layer.q_proj.weight.shape) == (1, D, (D, WIDTH))


@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
def test_a_decoder_never_looks_ahead(positions):
    torch.manual_seed(0)
    model = h.nn.Transformer(VOCABULARY, WIDTH, decoder=[h.nn.LEARNED] * 2, positions=positions).eval()
    tokens = torch.randint(VOCABULARY, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCABULARY
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)
    source = torch.randint(VOCABULARY, (2, 5))
    translator = both(positions=positions)
    before, after = translator(source, tokens), translator(source, changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)


@pytest.mark.parametrize("positions", ["sinusoidal", "rope"])
@pytest.mark.parametrize("heads", [h.nn.LEARNED, [*FIXED, h.nn.Heads(1)]], ids=["8L", "7F+1L"])
def test_a_padded_batch_gives_what_separate_sentences_give(heads, positions):
    model = both(heads, positions=positions)
    lengths, outputs = (3, 9, 6), (5, 4, 7)
    sources = [torch.randint(4, VOCABULARY, (1, n)) for n in lengths]
    targets = [torch.randint(4, VOCABULARY, (1, n)) for n in outputs]
    segments = h.segments.from_lengths(torch.tensor(lengths), max(lengths))
    source, target = (
        torch.cat([torch.nn.functional.pad(x, (0, max(sizes) - x.shape[1])) for x in parts])
        for parts, sizes in ((sources, lengths), (targets, outputs))
    )
    whole = model(source, target, segments=segments)
    for row, (one, other) in enumerate(zip(sources, targets, strict=True)):
        torch.testing.assert_close(whole[row, : other.shape[1]], model(one, other)[0], rtol=0, atol=2e-5)


def test_word_based_heads_follow_the_words_of_each_batch():
    words = torch.tensor([[0, 0, 1, 1, 1, 2]])
    kinds = ("current", "previous", "next", "left", "right", "start", "end")
    model = both([h.nn.Heads(7, h.nn.FixedHeads(kinds, words=True)), h.nn.Heads(1)])
    source = torch.randint(VOCABULARY, (1, 6))
    each_its_own = model.encode(source, words=torch.arange(6)[None])
    by_word = model.encode(source, words=words)
    patterns = both([*FIXED, h.nn.Heads(1)])
    torch.testing.assert_close(each_its_own, patterns.encode(source), rtol=0, atol=2e-5)
    torch.testing.assert_close(by_word, patterns.encode(source, words=words), rtol=0, atol=2e-5)
    assert not torch.allclose(by_word, each_its_own, atol=1e-3)
    with pytest.raises(ValueError, match="none given"):
        model.encode(source)


@pytest.mark.parametrize("by_word", [False, True])
def test_fixed_heads_in_one_product_are_the_fixed_patterns(by_word):
    kinds = ("current", "previous", "next", "left", "right", "start", "end", "last")
    heads = h.nn.FixedHeads(kinds, words=by_word)
    for lengths in ((5, 9, 1), (9, 2, 6)):  # the second batch must not get the first one's matrix
        v = torch.randn(3, 8, 9, 4, dtype=torch.float64, requires_grad=True)
        segments = h.segments.from_lengths(torch.tensor(lengths), 9)[:, None]
        given = {"segments": segments}
        if by_word:
            given["words"] = torch.randint(3, (3, 1, 9)).cumsum(-1)
        each = zip(kinds, v.split(1, 1), strict=True)
        wanted = torch.cat([h.FixedPattern(kind)(x, x, x, **given) for kind, x in each], 1)
        for _ in range(2):
            found = heads(v, v, v, **given)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        ours, theirs = (torch.autograd.grad(out.square().sum(), v, retain_graph=True)[0] for out in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_fixed_heads_keep_the_contract_of_a_mechanism():
    laws = ("forward_is_matrix_times_v", "gradients_are_those_of_the_matrix", "padded_and_packed_equal_separate")
    laws += ("padding_has_no_say", "batch_axes_broadcast", "precision_is_no_worse_than_naive", "empty_sequences_work")
    laws += ("flops_are_what_cost_says", "state_dict_holds_everything", "copies_agree", "calls_repeat")
    check_mechanism(lambda: h.nn.FixedHeads(["previous", "left"]), checks=laws)


def test_xavier_has_the_variance_of_the_text():
    torch.manual_seed(0)
    model = h.nn.Transformer(10, 256, encoder=[h.nn.LEARNED])
    weight = model.encoder[0].attention.q_proj.weight
    assert float(weight.detach().var()) == pytest.approx(2 / (256 + 32), rel=0.03)
    torch_start = h.nn.Transformer(10, 256, encoder=[h.nn.LEARNED], init="torch").encoder[0].attention.q_proj.weight
    assert float(torch_start.detach().var()) == pytest.approx(1 / (3 * 256), rel=0.03)


def test_layers_differ_unless_their_projections_are_shared():
    apart = both([h.nn.Heads(8, qk=h.nn.Orthogonal)]).encoder
    assert not torch.equal(apart[0].attention.q_proj.weight, apart[1].attention.q_proj.weight)
    assert not torch.equal(apart[0].attention.q_proj.weight, apart[0].attention.k_proj.weight)
    shared = both([h.nn.Heads(8, qk=h.nn.Orthogonal)], shared=["q_proj"]).encoder
    assert shared[0].attention.q_proj is shared[1].attention.q_proj
    assert shared[0].attention.k_proj is not shared[1].attention.k_proj


def test_groups_of_heads_keep_their_order():
    layer = both([h.nn.Heads(3), h.nn.Heads(5, qk=h.nn.Orthogonal)]).encoder[0].attention
    assert isinstance(layer.q_proj, Joined)
    learned, drawn = layer.q_proj.parts
    assert learned.weight.requires_grad and not list(drawn.parameters())
    assert (learned.weight.shape[0], drawn.out_features) == (3 * D, 5 * D)


def test_gradients_reach_every_trained_weight():
    model = both([*FIXED, h.nn.Heads(1)], [h.nn.Heads(4), h.nn.Heads(4, qk=h.nn.Orthogonal)])
    model(torch.randint(VOCABULARY, (2, 6)), torch.randint(VOCABULARY, (2, 5))).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no layers"),
        ({"encoder": [h.nn.LEARNED], "positions": "learned"}, "sinusoidal"),
        ({"encoder": [h.nn.LEARNED], "init": "he"}, "xavier"),
        ({"encoder": [h.nn.LEARNED], "shared": ["out_proj"]}, "q_proj"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        h.nn.Transformer(10, 64, **options)
