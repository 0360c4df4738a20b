"""See every attention call of a Hugging Face model, one at a time, while the model runs.

Models of transformers ask `AttentionInterface` for the function that attends and `AttentionMaskInterface` for their masks.
Under a probe both are heedful's: each call becomes a `Call`, is run by heedful's own softmax, is handed to a visitor and
forgotten, so memory is that of the forward pass plus one layer.

Nothing is measured unless it was checked:
    before      no module computes its weights by itself, where no interface would see it
    once        on up to `check_tokens` tokens: outputs of the model under the probe, with each module's own eager function
                and masks, equal those of the untouched model; and for each call the weights and outputs of heedful, in
                float64, equal those of that eager function
    each call   rows sum to one (to less with a sink), nothing leaks from the future, outputs are finite
    each run    every attention module that was entered made a call
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from heedful.hf.calls import Call, Kind
from heedful.hf.masks import DeferredMask, MaskNotUnderstood, deferred_mask, rule_of
from heedful.shapes import Tensor

NAME = "heedful"  # a name with sdpa, flash or flex in it would change what some models do
KEYS_FROM_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
ALONG_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")

Visit = Callable[[Call], object]


class Refused(ValueError):
    """A model or input that can't be captured, with the reasons."""


class CheckFailed(RuntimeError):
    """What was captured is not what the model does. Nothing was measured."""


def objections(model: nn.Module) -> list[str]:
    """Why the attention of this model can't be captured; empty where it can.

    >>> objections(nn.Linear(2, 2))
    ['Linear holds no model of transformers, whose AttentionInterface the capture goes through.']
    """
    if type(model).__name__ == "OptimizedModule":
        return ["the model was compiled, and calls inside a compiled graph can't be seen: give the model itself."]
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return [
            f"{type(model).__name__} holds no model of transformers, whose AttentionInterface the capture goes through."
        ]
    alone = Counter(type(module) for module in model.modules() if _attends_by_itself(type(module)))
    why = [
        f"{kind.__name__} ({count} in this model) computes its weights itself instead of through transformers' "
        "AttentionInterface, so they can't be seen."
        for kind, count in alone.items()
    ]
    if not why and not _attention_modules(model):
        why.append(f"{type(model).__name__} has no module that attends through transformers' AttentionInterface.")
    return why


class Probe:
    """Runs a model and shows each of its attention calls to a visitor.

    The model is left as it was found. Inputs are what the model takes by name; `attention_mask` (and
    `decoder_attention_mask`) tell padding. See `heedful.hf.load` for a model.

    check_tokens   so many tokens of the first inputs of each form are compared with the untouched model
    """

    def __init__(self, model: nn.Module, *, check_tokens: int = 256):
        if check_tokens < 2:
            raise ValueError(f"check_tokens: expected at least 2, got {check_tokens}: one token attends to itself.")
        why = objections(model)
        if why:
            raise Refused(f"{type(model).__name__} can't be captured: " + " ".join(why))
        self.model = model
        self.check_tokens = check_tokens
        self._checked: set[tuple] = set()

    def __call__(self, inputs: Mapping[str, Any], visit: Visit) -> None:
        """Run the model on these inputs and call `visit` with each `Call`, in the order in which layers run."""
        given = dict(inputs)
        _check_inputs(given)
        form = _form(given)
        if form not in self._checked:
            self.check(given)
            self._checked.add(form)
        extra = _sparing(self.model, given)

        def attend(call: Call, own: _Own) -> tuple[Tensor, None]:
            out = call.forward()
            _check_call(call, out)
            visit(call)
            return out.transpose(1, 2).contiguous(), None

        with _prepared(self.model), _tapped(self.model, attend, given) as tap:
            self.model(**given, **extra)
        tap.check_counts()

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Compare the model under the probe with the untouched model, on the first tokens of these inputs."""
        given = _cut(dict(inputs), self.check_tokens)
        extra = {name: value for name, value in _sparing(self.model, given).items() if name == "use_cache"}

        def attend(call: Call, own: _Own) -> tuple[Tensor, Tensor | None]:
            out, weights = own(None)
            _compare(call, own, out)
            return out, weights

        with _prepared(self.model):
            with _implementation(self.model, "eager"):
                expected = _tensors(self.model(**given, **extra))
            with _tapped(self.model, attend, given) as tap:
                found = _tensors(self.model(**given, **extra))
        tap.check_counts()
        _compare_outputs(found, expected, type(self.model).__name__)


def probe(model: nn.Module, inputs: Mapping[str, Any], visit: Visit, *, check_tokens: int = 256) -> None:
    """Run a model once and call `visit` with each of its attention calls; for many inputs make a `Probe`."""
    Probe(model, check_tokens=check_tokens)(inputs, visit)


# ---- which modules attend, and how


def _source(kind: type) -> str:
    """The source of the class that defines `forward`; empty where there is none to read."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            try:
                return inspect.getsource(base)
            except (OSError, TypeError):
                return ""
    return ""


