"""The answer of a scan in sentences, in English and Chinese."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from heedful.notices import too_few

if TYPE_CHECKING:
    from heedful.scan.result import Scan

ENGLISH = {
    "measured": "{heads} heads in {layers} {of_layers}, measured on {texts} {noun} of {length} tokens.",
    "kinds": (
        "{positional} follow a positional pattern, {sink} rest on the first token, {low} are of low rank beside a "
        "random head, {content} follow content."
    ),
    "rank": "The effective rank (.9) is {rank} on average{interval}; {base} for random heads with logits as spread.",
    "bare": "The effective rank (.9) is {rank} on average{interval}.",
    "interval": " (95 % interval {low} to {high})",
    "cheaper": (
        "{cheap} of {heads} could be cheaper: positional heads by fixed patterns, sinks by a window and the first "
        "tokens, low ranks by low-rank attention. What that costs the model is another measurement."
    ),
}
CHINESE = {
    "measured": "共 {layers} 层 {heads} 个注意力头，在 {texts} 篇 {length} 个词元的文本上测得。",
    "kinds": (
        "其中 {positional} 个遵循位置模式，{sink} 个把多半权重放在首个词元上（注意力汇聚），"
        "{low} 个的秩明显低于随机头，{content} 个取决于内容。"
    ),
    "rank": "有效秩（τ = 0.9）平均为 {rank}{interval}；logit 方差相同的随机头为 {base}。",
    "bare": "有效秩（τ = 0.9）平均为 {rank}{interval}。",
    "interval": "（95% 区间 {low}–{high}）",
    "cheaper": (
        "{heads} 个头中有 {cheap} 个有望降低开销：位置头可换成固定模式，汇聚头可换成滑动窗口加首部词元，"
        "低秩头可换成低秩注意力。这样替换对模型质量的影响需要另行测量。"
    ),
}
SENTENCES = {"en": ENGLISH, "zh": CHINESE}


def summary(scan: Scan, language: str = "en") -> str:
    """What kinds of heads there are at the longest length, how high their ranks are, and what could be cheaper."""
    if language not in SENTENCES:
        raise ValueError(f"language: {language!r}, expected one of {', '.join(SENTENCES)}.")
    say = SENTENCES[language]
    table = scan.table()
    table = table.filter(pl.col("length") == table["length"].max())
    counts = dict(table["kind_of_head"].value_counts().iter_rows())
    heads, layers, texts = len(table), table["layer"].n_unique(), int(table["texts"][0])
    found = scan.mean("rank90")
    numbers = {
        "heads": heads,
        "layers": layers,
        "of_layers": "layer" if layers == 1 else "layers",
        "texts": texts,
        "noun": "text" if texts == 1 else "texts",
        "length": table["length"][0],
        "positional": counts.get("positional", 0),
        "sink": counts.get("sink", 0),
        "low": counts.get("low rank", 0),
        "content": counts.get("content", 0),
        "cheap": heads - counts.get("content", 0),
        "rank": _number(float(found.mean)),
        "interval": "",
    }
    if texts > 1:
        numbers["interval"] = say["interval"].format(low=_number(float(found.low)), high=_number(float(found.high)))
    base = scan.mean("base_rank90").mean
    few = too_few(int(table["length"][0]), language)
    kinds, cheaper = ([few], []) if few else (["kinds"], ["cheaper"])
    sentences = ["measured", *kinds, "bare" if base.isnan() else "rank", *cheaper]
    numbers["base"] = _number(float(base))
    return ("" if language == "zh" else " ").join(say.get(name, name).format(**numbers) for name in sentences)


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"
