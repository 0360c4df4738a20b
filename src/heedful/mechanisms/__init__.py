"""All mechanisms, one file each, and the catalogue of them.

The README's table, the command line, the conformance tests and the benchmarks are generated from `CATALOG`. To add a
mechanism, add one file and one line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from heedful.core import Mechanism, RecurrentMechanism
from heedful.feature_maps import (
    Cos,
    CosFormer,
    Elu1,
    Exp,
    FeatureMap,
    Hedgehog,
    Identity,
    Polynomial,
    Relu,
    Taylor,
)
from heedful.mechanisms.deprecated import DilatedSoftmax, StridedSoftmax, TreeSoftmax
from heedful.mechanisms.fixed_pattern import FixedPattern
from heedful.mechanisms.gated import GatedLinear
from heedful.mechanisms.key_value_memory import KeyValueMemory
from heedful.mechanisms.linear import Linear
from heedful.mechanisms.linformer import Linformer
from heedful.mechanisms.linformer_sparse import LinformerSparse
from heedful.mechanisms.lowrank_sparse import LowRankSparse
from heedful.mechanisms.memory import ExternalMemory
from heedful.mechanisms.mixture import Mixture
from heedful.mechanisms.nystrom import Nystrom
from heedful.mechanisms.perceiver import Perceiver
from heedful.mechanisms.quadratic import Quadratic, no_activation, relu2
from heedful.mechanisms.retention import Retention
from heedful.mechanisms.softmax import Softmax
from heedful.mechanisms.sum import Sum
from heedful.mechanisms.top_k import TopK
from heedful.mechanisms.truncated_svd import TruncatedSVD
from heedful.mechanisms.window_summary import WindowSummary
from heedful.patterns import (
    Blocks,
    Causal,
    Full,
    Global,
    Pattern,
    RandomBlocks,
    SparseFixed,
    Strided,
    Summaries,
    Tree,
    Window,
    balanced_tree,
)
from heedful.random_features import FavorPlus, FavorPlusPlus, FavorSharp, ReluFeatures, Trig

__all__ = [
    "CATALOG",
    "DilatedSoftmax",
    "Entry",
    "ExternalMemory",
    "FixedPattern",
    "GatedLinear",
    "KeyValueMemory",
    "Linear",
    "LinformerSparse",
    "LowRankSparse",
    "Mixture",
    "Paper",
    "Perceiver",
    "Quadratic",
    "Retention",
    "Softmax",
    "StridedSoftmax",
    "Sum",
    "TopK",
    "TreeSoftmax",
    "WindowSummary",
    "build",
    "no_activation",
    "relu2",
]


class Paper(NamedTuple):
    """The paper that introduced a mechanism."""

    authors: str
    year: int
    where: str

    def __str__(self) -> str:
        return f"{self.authors} {self.year}, {self.where}"


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue.

    complexity   complexity of `forward` in the length N
    small        options for a figure or a test with a few dozen tokens
    """

    name: str
    build: Callable[..., Mechanism]
    family: str
    summary: str
    paper: Paper
    complexity: str
    small: Mapping[str, Any] = field(default_factory=dict)

    def sample(self, **facts: Any) -> Mechanism:
        """Return a small instance. Sizes of the inputs (d, heads, length) are passed to builders that take them."""
        asked = inspect.signature(self.build).parameters
        return self.build(**{name: value for name, value in facts.items() if name in asked} | dict(self.small))

    @property
    def options(self) -> dict[str, Any]:
        """The builder's options and their defaults."""
        return {name: parameter.default for name, parameter in inspect.signature(self.build).parameters.items()}

    @property
    def streams(self) -> bool:
        """True if the mechanism can decode token by token."""
        return isinstance(self.sample(d=8, heads=8, length=32), RecurrentMechanism)


def _window(before: int = 512, after: int = 0, sinks: int = 0, temperature: float = 1.0) -> Softmax:
    return Softmax(Window(before, after, sinks), temperature=temperature)


def _window_sinks(before: int = 512, sinks: int = 4, temperature: float = 1.0) -> Softmax:
    return Softmax(Window(before, sinks=sinks), temperature=temperature)


def _window_summary(before: int = 512, sinks: int = 4) -> WindowSummary:
    return WindowSummary(before, sinks)


