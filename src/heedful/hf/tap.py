"""Register heedful's attention function in transformers' interfaces for one forward pass.

Afterwards the model is as before, also after an error: hooks, dropout and the names of its attention implementation are
restored.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.configuration_utils import PreTrainedConfig

from heedful.hf.calls import Call, Kind
from heedful.hf.differential import subtracted
from heedful.hf.masks import DeferredMask, MaskNotUnderstood, deferred_mask, rule_of
from heedful.hf.modules import CheckFailed, Refused, attention_modules
from heedful.shapes import Tensor

NAME = "heedful_probe"  # a name with sdpa, flash or flex in it would change what some models do
KEYS_FROM_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")

Attend = Callable[[Call, "Own"], tuple[Tensor, Tensor | None]]


class Own:
    """The attention function that the module itself would use under eager, with the arguments of this call."""

    def __init__(self, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict):
        self.module, self.tensors, self.mask, self.options = module, tensors, mask, options

    def __call__(self) -> tuple[Tensor, Tensor | None]:
        """Output (b, n, h, e), and the weights that the function returns."""
        return self._run(*self.tensors, self.options)

    def exactly(self) -> tuple[Tensor, Tensor]:
        """Output (b, h, n, e) and weights (b, h, n, m) in float64, by one run on [values, identity].

        The output for identity values is the weight matrix that the function applies. It can differ from the weights
        that the function returns (some apply a sink afterwards).
        """
        q, k, v = (x.double() for x in self.tensors)
        options = {name: x.double() if _is_float(x) else x for name, x in self.options.items()}
        unit = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*v.shape[:2], -1, -1)
        both = self._run(q, k, torch.cat([v, unit], -1), options)[0].transpose(1, 2)
        out, weights = both.split([v.shape[-1], unit.shape[-1]], -1)
        return out, weights

    def _run(self, q: Tensor, k: Tensor, v: Tensor, options: dict) -> tuple[Tensor, Tensor | None]:
        mask = self.mask.request.dense() if isinstance(self.mask, DeferredMask) else self.mask
        return _eager_function(self.module)(self.module, q, k, v, mask, **options)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _eager_function(module: nn.Module) -> Callable:
    for base in type(module).__mro__:
        found = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise Refused(
        f"{type(module).__name__} has no eager_attention_forward in its file, so there is nothing to check the capture "
        "against."
    )


class Tap:
    """Turns the calls of one forward pass into `Call`s and counts them."""

    def __init__(self, model: nn.Module, attend: Attend, inputs: dict[str, Any]):
        self.attend = attend
        self.inputs = inputs
        self.names = {id(module): name for name, module in model.named_modules()}
        self.entered: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.crosses: dict[str, bool] = {}
        self.turns: Counter[str] = Counter()
        self.shown = 0
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        name = self.names[id(module)]
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        self.crosses[name] = any(given.get(key) is not None for key in KEYS_FROM_ELSEWHERE)
        self.entered[name] += 1
        self.pairs[name] = []

    def leave(self, module: nn.Module, args: tuple, output: object) -> None:
        name = self.names[id(module)]
        self.pairs.pop(name, None)
        if self.called[name] < self.entered[name]:
            self.silent.add(name)

    def call(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict) -> tuple:
        name = self.names[id(module)]
        n, m = q.shape[-2], k.shape[-2]
        crosses = self.crosses.get(name, False) or (n != m and not getattr(module, "is_causal", False))
        try:
            queries, keys = self._padding(q.shape[0], n, m, crosses)
            rule = rule_of(mask, n, m, crosses=crosses, queries=queries, keys=keys)
        except MaskNotUnderstood as reason:
            raise Refused(f"{name} ({type(module).__name__}): {reason}") from reason
        minus, again = subtracted(module), self._again(name, q, k)
        if again and minus is None:
            raise Refused(
                f"{name} ({type(module).__name__}) attends twice with the same queries and keys and joins the two by "
                "itself: its heads would be counted twice, and what it makes of them is not known."
            )
        kind: Kind = "causal" if rule.pattern.is_causal else "cross" if crosses else "self"
        bias, position, sink = rule.bias, options.get("position_bias"), options.get("s_aux")
        if position is not None and bool(position.any()):
            bias = position if bias is None else position + bias.to(position.dtype)
        call = Call(
            name=name,
            turn=self.turns[name] - again,
            kind=kind,
            q=q,
            k=k,
            v=v,
            scale=_scale(options.get("scaling"), q, name),
            pattern=rule.pattern,
            segments=_on(rule.segments, q.device),
            bias=None if bias is None else bias.to(q.device, q.dtype),
            softcap=options.get("softcap"),
            sink=None if sink is None else sink.detach(),
            at=self.shown - again,
            minus=minus,
            again=again,
        )
        self.called[name] += 1
        self.turns[name] += not again
        self.shown += not again
        return self.attend(call, Own(module, (q, k, v), mask, options))

    def _again(self, name: str, q: Tensor, k: Tensor) -> bool:
        """True if this module has already made a call with these queries and keys since it was entered."""
        known = self.pairs.get(name)
        if known is None:
            return False
        found = any(_same(q, x) and _same(k, y) for x, y in known)
        known.append((q, k))
        return found

    def _padding(self, batch: int, n: int, m: int, crosses: bool) -> tuple[Tensor | None, Tensor | None]:
        """Which queries and keys are real; None if the inputs have no mask of the right size."""

        def mask(name: str, length: int) -> Tensor | None:
            given = self.inputs.get(name)
            return given.bool() if isinstance(given, Tensor) and given.shape == (batch, length) else None

        if crosses:
            return mask("decoder_attention_mask", n), mask("attention_mask", m)
        found = mask("attention_mask", m) if n == m else None
        return found, found

    def check_counts(self) -> None:
        if not self.called:
            raise CheckFailed("the model ran, and none of its modules attended: there is nothing to measure.")
        if self.silent:
            raise CheckFailed(
                f"{len(self.silent)} attention modules ran without a call through the interface, first "
                f"{min(self.silent)}; {sum(self.called.values())} calls of others were seen. Nothing was measured."
            )


def _scale(scaling: object, q: Tensor, name: str) -> float:
    if scaling is None:
        return q.shape[-1] ** -0.5
    if isinstance(scaling, Tensor):
        if scaling.numel() != 1:
            raise Refused(f"{name}: scaling of shape {tuple(scaling.shape)}, expected one number for all heads.")
        return float(scaling)
    return float(scaling)  # type: ignore[arg-type]


def _same(x: Tensor, y: Tensor) -> bool:
    """True if two tensors are the same memory."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()


