"""`heedful theory` in a terminal: progress, a table of verdicts, and the full page of one claim.

Uses records only, as defined in `heedful/theory/records.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent, wrap
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from heedful.cli.terminal import labelled, make_console, print_parts, two_ends
from heedful.latex import to_text
from heedful.report.numbers import measured_text, number_text
from heedful.theory.records import controls, counts, differing

Record = Mapping[str, Any]

SIGNS = {"HOLDS": "✓", "HOLDS_WHEN": "◑", "FAILS": "✗", "UNDECIDED": "?"}
STYLES = {"HOLDS": "green", "HOLDS_WHEN": "yellow", "FAILS": "red", "UNDECIDED": "dim"}
WORDS = {
    "en": {
        "HOLDS": "holds", "HOLDS_WHEN": "holds when", "FAILS": "fails", "UNDECIDED": "undecided", "not run": "not run",
        "condition": "when", "control": "control", "case": "as stated", "counterexample": "counterexample",
        "corrected": "true instead", "sharper": "more exactly", "reason": "why", "first": "first reading",
        "flipped": "comes out the other way", "same": "is not told apart", "True": "holds", "False": "does not hold",
        "None": "a number is missing", "because": "undecided",
    },
    "zh": {
        "HOLDS": "成立", "HOLDS_WHEN": "有条件成立", "FAILS": "不成立", "UNDECIDED": "未定", "not run": "未运行",
        "condition": "条件", "control": "对照", "case": "原命题", "counterexample": "反例",
        "corrected": "正确的说法", "sharper": "更精确的说法", "reason": "原因", "first": "初读",
        "flipped": "结果相反", "same": "未能区分", "True": "成立", "False": "不成立",
        "None": "缺少数值", "because": "未定",
    },
}  # fmt: skip


class Progress:
    """Progress on stderr: a bar in a terminal, else nothing."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("claims", total=None)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, record: Record, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=record["id"][:24].ljust(24))


def print_claims(
    records: Sequence[Record],
    shown: Sequence[Record],
    chapters: Sequence[Mapping[str, Any]],
    seconds: float,
    language: str,
) -> None:
    """Print a table of the records that are shown, then the counts of all."""
    console = make_console()
    parts: list[RenderableType] = []
    for chapter in chapters:
        own = [record for record in shown if record["chapter"] == chapter["name"]]
        if own:
            parts += [Text(chapter["title"][language], style="bold cyan"), _table(own, console.width, language), Text()]
    print_parts(console, *parts, *_sums(records, chapters, seconds, language))


def print_claim(record: Record, *, language: str) -> None:
    """Print everything about one claim."""
    console = make_console(widest=100)
    print_parts(console, *_beginning(record, language, console.width))
    if record["counterexample"]:
        print_parts(console, Text(), Text(WORDS[language]["counterexample"], style="cyan"))
        print(indent(record["counterexample"], "  "))  # not wrapped, so that it can be copied
    rest = _rest(record, language, console.width)
    if rest:
        print_parts(console, *rest)


