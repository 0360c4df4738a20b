"""The contract suite as a table: every entry of the catalogue under every check, and every planted fault caught.

    python benchmarks/contract.py [NAME …]

Exits with 1 if an entry breaks a law or a fault gets through.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import heedful as h
from heedful.mechanisms import Entry
from heedful.testing import CHECKS, Case, Report, examine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from test_planted_faults import FAULTS, Dense

FACTS = {"d": 8, "heads": 2, "length": 2048}
MARKS = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "does not apply": "[dim]·[/]"}


def case_of(entry: Entry) -> Case:
    """A small instance for the laws, and one with realistic options for the cost."""
    asked = inspect.signature(entry.build).parameters
    facts = {name: fact for name, fact in FACTS.items() if name in asked}
    return Case(lambda: entry.sample(**FACTS), large=lambda: entry.build(**facts), **FACTS)


def topic(check: str) -> str:
    return CHECKS[check].__module__.rpartition(".")[-1]


def entries_table(reports: dict[str, Report]) -> Table:
    """A table with one row per entry and one mark per check, in the order of the table of checks."""
    table = Table(title="entries × checks   ✓ passed   ✗ failed   · does not apply", title_justify="left")
    topics = list(dict.fromkeys(map(topic, CHECKS)))
    for column in ("entry", *topics):
        table.add_column(column, no_wrap=True)
    table.add_column("seconds", justify="right")
    for name, report in reports.items():
        marks = {about: "" for about in topics}
        for check, outcome in report.outcomes.items():
            marks[topic(check)] += MARKS[outcome.verdict]
        table.add_row(name, *marks.values(), f"{sum(outcome.seconds for outcome in report.outcomes.values()):.1f}")
    return table


def checks_table(reports: dict[str, Report]) -> Table:
    """A table with one row per check: how often it passed, and its mean time."""
    table = Table(title="checks", title_justify="left")
    for column in ("about", "check"):
        table.add_column(column, no_wrap=True)
    for column in (*MARKS, "seconds"):
        table.add_column(column, justify="right")
    for check in CHECKS:
        outcomes = [report.outcomes[check] for report in reports.values()]
        counts = [sum(outcome.verdict == verdict for outcome in outcomes) for verdict in MARKS]
        mean = sum(outcome.seconds for outcome in outcomes) / len(outcomes)
        table.add_row(topic(check), check, *(str(count or "") for count in counts), f"{mean:.2f}")
    return table


def faults_table(caught: dict[str, Report], wanted: dict[str, set[str]]) -> Table:
    """A table with one row per fault: the checks that must catch it, and others that catch it too."""
    table = Table(title="planted faults", title_justify="left")
    for column in ("fault", "caught by the check it was planted for", "others that notice"):
        table.add_column(column)
    for name, report in caught.items():
        failed = report.names("failed")
        meant = [
            f"{MARKS['passed'] if check in failed else MARKS['failed']} {check}"
            for check in CHECKS
            if check in wanted[name]
        ]
        table.add_row(name, "\n".join(meant), str(len([check for check in failed if check not in wanted[name]]) or ""))
    return table


def run(names: Iterable[str]) -> bool:
    """Print both tables; return True if everything is as expected."""
    console = Console(width=max(140, Console().width))
    reports = {name: examine(case_of(h.CATALOG[name])) for name in names}
    console.print(entries_table(reports))
    console.print(checks_table(reports))
    for name, report in reports.items():
        for check in report.names("failed"):
            console.print(f"[red]{name} · {check}[/]: {report.outcomes[check].why}", highlight=False, markup=True)

    wanted = {fault.__name__: checks for fault, checks in FAULTS.items()}
    caught = {fault.__name__: examine(Case(fault)) for fault in FAULTS}
    console.print(faults_table(caught, wanted))
    missed = {name: gap for name, report in caught.items() if (gap := wanted[name] - set(report.names("failed")))}
    blind = set(CHECKS) - set().union(*wanted.values())
    control = examine(Case(Dense))

    count = {verdict: sum(len(report.names(verdict)) for report in reports.values()) for verdict in MARKS}
    console.print(
        f"{len(reports)} entries × {len(CHECKS)} checks: {count['passed']} passed, {count['failed']} failed, "
        f"{count['does not apply']} do not apply.\n"
        f"{len(FAULTS)} planted faults: {len(FAULTS) - len(missed)} caught by every check they were planted for; "
        f"{len(CHECKS) - len(blind)} of {len(CHECKS)} checks catch at least one; "
        f"the mechanism they are planted in breaks {len(control.names('failed'))} laws."
    )
    for name, gap in missed.items():
        console.print(f"[red]{name} got through {', '.join(sorted(gap))}[/]")
    return not (count["failed"] or missed or blind) and control.passed


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.exit(0 if run(sys.argv[1:] or h.CATALOG) else 1)
