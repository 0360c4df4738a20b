"""The answer of a scan: its numbers and sentences. The terminal, the page and `Scan.words` all use this module.

rank        mean over heads and texts of rank(.9): fewest singular values with 90 % of ‖A‖²_F
interval    95 %, bootstrapped over texts
certified   means of the certified bounds of the single ranks; the mean lies between them
exponent    slope of log(mean rank) over log(length), by least squares: how the reported mean rank grows

docs/decisions/0018-one-rank-one-mean-one-exponent.md has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from heedful.notices import notices, too_few
from heedful.scan.phrases import PHRASES, Phrases
from heedful.scan.statistics import Mean, bootstrap
from heedful.store.scans import RANK, title_of

if TYPE_CHECKING:
    from heedful.scan.result import Scan

KINDS = ("positional", "sink", "low rank", "content")
BASE = f"base_{RANK}"
FEWEST = 5  # texts before an interval is trusted to stop a scan


@dataclass(frozen=True)
class Answer:
    """What a scan found, in one language.

    length    the longest length, in tokens; everything except growth and precision refers to it
    counts    heads by kind
    lead      one sentence
    more      sentences on ranks
    notices   warnings to read before the numbers, such as random weights; most scans have none
    notes     remarks: the requested precision was not reached, some texts were not measured
    kinds     a pair (kind, sentence) for each kind of head found: what could be cheaper, or what changed
    caveat    what the sentences on kinds do not say; "" for a comparison
    """

    language: str
    length: int
    counts: Mapping[str, int]
    lead: str
    more: tuple[str, ...]
    notes: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]
    caveat: str
    notices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole answer as text, one line for each part."""
        space = PHRASES[self.language]["space"]
        kinds = (sentence for _, sentence in self.kinds)
        lines = [*self.notices, self.lead, space.join(self.more), *self.notes, *kinds, self.caveat]
        return "\n".join(filter(None, lines))


def answer(scan: Scan, language: str = "en") -> Answer:
    """What kinds of heads there are at the longest length, how high their ranks are, and what could be cheaper."""
    say = _phrases(language)
    length = scan.lengths[-1]
    table = scan.table().filter(pl.col("length") == length)
    counts, few = _counts(table), too_few(length, language)
    return Answer(
        language=language,
        length=length,
        counts=counts,
        lead=few or _lead(say, counts, length),
        more=(_texts(say, table, length), say["rank means"], _rank(say, scan, table), *_over(say, scan)),
        notes=_notes(say, scan),
        kinds=tuple((kind, _cheaper(say, table, kind, counts[kind], length)) for kind in KINDS if counts[kind]),
        caveat="" if few else say["caveat"],
        notices=tuple(notices(scan.manifest, language)),
    )


def compared(scan: Scan, other: Scan, language: str = "en") -> Answer:
    """How the heads of one model differ from those of another on the same texts."""
    say = _phrases(language)
    shared = [length for length in scan.lengths if length in other.lengths]
    length = shared[-1] if shared else scan.lengths[-1]
    names = {"a": title_of(scan.manifest), "b": title_of(other.manifest)}
    mine, theirs = (each.table().filter(pl.col("length") == length) for each in (scan, other))
    try:
        table = scan.compare(other).filter(pl.col("length") == length)
    except ValueError:  # the scans share no texts, lengths or heads
        table = pl.DataFrame()
    if table.is_empty():
        means = _means(scan, scan.lengths[-1]), _means(other, other.lengths[-1])
        lead, more = say["unpaired lead"].format(rank=means[0], other=means[1], **names), [say["rank means"]]
    else:
        means = _means(scan, length), _means(other, length)
        lead = _pair_lead(say, table, length, names)
        more = [say["rank means"], _pair_rank(say, scan, other, length, means, names)]
        more += [*_pair_kinds(say, mine, theirs), *_pair_delta(say, table), *_pair_growth(say, scan, other, names)]
    counts, before = _counts(mine), _counts(theirs)
    kinds = tuple(
        (kind, say[f"pair {kind}"].format(count=counts[kind], other=before[kind], **names))
        for kind in KINDS
        if counts[kind] or before[kind]
    )
    told = tuple(
        f"{title_of(each.manifest)}{say['colon']}{sentence}"
        for each in (scan, other)
        for sentence in notices(each.manifest, language)
    )
    return Answer(language, length, counts, lead, tuple(more), _notes(say, scan), kinds if shared else (), "", told)


