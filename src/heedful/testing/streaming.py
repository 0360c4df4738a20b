"""Streaming: steps reproduce `forward`, and later tokens do not change earlier outputs."""

from __future__ import annotations

import torch

from heedful.core import Mechanism
from heedful.segments import from_lengths
from heedful.shapes import Tensor
from heedful.testing.algebra import LONG
from heedful.testing.case import Case, assert_agrees, assert_same, dense, oracle


def steps_replay_forward(case: Case) -> None:
    """From an empty state, each step gives the last row of forward on all tokens so far."""
    mechanism, n = case.recurrent(), 20
    q, k, v = case.draw(n, seed=1)
    state = mechanism.init_state(q, k, v)
    outputs = []
    for t in range(n):
        token = [x[..., t : t + 1, :] for x in (q, k, v)]
        out, after = mechanism.step(state, *token)
        again, _ = mechanism.step(state, *token)
        assert_same(again, out, f"two steps from one state at t = {t}", "step changes the state that it was given")
        outputs.append(out)
        state = after
    cause = "the state forgets a key too early or too late, or positions are off by one"
    want = oracle(lambda *x: _row_by_row(mechanism, *x, start=0), q, k, v, terms=n + case.d)
    assert_agrees(torch.cat(outputs, -2), want, f"{n} steps replay the definition", cause)
    if case.pattern.is_causal:
        assert_agrees(mechanism(q, k, v), want, f"forward on {n} tokens equals the steps", cause)


