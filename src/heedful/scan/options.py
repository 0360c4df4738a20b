"""The options of a scan: what is measured (`ScanOptions`), and where it runs (`Execution`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from heedful.executor import Engine, Executor
from heedful.scan.baseline import BUDGET
from heedful.scan.heads import Measuring
from heedful.scan.texts import Unit

Progress = Callable[[float, int], None]
"""Called with (units done, units in total); fractions of a unit count."""


@dataclass(frozen=True)
class ScanOptions:
    """What a scan measures, on which layers, and under which names.

    layers          attention calls to measure, counted from 0 in execution order; the forward pass stops after the last
                    one. None: all
    against         another model, or (model, tokenizer), on the same texts: `Scan.against`, `Scan.compare`
    precision       stop when the 95 % interval of the mean effective rank (.9) is ± this share of it, at every length
    values          singular values to record for each head
    budget          matrix-vector products to spend on each head: more of them narrow the bounds of high ranks
    seed            seed of random starts and random heads
    beyond          allow more tokens than a model with rotary positions was trained on
    allow_unknown   accept a text even if the tokenizer does not know half of its tokens
    name            name of the model in the records. None: the name that it was loaded by
    against_name    name of the other model
    titles          titles of the texts

    >>> ScanOptions(precision=0.05).budget
    208
    """

    layers: Sequence[int] | None = None
    against: nn.Module | tuple[nn.Module, Any] | None = None
    precision: float | None = None
    values: int = 32
    budget: int = BUDGET
    seed: int = 0
    beyond: bool = False
    allow_unknown: bool = False
    name: str | None = None
    against_name: str | None = None
    titles: Sequence[str] | None = None

    def __post_init__(self) -> None:
        layers, precision = self.layers, self.precision
        if layers is not None and (not layers or any(not isinstance(x, int) or x < 0 for x in layers)):
            raise ValueError(f"layers: {list(layers)}, expected numbers from 0.")
        if precision is not None and not 0 < precision < 1:
            raise ValueError(f"precision: {precision}, expected a share of the mean, such as 0.05.")
        if self.values < 1 or self.budget < 1:
            raise ValueError(f"values {self.values}, budget {self.budget}: expected 1 or more.")

    @property
    def measuring(self) -> Measuring:
        """How each head is measured."""
        return Measuring(seed=self.seed, values=self.values, budget=self.budget)


@dataclass(frozen=True)
class Execution:
    """Where a scan runs.

    device     device of the model: "cpu" or "cuda". None: where the model is
    memory     bytes that this process, or each process of a cluster, may use in total. None: no limit
    engine     "local": this process. "processes" of this machine or "ray" distribute texts over processes
    address    address of a running Ray cluster
    workers    number of processes; by default one for each core, or as many as the cluster has capacity for
    progress   called with (units done, units in total); fractions of a unit count

    >>> Execution(memory=4 << 30).engine
    'local'
    """

    device: str | None = None
    memory: int | None = None
    engine: Engine = "local"
    address: str | None = None
    workers: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self.executor("cpu")  # raises if the options contradict each other

    def on(self, model: nn.Module) -> str:
        """The device on which this model is measured."""
        return self.device or str(next(model.parameters()).device)

    def executor(self, device: str) -> Executor:
        """The executor that runs the texts."""
        gpus = int(torch.device(device).type == "cuda")
        return Executor(self.engine, self.workers, self.address, gpus, name=unit_name)


def unit_name(unit: Unit) -> str:
    """The name of a unit in error messages."""
    return f"text {unit.text} at {unit.length or 'all'} tokens"


def with_old_names(
    options: ScanOptions | None, execution: Execution | None, old: Mapping[str, Any]
) -> tuple[ScanOptions, Execution]:
    """The two objects, updated with keyword arguments of `scan` as in version 0.1; warns that these are deprecated."""
    options, execution = options or ScanOptions(), execution or Execution()
    known = {field.name: kind for kind in (ScanOptions, Execution) for field in fields(kind)}
    unknown = [name for name in old if name not in known]
    if unknown:
        raise TypeError(
            f"scan() has no parameter {unknown[0]!r}. Expected lengths, out, resume, options=ScanOptions(…) or "
            f"execution=Execution(…); their fields are {', '.join(known)}."
        )
    for name in old:
        kind = known[name]
        keyword = "options" if kind is ScanOptions else "execution"
        warnings.warn(
            f"scan({name}=…) will go in the next release: pass {keyword}={kind.__name__}({name}=…).",
            DeprecationWarning,
            stacklevel=3,
        )
    options = replace(options, **{name: x for name, x in old.items() if known[name] is ScanOptions})
    execution = replace(execution, **{name: x for name, x in old.items() if known[name] is Execution})
    return options, execution
