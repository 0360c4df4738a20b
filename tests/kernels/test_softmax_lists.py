"""Softmax over any pattern in Triton by lists of tokens (interpreted where there is no GPU), against the definition."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import heedful as h
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.softmax import lists as listing
from heedful.kernels.softmax.lists import HEAD, lists
from heedful.kernels.softmax.reach import Reach
from heedful.segments import visible

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BIGBIRD = h.Window(6, 6) | h.Global((0,)) | h.RandomBlocks(8, 2)
FIXED = h.SparseFixed(16, 4) & h.Causal()


@dataclass(frozen=True)
class Pairs(h.Pattern):
    """Some pairs; every fifth query sees nothing, nobody sees every seventh key."""

    def allows(self, i, j):
        return (((i * 31 + j * 17) % 11) < 4) & (i % 5 != 0) & (j % 7 != 0)


@dataclass(frozen=True)
class Nothing(h.Pattern):
    def allows(self, i, j):
        return (i < 0) & (j < 0)


@dataclass(frozen=True)
class Few(h.Pattern):
    """Says so without looking at the queries, in a tensor that has no axis for them."""

    def allows(self, i, j):
        return j % 9 == 4


PATTERNS = {
    "bigbird": BIGBIRD,
    "sparse fixed": FIXED,
    "random, and block 0 sees nothing": h.RandomBlocks(8, 2) & h.Causal(),
    "pairs": Pairs(),
    "nothing": Nothing(),
    "full": h.Full(),
    "few": Few(),
}
PACKED = torch.tensor([[0] * 30 + [-1] * 5 + [1] * 25, [4] * 60], device=DEVICE)[:, None]
INTERRUPTED = torch.tensor([0] * 20 + [1] * 10 + [-1] * 10 + [0] * 20, device=DEVICE)
APART = (
    torch.tensor([0] * 30 + [5] * 10 + [1] * 20, device=DEVICE),
    torch.tensor([0] * 30 + [-1] * 10 + [1] * 20, device=DEVICE),
)
LONGER = torch.tensor([0] * 50 + [1] * 30 + [0] * 10, device=DEVICE), torch.tensor([0] * 10 + [1] * 7, device=DEVICE)


@pytest.fixture
def fused(small_tiles):
    from heedful.kernels.softmax import fused

    return fused


def pairs_of(blocks, found, length, others, rows, tile):
    """How often each pair is listed in one sequence, and how often in a tile that needs no test."""
    listed, untested = torch.zeros(2, length, others, dtype=torch.int, device=blocks.device)
    marked = blocks[:, :rows].flatten()[:length].long()
    tokens = torch.where(marked < 0, ~marked, marked)
    assert torch.equal(tokens.sort().values, torch.arange(length, device=tokens.device))
    for block, own in zip(blocks, tokens.split(rows), strict=True):
        begin, full, size = block[-HEAD:].tolist()
        assert full % tile == size % tile == 0
        seen, words = found.tokens[begin : begin + size], found.words[begin : begin + size]
        assert (seen[:full] >= 0).all() and not words[seen < 0].any()
        bits = (words[seen >= 0] >> torch.arange(rows, device=words.device)[:, None] & 1).int()[: len(own)]
        listed[own[:, None], seen[seen >= 0].long()] += bits
        untested[own[:, None], seen[:full].long()] += 1
    assert torch.equal(marked < 0, ~listed.bool().any(-1)[tokens])  # those that see nothing
    return listed, untested


@pytest.mark.parametrize("rows, tile", [(16, 16), (64, 32)])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_lists_hold_every_visible_pair_once_and_no_other(monkeypatch, pattern, rows, tile):
    monkeypatch.setattr(listing, "SLAB", 2000)  # several slabs
    listing._unsegmented.cache_clear()
    for n, m, segments in [(60, 60, None), (100, 100, None), (7, 60, None), (60, 60, PACKED), (60, 60, APART)]:
        found = lists(pattern, n, m, segments, torch.device(DEVICE), rows, tile)
        want = visible(pattern, n, m, segments, DEVICE)
        for blocks, side, mask in ((found.rows, found.of_rows, want), (found.keys, found.of_keys, want.mT)):
            mask = mask.reshape(-1, *mask.shape[-2:])
            for own, one in zip(blocks.flatten(0, -3) if blocks.ndim > 2 else blocks[None], mask, strict=True):
                listed, untested = pairs_of(own, side, *one.shape, rows, tile)
                assert torch.equal(listed, one.int())
                assert (untested <= listed).all()
    listing._unsegmented.cache_clear()


def test_tokens_that_see_far_more_than_most_share_blocks_and_come_first():
    found = lists(FIXED, 256, 256, None, torch.device(DEVICE), 16, 16)
    summaries = [j for j in range(256) if j % 16 >= 12]
    long = found.first_keys
    assert 0 < long < 80 and found.first_rows == 0
    assert torch.isin(found.keys[: long // 16 - 1, :-HEAD], torch.tensor(summaries, device=DEVICE)).all()
    scattered = visible(FIXED, 256, 256, None, DEVICE).view(256, 16, 16).any(-1).sum() * 16
    assert len(found.of_keys.tokens) < scattered / 2  # than tiles of neighbouring keys would walk


def draw(heads=(4, 4), n=60, m=None, d=16, e=None, dtype=torch.float64):
    g = torch.Generator().manual_seed(n)
    shapes = (2, heads[0], n, d), (2, heads[1], m or n, d), (2, heads[1], m or n, e or d)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).to(DEVICE) for s in shapes]


def outcome(function, inputs, dtype):
    """Output and gradients, in float64."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    o = function(*inputs)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(DEVICE)
    return [x.detach().double() for x in (o, *torch.autograd.grad(o, inputs, do.to(dtype)))]


