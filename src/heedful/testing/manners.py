"""Manners: a mechanism compiles, can be copied and saved, repeats its results, and names bad input in its errors."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from heedful.core import RecurrentMechanism
from heedful.testing.case import Case, assert_agrees, assert_same, oracles, with_gradients
from heedful.validation import check_finite


def compiled_equals_eager(case: Case) -> None:
    """torch.compile changes neither output nor gradients.

    The backend is "aot_eager": like every backend it captures the graphs of both passes, but it runs them without
    generating code. Code generation takes 14 to 25 seconds each and would test the compiler, not the mechanism.
    """
    mechanism, n = case.mechanism(), 21
    inputs, weight = case.draw(n, seed=1), case.draw(n, seed=2)[2]
    want = oracles(lambda *x: with_gradients(mechanism, x, weight), *inputs, terms=n + case.d)
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a graph break is no wrong result
            compiled = torch.compile(mechanism, backend="aot_eager", dynamic=False)
            got = with_gradients(compiled, inputs, weight)
    finally:
        torch._dynamo.reset()
    for name, one, other in zip(("output", "grad q", "grad k", "grad v"), got, want, strict=True):
        assert_agrees(one, other, f"{name} under torch.compile", "Python side effects, or a branch on is_compiling()")


def state_dict_holds_everything(case: Case) -> None:
    """A new instance with other random initial values computes the same after loading the state_dict."""
    inputs = case.draw(21, seed=3)
    old, new = case.mechanism(seed=0), case.mechanism(seed=1)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert_same(
        new(*inputs), old(*inputs), "a state_dict round trip", "a tensor is a plain attribute, no parameter or buffer"
    )


def copies_agree(case: Case) -> None:
    """pickle, copy.deepcopy and .to(dtype) give a mechanism that computes the same, and repr works."""
    mechanism = case.mechanism()
    inputs = case.draw(21, seed=4)
    want = mechanism(*inputs)
    assert_same(copy.deepcopy(mechanism)(*inputs), want, "a deep copy", "state outside the module")
    try:
        loaded = pickle.loads(pickle.dumps(mechanism))
    except Exception as error:
        raise AssertionError(
            f"pickle: {type(error).__name__}: {error}. Likely cause: a lambda or a local function is an attribute; "
            "make it a module-level function or an nn.Module."
        ) from error
    assert_same(loaded(*inputs), want, "a pickled copy", "state outside the module")
    assert type(mechanism).__name__ in repr(mechanism), f"repr: {mechanism!r} does not name {type(mechanism).__name__}."
    for dtype in (torch.float32, torch.float64):
        out = case.mechanism().to(dtype)(*(x.to(dtype) for x in inputs))
        assert out.dtype == dtype, (
            f"after .to({dtype}) the output is {out.dtype}. Likely cause: an unregistered tensor."
        )


def calls_repeat(case: Case) -> None:
    """Two calls give bit-equal results, and train() and eval() change nothing."""
    mechanism = case.mechanism(torch.float32)
    inputs, weight = case.draw(100, seed=5, dtype=torch.float32), case.draw(100, seed=6, dtype=torch.float32)[2]
    want = with_gradients(mechanism, inputs, weight)
    for what, again in (
        ("a second call", with_gradients(mechanism, inputs, weight)),
        ("train()", with_gradients(mechanism.train(), inputs, weight)),
        ("eval()", with_gradients(mechanism.eval(), inputs, weight)),
    ):
        for name, one, other in zip(("output", "grad q", "grad k", "grad v"), again, want, strict=True):
            assert_same(
                one, other, f"{name} of {what}", "randomness at each call, a counter, or dropout; draw at construction"
            )


def bad_input_is_named(case: Case) -> None:
    """Wrong ranks, widths, lengths, dtypes and segments raise a ValueError or TypeError that names the argument."""
    for what, names, call in _mistakes(case):
        _assert_refused(what, names, call)


def non_finite_input_is_named(case: Case) -> None:
    """Under heedful.check_finite(), NaN or infinity in q, k or v is an error that names it."""
    mechanism = case.mechanism()
    for at, name in enumerate("qkv"):
        for value in (torch.nan, torch.inf):
            inputs = list(case.draw(9, seed=7))
            inputs[at][-1, -1, -1, -1] = value

            def call(inputs=inputs):
                with check_finite():
                    mechanism(*inputs)

            _assert_refused(f"{name} with {value} under check_finite()", (name,), call)


def _mistakes(case: Case) -> Iterator[tuple[str, tuple[str, ...], Callable[[], Any]]]:
    """Yield a description of the mistake, the names of which the error must contain one, and the call."""
    mechanism = case.mechanism()
    q, k, v = case.draw(9, seed=8)
    ids = torch.zeros(9, dtype=torch.long)
    yield "q with one axis", ("q",), lambda: mechanism(q[0, 0, 0], k, v)
    yield "k with one axis", ("k",), lambda: mechanism(q, k[0, 0, 0], v)
    yield "v with one axis", ("v",), lambda: mechanism(q, k, v[0, 0, 0])
    yield "q as a list", ("q",), lambda: mechanism(q.tolist(), k, v)
    yield "k narrower than q", ("k", "q"), lambda: mechanism(q, k[..., :-1], v)
    yield "v with fewer tokens than k", ("v",), lambda: mechanism(q, k, v[..., :-1, :])
    yield "k in another dtype", ("k",), lambda: mechanism(q, k.float(), v)
    yield "v in another dtype", ("v",), lambda: mechanism(q, k, v.float())
    yield "v of integers", ("v",), lambda: mechanism(q, k, v.long())
    yield "batch axes that do not fit", ("q", "k", "v"), lambda: mechanism(q, k.repeat(3, 1, 1, 1), v)
    yield "segments of the wrong length", ("segments",), lambda: mechanism(q, k, v, segments=ids[:-1])
    yield "a boolean mask as segments", ("segments",), lambda: mechanism(q, k, v, segments=ids.bool())
    yield "segments in floating point", ("segments",), lambda: mechanism(q, k, v, segments=ids.double())
    yield (
        "segments with batch axes that do not fit",
        ("segments",),
        lambda: mechanism(q, k, v, segments=ids.repeat(5, 1, 1)),
    )
    yield "a pair of segments, keys too short", ("segments",), lambda: mechanism(q, k, v, segments=(ids, ids[:-1]))
    yield "matrix: k narrower than q", ("k", "q"), lambda: mechanism.matrix(q, k[..., :-1])
    yield "matrix: segments of the wrong length", ("segments",), lambda: mechanism.matrix(q, k, segments=ids[:-1])
    yield "operator: k narrower than q", ("k", "q"), lambda: mechanism.operator(q, k[..., :-1])
    if isinstance(mechanism, RecurrentMechanism):
        state = mechanism.prefill(q, k, v)[1]
        one = [x[..., :1, :] for x in (q, k, v)]
        yield "step: two tokens", ("q", "k", "v"), lambda: mechanism.step(state, *(x[..., :2, :] for x in (q, k, v)))
        yield "step: two queries for one key", ("q",), lambda: mechanism.step(state, q[..., :2, :], one[1], one[2])
        yield (
            "step: v narrower than the state's",
            ("v",),
            lambda: mechanism.step(state, one[0], one[1], one[2][..., :-1]),
        )
    if not case.takes_more_queries_than_keys:
        yield "more queries than keys", ("q",), lambda: mechanism(q, k[..., :5, :], v[..., :5, :])


def _assert_refused(what: str, names: tuple[str, ...], call: Callable[[], Any]) -> None:
    wanted = f"expected a ValueError or TypeError that names {' or '.join(names)}"
    try:
        call()
    except (ValueError, TypeError) as error:
        if not any(re.search(rf"\b{name}\b", str(error)) for name in names):
            raise AssertionError(f"{what}: {wanted}, got {type(error).__name__}: {error}") from error
    except Exception as error:
        raise AssertionError(
            f"{what}: {wanted}, got {type(error).__name__}: {error}. Likely cause: the method does not start with "
            "heedful.core.check_inputs(q, k, v, segments=segments, pattern=self.pattern)."
        ) from error
    else:
        raise AssertionError(
            f"{what}: accepted in silence, {wanted}. Likely cause: the method does not start with "
            "heedful.core.check_inputs(q, k, v, segments=segments, pattern=self.pattern)."
        )
