"""`heedful theory`: every statement of the texts, with a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.answers import AsJson, fail, print_json, writing


def theory_command(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="Claims, such as T11.23; without: all.")
    ] = None,
    chapter: Annotated[str | None, typer.Option("--chapter", help="Only this chapter, such as low-rank.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Only this kind, such as exact or empirical.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Show only the claims that fail.")] = False,
    slow: Annotated[bool, typer.Option("--all", help="Run slow claims too.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", show_default=False, help="Processes.  [default: one per core]")] = 0,
    limit: Annotated[
        float, typer.Option("--limit", show_default=False, help="Seconds per claim.  [default: 300, slow 1800]")
    ] = 0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the findings.")] = Path("runs/theory"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge all claims again.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the theory book.")] = None,
    language: Annotated[str, typer.Option("--language", help="en or zh.")] = "en",
    as_json: AsJson = False,
) -> None:
    """Run the theory: every statement of the texts, with a verdict.

    Each claim has a check, and a control on which the check must give the opposite result. A single claim is shown in
    full. Findings are written as they come: an interrupted run continues, and a finding is used again until something
    changes that it depends on. Exit code 1: a check gave the same result for a claim and its control.

    \b
    heedful theory T11.23
    heedful theory --chapter low-rank --failed
    heedful theory --all --html runs/theory.html --language zh
    """
    from heedful.cli.theory_run import theory

    if jobs < 0 or limit < 0:
        fail(f"{'--jobs' if jobs < 0 else '--limit'}: expected a number above 0.")
    with writing():
        answer = theory(
            tuple(ids or ()), chapter=chapter, kind=kind, failed=failed, slow=slow, jobs=jobs, limit=limit, out=out,
            fresh=fresh, html=html, language=language,
        )  # fmt: skip
    if as_json:
        print_json(answer.shown)
    else:
        answer.show()
    raise typer.Exit(answer.exit_code)
