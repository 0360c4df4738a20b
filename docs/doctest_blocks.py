"""An extension of griffe: shows the doctests of a docstring as blocks of code."""

from __future__ import annotations

import re

import griffe

# From a line with >>> to the next blank line.
BLOCK = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?!\s*$).*)*")


def fenced(text: str) -> str:
    """Put a fence around every doctest."""
    return BLOCK.sub(lambda found: f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```", text)


class DoctestBlocks(griffe.Extension):
    """Rewrites docstrings before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
