"""The page of a study: the question, the prediction, what the runs show, and every run as a dot.

Made from rows as `heedful.studies.results` reads them; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from heedful import svg
from heedful.report import shell
from heedful.report.shell import say
from heedful.store import write_whole
from heedful.studies.results import (
    BASELINES,
    BLEU,
    MEASURES,
    Row,
    Setting,
    by_seed,
    cells,
    difference,
    settings,
    spread,
)
from heedful.studies.tables import Table, latex, markdown, stars, tables, title
from heedful.studies.texts import TEXTS

WIDTH, LINE, LABELS = 640, 22, 210
SHOWN_CURVES = 6
"""Cells whose curves are drawn; there are six dash styles."""

METHODS = (
    ("orthogonal", {"en": "Orthogonal random attention (the open cell)", "zh": "正交随机注意力（原表空格）"}),
    ("learned", {"en": "Standard attention", "zh": "标准注意力"}),
    ("linear, learned", {"en": "Linear attention", "zh": "Linear Attention"}),
    ("favor+, learned", {"en": "Performer (FAVOR+)", "zh": "Performer（FAVOR+）"}),
    ("linear, orthogonal", {"en": "Linear, projections frozen", "zh": "线性注意力，冻结投影"}),
    ("favor+, orthogonal", {"en": "FAVOR+, projections frozen", "zh": "FAVOR+，冻结投影"}),
)
"""Rows of table 4.4 of text 003 and the cells that fill them."""


def write(rows: list[Row], path: str | Path, *, language: str = "en") -> Path:
    """Write the page as one HTML file, atomically."""
    path = Path(path)
    write_whole(path, html(rows, language=language))
    return path


def html(rows: list[Row], *, language: str = "en") -> str:
    """The page as HTML."""
    shell.check_language(language)
    study = rows[0]["study"]
    texts = TEXTS[study]
    found = tables(rows)
    body = "\n".join(
        [
            _opening(rows, study),
            *(_setting(rows, one) for one in found),
            _table_of_text(rows) if study == "frozen-projections" else "",
            _heads(rows),
            _samples(rows),
            _sources(rows),
        ]
    )
    return shell.page(texts.title, body, shell.asset("study.css"), "", {}, language=language)


def _opening(rows: list[Row], study: str) -> str:
    texts, base = TEXTS[study], BASELINES[study]
    lines = []
    for setting in settings(rows):
        groups = cells(rows, setting)
        measure = MEASURES[setting.task][0]
        gaps = {
            name: gap
            for name, some in groups.items()
            if name != base and (gap := difference(by_seed(some, measure), by_seed(groups.get(base, []), measure)))
        }
        if gaps:
            said = ", ".join(f"{name} {gap}{stars(gap.p)}" for name, gap in gaps.items())
            lines.append(
                "<li>"
                + say(
                    {
                        "en": f"{title(setting)}: {measure.name} to {base}: {said}",
                        "zh": f"{title(setting)}：{measure.name}，相对 {base}：{said}",
                    }
                )
                + "</li>"
            )
    marks = {
        "en": "Means of differences of equal seeds with 95 % intervals; * p < 0.05, ** p < 0.01 by the paired t-test.",
        "zh": "同种子差值的均值与 95 % 置信区间；配对 t 检验：* p < 0.05，** p < 0.01。",
    }
    return f"""<section class="study" aria-label="heedful">
<p class="eyebrow">{say({"en": "A study", "zh": "研究"})}</p>
<h1>{say(texts.title)}</h1>
<p class="question">{say(texts.question)}</p>
<h2>{say({"en": "What the runs show", "zh": "结果说明"})}</h2>
<p>{say(texts.shows)}</p>
<ul>{"".join(lines)}</ul>
<p class="note">{say(marks)}</p>
<details><summary>{say({"en": "The prediction", "zh": "运行前的预测"})}</summary>
<p>{say(texts.prediction)}</p></details>
</section>"""


def _setting(rows: list[Row], table: Table) -> str:
    groups = cells(rows, table.setting)
    head = "".join(f"<th>{escape(name)}</th>" for name in table.heads)
    body = "".join(
        f"<tr><th>{escape(line[0])}</th>{''.join(f'<td>{escape(x)}</td>' for x in line[1:])}</tr>"
        for line in table.rows
    )
    return f"""<section>
