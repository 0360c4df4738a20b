"""Fits to times at several lengths: the exponent of growth, and the length from which one beats another."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log, sqrt
from typing import NamedTuple


class Fit(NamedTuple):
    """A fit y ∝ N^exponent, with the standard error of the exponent; None for two points."""

    exponent: float
    error: float | None


def growth(points: Mapping[int, float], least: int = 1024) -> Fit | None:
    """Log-log least squares over N ≥ least, or over the last three lengths if fewer are that long.

    >>> round(growth({1024: 1.0, 2048: 4.0, 4096: 16.0}).exponent, 6)
    2.0
    """
    sizes = sorted(points)
    chosen = [n for n in sizes if n >= least]
    chosen = chosen if len(chosen) > 2 else sizes[-3:]
    if len(chosen) < 2:
        return None
    x, y = [log(n) for n in chosen], [log(points[n]) for n in chosen]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    square = sum((a - mean_x) ** 2 for a in x)
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / square
    if len(chosen) == 2:
        return Fit(exponent, None)
    left = sum((b - mean_y - exponent * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Fit(exponent, sqrt(left / (len(x) - 2) / square))


def crossover(times: Mapping[int, float], dense: Mapping[int, float]) -> float | None:
    """The length from which on `times` stay below `dense`, interpolated linearly in log-log.

    0 if they are below at every common length, infinity if not at the longest, None if no length is common.

    >>> round(crossover({256: 2.0, 1024: 8.0}, {256: 1.0, 1024: 16.0}))  # equal at 512: 4 and 4
    512
    """
    sizes = sorted(times.keys() & dense.keys())
    if not sizes:
        return None
    gain = {n: log(dense[n] / times[n]) for n in sizes}
    if gain[sizes[-1]] < 0:
        return inf
    behind = [n for n in sizes if gain[n] < 0]
    if not behind:
        return 0.0
    low = behind[-1]
    high = sizes[sizes.index(low) + 1]
    share = -gain[low] / (gain[high] - gain[low])
    return exp(log(low) + share * log(high / low))
