"""A scan on the terminal: progress with the remaining time, and the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import polars as pl
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from heedful.scan.answer import BASE, KINDS, number
from heedful.store.scans import RANK, title_of

if TYPE_CHECKING:
    from heedful.scan import Scan


@contextmanager
def progress_bar(title: str, shown: bool) -> Iterator[Callable[[float, int], None]]:
    """A progress bar on stderr; yields a function to call with (units done, units in total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[units]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(title, total=None, units="")

        def tell(done: float, total: int) -> None:
            bar.update(task, completed=done, total=total, units=f"{int(done)} of {total} texts")

        yield tell


def print_scan(scan: Scan, width: int | None = None) -> None:
    """Print the answer in words and a table of layers; for two scans, first how they differ."""
    console = Console(highlight=False, width=width)
    other = scan.against
    if other is not None:
        console.print(scan.answer(against=other).text + "\n")
    for each in (scan, other):
        if each is not None:
            console.print(each.words() if other is None else f"{title_of(each.manifest)}: {each.words()}")
            console.print(_layers(each.table().filter(pl.col("length") == each.lengths[-1]), each.lengths[-1]))


def _layers(rows: pl.DataFrame, length: int) -> Table:
    """A table with one line per layer: means over its heads, and the number of heads of each kind."""
    texts = int(rows["texts"][0])
    title = f"{length} tokens, {texts} text{'s' * (texts != 1)}; means over heads, and how many heads are"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0)
    columns = {RANK: "rank", BASE: "random", "energy10": "top10%", "entropy": "entropy", "sink": "first"}
    for name in ("layer", "of", *columns.values(), *KINDS):
        table.add_column(name.replace("positional", "fixed"), justify="left" if name == "of" else "right")
    for layer in rows["layer"].unique(maintain_order=True):
        part = rows.filter(rows["layer"] == layer)
        counts = [str((part["kind_of_head"] == kind).sum() or "·") for kind in KINDS]
        means = {name: part[name].mean() for name in columns}
        shown = [_short(name, x) if isinstance(x, float) else "–" for name, x in means.items()]
        table.add_row(str(layer), part["kind"][0], *shown, *counts)
    return table


def _short(name: str, x: float) -> str:
    return number(x) if name in (RANK, BASE) else f"{x:.2f}"
