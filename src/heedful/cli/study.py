"""`heedful study`: models that were trained and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.answers import AsJson, fail, print_json, writing


def study_command(
    name: Annotated[str | None, typer.Argument(help="fixed-heads or frozen-projections; the list without.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the page of the study.")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Print the tables as LaTeX, not as Markdown.")] = False,
    language: Annotated[str, typer.Option("--language", help="Of the page: en or zh.")] = "en",
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="OPTIONS", help="Train, with options of python -m heedful.studies.run."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a study found, or train it.

    A study trains models that differ in one thing. The tables are made of runs on one H200 that come with heedful;
    docs/studies.md says how the data are built. Training needs `pip install 'heedful[studies]'`.

    \b
    heedful study fixed-heads
    heedful study frozen-projections --html frozen.html --language zh
    heedful study fixed-heads --run "--seeds 0-2 --out runs/records"
    """
    from heedful.studies.results import BASELINES, published
    from heedful.studies.tables import latex as latex_tables
    from heedful.studies.tables import markdown

    if name is None:
        typer.echo("\n".join(BASELINES))
        return
    if name not in BASELINES:
        fail(f"no study is called {name!r}; there are {', '.join(BASELINES)}.")
    if run is not None:
        raise typer.Exit(_train(name, run))
    rows = published(name)
    if not rows:
        fail(f"{name}: no runs have been published yet; train it with --run.", code=1)
    if html is not None:
        from heedful.studies.page import write

        with writing():
            typer.echo(write(rows, html, language=language))
    elif as_json:
        from heedful.studies.page import payload

        print_json(payload(rows))
    else:
        typer.echo((latex_tables if latex else markdown)(rows), nl=False)


def _train(name: str, options: str) -> int:
    import shlex

    try:
        from heedful.studies.run import main
    except ImportError as missing:
        fail(f"training needs {missing.name}: pip install 'heedful[studies]'.", code=1)
    return main(["--study", name, *shlex.split(options)])
