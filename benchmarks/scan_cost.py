"""Compare the cost of a scan with eager attention with `output_attentions` and a dense SVD of every head.

    python benchmarks/scan_cost.py [--model smollm2] [--length 1024] [--texts 20] [--dense-texts 20] [--threads 2]
        [--dtype bfloat16]

Each side runs in a separate process on the same texts. Prints wall and CPU seconds per text, and peak resident memory,
in total and beyond the loaded model. The dense side stores all weights of one forward pass, as `output_attentions`
does, and computes only `torch.linalg.svdvals` of each head in float32. A scan computes some forty numbers for each head
besides its ranks, a random head, and pictures. The dense side may use fewer texts: figures are per text. Needs
heedful[hf,report].
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIDES = ("scan", "dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--dense-texts", type=int)
    parser.add_argument("--threads", type=int, help="of torch, on both sides; as many as it likes otherwise")
    parser.add_argument("--dtype", help="of the model, on both sides; as it is stored otherwise")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measured(options)))
        return
    found = {}
    for side in SIDES:
        line = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        found[side] = json.loads(subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True).stdout)
    table(options, found)


def measured(options: argparse.Namespace) -> dict[str, float]:
    import torch

    from heedful import hf
    from heedful.hf.load import quiet
    from heedful.scan.memory import keep_pages
    from heedful.scan.texts import builtin

    quiet()
    keep_pages()  # like the command
    if options.threads:
        torch.set_num_threads(options.threads)
    count = options.texts if options.side == "scan" else options.dense_texts or options.texts
    model, tokenizer = hf.load(options.model, dtype=options.dtype)
    texts = builtin(options.length, count)
    for weight in model.parameters():
        weight.detach().sum()  # read the weights, which are memory-mapped from their file
    before = peak()
    clock, work = time.perf_counter(), time.process_time()
    rank = ours(options, model, tokenizer, texts) if options.side == "scan" else dense(options, model, tokenizer, texts)
    return {
        "texts": count,
        "threads": torch.get_num_threads(),
        "seconds": (time.perf_counter() - clock) / count,
        "cpu": (time.process_time() - work) / count,
        "peak": peak(),
        "beyond": peak() - before,
        "rank": rank,
    }


def peak() -> float:
    """GiB"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def ours(options: argparse.Namespace, model, tokenizer, texts: list[str]) -> float:
    from heedful.hf import scan

    with tempfile.TemporaryDirectory() as folder:
        found = scan(model, tokenizer, texts, lengths=[options.length], out=Path(folder) / "run")
        return float(found.mean("rank90").mean)


def dense(options: argparse.Namespace, model, tokenizer, texts: list[str]) -> float:
    model.set_attn_implementation("eager")
    ranks = [rank for text in texts for rank in dense_ranks(options, model, tokenizer, text)]
    return sum(ranks) / len(ranks)


def dense_ranks(options: argparse.Namespace, model, tokenizer, text: str) -> list[int]:
    """The ranks of one text. A function, so that its weights are freed before the next text: a loop would hold both."""
    import torch

    from heedful import hf

    with torch.no_grad():
        inputs = hf.encode(model, tokenizer, text, options.length)
        weights = model(**inputs, output_attentions=True, use_cache=False).attentions
    ranks = []
    for layer in weights:
        for head in layer[0]:
            sums = torch.linalg.svdvals(head.float()).double().square().cumsum(0)
            ranks.append(int((sums < 0.9 * sums[-1]).sum()) + 1)
    return ranks


def table(options: argparse.Namespace, found: dict[str, dict[str, float]]) -> None:
    scan, dense = found["scan"], found["dense"]
    kind = f" in {options.dtype}" if options.dtype else ""
    print(f"{options.model}{kind}, {options.length} tokens, {scan['threads']:.0f} threads; for one text\n")
    print("| | texts | seconds | CPU seconds | peak GiB | beyond the model | mean rank (.9) |")
    print("|---|---|---|---|---|---|---|")
    for name, row in (("heedful scan", scan), ("output_attentions + svdvals", dense)):
        print(
            f"| {name} | {row['texts']} | {row['seconds']:.1f} | {row['cpu']:.1f} | {row['peak']:.2f} | "
            f"{row['beyond']:.2f} | {row['rank']:.1f} |"
        )
    print(
        f"| ratio | | {dense['seconds'] / scan['seconds']:.1f} | {dense['cpu'] / scan['cpu']:.1f} | "
        f"{dense['peak'] / scan['peak']:.1f} | {dense['beyond'] / scan['beyond']:.1f} | |"
    )


if __name__ == "__main__":
    main()
