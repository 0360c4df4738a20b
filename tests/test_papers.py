"""Entries of the catalogue against the sets and formulas that their papers print, written out by hand."""

from __future__ import annotations

import re
from collections import Counter
from math import comb
from pathlib import Path

import pytest
import torch

import heedful as h

N = 60


def seen(mechanism: h.Mechanism) -> list[set[int]]:
    allows = mechanism.pattern.allows(torch.arange(N)[:, None], torch.arange(N)).expand(N, N)
    return [set(row.nonzero().flatten().tolist()) for row in allows]


# Sparse Transformer (Child et al. 2019, arXiv:1904.10509, section 4.3), both factorisations.


def strided_sets(stride: int, i: int) -> tuple[set[int], set[int]]:
    return set(range(max(0, i - stride), i + 1)), {j for j in range(i + 1) if (i - j) % stride == 0}


def fixed_sets(stride: int, c: int, i: int) -> tuple[set[int], set[int]]:
    block = {j for j in range(i + 1) if j // stride == i // stride}
    return block, {j for j in range(i + 1) if j % stride in range(stride - c, stride)}


@pytest.mark.parametrize("stride", [1, 4, 7])
def test_strided_heads_are_those_of_the_sparse_transformer(stride):
    parts = h.build("strided-heads", stride=stride, window=stride, heads=2).parts
    merged = h.build("strided", stride=stride, window=stride)
    for i, (near, far, both) in enumerate(zip(*map(seen, [*parts, merged]), strict=True)):
        first, second = strided_sets(stride, i)
        assert len(first) == min(i, stride) + 1
        assert (near, far, both) == (first, second, first | second)


@pytest.mark.parametrize(("stride", "c"), [(1, 1), (4, 1), (7, 3)])
def test_fixed_heads_are_those_of_the_sparse_transformer(stride, c):
    parts = h.build("sparse-fixed-heads", stride=stride, summary=c, heads=2).parts
    merged = h.build("sparse-fixed", stride=stride, summary=c)
    for i, (near, far, both) in enumerate(zip(*map(seen, [*parts, merged]), strict=True)):
        first, second = fixed_sets(stride, c, i)
        assert (near, far, both) == (first, second, first | second)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("stride", "window"), [(4, 0), (4, 1), (4, 6), (4, 8), (5, 4)])
def test_the_window_of_strided_entries_counts_the_keys_beside_the_own_one(stride, window, causal):
    after = 0 if causal else window
    for i, keys in enumerate(seen(h.build("strided", stride=stride, window=window, causal=causal))):
        near = {j for j in range(N) if i - window <= j <= i + after}
        far = {j for j in range(N) if (i - j) % stride == 0 and (j <= i or not causal)}
        assert keys == near | far


@pytest.mark.parametrize("options", [{"stride": 0}, {"window": -1}, {"stride": -2, "window": 3}])
def test_bad_sizes_of_strided_entries_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        h.build("strided", **options)


# BigBird (Zaheer et al. 2020, arXiv:2007.14062): r random blocks each.


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (1, 3), (2, 5), (1, 100)])
def test_every_block_has_as_many_random_links_as_it_is_told_to(size, count, seed):
    keys = seen(h.Softmax(h.RandomBlocks(size, count, seed)))
    for block in range(N // size):
        earlier = {j // size for j in keys[block * size]} - set(range(block, N))
        assert len(earlier) == min(count, block)


def test_random_links_are_uniform_over_sets_of_blocks():
    draws, block, cells = 1000, 7, comb(7, 3)
    times: Counter = Counter()
    for seed in range(draws):
        row = h.RandomBlocks(1, 3, seed).allows(torch.tensor([[block]]), torch.arange(block)).flatten()
        times[frozenset(row.nonzero().flatten().tolist())] += 1
    chi2 = sum((count - draws / cells) ** 2 / (draws / cells) for count in times.values())
    assert len(times) == cells and chi2 < cells + 4 * (2 * cells) ** 0.5


def test_random_links_stay_as_the_sequence_grows():
    short, long = (h.RandomBlocks(2, 4).allows(torch.arange(n)[:, None], torch.arange(n)) for n in (30, 300))
    assert torch.equal(short, long[:30, :30])


# Longformer (Beltagy et al. 2020, arXiv:2004.05150, section 3.1): w / 2 tokens on each side, and global tokens.


def test_longformer_sees_half_a_window_on_each_side_and_global_tokens_both_ways():
    for i, keys in enumerate(seen(h.build("longformer", window=6, tokens=(0, 9)))):
        near = {j for j in range(N) if abs(i - j) <= 3}
        assert keys == (set(range(N)) if i in (0, 9) else near | {0, 9})


@pytest.mark.parametrize("causal", [True, False])
def test_dilated_windows_have_gaps_of_one_size(causal):
    for i, keys in enumerate(seen(h.build("dilated", window=4, gap=3, causal=causal))):
        steps = range(-3, 1) if causal else range(-3, 4)
        assert keys == {i + 3 * step for step in steps} & set(range(N))


# The page that compares all of them.


def test_the_page_names_every_entry():
    page = (Path(__file__).parents[1] / "docs" / "papers.md").read_text()
    named = set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]*)\|", page, re.MULTILINE))))
    fixed = {name for name, entry in h.CATALOG.items() if entry.family == "fixed"}
    assert named | fixed == set(h.CATALOG)


# RazorAttention (Tang et al. 2024, arXiv:2407.15891), the compensation token.


def test_the_summary_is_the_compensation_token_of_razor_attention():
    q, k, v = torch.randn(3, 30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    out = h.build("window-summary", before=6, sinks=2)(q, k, v)
    for i in range(30):
        exact = [j for j in range(i + 1) if j < 2 or j >= i - 6]
        dropped = [j for j in range(i + 1) if j not in exact]
        weights, values = (q[i] @ k[exact].mT / 2).exp(), v[exact]
        if dropped:
            summary = len(dropped) * (q[i] @ k[dropped].mean(0) / 2).exp()
            weights = torch.cat([weights, summary[None]])
            values = torch.cat([values, v[dropped].mean(0)[None]])
        torch.testing.assert_close(out[i], weights @ values / weights.sum())
