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

from heedful.notices import too_few

THIN = "\u202f"  # a narrow space at which no line breaks
KINDS = ("positional", "sink", "low rank", "content")
Answer = dict[str, Any]
Phrases = dict[str, str]

_ENGLISH: Phrases = {
    "one positional": "follows position",
    "one sink": "rests on the first token",
    "one low rank": "has a rank well below a random head’s",
    "one content": "follows content",
    "some positional": "follow position",
    "some sink": "rest on the first token",
    "some low rank": "have a rank well below a random head’s",
    "some content": "follow content",
    "lead one": "Its one attention head {kind}.",
    "lead": "Of its {total} attention heads, {kinds}.",
    "comma": ", ",
    "and": " and ",
    "one head": "1 head",
    "heads": "{count} heads",
    "range": "{least} to {most}",
    "text": "Measured on 1 text of {length} tokens.",
    "texts": "Measured on {many} texts of {length} tokens.",
    "rank": (
        f"The median head needs {{rank}} of {{length}} singular values for 95{THIN}% of its energy "
        "(the smallest {least}, the largest {most}){beside}."
    ),
    "beside": "; a random head with logits spread as widely needs {base}",
    "nothing beside": "; no random head was measured beside it, so none is called low rank",
    "depth": "From the first third of the layers to the last the median {verb}: {first} to {last}.",
    "falls": "falls",
    "rises": "rises",
    "stays": "hardly changes",
    "growth": "From {shortest} to {longest} tokens the median rank grows as N to the power {power:.2f}{random}.",
    "random growth": ", a random head’s to the power {power:.2f}",
    "positional": "{heads} by position: a fixed pattern or a short window does without most query–key products.",
    "sink": "{heads} on the first token: a window that keeps the first tokens costs O(N) and loses little weight.",
    "low rank": (
        f"{{heads}} of low rank: two factors of rank {{rank}}, the median, hold {{percent}}{THIN}% of the numbers of "
        "the matrix. Low-rank or linear attention is the candidate."
    ),
    "not low enough": "{heads} of low rank, but not low enough to pay at {length} tokens.",
    "content": "{heads} by content: keep exact attention here.",
    "caveat": (
        "These are candidates: the measures are of the weights. What a replacement does to the model’s loss has to be "
        "measured too."
    ),
}
_CHINESE: Phrases = {
    "one positional": "个由位置决定",
    "one sink": "个主要落在第一个词元上",
    "one low rank": "个的秩远低于随机头",
    "one content": "个取决于内容",
    "some positional": "个由位置决定",
    "some sink": "个主要落在第一个词元上",
    "some low rank": "个的秩远低于随机头",
    "some content": "个取决于内容",
    "lead one": "共有 1 个注意力头：1 {kind}。",
    "lead": "共有 {total} 个注意力头：{kinds}。",
    "comma": "，",
    "and": "，",
    "one head": "1 个",
    "heads": "{count} 个",
    "range": "{least} 至 {most}",
    "text": "在 1 篇长度为 {length} 个词元的文本上测得。",
    "texts": "在 {many} 篇长度为 {length} 个词元的文本上测得。",
    "rank": (
        "就中位数而言，一个头需要 {rank} 个奇异值（共 {length} 个）才能占到 95% 的能量"
        "（最少 {least}，最多 {most}）{beside}。"
    ),
    "beside": "；logit 离散度相同的随机头需要 {base} 个",
    "nothing beside": "；没有测量随机头作对照，因此不判定低秩型",
    "depth": "从前三分之一的层到后三分之一的层，中位数{verb}：{first} 到 {last}。",
    "falls": "下降",
    "rises": "上升",
    "stays": "几乎不变",
    "growth": "从 {shortest} 到 {longest} 个词元，中位秩按 N 的 {power:.2f} 次幂增长{random}。",
    "random growth": "，随机头为 {power:.2f} 次幂",
    "positional": "{heads}位置型头：固定模式或短窗口即可，省去大部分查询–键乘积。",
    "sink": "{heads}汇聚型头：保留首部词元的窗口只需 O(N)，损失的权重很少。",
    "low rank": (
        "{heads}低秩头：两个秩 {rank}（中位数）的因子合计只有原矩阵元素数的 {percent}%，可考虑低秩或线性注意力。"
    ),
    "not low enough": "{heads}头秩较低，但在 {length} 个词元处还不足以节省计算。",
    "content": "{heads}内容型头：此处应保留精确注意力。",
    "caveat": "以上只是候选：这里测量的是权重，替换后对模型损失的影响还需另行测量。",
}


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
    say = _ENGLISH if language == "en" else _CHINESE
    more = [_texts(say, longest), _rank(say, longest, length), *_depth(say, longest), *_growth(say, table)]
    return {
        "counts": counts,
        "length": length,
        "lead": too_few(length, language) or _lead(say, counts),
        "more": more,
        "cheaper": [(kind, _cheaper(say, longest, kind, counts[kind], length)) for kind in KINDS if counts[kind]],
        "caveat": say["caveat"],
    }


def _lead(say: Phrases, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    kinds = {kind: say[f"{'one' if count == 1 else 'some'} {kind}"] for kind, count in counts.items() if count}
    if total == 1:
        return say["lead one"].format(kind=next(iter(kinds.values())))
    parts = [f"{counts[kind]} {phrase}" for kind, phrase in kinds.items()]
    joined = parts[0] if len(parts) == 1 else say["comma"].join(parts[:-1]) + say["and"] + parts[-1]
    return say["lead"].format(total=total, kinds=joined)


def _texts(say: Phrases, table: pl.DataFrame) -> str:
    least, most = int(table["texts"].min()), int(table["texts"].max())  # type: ignore[arg-type]
    many = f"{most}" if least == most else say["range"].format(least=least, most=most)
    return say["texts" if most > 1 else "text"].format(many=many, length=table["length"][0])


def _rank(say: Phrases, table: pl.DataFrame, length: int) -> str:
    rank, base = _middle(table, "rank95"), _middle(table, "base_rank95")
    beside = say["beside"].format(base=_round(base)) if math.isfinite(base) else say["nothing beside"]
    least, most = _round(table["rank95"].min()), _round(table["rank95"].max())  # type: ignore[arg-type]
    return say["rank"].format(rank=_round(rank), length=length, least=least, most=most, beside=beside)


def _depth(say: Phrases, table: pl.DataFrame) -> list[str]:
    thirds = _thirds(table)
    if thirds is None:
        return []
    first, last = thirds
    verb = "falls" if last < first / 1.1 else "rises" if last > first * 1.1 else "stays"
    return [say["depth"].format(verb=say[verb], first=_round(first), last=_round(last))]


def _growth(say: Phrases, table: pl.DataFrame) -> list[str]:
    found = _exponent(table)
    if found is None:
        return []
    shortest, longest, power = found
    beside = _exponent(table, "base_rank95")
    random = say["random growth"].format(power=beside[2]) if beside else ""
    return [say["growth"].format(shortest=shortest, longest=longest, power=power, random=random)]


def _cheaper(say: Phrases, table: pl.DataFrame, kind: str, count: int, length: int) -> str:
    heads = say["one head"] if count == 1 else say["heads"].format(count=count)
    if kind != "low rank":
        return say[kind].format(heads=heads)
    rank, share = _share_of_entries(table, kind, length)
    if share >= 1:
        return say["not low enough"].format(heads=heads, length=length)
    return say[kind].format(heads=heads, rank=_round(rank), percent=_percent(share))


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
    return f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1g}"


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