def shorten(text: str, room: int) -> str:
    """As many whole words as fit; in Chinese, as many characters.

    >>> shorten("The rank is at most d.", 16), shorten("短", 16)
    ('The rank is …', '短')
    """
    if cell_len(text) <= room:
        return text
    kept = ""
    for character in text:
        if cell_len(kept + character) > room - 2:
            break
        kept += character
    at = kept.rfind(" ")
    wide = cell_len(kept[-1:]) == 2
    return (kept if wide or at < len(kept) // 2 else kept[:at]).rstrip(" ,;:，、；：") + " …"


def _verdict(record: Record, language: str) -> Text:
    verdict = record["verdict"]
    word = WORDS[language][verdict if record["ran"] else "not run"]
    return Text(f"{SIGNS[verdict] if record['ran'] else '–'} {word}", style=STYLES[verdict])


def _table(records: Sequence[Record], width: int, language: str) -> Table:
    """A table with two lines per claim: its statement, and what was measured."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    names = max(len(record["id"]) for record in records)
    verdicts = 2 + max(cell_len(word) for word in WORDS[language].values() if word != WORDS[language]["same"])
    verdicts = min(verdicts, 12)
    table.add_column(no_wrap=True, width=names)
    table.add_column(no_wrap=True, width=verdicts)
    room = max(20, width - names - verdicts - 4)
    table.add_column(no_wrap=True)
    for record in records:
        said = Text(shorten(record["statement"][language], room))
        table.add_row(Text(record["id"], style="bold"), _verdict(record, language), said)
        table.add_row("", "", Text(_evidence_line(record, room), style="dim"))
    return table


def _evidence_line(record: Record, room: int) -> str:
    """The numbers that decided the verdict: the first comparison that does not hold, else the first one."""
    if record["evidence"] is None:
        return shorten(record["because"], room)
    rows = record["evidence"]["comparisons"]
    telling = next((row for row in rows if not row["holds"]), rows[0])
    numbers = _numbers(telling) + (f" (+{len(rows) - 1})" if len(rows) > 1 else "")
    return shorten(f"{shorten(telling['name'], max(10, room - cell_len(numbers) - 2))}: {numbers}", room)


def _comparison(row: Mapping[str, Any]) -> str:
    return f"{row['name']}: {_numbers(row)}"


def _numbers(row: Mapping[str, Any]) -> str:
    relation = row["relation"] if row["holds"] else f"not {row['relation']}"
    return f"{measured_text(row['measured'], row['noise'])} {relation} {number_text(row['expected'])}"


def _sums(
    records: Sequence[Record], chapters: Sequence[Mapping[str, Any]], seconds: float, language: str
) -> list[RenderableType]:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("chapter", overflow="fold")
    for verdict in SIGNS:
        table.add_column(f"{SIGNS[verdict]} {WORDS[language][verdict]}", justify="right")
    table.add_column("all", justify="right")
    for chapter in chapters:
        own = [record for record in records if record["chapter"] == chapter["name"]]
        if own:
            table.add_row(chapter["name"], *map(str, counts(own).values()), str(len(own)))
    table.add_row("all", *map(str, counts(records).values()), str(len(records)), style="bold")
    parts: list[RenderableType] = [table, Text()]
    others = differing(records)
    if others:
        parts += [
            Text(f"{len(others)} unlike a first reading", style="bold"),
            _differences(others, language),
            Text(),
        ]
    ran = list(controls(records))
    flipped = sum(one["control"]["flipped"] for one in ran)
    parts.append(Text(f"controls that came out the other way: {flipped} of {len(ran)}"))
    stuck = [one["id"] for one in ran if not one["control"]["flipped"]]
    parts += [Text(f"not told from their control: {', '.join(stuck)}", style="red")] if stuck else []
    waiting = sum(not record["ran"] for record in records)
    parts += [Text(f"{waiting} slow ones were not run: `heedful theory --all` does")] if waiting else []
    checks = sum(record["seconds"] for record in records)
    parts.append(Text(f"wall time {seconds:.1f} s, of all checks {checks:.1f} s", style="dim"))
    return parts


def _differences(records: Sequence[Record], language: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for record in records:
        why = record["reason"][language] if record["reason"] else record["because"]
        now = f"{record['first']} → {WORDS[language][record['verdict']]}"
        table.add_row(Text(record["id"], style="bold"), now, Text(why))
    return table


def _beginning(record: Record, language: str, width: int) -> list[RenderableType]:
    place = f"§ {record['section']}, {record['kind']}"
    head = Text.assemble((record["id"], "bold"), "  ", _verdict(record, language))
    return [two_ends(head, Text(place, style="cyan")), *_content(record, language, width)]


def _rest(record: Record, language: str, width: int) -> list[RenderableType]:
    words = WORDS[language]
    parts: list[RenderableType] = []
    if record["corrected"]:
        inner = record["corrected"]
        name = words["corrected" if record["verdict"] == "FAILS" else "sharper"]
        head = Text.assemble((name, "cyan"), "  ", (inner["id"], "bold"), "  ", _verdict(inner, language))
        parts += [Text(), head, Padding(Group(*_content(inner, language, width - 2)), (0, 0, 0, 2))]
    tail = []
    if record["differs"]:
        tail.append((words["first"], record["first"]))
    if record["reason"]:
        tail.append((words["reason"], record["reason"][language]))
    parts += [Text(), labelled(tail)] if tail else []
    return parts


def _content(record: Record, language: str, width: int) -> list[RenderableType]:
    words = WORDS[language]
    parts: list[RenderableType] = [Text(record["statement"][language])]
    if record["formula"]:
        parts.append(Padding(Text("\n".join(wrap(_formula(record["formula"]), max(20, width - 4)))), (1, 0, 0, 2)))
    rows = []
    if record["condition"]:
        rows.append((words["condition"], record["condition"][language]))
    if record["because"]:
        rows.append((words["because"], record["because"]))
    parts += [Text(), labelled(rows)] if rows else []
    for key in ("evidence", "control"):
        found = record[key]
        if found is not None:
            outcome = words[str(found["holds"])]
            if key == "control":
                outcome = words["flipped" if found["flipped"] else "same"]
            head = f"{words['case' if key == 'evidence' else 'control']}: {found['case']}"
            lines = [_comparison(row) for row in found["comparisons"]] + ([found["note"]] if found["note"] else [])
            parts += [Text(), Text.assemble((head, "cyan"), f" – {outcome}")]
            parts.append(Padding(Text("\n".join(lines)), (0, 0, 0, 2)))
    return parts


def _formula(latex: str) -> str:
    try:
        return to_text(latex)
    except ValueError:
        return latex


def print_written(path: Path) -> None:
    """Print the path of the book."""
    print_parts(make_console(), Text(f"wrote {path}", style="dim"))
