"""How results are shown: one base class, from which a result gets its text, its table, its page and its plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from html import escape
from itertools import product
from typing import Any

from heedful.shapes import Tensor

SHOWN = 12  # heads in a printed table; the rest is counted


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """A result over a batch of heads. Subclasses are dataclasses and say `columns`, one tensor over the batch each."""

    def columns(self) -> dict[str, Tensor]:
        """What a table shows, by heading: tensors over the batch."""
        raise NotImplementedError

    def caption(self) -> str:
        """One line above the table."""
        return type(self).__name__

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows, as text: the head's index in the batch first, where there is a batch."""
        columns = self.columns()
        batch = next(iter(columns.values())).shape
        plain = {name: x.detach().cpu() for name, x in columns.items()}
        rows = []
        for index in product(*(range(size) for size in batch)):
            head = [".".join(map(str, index))] if index else []
            rows.append(head + [number(x[index].item()) for x in plain.values()])
        return (["head"] if batch else []) + list(columns), rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON has it. (A field whose metadata say `hidden` stays inside.)"""
        shown = [field.name for field in fields(self) if not field.metadata.get("hidden")]
        return {name: _plain(getattr(self, name)) for name in shown}

    def __repr__(self) -> str:
        head, rows = self.cells()
        shown = [head, *rows[:SHOWN]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in shown]
        if len(rows) > SHOWN:
            lines.append(f"… and {len(rows) - SHOWN} more")
        return "\n".join([self.caption(), *lines])

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


def number(value: float | int | bool | str) -> str:
    """A number as a reader wants it: four digits that count.

    >>> number(0.123456), number(1234567.8), number(12), number(float("nan"))
    ('0.1235', '1.235e+06', '12', '—')
    """
    if isinstance(value, bool | str | int):
        return str(value)
    return "—" if value != value else f"{value:.4g}"


def _plain(value: Any) -> Any:
    return value.detach().cpu().tolist() if isinstance(value, Tensor) else value


def altair():
    """The plotting library, or an error that says how to get it."""
    try:
        import altair as found
    except ImportError:
        raise ImportError("plot: needs altair. Install it with pip install 'heedful[report]'.") from None
    return found
