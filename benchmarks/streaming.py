"""Long streams in float32 and bfloat16: does the last output drift from the float64 parallel form?

    python benchmarks/streaming.py [--steps 100000]

Prints the relative error of the last 100 outputs at several lengths, and the size of the state.
"""

from __future__ import annotations

import argparse

import torch

import heedful as h

HEADS, WIDTH = 2, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    marks = [options.steps // 100, options.steps // 10, options.steps]
    print(f"{'':28}{'inputs':>10}" + "".join(f"{mark:>12}" for mark in marks) + f"{'numbers kept':>16}")
    for name, build in mechanisms().items():
        for dtype in (torch.float32, torch.bfloat16):
            errors, kept = drift(build(), dtype, marks)
            cells = "".join(f"{error:12.1e}" for error in errors)
            print(f"{name:28}{str(dtype).removeprefix('torch.'):>10}{cells}{' → '.join(map(str, kept)):>16}")


def mechanisms():
    return {
        "linear (elu + 1)": lambda: h.Linear(),
        "linear (FAVOR+, 32)": lambda: h.Linear(h.FavorPlus(WIDTH, 32)),
        "left context": lambda: h.FixedPattern("left"),
        "retention (λ = 0.999)": lambda: h.Retention(0.999),
    }


@torch.no_grad()
def drift(mechanism, dtype: torch.dtype, marks: list[int]) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(HEADS, marks[-1], WIDTH).to(dtype) for _ in range(3))
    exact = mechanism(q.double(), k.double(), v.double())
    state, last, errors, kept = mechanism.init_state(q, k, v), [], [], []
    for t in range(marks[-1]):
        out, state = mechanism.step(state, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
        last = [*last[-99:], out]
        if t + 1 in marks:
            theirs = exact[:, t + 1 - len(last) : t + 1]
            ours = torch.cat(last, -2).double()
            # Rounding of the output to its own dtype is not drift.
            errors.append(float((ours - theirs.to(dtype).double()).norm() / theirs.norm()))
            kept.append(sum(x.numel() for x in state if x is not None and x.is_floating_point()))
    return errors, sorted(set(kept))


if __name__ == "__main__":
    main()
