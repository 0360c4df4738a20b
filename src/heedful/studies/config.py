"""The config of one run as plain data: equal configs have the same hash on every machine and are trained once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from heedful.core import Mechanism
from heedful.feature_maps import Elu1
from heedful.nn import (
    FixedHeads,
    Gaussian,
    Hadamard,
    Heads,
    MaskedSoftmax,
    MaterialisedLinear,
    Orthogonal,
    Transformer,
    adapted,
    trained,
)
from heedful.patterns import Causal, Full, Pattern, Window
from heedful.random_features import FavorPlus

QK: dict[str, Any] = {
    "learned": None,
    "orthogonal": Orthogonal,
    "orthogonal-global": partial(Orthogonal, per_head=False),
    "gaussian": Gaussian,
    "hadamard": Hadamard,
    "orthogonal-start": partial(trained, Orthogonal),
    "orthogonal-lora": partial(adapted, Orthogonal, 8),
}
"""Schemes of a projection into heads; "orthogonal-start" is trained, "orthogonal-lora" adds an update of rank 8."""


@dataclass(frozen=True)
class Group:
    """A group of adjacent heads of a layer.

    mechanism   softmax, linear, favor+, window; or "token:" or "word:" followed by the kinds of fixed patterns
    qk, v       projection scheme, one of QK
    """

    count: int
    mechanism: str = "softmax"
    qk: str = "learned"
    v: str = "learned"


LEARNED = (Group(8),)


@dataclass(frozen=True)
class Model:
    """Shape of an encoder and decoder; all layers of a stack have the same heads.

    shared      projections shared by all layers of a stack, as in Transformer
    positions   "sinusoidal" or "rope"
    """

    encoder: tuple[Group, ...] = LEARNED
    decoder: tuple[Group, ...] = LEARNED
    cross: tuple[Group, ...] = LEARNED
    width: int = 256
    head_dim: int = 32
    hidden: int = 1024
    layers: int = 4
    dropout: float = 0.3
    shared: tuple[str, ...] = ()
    positions: Literal["sinusoidal", "rope"] = "sinusoidal"


@dataclass(frozen=True)
class Training:
    """AdamW with linear warmup and cosine decay to a tenth of the peak; a batch has about `tokens` tokens per side.

    precision   precision of weights and activations on a GPU; AdamW has float32 weights. A CPU uses float32
    """

    steps: int
    tokens: int = 8192
    rate: float = 1e-3
    warmup: float = 0.1
    decay: float = 0.01
    smoothing: float = 0.1
    clip: float = 1.0
    evaluations: int = 20
    precision: str = "bfloat16"


@dataclass(frozen=True)
class Run:
    """One training run of one cell of a study.

    corpus      name of a folder of encoded pairs, such as "de-5000", or of another task, such as "prose"
    direction   direction of translation, "de-en" or "en-de"; other tasks have one direction
    shuffled    pair each source with the target of another pair: a control that must not learn to translate
    """

    study: str
    cell: str
    corpus: str
    training: Training
    model: Model = field(default_factory=Model)
    direction: str = "de-en"
    seed: int = 0
    shuffled: bool = False

    @property
    def key(self) -> str:
        """The run's name: a hash of its config. Fields added after the first records enter the hash only if set."""
        config = asdict(self)
        if config["model"]["positions"] == "sinusoidal":
            del config["model"]["positions"]
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def build(model: Model, vocabulary: int, *, encoder: bool = True) -> Transformer:
    """The Transformer of a config, with or without an encoder; weights are drawn from torch's generator."""

    def stack(groups: tuple[Group, ...], causal: bool) -> list[Heads]:
        return [
            Heads(group.count, _mechanism(group, causal, model.head_dim), QK[group.qk], QK[group.v]) for group in groups
        ]

    return Transformer(
        vocabulary,
        model.width,
        encoder=[stack(model.encoder, False)] * model.layers if encoder else [],
        decoder=[stack(model.decoder, True)] * model.layers,
        cross=stack(model.cross, False),
        head_dim=model.head_dim,
        hidden=model.hidden,
        dropout=model.dropout,
        positions=model.positions,
        shared=model.shared,
    )


def _mechanism(group: Group, causal: bool, head_dim: int) -> Mechanism:
    name, _, kind = group.mechanism.partition(":")
    pattern: Pattern = Causal() if causal else Full()
    kinds = kind.split()
    if name in ("token", "word") and len(kinds) != group.count:
        raise ValueError(
            f"mechanism: {group.mechanism!r} names {len(kinds)} kinds, expected one for each of {group.count}."
        )
    known: dict[str, Callable[[], Mechanism]] = {
        "softmax": lambda: MaskedSoftmax(pattern),
        "window": lambda: MaskedSoftmax(Window(16) if causal else Window(16, 16)),
        "linear": lambda: MaterialisedLinear(Elu1(), pattern),
        "favor+": lambda: MaterialisedLinear(FavorPlus(head_dim, 64), pattern),
        "token": lambda: FixedHeads(kinds),
        "word": lambda: FixedHeads(kinds, words=True),
    }
    if name not in known:
        raise ValueError(f"mechanism: {group.mechanism!r}, expected one of {', '.join(known)}.")
    return known[name]()
