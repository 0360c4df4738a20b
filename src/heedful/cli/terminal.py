"""Tables, cards and pages for the terminal, fitted to its width."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heedful.cli import picture
from heedful.cli.mechanism_facts import Facts, Page, direction
from heedful.cli.options import SIZES
from heedful.core import Mechanism

DIRECTIONS = {"causal": "causal", "either": "causal or two-way", "two-way": "two-way"}
CARD = 24
"""Columns of the picture on a card."""


def print_catalogue(rows: list[Facts]) -> None:
    """Print the catalogue: one line per entry if the terminal is wide enough, else two."""
    console = make_console()
    print_parts(console, _wide_table(rows) if console.width >= 140 else _stacked_table(rows))


def print_cards(pages: list[Page]) -> None:
    """Print a card for each: a picture and the main facts. Two cards side by side if the terminal is wide enough."""
    console = make_console()
    colour = _has_colours(console)
    across = 2 if console.width >= 150 else 1
    block = picture.block_size(pages[0].matrix.shape, CARD, colour=colour)
    notes = ["blank: exactly 0", *picture.shared_cells(block, "max", "cell" if colour else "character")]
    preface = (
        f"Attention as matrices: queries down, keys across, {pages[0].tokens} random tokens, seed {pages[0].seed} "
        f"({'; '.join(notes)})."
    )
    parts: list[RenderableType] = [Text(preface, style="dim"), Text()]
    for at in range(0, len(pages), across):
        row = Table.grid(expand=True, padding=(0, 3, 0, 0), pad_edge=False)
        for _ in range(across):
            row.add_column(ratio=1)
        row.add_row(*(_card(page, colour, console.width // across - CARD - 6) for page in pages[at : at + across]))
        parts += [row, Text()]
    parts.append(Text("`heedful.cli NAME` tells more of one, `heedful list` compares them.", style="dim"))
    print_parts(console, *parts)


def print_page(page: Page, png: Path | None) -> None:
    """Print the full page of one mechanism; `png` is the file to which its picture was written, if any."""
    console = make_console(widest=110)
    facts, (prose, mathematics) = page.facts, page.document
    parts: list[RenderableType] = [
        two_ends(Text(facts["name"], style="bold"), Text(facts["family"], style="cyan")),
        Text(facts["summary"]),
        Text(facts["paper"], style="dim"),
        Text(_in_python(page.mechanism), style="dim"),
    ]
    parts += [Padding(Text(paragraph), (1, 0, 0, 0)) for paragraph in prose[:1]]
    room = console.width - 4 - max((len(label) for label, _ in mathematics), default=0)
    formulas = [(label, fold_formula(text, room)) for label, text in mathematics]
    parts += [Padding(labelled(formulas), (1, 0, 0, 2))] if formulas else []
    parts += [Padding(Text(paragraph), (1, 0, 0, 0)) for paragraph in prose[1:]]
    drawing = picture.to_text(page.matrix, width=32 if console.width < 100 else 48, colour=_has_colours(console))
    if console.width >= 72:
        side_by_side = Table.grid(padding=(0, 3, 0, 0))
        side_by_side.add_row(drawing, Group(*_details(page)))
        parts += [Text(), side_by_side]
    else:
        parts += [Text(), *_details(page), drawing]
    parts.append(Text(f"drawn: {page.drawn}", style="dim"))
    if png is not None:
        parts.append(Text(f"wrote {png}", style="dim"))
    print_parts(console, *parts)


def print_stages(page: Page) -> None:
    """The flops of a layer by stage."""
    cost = page.layer_cost
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(heading, style="dim") for heading in ("stage", "flops", "share", "elementwise")))
    for stage in cost.stages:
        share = f"{100 * stage.flops / max(cost.flops, 1):.1f} %"
        table.add_row(stage.name, _amount(stage.flops), share, _amount(stage.elementwise) if stage.elementwise else "")
    table.add_row("total", _amount(cost.flops), "", _amount(sum(stage.elementwise for stage in cost.stages)))
    width, heads = page.heads * page.d, "1 head" if page.heads == 1 else f"{page.heads} heads"
    print_parts(
        make_console(widest=110),
        two_ends(Text(page.entry.name, style="bold"), Text(page.entry.family, style="cyan")),
        Text(f"one layer, {width} wide: n = {page.n}, d = {page.d}, {heads}, batch 1", style="dim"),
        Padding(table, (1, 0, 1, 2)),
        Text(
            "flops are of matrix products, a multiply-add being two. elementwise counts the numbers that get a "
            "function of their own, such as an exponential; they are not among the flops.",
            style="dim",
        ),
    )


def make_console(widest: int = 160) -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, widest)
    return console


def print_parts(console: Console, *parts: RenderableType) -> None:
    """Print without the trailing blanks of tables."""
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _has_colours(console: Console) -> bool:
    """True if the terminal has enough colours for a picture: sixteen are too few."""
    return console.is_terminal and not console.no_color and console.color_system in ("256", "truecolor")


def _stacked_table(rows: list[Facts]) -> Table:
    """A table with two lines per entry, for 80 columns; families are headings."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(overflow="fold", min_width=11)
    table.add_column(no_wrap=True)
    table.add_row("name", "what it does", "complexity", "causal", style="bold")
    table.add_row("", "paper", "kernels", "streams", style="dim")
    family = None
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            table.add_row()
            table.add_row(Text(str(family), style="bold cyan"))
        table.add_row(Text(row["name"], style="bold"), row["summary"], row["complexity"], direction(row))
        streams = "streams" if row["streaming"] else "-"
        table.add_row("", row["paper"], row["kernels"] or "-", streams, style="dim")
    return table