def number(value: float) -> str:
    """A rank or a difference of ranks as text: a whole number from 100 on, one decimal below.

    >>> number(3.04), number(51.66), number(312.4), number(12.0)
    ('3.0', '51.7', '312', '12.0')
    """
    if not math.isfinite(value):
        return "–"
    text = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"
    return text.replace("-", "−")


def reached(scan: Scan) -> tuple[int, float]:
    """The length at which the mean rank is least precise, and the half width of its interval over the mean there."""
    found = [(length, scan.mean(RANK, length)) for length in scan.lengths]
    shares = [(float(mean.half_width / mean.mean), length) for length, mean in found]
    share, length = max(shares, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
    return length, share


def _phrases(language: str) -> Phrases:
    if language not in PHRASES:
        raise ValueError(f"language: {language!r}, expected one of {', '.join(PHRASES)}.")
    return PHRASES[language]


def _counts(table: pl.DataFrame) -> dict[str, int]:
    return {kind: table.filter(pl.col("kind_of_head") == kind).height for kind in KINDS}


def _lead(say: Phrases, counts: Mapping[str, int], length: int) -> str:
    total = sum(counts.values())
    kinds = {kind: say[f"{'one' if count == 1 else 'some'} {kind}"] for kind, count in counts.items() if count}
    if total == 1:
        return say["lead one"].format(kind=next(iter(kinds.values())), length=length)
    parts = [
        say["lead next" if at else "lead first"].format(count=counts[kind], phrase=phrase, total=total)
        for at, (kind, phrase) in enumerate(kinds.items())
    ]
    joined = parts[0] if len(parts) == 1 else say["comma"].join(parts[:-1]) + say["and"] + parts[-1]
    return say["lead"].format(kinds=joined, length=length)


def _texts(say: Phrases, table: pl.DataFrame, length: int) -> str:
    texts = int(table["texts"][0])
    return say["texts" if texts > 1 else "text"].format(texts=texts, length=length)


def _rank(say: Phrases, scan: Scan, table: pl.DataFrame) -> str:
    found, base = scan.mean(RANK), float(scan.mean(BASE).mean)
    low, high = (table[f"{RANK}_certified_{side}"] for side in ("low", "high"))
    ends = {"low": number(_mean(table, low.name)), "high": number(_mean(table, high.name))}
    if low.null_count() or high.null_count():
        certainty = ""
    elif (low == high).all():
        certainty = say["exact"]
    else:
        certainty = say["tight" if ends["low"] == ends["high"] else "certified"].format(**ends)
    return say["rank"].format(
        rank=number(float(found.mean)),
        length=table["length"][0],
        range=_range(say["range"], found, number),
        certainty=certainty,
        beside=say["nothing beside"] if math.isnan(base) else say["beside"].format(base=number(base)),
    )


def _range(sentence: str, found: Mean, shown: Any) -> str:
    if math.isnan(float(found.low)):
        return ""
    return sentence.format(low=shown(float(found.low)), high=shown(float(found.high)))


def _over(say: Phrases, scan: Scan) -> list[str]:
    """Sentences on how the rank changes with depth and with length."""
    return [*_depth(say, scan), *_growth(say, scan)]


def _depth(say: Phrases, scan: Scan) -> list[str]:
    """A sentence comparing the first and the last third of the layers; empty for fewer than three layers."""
    layers = sorted(scan.rows["layer"].unique())
    if len(layers) < 3:
        return []
    some = len(layers) // 3
    first, last = (scan.mean(RANK, layers=set(part).__contains__) for part in (layers[:some], layers[-some:]))
    return [say["depth"].format(first=number(float(first.mean)), last=number(float(last.mean)))]


def _growth(say: Phrases, scan: Scan) -> list[str]:
    """A sentence on growth with length; empty for fewer than two lengths."""
    if len(scan.lengths) < 2:
        return []
    found, base = scan.trend(RANK), scan.trend(BASE)
    if math.isnan(float(found.mean)):
        return []
    random = "" if math.isnan(float(base.mean)) else say["random growth"].format(power=power(float(base.mean)))
    ends = {"shortest": scan.lengths[0], "longest": scan.lengths[-1]}
    shown = _range(say["range"], found, power)
    return [say["growth"].format(**ends, power=power(float(found.mean)), range=shown, random=random)]


def power(value: float) -> str:
    """An exponent as text, with two decimals."""
    return f"{value:.2f}".replace("-", "−")


def _notes(say: Phrases, scan: Scan) -> tuple[str, ...]:
    lengths = scan.rows.group_by("text").agg(pl.col("length").n_unique())["length"]
    texts, planned = int((lengths == len(scan.lengths)).sum()), len(scan.manifest.get("texts", []))
    asked, items = scan.manifest.get("precision"), scan.rows["items"].max()
    several = (say["items"].format(items=items),) if isinstance(items, int) and items > 1 else ()
    if asked is None:
        return (*several, *((say["unfinished"].format(texts=texts, planned=planned),) if texts < planned else ()))
    length, share = reached(scan)
    numbers = {"asked": percent(asked), "reached": percent(share), "length": length, "texts": texts, "planned": planned}
    remedy = say["resume" if texts < planned else "more texts"]
    if texts < FEWEST:
        return (*several, say["too few"].format(**numbers, fewest=FEWEST, remedy=remedy))
    return (*several, say["precise" if share <= asked else "not precise"].format(**numbers, remedy=remedy))


def percent(share: float) -> str:
    """A share in percent as text: two significant digits, no decimals from 10 % on.

    >>> percent(0.884), percent(0.0312), percent(0.0005)
    ('88', '3.1', '0.05')
    """
    return f"{100 * share:.0f}" if share >= 0.0995 or share == 0 else f"{100 * share:.2g}"


def _cheaper(say: Phrases, table: pl.DataFrame, kind: str, count: int, length: int) -> str:
    own = table.filter(pl.col("kind_of_head") == kind)
    heads = say["one head"] if count == 1 else say["heads"].format(count=count)
    if kind == "positional":
        return say[kind].format(heads=heads, percent=percent(_mean(own, "label_score")))
    if kind == "sink":  # very short texts have no mass on the first four tokens, only on the first
        share = _mean(own, "first" if own["first"].null_count() < len(own) else "sink")
        return say[kind].format(heads=heads, percent=percent(share), rest=percent(1 - share))
    if kind == "low rank":
        rank = _mean(own, RANK)
        share = 2 * rank / length
        which = "not low enough" if share >= 1 else kind
        return say[which].format(heads=heads, rank=number(rank), percent=percent(share), length=length)
    return say[kind].format(heads=heads)


def _mean(table: pl.DataFrame, column: str) -> float:
    found = table[column].mean()
    return math.nan if found is None else float(found)  # type: ignore[arg-type]


def _means(scan: Scan, length: int) -> str:
    return number(float(scan.mean(RANK, length).mean))


def _pair_lead(say: Phrases, table: pl.DataFrame, length: int, names: Mapping[str, str]) -> str:
    texts, apart = int(table["texts"][0]), table[RANK]
    up, down = (apart > 0, apart < 0) if texts < 2 else (table[f"{RANK}_low"] > 0, table[f"{RANK}_high"] < 0)
    counts = {"up": int(up.sum()), "down": int(down.sum()), "all": len(table)}
    counts["flat"] = counts["all"] - counts["up"] - counts["down"]
    return say["pair lead" if texts > 1 else "pair lead one"].format(texts=texts, length=length, **counts, **names)


def _pair_rank(
    say: Phrases, scan: Scan, other: Scan, length: int, means: tuple[str, str], names: Mapping[str, str]
) -> str:
    rows = scan.paired(other).filter(pl.col("length") == length)
    per_text = rows.group_by("text", maintain_order=True).agg(pl.col(RANK).mean())[RANK].to_torch()
    found = bootstrap(per_text.double()[:, None])
    difference = ("+" if float(found.mean) > 0 else "") + number(float(found.mean))
    shown = _range(say["pair range"], found, number)
    return say["pair rank"].format(rank=means[0], other=means[1], difference=difference, range=shown, **names)


def _pair_kinds(say: Phrases, mine: pl.DataFrame, theirs: pl.DataFrame) -> list[str]:
    both = mine.join(theirs, on=["layer", "head"], suffix="_other")
    changed = int((both["kind_of_head"] != both["kind_of_head_other"]).sum())
    return [say["pair kinds"].format(changed=changed, all=len(both))]


def _pair_delta(say: Phrases, table: pl.DataFrame) -> list[str]:
    if "delta_relative" not in table.columns or table["delta_relative"].null_count() == len(table):
        return []
    return [say["pair delta"].format(relative=f"{_mean(table, 'delta_relative'):.2f}")]


def _pair_growth(say: Phrases, scan: Scan, other: Scan, names: Mapping[str, str]) -> list[str]:
    if len(scan.lengths) < 2 or scan.lengths != other.lengths:
        return []
    mine, theirs = (float(each.trend(RANK).mean) for each in (scan, other))
    ends = {"shortest": scan.lengths[0], "longest": scan.lengths[-1]}
    return [say["pair growth"].format(**ends, power=power(mine), other=power(theirs), **names)]
