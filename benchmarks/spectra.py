"""Spectra from products against dense decompositions: accuracy, speed, growth.

    python benchmarks/spectra.py accuracy minilm --length 512       every head against float64, in one run
    python benchmarks/spectra.py speed smollm2 --length 2048        top 32 and effective rank against eager + svdvals
    python benchmarks/spectra.py growth --most 32768                one head: seconds, products, peak memory by length
    python benchmarks/spectra.py closed                             closed forms

The first two need heads that benchmarks/real_heads.py captured. Rows go to runs/spectra/<name>.jsonl as they are
measured, and a row that is there already is not measured again: a run that was interrupted goes on. `--every 9` takes
each ninth head or layer.
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

RUNS = Path("runs/spectra")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "speed", "growth", "closed", "one-length"])
    parser.add_argument("model", nargs="?", default="smollm2", choices=["minilm", "smollm2"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "accuracy":
        accuracy(options.model, options.length, options.every)
    elif options.what == "speed":
        speed(options.model, options.length, options.every)
    elif options.what == "growth":
        growth(options.most)
    elif options.what == "closed":
        closed()
    else:
        print(json.dumps(one_length(options.length)))


class Rows:
    """Rows by key in a file of JSON lines; what is there is not measured again."""

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


def heads(model: str, length: int, every: int) -> Iterator[tuple[str, h.Mechanism, torch.Tensor, torch.Tensor]]:
    stored = load(model, length)
    mechanism = h.Softmax(h.Full() if model == "minilm" else h.Causal(), scale=float(stored["scale"]))
    layers = sum(name.startswith("q.") for name in stored)
    per_layer = len(stored["q.0"])
    for at in range(0, layers * per_layer, every):
        layer, head = divmod(at, per_layer)
        yield f"{layer}.{head}", mechanism, stored[f"q.{layer}"][head], stored[f"k.{layer}"][head]


# accuracy


def accuracy(model: str, length: int, every: int) -> None:
    rows = Rows(f"accuracy-{model}-{length}")
    done = []
    for key, mechanism, q, k in heads(model, length, every):
        done.append(rows.measure(key, against_float64, mechanism, q, k))
        progress(len(done), f"{key}")
    print(f"\n{model}, N = {length}, {len(done)} heads")
    worst = [row["error"] for row in done]
    print(f"  first 32 values, worst of a head: median {median(worst):.1e}, largest {max(worst):.1e}")
    for tau in ("0.9", "0.95"):
        found = [row[tau] for row in done]
        inside = sum(x["lower"] <= x["true"] <= x["upper"] for x in found)
        near = sum(abs(x["estimate"] - x["true"]) <= 0.05 * x["true"] for x in found)
        width = median((x["upper"] - x["lower"]) / x["true"] for x in found)
        print(
            f"  effective rank at {tau}: inside the interval {inside} of {len(found)}, estimate within 5 % "
            f"{near / len(found):.1%}, median width {width:.1%}, "
            f"products median {median(x['products'] for x in found):.0f}"
        )
    ours, dense = (sum(row[name] for row in done) for name in ("seconds", "dense seconds"))
    print(f"  seconds for both ranks and the values {ours:.1f}, dense float64 {dense:.1f}: {dense / ours:.1f} times")


def against_float64(mechanism: h.Mechanism, q: torch.Tensor, k: torch.Tensor) -> dict:
    op = mechanism.operator(q, k)
    found, seconds = timed(lambda: h.spectrum(op, 32, tau=(0.9, 0.95)))
    ranks = {}
    for tau in (0.9, 0.95):
        rank = h.effective_rank(found, tau)
        ranks[str(tau)] = {name: int(getattr(rank, name)) for name in ("lower", "estimate", "upper", "products")}
    exact, dense = timed(lambda: h.svdvals(mechanism.operator(q.double(), k.double())))
    sums = exact.square().cumsum(-1)
    for tau, rank in ranks.items():
        rank["true"] = int((sums < float(tau) * sums[-1]).sum()) + 1
    error = float((found.values / exact[:32] - 1).abs().max())
    return {"error": error, "seconds": seconds, "dense seconds": dense, **ranks}


# speed


def speed(model: str, length: int, every: int) -> None:
    """By layers, as a scan would: row entropies are left to the row measures."""
    stored = load(model, length)
    mechanism = h.Softmax(h.Full() if model == "minilm" else h.Causal(), scale=float(stored["scale"]))
    layers = range(0, sum(name.startswith("q.") for name in stored), every)
    rows, done = Rows(f"speed-{model}-{length}-{torch.get_num_threads()}"), []
    for layer in layers:
        done.append(rows.measure(str(layer), layer_race, mechanism, stored[f"q.{layer}"], stored[f"k.{layer}"]))
        progress(len(done), f"layer {layer}: {done[-1]['theirs'] / done[-1]['ours']:.1f} times")
    ours, theirs = (sum(row[name] for row in done) for name in ("ours", "theirs"))
    print(
        f"\n{model}, N = {length}: ours {ours:.1f} s, eager + svdvals {theirs:.1f} s, {theirs / ours:.1f} times faster"
    )


def layer_race(mechanism: h.Mechanism, q: torch.Tensor, k: torch.Tensor) -> dict:
    found, ours = timed(lambda: h.spectrum(mechanism.operator(q, k), 32, tau=0.9))
    theirs = 0.0
    for one, other in zip(q, k, strict=True):
        theirs += timed(lambda one=one, other=other: torch.linalg.svdvals(mechanism.matrix(one, other)))[1]
    return {"ours": ours, "theirs": theirs, "products": found.products.tolist()}


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
    """The peak of a process is its own: one length a process."""
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
    """A made head of smooth and local parts, never formed from 4096 on."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(length, 64, generator=generator).cumsum(0)
    walk = walk - walk.mean(0)
    q = k = 6 * walk / walk.norm(dim=-1, keepdim=True)
    q = q + 0.3 * torch.randn(length, 64, generator=generator)
    op = h.Softmax(h.Causal()).operator(q, k)
    op @ torch.ones(length, 64)  # warm up, so that what torch itself allocates is not counted
    before = peak_mib(reset=True)
    energy, first = timed(lambda: squared_norms(q, k).sum())
    found, second = timed(lambda: h.effective_rank(op, 0.9, energy=energy))
    more = peak_mib() - before
    rank = [int(x) for x in (found.lower, found.estimate, found.upper)]
    return {"seconds": first + second, "products": int(found.products), "MiB": more, "rank": rank}


def peak_mib(reset: bool = False) -> float:
    """The largest resident size of this process so far, or from here on (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def squared_norms(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Σ_j a_ij² = exp(lse(2 s_i) − 2 lse(s_i)), causal, a block of rows at a time."""
    parts, rows = [], max(1, (1 << 20) // len(q))
    for start in range(0, len(q), rows):
        stop = min(start + rows, len(q))
        scores = q[start:stop] @ k[:stop].mT / q.shape[-1] ** 0.5
        hidden = torch.arange(stop) > torch.arange(start, stop)[:, None]
        scores.masked_fill_(hidden, -torch.inf)
        parts.append((torch.logsumexp(2 * scores, -1) - 2 * torch.logsumexp(scores, -1)).double().exp())
    return torch.cat(parts)


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
