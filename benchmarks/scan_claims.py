"""Compare common claims about the rank of attention with scans of two real models.

    python benchmarks/scan_claims.py [--texts 20] [--model minilm:512 --model smollm2:512 --model smollm2:1024]

Claims: at N = 512 the effective rank is about 150; early layers have high rank, late layers low; the top 10 % of the
singular values carry 80 % of the energy. Each number is a mean over heads and texts with a 95 % interval over texts,
beside the number for random heads of the same logit variance, length, mask and width. Records are stored under
runs/claims and reused. Needs heedful[hf,report]; the weights of SmolLM2 are quantised to four bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

RUNS = Path("runs/claims")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--model", action="append", metavar="NAME:LENGTH")
    options = parser.parse_args()
    print("| model | N | measure | said | measured | random heads |")
    print("|---|---|---|---|---|---|")
    for given in options.model or ["minilm:512", "smollm2:512", "smollm2:1024"]:
        name, _, length = given.partition(":")
        for row in claims(name, int(length or 512), options.texts):
            print(f"| {name} | {length} | " + " | ".join(row) + " |", flush=True)


def claims(name: str, length: int, texts: int) -> list[tuple[str, str, str, str]]:
    from heedful import hf
    from heedful.hf.load import quiet
    from heedful.scan.texts import builtin

    quiet()
    model, tokenizer = hf.load(name)
    out = RUNS / f"{name}-{length}"
    found = hf.scan(
        model,
        tokenizer,
        builtin(length, texts),
        lengths=[length],
        out=out,
        resume=True,
        options=hf.ScanOptions(name=name),
    )
    third = len(found.manifest["layers"]) // 3
    last = len(found.manifest["layers"]) - third

    def row(title: str, said: str, column: str, layers=None, percent: bool = False) -> tuple[str, str, str, str]:
        own, base = found.mean(column, layers=layers), found.mean(f"base_{column}", layers=layers)

        def number(x) -> str:
            return f"{100 * float(x):.1f} %" if percent else f"{float(x):.1f}"

        measured = f"{number(own.mean)} ({number(own.low)} to {number(own.high)})"
        return title, said, measured, number(base.mean)

    return [
        row("effective rank (.9)", "150" if length == 512 else "", "rank90"),
        row("effective rank (.95)", "", "rank95"),
        row(f"rank (.9), first {third} layers", "high", "rank90", lambda layer: layer < third),
        row(f"rank (.9), last {third} layers", "low", "rank90", lambda layer: layer >= last),
        row("energy in the top 10 %", "80 %", "energy10", percent=True),
        row("the same, first layers", "", "energy10", lambda layer: layer < third, percent=True),
        row("the same, last layers", "", "energy10", lambda layer: layer >= last, percent=True),
    ]


if __name__ == "__main__":
    main()
