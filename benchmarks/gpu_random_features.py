"""Random feature attention on a GPU: errors, times, and the best configurations.

    python benchmarks/gpu_random_features.py                     all of it, in about three minutes:
    python benchmarks/gpu_random_features.py --core              errors against float64 in the four main cases
    python benchmarks/gpu_random_features.py --bench             the README's table, and each launch alone
    python benchmarks/gpu_random_features.py --tune              candidates for each launch, the best of them together
    python benchmarks/gpu_random_features.py --check             the other cases, each in a separate process
    python benchmarks/gpu_random_features.py --one "d16 m64"     one case

Results go to $OUT/gpu_random_features.json, or to this folder. Many processes compile the kernels first.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from heedful.kernels import launching  # noqa: E402
from heedful.kernels.random_features import launches, reference  # noqa: E402
from heedful.kernels.random_features import triton as fused  # noqa: E402

Config = launches.Config
START = time.time()


def naive(q, k, v, *, query_weight, key_weight, bias=None, curvature=0.0, key_bias=None, causal=True):
    """The dense computation, every step in the dtype of its inputs, with features shifted by their maxima."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    own = 0 if bias is None else bias.to(dtype)[:, None]
    x, y = q @ query_weight.to(dtype) + own, k @ key_weight.to(dtype) + own
    y = y - curvature / 2 * k.square().sum(-1, keepdim=True)
    if key_bias is not None:
        y = y + key_bias.to(dtype).repeat_interleave(group, 1)[..., None]
    x, y = (x - x.detach().amax(-1, keepdim=True)).exp(), (y - y.detach().amax((-2, -1), keepdim=True)).exp()
    a = x @ y.mT
    a = a.tril() if causal else a
    return a @ v / a.sum(-1, keepdim=True)


def exact(q, k, v, *, causal=True, **options):
    """The same in float64 with logarithms, a few rows at a time, so that nothing underflows."""
    group = q.shape[1] // k.shape[1]
    x, y = reference.log_features(q, k, **options)
    y, v = (t.repeat_interleave(group, 1) for t in (y, v))
    top = y.detach().amax(-1, keepdim=True)
    a = (x - x.detach().amax(-1, keepdim=True)).exp() @ (y - top).exp().mT
    shift = top.mT.expand_as(a)
    if causal:
        shift = shift.masked_fill(torch.ones_like(shift, dtype=torch.bool).triu(1), -torch.inf)
    a = a * (shift - shift.amax(-1, keepdim=True)).exp()
    return a @ v / a.sum(-1, keepdim=True)


def draw(B=1, H=2, n=1000, d=64, *, m=None, KV=None, e=None, features=256, dtype=torch.bfloat16, per_head=False,
         key_bias=False, length=1.0, seed=0):  # fmt: skip
    """Inputs and the parameters of FAVOR+ with scale d^-½, or of dense features if `key_bias`."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, device="cuda")

    KV, e, m = KV or H, e or d, m or n
    q, k, v = normal(B, H, n, d) * length, normal(B, KV, m, d) * length, normal(B, KV, m, e)
    W = normal(H if per_head else 1, d, features) * d**-0.25
    options = dict(query_weight=W, key_weight=W, bias=None, curvature=d**-0.5, key_bias=None)
    if key_bias:
        options.update(key_weight=W + 0.1 * normal(*W.shape), key_bias=normal(B, KV, m))
        options["bias"] = normal(W.shape[0], features) * 0.3
    return [x.to(dtype).requires_grad_() for x in (q, k, v)], options


def run(function, inputs, do, **options):
    o = function(*inputs, **options)
    return o.detach(), *torch.autograd.grad(o, inputs, do.to(o))


def errors(got, want):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, want, strict=True)]


def poisoned(shape, like, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype, device=like.device)


CORE = {
    "d64 m256": dict(),
    "not causal": dict(causal=False),
    "n 63": dict(n=63),
    "shared heads": dict(H=4, KV=2, key_bias=True),
}
CHECKS = {
    "d16 m64": dict(d=16, features=64),
    "d64 m64": dict(features=64),
    "d32 m20": dict(d=32, features=20),
    "n 1024": dict(n=1024),
    "n 2": dict(n=2),
    "long q, k": dict(length=3.0),
    "dense, a head": dict(key_bias=True, per_head=True),
    "not causal n m": dict(causal=False, n=300, m=1500, key_bias=True),
    "d96 m100": dict(d=96, features=100),
    "d128": dict(d=128),
    "d256": dict(d=256, n=500),
    "d64 e128": dict(e=128),
    "fp16": dict(dtype=torch.float16),
    "fp32": dict(dtype=torch.float32),
    "fp32 d128": dict(dtype=torch.float32, d=128, n=500),
    "fp32 d256": dict(dtype=torch.float32, d=256, n=300),
    "d64 m256, W in one part": dict(),
    "long, W in one part": dict(length=3.0),
}


def check_one(case, split=True):
    launches.SPLIT = split
    case = dict(case)
    causal = case.pop("causal", True)
    inputs, options = draw(**case)
    q, _, v = inputs
    do = torch.randn(*q.shape[:3], v.shape[-1], device="cuda")
    options["causal"] = causal
    usual, launching.empty = launching.empty, poisoned
    try:
        got, again = (run(fused.random_features, inputs, do, **options) for _ in range(2))
    finally:
        launching.empty, launches.SPLIT = usual, True
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    want = run(exact, [x.detach().double().requires_grad_() for x in inputs], do, **wide)
    mine, theirs = errors(got, want), errors(run(naive, inputs, do, **options), want)
    same = all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    return mine, theirs, same


def report(name) -> dict:
    """Check one case: errors beside the naive errors, and whether two runs are bit-identical."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if name == "long n":
        return long_check()
    mine, theirs, same = check_one({**CORE, **CHECKS}[name], "one part" not in name)
    ratio = max(x / y if y else (0 if x < 1e-9 else 99) for x, y in zip(mine, theirs, strict=True))
    text = " ".join(f"{x:.1e}/{y:.1e}" for x, y in zip(mine, theirs, strict=True))
    print(
        f"{name:24s} {'ok ' if ratio <= 2 and same else 'BAD'} x{ratio:.2f} {'' if same else 'MOVES '}{text}",
        flush=True,
    )
    return dict(error=mine, naive=theirs, worst_ratio=ratio, bit_equal=same)


