"""The random head beside which a real one is judged: q, k Gaussian and independent, logits as spread as its own.

logit spread    s² = mean over queries i of the variance over visible keys j of z_ij; softmax does not see what all
                logits of a row share, so variance between rows does not count
random head     z_ij = q_i·k_j, q, k ~ N(0, s/√d · I_d): within a row Var z = |q_i|² s/√d, s² on average

At s = 0 every row is uniform; a large s picks one random key for each query. Width d, length, pattern are the head's
own. The same draws serve all spreads, scaled, so that what is measured is smooth in s: it is taken at the nodes RATIO^i
of a grid, kept, and read between two nodes along a straight line in log s. Compared with measuring at s itself (256 and
512 tokens, d = 64, s from 1 to 8), effective ranks err by 2 % at most; single draws differ by 3 %, sometimes by 7 %, so
the mean of DRAWS is taken. Where s is small, ranks are few and the error is below one.

Only where matrices are formed (`measures.search.FORMED`): beyond, a random head costs more than the head it is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, sqrt

import torch

from heedful.hf.calls import Call
from heedful.measures import effective_rank, energy_share, head_measures
from heedful.measures.rows import over_rows
from heedful.measures.search import FORMED
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Pattern
from heedful.segments import resolve
from heedful.shapes import Tensor

RATIO = 1.2
DRAWS = 2
LEAST, MOST = 0.05, 100.0  # spreads beyond which nothing changes: uniform rows, rows of a single key
SAMPLED = 256  # queries from which the spread of the logits is told


@dataclass(frozen=True)
class Baseline:
    """What a random head measures; None where it was too large to be measured."""

    rank90: float
    rank95: float
    energy10: float
    entropy: float
    sigma: tuple[float, ...]


class Baselines:
    """Random heads of every kind that was asked for, measured once each. What they say does not depend on the order."""

    def __init__(self, *, seed: int = 0, values: int = 32, budget: int = 512):
        self.seed, self.values, self.budget = seed, values, budget
        self._nodes: dict[tuple, Baseline] = {}

    def of(self, n: int, m: int, pattern: Pattern, width: int, spread: float) -> Baseline | None:
        """The random head of this shape whose logits have this standard deviation."""
        if n * m > FORMED or not 0 <= spread < float("inf"):
            return None
        place = log(min(max(spread, LEAST), MOST)) / log(RATIO)
        low, high = floor(place), ceil(place)
        first, second = (self._node(n, m, pattern, width, at) for at in (low, high))
        return _between(first, second, place - low)

    def _node(self, n: int, m: int, pattern: Pattern, width: int, at: int) -> Baseline:
        key = (n, m, pattern, width, at)
        if key not in self._nodes:
            self._nodes[key] = self.measured(n, m, pattern, width, RATIO**at)
        return self._nodes[key]

    def measured(self, n: int, m: int, pattern: Pattern, width: int, spread: float) -> Baseline:
        """The mean of DRAWS random heads, by the library's own measures."""
        drawn = [self._draw(n, m, pattern, width, spread, self.seed + at) for at in range(DRAWS)]
        first, *others = drawn
        for number, other in enumerate(others, 1):
            first = _between(first, other, 1 / (number + 1))
        return first

    def _draw(self, n: int, m: int, pattern: Pattern, width: int, spread: float, seed: int) -> Baseline:
        generator = torch.Generator().manual_seed(seed)
        size = sqrt(spread / sqrt(width))
        q, k = (size * torch.randn(length, width, generator=generator) for length in (n, m))
        op = Softmax(pattern, scale=1.0).operator(q, k)
        found = head_measures(op, min(self.values, n, m), tau=(0.9, 0.95), budget=self.budget, seed=self.seed)
        return Baseline(
            rank90=float(effective_rank(found.spectrum, 0.9).estimate),
            rank95=float(effective_rank(found.spectrum, 0.95).estimate),
            energy10=float(energy_share(found.spectrum, 0.1).estimate),
            entropy=float(over_rows(found.rows.entropy, found.rows.mass > 0)),
            sigma=tuple(found.spectrum.values.tolist()),
        )


def _between(a: Baseline, b: Baseline, part: float) -> Baseline:
    """(1 − part) a + part b."""

    def mix(x: float, y: float) -> float:
        return (1 - part) * x + part * y

    return Baseline(
        mix(a.rank90, b.rank90),
        mix(a.rank95, b.rank95),
        mix(a.energy10, b.energy10),
        mix(a.entropy, b.entropy),
        tuple(map(mix, a.sigma, b.sigma)),
    )


def logit_spread(call: Call) -> float:
    """The standard deviation of a head's logits within a row, over visible keys; for one head and one text.

    All queries up to SAMPLED of them, so many at even distances beyond: never n × m logits at once.
    """
    q, k = call.q[0, 0], call.k[0, 0]
    n, m = q.shape[-2], k.shape[-2]
    layout = resolve(call.segments, n, m, q.device)
    query_ids, key_ids, i, j = (x.reshape(-1, x.shape[-1])[0] for x in layout)
    real = (query_ids >= 0).nonzero()[:, 0]
    if not len(real):
        return float("nan")
    rows = real[torch.linspace(0, len(real) - 1, min(len(real), SAMPLED), device=q.device).round().long()]
    z = call.scale * (q[rows].float() @ k.float().mT)
    if call.softcap is not None:
        z = call.softcap * torch.tanh(z / call.softcap)
    if call.bias is not None:
        z = z + call.bias[0, 0].expand(n, m)[rows]
    shown = (query_ids[rows, None] == key_ids) & call.pattern.allows(i[rows, None], j) & z.isfinite()
    return _spread(z, shown & (z > -1e9))


def _spread(z: Tensor, shown: Tensor) -> float:
    count = shown.sum(-1)
    several = count > 1
    z = torch.where(shown, z, 0).double()
    mean = z.sum(-1) / count.clamp(min=1)
    square = torch.where(shown, (z - mean[:, None]).square(), 0).sum(-1) / count.clamp(min=1)
    return float((square * several).sum() / several.sum().clamp(min=1)) ** 0.5 if bool(several.any()) else 0.0
