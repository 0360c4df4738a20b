"""Attention of other packages as `Work`: one function each, which imports the package.

A peer and heedful compute the same thing, with the same tensors, parameters and precision. If a package offers only a
whole layer, its dense projections are replaced by slices of its input. Then q, k and v are given, and only attention is
timed; heedful gets the same slices.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from heedful.bench.setting import Setting, Work
from heedful.core import Mechanism
from heedful.mechanisms.linear import Linear
from heedful.mechanisms.linformer import Linformer
from heedful.mechanisms.nystrom import Nystrom
from heedful.nn.attention import Attention
from heedful.patterns import Pattern
from heedful.random_features import FavorPlus
from heedful.shapes import Float, Tensor


@dataclass(frozen=True)
class Contender:
    """One implementation of the work of a case.

    make      makes the work at n tokens
    package   name on PyPI, with the module to import; None for heedful and torch
    note      how it differs from heedful's computation, or how it had to be adapted
    same      True if its output should equal heedful's
    """

    name: str
    make: Callable[[Setting, int], Work]
    package: str | None = None
    module: str | None = None
    note: str = ""
    same: bool = True

    @property
    def installed(self) -> bool:
        return self.module is None or find_spec(self.module) is not None

    @property
    def missing(self) -> str:
        """The message if it is not installed."""
        return f"not installed: pip install {self.package}"


def attend(mechanism: Mechanism) -> Callable[[Setting, int], Work]:
    """Work of a mechanism that does not depend on the length."""
    return lambda setting, n: Work(mechanism.to(setting.device), setting.draw(n))


# ── dense softmax


def _dense(causal: bool, setting: Setting, n: int) -> Work:
    return Work(partial(F.scaled_dot_product_attention, is_causal=causal), setting.draw(n))


DENSE_CAUSAL = Contender("dense causal SDPA", partial(_dense, True), same=False)
DENSE = Contender("dense SDPA", partial(_dense, False), same=False)


# ── causal linear attention


def _fast_transformers(setting: Setting, n: int) -> Work:
    from fast_transformers.attention.causal_linear_attention import CausalLinearAttention
    from fast_transformers.feature_maps import elu_feature_map

    layer = CausalLinearAttention(setting.d, elu_feature_map)
    causal = SimpleNamespace(lower_triangular=True)  # its own mask object has an n × n matrix that it never reads
    whole = SimpleNamespace(float_matrix=torch.ones(setting.batch, n, device=setting.device))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The package takes (batch, n, heads, d) and copies to (batch, heads, n, d); these views avoid the copy."""
        out = layer(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, whole, whole)
        return out.transpose(1, 2)

    return Work(function, setting.draw(n))


FAST_TRANSFORMERS = Contender(
    "fast-transformers",
    _fast_transformers,
    "pytorch-fast-transformers",
    "fast_transformers",
    "adds 1e-6 to the normaliser",
)


# ── FAVOR+


def favor(pattern: Pattern, features: int = 256) -> Callable[[Setting, int], Work]:
    def make(setting: Setting, n: int) -> Work:
        mechanism = Linear(FavorPlus(setting.d, features, setting.seed), pattern).to(setting.device)
        return Work(mechanism, setting.draw(n))

    return make


def _performer(causal: bool, setting: Setting, n: int) -> Work:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that its CUDA extension is missing
        from performer_pytorch import FastAttention

        layer = FastAttention(setting.d, nb_features=256, causal=causal).to(setting.device)
    rows = FavorPlus(setting.d, 256, setting.seed).projection.rows()
    layer.projection_matrix.copy_(rows)  # the same draw, so that outputs can be compared
    return Work(layer, setting.draw(n))


PERFORMER = Contender(
    "performer-pytorch",
    partial(_performer, False),
    "performer-pytorch",
    "performer_pytorch",
    "adds 1e-4 to every feature",
)
PERFORMER_CAUSAL = Contender(
    "performer-pytorch",
    partial(_performer, True),
    "performer-pytorch",
    "performer_pytorch",
    "adds 1e-4 to every feature; scales keys by a maximum that includes the future",
)


# ── windows


def _local_attention(setting: Setting, n: int) -> Work:
    from local_attention import LocalAttention

    layer = LocalAttention(512, causal=True, exact_windowsize=True, use_rotary_pos_emb=False)
    return Work(layer, setting.draw(n))


LOCAL_ATTENTION = Contender("local-attention", _local_attention, "local-attention", "local_attention")


# ── layers whose projections are replaced by slices


class _Thirds:
    """Three modules that return a third of the features each. x is split once, so gradients are joined once."""

    def __init__(self) -> None:
        self._parts: tuple[Tensor, ...] = ()

    def modules(self) -> list[nn.Module]:
        return [_Third(self, i) for i in range(3)]

    def of(self, x: Tensor, i: int) -> Tensor:
        if i == 0:
            self._parts = x.chunk(3, -1)
        return self._parts[i]


