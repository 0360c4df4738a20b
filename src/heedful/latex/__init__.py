"""LaTeX formulas as MathML for a page, and as one line of text for a terminal. README.md says how."""

from heedful.latex.mathml import to_mathml
from heedful.latex.text import to_text

__all__ = ["to_mathml", "to_text"]
