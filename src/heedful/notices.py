"""Warnings about a scan, written as sentences from its manifest, in English and Chinese.

weights         how the weights were loaded: "prefix"; "named", "read_as"; "random", "left_out": {"count": …, "names":
                […]}
texts           "unknown": the share of tokens in a text that the tokenizer does not know
not_captured    modules whose attention could not be captured; they run after all measured modules
draws           the model draws random numbers, for example to drop patches
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WARN_UNKNOWN, REFUSE_UNKNOWN = 0.05, 0.5
"""Smallest shares of unknown tokens in a text at which a scan warns, and at which it is refused."""

VERDICT_TOKENS = 32
"""Smallest number of tokens for a verdict on a head (positional, sink, low rank, content); see docs/scan.md."""

_ENGLISH = {
    "few": "No verdict on heads: {length} tokens are too few, expected {least} or more.",
    "prefix": "The prefix {prefix!r} was removed from the names of stored weights.",
    "random": (
        "Random weights were measured: {count} did not fit the stored ones or are not among them ({names}{more}). The "
        "numbers say nothing about a trained model."
    ),
    "left_out": "{count} stored weights have no place in the model and were left out ({names}{more}).",
    "read_as": "config.json names {named}, which is no model of transformers; {read_as} was measured in its place.",
    "unknown": "The tokenizer does not know {share} of the tokens of text {id} ({title}): expected less than 5 %.",
    "not_captured": "Not measured: {names}, which attends out of sight, behind all that is measured.",
    "draws": "The model draws random numbers as it runs; they are those of seed 0 for every text.",
    "more": " and {count} more",
    "comma": ", ",
}
_CHINESE = {
    "few": "{length} 个词元太少，无法判定各头的类型；至少需要 {least} 个。",
    "prefix": "所存权重的名称都带有前缀 {prefix!r}，读取时已去掉。",
    "random": ("测到的是随机权重：{count} 个权重在文件中缺失或不相符（{names}{more}）。这些数字不能说明训练好的模型。"),
    "left_out": "文件中有 {count} 个权重在模型中没有位置，未被使用（{names}{more}）。",
    "read_as": "config.json 所写的 {named} 不是 transformers 的模型，改为测量 {read_as}。",
    "unknown": "文本 {id}（{title}）有 {share} 的词元是分词器不认识的，应低于 5%。",
    "not_captured": "未测量：{names}；它在所有被测部分之后，其注意力无法观察。",
    "draws": "模型运行时会取随机数；每篇文本都用种子 0。",
    "more": " 等，另有 {count} 个",
    "comma": "、",
}
_SENTENCES = {"en": _ENGLISH, "zh": _CHINESE}


def notices(manifest: Mapping[str, Any], language: str = "en") -> list[str]:
    """Return the warnings that apply to a scan, most serious first; empty for most scans.

    >>> notices({"weights": {"prefix": "module."}})
    ["The prefix 'module.' was removed from the names of stored weights."]
    """
    say = _SENTENCES[language]
    weights, texts = manifest.get("weights") or {}, manifest.get("texts") or []
    return [*_weights(weights, say), *_texts(texts, say), *_model(manifest, say)]


def too_few(length: int, language: str = "en") -> str:
    """Return why heads get no verdict at this length, or "" if the text is long enough.

    >>> too_few(5), too_few(512)
    ('No verdict on heads: 5 tokens are too few, expected 32 or more.', '')
    """
    return "" if length >= VERDICT_TOKENS else _SENTENCES[language]["few"].format(length=length, least=VERDICT_TOKENS)


def _weights(facts: Mapping[str, Any], say: Mapping[str, str]) -> list[str]:
    found = []
    for what in ("random", "left_out"):
        if some := facts.get(what):
            rest = some["count"] - len(some["names"])
            more = say["more"].format(count=rest) if rest else ""
            found.append(say[what].format(count=some["count"], names=say["comma"].join(some["names"]), more=more))
    if facts.get("named"):
        found.append(say["read_as"].format(**facts))
    if facts.get("prefix"):
        found.append(say["prefix"].format(**facts))
    return found


def _texts(texts: list[Mapping[str, Any]], say: Mapping[str, str]) -> list[str]:
    """One warning, about the text with the largest share of unknown tokens."""
    worst = max(texts, key=lambda text: text.get("unknown") or 0, default=None)
    if worst is None or (worst.get("unknown") or 0) < WARN_UNKNOWN:
        return []
    share = f"{100 * worst['unknown']:.0f} %"
    return [say["unknown"].format(share=share, id=worst["id"], title=worst["title"])]


def _model(manifest: Mapping[str, Any], say: Mapping[str, str]) -> list[str]:
    found = []
    if manifest.get("not_captured"):
        found.append(say["not_captured"].format(names=say["comma"].join(manifest["not_captured"])))
    if manifest.get("draws"):
        found.append(say["draws"])
    return found