class _Third(nn.Module):
    def __init__(self, thirds: _Thirds, i: int):
        super().__init__()
        self.thirds, self.i = thirds, i

    def forward(self, x: Tensor) -> Tensor:
        return self.thirds.of(x, self.i)


def _joined(setting: Setting, n: int) -> Float[Tensor, "b n three_h_d"]:
    """q, k and v concatenated along the features, like the output of a layer's projections."""
    return torch.cat([x.transpose(1, 2).flatten(2) for x in setting.draw(n)], -1)


def _on_joined(mechanism: Mechanism, setting: Setting) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (setting.heads, setting.d)).transpose(1, 2) for part in x.chunk(3, -1))
        return mechanism(q, k, v).transpose(1, 2).flatten(2)

    return function


def _mixes(setting: Setting, n: int, rank: int) -> tuple[Tensor, Tensor]:
    """Linformer's E and F."""
    generator = torch.Generator().manual_seed(setting.seed + 1)
    E, F = (torch.randn(rank, n, generator=generator) * n**-0.5 for _ in range(2))
    return E.to(setting.device), F.to(setting.device)


def linformer(setting: Setting, n: int, rank: int = 256) -> Work:
    mechanism = Linformer(n, rank, shared=False).to(setting.device)
    with torch.no_grad():
        for own, given in zip(mechanism.parameters(), _mixes(setting, n, rank), strict=True):
            own.copy_(given)
    return Work(_on_joined(mechanism, setting), [_joined(setting, n)], list(mechanism.parameters()))


def _linformer(setting: Setting, n: int, rank: int = 256) -> Work:
    from linformer import LinformerSelfAttention

    layer = LinformerSelfAttention(setting.heads * setting.d, n, k=rank, heads=setting.heads, dim_head=setting.d)
    layer.to_q, layer.to_k, layer.to_v = _Thirds().modules()
    layer.to_out = nn.Identity()
    layer = layer.to(setting.device)
    with torch.no_grad():
        for own, given in zip((layer.proj_k, layer.proj_v), _mixes(setting, n, rank), strict=True):
            own.copy_(given.mT)
    return Work(layer, [_joined(setting, n)], list(layer.parameters()))


def linformer_layer(setting: Setting, n: int, rank: int = 256) -> Work:
    """The layer with its projections, as in the package."""
    width = setting.heads * setting.d
    layer = Attention(width, setting.heads, Linformer(n, rank, shared=False)).to(setting.device)
    own = layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj
    return _layer_work(layer, own, list(layer.mechanism.parameters()), setting, n, rank)


def _linformer_layer(setting: Setting, n: int, rank: int = 256) -> Work:
    from linformer import LinformerSelfAttention

    layer = LinformerSelfAttention(setting.heads * setting.d, n, k=rank, heads=setting.heads, dim_head=setting.d)
    layer.to_out.bias = None
    layer = layer.to(setting.device)
    own = layer.to_q, layer.to_k, layer.to_v, layer.to_out
    return _layer_work(layer, own, [layer.proj_k.mT, layer.proj_v.mT], setting, n, rank)


def _layer_work(layer: nn.Module, projections, mixes: list[Tensor], setting: Setting, n: int, rank: int) -> Work:
    """The layer on tokens, with the same weights for every contender."""
    width, generator = setting.heads * setting.d, torch.Generator().manual_seed(setting.seed)
    with torch.no_grad():
        for own, given in zip(mixes, _mixes(setting, n, rank), strict=True):
            own.copy_(given)
        for projection in projections:
            projection.weight.copy_(torch.randn(width, width, generator=generator) * width**-0.5)
    return Work(layer, [setting.draw(n)[0].transpose(1, 2).flatten(2)], list(layer.parameters()))


LINFORMER_LAYER = Contender("linformer", _linformer_layer, "linformer", "linformer", "its output's bias taken out")
LINFORMER = Contender("linformer", _linformer, "linformer", "linformer", "its q, k, v, out projections taken out")


def nystrom(landmarks: int) -> Callable[[Setting, int], Work]:
    def make(setting: Setting, n: int) -> Work:
        return Work(_on_joined(Nystrom(landmarks), setting), [_joined(setting, n)])

    return make


def _nystrom(landmarks: int, setting: Setting, n: int) -> Work:
    from nystrom_attention import NystromAttention

    layer = NystromAttention(
        setting.heads * setting.d, setting.d, setting.heads, num_landmarks=landmarks, residual=False
    ).to(setting.device)
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    return Work(layer, [_joined(setting, n)])


def nystrom_attention(landmarks: int) -> Contender:
    return Contender(
        "nystrom-attention",
        partial(_nystrom, landmarks),
        "nystrom-attention",
        "nystrom_attention",
        "its projections and convolution taken out; one norm for all heads in Z₀",
    )
