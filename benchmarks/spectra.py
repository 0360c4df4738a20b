"""Compare measures computed from products with dense decompositions: accuracy, speed, growth.

    python benchmarks/spectra.py accuracy minilm --length 512       every head against float64, in one run
    python benchmarks/spectra.py speed smollm2 --length 2048        rows, top 32, effective rank against eager + svdvals
    python benchmarks/spectra.py growth --most 32768                one head: seconds, products, peak memory by length
    python benchmarks/spectra.py closed                             closed forms

The first two need heads that benchmarks/real_heads.py captured; its docstring says where the weights come from:

    python benchmarks/real_heads.py smollm2 --length 2048

Rows are written to runs/spectra/<name>.jsonl as they are measured. Existing rows are not measured again, so an
interrupted run continues. Delete the file to start over.

    --layers 0,10,20    these layers (0-5 works too); all of them otherwise
    --limit 4           the first 4 heads of each layer
    --offset 200000     heads captured from another passage
    --iterative         no full decompositions of small heads, to check the iteration (accuracy)
    --as-scan           with the default budget of products of a scan (accuracy)
    --sample 0,10,20    dense references for these layers only, ours for all; both reported per head (speed)

The dense references dominate: on one core, float32 at N = 2048, about 1.5 s per head against 0.13 s. All 270 heads take
seven minutes, and two minutes with `--sample 0,5,10,15,20,25`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from math import log
from pathlib import Path
from statistics import median

import torch
from real_heads import load

import heedful as h
from heedful.measures import search
from heedful.scan.baseline import BUDGET

RUNS = Path("runs/spectra")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "speed", "growth", "closed", "one-length"])
    parser.add_argument("model", nargs="?", default="smollm2", choices=["minilm", "smollm2"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("--layers", type=numbers)
    parser.add_argument("--sample", type=numbers)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--iterative", action="store_true")
    parser.add_argument("--as-scan", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what in ("accuracy", "speed"):
        layers = Layers(options.model, options.length, options.offset, options.layers, options.limit)
        if options.what == "accuracy":
            accuracy(layers, options.iterative, options.as_scan)
        else:
            speed(layers, options.sample)
    elif options.what == "growth":
        growth(options.most)
    elif options.what == "closed":
        closed()
    else:
        print(json.dumps(one_length(options.length)))


def numbers(text: str) -> list[int]:
    """Parse "0,3,8-10" to a list of numbers."""
    ends = [part.split("-") for part in text.split(",")]
    return [number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)]


class Rows:
    """Rows by key in a file of JSON lines; existing rows are not measured again."""

    def __init__(self, name: str):
        self.path = RUNS / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = self.path.read_text().splitlines() if self.path.exists() else []
        self.rows = {row["key"]: row for row in map(json.loads, known)}

    def measure(self, key: str, function, *args) -> dict:
        if key not in self.rows:
            self.rows[key] = {"key": key, **function(*args)}
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[key]) + "\n")
        return self.rows[key]


class Layers:
    """Yield the captured heads, one layer at a time."""

    def __init__(self, model: str, length: int, offset: int, chosen: list[int] | None, limit: int | None):
        self.stored, self.limit = load(model, length, offset), limit
        self.name = f"{model}-{length}" + (f"-{offset}" if offset else "")
        self.mechanism = h.Softmax(h.Full() if model == "minilm" else h.Causal(), scale=float(self.stored["scale"]))
        self.chosen = range(sum(name.startswith("q.") for name in self.stored)) if chosen is None else chosen

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for layer in self.chosen:
            q, k = (self.stored[f"{name}.{layer}"][: self.limit] for name in "qk")
            yield layer, q, k


# accuracy


def accuracy(layers: Layers, iterative: bool, as_scan: bool) -> None:
    if iterative:
        search.EXACT = 0
    spent = h.SearchOptions(BUDGET, failure=0) if as_scan else h.SearchOptions()
    rows = Rows(f"accuracy-{layers.name}" + "-iterative" * iterative + "-as-scan" * as_scan)
    done: list[dict] = []
    for layer, q, k in layers:
        for head in range(len(q)):
            done.append(rows.measure(f"{layer}.{head}", against_float64, layers.mechanism, q[head], k[head], spent))
            progress(len(done), f"{layer}.{head}")
    print(f"\n{layers.name}, {len(done)} heads")
    for name, what in (("error", "all"), ("error above noise", "those above 1e-4 σ₁")):
        worst = [row[name] for row in done]
        print(
            f"  first 32 values, worst of a head among {what}: median {median(worst):.1e}, "
            f"within 1 % in {sum(x <= 0.01 for x in worst) / len(worst):.1%}, largest {max(worst):.1e}"
        )
    for tau in ("0.9", "0.95"):
        found = [row[tau] for row in done]
        inside = sum(x["lower"] <= x["true"] <= x["upper"] for x in found)
        near = sum(abs(x["estimate"] - x["true"]) <= 0.05 * x["true"] for x in found)
        worst = max(abs(x["estimate"] - x["true"]) / max(x["true"], 10) for x in found)
        width = median((x["upper"] - x["lower"]) / x["true"] for x in found)
        print(
            f"  effective rank at {tau}: inside the interval {inside} of {len(found)}, estimate within 5 % "
            f"{near / len(found):.1%}, off by {worst:.1%} at most (of 10 where it is less), median width {width:.1%}, "
            f"products median {median(x['products'] for x in found):.0f}"
        )
    ours, dense = (sum(row[name] for row in done) for name in ("seconds", "dense seconds"))
    print(f"  seconds for both ranks and the values {ours:.1f}, dense float64 {dense:.1f}: {dense / ours:.1f} times")


def against_float64(mechanism: h.Mechanism, q: torch.Tensor, k: torch.Tensor, spent: h.SearchOptions) -> dict:
    op = mechanism.operator(q, k)
    found, seconds = timed(lambda: h.spectrum(op, 32, tau=(0.9, 0.95), search=spent))
    ranks = {}
    for tau in (0.9, 0.95):
        rank = h.effective_rank(found, tau)
        ranks[str(tau)] = {name: int(getattr(rank, name)) for name in ("lower", "estimate", "upper", "products")}
    exact, dense = timed(lambda: h.svdvals(mechanism.operator(q.double(), k.double())))
    sums = exact.square().cumsum(-1)
    for tau, rank in ranks.items():
        rank["true"] = int((sums < float(tau) * sums[-1]).sum()) + 1
    errors = (found.values / exact[:32] - 1).abs()
    told = float(errors[exact[:32] > 1e-4 * exact[0]].max())
    return {
        "error": float(errors.max()),
        "error above noise": told,
        "seconds": seconds,
        "dense seconds": dense,
        **ranks,
    }


# speed


def speed(layers: Layers, sample: list[int] | None) -> None:
    """Time by layer, like a scan: row statistics, the first 32 values and the effective rank of every head."""
    rows = Rows(f"speed-{layers.name}-{torch.get_num_threads()}")
    done, both = [], []
    for layer, q, k in layers:
        compared = sample is None or layer in sample
        # Interleave both sides on the heads of one layer, so other load on the machine affects both.
        done.append(rows.measure(f"ours {layer} {len(q)}", ours_of, layers.mechanism, q, k))
        if compared:
            theirs = rows.measure(f"theirs {layer} {len(q)}", theirs_of, layers.mechanism, q, k)
            both.append((done[-1], theirs))
            progress(len(done), f"layer {layer}: {theirs['seconds'] / done[-1]['seconds']:.1f} times")
        else:
            progress(len(done), f"layer {layer}")
    heads = sum(row["heads"] for row in done)
    print(f"\n{layers.name}, {torch.get_num_threads()} threads; seconds a head, and of the processor in brackets")
    print(f"  ours, {heads} heads: {a_head(done)}; {sum(row['seconds'] for row in done):.1f} s in all")
    if not both:
        return
    ours, theirs = zip(*both, strict=True)
    print(f"  of the same {sum(row['heads'] for row in ours)} heads: ours {a_head(ours)}, theirs {a_head(theirs)}")
    for name in ("seconds", "processor"):
        ratios = [y[name] / x[name] for x, y in both]
        whole = sum(y[name] for y in theirs) / sum(x[name] for x in ours)
        print(f"  {name}: {whole:.1f} times faster in all, {min(ratios):.1f} to {max(ratios):.1f} by layer")


def a_head(rows) -> str:
    heads = sum(row["heads"] for row in rows)
    return " ".join(
        form.format(sum(row[name] for row in rows) / heads)
        for name, form in (("seconds", "{:.3f}"), ("processor", "({:.3f})"))
    )


def ours_of(mechanism: h.Mechanism, q: torch.Tensor, k: torch.Tensor) -> dict:
    start = time.process_time()
    found, seconds = timed(lambda: h.head_measures(mechanism.operator(q, k), 32, tau=0.9))
    processor = time.process_time() - start
    products = found.spectrum.products.tolist()
    return {"heads": len(q), "seconds": seconds, "processor": processor, "products": products}


def theirs_of(mechanism: h.Mechanism, q: torch.Tensor, k: torch.Tensor) -> dict:
    start, seconds = time.process_time(), 0.0
    for one, other in zip(q, k, strict=True):
        seconds += timed(lambda one=one, other=other: torch.linalg.svdvals(mechanism.matrix(one, other)))[1]
    return {"heads": len(q), "seconds": seconds, "processor": time.process_time() - start}


# growth


def growth(most: int) -> None:
    rows, done = Rows("growth"), []
    length = 1024
    while length <= most:
        done.append(rows.measure(str(length), in_a_fresh_process, length))
        progress(len(done), f"N = {length}")
        length *= 2
    print(f"\n{'N':>8}{'seconds':>10}{'products':>10}{'MiB more':>10}{'rank':>22}")
    for row in done:
        rank = f"{row['rank'][0]} ≤ {row['rank'][1]} ≤ {row['rank'][2]}"
        print(f"{row['key']:>8}{row['seconds']:10.2f}{row['products']:10}{row['MiB']:10.0f}{rank:>22}")
    late = [row for row in done if int(row["key"]) >= 4096]
    if len(late) > 1:
        for name in ("seconds", "MiB"):
            print(f"  {name} grow as N^{exponent(late, name):.2f} from {late[0]['key']} on")


def in_a_fresh_process(length: int) -> dict:
    """Measure each length in a separate process, because the peak memory belongs to a process."""
    command = [
        sys.executable,
        __file__,
        "one-length",
        "--length",
        str(length),
        "--threads",
        str(torch.get_num_threads()),
    ]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def one_length(length: int) -> dict:
    """A synthetic head with smooth and local parts, not materialised from 4096 tokens on."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(length, 64, generator=generator).cumsum(0)
    walk = walk - walk.mean(0)
    q = k = 6 * walk / walk.norm(dim=-1, keepdim=True)
    q = q + 0.3 * torch.randn(length, 64, generator=generator)
    op = h.Softmax(h.Causal()).operator(q, k)
    op @ torch.ones(length, 64)  # warm-up, so that torch's own allocations are not counted
    before = peak_mib(reset=True)
    found, seconds = timed(lambda: h.head_measures(op, 32, tau=0.9))
    more = peak_mib() - before
    told = h.effective_rank(found.spectrum, 0.9)
    rank = [int(x) for x in (told.lower, told.estimate, told.upper)]
    return {"seconds": seconds, "products": int(told.products), "MiB": more, "rank": rank}


