"""Tables of a study, as Markdown and as LaTeX: one table per setting, one row per cell.

A difference is paired by seed and has its 95 % interval; * p < 0.05, ** p < 0.01 by the paired t-test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from heedful.studies.results import (
    BASELINES,
    MEASURES,
    Measure,
    Row,
    Setting,
    by_seed,
    cells,
    difference,
    settings,
    spread,
)


class Table(NamedTuple):
    """A title, column headings and rows; the first column names the cell."""

    setting: Setting
    heads: list[str]
    rows: list[list[str]]


def tables(rows: list[Row]) -> list[Table]:
    """One table for each setting of a study, the baseline first."""
    return [table(rows, setting) for setting in settings(rows)]


def table(rows: list[Row], setting: Setting) -> Table:
    groups = cells(rows, setting)
    base = BASELINES[rows[0]["study"]]
    order = sorted(groups, key=lambda name: (name != base, "(" in name))
    first, second = MEASURES[setting.task]
    heads = ["cell", "seeds", first.name, f"to {base}", second.name, f"to {base}", "train loss", "test loss"]
    heads += ["test − train", "M trained", "MB of AdamW", "ms a step, GPU shared"]
    return Table(setting, heads, [_line(name, groups[name], groups.get(base, []), (first, second)) for name in order])


def _line(name: str, some: list[Row], base: list[Row], measures: tuple[Measure, Measure]) -> list[str]:
    line = [name, str(len(some))]
    for measure in measures:
        values, against = by_seed(some, measure), by_seed(base, measure)
        line.append(str(spread(list(values.values()))) if values else "")
        gap = difference(values, against) if some is not base else None
        line.append("" if gap is None else f"{gap}{stars(gap.p)}")

    def average(of: Callable[[Row], float], digits: int) -> str:
        return f"{sum(map(of, some)) / len(some):.{digits}f}"

    return [
        *line,
        average(lambda row: row["losses"]["train"], 3),
        average(lambda row: row["losses"]["test"], 3),
        average(lambda row: row["losses"]["test"] - row["losses"]["train"], 3),
        average(lambda row: row["weights"]["trainable"] / 1e6, 2),
        average(lambda row: row["optimiser_bytes"] / 2**20, 0),
        average(lambda row: 1e3 * row["step_seconds"], 1),
    ]


def stars(p: float | None) -> str:
    """Significance marks of a p-value.

    >>> stars(0.003), stars(0.03), stars(0.3), stars(None)
    (' **', ' *', '', '')
    """
    return "" if p is None or p >= 0.05 else " *" if p >= 0.01 else " **"


def title(setting: Setting) -> str:
    """The setting in words.

    >>> title(Setting("de-5000", "de-en", 1500)), title(Setting("recall", "source-target", 2000))
    ('de-5000, de-en, 1,500 steps', 'recall, 2,000 steps')
    """
    direction = [setting.direction] if setting.task == "translation" else []
    return ", ".join([setting.corpus, *direction, f"{setting.steps:,} steps"])


def markdown(rows: list[Row]) -> str:
    """All tables of a study as Markdown."""
    parts = []
    for found in tables(rows):
        lines = [f"### {title(found.setting)}", "", _bar(found.heads), _bar(["---"] * len(found.heads))]
        parts.append("\n".join([*lines, *map(_bar, found.rows)]))
    return "\n\n".join(parts) + "\n"


def latex(rows: list[Row]) -> str:
    """All tables of a study as LaTeX, for the booktabs package."""
    parts = []
    for found in tables(rows):
        body = "\n".join(" & ".join(map(_escaped, line)) + r" \\" for line in found.rows)
        head = " & ".join(map(_escaped, found.heads))
        columns = "l" + "r" * (len(found.heads) - 1)
        parts.append(
            f"% {title(found.setting)}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
            f"{body}\n\\bottomrule\n\\end{{tabular}}"
        )
    return "\n\n".join(parts) + "\n"


def _bar(line: list[str]) -> str:
    return f"| {' | '.join(line)} |"


def _escaped(text: str) -> str:
    """Text escaped for LaTeX.

    >>> _escaped("+1.00 ± 0.25 **"), _escaped("test − train")
    ('+1.00 $\\\\pm$ 0.25 **', 'test $-$ train')
    """
    for character, instead in (("&", r"\&"), ("%", r"\%"), ("_", r"\_"), ("±", r"$\pm$"), ("−", "$-$")):
        text = text.replace(character, instead)
    return text
