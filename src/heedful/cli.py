"""The command `heedful`, one function a command.

Tables and pictures are for people; `--json` prints the same facts for programs, and nothing else, to stdout. What a
user got wrong is told in a sentence on stderr, with exit code 2; what the system refused, with exit code 1.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

import heedful
from heedful import draw
from heedful.core import Cost, Dims, Mechanism, RecurrentMechanism
from heedful.kernels.dispatch import Kernel
from heedful.mechanisms import CATALOG, Entry
from heedful.patterns import Causal, Full, Pattern
from heedful.shapes import Float, Tensor

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def main() -> None:
    """The entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Greek gets question marks, not a crash
            stream.reconfigure(errors="replace")
    app(prog_name="heedful")


@app.callback(invoke_without_command=True)
def heedful_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Measure the structure of Transformer attention, and put it to work."""
    if version:
        typer.echo(f"heedful {heedful.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_command(
    family: Annotated[str | None, typer.Option(help="Only this family, such as sparse.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every attention mechanism in one table.

    \b
    complexity  of attending over N tokens
    causal      looks back only; "either": by an option; "two-way": it does not
    streams     can go token by token, as a decoder does
    kernels     implementations to choose from, the preferred one first
    """
    families = list(dict.fromkeys(entry.family for entry in CATALOG.values()))
    if family is not None and family not in families:
        _fail(f"no family is called {family!r}; the families are {', '.join(families)}.")
    rows = [
        _facts(entry, _built(entry, 4096, 64, 1, {})) for entry in CATALOG.values() if family in (None, entry.family)
    ]
    if as_json:
        _print_json(rows)
        return
    console = _console()
    _print(console, _wide_table(rows) if console.width >= 140 else _stacked_table(rows))


@app.command("show")
def show_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One from `heedful list`; all without it.")] = None,
    n: Annotated[int, typer.Option("--n", help="Tokens at which to give the cost.")] = 4096,
    d: Annotated[int, typer.Option("--d", help="Width of one head.")] = 64,
    heads: Annotated[int, typer.Option("--heads", help="Number of heads.")] = 1,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Set an option; repeatable.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Random tokens in the picture.  [default: 32]")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of these tokens.")] = 0,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the matrix to a file too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a mechanism: its mathematics, cost and picture.

    Without a name: all of them, one card each. Pictures are of random tokens, under options that are small
    enough to be seen on a few dozen of them.

    \b
    heedful show window-sinks --n 16384 --option before=1024
    heedful show bigbird --tokens 96 --png bigbird.png
    heedful show softmax --option "pattern=Window(8, sinks=1)"
    """
    tokens = (24 if name is None else 32) if tokens is None else tokens
    for flag, value, least, most in (
        ("--n", n, 1, 2**24),
        ("--d", d, 1, 2**16),
        ("--heads", heads, 1, 2**16),
        ("--tokens", tokens, 1, 4096),
        ("--seed", seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            _fail(f"{flag} {value}: expected {least} to {most}.")
    if name is None:
        if option or png:
            _fail(f"{'--option' if option else '--png'} needs the name of one mechanism, as in `heedful show softmax`.")
        everything = [Page(entry, {}, n, d, heads, tokens, seed) for entry in CATALOG.values()]
        if as_json:
            _print_json([page.as_json() for page in everything])
        else:
            _print_cards(everything)
        return
    try:
        if name not in CATALOG:
            heedful.build(name)
        page = Page(CATALOG[name], _parsed(CATALOG[name], option or []), n, d, heads, tokens, seed)
        _ = page.mechanism, page.small_mechanism
    except (ValueError, TypeError) as mistake:
        _fail(str(mistake))
    if png is not None:
        _save(page, png)
    if as_json:
        _print_json(page.as_json())
    else:
        _print_page(page, png)


# What there is to tell.


def _built(entry: Entry, n: int, d: int, heads: int, options: dict[str, Any]) -> Mechanism:
    """The mechanism under these options, else its defaults; builders that ask for sizes get them."""
    return replace(entry, small=options).sample(d=d, heads=heads, length=n)


def _facts(entry: Entry, mechanism: Mechanism) -> dict[str, str | int | bool]:
    """One row of the catalogue, flat."""
    kernel = getattr(mechanism, "kernel", None)
    return {
        "name": entry.name,
        "family": entry.family,
        "summary": entry.summary,
        "paper": entry.paper,
        "year": entry.year,
        "complexity": entry.complexity,
        "causal": mechanism.pattern.is_causal,
        "causal_is_optional": not entry.options.keys().isdisjoint(("pattern", "causal")),
        "streaming": isinstance(mechanism, RecurrentMechanism),
        "kernels": ", ".join(kernel.backends) if isinstance(kernel, Kernel) else "",
    }


@dataclass(frozen=True)
class Page:
    """What `show` tells of one mechanism: at the size asked for, and on a small random example."""

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
    def facts(self) -> dict[str, Any]:
        return _facts(self.entry, self.mechanism)

    @cached_property
    def document(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Prose and mathematics of the file that defines the mechanism."""
        module = inspect.getmodule(type(self.mechanism))
        return read_mathematics((module and module.__doc__) or self.entry.summary)

    @cached_property
    def cost(self) -> Cost:
        return self.mechanism.cost(self._dims)

    @cached_property
    def dense_cost(self) -> Cost:
        """Softmax over all keys, or over all earlier ones where the mechanism is causal."""
        return heedful.Softmax(Causal() if self.facts["causal"] else Full()).cost(self._dims)

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
        """In words, what the picture is of."""
        settings = "".join(f"{name}={value}, " for name, value in self.small_options.items())
        return f"{settings}{self.tokens} random tokens, seed {self.seed}"

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
            "matrix": [[float(f"{x:.6g}") if x - x == 0 else None for x in row] for row in self.matrix.tolist()],
        }


