"""Batches: other entries, padding, packing, empty sequences, strides and broadcast axes do not change a result."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from heedful.core import RecurrentMechanism
from heedful.segments import Segments, from_lengths
from heedful.shapes import Tensor
from heedful.testing.case import (
    Case,
    assert_agrees,
    assert_same,
    assert_zero,
    dense,
    oracle,
    oracles,
    separate,
    with_gradients,
)

GARBAGE = 1e4


def batch_mates_are_independent(case: Case) -> None:
    """Changing one batch entry leaves the others bit-equal."""
    n = min(200, case.length)
    for dtype in (torch.float64, torch.float32):
        mechanism = case.mechanism(dtype)
        inputs = case.draw(n, seed=1, batch=(3,), dtype=dtype)
        others = [5 * x for x in case.draw(n, seed=2, batch=(3,), dtype=dtype)]
        mixed = [torch.cat([x[:1], y[1:2], x[2:]]) for x, y in zip(inputs, others, strict=True)]
        out, changed = mechanism(*inputs), mechanism(*mixed)
        for row in (0, 2):
            assert_same(
                changed[row],
                out[row],
                f"row {row} of 3 after row 1 was changed, {dtype}",
                "a maximum, a mean or an initial value is taken over the batch",
            )


def padded_and_packed_equal_separate(case: Case) -> None:
    """Padded, packed and interleaved batches give, row for row, the results of the separate sequences."""
    mechanism = case.mechanism()
    for name, n, m, segments, query_ids, key_ids in _layouts(case):
        q, k, v = case.draw(n, m, seed=3, batch=(len(query_ids),))
        want = oracle(
            lambda *x, a=query_ids, b=key_ids: separate(mechanism, x[0], x[1], x[2], a, b), q, k, v, terms=m + case.d
        )
        cause = (
            "padding or a neighbour enters a normaliser (mask the keys, not only the values), or positions are absolute"
        )
        assert_agrees(mechanism(q, k, v, segments=segments), want, f"forward under {name}", cause)
        assert_agrees(dense(mechanism, q, k, v, segments), want, f"matrix under {name}", cause)
        assert_zero(
            mechanism(q, k, v, segments=segments).mT[..., _padding(query_ids)], f"padded queries, {name}", cause
        )


def padding_has_no_say(case: Case) -> None:
    """Arbitrary numbers in padded positions change no result, and the gradient there is zero."""
    mechanism, n = case.mechanism(), 12
    for side in ("left", "right"):
        ids = from_lengths(torch.tensor([0, 1, 7, 12]), n, padding=side)
        hidden = (ids < 0)[:, None, :, None]
        inputs = case.draw(n, seed=4, batch=(4,))
        weight = case.draw(n, seed=5, batch=(4,))[2]

        def results(*x, ids=ids, weight=weight):
            return with_gradients(lambda *y: mechanism(*y, segments=ids[:, None]), x, weight)

        want = oracles(results, *inputs, terms=n + case.d)
        dirty = results(*(torch.where(hidden, GARBAGE * x.sign(), x) for x in inputs))
        for what, one, clean in zip(("the output", "grad q", "grad k", "grad v"), dirty, want, strict=True):
            cause = "weights of padded keys are made small instead of zero, or padding enters a maximum"
            assert_agrees(one, clean, f"{what} with {GARBAGE:g} in {side} padding", cause)
            assert_zero(
                one[hidden.expand_as(one)], f"{what} at {side} padding", "the mask is applied after the product"
            )


def empty_sequences_work(case: Case) -> None:
    """No queries, no keys, an empty batch, one value column: shapes are right, rows without visible keys are zero.

    Tested without segments, with one tensor of segments and with a pair, for forward, gradients, operator, adjoint and
    prefill.
    """
    mechanism = case.mechanism()
    for n, m, batch, e, segments in _empty(case):
        inputs = case.draw(n, m, seed=6, batch=batch, e=e)
        kind = (
            "no segments" if segments is None else "a pair of segments" if isinstance(segments, tuple) else "segments"
        )
        where = f"n = {n}, m = {m}, e = {e}, batch {batch}, {kind}"
        cause = "an empty axis was not expected"
        out, *grads = with_gradients(
            lambda *x, s=segments: mechanism(*x, segments=s), inputs, torch.ones(*batch, case.heads, n, e)
        )
        want = oracle(lambda q, k, v, s=segments: dense(mechanism, q, k, v, s), *inputs, terms=m + case.d)
        assert_agrees(out, want, f"forward = matrix · v at {where}", cause)
        A, full = mechanism.operator(*inputs[:2], segments=segments), mechanism.matrix(*inputs[:2], segments=segments)
        y = case.draw(n, seed=7, batch=batch)[2]
        back = oracle(lambda a, b: a.mT @ b, full, y, terms=n + m)
        assert_agrees(A @ inputs[2], want, f"A @ x at {where}", cause)
        assert_agrees(A.mT @ y, back, f"A.mT @ y at {where}", cause)
        if isinstance(mechanism, RecurrentMechanism) and not isinstance(segments, tuple):
            assert_agrees(mechanism.prefill(*inputs, segments=segments)[0], want, f"prefill at {where}", cause)
        for name, x, grad in zip("qkv", inputs, grads, strict=True):
            fine = grad.shape == x.shape and bool(torch.isfinite(grad).all())
            assert fine, f"gradient in {name} at {where}: shape {tuple(grad.shape)}, expected finite {tuple(x.shape)}."
        if m == 0:
            assert_zero(out, f"the output at {where}", "a softmax over no keys")


def strides_do_not_matter(case: Case) -> None:
    """Transposed, strided and expanded inputs give the outputs and gradients of contiguous ones."""
    mechanism, n = case.mechanism(), 37
    plain = case.draw(n, seed=7)
    weight = case.draw(n, seed=8)[2]
    shared = [x[:1, :1].expand_as(x) for x in plain]
    views = {
        "token axis first": [x.movedim(-2, 0).contiguous().movedim(0, -2) for x in plain],
        "width before tokens": [x.mT.contiguous().mT for x in plain],
        "every second token": [torch.stack([x, x], -2).flatten(-3, -2)[..., ::2, :] for x in plain],
        "an offset into a wider tensor": [torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]] for x in plain],
        "stride 0": shared,
        "stride 0 keys": [plain[0], shared[1], plain[2]],
        "stride 0 tokens": [x[..., :1, :].expand_as(x) for x in plain],
    }

    def results(*inputs: Tensor) -> list[Tensor]:
        return with_gradients(mechanism, inputs, weight)

    for name, inputs in views.items():
        want = oracles(results, *(x.contiguous() for x in inputs), terms=n + case.d)
        for what, one, other in zip(("output", "grad q", "grad k", "grad v"), results(*inputs), want, strict=True):
            assert_agrees(one, other, f"{what} from {name}", "memory is read in order instead of by strides")


def batch_axes_broadcast(case: Case) -> None:
    """Batch axes that are missing or of size 1 broadcast: shared keys, grouped queries, shared queries and values."""
    mechanism, n, h = case.mechanism(), 21, case.heads
    shapes = {
        "one key head for all": ((2, h), (2, 1), (2, 1)),
        "one key batch for all": ((3, h), (1, h), (1, h)),
        "grouped queries": ((2, 3, h), (2, 1, h), (2, 1, h)),
        "queries without batch axes": ((h,), (2, h), (2, h)),
        "shared values": ((2, h), (2, h), (1,)),
        "shared queries": ((1, h), (2, h), (2, h)),
    }
    for name, axes in shapes.items():
        generator = torch.Generator().manual_seed(9)
        widths = (case.d, case.d, case.e)
        small = [
            torch.randn(*b, n, w, generator=generator, dtype=torch.float64) for b, w in zip(axes, widths, strict=True)
        ]
        batch = torch.broadcast_shapes(*axes)
        weight = torch.randn(*batch, n, case.e, generator=generator, dtype=torch.float64)

        def wide(q, k, v, batch=batch):
            return dense(mechanism, *(x.expand(*batch, *x.shape[-2:]) for x in (q, k, v)))

        want = oracles(lambda *x, w=weight: with_gradients(wide, x, w), *small, terms=n * sum(batch))
        got = with_gradients(mechanism, small, weight)
        shape = ", ".join(f"{letter} {tuple(x.shape)}" for letter, x in zip("qkv", small, strict=True))
        for what, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
            assert_agrees(
                one, other, f"{what} with {name}: {shape}", "batch axes are flattened before they are broadcast"
            )


def _empty(case: Case) -> Iterator[tuple[int, int, tuple[int, ...], int, Segments | None]]:
    """Yield n, m, batch axes, e and segments, at least one of them of size 0 or 1."""
    e = case.e
    for n, m, batch in ((0, 0, (2,)), (0, 5, (2,)), (4, 4, (0,))):
        ids = torch.zeros(m, dtype=torch.long)
        yield n, m, batch, e, None
        yield n, m, batch, e, ids
        yield n, m, batch, e, (ids[m - n :], ids) if n < m else ids.expand(*batch, 1, m)
    yield 5, 0, (2,), e, (torch.zeros(5, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    yield 5, 5, (2,), 1, None
    yield 4, 4, (2,), 0, None
    if case.takes_more_queries_than_keys:
        yield 5, 0, (2,), e, None


def _padding(ids: Tensor) -> Tensor:
    """Return the positions that are padding in every row, so that one index applies to all rows."""
    return (ids < 0).all(0).nonzero()[:, 0]


def _layouts(case: Case) -> Iterator[tuple[str, int, int, Segments, Tensor, Tensor]]:
    """Yield name, n, m, segments for the call, and the ids of queries and keys, one row per batch entry."""
    lengths = torch.tensor([0, 1, 7, 12])
    right, left = from_lengths(lengths, 12), from_lengths(lengths, 12, padding="left")
    packed = torch.tensor([0] * 7 + [1] + [2] * 12 + [-1] * 3)
    mixed = torch.tensor([[0, 1, -1] * 5 + [2], [5, 5, 0, -1] * 4, [-1] * 16])
    long = torch.tensor([[0] * 150 + [1] * 60 + [2] * 47, [-1] * 57 + [4] * 200])
    yield "right padding", 12, 12, right[:, None], right, right
    yield "left padding", 12, 12, left[:, None], left, left
    yield "packing, segments (n,)", 23, 23, packed, packed.expand(2, -1), packed.expand(2, -1)
    yield "packing in int32", 23, 23, packed.int(), packed.expand(2, -1), packed.expand(2, -1)
    yield "interleaved segments", 16, 16, mixed[:, None], mixed, mixed
    if case.length >= 257:
        yield "packing of 257 tokens", 257, 257, long[:, None], long, long
    yield "fewer queries than keys, left padding", 5, 12, left[:, None], left[:, -5:], left
    yield "fewer queries than keys, packing", 15, 23, packed, packed[-15:].expand(2, -1), packed.expand(2, -1)
    queries, keys = torch.tensor([0, 0, 1, -1, 2]), torch.tensor([1, 0, 0, 0, -1, 1, 7])
    yield "a pair of ids", 5, 7, (queries, keys), queries.expand(2, -1), keys.expand(2, -1)
    yield "a pair of ids (B, 1, ·)", 12, 12, (right[:, None], right[:, None]), right, right