_SOURCES: dict[type, str] = {}


def _source_of(kind: type) -> str:
    if kind not in _SOURCES:
        _SOURCES[kind] = _source(kind)
    return _SOURCES[kind]


def _asks_interface(kind: type) -> bool:
    return not kind.__module__.startswith("torch.") and "ALL_ATTENTION_FUNCTIONS" in _source_of(kind)


def _attends_by_itself(kind: type) -> bool:
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if kind.__module__.startswith("torch.") or "attention" not in kind.__name__.lower() or _asks_interface(kind):
        return False
    words = ("softmax(", "scaled_dot_product_attention(", "_flash_attention_forward(", "Softmax(")
    return any(word in _source_of(kind) for word in words)


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if _asks_interface(type(module))}


# ---- the tap


class _Own:
    """The attention function that the module itself would use under eager, with the arguments of this call."""

    def __init__(self, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict):
        self.module, self.tensors, self.mask, self.options = module, tensors, mask, options

    def __call__(self, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
        """Output (b, n, h, e) and weights, in another precision where one is given."""

        def cast(x):
            return x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x

        mask = self.mask.request.dense() if isinstance(self.mask, DeferredMask) else self.mask
        options = {name: cast(value) for name, value in self.options.items()}
        return _eager_function(self.module)(self.module, *map(cast, self.tensors), mask, **options)


def _eager_function(module: nn.Module) -> Callable:
    for base in type(module).__mro__:
        found = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise Refused(
        f"{type(module).__name__} has no eager_attention_forward in its file, so there is nothing to check the capture "
        "against."
    )


class _Tap:
    """Turns the calls of one forward pass into `Call`s and counts them."""

    def __init__(self, model: nn.Module, attend: Callable[[Call, _Own], tuple], inputs: dict[str, Any]):
        self.attend = attend
        self.inputs = inputs
        self.names = {id(module): name for name, module in model.named_modules()}
        self.entered: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.crosses: dict[str, bool] = {}

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        name = self.names[id(module)]
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        self.crosses[name] = any(given.get(key) is not None for key in KEYS_FROM_ELSEWHERE)
        self.entered[name] += 1

    def leave(self, module: nn.Module, args: tuple, output: object) -> None:
        name = self.names[id(module)]
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
        kind: Kind = "cross" if crosses else "causal" if rule.pattern.is_causal else "self"
        bias, position = rule.bias, options.get("position_bias")
        if position is not None and bool(position.any()):
            bias = position if bias is None else position + bias.to(position.dtype)
        call = Call(
            name=name,
            turn=self.called[name],
            kind=kind,
            q=q,
            k=k,
            v=v,
            scale=_scale(options.get("scaling"), q, name),
            pattern=rule.pattern,
            segments=_on(rule.segments, q.device),
            bias=None if bias is None else bias.to(q.device, q.dtype),
            softcap=options.get("softcap"),
            sink=options.get("s_aux"),
        )
        self.called[name] += 1
        return self.attend(call, _Own(module, (q, k, v), mask, options))

    def _padding(self, batch: int, n: int, m: int, crosses: bool) -> tuple[Tensor | None, Tensor | None]:
        """Which queries and keys are real, where the inputs have a mask of the right size."""

        def mask(name: str, length: int) -> Tensor | None:
            given = self.inputs.get(name)
            fits = isinstance(given, Tensor) and given.shape == (batch, length)
            return given.bool() if fits else None

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
                f"{min(self.silent)}; {sum(self.called.values())} calls of other modules were seen. Nothing was measured."
            )