def core() -> dict:
    return {name: report(name) for name in CORE}


def check(limit) -> dict:
    """Run each case in a separate process, a few at a time: a case that crashes the GPU context affects no other."""
    waiting, running, table = [*CHECKS, "long n"], {}, {}
    while waiting or running:
        while waiting and len(running) < 7 and time.time() - START < limit:
            name = waiting.pop(0)
            command = [sys.executable, __file__, "--one", name]
            pipe = subprocess.PIPE
            running[name] = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True), time.time()
        if not running:
            break
        for name, (child, since) in list(running.items()):
            late = time.time() - since > 90
            if late:
                child.kill()
            if late or child.poll() is not None:
                out, err = child.communicate()
                table[name] = out if child.returncode == 0 else dict(failed=err[-2000:])
                wrong = "out of time" if late else " ".join(err.split()[-30:])
                print(out.rstrip() if child.returncode == 0 else f"{name:24s} FAILED {wrong}", flush=True)
                del running[name]
        time.sleep(0.1)
    if waiting:
        print("no time for", ", ".join(waiting), flush=True)
    return table


def long_check() -> dict:
    """Show whether the error grows with n, against the float64 reference on the device; also of the last 1024 rows."""
    table = {}
    for n in (2048, 16384, 131072):
        inputs, options = draw(n=n, H=1)
        do = torch.randn(1, 1, n, 64, device="cuda")
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        want = run(reference.random_features, [x.detach().double().requires_grad_() for x in inputs], do, **wide)
        got = run(fused.random_features, inputs, do, **options)
        last = errors([got[0][:, :, -1024:]], [want[0][:, :, -1024:]])[0]
        table[n] = dict(error=errors(got, want), last_rows=last)
        print(f"n {n:7d} errors {' '.join(f'{x:.1e}' for x in table[n]['error'])} last rows {last:.1e}", flush=True)
    return table


def median(function, milliseconds=60):
    return do_bench(function, warmup=15, rep=milliseconds, return_mode="median")


def forward_and_both(inputs, options, milliseconds=60):
    do = torch.randn(*inputs[0].shape[:3], inputs[2].shape[-1], device="cuda").to(inputs[0].dtype)

    def forward():
        with torch.no_grad():
            return fused.random_features(*inputs, **options)

    def both():
        return torch.autograd.grad(fused.random_features(*inputs, **options), inputs, do)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return median(forward, milliseconds), median(both, milliseconds), peak


# features at a time, warps, stages
CANDIDATES = {
    (128, True): [(64, 8, 1), (64, 8, 2), (64, 8, 3), (128, 8, 1), (128, 8, 2)],
    (64, True): [(64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2)],
    (128, False): [(64, 8, 2), (64, 8, 3), (128, 8, 2)],
    (64, False): [(64, 4, 2), (64, 4, 3)],
}


