"""Window attention against dense causal SDPA on the CPU: time ratios and peak memory, in one run.

    python benchmarks/window.py [--n 16384] [--heads 8] [--d 64] [--repeats 5] [--json FILE]

Times are medians of alternating repeats. Memory is the growth of the process's peak resident set over a call, in
multiples of the inputs q, k, v (Linux only).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import heedful as h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, options.heads, options.n, options.d) for _ in range(3))
    rivals = {
        "dense causal SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "Softmax(Window(512))": h.Softmax(h.Window(512)),
        "Softmax(Window(512, sinks=4))": h.Softmax(h.Window(512, sinks=4)),
    }
    rows = measure(rivals, (q, k, v), options.repeats)
    print(f"n = {options.n}, heads = {options.heads}, d = {options.d}, float32, {torch.get_num_threads()} threads")
    print(f"{'':32}{'forward':>20}{'forward + backward':>24}{'peak memory / inputs':>24}")
    for row in rows:
        print(
            f"{row['name']:32}{row['forward_s']:9.3f} s ({row['forward_gain']:4.1f}×)"
            f"{row['both_s']:13.3f} s ({row['both_gain']:4.1f}×)"
            f"{row['forward_memory']:14.2f} / {row['both_memory']:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(rivals, inputs, repeats: int) -> list[dict]:
    calls = {(name, both): closure(rival, inputs, both) for name, rival in rivals.items() for both in (False, True)}
    size = sum(x.numel() * x.element_size() for x in inputs)
    memory = {key: peak_growth(call) / size for key, call in calls.items()}
    times: dict = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    median = {key: statistics.median(values) for key, values in times.items()}
    dense = next(iter(rivals))
    return [
        {
            "name": name,
            "forward_s": median[name, False],
            "both_s": median[name, True],
            "forward_gain": median[dense, False] / median[name, False],
            "both_gain": median[dense, True] / median[name, True],
            "forward_memory": memory[name, False],
            "both_memory": memory[name, True],
        }
        for name in rivals
    ]


def closure(rival, inputs, both: bool):
    def forward():
        with torch.no_grad():
            rival(*inputs)

    def forward_backward():
        leaves = [x.detach().requires_grad_() for x in inputs]
        rival(*leaves).sum().backward()

    return forward_backward if both else forward


def peak_growth(call) -> int:
    """Bytes by which the peak resident set grows during a call (after one call to warm up)."""
    call()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
