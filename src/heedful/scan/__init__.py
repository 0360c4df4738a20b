"""Run a model over texts and measure every head of every layer. Needs `pip install 'heedful[hf,report]'`."""

from heedful.scan.options import Execution, ScanOptions
from heedful.scan.result import Scan
from heedful.scan.run import scan

__all__ = ["Execution", "Scan", "ScanOptions", "scan"]
