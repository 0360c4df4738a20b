"""Time the first call of each entry on a GPU, with its backward pass, without compiled programs.

    python benchmarks/gpu_first_calls.py [NAME …] [--workers 2]

Each entry runs in a separate process with an empty cache of compiled programs, `--workers` at a time. The process calls
bfloat16 and float32 heads of width 64, 128 and 256 in turn; only the first call pays for what they share. Prints
seconds, and the backend that ran.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch

NAMES = (
    *("linear", "cosformer", "retention", "gla", "favor+", "softmax", "window", "window-sinks", "blocks", "longformer"),
    *("bigbird", "sparse-fixed", "strided"),
)
KINDS = torch.bfloat16, torch.float32
WIDTHS = 64, 128, 256
TOKENS, HEADS = 2048, 8


def first_calls(name: str) -> None:
    import heedful as h

    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    entry = h.CATALOG[name]
    for dtype in KINDS:
        for d in WIDTHS:
            given = dict(d=d, heads=HEADS, length=TOKENS)
            mechanism = entry.build(**{key: x for key, x in given.items() if key in entry.options}).to("cuda", dtype)
            leaves = [torch.randn(1, HEADS, TOKENS, d, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
            start = time.perf_counter()
            mechanism(*leaves).sum().backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            told = h.backend.explain(mechanism, *leaves).splitlines()[-1].strip()
            print(f"{name:15}{str(dtype)[6:]:10}d{d:<5}{seconds:6.1f} s   {told}", flush=True)


def alone(name: str) -> str:
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | dict(TRITON_CACHE_DIR=empty, TORCHINDUCTOR_CACHE_DIR=empty)
        ran = subprocess.run(
            [sys.executable, __file__, "--case", name],
            capture_output=True,
            text=True,
            env=environment,
        )
    return ran.stdout if ran.returncode == 0 else f"{ran.stdout}{name}: {ran.stderr.strip().splitlines()[-1]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}, which is all of them")
    parser.add_argument("--workers", type=int, default=2, help="entries at a time; 2")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        first_calls(given.case)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
    with ThreadPoolExecutor(given.workers) as pool:
        for text in pool.map(alone, given.names or NAMES):
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()
