"""The self-attention layers of a model, by name: heads of queries, heads of keys and values, and width."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from heedful.hf.differential import MODULES as DIFFERENTIAL
from heedful.hf.modules import Refused, attention_modules, objections, source_of

HEADS = ("num_attention_heads", "num_heads", "n_heads", "num_head", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "attention_head_dim")
TOTAL = ("embed_dim", "hidden_size", "all_head_size", "dim", "d_model")
CROSS = ("cross", "encoder_attn", "encdec")

Kind = Literal["causal", "self"]


@dataclass(frozen=True)
class AttentionLayer:
    """One self-attention module of a model.

    name       name of the module inside the base model: "layers.0.self_attn"
    kind       "causal", or "self" if queries see later keys
    heads      query heads
    kv_heads   heads of keys and values; each is shared by heads / kv_heads query heads
    width      width of a query in one head
    """

    name: str
    kind: Kind
    heads: int
    kv_heads: int
    width: int


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside adapters and wrappers."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise Refused(f"{type(model).__name__} holds no model of transformers.")


def swappable(model: nn.Module) -> dict[str, tuple[AttentionLayer, nn.Module]]:
    """The layers whose heads can run on other mechanisms, by name, with their modules.

    Raises `Refused` with the reasons if the model has none, or if some do not go through the interface. Cross-attention
    is left out: it stays exact.
    """
    base = base_of(model)
    if why := objections(base):
        raise Refused(f"{type(base).__name__} can't be attached: {' '.join(why)}")
    prefix, found = f"{base.base_model_prefix}.", {}
    for full, module in attention_modules(base).items():
        name = full.removeprefix(prefix)
        if type(module).__name__ in DIFFERENTIAL:
            raise Refused(
                f"{name}: heads of {type(module).__name__} are differences of two softmaxes, which a plan can't name."
            )
        if not _crosses(name, module):
            found[name] = (_facts(name, module), module)
    if not found:
        raise Refused(f"{type(base).__name__} has no self-attention, and cross-attention stays as it is.")
    return found


def own_terms(module: nn.Module) -> str:
    """What the attention of a module has besides q·k and a plain mask, in words; "" if nothing."""
    config: Any = getattr(module, "config", None)
    if getattr(module, "sinks", None) is not None:
        return "sinks"
    if getattr(module, "attn_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None):
        return "a softcap"
    if hasattr(module, "has_relative_attention_bias") or hasattr(module, "relative_position_bias_table"):
        return "a position bias"
    names = ("sliding_window", "local_attention")
    where = module if any(hasattr(module, name) for name in names) else config
    if _first(names, where) and any(name in source_of(type(module)) for name in names):
        return "a window of its own"
    return ""


def fingerprint(layers: list[AttentionLayer], model_type: str) -> str:
    """A hash of 16 digits of the model's type and the shapes of its layers; weights do not count."""
    return hashlib.sha256(repr((model_type, layers)).encode()).hexdigest()[:16]


def model_type(model: nn.Module) -> str:
    return str(getattr(base_of(model).config, "model_type", "")) or type(base_of(model)).__name__


def _crosses(name: str, module: nn.Module) -> bool:
    words = f"{name.rsplit('.', 1)[-1]} {type(module).__name__}".lower()
    return bool(getattr(module, "is_cross_attention", False)) or any(word in words for word in CROSS)


def _facts(name: str, module: nn.Module) -> AttentionLayer:
    config: Any = getattr(module, "config", None)
    heads = _first(HEADS, module) or _first(HEADS, config)
    if heads is None:
        raise Refused(f"{name} ({type(module).__name__}): neither it nor its configuration says how many heads it has.")
    shared = _first(("num_key_value_groups",), module)
    kv_heads = _first(KV_HEADS, module) or (heads // shared if shared else _first(KV_HEADS, config)) or heads
    total = _first(TOTAL, module) or _first(TOTAL, config) or 0
    width = _first(WIDTHS, module) or _first(WIDTHS, config) or total // heads
    if heads % kv_heads or not width:
        raise Refused(
            f"{name} ({type(module).__name__}): {heads} heads with {kv_heads} of keys, {width} wide; expected a "
            "multiple, and a width."
        )
    causal = bool(getattr(module, "is_causal", False)) or bool(getattr(module, "is_decoder", False))
    return AttentionLayer(name, "causal" if causal else "self", heads, kv_heads, width)


def _first(names: tuple[str, ...], where: object) -> int | None:
    """The first of these attributes that is a positive number."""
    for name in names:
        value = getattr(where, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
