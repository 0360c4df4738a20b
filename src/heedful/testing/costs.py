"""What `cost` says, against what really runs and what is really kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism
from heedful.patterns import Causal, Full
from heedful.shapes import Tensor
from heedful.testing.case import Case, DoesNotApply
from heedful.testing.flops import FlopCounter

LEAST, SPARSE, MOST, GROWTH = 0.75, 0.5, 1.1, 0.25
"""cost.flops must lie between LEAST and MOST times the counted ones.

A fast path does more than the necessary work, and can't do less, up to the terms that a formula leaves out. Where all
queries see all keys or all before them, it does a quarter more at most (a learned part that the formula leaves out, the
corners of tiles on the diagonal). It does up to twice as much, SPARSE, where tiles are about as large as what a sparse
pattern lets through, and where zeros fill values up to another width than that of the keys. From one
length to twice that length both must grow alike, within GROWTH: tiles fit two lengths differently well, by a fifth at
worst (random blocks), while another power of the length would show as 2×.
"""


def flops_are_what_cost_says(case: Case) -> None:
    """cost.flops agrees with a counter that refuses unknown operations, at four shapes, and grows as it does."""
    mechanism, n = case.full_size(), case.length
    d = case.d
    said, ran = {}, {}
    for shape in ((n, n, d), (n // 2, n // 2, d), (n, n, 4 * d), (n // 8, n, d)):
        queries, keys, e = shape
        q, k, v = case.draw(queries, keys, seed=1, batch=(1,), e=e, dtype=torch.float32)
        with torch.no_grad(), FlopCounter() as counter:
            mechanism(q, k, v)
        said[shape], ran[shape] = mechanism.cost(Dims.of(q, k, v)).flops, counter.flops
        least = LEAST if e == d and _is_dense(mechanism, n) else SPARSE
        assert least * ran[shape] <= said[shape] <= MOST * ran[shape], (
            f"cost.flops at n = {queries}, m = {keys}, d = {d}, e = {e}: {said[shape]:,}, but {ran[shape]:,} ran "
            f"({_ratio(said[shape], ran[shape]):.2f}×, expected {least} to {MOST}): {dict(counter.by_operation)}. "
            "Likely cause: a multiply-add counts as two; the batch counts; masked pairs do not; d and e are confused."
        )
    long, short = (n, n, d), (n // 2, n // 2, d)
    grows, should = _ratio(ran[long], ran[short]), _ratio(said[long], said[short])
    assert abs(should - grows) <= GROWTH * grows, (
        f"from n = {n // 2} to {n} the counted flops grow {grows:.2f}×, cost.flops {should:.2f}×. Likely cause: the "
        "formula has another power of the length than the code."
    )


def bytes_cover_the_inputs(case: Case) -> None:
    """cost holds integers, and no fewer bytes than reading each input and writing the output once."""
    mechanism = case.mechanism()
    for dims in (Dims(1, 1, case.d, case.e), Dims(20, 100, case.d, case.e, batch=6, itemsize=2)):
        cost = mechanism.cost(dims)
        assert isinstance(cost, Cost), f"cost({dims}) is {type(cost).__name__}, expected heedful.Cost."
        for name in ("flops", "bytes"):
            kind = type(getattr(cost, name))
            assert kind is int, (
                f"cost.{name} at {dims} is {kind.__name__}, expected int. Likely cause: `/` or a tensor."
            )
        assert cost.bytes >= dims.io_bytes, (
            f"cost.bytes at {dims}: {cost.bytes:,}, expected at least {dims.io_bytes:,}, each input read and the "
            "output written once. Likely cause: itemsize or batch was left out."
        )


def state_is_what_cost_says(case: Case) -> None:
    """cost.state is the number of floating-point numbers in the state after m tokens; None without a recurrence."""
    mechanism = case.mechanism()
    if not isinstance(mechanism, RecurrentMechanism):
        state = mechanism.cost(Dims(8, 8, case.d, case.e)).state
        assert state is None, f"cost.state is {state} for a mechanism without a recurrence, expected None."
        raise DoesNotApply(
            f"{type(mechanism).__name__} is no RecurrentMechanism (and cost.state is None, as it should)"
        )
    for m in (0, 1, 20, 41):
        q, k, v = case.draw(m, seed=2, batch=(3,))
        kept = sum(x.numel() for x in _tensors(mechanism.prefill(q, k, v)[1]) if x.is_floating_point())
        said = mechanism.cost(Dims.of(q, k, v)).state
        assert said == kept, (
            f"cost.state after m = {m} tokens: {said}, but the state holds {kept} floating-point numbers "
            f"(batch 3 · {case.heads} heads, d = {case.d}, e = {case.e}). Likely cause: the batch or the normaliser "
            "was left out, or prefill keeps what no later query may see."
        )


def _is_dense(mechanism: Mechanism, n: int) -> bool:
    """Whether all its parts let each query see all keys, or all before it: at least as many pairs as `Causal`."""
    patterns = (part.pattern for part in mechanism.modules() if isinstance(part, Mechanism))
    return all(isinstance(pattern, Full | Causal) or pattern.pairs(n, n) >= n * (n + 1) // 2 for pattern in patterns)


def _tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in a state, however it is nested."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        yield from (x for part in state.values() for x in _tensors(part))
    elif isinstance(state, list | tuple):
        yield from (x for part in state for x in _tensors(part))
    elif is_dataclass(state):
        yield from (x for field in fields(state) for x in _tensors(getattr(state, field.name)))


def _ratio(a: float, b: float) -> float:
    return a / b if b else float(a == b) or float("inf")