def _scale(scaling: object, q: Tensor, name: str) -> float:
    if scaling is None:
        return q.shape[-1] ** -0.5
    if isinstance(scaling, Tensor):
        if scaling.numel() != 1:
            raise Refused(f"{name}: scaling of shape {tuple(scaling.shape)}, expected one number for all heads.")
        return float(scaling)
    return float(scaling)  # type: ignore[arg-type]


def _on(segments, device: torch.device):
    if segments is None:
        return None
    return tuple(x.to(device) for x in segments) if isinstance(segments, tuple) else segments.to(device)


_taps: dict[int, _Tap] = {}  # by id of the module that calls, so that models in other threads keep to themselves


def _registered(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options):
    """What `AttentionInterface` calls. All options go on to the module's own eager function when it is asked."""
    return _taps[id(module)].call(module, query, key, value, attention_mask, options)


AttentionInterface.register(NAME, _registered)
AttentionMaskInterface.register(NAME, deferred_mask)


# ---- the state of the model, and its return


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every configuration that modules of the model hold, with those inside."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


@contextmanager
def _implementation(model: nn.Module, name: str) -> Iterator[None]:
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


@contextmanager
def _prepared(model: nn.Module) -> Iterator[None]:
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
def _tapped(model: nn.Module, attend: Callable[[Call, _Own], tuple], inputs: dict[str, Any]) -> Iterator[_Tap]:
    tap = _Tap(model, attend, inputs)
    busy = [module for module in model.modules() if id(module) in _taps]
    if busy:
        raise RuntimeError("the model is already being probed: a visitor must not run the model it visits.")
    modules = _attention_modules(model).values()
    hooks = [module.register_forward_pre_hook(tap.enter, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(tap.leave) for module in modules]
    mine = {id(module): tap for module in model.modules()}
    _taps.update(mine)
    try:
        with _implementation(model, NAME):
            yield tap
    finally:
        for key in mine:
            del _taps[key]
        for hook in hooks:
            hook.remove()


# ---- inputs


def _check_inputs(inputs: dict[str, Any]) -> None:
    if inputs.get("past_key_values") is not None:
        raise Refused("past_key_values: a text is captured whole, not on top of a cache.")
    for name in ("input_ids", "inputs_embeds", "decoder_input_ids"):
        tokens = inputs.get(name)
        if isinstance(tokens, Tensor) and 0 in tokens.shape[:2]:
            raise Refused(
                f"{name}: shape {tuple(tokens.shape)}, expected at least one token. Likely cause: empty text."
            )
    for name, value in inputs.items():
        if name.endswith("attention_mask") and isinstance(value, Tensor) and value.ndim == 2:
            empty = ~value.bool().any(-1)
            if bool(empty.any()):
                raise Refused(f"{name}: row {int(empty.int().argmax())} is all padding, expected at least one token.")


def _form(inputs: dict[str, Any]) -> tuple:
    """What decides which paths a model takes: the names of its inputs, and where the padding is."""

    def padding(value: object) -> str:
        if not isinstance(value, Tensor) or value.ndim != 2:
            return ""
        left, right = (not bool(value[:, at].bool().all()) for at in (0, -1))
        return "left" * left + "right" * right

    return tuple(
        sorted((name, padding(value) if name.endswith("attention_mask") else "") for name, value in inputs.items())
    )


def _cut(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """At most `length` tokens of each text: the last ones where padding is on the left."""
    cut = dict(inputs)
    for prefix in ("", "decoder_"):
        mask = inputs.get(prefix + "attention_mask")
        left = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].bool().all())
        for name in ALONG_TOKENS:
            value = inputs.get(prefix + name)
            if isinstance(value, Tensor) and value.ndim >= 2:
                cut[prefix + name] = value[:, -length:] if left else value[:, :length]
    return cut


