"""Hugging Face models: loading them, and seeing every attention call they make. Needs `pip install 'heedful[hf]'`."""

from heedful.hf.calls import Call
from heedful.hf.probe import CheckFailed, Probe, Refused, objections, probe

__all__ = ["Call", "CheckFailed", "Probe", "Refused", "objections", "probe"]