def _on(segments, device: torch.device):
    if segments is None:
        return None
    return tuple(x.to(device) for x in segments) if isinstance(segments, tuple) else segments.to(device)


_taps: dict[int, Tap] = {}  # by id of the calling module, so models in other threads do not interfere


def _registered(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options):
    """The function that `AttentionInterface` calls. `Own` passes all options on to the module's eager function."""
    return _taps[id(module)].call(module, query, key, value, attention_mask, options)


AttentionInterface.register(NAME, _registered)
AttentionMaskInterface.register(NAME, deferred_mask)


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """All configurations that modules of the model hold, including nested ones."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout. Not inference mode: the adjoint of an operator is a gradient in v."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def tapped(model: nn.Module, attend: Attend, inputs: dict[str, Any]) -> Iterator[Tap]:
    tap = Tap(model, attend, inputs)
    busy = [module for module in model.modules() if id(module) in _taps]
    if busy:
        raise RuntimeError("the model is already being probed: a visitor must not run the model it visits.")
    modules = attention_modules(model).values()
    hooks = [module.register_forward_pre_hook(tap.enter, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(tap.leave) for module in modules]
    mine = {id(module): tap for module in model.modules()}
    _taps.update(mine)
    try:
        with implementation(model, NAME):
            yield tap
    finally:
        for key in mine:
            del _taps[key]
        for hook in hooks:
            hook.remove()
