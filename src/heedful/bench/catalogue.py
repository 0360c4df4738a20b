"""The catalogue at any length: an instance with its default options, and whether a call is worth waiting for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from heedful.bench.setting import Setting
from heedful.core import Cost, Dims, Mechanism
from heedful.mechanisms import Entry


def instance(entry: Entry, setting: Setting, n: int) -> Mechanism:
    """The entry with the options of real use, for n tokens."""
    facts = {"d": setting.d, "heads": setting.heads, "length": n}
    asked = inspect.signature(entry.build).parameters
    mechanism = entry.build(**{name: fact for name, fact in facts.items() if name in asked})
    return mechanism.to(device=setting.device, dtype=getattr(torch, setting.dtype))


def cost(mechanism: Mechanism, setting: Setting, n: int) -> Cost:
    itemsize = getattr(torch, setting.dtype).itemsize
    return mechanism.cost(Dims(n, n, setting.d, setting.d, setting.batch * setting.heads, itemsize))


def affordable(mechanism: Mechanism, setting: Setting, spent: Mapping[int, float], n: int, longest: float) -> bool:
    """Whether a call is expected to stay below `longest` seconds, by what the last length took and what `cost` says."""
    if not spent:
        return True
    last = max(spent)
    before, now = (cost(mechanism, setting, at).flops for at in (last, n))
    return spent[last] * (now / before if before else n / last) <= longest


def is_linear(entry: Entry) -> bool:
    """Whether its complexity grows with N alone, whatever its options; N²/l, as of strides, does not count.

    >>> from heedful import CATALOG
    >>> is_linear(CATALOG["linear"]), is_linear(CATALOG["current"]), is_linear(CATALOG["strided"])
    (True, True, False)
    """
    first, _, rest = entry.complexity.partition("·")
    return first == "N" and "N" not in rest
