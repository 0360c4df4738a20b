"""Run a scan: encode the texts, find the layers, measure text by text, write each result, stop when precise enough.

The unit of work is one text at one length. Its rows depend only on the model, the inputs and the options. Which process
measures a unit, in which order, and how often the scan was killed and resumed makes no difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import heedful
from heedful.hf.modules import Refused, out_of_sight
from heedful.hf.probe import Probe
from heedful.hf.prose import longest
from heedful.hf.weights import loaded
from heedful.scan.answer import FEWEST
from heedful.scan.memory import lifted, limited
from heedful.scan.options import Execution, Progress, ScanOptions, with_old_names
from heedful.scan.result import Scan
from heedful.scan.statistics import bootstrap
from heedful.scan.texts import Reading, Text, Unit, builtin, read, token_count
from heedful.scan.worker import Result, Task, Worker, survey
from heedful.shapes import Tensor
from heedful.store.scans import RANK, Run

DEFAULT_LENGTH = 512
DEFAULT_TEXTS = 8
HASHED = 1 << 23  # bytes of a weight hashed at a time
SURVEYED = 256  # tokens of the forward pass that finds the layers


def scan(
    model: nn.Module,
    tokenizer: Any = None,
    texts: Sequence[Text] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    options: ScanOptions | None = None,
    execution: Execution | None = None,
    **old: Any,
) -> Scan:
    """Measure every head of every layer of a model on texts. docs/scan.md says what is measured.

    texts       strings; or, with tokenizer None, token ids or inputs of the model (such as {"pixel_values": …}). By
                default passages that come with heedful
    lengths     how many tokens to read from the start of each text; a text with fewer is refused. By default 512 of
                heedful's passages, and all tokens of your own texts
    out         folder of the records; by default a new one in the system's temporary folder
    resume      continue the scan in `out`; texts and lengths may be added
    options     layers, precision, a second model to compare with: see `ScanOptions`
    execution   device, memory, engine, progress: see `Execution`

    Until the next release, fields of the two objects may be passed as keywords, with a DeprecationWarning.
    """
    options, execution = with_old_names(options, execution, old)
    lengths = _lengths(lengths)
    if texts is None:
        lengths = lengths or (min(DEFAULT_LENGTH, longest(model) or DEFAULT_LENGTH),)
        texts = builtin(max(lengths))
        texts = texts if options.precision is not None else texts[:DEFAULT_TEXTS]
    device = execution.on(model)
    against = options.against
    other, other_tokenizer = against if isinstance(against, tuple) else (against, tokenizer)
    with limited(execution.memory):
        setting = _Setting(texts, lengths, options, device)
        first = _Side(model, tokenizer, options.name, setting)
        second = None if other is None else _Side(other, other_tokenizer, options.against_name, setting)
        if second is not None:
            first.manifest["options"]["against"] = second.manifest["fingerprint"]
        folder = Path(tempfile.mkdtemp(prefix="heedful-scan-")) if out is None else Path(out)
        run = Run.begin(folder, first.manifest, resume=resume)
        beside = None if second is None else Run.begin(folder / "against", second.manifest, resume=resume)
        others = None if second is None else second.readings
        plan = _Schedule(run, first.readings, others, lengths, options.precision, _done(run, beside))
        tick = _Tick(execution.progress, plan)
        worker = partial(Worker, first.probe, None if second is None else second.probe, first.task)
        # Only a local worker can report fractions of a unit. Workers in other processes need their own memory limit.
        local = execution.engine == "local"
        worker = partial(worker, tick=tick) if local else partial(worker, memory=execution.memory)
        for done in execution.executor(device).run(worker, plan.pending()):
            result = done.result()
            with lifted():
                _write(result, run, beside)
            plan.note(result)
            tick.next()
            if plan.enough():
                break
    return Scan(run)


@dataclass(frozen=True)
class _Setting:
    """Texts, lengths, options and device, the same for both models of a comparison."""

    texts: Sequence[Text]
    lengths: tuple[int, ...]
    options: ScanOptions
    device: str


class _Side:
    """A model with its inputs, layers and manifest. Making one raises whatever can be refused before measuring."""

    def __init__(self, model: nn.Module, tokenizer: Any, name: str | None, setting: _Setting):
        model.to(setting.device)
        options = setting.options
        self.readings = read(
            model, tokenizer, setting.texts, setting.lengths, titles=options.titles, beyond=options.beyond,
            allow_unknown=options.allow_unknown,
        )  # fmt: skip
        self.probe = Probe(model)
        layers = survey(self.probe, _short(self.readings[0], setting.device), options.layers)
        chosen = _chosen(options.layers, len(layers))
        calls = len(layers) if chosen is None else max(chosen) + 1
        self.task = Task(options.measuring, setting.device, chosen, calls, last=layers[calls - 1]["name"])
        self.manifest = _manifest(model, name, layers, self.readings, setting)
        self.manifest |= _notes(model, self.probe)
        self.manifest["thumbnail_tokens"] = _tokens(tokenizer, self.readings[0])


def _lengths(lengths: Sequence[int] | None) -> tuple[int, ...]:
    """The lengths in ascending order without duplicates; empty: read texts whole."""
    for length in lengths or ():
        if not isinstance(length, int) or length < 2:
            raise ValueError(f"lengths: {length!r}, expected numbers of tokens, 2 or more.")
    return tuple(sorted(set(lengths or ())))


def _chosen(layers: Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    if layers is None:
        return None
    if max(layers) >= count:
        raise Refused(f"layers: {max(layers)}, expected 0 to {count - 1}: this model makes {count} attention calls.")
    return tuple(sorted(set(layers)))


def _short(reading: Reading, device: str) -> dict[str, Any]:
    """The first text's inputs, cut to SURVEYED tokens; ready-made inputs stay whole."""
    inputs = next(iter(reading.inputs.values()))
    plain = {"input_ids", "attention_mask", "decoder_input_ids"}
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return {name: x[:, :SURVEYED] for name, x in given.items()} if given.keys() <= plain else given


