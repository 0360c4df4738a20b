"""Results cached until the tensors that they were made from change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


def cached(store: WeakIdKeyDictionary, tensors: Sequence[Tensor], key: Hashable, make: Callable[[], T]) -> T:
    """make(), or its cached result: for the same tensors, not written to since, and the same `key`.

    >>> store, x = WeakIdKeyDictionary(), torch.ones(2)
    >>> y = cached(store, [x], "double", lambda: 2 * x)
    >>> cached(store, [x], "double", lambda: 2 * x) is y
    True
    >>> _ = x.add_(1)
    >>> cached(store, [x], "double", lambda: 2 * x)
    tensor([4., 4.])

    One result is cached for each first tensor, which the cache does not keep alive. Writes that PyTorch does not count,
    through `.data` or by another library, go unnoticed.
    """
    if _must_be_made_anew(tensors):
        return make()
    first, *others = tensors
    versions = [x._version for x in tensors]
    found = store.get(first)
    if found is not None:
        same_key, same_others, same_versions, result = found
        alike = len(others) == len(same_others) and all(x is y for x, y in zip(others, same_others, strict=True))
        if alike and same_key == key and same_versions == versions:
            return result
    result = make()
    store[first] = key, others, versions, result
    return result


def _must_be_made_anew(tensors: Sequence[Tensor]) -> bool:
    """Whether the result must not be cached: tensors without a version, gradients, compilers, CUDA graphs."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return True
    if any(x.is_inference() or x.requires_grad for x in tensors):
        return True
    # a graph would go on reading memory that a later result has replaced
    return any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()
