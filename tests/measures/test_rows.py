"""Row statistics against the dense matrix in float64, for every mechanism, pattern and kind of segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heedful as h
from heedful.column_slabs import Trimmed
from heedful.kernels.blocked import tiles as scheduler
from heedful.kernels.row_statistics import reference
from heedful.kernels.row_statistics.sums import Request
from heedful.measures.key_index import Places
from heedful.segments import resolve, visible

N, D, HEADS = 41, 8, 2
OFFSETS = (-3, -1, 0, 1, 2)
PATTERNS = [
    h.Full(),
    h.Causal(),
    h.Window(7),
    h.Window(5, 3, sinks=2),
    h.Strided(4) & h.Causal(),
    h.Strided(7) & h.Window(15, 8),  # 41 = 5 · 7 + 6: classes of two lengths
    h.SparseFixed(6, 2) & h.Causal(),
    h.Blocks(8),
    h.Global((0, 30)) | h.Window(3, 3),
    h.RandomBlocks(4, 1) & h.Causal(),  # some queries see nothing
]
PACKED = torch.tensor([[0] * 12 + [1] * 20 + [-1] * 9, [5] * 3 + [-1] * 2 + [2] * 36])[:, None]
INTERLEAVED = torch.tensor([[0, 1, -1] * 13 + [0, 1], [3] * 41])[:, None]
SEGMENTS = {"plain": None, "packed": PACKED, "interleaved": INTERLEAVED}


def inputs(n=N, m=N, batch=(2, HEADS), seed=0):
    torch.manual_seed(seed)
    return torch.randn(*batch, n, D, dtype=torch.float64), torch.randn(*batch, m, D, dtype=torch.float64)


def definition(A, sees, segments, first=4, last=1, window=(2, 3), sink=False):
    """Every statistic from the whole matrix, entry by entry."""
    n, m = A.shape[-2:]
    ids, key_ids, i, j = (x.expand(*A.shape[:-2], -1) for x in resolve(segments, n, m))
    same = (ids[..., None] == key_ids[..., None, :]) & (ids[..., None] >= 0)
    offset, length = j[..., None, :] - i[..., None], same.sum(-1, keepdim=True)
    size = torch.where(same, A.abs(), 0)
    mass = A.abs().sum(-1)
    p = A.abs() / mass.clamp(min=1e-300)[..., None]
    if sink:  # weights as they are, and what the sink takes as one more outcome
        p = torch.cat([A, (1 - mass).clamp(min=0)[..., None]], -1) * (mass > 0)[..., None]
    return {
        "total": A.sum(-1),
        "mass": mass,
        "square": (A * A).sum(-1),
        "entropy": torch.special.entr(p).sum(-1),
        "largest": A.abs().amax(-1),
        "visible": sees.expand_as(A).sum(-1),
        "at_offset": torch.stack([(size * (offset == o)).sum(-1) for o in OFFSETS], -1),
        "first": (size * (j < first)[..., None, :]).sum(-1),
        "last": (size * (j[..., None, :] >= length - last)).sum(-1),
        "inside": (size * ((offset >= -window[0]) & (offset <= window[1]))).sum(-1),
    }


def assert_agrees(mechanism, q, k, segments, atol=1e-12):
    rows = h.row_statistics(mechanism.operator(q, k, segments=segments), offsets=OFFSETS, window=(2, 3))
    A = mechanism.matrix(q, k, segments=segments).detach()
    sees = visible(mechanism.pattern, *A.shape[-2:], segments)
    if isinstance(mechanism, h.Mixture):  # each head by its own pattern
        heads = [visible(part.pattern, *A.shape[-2:], segments) for part in mechanism.parts]
        sees = torch.cat([head.expand(len(A), 1, -1, -1) for head in heads], 1)
    sink = isinstance(mechanism, h.Softmax) and mechanism.sink is not None
    for name, wanted in definition(A, sees, segments, sink=sink).items():
        torch.testing.assert_close(
            getattr(rows, name), wanted, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )
    blind = A.abs().sum(-1) == 0
    assert bool((rows.where[blind] == -1).all())
    found = A.gather(-1, rows.where.clamp(min=0)[..., None])[..., 0].abs()
    torch.testing.assert_close(found[~blind], rows.largest[~blind], rtol=0, atol=atol)
    torch.testing.assert_close(rows.frobenius, torch.linalg.matrix_norm(A), rtol=0, atol=1e-11)
    return rows, A


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("name", h.CATALOG)
def test_every_mechanism_has_the_statistics_of_its_matrix(name, segments):
    mechanism = h.CATALOG[name].sample(d=D, heads=HEADS, length=N).double()
    assert_agrees(mechanism, *inputs(), segments, atol=1e-9)


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_pattern_and_every_schedule(pattern, segments, monkeypatch):
    for rows, fewest, budget in ((128, 16, 1 << 21), (8, 2, 200), (16, 4, 60)):
        monkeypatch.setattr(scheduler, "ROWS", rows)
        monkeypatch.setattr(scheduler, "FEWEST", fewest)
        monkeypatch.setattr(scheduler, "BUDGET", budget)
        assert_agrees(h.Softmax(pattern), *inputs(), segments)
        if budget > 100:
            assert_agrees(h.Quadratic(torch.tanh, pattern), *inputs(), segments)


def test_signed_rows_have_the_entropy_of_their_absolute_values():
    q, k = inputs()
    mechanism = h.Quadratic(h.no_activation, h.Full(), normalise=None)
    rows, A = assert_agrees(mechanism, q, k, None)
    assert bool((A < 0).any()) and bool((rows.total < 0).any())
    scaled = h.row_statistics(h.Quadratic(h.no_activation, h.Full(), scale=100.0, normalise=None).operator(q, k))
    torch.testing.assert_close(rows.entropy, scaled.entropy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("segments", [None, PACKED], ids=["plain", "packed"])
def test_log_sum_exp_is_that_of_the_visible_scores(segments):
    q, k = inputs()
    rows = h.row_statistics(h.Softmax(h.Causal(), 0.7).operator(q, k, segments=segments))
    hidden = ~visible(h.Causal(), N, N, segments)
    wanted = (0.7 * q @ k.mT).masked_fill(hidden, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(rows.log_sum_exp, wanted, rtol=0, atol=1e-12)
    assert h.row_statistics(h.Linear().operator(q, k)).log_sum_exp is None


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("sink", [[0.5, 3.0], [-100.0, 100.0]], ids=["mild", "extreme"])
def test_a_sink_logit_takes_mass_and_is_part_of_the_log_sum_exp(sink):
    q, k = inputs()
    sink = torch.tensor(sink, dtype=torch.float64)
    mechanism = h.Softmax(h.Causal(), temperature=0.5, sink=sink)
    rows, _ = assert_agrees(mechanism, q, k, None)
    logits = (q @ k.mT * D**-0.5 / 0.5).masked_fill(~visible(h.Causal(), N, N, None), -torch.inf)
    wanted = torch.logaddexp(logits.logsumexp(-1), sink[:, None] / 0.5)
    torch.testing.assert_close(rows.log_sum_exp, wanted, rtol=1e-13, atol=1e-12)


def test_the_sink_of_a_softmax_is_one_more_outcome_of_a_row():
    """Logits of 0 on i keys and a sink of log c: weights 1 / (i + c), and c / (i + c) goes nowhere."""
    c, i = 3.0, torch.arange(1, 7, dtype=torch.float64)
    x = torch.zeros(6, 4, dtype=torch.float64)
    op = h.Softmax(h.Causal(), sink=torch.tensor(c, dtype=torch.float64).log()).operator(x, x)
    rows = h.row_statistics(op, first=1)
    torch.testing.assert_close(rows.total, i / (i + c))
    torch.testing.assert_close(rows.largest, 1 / (i + c))
    wanted = (i + c).log() - c / (i + c) * torch.tensor(c).double().log()
    torch.testing.assert_close(rows.entropy, wanted, rtol=1e-14, atol=0)
    torch.testing.assert_close(h.entropy(op), wanted, rtol=1e-14, atol=0)
    torch.testing.assert_close(rows.perplexity, wanted.exp())
    torch.testing.assert_close(h.sink_mass(op, 1), (1 / (i + c))[1:].mean())


def test_a_sink_that_takes_next_to_nothing_or_next_to_all():
    x = torch.zeros(4, 4, dtype=torch.float64)
    for sink, shown in ((-50.0, h.Softmax(h.Causal()).operator(x, x)), (50.0, None)):
        found = h.entropy(h.Softmax(h.Causal(), sink=torch.tensor(sink).double()).operator(x, x))
        wanted = h.entropy(shown) if shown is not None else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-15)


def test_bias_and_softcap_reach_the_statistics():
    q, k = inputs()
    bias = torch.randn(N, N, dtype=torch.float64)
    bias[5] = -torch.inf
    bias[7, :6] = -torch.inf
    rows, _ = assert_agrees(h.Softmax(h.Causal(), bias=bias, softcap=2.0), q, k, None)
    assert rows.log_sum_exp[0, 0, 5] == -torch.inf and rows.entropy[0, 0, 5] == 0
    assert_agrees(h.Softmax(h.Full(), bias=lambda i, j: -0.1 * (i - j).abs()), q, k, PACKED)


@pytest.mark.usefixtures("annotations_enforced")
def test_grouped_queries_and_queries_after_a_cache():
    q, k = inputs(n=13, batch=(2, 1, 3))[0], inputs(batch=(2, 1, 1))[1]
    for mechanism in (h.Softmax(h.Window(9, sinks=3)), h.Linear(), h.Quadratic()):
        assert_agrees(mechanism, q, k, None)
        assert_agrees(mechanism, q, k, PACKED[:, None])


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("n", [7, 12])
def test_one_segment_is_a_packed_row_of_one(n):
    """Without segments the keys that are asked for are kept from call to call, by all that they depend on."""
    q, k = (torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length)) for length in (n, 12))
    segments = torch.zeros(n, dtype=torch.long), torch.zeros(12, dtype=torch.long)
    for offsets, first, last in (((-1, 0, 1), 4, 1), ((-1, 0, 1), 3, 2), ((2, -3), 3, 2), ((-1, 0, 1), 4, 1)):
        asked = dict(offsets=offsets, first=first, last=last)
        plain, packed = h.Softmax().operator(q, k), h.Softmax().operator(q, k, segments=segments)
        assert plain.is_one_segment and not packed.is_one_segment
        found, want = (h.row_statistics(op, **asked) for op in (plain, packed))
        for name, x in vars(want).items():
            assert torch.equal(getattr(found, name), x) if isinstance(x, torch.Tensor) else getattr(found, name) == x
        for one, two in zip(plain.mT.layout, packed.mT.layout, strict=True):
            assert torch.equal(one, two)


def test_cross_attention_with_a_pair_of_segments():
    q, k = inputs(n=11, m=17, batch=(2,))
    pair = torch.tensor([[0] * 5 + [1] * 6, [0] * 11]), torch.tensor([[0] * 9 + [1] * 8, [0] * 10 + [-1] * 7])
    for mechanism in (h.Softmax(h.Full()), h.Linear(pattern=h.Full())):
        assert_agrees(mechanism, q, k, pair)
    assert_agrees(h.Softmax(h.Full()), *inputs(n=30, m=17), None)


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 9)])
def test_empty_and_single_rows(n, m):
    q, k = torch.randn(2, n, 4), torch.randn(2, m, 4)
    for mechanism in (h.Softmax(h.Full()), h.Linear(pattern=h.Full()), h.Quadratic(pattern=h.Full())):
        rows = h.row_statistics(mechanism.operator(q, k), window=1)
        assert rows.total.shape == (2, n) and rows.at_offset.shape == (2, n, 3)
        if m == 0:
            assert bool((rows.where == -1).all()) and float(rows.mass.sum()) == 0
        assert h.entropy(mechanism.operator(q, k)).shape == (2, n)
        assert torch.isfinite(h.sink_mass(mechanism.operator(q, k))).all()


def test_large_logits_and_one_hot_rows():
    q, k = inputs()
    rows, _ = assert_agrees(h.Softmax(h.Causal(), scale=1e4), q, k, None)
    assert float(rows.entropy.max()) < 1e-3  # the gap between the two largest scores is some 1e3
    exact = h.row_statistics(h.FixedPattern("previous").operator(q, k))
    assert float(exact.entropy.abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", [h.Softmax(), h.Quadratic(h.no_activation), h.Linear()], ids=repr)
def test_low_precision_errs_no_more_than_the_dense_matrix_in_it(dtype, mechanism):
    q, k = (x.to(dtype) for x in inputs(n=200, m=200))
    A = mechanism.matrix(q.double(), k.double())
    naive = mechanism.matrix(q, k)
    rows = h.row_statistics(mechanism.operator(q, k))
    assert rows.total.dtype == torch.float32
    for ours, exact, theirs in (
        (rows.mass, A.abs().sum(-1), naive.double().abs().sum(-1)),
        (rows.square, A.square().sum(-1), naive.double().square().sum(-1)),
        (
            rows.entropy,
            *(torch.special.entr(x / x.sum(-1, keepdim=True)).sum(-1) for x in (A.abs(), naive.double().abs())),
        ),
    ):
        floor = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert float((ours.double() - exact).abs().max()) <= max(2 * float((theirs - exact).abs().max()), floor)


@pytest.mark.parametrize("segments", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("rows", [8, 128])
def test_bands_hold_what_stands_between_two_offsets(rows, segments, monkeypatch):
    monkeypatch.setattr(scheduler, "ROWS", rows)
    monkeypatch.setattr(scheduler, "BUDGET", 2000)
    q, k = inputs()
    X = torch.randn(N, 2, dtype=torch.float64)
    bands = ((None, None), (None, -2), (2, None), (-3, 20), (-20, -15), (0, 0), (4, 1))
    i, j = (x[..., None, :] for x in resolve(segments, N, N)[2:])
    offset = j - i.mT
    sink = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for mechanism in (h.Softmax(h.Causal(), sink=sink), h.Quadratic(h.no_activation, h.Window(9, 4)), h.Linear()):
        sums = mechanism.operator(q, k, segments=segments).row_sums(Request(bands=bands, columns=X))
        A = mechanism.matrix(q, k, segments=segments)
        for at, (least, most) in enumerate(bands):
            inside = (offset >= (-N if least is None else least)) & (offset <= (N if most is None else most))
            part = A * inside
            for name, wanted in (
                ("band_mass", part.abs().sum(-1)),
                ("band_dot", part @ X),
            ):
                found = getattr(sums, name).select(3, at)
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11, msg=f"{name} {bands[at]}")


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_a_pass_leaves_the_matrix_its_column_sums_and_what_was_seen(pattern, segments, monkeypatch):
    q, k = inputs()
    targets = torch.randint(-1, N, (2, 1, N, 6), generator=torch.Generator().manual_seed(0))
    sees = visible(pattern, N, N, segments).expand(2, HEADS, N, N)
    for budget in (1 << 21, 300):
        monkeypatch.setattr(scheduler, "BUDGET", budget)
        for mechanism in (h.Softmax(pattern), h.Quadratic(h.no_activation, pattern, normalise=None)):
            A = mechanism.matrix(q, k, segments=segments)
            into = torch.full((2, HEADS, N, N), torch.nan, dtype=torch.float64)  # room, whatever stands in it
            down = torch.zeros(2, HEADS, N, dtype=torch.float64)
            op = mechanism.operator(q, k, segments=segments)
            sums = op.row_sums(Request(targets, into=into, down=down, places=False))
            assert sums.left and bool((sums.where == -1).all())
            torch.testing.assert_close(into, A, rtol=0, atol=1e-12)
            torch.testing.assert_close(down, A.sum(-2), rtol=0, atol=1e-11)
            torch.testing.assert_close(sums.largest, A.abs().amax(-1), rtol=0, atol=1e-12)
            wanted = sees.gather(-1, targets.clamp(min=0).expand(2, HEADS, N, 6)) & (targets >= 0)
            assert torch.equal(sums.seen, wanted)


def test_passes_that_share_memory_do_not_see_each_other():
    scratch: dict[str, torch.Tensor] = {}
    for n, dtype in ((N, torch.float64), (200, torch.float64), (N, torch.float32), (N, torch.float64)):
        q, k = (x.to(dtype) for x in inputs(n=n, m=n))
        op = h.Softmax(h.Causal()).operator(q, k)
        alone, shared = op.row_sums(Request()), op.row_sums(Request(scratch=scratch))
        assert all(torch.equal(x, shared.tensors()[name]) for name, x in alone.tensors().items())


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_values_ride_along_with_a_pass(pattern, segments, monkeypatch):
    q, k = inputs()
    v = torch.randn(2, HEADS, N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = v.clone()
    if segments is not None:  # what stands in padding reaches nothing
        given[(segments < 0).expand(2, HEADS, N)] = torch.nan
    sink = torch.tensor([0.3, -2.0], dtype=torch.float64)
    bias = torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mechanisms = [
        h.Softmax(pattern),
        h.Softmax(pattern, temperature=0.5, softcap=1.5, bias=bias, sink=sink),
        h.Quadratic(h.no_activation, pattern, normalise=None),
    ]
    for budget in (1 << 21, 300):
        monkeypatch.setattr(scheduler, "BUDGET", budget)
        for mechanism in mechanisms:
            found = mechanism.operator(q, k, segments=segments).row_sums(Request(values=given)).product
            wanted = mechanism.matrix(q, k, segments=segments) @ v
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_values_ride_along_with_any_mechanism():
    q, k = inputs()
    v = torch.randn(2, HEADS, N, 5, dtype=torch.float64)
    mixed = h.Mixture([h.Softmax(h.Causal()), h.Linear()])
    for mechanism in (h.Linear(), mixed):
        found = mechanism.operator(q, k).row_sums(Request(values=v)).product
        torch.testing.assert_close(found, mechanism.matrix(q, k) @ v, rtol=0, atol=1e-12)


def test_values_of_low_precision_are_multiplied_in_float32():
    q, k = (x.bfloat16() for x in inputs())
    v = torch.randn(2, HEADS, N, 5).bfloat16()
    found = h.Softmax(h.Causal()).operator(q, k).float().row_sums(Request(values=v)).product
    wanted = h.Softmax(h.Causal()).matrix(q.double(), k.double()) @ v.double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_rooms_that_take_turns_are_each_remembered_while_they_exist():
    q, k = inputs()
    scratch: dict[str, dict] = {}
    wanted = h.Softmax(h.Causal()).matrix(q, k)
    op = h.Softmax(h.Causal()).operator(q, k)
    rooms = [torch.full((2, HEADS, N, N), torch.nan, dtype=torch.float64) for _ in range(3)]
    for room in [*rooms, *rooms]:
        op.row_sums(Request(into=room, scratch=scratch))
        torch.testing.assert_close(room, wanted, rtol=0, atol=1e-12)
    assert len(scratch["left"]) == 3
    rooms[1].fill_(torch.nan)
    for room in rooms:
        op.row_sums(Request(into=room, scratch=scratch))
        torch.testing.assert_close(room, wanted, rtol=0, atol=1e-12)
    del rooms[1:], room
    op.row_sums(Request(into=rooms[0], scratch=scratch))
    assert len(scratch["left"]) == 1


@pytest.mark.parametrize("inference", [False, True])
def test_room_that_is_used_again_has_zeros_around_the_weights(inference, monkeypatch):
    monkeypatch.setattr(scheduler, "ROWS", 8)
    q, k = inputs()
    scratch: dict[str, object] = {}
    with torch.inference_mode(inference):
        into = torch.full((2, HEADS, N, N), torch.nan, dtype=torch.float64)
        window, sparse = h.Window(7), h.RandomBlocks(4, 1) & h.Causal()
        for pattern in (h.Causal(), h.Causal(), window, window, sparse, sparse, None, sparse, h.Causal()):
            if pattern is None:  # somebody else was here
                into.fill_(torch.nan)
                continue
            for segments in (None, PACKED):
                op = h.Softmax(pattern).operator(q, k, segments=segments)
                op.row_sums(Request(into=into, scratch=scratch))
                wanted = h.Softmax(pattern).matrix(q, k, segments=segments)
                torch.testing.assert_close(into, wanted, rtol=0, atol=1e-12)
            for _ in range(2):
                op = h.Softmax(pattern).operator(k, q)
                op.row_sums(Request(into=into, scratch=scratch))
                torch.testing.assert_close(into, h.Softmax(pattern).matrix(k, q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", [N, N - 9])
@pytest.mark.parametrize("scores", [1 << 21, 8 * N])  # of a tile: all heads, or one
def test_a_pass_leaves_its_matrix_in_slabs(queries, scores, monkeypatch):
    monkeypatch.setattr(scheduler, "ROWS", 8)
    monkeypatch.setattr(scheduler, "BUDGET", scores)
    monkeypatch.setattr(Trimmed, "WIDTH", 5)
    q, k = inputs(queries)
    memory = torch.full((2 * HEADS * queries * N,), torch.nan, dtype=torch.float64)
    for pattern in [*PATTERNS, h.Causal()]:
        op = h.Softmax(pattern).operator(q, k)
        room = Trimmed.room(op.shape, pattern, op.dtype, lambda size, dtype: memory[:size])
        sums = op.row_sums(Request(into=room))
        assert sums.left
        for name, found in op.row_sums(Request()).tensors().items():  # strided patterns have a backend of their own
            torch.testing.assert_close(sums.tensors()[name], found, rtol=0, atol=1e-13)
        found = (room @ torch.eye(N, dtype=torch.float64)).view(op.shape)
        torch.testing.assert_close(found, h.Softmax(pattern).matrix(q, k), rtol=0, atol=1e-12)


def test_slabs_take_the_rows_of_any_mechanism():
    q, k = inputs()
    op = h.Linear().operator(q, k)
    room = Trimmed.room(op.shape, h.Causal(), op.dtype, torch.empty)
    assert op.row_sums(Request(into=room)).left
    found = (room @ torch.eye(N, dtype=torch.float64)).view(op.shape)
    torch.testing.assert_close(found, h.Linear().matrix(q, k), rtol=0, atol=1e-12)


@pytest.mark.parametrize("c", [1, 63, 64, 128, 200, 1000])
def test_the_largest_of_a_row_is_found_by_chunks_as_by_hand(c):
    x = torch.randint(0, 50, (3, 40, c), generator=torch.Generator().manual_seed(c)).double()  # with ties
    x[0, 0, -1] = torch.nan
    x[0, 1, 0] = torch.nan
    top, place = reference.largest(x)
    torch.testing.assert_close(top, x.amax(-1, keepdim=True), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(place, x.argmax(-1, keepdim=True))


def test_autocast_stays_outside():
    q, k = (x.float() for x in inputs())
    for mechanism in (h.Softmax(), h.Linear(), h.Quadratic()):
        request = Request(bands=((None, -1),), columns=torch.randn(N, 2, generator=torch.Generator().manual_seed(0)))
        plain = mechanism.operator(q, k).row_sums(request).tensors()
        with torch.autocast("cpu", torch.bfloat16):
            cast = mechanism.operator(q, k).row_sums(request).tensors()
        for name, x in plain.items():
            torch.testing.assert_close(cast[name], x, rtol=0, atol=0, msg=name)


@pytest.mark.usefixtures("annotations_enforced")
def test_statistics_of_the_adjoint_are_those_of_the_columns():
    q, k = inputs()
    A = h.Softmax().operator(q, k, segments=PACKED)
    columns = h.row_statistics(A.mT)
    dense = A.to_dense()
    torch.testing.assert_close(columns.total, dense.sum(-2), rtol=0, atol=1e-12)
    torch.testing.assert_close(columns.at_offset[..., 2], h.row_statistics(A.mT, offsets=[1]).at_offset[..., 0])
    below = torch.where(PACKED[..., 1:] == PACKED[..., :-1], dense.diagonal(-1, -2, -1), 0)
    torch.testing.assert_close(columns.at_offset[..., :-1, 2], below, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("annotations_enforced")
def test_a_mixture_keeps_the_requests_of_its_heads_apart():
    q, k = inputs(batch=(2, 4))
    mixture = h.Mixture([h.Softmax(), h.FixedPattern("left"), h.FixedPattern("left"), h.Quadratic()])
    request = Request(torch.randint(-1, N, (2, 4, N, 3)), ((None, -1),), torch.randn(2, 4, N, 2, dtype=torch.float64))
    sums, A = mixture.operator(q, k).row_sums(request), mixture.matrix(q, k)
    at = torch.where(request.targets >= 0, A.gather(-1, request.targets.clamp(min=0)), 0)
    torch.testing.assert_close(sums.at, at, rtol=0, atol=1e-12)
    torch.testing.assert_close(sums.band_dot[..., 0, :], A.tril(-1) @ request.columns, rtol=0, atol=1e-12)


def test_padding_with_nan_in_it_reaches_nothing():
    q, k = inputs()
    clean = h.row_statistics(h.Softmax().operator(q, k, segments=PACKED))
    padding = (PACKED < 0)[..., None]
    dirty = h.row_statistics(
        h.Softmax().operator(q.masked_fill(padding, torch.nan), k.masked_fill(padding, torch.nan), segments=PACKED)
    )
    for name, x in vars(clean).items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(getattr(dirty, name), x, rtol=0, atol=0)


@pytest.mark.usefixtures("annotations_enforced")
def test_the_mass_of_sinks_is_a_mean_over_queries_behind_them():
    q, k = inputs()
    mechanism = h.Softmax(h.Causal())
    A = mechanism.matrix(q, k)
    torch.testing.assert_close(h.sink_mass(mechanism.operator(q, k), 3), A[..., 3:, :3].sum(-1).mean(-1))
    packed = h.sink_mass(mechanism.operator(q, k, segments=PACKED), 2)
    B = mechanism.matrix(q, k, segments=PACKED)
    rows = torch.cat([B[0, :, 2:12, 0:2], B[0, :, 14:32, 12:14]], -2)
    torch.testing.assert_close(packed[0], rows.sum(-1).mean(-1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offsets": [50]}, "offsets: 50, expected integers from −40 to 40"),
        ({"offsets": [0.5]}, "offsets: 0.5"),
        ({"first": -1}, "first: expected an integer ≥ 0"),
        ({"window": -2}, "window: -2, expected a number of keys"),
        ({"window": (1, -1)}, "window: "),
    ],
)
def test_bad_requests_are_refused_in_words(options, words):
    with pytest.raises(ValueError, match=words):
        h.row_statistics(h.Softmax().operator(*inputs()), **options)


def test_nan_is_an_error_and_not_a_number():
    q, k = inputs()
    q[1, 0, 3] = torch.nan
    for mechanism in (h.Softmax(), h.Linear(), h.Quadratic()):
        with pytest.raises(ValueError, match=r"rows have weights that are NaN or infinite, the first at \(1, 0, "):
            h.row_statistics(mechanism.operator(q, k))
    with pytest.raises(TypeError, match="expected an AttentionOperator, got Softmax"):
        h.entropy(h.Softmax())


def test_memory_follows_the_rows_and_not_the_matrix(monkeypatch):
    """No tensor made on the way is as large as the matrix, whatever the mechanism."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return out

    monkeypatch.setattr(scheduler, "BUDGET", 1 << 18)
    q, k = torch.randn(2, 2100, 4).unbind()
    for mechanism in (h.Softmax(), h.Linear(), h.Softmax(h.Window(16))):
        with Largest() as largest:
            h.row_statistics(mechanism.operator(q, k), window=3)
        assert largest.size <= 8 * scheduler.BUDGET < 2100 * 2100 * 4


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(-1, 3), min_size=1, max_size=12), words=st.data())
def test_places_are_found_as_by_hand(ids, words):
    tokens = words.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
    segments = torch.tensor(ids)
    places = Places(resolve(segments, len(ids), len(ids)))
    offset, first, last = places.at_offset([-2, 1]), places.first(2), places.last(1)
    induction = places.after_previous(torch.tensor(tokens))
    for at, own in enumerate(ids):
        keys = [j for j, other in enumerate(ids) if other == own] if own >= 0 else []
        here = keys.index(at) if keys else 0

        def key(p, keys=keys):
            return keys[p] if 0 <= p < len(keys) else -1

        assert offset[at].tolist() == ([key(here - 2), key(here + 1)] if keys else [-1, -1])
        assert first[at].tolist() == [key(0), key(1)]
        assert last[at].tolist() == [key(len(keys) - 1)]
        earlier = [p for p in range(here) if tokens[keys[p]] == tokens[at]] if keys else []
        assert induction[at].tolist() == [key(earlier[-1] + 1) if earlier else -1]
