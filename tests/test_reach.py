"""What layers of attention connect is what a search along the edges finds."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.patterns import balanced_tree

N = 37
STACKS = {
    "halves of the Sparse Transformer": [h.Window(6), h.Strided(6) & h.Causal()],
    "windows": [h.Window(3)] * 4,
    "a global token": [h.Window(1, 1) | h.Global((5,))] * 3,
    "summaries, which have no diagonal": [h.Blocks(6), h.Summaries(6, 1) & h.Causal(), h.Blocks(6)],
    "a tree": [h.Tree(balanced_tree(N), 1)] * 5,
    "one layer": [h.RandomBlocks(4, 2)],
    "none": [],
}


def edges(pattern, residual):
    allowed = pattern.allows(torch.arange(N)[:, None], torch.arange(N)).expand(N, N)
    return [set(row.nonzero().flatten().tolist()) | ({i} if residual else set()) for i, row in enumerate(allowed)]


def paths(layers, residual):
    """Every path as its tokens from the output down to the input."""
    found = [(i,) for i in range(N)]
    for pattern in reversed(layers):
        seen = edges(pattern, residual)
        found = [(*path, j) for path in found for j in seen[path[-1]]]
    return found


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", STACKS)
def test_outputs_depend_on_the_inputs_that_a_search_finds(name, residual):
    layers = STACKS[name]
    found = h.reach(layers, N, residual=residual)
    causal = all(pattern.is_causal for pattern in layers)
    sets = [{i} for i in range(N)]
    for layer, pattern in enumerate(layers, 1):
        sets = [set().union(*(sets[j] for j in seen)) for seen in edges(pattern, residual)]
        want = torch.tensor([[j in inputs for j in range(N)] for inputs in sets])
        assert torch.equal(found.after(layer), want)
        possible = N * (N + 1) // 2 if causal else N * N
        assert found.shares[layer - 1] == int(want.sum()) / possible
    assert torch.equal(found.after(0), torch.eye(N, dtype=torch.bool))
    complete = [layer for layer, share in enumerate(found.shares, 1) if share == 1]
    assert found.complete_after == (complete[0] if complete else None)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", [name for name in STACKS if len(STACKS[name]) < 4])
def test_traffic_counts_the_pairs_with_a_path_through_a_token(name, residual):
    layers = STACKS[name]
    found = h.reach(layers, N, residual=residual)
    every = paths(layers, residual)
    pairs = len({(path[0], path[-1]) for path in every})
    want = torch.zeros(max(0, len(layers) - 1), N, dtype=torch.float64)
    for below in range(1, len(layers)):
        through = {(path[0], path[-1], path[-1 - below]) for path in every}
        for *_, token in through:
            want[below - 1, token] += 1 / pairs
    torch.testing.assert_close(found.traffic, want)


def test_hubs_are_where_the_traffic_is():
    assert h.reach(STACKS["a global token"][:2], N).hubs(1) == [(5, 1.0)]
    summaries = h.reach([h.Blocks(6), h.Summaries(6, 1) & h.Causal()], N)
    assert {token for token, _ in summaries.hubs(6)} == {5, 11, 17, 23, 29, 35}  # the last of every block of 6
    assert h.reach(STACKS["one layer"], N).hubs() == h.reach([], N).hubs() == []


def test_thousands_of_tokens_take_no_square_of_numbers():
    found = h.reach([h.Window(63), h.Strided(64) & h.Causal()], 2000)
    assert found.complete_after == 2 and found.shares[0] < 0.07
    assert sum(x.untyped_storage().nbytes() for x in found._sets) < 3 * 2000 * 2048 // 8 + 1  # one bit a pair


@pytest.mark.parametrize(
    "patterns, n, said", [(h.Window(3), 9, "one pattern a layer"), ([3], 9, "one pattern"), ([], 0, "n: ")]
)
def test_a_bad_argument_is_named(patterns, n, said):
    with pytest.raises((TypeError, ValueError), match=said):
        h.reach(patterns, n)
    with pytest.raises(ValueError, match="layers"):
        h.reach([h.Causal()], 4).after(2)
