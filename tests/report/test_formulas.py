"""Formulas: LaTeX to MathML and to plain text, and a refusal by name of what is not known."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from heedful.latex import to_mathml, to_text
from heedful.theory.registry import claims_of


def shape(latex):
    """Tags and texts, without attributes."""

    def tell(element):
        inside = " ".join(map(tell, element))
        return f"{element.tag}({element.text or ''}{inside})"

    return tell(ElementTree.fromstring(to_mathml(latex))[0])


@pytest.mark.parametrize(
    "latex, wanted",
    [
        (r"\frac12", "mfrac(mn(1) mn(2))"),
        (r"x_i^2", "msubsup(mi(x) mi(i) mn(2))"),
        (r"x'^2", "msup(mi(x) mrow(mo(′) mn(2)))"),
        (r"\sum_{i}^N", "munderover(mo(∑) mi(i) mi(N))"),
        (r"\int_0^1", "msubsup(mo(∫) mn(0) mn(1))"),
        (r"\max_j", "munder(mo(max) mi(j))"),
        (r"\operatorname*{arg\,max}_j", "munder(mo(arg\u2009max) mi(j))"),
        (r"\mathrm{softmax}", "mi(softmax)"),
        (r"\operatorname{eff\text{-}rank}", "mi(eff\u2010rank)"),
        (r"\sqrt[4]{\pi}", "mroot(mi(π) mn(4))"),
        (r"\hat A", "mover(mi(A) mo(^))"),
        (r"\mathbb{R}", "mi(ℝ)"),
        (r"10{,}000", "mn(10,000)"),
        (r"a\not\le b", "mrow(mi(a) mo(≰) mi(b))"),
        (r"\left(x\right)", "mrow(mo(() mi(x) mo()))"),
        (r"\text{for all }x", "mrow(mtext(for\u00a0all\u00a0) mi(x))"),
        (r"a<b", "mrow(mi(a) mo(<) mi(b))"),
    ],
)
def test_what_a_formula_becomes(latex, wanted):
    assert shape(latex) == wanted


def test_cases_are_a_table_with_one_brace():
    root = ElementTree.fromstring(to_mathml(r"\begin{cases}0&x<0\\1&\text{else}\end{cases}"))
    assert [row.tag for row in root.iter("mtr")] == ["mtr"] * 2 and len(list(root.iter("mtd"))) == 4
    assert [mo.text for mo in root.iter("mo")] == ["{", "<"]


def test_a_sign_is_no_difference():
    difference, sign = (ElementTree.fromstring(to_mathml(latex)).find(".//mo[.='−']") for latex in ("a-b", "a=-b"))
    assert difference.get("form") is None and sign.get("form") == "prefix"


@pytest.mark.parametrize(
    "latex, said",
    [
        (r"\unknown x", r"\unknown is not known"),
        (r"\frac{1}", "it ends"),
        (r"{x", "expected }"),
        (r"x}", "} closes nothing"),
        (r"a & b", "a bare &"),
        (r"\left(x", r"expected \right"),
        (r"\begin{tikz}x\end{tikz}", "the environment tikz is not known"),
        (r"\text{x", "a brace is not closed"),
    ],
)
def test_what_is_not_known_is_named(latex, said):
    with pytest.raises(ValueError) as mistake:
        to_mathml(latex)
    assert said in str(mistake.value)


def test_nothing_of_a_formula_becomes_markup():
    page = to_mathml(r"\text{<script>alert(1)</script>}<x")
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "latex, wanted",
    [
        (r"\operatorname{rank}(A)\le\min(N,d)", "rank(A) ≤ min(N, d)"),
        (r"e^{\beta Z}", "e^(βZ)"),
        (r"\sigma_{\max}^2", "σ_max²"),
        (r"\frac{a+b}{2}", "(a + b)/2"),
        (r"\sum_{i\le k}\sigma_i", "∑_(i≤k) σᵢ"),
        (r"\hat A", "Â"),
    ],
)
def test_plain_text(latex, wanted):
    assert to_text(latex) == wanted


def formulas():
    for claim in claims_of().values():
        for one in (claim, claim.corrected):
            if one is not None and one.formula:
                yield pytest.param(one.formula, id=one.id)


@pytest.mark.parametrize("latex", list(formulas()))
def test_every_formula_of_the_theory_can_be_set(latex):
    assert to_mathml(latex).startswith("<math") and to_text(latex)