SIZES = ("d", "heads", "length")
"""Arguments of builders that are facts of the inputs: they have flags of their own."""
SMALL_WIDTH = 16
CONTRAST = 1.5
"""Queries of the random example are longer by this much, so that weights differ enough to be seen."""


def _plain(value: Any) -> Any:
    """A default as JSON has it; patterns, feature maps and the like as Python writes them."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def read_mathematics(docstring: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Paragraphs, and the indented block as (label, text); a line without a label goes on with the one above.

    >>> read_mathematics("Title.\\n\\n    matrix   A = B\\n             B = C\\n    cost     n\\n\\nMore.")
    (['Title.', 'More.'], [('matrix', 'A = B'), ('', 'B = C'), ('cost', 'n')])
    """
    paragraphs = [part for part in docstring.split("\n\n") if part.strip()]
    prose = [" ".join(part.split()) for part in paragraphs if not part.startswith("    ")]
    block = [line[4:] for part in paragraphs if part.startswith("    ") for line in part.splitlines()]
    rows = []
    for line in block:
        label, _, text = line.partition("  ") if not line.startswith(" ") else ("", "", line)
        rows.append((label, text.strip()))
    return prose, rows


def fold_formula(text: str, width: int) -> str:
    """Lines of at most this width that do not break inside an innermost bracket.

    >>> print(fold_formula("A = exp(z / T) / (1 + exp(z / T))", 26))
    A = exp(z / T) / (1 +
    exp(z / T))
    """
    held = re.sub(r"\([^()]*\)|\{[^{}]*\}", lambda bracket: bracket[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    return "\n".join(wrap(held, max(width, 16), break_on_hyphens=False)).replace("\N{NO-BREAK SPACE}", " ")


# What a user may set.


def _parsed(entry: Entry, settings: list[str]) -> dict[str, Any]:
    """before=64 → {"before": 64}, by the type of each option's default."""
    parameters = {
        name: parameter for name, parameter in inspect.signature(entry.build).parameters.items() if name not in SIZES
    }
    options = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--option {setting}: expected NAME=VALUE, as in --option before=64.")
        if name in SIZES:
            raise ValueError(f"--option {name}: sizes have flags of their own, --n, --d and --heads.")
        if name not in parameters:
            raise ValueError(f"{entry.name} has no option {name!r}; it takes {', '.join(parameters) or 'none'}.")
        options[name] = _value(setting, value, parameters[name])
    return options


def _value(setting: str, value: str, parameter: inspect.Parameter) -> Any:
    default = parameter.default
    if isinstance(default, Pattern):
        return read_pattern(value)
    if isinstance(default, (bool, int, float, str, tuple)):
        kind = type(default).__name__
    else:  # no default, or None: the annotation tells
        kinds = re.findall(r"\b(?:bool|int|float|str|tuple)\b", str(parameter.annotation))
        if not kinds:
            raise ValueError(f"--option {setting}: {parameter.name} can be set from Python only.")
        if value.lower() == "none":
            return None
        kind = kinds[0]
    read, wanted = READERS[kind]
    try:
        return read(value)
    except ValueError:
        raise ValueError(f"--option {setting}: expected {wanted}.") from None


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError
    return value.lower() == "true"


def _integers(value: str) -> tuple[int, ...]:
    return tuple(int(part) for part in value.strip("()").split(",") if part.strip())


READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bool": (_truth, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "a word"),
    "tuple": (_integers, "whole numbers with commas between them"),
}


def read_pattern(text: str) -> Pattern:
    """A pattern as Python writes it, in lower case too, and nothing else of Python.

    >>> read_pattern("window(8, sinks=1) & Causal")
    (Window(before=8, after=0, sinks=1) & Causal())
    """
    kinds = {kind.__name__.lower(): kind for kind in Pattern.__subclasses__() if not kind.__name__.startswith("_")}

    def read(node: ast.AST) -> Pattern:
        match node:
            case ast.Expression(body):
                return read(body)
            case ast.BinOp(left, ast.BitAnd(), right):
                return read(left) & read(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return read(left) | read(right)
            case ast.Name(name) if name.lower() in kinds:
                return kinds[name.lower()]()
            case ast.Call(ast.Name(name), values, named) if name.lower() in kinds:
                keywords = {str(one.arg): ast.literal_eval(one.value) for one in named}
                return kinds[name.lower()](*map(ast.literal_eval, values), **keywords)
        names = ", ".join(kind.__name__ for kind in kinds.values())
        raise ValueError(
            f"{text!r} is no pattern; patterns are {names}, joined with & and |, as in Window(8, 8) & Causal()."
        )

    try:
        return read(ast.parse(text.strip(), mode="eval"))
    except SyntaxError:
        return read(ast.Pass())


# How it is told.


def _console(widest: int = 160) -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, widest)
    return console


def _print(console: Console, *parts: RenderableType) -> None:
    """Without the blanks that tables leave at the ends of lines."""
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _has_colours(console: Console) -> bool:
    """Enough of them for a picture: sixteen are not."""
    return console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor")


def _fail(sentence: str, code: int = 2) -> NoReturn:
    Console(stderr=True, highlight=False).print(Text(f"heedful: {sentence}"))
    raise typer.Exit(code)


def _print_json(rows: Any) -> None:
    typer.echo(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False))


