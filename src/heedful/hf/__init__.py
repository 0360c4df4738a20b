"""Hugging Face models: load them, see every attention call, run heads on other mechanisms.

Needs `pip install 'heedful[hf]'`.
"""

from typing import TYPE_CHECKING

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "heedful.hf works on models of transformers, which is not installed: pip install 'heedful[hf]'",
        name="transformers",
    ) from missing

from heedful.hf.cache import HeedfulCache, cache
from heedful.hf.calls import Call
from heedful.hf.load import PACKAGED, load
from heedful.hf.modules import CheckFailed, Notice, Refused, objections
from heedful.hf.plan import Plan
from heedful.hf.probe import Attending, Enough, Probe, probe
from heedful.hf.prose import encode, longest, passages
from heedful.hf.swap import attach, detach

if TYPE_CHECKING:
    from heedful.scan import Execution, ScanOptions, scan

__all__ = [
    "PACKAGED",
    "Attending",
    "Call",
    "CheckFailed",
    "Enough",
    "Execution",
    "HeedfulCache",
    "Notice",
    "Plan",
    "Probe",
    "Refused",
    "ScanOptions",
    "attach",
    "cache",
    "detach",
    "encode",
    "load",
    "longest",
    "objections",
    "passages",
    "probe",
    "scan",
]


def __getattr__(name: str):
    """Import `scan` and its options on first use: they need polars, and they import modules of this package."""
    if name in ("Execution", "ScanOptions", "scan"):
        from heedful import scan

        return getattr(scan, name)
    raise AttributeError(f"module 'heedful.hf' has no attribute {name!r}")
