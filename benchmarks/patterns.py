"""Time softmax over patterns beside dense causal softmax: does each pattern reach the kernel made for it?

    python benchmarks/patterns.py                     N = 4096, 8 heads, d = 64, one thread
    python benchmarks/patterns.py --length 16384
    python benchmarks/patterns.py --device cuda       bfloat16; also with every other backend that accepts the inputs

Milliseconds, the minimum of several interleaved runs: CPU time on a CPU, time between events on a GPU. `adjoint` is a
product of Aᵀ with 8 columns (not the first such product), `rows` the statistics of every row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import heedful as h
from heedful.kernels.softmax import softmax
from heedful.patterns import balanced_tree

STRIDED, WINDOW, CAUSAL = h.Strided(128), h.Window(127), h.Causal()


def cases(n: int) -> dict[str, h.Pattern]:
    return {
        "dense causal": CAUSAL,
        "strided": STRIDED & CAUSAL,
        "strided | window": (STRIDED | WINDOW) & CAUSAL,
        "strided | window, both ways": STRIDED | h.Window(127, 127),
        "dilated": h.Strided(4) & h.Window(127 * 4),
        "tree": h.Tree(balanced_tree(n), 2),
        "tree | window": h.Tree(balanced_tree(n), 2) | h.Window(2, 2),
    }


def works(attend: h.Softmax, q, k, v) -> dict[str, Callable[[], object]]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    operator, y = attend.operator(q, k), torch.randn_like(q[..., :8])
    return {
        "forward": lambda: attend(q, k, v),
        "backward too": lambda: torch.autograd.grad(attend(*leaves).sum(), leaves),
        "adjoint": lambda: operator.mT @ y,
        "rows": lambda: h.row_statistics(operator),
    }


def milliseconds(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        began = time.process_time()
        work()
        return (time.process_time() - began) * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def backends(attend: h.Softmax, q, k, v, device: str) -> list[str]:
    """The preferred backend; on a GPU also all others that accept the inputs."""
    inputs = q, k, v, attend.rows(), attend.pattern, None, attend.score_scale(q.shape[-1])
    chosen = softmax.choose(*inputs).name
    others = [name for name, each in softmax.backends.items() if name != chosen and not each.objections(*inputs)]
    return [chosen, *(others if device != "cpu" else [])]


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parse.add_argument("--length", type=int, default=4096)
    parse.add_argument("--device", default="cpu")
    parse.add_argument("--runs", type=int, default=5)
    given = parse.parse_args()
    torch.set_num_threads(1)
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    q, k, v = torch.randn(3, 1, 8, given.length, 64, device=given.device, dtype=dtype).unbind()
    todo = []
    for name, pattern in cases(given.length).items():
        attend = h.Softmax(pattern)
        for number, backend in enumerate(backends(attend, q, k, v, given.device)):
            parts = works(attend, q, k, v)
            todo.append((name, backend, number > 0, parts if not number else {"forward": parts["forward"]}))
    best: dict[tuple[str, str, str], float] = {}
    for _ in range(given.runs + 1):  # the first run compiles and fills caches
        for name, backend, forced, parts in todo:
            with h.backend(backend if forced else None):
                for part, work in parts.items():
                    best[name, backend, part] = min(
                        best.get((name, backend, part), 1e9), milliseconds(work, given.device)
                    )
    kinds = ("forward", "backward too", "adjoint", "rows")
    print(f"{'':28}{'runs on':16}" + "".join(f"{kind:>14}" for kind in kinds))
    for name, backend, _, _ in todo:
        times = (best.get((name, backend, kind)) for kind in kinds)
        print(f"{name:28}{backend:16}" + "".join(f"{'' if t is None else f'{t:.1f}':>14}" for t in times))


if __name__ == "__main__":
    main()
