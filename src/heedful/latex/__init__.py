"""Convert LaTeX formulas to MathML for a page, and to one line of text for a terminal. See README.md."""

from heedful.latex.mathml import to_mathml
from heedful.latex.text import to_text

__all__ = ["to_mathml", "to_text"]
