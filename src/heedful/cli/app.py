"""The command `heedful` and its subcommands, one function each.

Tables and pictures are for people; `--json` prints the same facts as JSON, and nothing else, to stdout. Errors go to
stderr as one sentence: exit code 2 for a user's mistake, exit code 1 if the system refused something.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from heedful import __version__
from heedful.cli.bench import bench_command
from heedful.cli.mechanisms import list_command, show_command
from heedful.cli.scan import report_command, scan_command
from heedful.cli.study import study_command
from heedful.cli.theory import theory_command

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_command)
app.command("show")(show_command)
app.command("bench")(bench_command)
app.command("scan")(scan_command)
app.command("report")(report_command)
app.command("theory")(theory_command)
app.command("study")(study_command)


@app.callback(invoke_without_command=True)
def heedful_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Measure the structure of Transformer attention, and put it to work."""
    if version:
        typer.echo(f"heedful {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """The entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # question marks, not errors, for characters it lacks
            stream.reconfigure(errors="replace")
    app(prog_name="heedful")
