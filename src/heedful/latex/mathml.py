r"""Convert LaTeX to MathML, which browsers render themselves. `text` makes a line for a terminal from the same tree.

Supports the part of LaTeX used in formulas: letters, Greek, relations, arrows, \frac, \sqrt, scripts, \sum and \lim
with their limits, accents, \left … \right, \text, \operatorname, \mathrm and the other alphabets, cases, matrices,
aligned. An unknown command is an error that names it; the converter never guesses.

Why not a general converter: their output needs fixes nearly everywhere before browsers render it well (limits beside ∑,
names in italics, a wide gap around a transpose), and terminal and page must show the same formula.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NoReturn
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from heedful.latex import symbols

TOKEN = re.compile(r"\\(?:[A-Za-z]+\*?|.)|\d+(?:\.\d+)?(?:\{,\}\d{3})*|\s+|.", re.DOTALL)
BIG = {"big": "1.2em", "Big": "1.6em", "bigg": "2.1em", "Bigg": "2.6em"}
SIZES = {f"{name}{side}": size for name, size in BIG.items() for side in ("", "l", "r", "m")}
ALPHABETS = {
    "mathbf": "bold",
    "boldsymbol": "bold italic",
    "bm": "bold italic",
    "mathbb": "double",
    "mathcal": "script",
}
UPRIGHT = {"mathrm", "mathit", "mathsf", "mathtt", "operatorname", "operatorname*"}
FENCES = {"pmatrix": "()", "bmatrix": "[]", "vmatrix": "||", "Vmatrix": "‖‖", "Bmatrix": "{}", "cases": "{"}
ENVIRONMENTS = {*FENCES, "matrix", "smallmatrix", "aligned", "align*", "gathered", "array", "split"}
THIN = "0.167em"

# The role of an element in a formula; it decides the space around its neighbours.
ORD, OP, BIN, REL, OPEN, CLOSE, BAR, PUNCT, SPACE = "ord", "op", "bin", "rel", "open", "close", "bar", "punct", "space"


@cache
def to_mathml(latex: str) -> str:
    r"""Convert a formula to a displayed MathML element.

    >>> to_mathml(r"\operatorname{rank}A\le d")
    '<math display="block"><mrow><mi>rank</mi><mspace width="0.167em" /><mi>A</mi><mo>≤</mo><mi>d</mi></mrow></math>'

    Raises ValueError for an unknown command, or if the formula ends too early.
    """
    root = Element("math", display="block")
    root.append(_plain(parse(latex)))
    return ElementTree.tostring(root, encoding="unicode")


def parse(latex: str) -> Element:
    """Parse a formula into a MathML tree; the attribute `is` of each element holds its role, used for spacing."""
    parser = _Parser(latex)
    row = parser.row(())
    if parser.token:
        parser.fail(f"{parser.token} closes nothing")
    return row


def _plain(element: Element) -> Element:
    """Remove the `is` attributes, which are needed only for spacing."""
    for one in element.iter():
        one.attrib.pop("is", None)
    return element


def _leaf(tag: str, text: str, is_: str, **attributes: str) -> Element:
    made = Element(tag, {**attributes, "is": is_})
    made.text = text
    return made


def _tree(tag: str, *children: Element, is_: str = ORD, **attributes: str) -> Element:
    made = Element(tag, {**attributes, "is": is_})
    made.extend(children)
    return made


def _row(children: list[Element]) -> Element:
    """Join several elements into one, with the usual mathematical spacing."""
    spaced: list[Element] = []
    for place, child in enumerate(children):
        before = children[place - 1].get("is") if place else None
        kind = child.get("is")
        if (kind == OP and before in (ORD, CLOSE)) or (before == OP and kind in (ORD, OP)):
            spaced.append(_leaf("mspace", "", SPACE, width=THIN))
        if kind == BIN and before in (None, BIN, REL, OPEN, PUNCT, OP) and child.tag == "mo":
            child.set("form", "prefix")  # a sign, not a subtraction
            child.set("is", ORD)
        spaced.append(child)
    return spaced[0] if len(spaced) == 1 else _tree("mrow", *spaced)


class _Parser:
    def __init__(self, latex: str):
        self.latex = latex
        self.tokens = [token for token in TOKEN.findall(latex)]
        self.at = 0

    # ── tokens

    @property
    def token(self) -> str:
        """The next token, "" at the end; skips blanks."""
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.token
        self.at += 1
        return token

    def expect(self, wanted: str) -> None:
        if self.token != wanted:
            self.fail(f"expected {wanted}, found {self.token or 'the end'}")
        self.take()

    def fail(self, why: str) -> NoReturn:
        raise ValueError(f"formula {self.latex!r}: {why}.")

    def raw(self) -> str:
        """The raw text between braces, blanks included."""
        self.expect("{")
        depth = 1
        found: list[str] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            depth += {"{": 1, "}": -1}.get(token, 0)
            if depth == 0:
                return "".join(found)
            found.append(token)
        self.fail("a brace is not closed")

    # ── rows and atoms

    def row(self, ends: tuple[str, ...]) -> Element:
        """Parse atoms with their scripts up to one of `ends`, which is not consumed."""
        found: list[Element] = []
        while self.token and self.token not in ends and self.token not in ("}", r"\right", r"\end"):
            if self.token in ("^", "_", "'"):
                base = found.pop() if found and found[-1].get("is") != SPACE else _tree("mrow")
                found.append(self.scripts(base))
            else:
                atom = self.atom()
                if atom is not None:
                    found.append(atom)
        return _row(found)

    def group(self) -> Element:
        """Parse the argument of a command: braces, or a single atom."""
        if self.token == "{":
            self.take()
            inside = self.row(())
            self.expect("}")
            return inside
        if not self.token:
            self.fail("it ends where something is expected")
        if len(self.token) > 1 and self.token[0].isdigit():  # without braces, the argument is a single digit
            self.tokens[self.at : self.at + 1] = [self.token[0], self.token[1:]]
        found = self.atom()
        if found is None:
            self.fail(f"{self.tokens[self.at - 1]} is no argument")
        return found

    def scripts(self, base: Element) -> Element:
        below: Element | None = None
        above: list[Element] = []
        while self.token in ("^", "_", "'"):
            token = self.take()
            if token == "_":
                below = self.script()
            elif token == "^":
                above.append(self.script())
            else:
                above.append(_leaf("mo", "′", ORD, lspace="0", rspace="0"))
        over = _row(above) if above else None
        limits = base.get("limits") == "yes"
        base.attrib.pop("limits", None)
        names = ("munder", "mover", "munderover") if limits else ("msub", "msup", "msubsup")
        parts = [part for part in (below, over) if part is not None]
        name = names[2] if len(parts) == 2 else names[0 if below is not None else 1]
        return _tree(name, base, *parts, is_=base.get("is", ORD))

    def script(self) -> Element:
        found = self.group()
        if found.tag == "mo":  # no space around an operator alone in a script
            found.attrib.update(lspace="0", rspace="0")
        return found

    def atom(self) -> Element | None:
        token = self.take()
        if token == "{":
            inside = self.row(())
            self.expect("}")
            return inside
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return _leaf("mn", token.replace("{,}", ","), ORD)
        return self.character(token)

    def character(self, token: str) -> Element:
        match token:
            case "-" | "+" | "*":
                return _leaf("mo", {"-": "−", "*": "∗"}.get(token, token), BIN)
            case "=" | "<" | ">" | ":":
                return _leaf("mo", token, REL)
            case "(" | "[":
                return _leaf("mo", token, OPEN, stretchy="false")
            case ")" | "]":
                return _leaf("mo", token, CLOSE, stretchy="false")
            case "|":
                return _leaf("mo", token, BAR, stretchy="false", lspace="0", rspace="0")
            case "," | ";":
                return _leaf("mo", token, PUNCT)
            case "/" | "!" | ".":
                return _leaf("mo", token, ORD, lspace="0", rspace="0")
            case "~":
                return _leaf("mspace", "", SPACE, width="0.25em")
            case "&" | "$" | "%" | "#":
                self.fail(f"a bare {token}")
        if token.isalpha():
            return _leaf("mi", token, ORD)
        if token in {*symbols.RELATIONS.values(), *symbols.ARROWS.values()}:
            return _leaf("mo", token, REL, stretchy="false")
        if token in symbols.BINARY.values() or token == "−":
            return _leaf("mo", token, BIN)
        return _leaf("mi", token, ORD)

    # ── commands

    def command(self, name: str) -> Element | None:
        if name in symbols.GREEK:
            upright = {"mathvariant": "normal"} if name[0].isupper() else {}
            return _leaf("mi", symbols.GREEK[name], ORD, **upright)
        if name in symbols.ORDINARY:
            return _leaf("mi", symbols.ORDINARY[name], ORD)
        if name in symbols.BINARY:
            return _leaf("mo", symbols.BINARY[name], BIN)
        if name in ("mid", "colon"):
            room = {"mid": "0.278em", "colon": "0"}[name]
            return _leaf("mo", {"mid": "|", "colon": ":"}[name], REL, stretchy="false", lspace=room, rspace="0.278em")
        if name in symbols.RELATIONS:
            return _leaf("mo", symbols.RELATIONS[name], REL)
        if name in symbols.ARROWS:
            return _leaf("mo", symbols.ARROWS[name], REL, stretchy="false")
        if name in symbols.LARGE:
            return _leaf("mo", symbols.LARGE[name], OP, limits="yes")
        if name in symbols.INTEGRALS:
            return _leaf("mo", symbols.INTEGRALS[name], OP)
        if name in symbols.SPACES:
            return _leaf("mspace", "", SPACE, width=symbols.SPACES[name])
        if name == "|":
            return _leaf("mo", "‖", BAR, stretchy="false", lspace="0", rspace="0")
        if name in symbols.OPENING:
            return _leaf("mo", symbols.OPENING[name], OPEN, stretchy="false", form="prefix", lspace="0", rspace="0")
        if name in symbols.CLOSING:
            return _leaf("mo", symbols.CLOSING[name], CLOSE, stretchy="false", form="postfix", lspace="0", rspace="0")
        if name in symbols.ACCENTS:
            return self.accent(name)
        if name in symbols.FUNCTIONS:
            return _leaf("mi", name, OP)
        if name in symbols.LIMITS:
            return self.with_limits(name)
        return self.construction(name)

    def with_limits(self, name: str) -> Element:
        words = {"limsup": "lim\u2009sup", "liminf": "lim\u2009inf"}
        return _leaf("mo", words.get(name, name), OP, limits="yes", movablelimits="true", lspace="0", rspace="0")

    def accent(self, name: str) -> Element:
        stretchy = "true" if name.startswith(("wide", "over")) else "false"
        mark = _leaf("mo", symbols.ACCENTS[name], ORD, stretchy=stretchy)
        return _tree("mover", self.group(), mark, accent="true")

    def construction(self, name: str) -> Element | None:
        match name:
            case "frac" | "tfrac" | "dfrac" | "cfrac":
                made = _tree("mfrac", self.group(), self.group())
                style = {"tfrac": "false", "dfrac": "true"}.get(name)
                return made if style is None else _tree("mstyle", made, displaystyle=style, scriptlevel="0")
            case "binom":
                made = _tree("mfrac", self.group(), self.group(), linethickness="0")
                return _tree("mrow", _fence("(", "prefix"), made, _fence(")", "postfix"))
            case "sqrt":
                return self.root()
            case "text" | "textit" | "textbf" | "textrm" | "mbox":
                return _leaf("mtext", self.raw().replace(" ", "\u00a0").replace("\\\u00a0", "\u00a0"), ORD)
            case "left":
                return self.between()
            case "begin":
                return self.environment()
            case "underline" | "underbrace" | "overbrace":
                mark, tag = {"underline": ("_", "munder"), "underbrace": ("⏟", "munder")}.get(name, ("⏞", "mover"))
                return _tree(tag, self.group(), _leaf("mo", mark, ORD, stretchy="true"), is_=ORD, limits="yes")
            case "overset" | "stackrel" | "underset":
                mark_, base = self.group(), self.group()
                tag = "munder" if name == "underset" else "mover"
                return _tree(tag, base, mark_, is_=base.get("is", ORD))
            case "xrightarrow":
                return _tree("mover", _leaf("mo", "→", REL, stretchy="true"), self.group(), is_=REL)
            case "substack":
                return self.substack()
            case "not":
                return self.negated()
            case "bmod":
                return _leaf("mo", "mod", BIN, lspace="0.222em", rspace="0.222em")
            case "pmod":
                inside = [_leaf("mi", "mod", OP), self.group()]
                return _tree("mrow", _leaf("mo", "(", OPEN), _row(inside), _leaf("mo", ")", CLOSE), is_=CLOSE)
            case "displaystyle" | "textstyle" | "limits" | "nolimits" | "middle":
                return None
        if name in SIZES:
            return self.sized(SIZES[name])
        if name in UPRIGHT:
            return self.upright(name)
        if name in ALPHABETS:
            return self.alphabet(ALPHABETS[name])
        self.fail(f"\\{name} is not known")

    def root(self) -> Element:
        if self.token != "[":
            return _tree("msqrt", self.group())
        self.take()
        index = self.row(("]",))
        self.expect("]")
        return _tree("mroot", self.group(), index)

    def upright(self, name: str) -> Element:
        r"""A word. After \operatorname, or if it has several letters, it is spaced like a function."""
        text = self.raw() if self.token == "{" else self.take()
        text = re.sub(r"\\(?:text|mathrm)\s*\{([^{}]*)\}", r"\1", text)
        text = text.replace(r"\,", "\u2009").replace(r"\ ", " ").replace("\\_", "_").strip()
        if "\\" in text:
            self.fail(f"\\{name} takes a word, not {text}")
        if name == "mathit":
            return _leaf("mi", text, ORD, **({} if len(text) == 1 else {"style": "font-style: italic"}))
        if name == "operatorname*":
            return _leaf("mo", text, OP, limits="yes", movablelimits="true", lspace="0", rspace="0")
        single = {"mathvariant": "normal"} if len(text) == 1 else {}
        word = text.replace(" ", "\u00a0").replace("-", "\u2010")
        function = name == "operatorname" or (len(text) > 1 and text[0].isalpha())
        return _leaf("mi", word, OP if function else ORD, **single)

    def alphabet(self, style: str) -> Element:
        text = self.raw() if self.token == "{" else self.take()
        if text.startswith("\\"):
            return _Parser(text).row(())
        letters = "".join(symbols.styled(letter, style) for letter in text.strip())
        return _leaf("mn" if text.isdigit() else "mi", letters, ORD)

    def sized(self, size: str) -> Element:
        fence = self.atom()
        if fence is None or fence.tag != "mo":
            self.fail("a size is followed by no delimiter")
        fence.attrib.update(stretchy="true", symmetric="true", minsize=size, maxsize=size)
        return fence

    def delimiter(self, form: str) -> Element | None:
        if self.token == ".":
            self.take()
            return None
        fence = self.atom()
        if fence is None or fence.tag != "mo":
            self.fail("\\left or \\right is followed by no delimiter")
        return _fence(fence.text or "", form)

    def between(self) -> Element:
        left = self.delimiter("prefix")
        inside = self.row(())
        self.expect(r"\right")
        right = self.delimiter("postfix")
        return _tree(
            "mrow", *(part for part in (left, inside, right) if part is not None), is_=CLOSE if left is None else OPEN
        )

    def negated(self) -> Element:
        made = self.atom()
        if made is None or (made.text or "") not in symbols.NEGATED:
            self.fail("\\not before what has no crossed form")
        made.text = symbols.NEGATED[made.text or ""]
        return made

    def environment(self) -> Element:
        name = self.raw()
        if name not in ENVIRONMENTS:
            self.fail(f"the environment {name} is not known")
        if name == "array":
            self.raw()
        table = self.table(name)
        self.expect(r"\end")
        if self.raw() != name:
            self.fail(f"{name} is not ended")
        fences = FENCES.get(name, "")
        left = [_fence(fences[0], "prefix")] if fences else []
        right = [_fence(fences[1], "postfix")] if len(fences) > 1 else []
        return _tree("mrow", *left, table, *right)

    def table(self, name: str) -> Element:
        rows: list[Element] = [Element("mtr")]
        while True:
            cell = Element("mtd")
            inside = self.row(("&", "\\\\"))
            if len(inside) or inside.text:
                cell.append(inside)
            rows[-1].append(cell)
            if self.token == "&":
                self.take()
            elif self.token == "\\\\":
                self.take()
                rows.append(Element("mtr"))
            else:
                break
        if len(rows[-1]) == 1 and not len(rows[-1][0]):  # \\ after the last row
            rows.pop()
        aligned = name in ("aligned", "align*", "split")
        return _tree("mtable", *rows, **{"class": "aligned" if aligned else "cases" if name == "cases" else "matrix"})

    def substack(self) -> Element:
        lines = [_Parser(line).row(()) for line in self.raw().split("\\\\")]
        rows = [_tree("mtr", _tree("mtd", line)) for line in lines]
        return _tree("mtable", *rows, **{"class": "matrix"})


def _fence(text: str, form: str) -> Element:
    kind = OPEN if form == "prefix" else CLOSE
    return _leaf("mo", text, kind, fence="true", form=form, stretchy="true", symmetric="true")
