"""Planted heads get their names back; heads that look at content do not get one."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.measures.positions import CONTAINS, FIXED, LEVELS

N = 64
KINDS = ("current", "previous", "next", "left", "right", "start", "end", "last")
PACKED = torch.tensor([0] * 100 + [1] * 160 + [-1] * 40)


class Given(h.Mechanism):
    """A mechanism with exactly this matrix, whatever q and k are."""

    def __init__(self, A):
        super().__init__(h.Full())
        self.A = A

    def forward(self, q, k, v, *, segments=None):
        return self.A @ v

    def matrix(self, q, k, *, segments=None):
        return self.A

    def cost(self, dims):
        raise NotImplementedError


def operator_of(A, segments=None):
    """An operator with exactly this matrix."""
    q, k = (A.new_zeros(*A.shape[:-2], length, 1) for length in A.shape[-2:])
    return Given(A).operator(q, k, segments=segments)


def content(n=N, causal=False, spread=2.0, seed=0):
    """Rows of iid Gaussian scores."""
    scores = spread * torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1)


def definition(A, P, defined):
    """⟨A, P⟩² / ‖A‖²‖P‖² and the mass on P's support, from whole matrices."""
    A, P = A[defined], P[defined]
    return (A * P).sum() ** 2 / ((A * A).sum() * (P * P).sum()), A[P > 0].sum() / A.sum()


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("segments", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_pattern_gets_its_name_back(kind, segments):
    x = torch.zeros(2, 3, 300, 1)
    found = h.positional_pattern(h.FixedPattern(kind).operator(x, x, segments=segments))
    assert found.labels == [[kind] * 3] * 2
    assert float(found.score.min()) > 0.999 and float(found.margin.min()) > 0.3


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_those_of_the_whole_matrices(kind, causal):
    A, x = 0.7 * content(causal=causal) + 0.3 * content(causal=causal, seed=1), torch.zeros(N, 1, dtype=torch.float64)
    P = h.FixedPattern(kind).matrix(x, x)
    defined = torch.ones(N, dtype=torch.bool)
    defined[{"previous": 0, "next": -1}.get(kind, slice(0, 0))] = False
    found = h.positional_pattern(operator_of(A))
    energy, mass = definition(A, P, defined)
    at = found.names.index(kind)
    torch.testing.assert_close(found.energy[at], energy, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.mass[at], mass, rtol=1e-12, atol=1e-14)


def test_energy_of_bands_windows_sinks_and_stripes_is_that_of_the_nearest_matrix():
    A = content(causal=True)
    found = h.positional_pattern(operator_of(A), width=3, sinks=2, stripes=5)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    inside, whole = (i - j).abs() <= 3, (A * A).sum()
    shifts = torch.stack([torch.diag(torch.ones(N - abs(o), dtype=A.dtype), o) for o in range(-3, 4)])
    columns = torch.stack([((j == c) & (i >= j)).double() for c in range(N)])
    wanted = {
        "window": A[inside].square().sum() / whole,
        "sink": A[:, :2].square().sum() / whole,
        "band": sum((A * P).sum() ** 2 / P.sum() for P in shifts) / whole,
        "stripes": torch.stack([(A * P).sum() ** 2 / P.sum() for P in columns]).sort().values[-5:].sum() / whole,
    }
    for name, energy in wanted.items():
        torch.testing.assert_close(found.energy[found.names.index(name)], energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.mass[found.names.index("window")], A[inside].sum() / N)


@pytest.mark.parametrize("causal", [False, True], ids=["both ways", "causal"])
@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
def test_heads_that_look_at_content_have_no_pattern(spread, causal):
    A = torch.stack([content(256, causal, spread, seed) for seed in range(10)])
    found = h.positional_pattern(operator_of(A))
    assert found.labels == ["content"] * 10
    assert float(found.margin.min()) > 0
    torch.testing.assert_close(found.score, 1 - found.scores.amax(-1))


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_shows_through_noise(kind, share):
    x = torch.zeros(256, 1, dtype=torch.float64)
    A = share * h.FixedPattern(kind).matrix(x, x) + (1 - share) * content(256, spread=1.0)
    found = h.positional_pattern(operator_of(A))
    assert found.labels == kind
    single = kind in ("current", "previous", "next", "last")
    if single:  # its mass is what is left of it, and what the noise happens to put there
        assert abs(float(found.score) - share) < 0.02


def test_sinks_windows_bands_stripes_and_uniform_heads_are_named():
    torch.manual_seed(0)
    n = 256
    i, j = torch.arange(n)[:, None], torch.arange(n)
    q, k = torch.randn(2, n, 32, dtype=torch.float64).unbind()
    window = h.Softmax(h.Window(8), scale=0.4).matrix(q, k)
    sink = 0.3 * content(n, causal=True)
    sink[:, 0] += 0.7
    hubs = 0.3 * content(n)
    hubs[:, [17, 40, 90, 201]] += 0.7 / 4
    near = torch.where((j <= i) & (j >= i - 6), 0.6 ** (i - j).double(), 0)
    planted = {
        "window": window,
        "sink": sink,
        "stripes": hubs,
        "band": near / near.sum(-1, keepdim=True),
        "uniform": torch.full((n, n), 1 / n, dtype=torch.float64),
    }
    for name, A in planted.items():
        assert h.positional_pattern(operator_of(A)).labels == name
    x = torch.zeros(n, 4)
    assert h.positional_pattern(h.Softmax(h.Causal()).operator(x, x)).labels == "uniform"


def test_a_support_that_holds_almost_everything_explains_nothing():
    """In 16 tokens a window of 8 a side holds three quarters of all pairs, and 8 columns are half of them."""
    A = torch.stack([content(16, spread=2.0, seed=seed) for seed in range(20)])
    found = h.positional_pattern(operator_of(A))
    window = found.names.index("window")
    assert float(found.mass[..., window].mean()) > 0.7
    assert float(found.scores[..., window].mean()) < 0.25
    assert found.labels.count("content") >= 18


def test_stripes_are_counted_in_each_segment():
    segments = torch.arange(6).repeat_interleave(40)
    A = torch.zeros(240, 240, dtype=torch.float64)
    for at in range(6):
        A[40 * at : 40 * at + 40, [40 * at + 11, 40 * at + 23]] = 0.5
    assert h.positional_pattern(operator_of(A, segments), stripes=2).labels == "stripes"
    assert h.positional_pattern(operator_of(A), stripes=2).labels == "content"


def test_induction_needs_the_tokens_and_finds_them():
    n, period = 120, 40
    tokens = torch.randperm(period, generator=torch.Generator().manual_seed(0)).repeat(n // period)
    A = 0.2 * content(n, causal=True)
    A[torch.arange(period, n), torch.arange(period, n) - period + 1] += 0.8
    A[:period] = content(n, causal=True, seed=1)[:period]
    op = operator_of(A)
    assert h.positional_pattern(op).labels == "content"
    found = h.positional_pattern(op, tokens)
    assert found.labels == "induction"
    wanted = A[torch.arange(period, n), torch.arange(period, n) - period + 1].mean()
    torch.testing.assert_close(found.mass[found.names.index("induction")], wanted)
    few = torch.arange(n)
    few[-1] = 0
    assert float(h.positional_pattern(op, few).of("induction")) == 0  # one row says nothing about a head


@pytest.mark.usefixtures("annotations_enforced")
def test_heads_of_a_batch_have_tokens_of_their_own():
    tokens = torch.stack([torch.arange(10).repeat(3), torch.arange(15).repeat(2)])[:, None]
    A = torch.zeros(2, 1, 30, 30, dtype=torch.float64)
    for batch, period in enumerate((10, 15)):
        A[batch, 0, torch.arange(period, 30), torch.arange(period, 30) - period + 1] = 1
        A[batch, 0, torch.arange(period), torch.arange(period)] = 1
    found = h.positional_pattern(operator_of(A), tokens)
    assert found.labels == [["induction"], ["induction"]]


@pytest.mark.usefixtures("annotations_enforced")
def test_a_mixture_of_mechanisms_head_by_head():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 100, 16).unbind()
    parts = [h.FixedPattern("previous"), h.FixedPattern("left"), h.FixedPattern("end"), h.Softmax(h.Full(), 1.0)]
    labels = h.positional_pattern(h.Mixture(parts).operator(q, k)).labels
    assert labels == [["previous", "left", "end", "content"]] * 2


def test_signed_and_unnormalised_heads():
    torch.manual_seed(0)
    q, k = torch.randn(2, 200, 16).unbind()
    assert h.positional_pattern(h.Linear(h.Identity(), normalise=False).operator(q, k)).labels == "content"
    x = torch.ones(200, 1)
    fading = h.positional_pattern(h.Retention(0.5).operator(x, x))
    assert fading.labels == "current"
    assert float(fading.of("band")) > 0.95


@pytest.mark.usefixtures("annotations_enforced")
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_short_sequences_have_scores_and_no_accidents(n):
    x = torch.randn(2, n, 4)
    found = h.positional_pattern(h.Softmax().operator(x, x), torch.zeros(n, dtype=torch.long))
    assert found.scores.shape == (2, 14) and torch.isfinite(found.scores).all()
    assert bool(((found.scores >= 0) & (found.scores <= 1)).all())


@pytest.mark.usefixtures("annotations_enforced")
def test_queries_after_a_cache():
    x = torch.zeros(1, 80, 1)
    for kind in ("current", "previous", "left", "end", "last"):
        assert h.positional_pattern(h.FixedPattern(kind).operator(x[:, 50:], x)).labels == [kind]


def test_the_tables_speak_of_the_same_kinds():
    names = [name for level in LEVELS for name in level]
    assert len(set(names)) == len(names) == 14 and set(FIXED) <= set(names)
    for one, others in CONTAINS.items():
        depth = {name: at for at, level in enumerate(LEVELS) for name in level}
        assert all(depth[other] < depth[one] for other in others)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"tokens": torch.zeros(5, dtype=torch.long)},
            ValueError,
            r"tokens: shape \(5,\), expected one id for each of the 64",
        ),
        ({"tokens": torch.zeros(N)}, TypeError, "tokens: expected an integer tensor"),
        ({"width": 0}, ValueError, "width: expected an integer ≥ 1"),
        ({"threshold": 0.0}, ValueError, "threshold: expected a score"),
    ],
)
def test_bad_arguments_are_refused_in_words(options, error, words):
    with pytest.raises(error, match=words):
        h.positional_pattern(operator_of(content()), **options)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="name: expected one of current, previous"):
        h.positional_pattern(operator_of(content())).of("content")
