"""Hugging Face models: loading them, and seeing every attention call they make. Needs `pip install 'heedful[hf]'`."""

from typing import TYPE_CHECKING

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "heedful.hf works on models of transformers, which is not installed: pip install 'heedful[hf]'",
        name="transformers",
    ) from missing

from heedful.hf.calls import Call
from heedful.hf.load import PACKAGED, load
from heedful.hf.modules import CheckFailed, Notice, Refused, objections
from heedful.hf.probe import Attending, Enough, Probe, probe
from heedful.hf.prose import encode, longest, passages

if TYPE_CHECKING:
    from heedful.scan import Execution, ScanOptions, scan

__all__ = [
    "PACKAGED",
    "Attending",
    "Call",
    "CheckFailed",
    "Enough",
    "Execution",
    "Notice",
    "Probe",
    "Refused",
    "ScanOptions",
    "encode",
    "load",
    "longest",
    "objections",
    "passages",
    "probe",
    "scan",
]


def __getattr__(name: str):
    """Import `scan` and its options when they are first asked for: they need polars, and modules of this package."""
    if name in ("Execution", "ScanOptions", "scan"):
        from heedful import scan

        return getattr(scan, name)
    raise AttributeError(f"module 'heedful.hf' has no attribute {name!r}")
