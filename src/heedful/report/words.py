"""The answer in words: what kinds of heads a model has, how large their ranks are, and what could be cheaper.

Every number comes from the table of the longest length, where attention costs most. A random head with the same length,
mask and spread of logits stands beside each rank: a rank alone says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import linear_regression, median
from typing import Any

import polars as pl

THIN = "\u202f"  # a narrow space at which no line breaks
KINDS = ("positional", "sink", "low rank", "content")
Answer = dict[str, Any]


def title_of(manifest: Mapping[str, Any]) -> str:
    """A model's name without the folders before it.

    >>> title_of({"model": "/models/all-MiniLM-L6-v2/"})
    'all-MiniLM-L6-v2'
    """
    name = str(manifest.get("model") or "model").rstrip("/")
    return name.replace("\\", "/").rsplit("/", 1)[-1]


def answer(table: pl.DataFrame, language: str) -> Answer:
    """`lead`, one sentence; `more`, sentences on ranks; `cheaper`, a pair (kind, sentence) for each kind; `caveat`."""
    length = int(table["length"].max() or 0)  # type: ignore[arg-type]
    longest = table.filter(pl.col("length") == length)
    counts = {kind: longest.filter(pl.col("kind_of_head") == kind).height for kind in KINDS}
    write = _ENGLISH if language == "en" else _CHINESE
    more = [write["texts"](longest), write["rank"](longest, length), *write["depth"](longest), *write["growth"](table)]
    return {
        "counts": counts,
        "length": length,
        "lead": write["lead"](counts),
        "more": more,
        "cheaper": [(kind, write["cheaper"][kind](longest, counts[kind], length)) for kind in KINDS if counts[kind]],
        "caveat": write["caveat"],
    }


def _middle(table: pl.DataFrame, column: str) -> float:
    """The median of what is there."""
    values = [x for x in table[column].to_list() if x is not None and math.isfinite(x)]
    return median(values) if values else math.nan


def _round(value: float) -> str:
    """Counts of hundreds need no fraction, and small ones one digit of it.

    >>> _round(3.04), _round(3.26), _round(312.4)
    ('3', '3.3', '312')
    """
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}".removesuffix(".0")


def _percent(share: float) -> str:
    return f"{100 * share:.0f}{THIN}%" if share >= 0.095 else f"{100 * share:.1g}{THIN}%"


def _thirds(table: pl.DataFrame) -> tuple[float, float] | None:
    """Median rank in the first and in the last third of the layers; three layers at least."""
    layers = table["layer"].unique().sort().to_list()
    if len(layers) < 3:
        return None
    some = len(layers) // 3
    first, last = (table.filter(pl.col("layer").is_in(part)) for part in (layers[:some], layers[-some:]))
    return _middle(first, "rank95"), _middle(last, "rank95")


def _exponent(table: pl.DataFrame, column: str = "rank95") -> tuple[int, int, float] | None:
    """Shortest and longest length, and the exponent of the median rank between them; two lengths at least."""
    lengths = table["length"].unique().sort().to_list()
    if len(lengths) < 2:
        return None
    medians = [_middle(table.filter(pl.col("length") == length), column) for length in lengths]
    if not all(value > 0 for value in medians):
        return None
    slope = linear_regression([math.log(x) for x in lengths], [math.log(x) for x in medians]).slope
    return lengths[0], lengths[-1], slope


def _share_of_entries(table: pl.DataFrame, kind: str, length: int) -> tuple[float, float]:
    """Median rank of the heads of a kind, and the numbers in two factors of that rank over those in the matrix."""
    rank = _middle(table.filter(pl.col("kind_of_head") == kind), "rank95")
    return rank, 2 * rank / length


# English


def _en_lead(counts: Mapping[str, int]) -> str:
    phrases = {
        "positional": ("follows position", "follow position"),
        "sink": ("rests on the first token", "rest on the first token"),
        "low rank": ("has a rank well below a random head’s", "have a rank well below a random head’s"),
        "content": ("follows content", "follow content"),
    }
    parts = [f"{count} {phrases[kind][count != 1]}" for kind, count in counts.items() if count]
    joined = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    total = sum(counts.values())
    if total == 1:
        return f"Its one attention head{parts[0][1:]}."
    return f"Of its {total} attention heads, {joined}."


def _en_texts(table: pl.DataFrame) -> str:
    least, most = int(table["texts"].min()), int(table["texts"].max())  # type: ignore[arg-type]
    many = f"{most}" if least == most else f"{least} to {most}"
    return f"Measured on {many} text{'s' if most > 1 else ''} of {table['length'][0]} tokens."


def _en_rank(table: pl.DataFrame, length: int) -> str:
    rank, base = _middle(table, "rank95"), _middle(table, "base_rank95")
    beside = (
        f"; a random head with logits spread as widely needs {_round(base)}"
        if math.isfinite(base)
        else "; no random head was measured beside it, so none is called low rank"
    )
    return (
        f"The median head needs {_round(rank)} of {length} singular values for 95{THIN}% of its energy "
        f"(the smallest {_round(table['rank95'].min())}, the largest {_round(table['rank95'].max())}){beside}."  # type: ignore[arg-type]
    )


def _en_depth(table: pl.DataFrame) -> list[str]:
    thirds = _thirds(table)
    if thirds is None:
        return []
    first, last = thirds
    verb = "falls" if last < first / 1.1 else "rises" if last > first * 1.1 else "hardly changes"
    return [f"From the first third of the layers to the last the median {verb}: {_round(first)} to {_round(last)}."]


def _en_growth(table: pl.DataFrame) -> list[str]:
    found = _exponent(table)
    if found is None:
        return []
    beside = _exponent(table, "base_rank95")
    random = f", a random head’s to the power {beside[2]:.2f}" if beside else ""
    return [f"From {found[0]} to {found[1]} tokens the median rank grows as N to the power {found[2]:.2f}{random}."]


def _en_low_rank(table: pl.DataFrame, count: int, length: int) -> str:
    rank, share = _share_of_entries(table, "low rank", length)
    if share >= 1:
        return f"{_en_heads(count)} of low rank, but not low enough to pay at {length} tokens."
    return (
        f"{_en_heads(count)} of low rank: two factors of rank {_round(rank)}, the median, hold {_percent(share)} of "
        "the numbers of the matrix. Low-rank or linear attention is the candidate."
    )


def _en_heads(count: int) -> str:
    return f"{count} head{'s' if count != 1 else ''}"


# Chinese


def _zh_lead(counts: Mapping[str, int]) -> str:
    phrases = {
        "positional": "{} 个由位置决定",
        "sink": "{} 个主要落在第一个词元上",
        "low rank": "{} 个的秩远低于随机头",
        "content": "{} 个取决于内容",
    }
    parts = [phrases[kind].format(count) for kind, count in counts.items() if count]
    return f"共有 {sum(counts.values())} 个注意力头：{'，'.join(parts)}。"


def _zh_texts(table: pl.DataFrame) -> str:
    least, most = int(table["texts"].min()), int(table["texts"].max())  # type: ignore[arg-type]
    many = f"{most}" if least == most else f"{least} 至 {most}"
    return f"在 {many} 篇长度为 {table['length'][0]} 个词元的文本上测得。"


def _zh_rank(table: pl.DataFrame, length: int) -> str:
    rank, base = _middle(table, "rank95"), _middle(table, "base_rank95")
    beside = (
        f"；logit 离散度相同的随机头需要 {_round(base)} 个"
        if math.isfinite(base)
        else "；没有测量随机头作对照，因此不判定低秩型"
    )
    return (
        f"就中位数而言，一个头需要 {_round(rank)} 个奇异值（共 {length} 个）才能占到 95% 的能量"
        f"（最少 {_round(table['rank95'].min())}，最多 {_round(table['rank95'].max())}）{beside}。"  # type: ignore[arg-type]
    )


def _zh_depth(table: pl.DataFrame) -> list[str]:
    thirds = _thirds(table)
    if thirds is None:
        return []
    first, last = thirds
    verb = "下降" if last < first / 1.1 else "上升" if last > first * 1.1 else "几乎不变"
    return [f"从前三分之一的层到后三分之一的层，中位数{verb}：{_round(first)} 到 {_round(last)}。"]


def _zh_growth(table: pl.DataFrame) -> list[str]:
    found = _exponent(table)
    if found is None:
        return []
    beside = _exponent(table, "base_rank95")
    random = f"，随机头为 {beside[2]:.2f} 次幂" if beside else ""
    return [f"从 {found[0]} 到 {found[1]} 个词元，中位秩按 N 的 {found[2]:.2f} 次幂增长{random}。"]


def _zh_low_rank(table: pl.DataFrame, count: int, length: int) -> str:
    rank, share = _share_of_entries(table, "low rank", length)
    if share >= 1:
        return f"{count} 个头秩较低，但在 {length} 个词元处还不足以节省计算。"
    percent = _percent(share).replace(THIN, "")
    return (
        f"{count} 个低秩头：两个秩 {_round(rank)}（中位数）的因子合计只有原矩阵元素数的 {percent}，"
        "可考虑低秩或线性注意力。"
    )


_ENGLISH: dict[str, Any] = {
    "lead": _en_lead,
    "texts": _en_texts,
    "rank": _en_rank,
    "depth": _en_depth,
    "growth": _en_growth,
    "cheaper": {
        "positional": lambda table, count, length: (
            f"{_en_heads(count)} by position: a fixed pattern or a short window does without most query–key products."
        ),
        "sink": lambda table, count, length: (
            f"{_en_heads(count)} on the first token: a window that keeps the first tokens costs O(N) and loses little "
            "weight."
        ),
        "low rank": _en_low_rank,
        "content": lambda table, count, length: f"{_en_heads(count)} by content: keep exact attention here.",
    },
    "caveat": (
        "These are candidates: the measures are of the weights. What a replacement does to the model’s loss has to be "
        "measured too."
    ),
}
_CHINESE: dict[str, Any] = {
    "lead": _zh_lead,
    "texts": _zh_texts,
    "rank": _zh_rank,
    "depth": _zh_depth,
    "growth": _zh_growth,
    "cheaper": {
        "positional": lambda table, count, length: f"{count} 个位置型头：固定模式或短窗口即可，省去大部分查询–键乘积。",
        "sink": lambda table, count, length: f"{count} 个汇聚型头：保留首部词元的窗口只需 O(N)，损失的权重很少。",
        "low rank": _zh_low_rank,
        "content": lambda table, count, length: f"{count} 个内容型头：此处应保留精确注意力。",
    },
    "caveat": "以上只是候选：这里测量的是权重，替换后对模型损失的影响还需另行测量。",
}