def _blocks(size: int = 256, causal: bool = True, temperature: float = 1.0) -> Softmax:
    return Softmax(_if_causal(Blocks(size), causal), temperature=temperature)


def _sparse_fixed(stride: int = 128, summary: int = 8, causal: bool = True, temperature: float = 1.0) -> Softmax:
    return Softmax(_if_causal(SparseFixed(stride, summary), causal), temperature=temperature)


def _longformer(window: int = 512, tokens: tuple[int, ...] = (0,), temperature: float = 1.0) -> Softmax:
    return Softmax(Window(window // 2, window // 2) | Global(tokens), temperature=temperature)


def _bigbird(
    size: int = 64, random: int = 3, tokens: tuple[int, ...] = (0,), seed: int = 0, temperature: float = 1.0
) -> Softmax:
    near = Window(size * 3 // 2, size * 3 // 2)
    return Softmax(near | Global(tokens) | RandomBlocks(size, random, seed), temperature=temperature)


def _relu2(pattern: Pattern = Causal(), scale: float | None = None) -> Quadratic:  # noqa: B008  (frozen)
    return Quadratic(relu2, pattern, scale, normalise="length")


def _identity(pattern: Pattern = Causal(), scale: float | None = None) -> Quadratic:  # noqa: B008  (frozen)
    return Quadratic(no_activation, pattern, scale, normalise="length")


def _l2(pattern: Pattern = Causal(), scale: float | None = None) -> Quadratic:  # noqa: B008  (frozen)
    return Quadratic(torch.exp, pattern, scale, normalise="l2")


def _linear(feature_map: Callable[[], FeatureMap], normalised: bool = True) -> Callable[..., Linear]:
    def build(pattern: Pattern = Causal(), normalise: bool = normalised) -> Linear:  # noqa: B008  (frozen)
        return Linear(feature_map(), pattern, normalise)

    return build


def _cosformer(length: int = 65536, pattern: Pattern = Causal()) -> Linear:  # noqa: B008  (frozen)
    return Linear(CosFormer(length), pattern)


def _hedgehog(d: int, heads: int = 1, pattern: Pattern = Causal()) -> Linear:  # noqa: B008  (frozen)
    return Linear(Hedgehog(d, heads), pattern)


def _retention(decay: float = 0.97) -> Retention:
    return Retention(decay)


def _retention_normalised(decay: float = 0.97) -> Retention:
    return Retention(decay, normalise=True)


def _gla(
    d: int,
    heads: int = 1,
    gate: Literal["channel", "head"] = "channel",
    rank: int = 16,
    tau: float = 16.0,
    normalise: bool = False,
) -> GatedLinear:
    return GatedLinear(d, heads, gate=gate, rank=rank, tau=tau, normalise=normalise)


def _trig(d: int, features: int = 256, seed: int = 0, pattern: Pattern = Causal()) -> Linear:  # noqa: B008  (frozen)
    return Linear(Trig(d, features, seed), pattern)


def _favor_plus(
    d: int,
    features: int = 256,
    seed: int = 0,
    hyperbolic: bool = False,
    pattern: Pattern = Causal(),  # noqa: B008  (frozen)
) -> Linear:
    return Linear(FavorPlus(d, features, seed, hyperbolic=hyperbolic), pattern)


def _favor_plus_plus(
    d: int,
    features: int = 256,
    seed: int = 0,
    pattern: Pattern = Causal(),  # noqa: B008  (frozen)
) -> Linear:
    return Linear(FavorPlusPlus(d, features, seed), pattern)


def _favor_sharp(
    d: int,
    features: int = 256,
    seed: int = 0,
    kind: Literal["sderf", "aderf", "saderf"] = "sderf",
    pattern: Pattern = Causal(),  # noqa: B008  (frozen)
) -> Linear:
    return Linear(FavorSharp(d, features, seed, kind=kind), pattern)


def _relu_features(
    d: int,
    features: int = 256,
    seed: int = 0,
    pattern: Pattern = Causal(),  # noqa: B008  (frozen)
) -> Linear:
    return Linear(ReluFeatures(d, features, seed), pattern)


def _linformer(
    length: int,
    rank: int = 256,
    projection: Literal["learned", "pooled", "random"] = "learned",
    shared: bool = True,
    heads: int = 1,
    seed: int = 0,
) -> Linformer:
    return Linformer(length, rank, projection=projection, shared=shared, heads=heads, seed=seed)


def _lowrank_sparse(
    d: int,
    features: int = 256,
    window: int = 128,
    seed: int = 0,
    kind: Literal["favor+", "favor++", "favor#"] = "favor+",
    pattern: Pattern = Causal(),  # noqa: B008  (frozen)
) -> LowRankSparse:
    maps = {"favor+": FavorPlus, "favor++": FavorPlusPlus, "favor#": FavorSharp}
    if kind not in maps:
        raise ValueError(f"kind: expected one of {', '.join(maps)}, got {kind!r}.")
    return LowRankSparse(maps[kind](d, features, seed), window, pattern)


def _linformer_sparse(
    length: int,
    rank: int = 256,
    window: int = 128,
    projection: Literal["learned", "pooled", "random"] = "learned",
    shared: bool = True,
    heads: int = 1,
    seed: int = 0,
) -> LinformerSparse:
    return LinformerSparse(length, rank, window, projection=projection, shared=shared, heads=heads, seed=seed)


def _truncated_svd(rank: int = 64, inner: Mechanism | None = None) -> TruncatedSVD:
    return TruncatedSVD(rank, inner)


def _strided(stride: int = 128, window: int = 128, causal: bool = True, temperature: float = 1.0) -> Softmax:
    """`window` keys before the query and every `stride`-th key: with window = stride, A⁽¹⁾ ∪ A⁽²⁾ of the paper."""
    _require_count("window", window, 0)
    pattern = Strided(stride) | Window(window, 0 if causal else window)
    return Softmax(_if_causal(pattern, causal), temperature=temperature)


def _dilated(window: int = 128, gap: int = 4, causal: bool = True, temperature: float = 1.0) -> Softmax:
    _require_count("window", window, 1)
    reach = (window - 1) * gap
    return Softmax(Strided(gap) & Window(reach, 0 if causal else reach), temperature=temperature)


def _halves(one: Mechanism, other: Mechanism, merged: Mechanism, heads: int) -> Mechanism:
    """Return a mixture in which half of the heads use `one` and half use `other`; for a single head, `merged`."""
    return Mixture([one, other], [heads - heads // 2, heads // 2]) if heads > 1 else merged


def _sparse_fixed_heads(
    stride: int = 128, summary: int = 8, heads: int = 2, causal: bool = True, temperature: float = 1.0
) -> Mechanism:
    own = Softmax(_if_causal(Blocks(stride), causal), temperature=temperature)
    far = Softmax(_if_causal(Summaries(stride, summary), causal), temperature=temperature)
    return _halves(own, far, _sparse_fixed(stride, summary, causal, temperature), heads)


def _strided_heads(
    stride: int = 128, window: int = 128, heads: int = 2, causal: bool = True, temperature: float = 1.0
) -> Mechanism:
    near = Softmax(Window(window, 0 if causal else window), temperature=temperature)  # i − l … i: l keys and its own
    far = Softmax(_if_causal(Strided(stride), causal), temperature=temperature)
    return _halves(near, far, _strided(stride, window, causal, temperature), heads)


def _tree(
    length: int | None = None,
    radius: int = 2,
    parents: tuple[int, ...] | None = None,
    causal: bool = False,
    temperature: float = 1.0,
) -> Softmax:
    """Default parents: a balanced tree over `length` tokens."""
    if parents is None and length is None:
        raise TypeError(_needs("tree", ["length"]) + " Or give the parents of a tree of your own, parents=(1, -1, 1).")
    tree = Tree(balanced_tree(length or 0) if parents is None else tuple(parents), radius)
    return Softmax(_if_causal(tree, causal), temperature=temperature)


def _top_k(k: int = 32, pattern: Pattern = Causal(), scale: float | None = None) -> TopK:  # noqa: B008  (frozen)
    return TopK(k, pattern, scale)


def _perceiver(d: int, latents: int = 256, rounds: int = 2, heads: int = 1) -> Perceiver:
    return Perceiver(d, latents, rounds=rounds, heads=heads)


def _memory(before: int = 512, k: int = 32, heads: int = 1) -> ExternalMemory:
    return ExternalMemory(before, k, heads=heads)


def _mixture(heads: int = 8, causal: bool = False) -> Mixture:
    kinds = ("left",) if causal else ("current", "previous", "next", "left", "right", "start", "end")
    fixed = [FixedPattern(kinds[head % len(kinds)]) for head in range(heads - 1)]
    return Mixture([*fixed, Softmax(Causal() if causal else Full())])


def _sum(before: int = 512) -> Sum:
    return Sum(Softmax(Window(before)), Linear())


def _gated_sum(before: int = 512, heads: int = 1) -> Sum:
    return Sum(Softmax(Window(before)), Linear(), gate="softmax", heads=heads)


def _require_count(name: str, count: int, least: int) -> None:
    if not isinstance(count, int) or count < least:
        raise ValueError(f"{name}: expected an integer ≥ {least}, got {count!r}.")


def _if_causal(pattern: Pattern, causal: bool) -> Pattern:
    return pattern & Causal() if causal else pattern


VASWANI = Paper("Vaswani et al.", 2017, "arXiv:1706.03762")
HUA = Paper("Hua et al.", 2022, "arXiv:2202.10447")
SU_FOCUS = Paper("Su", 2023, "kexue.fm/archives/9889")
SU_L2 = Paper("Su", 2022, "kexue.fm/archives/9105")
BELTAGY = Paper("Beltagy et al.", 2020, "arXiv:2004.05150")
XIAO = Paper("Xiao et al.", 2023, "arXiv:2309.17453")
QIU = Paper("Qiu et al.", 2019, "arXiv:1911.02972")
CHILD = Paper("Child et al.", 2019, "arXiv:1904.10509")
KATHAROPOULOS = Paper("Katharopoulos et al.", 2020, "arXiv:2006.16236")
QIN = Paper("Qin et al.", 2022, "arXiv:2202.08791")
ARORA = Paper("Arora et al.", 2024, "arXiv:2402.18668")
ZHANG = Paper("Zhang et al.", 2024, "arXiv:2402.04347")
SUN = Paper("Sun et al.", 2023, "arXiv:2307.08621")
JAEGLE = Paper("Jaegle et al.", 2021, "arXiv:2103.03206")
YANG = Paper("Yang et al.", 2023, "arXiv:2312.06635")
RAGANATO = Paper("Raganato et al.", 2020, "arXiv:2002.10260")
PENG = Paper("Peng et al.", 2021, "arXiv:2103.02143")
CHOROMANSKI = Paper("Choromanski et al.", 2020, "arXiv:2009.14794")
LIKHOSHERSTOV_22 = Paper("Likhosherstov et al.", 2022, "arXiv:2205.15317")
LIKHOSHERSTOV_23 = Paper("Likhosherstov et al.", 2023, "arXiv:2302.00787")
WANG = Paper("Wang et al.", 2020, "arXiv:2006.04768")
XIONG = Paper("Xiong et al.", 2021, "arXiv:2102.03902")
ECKART = Paper("Eckart & Young", 1936, "Psychometrika 1(3)")
GUPTA = Paper("Gupta et al.", 2021, "arXiv:2106.06899")
WU = Paper("Wu et al.", 2022, "arXiv:2203.08913")
KELES = Paper("Keles et al.", 2023, "arXiv:2209.04881")
CHEN = Paper("Chen et al.", 2021, "arXiv:2110.15343")
LI = Paper("Li et al.", 2020, "arXiv:2012.15150")
ZHU = Paper("Zhu et al.", 2021, "arXiv:2107.02192")
TANG = Paper("Tang et al.", 2024, "arXiv:2407.15891")
ZAHEER = Paper("Zaheer et al.", 2020, "arXiv:2007.14062")

# fmt: off
_ENTRIES = (
    Entry("softmax", Softmax, "exact", "softmax attention over any pattern", VASWANI, "N²"),
    Entry("relu2", _relu2, "exact", "squared ReLU over the visible length (GAU)", HUA, "N²"),
    Entry("identity", _identity, "exact", "no activation at all", SU_FOCUS, "N²"),
    Entry("l2", _l2, "exact", "the exponential, rows of unit length", SU_L2, "N²"),
    Entry("window", _window, "sparse", "the last w keys", BELTAGY, "N·w", {"before": 5}),
    Entry("window-sinks", _window_sinks, "sparse", "the last w keys and the first s", XIAO, "N·(w+s)",
          {"before": 5, "sinks": 2}),
    Entry("window-summary", _window_summary, "sparse", "the last w keys, the first s, a mean of all between", TANG,
          "N·(w+s)", {"before": 5, "sinks": 2}),
    Entry("blocks", _blocks, "sparse", "the keys of one's own block", QIU, "N·b", {"size": 8}),
    Entry("sparse-fixed", _sparse_fixed, "sparse", "one's own block and every block's summary", CHILD, "N·(l+cN/l)",
          {"stride": 8, "summary": 2}),
    Entry("strided", _strided, "sparse", "every l-th key, and the last w", CHILD, "N·(w+N/l)",
          {"stride": 4, "window": 4}),
    Entry("sparse-fixed-heads", _sparse_fixed_heads, "sparse", "half the heads their block, half the summaries",
          CHILD, "N·(l+cN/l)", {"stride": 8, "summary": 2}),
    Entry("strided-heads", _strided_heads, "sparse", "half the heads the last w keys, half every l-th", CHILD,
          "N·(w+N/l)", {"stride": 4, "window": 4}),
    Entry("dilated", _dilated, "sparse", "w keys, each g before the next", BELTAGY, "N·w", {"window": 4, "gap": 3}),
    Entry("tree", _tree, "sparse", "the tokens within a few edges in a syntax tree", LI, "N·neighbours"),
    Entry("top-k", _top_k, "sparse", "softmax over the k largest scores", GUPTA, "N²", {"k": 5}),
    Entry("longformer", _longformer, "sparse", "a window and global tokens", BELTAGY, "N·(w+g)", {"window": 6}),
    Entry("bigbird", _bigbird, "sparse", "a window, global tokens and random blocks", ZAHEER, "N·(w+g+rb)",
          {"size": 4, "random": 1}),
    Entry("current", partial(FixedPattern, "current"), "fixed", "each token itself", RAGANATO, "N"),
    Entry("previous", partial(FixedPattern, "previous"), "fixed", "the token or word before", RAGANATO, "N"),
    Entry("next", partial(FixedPattern, "next"), "fixed", "the token or word after", RAGANATO, "N"),
    Entry("left", partial(FixedPattern, "left"), "fixed", "all up to two before, the nearer the more", RAGANATO, "N"),
    Entry("right", partial(FixedPattern, "right"), "fixed", "all from two after, the nearer the more", RAGANATO, "N"),
    Entry("start", partial(FixedPattern, "start"), "fixed", "all, the start of the sequence the most", RAGANATO, "N"),
    Entry("end", partial(FixedPattern, "end"), "fixed", "all, the end of the sequence the most", RAGANATO, "N"),
    Entry("last", partial(FixedPattern, "last"), "fixed", "the last token of the sequence", RAGANATO, "N"),
    Entry("linear", _linear(Elu1), "linear", "features elu(x) + 1", KATHAROPOULOS, "N·r"),
    Entry("linear-relu", _linear(Relu), "linear", "features max(x, 0)", KATHAROPOULOS, "N·r"),
    Entry("linear-exp", _linear(Exp), "linear", "features exp(x), entry by entry", KATHAROPOULOS, "N·r"),
    Entry("linear-cos", _linear(Cos, False), "linear", "features cos(x), entry by entry", KATHAROPOULOS, "N·r"),
    Entry("linear-identity", _linear(Identity, False), "linear", "q·k itself, summed in order N", SU_FOCUS, "N·r"),
    Entry("cosformer", _cosformer, "linear", "relu features that turn with position", QIN, "N·r", {"length": 4096}),
    Entry("polynomial", _linear(Polynomial), "linear", "the series of exp(q·k) to degree p", KELES, "N·dᵖ"),
    Entry("taylor", _linear(Taylor), "linear", "1 + s + s²/2, products kept once", ARORA, "N·d²"),
    Entry("hedgehog", _hedgehog, "linear", "learned softmax features", ZHANG, "N·r"),
    Entry("trig", _trig, "random features", "cosines and sines of random projections", PENG, "N·m", {"features": 16}),
    Entry("favor+", _favor_plus, "random features", "positive features of the exponential", CHOROMANSKI, "N·m",
          {"features": 16}),
    Entry("favor++", _favor_plus_plus, "random features", "one parameter fitted to the data", LIKHOSHERSTOV_22, "N·m",
          {"features": 16}),
    Entry("favor#", _favor_sharp, "random features", "axes fitted to the data", LIKHOSHERSTOV_23, "N·m",
          {"features": 16}),
    Entry("relu-features", _relu_features, "random features", "random ReLU features: the arc-cosine kernel",
          CHOROMANSKI, "N·m", {"features": 16}),
    Entry("linformer", _linformer, "low rank", "r learned, pooled or random mixes of keys", WANG, "N·r", {"rank": 8}),
    Entry("nystrom", Nystrom, "low rank", "softmax through r landmarks", XIONG, "N·r", {"landmarks": 8}),
    Entry("truncated-svd", _truncated_svd, "low rank", "the nearest matrix of rank r: a baseline", ECKART, "N³",
          {"rank": 4}),
    Entry("lowrank-sparse", _lowrank_sparse, "low rank + sparse", "the last w keys exact, the rest by random features",
          CHEN, "N·(w+m)", {"features": 16, "window": 5}),
    Entry("linformer-sparse", _linformer_sparse, "low rank + sparse", "the nearest keys exact, and r mixes of all", ZHU,
          "N·(w+r)", {"rank": 8, "window": 4}),
    Entry("retention", _retention, "decay", "q·k fading by λ a token", SUN, "N·r"),
    Entry("retention-norm", _retention_normalised, "decay", "elu + 1 features fading by λ a token", SUN, "N·r"),
    Entry("gla", _gla, "decay", "q·k fading channel by channel, as the keys say", YANG, "N·r"),
    Entry("perceiver", _perceiver, "latent and memory", "r learned latents between keys and queries", JAEGLE, "N·r",
          {"latents": 8}),
    Entry("memory", _memory, "latent and memory", "the last w keys, and the k nearest before them", WU, "N²",
          {"before": 5, "k": 4}),
    Entry("mixture", _mixture, "combinations", "each head its own: seven fixed, one learned", RAGANATO, "each head's"),
    Entry("sum", _sum, "combinations", "mechanisms added up: a window and a linear one", WU, "N·(w+r)", {"before": 5}),
    Entry("gated-sum", _gated_sum, "combinations", "mechanisms weighed by a learned gate", WU, "N·(w+r)",
          {"before": 5}),
)
# fmt: on


def _needs(name: str, missing: list[str]) -> str:
    """Return an error message: the missing options of an entry, their meaning, and a call that works."""
    facts = {option: FACTS.get(option, ("an option without a default", "…")) for option in missing}
    meanings = "; ".join(f"{option}, {meaning}" for option, (meaning, _) in facts.items())
    example = ", ".join(f"{option}={value}" for option, (_, value) in facts.items())
    return f"{name} needs {meanings}. For example: heedful.build({name!r}, {example})."


FACTS: dict[str, tuple[str, int]] = {
    "d": ("the width of q and k in one head, q.shape[-1]", 64),
    "length": ("the number of tokens of the longest sequence", 4096),
}
"""Meaning and example value of each option without a default."""

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def build(name: str, **options: Any) -> Mechanism:
    """Return a mechanism by its name in the catalogue.

    >>> build("window", before=64)
    Softmax(Window(before=64, after=0, sinks=0))
    """
    if name not in CATALOG:
        near = get_close_matches(name, CATALOG, n=3) or sorted(CATALOG)
        raise ValueError(f"no mechanism is called {name!r}; did you mean {', '.join(near)}? `heedful list` shows all.")
    known = CATALOG[name].options
    for option in options:
        if option not in known:
            raise TypeError(f"{name} has no option {option!r}; it takes {', '.join(known)}.")
    required = [option for option, default in known.items() if default is inspect.Parameter.empty]
    if missing := [option for option in required if option not in options]:
        raise TypeError(_needs(name, missing))
    return CATALOG[name].build(**options)
