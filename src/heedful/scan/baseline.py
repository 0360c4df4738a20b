"""The random head that a real head is compared with: Gaussian q and k, and logits of the same standard deviation.

logit spread    s² = mean over queries i of the variance over visible keys j of z_ij. Variance between rows does not
                count: softmax ignores what all logits of a row have in common
random head     z_ij = q_i·k_j, q, k ~ N(0, s/√d · I_d): within a row Var z = |q_i|² s/√d, s² on average

At s = 0 every row is uniform; a large s picks one random key for each query. Width d, length and pattern are those of
the real head. All spreads use the same draws, scaled, so the measures are smooth in s. They are computed at the nodes
RATIO^i of a grid, cached, and interpolated linearly in log s. Compared with measuring at s itself (256 and 512 tokens,
d = 64, s from 1 to 8), effective ranks err by 2 % at most. Single draws differ by 3 %, sometimes by 7 %, so the mean of
DRAWS is taken. Where s is small, ranks are small and the error is below one.

A random head costs about as much as a real one; heads whose logits have a similar spread share one.
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
from heedful.measures.profile import BLOCK
from heedful.measures.rows import over_rows
from heedful.measures.search import SearchOptions, block_of
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Pattern
from heedful.segments import Segments, resolve
from heedful.shapes import Bool, Float, Int, Tensor

BUDGET = 208  # products for a head: 96 columns of a sketch, for ranks within a few percent and 32 values.
# With 176 (80 columns) rank(.95) came out 0.4 % low on average, 1.9 % of the heads were off by more than 5 %
RATIO = 1.2
DRAWS = 2
NODES_ON_GPU = 8  # nodes measured in one batch on a GPU: short sequences are CPU-bound
LEAST, MOST = 0.05, 100.0  # spreads are clamped to this range: below it rows are uniform, above it one key takes all
SAMPLED = 256  # queries from which the spread of the logits is estimated
ROWS = 64  # queries processed at a time


@dataclass(frozen=True)
class Baseline:
    """The measures of a random head."""

    rank90: float
    rank95: float
    energy10: float
    entropy: float
    sigma: tuple[float, ...]


@dataclass(frozen=True)
class RandomHead:
    """The shape of a random head (queries, keys, pattern, width), and the device and dtype used to measure it."""

    n: int
    m: int
    pattern: Pattern
    width: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @classmethod
    def like(cls, call: Call) -> RandomHead:
        """The shape of a call's heads. A GPU uses the dtype of q (16 bits are faster), a CPU float32."""
        device = call.q.device
        dtype = torch.float32 if device.type == "cpu" else call.q.dtype
        return cls(call.q.shape[-2], call.k.shape[-2], call.pattern, call.q.shape[-1], str(device), dtype)


class Baselines:
    """Measures random heads and caches the results by shape and spread."""

    def __init__(self, seed: int = 0, values: int = 32, budget: int = BUDGET):
        self.seed, self.values, self.budget = seed, values, budget
        self._nodes: dict[tuple[RandomHead, int], Baseline] = {}
        self._lock = threading.Lock()  # a node is measured once; other threads wait for it

    def of(self, head: RandomHead, spread: float) -> Baseline | None:
        """The random head of this shape whose logits have this standard deviation; None if `spread` is not finite."""
        if not 0 <= spread < float("inf"):
            return None
        place = log(min(max(spread, LEAST), MOST)) / log(RATIO)
        low, high = floor(place), ceil(place)
        first, second = (self._node(head, at) for at in (low, high))
        return _between(first, second, place - low)

    def _node(self, head: RandomHead, at: int) -> Baseline:
        with self._lock:
            if (head, at) not in self._nodes:
                # Which nodes are measured together depends only on the node, so results do not depend on the order
                # of requests.
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

    Uses all queries if there are at most SAMPLED, else SAMPLED evenly spaced ones. Processes ROWS queries at a time, so
    the n × m logits are never materialised.
    """
    return [_spreads(call.item(at)) for at in range(len(call.q))]


def _spreads(call: Call) -> list[float]:
    """The standard deviations for a call with one item; NaN for differences of two softmaxes, which have no logits."""
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
    """Some queries; for each, a 0/1 mask of the first keys that it sees, and their number."""

    rows: Int[Tensor, " r"]
    shown: Float[Tensor, "r c"]
    number: Int[Tensor, " r"]


def _samples(
    pattern: Pattern, segments: Segments | None, n: int, m: int, device: torch.device, most: int, step: int
) -> list[_Sample]:
    """At most `most` evenly spaced real queries, in groups of `step`."""
    query_ids, key_ids, i, j = (x.reshape(-1, x.shape[-1])[0] for x in resolve(segments, n, m, device))
    real = (query_ids >= 0).nonzero()[:, 0]
    if not len(real):
        return []
    rows = real[torch.linspace(0, len(real) - 1, min(len(real), most), device=device).round().long()]
    shown = (query_ids[rows, None] == key_ids) & pattern.allows(i[rows, None], j)
    reach = torch.where(shown, torch.arange(1, m + 1, device=device), 0).amax(-1)  # index after the last visible key
    parts = zip(rows.split(step), shown.split(step), reach.split(step), strict=True)
    return [_Sample(part, seen[:, : int(last.max())].float(), seen.sum(-1)) for part, seen, last in parts]


@lru_cache(maxsize=4)
def _usual(pattern: Pattern, n: int, m: int, device: torch.device, most: int, step: int) -> list[_Sample]:
    """The samples for a text without padding. Cached, because all layers use the same."""
    return _samples(pattern, None, n, m, device, most, step)


def _logits(call: Call, sample: _Sample) -> tuple[Float[Tensor, "h r c"], Float[Tensor, "*h r c"], Int[Tensor, "*h r"]]:
    """The logits of some queries on the first c keys, which keys are visible, and how many."""
    n, m = call.q.shape[-2], call.k.shape[-2]
    rows, shown, count = sample
    keys, group = slice(shown.shape[-1]), call.heads // call.k.shape[1]
    q = (call.scale * call.q[0].index_select(1, rows).float()).unflatten(0, (-1, group)).flatten(1, 2)
    z = (q @ call.k[0, :, keys].float().mT).view(call.heads, len(rows), -1)  # queries that share keys are adjacent
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
    """The variance of z over visible keys, and which rows have at least two of them. Overwrites z."""
    count = count.expand(z.shape[:-1])
    mean = z.mul_(weight).sum(-1, keepdim=True) / count.clamp(min=1)[..., None]
    away = z.sub_(mean).mul_(weight)
    return torch.linalg.vector_norm(away, dim=-1).double().square() / count.clamp(min=1), count > 1