def peak_mib(reset: bool = False) -> float:
    """The peak resident size of this process so far, or from now on (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


# closed forms


def closed() -> None:
    zero = torch.zeros(512, 2, dtype=torch.float64)
    angles = torch.arange(256, dtype=torch.float64) * (2 * torch.pi / 256)
    circle = 20 * torch.stack([angles.cos(), angles.sin()], -1)
    causal = h.Softmax(h.Causal()).operator(zero, zero)
    print(f"causal uniform, N = 512: σ₁ {float(h.spectrum(causal, 1).values[0]):.5f} (1.72028)")
    cases = [
        ("uniform", h.Softmax(h.Full()).operator(zero, zero), 0.9, 1),
        ("identity", h.FixedPattern("current").operator(zero, zero), 0.9, 461),
        ("causal uniform", causal, 0.9, 7),
        ("causal uniform", causal, 0.95, 11),
        ("circle, d = 2", h.Softmax(h.Full(), scale=1.0).operator(circle, circle), 0.9, 47),
    ]
    for name, op, tau, expected in cases:
        found = h.effective_rank(op, tau)
        print(f"{name}: {int(found.lower)} ≤ {int(found.estimate)} ≤ {int(found.upper)} at τ = {tau} ({expected})")


def timed(function):
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def exponent(rows: list[dict], name: str) -> float:
    """The slope of log y against log N."""
    x, y = [log(int(row["key"])) for row in rows], [log(max(row[name], 1e-9)) for row in rows]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def progress(count: int, text: str) -> None:
    print(f"\r{count:5} {text:40}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
