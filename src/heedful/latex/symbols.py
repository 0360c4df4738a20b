"""The commands of LaTeX that stand for one character, by how they behave in a formula."""

from __future__ import annotations

_GREEK = (
    "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ "
    "mu μ nu ν xi ξ pi π rho ρ varrho ϱ sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω "
    "Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω"
)
_ORDINARY = (
    r"infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅ varnothing ∅ top ⊤ bot ⊥ forall ∀ exists ∃ nexists ∄ neg ¬ "
    r"lnot ¬ dots … ldots … dotsc … cdots ⋯ dotsb ⋯ vdots ⋮ ddots ⋱ prime ′ angle ∠ triangle △ square □ Re ℜ Im ℑ "
    r"aleph ℵ % % # # $ $ & & _ _ checkmark ✓ degree °"
)
_BINARY = (
    "cdot · times × div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet • oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ cup ∪ cap ∩ "
    "setminus ∖ wedge ∧ land ∧ vee ∨ lor ∨ sqcup ⊔ sqcap ⊓"
)
_RELATIONS = (
    "le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠ ll ≪ gg ≫ lt < gt > equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ "
    "asymp ≍ propto ∝ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ prec ≺ preceq ⪯ succ ≻ succeq ⪰ "
    "lesssim ≲ gtrsim ≳ perp ⊥ parallel ∥ mid ∣ nmid ∤ coloneqq ≔ triangleq ≜ models ⊨ vdash ⊢ nleq ≰ ngeq ≱ colon :"
)
_ARROWS = (
    "to → rightarrow → longrightarrow ⟶ leftarrow ← gets ← uparrow ↑ downarrow ↓ leftrightarrow ↔ updownarrow ↕ "
    "mapsto ↦ Rightarrow ⇒ Longrightarrow ⟹ implies ⟹ Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔ iff ⟺ nearrow ↗ "
    "searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌ nRightarrow ⇏"
)
_LARGE = "sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀"
_INTEGRALS = "int ∫ iint ∬ oint ∮"
_OPENING = "{ { lbrace { langle ⟨ lfloor ⌊ lceil ⌈ lvert | lVert ‖ lbrack ["
_CLOSING = "} } rbrace } rangle ⟩ rfloor ⌋ rceil ⌉ rvert | rVert ‖ rbrack ]"
_ACCENTS = "hat ^ widehat ^ tilde ~ widetilde ~ bar ¯ overline ¯ vec → dot ˙ ddot ¨ check ˇ breve ˘"


def _table(pairs: str) -> dict[str, str]:
    words = pairs.split()
    return dict(zip(words[::2], words[1::2], strict=True))


GREEK = _table(_GREEK)
ORDINARY = _table(_ORDINARY)
BINARY = _table(_BINARY)
RELATIONS = _table(_RELATIONS)
ARROWS = _table(_ARROWS)
LARGE = _table(_LARGE)
INTEGRALS = _table(_INTEGRALS)
OPENING = _table(_OPENING)
CLOSING = _table(_CLOSING)
ACCENTS = _table(_ACCENTS)
SPACES = {",": "0.167em", ":": "0.222em", ">": "0.222em", ";": "0.278em", "!": "-0.167em", " ": "0.25em", "quad": "1em"}
SPACES |= {"qquad": "2em", "thinspace": "0.167em"}
_FUNCTIONS = "log ln lg exp sin cos tan cot sinh cosh tanh arcsin arccos arctan dim ker deg arg hom"
_LIMITS = "lim max min sup inf det gcd Pr limsup liminf"
FUNCTIONS, LIMITS = set(_FUNCTIONS.split()), set(_LIMITS.split())
NEGATED = {"=": "≠", "≤": "≰", "≥": "≱", "<": "≮", ">": "≯", "∈": "∉", "⊂": "⊄", "⊆": "⊈", "≡": "≢", "∼": "≁", "≈": "≉"}
NEGATED |= {"⇒": "⇏", "⟹": "⇏", "→": "↛", "∥": "∦", "∃": "∄", "≃": "≄", "∝": "∝̸"}

_EXCEPTIONS = {
    "script": dict(zip("BEFHILMRego", "ℬℰℱℋℐℒℳℛℯℊℴ", strict=True)),
    "double": dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True)),
}
_FIRST = {  # capital A, small a, zero
    "bold": (0x1D400, 0x1D41A, 0x1D7CE),
    "bold italic": (0x1D468, 0x1D482, 0x1D7CE),
    "script": (0x1D49C, 0x1D4B6, None),
    "double": (0x1D538, 0x1D552, 0x1D7D8),
}


def styled(letter: str, style: str) -> str:
    """A letter of another alphabet.

    >>> styled("R", "double"), styled("E", "double"), styled("x", "bold")
    ('ℝ', '𝔼', '𝐱')
    """
    if letter in _EXCEPTIONS.get(style, {}):
        return _EXCEPTIONS[style][letter]
    for start, first in zip("Aa0", _FIRST[style], strict=True):
        count = 10 if start == "0" else 26
        if first is not None and 0 <= ord(letter) - ord(start) < count:
            return chr(first + ord(letter) - ord(start))
    return letter
