"""Every mechanism of the catalogue, and the variants that the catalogue has no room for, under every law."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import heedful as h
from heedful.mechanisms import Entry
from heedful.testing import CHECKS, Case, DoesNotApply, check_mechanism
from heedful.testing.case import assert_agrees, dense, oracle, oracles, separate, with_gradients

FACTS = {"d": 8, "heads": 2, "length": 2048}


def small(entry: Entry) -> h.Mechanism:
    return entry.sample(**FACTS)


def large(entry: Entry) -> h.Mechanism:
    asked = inspect.signature(entry.build).parameters
    return entry.build(**{name: fact for name, fact in FACTS.items() if name in asked})


class Slopes(nn.Module):
    """A learned slope for each head, as in ALiBi (Press et al. 2022, arXiv:2108.12409)."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.1, 0.7]))

    def forward(self, i, j):
        return -self.slope[:, None, None] * (i - j).abs()


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


def distance(i, j):
    return -0.2 * (i - j).abs()


def sink() -> nn.Parameter:
    return nn.Parameter(torch.tensor([0.3, -0.8]))


VARIANTS = {
    "softmax, full": lambda: h.Softmax(h.Full()),
    "softmax, temperature": lambda: h.Softmax(temperature=0.5),
    "softmax, scale": lambda: h.Softmax(scale=0.3),
    "softmax, softcap": lambda: h.Softmax(softcap=2.0),
    "softmax, softcap and temperature, full": lambda: h.Softmax(h.Full(), softcap=2.0, temperature=3.0),
    "softmax, sink": lambda: h.Softmax(sink=sink()),
    "softmax, sink, temperature, window": lambda: h.Softmax(h.Window(5), temperature=2.0, sink=sink()),
    "softmax, bias function": lambda: h.Softmax(bias=distance, temperature=0.7),
    "softmax, learned bias": lambda: h.Softmax(bias=Slopes()),
    "softmax, everything": lambda: h.Softmax(h.Window(5, sinks=2), 0.4, 2.0, bias=Slopes(), softcap=3.0, sink=sink()),
    "softmax, window both ways": lambda: h.Softmax(h.Window(3, 4)),
    "softmax, strided": lambda: h.Softmax(h.Strided(4) & h.Causal()),
    "softmax, window or strided": lambda: h.Softmax((h.Window(3) | h.Strided(4)) & h.Causal()),
    "quadratic, not normalised": lambda: h.Quadratic(h.relu2, normalise=None),
    "quadratic, l1": lambda: h.Quadratic(torch.sigmoid, normalise="l1"),
    "quadratic, l1 of exp": lambda: h.Quadratic(torch.exp, h.Window(5), normalise="l1"),
    "quadratic, l2, full": lambda: h.Quadratic(torch.tanh, h.Full(), normalise="l2"),
    "quadratic, l2 of relu²": lambda: h.Quadratic(h.relu2, normalise="l2"),
    "quadratic, length, full": lambda: h.Quadratic(h.relu2, h.Full(), normalise="length"),
    "quadratic, learned activation": lambda: h.Quadratic(Swish(), normalise="l2"),
    "linear, full": lambda: h.Linear(pattern=h.Full()),
    "linear, full, logarithms": lambda: h.Linear(h.Exp(), h.Full()),
    "linear, full, positions": lambda: h.Linear(h.CosFormer(4096), h.Full()),
    "retention, a decay for each head": lambda: h.Retention(torch.tensor([0.5, 0.99]), normalise=True),
    "gated linear, one gate a head, normalised": lambda: h.GatedLinear(8, 2, gate="head", normalise=True),
    "retention, logarithms": lambda: h.Retention(0.9, normalise=True, feature_map=h.Exp()),
}


def hold(check, case):
    try:
        CHECKS[check](case)
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("entry", h.CATALOG.values(), ids=h.CATALOG)
def test_the_catalogue_keeps_the_contract(entry, check, request):
    if check != "compiled_equals_eager":  # the compiler would trace the annotation checker
        request.getfixturevalue("annotations_enforced")
    hold(check, Case(lambda: small(entry), large=lambda: large(entry), **FACTS))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_keep_the_contract(name, check):
    case = Case(VARIANTS[name])
    if check == "flops_are_what_cost_says" and not isinstance(case.pattern, h.Full | h.Causal):
        pytest.skip("its pattern is smaller than a tile; the catalogue's entries are counted at full size")
    hold(check, case)


