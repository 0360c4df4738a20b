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
from heedful.testing.case import separate

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
    mechanism = FixedPattern(kind, words=torch.tensor(WORDS))
    torch.testing.assert_close(mechanism.matrix(x, x), want, rtol=0, atol=1e-15)
    torch.testing.assert_close(mechanism(x, x, torch.eye(6).double()), want, rtol=0, atol=1e-15)
    assert not isinstance(mechanism, h.RecurrentMechanism)


@pytest.mark.parametrize(("kind", "options"), EDGES, ids=EDGE_IDS)
@pytest.mark.parametrize("n", [1, 3, 70])
def test_words_of_one_token_are_tokens(kind, options, n):
    x = draw(2, n, 4)
    mechanism = FixedPattern(kind, words=torch.arange(n), **options)
    torch.testing.assert_close(mechanism(x, x, x), FixedPattern(kind, **options)(x, x, x), rtol=0, atol=1e-13)


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
    mechanism = FixedPattern(kind, words=words, **options)
    v.requires_grad_()
    got, want = mechanism(q, k, v, segments=segments), mechanism.matrix(q, k, segments=segments) @ v
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    for one, other in zip(*(torch.autograd.grad(x, v, g) for x in (got, want)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    A = mechanism.operator(q, k, segments=segments)
    torch.testing.assert_close(A.mT @ g, A.to_dense().mT @ g, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_words_in_a_packed_batch_are_those_of_the_separate_sequences(kind):
    ids = torch.tensor([[0, 1] * 4 + [1, 1, -1], [-1, 2, 2, 2, 2, 2, 5, 5, 5, -1, -1]])
    words = torch.tensor([[0, 0, 0, 0, 1, 0, 1, 2, 2, 2, 2], [9, 9, 9, 1, 1, 2, 2, 2, 3, 3, 3]])
    x = draw(2, 1, 11, 4)
    got = FixedPattern(kind, words=words[:, None])(x, x, x, segments=ids[:, None])
    for row in range(2):
        for segment in (0, 1, 2, 5):
            at = (ids[row] == segment).nonzero()[:, 0]
            if len(at):
                alone = FixedPattern(kind, words=words[row, at])
                one = x[row : row + 1, :, at]
                want = separate(alone, one, one, one, *[torch.zeros(1, len(at))] * 2)
                torch.testing.assert_close(got[row : row + 1, :, at], want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_word", [False, True], ids=["tokens", "words"])
def test_nan_in_padding_stays_there(kind, by_word):
    ids = from_lengths(torch.tensor([0, 3, 50, 64]), 64)[:, None]
    clean = draw(4, 2, 64, 3)
    dirty = torch.where((ids < 0)[..., None], torch.nan, clean).requires_grad_()
    mechanism = FixedPattern(kind, words=torch.arange(64) // 3 if by_word else None)
    out = mechanism(dirty, dirty, dirty, segments=ids)
    assert torch.equal(out, mechanism(clean, clean, clean, segments=ids))
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
        for words in (None, torch.arange(6) // 2):
            mechanism = FixedPattern(kind, words=words, **options)
            assert isinstance(mechanism, StreamingFixedPattern) == (streams and words is None)
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
            FixedPattern(kind, words=words)(x, x, x, segments=ids)
            FixedPattern(kind, words=words)(x, x, x)


def test_mistakes_are_named():
    x = draw(2, 3, 6, 4)
    with pytest.raises(ValueError, match="current, previous, next, left, right, start, end, last, got 'centre'"):
        FixedPattern("centre")
    with pytest.raises(ValueError, match="edge"):
        FixedPattern("previous", edge="wrap")
    with pytest.raises(ValueError, match='"first" is for kind "previous"'):
        FixedPattern("next", edge="first")
    with pytest.raises(TypeError, match="words: expected an integer tensor"):
        FixedPattern("left", words=[0, 0, 1])
    with pytest.raises(TypeError, match="words: expected an integer tensor"):
        FixedPattern("left", words=torch.ones(6))
    for words in (torch.arange(5), torch.arange(12).reshape(2, 6)):
        for call in (lambda a: a(x, x, x), lambda a: a.matrix(x, x)):
            with pytest.raises(ValueError, match=r"words: shape .*expected one id for each of the 6 keys"):
                call(FixedPattern("left", words=words))
    streaming = FixedPattern("left")
    streaming.words = torch.arange(6)
    with pytest.raises(TypeError, match="words: set on a mechanism that streams"):
        streaming(x, x, x)
    with pytest.raises(ValueError, match="6 queries for 5 keys"):
        FixedPattern("next")(x, x[..., 1:, :], x[..., 1:, :])
