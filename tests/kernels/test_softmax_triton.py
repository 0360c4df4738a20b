"""Softmax over patterns in Triton (interpreted where there is no GPU), against the definition in float64."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.blocked.tiles import SoftmaxRows
from heedful.kernels.softmax.reach import Reach, are_runs, inside, intervals
from heedful.segments import visible

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LONGFORMER = h.Global((0, 1)) | h.Window(5, 5)
PATTERNS = [
    h.Full(),
    h.Causal(),
    h.Window(3),
    h.Window(3, 2),
    h.Window(2, 1, sinks=3),
    h.Window(0, 0, sinks=5),
    h.Blocks(4),
    h.Blocks(4) & h.Causal(),
    h.Blocks(4) & h.Window(2, 1),
    h.Blocks(2) & h.Blocks(4),
    LONGFORMER,
    LONGFORMER & h.Causal(),
    LONGFORMER & (h.Causal() | h.Window(0, 1)),
    h.Global((0, 1)),
    h.Global((0,)) & h.Causal(),
    h.Global((0, 1)) | h.Blocks(4),
    h.Causal() | h.Window(0, 3),
    h.Window(3, 3) | h.Window(1, 5),
    h.Window(3, 3, sinks=1) | h.Global((0, 1)),
]
IDS = torch.tensor([[0] * 5 + [3] * 9 + [-1] * 2 + [1] * 4, [-1] * 6 + [2] * 10 + [-1] * 4])
PAIR = torch.tensor([0] * 3 + [1] * 2), torch.tensor([0] * 9 + [1] * 8 + [2] * 3)


@pytest.fixture
def kernels(small_tiles):
    from heedful.kernels.softmax import fused

    return fused, small_tiles


def count(bounds, at, axis):
    """How often each pair lies in one of the two intervals."""
    lo, hi, start, stop = (x.unsqueeze(axis) for x in bounds.long().unbind(-2))
    return ((at >= lo) & (at < hi)).int() + ((at >= start) & (at < stop)).int()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_two_intervals_are_the_pattern(pattern):
    reach = Reach.of(pattern)
    m = 20
    for n, segments in [(20, None), (7, None), (1, None), (20, IDS), (7, IDS), (5, PAIR)]:
        found = intervals(reach, n, m, segments, torch.device("cpu"))
        want = visible(pattern, n, m, segments).int()
        i, j = torch.arange(n)[:, None], torch.arange(m)
        assert (count(found.rows, j, -1) == want).all()
        assert (count(found.keys, i, -2) == want).all()
        if not isinstance(segments, tuple):
            near = (j - i - (m - n) >= -3) & (j - i - (m - n) <= 1)
            assert (count(inside(found, n, m, -3, 1).rows, j, -1) == want * near).all()


def test_a_cap_far_above_the_scores_changes_little(kernels):
    """cap · tanh(x / cap) by exponentials alone loses the digits of a small x: 1e-6 here, more than x itself rounds."""
    inputs = [x.float() for x in draw(batch=(1,), n=24, d=16)]
    scale, cap = 0.01, 200.0
    truth = h.Softmax(h.Full(), scale=scale, softcap=cap).matrix(inputs[0].double(), inputs[1].double())
    found = kernels[0].attend(*inputs, SoftmaxRows(softcap=cap), h.Full(), None, scale)
    assert distance(found.double(), truth @ inputs[2].double()) < 4e-7


def test_the_adjoint_where_only_queries_and_segments_have_a_batch_axis(kernels):
    fused, _ = kernels
    q, k, y = draw(batch=(2, 3), keys=(1, 1), n=49, d=16)
    segments, pattern = segments_of("packed", 1), h.Window(9, sinks=2)
    y = y.expand(2, 3, -1, -1)
    a = h.Softmax(pattern).matrix(q, k, segments=segments)
    found = fused.adjoint(q.float(), k.float(), y.float(), SoftmaxRows(), pattern, segments, 16**-0.5)
    assert distance(found.double(), a.mT @ y) < 1e-6


def test_what_two_intervals_can_not_say():
    strange = [h.Strided(3), h.Blocks(4) | h.Window(2), h.Blocks(4) & h.Window(2, sinks=1), h.Global((2,))]
    strange += [h.Blocks(4) & h.Blocks(6), h.Window(3, 3) | (h.Global((0,)) & h.Causal()), h.SparseFixed(4)]
    assert [Reach.of(pattern) for pattern in strange] == [None] * len(strange)
    assert are_runs(IDS)
    ids = torch.tensor([0, 1, 0])
    assert not are_runs(ids)
    ids[2] = 1
    assert are_runs(ids)  # the same tensor, changed in place: looked at anew


def test_a_pattern_longer_than_its_keys():
    found = intervals(Reach.of(h.Full()), 9, 5, None, torch.device("cpu"))
    assert (count(found.rows, torch.arange(5), -1) == 1).all()
    assert (count(found.keys, torch.arange(9)[:, None], -2) == 1).all()
    assert found.first_rows == 0  # a row that sees five keys is not a long one


def draw(batch, n, d, *, keys=None, m=None, e=None, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    m, keys = m or n, keys or batch
    shapes = (*batch, n, d), (*keys, m, d), (*keys, m, e or d)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).to(DEVICE) for s in shapes]


def segments_of(name, axes):
    rows = {
        "packed": [[0] * 15 + [3] * 17 + [-1] * 3 + [1] * 14, [5] * 20 + [2] * 29],
        "padded": [[-1] * 9 + [0] * 40, [0] * 30 + [-1] * 19],
        "nothing": [[-1] * 49, [4] * 49],
    }[name]
    return torch.tensor(rows, device=DEVICE).view(2, *(1,) * axes, 49)


def outcome(function, inputs, segments, dtype):
    """Output and gradients, in float64."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    o = function(q, k, v, segments)
    g = torch.Generator().manual_seed(9)
    do = torch.randn(o.shape, generator=g, dtype=torch.float64).to(DEVICE)
    return [x.detach().double() for x in (o, *torch.autograd.grad(o, (q, k, v), do.to(dtype)))]


