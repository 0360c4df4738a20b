"""Time the direct adjoint of softmax attention against the gradient in v, on the CPU, in one run.

python benchmarks/adjoint.py [--n 8192] [--heads 4] [--d 64] [--columns 64]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import heedful as h
from heedful.core import Mechanism


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--columns", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    q, k = torch.randn(2, options.heads, options.n, options.d).unbind()
    y = torch.randn(options.heads, options.n, options.columns)
    print(f"n = {options.n}, heads = {options.heads}, d = {options.d}, {options.columns} columns, float32")
    print(f"{'':28}{'A @ x':>10}{'A.mT @ y':>12}{'by gradient':>14}{'gain':>8}{'difference':>13}")
    for pattern in (h.Full(), h.Causal(), h.Window(512)):
        mechanism = h.Softmax(pattern)
        direct = mechanism.operator(q, k)
        _, gradient = Mechanism.products(mechanism, q, k)
        seconds = medians(lambda A=direct: A @ y, lambda A=direct: A.mT @ y, lambda g=gradient: g(y))
        error = ((direct.mT @ y) - gradient(y)).norm() / gradient(y).norm()
        forward, adjoint, by_gradient = seconds
        print(
            f"Softmax({pattern!r})"[:27].ljust(28)
            + f"{forward:9.3f}s{adjoint:11.3f}s{by_gradient:13.3f}s{by_gradient / adjoint:7.1f}×{error:13.1e}"
        )


def medians(*calls, repeats: int = 5) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


if __name__ == "__main__":
    main()
