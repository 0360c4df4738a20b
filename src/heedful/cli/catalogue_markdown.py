"""The catalogue as a GitHub Markdown table, for the READMEs."""

from __future__ import annotations

import re
from typing import Literal

from heedful.cli.mechanism_facts import Facts, catalogue, direction
from heedful.mechanisms import CATALOG, Paper

HEADINGS = {
    "en": ("name", "what it does", "family", "complexity", "causal", "streams", "paper"),
    "zh": ("名字", "做什么", "族", "复杂度", "因果", "流式", "论文"),
}


def catalogue_markdown(language: Literal["en", "zh"] = "en", family: str | None = None) -> str:
    """The table: headings in one of two languages, one row per entry in English.

    >>> print(catalogue_markdown().splitlines()[2])
    | `softmax` | softmax attention over any pattern | exact | N² | either | yes | [Vaswani et al. 2017, ...
    """
    headings = HEADINGS[language]
    rows = [headings, ["---"] * len(headings), *map(_cells, catalogue(family))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(facts: Facts) -> list[str]:
    words = [facts["summary"], facts["family"], facts["complexity"], direction(facts)]
    streams = "yes" if facts["streaming"] else "no"
    return [f"`{facts['name']}`", *map(_escaped, words), streams, _linked(CATALOG[facts["name"]].paper)]


def _linked(paper: Paper) -> str:
    """A link if the place is an arXiv id, a DOI or an address, else plain text."""
    text = _escaped(str(paper))
    if found := re.match(r"arXiv:([\w.-]+(?:/\d+)?)", paper.where):
        return f"[{text}](https://arxiv.org/abs/{found[1]})"
    if found := re.match(r"doi:(\S+)", paper.where):
        return f"[{text}](https://doi.org/{found[1]})"
    if found := re.match(r"[\w-]+(?:\.[\w-]+)+/\S+", paper.where):
        return f"[{text}](https://{found[0]})"
    return text


def _escaped(text: str) -> str:
    """Escape characters that have a meaning in Markdown."""
    return re.sub(r"[\\`*_<|\[\]]", r"\\\g<0>", text)