def _manifest(
    model: nn.Module, name: str | None, layers: list[dict[str, Any]], readings: list[Reading], setting: _Setting
) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    stored = getattr(config, "_name_or_path", "") or type(model).__name__
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "polars")}
    chosen = setting.options.layers
    layers_asked = None if chosen is None else sorted(set(chosen))
    options = {**asdict(setting.options.measuring), "layers": layers_asked, "dtype": _dtype(model)}
    return {
        "model": name or stored,
        "model_type": getattr(config, "model_type", type(model).__name__),
        "fingerprint": _fingerprint(model),
        "layers": layers,
        "options": options,
        "versions": {"heedful": heedful.__version__, "python": platform.python_version(), **versions},
        "device": setting.device,
        "lengths": list(setting.lengths),
        "texts": [reading.described() for reading in readings],
        "precision": setting.options.precision,
    }


def _notes(model: nn.Module, probe: Probe) -> dict[str, Any]:
    """Manifest entries from which `heedful.notices` makes sentences."""
    found = {"weights": loaded(model).described(), "not_captured": out_of_sight(model), "draws": probe.draws}
    return {name: fact for name, fact in found.items() if fact}


def _dtype(model: nn.Module) -> str:
    """The precision of the weights."""
    kinds = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters() if weight.is_floating_point()}
    return ", ".join(sorted(kinds))


def _fingerprint(model: nn.Module) -> str:
    """A hash of all weights and the configuration: another model, or another fine-tuning, has another one."""
    digest = hashlib.sha256(heedful.__version__.encode())
    config: Any = getattr(model, "config", None)
    if config is not None:
        kept = {key: x for key, x in config.to_dict().items() if key not in ("_name_or_path", "transformers_version")}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    weights = sorted(model.state_dict().items())
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        for part in pool.map(_digest, weights):
            digest.update(part)
    return digest.hexdigest()