def dense(pattern):
    attend = h.Softmax(pattern)
    return lambda q, k, v, segments: attend.matrix(q, k, segments=segments) @ v


def by_kernel(fused, pattern):
    def attend(q, k, v, segments):
        inputs = q, k, v, SoftmaxRows(), pattern, segments, q.shape[-1] ** -0.5
        assert fused.objections(*inputs) == []
        return fused.attend(*inputs)

    return attend


def distance(got, want):
    assert got.shape == want.shape
    assert got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp(min=1e-9)).item()


CASES = {
    "window": (h.Window(20), dict(batch=(2,), n=49, d=16), None),
    "window both ways, sinks": (h.Window(9, 5, sinks=3), dict(batch=(1,), n=63, d=16), None),
    "many sinks": (h.Window(2, sinks=35), dict(batch=(1,), n=63, d=8), None),
    "blocks": (h.Blocks(12), dict(batch=(1,), n=63, d=16), None),
    "causal blocks, odd widths": (h.Blocks(24) & h.Causal(), dict(batch=(1,), n=49, d=5, e=19), None),
    "longformer": (LONGFORMER, dict(batch=(1,), n=63, d=16), None),
    "causal": (h.Causal(), dict(batch=(1,), n=49, d=16), None),
    "more queries than keys": (h.Full(), dict(batch=(1,), n=40, m=17, d=16), None),
    "few keys, in parts": (h.Full(), dict(batch=(1,), n=200, m=17, d=16), None),
    "after a cache": (h.Window(9, sinks=3), dict(batch=(1,), n=20, m=63, d=16), None),
    "global rows after a cache": (h.Global((0, 1, 2)) | h.Window(4, 4), dict(batch=(1,), n=61, m=63, d=16), None),
    "one query": (h.Window(20), dict(batch=(2,), n=1, m=49, d=16), None),
    "shared heads": (h.Window(9, sinks=3), dict(batch=(2, 2), keys=(2, 1), n=30, d=16), None),
    "packed": (h.Window(7), dict(batch=(2, 1), n=49, d=16), "packed"),
    "packed, sinks": (h.Window(4, sinks=3), dict(batch=(2, 1), n=49, d=16), "packed"),
    "packed longformer": (LONGFORMER, dict(batch=(2, 1), n=49, d=16), "packed"),
    "packed blocks after a cache": (h.Blocks(6), dict(batch=(2, 1), n=30, m=49, d=16), "packed"),
    "padded, shared heads": (h.Causal(), dict(batch=(2, 1, 2), keys=(2, 1, 1), n=49, d=8), "padded"),
    "nothing to see": (h.Causal(), dict(batch=(2, 1), n=49, d=8), "nothing"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_definition_and_so_are_its_gradients(kernels, fenced, case):
    pattern, sizes, name = CASES[case]
    inputs = draw(**sizes)
    segments = None if name is None else segments_of(name, len(sizes["batch"]) - 1)
    want = outcome(dense(pattern), inputs, segments, torch.float64)
    got = outcome(by_kernel(kernels[0], pattern), inputs, segments, torch.float32)
    for x, y in zip(got, want, strict=True):
        assert distance(x, y) < 2e-6


@pytest.mark.parametrize("case", ["window both ways, sinks", "longformer", "shared heads", "packed, sinks"])
def test_adjoint_and_statistics(kernels, case):
    fused = kernels[0]
    pattern, sizes, name = CASES[case]
    q, k, _ = draw(**sizes)
    segments = None if name is None else segments_of(name, len(sizes["batch"]) - 1)
    a = h.Softmax(pattern).matrix(q, k, segments=segments)
    y = torch.randn(*a.shape[:-1], 300, dtype=torch.float64, device=DEVICE)  # wider than a program's columns
    inputs = q.float(), k.float()
    rest = SoftmaxRows(), pattern, segments, q.shape[-1] ** -0.5
    assert distance(fused.adjoint(*inputs, y.float(), *rest).double(), a.mT @ y) < 1e-6
    assert distance(fused.attend(*inputs, y[..., : k.shape[-2], :].float(), *rest), a @ y[..., : k.shape[-2], :]) < 1e-6
    lse, square, entropy, largest, place = fused.row_statistics(*inputs, *rest)
    assert distance(square, a.square().sum(-1)) < 1e-6
    assert distance(entropy, -torch.special.xlogy(a, a).sum(-1)) < 1e-6
    assert distance(largest, a.amax(-1)) < 1e-6
    seen = a.sum(-1) > 0
    assert torch.equal(place.long(), torch.where(seen, a.argmax(-1), -1))
    assert (lse == torch.inf).eq(~seen).all()


@pytest.mark.parametrize("d, e", [(40, 24), (8, 80), (96, 16)])
def test_widths_that_are_no_powers_of_two(kernels, fenced, d, e):
    pattern = h.Window(9, sinks=3)
    inputs = draw(batch=(1, 2), keys=(1, 1), n=35, d=d, e=e)
    want = outcome(dense(pattern), inputs, None, torch.float64)
    attend = by_kernel(kernels[0], pattern)
    odd = [torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]] for x in inputs]  # rows at odd distances
    for other in (inputs, odd):
        for x, y in zip(outcome(attend, other, None, torch.float32), want, strict=True):
            assert distance(x, y) < 2e-6


