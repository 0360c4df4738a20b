"""A plan: which heads of a model run on which mechanism. A small JSON file that people read, edit and exchange.

    {
      "heedful_plan": 1,
      "model": {"name": "SmolLM2-135M", "type": "llama", "fingerprint": "5f0c…"},
      "length": 8192,
      "unit": "kv-group",
      "mechanisms": {"exact": {"name": "softmax"}, "near": {"name": "window-sinks", "options": {"before": 255}}},
      "layers": [
        {"name": "layers.0.self_attn", "kind": "causal", "heads": 9, "kv_heads": 3, "width": 64,
         "units": ["exact", "near", "near"]},
        …
      ]
    }

Names and options of mechanisms are those of `heedful.build`. "softmax" without options is the model's own attention.
Arguments of a builder that depend on the layer (width d, heads, length, causal or not) are filled in from the layer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn

from heedful.core import Cost, Dims, Mechanism
from heedful.hf.layers import AttentionLayer, base_of, fingerprint, model_type, own_terms, swappable
from heedful.hf.modules import Refused
from heedful.mechanisms import CATALOG, build
from heedful.mechanisms.score_base import ScoreBase
from heedful.mechanisms.softmax import Softmax
from heedful.patterns import Causal, Full

VERSION = 1
EXACT = "exact"
FACTS = ("d", "heads", "length", "pattern", "causal")
"""Options filled in from the layer unless the plan sets them."""

Unit = Literal["head", "kv-group", "layer"]
NOTES = ("bounds", "predictions", "measurements")


@dataclass(frozen=True)
class Spec:
    """A mechanism by its name in the catalogue, with options that JSON can hold."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.name not in CATALOG:
            build(self.name)  # raises, and suggests similar names
        known = CATALOG[self.name].options
        for option, value in self.options.items():
            if option not in known:
                raise ValueError(f"{self.name} has no option {option!r}; it takes {', '.join(known)}.")
            if not _is_json(value):
                raise ValueError(
                    f"{self.name}: {option} = {value!r}, expected a number, a string, true, false or a list of them; "
                    "patterns follow from the layer."
                )
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))

    @property
    def is_exact(self) -> bool:
        """True for the model's own attention."""
        return self.name == "softmax" and not self.options

    def __str__(self) -> str:
        if self.is_exact:
            return EXACT
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def build(self, layer: AttentionLayer, heads: int, length: int | None) -> Mechanism:
        """The mechanism for `heads` heads of a layer."""
        facts: dict[str, Any] = {"d": layer.width, "heads": heads, "length": length}
        causal = layer.kind == "causal"
        facts |= {"causal": causal, "pattern": Causal() if causal else Full()}
        if length is None:
            del facts["length"]
        known = CATALOG[self.name].options
        given = {name: facts[name] for name in FACTS if name in known and name in facts and name not in self.options}
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in self.options.items()}
        try:
            return build(self.name, **given, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{layer.name}: {self} can't be built: {error}") from error


@dataclass(frozen=True)
class LayerPlan:
    """A layer and the mechanism of each of its units, by label."""

    layer: AttentionLayer
    units: tuple[str, ...]

    def by_head(self) -> tuple[str, ...]:
        """The label of each query head."""
        each = self.layer.heads // len(self.units)
        return tuple(label for label in self.units for _ in range(each))


@dataclass(frozen=True)
class Plan:
    """Which unit of a model runs on which mechanism.

    >>> import heedful.hf as hf
    >>> model, _ = hf.load("smollm2")  # doctest: +SKIP
    >>> plan = hf.Plan.uniform(model, "window-sinks", before=255, sinks=4)  # doctest: +SKIP
    >>> plan = plan.edit("softmax", layers=[0, 1])  # doctest: +SKIP
    >>> plan.save("plan.json"); hf.attach(model, hf.Plan.load("plan.json"))  # doctest: +SKIP

    model          name of the model, for people
    type           architecture of the model, such as "llama"
    fingerprint    hash of the type and the shapes of the layers: a plan fits every model with the same
    unit           "head", "kv-group" (heads that share keys) or "layer"
    mechanisms     label → mechanism
    layers         each layer with the label of each unit
    length         length of the texts that the plan was made for; None: any
    bounds, predictions, measurements   what is known about the plan; this module does not read them
    """

    model: str
    type: str
    fingerprint: str
    unit: Unit
    mechanisms: Mapping[str, Spec]
    layers: tuple[LayerPlan, ...]
    length: int | None = None
    bounds: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, Any] = field(default_factory=dict)
    measurements: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit: {self.unit!r}, expected one of {', '.join(get_args(Unit))}.")
        if self.length is not None and (not _is_count(self.length)):
            raise ValueError(f"length: {self.length!r}, expected a number of tokens, or null.")
        for own in self.layers:
            wanted = units_of(own.layer, self.unit)
            if len(own.units) != wanted:
                raise ValueError(
                    f"{own.layer.name}: {len(own.units)} units, expected {wanted}: it has {own.layer.heads} heads, "
                    f"{own.layer.kv_heads} of keys and values, and the unit is {self.unit}."
                )
            if unknown := sorted(set(own.units) - set(self.mechanisms)):
                raise ValueError(
                    f"{own.layer.name}: no mechanism is labelled {unknown[0]!r}; the plan has "
                    f"{', '.join(self.mechanisms)}."
                )
        used = {label for own in self.layers for label in own.units}
        kept = {label: spec for label, spec in self.mechanisms.items() if label in used}
        object.__setattr__(self, "mechanisms", MappingProxyType(kept))
        for name in NOTES:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @classmethod
    def uniform(
        cls,
        model: nn.Module,
        mechanism: str = "softmax",
        *,
        unit: Unit = "kv-group",
        length: int | None = None,
        **options,
    ) -> Plan:
        """The same mechanism for every head of every self-attention layer.

        `length` is the length of the plan, also passed to mechanisms that need one. All other options go to the
        mechanism.
        """
        layers = [layer for layer, _ in swappable(model).values()]
        spec = Spec(mechanism, options)
        if unit not in get_args(Unit):
            raise ValueError(f"unit: {unit!r}, expected one of {', '.join(get_args(Unit))}.")
        name = str(getattr(base_of(model).config, "name_or_path", "") or type(base_of(model)).__name__)
        return cls(
            model=Path(name).name,
            type=model_type(model),
            fingerprint=fingerprint(layers, model_type(model)),
            unit=unit,
            mechanisms={str(spec): spec},
            layers=tuple(LayerPlan(layer, (str(spec),) * units_of(layer, unit)) for layer in layers),
            length=length,
        )

    def edit(
        self,
        mechanism: str,
        *,
        layers: int | Iterable[int] | None = None,
        units: int | Iterable[int] | None = None,
        **options: Any,
    ) -> Plan:
        """The plan with another mechanism for some units.

        layers   indices in `plan.layers`; all by default
        units    indices inside each of these layers; all by default
        """
        spec = Spec(mechanism, options)
        chosen = _places("layers", layers, len(self.layers), "layers")
        after = list(self.layers)
        for at in chosen:
            own = after[at]
            places = set(_places("units", units, len(own.units), f"units ({self.unit}) in {own.layer.name}"))
            after[at] = replace(own, units=tuple(str(spec) if i in places else x for i, x in enumerate(own.units)))
        mechanisms = {**self.mechanisms, str(spec): spec}
        return replace(self, mechanisms=mechanisms, layers=tuple(after), bounds={}, predictions={}, measurements={})

    def table(self) -> str:
        """The plan as text: a line for each layer, and how many units run on each mechanism."""
        width = max(len(own.layer.name) for own in self.layers)
        lines = [f"{self.model} ({self.type}), unit {self.unit}" + (f", {self.length} tokens" if self.length else "")]
        for at, own in enumerate(self.layers):
            runs = [(label, len(list(run))) for label, run in groupby(own.units)]
            said = ", ".join(label if size == 1 else f"{label} × {size}" for label, size in runs)
            lines.append(f"{at:>3}  {own.layer.name:<{width}}  {said}")
        counted = Counter(label for own in self.layers for label in own.units)
        total = sum(counted.values())
        for label, count in counted.most_common():
            spec = self.mechanisms[label]
            meaning = "" if label == str(spec) else f" = {spec}"
            lines.append(f"{count:>5} of {total} units: {label}{meaning}")
        return "\n".join(lines)

    def cost(self, dims: Dims) -> Cost:
        """The cost of the attention of all layers for dims.n new tokens out of dims.m, in dims.batch rows.

        Widths and heads are those of the layers. The state counts keys and values once per key head, as the cache
        stores them; None if a mechanism can't go token by token.
        """
        flops = moved = 0
        state: int | None = 0
        for own in self.layers:
            labels, each = own.by_head(), own.layer.heads // own.layer.kv_heads
            built = {
                label: self.mechanisms[label].build(own.layer, labels.count(label), self.length) for label in labels
            }
            sizes = replace(dims, d=own.layer.width, e=own.layer.width)
            one = {label: mechanism.cost(replace(sizes, batch=dims.batch)) for label, mechanism in built.items()}
            flops += sum(one[label].flops for label in labels)
            moved += sum(one[label].bytes for label in labels)
            for first in range(0, own.layer.heads, each):
                kept = 0  # keys and values, shared by the heads of a group
                for label in labels[first : first + each]:
                    own_state = one[label].state
                    if state is None or own_state is None:
                        state = None
                    elif isinstance(built[label], ScoreBase):
                        kept = max(kept, own_state)
                    else:
                        state += own_state
                state = None if state is None else state + kept
        return Cost(flops, moved, state)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "heedful_plan": VERSION,
            "model": {"name": self.model, "type": self.type, "fingerprint": self.fingerprint},
            "length": self.length,
            "unit": self.unit,
            "mechanisms": {
                label: {"name": spec.name} | ({"options": dict(spec.options)} if spec.options else {})
                for label, spec in self.mechanisms.items()
            },
            "layers": [{**asdict(own.layer), "units": list(own.units)} for own in self.layers],
        } | {name: dict(getattr(self, name)) for name in NOTES if getattr(self, name)}

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The plan from the output of `to_dict`, checked."""
        try:
            return _read(data)
        except (KeyError, TypeError, AttributeError) as error:
            said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"no plan: {said}. Expected what Plan.save writes.") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one line per layer."""
        data = self.to_dict()
        layers = data.pop("layers")
        mechanisms = data.pop("mechanisms")
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items() if name not in NOTES]
        lines.append(
            '  "mechanisms": {\n' + _lines({label: json.dumps(spec) for label, spec in mechanisms.items()}) + "\n  }"
        )
        lines.append('  "layers": [\n' + ",\n".join(f"    {json.dumps(layer)}" for layer in layers) + "\n  ]")
        lines += [f"  {json.dumps(name)}: {json.dumps(data[name])}" for name in NOTES if name in data]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file and check it."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path}: no JSON ({error}). Likely cause: a file that was cut short or edited."
            ) from error
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def units_of(layer: AttentionLayer, unit: Unit) -> int:
    """How many units a layer has."""
    return {"head": layer.heads, "kv-group": layer.kv_heads, "layer": 1}[unit]


