"""`heedful list` and `heedful show`: the catalogue of mechanisms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.answers import AsJson, check_limits, fail, print_json

if TYPE_CHECKING:
    from heedful.cli.mechanism_facts import Page


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
    from heedful.cli import terminal
    from heedful.cli.catalogue_markdown import catalogue_markdown
    from heedful.cli.mechanism_facts import catalogue
    from heedful.mechanisms import CATALOG

    families = list(dict.fromkeys(entry.family for entry in CATALOG.values()))
    if family is not None and family not in families:
        fail(f"no family is called {family!r}; the families are {', '.join(families)}.")
    if as_json and as_markdown:
        fail("--json and --markdown are two answers; choose one.")
    if as_json:
        print_json(catalogue(family))
    elif as_markdown:
        typer.echo(catalogue_markdown(family=family))
    else:
        terminal.print_catalogue(catalogue(family))


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
    stages: Annotated[bool, typer.Option("--stages", help="Show where the flops of a whole layer go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a mechanism: its mathematics, cost and picture.

    Without a name: all of them, one card each. Pictures are of random tokens, under options that are small
    enough to be seen on a few dozen of them.

    \b
    heedful show window-sinks --n 16384 --option before=1024
    heedful show bigbird --tokens 96 --png bigbird.png
    heedful show softmax --option "pattern=Window(8, sinks=1)"
    heedful show favor+ --heads 8 --stages
    """
    from heedful.cli import terminal
    from heedful.cli.mechanism_facts import Page
    from heedful.cli.options import read_options
    from heedful.mechanisms import CATALOG, build

    tokens = (24 if name is None else 32) if tokens is None else tokens
    check_limits({"--n": n, "--d": d, "--heads": heads, "--tokens": tokens, "--seed": seed})
    if name is None:
        if option or png or stages:
            needy = "--option" if option else "--png" if png else "--stages"
            fail(f"{needy} needs the name of one mechanism, as in `heedful show softmax`.")
        everything = [Page(entry, {}, n, d, heads, tokens, seed) for entry in CATALOG.values()]
        if as_json:
            print_json([page.as_json() for page in everything])
        else:
            terminal.print_cards(everything)
        return
    try:
        if name not in CATALOG:
            build(name)
        page = Page(CATALOG[name], read_options(CATALOG[name], option or []), n, d, heads, tokens, seed)
        _ = page.mechanism, page.small_mechanism
    except (ValueError, TypeError) as mistake:
        fail(str(mistake))
    if png is not None:
        _save(page, png)
    if as_json:
        print_json(page.as_json() | (page.stages_as_json() if stages else {}))
    elif stages:
        terminal.print_stages(page)
    else:
        terminal.print_page(page, png)


def _save(page: Page, path: Path) -> None:
    from heedful.cli import picture

    try:
        picture.to_png(page.matrix, path, f"{page.entry.name}: {page.entry.summary}", page.drawn)
    except ImportError:
        fail("drawing to a file needs Pillow: pip install 'heedful[plot]'", code=1)
    except OSError as refusal:
        fail(f"can't write {path}: {refusal.strerror or refusal}.", code=1)