<h2>{escape(title(table.setting))}</h2>
<div class="pair"><figure>{dots(groups, table.setting)}<figcaption>{
        say(
            {
                "en": "Every run is a dot, the bar the mean of its cell.",
                "zh": "每个点是一次运行，竖线为该组均值。",
            }
        )
    }</figcaption></figure><figure>{_curves(groups, BASELINES[rows[0]["study"]])}</figure></div>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
</section>"""


def dots(groups: Mapping[str, list[Row]], setting: Setting) -> str:
    """An SVG with one line per cell and one dot per run."""
    measure = MEASURES[setting.task][0]
    values = {name: list(by_seed(some, measure).values()) for name, some in groups.items()}
    values = {name: some for name, some in values.items() if some}
    everything = [x for some in values.values() for x in some]
    if not everything:
        return ""
    low, high = min(everything), max(everything)
    room = (high - low) * 0.05 or max(abs(high), 1.0) / 2
    axis = svg.Axis(low - room, high + room, False, LABELS, WIDTH - 12)
    bottom = LINE * len(values) + 8
    parts = []
    for tick in axis.ticks():
        x = axis.place(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} 4V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{svg.tick_text(tick)}</text>')
    for at, (name, some) in enumerate(sorted(values.items(), key=lambda item: -mean(item[1]))):
        y = LINE * at + LINE / 2 + 4
        parts.append(f'<text class="name" x="{LABELS - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<path class="mean" d="M{axis.place(mean(some)):.1f} {y - 8:.1f}v16"/>')
        parts += [f'<circle class="run" cx="{axis.place(x):.1f}" cy="{y:.1f}" r="3.4"/>' for x in some]
    middle = (LABELS + WIDTH) / 2
    parts.append(f'<text class="name" x="{middle}" y="{bottom + 32}" text-anchor="middle">{measure.name}</text>')
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {bottom + 38}" role="img">{"".join(parts)}</svg>'


def _curves(groups: Mapping[str, list[Row]], base: str) -> str:
    """A plot of the loss on the development set during training, mean over seeds."""
    order = sorted(groups, key=lambda name: name != base)[:SHOWN_CURVES]
    series = {}
    for name in order:
        points: dict[int, list[float]] = {}
        for row in groups[name]:
            for step, _, dev in row["curve"]:
                points.setdefault(step, []).append(dev)
        series[name] = [list(points), [mean(values) for values in points.values()]]
    figure = {"x": "steps", "y": "dev loss", "series": series, "log_x": False, "log_y": False, "points": False}
    return svg.line_plot(figure) + svg.legend(figure)


def _table_of_text(rows: list[Row]) -> str:
    """Table 4.4 of text 003 with its low-resource column as measured here."""
    found = [setting for setting in settings(rows) if setting.task == "translation"]
    lines = []
    for cell, name in METHODS:
        columns = [f"<th>{say(name)}</th>"]
        some: list[Row] = []
        for setting in found:
            groups = cells(rows, setting)
            some = groups.get(cell, []) or some
            gap = difference(by_seed(groups.get(cell, []), BLEU), by_seed(groups.get("learned", []), BLEU))
            scores = list(by_seed(groups.get(cell, []), BLEU).values())
            behind = f" ({gap}{stars(gap.p)})" if gap and cell != "learned" else ""
            columns.append(f"<td>{spread(scores)}{behind}</td>" if scores else "<td>–</td>")
        weights = f"{some[0]['weights']['trainable'] / 1e6:.2f} M" if some else "–"
        lines.append(f"<tr>{''.join(columns)}<td>{weights}</td></tr>")
    heads = "".join(f"<th>{escape(title(setting))}</th>" for setting in found)
    return f"""<section>
