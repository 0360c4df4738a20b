"""Counts the floating-point operations that run, and raises on unknown ones.

counted     matrix products (a multiply-add is two), fused attention, prefix sums, dense factorisations
free        elementwise operations, reductions, views, copies, indexing, sorting: `Cost.flops` omits them too
unknown     an error with the name of the operation: a counter that skips unknown operations proves nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Formula = Callable[..., int]
"""A function from the arguments of an operation to its flops."""


class UnknownOperation(RuntimeError):
    """Raised if an operation runs that is neither counted nor known to be free.

    >>> import torch
    >>> with FlopCounter():
    ...     _ = torch.linalg.eigvals(torch.eye(3))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    heedful.testing.flops.UnknownOperation: ...
    """


class FlopCounter(TorchDispatchMode):
    """Context manager that adds the flops of each operation to `flops`.

    >>> import torch
    >>> with FlopCounter() as counter:
    ...     _ = torch.randn(3, 4) @ torch.randn(4, 5)
    >>> counter.flops
    120

    `formulas` adds operations, such as those of a custom kernel, by their name "namespace::name". Each formula is a
    function of the operation's arguments.
    """

    def __init__(self, formulas: Mapping[str, Formula] | None = None):
        super().__init__()
        self.formulas = {**FORMULAS, **(formulas or {})}
        self.by_operation: Counter[str] = Counter()

    @property
    def flops(self) -> int:
        return self.by_operation.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removesuffix("_")  # an operation and its in-place version have the same flops
        if name in self.formulas:
            self.by_operation[name] += self.formulas[name](*args, **kwargs)
        elif not is_free(func, name):
            raise UnknownOperation(
                f"{func._schema.name}: the flop counter knows no formula for this operation, and it is not on the list "
                "of free ones. If it does arithmetic, pass FlopCounter(formulas={name: formula}); if it only moves or "
                "compares numbers, it belongs in heedful.testing.flops.FREE."
            )
        return func(*args, **kwargs)


def is_free(func: Any, name: str) -> bool:
    """True if the operation is elementwise (by torch's tag), a view, or listed below."""
    return torch.Tag.pointwise in func.tags or func.is_view or name.removeprefix("aten::") in FREE


FREE = frozenset(
    name
    for names in (
        # creation and copies
        "_local_scalar_dense _to_copy _unsafe_view alias clone contiguous copy detach lift_fresh promote_types equal",
        "arange empty empty_like empty_strided empty_permuted new_empty new_empty_strided new_full new_ones new_zeros",
        "full full_like ones ones_like zeros zeros_like zero eye scalar_tensor fill",
        "normal rand randn randint randperm rand_like randn_like randint_like uniform bernoulli exponential",
        "cat stack constant_pad_nd repeat repeat_interleave flip roll tril triu tril_indices triu_indices",
        "slice_scatter select_scatter diagonal_scatter diag_embed native_dropout",
        # indexing, search and sorting
        "gather scatter scatter_add scatter_reduce index index_put _index_put_impl index_select index_copy index_add",
        "index_fill masked_fill masked_select masked_scatter nonzero nonzero_static take put where embedding",
        "sort argsort topk kthvalue median searchsorted bucketize isin unique_dim unique_consecutive _unique2 _unique",
        "histc bincount cummax cummin _cummax_helper _cummin_helper",
        # reductions, and elementwise operations that torch does not tag
        "sum nansum mean prod amax amin aminmax max min argmax argmin any all std var std_mean var_mean norm logsumexp",
        "linalg_vector_norm count_nonzero _softmax softmax _log_softmax _safe_softmax native_layer_norm floor_divide",
        "log_sigmoid_forward",
    )
    for name in names.split()
)
"""Reductions, copies, indexing, sorting, random numbers: none is a matrix product."""


def _product(a, b, *_, **__) -> int:
    """(…, n, d) by (…, d, m): n · m · d multiply-adds."""
    return 2 * a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _product_added(_added, a, b, *_, **__) -> int:
    return _product(a, b)


def _fused(causal_at: int) -> Formula:
    """Flops of the scores and of their product with v, over the pairs that a fused kernel computes.

    `causal_at` is the place of `is_causal`, which differs between signatures. The causal mask is aligned top-left:
    query i sees i + 1 keys.
    """

    def formula(q, k, v, *rest, is_causal=False, **_) -> int:
        causal = is_causal or any(rest[causal_at - 3 : causal_at - 2])
        n, m = q.shape[-2], k.shape[-2]
        pairs = sum(min(i + 1, m) for i in range(n)) if causal else n * m
        return 2 * prod(q.shape[:-2]) * pairs * (q.shape[-1] + v.shape[-1])

    return formula


def _scan(x, *_, **__) -> int:
    return x.numel()


def _inverse(a, *_, **__) -> int:
    return 2 * prod(a.shape[:-2]) * a.shape[-1] ** 3


def _solve(a, b, *_, **__) -> int:
    n = a.shape[-1]
    return prod(a.shape[:-2]) * (2 * n**3 // 3) + 2 * n * b.numel()


def _triangular_solve(a, b, *_, **__) -> int:
    return b.numel() * a.shape[-1]


def _cholesky(a, *_, **__) -> int:
    return prod(a.shape[:-2]) * a.shape[-1] ** 3 // 3


def _qr(a, *_, **__) -> int:
    long, short = max(a.shape[-2:]), min(a.shape[-2:])
    return prod(a.shape[:-2]) * 4 * (long * short**2 - short**3 // 3)


def _svd(a, *_, **__) -> int:
    long, short = max(a.shape[-2:]), min(a.shape[-2:])
    return prod(a.shape[:-2]) * (6 * long * short**2 + 20 * short**3)


FORMULAS: dict[str, Formula] = {
    f"aten::{name}": formula
    for names, formula in (
        ("mm bmm mv dot vdot", _product),
        ("addmm baddbmm addmv addbmm", _product_added),
        # Golub & Van Loan, Matrix Computations, 4th ed.: §3.2, §4.2, §5.2, §8.6.
        ("linalg_inv_ex inverse", _inverse),
        ("_linalg_solve_ex linalg_solve_ex linalg_lstsq", _solve),
        ("linalg_solve_triangular", _triangular_solve),
        ("linalg_cholesky_ex cholesky", _cholesky),
        ("linalg_qr", _qr),
        ("_linalg_svd linalg_svd", _svd),
        ("cumsum cumprod logcumsumexp", _scan),
        ("_scaled_dot_product_flash_attention_for_cpu", _fused(causal_at=4)),
        ("_scaled_dot_product_flash_attention", _fused(causal_at=4)),
        ("_scaled_dot_product_efficient_attention", _fused(causal_at=6)),
        ("_scaled_dot_product_cudnn_attention", _fused(causal_at=6)),
        ("_scaled_dot_product_fused_attention_overrideable", _fused(causal_at=5)),
    )
    for name in names.split()
}
"""Formulas of the counted operations, by their name without the overload."""
