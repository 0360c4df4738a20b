"""A dilated window is a plain one in each residue class; heads may share the halves of the Sparse Transformer."""

from __future__ import annotations

import pytest
import torch

import heedful as h
from heedful.testing import CHECKS, Case, DoesNotApply
from heedful.testing.case import assert_agrees, dense, oracles, with_gradients
from heedful.testing.flops import FlopCounter


def dilated(window, gap, causal=True):
    reach = (window - 1) * gap
    return h.Softmax(h.Strided(gap) & h.Window(reach, 0 if causal else reach))


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "compiled_equals_eager"])
def test_looking_both_ways_keeps_the_contract(check):
    try:
        CHECKS[check](Case(lambda: dilated(3, 4, False), large=lambda: dilated(128, 4, False)))
    except DoesNotApply as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window, gap", [(1, 7), (5, 1), (4, 7), (9, 3), (3, 100)])
@pytest.mark.parametrize("n, m", [(1, 1), (49, 49), (100, 100), (13, 100), (1, 29)])
def test_it_is_softmax_over_the_keys_at_multiples_of_the_gap(window, gap, causal, n, m):
    i, j = torch.arange(m - n, m)[:, None], torch.arange(m)
    sees = ((i - j) % gap == 0) & ((i - j).abs() < window * gap) & ((j <= i) | (not causal))
    generator = torch.Generator().manual_seed(n * 1000 + m)
    q, k, v, weight = (
        torch.randn(2, size, width, generator=generator, dtype=torch.float64)
        for size, width in ((n, 5), (m, 5), (m, 3), (n, 3))
    )

    def plain(q, k, v):
        return (q @ k.mT * 5**-0.5).masked_fill(~sees, -torch.inf).softmax(-1) @ v

    mechanism = dilated(window, gap, causal)
    assert ("→ strided" in mechanism.explain(q, k, v)) == (gap > 1 and window > 1)
    assert torch.equal(mechanism.pattern.allows(i, j).expand(n, m), sees)
    want = oracles(lambda *x: with_gradients(plain, x, weight), q, k, v, terms=m + 5)
    for name, one, other in zip(
        ("output", "grad q", "grad k", "grad v"), with_gradients(mechanism, (q, k, v), weight), want, strict=True
    ):
        assert_agrees(one, other, f"{name} of {mechanism}", "a residue class is cut off or shifted")


def test_a_wider_gap_takes_no_more_work():
    q, k, v = torch.randn(3, 2048, 16).unbind()
    flops = []
    for gap in (1, 2, 8):
        with torch.no_grad(), FlopCounter() as counter:
            dilated(64, gap)(q, k, v)
        flops.append(counter.flops)
    assert max(flops) < 1.2 * flops[0]
    with torch.no_grad(), FlopCounter() as counter, h.backend("torch"):
        dilated(64, 8)(q, k, v)
    assert counter.flops > 3 * max(flops)  # tiles of the pattern on a line


# Heads that share the work.


@pytest.mark.parametrize("name, option", [("strided", {"window": 4}), ("sparse-fixed", {"summary": 2})])
@pytest.mark.parametrize("causal", [True, False])
def test_the_two_kinds_of_heads_see_together_what_the_merged_head_sees(name, option, causal):
    options = {"stride": 6, "causal": causal, **option}
    merged = h.build(name, **options).pattern
    heads = h.build(f"{name}-heads", heads=5, **options)
    assert heads.groups == (3, 2)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    near, far = (part.pattern.allows(i, j) for part in heads.parts)
    assert torch.equal(near | far, merged.allows(i, j))
    assert not torch.equal(near, far)
    q, k, v = torch.randn(3, 2, 5, 40, 8, dtype=torch.float64).unbind()
    out = heads(q, k, v)
    for head in range(5):
        alone = h.Softmax(heads.parts[head // 3].pattern)
        assert torch.allclose(out[:, head], dense(alone, q[:, head], k[:, head], v[:, head]))


def test_a_single_head_is_the_merged_one():
    assert h.build("strided-heads", heads=1).pattern == h.build("strided").pattern
    assert h.build("sparse-fixed-heads", heads=1).pattern == h.build("sparse-fixed").pattern


def test_sparse_fixed_is_blocks_and_summaries():
    i, j = torch.arange(50)[:, None], torch.arange(50)
    both = h.Blocks(7) | h.Summaries(7, 2)
    assert torch.equal(both.allows(i, j), h.SparseFixed(7, 2).allows(i, j))
    with pytest.raises(ValueError, match="summary"):
        h.Summaries(4, 5)


def test_a_causal_query_before_the_first_summary_sees_nothing():
    q, k, v = torch.randn(3, 20, 4).unbind()
    out = h.Softmax(h.Summaries(8, 2) & h.Causal())(q, k, v)
    assert out[:6].eq(0).all() and out[6:].ne(0).all()
