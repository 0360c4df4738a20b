"""The facts about a mechanism: one row of the catalogue table, or a full page."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isfinite
from textwrap import dedent
from typing import Any

import torch

from heedful.cli.options import SIZES
from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism
from heedful.kernels.dispatch import Kernel
from heedful.mechanisms import CATALOG, Entry, Softmax
from heedful.nn import Attention
from heedful.patterns import Causal, Full
from heedful.shapes import Float, Tensor

Facts = dict[str, Any]
"""A flat dictionary that JSON can hold."""
SMALL_WIDTH = 16
CONTRAST = 1.5
"""Factor on the queries of the random example, so that weights visibly differ."""


def catalogue(family: str | None = None) -> list[Facts]:
    """One row for each entry, or for each entry of one family.

    >>> catalogue()[0]["name"]
    'softmax'
    """
    return [
        _facts(entry, _built(entry, 4096, 64, 1, {})) for entry in CATALOG.values() if family in (None, entry.family)
    ]


def _built(entry: Entry, n: int, d: int, heads: int, options: dict[str, Any]) -> Mechanism:
    """The mechanism with these options, defaults for all others, and sizes if its builder takes them.

    Options without a default, such as a tree or word boundaries, come from the small instance.
    """
    required = [name for name, default in entry.options.items() if default is inspect.Parameter.empty]
    given = {name: value for name, value in entry.small.items() if name in required} | options
    return replace(entry, small=given).sample(d=d, heads=heads, length=n)


def _facts(entry: Entry, mechanism: Mechanism) -> Facts:
    """One row of the catalogue, flat."""
    kernel = getattr(mechanism, "kernel", None)
    return {
        "name": entry.name,
        "family": entry.family,
        "summary": entry.summary,
        "paper": str(entry.paper),
        "year": entry.paper.year,
        "complexity": entry.complexity,
        "causal": mechanism.pattern.is_causal,
        "causal_is_optional": not entry.options.keys().isdisjoint(("pattern", "causal")),
        "streaming": isinstance(mechanism, RecurrentMechanism),
        "kernels": ", ".join(kernel.names) if isinstance(kernel, Kernel) else "",
    }


def direction(facts: Facts) -> str:
    """The direction of attention: causal, two-way, or either if an option decides."""
    return "either" if facts["causal_is_optional"] else "causal" if facts["causal"] else "two-way"


@dataclass(frozen=True)
class Page:
    """The content of `show` for one mechanism: facts at the requested size, and a small random example."""

    entry: Entry
    options: dict[str, Any]
    n: int
    d: int
    heads: int
    tokens: int
    seed: int

    @cached_property
    def mechanism(self) -> Mechanism:
        return _built(self.entry, self.n, self.d, self.heads, self.options)

    @cached_property
    def facts(self) -> Facts:
        return _facts(self.entry, self.mechanism)

    @cached_property
    def document(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Prose and mathematics of the file that defines the mechanism."""
        module = inspect.getmodule(type(self.mechanism))
        prose, mathematics = read_mathematics((module and module.__doc__) or self.entry.summary)
        features = getattr(self.mechanism, "feature_map", None)
        if features is not None:  # the feature map's docstring describes half of a linear mechanism
            words = (inspect.getdoc(type(features)) or "").split("\n\n")[0]
            prose.append(f"{type(features).__name__}: {' '.join(words.split())}")
        return prose, mathematics

    @cached_property
    def cost(self) -> Cost:
        return self.mechanism.cost(self._dims)

    @cached_property
    def layer_cost(self) -> Cost:
        """The cost of a layer with this mechanism: `heads` heads, width heads · d, learned projections."""
        return Attention(self.heads * self.d, self.heads, self.mechanism, device="meta").cost(self.n)

    @cached_property
    def dense_cost(self) -> Cost:
        """The cost of softmax over all keys, or of causal softmax if the mechanism is causal."""
        return Softmax(Causal() if self.facts["causal"] else Full()).cost(self._dims)

    @property
    def dense_name(self) -> str:
        return "causal softmax" if self.facts["causal"] else "full softmax"

    @property
    def _dims(self) -> Dims:
        return Dims(self.n, self.n, self.d, self.d, batch=self.heads)

    @cached_property
    def small_mechanism(self) -> Mechanism:
        return _built(self.entry, self.tokens, SMALL_WIDTH, 1, self.small_options)

    @property
    def small_options(self) -> dict[str, Any]:
        return dict(self.entry.small) | self.options

    @cached_property
    def matrix(self) -> Float[Tensor, "n n"]:
        chance = torch.Generator().manual_seed(self.seed)
        q, k = torch.randn(2, 1, self.tokens, SMALL_WIDTH, generator=chance)
        with torch.no_grad():
            return self.small_mechanism.matrix(CONTRAST * q, k)[0]

    @property
    def drawn(self) -> str:
        """A description of what the picture shows."""
        settings = "".join(f"{name}={value}, " for name, value in self.small_options.items())
        return f"{settings}{self.tokens} random tokens, seed {self.seed}"

    def stages_as_json(self) -> dict[str, Any]:
        return {"layer_flops": self.layer_cost.flops, "stages": [asdict(stage) for stage in self.layer_cost.stages]}

    def as_json(self) -> dict[str, Any]:
        prose, mathematics = self.document
        options = {name: _plain(value) for name, value in self.entry.options.items() if name not in SIZES}
        return self.facts | {
            "prose": prose,
            "mathematics": [{"label": label, "text": text} for label, text in mathematics],
            "options": options | {name: _plain(value) for name, value in self.options.items()},
            "n": self.n,
            "d": self.d,
            "heads": self.heads,
            "flops": self.cost.flops,
            "bytes": self.cost.bytes,
            "state": self.cost.state,
            "dense_flops": self.dense_cost.flops,
            "drawn": self.drawn,
            "matrix": [[float(f"{x:.6g}") if isfinite(x) else None for x in row] for row in self.matrix.tolist()],
        }


def _plain(value: Any) -> Any:
    """A default value for JSON; patterns, feature maps and the like as their `repr`."""
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def read_mathematics(docstring: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Split a docstring into paragraphs and the table of forms, (label, text). A line without a label continues the
    line above.

    The table may be indented or not: formatters dedent it if no paragraph follows.

    >>> read_mathematics("Title.\\n\\n    matrix   A = B\\n             B = C\\n    cost     n\\n\\nMore.")
    (['Title.', 'More.'], [('matrix', 'A = B'), ('', 'B = C'), ('cost', 'n')])
    """
    prose, rows = [], []
    for part in re.split(r"\n\s*\n", docstring.strip("\n")):
        lines = dedent(part).splitlines()
        if not re.match(r"\S+ {2,}\S", lines[0]):
            prose.append(" ".join(part.split()))
            continue
        for line in lines:
            label, _, text = ("", "", line) if line.startswith(" ") else line.partition("  ")
            rows.append((label, text.strip()))
    return prose, rows