def _direction(row: dict[str, Any]) -> str:
    return "either" if row["causal_is_optional"] else "causal" if row["causal"] else "two-way"


DIRECTIONS = {"causal": "causal", "either": "causal or two-way", "two-way": "two-way"}


def _share(page: Page) -> str:
    return f"{page.cost.flops / page.dense_cost.flops:.2g}"


def _stacked_table(rows: list[dict[str, Any]]) -> Table:
    """Two lines an entry, for eighty columns; families are headings."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(overflow="fold", min_width=11)
    table.add_column(no_wrap=True)
    table.add_row("name", "what it does", "complexity", "causal", style="bold")
    table.add_row("", "paper", "kernels", "streams", style="dim")
    family = None
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            table.add_row()
            table.add_row(Text(str(family), style="bold cyan"))
        table.add_row(Text(row["name"], style="bold"), row["summary"], row["complexity"], _direction(row))
        streams = "streams" if row["streaming"] else "-"
        table.add_row("", f"{row['paper']}, {row['year']}", row["kernels"] or "-", streams, style="dim")
    return table


def _wide_table(rows: list[dict[str, Any]]) -> Table:
    """One line an entry."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("name", "family", "what it does", "paper", "complexity", "causal", "streams", "kernels"):
        table.add_column(heading, overflow="fold", style="bold" if heading == "name" else "")
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            row["summary"],
            f"{row['paper']}, {row['year']}",
            row["complexity"],
            _direction(row),
            "yes" if row["streaming"] else "no",
            row["kernels"] or "-",
        )
    return table


def _print_page(page: Page, png: Path | None) -> None:
    console = _console(widest=110)
    facts, (prose, mathematics) = page.facts, page.document
    parts: list[RenderableType] = [
        _two_ends(Text(facts["name"], style="bold"), Text(facts["family"], style="cyan")),
        Text(facts["summary"]),
        Text(f"{facts['paper']}, {facts['year']}", style="dim"),
        Text(_in_python(page.mechanism), style="dim"),
    ]
    parts += [Padding(Text(paragraph), (1, 0, 0, 0)) for paragraph in prose[:1]]
    room = console.width - 4 - max((len(label) for label, _ in mathematics), default=0)
    formulas = [(label, fold_formula(text, room)) for label, text in mathematics]
    parts += [Padding(_labelled(formulas), (1, 0, 0, 2))] if formulas else []
    parts += [Padding(Text(paragraph), (1, 0, 0, 0)) for paragraph in prose[1:]]
    picture = draw.to_text(page.matrix, width=32 if console.width < 100 else 48, colour=_has_colours(console))
    if console.width >= 72:
        side_by_side = Table.grid(padding=(0, 3, 0, 0))
        side_by_side.add_row(picture, Group(*_details(page)))
        parts += [Text(), side_by_side]
    else:
        parts += [Text(), *_details(page), picture]
    parts.append(Text(f"drawn: {page.drawn}", style="dim"))
    if png is not None:
        parts.append(Text(f"wrote {png}", style="dim"))
    _print(console, *parts)


