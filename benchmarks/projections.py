"""Frozen projections: do they preserve the scale of scores, and from which width on is Hadamard faster?

    python benchmarks/projections.py [--tokens 256]

Prints, for each width, the standard deviation of q·k / √d over pairs of standard normal tokens, and the time of
`Hadamard` relative to a dense matrix, with backward in x: medians of interleaved runs on one thread.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn

from heedful.nn import Gaussian, Hadamard, Orthogonal

WIDTHS, HEAD = (256, 512, 576, 768, 1024, 2048, 4096), 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'width':>6}{'linear':>12}{'gaussian':>12}{'orthogonal':>12}{'hadamard':>12}{'hadamard / dense':>20}")
    for width in WIDTHS:
        heads = width // HEAD
        x = torch.randn(options.tokens, width)
        pairs = [[nn.Linear(width, width, bias=False) for _ in range(2)]]
        pairs += [[kind(width, heads, HEAD, seed) for seed in (0, 1)] for kind in (Gaussian, Orthogonal, Hadamard)]
        spread = "".join(f"{score_deviation(q, k, x):12.3f}" for q, k in pairs)
        print(f"{width:6}{spread}{time_ratio(pairs[3][0], pairs[1][0], x):20.2f}")


@torch.no_grad()
def score_deviation(q: nn.Module, k: nn.Module, x: torch.Tensor) -> float:
    queries, keys = (project(x).unflatten(-1, (-1, HEAD)).transpose(0, 1) for project in (q, k))
    scores = queries @ keys.mT * HEAD**-0.5
    return scores[:, ~torch.eye(len(x), dtype=torch.bool)].std().item()


def time_ratio(one: nn.Module, other: nn.Module, x: torch.Tensor, repeats: int = 9) -> float:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for project, seconds in zip((one, other), times, strict=True):
            token = x.clone().requires_grad_()
            start = time.process_time()
            project(token).sum().backward()
            seconds.append(time.process_time() - start)
    return median(times[0][1:]) / median(times[1][1:])


if __name__ == "__main__":
    main()
