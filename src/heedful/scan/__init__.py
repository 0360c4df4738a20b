"""Run a model over texts and measure every head of every layer. Needs `pip install 'heedful[hf,report]'`."""

from heedful.scan.result import Scan
from heedful.scan.run import scan

__all__ = ["Scan", "scan"]