@pytest.mark.parametrize("check", [name for name in CHECKS if "step" not in name])
def test_a_bias_tensor_for_each_head_keeps_the_contract(check):
    if check in (
        "inputs_are_left_alone",
        "every_output_is_written",
        "large_logits_are_right",
        "state_is_what_cost_says",
    ):
        pytest.skip("they take a step, and a bias tensor belongs to one length")
    hold(check, Case(lambda: h.Softmax(bias=nn.Parameter(torch.tensor([[[0.5]], [[-1.0]]])), sink=sink())))


@pytest.mark.parametrize("shape", [(30, 40), (1, 40), (30, 1), (2, 30, 40), (3, 1, 1, 40)])
def test_a_bias_tensor_of_one_length_is_added_and_learned(shape):
    case = Case(lambda: h.Softmax(h.Window(9, sinks=1), temperature=1.7, bias=torch.zeros(shape)))
    attend = case.mechanism()
    q, k, v = case.draw(30, 40, seed=1, batch=(3,))
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 2, 30, case.e, generator=generator, dtype=torch.float64)

    def with_bias(call, bias, *inputs):
        attend.bias = bias
        return call(attend, *inputs)

    want = oracles(
        lambda *x: with_gradients(lambda *y: with_bias(dense, *y), x, weight), bias, q, k, v, terms=40 + case.d
    )
    got = with_gradients(lambda *y: with_bias(h.Softmax.__call__, *y), (bias, q, k, v), weight)
    for name, one, other in zip(("output", "grad bias", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{name} with a bias {shape}", "the bias is cut to tiles wrongly")


def test_a_bias_tensor_can_not_be_used_token_by_token():
    attend = h.Softmax(bias=torch.zeros(5, 5))
    q, k, v = torch.randn(3, 2, 5, 8).unbind()
    _, state = attend.prefill(q, k, v)
    with pytest.raises(ValueError, match="bias"):
        attend.step(state, q[..., :1, :], k[..., :1, :], v[..., :1, :])


@pytest.mark.parametrize(
    ("where", "after", "report"),
    [
        (check_mechanism, "`heedful.Rec", r"PrefixMean\(Causal\(\)\): \d+ passed, 0 failed, 5 does not apply"),
        (h.RecurrentMechanism, "check_inputs  ", r"DotProduct\(Causal\(\)\): \d+ passed, 0 failed, 1 does not apply"),
    ],
    ids=["check_mechanism", "RecurrentMechanism"],
)
def test_the_examples_of_the_contract_pass(tmp_path, where, after, report):
    """As they stand in the docstrings, as files of their own: that is how a reader would try them."""
    listing = where.__doc__.split("::\n", 1)[1].split(f"\n    {after}")[0]
    script = tmp_path / "mine.py"
    script.write_text(dedent(listing))
    source = Path(h.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert re.match(report, run.stdout), run.stdout


# Shapes and layouts at random.

everywhere = settings(derandomize=True, deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))


@st.composite
def calls(draw, full: bool):
    """q, k, v whose batch axes broadcast in some way, and segments (or none) whose ids may interleave."""
    n = draw(st.integers(0, 40))
    m = draw(st.integers(0, 40)) if full else n + draw(st.integers(0, 20))
    d, e = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    axes = [[1 if draw(st.booleans()) and draw(st.booleans()) else size for size in batch] for _ in range(3)]
    axes = [one[draw(st.integers(0, len(one))) if draw(st.booleans()) else 0 :] for one in axes]
    whole = torch.broadcast_shapes(*axes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shapes = [(*axis, *tail) for axis, tail in zip(axes, ((n, d), (m, d), (m, e)), strict=True)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    lead = torch.broadcast_shapes(*axes[:2])
    lead = [size if draw(st.booleans()) else 1 for size in lead][draw(st.integers(0, len(lead))) :]
    kind = draw(st.sampled_from(["none", "one", "pair"] if n <= m else ["none", "pair"]))
    ids = torch.randint(-1, 3, (*lead, m), generator=generator)
    if kind == "one":
        return q, k, v, whole, ids
    if kind == "pair" and full:
        return q, k, v, whole, (torch.randint(-1, 3, (*lead, n), generator=generator), ids)
    return q, k, v, whole, None


PROPERTY = [
    "softmax",
    "gla",
    "memory",
    "perceiver",
    "l2",
    "window-sinks",
    "sparse-fixed",
    "bigbird",
    "dilated",
    "lowrank-sparse",
    "softmax, full",
    "quadratic, length, full",
]


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("name", PROPERTY)
def test_any_shape_and_any_layout_give_what_the_separate_sequences_give(name):
    @everywhere
    @given(calls(full="full" in name))
    def holds(call):
        q, k, v, batch, segments = call
        facts = {"d": q.shape[-1], "heads": (*batch, 1)[-1] if batch else 1, "length": k.shape[-2]}
        build = VARIANTS[name] if name in VARIANTS else lambda: h.CATALOG[name].sample(**facts)
        mechanism = build().double()
        n, m = q.shape[-2], k.shape[-2]

        def alone(q, k, v):
            q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
            if segments is None:
                return dense(mechanism, q, k, v)
            ids = segments if isinstance(segments, tuple) else (segments[..., m - n :], segments)
            ids = [x.expand(*batch, -1).reshape(prod(batch), x.shape[-1]) for x in ids]
            flat = (x.reshape(prod(batch), *x.shape[-2:]) for x in (q, k, v))
            return separate(mechanism, *flat, *ids).reshape(*batch, n, v.shape[-1])

        want = oracle(alone, q, k, v, terms=m + q.shape[-1])
        law = f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, segments {segments}"
        assert_agrees(mechanism(q, k, v, segments=segments), want, law, "an unusual shape")

    holds()


# Patterns.

counts = st.integers(0, 9)
sizes = st.integers(1, 9)


@st.composite
def trees(draw):
    parents = [draw(st.integers(-1, child - 1)) for child in range(draw(st.integers(0, 12)))]
    absent = [token for token in range(len(parents)) if token not in parents and draw(st.booleans())]
    parents = [-2 if token in absent else parent for token, parent in enumerate(parents)]
    return h.Tree(tuple(parents), draw(st.integers(0, 3)))


@st.composite
def fixed(draw, kind=h.SparseFixed):
    stride = draw(sizes)
    return kind(stride, draw(st.integers(1, stride)))


simple = st.one_of(
    st.just(h.Full()),
    st.just(h.Causal()),
    st.builds(h.Window, counts, counts, counts),
    st.builds(h.Strided, sizes),
    fixed(),
    fixed(h.Summaries),
    st.builds(h.Blocks, sizes),
    st.builds(h.Global, st.lists(st.integers(0, 30), max_size=3).map(tuple)),
    st.builds(h.RandomBlocks, sizes, st.integers(1, 3), st.integers(0, 5)),
    trees(),
)
patterns = st.recursive(
    simple,
    lambda part: st.one_of(
        st.tuples(part, part).map(lambda pair: pair[0] & pair[1]),
        st.tuples(part, part).map(lambda pair: pair[0] | pair[1]),
    ),
    max_leaves=4,
)
lengths = st.integers(0, 40)
at_random = settings(everywhere, max_examples=150)


def allowed(pattern, n: int, m: int):
    """(n, m): the definition, the queries being the last."""
    return pattern.allows(torch.arange(m - n, m)[:, None], torch.arange(m)).expand(n, m)


@at_random
@given(patterns, lengths, lengths, lengths)
def test_spans_hold_every_key_that_a_query_may_see(pattern, lo, more, m):
    hi = lo + more
    spans = pattern.spans(lo, hi, m)
    flat = [edge for span in spans for edge in span]
    assert flat == sorted(flat) and all(start < stop for start, stop in spans), f"not sorted or empty: {spans}"
    assert all(0 <= edge <= m for edge in flat)
    inside = torch.zeros(m, dtype=torch.bool)
    for start, stop in spans:
        assert not inside[start:stop].any(), f"overlap: {spans}"
        inside[start:stop] = True
    seen = pattern.allows(torch.arange(lo, hi)[:, None], torch.arange(m)).expand(more, m).any(0)
    assert not (seen & ~inside).any(), (
        f"{pattern!r} sees {(seen & ~inside).nonzero().flatten().tolist()} outside {spans}"
    )


@at_random
@given(patterns)
def test_a_key_that_a_later_query_may_see_is_remembered(pattern):
    reach = 64
    t, j = torch.arange(30)[:, None], torch.arange(30)
    seen = pattern.allows(torch.arange(reach)[:, None], torch.arange(30)).expand(reach, 30)
    later = torch.stack([seen[start:].any(0) for start in range(30)])  # (t, j)
    forgotten = ~pattern.remembers(j, t).expand(30, 30) & later & (j < t)
    assert not forgotten.any(), f"{pattern!r} forgets at (t, j) {forgotten.nonzero().tolist()[:5]}"


@at_random
@given(patterns, patterns, lengths)
def test_and_and_or_are_those_of_logic(left, right, m):
    i, j = torch.arange(m)[:, None], torch.arange(m)
    one, other = left.allows(i, j), right.allows(i, j)
    assert torch.equal((left & right).allows(i, j), one & other)
    assert torch.equal((left | right).allows(i, j), one | other)


@at_random
@given(patterns, lengths)
def test_a_causal_pattern_admits_no_later_key(pattern, m):
    if pattern.is_causal:
        assert not allowed(pattern, m, m).triu(1).any()


@at_random
@given(patterns, lengths, lengths)
def test_pairs_are_counted(pattern, n, more):
    m = n + more
    assert pattern.pairs(n, m) == int(allowed(pattern, n, m).sum())


@at_random
@given(patterns)
def test_patterns_are_values(pattern):
    assert pickle.loads(pickle.dumps(pattern)) == pattern and hash(pattern) == hash(copy.deepcopy(pattern))
    assert eval(repr(pattern), vars(h)) == pattern


wide = st.one_of(
    st.builds(h.Window, st.integers(0, 300), st.integers(0, 200), st.integers(0, 40)),
    st.builds(h.Blocks, st.integers(1, 200)),
    st.builds(h.Strided, st.integers(1, 100)),
    st.builds(h.Global, st.lists(st.integers(0, 400), max_size=4).map(tuple)),
    st.builds(h.RandomBlocks, st.integers(8, 80), st.integers(1, 3), st.integers(0, 5)),
    patterns,
)
of_any_width = st.one_of(wide, st.tuples(wide, wide).map(lambda pair: pair[0] | pair[1]), wide.map(h.Causal().__and__))


@settings(everywhere, max_examples=60)
@given(of_any_width, st.integers(1, 300), st.integers(0, 150), st.integers(1, 4), st.booleans(), st.booleans())
def test_tiles_cover_any_pattern_once(pattern, n, more, parts, packed, squared):
    m = n + more
    case = Case(lambda: h.Quadratic(h.relu2, pattern) if squared else h.Softmax(pattern))
    attend = case.mechanism()
    inputs, weight = case.draw(n, m, seed=n, batch=()), case.draw(n, seed=m, batch=())[2]
    ids = torch.arange(m) * parts // m if packed else None  # long segments, so that tiles lie inside and across them
    want = oracles(lambda *x: with_gradients(lambda *y: dense(attend, *y, ids), x, weight), *inputs, terms=2 * m)
    got = with_gradients(lambda *y: attend(*y, segments=ids), inputs, weight)
    for what, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{what} of {attend} at n = {n}, m = {m}, {parts if packed else 0} segments", "tiles")
    adjoint = oracle(lambda q, k, y: attend.matrix(q, k, segments=ids).mT @ y, *inputs[:2], weight, terms=2 * m)
    assert_agrees(attend.operator(*inputs[:2], segments=ids).mT @ weight, adjoint, f"adjoint of {attend}", "tiles")


@everywhere
@given(patterns, st.integers(0, 24), st.booleans())
def test_any_pattern_streams(pattern, split, squared):
    n = 25
    case = Case(lambda: h.Quadratic(h.relu2, pattern) if squared else h.Softmax(pattern))
    attend = case.mechanism()
    q, k, v = case.draw(n, seed=split)
    _, state = attend.prefill(*(x[..., :split, :] for x in (q, k, v)))
    for t in range(split, n):
        out, state = attend.step(state, *(x[..., t : t + 1, :] for x in (q, k, v)))
        so_far = [x[..., : t + 1, :] for x in (q, k, v)]
        want = oracle(lambda *x: dense(attend, *x)[..., -1:, :], *so_far, terms=n + case.d)
        assert_agrees(out, want, f"step {t} of {attend} after a prefill of {split}", "it forgets what it still needs")


# Segments.

ids_of = st.lists(st.integers(-2, 3), max_size=25).map(lambda ids: torch.tensor(ids, dtype=torch.long))


@at_random
@given(ids_of)
def test_positions_count_earlier_tokens_of_the_same_segment(ids):
    listed = ids.tolist()
    assert h.segments.positions(ids).tolist() == [listed[:at].count(one) for at, one in enumerate(listed)]
    both = torch.stack([ids, ids.flip(0)])
    assert torch.equal(h.segments.positions(both)[0], h.segments.positions(ids))


@at_random
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 4), st.sampled_from(["left", "right"]))
def test_lengths_masks_and_boundaries_say_the_same(each, spare, side):
    n = max(each, default=0) + spare
    padded = h.segments.from_lengths(torch.tensor(each, dtype=torch.long), n, padding=side)
    assert padded.shape == (len(each), n)
    assert (padded >= 0).sum(-1).tolist() == each
    assert torch.equal(h.segments.from_mask(padded >= 0), padded)
    for row, length in zip(padded, each, strict=True):
        real = row.flip(0) if side == "left" else row
        assert (real[:length] == 0).all() and (real[length:] < 0).all()
    bounds = torch.tensor([0, *each]).cumsum(0)
    packed = h.segments.from_cu_seqlens(bounds, sum(each) + spare)
    assert packed.tolist() == [at for at, length in enumerate(each) for _ in range(length)] + [-1] * spare


@at_random
@given(patterns, ids_of, lengths)
def test_visible_pairs_are_those_of_each_segment_alone(pattern, ids, n):
    m = len(ids)
    n = min(n, m)
    sees = h.segments.visible(pattern, n, m, ids).expand(n, m)
    for segment in set(ids.tolist()):
        rows, cols = (ids[m - n :] == segment).nonzero()[:, 0], (ids == segment).nonzero()[:, 0]
        block = sees[rows][:, cols]
        alone = allowed(pattern, len(rows), len(cols)) if segment >= 0 else torch.zeros_like(block)
        assert torch.equal(block, alone)
    same = ids[m - n :, None] == ids
    assert not (sees & ~same).any()


@everywhere
@given(calls(full=True))
def test_per_segment_is_right_for_any_mechanism(call):
    q, k, v, batch, segments = call
    if segments is None:
        return
    attend = h.Softmax(h.Full())
    got = h.segments.per_segment(attend, q, k, v, segments)
    want = oracle(lambda *x: dense(attend, *x, segments).expand(*batch, -1, -1), q, k, v, terms=k.shape[-2] + 16)
    assert_agrees(got, want, f"per_segment under {segments}", "rows of ids are paired with the wrong batch entries")


@everywhere
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_grouped_heads_share_their_keys(batch, groups, each):
    q, kv = torch.randn(batch, groups * each, 5, 4), torch.randn(batch, groups, 5, 4)
    attend = h.Softmax()
    got = attend(*h.group_heads(q, kv, kv)).flatten(-4, -3)
    repeated = kv.repeat_interleave(each, -3)
    assert torch.allclose(got, attend(q, repeated, repeated), atol=1e-6)
