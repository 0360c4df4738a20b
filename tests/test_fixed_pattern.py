"""Fixed attention patterns: the paper's figure, every layout of segments and words, streaming and precision."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from functools import partial

import pytest
import torch

import heedful as h
from heedful.kernels.prefix import weighted_prefix_mean
from heedful.kernels.prefix.reference import weighted_mean
from heedful.mechanisms.fixed_pattern import KINDS, FixedPattern, StreamingFixedPattern
from heedful.segments import from_lengths
from heedful.testing import CHECKS, Case, DoesNotApply

EDGES = [(kind, {}) for kind in KINDS] + [("previous", {"edge": "first"})]
EDGE_IDS = [kind + (", first" if options else "") for kind, options in EDGES]
STREAMING = [("current", {}), ("left", {}), ("previous", {"edge": "first"})]

# The paper's figure for five tokens: whole numbers, each row to be divided by its sum.
FIGURE = {
    "current": [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
    "previous": [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]],
    "next": [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]],
    "left": [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 8, 0, 0, 0], [1, 8, 27, 0, 0]],
    "right": [[0, 0, 27, 8, 1], [0, 0, 0, 8, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]],
    "start": [[125, 64, 27, 8, 1]] * 5,
    "end": [[1, 8, 27, 64, 125]] * 5,
    "last": [[0, 0, 0, 0, 1]] * 5,
}
# Six tokens in four words, the second and the last of two tokens: ids 7, 3 3, 7, 5 5.
WORDS = [7, 3, 3, 7, 5, 5]
WORD_FIGURE = {
    "current": [[1, 0, 0, 0, 0, 0]] + [[0, 1, 1, 0, 0, 0]] * 2 + [[0, 0, 0, 1, 0, 0]] + [[0, 0, 0, 0, 1, 1]] * 2,
    "previous": [[0, 0, 0, 0, 1, 1]] + [[1, 0, 0, 0, 0, 0]] * 2 + [[0, 1, 1, 0, 0, 0]] + [[0, 0, 0, 1, 0, 0]] * 2,
    "next": [[0, 1, 1, 0, 0, 0]] + [[0, 0, 0, 1, 0, 0]] * 2 + [[0, 0, 0, 0, 1, 1]] + [[1, 0, 0, 0, 0, 0]] * 2,
    "left": [[1, 0, 0, 0, 0, 0]] * 4 + [[1, 8, 27, 0, 0, 0]] * 2,
    "right": [[0, 0, 0, 27, 8, 1]] + [[0, 0, 0, 0, 8, 1]] * 5,
    "start": [[216, 125, 64, 27, 8, 1]] * 6,
    "end": [[1, 8, 27, 64, 125, 216]] * 6,
    "last": [[0, 0, 0, 0, 0, 1]] * 6,
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def normalised(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[float(Fraction(x, sum(row))) for x in row] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_contract_holds_for_the_variant_that_no_entry_of_the_catalogue_has(check):
    try:
        check(Case(partial(FixedPattern, "previous", edge="first")))
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("kind", KINDS)
def test_five_tokens_are_the_papers_figure(kind):
    x, want = draw(5, 3), normalised(FIGURE[kind])
    torch.testing.assert_close(FixedPattern(kind).matrix(x, x), want, rtol=0, atol=1e-15)
    torch.testing.assert_close(FixedPattern(kind)(x, x, torch.eye(5).double()), want, rtol=0, atol=1e-15)


def test_previous_may_attend_itself_in_row_zero():
    x = draw(4, 3)
    want = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], dtype=torch.float64)
    assert torch.equal(FixedPattern("previous", edge="first").matrix(x, x), want)


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_neighbours_as_written_out(kind):
    x, want = draw(6, 3), normalised(WORD_FIGURE[kind])
    mechanism, words = FixedPattern(kind), torch.tensor(WORDS)
    torch.testing.assert_close(mechanism.matrix(x, x, words=words), want, rtol=0, atol=1e-15)
    torch.testing.assert_close(mechanism(x, x, torch.eye(6).double(), words=words), want, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("kind", "options"), EDGES, ids=EDGE_IDS)
@pytest.mark.parametrize("n", [1, 3, 70])
def test_words_of_one_token_are_tokens(kind, options, n):
    x = draw(2, n, 4)
    mechanism = FixedPattern(kind, **options)
    torch.testing.assert_close(mechanism(x, x, x, words=torch.arange(n)), mechanism(x, x, x), rtol=0, atol=1e-13)


def layouts():
    lengths = torch.tensor([0, 1, 7, 90])
    yield "right padding", 90, from_lengths(lengths, 90)[:, None]
    yield "left padding", 90, from_lengths(lengths, 90, padding="left")[:, None]
    yield "packing", 90, torch.tensor([4] * 3 + [0] * 50 + [-1] * 2 + [9] * 34 + [1])
    yield "interleaved", 90, (torch.arange(4)[:, None, None] * torch.arange(90)) % 5 - 1
    yield "a cache", 20, torch.tensor([0] * 40 + [1] * 45 + [-1] * 5)
    queries = torch.tensor([0] * 10 + [2] * 20 + [-1] * 3 + [8])
    yield "a pair", 34, (queries, torch.tensor([2] * 30 + [0] * 50 + [5] * 10))


@pytest.mark.parametrize(("kind", "options"), EDGES, ids=EDGE_IDS)
@pytest.mark.parametrize("layout", list(layouts()), ids=lambda layout: layout[0])
@pytest.mark.parametrize("by_word", [False, True], ids=["tokens", "words"])
def test_segments_and_words_are_those_of_the_definition(kind, options, layout, by_word):
    _, n, segments = layout
    q, k, v, g = draw(4, 2, n, 3), draw(4, 2, 90, 3), draw(4, 2, 90, 5, seed=1), draw(4, 2, n, 5, seed=2)
    words = torch.tensor([3, 1, 4])[torch.arange(90) * 7 // 11 % 3].expand(4, 1, 90) if by_word else None
    mechanism, given = FixedPattern(kind, **options), {"segments": segments, "words": words}
    v.requires_grad_()
    got, want = mechanism(q, k, v, **given), mechanism.matrix(q, k, **given) @ v
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    for one, other in zip(*(torch.autograd.grad(x, v, g) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    A = mechanism.operator(q, k, **given)
    torch.testing.assert_close(A @ v, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(A.mT @ g, mechanism.matrix(q, k, **given).mT @ g, rtol=0, atol=1e-12)
    torch.testing.assert_close(h.row_statistics(A).total.double(), A.to_dense().sum(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_words_in_a_packed_batch_are_those_of_the_separate_sequences(kind):
    ids = torch.tensor([[0, 1] * 4 + [1, 1, -1], [-1, 2, 2, 2, 2, 2, 5, 5, 5, -1, -1]])
    words = torch.tensor([[0, 0, 0, 0, 1, 0, 1, 2, 2, 2, 2], [9, 9, 9, 1, 1, 2, 2, 2, 3, 3, 3]])
    x = draw(2, 1, 11, 4)
    got = FixedPattern(kind)(x, x, x, segments=ids[:, None], words=words[:, None])
    for row in range(2):
        for segment in (0, 1, 2, 5):
            at = (ids[row] == segment).nonzero()[:, 0]
            if len(at):
                one = x[row : row + 1, :, at]
                want = FixedPattern(kind).matrix(one, one, words=words[row, at]) @ one
                torch.testing.assert_close(got[row : row + 1, :, at], want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_word", [False, True], ids=["tokens", "words"])
def test_nan_in_padding_stays_there(kind, by_word):
    ids = from_lengths(torch.tensor([0, 3, 50, 64]), 64)[:, None]
    clean = draw(4, 2, 64, 3)
    dirty = torch.where((ids < 0)[..., None], torch.nan, clean).requires_grad_()
    mechanism, words = FixedPattern(kind), torch.arange(64) // 3 if by_word else None
    out = mechanism(dirty, dirty, dirty, segments=ids, words=words)
    assert torch.equal(out, mechanism(clean, clean, clean, segments=ids, words=words))
    assert not out.mT[0].any()
    (grad,) = torch.autograd.grad(out.sum(), dirty)
    assert torch.isfinite(grad).all() and not grad[(ids < 0).expand(4, 2, 64)].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_q_and_k_are_zeros_even_at_nan(kind):
    q, k, v = (x.requires_grad_() for x in draw(3, 2, 9, 4).unbind())
    q.data[0, 0, 0] = torch.nan
    out = FixedPattern(kind)(q, k, v)
    assert torch.isfinite(out).all()
    for grad in torch.autograd.grad(out.sum(), (q, k)):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_memory_of_their_own(kind):
    for n in (1, 6):
        v = draw(6, 3)
        before = v.clone()
        out = FixedPattern(kind)(v[-n:], v, v)
        out += 1
        assert torch.equal(v, before)


@pytest.mark.parametrize("kind", KINDS)
def test_values_may_have_more_batch_axes_and_keys_fewer_heads(kind):
    q, k, v = draw(4, 3, 7, 2), draw(1, 7, 2), draw(5, 1, 3, 7, 6)
    out = FixedPattern(kind)(q, k, v)
    torch.testing.assert_close(out, FixedPattern(kind).matrix(q, k) @ v, rtol=0, atol=1e-14)
    assert out.shape == (5, 4, 3, 7, 6)


@pytest.mark.parametrize(("kind", "options"), STREAMING, ids=["current", "left", "previous"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_thousand_steps_replay_the_whole_in_a_constant_state(kind, options, dtype):
    mechanism, x = FixedPattern(kind, **options), draw(2, 2000, 4, dtype=dtype) + 1
    want = mechanism(*[x.double()] * 3)
    state = mechanism.init_state(*[x[:, :1]] * 3)
    sizes, rows = set(), []
    for t in range(2000):
        out, state = mechanism.step(state, *[x[:, t : t + 1]] * 3)
        rows.append(out)
        sizes.add(sum(y.numel() for y in state if y is not None and y.is_floating_point()))
    # The state is exact far beyond the inputs: one rounding to the output's type is all that is lost, at any length.
    unit = torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    torch.testing.assert_close(torch.cat(rows, -2).double(), want, rtol=unit, atol=unit)
    assert sizes == {mechanism.cost(h.Dims(2000, 2000, 4, 4, batch=2)).state}


def test_a_capability_is_a_type():
    for kind, options in EDGES:
        mechanism = FixedPattern(kind, **options)
        streams = (kind, options) in STREAMING
        assert isinstance(mechanism, FixedPattern)
        assert isinstance(mechanism, h.RecurrentMechanism) == streams == mechanism.pattern.is_causal
        assert isinstance(mechanism, StreamingFixedPattern) == streams
        for other in (copy.deepcopy(mechanism), pickle.loads(pickle.dumps(mechanism))):
            x = draw(6, 2)
            assert type(other) is type(mechanism) and torch.equal(other(x, x, x), mechanism(x, x, x))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", ["left", "right", "start", "end"])
@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
def test_twenty_thousand_tokens_keep_float32_precision(kind, packed, offset):
    """Against float64, in units of the last place of the largest output; gradients by their Euclidean norm."""
    n, mechanism = 20_000, FixedPattern(kind)
    ids = torch.tensor([0] * 13_000 + [1] * 5 + [2] * 6_995) if packed else None
    q, v, g = draw(n, 1), draw(n, 3, seed=1, dtype=torch.float32) + offset, draw(n, 3, seed=2, dtype=torch.float32)

    def results(dtype):
        x = v.to(dtype).requires_grad_()
        out = mechanism(q.to(dtype), q.to(dtype), x, segments=ids)
        return out.detach().double(), torch.autograd.grad(out, x, g.to(dtype))[0].double()

    (out, grad), (exact, exact_grad) = results(torch.float32), results(torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert (out - exact).abs().max() <= 4 * eps * exact.abs().max()
    assert (grad - exact_grad).norm() <= 4 * eps * exact_grad.norm()


def test_long_sequences_take_no_matrix():
    n = 131_072
    q, v = torch.zeros(n, 1), draw(n, 2, dtype=torch.float32)
    for kind in KINDS:
        out = FixedPattern(kind)(q, q, v)
        assert out.shape == (n, 2) and torch.isfinite(out).all()


def test_autocast_does_not_round_the_sums():
    x = draw(2, 2000, 4, dtype=torch.float32)
    for kind in KINDS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = FixedPattern(kind)(x, x, x)
        assert torch.equal(out, FixedPattern(kind)(x, x, x))


@pytest.mark.parametrize("m", [1, 2, 31, 32, 33, 65, 1000, 1024, 1100])
@pytest.mark.parametrize("reverse", [False, True])
def test_prefix_means_are_those_of_the_triangle(m, reverse):
    v, weights = draw(3, 2, m, 4).requires_grad_(), draw(3, 1, m, seed=1).clamp(min=0)
    first = draw(m, seed=2) > 1
    run = first.long().cumsum(-1)
    sees = (run[:, None] == run) & torch.ones(m, m, dtype=torch.bool).tril()
    part = (sees.mT if reverse else sees) * weights[..., None, :]
    want = part / part.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    got = weighted_prefix_mean(v, weights, first=first, reverse=reverse)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    g = draw(3, 2, m, 4, seed=3)
    for one, other in zip(*(torch.autograd.grad(x, v, g) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        weighted_mean(v, weights), weighted_prefix_mean(v, weights)[..., -1:, :], rtol=0, atol=1e-12
    )


def test_prefix_means_have_second_derivatives():
    v = draw(40, 1).requires_grad_()
    weights = torch.arange(1.0, 41.0)
    assert torch.autograd.gradgradcheck(lambda x: weighted_prefix_mean(x, weights, delay=2) ** 2, v)


def test_prefix_refuses_in_sentences():
    v, weights = draw(5, 2), torch.ones(5)
    with pytest.raises(RuntimeError, match="weights must be"):
        weighted_prefix_mean(v, weights[:4])
    with pytest.raises(RuntimeError, match="first must be bool"):
        weighted_prefix_mean(v, weights, first=weights)
    with pytest.raises(RuntimeError, match="delay must be"):
        weighted_prefix_mean(v, weights, first=weights > 0, delay=1)


@pytest.mark.usefixtures("annotations_enforced")
def test_annotations_hold():
    x, ids = draw(2, 3, 40, 4), torch.tensor([0] * 20 + [1] * 15 + [-1] * 5)
    for kind in KINDS:
        for words in (None, torch.arange(40) // 3):
            FixedPattern(kind)(x, x, x, segments=ids, words=words)
            FixedPattern(kind)(x, x, x, words=words)


def test_mistakes_are_named():
    x = draw(2, 3, 6, 4)
    with pytest.raises(ValueError, match="current, previous, next, left, right, start, end, last, got 'centre'"):
        FixedPattern("centre")
    with pytest.raises(ValueError, match="edge"):
        FixedPattern("previous", edge="wrap")
    with pytest.raises(ValueError, match='"first" is for kind "previous"'):
        FixedPattern("next", edge="first")
    with pytest.raises(TypeError, match=r"words: given to the constructor, expected with the call: .*words=ids"):
        FixedPattern("left", words=torch.arange(6))
    for words in ([0, 0, 1], torch.ones(6), torch.ones(6, dtype=torch.bool), torch.tensor(3)):
        with pytest.raises(TypeError, match="words: expected an integer tensor"):
            FixedPattern("left")(x, x, x, words=words)
    for words in (torch.arange(5), torch.arange(12).reshape(2, 6)):
        for call in (
            lambda w: FixedPattern("left")(x, x, x, words=w),
            lambda w: FixedPattern("left").matrix(x, x, words=w),
            lambda w: FixedPattern("left").operator(x, x, words=w) @ x,
        ):
            with pytest.raises(ValueError, match=r"words: shape .*expected one id for each of the 6 keys"):
                call(words)
    for mechanism in (h.Mixture([h.Softmax(), h.Linear(), h.Softmax()]), h.Sum(h.Softmax(), h.Linear())):
        for call in (
            lambda a: a(x, x, x, words=torch.arange(6)),
            lambda a: a.matrix(x, x, words=torch.arange(6)),
            lambda a: a.operator(x, x, words=torch.arange(6)),
        ):
            with pytest.raises(TypeError, match=r"words: given to (Streaming)?(Mixture|Sum).*FixedPattern"):
                call(mechanism)
    with pytest.raises(ValueError, match="6 queries for 5 keys"):
        FixedPattern("next")(x, x[..., 1:, :], x[..., 1:, :])


# Words belong to a batch, not to a mechanism.

BATCHES = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 1, 2, 2, 3, 4]]), torch.arange(14).reshape(2, 7) // 3


def layer(**options):
    torch.manual_seed(0)
    heads = [FixedPattern(kind) for kind in ("current", "previous", "left")] + [h.Softmax(h.Full())]
    return h.nn.Attention(16, 4, h.Mixture(heads), dtype=torch.float64, **options)


def test_word_ids_travel_with_the_call_and_never_enter_a_checkpoint():
    """Two batches of other lengths and words through one layer, whose checkpoint loads into another after either."""
    trained, fresh = layer(), layer()
    names = set(trained.state_dict())
    assert names == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"}
    for words in BATCHES:
        x = draw(2, words.shape[-1], 16)
        out = trained(x, words=words)
        assert set(trained.state_dict()) == names and not list(trained.mechanism.buffers())
        fresh.load_state_dict(trained.state_dict())
        assert torch.equal(fresh(x, words=words), out)
        assert not torch.equal(fresh(x), out)  # words do have a say
        v = trained.v_proj(x).unflatten(-1, (4, 4)).transpose(1, 2)
        for head, kind in enumerate(("current", "previous", "left")):  # against the definition, head by head
            A = FixedPattern(kind).matrix(x, x, words=words)
            by_hand = torch.zeros_like(v)
            by_hand[:, head] = A @ v[:, head]
            alone = torch.zeros_like(v)
            q, k, _ = trained._project(x, x, torch.arange(x.shape[1]), torch.arange(x.shape[1]))
            alone[:, head] = trained.mechanism(q, k, v, words=words[:, None])[:, head]
            torch.testing.assert_close(alone, by_hand, rtol=0, atol=1e-14)


@pytest.mark.parametrize("prefix", ["", "mechanism.parts.1."])
def test_a_checkpoint_that_holds_the_words_of_a_batch_loads(prefix):
    """Earlier releases kept them in a buffer; the ids are ignored."""
    module = FixedPattern("previous") if not prefix else layer()
    old = {**module.state_dict(), f"{prefix}words": BATCHES[0]}
    assert module.load_state_dict(old) == ([], [])
    assert f"{prefix}words" not in module.state_dict()
    with pytest.raises(RuntimeError, match="wordz"):
        module.load_state_dict({**old, f"{prefix}wordz": BATCHES[0]})


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_mixture_and_a_sum_hand_words_to_the_parts_that_take_them(kv_heads):
    words = BATCHES[0][:, None] if kv_heads == 4 else BATCHES[0][:, None, None]
    q, k, v = draw(2, 4, 6, 3), draw(2, kv_heads, 6, 3, seed=1), draw(2, kv_heads, 6, 5, seed=2)
    parts = [FixedPattern("current"), h.Linear(pattern=h.Full()), FixedPattern("left"), FixedPattern("left")]
    if kv_heads == 2:
        q, k, v = h.group_heads(q, k, v)
    mixture = h.Mixture(parts, kv_heads=None if kv_heads == 4 else 2)
    total = h.Sum(FixedPattern("next"), h.Softmax(h.Full()), weights=[0.3, 0.7])
    ids = torch.tensor([0, 0, 0, 0, 1, 1])
    for mechanism in (mixture, total):
        A = mechanism.matrix(q, k, words=words, segments=ids)
        torch.testing.assert_close(mechanism(q, k, v, words=words, segments=ids), A @ v, rtol=0, atol=1e-13)
        operator = mechanism.operator(q, k, words=words, segments=ids)
        torch.testing.assert_close(operator.mT @ (A @ v), A.mT @ (A @ v), rtol=0, atol=1e-13)
        assert not torch.equal(A, mechanism.matrix(q, k, segments=ids))
        assert mechanism.explain(q, k, v, words=words)
    alone = FixedPattern("current").matrix(q, k, words=words)
    got = mixture.matrix(q, k, words=words)
    assert torch.equal(got[:, 0] if kv_heads == 4 else got[:, 0, 0], alone[:, 0] if kv_heads == 4 else alone[:, 0, 0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_takes_words(batch_first, need_weights):
    torch.manual_seed(0)
    made = h.nn.MultiheadAttention(
        12, 2, batch_first=batch_first, mechanism=FixedPattern("next"), bias=False, dtype=torch.float64
    )
    x = draw(2, 6, 12)
    given = x if batch_first else x.transpose(0, 1)
    out, weights = made(given, given, given, need_weights=need_weights, words=BATCHES[0])
    A = FixedPattern("next").matrix(x, x, words=BATCHES[0])
    want = (A[:, None] @ made._heads(given, given, given)[2]).transpose(1, 2).flatten(-2) @ made.out_proj.weight.mT
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), want, rtol=0, atol=1e-13)
    if need_weights:
        torch.testing.assert_close(weights, A, rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match=r"words: shape \(7,\), expected an integer tensor \(2, 6\)"):
        made(given, given, given, words=torch.arange(7))
    with pytest.raises(ValueError, match="words: given with is_causal=True"):
        made(given, given, given, words=BATCHES[0], is_causal=True)
    with pytest.raises(TypeError, match="words: given without a mechanism"):
        h.nn.MultiheadAttention(12, 2)(x, x, x, words=BATCHES[0])


def test_a_layer_without_word_based_heads_refuses_words():
    x = draw(2, 6, 16)
    with pytest.raises(TypeError, match=r"words: given to Softmax.*expected a heedful.FixedPattern"):
        h.nn.Attention(16, 4, dtype=torch.float64)(x, words=BATCHES[0])
    with pytest.raises(ValueError, match=r"words: shape \(2, 7\), expected \(2, 6\)"):
        layer()(x, words=BATCHES[1])
    with pytest.raises(TypeError, match=r"words: torch\.float32, expected an integer tensor of word ids"):
        layer()(x, words=torch.ones(2, 6))


def test_a_layer_with_words_compiles():
    x, made = draw(2, 6, 16), layer()
    torch._dynamo.reset()
    try:
        got = torch.compile(made, backend="aot_eager")(x, words=BATCHES[0])
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(got, made(x, words=BATCHES[0]), rtol=0, atol=1e-14)


def test_a_tree_belongs_to_no_checkpoint_either():
    made = h.nn.Attention(16, 4, h.Softmax(h.Tree((1, -1, 1), radius=1)))
    assert not any(name.startswith("mechanism") for name in made.state_dict())
