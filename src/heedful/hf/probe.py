"""Show every attention call of a Hugging Face model to a visitor, one at a time, while the model runs.

Models of transformers get their attention function from `AttentionInterface` and their masks from
`AttentionMaskInterface`. Under a probe both are heedful's. The probe turns each call into a `Call`, runs it with
heedful's softmax, passes it to the visitor and drops it, so memory is that of the forward pass plus one layer.

Everything is checked before it is measured:
    before      no module computes its weights itself, without the interface
    once        on up to `check_tokens` tokens: the model's outputs under the probe, with each module's own eager
                function and masks, equal those of the untouched model; and for each call heedful's weights and outputs
                in float64 equal those of the eager function, and so do the outputs of an `Attending`
    each call   rows sum to one (to less with a sink), no causal query sees a later key, outputs are finite
    each run    every attention module that was entered made a call, up to where the visitor stopped the run
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from heedful.hf import differential
from heedful.hf.calls import Call
from heedful.hf.checks import (
    attended,
    check_call,
    check_finite_model,
    compare_call,
    compare_outputs,
    floating_tensors,
)
from heedful.hf.modules import Refused, objections
from heedful.hf.tap import Own, implementation, prepared, tapped
from heedful.shapes import Tensor

ALONG_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")

Visit = Callable[[Call], object]


class Attending(ABC):
    """Computes the outputs of a call in place of heedful's softmax, for code that needs the weights anyway."""

    @abstractmethod
    def attend(self, call: Call) -> tuple[Tensor, Tensor] | None:
        """The outputs (b, h, n, e) of a call in its precision, and the products (b, h, n, 2) that `checks.check_call`
        needs. None: let heedful's softmax compute this call.
        """


class Enough(Exception):
    """Raised by a visitor to stop the forward pass."""


class Probe:
    """Runs a model and shows each of its attention calls to a visitor.

    The model is left unchanged. Inputs are the model's keyword arguments; `attention_mask` (and
    `decoder_attention_mask`) mark padding. `heedful.hf.load` loads a model.

    check_tokens   number of tokens on which inputs of each new form are compared with the untouched model
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
        self.draws = False
        """True if the forward pass draws random numbers. They start from seed 0, so runs on the same inputs agree."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the list of checked forms: another process, perhaps on another machine, checks again."""
        return {**vars(self), "_checked": set()}

    def __call__(self, inputs: Mapping[str, Any], visit: Visit, attending: Attending | None = None) -> None:
        """Run the model on these inputs and call `visit` with each `Call`, in execution order.

        If the visitor raises `Enough`, the run ends there. `attending` may compute the outputs of each call before it
        is visited; they are checked like heedful's own, once for each class of `attending`.
        """
        given = dict(inputs)
        _check_inputs(given)
        if (_form(given), type(attending)) not in self._checked:
            self.check(given, attending=attending)
        extra = _sparing(self.model, given)

        def attend(call: Call, own: Own) -> tuple[Tensor, None]:
            given = None if attending is None or call.minus is not None else attending.attend(call)
            out, products = attended(call) if given is None else given
            check_call(call, out, products)
            if not call.again:
                visit(call)
            return out.transpose(1, 2).contiguous(), None

        with prepared(self.model), tapped(self.model, attend, given) as tap, suppress(Enough):
            self._run(given, extra)
        tap.check_counts()

    def _run(self, given: dict[str, Any], extra: dict[str, Any]) -> Any:
        """The model's outputs. Random draws (such as the patches that ViTMAE drops) are the same in every run."""
        devices = {x.device for x in self.model.parameters() if x.is_cuda}
        with torch.random.fork_rng(devices=list(devices)):
            torch.default_generator.manual_seed(0)
            for device in devices:
                torch.cuda.default_generators[device.index].manual_seed(0)
            before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            out = self.model(**given, **extra)
            after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        self.draws |= any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
        return out

    def check(self, inputs: Mapping[str, Any], visit: Visit | None = None, attending: Attending | None = None) -> None:
        """Compare the model under the probe with the untouched model, on the first tokens of these inputs.

        `visit` is called with the calls on those tokens.
        """
        _check_inputs(dict(inputs))
        given = _cut(dict(inputs), self.check_tokens)
        extra = {name: value for name, value in _sparing(self.model, given).items() if name == "use_cache"}

        def attend(call: Call, own: Own) -> tuple[Tensor, Tensor | None]:
            out, weights = own()
            given = None if attending is None or call.minus is not None else attending.attend(call)
            compare_call(call, own, out, *([] if given is None else given[:1]))
            if call.minus is not None:
                halves.setdefault(call.name, []).append(call)
            if visit is not None and not call.again:
                visit(call)
            return out, weights

        halves: dict[str, list[Call]] = {}
        joined = [
            differential.receiver(module).register_forward_pre_hook(partial(_joined, halves, name))
            for name, module in self.model.named_modules()
            if differential.subtracted(module) is not None
        ]

        with prepared(self.model):
            with implementation(self.model, "eager"):
                expected = floating_tensors(self._untouched(given, extra))
            check_finite_model(expected, self.model)
            try:
                with tapped(self.model, attend, given) as tap:
                    found = floating_tensors(self._run(given, extra))
            finally:
                for hook in joined:
                    hook.remove()
        tap.check_counts()
        compare_outputs(found, expected, type(self.model).__name__)
        self._checked.add((_form(dict(inputs)), type(attending)))

    def _untouched(self, given: dict[str, Any], extra: dict[str, Any]) -> Any:
        """The outputs of the model without the probe. An error here is the model's, not the probe's."""
        try:
            return self._run(given, extra)
        except MemoryError:
            raise
        except Exception as error:
            if "allocate memory" in str(error) or "out of memory" in str(error):
                raise
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise Refused(
                f"{type(self.model).__name__} by itself can't be run on {', '.join(given)}: {said[:240]}. Expected "
                "what its forward takes."
            ) from error

    def sees_all(self, inputs: Mapping[str, Any]) -> bool:
        """True if a check covers all tokens of these inputs."""
        cut = _cut(dict(inputs), self.check_tokens)
        return all(cut[name].shape == x.shape for name, x in inputs.items() if isinstance(x, Tensor))


