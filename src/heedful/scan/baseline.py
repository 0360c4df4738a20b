"""The random head beside which a real one is judged: q, k Gaussian and independent, logits as spread as its own.

logit spread    s² = mean over queries i of the variance over visible keys j of z_ij; softmax does not see what all
                logits of a row share, so variance between rows does not count
random head     z_ij = q_i·k_j, q, k ~ N(0, s/√d · I_d): within a row Var z = |q_i|² s/√d, s² on average

At s = 0 every row is uniform; a large s picks one random key for each query. Width d, length, pattern are the head's
own. The same draws serve all spreads, scaled, so that what is measured is smooth in s: it is taken at the nodes RATIO^i
of a grid, kept, and read between two nodes along a straight line in log s. Compared with measuring at s itself (256 and
512 tokens, d = 64, s from 1 to 8), effective ranks err by 2 % at most; single draws differ by 3 %, sometimes by 7 %, so
the mean of DRAWS is taken. Where s is small, ranks are few and the error is below one.

A random head costs about as much as the head it is for; heads with logits of like spread share one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log, sqrt
from typing import Any, NamedTuple

import torch

from heedful.hf.calls import Call
from heedful.measures import effective_rank, energy_share, head_measures
from heedful.measures.rows import over_rows
from heedful.measures.search import SearchOptions, block_of
from heedful.measures.stopping import BLOCK
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Bool, Float, Int, Tensor

BUDGET = 208  # products for a head: 96 columns of a sketch, which tells ranks to a few percent, and 32 values
RATIO = 1.2
DRAWS = 2
NODES_ON_GPU = 8  # nodes that are measured together there: short heads wait for launches
LEAST, MOST = 0.05, 100.0  # spreads beyond which nothing changes: uniform rows, rows of a single key
SAMPLED = 256  # queries from which the spread of the logits is told
ROWS = 64  # of them at a time


@dataclass(frozen=True)
class Baseline:
    """What a random head measures."""

    rank90: float
    rank95: float
    energy10: float
    entropy: float
    sigma: tuple[float, ...]


@dataclass(frozen=True)
class RandomHead:
    """The shape of a random head: n queries and m keys of some width under a pattern, and where it is measured."""

    n: int
    m: int
    pattern: Pattern
    width: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @classmethod
    def like(cls, call: Call) -> RandomHead:
        """As the heads of a call. Products with 16-bit q and k are faster on a GPU; a CPU computes in float32."""
        device = call.q.device
        dtype = torch.float32 if device.type == "cpu" else call.q.dtype
        return cls(call.q.shape[-2], call.k.shape[-2], call.pattern, call.q.shape[-1], str(device), dtype)


class Baselines:
    """Random heads that were measured, kept by shape and spread."""

    def __init__(self, seed: int = 0, values: int = 32, budget: int = BUDGET):
        self.seed, self.values, self.budget = seed, values, budget
        self._nodes: dict[tuple[RandomHead, int], Baseline] = {}
        self._lock = threading.Lock()  # what one thread measures, the others wait for instead of doing it again

    def of(self, head: RandomHead, spread: float) -> Baseline | None:
        """The random head of this shape whose logits have this standard deviation; None where they have none."""
        if not 0 <= spread < float("inf"):
            return None
        place = log(min(max(spread, LEAST), MOST)) / log(RATIO)
        low, high = floor(place), ceil(place)
        first, second = (self._node(head, at) for at in (low, high))
        return _between(first, second, place - low)

    def _node(self, head: RandomHead, at: int) -> Baseline:
        with self._lock:
            if (head, at) not in self._nodes:
                # Which nodes are measured together follows from the node alone, so that numbers never depend on
                # what was asked before.
                some = 1 if head.device == "cpu" else NODES_ON_GPU
                nodes = range(at // some * some, (at // some + 1) * some)
                found = self.measured(head, [RATIO**node for node in nodes])
                self._nodes |= {(head, node): base for node, base in zip(nodes, found, strict=True)}
            return self._nodes[head, at]

    def measured(self, head: RandomHead, spreads: Sequence[float]) -> list[Baseline]:
        """The mean of DRAWS random heads for each spread, by the library's own measures."""
        drawn = [_drawn(head, self.seed + at) for at in range(DRAWS)]
        sizes = torch.tensor([sqrt(spread / sqrt(head.width)) for spread in spreads])[:, None, None, None]
        q, k = (sizes * torch.stack(x) for x in zip(*drawn, strict=True))
        q, k = (x.flatten(0, 1).to(head.device, head.dtype) for x in (q, k))
        op = Softmax(head.pattern, scale=1.0).operator(q, k)
        budget = self.budget * block_of(op) // BLOCK
        search = SearchOptions(budget, failure=0, seed=self.seed)
        found = head_measures(op, min(self.values, head.n, head.m), tau=(0.9, 0.95), search=search)

        def mean(x: Tensor) -> Any:
            return x.double().cpu().unflatten(0, (len(spreads), DRAWS)).mean(1).tolist()

        rank90 = mean(effective_rank(found.spectrum, 0.9).estimate)
        rank95 = mean(effective_rank(found.spectrum, 0.95).estimate)
        energy10 = mean(energy_share(found.spectrum, 0.1).estimate)
        entropy = mean(over_rows(found.rows.entropy, found.rows.mass > 0))
        sigma = map(tuple, mean(found.spectrum.values))
        return [Baseline(*numbers) for numbers in zip(rank90, rank95, energy10, entropy, sigma, strict=True)]


