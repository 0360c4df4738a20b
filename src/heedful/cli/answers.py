"""Output of commands: JSON, or an error message with an exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

from heedful.cli.messages import print_mistake

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

LIMITS = {
    "--texts-count": (1, 9999),
    "--budget": (64, 2**20),
    "--n": (1, 2**24),
    "--d": (1, 2**16),
    "--heads": (1, 2**16),
    "--tokens": (1, 4096),
    "--seed": (0, 2**63 - 1),
    "--threads": (1, 1024),
}


def check_limits(given: dict[str, int]) -> None:
    for flag, value in given.items():
        least, most = LIMITS[flag]
        if not least <= value <= most:
            fail(f"{flag} {value}: expected {least} to {most}.")


def fail(sentence: str, code: int = 2) -> NoReturn:
    print_mistake(sentence)
    raise typer.Exit(code)


def print_json(rows: Any) -> None:
    typer.echo(json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def writing() -> Iterator[None]:
    """Turn errors of a run that writes files into a message and an exit code."""
    try:
        yield
    except ValueError as mistake:
        fail(str(mistake))
    except OSError as refusal:
        fail(f"can't write {refusal.filename}: {refusal.strerror or refusal}.", code=1)