@pytest.mark.parametrize("pattern", [h.Window(9, sinks=2), LONGFORMER, h.Causal()], ids=str)
@pytest.mark.parametrize("softcap, temperature", [(None, 1.0), (1.5, 0.8)])
def test_a_sink_and_a_cap(kernels, pattern, softcap, temperature):
    """With gradients in the sink too, one logit a query head."""
    inputs = draw(batch=(1, 3), keys=(1, 1), n=24, d=16)
    found = {}
    for dtype in (torch.float64, torch.float32):
        sink = torch.tensor([0.3, -1.0, 2.0], dtype=dtype, device=DEVICE, requires_grad=True)
        mechanism = h.Softmax(pattern, softcap=softcap, sink=sink, temperature=temperature)

        def exactly(q, k, v, segments, mechanism=mechanism):
            return mechanism.matrix(q, k) @ v

        def here(q, k, v, segments, mechanism=mechanism):
            args = q, k, v, mechanism.rows(), pattern, None, mechanism.score_scale(q.shape[-1])
            assert kernels[0].objections(*args) == []
            return kernels[0].attend(*args)

        function = exactly if dtype == torch.float64 else here
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        o = function(q, k, v, None)
        do = draw(batch=(1, 3), n=24, d=16, seed=3)[0].to(dtype)
        found[dtype] = [x.detach().double() for x in (o, *torch.autograd.grad(o, (q, k, v, mechanism.sink), do))]
    for x, y in zip(found[torch.float32], found[torch.float64], strict=True):
        assert distance(x, y) < 3e-6


