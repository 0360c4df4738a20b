"""Convert LaTeX formulas to one line of plain text for a terminal, from the same tree as MathML."""

from __future__ import annotations

import re
from functools import cache
from unicodedata import normalize
from xml.etree.ElementTree import Element

from heedful.latex.mathml import BIN, PUNCT, REL, parse

ABOVE = dict(zip("0123456789+−=()nibkdmtNTxyr⊤′*∗", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱᵇᵏᵈᵐᵗᴺᵀˣʸʳᵀ′*∗", strict=True))
BELOW = dict(zip("0123456789+−=()aeijklmnoprstx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₖₗₘₙₒₚᵣₛₜₓ", strict=True))
COMBINING = {"^": "\u0302", "~": "\u0303", "¯": "\u0304", "→": "\u20d7", "˙": "\u0307", "¨": "\u0308", "ˇ": "\u030c"}


@cache
def to_text(latex: str) -> str:
    r"""A formula as one line of text.

    >>> to_text(r"\sigma_2=\frac{e^b-1}{e^b+N-1}\le\sqrt{d_k}")
    'σ₂ = (eᵇ − 1)/(eᵇ + N − 1) ≤ √(dₖ)'
    """
    return normalize("NFC", " ".join(_say(parse(latex)).split()))


def _say(element: Element) -> str:
    children = [_say(child) for child in element]
    match element.tag:
        case "mspace":
            return "" if element.get("width", "").startswith("-") else " "
        case "mo":
            return _said_operator(element)
        case "mfrac":
            if element.get("linethickness") == "0":
                return f"{children[0]} choose {children[1]}"
            return f"{_closed(children[0])}/{_closed(children[1])}"
        case "msqrt":
            return f"√{_closed(children[0])}"
        case "mroot":
            return f"{_raised(children[1])}√{_closed(children[0])}"
        case "munder" | "mover" if (element[1].text or "") in ("⏟", "⏞", "_"):
            return children[0]
        case "msub" | "munder":
            return children[0].rstrip() + _lowered(children[1])
        case "msup":
            return children[0] + _raised(children[1])
        case "mover":
            mark = element[1].text or ""
            if element.get("accent"):
                return (
                    children[0] + COMBINING.get(mark, "") if len(children[0]) == 1 else f"{mark}{_closed(children[0])}"
                )
            return children[0] + _raised(children[1])
        case "msubsup" | "munderover":
            return children[0].rstrip() + _lowered(children[1]) + _raised(children[2])
        case "mtable":
            return "; ".join(children)
        case "mtr":
            return " ".join(child for child in children if child)
        case "mtext":
            return (element.text or "").replace("\u00a0", " ")
    return (element.text or "").replace("\u00a0", " ") + "".join(children)


def _said_operator(element: Element) -> str:
    text, kind = element.text or "", element.get("is")
    if kind == REL or (kind == BIN and text not in "·∗"):
        return f" {text} "
    return f"{text} " if kind == PUNCT else text


def _closed(text: str) -> str:
    """The text in brackets, unless it is one word."""
    text = text.strip()
    whole = re.fullmatch(r"[\w.∞…]+", text) and not re.search(r"[₀-₉ₐ-ₜ⁰-ⁿ]", text)
    return text if whole else f"({text})"


def _raised(text: str) -> str:
    text = text.strip().replace(" ", "")
    return (
        "".join(ABOVE[one] for one in text)
        if all(one in ABOVE for one in text)
        else f"^{text if len(text) == 1 else f'({text})'}"
    )


def _lowered(text: str) -> str:
    text = text.strip().replace(" ", "")
    if len(text) > 2 and text.isalpha():  # small letters in a row are hard to read
        return f"_{text}"
    return "".join(BELOW[one] for one in text) if all(one in BELOW for one in text) else f"_{_closed(text)}"