def prefill_then_steps_is_the_whole(case: Case) -> None:
    """prefill on a prefix followed by steps gives the result of the whole sequence, for every length of the prefix."""
    mechanism, n = case.recurrent(), 20
    q, k, v = case.draw(n, seed=2)
    cause = "prefill leaves another state than the same tokens one by one"
    for split in (0, 1, n // 2, n - 1):
        out, state = mechanism.prefill(*(x[..., :split, :] for x in (q, k, v)))
        head = oracle(lambda *x: dense(mechanism, *x), *(x[..., :split, :] for x in (q, k, v)), terms=n + case.d)
        assert_agrees(out, head, f"prefill of {split} tokens equals forward", "prefill has its own arithmetic")
        tail = _steps(mechanism, state, *(x[..., split:, :] for x in (q, k, v)))
        rest = oracle(lambda *x, s=split: _row_by_row(mechanism, *x, start=s), q, k, v, terms=n + case.d)
        assert_agrees(tail, rest, f"prefill of {split} tokens, then {n - split} steps", cause)
    _, state = mechanism.prefill(q[..., 5 : n - 1, :], k[..., : n - 1, :], v[..., : n - 1, :])
    last = _steps(mechanism, state, *(x[..., n - 1 :, :] for x in (q, k, v)))
    final = oracle(lambda *x: _row_by_row(mechanism, *x, start=n - 1), q, k, v, terms=n + case.d)
    assert_agrees(last, final, f"prefill of {n - 6} queries and {n - 1} keys, then a step", cause)
    if case.length >= LONG:
        q, k, v = case.draw(LONG, seed=2, batch=())
        _, state = mechanism.prefill(q[..., -2:-1, :], k[..., :-1, :], v[..., :-1, :])
        last, _ = mechanism.step(state, *(x[..., -1:, :] for x in (q, k, v)))
        final = oracle(lambda *x: dense(mechanism, x[0][..., -1:, :], x[1], x[2]), q, k, v, terms=LONG + case.d)
        assert_agrees(last, final, f"prefill of {LONG - 1} tokens, then a step", cause)


def padded_prefill_then_steps_is_each_sequence(case: Case) -> None:
    """After a padded or packed prefill, steps continue the last segment of each row."""
    mechanism, n, more = case.recurrent(), 12, 3
    layouts = {
        "right padding": from_lengths(torch.tensor([0, 1, 7, 12]), n),
        "left padding": from_lengths(torch.tensor([0, 1, 7, 12]), n, padding="left"),
        "packing": torch.tensor(
            [[0] * 5 + [1] * 7, [3] * 4 + [1] * 6 + [-1] * 2, [0] * 3 + [1] * 9, [-1] * 4 + [2] * 8]
        ),
        "interleaved segments": torch.tensor([[0, 1] * 6, [0, 1, -1] * 4, [2] * 12, [-1] * 12]),
    }
    q, k, v = case.draw(n + more, seed=3, batch=(4,))
    for name, ids in layouts.items():
        out, state = mechanism.prefill(*(x[..., :n, :] for x in (q, k, v)), segments=ids[:, None])
        tail = _steps(mechanism, state, *(x[..., n:, :] for x in (q, k, v)))
        for row, own in enumerate(ids):
            real = (own == own[own >= 0][-1]).nonzero()[:, 0].tolist() if (own >= 0).any() else []
            index = [*real, *range(n, n + more)]
            sequence = [x[row][..., index, :] for x in (q, k, v)]
            length = len(real)
            want = oracle(lambda *x, s=length: _row_by_row(mechanism, *x, start=s), *sequence, terms=n + case.d)
            assert_agrees(
                tail[row],
                want,
                f"{name}: prefill of row {row} ({length} tokens in its last segment), then {more} steps",
                "padding or an earlier segment entered the state, or positions count from the row's start",
            )
        assert_same(
            out,
            mechanism(*(x[..., :n, :] for x in (q, k, v)), segments=ids[:, None]),
            f"{name}: prefill equals forward",
            "prefill has its own arithmetic",
        )


def future_leaves_the_past_alone(case: Case) -> None:
    """Changing q, k and v after t leaves outputs up to t bit-equal; removing them, equal up to rounding."""
    case.require_causal()
    cause = "a maximum, a normaliser or a landmark is taken over all positions, later ones too"
    n = min(300, case.length)
    for dtype in (torch.float64, torch.float32):
        mechanism = case.mechanism(dtype)
        q, k, v = case.draw(n, seed=4, dtype=dtype)
        others = [5 * x for x in case.draw(n, seed=5, dtype=dtype)]
        out = mechanism(q, k, v)
        for t in (0, 62, n // 2, n - 2):
            mixed = [
                torch.cat([x[..., : t + 1, :], y[..., t + 1 :, :]], -2) for x, y in zip((q, k, v), others, strict=True)
            ]
            law = f"changing the future of t = {t} of {n} in {dtype}"
            assert_same(mechanism(*mixed)[..., : t + 1, :], out[..., : t + 1, :], law, cause)
    mechanism = case.mechanism()
    q, k, v = case.draw(n, seed=4)
    for t in (1, 63, n - 1):
        want = oracle(lambda *x: mechanism(*x), *(x[..., :t, :] for x in (q, k, v)), terms=n + case.d)
        assert_agrees(mechanism(q, k, v)[..., :t, :], want, f"{n} tokens against the first {t} alone", cause)
    late = mechanism.matrix(q, k).triu(1)
    assert not late.any(), f"matrix: {int((late != 0).sum())} weights above the diagonal under {case.pattern!r}."


def _steps(mechanism, state, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outputs = []
    for t in range(q.shape[-2]):
        out, state = mechanism.step(state, *(x[..., t : t + 1, :] for x in (q, k, v)))
        outputs.append(out)
    return torch.cat(outputs, -2)


def _row_by_row(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, *, start: int) -> Tensor:
    """Return row t of `matrix` @ v on the first t + 1 tokens, for t from `start`: the oracle of decoding."""
    rows = [
        dense(mechanism, q[..., : t + 1, :], k[..., : t + 1, :], v[..., : t + 1, :])[..., -1:, :]
        for t in range(start, q.shape[-2])
    ]
    return torch.cat(rows, -2)
