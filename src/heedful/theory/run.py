"""Run all or some claims in parallel processes; a killed run keeps the findings that it has written.

    plan = TheoryOptions(Path("runs/theory"), ids=("T11.23", "C11.9"))
    records = run(plan)

A record is a claim and its outcome as plain data; `records.py` describes its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import get_args

from heedful.executor import Executor, TaskFailed, cores
from heedful.store import Log, now
from heedful.theory.claim import Claim, Kind
from heedful.theory.fingerprint import fingerprints_of
from heedful.theory.judge import Outcome, judge, sentence, undecided
from heedful.theory.records import Record, record
from heedful.theory.registry import REGISTRY, chapters_of, claims_of

FAST_LIMIT, SLOW_LIMIT = 300.0, 1800.0
"""Time limit of a claim in seconds: generous, because the machine may be busy."""

Told = Callable[[Record, int, int], None]
"""Called with each record as it comes, the number of records so far, and their total number."""


@dataclass(frozen=True)
class TheoryOptions:
    """What to run.

    out        folder of the findings
    ids        ids of the claims; empty: all
    chapter    name of a chapter
    slow       run slow claims too; otherwise they are reported as not run, unless they are requested by id or have a
               finding that is up to date
    jobs       number of parallel processes
    fresh      judge again even if there is a finding
    limit      seconds for each claim, instead of FAST_LIMIT and SLOW_LIMIT
    registry   the module that defines `CHAPTERS`
    """

    out: Path
    ids: tuple[str, ...] = ()
    chapter: str | None = None
    kind: str | None = None
    slow: bool = False
    jobs: int = 0
    fresh: bool = False
    limit: float | None = None
    registry: str = REGISTRY

    def limit_of(self, claim: Claim) -> float:
        return self.limit or (SLOW_LIMIT if claim.slow else FAST_LIMIT)


def select(plan: TheoryOptions) -> list[Claim]:
    """The claims that a plan requests, in the order of the texts.

    Raises ValueError with similar names if there is no such claim, chapter or kind.
    """
    claims, chapters = claims_of(plan.registry), chapters_of(plan.registry)
    wanted = {_find(name, claims) for name in plan.ids}
    names = [chapter.name for chapter in chapters]
    if plan.chapter is not None and plan.chapter not in names:
        raise ValueError(f"no chapter is called {plan.chapter!r}; the chapters are {', '.join(names)}.")
    if plan.kind is not None and plan.kind not in get_args(Kind):
        raise ValueError(f"no claim is of the kind {plan.kind!r}; the kinds are {', '.join(get_args(Kind))}.")
    return [
        claim
        for chapter in chapters
        for claim in chapter.claims
        if (not wanted or claim.id in wanted)
        and plan.chapter in (None, chapter.name)
        and plan.kind in (None, claim.kind)
    ]


def _find(name: str, claims: Mapping[str, Claim]) -> str:
    """The id of a claim, ignoring case; the id of a corrected form also finds its claim."""
    by_name = {known.casefold(): known for known in claims}
    plain = name.casefold().rstrip("*")
    if plain in by_name:
        return by_name[plain]
    near = [known for key, known in by_name.items() if len(plain) > 1 and (plain in key)]
    near += [by_name[key] for key in get_close_matches(plain, by_name, n=6, cutoff=0.5)]
    hint = f"Near to it: {', '.join(list(dict.fromkeys(near))[:6])}." if near else "`heedful theory` lists them."
    raise ValueError(f"no claim is called {name!r}. {hint}")


def run(plan: TheoryOptions, told: Told = lambda record, done, total: None) -> list[Record]:
    """Judge the requested claims without an up-to-date finding; return the records of all requested claims in order.

    Findings are reused as long as their fingerprint is unchanged. Claims that could not be measured (a model is
    missing, a check crashed, a limit was reached) are tried again.
    """
    claims = {claim.id: claim for claim in select(plan)}
    chapter_of = {claim.id: chapter for chapter in chapters_of(plan.registry) for claim in chapter.claims}
    marks = fingerprints_of(plan.registry)
    log = Log(plan.out / "findings.jsonl")
    found: dict[str, Outcome] = {}

    def add(name: str, outcome: Outcome) -> None:
        found[name] = outcome
        told(record(chapter_of[name], claims[name], outcome), len(found), len(claims))

    kept = {} if plan.fresh else fresh(log, marks)
    for name, claim in claims.items():
        if name in kept and kept[name]["evidence"] is not None:
            add(name, kept[name])
        elif claim.check is None:
            add(name, judge(claim))  # no check to run
        elif claim.slow and not plan.slow and not plan.ids:
            add(name, undecided("slow: not run", ran=False))
    missing = [name for name in claims if name not in found]
    missing.sort(key=lambda name: not claims[name].slow)  # start slow claims first
    plan.out.mkdir(parents=True, exist_ok=True)
    processes = Executor(
        "processes",
        workers=plan.jobs or cores(),
        threads=1,
        limit=lambda name: plan.limit_of(claims[name]),
        log=plan.out / "workers.log",
    )
    for done in processes.run(partial(Judge, plan.registry), missing, in_order=False):
        name = done.item
        if isinstance(done.error, TaskFailed):
            mark, outcome = marks[name], undecided(done.error.reason, done.error.seconds)
        elif done.error is not None:
            mark, outcome = marks[name], undecided(f"it could not be judged: {sentence(done.error)}")
        else:
            mark, outcome = done.result()
        if mark != marks[name]:
            outcome = undecided("the sources changed while it ran; run it again", outcome["seconds"])
        log.append({"id": name, "fingerprint": mark, "date": now(), "outcome": outcome})
        add(name, outcome)
    return [record(chapter_of[name], claim, found[name]) for name, claim in claims.items()]


def fresh(log: Log, marks: Mapping[str, str]) -> dict[str, Outcome]:
    """The last outcome of each claim with the current fingerprint."""
    return {line["id"]: line["outcome"] for line in log.records() if marks.get(line["id"]) == line["fingerprint"]}


class Judge:
    """Judges claims by id in a worker process; returns the fingerprint of the sources and the outcome."""

    def __init__(self, registry: str):
        self.registry, self.claims = registry, claims_of(registry)

    def __call__(self, name: str) -> tuple[str, Outcome]:
        outcome = judge(self.claims[name])
        return fingerprints_of(self.registry, name)[name], outcome  # after the check, which may import modules
