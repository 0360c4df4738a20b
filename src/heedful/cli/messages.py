"""Sentences on stderr, beside the answer on stdout. Imports no torch: a mistake is told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


def print_mistake(sentence: str) -> None:
    """What went wrong, as it is."""
    _stderr().print(Text(f"heedful: {sentence}"))


def print_notice(sentence: str) -> None:
    """What a reader of the answer has to know."""
    _stderr().print(Text(f"note: {sentence}"))


@contextmanager
def waiting(first: str, shown: bool) -> Iterator[Callable[[str], None]]:
    """A line with the time it has taken, while something is read; a function that replaces its text.

    It is there on a terminal alone, and gone at the end.
    """
    console = _stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as line:
        task = line.add_task(first, total=None)
        yield lambda text: line.update(task, description=text)


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)
