"""Arithmetic: low precision, large logits, rows without visible keys, uninitialised memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from heedful.core import Mechanism, RecurrentMechanism
from heedful.kernels.row_statistics.sums import Request
from heedful.segments import Segments, from_lengths
from heedful.shapes import Tensor
from heedful.testing.case import Case, assert_agrees, assert_zero, dense, oracle, with_gradients

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def precision_is_no_worse_than_naive(case: Case) -> None:
    """In every precision, output and gradients err at most twice as much as matrix(q, k) @ v does in that precision.

    The reference is float64 on the same rounded inputs. (For float64 itself, this check tests only the dtype;
    `forward_is_matrix_times_v` tests the error.) The error is the maximum for outputs and the Euclidean norm for
    gradients, because the maximum error of a naive float32 gradient varies at random. The tolerance is at least the
    error that float32 sums cannot avoid: two units in the last place for rounding the result, or √m float32 roundings
    for a sum of m terms.
    """
    for dtype in DTYPES:
        mechanism, exact = case.mechanism(dtype), case.mechanism(dtype).to(torch.float64)
        for n, m, offset in ((200, 200, 0), (16, 1000, 1)):  # low precision fails on long sums of one sign
            if m > case.length:
                continue
            q, k, v = case.draw(n, m, seed=1, dtype=dtype)
            inputs, weight = (q, k, v + offset), case.draw(n, seed=2, dtype=dtype)[2]
            kind = mechanism.matrix(q, k).dtype
            assert kind == dtype, (
                f"matrix of {dtype} inputs: {kind}, expected {dtype}. Likely cause: a float32 constant."
            )
            got = with_gradients(mechanism, inputs, weight)
            naive = with_gradients(lambda *x, a=mechanism: dense(a, *x), inputs, weight)
            truth = with_gradients(lambda *x, a=exact: dense(a, *x), [x.double() for x in inputs], weight.double())
            for name, *results in zip(("output", "grad q", "grad k", "grad v"), got, naive, truth, strict=True):
                if name == "output" or not offset:
                    _assert_precise(f"{name} in {dtype} at n = {n}, m = {m}", *results, terms=m)


def products_and_steps_are_as_precise(case: Case) -> None:
    """In low precision, the adjoint and 200 steps of the recurrence obey the same error bound as the output."""
    n = min(200, case.length)
    for dtype in DTYPES:
        mechanism, exact = case.mechanism(dtype), case.mechanism(dtype).to(torch.float64)
        q, k, v = case.draw(n, seed=3, dtype=dtype)
        v = v + 1
        naive, truth = mechanism.matrix(q, k), exact.matrix(q.double(), k.double())
        A = mechanism.operator(q, k)
        _assert_precise(f"output of A @ x in {dtype}", A @ v, naive @ v, truth @ v.double(), terms=n)
        _assert_precise(f"output of A.mT @ y in {dtype}", A.mT @ v, naive.mT @ v, truth.mT @ v.double(), terms=n)
        if isinstance(mechanism, RecurrentMechanism) and case.pattern.is_causal:
            steps = _steps(mechanism, q, k, v)
            _assert_precise(f"output of {n} steps in {dtype}", steps, naive @ v, truth @ v.double(), terms=n)


def arithmetic_is_that_of_the_inputs(case: Case) -> None:
    """float64 inputs are computed in float64 and float32 inputs in float32, also in `matrix`.

    The other checks compare with `matrix`, so they would miss a `matrix` that rounds like the fast path. First test: if
    the inputs change by 10⁻⁸, a float64 matrix changes in proportion, while a matrix that was rounded on the way stays
    equal or jumps. Second test: float32 results differ from float64 by at most the effect of one rounding of the
    inputs, plus 64 roundings of a result.
    """
    q, k, v = case.draw(24, seed=9, batch=())
    exact, generator = case.mechanism(), torch.Generator().manual_seed(10)
    ways = [torch.randn(q.shape, generator=generator, dtype=q.dtype) for _ in "qk"]

    def moved(step: float) -> Tensor:
        return exact.matrix(*(x * (1 + step * way) for x, way in zip((q, k), ways, strict=True))).detach()

    here = moved(0.0)
    once, twice = moved(1e-8) - here, moved(2e-8) - here
    if not torch.equal(moved(0.3), here):  # fixed weights do not depend on q and k
        uneven, far = (twice - 2 * once).abs().max().item(), once.abs().max().item()
        assert far and uneven <= 0.05 * far, (
            f"matrix of float64 inputs that move by 1e-8 moves by {far:.1e}, and uneven by {uneven:.1e}. Likely cause: "
            "float64 inputs are rounded to a lower precision on the way."
        )
    low = [x.float() for x in (q, k, v)]
    high = [x.double() for x in low]
    mechanism, exact = case.mechanism(torch.float32), case.mechanism(torch.float32).double()
    eps = torch.finfo(torch.float32).eps
    for name, got, definition in (
        ("matrix", mechanism.matrix(*low[:2]), lambda q, k, v: exact.matrix(q, k)),
        ("forward", mechanism(*low), lambda *x: dense(exact, *x)),
    ):
        truth = definition(*high)
        near = [[x * (1 + eps * torch.randn(x.shape, generator=generator)) for x in high] for _ in range(4)]
        bound = 8 * max((definition(*x) - truth).abs().max() for x in near) + 64 * eps * truth.abs().max()
        error = (got.double() - truth).abs().max()
        assert error <= bound, (
            f"{name} of float32 inputs: error {error.item():.1e} against float64, where float32 explains "
            f"{bound.item():.1e}. Likely cause: 16-bit arithmetic inside."
        )


def _assert_precise(what: str, got: Tensor, naive: Tensor, truth: Tensor, *, terms: int) -> None:
    dtype = naive.dtype
    assert got.dtype == dtype, f"{what}: {got.dtype}, expected {dtype} like the inputs."
    if dtype == torch.float64:
        return
    order = torch.inf if what.startswith("output") else 2
    error, allowed = (torch.linalg.vector_norm(x.double() - truth, order).item() for x in (got, naive))
    unit = max(2 * torch.finfo(dtype).eps, terms**0.5 * torch.finfo(torch.float32).eps) * truth.abs().max().item()
    floor = torch.linalg.vector_norm(torch.full_like(truth, unit), order).item()
    assert error <= max(2 * allowed, floor), (
        f"{what}: error {error:.1e} against float64; naive arithmetic errs {allowed:.1e}, float32 sums and a rounding "
        f"explain {floor:.1e}. Likely cause: sums are accumulated in low precision, or features are rounded before use."
    )


def inputs_are_left_alone(case: Case) -> None:
    """q, k and v are the same after a call as before it."""
    for dtype in DTYPES:
        mechanism = case.mechanism(dtype)
        inputs = case.draw(33, seed=3, dtype=dtype)
        before = [x.clone() for x in inputs]
        mechanism(*inputs)
        mechanism.matrix(*inputs[:2])
        mechanism(*inputs, segments=from_lengths(torch.tensor([33, 20]), 33)[:, None])
        A = mechanism.operator(*inputs[:2])
        A @ inputs[2], A.mT @ inputs[2]
        if isinstance(mechanism, RecurrentMechanism):
            mechanism.step(mechanism.prefill(*inputs)[1], *(x[..., -1:, :] for x in inputs))
        for name, x, old in zip("qkv", inputs, before, strict=True):
            assert torch.equal(x, old), (
                f"{name} was changed in place by a call in {dtype}. Likely cause: an `op_` on a view."
            )


def large_logits_are_right(case: Case) -> None:
    """With scores up to ±10⁴ an output errs at most twice as much as matrix(q, k) @ v does in that precision.

    The same holds for steps, for outputs under packed segments and, in float32, for gradients. The reference is
    `matrix` in float64 on the same rounded inputs. The tolerance is at least one rounding of the result and of one
    score in float32: a score s, and so the logarithm of a weight, has an error of ε·s. The check skips a precision in
    which `matrix` overflows. In float64 the tolerance is that of the oracle.
    """
    n, cause = 40, "weights that vanish or overflow before their row is divided, or scores that are clipped"
    ids = torch.tensor([0] * 17 + [1] * (n - 17))
    for largest in (1e3, 1e4):
        q, k, v = case.draw(n, seed=4)
        factor = (largest / ((q @ k.mT).abs().max() * case.d**-0.5)).sqrt()
        q, k, weight = q * factor, k * factor, case.draw(n, seed=5)[2]
        scores = f"with scores up to {largest:.0f}"
        exact = case.mechanism()
        want = oracle(lambda *x, a=exact: dense(a, *x), q, k, v, terms=n + case.d)
        assert_agrees(exact(q, k, v), want, f"forward = matrix · v {scores}", cause)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            mechanism, exact = case.mechanism(dtype), case.mechanism(dtype).to(torch.float64)
            inputs = [x.to(dtype) for x in (q, k, v)]
            wide = [x.double() for x in inputs]
            terms = [x.abs().max().item() for x in wide]
            naive, truth = dense(mechanism, *inputs), dense(exact, *wide)
            survives = partial(_assert_survives, scores=scores, largest=largest, cause=cause)
            survives(f"output in {dtype}", mechanism(*inputs), naive, truth, terms[2])
            if isinstance(mechanism, RecurrentMechanism) and case.pattern.is_causal and dtype != torch.float16:
                steps = _steps(mechanism, *inputs)
                survives(f"output of {n} steps in {dtype}", steps, naive, truth, terms[2])
            if dtype != torch.float32:
                continue
            naive, truth = (dense(a, x[0], x[1], x[2], ids) for a, x in ((mechanism, inputs), (exact, wide)))
            packed = mechanism(*inputs, segments=ids)
            survives("output of packed segments", packed, naive, truth, terms[2])
            got = with_gradients(mechanism, inputs, weight)[1:]
            plain = with_gradients(lambda *x, a=mechanism: dense(a, *x), inputs, weight)[1:]
            wanted = with_gradients(lambda *x, a=exact: dense(a, *x), wide, weight)[1:]
            # a gradient may cancel to a small value, but its rounding error is that of its terms
            most = weight.abs().max().item()
            sizes = terms[1] * terms[2] * most, terms[0] * terms[2] * most, most
            for name, one, other, right, size in zip("qkv", got, plain, wanted, sizes, strict=True):
                survives(f"grad {name} in {dtype}", one, other, right, size)


def _steps(mechanism: RecurrentMechanism, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, rows = mechanism.init_state(q, k, v), []
    for t in range(q.shape[-2]):
        out, state = mechanism.step(state, *(x[..., t : t + 1, :] for x in (q, k, v)))
        rows.append(out)
    return torch.cat(rows, -2)


def _assert_survives(
    what: str, got: Tensor, naive: Tensor, truth: Tensor, size: float, *, scores: str, largest: float, cause: str
) -> None:
    if not (torch.isfinite(naive).all() and torch.isfinite(truth).all()):
        return
    bad = int((~torch.isfinite(got)).sum())
    assert not bad, f"{what} {scores}: {bad} of {got.numel()} numbers are not finite. Likely cause: {cause}."
    order = torch.inf if what.startswith("output") else 2
    error, allowed = (torch.linalg.vector_norm(x.double() - truth, order).item() for x in (got, naive))
    relative = 2 * torch.finfo(got.dtype).eps + largest * torch.finfo(torch.float32).eps
    unit = relative * max(size, truth.abs().max().item())
    floor = torch.linalg.vector_norm(torch.full_like(truth, unit), order).item()
    assert error <= max(2 * allowed, floor), (
        f"{what} {scores}: error {error:.1e} against float64; naive arithmetic errs {allowed:.1e}, rounding explains "
        f"{floor:.1e}. Likely cause: {cause}."
    )


def masked_rows_are_zero(case: Case) -> None:
    """A query without visible keys gets zeros and propagates zero gradients, in every precision.

    Products with the operator and with its adjoint and sums over rows are zeros too.
    """
    n = 9
    layouts: list[tuple[str, Segments]] = [
        ("all padding", torch.full((n,), -1)),
        ("no key of its segment", (torch.arange(n), torch.arange(n) + n)),
    ]
    for name, segments in layouts:
        mechanism = case.mechanism()
        q, k, v = case.draw(n, seed=5)
        _assert_still_learns(mechanism, (q, k, v), segments, name)
        A = mechanism.operator(q, k, segments=segments)
        sums = A.row_sums(Request(torch.zeros(n, 1, dtype=torch.long)))
        found = {
            field: getattr(sums, field) for field in ("total", "mass", "square", "entropy", "largest", "count", "at")
        }
        for what, x in {"A @ x": A @ v, "A.mT @ y": A.mT @ v, **found}.items():
            assert_zero(x, f"{what} of the operator, {name}", "a row without keys was not expected")
    for dtype in DTYPES:
        mechanism = case.mechanism(dtype)
        for name, segments in layouts:
            inputs = case.draw(n, seed=5, dtype=dtype)
            out, *grads = with_gradients(lambda *x, a=mechanism, s=segments: a(*x, segments=s), inputs, inputs[2])
            cause = "a softmax over -inf alone, or a division by an empty normaliser"
            assert_zero(out, f"the output, {name}, {dtype}", cause)
            assert_zero(mechanism.matrix(*inputs[:2], segments=segments), f"the matrix, {name}, {dtype}", cause)
            for letter, grad in zip("qkv", grads, strict=True):
                assert_zero(grad, f"the gradient in {letter}, {name}, {dtype}", cause)


def _assert_still_learns(mechanism: Mechanism, inputs: tuple[Tensor, ...], segments: Segments, name: str) -> None:
    """Tensors with gradients in an ordinary call also have them if no key is visible: each input, then parameters."""
    learned = [p for p in mechanism.parameters() if p.requires_grad]
    for letter in ("q", "k", "v", "the parameters"):
        for parameter in learned:
            parameter.requires_grad_(letter == "the parameters")
        leaves = [x.detach().requires_grad_(letter == own) for own, x in zip("qkv", inputs, strict=True)]
        if mechanism(*leaves).requires_grad:
            assert mechanism(*leaves, segments=segments).requires_grad, (
                f"backward where only {letter} need gradients raises, {name}; expected zeros. Likely cause: fresh "
                "zeros; those of heedful.segments.nothing_seen(q, k, v, *parameters) depend on all of them."
            )


def every_output_is_written(case: Case) -> None:
    """If new memory is filled with NaN, results are still finite and correct: no entry is left uninitialised."""
    mechanism = case.mechanism()
    ids = torch.tensor([0] * 20 + [-1] * 13 + [1] * 30)
    cause = "torch.empty leaves rows that no tile, chunk or segment writes"
    for n, m, segments in ((63, 63, None), (21, 63, None), (63, 63, ids), (0, 5, None)):
        inputs = case.draw(n, m, seed=6)
        weight = case.draw(n, seed=7)[2]

        def results(*x, segments=segments, weight=weight):
            return with_gradients(lambda *y: mechanism(*y, segments=segments), x, weight)

        clean = results(*inputs)
        with poisoned_memory():
            poisoned = results(*inputs)
        for name, one, other in zip(("output", "grad q", "grad k", "grad v"), poisoned, clean, strict=True):
            want = oracle(lambda x: x, other, terms=n + m)
            assert_agrees(one, want, f"{name} at n = {n}, m = {m} in poisoned memory", cause)
    if isinstance(mechanism, RecurrentMechanism):
        q, k, v = case.draw(20, seed=8)
        with poisoned_memory():
            state = mechanism.prefill(*(x[..., :19, :] for x in (q, k, v)))[1]
            last, _ = mechanism.step(state, *(x[..., 19:, :] for x in (q, k, v)))
        want = oracle(lambda *x: dense(mechanism, *x)[..., -1:, :], q, k, v, terms=20 + case.d)
        assert_agrees(last, want, "a step after prefill in poisoned memory", "part of the state was never written")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside this block torch.empty returns NaN."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operations without a deterministic version are allowed here
            yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
