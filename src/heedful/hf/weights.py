"""Check that the stored weights fit the model. A missing weight would be random, and so would every measure of it.

before loading    every weight file is complete, and its dtypes fit the model
after loading     missing, mismatched     refused, unless the weight acts after the last attention call: a task head,
                                          a pooler
                  unexpected              refused, unless it belongs to a task head that this model lacks
                  a known prefix          removed from all names, if nothing else is wrong
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from heedful.hf.modules import Refused, asks_interface, attends_by_itself

PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "model.")
"""Prefixes that data parallelism, torch.compile, DeepSpeed and Lightning put before all names."""
BUFFERS = ("position_ids", "masked_bias", "inv_freq", "num_batches_tracked")
"""Buffers that old models stored; they are not weights."""
SHOWN = 4
WHOLE = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64")


@dataclass(frozen=True)
class Loaded:
    """Remarkable facts about how a model was loaded.

    prefix      prefix removed from the names of all stored weights; "" if none
    named       the architecture in config.json, if transformers has no model of this name
    read_as     the class that was used instead
    random      weights that affect attention and are random, permitted by `allow_random`
    left_out    stored weights of the attending part that the model does not use, permitted by `allow_random`
    unread      why the model's tokenizer can't be read; "" if it can, or if there is none
    """

    prefix: str = ""
    named: str = ""
    read_as: str = ""
    random: tuple[str, ...] = field(default=())
    left_out: tuple[str, ...] = field(default=())
    unread: str = ""

    def described(self) -> dict[str, Any]:
        """These facts for a manifest; empty if there are none."""
        found: dict[str, Any] = {"prefix": self.prefix} if self.prefix else {}
        found |= {"named": self.named, "read_as": self.read_as} if self.named else {}
        for name, weights in (("random", self.random), ("left_out", self.left_out)):
            found |= {name: {"count": len(weights), "names": list(weights[:SHOWN])}} if weights else {}
        return found


_loaded: WeakKeyDictionary[nn.Module, Loaded] = WeakKeyDictionary()


def remember(model: nn.Module, loaded: Loaded) -> None:
    _loaded[model] = loaded


def loaded(model: nn.Module) -> Loaded:
    """How a model was loaded; all fields empty if `load` did not load it."""
    return _loaded.get(model, Loaded())


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are.

    >>> listed("abcdef")
    'a, b, c, d and 2 more'
    """
    found = list(names)
    rest = len(found) - SHOWN
    return ", ".join(found[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# ---- before loading


def check_files(name: str, folder: Path) -> dict[str, str]:
    """The stored dtype of each weight in the safetensors files of a folder; refuses incomplete files."""
    kinds: dict[str, str] = {}
    for path in _files(name, folder):
        try:
            with safe_open(path, framework="pt") as stored:
                kinds |= {key: stored.get_slice(key).get_dtype() for key in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            with path.open("rb") as file:
                pointer = file.read(40).startswith(b"version https://git-lfs")
            cause = (
                "it is the pointer that git keeps instead of a large file: run `git lfs pull` in its folder."
                if pointer
                else "a download or a copy that was cut short. Fetch it again."
            )
            raise Refused(
                f"{name}: {path.name} can't be read as safetensors ({error}). Likely cause: {cause}"
            ) from error
    return kinds


def _files(name: str, folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{name}: {index.name} is no index of weight files ({error}). Fetch it again.") from error
    lost = [part for part in parts if not (folder / part).is_file()]
    if lost:
        raise Refused(f"{name}: {len(lost)} of {len(parts)} weight files are not there: {listed(lost)}. Fetch them.")
    return [folder / part for part in parts]


def check_kinds(name: str, kinds: Mapping[str, str], model: nn.Module) -> None:
    """Refuse integers for floating-point weights: these were quantised, and the scales are missing."""
    own = {key for key, x in model.state_dict().items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    whole = [key for key, kind in kinds.items() if kind in WHOLE and any(_same(key, each) for each in own)]
    if whole:
        raise Refused(
            f"{name}: {len(whole)} weights are stored as whole numbers ({kinds[whole[0]]}): {listed(whole)}. They are "
            "quantised; give the checkpoint that they were made from."
        )


def _same(stored: str, own: str) -> bool:
    """True if two names are equal up to a prefix."""
    return f".{stored}".endswith(f".{own}") or f".{own}".endswith(f".{stored}")


# ---- after loading


@dataclass(frozen=True)
class Fit:
    """Missing, mismatched and unexpected weights, without the harmless ones; `sentences` describes them."""

    missing: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    unexpected: tuple[str, ...]

    def __bool__(self) -> bool:
        """True if the weights fit."""
        return not (self.missing or self.mismatched or self.unexpected)

    @property
    def random(self) -> tuple[str, ...]:
        """Weights of the model that are not stored, so they are random."""
        return (*self.missing, *(key for key, _, _ in self.mismatched))

    def sentences(self) -> str:
        found = []
        if self.missing:
            found.append(f"{_weights(self.missing)} not in the file and would be random: {listed(self.missing)}.")
        if self.mismatched:
            shapes = [f"{key} {_shape(stored)}, expected {_shape(own)}" for key, stored, own in self.mismatched]
            found.append(f"{_weights(shapes)} of another shape: {'; '.join(shapes[:SHOWN])}{_more(shapes)}.")
        if self.unexpected:
            found.append(f"{_weights(self.unexpected)} in the file and not in the model: {listed(self.unexpected)}.")
        return " ".join(found)


def fit(model: nn.Module, info: Mapping[str, Any]) -> Fit:
    """Judge transformers' report about loading (`output_loading_info`)."""
    parts = _Parts(model)
    return Fit(
        tuple(sorted(key for key in info["missing_keys"] if parts.enters(key))),
        tuple(sorted((key, tuple(a), tuple(b)) for key, a, b in info["mismatched_keys"] if parts.enters(key))),
        tuple(sorted(key for key in info["unexpected_keys"] if parts.belongs(key) and not _of_plan(key, model))),
    )


def _of_plan(key: str, model: nn.Module) -> bool:
    """True if a stored weight belongs to a mechanism that a plan assigns to a layer."""
    return ".heedful." in key and bool(getattr(getattr(model, "config", None), "heedful", None))


def restore_mechanisms(name: str, folder: Path, model: nn.Module) -> None:
    """Load the stored parameters of the mechanisms of an attached model."""
    own = {key: x for key, x in model.state_dict().items() if ".heedful." in key}
    stored: dict[str, torch.Tensor] = {}
    for path in _files(name, folder) if own else []:
        with safe_open(path, "pt") as file:
            stored |= {key: file.get_tensor(key) for key in file.keys() if key in own}  # noqa: SIM118
    if lost := sorted(set(own) - set(stored)):
        raise Refused(f"{name}: {len(lost)} weights of the plan's mechanisms are not stored: {listed(lost)}.")
    model.load_state_dict(stored, strict=False)


def known_prefixes(info: Mapping[str, Any]) -> list[str]:
    """Known prefixes that all stored names start with: each is the one before plus one more known prefix.

    >>> known_prefixes({"missing_keys": {"a"}, "unexpected_keys": {"module._orig_mod.a"}})
    ['module.', 'module._orig_mod.']
    """
    keys, found, known = list(info["unexpected_keys"]), [""], list(PREFIXES)
    while keys and info["missing_keys"]:
        more = [prefix for prefix in known if all(key.startswith(found[-1] + prefix) for key in keys)]
        if not more:
            break
        known.remove(more[0])
        found.append(found[-1] + more[0])
    return found[1:]


class _Parts:
    """Decides, by names, which weights of a model act in or before an attention call."""

    def __init__(self, model: nn.Module):
        self.model = model
        base = getattr(model, "base_model", model)
        self.prefix = "" if base is model else getattr(model, "base_model_prefix", "")
        self.inside = {name.partition(".")[0] for name, _ in [*base.named_modules(), *base.named_parameters()]} - {""}
        self.attention = [name for name, module in model.named_modules() if _attends(module)]
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self.output = next((name for name, module in model.named_modules() if module is output), None)

    def enters(self, key: str) -> bool:
        """True if a weight of the model may change the inputs or weights of an attention call."""
        if self.output is not None and key.startswith(f"{self.output}."):
            return False
        parts = key.split(".")
        if "pooler" in parts:
            return self._attend(".".join(parts[: parts.index("pooler") + 1]))
        outside = self.prefix and parts[0] != self.prefix
        return self._attend(parts[0]) if outside else True

    def belongs(self, key: str) -> bool:
        """True if a stored weight that the model does not use belongs to the attending part."""
        parts = key.removeprefix(f"{self.prefix}.").split(".")
        if parts[-1] in BUFFERS:
            return False
        names = {name.rpartition(".")[2] for name in self.attention}
        return parts[0] in self.inside or bool(names & set(parts))

    def _attend(self, name: str) -> bool:
        """True if this module or a submodule attends."""
        return any(each == name or each.startswith(f"{name}.") for each in self.attention)


def _attends(module: nn.Module) -> bool:
    return asks_interface(type(module)) or attends_by_itself(type(module))


def _weights(names: tuple | list) -> str:
    return "1 weight is" if len(names) == 1 else f"{len(names)} weights are"


def _more(names: list[str]) -> str:
    return f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"
