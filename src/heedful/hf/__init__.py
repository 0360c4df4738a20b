"""Hugging Face models: loading them, and seeing every attention call they make. Needs `pip install 'heedful[hf]'`."""

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "heedful.hf works on models of transformers, which is not installed: pip install 'heedful[hf]'",
        name="transformers",
    ) from missing

from heedful.hf.calls import Call
from heedful.hf.load import PACKAGED, load
from heedful.hf.modules import CheckFailed, Refused, objections
from heedful.hf.probe import Enough, Probe, probe
from heedful.hf.prose import encode, longest, passages

__all__ = [
    "PACKAGED",
    "Call",
    "CheckFailed",
    "Enough",
    "Probe",
    "Refused",
    "encode",
    "load",
    "longest",
    "objections",
    "passages",
    "probe",
]