def test_keys_split_among_calls_are_put_together_again(kernels, monkeypatch):
    """Residue classes of tokens as views: nothing is copied, and what comes back lies as q does."""
    fused, launches = kernels
    monkeypatch.setattr(launches, "aligned", lambda x: x)
    q, k, v, do = (*draw(batch=(2,), n=48, d=16), draw(batch=(2,), n=48, d=16, seed=5)[0])

    def classes(x):
        return x.unflatten(-2, (16, 3)).transpose(1, 2)

    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    views = [classes(x) for x in inputs]
    o, lse = fused.forward_with_lse(*views, h.Causal(), 0.25)
    exact = [x.requires_grad_() for x in (q, k, v)]
    scores = 0.25 * classes(q) @ classes(k).mT
    scores = scores.masked_fill(~visible(h.Causal(), 16, 16, None, DEVICE), -torch.inf)
    want = scores.softmax(-1) @ classes(v)
    assert o.stride() == views[0].stride()
    assert distance(o, want.detach()) < 1e-6
    assert distance(lse, scores.logsumexp(-1).detach()) < 1e-6
    grads = fused.backward_from(*views, o, lse, classes(do.float()), h.Causal(), 0.25)
    for x, y, view in zip(grads, torch.autograd.grad(want, exact, classes(do)), views, strict=True):
        assert x.stride() == view.stride()
        assert distance(x, classes(y)) < 2e-6


def test_parts_of_a_row_add_up(kernels):
    """A window and what lies before it, merged by their log-sum-exps, give the whole row's output and gradients."""
    fused, _ = kernels
    q, k, v = draw(batch=(2,), n=40, d=16)
    want = outcome(dense(h.Causal()), (q, k, v), None, torch.float64)
    near = q.float(), k.float(), v.float(), h.Window(7), 0.25
    far = q.float()[:, 8:], k.float()[:, :-8], v.float()[:, :-8], h.Causal(), 0.25
    o, lse = fused.forward_with_lse(*near)
    more, more_lse = fused.forward_with_lse(*far)
    whole = lse.clone()
    whole[:, 8:] = torch.logaddexp(lse[:, 8:], more_lse)
    o = o * (lse - whole).exp()[..., None]
    o[:, 8:] += more * (more_lse - whole[:, 8:]).exp()[..., None]
    assert distance(o.double(), want[0]) < 1e-6
    g = torch.Generator().manual_seed(9)
    do = torch.randn(o.shape, generator=g, dtype=torch.float64).to(DEVICE).float()
    grads = fused.backward_from(*near[:3], o, whole, do, *near[3:])
    others = fused.backward_from(*far[:3], o[:, 8:], whole[:, 8:], do[:, 8:], *far[3:])
    grads[0][:, 8:] += others[0]
    for x, y in zip(grads[1:], others[1:], strict=True):
        x[:, :-8] += y
    for x, y in zip(grads, want[1:], strict=True):
        assert distance(x.double(), y) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_good_as_the_naive_way(kernels, dtype):
    pattern = h.Window(30, sinks=3)
    inputs = [x.double() for x in draw(batch=(1,), n=80, d=32, dtype=dtype)]
    want = outcome(dense(pattern), inputs, None, torch.float64)
    naive = outcome(dense(pattern), inputs, None, dtype)
    got = outcome(by_kernel(kernels[0], pattern), inputs, None, dtype)
    for x, y, truth in zip(got, naive, want, strict=True):
        assert distance(x, truth) <= 2 * distance(y, truth)


