"""Fair timing: every contender runs once per round, so other load on the machine affects all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST = 25
"""The maximal number of rounds."""


@dataclass(frozen=True)
class Pace:
    """How long to measure one contender.

    least      minimal number of samples, unless they take longer than `patience` seconds
    budget     seconds to spend at least
    patience   seconds after which measuring stops, even with fewer samples
    """

    least: int = 3
    budget: float = 1.0
    patience: float = 15.0

    def enough(self, samples: list[float]) -> bool:
        spent = sum(samples)
        return (len(samples) >= self.least and spent >= self.budget) or (bool(samples) and spent >= self.patience)


def race(calls: Mapping[str, Callable[[], object]], now: Callable[[], float], pace: Pace) -> dict[str, Any]:
    """Samples of each call in seconds, or the exception that it raised.

    The first call of each is a warm-up. It counts as a sample if it takes so long that warming up does not matter.

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
    """Median, interquartile range relative to it, fastest sample, and number of samples."""
    median = statistics.median(samples)
    quarters = statistics.quantiles(samples, n=4) if len(samples) > 2 else [min(samples), median, max(samples)]
    return {
        "seconds": median,
        "spread": (quarters[2] - quarters[0]) / median if median else 0.0,
        "fastest": min(samples),
        "samples": len(samples),
    }
