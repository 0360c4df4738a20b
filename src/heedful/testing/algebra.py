"""Algebra: the fast path, the operator and the gradients agree with the matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from heedful.core import Mechanism
from heedful.kernels.row_statistics.sums import Request
from heedful.segments import Segments
from heedful.shapes import Tensor
from heedful.testing.case import (
    Case,
    DoesNotApply,
    Oracle,
    assert_agrees,
    assert_same,
    dense,
    oracle,
    oracles,
    with_gradients,
)

# One token, two, odd lengths around the usual tile sizes, fewer queries than keys (a cache), and one long sequence:
# kernels switch between code paths at powers of two, and 1024 is the largest at which float64 `matrix` is still fast.
LONG = 1100
SIZES = ((1, 1), (2, 2), (63, 63), (100, 100), (257, 257), (1, 100), (63, 100), (2, 257), (1, LONG), (LONG, LONG))
WIDE = 130  # values wider than 64 and 128, where kernels begin a second block of columns
MORE_QUERIES = ((2, 1), (100, 63), (257, 2))


def forward_is_matrix_times_v(case: Case) -> None:
    """forward(q, k, v) = matrix(q, k) @ v in float64, at every size, with a cache and with wide values."""
    mechanism = case.mechanism()
    for n, m in (*SIZES, *(MORE_QUERIES if case.takes_more_queries_than_keys else ())):
        if max(n, m) > case.length:
            continue
        q, k, v = case.draw(n, m, seed=n * 2000 + m, batch=() if m == LONG else (2,))
        want = oracle(lambda *x: dense(mechanism, *x), q, k, v, terms=m + case.d)
        assert_agrees(
            mechanism(q, k, v),
            want,
            f"forward = matrix · v at n = {n}, m = {m}",
            "causal alignment is not bottom-right" if n < m else "the fast path and the definition differ",
        )
    inputs, weight = case.draw(40, 70, seed=9, e=WIDE), case.draw(40, seed=10, e=WIDE)[2]
    exact = oracles(lambda *x: with_gradients(partial(dense, mechanism), x, weight), *inputs, terms=70 + WIDE)
    got = with_gradients(mechanism, inputs, weight)
    for name, one, want in zip(("forward", "grad q", "grad k", "grad v"), got, exact, strict=True):
        cause = "value columns beyond the first block of a kernel are left out or come from another block"
        assert_agrees(one, want, f"{name} = that of matrix · v with values {WIDE} wide", cause)


def outputs_add_up_with_the_values(case: Case) -> None:
    """forward(q, k, a·v₁ + b·v₂) = a·forward(q, k, v₁) + b·forward(q, k, v₂)."""
    mechanism = case.mechanism()
    for n, m in ((7, 7), (20, 100)):
        q, k, v1 = case.draw(n, m, seed=1)
        v2 = 10 * case.draw(n, m, seed=2)[2]
        want = oracle(
            lambda *x: 2 * mechanism(*x[:3]) - 3 * mechanism(x[0], x[1], x[3]), q, k, v1, v2, terms=m + case.d
        )
        assert_agrees(
            mechanism(q, k, 2 * v1 - 3 * v2),
            want,
            f"superposition in v at n = {n}, m = {m}",
            "the output is no linear function of v: values are clipped, normalised, or enter the weights",
        )


def operator_is_the_matrix(case: Case) -> None:
    """A @ x, A.mT @ y, rows, sums over rows, to_dense and materialise agree with matrix(q, k)."""
    mechanism = case.mechanism()
    ids = torch.tensor([0] * 11 + [1] * 20 + [-1] * 2)
    for n, m, segments in ((33, 33, None), (9, 63, None), (33, 33, ids)):
        q, k, _ = case.draw(n, m, seed=3)
        where = f"n = {n}, m = {m}{'' if segments is None else ', packed'}"
        with torch.no_grad():  # as in measurements; the adjoint must enable gradients itself
            A = mechanism.operator(q, k, segments=segments)
            _products_agree(A, mechanism.matrix(q, k, segments=segments), where)
            _parts_agree(A, mechanism.matrix(q, k, segments=segments), where)
            _row_sums_agree(A, mechanism.matrix(q, k, segments=segments), where)


def _products_agree(A, full: Tensor, where: str) -> None:
    n, m = full.shape[-2:]
    generator = torch.Generator().manual_seed(4)
    for columns, batch in (
        (1, full.shape[:-2]),
        (3, ()),
        (40, full.shape[:-2]),
        (2, (3, *full.shape[:-2])),
        (None, ()),
    ):
        tail = () if columns is None else (columns,)
        x, y = (torch.randn(*batch, size, *tail, generator=generator, dtype=full.dtype) for size in (m, n))
        shape = f"{where}, x {tuple(x.shape)}"
        forth = oracle(lambda a, b: a @ b, full, x, terms=m + n)
        back = oracle(lambda a, b: a.mT @ b, full, y, terms=m + n)
        Ax, Ay = A @ x, A.mT @ y
        assert_agrees(Ax, forth, f"A @ x = matrix @ x at {shape}", "products() applies another matrix")
        assert_agrees(Ay, back, f"A.mT @ y = matrix.mT @ y at {shape}", "products() has a wrong adjoint")
        if columns is not None:
            left, right = (Ax * y).sum(), (x * Ay).sum()
            bound = (forth.bound + back.bound) * max(Ax.numel(), Ay.numel())
            assert_agrees(left, Oracle(right, bound), f"⟨A x, y⟩ = ⟨x, Aᵀ y⟩ at {shape}", "a wrong adjoint")


def _parts_agree(A, full: Tensor, where: str) -> None:
    n, m = full.shape[-2:]
    exact = oracle(lambda a: a.clone(), full, terms=m + n)
    assert tuple(A.shape) == tuple(full.shape), f"operator.shape at {where}: {A.shape}, expected {tuple(full.shape)}."
    assert tuple(A.mT.shape) == tuple(full.mT.shape), f"operator.mT.shape at {where}: {A.mT.shape}."
    assert_agrees(A.to_dense(), exact, f"to_dense() = matrix at {where}", "a different definition")
    assert_agrees(A.materialise(), exact, f"materialise() = matrix at {where}", "a fast way to another matrix")
    assert_agrees(A.mT.mT.to_dense(), exact, f"A.mT.mT = A at {where}", "a transpose too many")
    for index in ([0, n // 2, n - 1], slice(1, None, 3), torch.tensor([n - 1])):
        want = Oracle(full[..., index, :], exact.bound)
        assert_agrees(A.rows(index), want, f"rows({index}) = matrix[{index}] at {where}", "a wrong adjoint")


def _row_sums_agree(A, full: Tensor, where: str) -> None:
    n, m = full.shape[-2:]
    targets = torch.arange(n)[:, None].add(torch.tensor([0, 3])).remainder(m)
    sums = A.row_sums(Request(targets))
    wanted: dict[str, Callable[[Tensor], Tensor]] = {
        "total": lambda a: a.sum(-1),
        "mass": lambda a: a.abs().sum(-1),
        "square": lambda a: a.square().sum(-1),
        "largest": lambda a: a.abs().amax(-1),
        "at": lambda a: a.gather(-1, targets.expand(*a.shape[:-1], -1)),
    }
    for name, definition in wanted.items():
        assert_agrees(
            getattr(sums, name),
            oracle(definition, full, terms=m + n),
            f"row_sums().{name} is that of the matrix at {where}",
            "row_sums() sums another matrix",
        )


def gradients_are_those_of_the_matrix(case: Case) -> None:
    """Gradients in q, k, v and in every parameter equal those of matrix(q, k) @ v."""
    mechanism = case.mechanism()
    learned = {name: p for name, p in mechanism.named_parameters() if p.requires_grad}
    ids = torch.tensor([0] * 20 + [1] * 25 + [-1] * 5 + [2] * 50)

    def gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        wanted = [*leaves, *learned.values()]
        return torch.autograd.grad(call(*leaves), wanted, weight, allow_unused=True, materialize_grads=True)

    sizes = [(100, 100, None), (20, 63, None), (100, 100, ids)]
    if case.length >= LONG:
        sizes.append((3, LONG, None))  # few queries: their gradients reach the last keys of a long sequence
    for n, m, segments in sizes:
        inputs, weight = case.draw(n, m, seed=5), case.draw(n, seed=6)[2]
        slow, fast = partial(_dense_under, mechanism, segments), partial(mechanism, segments=segments)
        want = oracles(lambda *x, f=slow, w=weight: gradients(f, x, w), *inputs, terms=n + m + case.d)
        for name, one, other in zip(["q", "k", "v", *learned], gradients(fast, inputs, weight), want, strict=True):
            assert_agrees(
                one,
                other,
                f"gradient in {name} at n = {n}, m = {m}{'' if segments is None else ', packed'}",
                "a hand-written backward pass is wrong, or a tensor was detached",
            )


def unread_queries_and_keys_have_no_say(case: Case) -> None:
    """Heads for which `reads_qk` returns False give bit-equal outputs with other queries and keys."""
    mechanism = case.mechanism()
    reads = mechanism.reads_qk(case.heads)
    assert len(reads) == case.heads, f"reads_qk({case.heads}): {len(reads)} answers, expected one for each head."
    unread = [head for head, read in enumerate(reads) if not read]
    if not unread:
        raise DoesNotApply(f"{type(mechanism).__name__} reads queries and keys in all heads")
    q, k, v = case.draw(21, seed=7)
    want = mechanism(q, k, v)[:, unread]
    for what, other in (("other", case.draw(21, seed=8)[:2]), ("zero", (torch.zeros_like(q), torch.zeros_like(k)))):
        assert_same(
            mechanism(*other, v)[:, unread],
            want,
            f"forward with {what} q and k",
            "reads_qk says False of a head that reads",
        )


def _dense_under(mechanism: Mechanism, segments: Segments | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense(mechanism, q, k, v, segments)