def _sparing(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Options that keep a forward pass from storing what nobody asked for."""
    known = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "logits_to_keep": 1}
    accepted = {name: value for name, value in wanted.items() if name in known and name not in inputs}
    return accepted


# ---- the checks


def _compare(call: Call, own: _Own, out: Tensor) -> None:
    """Weights and outputs of one call against the module's own eager function."""
    where = f"{call.name} ({type(own.module).__name__})"
    exact = call.to(torch.float64)
    out64, weights64 = own(torch.float64)
    real = call.real[:, None, :, None]
    scores = (exact.q @ exact.per_head(exact.k).mT).abs().max() * call.scale
    # Eager functions take softmax in float32: a score z is rounded by eps·|z|, and its weight by as much, relatively.
    allowed = 8 * torch.finfo(torch.float32).eps * (1 + float(scores))
    if weights64 is not None:
        _demand(exact.operator().to_dense(), weights64, real, allowed, f"{where}: weights")
    height = float(call.v.abs().max())
    expected = out64.transpose(1, 2)
    _demand(exact.forward(), expected, real, allowed * height, f"{where}: outputs")
    # In the precision of the model: at most twice the error of the model's own computation.
    error = _largest((out.transpose(1, 2).double() - expected.double()).abs(), real)
    eps = torch.finfo(call.q.dtype).eps
    _demand(call.forward(), expected, real, 2 * error + 4 * eps * height, f"{where}: outputs in {call.q.dtype}")


def _demand(found: Tensor, expected: Tensor, real: Tensor, allowed: float, what: str) -> None:
    if found.shape != expected.shape:
        raise CheckFailed(f"{what}: shape {tuple(found.shape)}, the model's own {tuple(expected.shape)}.")
    error = _largest((found.double() - expected.double()).abs(), real)
    if not error <= allowed:
        raise CheckFailed(
            f"{what} differ from the model's own by {error:.2g}, more than {allowed:.2g}. Likely cause: the module does "
            "something to its scores that the capture does not know. Nothing was measured."
        )


def _largest(difference: Tensor, real: Tensor) -> float:
    return float(torch.where(real, difference, 0).max())


def _compare_outputs(found: list[Tensor], expected: list[Tensor], name: str) -> None:
    """Both runs used the same functions on the same masks, so they agree to rounding, padding included."""
    if len(found) != len(expected):
        raise CheckFailed(f"{name}: {len(found)} outputs under the probe, {len(expected)} without.")
    for ours, theirs in zip(found, expected, strict=True):
        eps = torch.finfo(theirs.dtype).eps
        close = torch.allclose(ours, theirs, rtol=16 * eps, atol=16 * eps * float(theirs.abs().max()), equal_nan=True)
        if ours.shape != theirs.shape or not close:
            raise CheckFailed(
                f"{name}: outputs under the probe differ from those of the untouched model by "
                f"{float((ours - theirs).abs().max()):.2g} of {float(theirs.abs().max()):.2g}. Likely cause: the model takes "
                "another path or builds another mask when its attention is not called eager. Nothing was measured."
            )


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return [x for part in output for x in _tensors(part)] if isinstance(output, tuple | list) else []


def _check_call(call: Call, out: Tensor) -> None:
    """Row sums and leaks by one product with two columns: ones, and ones on the later half of the keys."""
    n, m = call.q.shape[-2], call.k.shape[-2]
    real = call.real[:, None, :]
    columns = torch.ones(m, 2, dtype=call.q.dtype, device=call.q.device)
    columns[: m // 2 + 1, 1] = 0
    sums, ahead = (call.operator() @ columns).unbind(-1)
    # Sums are taken in float32 at least, and rounded once to the precision of the model.
    slack = 4 * torch.finfo(call.q.dtype).eps + m * torch.finfo(torch.float32).eps
    over = sums > 1 + slack
    under = sums < (1 - slack if call.sink is None else 0)
    if bool(((over | under | ~sums.isfinite()) & real).any()):
        wrong = sums[((over | under | ~sums.isfinite()) & real)]
        raise CheckFailed(f"{call.name}: a row sums to {float(wrong[0])}, expected 1. Nothing more was measured.")
    if call.kind == "causal" and n == m and bool((ahead[..., : m // 2 + 1] != 0).any()):
        raise CheckFailed(f"{call.name}: a query sees a later key in a causal layer. Nothing more was measured.")
    if bool((~out.isfinite() & real[..., None]).any()):
        raise CheckFailed(f"{call.name}: outputs are not finite. Likely cause: overflow in {call.q.dtype}.")
