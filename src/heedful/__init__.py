"""heedful measures the structure of Transformer attention, and puts it to work.

The names are those of `heedful.library`. They are imported when the first of them is asked for, not before: they take
torch, which takes seconds, and `heedful --help` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING
from warnings import warn as _warn

if TYPE_CHECKING:
    from heedful.library import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str):
    """A name of the library, or a part of the package such as `heedful.hf`."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    try:
        return import_module(f"heedful.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"heedful.{name}":
            raise
    library = import_module("heedful.library")
    if name in getattr(library, "RENAMED", ()):
        now = library.RENAMED[name]
        message = f"heedful.{name} is called heedful.{now} now; the old name goes with the next release."
        _warn(message, DeprecationWarning, stacklevel=2)
        return getattr(library, now)
    if name != "__all__" and name not in getattr(library, "__all__", ()):
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    globals().update({each: getattr(library, each) for each in library.__all__}, __all__=library.__all__)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
