"""attn_implementation="heedful": run the heads of a transformers model on the mechanisms of a plan.

Models get their attention function from `AttentionInterface` and their masks from `AttentionMaskInterface`; this module
registers both. Without a plan every head is exact, as under eager. `attach` adds a child `heedful` with the mechanisms
to each attention module, and a hook to the model that replaces an empty `DynamicCache` by heedful's. The model's
weights stay unchanged, and `detach` removes everything again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import EncoderDecoderCache

from heedful.hf.cache import cache, claimed, forget_claims
from heedful.hf.head_groups import HeadGroups, Setting, attend, check_shapes, exact
from heedful.hf.layers import base_of, swappable
from heedful.hf.masks import DeferredMask, MaskNotUnderstood, MaskRequest, deferred_mask, rule_of
from heedful.hf.modules import Refused, attention_modules
from heedful.hf.plan import Plan, check_plan
from heedful.patterns import Causal, Full, Pattern, Window
from heedful.segments import from_mask
from heedful.shapes import Tensor

NAME = "heedful"
CHILD = "heedful"


def attach(model: nn.Module, plan: Plan | None = None) -> nn.Module:
    """Run the heads of a model on the mechanisms of a plan, and return the model.

    plan   by default config.heedful, the plan that `save_pretrained` stored in the configuration

    The plan is checked first; a model that it does not fit is left unchanged. Training, `generate`, adapters and
    `save_pretrained` work as before; `heedful.hf.load` restores model and plan.
    """
    base = base_of(model)
    if plan is None:
        stored = getattr(base.config, "heedful", None)
        if not stored:
            raise Refused("plan: none given, and the configuration of the model holds none (config.heedful).")
        plan = Plan.from_dict(stored)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: {type(plan).__name__}, expected a heedful.hf.Plan; Plan.load reads one from a file.")
    check_plan(plan, model)
    layers = swappable(model)
    groups = {own.layer.name: HeadGroups(own, plan) for own in plan.layers}
    detach(model)
    before = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    stays = [name for name, (_, module) in layers.items() if module.config._attn_implementation != NAME]  # type: ignore[union-attr]
    if stays:
        base.set_attn_implementation(before)
        raise Refused(
            f"{stays[0]}: {type(base).__name__} does not let its attention be set, so the plan would not run."
        )
    for name, (_, module) in layers.items():
        weight = next(module.parameters(), None)
        own = groups[name] if weight is None else groups[name].to(weight.device, weight.dtype)
        module.add_module(CHILD, own.train(module.training))
    for module in attention_modules(base).values():
        if getattr(module, CHILD, None) is None:
            setattr(module, CHILD, "exact")  # cross-attention
    handle = base.register_forward_pre_hook(_use_own_cache, with_kwargs=True)
    base.config.heedful = plan.to_dict()
    base._heedful_attached = (before, handle)  # type: ignore[assignment]
    return model


def detach(model: nn.Module) -> nn.Module:
    """Restore a model's own attention, and return the model."""
    base = base_of(model)
    before, handle = base.__dict__.pop("_heedful_attached", (None, None))
    if handle is not None:
        handle.remove()
    for module in base.modules():
        if getattr(module, CHILD, None) is not None:
            delattr(module, CHILD)
    if getattr(base.config, "heedful", None) is not None:
        del base.config.heedful
    if base.config._attn_implementation == NAME and before is not None:
        base.set_attn_implementation(before)
    return model


