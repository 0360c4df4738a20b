"""Display of results: a base class that gives each result its text, table, HTML and plain data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from html import escape
from itertools import product
from textwrap import wrap
from typing import Any

from heedful.shapes import Tensor

SHOWN = 12  # heads in a printed table; the others are only counted
WIDE = 80  # width of printed text in characters
DRAWN = 256  # largest number of queries in a plot, evenly spaced


@dataclass(frozen=True, eq=False, repr=False)
class Measurement(ABC):
    """A result over a batch of heads. Subclasses are dataclasses and implement `columns`: tensors over the batch."""

    @abstractmethod
    def columns(self) -> dict[str, Tensor]:
        """Return the columns of the table by heading; each is a tensor over the batch."""

    def caption(self) -> str:
        """Return the line above the table."""
        return type(self).__name__

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows as text; with a batch, the first column is the index of the head."""
        columns = self.columns()
        batch = next(iter(columns.values())).shape
        plain = [x.detach().reshape(-1).cpu().tolist() for x in columns.values()]
        values = [[number(value) for value in row] for row in zip(*plain, strict=True)]
        rows = [[head, *row] if batch else row for head, row in zip(indices(batch), values, strict=True)]
        return (["head"] if batch else []) + list(columns), rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without fields whose metadata contain `hidden`."""
        shown = [field.name for field in fields(self) if not field.metadata.get("hidden")]
        return {name: _plain(getattr(self, name)) for name in shown}

    def __repr__(self) -> str:
        head, rows = self.cells()
        columns = list(zip(head, *rows[:SHOWN], strict=True))
        keys = 1 if head[0] == "head" else 0
        lines = [line for part in _packed(columns, keys) for line in _aligned(part)]
        if len(rows) > SHOWN:
            lines.append(f"… and {len(rows) - SHOWN} more")
        return "\n".join([*wrap(self.caption(), WIDE), *lines])

    def __rich__(self):
        from rich.table import Table

        head, rows = self.cells()
        table = Table(title=self.caption(), title_justify="left")
        for name in head:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
        return table

    def _repr_html_(self) -> str:
        head, rows = self.cells()
        lines = ["<table>", f"<caption>{escape(self.caption())}</caption>"]
        lines.append("<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>")
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        return "\n".join([*lines, "</table>"])


def _packed(columns: list[tuple[str, ...]], keys: int) -> Iterator[list[tuple[str, ...]]]:
    """Yield the columns in parts that fit a terminal, each with the first `keys` columns."""
    part = columns[:keys]
    for column in columns[keys:]:
        if len(part) > keys and sum(2 + max(map(len, one)) for one in [*part, column]) - 2 > WIDE:
            yield part
            part = columns[:keys]
        part = [*part, column]
    yield part


def _aligned(columns: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def indices(batch: tuple[int, ...]) -> list[str]:
    """Return the heads of a batch by their indices; one empty name if there is no batch.

    >>> indices((2, 2)), indices(())
    (['0.0', '0.1', '1.0', '1.1'], [''])
    """
    return [".".join(map(str, index)) for index in product(*(range(size) for size in batch))]


def bars(name: str, middle: Tensor, lower: Tensor, upper: Tensor):
    """Plot a point with its bounds for each head (needs altair)."""
    alt = altair()
    columns = [x.detach().double().reshape(-1).cpu().tolist() for x in (middle, lower, upper)]
    rows = [
        {"head": head or "0", name: at, "at least": low, "at most": high}
        for head, at, low, high in zip(indices(middle.shape), *columns, strict=True)
        if at == at  # skips NaN
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(x=alt.X("head:N", sort=None))
    span = base.mark_rule().encode(y=alt.Y("at least:Q", title=name), y2=alt.Y2("at most:Q"))
    return span + base.mark_point(filled=True).encode(y=alt.Y(f"{name}:Q", title=name))


def number(value: float | int | bool | str) -> str:
    """Format a number with four significant digits.

    >>> number(0.123456), number(1234567.8), number(12), number(float("nan"))
    ('0.1235', '1.235e+06', '12', '—')
    """
    if isinstance(value, bool | str | int):
        return str(value)
    return "—" if value != value else f"{value:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().tolist()
    return list(value) if isinstance(value, tuple) else value


def altair():
    """Return the plotting library; raise an error that says how to install it if it is missing."""
    try:
        import altair as found
    except ImportError:
        raise ImportError("plot: needs altair. Install it with pip install 'heedful[plot]'.") from None
    return found


def by_query(shown: dict[str, Tensor], seeing: Tensor):
    """Plot lines over the queries, one panel per quantity, one line per head, gaps where a query sees nothing."""
    alt = altair()
    *batch, n = seeing.shape
    points = range(0, n, -(-n // DRAWN))
    seen = seeing.reshape(-1, n).cpu().tolist()
    rows = [
        {"head": head or "0", "query": at, "quantity": name, "value": values[at] if here[at] else None}
        for name, x in shown.items()
        for head, values, here in zip(indices(tuple(batch)), x.reshape(-1, n).cpu().tolist(), seen, strict=True)
        for at in points
    ]
    line = (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(x="query:Q", y=alt.Y("value:Q", title=None), color=alt.Color("head:N", sort=None))
        .properties(width=320, height=120)
    )
    return line.facet(facet=alt.Facet("quantity:N", sort=list(shown), title=None), columns=2).resolve_scale(
        y="independent"
    )