def _wide_table(rows: list[Facts]) -> Table:
    """A table with one line per entry."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("name", "family", "what it does", "paper", "complexity", "causal", "streams", "kernels"):
        table.add_column(heading, overflow="fold", style="bold" if heading == "name" else "")
    for row in rows:
        table.add_row(
            row["name"],
            row["family"],
            row["summary"],
            row["paper"],
            row["complexity"],
            direction(row),
            "yes" if row["streaming"] else "no",
            row["kernels"] or "-",
        )
    return table


def _card(page: Page, colour: bool, room: int) -> Table:
    facts, (_, mathematics) = page.facts, page.document
    formula = next((text for label, text in mathematics if label == "matrix"), "")
    against = f"{_share(page)} × {page.dense_name} at n = {page.n}"
    streams = ", streams" if facts["streaming"] else ""
    lines: list[RenderableType] = [
        two_ends(Text(facts["name"], style="bold"), Text(facts["family"], style="cyan")),
        Text(facts["summary"]),
        Text(f"{facts['complexity']}, {against}"),
        Text(f"{DIRECTIONS[direction(facts)]}{streams}"),
        Text(facts["paper"], style="dim"),
        Text(),
        Text(fold_formula(formula, room)),
        Text(_in_python(page.small_mechanism), style="dim"),
        picture.legend(picture.Scale.of(page.matrix), colour),
    ]
    card = Table.grid(expand=True, padding=(0, 3, 0, 0), pad_edge=False)
    card.add_column(width=CARD)
    card.add_column(ratio=1)
    card.add_row(picture.to_text(page.matrix, width=CARD, colour=colour, caption=False), Group(*lines))
    return card


def _details(page: Page) -> list[RenderableType]:
    facts, cost = page.facts, page.cost
    heads = "1 head" if page.heads == 1 else f"{page.heads} heads"
    state = "none" if cost.state is None else f"{_bytes(4 * cost.state)} after {page.n} tokens"
    sections: dict[str, list[tuple[str, str]]] = {
        "options": [(name, _set_to(page, name)) for name in page.entry.options if name not in SIZES],
        f"cost at n = {page.n}, d = {page.d}, {heads}, float32": [
            ("flops", f"{_amount(cost.flops)}, {_share(page)} × dense {page.dense_name}"),
            ("memory", f"at least {_bytes(cost.bytes)} read and written"),
            ("state", state),
            ("grows", f"as {facts['complexity']}"),
        ],
        "use": [
            ("direction", DIRECTIONS[direction(facts)]),
            ("streams", "token by token" if facts["streaming"] else "no"),
            ("kernels", facts["kernels"] or "plain torch"),
        ],
    }
    parts: list[RenderableType] = []
    for heading, rows in sections.items():
        if rows:
            parts += [Text(heading, style="bold"), Padding(labelled(rows), (0, 0, 1, 2))]
    return parts


def _set_to(page: Page, name: str) -> str:
    default = page.entry.options[name]
    if name in page.options:
        return f"{page.options[name]} (default {default})"
    return "must be given" if default is inspect.Parameter.empty else str(default)


def _share(page: Page) -> str:
    return f"{page.cost.flops / page.dense_cost.flops:.2g}"


def _in_python(mechanism: Mechanism) -> str:
    return " ".join(repr(mechanism).split())


def two_ends(left: Text, right: Text) -> Table:
    line = Table.grid(expand=True)
    line.add_column(ratio=1)
    line.add_column(justify="right")
    line.add_row(left, right)
    return line


def labelled(rows: list[tuple[str, str]]) -> Table:
    """Labels in one column, wrapped texts in the next."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def _amount(count: float) -> str:
    """1234567 → 1.23 M."""
    for unit in ("", " k", " M", " G", " T"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} P"


def _bytes(count: float) -> str:
    """4096 → 4 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def fold_formula(text: str, width: int) -> str:
    """Lines of at most this width that do not break inside an innermost bracket.

    >>> print(fold_formula("A = exp(z / T) / (1 + exp(z / T))", 26))
    A = exp(z / T) / (1 +
    exp(z / T))
    """
    held = re.sub(r"\([^()]*\)|\{[^{}]*\}", lambda bracket: bracket[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    return "\n".join(wrap(held, max(width, 16), break_on_hyphens=False)).replace("\N{NO-BREAK SPACE}", " ")