def check_plan(plan: Plan, model: nn.Module) -> None:
    """Raise `Refused` if a plan does not fit a model: other layers, or a mechanism that a layer can't run."""
    found = swappable(model)
    layers = [layer for layer, _ in found.values()]
    if fingerprint(layers, model_type(model)) != plan.fingerprint or [own.layer for own in plan.layers] != layers:
        raise Refused(f"the plan is for another model: {_difference(plan, layers, model_type(model))}.")
    for own in plan.layers:
        terms = own_terms(found[own.layer.name][1])
        for label, heads in Counter(own.by_head()).items():
            spec = plan.mechanisms[label]
            if spec.is_exact:
                continue
            mechanism = spec.build(own.layer, heads, plan.length)
            if terms and not isinstance(mechanism, Softmax):
                raise Refused(f"{own.layer.name}: the layer has {terms}, which {spec} can't apply; softmax ones can.")
            if own.layer.kind == "causal" and not mechanism.pattern.is_causal:
                raise Refused(
                    f"{own.layer.name}: {spec} sees later keys, and the layer is causal: expected a causal mechanism."
                )


def _difference(plan: Plan, layers: list[AttentionLayer], kind: str) -> str:
    if plan.type != kind:
        return f"of type {plan.type}, and this one is {kind}"
    if len(plan.layers) != len(layers):
        return f"it has {len(plan.layers)} layers, and this one {len(layers)}"
    for own, layer in zip(plan.layers, layers, strict=True):
        if own.layer != layer:
            return f"{own.layer.name} is {_shape(own.layer)} there, and {layer.name} is {_shape(layer)} here"
    return f"its fingerprint is {plan.fingerprint}, expected {fingerprint(layers, kind)}. Likely cause: an edited file"


