"""Every entry of the catalogue on the GPU: right against float64 on the host, and how long it takes.

    python benchmarks/gpu_check.py [NAME …] [--json FILE] [--no-times]

Errors are relative to the float64 definition at n = 1000, in bfloat16 and float32, beside those of the naive dense
computation in the same precision; times are medians in bfloat16 at B1 H16 N8192 d64, forward and forward + backward.
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
    options = parser.parse_args()
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':22}{'bf16 error':>11}{'naive':>9}{'fp32 error':>12}{'naive':>9}", end="")
    print(f"{'grad bf16':>11}{'ms':>9}{'+ backward':>12}")
    for name in options.names or h.CATALOG:
        entry = h.CATALOG[name]
        try:
            row = {"name": name} | errors(entry) | ({} if options.no_times else times(entry))
        except Exception as error:  # one that breaks must not hide the others
            rows.append({"name": name, "problem": f"{type(error).__name__}: {error}"[:300]})
            print(f"{name:22}FAILED {rows[-1]['problem'][:200]}", flush=True)
            continue
        rows.append(row)
        print(
            f"{name:22}{row['bfloat16']:11.1e}{row['bfloat16_naive']:9.1e}{row['float32']:12.1e}"
            f"{row['float32_naive']:9.1e}{row['bfloat16_grad']:11.1e}{row.get('forward_ms', nan):9.2f}"
            f"{row.get('both_ms', nan):12.2f}",
            flush=True,
        )
    if options.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1))
    bad = [row["name"] for row in rows if is_bad(row)]
    print(f"{len(rows) - len(bad)} of {len(rows)} are right" + (f"; not {', '.join(bad)}" if bad else ""))


def is_bad(row) -> bool:
    """It broke, or its error is more than twice the naive way's."""
    kinds = ("bfloat16", "float32")
    return "problem" in row or any(not row[kind] <= 2 * row[f"{kind}_naive"] + 1e-6 for kind in kinds)


def errors(entry) -> dict[str, float]:
    torch.manual_seed(0)
    found = {}
    mechanism = entry.build(**given(entry, d=64, heads=4, length=1000))
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, g = (torch.randn(2, 4, 1000, 64).to(dtype) for _ in range(4))
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        double = mechanism.double()
        truth = double.matrix(exact[0], exact[1]) @ exact[2]
        truth.backward(g.double())
        ours = [x.cuda().requires_grad_() for x in (q, k, v)]
        mechanism = mechanism.to(dtype).cuda()
        out = mechanism(*ours)
        out.backward(g.cuda())
        naive = mechanism.matrix(ours[0], ours[1]) @ ours[2]
        key = str(dtype).removeprefix("torch.")
        found[key], found[f"{key}_naive"] = relative(out, truth), relative(naive, truth)
        pairs = [(a.grad, b.grad) for a, b in zip(ours, exact, strict=True) if b.grad is not None]  # read by nothing
        found[f"{key}_grad"] = max(relative(a, b) for a, b in pairs)
        mechanism = mechanism.cpu()
    return found


def times(entry) -> dict[str, float]:
    if entry.complexity == "N³":  # a baseline that nobody would run at this length
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
    return float((ours.detach().cpu().double() - truth.detach()).norm() / truth.detach().norm())


if __name__ == "__main__":
    main()