def _in_python(mechanism: Mechanism) -> str:
    return " ".join(repr(mechanism).split())


def _details(page: Page) -> list[RenderableType]:
    facts, cost = page.facts, page.cost
    heads = "1 head" if page.heads == 1 else f"{page.heads} heads"
    state = "none" if cost.state is None else f"{_bytes(4 * cost.state)} after {page.n} tokens"
    sections: dict[str, list[tuple[str, str]]] = {
        "options": [(name, _set_to(page, name)) for name in page.entry.options if name not in SIZES],
        f"cost at n = {page.n}, d = {page.d}, {heads}, float32": [
            ("flops", f"{_amount(cost.flops)}, {_share(page)} × dense {page.dense_name}"),
            ("memory", f"at least {_bytes(cost.bytes)} read and written"),
            ("state", state),
            ("grows", f"as {facts['complexity']}"),
        ],
        "use": [
            ("order", DIRECTIONS[_direction(facts)]),
            ("streams", "token by token" if facts["streaming"] else "no"),
            ("kernels", facts["kernels"] or "plain torch"),
        ],
    }
    parts: list[RenderableType] = []
    for heading, rows in sections.items():
        if rows:
            parts += [Text(heading, style="bold"), Padding(_labelled(rows), (0, 0, 1, 2))]
    return parts


def _set_to(page: Page, name: str) -> str:
    default = page.entry.options[name]
    if name in page.options:
        return f"{page.options[name]} (default {default})"
    return "must be given" if default is inspect.Parameter.empty else str(default)


CARD = 24
"""Columns of the picture on a card."""


def _print_cards(pages: list[Page]) -> None:
    console = _console()
    colour = _has_colours(console)
    across = 2 if console.width >= 150 else 1
    block = draw.block_size(pages[0].matrix.shape, CARD, colour=colour)
    notes = ["blank: exactly 0", *draw.shared_cells(block, "max", "cell" if colour else "character")]
    preface = (
        f"Attention as matrices: queries down, keys across, {pages[0].tokens} random tokens, seed {pages[0].seed} "
        f"({'; '.join(notes)})."
    )
    parts: list[RenderableType] = [Text(preface, style="dim"), Text()]
    for at in range(0, len(pages), across):
        row = Table.grid(expand=True, padding=(0, 3, 0, 0), pad_edge=False)
        for _ in range(across):
            row.add_column(ratio=1)
        row.add_row(*(_card(page, colour, console.width // across - CARD - 6) for page in pages[at : at + across]))
        parts += [row, Text()]
    parts.append(Text("`heedful show NAME` tells more of one, `heedful list` compares them.", style="dim"))
    _print(console, *parts)


def _card(page: Page, colour: bool, room: int) -> Table:
    facts, (_, mathematics) = page.facts, page.document
    formula = next((text for label, text in mathematics if label == "matrix"), "")
    against = f"{_share(page)} × {page.dense_name} at n = {page.n}"
    streams = ", streams" if facts["streaming"] else ""
    lines: list[RenderableType] = [
        _two_ends(Text(facts["name"], style="bold"), Text(facts["family"], style="cyan")),
        Text(facts["summary"]),
        Text(f"{facts['complexity']}, {against}"),
        Text(f"{DIRECTIONS[_direction(facts)]}{streams}"),
        Text(f"{facts['paper']}, {facts['year']}", style="dim"),
        Text(),
        Text(fold_formula(formula, room)),
        Text(_in_python(page.small_mechanism), style="dim"),
        draw.legend(draw.Scale.of(page.matrix), colour),
    ]
    card = Table.grid(expand=True, padding=(0, 3, 0, 0), pad_edge=False)
    card.add_column(width=CARD)
    card.add_column(ratio=1)
    card.add_row(draw.to_text(page.matrix, width=CARD, colour=colour, caption=False), Group(*lines))
    return card


def _two_ends(left: Text, right: Text) -> Table:
    line = Table.grid(expand=True)
    line.add_column(ratio=1)
    line.add_column(justify="right")
    line.add_row(left, right)
    return line


def _labelled(rows: list[tuple[str, str]]) -> Table:
    """Labels in one column, texts in the next, wrapped under themselves."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def _amount(count: float) -> str:
    """1234567 → 1.23 M."""
    for unit in ("", " k", " M", " G", " T"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} P"


def _bytes(count: float) -> str:
    """4096 → 4 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _save(page: Page, path: Path) -> None:
    try:
        draw.to_png(page.matrix, path, f"{page.entry.name}: {page.entry.summary}", page.drawn)
    except ImportError:
        _fail("drawing to a file needs Pillow: pip install 'heedful[plot]'", code=1)
    except OSError as refusal:
        _fail(f"can't write {path}: {refusal.strerror or refusal}.", code=1)