def configured(block, configs):
    launches.config = lambda low, widest: (block, configs)


def usual(block):
    return dict.fromkeys(launches.LAUNCHES, Config(64, 8 if block == 128 else 4, 2))


def recorded(inputs, options, launching=True) -> list:
    """The arguments of `Plan.launch` and `Plan.join` in a forward and backward pass."""
    calls = []
    real, real_join = launches.FeatureSetup.launch, launches.FeatureSetup.join

    def noted(setup, name, *args, **constants):
        calls.append((name, setup, args, constants))
        if launching:
            real(setup, name, *args, **constants)

    def joined(setup, *args):
        calls.append(("join", setup, args, {}))
        return real_join(setup, *args) if launching or not setup.causal else args[1:3]

    launches.FeatureSetup.launch, launches.FeatureSetup.join = noted, joined
    try:
        o = fused.random_features(*inputs, **options)
        torch.autograd.grad(o, inputs, torch.randn_like(o))
    finally:
        launches.FeatureSetup.launch, launches.FeatureSetup.join = real, real_join
    return calls


def again(call, config=None):
    """A function that repeats a recorded call with another configuration."""
    name, setup, args, constants = call
    if name == "join":
        return lambda: setup.join(*args)
    if config is not None:
        setup = copy.copy(setup)
        setup.configs, setup.ready = {**setup.configs, name: config}, {}
    return lambda: setup.launch(name, *args, **constants)


def by_launch(inputs, options) -> dict:
    """ms of each launch of one forward and backward pass, timed separately; launches of one name are summed."""
    found = defaultdict(float)
    for call in recorded(inputs, options):
        found[call[0]] += median(again(call), 10)
    return dict(found)


def tune() -> dict:
    table = {}
    before = launches.config
    for (block, causal), candidates in CANDIDATES.items():
        inputs, options = draw(H=16, n=65536)
        options["causal"] = causal
        kind = f"{'causal' if causal else 'not causal'} block {block}"
        configured(block, usual(block))
        calls = recorded(inputs, options)
        best = {}
        for name in launches.LAUNCHES:
            seen = {}
            for candidate in candidates:
                try:
                    own = [again(x, Config(*candidate)) for x in calls if x[0] == name]
                    seen[candidate] = sum(median(x, 10) for x in own)
                except Exception as error:
                    seen[candidate] = float("inf")
                    if not isinstance(error, triton.runtime.errors.OutOfResources):
                        print(name, candidate, type(error).__name__, str(error)[-100:], flush=True)
            best[name] = Config(*min(seen, key=seen.get))
            table[f"{kind} {name}"] = {"/".join(map(str, x)): y for x, y in seen.items()}
            print(f"{kind:20s} {name:9s}" + " ".join(f"{'/'.join(map(str, x))} {y:.3f}" for x, y in seen.items()))
        del calls
        configured(block, best)
        f, fb, peak = forward_and_both(inputs, options, 60)
        table[kind] = dict(forward_ms=f, both_ms=fb, peak_GiB=peak, best={x: tuple(y) for x, y in best.items()})
        text = ", ".join(f"{x}=Config({y.features}, {y.warps}, {y.stages})" for x, y in best.items())
        print(f"{kind:20s} best {f:.3f} / {fb:.3f} ms {peak:.2f} GiB: dict({text})", flush=True)
        launches.config = before
    return table


WORK = {
    "B1 N65536": dict(B=1, n=65536),
    "B4 N8192": dict(B=4, n=8192),
    "B8 N2048": dict(B=8, n=2048),
    "B1 N65536 not causal": dict(B=1, n=65536, causal=False),
    "B4 N8192 not causal": dict(B=4, n=8192, causal=False),
    "B8 N2048 not causal": dict(B=8, n=2048, causal=False),
    "B1 N65500": dict(B=1, n=65500),
    "B1 N65536 4 key heads": dict(B=1, n=65536, KV=4),
    "B1 N65536 H8 d128": dict(B=1, n=65536, H=8, d=128),
}


