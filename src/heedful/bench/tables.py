"""Rows as tables of at most 80 columns, in plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from statistics import median

from heedful.bench.cases import CASES, Case
from heedful.bench.fits import Fit, crossover, growth
from heedful.bench.peers import DENSE, DENSE_CAUSAL
from heedful.bench.rows import Row, machine
from heedful.bench.setting import BOTH, FORWARD, PASSES

DENSE_NAMES = (DENSE_CAUSAL.name, DENSE.name)


def columns(rows: Sequence[Sequence[str]], align: str, gap: str = "  ") -> list[str]:
    """Lines of aligned columns; `align` has one of < and > per column.

    >>> columns([["a", "1"], ["bc", "10"]], "<>")
    ['a    1', 'bc  10']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [gap.join(f"{cell:{a}{w}}" for cell, a, w in zip(row, align, widths, strict=True)).rstrip() for row in rows]


def setting_line(rows: Sequence[Row]) -> str:
    """A heading with what all rows have in common."""
    row = rows[0]
    return (
        f"B{row['batch']} H{row['heads']} d{row['d']}, {row['dtype']}, {row['clock']} time\n"
        f"{machine(row)}; torch {row['torch']}, commit {row['commit']}"
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _times(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:.2f}×" if gain < 10 else f"{gain:.0f}×"


# ── peers


def gains(rows: Iterable[Row], case: str, way: str, rival: str, n: int, which: str) -> list[float]:
    """The rival's time divided by ours, for every run that has both."""
    found: dict[int, dict[str, float | None]] = {}
    for row in rows:
        if (row["case"], row["n"], row["pass"]) == (case, n, which):
            found.setdefault(row.get("run", 1), {})[row["contender"]] = row["seconds"]
    pairs = ((run.get(way), run.get(rival)) for run in found.values())
    return [theirs / mine for mine, theirs in pairs if mine and theirs]


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """One row per implementation of ours, rival, length and pass: lowest and highest gain of all runs, and the goal.

    A goal is met if the lowest gain meets it.
    """
    answer = []
    for case in CASES.values():
        sizes = sorted({row["n"] for row in rows if row["case"] == case.name})
        for way in case.ours:
            for rival in case.rivals:
                goal = case.goals.get(rival.name)
                for n in sizes:
                    for which in PASSES:
                        every = gains(rows, case.name, way.name, rival.name, n, which)
                        found = min(every, default=None)
                        asked = goal.factor if goal and n in goal.sizes else None
                        answer.append(
                            {
                                "case": case.name,
                                "ours": way.name,
                                "against": rival.name,
                                "n": n,
                                "pass": which,
                                "gain": found,
                                "most": max(every, default=None),
                                "runs": len(every),
                                "asked": asked,
                                "met": None if asked is None or found is None else found >= asked,
                            }
                        )
    return answer


def peers_table(rows: Sequence[Row]) -> str:
    """The table of times in milliseconds, gains and goals."""
    if not rows:
        return "peers: nothing was measured."
    head = "heedful against its peers: milliseconds, medians of interleaved rounds"
    runs = max(row.get("run", 1) for row in rows)
    head += f"\n{runs} runs: median times, lowest gains; the highest are below" if runs > 1 else ""
    lines = [head, setting_line(rows), ""]
    body: list[list[str]] = [["", "N", "ours", "other", "gain", "ours", "other", "gain", "asked"]]
    heads = []
    answers = verdicts(rows)
    for case in CASES.values():
        for way in case.ours:
            for rival in case.rivals:
                mine = [a for a in answers if (a["ours"], a["against"], a["case"]) == (way.name, rival.name, case.name)]
                if not mine:
                    continue
                heads.append((len(body), f"{way.name} against {rival.name}{_said(rows, case, rival.name)}"))
                body += [_peer_line(rows, case, way.name, rival.name, n, mine) for n in sorted({a["n"] for a in mine})]
    text = columns(body, "<>>>>>>><")
    heads.append(
        (0, " " * (text[0].index("ours") - 2) + FORWARD.ljust(text[0].rindex("ours") - text[0].index("ours")) + BOTH)
    )
    for at, head in sorted(heads, reverse=True):
        text[at:at] = [head]
    met = [a["met"] for a in answers if a["met"] is not None]
    unknown = sum(a["asked"] is not None and a["met"] is None for a in answers)
    lines += [
        *text,
        "",
        f"{sum(met)} of {len(met)} asked gains are met" + (f", {unknown} not measured." if unknown else "."),
    ]
    return "\n".join([*lines, *_ranges(answers), *_remarks(rows)])


def _short(gain: float) -> str:
    """A number with two significant digits.

    >>> _short(1.44), _short(12.6), _short(137.0)
    ('1.4', '13', '140')
    """
    return f"{gain:.2g}" if gain < 99.5 else f"{round(gain, 1 - len(str(int(gain))) + 1):.0f}"


def _ranges(answers: Sequence[Row]) -> list[str]:
    """The range of each gain over several runs, by length; empty for one run."""
    if max((a["runs"] for a in answers), default=1) < 2:
        return []
    body = [["", *(FORWARD, BOTH)]]
    for ours, against in dict.fromkeys((a["ours"], a["against"]) for a in answers):
        mine = [a for a in answers if (a["ours"], a["against"]) == (ours, against) and a["gain"]]
        cells = [
            " · ".join(f"{_short(a['gain'])}–{_short(a['most'])}" for a in mine if a["pass"] == which)
            for which in PASSES
        ]
        body += [[f"{ours} against {against}", "", ""], ["", *cells]] if mine else []
    return ["", "Gains from the lowest to the highest run, by length:", *columns(body, "<<<")]


def _said(rows: Sequence[Row], case: Case, rival: str) -> str:
    known = {
        row["version"] for row in rows if row["case"] == case.name and row["contender"] == rival and row["version"]
    }
    return f" {known.pop()}" if known else ""


def _peer_line(rows: Sequence[Row], case: Case, way: str, rival: str, n: int, answers: list[Row]) -> list[str]:
    samples: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if (row["case"], row["n"]) == (case.name, n) and row["seconds"]:
            samples.setdefault((row["contender"], row["pass"]), []).append(row["seconds"])
    seconds = {key: median(x) for key, x in samples.items()}
    here = {a["pass"]: a for a in answers if a["n"] == n}
    cells = ["", str(n)]
    for which in PASSES:
        cells += [_ms(seconds.get((way, which))), _ms(seconds.get((rival, which))), _times(here[which]["gain"])]
    asked = here[FORWARD]["asked"]
    met = [here[which]["met"] for which in PASSES]
    mark = "" if asked is None else "✗ " if False in met else "? " if None in met else "✓ "
    return [*cells, "" if asked is None else f"{mark}{asked:g}×"]


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Notes below the gains: what failed, and where a peer computes something different."""
    said = []
    for row in rows:
        at = f"{row['case']}, {row['contender']}"
        if row["problem"] and row["problem"].startswith("not installed"):
            said.append(f"{at}: {row['problem']}")
        elif row["problem"]:
            said.append(f"{at}, N = {row['n']}, {row['pass']}: {row['problem']}")
        if row["difference"] is not None:
            said.append(
                f"{at}: output differs by {row['difference']:.0e}" + (f"; {row['note']}" if row["note"] else "")
            )
    return ["", *wrapped(dict.fromkeys(said))] if said else []


def wrapped(sentences: Iterable[str]) -> list[str]:
    from textwrap import wrap

    return [line for sentence in sentences for line in wrap(sentence, 78, subsequent_indent="  ")]


# ── growth


def series(rows: Iterable[Row], entry: str, which: str, field: str) -> dict[int, float]:
    """The values of one field by length."""
    return {row["n"]: row[field] for row in rows if (row["entry"], row["pass"]) == (entry, which) and row.get(field)}


def _fit(points: dict[int, float]) -> str:
    found: Fit | None = growth(points) if len(points) > 1 else None
    return "–" if found is None else f"{found.exponent:.2f}" + ("" if found.error is None else f" ±{found.error:.2f}")


def _entries(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["entry"] for row in rows))


def growth_table(times: Sequence[Row], memory: Sequence[Row]) -> str:
    """A table of measured exponents of N beside those of `cost`."""
    if not times:
        return "growth: nothing was measured."
    body = [["", "time:", "", "its", "memory:", "", "its", "N"]]
    body += [["", FORWARD, "both", "cost", FORWARD, "both", "cost", "up to"]]
    for entry in _entries(times):
        first = series(times, entry, FORWARD, "seconds")
        body.append(
            [
                entry,
                _fit(first),
                _fit(series(times, entry, BOTH, "seconds")),
                _fit(series(times, entry, FORWARD, "flops")).split(" ")[0],
                _fit(series(memory, entry, FORWARD, "peak_bytes")),
                _fit(series(memory, entry, BOTH, "peak_bytes")),
                _fit(series(times, entry, FORWARD, "bytes")).split(" ")[0],
                str(max(first, default="–")),
            ]
        )
    head = (
        "Growth: the exponent of N, by least squares over N ≥ 1024, ± its standard error;\n"
        "beside it that of cost's flops and bytes"
    )
    return "\n".join([head, setting_line(times), "", *columns(body, "<>>>>>>>", " ")])


def crossovers(rows: Sequence[Row]) -> list[Row]:
    """The length from which each entry beats dense softmax (causal for a causal entry); 0: always, inf: never."""
    answer = []
    for entry in _entries(rows):
        if entry in DENSE_NAMES or entry == "softmax":
            continue
        causal = next(row["causal"] for row in rows if row["entry"] == entry)
        against = DENSE_CAUSAL.name if causal else DENSE.name
        for which in PASSES:
            mine, dense = (series(rows, name, which, "seconds") for name in (entry, against))
            shared = sorted(mine.keys() & dense.keys())
            if shared:
                last = shared[-1]
                answer.append(
                    {
                        "entry": entry,
                        "against": against,
                        "pass": which,
                        "crossover": crossover(mine, dense),
                        "shortest": shared[0],
                        "longest": last,
                        "gain": dense[last] / mine[last],
                    }
                )
    return answer


def _length(row: Row | None) -> str:
    if row is None or row["crossover"] is None:
        return "–"
    at = row["crossover"]
    return f"> {row['longest']}" if at == inf else f"< {row['shortest']}" if at == 0 else f"{at:.0f}"


def crossover_table(rows: Sequence[Row]) -> str:
    """A table of the lengths from which each entry is faster."""
    found = crossovers(rows)
    if not found:
        return "crossover: nothing was measured."
    body = [["", "against", FORWARD, "with backward", "gain", "gain", "at N"]]
    for entry in _entries(found):
        by = {row["pass"]: row for row in found if row["entry"] == entry}
        gains = [_times(by[which]["gain"]) if which in by else "–" for which in PASSES]
        last = min(row["longest"] for row in by.values())
        against = "causal" if next(iter(by.values()))["against"] == DENSE_CAUSAL.name else "full"
        body.append([entry, against, *(_length(by.get(which)) for which in PASSES), *gains, str(last)])
    head = "Crossover: the length from which on a mechanism beats dense softmax (SDPA)"
    return "\n".join([head, setting_line(rows), "", *columns(body, "<<>>>>>")])


# ── memory


def memory_table(rows: Sequence[Row]) -> str:
    """A table of peaks at the longest length of each entry."""
    if not rows:
        return "memory: nothing was measured."
    body = [
        ["", "N", "peak", "peak", "largest", "largest", "N×N", "MB"],
        ["", "", FORWARD, "both", FORWARD, "both"] + [""] * 2,
    ]
    problems = []
    for entry in _entries(rows):
        own = [row for row in rows if row["entry"] == entry]
        problems += [f"{entry}, N = {row['n']}, {row['pass']}: {row['problem']}" for row in own if row["problem"]]
        last = max((row["n"] for row in own if row["peak_bytes"]), default=None)
        by = {row["pass"]: row for row in own if row["n"] == last and row["peak_bytes"]}
        if not by:
            continue
        size = next(iter(by.values()))["input_bytes"]
        shares = [f"{by[w][f] / size:.2f}" if w in by else "–" for f in ("peak_bytes", "largest_bytes") for w in PASSES]
        square = size / (3 * rows[0]["d"]) * last  # bytes of N × N for all heads, in the precision of the inputs
        whole = by.get(BOTH, by.get(FORWARD))
        assert whole is not None
        body.append([entry, str(last), *shares, f"{square / size:.0f}", f"{whole['peak_bytes'] / 1e6:.0f}"])
    head = (
        "Memory beyond q, k, v, in multiples of all three: peak, and largest piece;\n"
        "N×N: what one such matrix would be; MB: peak of both passes"
    )
    return "\n".join([head, setting_line(rows), "", *columns(body, "<>>>>>>>"), *wrapped(problems)])