def _drawn(head: RandomHead, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(head.n, head.width, generator=generator)
    return q, torch.randn(head.m, head.width, generator=generator)


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


def logit_spreads(call: Call) -> list[list[float]]:
    """The standard deviation of each head's logits within a row, over visible keys, for each item of the batch.

    All queries up to SAMPLED of them, so many at even distances beyond, a few at a time: never n × m logits at once.
    """
    return [_spreads(call.item(at)) for at in range(len(call.q))]


def _spreads(call: Call) -> list[float]:
    """The same for the one item of a call; NaN for differences of two softmaxes, which have no logits."""
    if call.minus is not None:
        return [float("nan")] * call.heads
    n, m = call.q.shape[-2], call.k.shape[-2]
    size = n, m, call.q.device, SAMPLED, ROWS
    samples = _samples(call.pattern, call.segments, *size) if call.segments is not None else _usual(call.pattern, *size)
    if not samples:
        return [float("nan")] * call.heads
    found = [_variances(*_logits(call, sample)) for sample in samples]
    variance, several = (torch.cat(x, -1) for x in zip(*found, strict=True))
    total = (variance * several).sum(-1) / several.sum(-1).clamp(min=1)
    return total.sqrt().tolist()


class _Sample(NamedTuple):
    """Some queries, which of the first keys each of them sees, 1 or 0, and how many."""

    rows: Int[Tensor, " r"]
    shown: Float[Tensor, "r c"]
    number: Int[Tensor, " r"]


def _samples(
    pattern: Pattern, segments: Segments | None, n: int, m: int, device: torch.device, most: int, step: int
) -> list[_Sample]:
    """`most` real queries at even distances, `step` at a time."""
    query_ids, key_ids, i, j = (x.reshape(-1, x.shape[-1])[0] for x in resolve(segments, n, m, device))
    real = (query_ids >= 0).nonzero()[:, 0]
    if not len(real):
        return []
    rows = real[torch.linspace(0, len(real) - 1, min(len(real), most), device=device).round().long()]
    shown = (query_ids[rows, None] == key_ids) & pattern.allows(i[rows, None], j)
    reach = torch.where(shown, torch.arange(1, m + 1, device=device), 0).amax(-1)  # no key after it is seen
    parts = zip(rows.split(step), shown.split(step), reach.split(step), strict=True)
    return [_Sample(part, seen[:, : int(last.max())].float(), seen.sum(-1)) for part, seen, last in parts]


@lru_cache(maxsize=4)
def _usual(pattern: Pattern, n: int, m: int, device: torch.device, most: int, step: int) -> list[_Sample]:
    """Where every token is real, layers ask the same."""
    return _samples(pattern, None, n, m, device, most, step)


def _logits(call: Call, sample: _Sample) -> tuple[Float[Tensor, "h r c"], Float[Tensor, "*h r c"], Int[Tensor, "*h r"]]:
    """The logits of some queries on the first c keys, which of them are seen, and how many."""
    n, m = call.q.shape[-2], call.k.shape[-2]
    rows, shown, count = sample
    keys, group = slice(shown.shape[-1]), call.heads // call.k.shape[1]
    q = (call.scale * call.q[0].index_select(1, rows).float()).unflatten(0, (-1, group)).flatten(1, 2)
    z = (q @ call.k[0, :, keys].float().mT).view(call.heads, len(rows), -1)  # queries of a group beside each other
    if call.softcap is not None:
        z = call.softcap * torch.tanh(z / call.softcap)
    if call.bias is None:
        return z, shown, count
    z = z + call.bias[0].expand(-1, n, m)[:, rows, keys]
    assert call.hidden is not None
    seen = (shown > 0) & z.isfinite() & ~call.hidden[0].expand(-1, n, m)[:, rows, keys]
    return torch.where(seen, z, 0), seen.float(), seen.sum(-1)


def _variances(
    z: Float[Tensor, "h r c"], weight: Float[Tensor, "*h r c"], count: Int[Tensor, "*h r"]
) -> tuple[Float[Tensor, "h r"], Bool[Tensor, "h r"]]:
    """The variance of z over what is shown, and which rows have several numbers to tell it from. Overwrites z."""
    count = count.expand(z.shape[:-1])
    mean = z.mul_(weight).sum(-1, keepdim=True) / count.clamp(min=1)[..., None]
    away = z.sub_(mean).mul_(weight)
    return torch.linalg.vector_norm(away, dim=-1).double().square() / count.clamp(min=1), count > 1
