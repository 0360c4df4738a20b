"""Find the attention modules of a model, and whether the interface sees their calls."""

from __future__ import annotations

import inspect
from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from heedful.shapes import Tensor

BY_ITSELF = (
    *("softmax", "dot_product", "flash", "matmul(", "einsum(", "bmm(", " @ "),
    *("multi_head_attention_forward(", "mra2_attention(", "cumulation.apply("),  # WavLM's, MRA's, YOSO's
)
"""Strings in the lower-cased source of a module that computes its weights itself."""


class Refused(ValueError):
    """A model or input that can't be captured, with the reasons."""


class Notice(UserWarning):
    """A warning that a reader of the numbers needs. The records of a scan contain it too."""


class CheckFailed(RuntimeError):
    """The captured attention is not what the model computes. Nothing was measured."""


def objections(model: nn.Module) -> list[str]:
    """Why the attention of this model can't be captured; empty if it can.

    >>> objections(nn.Linear(2, 2))
    ['Linear holds no model of transformers, whose AttentionInterface the capture goes through.']
    """
    if type(model).__name__ == "OptimizedModule":
        return ["the model was compiled, and calls inside a compiled graph can't be seen: give the model itself."]
    if not any(isinstance(module, PreTrainedModel) for module in model.modules()):
        return [
            f"{type(model).__name__} holds no model of transformers, whose AttentionInterface the capture goes through."
        ]
    if packed := quantised(model):
        return [packed]
    pooling = {id(model.get_submodule(name)) for name in out_of_sight(model)}
    alone = Counter(
        type(module) for module in model.modules() if attends_by_itself(type(module)) and id(module) not in pooling
    )
    why = [
        f"{kind.__name__} ({count} in this model) computes its weights itself instead of through transformers' "
        "AttentionInterface, so they can't be seen."
        for kind, count in alone.items()
    ]
    if not why and not attention_modules(model):
        why.append(f"{type(model).__name__} has no module that attends through transformers' AttentionInterface.")
    return why


def out_of_sight(model: nn.Module) -> list[str]:
    """Modules that the interface does not see but that only pool the output: torch's attention with a learned query.

    The query is a parameter `probe` of the module, as in SigLIP. No other attention layer reads the result.
    """
    return [
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if isinstance(getattr(module, "probe", None), nn.Parameter)
        for child, part in module.named_children()
        if isinstance(part, nn.MultiheadAttention)
    ]


def quantised(model: nn.Module) -> str:
    """One sentence about quantised weights (integers or packed); "" if all are floating point."""
    packed = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    packed += [name for name, weight in model.state_dict().items() if not isinstance(weight, Tensor)]
    tiny = [name for name, weight in model.named_parameters() if weight.is_floating_point() and weight.itemsize < 2]
    if not packed and not tiny:
        return ""
    return (
        f"{len(packed + tiny)} weights are quantised, {(packed + tiny)[0]} first; expected weights of 16 bits or more. "
        "Give the model that they were made from, or unpack them first (dequantize)."
    )


_sources: dict[type, str] = {}


def source_of(kind: type[nn.Module]) -> str:
    """The source of the class that defines `forward`; empty if there is none. Cached."""
    if kind not in _sources:
        _sources[kind] = _read_source(kind)
    return _sources[kind]


def _read_source(kind: type[nn.Module]) -> str:
    for base in kind.__mro__:
        if "forward" in vars(base):
            try:
                return inspect.getsource(base)
            except (OSError, TypeError):
                return ""
    return ""


def asks_interface(kind: type[nn.Module]) -> bool:
    return not kind.__module__.startswith("torch.") and "ALL_ATTENTION_FUNCTIONS" in source_of(kind)


def attends_by_itself(kind: type[nn.Module]) -> bool:
    """True if an attention module multiplies or normalises scores itself, or if its source can't be read.

    A module that only wraps another one does neither.
    """
    if issubclass(kind, nn.MultiheadAttention):
        return True
    name = kind.__name__.lower()
    if kind.__module__.startswith("torch.") or not ("attention" in name or "attn" in name) or asks_interface(kind):
        return False
    source = source_of(kind).lower()
    return not source or any(word in source for word in BY_ITSELF)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if asks_interface(type(module))}
