"""Costs: compares `cost` with the operations that run and the state that is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any

import torch

from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism
from heedful.shapes import Tensor, broadcast_shapes
from heedful.testing.case import Case, DoesNotApply
from heedful.testing.flops import FlopCounter

LEAST, PADDED, MOST, GROWTH = 0.75, 0.5, 1.1, 0.25
"""cost.flops must lie between LEAST and MOST times the counted ones.

A fast path may do more than the necessary work, but not less, except for terms that the formula omits: at most a
quarter (a learned part, corners of tiles on the diagonal). If the tiles of a sparse pattern contain many hidden pairs,
LEAST applies to the work on visible pairs, not to the counted work. If values are wider than keys, a fused kernel pads
the keys with zeros, and the bound is PADDED times the counted flops. If the length doubles, both must grow by the same
factor, within GROWTH: the overhead of tiles differs between two lengths by at most a fifth (random blocks), while a
wrong power of the length would give a factor of 2.
"""


def flops_are_what_cost_says(case: Case) -> None:
    """cost.flops agrees with a counter that raises on unknown operations, at six shapes, and grows like it."""
    mechanism, n, d = case.full_size(), case.length, case.d
    said, ran = {}, {}
    for shape in ((n, n, d), (n // 2, n // 2, d), (n, n, 4 * d), (n // 8, n, d)):
        queries, keys, e = shape
        q, k, v = case.draw(queries, keys, seed=1, batch=(1,), e=e, dtype=torch.float32)
        said[shape], ran[shape] = _compare_flops(mechanism, q, k, v)
    long, short = (n, n, d), (n // 2, n // 2, d)
    grows, should = _ratio(ran[long], ran[short]), _ratio(said[long], said[short])
    assert abs(should - grows) <= GROWTH * grows, (
        f"from n = {n // 2} to {n} the counted flops grow {grows:.2f}×, cost.flops {should:.2f}×. Likely cause: the "
        "formula has another power of the length than the code."
    )
    for _, q, k, v in _grouped(case, n // 4, e=d, dtype=torch.float32):
        _compare_flops(mechanism, q, k, v)


def _compare_flops(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the flops of a call according to `cost` and as counted; raise unless they agree."""
    with torch.no_grad(), FlopCounter() as counter:
        mechanism(q, k, v)
    dims = Dims.of(q, k, v)
    said, ran = mechanism.cost(dims).flops, counter.flops
    padded = dims.e > dims.d
    least = PADDED if padded else LEAST
    enough = said >= least * ran
    if not enough and not padded:
        enough = said >= least * 2 * _visible_pairs(mechanism, q, k) * (dims.d + dims.e)
    assert enough and said <= MOST * ran, (
        f"cost.flops at {dims}: {said:,}, but {ran:,} ran ({_ratio(said, ran):.2f}×, expected {least} to {MOST}): "
        f"{dict(counter.by_operation)}. Likely cause: a multiply-add counts as two; the batch counts, of keys and "
        "values that queries share once; masked pairs do not; d and e are confused."
    )
    return said, ran


def bytes_cover_the_inputs(case: Case) -> None:
    """cost has integers, and its bytes count each input and the output at least once; shared keys count once."""
    mechanism, h = case.mechanism(), case.heads
    for dims in (Dims(1, 1, case.d, case.e), Dims(20, 100, case.d, case.e, batch=6 * h, itemsize=2)):
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
    shared = replace(dims, group_size=3 * h)
    saves, should = cost.bytes - mechanism.cost(shared).bytes, dims.io_bytes - shared.io_bytes
    assert saves >= should, (
        f"cost.bytes at {shared}: {saves:,} fewer than without shared keys, expected {should:,} fewer. Likely cause: "
        "keys and values are counted for each query head; dims.io_bytes counts them once, as dims.kv_batch does."
    )


def state_is_what_cost_says(case: Case) -> None:
    """cost.state is the number of floating-point numbers in the state after m tokens, also if queries share keys."""
    mechanism = case.mechanism()
    if not isinstance(mechanism, RecurrentMechanism):
        state = mechanism.cost(Dims(8, 8, case.d, case.e)).state
        assert state is None, f"cost.state is {state} for a mechanism without a recurrence, expected None."
        raise DoesNotApply(
            f"{type(mechanism).__name__} is no RecurrentMechanism (and cost.state is None, as it should)"
        )
    plain = [("each query has keys of its own", *case.draw(m, seed=2, batch=(3,))) for m in (0, 1, 20, 41)]
    for how, q, k, v in [*plain, *_grouped(case, 20)]:
        states = {
            "cost.state": mechanism.prefill(q, k, v)[1],
            "the state of steps": _after_steps(mechanism, q, k, v),
        }
        said = mechanism.cost(Dims.of(q, k, v)).state
        for name, state in states.items():
            kept = sum(x.numel() for x in _tensors(state) if x.is_floating_point())
            assert said == kept, (
                f"{name} after {k.shape[-2]} tokens, where {how}: cost.state is {said}, but the state holds {kept} "
                f"floating-point numbers (q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}). Likely cause: "
                "the batch or the normaliser was left out, prefill keeps what no later query may see, or what depends "
                "on keys and values alone is kept for each query head."
            )


def _after_steps(mechanism: RecurrentMechanism, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Return the state after one step per token."""
    state = mechanism.init_state(q, k, v)
    for at in range(k.shape[-2]):
        state = mechanism.step(state, *(x[..., at : at + 1, :] for x in (q, k, v)))[1]
    return state


def _grouped(
    case: Case, n: int, e: int | None = None, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Return inputs whose queries share keys and values: all heads of a group, and one head of several batch rows."""
    others = case.heads + 1
    q, k, v = case.draw(n, seed=3, batch=(2, others), e=e, dtype=dtype)
    yield "the heads of a group share keys", q, k[..., :1, :, :], v[..., :1, :, :]
    yield "rows share keys, head by head", q, k[:, :1], v[:, :1]


def _visible_pairs(mechanism: Mechanism, q: Tensor, k: Tensor) -> int:
    """Return the number of visible pairs over the batch; for a mechanism with several parts, of pairs with weight."""
    if sum(isinstance(part, Mechanism) for part in mechanism.modules()) > 1:
        with torch.no_grad():
            return int(mechanism.matrix(q, k).count_nonzero())
    return prod(broadcast_shapes(q.shape[:-2], k.shape[:-2])) * mechanism.pattern.pairs(q.shape[-2], k.shape[-2])


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield every tensor in a nested state."""
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
