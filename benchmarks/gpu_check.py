"""Check every catalogue entry on the GPU against float64 on the CPU, and time it.

    python benchmarks/gpu_check.py [NAME …] [--json FILE] [--no-times]
    python benchmarks/gpu_check.py --long [NAME …]              does the error grow, up to 131,072 tokens

Errors are relative to the float64 definition at n = 1000, in bfloat16 and float32, beside those of the naive dense
computation in the same precision: the error of the output, and that of the gradient (in q, k or v) with the worst ratio
to its naive error. An entry passes if no error is more than twice the naive one. Times are medians in bfloat16 at
B1 H16 N8192 d64, forward and forward + backward.

The comparison needs meaningful numbers. If features may be negative, a row of weights can sum to nearly zero; dividing
by that sum then amplifies errors in any precision, by a factor Σ|a| for a row that sums to one. So q and k start as
standard normal draws and are halved until Σ|a| is at most 100 in every row. The column `q, k ×` shows the factor: 1 for
all entries with positive weights.

At lengths where a dense matrix does not fit in memory, the reference is the same entry in float64, which runs in torch;
errors are those of the output, of its last 1024 rows, and of the gradients in q, k and v.
"""

from __future__ import annotations

import argparse
import json
from math import nan
from pathlib import Path

import torch
from triton.testing import do_bench

import heedful as h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these entries alone")
    parser.add_argument("--no-times", action="store_true", help="errors alone: some entries take a second a call")
    parser.add_argument("--long", action="store_true", help="errors in bfloat16 by length, and nothing else")
    options = parser.parse_args()
    if options.long:
        for name in options.names or LONG:
            by_length(h.CATALOG[name])
        return
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':22}{'q, k ×':>8}", end="")
    print("".join(f"{kind:>10}{'naive':>8}{'grad':>9}{'naive':>8}" for kind in ("bf16", "fp32")), "      ms + backward")
    for name in options.names or h.CATALOG:
        entry = h.CATALOG[name]
        try:
            row = {"name": name} | errors(entry) | ({} if options.no_times else times(entry))
        except Exception as error:  # one failure must not hide the other results
            rows.append({"name": name, "problem": f"{type(error).__name__}: {error}"[:300]})
            print(f"{name:22}FAILED {rows[-1]['problem'][:200]}", flush=True)
            continue
        rows.append(row)
        print(f"{name:22}{row['scale']:8g}", end="")
        for kind in KINDS:
            print(f"{row[kind]:10.1e}{row[f'{kind}_naive']:8.0e}", end="")
            print(f"{row[f'{kind}_grad']:9.1e}{row[f'{kind}_grad_naive']:8.0e}", end="")
        print(f"{row.get('forward_ms', nan):9.2f}{row.get('both_ms', nan):11.2f}", flush=True)
    if options.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))
    bad = [row["name"] for row in rows if is_bad(row)]
    print(f"{len(rows) - len(bad)} of {len(rows)} are right" + (f"; not {', '.join(bad)}" if bad else ""))


KINDS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LARGEST = 100  # Σ|a| in a row that sums to one
LENGTHS = 2048, 16384, 131072
LONG = (
    *("linear", "linear-exp", "cosformer", "retention", "retention-norm", "gla", "favor+", "window", "window-sinks"),
    *("blocks", "longformer", "strided", "left", "start"),
)


def is_bad(row) -> bool:
    """True if the entry raised, or an error is more than twice the naive one."""
    names = [name for kind in KINDS for name in (kind, f"{kind}_grad")]
    return "problem" in row or any(not row[name] <= 2 * row[f"{name}_naive"] for name in names)


def errors(entry) -> dict[str, float]:
    torch.manual_seed(0)
    mechanism = entry.build(**given(entry, d=64, heads=4, length=1000)).double()
    draws = torch.randn(4, 2, 4, 1000, 64)
    found = {"scale": well_posed(mechanism, draws[0], draws[1])}
    draws[:2] *= found["scale"]
    for kind, dtype in KINDS.items():
        q, k, v, g = draws.to(dtype).unbind()
        truth = outcome(definition(mechanism), (q, k, v), g, torch.float64)
        mechanism = mechanism.to(dtype).cuda()
        inputs = [x.cuda() for x in (q, k, v)]
        mine = outcome(mechanism, inputs, g, dtype)
        naive = outcome(definition(mechanism), inputs, g, dtype)
        mechanism = mechanism.cpu().double()
        pairs = [(relative(a, c), relative(b, c)) for a, b, c in zip(mine, naive, truth, strict=True) if c is not None]
        found[kind], found[f"{kind}_naive"] = pairs[0]
        worst = max(pairs[1:], key=lambda pair: pair[0] / max(pair[1], 1e-30))
        found[f"{kind}_grad"], found[f"{kind}_grad_naive"] = worst
    return found


def by_length(entry) -> None:
    """Print the errors at each length, one line each."""
    for n in LENGTHS:
        torch.manual_seed(0)
        mechanism = entry.build(**given(entry, d=64, heads=2, length=n)).to("cuda", torch.bfloat16)
        q, k, v, g = torch.randn(4, 1, 2, n, 64, device="cuda").bfloat16().unbind()
        mine = outcome(mechanism, (q, k, v), g, torch.bfloat16)
        truth = outcome(mechanism.double(), (q, k, v), g, torch.float64)
        mine.insert(1, mine[0][..., -1024:, :])
        truth.insert(1, truth[0][..., -1024:, :])
        found = [f"{relative(a, b.cpu()):.1e}" for a, b in zip(mine, truth, strict=True) if b is not None]
        grads = " ".join(found[2:])
        print(f"{entry.name:16} n {n:7}   o {found[0]}, last rows {found[1]}, gradients {grads}", flush=True)


def well_posed(mechanism, q, k) -> float:
    """The factor for q and k with which no row that sums to one has nearly cancelling terms."""
    scale = 1.0
    while True:
        with torch.no_grad():
            weights = mechanism.matrix(q.double() * scale, k.double() * scale)
        sums, sizes = weights.sum(-1), weights.abs().sum(-1)
        normalised = bool(((sums - 1).abs() < 1e-6 + 1e-9 * sizes).logical_or(sizes == 0).all())
        if not normalised or scale < 1e-3 or sizes.max() <= LARGEST:
            return scale
        scale /= 2


def definition(mechanism):
    return lambda q, k, v: mechanism.matrix(q, k) @ v


def outcome(function, inputs, g, dtype) -> list:
    """The output and the gradients in q, k and v; None for inputs that do not affect it."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(g.to(out))
    return [out.detach(), *(x.grad for x in leaves)]


def times(entry) -> dict[str, float]:
    if entry.complexity == "N³":  # a baseline that is not meant for this length
        return {"forward_ms": nan, "both_ms": nan}
    q, k, v = (torch.randn(1, 16, 8192, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mechanism = entry.build(**given(entry, d=64, heads=16, length=8192)).to(torch.bfloat16).cuda()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both():
        mechanism(*leaves).sum().backward()

    with torch.no_grad():
        forward = do_bench(lambda: mechanism(q, k, v), warmup=10, rep=50, return_mode="median")
    return {"forward_ms": forward, "both_ms": do_bench(both, warmup=10, rep=50, return_mode="median")}


def given(entry, **facts):
    return {name: value for name, value in facts.items() if name in entry.options}


def relative(ours, truth) -> float:
    return float((ours.cpu().double() - truth).norm() / truth.norm().clamp(min=1e-30))


if __name__ == "__main__":
    main()
