"""The command `heedful`, one function a command.

Tables and pictures are for people; `--json` prints the same facts for programs, and nothing else, to stdout. What a
user got wrong is told in a sentence on stderr, with exit code 2; what the system refused, with exit code 1.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import heedful
from heedful.mechanisms import CATALOG
from heedful.show import picture, terminal
from heedful.show.markdown import catalogue_markdown
from heedful.show.options import read_options
from heedful.show.page import Page, catalogue

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
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
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
    if as_json and as_markdown:
        _fail("--json and --markdown are two answers; choose one.")
    if as_json:
        _print_json(catalogue(family))
    elif as_markdown:
        typer.echo(catalogue_markdown(family=family))
    else:
        terminal.print_catalogue(catalogue(family))


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
    _check_limits({"--n": n, "--d": d, "--heads": heads, "--tokens": tokens, "--seed": seed})
    if name is None:
        if option or png:
            _fail(f"{'--option' if option else '--png'} needs the name of one mechanism, as in `heedful show softmax`.")
        everything = [Page(entry, {}, n, d, heads, tokens, seed) for entry in CATALOG.values()]
        if as_json:
            _print_json([page.as_json() for page in everything])
        else:
            terminal.print_cards(everything)
        return
    try:
        if name not in CATALOG:
            heedful.build(name)
        page = Page(CATALOG[name], read_options(CATALOG[name], option or []), n, d, heads, tokens, seed)
        _ = page.mechanism, page.small_mechanism
    except (ValueError, TypeError) as mistake:
        _fail(str(mistake))
    if png is not None:
        _save(page, png)
    if as_json:
        _print_json(page.as_json())
    else:
        terminal.print_page(page, png)


LIMITS = {"--n": (1, 2**24), "--d": (1, 2**16), "--heads": (1, 2**16), "--tokens": (1, 4096), "--seed": (0, 2**63 - 1)}


def _check_limits(given: dict[str, int]) -> None:
    for flag, value in given.items():
        least, most = LIMITS[flag]
        if not least <= value <= most:
            _fail(f"{flag} {value}: expected {least} to {most}.")


def _fail(sentence: str, code: int = 2) -> NoReturn:
    terminal.print_mistake(sentence)
    raise typer.Exit(code)


def _print_json(rows: Any) -> None:
    typer.echo(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False))


def _save(page: Page, path: Path) -> None:
    try:
        picture.to_png(page.matrix, path, f"{page.entry.name}: {page.entry.summary}", page.drawn)
    except ImportError:
        _fail("drawing to a file needs Pillow: pip install 'heedful[plot]'", code=1)
    except OSError as refusal:
        _fail(f"can't write {path}: {refusal.strerror or refusal}.", code=1)