def dense(pattern, segments=None):
    return lambda q, k, v: h.Softmax(pattern).matrix(q, k, segments=segments) @ v


def by_lists(fused, pattern, segments=None):
    def attend(q, k, v):
        inputs = q, k, v, SoftmaxRows(), pattern, segments, q.shape[-1] ** -0.5
        assert fused.objections(*inputs) == []
        return fused.attend(*inputs)

    return attend


def distance(got, want):
    assert got.shape == want.shape and got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp(min=1e-9)).item()


CASES = {
    "bigbird, shared heads": (BIGBIRD, dict(heads=(2, 1), n=97), None),
    "sparse fixed, odd widths": (FIXED, dict(heads=(1, 1), n=97, d=5, e=19), None),
    "sparse fixed after a cache": (FIXED, dict(heads=(1, 1), n=33, m=70), None),
    "pairs": (Pairs(), dict(heads=(2, 1), n=63), None),
    "block 0 sees nothing": (PATTERNS["random, and block 0 sees nothing"], dict(heads=(1, 1)), None),
    "one query": (BIGBIRD, dict(heads=(1, 1), n=1, m=49), None),
    "packed": (FIXED, dict(heads=(2, 1)), PACKED),
    "interrupted segments": (h.Window(9), dict(heads=(1, 1)), INTERRUPTED),
    "two sequences": (Pairs(), dict(heads=(1, 1)), APART),
    "more queries than keys, interrupted": (h.Full(), dict(heads=(1, 1), n=90, m=17), LONGER),
    "nothing to see": (Nothing(), dict(heads=(1, 1), n=20), None),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_definition_and_so_are_its_gradients(fused, fenced, case):
    pattern, sizes, segments = CASES[case]
    inputs = draw(**sizes)
    want = outcome(dense(pattern, segments), inputs, torch.float64)
    got = outcome(by_lists(fused, pattern, segments), inputs, torch.float32)
    for x, y in zip(got, want, strict=True):
        assert distance(x, y) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_good_as_the_naive_way(fused, dtype):
    inputs = draw(heads=(1, 1), n=80, d=32, dtype=dtype)
    want, naive = (outcome(dense(BIGBIRD), inputs, kind) for kind in (torch.float64, dtype))
    for x, y, truth in zip(outcome(by_lists(fused, BIGBIRD), inputs, dtype), naive, want, strict=True):
        assert distance(x, truth) <= 2 * distance(y, truth)


def test_rows_that_see_nothing_are_zero_and_give_nothing(fused):
    inputs = [x.float().requires_grad_() for x in draw(heads=(1, 1), n=35)]
    out = by_lists(fused, Pairs())(*inputs)
    assert not out[..., ::5, :].any() and out[..., 1, :].any()
    for grad in torch.autograd.grad(out[..., ::5, :].sum(), inputs):
        assert not grad.any()


def test_what_stands_in_padding_goes_nowhere(fused):
    inputs, attend = draw(heads=(1, 1)), by_lists(fused, FIXED, PACKED)
    spoilt = [torch.where((PACKED >= 0)[..., None], x, torch.nan) for x in inputs]
    clean = outcome(attend, inputs, torch.float32)
    for x, y in zip(outcome(attend, spoilt, torch.float32), clean, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("pattern", [BIGBIRD, Pairs()], ids=str)
def test_a_sink_and_a_cap(fused, pattern):
    sink = torch.tensor([0.3, -1.0], dtype=torch.float64, device=DEVICE)
    found = {}
    for dtype in (torch.float64, torch.float32):
        mechanism = h.Softmax(pattern, softcap=1.5, sink=sink.to(dtype).requires_grad_(), temperature=0.8)
        q, k, v = (x.to(dtype).requires_grad_() for x in draw(heads=(2, 1), n=40))
        if dtype == torch.float64:
            o = mechanism.matrix(q, k) @ v
        else:
            o = fused.attend(q, k, v, mechanism.rows(), pattern, None, mechanism.score_scale(16))
        grads = torch.autograd.grad(o, (q, k, v, mechanism.sink), draw(heads=(2, 2), n=40)[1].to(dtype))
        found[dtype] = [x.detach().double() for x in (o, *grads)]
    for x, y in zip(found[torch.float32], found[torch.float64], strict=True):
        assert distance(x, y) < 3e-6


@pytest.mark.parametrize("segments", [None, PACKED], ids=["alone", "packed"])
def test_the_adjoint(fused, segments):
    q, k, _ = draw(heads=(2, 1))
    a = h.Softmax(BIGBIRD).matrix(q, k, segments=segments)
    y = torch.randn(*a.shape[:-1], 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = fused.adjoint(q.float(), k.float(), y.float(), SoftmaxRows(), BIGBIRD, segments, 0.25)
    assert distance(got.double(), a.mT @ y) < 1e-6


def test_runs_are_bit_equal_whatever_the_strides(fused):
    attend, inputs = by_lists(fused, BIGBIRD), draw(heads=(1, 1), n=40)
    want = outcome(attend, inputs, torch.float32)
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for other in (inputs, spread):
        for x, y in zip(outcome(attend, other, torch.float32), want, strict=True):
            assert torch.equal(x, y)


def test_lists_made_without_gradients_serve_where_there_are(fused):
    listing._unsegmented.cache_clear()
    inputs = [x.float().requires_grad_() for x in draw(heads=(1, 1), n=40)]
    attend = by_lists(fused, BIGBIRD)
    with torch.inference_mode():
        first = attend(*inputs)
    out = attend(*inputs)
    assert torch.equal(out, first)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_a_pattern_without_a_hash_is_refused(fused):
    @dataclass
    class Loose(h.Pattern):
        def allows(self, i, j):
            return j <= i

    q, k, v = draw(n=12, dtype=torch.float32)
    for pattern in (Loose(), Loose() | h.Window(3)):
        assert "no hash" in " ".join(fused.objections(q, k, v, SoftmaxRows(), pattern, None, 1.0))


def test_the_dispatcher_says_who_takes_what():
    assert Reach.of(BIGBIRD) is None and Reach.of(FIXED) is None
    q, k, v = draw(n=12, dtype=torch.float32)
    told = h.backend.explain(h.Softmax(BIGBIRD), q, k, v)
    assert told.endswith("→ triton" if DEVICE == "cuda" else "→ torch") and "masked" not in told