def _shape(layer: AttentionLayer) -> str:
    return f"{layer.kind}, {layer.heads} heads, {layer.kv_heads} of keys, {layer.width} wide"


def _read(data: Any) -> Plan:
    if not isinstance(data, dict) or "heedful_plan" not in data:
        raise ValueError('no plan: expected an object with "heedful_plan".')
    if data["heedful_plan"] != VERSION:
        raise ValueError(f"a plan of version {data['heedful_plan']!r}, and this heedful reads version {VERSION}.")
    known = {"heedful_plan", "model", "length", "unit", "mechanisms", "layers", *NOTES}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"unknown field {unknown[0]!r}; a plan has {', '.join(sorted(known))}.")
    mechanisms = {}
    for label, spec in data["mechanisms"].items():
        if not isinstance(spec, dict) or set(spec) - {"name", "options"} or "name" not in spec:
            raise ValueError(f'mechanisms: {label!r} is {spec!r}, expected {{"name": …, "options": {{…}}}}.')
        mechanisms[label] = Spec(spec["name"], spec.get("options", {}))
    layers = []
    for at, own in enumerate(data["layers"]):
        shape = {name: own[name] for name in ("name", "kind", "heads", "kv_heads", "width")}
        if not all(_is_count(shape[name]) for name in ("heads", "kv_heads", "width")) or not isinstance(
            own["units"], list
        ):
            raise ValueError(
                f"layers[{at}]: {own!r}, expected counts for heads, kv_heads and width, and a list of units."
            )
        layers.append(LayerPlan(AttentionLayer(**shape), tuple(own["units"])))
    about = data["model"]
    notes = {name: data.get(name, {}) for name in NOTES}
    return Plan(
        about["name"], about["type"], about["fingerprint"], data["unit"], mechanisms, tuple(layers), data.get("length"),
        **notes,
    )  # fmt: skip


def _places(name: str, wanted: int | Iterable[int] | None, count: int, of: str) -> list[int]:
    if wanted is None:
        return list(range(count))
    chosen = [wanted] if isinstance(wanted, int) else list(wanted)
    for at in chosen:
        if not isinstance(at, int) or not -count <= at < count:
            raise ValueError(f"{name}: {at!r} is out of range, there are {count} {of}, counted from 0.")
    return [at % count for at in chosen]


def _lines(entries: Mapping[str, str]) -> str:
    return ",\n".join(f"    {json.dumps(name)}: {value}" for name, value in entries.items())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(x) for x in value)
    return value is None or isinstance(value, bool | int | float | str)
