"""The blocked kernel at tile sizes small enough that every branch of the scheduler runs."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.blocked import schedule
from heedful.kernels.blocked import tiles as scheduler

PATTERNS = [
    h.Full(),
    h.Causal(),
    h.Window(7),
    h.Window(5, 3, sinks=2),
    h.Window(9, sinks=3),
    h.Strided(4) & h.Causal(),
    h.SparseFixed(6, 2) & h.Causal(),
    h.Blocks(8),
    h.Global((0, 30)) | h.Window(3, 3),
    h.RandomBlocks(4, 2) | h.Window(2),
    h.RandomBlocks(4, 1) & h.Causal(),
    h.Tree([-1, *(child // 2 for child in range(40))], 2),
]
PACKED = torch.tensor([[0] * 12 + [1] * 20 + [-1] * 9, [5] * 3 + [-1] * 2 + [2] * 36])[:, None]
INTERLEAVED = torch.tensor([[0, 1, -1] * 13 + [0, 1], [3] * 41])[:, None]


@pytest.fixture(params=[(128, 16, 1 << 21), (8, 2, 1 << 21), (8, 2, 200), (16, 4, 30)], ids=str)
def sizes(request, monkeypatch):
    rows, fewest, budget = request.param
    monkeypatch.setattr(scheduler, "ROWS", rows)
    monkeypatch.setattr(scheduler, "FEWEST", fewest)
    monkeypatch.setattr(scheduler, "BUDGET", budget)


def inputs(n=41, m=41, batch=(2, 3), seed=0):
    torch.manual_seed(seed)
    shapes = (*batch, n, 4), (*batch, m, 4), (*batch, m, 5)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_agrees(mechanism, q, k, v, segments):
    out, dense = mechanism(q, k, v, segments=segments), mechanism.matrix(q, k, segments=segments)
    torch.testing.assert_close(mechanism.materialise(q, k, segments=segments), dense.detach())
    assert torch.allclose(out, dense @ v, rtol=0, atol=1e-12)
    grad = torch.randn_like(out)
    wanted = [q, k, v, *mechanism.parameters()]
    pairs = zip(torch.autograd.grad(out, wanted, grad), torch.autograd.grad(dense @ v, wanted, grad), strict=True)
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-11)
    adjoint = mechanism.operator(q.detach(), k.detach(), segments=segments).mT @ grad
    assert torch.allclose(adjoint, dense.detach().mT @ grad, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("segments", [None, PACKED, INTERLEAVED], ids=["plain", "packed", "interleaved"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_schedule_gives_the_definition(pattern, segments):
    with h.backend("torch"):
        assert_agrees(h.Softmax(pattern), *inputs(), segments)
        assert_agrees(h.Quadratic(pattern=pattern), *inputs(), segments)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("pattern", PATTERNS[:-1], ids=repr)
def test_queries_after_a_cache_are_the_last_positions(pattern):
    with h.backend("torch"):
        assert_agrees(h.Softmax(pattern), *inputs(n=13), None)
        assert_agrees(h.Softmax(pattern), *inputs(n=13), PACKED)


class Slope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64))

    def forward(self, i, j):
        return -self.slope[:, None, None] * (i - j).abs()


def parameter(*shape):
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("segments", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {"bias": Slope()},
        {"bias": parameter(3, 41, 41)},
        {"bias": parameter(2, 1, 1, 41)},
        {"bias": parameter(41, 1), "temperature": 2.0},
        {"softcap": 1.5, "temperature": 0.5},
        {"sink": parameter(3)},
        {"sink": parameter(3), "softcap": 2.0, "bias": Slope(), "temperature": 0.7, "scale": 0.3},
    ],
    ids=lambda options: "+".join(options),
)
def test_score_modifiers_and_their_gradients(options, segments):
    assert_agrees(h.Softmax(h.Window(9, sinks=2), **options), *inputs(), segments)


@pytest.mark.usefixtures("sizes")
def test_grouped_queries_share_keys_without_copies():
    q, k, v = inputs(batch=(2, 2, 3))
    k, v = (x[:, :, :1].detach().requires_grad_() for x in (k, v))
    assert_agrees(h.Softmax(h.Window(9)), q, k, v, None)


@pytest.mark.usefixtures("sizes")
def test_a_bias_of_minus_infinity_leaves_zeros_and_zero_gradients():
    bias = torch.zeros(41, 41, dtype=torch.float64)
    bias[5] = -torch.inf
    q, k, v = inputs()
    out = h.Softmax(h.Full(), bias=bias)(q, k, v)
    out.sum().backward()
    assert out[..., 5, :].eq(0).all()
    assert q.grad[..., 5, :].eq(0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.usefixtures("sizes")
def test_nan_in_padding_reaches_neither_output_nor_gradient():
    q, k, v = inputs()
    with torch.no_grad():
        clean = h.Softmax(h.Window(9))(q, k, v, segments=PACKED)
        for x in (q, k, v):
            x.masked_fill_((PACKED < 0)[..., None], torch.nan)
    out = h.Softmax(h.Window(9))(q, k, v, segments=PACKED)
    out.sum().backward()
    assert torch.equal(out, clean)
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert x.grad.masked_select((PACKED < 0)[..., None].expand_as(x)).eq(0).all()


def test_nan_in_padding_reaches_neither_adjoint_nor_matrix():
    q, k, _ = (x.detach() for x in inputs())
    y = torch.randn(2, 3, 41, 5, dtype=torch.float64)
    clean = h.Softmax(h.Window(9)).operator(q, k, segments=PACKED)
    expected = clean.mT @ y.masked_fill((PACKED < 0)[..., None], 0), clean.materialise()
    for x in (q := q.clone(), k := k.clone(), y):
        x.masked_fill_((PACKED < 0)[..., None], torch.nan)
    dirty = h.Softmax(h.Window(9)).operator(q, k, segments=PACKED)
    assert torch.equal(dirty.mT @ y, expected[0]) and torch.equal(dirty.materialise(), expected[1])


def test_work_follows_the_pattern():
    def visited(pattern, n=4096):
        found = schedule.tiles(pattern, (), n, n, None, torch.device("cpu"))
        return sum((tile.rows.stop - tile.rows.start) * len(tile.cols) for tile in found)

    for pattern, slack in [
        (h.Window(512), 1.3),
        (h.Window(512, sinks=4), 1.4),
        (h.Causal(), 1.1),
        (h.Blocks(64), 1.01),
    ]:
        assert visited(pattern) <= slack * pattern.pairs(4096, 4096)
    spread = h.Global((1000, 2000, 3000)) | h.Window(64, 64)
    assert visited(spread) <= 2.5 * spread.pairs(4096, 4096)


def test_tiles_that_are_shifts_of_each_other_share_one_small_mask():
    found = list(schedule.tiles(h.Causal(), (), 2048, 2048, None, torch.device("cpu")))
    assert len({id(tile.mask) for tile in found}) == 1
    assert found[-1].mask.visible.shape[-1] <= scheduler.ROWS


def test_a_plain_function_with_a_gradient_is_refused():
    slope = torch.ones((), requires_grad=True)
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"nn\.Module"):
        h.Softmax(h.Causal(), bias=lambda i, j: -slope * (i - j))(q, k, v)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_cached_tiles_are_those_of_the_schedule(pattern):
    cpu = torch.device("cpu")
    cached = schedule.cached_tiles(pattern, (2, 3), 41, 41, scheduler.size_on(cpu))
    fresh = list(schedule.tiles(pattern, (2, 3), 41, 41, None, cpu))
    assert cached is not None and len(cached) == len(fresh)
    for one, two in zip(cached, fresh, strict=True):
        assert (one.batch, one.rows, one.clear) == (two.batch, two.rows, two.clear)
        assert torch.equal(one.cols.index, two.cols.index) and torch.equal(one.i, two.i) and torch.equal(one.j, two.j)
        assert (one.mask is None) == (two.mask is None)
        assert one.mask is None or torch.equal(one.mask.visible, two.mask.visible)


def test_a_second_call_makes_no_tiles(monkeypatch):
    attend, (q, k, v) = h.Softmax(h.Window(11, sinks=2)), inputs(n=37, m=43)
    first = attend(q, k, v)
    monkeypatch.setattr(h.Window, "spans", None)
    monkeypatch.setattr(h.Window, "allows", None)
    assert torch.equal(attend(q, k, v), first)


def test_tiles_cached_in_inference_mode_serve_gradients():
    # the first queries see nothing: autograd keeps the part of the mask that says so
    attend, (q, k, v) = h.Softmax(h.Summaries(9) & h.Causal(), softcap=5.0), inputs(n=43, m=43)
    with torch.inference_mode(), h.backend("torch"):
        attend(q, k, v)
    with h.backend("torch"):
        given = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    wanted = torch.autograd.grad((attend.matrix(q, k) @ v).square().sum(), (q, k, v))
    torch.testing.assert_close(given, wanted)


def test_a_schedule_with_large_masks_is_not_cached():
    size = scheduler.size_on(torch.device("cpu"))
    assert schedule.cached_tiles(h.Tree([-1] + [0] * 1499, 2), (), 1500, 1500, size) is None
    assert schedule.cached_tiles(h.Window(512, sinks=4), (), 1500, 1500, size) is not None


def test_a_pattern_without_a_hash_runs():
    class Unhashable(h.Window):
        __hash__ = None

    q, k, v = inputs()
    with h.backend("torch"):
        assert torch.equal(h.Softmax(Unhashable(7))(q, k, v), h.Softmax(h.Window(7))(q, k, v))
