"""Catalogue entries at any length: an instance with default options, and whether a call is fast enough to measure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from heedful.bench.setting import Setting
from heedful.core import Cost, Dims, Mechanism
from heedful.mechanisms import Entry


def instance(entry: Entry, setting: Setting, n: int) -> Mechanism:
    """An instance of the entry for n tokens, with realistic options."""
    facts = {"d": setting.d, "heads": setting.heads, "length": n}
    asked = inspect.signature(entry.build).parameters
    mechanism = entry.build(**{name: fact for name, fact in facts.items() if name in asked})
    return mechanism.to(device=setting.device, dtype=getattr(torch, setting.dtype))


def cost(mechanism: Mechanism, setting: Setting, n: int) -> Cost:
    itemsize = getattr(torch, setting.dtype).itemsize
    return mechanism.cost(Dims(n, n, setting.d, setting.d, setting.batch * setting.heads, itemsize))


def affordable(mechanism: Mechanism, setting: Setting, spent: Mapping[int, float], n: int, longest: float) -> bool:
    """True if a call should take less than `longest` seconds, extrapolated from the last length by `cost`."""
    if not spent:
        return True
    last = max(spent)
    before, now = (cost(mechanism, setting, at).flops for at in (last, n))
    return spent[last] * (now / before if before else n / last) <= longest


def is_linear(entry: Entry) -> bool:
    """True if the complexity is linear in N for all options; N²/l, as for strides, is not.

    >>> from heedful import CATALOG
    >>> is_linear(CATALOG["linear"]), is_linear(CATALOG["current"]), is_linear(CATALOG["strided"])
    (True, True, False)
    """
    first, _, rest = entry.complexity.partition("·")
    return first == "N" and "N" not in rest