def _use_own_cache(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Replace an empty `DynamicCache` by heedful's cache, which frees what no head needs."""
    forget_claims()
    given = kwargs.get("past_key_values")
    if given is None:
        if kwargs.get("use_cache") is not True or model.training:
            return None
        own: Any = cache(model)
        if model.config.is_encoder_decoder:  # type: ignore[union-attr]
            own = EncoderDecoderCache(own, DynamicCache())
        return args, {**kwargs, "past_key_values": own}
    pair = given if isinstance(given, EncoderDecoderCache) else None
    inner = given if pair is None else pair.self_attention_cache
    if type(inner) is not DynamicCache or inner.offloading or inner.get_seq_length():
        return None
    if pair is None:
        return args, {**kwargs, "past_key_values": cache(model)}
    pair.self_attention_cache = cache(model)  # type: ignore[assignment]
    return None


@torch.compiler.disable
def heedful_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that `AttentionInterface` calls: returns the outputs (b, n, h, e) of all heads."""
    layer = claimed(module, key)
    if dropout:
        raise Refused(
            f"attention dropout of {dropout}: heedful computes A(q, k) v and drops no weights. Set it to 0 in the "
            "configuration (attention_dropout, attention_probs_dropout_prob)."
        )
    if options.get("cache") is not None:
        raise Refused("paged caches (continuous batching) keep keys in pages, which heedful does not read.")
    groups = getattr(module, CHILD, None) or _from_config(module)
    if isinstance(groups, HeadGroups):
        check_shapes(groups, query, key)
        parts = groups.parts
    else:
        parts = exact(query.shape[1], key.shape[1])
    setting = Setting(_scale(scaling, query), Full(), softcap=softcap, sink=s_aux)
    if position_bias is not None:
        setting.bias = position_bias.to(query.dtype)
    if layer is not None:
        tokens = _read_cached(setting, attention_mask, layer, query, module)
        new = query.shape[-2]
        out = layer.attend(parts, query, key[:, :, -new:], value[:, :, -new:], setting, tokens)
    else:
        key, value = _read(setting, attention_mask, query, key, value)
        out = attend(parts, query, key, value, setting)
    return out.transpose(1, 2).contiguous(), None


def _read(setting: Setting, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Translate a mask into the setting; return keys and values without the unwritten places of a static cache."""
    n, m = q.shape[-2], k.shape[-2]
    request = mask.request if isinstance(mask, DeferredMask) else None
    if request is None:
        _read_dense(setting, mask, n, m)
        return k, v
    offset = request.arguments["kv_offset"]
    used = request.arguments["q_offset"] - offset + n
    known = _known(request)
    if known is None:
        _read_unknown(setting, request, n, m)
        return k, v
    setting.pattern, packed = known
    setting.shortened = offset > 0
    if setting.pattern.is_causal and used < m:  # static cache: later places are unwritten
        k, v, m = k[..., :used, :], v[..., :used, :], used
        if setting.bias is not None:
            setting.bias = setting.bias[..., :used]
    if packed is not None:
        setting.segments = packed[:, None]
    elif request.hides and request.padding is not None:
        real = request.padding[:, :m]
        if not isinstance(setting.pattern, Full):
            setting.segments = from_mask(real)[:, None]
        else:
            setting.hidden = ~real
            setting.segments = from_mask(real)[:, None] if n == m else None
    return k, v


def _known(request: MaskRequest) -> tuple[Pattern, Tensor | None] | None:
    """Pattern and packing of one of transformers' own masks; None for others, or for a window over gaps of padding."""
    if request.read is None or (isinstance(request.read[0], Window) and request.has_gaps):
        return None
    return request.read


def _read_unknown(setting: Setting, request: MaskRequest, n: int, m: int) -> None:
    """Translate a mask with a custom predicate: a pattern if one agrees with it, else a bias."""
    try:
        rule = request.rule(False, None)
    except MaskNotUnderstood as reason:
        raise Refused(f"attention_mask: {reason}") from reason
    setting.pattern, setting.segments = rule.pattern, rule.segments
    setting.aligned = n == m or rule.bias is None
    if rule.bias is not None:
        setting.bias = rule.bias if setting.bias is None else setting.bias + rule.bias


def _read_dense(setting: Setting, mask: Tensor | None, n: int, m: int) -> None:
    """Translate no mask, or a dense mask made by the model or its user: additive or boolean."""
    if mask is None:
        return
    try:
        rule = rule_of(mask, n, m, crosses=True, queries=None, keys=None)
    except MaskNotUnderstood as reason:
        raise Refused(f"attention_mask: {reason}") from reason
    setting.pattern, setting.aligned = rule.pattern, n == m
    if isinstance(rule.segments, tuple):
        setting.hidden = (rule.segments[1] < 0)[:, 0]
    if rule.bias is not None:
        setting.bias = rule.bias if setting.bias is None else setting.bias + rule.bias


def _read_cached(setting: Setting, mask: Tensor | None, layer: Any, q: Tensor, module: nn.Module) -> Any:
    """Translate a mask if heedful's cache holds the keys: which tokens are new, and which are padding."""
    request = mask.request if isinstance(mask, DeferredMask) else None
    padding = None
    if request is not None and request.read is not None:
        setting.pattern, packed = request.read
        padding = request.arguments["attention_mask"]
        if packed is not None:
            raise Refused("packed texts with a cache: give each text a row of its own.")
    elif mask is None and getattr(module, "is_causal", False):
        setting.pattern = Causal()
    elif mask is not None:
        raise Refused("a mask of one's own with heedful's cache: expected attention_mask (batch, tokens).")
    if not setting.pattern.is_causal:
        raise Refused("a cache in a layer that sees later tokens.")
    return layer.cache.tokens(padding, layer.seen, q.shape[-2])


def _scale(scaling: float | Tensor | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scaling is None else float(scaling)


def _from_config(module: nn.Module) -> HeadGroups | None:
    """The mechanisms of a module whose model was made with attn_implementation="heedful" and config.heedful."""
    stored = getattr(getattr(module, "config", None), "heedful", None)
    if not stored:
        return None
    plan, at = Plan.from_dict(stored), getattr(module, "layer_idx", None)
    found = [own for own in plan.layers if f".{at}." in f".{own.layer.name}."]
    if len(found) != 1:
        raise Refused(
            "config.heedful holds a plan whose layers can't be told by their index here: heedful.hf.attach(model) "
            "once, or load the model by heedful.hf.load."
        )
    groups = HeadGroups(found[0], plan)
    weight = next(module.parameters(), None)
    module.add_module(CHILD, groups if weight is None else groups.to(weight.device, weight.dtype))
    return groups


AttentionInterface.register(NAME, heedful_attention)
AttentionMaskInterface.register(NAME, torch.compiler.disable(deferred_mask))
