"""Fair timing: every contender once a round, so that what the machine does meanwhile hits all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST = 25
"""Rounds, however fast a call is."""


@dataclass(frozen=True)
class Pace:
    """How long to measure one contender.

    least      samples, unless they take longer than `patience` seconds
    budget     seconds after which `least` samples suffice
    """

    least: int = 3
    budget: float = 1.0
    patience: float = 15.0

    def enough(self, samples: list[float]) -> bool:
        spent = sum(samples)
        return (len(samples) >= self.least and spent >= self.budget) or (bool(samples) and spent >= self.patience)


def race(calls: Mapping[str, Callable[[], object]], now: Callable[[], float], pace: Pace) -> dict[str, Any]:
    """Samples of each call in seconds, or the exception that it raised.

    The first call of each warms up. It is a sample too where it takes so long that warming up is nothing.

    >>> ticks = iter(range(100))
    >>> race({"a": lambda: None}, lambda: next(ticks), Pace(least=2, budget=2))
    {'a': [1, 1]}
    """
    results: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            first = _time(call, now)
        except Exception as error:
            results[name] = error
        else:
            results[name] = [first] if first >= pace.patience / 3 else []
    running = [name for name, found in results.items() if not isinstance(found, Exception)]
    for _ in range(MOST):
        running = [name for name in running if not pace.enough(results[name])]
        for name in running:
            results[name].append(_time(calls[name], now))
    return results


def _time(call: Callable[[], object], now: Callable[[], float]) -> float:
    start = now()
    call()
    return now() - start


def summary(samples: list[float]) -> dict[str, Any]:
    """Median, the middle half's width over it, the fastest, and how many there were."""
    median = statistics.median(samples)
    quarters = statistics.quantiles(samples, n=4) if len(samples) > 2 else [min(samples), median, max(samples)]
    return {
        "seconds": median,
        "spread": (quarters[2] - quarters[0]) / median if median else 0.0,
        "fastest": min(samples),
        "samples": len(samples),
    }