def test_what_stands_in_padding_goes_nowhere(kernels):
    pattern, segments = h.Window(6, 3, sinks=2), segments_of("padded", 0)[:1]
    inputs = draw(batch=(1,), n=49, d=16)
    attend = by_kernel(kernels[0], pattern)
    clean = outcome(attend, inputs, segments, torch.float32)
    dirty = [x.masked_fill(segments[..., None] < 0, torch.nan) for x in inputs]
    for x, y in zip(outcome(attend, dirty, segments, torch.float32), clean, strict=True):
        assert torch.equal(x, y)


def test_strides_do_not_matter_and_runs_are_bit_equal(kernels):
    attend = by_kernel(kernels[0], h.Window(9, sinks=3))
    inputs = draw(batch=(1, 2), n=20, d=16)
    want = outcome(attend, inputs, None, torch.float32)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    for other in (inputs, swapped, spread):
        for x, y in zip(outcome(attend, other, None, torch.float32), want, strict=True):
            assert torch.equal(x, y)


def test_large_scores_do_not_overflow(kernels):
    q, k, v = draw(batch=(1,), n=35, d=16)
    inputs = q * 100, k * 100, v
    got = by_kernel(kernels[0], h.Window(9))(*(x.float() for x in inputs), None)
    assert distance(got.double(), dense(h.Window(9))(*(x.float().double() for x in inputs), None)) < 1e-4


def test_what_it_cannot_take_it_says(kernels):
    fused, _ = kernels
    q, k, v = draw(batch=(2, 2), n=12, d=8, dtype=torch.float32)

    def said(*, rows=SoftmaxRows(), pattern=h.Window(3), segments=None, scale=1.0, inputs=(q, k, v)):  # noqa: B008
        return " ".join(fused.objections(*inputs, rows, pattern, segments, scale))

    assert said() == ""
    assert said(pattern=h.Strided(3)) == ""  # listed
    assert "more than a window" in " ".join(fused.about_intervals(q, k, v, h.Strided(3), None))
    assert "positive scale" in said(scale=-1.0)
    assert said(rows=SoftmaxRows(softcap=1.0, sink=torch.zeros(2, device=DEVICE))) == ""
    assert "sink has more heads" in said(rows=SoftmaxRows(sink=torch.zeros(3, 2, 2, device=DEVICE)))
    assert "no bias" in said(rows=SoftmaxRows(bias=torch.zeros(12, 12)))
    assert "not torch.float64" in said(inputs=(q.double(), k.double(), v.double()))
    assert "empty" in said(inputs=(q[..., :0, :], k, v))
    assert "wider than 256" in said(inputs=(q.repeat(1, 1, 1, 40), k.repeat(1, 1, 1, 40), v))
    apart = torch.tensor([0] * 5 + [1] * 3 + [0] * 4, device=DEVICE)
    assert said(segments=apart) == ""
    assert "interrupted" in " ".join(fused.about_intervals(q, k, v, h.Window(3), apart))
    long = torch.empty(1, 131073, 8, device="meta")
    assert "17180131329 pairs" in " ".join(fused._about_lists(long, long, h.Strided(3), None))
    assert fused._about_lists(q, k, h.Strided(3), apart) == []
    each = torch.zeros(2, 2, 12, dtype=torch.long, device=DEVICE)
    assert said(segments=each) == ""
    assert "share keys" in said(segments=each, inputs=(q, k[:, :1], v[:, :1]))


def test_the_dispatcher_knows_of_it():
    q, k, v = draw(batch=(2,), n=12, d=8, dtype=torch.float32)
    told = h.backend.explain(h.Softmax(h.Window(3)), q, k, v)
    assert "softmax/triton: " in told
    assert told.endswith("→ triton" if ON_GPU else "→ torch")