def _digest(named: tuple[str, Tensor]) -> bytes:
    name, weight = named
    digest = hashlib.sha256(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
    numbers = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    # Copy from a GPU through one small pinned buffer: copies to fresh pages take ten times as long.
    buffer = torch.empty(min(HASHED, len(numbers)), dtype=torch.uint8, pin_memory=True) if weight.is_cuda else None
    for part in numbers.split(HASHED):
        digest.update((part if buffer is None else buffer[: len(part)].copy_(part)).numpy().data)
    return digest.digest()


def _tokens(tokenizer: Any, reading: Reading) -> dict[str, list[str]]:
    """The tokens of the first text at each length, as strings, to label the pictures. A text read whole has its own
    length."""
    found = {}
    for length, inputs in reading.inputs.items():
        ids = inputs.get("input_ids")
        if isinstance(ids, Tensor):
            listed = ids[0].tolist()
            found[str(length or len(listed))] = (
                [str(x) for x in listed] if tokenizer is None else [tokenizer.decode([x]) for x in listed]
            )
    return found


def _write(result: Result, run: Run, other: Run | None) -> None:
    """Write a unit's results, the rows of the scan itself last: if they exist, so does everything else."""
    unit = result.unit
    if result.thumbnails:
        key = {"text": unit.text, "length": max(row["length"] for row in result.rows)}
        run.write(unit.text, unit.length, [{**row, **key} for row in result.thumbnails], table="thumbnails")
    if other is not None:
        other.write(unit.text, unit.length, result.other)
        run.write(unit.text, unit.length, result.delta, table="delta")
    run.write(unit.text, unit.length, result.rows)


def _done(run: Run, other: Run | None) -> Callable[[Unit], bool]:
    """A function that tells if a unit is complete: its rows, and its pictures and second-model rows if it needs any."""
    rows, pictures = run.done(), run.done("thumbnails")
    delta, others = (rows, rows) if other is None else (run.done("delta"), other.done())

    def done(unit: Unit) -> bool:
        key = unit.text, unit.length
        return key in rows and key in delta and key in others and (key in pictures or not unit.first)

    return done


class _Tick:
    """Reports progress in units, including the fraction done of the current unit."""

    def __init__(self, tell: Progress | None, plan: _Schedule):
        self.tell, self.total, self.done = tell, sum(1 for _ in plan.units()), plan.count_done()

    def __call__(self, part: float) -> None:
        if self.tell is not None:
            self.tell(min(self.done + part, self.total), self.total)

    def next(self) -> None:
        self.done += 1
        self(0.0)


class _Schedule:
    """Which units are left to measure, and whether the results so far are precise enough."""

    def __init__(
        self,
        run: Run,
        readings: list[Reading],
        others: list[Reading] | None,
        lengths: tuple[int, ...],
        precision: float | None,
        done: Callable[[Unit], bool],
    ):
        self.readings, self.others, self.precision, self.done = readings, others, precision, done
        self.lengths = lengths or (0,)
        self.lost: set[tuple[str, int]] = set()
        self.means: dict[tuple[str, int], float] = {}
        if precision is not None:
            for (text, length), part in run.rows().group_by("text", "length"):
                self.means[str(text), int(length) if lengths else 0] = float(part[RANK].mean())  # type: ignore

    def units(self) -> Iterator[Unit]:
        for at, reading in enumerate(self.readings):
            for length in self.lengths:
                inputs = reading.inputs[length]
                other = None if self.others is None else self.others[at].inputs[length]
                tokens = length or token_count(inputs)
                yield Unit(reading.id, tokens, inputs, other, first=at == 0)

    def count_done(self) -> int:
        return sum(map(self.done, self.units()))

    def pending(self) -> Iterator[Unit]:
        """The units left to measure: first those of which some files were lost, then new ones unless it is precise."""
        left = [unit for unit in self.units() if not self.done(unit)]
        known = set(self.means)
        self.lost = {self._key(unit) for unit in left} & known
        yield from (unit for unit in left if self._key(unit) in known)
        if not self.precise():
            yield from (unit for unit in left if self._key(unit) not in known)

    def _key(self, unit: Unit) -> tuple[str, int]:
        return unit.text, 0 if self.lengths == (0,) else unit.length

    def note(self, result: Result) -> None:
        ranks = [row[RANK] for row in result.rows]
        self.means[self._key(result.unit)] = sum(ranks) / len(ranks)
        self.lost.discard(self._key(result.unit))

    def enough(self) -> bool:
        """True if the scan may stop here."""
        return not self.lost and self.precise()

    def precise(self) -> bool:
        """True if the first texts, up to the first incomplete one, give every mean with the requested precision.

        Tries every number of texts from FEWEST on, so a resumed scan stops where an uninterrupted one would stop.
        """
        if self.precision is None:
            return False
        full = 0
        while full < len(self.readings) and all((self.readings[full].id, x) in self.means for x in self.lengths):
            full += 1
        ids = [reading.id for reading in self.readings[:full]]
        return any(self._settled(ids[:count]) for count in range(FEWEST, full + 1))

    def _settled(self, ids: list[str]) -> bool:
        for length in self.lengths:
            found = bootstrap(torch.tensor([self.means[text, length] for text in ids], dtype=torch.float64)[:, None])
            if not float(found.half_width) <= self.precision * float(found.mean):  # type: ignore[operator]
                return False
        return True