def floors(inputs, features, causal, bandwidth, rate):
    """Lower bounds in ms, forward and both passes: the larger of the times for bytes (each tensor once) and for flops
    (each product once, blocks of 64).
    """
    q, k, v = inputs
    (B, H, n, d), (_, KV, m, e) = q.shape, v.shape
    r, inside = features, 64 if causal else 0
    o = B * H * n * e * q.element_size()
    bytes_forward = q.nbytes + k.nbytes + v.nbytes + o
    bytes_both = 2 * bytes_forward + o + q.nbytes + k.nbytes + v.nbytes
    project, mix, pairs = (n * H + m * KV) * d * r, (n * H + m * KV) * r * e, n * H * inside * (r + e)
    forward = 2 * B * (project + mix + pairs)
    both = 2 * B * (3 * project + 3 * mix + 3 * pairs)
    return max(bytes_forward / bandwidth, forward / rate) * 1e3, max(bytes_both / bandwidth, both / rate) * 1e3


def ceilings():
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    bandwidth = 2 * x.nbytes / median(lambda: y.copy_(x)) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return bandwidth, 2 * 8192**3 / median(lambda: a @ b) * 1e3


def bench() -> dict:
    bandwidth, rate = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s", flush=True)
    table = dict(copy=bandwidth, product=rate)
    for name, work in WORK.items():
        work = dict(work)
        causal = work.pop("causal", True)
        inputs, options = draw(**{"H": 16, **work})
        low, lows = floors(inputs, 256, causal, bandwidth, rate)
        try:
            f, fb, peak = forward_and_both(inputs, dict(options, causal=causal))
        except Exception as error:
            print(f"{name:24s} FAILED {str(error)[-200:]}", flush=True)
            continue
        table[name] = dict(forward_ms=f, both_ms=fb, peak_GiB=peak, floor_ms=low, floor_both_ms=lows)
        print(f"{name:24s} {f:.3f} / {fb:.3f} ms  floor {low:.3f} / {lows:.3f}  {peak:.2f} GiB", flush=True)
        if name.startswith("B1 N65536") and not work.keys() - {"B", "n"}:
            parts = by_launch(inputs, dict(options, causal=causal))
            table[name]["launches_ms"] = parts
            print("    " + " ".join(f"{x} {y:.3f}" for x, y in parts.items()), flush=True)
    return table


def warm(share, of, tuning) -> None:
    """Compile every `of`-th task; many processes fill the cache together."""

    def work(causal=True, **work):
        inputs, options = draw(**{"H": 16, **work})
        o = fused.random_features(*inputs, **options, causal=causal)
        torch.autograd.grad(o, inputs, torch.randn_like(o))

    def tried(block, causal, own):
        """Small sizes for which Triton compiles the same programs as for the timed sizes."""
        inputs, options = draw(H=16, n=2048)
        configured(block, usual(block))
        calls = recorded(inputs, dict(options, causal=causal), launching=False)
        for name, candidate in own:
            for call in (x for x in calls if x[0] == name):
                attempt(again(call, Config(*candidate)))

    def attempt(task):
        try:
            task()
        except Exception as error:
            print(type(error).__name__, str(error)[-100:], file=sys.stderr)

    if tuning:
        for (block, causal), candidates in CANDIDATES.items():
            every = [(name, x) for x in candidates for name in launches.LAUNCHES]
            attempt(lambda block=block, causal=causal, every=every: tried(block, causal, every[share::of]))
        return
    tasks = [lambda x=x: check_one(x) for x in CORE.values()] + [lambda x=x: work(**x) for x in WORK.values()]
    for task in tasks[share::of]:
        attempt(task)


def compiled(tuning) -> None:
    workers = min(14, os.cpu_count() or 1)
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    command = [sys.executable, __file__, "--warm"]
    children = [subprocess.Popen([*command, str(i), str(workers), str(int(tuning))], **quiet) for i in range(workers)]
    for child in children:
        child.wait()
    print(f"compiled after {time.time() - START:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--core", "--bench", "--tune", "--check"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--one", choices=[*CORE, *CHECKS, "long n"])
    parser.add_argument("--warm", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=170, help="seconds after which no further case is checked")
    given = parser.parse_args()
    if given.warm:
        warm(*given.warm)
        return
    if given.one:
        report(given.one)
        return
    every = not (given.core or given.bench or given.tune or given.check)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    path = Path(os.environ.get("OUT", ".")) / "gpu_random_features.json"
    result = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    if every or given.core or given.bench:
        compiled(tuning=False)
    parts = dict(core=core, bench=bench, tune=tune, check=lambda: check(given.limit))
    for name, part in parts.items():
        if every or getattr(given, name):
            if name == "tune":
                compiled(tuning=True)
            try:
                result[name] = part()
            except Exception as error:
                print(f"{name} FAILED {type(error).__name__} {str(error)[-300:]}", flush=True)
            path.write_text(json.dumps(result, indent=1))
            print(f"-- {name}: {time.time() - START:.0f} s", flush=True)


if __name__ == "__main__":
    main()