<h2>{say({"en": "Table 4.4 of text 003, low resource: BLEU", "zh": "文本 003 第 4.4 节表：低资源性能（BLEU）"})}</h2>
<div class="wide"><table>
<thead><tr><th></th>{heads}<th>{say({"en": "trained weights", "zh": "可训练参数"})}</th></tr></thead>
<tbody>{"".join(lines)}</tbody></table></div>
</section>"""


def _heads(rows: list[Row]) -> str:
    """Where the learned encoder heads of the baseline attend: the largest share in each layer."""
    found = [row for row in rows if row["cell"] in BASELINES.values() and row.get("heads") and not row["shuffled"]]
    if not found:
        return ""
    names = ("current", "previous", "next", "left", "right", "first", "last", "entropy", "twin_cosine")
    lines = []
    for row in found:
        for layer in sorted({head["layer"] for head in row["heads"]}):
            some = [head for head in row["heads"] if head["layer"] == layer]
            cells_ = "".join(f"<td>{max(head[name] for head in some):.2f}</td>" for name in names)
            lines.append(f"<tr><th>{escape(row['corpus'])}, {row['steps']:,}</th><td>{layer}</td>{cells_}</tr>")
    heads = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    about = {
        "en": "For each encoder layer of the baseline (seed 0) the largest share of weight that one of its heads puts "
        "there; entropy as a share of its maximum; the cosine of the two most similar heads.",
        "zh": "基线（种子 0）每个编码器层中，单个头放在该处的最大权重；熵为其最大值的比例；"
        "twin cosine 为最相似两头的余弦。",
    }
    return f"""<section><h2>{say({"en": "What the learned heads look at", "zh": "可学习头关注什么"})}</h2>
<p>{say(about)}</p>
<div class="wide"><table><thead><tr><th></th><th>layer</th>{heads}</tr></thead>
<tbody>{"".join(lines)}</tbody></table></div></section>"""


def _samples(rows: list[Row]) -> str:
    """Some test sentences, and their translations by seed 0 of each cell."""
    parts = []
    for setting in settings(rows):
        groups = cells(rows, setting)
        kept = {name: row["samples"] for name, some in groups.items() for row in some if row.get("samples")}
        if not kept:
            continue
        items = []
        for at in range(min(map(len, kept.values()))):
            source, reference, _ = next(iter(kept.values()))[at]
            lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(x[at][2])}</dd>" for name, x in kept.items())
            both = f"<dt>source</dt><dd>{escape(source)}</dd><dt>reference</dt><dd>{escape(reference)}</dd>"
            items.append(f"<dl>{both}{lines}</dl>")
        parts.append(f"<details><summary>{escape(title(setting))}</summary>{''.join(items)}</details>")
    return f"<section><h2>{say({'en': 'Samples', 'zh': '译文样例'})}</h2>{''.join(parts)}</section>" if parts else ""


def _sources(rows: list[Row]) -> str:
    """What was run, and the tables for other documents."""
    seeds = sorted({row["seed"] for row in rows})
    hours = sum(row["train_seconds"] or 0 for row in rows) / 3600
    devices = ", ".join(sorted({row["hardware"] for row in rows}))
    tests = [test for row in rows for test in (row.get("tests") or {}).values() if not row["shuffled"]]
    empty, copies = (100 * mean(test[x] for test in tests) if tests else 0.0 for x in ("empty", "copies"))
    signature = next((test["signatures"][0] for test in tests if test.get("signatures")), "")
    facts = {
        "en": f"{len(rows)} runs, seeds {seeds[0]} to {seeds[-1]}, on {devices}; {hours:.1f} hours of processes that "
        f"shared one GPU. {empty:.2f} % of the translations are empty, {copies:.2f} % copies of the source. "
        f"{signature}",
        "zh": f"{len(rows)} 次运行，种子 {seeds[0]} 至 {seeds[-1]}，设备 {devices}；"
        f"共享一块 GPU 的进程合计 {hours:.1f} 小时。空译文 {empty:.2f} %，照抄原文 {copies:.2f} %。{signature}",
    }
    return f"""<section><h2>{say({"en": "Runs and tables", "zh": "运行与表格"})}</h2><p>{say(facts)}</p>
<details><summary>Markdown</summary><pre>{escape(markdown(rows))}</pre></details>
<details><summary>LaTeX</summary><pre>{escape(latex(rows))}</pre></details></section>"""


def payload(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows for programs, without fields that only the page needs."""
    return [{name: value for name, value in row.items() if name not in ("samples", "heads", "curve")} for row in rows]
