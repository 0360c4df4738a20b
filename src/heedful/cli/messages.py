"""Messages on stderr, beside the answer on stdout. Does not import torch, so mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


def print_mistake(sentence: str) -> None:
    """Print an error message, unformatted."""
    _stderr().print(Text(f"heedful: {sentence}"))


def print_notice(sentence: str) -> None:
    """Print a note that a reader of the answer needs."""
    _stderr().print(Text(f"note: {sentence}"))


@contextmanager
def waiting(first: str, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show a line with a spinner and the elapsed time; yields a function that replaces its text.

    Only on a terminal; the line disappears at the end.
    """
    console = _stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as line:
        task = line.add_task(first, total=None)
        yield lambda text: line.update(task, description=text)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