def probe(model: nn.Module, inputs: Mapping[str, Any], visit: Visit, *, check_tokens: int = 256) -> None:
    """Run a model once and call `visit` with each of its attention calls. For many inputs, make a `Probe`."""
    Probe(model, check_tokens=check_tokens)(inputs, visit)


def _joined(halves: dict[str, list[Call]], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Check what a module with differential heads joined from the outputs of its calls, and drop these calls."""
    calls = halves.pop(name, None)
    if calls:
        differential.compare(calls, args[0])


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
    """What decides the code path of a model: the names of its inputs, and where the padding is."""

    def padding(value: object) -> str:
        if not isinstance(value, Tensor) or value.ndim != 2:
            return ""
        left, right = (not bool(value[:, at].bool().all()) for at in (0, -1))
        return "left" * left + "right" * right

    return tuple(
        sorted((name, padding(value) if name.endswith("attention_mask") else "") for name, value in inputs.items())
    )


def _cut(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """At most `length` tokens of each text: the last ones if padding is on the left."""
    cut = dict(inputs)
    for prefix in ("", "decoder_"):
        mask = inputs.get(prefix + "attention_mask")
        left = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, 0].bool().all())
        kept = slice(-length, None) if left else slice(length)
        for name in ALONG_TOKENS:
            value = inputs.get(prefix + name)
            if isinstance(value, Tensor):
                cut[prefix + name] = _cut_tokens(value, name, kept)
    return cut


def _cut_tokens(value: Tensor, name: str, kept: slice) -> Tensor:
    if name == "attention_mask" and value.ndim == 4:
        return value[..., kept, kept]
    if name == "position_ids":  # (batch, tokens), or three kinds of positions before them
        return value[..., kept]
    return value[:, kept]


def _sparing(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Options that keep a forward pass from storing unused outputs."""
    known = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "logits_to_keep": 1}
    accepted = {name: value for name, value in wanted.items() if name in known and name not in inputs}
    return accepted
