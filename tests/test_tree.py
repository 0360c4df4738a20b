"""Attention along trees: lists of neighbours are the pattern, and a batch of trees is a forest."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.kernels.softmax.neighbours import reference
from heedful.patterns import balanced_tree
from heedful.testing import CHECKS, Case, DoesNotApply
from heedful.testing.case import assert_agrees, dense, oracles, with_gradients
from heedful.testing.flops import FlopCounter

CHAIN = tuple(range(-1, 39))
STAR = (-1,) + (0,) * 39
TREES = {"chain": CHAIN, "star": STAR, "balanced": balanced_tree(40), "apart": (-1,) * 40}


def over(parents, radius=2, causal=False):
    tree = h.Tree(tuple(parents), radius)
    return h.Softmax(tree & h.Causal() if causal else tree)


def hops(parents) -> torch.Tensor:
    """Distances in the tree by Floyd and Warshall, infinite where there is no way."""
    size = len(parents)
    far = torch.full((size, size), torch.inf).fill_diagonal_(0)
    for child, parent in enumerate(parents):
        if parent >= 0:
            far[child, parent] = far[parent, child] = 1
    for by in range(size):
        far = torch.minimum(far, far[:, by, None] + far[by])
    return far


@pytest.mark.parametrize("check", [check for check in CHECKS if "cost" not in check and "compiled" not in check])
def test_looking_back_keeps_the_contract(check):
    try:
        CHECKS[check](Case(lambda: over(balanced_tree(300), 2, causal=True), length=300))
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("radius", [0, 1, 2, 5])
def test_a_query_sees_what_is_near_in_the_tree(name, radius):
    tree = h.Tree(TREES[name], radius)
    near = hops(TREES[name]) <= radius
    place = torch.arange(40)
    assert torch.equal(tree.allows(place[:, None], place), near)
    assert torch.equal(torch.stack(tree.links), near.nonzero().mT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("n, m", [(40, 40), (9, 40), (25, 25), (50, 50), (1, 30)])
def test_lists_give_softmax_over_the_tree(name, causal, n, m):
    """The sequence may be shorter than the tree, or longer: tokens beyond it see nothing."""
    near = torch.zeros(50, 50, dtype=torch.bool)
    near[:40, :40] = hops(TREES[name]) <= 2
    near = (near.tril() if causal else near)[m - n : m, :m]
    generator = torch.Generator().manual_seed(n * 100 + m)
    q, k, v, weight = (
        torch.randn(2, size, width, generator=generator, dtype=torch.float64)
        for size, width in ((n, 5), (m, 5), (m, 3), (n, 3))
    )

    def plain(q, k, v):
        weights = (q @ k.mT * 5**-0.5).exp() * near
        total = weights.sum(-1, keepdim=True)
        return weights / torch.where(total > 0, total, 1) @ v

    attend = over(TREES[name], 2, causal)
    assert "→ neighbours" in attend.explain(q, k, v)
    want = oracles(lambda *x: with_gradients(plain, x, weight), q, k, v, terms=m + 5)
    got = with_gradients(attend, (q, k, v), weight)
    for what, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{what} over a {name}", "a list is cut, or filled with keys that count")


def test_pieces_of_any_size_give_the_same(monkeypatch):
    attend = over(TREES["balanced"], 3)
    q, k, v = torch.randn(3, 2, 40, 4, dtype=torch.float64).unbind()
    want = dense(attend, q, k, v)
    for budget in (1, 100, 1000):
        monkeypatch.setattr(reference, "BUDGET", budget)
        assert torch.allclose(attend(q, k, v), want)


def test_a_hub_makes_nobody_elses_list_longer():
    """A star of 1000: its centre has 1000 neighbours, everyone else two."""
    q, k, v = torch.randn(3, 1000, 8).unbind()
    attend = over((-1,) + (0,) * 999, radius=1)
    with torch.no_grad(), FlopCounter() as counter:
        attend(q, k, v)
    said = attend.cost(h.Dims.of(q, k, v)).flops
    assert said == 2 * 16 * (1000 + 2 * 999)
    assert counter.flops < 2 * said


def test_a_batch_of_trees_is_a_forest():
    trees = [[1, -1, 4, 4, 1], [-1, 0, 1], [2, 2, -1, 2]]
    q, k, v = torch.randn(3, 3, 2, 5, 4, dtype=torch.float64).unbind()  # (batch, heads, tokens, width)
    for length in (5, None):
        sizes = [5] * 3 if length else [len(tree) for tree in trees]
        packed = [torch.cat([x[row, :, :size] for row, size in enumerate(sizes)], -2) for x in (q, k, v)]
        out = over(h.forest(trees, length), 2)(*packed).split(sizes, -2)
        for row, tree in enumerate(trees):
            own = [x[row, :, : len(tree)] for x in (q, k, v)]
            alone = h.Softmax(h.Tree(tuple(tree), 2))(*own)
            assert torch.allclose(out[row][:, : len(tree)], alone)
            assert out[row][:, len(tree) :].eq(0).all()


def test_under_segments_every_sequence_has_the_same_tree():
    attend = over(balanced_tree(9), 1)
    q, k, v = torch.randn(3, 2, 16, 4, dtype=torch.float64).unbind()
    ids = torch.tensor([0] * 9 + [1] * 7)
    assert "positions of their own" in attend.explain(q, k, v, segments=ids)
    apart = torch.cat([attend(*(x[:, part] for x in (q, k, v))) for part in (slice(0, 9), slice(9, 16))], -2)
    assert torch.allclose(attend(q, k, v, segments=ids), apart)


def test_tiles_follow_the_tree_too():
    """Where lists can't be used, spans leave out what no query of a block sees."""
    tree = h.Tree(h.forest([balanced_tree(32)] * 8), 2)
    assert tree.spans(0, 32, 256) == [(0, 32)]
    assert tree.spans(0, 1, 256) != [(0, 32)]


@pytest.mark.parametrize("parents", [(0,), (5, -1), (-3,), (-2, 0)])
def test_a_bad_parent_is_named(parents):
    with pytest.raises(ValueError, match="parents"):
        h.Tree(parents, 2)


def test_a_forest_needs_room_for_its_trees():
    with pytest.raises(ValueError, match="length"):
        h.forest([[-1, 0, 0]], length=2)
    assert h.forest([]) == () and h.forest([[], [-1]]) == (-1,)
