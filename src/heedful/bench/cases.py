"""The comparisons of the peers table, and the speed-up that each should reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from heedful.bench import peers
from heedful.bench.peers import DENSE_CAUSAL, Contender, attend
from heedful.feature_maps import Elu1
from heedful.mechanisms.fixed_pattern import KINDS, FixedPattern
from heedful.mechanisms.linear import Linear
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Full, Strided, Window

SIZES = (2048, 8192, 16384)
LONGEST = (16384,)


@dataclass(frozen=True)
class Goal:
    """A target: heedful should be this many times as fast, in both passes, at these lengths."""

    factor: float
    sizes: tuple[int, ...] = SIZES


@dataclass(frozen=True)
class Case:
    """A comparison. ours: one or several implementations of heedful; rivals: the others, with or without a goal."""

    name: str
    ours: tuple[Contender, ...]
    rivals: tuple[Contender, ...]
    goals: dict[str, Goal] = field(default_factory=dict)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return self.ours + self.rivals


_CASES = (
    Case(
        "linear",
        (Contender("Linear(Elu1()), causal", attend(Linear(Elu1(), Causal()))),),
        (peers.FAST_TRANSFORMERS, DENSE_CAUSAL),
        {"fast-transformers": Goal(2), "dense causal SDPA": Goal(6, LONGEST)},
    ),
    Case(
        "favor-causal",
        (Contender("Linear(FavorPlus(64, 256)), causal", peers.favor(Causal())),),
        (peers.PERFORMER_CAUSAL,),
        {"performer-pytorch": Goal(20)},
    ),
    Case(
        "favor",
        (Contender("Linear(FavorPlus(64, 256))", peers.favor(Full())),),
        (peers.PERFORMER,),
        {"performer-pytorch": Goal(1.5)},
    ),
    Case(  # with projections, as in the package
        "linformer-layer",
        (Contender("nn.Attention with Linformer(n, 256)", peers.linformer_layer),),
        (peers.LINFORMER_LAYER,),
        {"linformer": Goal(1.5)},
    ),
    Case(  # attention alone
        "linformer",
        (Contender("Linformer(n, 256)", peers.linformer),),
        (peers.LINFORMER,),
        {"linformer": Goal(1.5)},
    ),
    Case(  # the package's own default
        "nystrom-256",
        (Contender("Nystrom(256)", peers.nystrom(256)),),
        (peers.nystrom_attention(256),),
        {"nystrom-attention": Goal(1.5)},
    ),
    Case(  # the paper's setting, and heedful's default
        "nystrom-64",
        (Contender("Nystrom(64)", peers.nystrom(64)),),
        (peers.nystrom_attention(64),),
        {"nystrom-attention": Goal(1.5)},
    ),
    Case(
        "window",
        (
            Contender("Softmax(Window(512))", attend(Softmax(Window(512)))),
            Contender("Softmax(Window(512, sinks=4))", attend(Softmax(Window(512, sinks=4)))),
        ),
        (peers.LOCAL_ATTENTION, DENSE_CAUSAL),
        {"local-attention": Goal(1.5)},
    ),
    Case(
        "strided",
        (Contender("Softmax(Strided(128) | Window(127))", attend(Softmax((Strided(128) | Window(127)) & Causal()))),),
        (DENSE_CAUSAL,),
        {"dense causal SDPA": Goal(5, LONGEST)},
    ),
    Case(
        "fixed",
        tuple(Contender(f'FixedPattern("{kind}")', attend(FixedPattern(kind))) for kind in KINDS),
        (DENSE_CAUSAL,),
        {"dense causal SDPA": Goal(50, LONGEST)},
    ),
)

CASES: dict[str, Case] = {case.name: case for case in _CASES}
