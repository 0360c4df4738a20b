"""The work of `heedful theory`: run the requested claims, write the book, and report the results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import heedful
from heedful.cli import theory_terminal
from heedful.report.book import book
from heedful.report.shell import check_language
from heedful.store import write_whole
from heedful.theory import registry, run
from heedful.theory.records import Record, controls


@dataclass(frozen=True)
class Answer:
    """The results of a run, and how to present them."""

    records: list[Record]
    shown: list[Record]
    chapters: list[dict[str, Any]]
    seconds: float
    language: str
    one: bool
    html: Path | None

    @property
    def exit_code(self) -> int:
        """1 if a check could not distinguish a claim from its control, else 0."""
        return 0 if all(one["control"]["flipped"] for one in controls(self.records)) else 1

    def show(self) -> None:
        if self.one and self.shown:
            theory_terminal.print_claim(self.shown[0], language=self.language)
        else:
            theory_terminal.print_claims(self.records, self.shown, self.chapters, self.seconds, self.language)
        if self.html is not None:
            theory_terminal.print_written(self.html)


def theory(
    ids: tuple[str, ...],
    *,
    chapter: str | None,
    kind: str | None,
    failed: bool,
    slow: bool,
    jobs: int,
    limit: float,
    out: Path,
    fresh: bool,
    html: Path | None,
    language: str,
) -> Answer:
    """Run claims and write the book. Raises ValueError for an unknown claim, chapter, kind or language."""
    check_language(language)
    plan = run.TheoryOptions(out, ids, chapter, kind, slow, jobs, fresh, limit or None, registry.REGISTRY)
    run.select(plan)  # raises for a wrong name before anything runs
    start = time.perf_counter()
    with theory_terminal.Progress() as progress:
        records = run.run(plan, progress.told)
    seconds = time.perf_counter() - start
    shown = [record for record in records if not failed or record["verdict"] == "FAILS"]
    chapters = [
        {"name": one.name, "title": {"en": one.title.en, "zh": one.title.zh}, "text": one.text}
        for one in registry.chapters_of(plan.registry)
    ]
    if html is not None:
        made = f"heedful {heedful.__version__}, {datetime.now(UTC):%Y-%m-%d}"
        write_whole(html, book(shown, chapters, made=made, language=language))
    return Answer(records, shown, chapters, seconds, language, len(ids) == 1, html)
